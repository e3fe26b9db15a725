"""Format the result of `zero-study saved` as text and as JSON, and derive its exit status."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ... import terminal
from ..diff.text import printable
from .against import Comparison, difference_text
from .content import Finding, Saved, names_text


def status(saved: Sequence[Saved], compared: Sequence[Comparison], is_strict: bool) -> int:
    """Return the exit status: 1 if something is wrong, or if a requested check could not be made; else 0.

    A folder from which nothing was read counts as a check that could not be made.
    """
    if not any(each.tensors or each.states for each in saved):
        return 1
    is_wrong = any(finding.is_wrong for each in _all(saved, compared) for finding in each.findings)
    is_open = any(each.unchecked for each in compared) or (is_strict and any(each.unchecked for each in saved))
    return int(is_wrong or is_open)


def text(folder: Path, saved: Sequence[Saved], compared: Sequence[Comparison], is_strict: bool) -> str:
    """Return the result for a terminal: the answer first, then each finding, and what was not checked."""
    lines = [_answer(saved, compared, is_strict)]
    for each in saved:
        place = "" if each.folder == folder else f"{each.folder.relative_to(folder)}: "
        lines += [_line(finding, place) for finding in _in_order(each.findings)]
    for comparison in compared:
        lines += [_line(finding) for finding in _in_order(comparison.findings)]
        if comparison.num_compared:
            lines.append(f"Compared with {comparison.other}: {difference_text(comparison)}.")
    unchecked = list(dict.fromkeys(what for each in _all(saved, compared) for what in each.unchecked))
    lines += [f"Not checked: {what}." for what in unchecked]
    for each in saved:
        place = each.folder.name if each.folder == folder else str(each.folder.relative_to(folder))
        lines.append(f"Read: {place} ({_summary(each)})")
    return "\n".join(
        terminal.wrapped(printable(line), "  " if line[0] == "-" else "", "    " if line[0] == "-" else "  ")
        for line in lines
    )


def content(folder: Path, saved: Sequence[Saved], compared: Sequence[Comparison], is_strict: bool) -> dict[str, Any]:
    """Return the result for `--json`."""
    return {
        "folder": str(folder),
        "status": status(saved, compared, is_strict),
        "saved": [
            {
                "folder": str(each.folder),
                "format": each.format,
                "step": each.step,
                "tensors": len(each.tensors),
                "elements": sum(tensor.size for tensor in each.tensors.values()),
                "optimizer_states": len(each.states),
                "findings": [finding._asdict() for finding in each.findings],
                "not_checked": each.unchecked,
            }
            for each in saved
        ],
        "compared": [
            {
                "with": each.other,
                "identical": each.equal,
                "identical_after_rounding": each.rounded,
                "within_rounding": each.close,
                "other_shape": each.reshaped,
                "different": {n: None if math.isnan(value) else value for n, value in each.different.items()},
                "missing": each.missing,
                "only_saved": each.extra,
                "findings": [finding._asdict() for finding in each.findings],
                "not_checked": each.unchecked,
            }
            for each in compared
        ],
    }


def _all(saved: Sequence[Saved], compared: Sequence[Comparison]) -> list[Saved | Comparison]:
    return [*saved, *compared]


def _answer(saved: Sequence[Saved], compared: Sequence[Comparison], is_strict: bool) -> str:
    """Return the first line: whether what was saved is whole."""
    num_tensors = sum(len(each.tensors) for each in saved)
    wrong = [finding for each in _all(saved, compared) for finding in each.findings if finding.is_wrong]
    counted = terminal.counted(num_tensors, "tensor")
    if wrong:
        names = {name for finding in wrong for name in finding.names}
        concerned = terminal.counted(len(names), "tensor or file", "tensors or files")
        which = f", which concern{'s' * (len(wrong) == 1)} {concerned}" if names else ""
        return f"WRONG: {terminal.counted(len(wrong), 'fault')}{which}. {counted} were found."
    if not any(each.tensors or each.states for each in saved):
        return "Nothing could be checked."
    if status(saved, compared, is_strict):
        return f"Nothing wrong was found in {counted}, but a check that you requested could not be made."
    if any(each.unchecked for each in saved):
        return f"Nothing wrong in {counted}, but some checks could not be made."
    return f"Nothing wrong: {num_tensors} of {counted} were saved whole."


def _line(finding: Finding, place: str = "") -> str:
    """Return the kind of a finding, the tensors or files that it concerns, and what is wrong with them."""
    mark = finding.kind if finding.is_wrong else f"note, {finding.kind}"
    count = f" ({len(finding.names)})" if len(finding.names) > 1 else ""
    named = "" if all(name in finding.text for name in finding.names) else f"{names_text(finding.names)}. "
    return f"- {mark}{count}: {place}{named}{finding.text}"


def _in_order(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: not finding.is_wrong)


def _summary(saved: Saved) -> str:
    elements = sum(tensor.size for tensor in saved.tensors.values())
    types = ", ".join(sorted({tensor.dtype for tensor in saved.tensors.values()}))
    parts = [saved.format, f"{terminal.counted(len(saved.tensors), 'tensor')} with {elements:,} elements"]
    if types:
        parts.append(types)
    if saved.states:
        parts.append(terminal.counted(len(saved.states), "optimizer state"))
    return ", ".join(parts)
