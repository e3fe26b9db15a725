"""How many bytes of model states did each rank hold, beside what the paper says, and why do they differ?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from study.compare import markdown
from study.compare.cases import accumulates, computed_buckets, engine_of, shape_of
from study.compare.words import processes
from study.records import find as records
from study.records.find import RecordFile
from study.records.schema import ModelStateBytes, Record
from study.theory.case import Engine
from study.theory.model_states import PARTS, REASONS, Moment, Part, engine_differences, paper_bytes
from study.theory.shapes import ParameterSizes

TOLERANCE = 0.005  # relative; also the share of a part that a reason must have to be named
PRINTED = 0.0005  # bytes per parameter below which a difference is not visible

HEADINGS: dict[Moment, str] = {"stepping": "As the optimizer is about to step", "resting": "Between two steps"}
STATES: dict[Part, str] = {"parameters": "parameters", "gradients": "gradients", "optimizer_states": "optimizer states"}
BUFFERS = "communication buffers"

EXPLANATION = """\
Bytes per parameter that a rank holds in memory, GPU and host together, each storage counted once. Where ranks differ:
least to most. A value that differs from the paper's by more than 0.5 % has the paper's in parentheses and the reasons'
numbers in brackets; *unexplained* means that the known reasons do not add up to the measurement. Model states are
parameters, gradients and optimizer states; the ratios are the largest rank's over the paper's, without and with
communication buffers, which the paper (arXiv:1910.02054, sec. 3.1 and 5) does not count. Between two steps the paper's
gradients are taken as released."""


def table(folders: Sequence[Path]) -> str:
    """Make the page: by precision and workload, one block per world size, one row per strategy."""
    record_files = records.find(folders)
    finished = [f for f in record_files if f.record.status == "ok"]
    measured = [f for f in finished if f.record.model_state_bytes and f.record.resting_state_bytes]
    notes: list[str] = []  # reasons in the order of their first use
    lines = ["# Model states: measured, and by the paper", "", EXPLANATION, ""]
    for heading, members in groupby(sorted(measured, key=_order), key=_heading):
        lines += [f"## {heading}", ""]
        for world_size, block in groupby(members, key=lambda f: f.record.world_size):
            rows = _distinct(list(block))
            for moment, title in HEADINGS.items():
                head = ["strategy", *STATES.values(), "model states", "paper", "ratio", BUFFERS, "ratio with them"]
                lines += [f"### {processes(world_size)}. {title}", ""]
                lines += [*markdown.markdown(head, [_row(name, r, moment, notes) for name, r in rows]), ""]
    lines += computed_buckets(f.record for f in measured)
    if notes:
        lines += ["## Reasons", ""]
        lines += [f"{number}. {REASONS[reason]}" for number, reason in enumerate(notes, 1)] + [""]
    unmeasured = [f.record.run_id for f in finished if f not in measured]
    if unmeasured:
        lines += [f"Not measured (`--no-measure`): {', '.join(unmeasured)}.", ""]
    lines += [*markdown.not_ok(record_files), f"Made by `{markdown.command('compare --view model-states', folders)}`."]
    return "\n".join(lines)


def error(r: Record) -> float | None:
    """Theory's largest relative error about what a rank of a run held, buffers and all; None: not known."""
    shape = shape_of(r)
    if shape is None or not r.model_state_bytes or not r.resting_state_bytes:
        return None
    errors = []
    moments: tuple[tuple[Moment, Sequence[ModelStateBytes]], ...]
    moments = (("stepping", r.model_state_bytes), ("resting", r.resting_state_bytes))
    for moment, ranks in moments:
        paper = paper_bytes(engine_of(r), r.num_params, moment).total
        for rank, held in enumerate(ranks):
            known = engine_differences(engine_of(r), shape.parameters, rank, moment, accumulates(r))
            predicted = paper + sum(difference.num_bytes for difference in known)
            errors.append(predicted / sum(getattr(held, part) for part in PARTS) - 1)
    return max(errors, key=abs)


def _heading(file: RecordFile) -> str:
    r = file.record
    return f"{r.workload} {r.size}, {r.proof.precision}, {r.num_params:,} parameters"


def _order(file: RecordFile) -> tuple:
    r = file.record
    return r.proof.precision, r.workload, r.num_params, _heading(file), r.world_size, _rank_of_strategy(r), r.run_id


