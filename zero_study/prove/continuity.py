"""Check that optimizer states and gradients are not changed between one update and the next.

The states must be those of the previous update. The gradients must come from backward passes since then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..engines.readback.parameters import local
from .checksums import UNKNOWN, Checksum, checksums, first_difference

MOST_ELEMENTS = 2**16  # of all gradients of a rank together that are compared with those of the backward passes
MOST_BACKWARDS = 64  # in a step with more backward passes, gradients are not compared
# Random gradients lie in the span of n others with this fraction of their length: sqrt(n / elements). This many times
# that fraction cannot be by chance. If it is more than LARGEST_CHANCE, there are too few elements for a judgment.
CHANCES = 4
LARGEST_CHANCE = 0.1


# ---------------------------------------------------------------- states of the optimizer


class States:
    """The optimizer states after an update, by the position of the tensor and the key of the state.

    The momentum of DeepSpeed's Muon is left out, because ZeRO advances it while it reduces the gradients.
    """

    def __init__(self, optimizer: Any) -> None:
        is_muon = any(
            kind.__module__.startswith("deepspeed.") and "Muon" in kind.__name__ for kind in type(optimizer).__mro__
        )
        self._keys_of_engine = {"momentum_buffer"} if is_muon else set[str]()
        self._optimizer = optimizer
        self._left: dict[str, Checksum] = {}
        self._numbers: dict[int, int] = {}  # id of a tensor -> its number, for messages

    def note_left(self) -> None:
        """Record the states at the end of an update. DeepSpeed calls this several times: the last call counts."""
        self._left = self._sums()

    def differences(self) -> list[str]:
        """Return a finding if the states have changed since the last update."""
        before = {name: sums for name, sums in self._left.items() if not math.isnan(sums[0])}
        if not before:
            return []
        now = self._sums()
        lost = [name for name in before if name not in now]
        difference = first_difference(before, now)
        if difference is None:
            return []
        change = f"{len(lost)} of {len(before)} states are gone" if lost else difference
        return [
            f"optimizer states are not those of the last update: {change}. Look for code that resets, loads or "
            "replaces optimizer states in every step."
        ]

    def _sums(self) -> dict[str, Checksum]:
        checksums: dict[str, Checksum] = {}
        for tensor, states in self._optimizer.state.items():
            number = self._numbers.setdefault(id(tensor), len(self._numbers))
            values = states if isinstance(states, dict) else {}
            checksums |= {
                f"{key} of tensor {number}": _sums(value)
                for key, value in values.items()
                if isinstance(value, torch.Tensor) and key not in self._keys_of_engine
            }
        return checksums


def _sums(tensor: Any) -> Checksum:
    try:
        return checksums([tensor])[0]
    except Exception:  # a library's own class of tensor
        return UNKNOWN


# ---------------------------------------------------------------- gradients


class Contributions:
    """A sample of what the backward passes of a step added to the gradients."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameters = parameters
        self._added: list[torch.Tensor] | None = []  # one per backward pass; None if the gradients are not compared
        self._before: torch.Tensor | None = None
        self._left: torch.Tensor | None = None  # the gradients after the last backward pass
        if any(hasattr(parameter, "grad_sample") for parameter in parameters):
            self._added = None  # private training adds noise, on purpose
        total = sum(local(parameter).numel() for parameter in parameters)
        self._stride = max(1, math.ceil(total / MOST_ELEMENTS))

    def begin_backward(self) -> None:
        self._before = None if self._added is None else self._sample()

    def end_backward(self) -> None:
        if self._added is None or self._before is None:
            return
        self._left = self._sample()
        self._added.append(self._left - self._before)
        if len(self._added) > MOST_BACKWARDS:
            self._added = None

    def share(self) -> float | None:
        """Return the share of the gradients' norm that the contributions of the backward passes explain.

        None if that cannot be judged, for instance if there are few elements, or if nothing was added.
        """
        added = [part for part in self._added or () if bool(part.isfinite().all()) and float(part.norm())]
        gradient = self._sample()
        length = float(gradient.norm())
        if not added or len(added) != len(self._added or ()) or not length or not math.isfinite(length):
            return None
        if self.num_too_few:
            return None
        basis, _ = torch.linalg.qr(torch.stack(added, 1) / torch.stack([part.norm() for part in added]))
        return float((basis.T @ gradient).norm()) / length

    @property
    def num_too_few(self) -> int:
        """The number of elements, if there are too few to tell changed gradients from unrelated ones, or else 0."""
        num_added, num = len(self._added or ()), self._sample().numel()
        return num if num and CHANCES * math.sqrt(num_added / num) > LARGEST_CHANCE else 0

    def erased_share(self) -> float:
        """Return the share of the elements that the last backward pass left, but that are now zero."""
        if self._added is None or self._left is None:
            return 0.0
        nonzero = self._left != 0
        return float((nonzero & (self._sample() == 0)).sum()) / max(1, int(nonzero.sum()))

    def are_unrelated(self) -> bool:
        """Return whether the gradients are unrelated to what the backward passes added."""
        share = self.share()
        return share is not None and share < CHANCES * math.sqrt(len(self._added or ()) / self._sample().numel())

    def _sample(self) -> torch.Tensor:
        with torch.no_grad():
            parts = [_strided(parameter, self._stride) for parameter in self._parameters]
            return torch.cat(parts) if parts else torch.empty(0)


def _strided(parameter: Any, stride: int) -> torch.Tensor:
    size = len(range(0, local(parameter).numel(), stride))
    if parameter.grad is None or parameter.grad.is_sparse or local(parameter.grad).numel() != local(parameter).numel():
        return torch.zeros(size, dtype=torch.float64)
    values = local(parameter.grad).detach().reshape(-1)[::stride]
    values = torch.view_as_real(values).sum(-1) if values.is_complex() else values
    return values.cpu().double()


def repeated(sums: Iterable[Checksum], before: Iterable[Checksum]) -> bool:
    """Return whether two updates got the same gradients, which are not all zero."""
    sums = list(sums)
    return sums == list(before) and any(size > 0 and math.isfinite(size) for _, size in sums)
