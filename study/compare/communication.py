"""What did an optimizer step send, beside what theory and the paper say?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from study.compare import markdown
from study.compare.cases import engine_of, job_of, shape_of
from study.compare.words import processes
from study.records import find as records
from study.records.schema import Record
from study.theory import communication as theory
from study.theory.communication import on_wire

TOLERANCE = 0.01  # of a step's bytes
WORDS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "subgroup_all_gather": "all-gather in a group of ranks",
    "reduce_scatter": "reduce-scatter",
    "subgroup_reduce_scatter": "reduce-scatter in a group of ranks",
    "subgroup_all_reduce": "all-reduce in a group of ranks",
}

EXPLANATION = """\
One steady optimizer step of rank 0. Sent: bytes over those of all parameters, an all-reduce counted twice
(arXiv:1910.02054, sec. 7.1), without the factor (N - 1) / N of a ring, which is what NCCL sends. By gloo: what gloo
sends for the same, whose reduce-scatter is an all-reduce; runs without a GPU talk over it. Theory: the step followed
collective by collective. Paper: its section 7, carried on to accumulation. Error: the bytes in which theory differs,
kind by kind, over all bytes. Collectives: number of each kind, where theory has another number, that in parentheses.
One all-reduce is told by no record, and not in theory: of 4 bytes, where DeepSpeed itself takes the norm at stage 0."""


class CommunicationCell(NamedTuple):
    """One run beside its prediction."""

    record: Record
    measured: dict[str, tuple[int, int]]  # kind -> count, bytes
    predicted: dict[str, tuple[int, int]]
    sent: float  # parameters' worth, measured
    sent_by_gloo: float  # for the same
    predicted_sent: float
    paper_sent: float
    error: float  # of bytes, relative

    @property
    def is_equal_in_counts(self) -> bool:
        counts, predicted = ({kind: count for kind, (count, _) in c.items()} for c in (self.measured, self.predicted))
        return counts == predicted


def table(folders: Sequence[Path]) -> str:
    """Make the page: by model and precision, one block per number of processes and way of computing."""
    record_files = records.find(folders)
    finished = [file.record for file in record_files if file.record.status == "ok"]
    measured = [r for r in finished if r.collectives_per_step is not None]
    cells = [c for r in measured if (c := cell(r)) is not None]
    lines = ["# Communication: measured, and by theory", "", EXPLANATION, ""]
    communicating = [c for c in cells if c.measured or c.predicted]
    lines += [*_summary(communicating), ""] if communicating else []
    for heading, members in groupby(sorted(communicating, key=_order), key=_heading):
        lines += [f"## {heading}", ""]
        for title, block in groupby(members, key=_title):
            head = ["strategy", "sent", "by gloo", "theory", "paper", "error", "collectives"]
            lines += [f"### {title}", "", *markdown.markdown(head, _rows(list(block))), ""]
    known = {c.record.run_id for c in cells}
    unknown = [r.run_id for r in measured if r.run_id not in known]
    lines += [f"No shape is known of the models of: {', '.join(unknown)}.", ""] if unknown else []
    unmeasured = [r.run_id for r in finished if r.collectives_per_step is None]
    lines += [f"Not measured (`--no-measure`): {', '.join(unmeasured)}.", ""] if unmeasured else []
    lines += [*markdown.not_ok(record_files), f"Made by `{markdown.command('compare --view communication', folders)}`."]
    return "\n".join(lines)


def cell(r: Record) -> CommunicationCell | None:
    """Hold a run's collectives against theory; None where the model is none that theory knows."""
    shape = shape_of(r)
    if shape is None:
        return None
    engine = engine_of(r)
    predicted = theory.collectives(engine, shape, job_of(r))
    size = engine.parameter_bytes * r.num_params
    counted = {c.kind: (c.count, c.bytes) for c in r.collectives_per_step}
    expected = {c.kind: (c.count, c.bytes) for c in predicted}
    differing = sum(abs(expected.get(k, (0, 0))[1] - counted.get(k, (0, 0))[1]) for k in {*counted, *expected})
    accumulation = r.proof.gradient_accumulation_steps
    paper = theory.paper_volume(engine.zero_stage, r.num_params, accumulation) if r.world_size > 1 else 0
    return CommunicationCell(
        record=r,
        measured=counted,
        predicted=expected,
        sent=sum(c.moved_bytes for c in r.collectives_per_step) / size,
        sent_by_gloo=on_wire.moved_by_gloo(r.collectives_per_step, r.world_size) / size,
        predicted_sent=sum(c.moved_bytes for c in predicted) / size,
        paper_sent=paper / r.num_params,
        error=differing / max(sum(num_bytes for _, num_bytes in counted.values()), 1),
    )


def _summary(cells: list[CommunicationCell]) -> list[str]:
    """How far theory is off, and where, in words."""
    worst = max(cells, key=lambda c: c.error)
    beyond = [c for c in cells if c.error > TOLERANCE]
    other = [c for c in cells if not c.is_equal_in_counts]
    equal = len(cells) - len(other)
    lines = [f"{len(cells)} runs: bytes within {TOLERANCE:.0%} in {len(cells) - len(beyond)}, counts equal in {equal}."]
    lines.append(
        f"The worst in bytes is {worst.record.run_id}, {worst.error:.4%} off."
        if worst.error
        else "No byte differs in any."
    )
    lines += [f"- beyond {TOLERANCE:.0%}: {c.record.run_id}, {c.error:.2%}" for c in beyond]
    lines += [f"- other counts: {c.record.run_id}, {markdown.shown(_counts(c))}" for c in other]
    return lines


def _heading(c: CommunicationCell) -> str:
    r = c.record
    return f"{r.workload} {r.size}, {r.proof.precision}, {r.num_params:,} parameters"


def _title(c: CommunicationCell) -> str:
    r = c.record
    accumulation = r.proof.gradient_accumulation_steps
    words = [processes(r.world_size)]
    words += [f"{accumulation} micro steps"] if accumulation > 1 else []
    words += ["checkpointed"] if r.config["activation_checkpointing"] else []
    return ", ".join(words)


def _order(c: CommunicationCell) -> tuple:
    r = c.record
    way = (r.world_size, r.config["activation_checkpointing"], r.proof.gradient_accumulation_steps)
    stage = r.proof.zero_stage if r.proof.zero_stage is not None else -1
    return r.proof.precision, r.workload, r.num_params, _heading(c), way, stage, r.strategy, r.run_id


def _rows(block: list[CommunicationCell]) -> list[list[str]]:
    """One row per strategy; runs of one strategy with other collectives have rows of their own, under their ids."""
    kept: dict[str, list[CommunicationCell]] = {}
    for c in block:
        members = kept.setdefault(c.record.strategy, [])
        if all((c.measured, c.predicted) != (other.measured, other.predicted) for other in members):
            members.append(c)
    return [
        [name if len(members) == 1 else c.record.run_id, f"{c.sent:.3f}", f"{c.sent_by_gloo:.3f}",
         f"{c.predicted_sent:.3f}", f"{c.paper_sent:.0f}", f"{c.error:.3%}", _counts(c)]
        for name, members in kept.items()
        for c in members
    ]  # fmt: skip


def _counts(c: CommunicationCell) -> str:
    words = []
    for kind in sorted({*c.measured, *c.predicted}):
        count, predicted = c.measured.get(kind, (0, 0))[0], c.predicted.get(kind, (0, 0))[0]
        other = "" if count == predicted else f" ({predicted})"
        words.append(f"{count} {WORDS.get(kind, kind)}{other}")
    return ", ".join(words)
