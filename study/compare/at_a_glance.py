"""The view `short`: runs beside the plainest of them, a line each: the loss, the peak of memory, the time of a step."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from study.compare import expected, facts, parity, words
from study.errors import Refusal
from study.records import find as records
from study.records.find import RecordFile

HEAD = ["strategy", "ranks", "loss", "", "peak", "", "s/step", ""]
LEGEND = f"""\
Each row is compared with the first of its block, "vs".
loss: of the last step. same: no step's loss differs by more than {parity.WITHIN:g};
  a number: the largest relative difference; masks, steps: the runs drew other
  dropout masks, or took other steps, so that their losses cannot be compared.
peak: of the tensors of the fullest rank.
More: --view differences, parity, parts, model-states or communication."""
WIDTH = 80  # of a terminal, in columns
MOST_GROUPS = 8  # that are shown


def table(folders: Sequence[Path]) -> str:
    """Make the text: a block for each group of runs that train the same."""
    files = records.find(folders)
    finished = sorted((file for file in files if file.record.status == "ok"), key=parity.same_training)
    groups = [sorted(members, key=parity.order) for _, members in groupby(finished, key=parity.same_training)]
    groups.sort(key=len, reverse=True)
    several = len({file.record.box for file in finished}) > 1
    lines: list[str] = []
    for group in groups[:MOST_GROUPS]:
        rows = [_row(file, group[0]) for file in group]
        columns = len(HEAD) if any(row[6] for row in rows) else 6  # without times where none was taken
        first = group[0].record.strategy
        head = [name or f"vs {first if len(first) <= len('ddp') else '1st'}" for name in HEAD[:columns]]
        shown = _fitting([row[:columns] for row in rows], head)
        reasons = dict.fromkeys(row[-1] for row in rows if row[-1])
        box = f", {group[0].record.box}" if several else ""
        lines += [
            textwrap.fill(words.shown(parity.heading(group[0].record) + box), WIDTH),
            "",
            shown,
            "",
            *(textwrap.fill(f"(): {reason}", WIDTH) for reason in reasons),
        ]
    if len(groups) > MOST_GROUPS:
        lines += [f"{len(groups) - MOST_GROUPS} more groups of runs that train the same; name fewer folders."]
    return "\n".join([*lines, LEGEND if lines else "No run here ended well.", *words.not_ok(files)])


def _fitting(rows: Sequence[Sequence[str]], head: Sequence[str]) -> str:
    """Make a table that fits into the terminal: a long name of a strategy goes on in the next line."""
    columns = [*zip(head, *rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    widths[0] = max(len(head[0]), min(widths[0], WIDTH - sum(2 + width for width in widths[1:])))
    lines = []
    for name, *others in (head, *rows):
        first, *more = textwrap.wrap(name, widths[0])
        cells = [f"{cell:<{width}}" for cell, width in zip((first, *others), widths, strict=True)]
        lines += ["  ".join(cells).rstrip(), *more]
    return "\n".join(lines)


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
        return "masks"
    try:
        difference = parity.largest_loss_difference(file, first)
    except Refusal:
        return "steps"
    if difference is None:
        return "unknown"
    return "same" if difference <= parity.WITHIN else f"{difference:.1e}"


def _times(value: float | None, other: float | None) -> str:
    """How many times the first one's."""
    return "" if value is None or not other else f"{value / other:.2f} x"
