"""The view `short`: runs beside the plainest of them, a line each: the loss, the peak of memory, the time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from tabulate import tabulate

from study.compare import expected, facts, parity, words
from study.errors import Refusal
from study.records import find as records
from study.records.find import RecordFile

HEAD = ["strategy", "processes", "loss", "", "peak memory", "", "s/step", ""]
LEGEND = f"""\
Beside the first line of a block. same: no step's loss is off by more than {parity.WITHIN:g}.
Peak: of tensors, of the fullest process. other masks: of dropout, so losses differ for that.
More: --view differences, parity, parts, model-states or communication."""
MOST_GROUPS = 8  # that are shown


def table(folders: Sequence[Path]) -> str:
    """Make the text: a block for each group of runs that train the same."""
    files = records.find(folders)
    finished = sorted((file for file in files if file.record.status == "ok"), key=parity.same_training)
    groups = [sorted(members, key=parity.order) for _, members in groupby(finished, key=parity.same_training)]
    groups.sort(key=len, reverse=True)
    several = len({records.box_of(file.record) for file in finished}) > 1
    lines: list[str] = []
    for group in groups[:MOST_GROUPS]:
        rows = [_row(file, group[0]) for file in group]
        columns = len(HEAD) if any(row[6] for row in rows) else 6  # without times where none was taken
        head = [name or f"vs {group[0].record.strategy}" for name in HEAD[:columns]]
        shown = tabulate([row[:columns] for row in rows], head, tablefmt="plain", disable_numparse=True)
        reasons = dict.fromkeys(row[-1] for row in rows if row[-1])
        box = f", {records.box_of(group[0].record)}" if several else ""
        lines += [
            words.shown(parity.heading(group[0].record) + box),
            "",
            shown,
            "",
            *(f"(): {reason}" for reason in reasons),
        ]
    if len(groups) > MOST_GROUPS:
        lines += [f"{len(groups) - MOST_GROUPS} more groups of runs that train the same; name fewer folders."]
    return "\n".join([*lines, LEGEND if lines else "No run here ended well.", *words.not_ok(files)])


def _row(file: RecordFile, first: RecordFile) -> list[str]:
    """The cells of a run, and why its time is no measure of its strategy; empty where it is one."""
    r, other = file.record, first.record
    peaks = [found and float(found.measured) for found in (expected.step_peak(r), expected.step_peak(other))]
    times = [each.timing.median_seconds if each.timing else None for each in (r, other)]
    why = facts.why_untimed(r) if times[0] else None
    ratio = "" if why or facts.why_untimed(other) else _times(times[0], times[1])
    loss = "" if r.final_loss is None else f"{r.final_loss:.4f}"
    shown = "" if times[0] is None else f"({times[0]:.3g})" if why else f"{times[0]:.3g}"
    alone = file is first
    return [
        r.strategy + (" (mixed code)" if r.mixed_code else ""),
        str(r.world_size),
        loss,
        "" if alone else _same(file, first),
        "" if peaks[0] is None else words.bytes_text(peaks[0]),
        "" if alone else _times(*peaks),
        shown,
        "" if alone else ratio,
        why or "",
    ]


def _same(file: RecordFile, first: RecordFile) -> str:
    if parity.incomparable(file.record, first.record):
        return "other masks"
    try:
        difference = parity.largest_loss_difference(file, first)
    except Refusal:
        return "other steps"
    if difference is None:
        return "unknown"
    return "same" if difference <= parity.WITHIN else f"off by {difference:.1e}"


def _times(value: float | None, other: float | None) -> str:
    """How many times the first one's."""
    return "" if value is None or not other else f"{value / other:.2f} x"
