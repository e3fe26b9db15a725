"""The view `model-states`: bytes of model states that each rank held, beside the paper's formula, with reasons."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from study.compare import expected, words
from study.compare.expected import STATE_PARTS, STEP_PHASES, StatePart, StepPhase
from study.compare.facts import computed_buckets, model_heading, proven
from study.records import find as records
from study.records.schema import ModelStateBytes, Record

TOLERANCE = 0.005  # relative; also the share of a part that a reason must have to be named
PRINTED = 0.0005  # bytes per parameter below which a difference is not visible

HEADINGS = {"stepping": "as the optimizer is about to step", "resting": "between two steps"}
HEAD = ["strategy", "model states", "paper", "ratio", "parameters", "gradients", "optimizer states",
        "communication buffers", "ratio with them"]  # fmt: skip

EXPLANATION = """\
Each rank keeps parameters, gradients and optimizer states, the model states: how many bytes for each parameter of the
model, and how many does the ZeRO paper say (arXiv:1910.02054, sec. 3.1 and 5)? GPU and host together, each storage
counted once. Where ranks differ: least to most. The ratios are the largest rank's over the paper's, without and with
communication buffers, which the paper does not count. A value more than 0.5 % from the paper's has that in parentheses,
and r1, r2 ... lead to the reasons at the end; *unexplained*: the known reasons do not add up to the measurement.
Between two steps the paper's gradients are taken as released."""


def table(folders: Sequence[Path]) -> str:
    """Make the page: by precision and workload, one block per world size, one row per strategy."""
    record_files = records.find(folders)
    finished = [f.record for f in record_files if f.record.status == "ok"]
    measured = [r for r in finished if r.model_state_bytes and r.resting_state_bytes]
    notes: list[str] = []  # reasons in the order of their first use
    lines = []
    for heading, members in groupby(sorted(measured, key=_order), key=model_heading):
        lines += [f"## {words.shown(heading)}", ""]
        for world_size, block in groupby(members, key=lambda r: r.world_size):
            rows = _distinct(list(block))
            for phase in STEP_PHASES:
                model = heading.rpartition(", ")[0]
                lines += [f"### {model}, {words.processes(world_size)}: {HEADINGS[phase]}", ""]
                lines += [*words.markdown(HEAD, [_row(name, r, phase, notes) for name, r in rows]), ""]
    lines += computed_buckets(measured)
    if notes:
        lines += ["## Reasons", ""]
        lines += [f"- r{number}: {expected.REASONS[reason]}" for number, reason in enumerate(notes, 1)] + [""]
        lines += [f"[r{number}]: #reasons" for number in range(1, len(notes) + 1)] + [""]
    if unmeasured := [r.run_id for r in finished if not (r.model_state_bytes and r.resting_state_bytes)]:
        lines += [f"Not measured (`--no-measure`): {', '.join(unmeasured)}.", ""]
    title = "Which model states does a rank hold?"
    return words.page(title, EXPLANATION, lines, "--view model-states", folders, record_files)


def _order(r: Record) -> tuple[object, ...]:
    stage = proven(r).zero_stage
    stages = {"single": -2, "ddp": -1, "ddp_tuned": -1}  # from nothing sharded to everything offloaded
    place = stages.get(r.strategy, stage if stage is not None else 9)
    return proven(r).precision, r.workload, r.num_params, model_heading(r), r.world_size, place, r.strategy, r.run_id


def _distinct(block: list[Record]) -> list[tuple[str, Record]]:
    """One row per strategy; runs of one strategy with other bytes have rows of their own, under their ids."""
    by_bytes: dict[str, list[Record]] = {}
    for r in block:
        members = by_bytes.setdefault(r.strategy, [])
        if all(_bytes(r) != _bytes(other) for other in members):
            members.append(r)
    return [(name if len(members) == 1 else r.run_id, r) for name, members in by_bytes.items() for r in members]


def _bytes(r: Record) -> list[list[int]]:
    """What a row shows of a run, without what differs from run to run by nature: bytes on the disk."""
    return [[getattr(rank, part) for part in STATE_PARTS] for phase in STEP_PHASES for rank in _ranks(r, phase)]


def _ranks(r: Record, phase: str) -> list[ModelStateBytes]:
    return (r.model_state_bytes if phase == "stepping" else r.resting_state_bytes) or []


def _row(name: str, r: Record, phase: StepPhase, notes: list[str]) -> list[str]:
    ranks, paper = _ranks(r, phase), expected.paper_states(r, phase)
    cells = [_cell(r, ranks, part, getattr(paper, part), phase, notes) for part in STATE_PARTS]
    states = [rank.model_states for rank in ranks]
    everything = [sum(getattr(rank, part) for part in STATE_PARTS) for rank in ranks]
    ratio, ratio_with_buffers = (f"{max(sums) / paper.total:.3f}" for sums in (states, everything))
    of_paper = _per_parameter([paper.total], r)
    return [name, _per_parameter(states, r), of_paper, ratio, *cells, ratio_with_buffers]


def _per_parameter(num_bytes: Sequence[float], r: Record) -> str:
    least, most = (value / (r.num_params or 1) for value in (min(num_bytes), max(num_bytes)))
    return f"{most:.3f}" if _close(least, most) else f"{least:.3f} to {most:.3f}"


def _close(value: float, other: float) -> bool:
    """Equal as far as the page can show, for bytes per parameter."""
    return abs(value - other) <= max(TOLERANCE * max(abs(value), abs(other)), PRINTED)


def _cell(
    r: Record, ranks: Sequence[ModelStateBytes], part: StatePart, paper: float, phase: StepPhase, notes: list[str]
) -> str:
    measured, each = [getattr(rank, part) for rank in ranks], r.num_params or 1
    cell = _per_parameter(measured, r)
    if all(_close(value / each, paper / each) for value in measured):
        return cell
    reasons = _reasons(r, part, measured, paper, phase)
    notes += [reason for reason in reasons if reason not in notes]
    numbers = ", ".join(f"[r{number}]" for number in sorted(notes.index(reason) + 1 for reason in reasons))
    return f"{cell} ({paper / each:.3f}) {numbers or '*unexplained*'}"


def _reasons(r: Record, part: StatePart, measured: Sequence[int], paper: float, phase: StepPhase) -> list[str]:
    """The reasons why a part differs from the paper's; none unless they account for what every rank measured."""
    each = r.num_params or 1
    named: dict[str, float] = {}
    for value, known in zip(measured, expected.state_differences(r, phase) or [], strict=False):
        departures = [d for d in known if d.part == part]
        if not _close(value / each, (paper + sum(d.num_bytes for d in departures)) / each):
            return []
        for d in departures:
            named[d.reason] = max(named.get(d.reason, 0.0), abs(d.num_bytes) / max(value, paper))
    return [reason for reason, share in named.items() if share > TOLERANCE]
