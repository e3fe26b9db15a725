"""Make the views of memory: model states, the peak memory of a step, the parts of a peak, and prediction errors.

- `model-states`: bytes of model states per rank, compared with the ZeRO paper's formula, with reasons for differences
- `parts`: the parts of a rank's peak memory, and the model size from which a strategy's peak is below DDP's
- `peaks`: the peak memory of a step in each run, compared with the prediction
- `theory`: the errors of predicted model states, collectives and peaks, by strategy
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

from study.compare import predicted
from study.compare.facts import computed_buckets, model_heading, process_bytes, require_proof, shown_adapter
from study.compare.predicted import STATE_PARTS, STEP_PHASES, StatePart, StepPeak, StepPhase
from study.compare.view import View, finished, tables
from study.records import find as records
from study.records.find import RecordFile
from study.records.schema import ModelStateBytes, Record
from zero_study import terminal
from zero_study.engines.strategy_names import StrategyName, in_order

CONTROL = "ddp"


# ---------------------------------------------------------------- model states

STATES_TOLERANCE = 0.005  # relative; a reason is listed only if it explains more than this share of a part
SMALLEST_PRINTED = 0.0005  # bytes per parameter below which a difference is not visible

MOMENT_HEADINGS = {"stepping": "as the optimizer is about to step", "resting": "between two steps"}
STATES_HEAD = ["strategy", "model states", "paper", "ratio", "parameters", "gradients", "optimizer states",
               "communication buffers", "ratio with buffers"]  # fmt: skip

STATES_EXPLANATION = """\
Model states are the parameters, gradients and optimizer states that a rank keeps. The tables show them in bytes per
parameter of the model, and compare them with the ZeRO paper (arXiv:1910.02054, sec. 3.1 and 5).

- Memory of GPU and host is added, and each storage is counted once. If ranks differ, the lowest and the highest
  value are shown.
- The ratios are those of the rank that uses the most memory to the paper. One ratio counts the rank's communication
  buffers, and the other one does not. The paper does not count them.
- If a value differs from the paper's by more than 0.5 %, the paper's value follows in parentheses, and r1, r2 ...
  refer to the reasons at the end. *unexplained* means that the known reasons do not add up to the difference.
- The paper's value between two steps contains no gradients."""


def _states_sections(record_files: list[RecordFile]) -> list[str]:
    """Return the lines of the view `model-states`: the tables, and the reasons for differences from the paper.

    There is a table for each model, precision, number of processes and moment, with one row per strategy.
    """
    runs = [file.record for file in finished(record_files)]
    measured = [r for r in runs if r.model_state_bytes and r.resting_state_bytes]
    notes: list[str] = []  # the reasons, in the order in which the tables first refer to them
    lines = []
    for heading, members in groupby(sorted(measured, key=_states_order), key=model_heading):
        lines += [f"## {terminal.escape_markdown(heading)}", ""]
        model = heading.rpartition(", ")[0]
        for world_size, block in groupby(members, key=lambda r: r.world_size):
            rows = _distinct(list(block))
            for moment in STEP_PHASES:
                lines += [
                    f"### {model}, {terminal.count(world_size, 'process', 'processes')}: {MOMENT_HEADINGS[moment]}",
                    "",
                ]
                states_rows = [_states_row(name, r, moment, notes) for name, r in rows]
                lines += [*terminal.markdown(STATES_HEAD, states_rows), ""]
    lines += [*computed_buckets(measured), *_explained(notes)]
    if unmeasured := [r.run_id for r in runs if not (r.model_state_bytes and r.resting_state_bytes)]:
        lines += [f"Not measured (`--no-measure`): {', '.join(unmeasured)}.", ""]
    return lines


def _explained(notes: Sequence[str]) -> list[str]:
    """Return the section with the numbered reasons to which the tables refer."""
    if not notes:
        return []
    reasons = [f"- r{number}: {predicted.REASONS[reason]}" for number, reason in enumerate(notes, 1)]
    links = [f"[r{number}]: #reasons" for number in range(1, len(notes) + 1)]
    return ["## Reasons", "", *reasons, "", *links, ""]


def _states_order(r: Record) -> tuple[object, ...]:
    return (
        require_proof(r).precision,
        r.workload,
        r.num_params,
        model_heading(r),
        r.world_size,
        StrategyName.parse(r.strategy).position,
        r.run_id,
    )


