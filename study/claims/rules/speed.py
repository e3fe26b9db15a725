"""What does theory say of speed, and of what today's engine sends? Times have the spread of their model around them."""

from __future__ import annotations

import math
from typing import Any

from study.claims.observed import Observed
from study.claims.rules.cases import POSITIONS, Case, around, engine_of, model_of, prediction_of, shape_of
from study.theory import communication, flops, measured_by_others, step_time
from study.theory.case import Job
from study.theory.intervals import EVIDENCE


def engine_volume(
    strategy: str, model: str | dict[str, Any], world_size: int, accumulation: int, checkpointing: bool
) -> Observed:
    """Parameters that a rank of today's DeepSpeed moves in a step, over the model's, in bf16."""
    shape = shape_of(model_of(model))
    engine = engine_of(strategy, shape.hidden, world_size, "bf16")
    job = Job(1, POSITIONS, accumulation, checkpointing, kernels="fused")
    collectives = communication.collectives(engine, shape, job)
    value = sum(collective.moved_bytes for collective in collectives) / (engine.parameter_bytes * shape.num_params)
    kinds = ", ".join(f"{collective.count:g} {collective.kind}" for collective in collectives)
    return Observed(value, (f"{shape.name}, {strategy}, {world_size} ranks: {kinds}",))


def tokens_per_second_per_gpu(**arguments: Any) -> Observed:
    """Tokens that a GPU trains on in a second."""
    case = Case.of(arguments)
    value = _speed(case)
    return Observed(value, (_in_words(case),), around(value, prediction_of(case).step.evidence.spread))


def speed_ratio(of: dict[str, Any], to: dict[str, Any]) -> Observed:
    """Tokens per second and GPU of one case over those of another."""
    above, below = Case.of(of), Case.of(to)
    value = _speed(above) / _speed(below)
    return Observed(value, (_in_words(above), _in_words(below)), around(value, _ratio_spread(above, below)))


def least_speed_ratio(of: dict[str, Any], to: dict[str, Any], along: str, values: list[float]) -> Observed:
    """The smallest `speed_ratio` over some values of an argument, set on both sides."""
    return min(_ratios(of, to, along, values), key=lambda ratio: ratio.value)


def speed_ratio_change(of: dict[str, Any], to: dict[str, Any], along: str, start: Any, end: Any) -> Observed:
    """How much `speed_ratio` rises from one value of an argument, set on both sides, to another."""
    first, last = _ratios(of, to, along, (start, end))
    low, high = around(last.value / first.value, _ratio_spread(Case.of(of), Case.of(to)))
    evidence = tuple(f"{along} {value}: {ratio.value:.4g}" for value, ratio in ((start, first), (end, last)))
    return Observed(last.value - first.value, evidence, (first.value * (low - 1), first.value * (high - 1)))


def speed_ratio_growth(of: dict[str, Any], to: dict[str, Any], along: str, start: Any, end: Any) -> Observed:
    """`speed_ratio` at one value of an argument, set on both sides, over that at another."""
    first, last = _ratios(of, to, along, (start, end))
    value = last.value / first.value
    return Observed(value, (*last.evidence, *first.evidence), around(value, _ratio_spread(Case.of(of), Case.of(to))))


def published_tflops(case: str) -> Observed:
    """Predicted TFLOP/s of a GPU, recomputation counted, of a case of theory/measured_by_others/published.yaml."""
    cases = [measured for measured in measured_by_others.cases() if measured.quantity == "tflops_per_gpu"]
    measured = next((measured for measured in cases if measured.name == case), None)
    if measured is None:
        raise ValueError(f"case {case!r}: is none in TFLOP/s of theory/measured_by_others/published.yaml")
    job = measured.job
    each = flops.hardware_flops_per_sequence(measured.shape, job.sequence_length, job.recomputed)
    time = step_time.seconds(measured.shape, measured.engine, job, measured.box)
    value = float(job.micro_batch_size * job.gradient_accumulation_steps * each / time.total / 1e12)
    return Observed(
        value, (f"{measured.name}: {float(time.total):.4g} s per step",), around(value, time.evidence.spread)
    )


def _ratios(of: dict[str, Any], to: dict[str, Any], along: str, values: Any) -> list[Observed]:
    return [speed_ratio({**of, along: value}, {**to, along: value}) for value in values]


def _ratio_spread(above: Case, below: Case) -> float:
    """How far a ratio of two predicted times may be off.

    What both have in common cancels: where nothing but sharding, batch or length differs it is taken to be as uncertain
    as a single time of what the constants were fitted to. Offload, other GPUs, models or types, autocast against 16-bit
    parameters among them: as of two times whose errors know nothing of each other.
    """
    sides = (above, below)
    alike = len({(case.model, case.gpu, case.gpus, case.kernels, case.engine.precision) for case in sides}) == 1
    if alike and not any(case.is_offloaded for case in sides):
        return EVIDENCE["fsdp", "known"].spread
    return math.exp(math.hypot(*(math.log(prediction_of(case).step.evidence.spread) for case in sides)))


def _speed(case: Case) -> float:
    return float(prediction_of(case).tokens_per_second_per_gpu)


def _in_words(case: Case) -> str:
    return f"{case}: {_speed(case):,.0f} tokens/s per GPU"
