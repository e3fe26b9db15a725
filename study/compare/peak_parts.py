"""The view `parts`: what a rank's highest moment is made of, and from which size on a strategy's is below DDP's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from study.compare import expected, words
from study.compare.facts import PARTS, process_bytes, proven
from study.records import find as records
from study.records.schema import Record
from study.running.memory_limits import GIB

EXPLANATION = """\
How many GiB does training take at the highest moment of a step (peak), and what are they? Of the rank with the highest
peak, in a steady step. Theory: of the peak. Process: the most that any whole process had in memory while it trained,
with Python and the libraries. Parameters to buffers: what the rank holds between two steps; more: the peak's rest."""
CROSSINGS = """\
The smallest model from which on, among those that were run, a strategy's peak is below {}'s; by theory the same."""
CONTROL = "ddp"


class Crossing(NamedTuple):
    """From which size on a strategy's peak is below the control's."""

    workload: str
    precision: str
    processes: int
    batch_sequences: int
    strategy: str
    measured: str
    by_theory: str


class Held(NamedTuple):
    """One run's peak."""

    record: Record
    at_rest: list[float]  # bytes, in the order of PARTS
    peak: float
    theory: float
    process: float | None

    @property
    def setting(self) -> tuple[str, str, int, int]:
        r = self.record
        return r.workload, proven(r).precision, r.world_size, r.config["global_batch_size"]

    @property
    def num_params(self) -> int:
        return self.record.num_params or 0


def table(folders: Sequence[Path]) -> str:
    """Make the page: by workload, precision and number of processes a table of each size, and crossings."""
    files = records.find(folders)
    lines: list[str] = []
    for setting, runs in _by_setting(files):
        workload, precision, world_size, batch = setting
        where = f"{precision}, {words.processes(world_size)}"
        lines += [f"## {words.shown(workload)}, {where}, {batch} sequences a step", ""]
        head = ["strategy", "peak", "theory", "process", *(part.replace("_", " ") for part in PARTS), "more"]
        for size, of_size in groupby(runs, key=lambda each: each.record.size):
            these = sorted(of_size, key=lambda each: words.in_order(run.record.strategy for run in runs).index(
                each.record.strategy))  # fmt: skip
            lines += [f"### {workload} {size}, {these[0].num_params:,} parameters, {where}", ""]
            lines += [*words.markdown(head, map(_row, these)), ""]
        if rows := _crossings(runs):
            lines += [f"### From which size on, {workload}, {where}", "", CROSSINGS.format(CONTROL), ""]
            lines += [*words.markdown(["strategy", "measured", "by theory"], [row[-3:] for row in rows]), ""]
    return words.page("What is a step's highest moment made of?", EXPLANATION, lines, "--view parts", folders, files)


def crossings(folders: Sequence[Path]) -> list[Crossing]:
    """From which size on each strategy saves, by setting."""
    return [row for _, runs in _by_setting(records.find(folders)) for row in _crossings(runs)]


def _by_setting(files: Iterable[records.RecordFile]) -> list[tuple[tuple[str, str, int, int], list[Held]]]:
    held = [each for file in files if file.record.status == "ok" and (each := _held(file.record))]
    ordered = sorted(held, key=lambda each: (each.setting, each.num_params))
    return [(setting, list(runs)) for setting, runs in groupby(ordered, key=lambda each: each.setting)]


def _held(r: Record) -> Held | None:
    found = expected.step_peak(r)
    if found is None or not r.resting_state_bytes:
        return None
    rank = max(r.resting_state_bytes, key=lambda each: each.model_states)
    at_rest = [float(getattr(rank, part)) for part in PARTS]
    return Held(r, at_rest, found.measured, found.predicted, process_bytes(r))


def _row(each: Held) -> list[str]:
    shown = [each.peak, each.theory, each.process, *each.at_rest, each.peak - sum(each.at_rest)]
    return [each.record.strategy, *("" if value is None else f"{value / GIB:.2f}" for value in shown)]


def _crossings(runs: list[Held]) -> list[Crossing]:
    """From which size on each strategy is below the control; none where fewer than three sizes were run."""
    control = {each.record.size: each for each in runs if each.record.strategy == CONTROL}
    rows = []
    for name in words.in_order(each.record.strategy for each in runs if each.record.strategy != CONTROL):
        pairs = [(each, control[each.record.size]) for each in runs
                 if each.record.strategy == name and each.record.size in control]  # fmt: skip
        if len({each.record.size for each, _ in pairs}) > 2:
            found = _from(pairs, lambda each: each.peak), _from(pairs, lambda each: each.theory)
            rows.append(Crossing(*runs[0].setting, name, *found))
    return rows


def _from(pairs: list[tuple[Held, Held]], of: Callable[[Held], float]) -> str:
    """The smallest size from which on the first of each pair holds less."""
    above = [each.num_params for each, control in pairs if of(each) >= of(control)]
    below = [each for each, _ in pairs if each.num_params > max(above, default=0)]
    if not below:
        return "not up to the largest"
    return min(below, key=lambda each: each.num_params).record.size if above else "from the smallest"
