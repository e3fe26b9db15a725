"""Check updates on a few elements, which are others in each update, by the formula of the optimizer.

As the next update begins, the states of the same elements are compared with those that the update left.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import terminal
from ..engines.readback.fragments import Fragment, elements, fragments_of
from . import rules, update

TENSORS = 1  # per update
ELEMENTS = 2**10  # of each tensor


class SampledUpdates:
    """The updates of one optimizer, each looked at on a sample."""

    def __init__(self, model: Any, optimizer: Any, base: Any) -> None:
        """Choose what can be sampled. `optimizer` holds the model states, and `base` does the arithmetic."""
        self._given = model, optimizer, base, False
        self.notes: dict[str, str] = {}
        self._base = update.Update(*self._given).arithmetic
        self._all = fragments_of(model, optimizer)
        self._number = 0
        self._current: update.Update | None = None
        self._picks: list[tuple[dict[str, Any], Any, Fragment]] = []
        # What the last update left of the same elements.
        self._left: list[tuple[str, dict[str, torch.Tensor], torch.Tensor]] = []

    def before(self, optimizer: Any, is_sampled: bool) -> list[str]:
        """Return findings on what changed since a sampled update, at the beginning of the next one.

        If `is_sampled`, this update is looked at, too.
        """
        if optimizer is not self._base:
            return []
        findings = self._changed()
        if not is_sampled:
            return findings
        if self._current is None:  # DeepSpeed updates in several calls
            self._picks, self._current = self._pick(), update.Update(*self._given)
        for group, tensor, fragment in self._picks:
            if any(own is group for own in optimizer.param_groups):
                self._current.note_sample(group, tensor, fragment)
        return findings

    def forget(self) -> None:
        """Do not compare the next update with the last one."""
        self._left = []

    def after(self) -> tuple[list[str], int]:
        """Return findings on the update that has just been made, and the number of compared parameters."""
        current, self._current = self._current, None
        if current is None:
            return [], 0
        self._number += 1
        report = current.report()
        self._left = [
            (fragment.name, self._states(tensor, fragment), elements(tensor, fragment))
            for _, tensor, fragment in self._picks
        ]
        judgment = update.judge([report])
        broken = [name for name, reason in report["unchecked"].items() if "not finite" in reason]
        findings = [f"weights are not finite: {terminal.names(broken)}"] if broken else judgment.findings
        return findings, judgment.numbers["num_checked"]

    def _pick(self) -> list[tuple[dict[str, Any], Any, Fragment]]:
        """Return the next tensors in turn, each with a part of it that moves from turn to turn."""
        candidates = [
            (group, tensor, fragment)
            for group in self._base.param_groups
            if (rule := rules.rule_of(self._base, group)) is not None and rule.is_elementwise
            for tensor in group["params"]
            if tensor.grad is not None
            for fragment in self._all.get(id(tensor), ())[:1]
            if fragment.size
        ]
        begin, picks = self._number * TENSORS, []
        for position in range(begin, begin + min(TENSORS, len(candidates))):
            group, tensor, fragment = candidates[position % len(candidates)]
            round_number = position // len(candidates)
            start = round_number * ELEMENTS % fragment.size
            size = min(ELEMENTS, fragment.size - start)
            moved = fragment._replace(tensor_start=fragment.tensor_start + start, size=size)
            picks.append((group, tensor, moved._replace(parameter_start=fragment.parameter_start + start)))
        return picks

    def _states(self, tensor: Any, fragment: Fragment) -> dict[str, torch.Tensor]:
        states = self._base.state.get(tensor, {})
        return {
            key: elements(value, fragment if value.numel() > 1 else fragment._replace(tensor_start=0, size=1))
            for key, value in states.items()
            if isinstance(value, torch.Tensor) and value.numel() in (1, tensor.numel())
        }

    def _changed(self) -> list[str]:
        """Return findings on states of the sample that are not those of the last update."""
        findings = []
        for (name, states, weight), (_, tensor, fragment) in zip(self._left, self._picks, strict=False):
            now = self._states(tensor, fragment)
            lost = [key for key in states if key not in now]
            changed = [key for key, value in states.items() if key in now and _differ(value, now[key])]
            if lost or changed:
                change = "are gone" if lost else "changed"
                findings = [
                    f"optimizer states are not those of the last update: some states of {name} {change} "
                    f"({terminal.names(lost or changed)}). Look for code that resets, "
                    "loads or replaces optimizer states"
                ]
            if _differ(weight, elements(tensor, fragment)):
                self.notes.setdefault(
                    "weights", f"weights change between updates, outside of the optimizer, for example {name}"
                )
        self._left = []
        return findings


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of float64 have different bits. NaN equals NaN."""
    return not torch.equal(a.view(torch.int64), b.view(torch.int64))