def _rank_of_strategy(r: Record) -> tuple[int, str]:
    """From nothing sharded to everything offloaded."""
    stages = {"single": -2, "ddp": -1, "ddp_tuned": -1}
    return stages.get(r.strategy, r.proof.zero_stage if r.proof.zero_stage is not None else 9), r.strategy


def _distinct(block: list[RecordFile]) -> list[tuple[str, Record]]:
    """One row per strategy; runs of one strategy with other bytes have rows of their own, under their ids."""
    by_bytes: dict[str, list[Record]] = {}
    for r in (file.record for file in block):
        members = by_bytes.setdefault(r.strategy, [])
        if all(_bytes(r) != _bytes(other) for other in members):
            members.append(r)
    return [(name if len(members) == 1 else r.run_id, r) for name, members in by_bytes.items() for r in members]


def _bytes(r: Record) -> tuple:
    """What a row shows of a run, without what differs from run to run by nature: bytes on the disk."""
    moments = (r.model_state_bytes, r.resting_state_bytes)
    return tuple(tuple(getattr(rank, part) for part in PARTS) for moment in moments for rank in moment)


def _row(name: str, r: Record, moment: Moment, notes: list[str]) -> list[str]:
    ranks = r.model_state_bytes if moment == "stepping" else r.resting_state_bytes
    engine, shape = engine_of(r), shape_of(r)
    sizes = shape and shape.parameters
    paper = paper_bytes(engine, r.num_params, moment)
    cells = [_cell(r, engine, sizes, ranks, part, getattr(paper, part), moment, notes) for part in PARTS]
    states = [rank.model_states for rank in ranks]
    everything = [sum(getattr(rank, part) for part in PARTS) for rank in ranks]
    ratio, ratio_with_buffers = (f"{max(sums) / paper.total:.3f}" for sums in (states, everything))
    of_paper = _per_parameter([paper.total], r)
    return [name, *cells[:-1], _per_parameter(states, r), of_paper, ratio, cells[-1], ratio_with_buffers]


def _per_parameter(num_bytes: Sequence[float], r: Record) -> str:
    least, most = (value / r.num_params for value in (min(num_bytes), max(num_bytes)))
    return f"{most:.3f}" if _close(least, most) else f"{least:.3f} to {most:.3f}"


def _close(value: float, other: float) -> bool:
    """Equal as far as the page can show, for bytes per parameter."""
    return abs(value - other) <= max(TOLERANCE * max(abs(value), abs(other)), PRINTED)


def _cell(
    r: Record,
    engine: Engine,
    sizes: ParameterSizes | None,
    ranks: Sequence[ModelStateBytes],
    part: Part,
    paper: float,
    moment: Moment,
    notes: list[str],
) -> str:
    measured = [getattr(rank, part) for rank in ranks]
    cell = _per_parameter(measured, r)
    if all(_close(value / r.num_params, paper / r.num_params) for value in measured):
        return cell
    reasons = _reasons(r, engine, sizes, part, measured, paper, moment)
    for reason in reasons:
        if reason not in notes:
            notes.append(reason)
    numbers = " ".join(f"[{number}]" for number in sorted(notes.index(reason) + 1 for reason in reasons))
    return f"{cell} ({paper / r.num_params:.3f}) {numbers or '*unexplained*'}"


def _reasons(
    r: Record,
    engine: Engine,
    sizes: ParameterSizes | None,
    part: Part,
    measured: Sequence[int],
    paper: float,
    moment: Moment,
) -> list[str]:
    """The reasons why a part differs from the paper's; none unless they account for what every rank measured."""
    if sizes is None:
        return []
    named: dict[str, float] = {}
    for rank, value in enumerate(measured):
        known = engine_differences(engine, sizes, rank, moment, accumulates(r))
        departures = [d for d in known if d.part == part]
        predicted = paper + sum(d.num_bytes for d in departures)
        if not _close(value / sizes.num_params, predicted / sizes.num_params):
            return []
        for d in departures:
            named[d.reason] = max(named.get(d.reason, 0.0), abs(d.num_bytes) / max(value, paper))
    return [reason for reason, share in named.items() if share > TOLERANCE]
