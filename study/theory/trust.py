"""Which published times does a predicted step time rest on, and how wide is its interval?

Found by `zero-study accuracy`, which predicts every published time by what was fitted without it; a test holds these
numbers to what it finds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
# The fewest and the most GPUs of these rows by engine and generation, as a test finds them; what is not here none has.
COUNTS_OF: dict[tuple[str, str], tuple[int, int]] = {
    ("DDP", "Ampere"): (8, 128),
    ("DDP", "Volta"): (8, 16),
    ("FSDP", "Ampere"): (2, 128),
    ("FSDP", "Hopper"): (4, 512),
    ("ZeRO-0", "Volta"): (16, 16),
    ("ZeRO-1", "Ampere"): (8, 1024),
    ("ZeRO-1", "Volta"): (8, 16),
    ("ZeRO-2", "Ampere"): (8, 8),
    ("ZeRO-3", "Ampere"): (4, 8),
    ("offload", "Ampere"): (2, 128),
    ("offload", "Hopper"): (64, 64),
    ("offload", "Volta"): (1, 64),
    ("one process", "Ampere"): (1, 1),
    ("one process", "Hopper"): (1, 1),
    ("one process", "Volta"): (1, 1),
}
MOST_GPUS = max(most for _, most in COUNTS_OF.values())
# Of all published times.
OPTIMIZERS = frozenset({"adafactor", "adamw", "lamb", "sgd"})
# A T4 stands in for the Titan RTX of one row, and is no card of theirs.
CARDS = frozenset({"a100-40gb", "a100-80gb", "h100-sxm", "h200", "v100-16gb", "v100-32gb"})


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
    held: int  # predictions within a factor found without what was left out with them
    tried: int  # those of which there is such a factor
    lacks: tuple[str, ...] = ()  # what of the case no published row has

    @property
    def sentence(self) -> str:
        """Say what the interval rests on, and what it cannot rest on."""
        what = {
            "fsdp": "FSDP on A100 and H100",
            "resident": "one process, DDP and DeepSpeed on A100, H100 and V100",
            "offload": "offload on A100, H100 and V100",
        }[self.engine]
        if self.engine == "offload" and self.distance == "new generation":
            what += ", and on a Titan RTX"
        *most, last = self.left_out
        without = f"{', '.join(most)} or {last}" if most else last
        lacking = f"; no published row has {' or '.join(self.lacks)}" if self.lacks else ""
        return (
            f"a factor of {self.spread:g} either way; factors found without the rows that they judge held for "
            f"{self.held} of {self.tried} predictions of {self.cases} published times, {what}, without their "
            f"{without}: {100 * self.median:.0f} % off in the median, {100 * abs(self.worst):.0f} % at worst{lacking}"
        )


EVIDENCE: dict[tuple[EngineKind, Distance], Evidence] = {
    (found.engine, found.distance): found
    for found in (
        Evidence("fsdp", "known", 1.3, 131, LEFT_OUT["known"], 290, 272, 0.0443, 0.213, -0.408, 268, 290),
        Evidence("fsdp", "new count", 1.3, 131, LEFT_OUT["new count"], 131, 125, 0.0504, 0.225, -0.407, 123, 131),
        Evidence(
            "fsdp", "new generation", 1.55, 131, LEFT_OUT["new generation"], 131, 120, 0.194, 0.421, 0.742, 122, 131
        ),
        Evidence("resident", "known", 1.55, 73, LEFT_OUT["known"], 219, 210, 0.0708, 0.293, 0.913, 208, 219),
        Evidence("resident", "new count", 1.55, 73, LEFT_OUT["new count"], 73, 70, 0.073, 0.313, 0.913, 68, 73),
        Evidence(
            "resident", "new generation", 1.55, 73, LEFT_OUT["new generation"], 73, 71, 0.144, 0.254, 0.617, 70, 73
        ),
        Evidence("offload", "known", 2.35, 13, LEFT_OUT["known"], 39, 39, 0.364, 0.556, -0.572, 30, 39),
        Evidence("offload", "new count", 2.35, 13, LEFT_OUT["new count"], 13, 13, 0.358, 0.564, -0.572, 10, 13),
        Evidence("offload", "new generation", 2.4, 14, LEFT_OUT["new generation"], 14, 14, 0.301, 0.577, 0.792, 13, 14),
    )
}


def engine_of(shape: ModelShape, engine: Engine) -> EngineKind:
    """Say which kind of engine a case is, as far as its time is concerned."""
    if (engine.offload_optimizer, engine.offload_param) != ("none", "none"):
        return "offload"
    return "fsdp" if engine.kind == "fsdp" and not shape.experts else "resident"


def engine_name(engine: Engine) -> str:
    """Name an engine as tables do."""
    return {"fsdp": "FSDP", "ddp": "DDP", "torch": "one process"}.get(engine.kind, f"ZeRO-{engine.zero_stage}")


def name_of(shape: ModelShape, engine: Engine) -> str:
    """Name an engine as COUNTS_OF does."""
    return "offload" if engine_of(shape, engine) == "offload" else engine_name(engine)


def distance_of(shape: ModelShape, engine: Engine, box: Box) -> Distance:
    """Say how far a box is from those whose throughput was published under that engine."""
    generation = hardware.generation_of(box.gpu)
    if generation not in GENERATIONS:
        return "new generation"
    least, most = COUNTS_OF.get((name_of(shape, engine), generation), (0, 0))
    return "known" if least <= box.num_gpus <= most else "new count"


def _lacks(shape: ModelShape, engine: Engine, box: Box) -> tuple[str, ...]:
    """List what of a case no published time has: its optimizer, its card, its engine on so many GPUs of that kind."""
    found = [f"the optimizer {engine.optimizer}"] if engine.optimizer not in OPTIMIZERS else []
    found += [f"the card {box.gpu.name}"] if box.gpu.name not in CARDS else []
    name, generation = name_of(shape, engine), hardware.generation_of(box.gpu)
    if distance_of(shape, engine, box) == "new count":
        found.append(f"{name} on {box.num_gpus} GPUs of {generation}")
    return tuple(found)


def evidence(shape: ModelShape, engine: Engine, box: Box) -> Evidence:
    """Find the errors that a prediction of this case rests on."""
    found = EVIDENCE[engine_of(shape, engine), distance_of(shape, engine, box)]
    return replace(found, lacks=_lacks(shape, engine, box))