def _distinct(block: list[Record]) -> list[tuple[str, Record]]:
    """Return the name and the record for each row of a table, with one row per strategy.

    If runs of one strategy have different bytes, each variant has a row of its own, named by the run's id.
    """
    by_bytes: dict[str, list[Record]] = {}
    for r in block:
        members = by_bytes.setdefault(r.strategy, [])
        if all(_bytes(r) != _bytes(reference) for reference in members):
            members.append(r)
    return [(name if len(members) == 1 else r.run_id, r) for name, members in by_bytes.items() for r in members]


def _bytes(r: Record) -> list[list[int]]:
    """Return the measured bytes that a run's row shows.

    Bytes on a disk are not among them, because they differ between equal runs.
    """
    return [[getattr(rank, part) for part in STATE_PARTS] for moment in STEP_PHASES for rank in _ranks(r, moment)]


def _ranks(r: Record, moment: str) -> list[ModelStateBytes]:
    return (r.model_state_bytes if moment == "stepping" else r.resting_state_bytes) or []


def _states_row(name: str, r: Record, moment: StepPhase, notes: list[str]) -> list[str]:
    ranks, paper = _ranks(r, moment), predicted.paper_states(r, moment)
    cells = [_states_cell(r, ranks, part, getattr(paper, part), moment, notes) for part in STATE_PARTS]
    states = [rank.model_states for rank in ranks]
    everything = [sum(getattr(rank, part) for part in STATE_PARTS) for rank in ranks]
    ratio, ratio_with_buffers = (f"{max(sums) / paper.total:.3f}" for sums in (states, everything))
    of_paper = _per_parameter([paper.total], r)
    return [name, _per_parameter(states, r), of_paper, ratio, *cells, ratio_with_buffers]


def _per_parameter(num_bytes: Sequence[float], r: Record) -> str:
    least, most = (value / (r.num_params or 1) for value in (min(num_bytes), max(num_bytes)))
    return f"{most:.3f}" if _close(least, most) else f"{least:.3f} to {most:.3f}"


def _close(value: float, reference: float) -> bool:
    """Return whether two numbers of bytes per parameter are equal within the tolerance of the page."""
    return abs(value - reference) <= max(STATES_TOLERANCE * max(abs(value), abs(reference)), SMALLEST_PRINTED)


def _states_cell(
    r: Record, ranks: Sequence[ModelStateBytes], part: StatePart, paper: float, moment: StepPhase, notes: list[str]
) -> str:
    measured, num_params = [getattr(rank, part) for rank in ranks], r.num_params or 1
    cell = _per_parameter(measured, r)
    if all(_close(value / num_params, paper / num_params) for value in measured):
        return cell
    reasons = _reasons(r, part, measured, paper, moment)
    notes += [reason for reason in reasons if reason not in notes]
    numbers = ", ".join(f"[r{number}]" for number in sorted(notes.index(reason) + 1 for reason in reasons))
    return f"{cell} ({paper / num_params:.3f}) {numbers or '*unexplained*'}"


def _reasons(r: Record, part: StatePart, measured: Sequence[int], paper: float, moment: StepPhase) -> list[str]:
    """Return the reasons why a part of the model states differs from the paper's value.

    Empty unless the reasons explain the measured bytes of every rank.
    """
    num_params = r.num_params or 1
    shares: dict[str, float] = {}
    for value, differences in zip(measured, predicted.state_differences(r, moment) or [], strict=False):
        departures = [d for d in differences if d.part == part]
        if not _close(value / num_params, (paper + sum(d.num_bytes for d in departures)) / num_params):
            return []
        for d in departures:
            shares[d.reason] = max(shares.get(d.reason, 0.0), abs(d.num_bytes) / max(value, paper))
    return [reason for reason, share in shares.items() if share > STATES_TOLERANCE]


MODEL_STATES = View("model-states", "Model states of each rank", STATES_EXPLANATION, _states_sections)


# ---------------------------------------------------------------- what a peak is made of

PARTS_EXPLANATION = """\
The memory of a training is largest at one moment of a step, its peak. The tables show the parts of this peak in
GiB, for the rank with the highest peak, in a step after the warm-up.

- "theory" is the predicted peak.
- "process" is the largest memory of any whole process during training, including Python and the libraries.
- The columns from "parameters" to "communication buffers" have the memory that the rank keeps between two steps.
  "more" is the rest of the peak."""
