"""What does the planner predict for a row? For each setting that the row may mean, since it seldom says all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from study.planner.check.known import Masters, Reported
from study.strategy import engines, file
from study.theory import hardware, peaks, step_time, trust
from study.theory.case import Engine, Job, Precision
from study.theory.peaks import Peak
from study.theory.shapes import ModelShape
from study.theory.step_time import StepTime

# The files that the project ships for a kind and a stage: as engines come, and the leanest.
_FILES = {
    ("none", 0): ("single",),
    ("ddp", 0): ("ddp", "ddp_tuned"),
    ("deepspeed", 0): ("zero0",),
    ("deepspeed", 1): ("zero1",),
    ("deepspeed", 2): ("zero2", "zero2_tuned"),
    ("deepspeed", 3): ("zero3", "zero3_tuned"),
    ("fsdp", 3): ("fsdp2",),
}
_IN_16_BITS: dict[str, Precision] = {"bf16-autocast": "bf16", "fp16-autocast": "fp16"}
_LEANEST_OF_STAGE_3 = ("zero3_tuned", "fsdp2")  # many call FSDP so
_KEEPS_PARAMETERS = ("fsdp2_no_reshard",)
MOST_TOKENS = 1e9  # of a micro step: more is no batch, and may overflow
MOST_RANKS = 8192
ACCUMULATIONS = (1, 16)  # where the row does not say: few and many


def _names(case: Reported) -> tuple[str, ...]:
    if case.sharding is None:
        return ()
    return _KEEPS_PARAMETERS if case.sharding.keeps_parameters else _FILES[case.sharding.kind, case.sharding.stage]


def _engine(case: Reported, shape: ModelShape, name: str, masters: Masters, accumulates_in: str) -> Engine:
    asked: dict[Masters, Precision] = {
        "pure": "pure-bf16",
        "masters": "fp16" if case.multiplies_in == ("fp16",) else "bf16",
        "fp32": "fp32",
    }
    chosen = file.read_by_name(name)
    precision = engines.precision_class(chosen, asked[masters])
    return engines.engine_of(chosen, shape.hidden, case.num_gpus or 1, precision, accumulates_in)


def _jobs(case: Reported) -> Iterator[Job]:
    """With fused kernels; of what is not said, the least first."""
    micro, length = case.row.whole("micro_batch"), case.row.whole("seq_len")
    if micro is None or length is None or micro * length > MOST_TOKENS:
        return
    batch, accumulation = case.row.whole("global_batch"), case.row.whole("gradient_accumulation_steps")
    many: tuple[int, ...] = ACCUMULATIONS
    if accumulation:
        many = (accumulation,)
    elif batch and case.num_gpus:
        many = (max(1, batch // (micro * case.num_gpus)),)
    for steps in many:
        for checkpointing in (True, False) if case.checkpointing is None else (case.checkpointing,):
            yield Job(micro, length, steps, checkpointing, kernels="fused")


def predicted_times(case: Reported) -> list[tuple[Job, StepTime]]:
    """Predict a step under each setting that the row may mean; none where the planner cannot, or was never tried."""
    shape, gpus = case.shape, case.num_gpus
    if shape is None or gpus is None or gpus > trust.MOST_GPUS or len(case.cards) != 1:
        return []
    if case.sharding is None or case.sharding.in_groups or not (
        case.has_whole_states and case.computes_all and case.is_timed
    ):  # fmt: skip
        return []
    found = []
    for job in _jobs(case):
        by_operators = Job(job.micro_batch_size, job.sequence_length, job.gradient_accumulation_steps,
                           job.activation_checkpointing, attention="eager", dropout=True)  # fmt: skip
        for each in (job, by_operators):
            for engine in (
                _engine(case, shape, name, masters, "fp32") for name in _names(case) for masters in case.masters
            ):
                try:
                    box = hardware.typical_box(case.cards[0], gpus)
                    found.append((each, step_time.seconds(shape, engine, each, box)))
                except ValueError:  # GPUs that fill no nodes, a type that the card has not
                    continue
    return found


def least_peak(case: Reported) -> Peak | None:
    """Predict the smallest peak, logits left out, of the settings that a row may mean."""
    shape, names, job = case.shape, _names(case), next(_jobs(case), None)
    if shape is None or job is None or not names or not case.num_gpus or case.num_gpus > MOST_RANKS:
        return None
    leanest = _LEANEST_OF_STAGE_3 if "zero3" in names else names[-1:]
    found = [_engine(case, shape, name, masters, "bf16") for name in leanest for masters in case.masters]
    # What is here autocast may elsewhere be 16-bit parameters beside fp32 masters.
    found += [
        replace(engine, precision=_IN_16_BITS[engine.precision]) for engine in found if engine.precision in _IN_16_BITS
    ]
    return min((_peak(shape, engine, job) for engine in found), key=lambda peak: peak.total - peak.parts["logits"])


@lru_cache(maxsize=4096)  # a table has one setting in many rows
def _peak(shape: ModelShape, engine: Engine, job: Job) -> Peak:
    return peaks.peak(shape, engine, job)
