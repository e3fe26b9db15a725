"""How many bytes did a step hold at its highest, beside what theory says?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from study.compare import markdown
from study.compare.cases import computed_buckets, engine_of, job_of, shape_of
from study.compare.words import processes
from study.records import find as records
from study.records.schema import Record
from study.theory import peaks as theory

WANTED = 0.05  # relative error
AT_MOST = 0.10

EXPLANATION = """\
Bytes of tensors that a rank held at the highest moment of a steady step, the largest rank's, GPU and host together; a
CPU's as its allocator counts them, and DDP's buckets where no gradient lies in them, C++ tensors that Python cannot see
there before. That count may be too large: what a thread of gloo's is the last to let go of is counted to the step's
end. Too large by: at most so much; in records from before it was asked all bytes that the step's collectives worked on.
Theory: study/theory/peaks.py, the largest rank's, and the moment at which it says the step is highest."""


class PeakCell(NamedTuple):
    """One run beside its prediction, in bytes."""

    record: Record
    measured: int
    overcount: int  # at most; 0: exact
    predicted: float
    parts: dict[str, float]  # of the predicted, but for a CPU's examples
    moment: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def error_beyond(self) -> float:
        """What is left of the error where the measurement is as much too large as it may be, and helps theory."""
        least = self.measured - self.overcount
        return self.error if self.error > 0 else min(0.0, self.predicted / least - 1) if least > 0 else 0.0


def table(folders: Sequence[Path]) -> str:
    """Make the page: one block per model, precision and number of processes."""
    record_files = records.find(folders)
    cells = [c for file in record_files if file.record.status == "ok" and (c := cell(file.record)) is not None]
    lines = ["# Peaks: measured, and by theory", "", EXPLANATION, ""]
    lines += [_summary(cells), ""] if cells else []
    for heading, members in groupby(sorted(cells, key=_order), key=_heading):
        head = ["strategy", "batch x tokens", "differs in", "measured, MB", "too large by, MB", "theory, MB", "error"]
        head += ["highest at"]
        lines += [f"## {heading}", "", *markdown.markdown(head, [_row(c) for c in members]), ""]
    lines += computed_buckets(c.record for c in cells if c.record.proof.device == "cpu")
    lines += [*markdown.not_ok(record_files), f"Made by `{markdown.command('compare --view peaks', folders)}`."]
    return "\n".join(lines)


def cell(r: Record) -> PeakCell | None:
    """Hold a run's peak against theory; None where it was not measured, or the model is none that theory knows."""
    shape = shape_of(r)
    if shape is None or not r.peak_memory or r.proof is None:
        return None
    steady = [phases["steady_steps"] for phases in r.peak_memory if "steady_steps" in phases]
    on_cpu = r.proof.device == "cpu"
    measured = [peak.tensor_bytes if on_cpu else peak.allocated_bytes for peak in steady]
    if not measured or None in measured:
        return None
    engine = engine_of(r)
    ranks_predicted = [theory.peak(shape, engine, job_of(r), rank) for rank in range(r.world_size)]
    if on_cpu and engine.kind == "ddp":
        if r.model_state_bytes is None:
            return None
        ranks = zip(measured, r.model_state_bytes, strict=True)
        measured = [peak + rank.communication_buffers for peak, rank in ranks]
    predicted = max(ranks_predicted, key=lambda peak: _counted(peak, on_cpu))
    total = _counted(predicted, on_cpu) + (_text_bytes(r) if on_cpu else 0)
    parts: dict[str, float] = {part: float(value) for part, value in predicted.parts.items()}
    parts["offloaded"] = float(predicted.host_bytes_then) if on_cpu else 0.0
    return PeakCell(r, max(measured), _overcount(r), total, parts, theory.MOMENTS[predicted.moment])


def _text_bytes(r: Record) -> int:
    """Bytes of the examples, all of which are in the host's memory: their tokens, and of a review which are padding."""
    examples = sum((r.data or {}).get(name, 0) for name in ("num_train_examples", "num_eval_examples"))
    return 8 * examples * r.config["sequence_length"] * (2 if r.workload == "bert-imdb" else 1)


def _overcount(r: Record) -> int:
    """Bytes by which a measured peak may be too large.

    On a CPU what a thread of gloo's lets go of is counted to the end of the step. Records say how much that was then;
    older ones do not: there it is at most what the step's collectives worked on.
    """
    if r.proof.device != "cpu" or r.world_size == 1:
        return 0
    known = [phases["steady_steps"].unreleased_bytes for phases in r.peak_memory if "steady_steps" in phases]
    if None not in known:
        return max(known)
    return sum(collective.bytes for collective in r.collectives_per_step or [])


def _counted(predicted: theory.Peak, on_cpu: bool) -> float:
    """Bytes that an allocator counts: a GPU's not those of the host."""
    return float(predicted.total + (predicted.host_bytes_then if on_cpu else 0.0))


def _summary(cells: list[PeakCell]) -> str:
    """How far theory is off, in words."""
    worst = max(cells, key=lambda c: abs(c.error))
    within, nearly = (sum(abs(c.error) <= limit for c in cells) for limit in (WANTED, AT_MOST))
    return (
        f"{len(cells)} runs: {within} within {WANTED:.0%}, {len(cells) - nearly} beyond {AT_MOST:.0%}; the worst is "
        f"{worst.record.run_id}, {worst.error:+.1%}. Beyond what may be counted too much the worst is "
        f"{max((c.error_beyond for c in cells), key=abs):+.1%}."
    )


def _heading(c: PeakCell) -> str:
    r = c.record
    return f"{r.workload} {r.size}, {r.proof.precision}, {r.num_params:,} parameters, {processes(r.world_size)}"


def _order(c: PeakCell) -> tuple:
    r = c.record
    stage = r.proof.zero_stage if r.proof.zero_stage is not None else -1
    return _heading(c), _ways(r), r.config["sequence_length"], r.config["global_batch_size"], stage, r.strategy


def _ways(r: Record) -> str:
    """How a run computed, where it is not the usual way: SDPA, with dropout, no checkpointing."""
    words = ["eager attention"] if r.config["attention"] == "eager" else []
    words += ["no dropout"] if not r.config["dropout"] else []
    words += ["checkpointed"] if r.config["activation_checkpointing"] else []
    steps = r.proof.gradient_accumulation_steps
    return ", ".join([*words, *([f"{steps} micro steps"] if steps > 1 else [])])


def _row(c: PeakCell) -> list[str]:
    r = c.record
    batch = f"{r.config['global_batch_size']} x {r.config['sequence_length']}"
    measured, overcount, predicted = (f"{value / 1e6:,.1f}" for value in (c.measured, c.overcount, c.predicted))
    return [r.strategy, batch, _ways(r), measured, overcount, predicted, f"{c.error:+.1%}", c.moment]