CROSSINGS = """\
For each strategy: the smallest tested model from which on its peak stays below that of {}. "measured" is from
the measured peaks, and "by theory" from the predicted ones."""


class Crossing(NamedTuple):
    """The smallest model size at which a strategy needs less peak memory than the baseline, measured and predicted."""

    workload: str
    precision: str
    processes: int
    batch_sequences: int
    strategy: str
    measured: str
    by_theory: str


class RunPeak(NamedTuple):
    """The measured and the predicted peak memory of one run, in bytes."""

    record: Record
    at_rest: list[float]  # the parts between two steps, in the order of STATE_PARTS
    peak: float
    theory: float
    process: float | None

    @property
    def setting(self) -> tuple[str, str, int, int]:
        r = self.record
        return r.workload, require_proof(r).precision, r.world_size, r.config["global_batch_size"]

    @property
    def num_params(self) -> int:
        return self.record.num_params or 0


def _parts_sections(record_files: list[RecordFile]) -> list[str]:
    """Return the lines of the view `parts`: a table per model size, and the sizes from which on strategies save memory.

    They are grouped by workload, precision, number of processes and batch.
    """
    lines: list[str] = []
    head = ["strategy", "peak", "theory", "process", *(part.replace("_", " ") for part in STATE_PARTS), "more"]
    for (workload, precision, world_size, batch), runs in _by_setting(record_files):
        setting = f"{precision}, {terminal.count(world_size, 'process', 'processes')}"
        strategies = in_order(run.record.strategy for run in runs)
        lines += [f"## {terminal.escape_markdown(workload)}, {setting}, {batch} sequences per step", ""]
        for size, members in groupby(runs, key=lambda run: run.record.size):
            of_size = sorted(members, key=lambda run: strategies.index(run.record.strategy))
            lines += [f"### {workload} {size}, {of_size[0].num_params:,} parameters, {setting}", ""]
            rows = []
            for run in of_size:
                columns = [run.peak, run.theory, run.process, *run.at_rest, run.peak - sum(run.at_rest)]
                rows.append([run.record.strategy, *map(terminal.gib, columns)])
            lines += [*terminal.markdown(head, rows), ""]
        if crossing_rows := _crossings(runs):
            lines += [f"### Smallest model that saves memory, {workload}, {setting}", "", CROSSINGS.format(CONTROL), ""]
            cells = [row[-3:] for row in crossing_rows]
            lines += [*terminal.markdown(["strategy", "measured", "by theory"], cells), ""]
    return lines


def crossings(folders: Sequence[Path]) -> list[Crossing]:
    """Return the model size from which a strategy's peak memory is below the baseline's, by training and strategy."""
    return [row for _, runs in _by_setting(records.find(folders)) for row in _crossings(runs)]


def _by_setting(files: Iterable[records.RecordFile]) -> list[tuple[tuple[str, str, int, int], list[RunPeak]]]:
    peaks = [peak for file in finished(files) if (peak := _peak_of(file.record))]
    ordered = sorted(peaks, key=lambda peak: (peak.setting, peak.num_params))
    return [(setting, list(runs)) for setting, runs in groupby(ordered, key=lambda peak: peak.setting)]


def _peak_of(r: Record) -> RunPeak | None:
    peak = predicted.step_peak(r)
    if peak is None or not r.resting_state_bytes:
        return None
    fullest_rank = max(r.resting_state_bytes, key=lambda rank: rank.model_states)
    at_rest = [float(getattr(fullest_rank, part)) for part in STATE_PARTS]
    return RunPeak(r, at_rest, peak.measured, peak.predicted, process_bytes(r))


def _crossings(runs: list[RunPeak]) -> list[Crossing]:
    """Return, by strategy, the model size from which on its peak memory is below the control's.

    Strategies that were run with fewer than three sizes are left out.
    """
    controls = {run.record.size: run for run in runs if run.record.strategy == CONTROL}
    rows = []
    for strategy in in_order(run.record.strategy for run in runs if run.record.strategy != CONTROL):
        own = [run for run in runs if run.record.strategy == strategy and run.record.size in controls]
        pairs = [(run, controls[run.record.size]) for run in own]
        if len({run.record.size for run in own}) > 2:
            measured, by_theory = (_crossing_size(pairs, name) for name in ("peak", "theory"))
            rows.append(Crossing(*runs[0].setting, strategy, measured, by_theory))
    return rows


