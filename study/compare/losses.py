"""Does each run learn, and how fast was it? The first and last losses, the held-out metric, the time of a step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from study.compare import markdown
from study.records import find as records
from study.records.find import RecordFile

STEPS = 10  # at each end, fewer in a shorter run: the loss of a single small batch is noisy

EXPLANATION = f"""\
One line per run. Losses are means over the first and the last {STEPS} steps (of a shorter run, over a third of its
steps each). Held-out figures are of examples that were not trained on. Seconds per step: the median, the slowest
rank's, without warm-up and the probed step; on a shared machine a figure of that hour, not a comparison."""

HEAD = ["strategy", "processes", "seed", "steps", "first losses", "last losses", "held out", "s/step", "peak RSS, GiB"]


def steps_at_an_end(num_steps: int) -> int:
    """How many steps a first or a last loss is the mean of."""
    return max(1, min(STEPS, num_steps // 3))


def table(folders: Sequence[Path]) -> str:
    """Make the page: one table per model, precision, global batch and box."""
    record_files = records.find(folders)
    finished = sorted((f for f in record_files if f.record.status == "ok"), key=_order)
    lines = ["# Losses: does each run learn?", "", EXPLANATION, ""]
    for heading, members in groupby(finished, key=_heading):
        rows = [_row(member) for member in members]
        lines += [f"## {heading}", "", *markdown.markdown(HEAD, rows), ""]
    lines += [*markdown.not_ok(record_files), f"Made by `{markdown.command('compare --view losses', folders)}`."]
    return "\n".join(lines)


def _heading(file: RecordFile) -> str:
    r = file.record
    batch = f"{r.config['global_batch_size']} sequences per step"
    return f"{r.workload} {r.size}, {r.proof.precision}, {batch}, {records.box_of(r)}"


def _order(file: RecordFile) -> tuple:
    facts = file.record
    return _heading(file), facts.strategy != "single", facts.strategy, facts.world_size, facts.seed


def _row(file: RecordFile) -> list[str]:
    facts = file.record
    losses = [line["loss"] for line in records.steps_of(file)]
    some = steps_at_an_end(len(losses))
    held_out = facts.evaluation[-1]
    name = "accuracy" if "accuracy" in held_out else "perplexity"
    figure = held_out.get(name)
    seconds = facts.timing and facts.timing.median_seconds
    peak = None if facts.peak_memory is None else _peak_resident(file)
    return [
        facts.strategy,
        str(facts.world_size),
        str(facts.seed),
        str(facts.steps_done),
        f"{statistics.mean(losses[:some]):.3f}",
        f"{statistics.mean(losses[-some:]):.3f}",
        f"{name} " + ("unknown" if figure is None else format(figure, ".3f" if name == "accuracy" else ".1f")),
        "" if seconds is None else f"{seconds:.2f}",
        "" if peak is None else f"{peak / 2**30:.2f}",
    ]


def _peak_resident(file: RecordFile) -> int | None:
    """The largest resident set of any rank in any phase; None on a GPU box, which records none."""
    peaks = [p.resident_bytes for phases in file.record.peak_memory for p in phases.values() if p.resident_bytes]
    return max(peaks, default=None)
