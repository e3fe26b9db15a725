"""Describe what a saved folder holds: its tensors, and how to read their values one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from .. import terminal
from ..engines.readback.dtypes import dtype_name
from ..verdict import Checked

Kind = Literal[
    "unreadable", "missing", "unexpected", "empty", "partial", "untied", "dtype", "zero", "not finite", "shards",
    "optimizer", "untrained", "different", "stale",
]  # fmt: skip


class Finding(NamedTuple):
    """A fault of a saved model, or a note on it."""

    kind: Kind
    text: str  # sentences
    names: list[str]  # of the tensors or files that it concerns
    is_wrong: bool = True  # False for a note, which may be intended


@dataclass(frozen=True)
class Tensor:
    """A saved tensor. `read` returns its unsharded values on the CPU."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as torch names it, such as bfloat16
    file: str  # the file that has it, or the files that have its parts
    read: Callable[[], torch.Tensor]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or any(type(size) is not int or size < 0 for size in self.shape):
            raise ValueError(f"{str(self.name)[:60]} has a shape or a name that no tensor has")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        return bool(getattr(torch, self.dtype).is_floating_point)


class OptimizerFacts(NamedTuple):
    """The step counters in the states of an optimizer, and the weights without states."""

    file: str
    steps: dict[str, float]  # of each weight or group that has a counter
    num_weights: int
    without_state: list[str]
    needs_states: bool  # whether this kind of optimizer has a state of each weight after its first step
    groups: Sequence[dict[str, Any]] = ()  # the settings of each group of weights


@dataclass
class Saved:
    """One saved model: its unsharded weights, and what is wrong with its files."""

    folder: Path
    format: str  # such as "DeepSpeed ZeRO-3, 2 ranks, step 40"
    tensors: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)  # of the optimizer: "<weight>/<state>"
    ties: dict[str, str] = field(default_factory=dict)  # a name -> the name of the tensor that it shares
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    checked: list[Checked] = field(default_factory=list)  # how many tensors were compared, and with what
    config: dict[str, Any] | None = None  # of config.json or adapter_config.json
    is_adapter: bool = False
    step: int | None = None
    optimizer: OptimizerFacts | None = None
    num_skipped: int = 0  # steps without an update, because a gradient in fp16 was infinite
    world_size: int = 0  # number of ranks that wrote the checkpoint; 0: unknown
    has_scheduler: bool = False  # whether the engine's files have the state of a scheduler

    def wrong(self, kind: Kind, text: str, names: Iterable[str] = ()) -> None:
        self.findings.append(Finding(kind, text, sorted(names)))

    def note(self, kind: Kind, text: str, names: Iterable[str] = ()) -> None:
        self.findings.append(Finding(kind, text, sorted(names), is_wrong=False))

    def whole(self) -> dict[str, Tensor]:
        """Return all tensors by name. Tied names are included, with the tensor that they share."""
        ties = {name: of for name, of in self.ties.items() if isinstance(name, str) and isinstance(of, str)}
        shared = {name: self.tensors[of] for name, of in ties.items() if of in self.tensors}
        return {**shared, **self.tensors}


def in_memory(name: str, tensor: torch.Tensor, file: str) -> Tensor:
    """Describe a tensor whose values are in memory, or mapped from a file."""
    return Tensor(name, tuple(tensor.shape), dtype_name(tensor.dtype), file, lambda: tensor)


def add_numbered_states(saved: Saved, states: dict[Any, Any], file: str) -> None:
    """Add the states of an optimizer whose file has numbers instead of names of weights."""
    for number, state in states.items():
        for kind, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and value.ndim:
                key = f"weight {number}/{kind}"
                saved.states[key] = in_memory(key, value, file)


def names_text(names: Iterable[str], most: int = 3) -> str:
    """List the first names as text, and say how many more there are."""
    return terminal.names(sorted(names), most)
