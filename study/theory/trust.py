"""Which published times does a predicted step time rest on, and how wide is its interval?

Found by `zero-study accuracy`, which predicts every published time by what was fitted without it; a test holds these
numbers to what it finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from study.theory import hardware
from study.theory.case import Engine
from study.theory.hardware import Box
from study.theory.shapes import ModelShape

# fsdp: PyTorch's sharding. resident: DDP, DeepSpeed, one process, and mixtures of experts. offload: whatever has states
# or parameters on the host or a disk.
EngineKind = Literal["fsdp", "resident", "offload"]
# Of the box: like the rows in generation and number of GPUs; another number of GPUs; another generation.
Distance = Literal["known", "new count", "new generation"]
ENGINES: tuple[EngineKind, ...] = get_args(EngineKind)
DISTANCES: tuple[Distance, ...] = get_args(Distance)
# What a fit must do without to be asked so of a published time.
LEFT_OUT: dict[Distance, tuple[str, ...]] = {
    "known": ("family", "model size", "card"),
    "new count": ("GPU count",),
    "new generation": ("generation",),
}

GENERATIONS = ("Ampere", "Hopper", "Volta")  # of the rows that constants are fitted to
COUNTS = (1, 1024)  # the fewest and the most GPUs of these rows
# What published times are of, all grades: whatever else is asked was never held against any.
PUBLISHED_GPUS = ("t4", "v100-16gb", "v100-32gb", "a100-40gb", "a100-80gb", "h100-sxm", "h200")
PUBLISHED_OPTIMIZERS = ("adamw", "lamb", "adafactor", "sgd")
# Kind, stage, where the optimizer and the parameters are, whether states are split in groups, or parameters kept twice.
PUBLISHED_ENGINES = (
    ("torch", 0, "none", "none", False, False),
    ("ddp", 0, "none", "none", False, False),
    ("deepspeed", 0, "none", "none", False, False),
    ("deepspeed", 1, "none", "none", False, False),
    ("deepspeed", 1, "none", "none", True, False),
    ("deepspeed", 2, "none", "none", False, False),
    ("deepspeed", 2, "cpu", "none", False, False),
    ("deepspeed", 3, "none", "none", False, False),
    ("deepspeed", 3, "cpu", "none", False, False),
    ("deepspeed", 3, "cpu", "cpu", False, False),
    ("fsdp", 3, "none", "none", False, False),
    ("fsdp", 3, "none", "none", True, False),
    ("fsdp", 3, "cpu", "cpu", False, False),
)


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
            "resident": "one process, DDP and DeepSpeed on A100, H100 and V100",
            "offload": "offload on A100, H100, V100 and Titan RTX",
        }[self.engine]
        *most, last = self.left_out
        without = f"{', '.join(most)} or {last}" if most else last
        return (
            f"a factor of {self.spread:g} either way held for {self.inside} of {self.predictions} predictions of "
            f"{self.cases} published times, {what}, without their {without}: {100 * self.median:.0f} % off in the "
            f"median, {100 * abs(self.worst):.0f} % at worst"
        )


EVIDENCE: dict[tuple[EngineKind, Distance], Evidence] = {
    (found.engine, found.distance): found
    for found in (
        Evidence("fsdp", "known", 1.3, 131, LEFT_OUT["known"], 290, 272, 0.046, 0.185, -0.399),
        Evidence("fsdp", "new count", 1.3, 131, LEFT_OUT["new count"], 131, 126, 0.047, 0.201, -0.399),
        Evidence("fsdp", "new generation", 1.55, 131, LEFT_OUT["new generation"], 131, 120, 0.197, 0.423, 0.736),
        Evidence("resident", "known", 1.55, 73, LEFT_OUT["known"], 219, 208, 0.071, 0.291, 0.917),
        Evidence("resident", "new count", 1.55, 73, LEFT_OUT["new count"], 73, 70, 0.074, 0.317, 0.917),
        Evidence("resident", "new generation", 1.55, 73, LEFT_OUT["new generation"], 73, 71, 0.128, 0.263, 0.617),
        Evidence("offload", "known", 2.6, 13, LEFT_OUT["known"], 39, 39, 0.342, 0.588, -0.61),
        Evidence("offload", "new count", 2.6, 13, LEFT_OUT["new count"], 13, 13, 0.34, 0.601, -0.61),
        Evidence("offload", "new generation", 2.6, 14, LEFT_OUT["new generation"], 14, 14, 0.299, 0.579, 0.791),
    )
}


def unlike(engine: Engine, box: Box) -> list[str]:
    """Name the optimizer and the card, where no published time has them."""
    named = ((engine.optimizer, PUBLISHED_OPTIMIZERS), (box.gpu.name, PUBLISHED_GPUS))
    return [name for name, known in named if name not in known]


def is_published(engine: Engine) -> bool:
    """Say whether a published time has an engine of this kind."""
    return kind_of(engine) in PUBLISHED_ENGINES


def kind_of(engine: Engine) -> tuple[str, int, str, str, bool, bool]:
    """Say of which kind an engine is, as PUBLISHED_ENGINES lists them."""
    return (
        engine.kind, engine.zero_stage, engine.offload_optimizer, engine.offload_param, engine.replicas > 1,
        engine.secondary_partition_size > 1,
    )  # fmt: skip


def engine_of(shape: ModelShape, engine: Engine) -> EngineKind:
    """Say which kind of engine a case is, as far as its time is concerned."""
    if (engine.offload_optimizer, engine.offload_param) != ("none", "none"):
        return "offload"
    return "fsdp" if engine.kind == "fsdp" and not shape.experts else "resident"


def distance_of(box: Box) -> Distance:
    """Say how far a box is from those whose throughput was published."""
    if hardware.generation_of(box.gpu) not in GENERATIONS:
        return "new generation"
    return "known" if COUNTS[0] <= box.num_gpus <= COUNTS[1] else "new count"


def evidence(shape: ModelShape, engine: Engine, box: Box) -> Evidence:
    """Find the errors that a prediction of this case rests on."""
    return EVIDENCE[engine_of(shape, engine), distance_of(box)]
