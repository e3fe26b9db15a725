"""Summarize runs: the view `short`, with one row per strategy, and the last lines that a run prints.

`table`: the loss, the peak memory and the time per step of each strategy, compared with a control.
`of_run`: the engine, losses, model states, traffic and step time of one run that ended well.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from study.compare import facts, parity, predicted, view
from study.compare.facts import require_proof
from study.config import OF_THE_PROCESS
from study.records import find as records
from study.records import schema
from study.records.find import RecordFile
from study.records.schema import Proof, Record
from study.records.steps import read_steps
from zero_study import terminal
from zero_study.engines.strategy_names import StrategyName
from zero_study.errors import Refusal

LEGEND = f"""\
Ratios are relative to the first row of the strategy after "vs". Rows with
  another number of ranks have none, unless one of the two rows is "single".
loss: the loss of the last step. "same": the loss of every step agrees within
  {parity.WITHIN:g}. A number: the largest relative difference of a step's loss.
  "masks", "steps", "seeds": the losses cannot be compared, because the runs
  drew different dropout masks, took different steps, or have different seeds.
peak: the largest number of bytes that the tensors of one rank occupied."""
REPEATS = """\
Each row shows the median of its runs. If they differ, the line below it shows
the range. Ratios compare medians. Add --each to list every run."""
MORE = "Other tables: --view differences, parity, parts, model-states, communication."
WIDTH = 80  # of a terminal, in columns
MOST_GROUPS = 8  # shown in the table
MOST_NAMES = 4  # listed in a sentence


def table(folders: Sequence[Path], each: bool = False) -> str:
    """Return the view `short` as text: a table for each group of runs of the same training, with one row per strategy.

    Runs that differ only in seed and repeat share a row. With `each`, every run has a row of its own.
    """
    files = records.find(folders)
    runs = view.finished(files)
    groups = _groups(runs, each)
    several_machines = len({file.record.box for file in runs}) > 1
    blocks = [_rows(group, each) for group in groups[:MOST_GROUPS]]
    lines = [line for block in blocks for line in _block(block, several_machines, each)]
    if not lines:
        return "\n".join(["No run ended successfully.", *view.not_ok(files)])
    if len(groups) > MOST_GROUPS:
        more = f"{len(groups) - MOST_GROUPS} more groups of equal trainings are not shown."
        lines += [f"{more} Name fewer folders.", ""]
    notes, rows = [LEGEND], [row for block in blocks for row in block]
    if any(row.seconds and (row.first.num_params or 0) < facts.REAL for row in rows):
        notes.append(facts.SMALL)
    if any(len(row.files) > 1 for row in rows):
        notes.append(REPEATS)
    return "\n".join([*lines, *notes, MORE, *view.not_ok(files)])


def _groups(runs: Sequence[RecordFile], each: bool) -> list[list[RecordFile]]:
    """Group runs of the same training, the largest group first."""
    block_of: Callable[[RecordFile], str] = parity.same_training if each else parity.same_training_of_any_seed
    members = groupby(sorted(runs, key=block_of), key=block_of)
    return sorted((sorted(group, key=parity.order) for _, group in members), key=len, reverse=True)


def content(folders: Sequence[Path], each: bool = False) -> dict[str, Any]:
    """Return the numbers of the view `short` as data for JSON: the groups with their rows, the baseline first."""
    files = records.find(folders)
    blocks = [_rows(group, each) for group in _groups(view.finished(files), each)]
    groups = [
        {
            "training": parity.heading(rows[0].first, _seeds(rows)),
            "rows": [_row_content(row, rows[0]) for row in rows],
        }
        for rows in blocks
    ]
    return {"groups": groups, "not_ok": view.not_ok(files)}


def _row_content(row: _Row, control: _Row) -> dict[str, Any]:
    difference = None if row is control else _loss_difference(row, control)
    return {
        "strategy": row.first.strategy,
        "name": row.name,
        "num_ranks": row.first.world_size,
        "seeds": _seeds([row]),
        "runs": [file.record.run_id for file in row.files],
        "final_loss": _numbers(row.losses),
        "peak_bytes": _numbers(row.peaks),
        "seconds_per_step": _numbers(row.seconds),
        "are_times_comparable": bool(row.comparable_seconds),
        "loss_compared_with_control": difference,
        "peak_ratio_to_control": _ratio(row, control, _peaks_of),
        "seconds_ratio_to_control": _ratio(row, control, _seconds_of),
    }


def _seeds(rows: Sequence[_Row]) -> list[int]:
    return sorted({file.record.seed for row in rows for file in row.files})


def _numbers(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _ratio(row: _Row, control: _Row, values_of: Callable[[_Row], list[float]]) -> float | None:
    """Return the ratio of the medians of two rows. None if a value is missing, or if the numbers of ranks differ.

    A comparison with `single` is meant to compare numbers of ranks.
    """
    is_with_single = "single" in (row.first.strategy, control.first.strategy)
    is_confounded = row.first.world_size != control.first.world_size and not is_with_single
    values, references = values_of(row), values_of(control)
    if is_confounded or not values or not references or not (reference := statistics.median(references)):
        return None
    return statistics.median(values) / reference


# ---------------------------------------------------------------- the rows of a block


class _Row(NamedTuple):
    """The runs that one table row summarizes: one strategy with one configuration."""

    name: str
    files: list[RecordFile]

    @property
    def first(self) -> Record:
        return self.files[0].record

    @property
    def losses(self) -> list[float]:
        """The final loss for each seed.

        If a seed has several runs, it is their median, so that every seed counts once.
        """
        by_seed: dict[int, list[float]] = {}
        for file in self.files:
            if file.record.final_loss is not None:
                by_seed.setdefault(file.record.seed, []).append(file.record.final_loss)
        return [statistics.median(losses) for losses in by_seed.values()]

    @property
    def peaks(self) -> list[float]:
        peaks = (predicted.step_peak(file.record) for file in self.files)
        return [float(peak.measured) for peak in peaks if peak]

    @property
    def comparable_seconds(self) -> list[float]:
        """The times per step of the runs whose times can be compared."""
        seconds = (_seconds(file.record) for file in self.files if facts.why_untimed(file.record) is None)
        return [value for value in seconds if value is not None]

    @property
    def seconds(self) -> list[float]:
        """The times per step that can be compared, or all times if none can be compared."""
        every = (_seconds(file.record) for file in self.files)
        return self.comparable_seconds or [value for value in every if value is not None]

    @property
    def why_untimed(self) -> list[str]:
        """The reasons why some times per step cannot be compared."""
        timed = [file.record for file in self.files if _seconds(file.record) is not None]
        return [reason for r in timed if (reason := facts.why_untimed(r))]


_peaks_of = attrgetter("peaks")
_seconds_of = attrgetter("comparable_seconds")


def _rows(group: Sequence[RecordFile], each: bool) -> list[_Row]:
    """Group runs into the rows of a table, in the order of their first runs. The first one is the control."""
    members: dict[str, list[RecordFile]] = {}
    for number, file in enumerate(group):
        members.setdefault(str(number) if each else _configuration(file.record), []).append(file)
    rows = [_Row(files[0].record.strategy, files) for files in members.values()]
    return [row._replace(name=row.name + _qualifier(row, rows, each)) for row in rows]


def _settings(r: Record) -> dict[str, Any]:
    settings = {name: value for name, value in r.config.items() if name not in OF_THE_PROCESS | {"seed"}}
    return settings | {"micro_batch_size": require_proof(r).micro_batch_size}


def _configuration(r: Record) -> str:
    """Return a key that is equal for runs that repeat one configuration."""
    mixed = (r.mixed_code, r.mixed_processors)
    return json.dumps([r.strategy, r.world_size, r.strategy_file, mixed, _settings(r)], sort_keys=True)


def _qualifier(row: _Row, rows: Sequence[_Row], each: bool) -> str:
    """Return the text that distinguishes a row from other rows with the same strategy and number of ranks."""
    words = ["mixed code"] if row.first.mixed_code else []
    if not each:
        alike = [
            row_alike
            for row_alike in rows
            if row_alike.name == row.name and row_alike.first.world_size == row.first.world_size
        ]
        settings = _settings(row.first)
        differing = [
            key
            for key, value in settings.items()
            if any(_settings(row_alike.first).get(key) != value for row_alike in alike)
        ]
        words += [f"{key.removesuffix('_size').replace('_', ' ')} {settings[key]}" for key in sorted(differing)]
    return f" ({', '.join(words)})" if words else ""


# ---------------------------------------------------------------- a block


def _block(rows: list[_Row], several_machines: bool, each: bool) -> list[str]:
    """Return the lines about one group: heading, answer, table, and the reasons why some times do not count."""
    control = rows[0]
    reference = control.first.strategy if len(control.first.strategy) <= len("zero1") else "ref."
    seeds = _seeds(rows)
    machine = f", {control.first.box}" if several_machines else ""
    heading = terminal.escape_markdown(parity.heading(control.first, seeds) + machine)
    lines = [*_wrapped(heading), *_wrapped(" ".join(_other_control(rows) if each else _answer(rows))), ""]
    lines += [_table(*_cells(rows, f"vs {reference}")), ""]
    reasons = Counter(reason for row in rows for reason in row.why_untimed)
    for reason, count in reasons.items():
        lines += _wrapped(f"The times of {terminal.count(count, 'run')} do not count, because {reason}.")
    if any(row.seconds and not row.comparable_seconds for row in rows):
        lines += _wrapped("Times in parentheses are not compared with other times.")
    return [*lines, *([""] if reasons else [])]


def _wrapped(text: str) -> list[str]:
    return terminal.wrap(text, columns=WIDTH).split("\n")


def _answer(rows: Sequence[_Row]) -> list[str]:
    """Return the sentences above a table.

    They name the control if it is not DDP, the rows with the lowest peak and the shortest step, and the rows whose
    losses are the same or different.
    """
    control, others = rows[0], rows[1:]
    sentences = _other_control(rows)
    if not others:
        return sentences
    names, ranks = _names_in_sentences(rows), control.first.world_size
    alike = [row for row in rows if row.first.world_size == ranks]
    among = "" if alike == rows else f" with {terminal.count(ranks, 'rank')}"
    for noun, values_of in (("lowest peak", _peaks_of), ("shortest step", _seconds_of)):
        measured = [row for row in alike if values_of(row)]
        if len(measured) > 1:
            least = min(measured, key=lambda row: statistics.median(values_of(row)))
            claim = f"{names[rows.index(least)]} has the {noun}{among}"
            ratio = _ratio_text(least, control, values_of).removesuffix("x")
            if least is control or not ratio:
                sentences.append(f"{claim}.")
            elif ratio == "1.00":
                sentences.append(f"The {noun}{among} is less than 1 % below that of {names[0]}.")
            else:
                sentences.append(f"{claim}: {ratio} times that of {names[0]}.")
    return [*sentences, *_answer_on_losses(rows, names)]


def _other_control(rows: Sequence[_Row]) -> list[str]:
    """Return sentences that name the control if it is not DDP. Empty if it is DDP."""
    if rows[0].first.strategy == "ddp":
        return []
    if any(row.first.strategy == "ddp" for row in rows):
        lack = (
            "The DDP runs cannot be the control, because some of them ran with different code or on other processors."
        )
    else:
        lack = "There is no DDP run to compare with."
    return [lack, *([f"The rows are compared with {rows[0].name} instead."] if len(rows) > 1 else [])]


def _names_in_sentences(rows: Sequence[_Row]) -> list[str]:
    """Return a unique name for each row."""
    counts = Counter(row.name for row in rows)
    ranks = [terminal.count(row.first.world_size, "rank") for row in rows]
    return [
        row.name if counts[row.name] == 1 else f"{row.name} ({rank})" for row, rank in zip(rows, ranks, strict=True)
    ]


def _answer_on_losses(rows: Sequence[_Row], names: Sequence[str]) -> list[str]:
    verdicts = {name: _loss_difference(row, rows[0]) for row, name in zip(rows[1:], names[1:], strict=True)}
    same = [name for name, verdict in verdicts.items() if verdict == "same"]
    different = [name for name, verdict in verdicts.items() if verdict[0].isdigit()]
    if len(same) == len(rows) - 1:
        return [f"All losses are the same as those of {names[0]}."]
    sentences = [f"The losses of {_row_names(same)} are the same as those of {names[0]}."] if same else []
    return [
        *sentences,
        *([f"The losses of {_row_names(different)} differ from those of {names[0]}."] if different else []),
    ]


def _row_names(names: Sequence[str]) -> str:
    """Return the names joined by commas and "and". If there are more than `MOST_NAMES`, return only their number."""
    if len(names) > MOST_NAMES:
        return f"{len(names)} rows"
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


Cell = tuple[str, str]  # the value, and the range that is shown below it


def _cells(rows: Sequence[_Row], comparison: str) -> tuple[list[list[Cell]], list[str]]:
    """Return the cells of a table and the headings of its columns. The rows are in the order of the project's tables.

    The columns for runs, peaks and times are left out if they contain no information.
    """
    control, rows = rows[0], sorted(rows, key=lambda row: StrategyName.parse(row.first.strategy).position)
    columns: list[tuple[str, list[Cell]]] = [
        ("strategy", [(row.name, "") for row in rows]),
        ("ranks", [(str(row.first.world_size), "") for row in rows]),
        ("runs", [(str(len(row.files)), "") for row in rows]),
        ("loss", [_median(row.losses, "{:.4f}".format) for row in rows]),
        (comparison, [("" if row is control else _loss_difference(row, control), "") for row in rows]),
        ("peak", [_median(row.peaks, terminal.bytes_text) for row in rows]),
        (comparison, [(_ratio_text(row, control, _peaks_of), "") for row in rows]),
        ("s/step", [_time_cell(row) for row in rows]),
        (comparison, [(_ratio_text(row, control, _seconds_of), "") for row in rows]),
    ]
    if all(len(row.files) == 1 for row in rows):
        columns = [column for column in columns if column[0] != "runs"]
    for name, is_known in (("s/step", any(row.seconds for row in rows)), ("peak", any(row.peaks for row in rows))):
        if not is_known:
            place = [title for title, _ in columns].index(name)
            del columns[place : place + 2]
    heads, cells = zip(*columns, strict=True)
    return [list(row) for row in zip(*cells, strict=True)], list(heads)


def _table(rows: Sequence[Sequence[Cell]], heads: Sequence[str]) -> str:
    """Return a table that fits the terminal, in which the range of a value is below the value."""
    cells = [["\n".join(filter(None, cell)) for cell in row] for row in rows]
    return "\n".join(terminal.table(heads, cells, WIDTH, sides="<" * len(heads)))


def _median(values: Sequence[float], text: Callable[[float], str]) -> Cell:
    """Return the median of the values, and their range if its two ends are printed differently."""
    if not values:
        return "", ""
    lowest, highest = text(min(values)), text(max(values))
    if lowest == highest:
        return text(statistics.median(values)), ""
    unit = lowest.partition(" ")[2]
    lowest = lowest.removesuffix(f" {unit}") if highest.endswith(f" {unit}") else lowest
    return text(statistics.median(values)), f"{lowest}-{highest}"


def _time_cell(row: _Row) -> Cell:
    value, extent = _median(row.seconds, "{:.3g}".format)
    return (value, extent) if row.comparable_seconds or not value else (f"({value})", f"({extent})" if extent else "")


def _ratio_text(row: _Row, control: _Row, values_of: Callable[[_Row], list[float]]) -> str:
    """Return a ratio as text. Empty if there is none, or for the control itself."""
    ratio = None if row is control else _ratio(row, control, values_of)
    return "" if ratio is None else f"{ratio:.2f}x"


def _loss_difference(row: _Row, control: _Row) -> str:
    """Return the result of comparing a row's losses with those of the control, seed by seed.

    It is "same", the largest relative difference, or a word that says why losses cannot be compared.
    """
    references = {file.record.seed: file for file in reversed(control.files)}
    verdicts, differences = set(), []
    for file in row.files:
        reference = references.get(file.record.seed)
        verdict = _difference(file, reference) if reference else "seeds"
        if isinstance(verdict, str):
            verdicts.add(verdict)
        else:
            differences.append(verdict)
    if verdicts:
        return next(word for word in ("masks", "steps", "unknown", "seeds") if word in verdicts)
    return "same" if max(differences) <= parity.WITHIN else f"{max(differences):.1e}"


def _difference(file: RecordFile, reference: RecordFile) -> float | str:
    """Return the largest relative difference between losses of the same step, or a word that says why there is none."""
    if parity.incomparable(file.record, reference.record):
        return "masks"
    try:
        difference = parity.largest_loss_difference(file, reference)
    except Refusal:
        return "steps"
    return "unknown" if difference is None else difference


def _seconds(r: Record) -> float | None:
    return r.timing.median_seconds if r.timing else None


# ---------------------------------------------------------------- one run

ENGINE_NAMES = {"MULTI_GPU": "DDP", "MULTI_CPU": "DDP", "NO": "no distribution", "FSDP": "FSDP2"}


def of_run(folder: Path, next_commands: Sequence[Sequence[str]] = ()) -> str:
    """Return the summary of a successful run: engine, losses, memory, traffic, time, record and next commands."""
    record = schema.read(folder)
    first_loss = read_steps(folder)[0]["loss"]
    proof, processes = require_proof(record), terminal.count(record.world_size, "process", "processes")
    lines = [
        f"verified  {record.strategy}: {_engine(proof)}, {processes} on {proof.device}, {proof.precision}",
        _learning_line(record, first_loss),
        _states_line(record),
        _messages_line(record),
        _time_line(record),
    ]
    lines.append(f"record    {folder / 'record.json'}")
    wrapped = [terminal.wrap(line, later_indent=" " * 10) for line in lines]
    if next_commands:
        wrapped.append("next      To compare with another strategy:")
        wrapped += [terminal.command(words, " " * 10) for words in next_commands]
    return "\n".join(wrapped)


def _engine(proof: Proof) -> str:
    if proof.zero_stage is None:
        return ENGINE_NAMES.get(proof.distributed_type, proof.distributed_type)
    offloads = {"optimizer": proof.offload_optimizer_device, "parameters": proof.offload_param_device}
    words = [f"{part} on {device}" for part, device in offloads.items() if device != "none"]
    return ", ".join([f"DeepSpeed's ZeRO stage {proof.zero_stage}", *words])


def _learning_line(record: Record, first_loss: float) -> str:
    line = f"loss      {first_loss:.4f} at first, {record.final_loss:.4f} after {record.steps_done} steps"
    line += " of synthetic text" if record.config["data"] == "bundled" else ""
    if not record.evaluation:
        return line
    last = {name: value for name, value in record.evaluation[-1].items() if name != "step"}
    return f"{line}; on held-out examples: " + ", ".join(
        f"{name} {'overflow' if value is None else f'{value:.4g}'}" for name, value in last.items()
    )


def _states_line(record: Record) -> str:
    if record.model_state_bytes is None or record.num_params is None:
        return "memory    not measured (--no-measure)"
    fullest = max(rank.model_states for rank in record.model_state_bytes) / record.num_params
    buffers = max(rank.communication_buffers for rank in record.model_state_bytes)
    paper = predicted.paper_states(record, "stepping").total / record.num_params
    return (
        f"memory    {fullest:.2f} bytes of model states per parameter, on the rank that has the most (ZeRO paper: "
        f"{paper:.2f}), and {buffers / 1e9:.3g} GB of communication buffers"
    )


def _messages_line(record: Record) -> str:
    if (sent := predicted.sent(record)) is None:
        return "sent      not measured (--no-measure)"
    line = f"sent      {sent.measured:.2f} times the size of the parameters per step and rank"
    line += f" (ZeRO paper: {sent.paper:.2f})"
    more = require_proof(record).backend == "gloo" and sent.by_gloo != sent.measured
    return line + (f"; gloo, the backend of this run, sends {sent.by_gloo:.2f}" if more else "")


def _time_line(record: Record) -> str:
    timing = record.timing
    if timing is None or timing.median_seconds is None:
        return "time      not measured, because there were too few steps"
    line = f"time      {timing.median_seconds:.3g} s per step, median of {timing.num_steps} steps"
    if timing.lower_quartile_seconds is None or timing.upper_quartile_seconds is None:
        return line
    return f"{line} (quartiles {timing.lower_quartile_seconds:.3g} to {timing.upper_quartile_seconds:.3g})"