def _crossing_size(pairs: list[tuple[RunPeak, RunPeak]], field: Literal["peak", "theory"]) -> str:
    """Return the name of the smallest model size from which on every run's peak is below that of the control.

    Each pair has a run of the strategy and a run of the control, of the same size.
    """
    above = [run.num_params for run, control in pairs if getattr(run, field) >= getattr(control, field)]
    below = [run for run, _ in pairs if run.num_params > max(above, default=0)]
    if not below:
        return "not up to the largest"
    return min(below, key=lambda run: run.num_params).record.size if above else "from the smallest"


PEAK_PARTS = View("parts", "Parts of the peak memory", PARTS_EXPLANATION, _parts_sections)


# ---------------------------------------------------------------- peaks

TARGET_ERROR = 0.05  # relative error
MAX_ERROR = 0.10

PEAKS_EXPLANATION = """\
The memory of a training is largest at one moment of a step, its peak. The tables show the bytes of all tensors at this
moment, on GPU and host together.

- "measured": the bytes on the rank that uses the most memory, in a step after the warm-up.
- "theory" and "highest at": the bytes and the moment that `zero_study/theory/peaks.py` predicts."""
PEAKS_COLUMNS = """\
On a CPU, PyTorch's allocator counts the bytes, and DDP's buckets are added if no gradient is stored in them. The
measurement can be too large, because threads of gloo release some tensors only at the end of the step. "too large by"
is an upper bound of this excess. In older records, the bound is the size of all tensors in the step's collectives."""
PEAKS_HEAD = ["strategy", "batch x tokens", "measured, MB", "theory, MB", "error", "too large by, MB", "differs in",
              "highest at"]  # fmt: skip


def _peaks_sections(record_files: list[RecordFile]) -> list[str]:
    """Return the lines of the view `peaks`: a summary, and a table per model, precision and number of processes."""
    peaks = [peak for file in finished(record_files) if (peak := predicted.step_peak(file.record)) is not None]
    lines = [_peaks_summary(peaks), "", PEAKS_COLUMNS, ""] if peaks else []
    lines += tables(peaks, _peaks_order, _peaks_heading, PEAKS_HEAD, lambda members: map(_peaks_row, members))
    return lines + computed_buckets(peak.record for peak in peaks if require_proof(peak.record).device == "cpu")


def _peaks_summary(cells: list[StepPeak]) -> str:
    worst = max(cells, key=lambda c: abs(c.error))
    within, nearly = (sum(abs(c.error) <= limit for c in cells) for limit in (TARGET_ERROR, MAX_ERROR))
    return (
        f"{len(cells)} runs: {within} within {TARGET_ERROR:.0%}, {len(cells) - nearly} beyond {MAX_ERROR:.0%}; the "
        f"worst is {worst.record.run_id}, {worst.error:+.1%}. Without the memory that was counted too long, the "
        f"largest error is {max((c.error_beyond for c in cells), key=abs):+.1%}."
    )


def _peaks_heading(c: StepPeak) -> str:
    processes = terminal.count(c.record.world_size, "process", "processes")
    return f"## {terminal.escape_markdown(model_heading(c.record))}, {processes}"


def _peaks_order(c: StepPeak) -> tuple[object, ...]:
    r = c.record
    batch = (r.config["sequence_length"], r.config["global_batch_size"])
    return _peaks_heading(c), _computed(r), *batch, StrategyName.parse(r.strategy).position


def _computed(r: Record) -> str:
    """Return what is unusual in how a run computed, as text.

    The usual way is SDPA, with dropout, of all weights, without activation checkpointing, and one micro step.
    """
    parts = ["eager attention"] if r.config["attention"] == "eager" else []
    parts += shown_adapter(r)
    parts += ["no dropout"] if not r.config["dropout"] else []
    parts += ["checkpointed"] if r.config["activation_checkpointing"] else []
    steps = require_proof(r).gradient_accumulation_steps
    return ", ".join([*parts, *([f"{steps} micro steps"] if steps > 1 else [])])


def _peaks_row(c: StepPeak) -> list[str]:
    r = c.record
    batch = f"{r.config['global_batch_size']} x {r.config['sequence_length']}"
    measured, overcount, by_theory = (f"{value / 1e6:,.1f}" for value in (c.measured, c.overcount, c.predicted))
    return [r.strategy, batch, measured, by_theory, f"{c.error:+.1%}", overcount, _computed(r), c.moment]


