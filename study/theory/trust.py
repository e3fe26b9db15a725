"""Which published times does a predicted step time rest on, and how wide is its interval?

Found by `zero-study accuracy`, which predicts every published time by what was fitted without it; a test holds these
numbers to what it finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from study.theory import hardware
from study.theory.case import Engine, Job
from study.theory.hardware import Box
from study.theory.shapes import ModelShape

# fsdp: with fused kernels, as the rows that constants are fitted to. resident: DDP, DeepSpeed, one process, other
# kernels and mixtures of experts. offload: whatever has states or parameters on the host or a disk.
EngineKind = Literal["fsdp", "resident", "offload"]
# Of the box: like the rows in generation and number of GPUs; another number of GPUs; another generation.
Distance = Literal["known", "new count", "new generation"]
ENGINES: tuple[EngineKind, ...] = get_args(EngineKind)
DISTANCES: tuple[Distance, ...] = get_args(Distance)
# What a fit must do without to be asked so of a published time.
LEFT_OUT: dict[Distance, tuple[str, ...]] = {
    "known": ("model size", "card"),
    "new count": ("GPU count",),
    "new generation": ("generation",),
}

GENERATIONS = ("Ampere", "Hopper")  # of the rows that constants are fitted to
COUNTS = (8, 512)  # the fewest and the most GPUs of these rows


@dataclass(frozen=True)
class Evidence:
    """Errors of one kind of case under cross-validation, and the interval that they give."""

    engine: EngineKind
    distance: Distance
    spread: float  # factor above and below a prediction
    cases: int  # published times
    left_out: tuple[str, ...]  # of the fits that predicted them, one at a time
    predictions: int
    inside: int  # of the predictions
    median: float  # of |predicted over published seconds, less one|
    percentile_90: float
    worst: float  # with its sign: above 0 is too slow

    @property
    def sentence(self) -> str:
        """Say what the interval rests on."""
        what = {
            "fsdp": "FSDP on A100 and H100",
            "resident": "DDP and DeepSpeed on A100 and V100",
            "offload": "offload on A100, V100 and Titan RTX",
        }[self.engine]
        *most, last = self.left_out
        without = f"{', '.join(most)} or {last}" if most else last
        return (
            f"a factor of {self.spread:g} either way held for {self.inside} of {self.predictions} predictions of "
            f"{self.cases} published times, {what}, without their {without}: {100 * self.median:.0f} % off in the "
            f"median, {100 * abs(self.worst):.0f} % at worst"
        )


_ALL = ("model size", "GPU count", "card", "generation")  # fewer than nine times are known of the one kind of case
_RESIDENT = (1.45, 13, _ALL, 45, 45, 0.172, 0.261, -0.306)
_OFFLOAD = (1.75, 6, _ALL, 22, 22, 0.280, 0.705, 0.746)
EVIDENCE: dict[tuple[EngineKind, Distance], Evidence] = {
    (found.engine, found.distance): found
    for found in (
        Evidence("fsdp", "known", 1.15, 103, LEFT_OUT["known"], 172, 163, 0.040, 0.109, -0.254),
        Evidence("fsdp", "new count", 1.5, 103, LEFT_OUT["new count"], 103, 95, 0.067, 0.310, -0.461),
        Evidence("fsdp", "new generation", 1.55, 103, LEFT_OUT["new generation"], 103, 95, 0.193, 0.418, 0.753),
        Evidence("resident", "known", *_RESIDENT),
        Evidence("resident", "new count", *_RESIDENT),
        Evidence("resident", "new generation", 1.45, 13, LEFT_OUT["new generation"], 13, 13, 0.069, 0.175, -0.264),
        Evidence("offload", "known", *_OFFLOAD),
        Evidence("offload", "new count", *_OFFLOAD),
        Evidence("offload", "new generation", *_OFFLOAD),
    )
}


def engine_of(shape: ModelShape, engine: Engine, job: Job) -> EngineKind:
    """Say which kind of engine a case is, as far as its time is concerned."""
    if (engine.offload_optimizer, engine.offload_param) != ("none", "none"):
        return "offload"
    return "fsdp" if engine.kind == "fsdp" and job.kernels == "fused" and not shape.experts else "resident"


def distance_of(box: Box) -> Distance:
    """Say how far a box is from those whose throughput was published."""
    if hardware.generation_of(box.gpu) not in GENERATIONS:
        return "new generation"
    return "known" if COUNTS[0] <= box.num_gpus <= COUNTS[1] else "new count"


def evidence(shape: ModelShape, engine: Engine, job: Job, box: Box) -> Evidence:
    """Find the errors that a prediction of this case rests on."""
    return EVIDENCE[engine_of(shape, engine, job), distance_of(box)]
