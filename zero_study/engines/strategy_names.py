"""Parse and sort names of strategies: "zero3_cpu_offload" is ZeRO stage 3 with its states in host memory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

OffloadDevice = Literal["none", "cpu", "nvme"]

# The order in all tables: engines from nothing sharded to everything sharded, then what follows the first underscore.
ENGINES = ("single", "ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")
VARIATIONS = ("", "cpu_offload", "nvme_offload", "tuned")

_OFFLOAD = re.compile(r"(cpu|nvme)_offload")
_STAGE = re.compile(r"zero([0-3])")


@dataclass(frozen=True)
class StrategyName:
    """The name of a strategy in two parts, for example zero3 (the engine) and cpu_offload (its variation).

    If a user chose the name, the engine is its first word.
    """

    engine: str  # the word before the first underscore: ddp, zero0 to zero3, fsdp2
    variation: str = ""  # what follows it: cpu_offload, tuned, hpz; empty: the plain engine

    @classmethod
    def parse(cls, name: str) -> StrategyName:
        engine, _, variation = name.partition("_")
        return cls(engine, variation)

    @classmethod
    def of_zero(cls, stage: int, offload: OffloadDevice = "none") -> StrategyName:
        """Return the name of the strategy with this ZeRO stage and its optimizer states on this device."""
        return cls(f"zero{stage}", "" if offload == "none" else f"{offload}_offload")

    def __str__(self) -> str:
        return f"{self.engine}_{self.variation}" if self.variation else self.engine

    @property
    def zero_stage(self) -> int | None:
        """DeepSpeed's ZeRO stage. None for another engine."""
        match = _STAGE.fullmatch(self.engine)
        return int(match[1]) if match else None

    @property
    def offload(self) -> OffloadDevice:
        """The device that optimizer states are offloaded to."""
        match = _OFFLOAD.fullmatch(self.variation)
        return "none" if match is None else "cpu" if match[1] == "cpu" else "nvme"

    @property
    def position(self) -> tuple[int, int, str]:
        """A sort key: by what is sharded, then by what is offloaded. Names that users chose come last, by name."""
        return _index(ENGINES, self.engine), _index(VARIATIONS, self.variation), str(self)


def in_order(names: Iterable[str]) -> list[str]:
    """Return the distinct names of strategies, sorted from nothing sharded to everything offloaded."""
    return sorted(set(names), key=lambda name: StrategyName.parse(name).position)


def _index(words: tuple[str, ...], word: str) -> int:
    return words.index(word) if word in words else len(words)
