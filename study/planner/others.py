"""What did others measure on one GPU and on many, what does theory predict of it, and what of it can be checked?"""

from __future__ import annotations

from dataclasses import dataclass

from study.planner import cross_validation
from study.theory import measured_by_others, on_box, step_time, trust
from study.theory.measured_by_others import MeasuredCase
from study.theory.model_states import paper_bytes_per_parameter


@dataclass(frozen=True)
class PublishedRun:
    """One published configuration with its step time, beside what theory says of it."""

    case: MeasuredCase
    seconds: float  # of a step, as published
    predicted: step_time.StepTime
    share_of_peak: float  # model FLOPs per second over the card's peak of that precision
    fits: bool  # predicted
    peak_bytes: float | None  # published, by torch's allocator
    predicted_peak_bytes: float

    @property
    def num_gpus(self) -> int:
        return self.case.box.num_gpus

    @property
    def published_speed(self) -> float:
        """Tokens per second of one GPU."""
        return float(step_time.tokens_per_second_per_gpu(self.case.job, self.seconds))

    @property
    def predicted_speed(self) -> float:
        """The same, as theory has it."""
        return float(step_time.tokens_per_second_per_gpu(self.case.job, self.predicted.total))


def runs(family: str, model: str = "") -> list[PublishedRun]:
    """List a family's configurations whose time is known, by engine, precision and number of GPUs."""
    memory = {
        case.name: case.published
        for case in measured_by_others.cases("memory")
        if case.family == family and case.quantity == "peak_allocated_bytes"
    }
    rows = []
    for case in measured_by_others.cases():
        if case.family != family or (model and case.shape.name != model):
            continue
        timed = cross_validation.of_case(case)
        prediction = on_box.predict(case.shape, case.engine, case.job, case.box)
        rows.append(
            PublishedRun(
                case=case,
                seconds=timed.seconds,
                predicted=prediction.step,
                share_of_peak=timed.flops_per_token * timed.tokens / timed.seconds / timed.peak,
                fits=bool(prediction.fits),
                peak_bytes=memory.get(case.name),
                predicted_peak_bytes=float(prediction.peak.total),
            )
        )
    return sorted(rows, key=lambda row: (engine_words(row.case), row.case.engine.precision, row.num_gpus))


def engine_words(case: MeasuredCase) -> str:
    """Name an engine as a legend does."""
    engine = case.engine
    words = trust.engine_name(engine)
    if engine.replicas > 1:
        words += " within nodes"
    offloaded = [
        what
        for what, place in (("optimizer", engine.offload_optimizer), ("parameters", engine.offload_param))
        if place != "none"
    ]
    return f"{words}, {' and '.join(offloaded)} on the host" if offloaded else words


def state_bytes(case: MeasuredCase) -> float:
    """Count parameters, gradients and Adam's states by the paper, in bytes per parameter, where nothing is split."""
    return paper_bytes_per_parameter(0, 1, case.engine.precision).total


def states_in_words(case: MeasuredCase) -> str:
    """Name the precision class, with the bytes that it takes of each parameter."""
    words = {
        "fp32": "fp32",
        "tf32": "fp32",
        "pure-bf16": "all bf16",
        "bf16": "16-bit compute, fp32 masters",
        "fp16": "16-bit compute, fp32 masters",
        "fp8": "fp8 compute, fp32 masters",
    }.get(case.engine.precision, "autocast over fp32")
    return f"{state_bytes(case):g} ({words})"