PEAKS = View("peaks", "Peak memory of a step", PEAKS_EXPLANATION, _peaks_sections)


# ---------------------------------------------------------------- theory's errors, by strategy

THEORY_EXPLANATION = """\
Theory predicts model states, traffic and the peak of a step before a run starts. The tables compare these predictions
with every finished run that measured the quantity, for all models that theory knows. Errors are relative to the
measurement. The median is the median of the absolute errors. The worst error is shown with its run."""
PEAKS_NOTE = """\
PyTorch's profiler counts the peak on a CPU. If a thread of gloo releases a tensor, the profiler does not notice it, and
counts the tensor until the end of the step. Newer runs wait for these threads and record this excess. For older runs of
several processes, the excess is at most the size of all tensors in the step's collectives. "excess, at most" is the
largest excess as a share of a measured peak. "worst without excess" is the worst error that the excess cannot explain.
If theory is above the measurement, the whole difference counts as an error."""


class Error(NamedTuple):
    """The error of one prediction for one run, relative to the measurement."""

    strategy: str
    run: str
    error: float
    overcount: float = 0.0  # upper bound of the share of the measurement that was counted too much
    beyond: float = 0.0  # the part of the error that `overcount` cannot explain


class Errors(NamedTuple):
    """The errors of predicted model states, collectives and peaks, for all runs that measured them."""

    states: list[Error]
    messages: list[Error]
    peaks: list[Error]


def errors(folders: Sequence[Path]) -> Errors:
    """Return the prediction errors for all runs below the folders. Raises Refusal if there is no run."""
    return _errors(records.find(folders))


def _errors(record_files: Iterable[RecordFile]) -> Errors:
    every = Errors([], [], [])
    for file in finished(record_files):
        r = file.record
        # Ids are unique only within the folder of a study.
        folder = file.path.parent.parent if file.path.name == "record.json" else file.path.parent
        run = f"{folder.parent.name if folder.name == 'records' else folder.name}/{r.run_id}"
        if (error := predicted.states_error(r)) is not None:
            every.states.append(Error(r.strategy, run, error))
        if r.world_size > 1 and (messages := predicted.messages(r)):
            every.messages.append(Error(r.strategy, run, messages.error))
        if peak := predicted.step_peak(r):
            share = peak.overcount / peak.measured
            every.peaks.append(Error(r.strategy, run, peak.error, share, peak.error_beyond))
    return every


def _theory_sections(record_files: list[RecordFile]) -> list[str]:
    """Return the lines of the view `theory`: three tables of errors, with a row per strategy and one for all."""
    every = _errors(record_files)
    head = ["strategy", "runs", "median error", "worst error", "run with the worst error"]
    peaks_head = [*head[:-1], "excess, at most", "worst without excess", head[-1]]
    return [
        *(
            "## Model states and buffers, at the moment with the larger error",
            "",
            *_errors_table(head, every.states, 4),
            "",
        ),
        *("## Messages of a step, in bytes", "", *_errors_table(head, every.messages, 4), ""),
        *("## Peak of a step", "", PEAKS_NOTE, "", *_errors_table(peaks_head, every.peaks, 1), ""),
    ]


def _errors_table(head: list[str], run_errors: list[Error], digits: int) -> list[str]:
    if not run_errors:
        return ["No run below these folders measured this quantity."]
    names = in_order({error.strategy for error in run_errors})
    rows = [
        _of_strategy(name, [error for error in run_errors if error.strategy == name], head, digits) for name in names
    ]
    return terminal.markdown(head, [*rows, _of_strategy("all", run_errors, head, digits)])


def _of_strategy(name: str, run_errors: list[Error], head: list[str], digits: int) -> list[str]:
    worst = max(run_errors, key=lambda error: abs(error.error))
    median = statistics.median(abs(error.error) for error in run_errors)
    exact = round(worst.error, digits + 2) == 0
    cells = [name, str(len(run_errors)), f"{median:.{digits}%}", f"{worst.error:+.{digits}%}"]
    if len(head) > len(cells) + 1:
        beyond = max((error.beyond for error in run_errors), key=abs)
        cells += [f"{max(error.overcount for error in run_errors):.0%}", f"{beyond:+.{digits}%}"]
    return [*cells, "" if exact else worst.run]


THEORY = View("theory", "Errors of theory", THEORY_EXPLANATION, _theory_sections, lists_unfinished=False)
