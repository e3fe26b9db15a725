"""Format the result of `zero-study saved` as text and as JSON, and derive its verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import terminal
from ..verdict import Checked, NotChecked, Verdict
from .against import Comparison, difference_text
from .content import Finding, Saved, names_text


def verdict(saved: Sequence[Saved], compared: Sequence[Comparison], is_strict: bool) -> Verdict:
    """Return the verdict on a saved folder: what is wrong, how many tensors were checked, and what was not checked.

    A comparison that was requested counts as requested. With `is_strict`, so does every other check.
    """
    wrong = sum(finding.is_wrong for part in _all(saved, compared) for finding in part.findings)
    checked = [
        Checked(sum(map(_num_readable, saved)), "tensor", "read and checked"),
        Checked(sum(len(saved_part.states) for saved_part in saved), "optimizer state", "read and checked"),
        *(entry for saved_part in saved for entry in saved_part.checked),
        *(
            Checked(number, noun, f"compared with {comparison.other}")
            for comparison in compared
            for number, noun in ((comparison.num_compared, "tensor"), (comparison.num_settings, "setting"))
        ),
    ]
    missing = [_not_checked(sentence, is_strict) for saved_part in saved for sentence in saved_part.unchecked]
    missing += [_not_checked(sentence, True) for comparison in compared for sentence in comparison.unchecked]
    if not any(map(_num_readable, saved)):
        reason = (
            "there are only optimizer states"
            if any(saved_part.states for saved_part in saved)
            else "none could be read"
        )
        missing.append(NotChecked("the weights", reason, is_requested=True))
    return Verdict.of(wrong, checked, missing)


def status(saved: Sequence[Saved], compared: Sequence[Comparison], is_strict: bool) -> int:
    """Return the exit status of the verdict."""
    return verdict(saved, compared, is_strict).status


def _num_readable(saved: Saved) -> int:
    """Return the number of tensors that have elements."""
    return sum(bool(tensor.size) for tensor in saved.tensors.values())


def _not_checked(sentence: str, is_requested: bool) -> NotChecked:
    check, _, reason = sentence.partition(", because ")
    return NotChecked(check, reason, is_requested)


def text(folder: Path, saved: Sequence[Saved], compared: Sequence[Comparison], is_strict: bool) -> str:
    """Return the result as text for a terminal: the answer first, then each finding, and what was not checked."""
    lines = [_answer(saved, compared, is_strict)]
    for saved_part in saved:
        place = "" if saved_part.folder == folder else f"{saved_part.folder.relative_to(folder)}: "
        lines += [_line(finding, place) for finding in _in_order(saved_part.findings)]
    for comparison in compared:
        lines += [_line(finding) for finding in _in_order(comparison.findings)]
        if comparison.num_compared:
            lines.append(f"Compared with {comparison.other}: {difference_text(comparison)}.")
    missing = verdict(saved, compared, is_strict).not_checked
    lines += [f"Not checked: {entry.what}{f', because {entry.why}' if entry.why else ''}." for entry in missing]
    for saved_part in saved:
        place = saved_part.folder.name if saved_part.folder == folder else str(saved_part.folder.relative_to(folder))
        lines.append(f"Read: {place} ({_summary(saved_part)})")
    return "\n".join(
        terminal.wrap(terminal.printable(line), "  " if line[0] == "-" else "", "    " if line[0] == "-" else "  ")
        for line in lines
    )


def content(folder: Path, saved: Sequence[Saved], compared: Sequence[Comparison], is_strict: bool) -> dict[str, Any]:
    """Return the result as plain data for `--json`."""
    return {
        "folder": str(folder),
        "status": (result := verdict(saved, compared, is_strict)).status,
        **result.content(),
        "saved": [
            {
                "folder": str(saved_part.folder),
                "format": saved_part.format,
                "step": saved_part.step,
                "tensors": len(saved_part.tensors),
                "elements": sum(tensor.size for tensor in saved_part.tensors.values()),
                "optimizer_states": len(saved_part.states),
                "findings": [finding._asdict() for finding in saved_part.findings],
                "not_checked": saved_part.unchecked,
            }
            for saved_part in saved
        ],
        "compared": [
            {
                "with": comparison.other,
                "identical": comparison.equal,
                "identical_after_rounding": comparison.rounded,
                "within_rounding": comparison.close,
                "other_shape": comparison.reshaped,
                "different": {n: None if math.isnan(value) else value for n, value in comparison.different.items()},
                "missing": comparison.missing,
                "only_saved": comparison.extra,
                "findings": [finding._asdict() for finding in comparison.findings],
                "not_checked": comparison.unchecked,
            }
            for comparison in compared
        ],
    }


def _all(saved: Sequence[Saved], compared: Sequence[Comparison]) -> list[Saved | Comparison]:
    return [*saved, *compared]


def _answer(saved: Sequence[Saved], compared: Sequence[Comparison], is_strict: bool) -> str:
    """Return the first line: whether what was saved is whole, and what was checked."""
    result = verdict(saved, compared, is_strict)
    wrong = [finding for part in _all(saved, compared) for finding in part.findings if finding.is_wrong]
    if wrong:
        names = {name for finding in wrong for name in finding.names}
        concerned = terminal.count(len(names), "tensor or file", "tensors or files")
        extent = f", which concern{'s' * (len(wrong) == 1)} {concerned}" if names else ""
        return f"WRONG: {terminal.count(len(wrong), 'fault')}{extent}. Checked: {result.coverage()}."
    if not result.num_checked:
        return "UNKNOWN: nothing could be checked."
    if result.result == "unknown":
        coverage = result.coverage()
        return (
            "UNKNOWN: nothing wrong was found, but a necessary check could not be made. "
            f"{coverage[:1].upper()}{coverage[1:]}."
        )
    is_compared = any(comparison.is_requested for comparison in compared)
    unseen = "" if is_compared else " Values were not compared with the trained ones: use --against."
    return f"Nothing wrong: {result.coverage()}.{unseen}"


def _line(finding: Finding, place: str = "") -> str:
    """Return the kind of a finding, the tensors or files that it concerns, and what is wrong with them."""
    mark = finding.kind if finding.is_wrong else f"note, {finding.kind}"
    count = f" ({len(finding.names)})" if len(finding.names) > 1 else ""
    names_prefix = "" if all(name in finding.text for name in finding.names) else f"{names_text(finding.names)}. "
    return f"- {mark}{count}: {place}{names_prefix}{finding.text}"


def _in_order(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: not finding.is_wrong)


def _summary(saved: Saved) -> str:
    elements = sum(tensor.size for tensor in saved.tensors.values())
    types = ", ".join(sorted({tensor.dtype for tensor in saved.tensors.values()}))
    parts = [saved.format, f"{terminal.count(len(saved.tensors), 'tensor')} with {elements:,} elements"]
    if types:
        parts.append(types)
    if saved.states:
        parts.append(terminal.count(len(saved.states), "optimizer state"))
    return ", ".join(parts)
