"""Compute the intervals of predicted step times from the published times that they are based on.

tools/derive/planner_accuracy.py predicts every published time with constants that were fitted to other times only. It
writes the errors to measured_by_others/evidence.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from zero_study.theory import measured_by_others
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.hardware import Cluster
from zero_study.theory.shapes import ModelShape

# The classes of trainings whose step times have one interval. launching: the process launches kernels more slowly than
# the GPU computes. one node, several nodes: products in 16 bits and fused attention, on data center GPUs that are newer
# than V100. other arithmetic: the same GPUs with eager attention, or with products in 32 or 8 bits. workstation card:
# one with GDDR memory, such as GeForce, RTX, A10 and L4.
TimingClass = Literal[
    "one node", "several nodes", "other arithmetic", "compiled", "launching", "offload", "one workstation card",
    "several workstation cards", "Volta",
]  # fmt: skip
# The classes of engines whose memory is compared with published memory. resident: DDP, DeepSpeed at stages 0 to 2, one
# process, and mixtures of experts. offload: optimizer states or parameters are on the host or a disk.
MemoryClass = Literal["fsdp", "zero3", "resident", "offload"]
# The results of the cross-validation.
CROSS_VALIDATION: dict[str, Any] = json.loads((measured_by_others.FOLDER / "evidence.json").read_text(encoding="utf-8"))
# The generations of the rows to which constants are fitted.
GENERATIONS: tuple[str, ...] = tuple(CROSS_VALIDATION["generations"])
# The fewest and the most GPUs of all published times on these generations, by engine. Other pairs have no times.
COUNTS_OF: dict[tuple[str, str], tuple[int, int]] = {
    (engine, generation): (fewest, most)
    for engine, counts in CROSS_VALIDATION["gpu_counts"].items()
    for generation, (fewest, most) in counts.items()
}
TIMED = frozenset(CROSS_VALIDATION["timed_generations"])  # the generations of all published times
OPTIMIZERS = frozenset(CROSS_VALIDATION["optimizers"])  # optimizers of all published times
CARDS = frozenset(CROSS_VALIDATION["cards"])
# What too few published times have, so that the predicted time is only a guess, and why it is.
MIXTURE = "a mixture of experts, except from one source"
SHARED_SEQUENCES = "a training in which several GPUs share a sequence"
TCP = "a network without RDMA, except from one source"
SMALL_COMPILED = "such a small step with torch.compile"
MOVED_CHECKPOINTS = "activation checkpoints in host memory"
GUESSES = {
    MIXTURE: "because some programs compute and gather the experts one after another",
    SHARED_SEQUENCES: "because only the number of bytes that the GPUs exchange is known",
    TCP: "because only one source published times of such networks",
    MOVED_CHECKPOINTS: "because nobody published a time with activation checkpoints in host memory",
    SMALL_COMPILED: "because launching the kernels may take longer than computing",
}
# If no published time is from a GPU of this generation, or from such a number of GPUs, the interval is wider by this
# factor. It is assumed, because there are too few generations to learn it from.
FAR = 1.3


@dataclass(frozen=True)
class Evidence:
    """The errors of predicted times of similar trainings, and the interval that follows from them.

    Each time was predicted with constants that were fitted without any time of its source.
    """

    kind: TimingClass
    spread: float  # the interval is from prediction / spread to prediction * spread
    cases: int  # number of published times
    sources: int  # number of those who measured them
    inside: int  # number of times within the interval
    median: float  # median of |predicted / published seconds - 1|
    percentile_90: float
    worst: float  # with its sign; positive if the prediction is too slow
    held: int  # times within the factor that was calculated without their own source
    lacks: tuple[str, ...] = ()  # properties of the case that no published row has
    is_far: bool = False  # whether the interval is wider by `FAR`

    @property
    def is_rough(self) -> bool:
        """Whether the predicted time is only a guess, so that its interval has no upper end."""
        return bool(self.guessed)

    @property
    def guessed(self) -> str | None:
        """The property of the case for which too few times were published. None if there is none."""
        return next((name for name in GUESSES if name in self.lacks), None)

    @property
    def sentence(self) -> str:
        """A text that says on which published times the interval is based, and which times nobody published."""
        return ". ".join(filter(None, [self.basis, missing_times(self.lacks)]))

    @property
    def basis(self) -> str:
        """A text on the published times behind the interval. Unlike `sentence`, it does not list missing times."""
        if self.guessed:
            return f"The time is a rough guess, and a step may take much longer, {GUESSES[self.guessed]}"
        rows = {
            "one node": "in 16 bits with fused attention, on one node with A100 or H100",
            "several nodes": "in 16 bits with fused attention, on several nodes with A100 or H100",
            "other arithmetic": "with eager attention, or with products in 32 or 8 bits, on A100 and H100",
            "compiled": "with torch.compile",
            "launching": "with steps so small that the GPU waits for the launches of kernels",
            "offload": "with offload",
            "one workstation card": "on one card with GDDR memory (GeForce, RTX, A10, L4 and similar ones)",
            "several workstation cards": "on several cards with GDDR memory (GeForce, RTX, A10, L4 and similar ones)",
            "Volta": "on V100",
        }[self.kind]
        wider = ""
        if self.is_far:
            wider = (
                f" Because nobody published a time on such GPUs, or on this number of them, the range is {FAR:g} times "
                "as wide as these times demand."
            )
        return (
            f"A real step should take between {1 / self.spread:.2f} and {self.spread:.3g} times the predicted time. "
            f"This range is based on {self.cases} step times of trainings {rows}, from {self.sources} sources. We "
            "predicted each of them from step times of other sources only. The median error of these test predictions "
            f"is {100 * self.median:.0f} %, and the largest error is {100 * abs(self.worst):.0f} %.{wider} In each "
            "test, we calculated the range again, without the times of that source. "
            f"In {self.held} of {self.cases} tests, the published time was inside this range"
        )


STORED = [field.name for field in fields(Evidence) if field.name not in ("lacks", "is_far")]  # the others are of a case


def missing_times(lacks: Iterable[str]) -> str:
    """Return a sentence that names the times that nobody published. Empty if none is missing."""
    engines: dict[str, list[str]] = {}  # by the number and the generation of GPUs, if a text ends with them
    for text in lacks:
        found = re.search(r" on \d+ \w+ GPUs?$", text)
        engines.setdefault(found[0] if found else "", []).append(text[: found.start()] if found else text)
    texts = [
        f"{', '.join(strategies[:-1])}{' or ' * bool(strategies[1:])}{strategies[-1]}{gpus}"
        for gpus, strategies in engines.items()
    ]
    return f"There is no published time for {' or for '.join(texts)}" if texts else ""


EVIDENCE: dict[TimingClass, Evidence] = {entry["kind"]: Evidence(**entry) for entry in CROSS_VALIDATION["intervals"]}


@dataclass(frozen=True)
class MemoryErrors:
    """The errors of the memory that `advise` prints, compared with one kind of published memory."""

    quantity: Literal["peak_allocated_bytes", "peak_reserved_bytes", "used_bytes"]
    count: int  # number of published values
    sources: int  # number of those who measured them
    median: float  # median of |printed / published - 1|
    percentile_90: float
    worst: float  # with its sign; positive if the printed value is too large
    too_low: int  # number of values that are larger than printed


def memory_errors(shape: ModelShape, engine: Engine) -> list[MemoryErrors]:
    """Return the errors of the memory that `advise` prints for engines of this class, by kind of published memory.

    The list is empty if nobody published a value of this class.
    """
    entries = [entry for entry in CROSS_VALIDATION["memory"] if entry["engine"] == memory_class(shape, engine)]
    names = [field.name for field in fields(MemoryErrors)]
    return [MemoryErrors(**{name: entry[name] for name in names}) for entry in entries]


def memory_class(shape: ModelShape, engine: Engine) -> MemoryClass:
    """Return the class of engines with whose published memory a case is compared."""
    if (engine.offload_optimizer, engine.offload_param) != ("none", "none"):
        return "offload"
    if engine.kind == "fsdp" and not shape.experts:
        return "fsdp"
    return "zero3" if engine.zero_stage == 3 and not shape.experts else "resident"


def timing_class(
    shape: ModelShape, engine: Engine, job: StepConfig, box: Cluster, is_small: bool = False
) -> TimingClass:
    """Return the class whose interval of step times a case has.

    `is_small` says that the process launches kernels more slowly than the GPU computes.
    """
    generation = box.gpu.resembled
    if memory_class(shape, engine) == "offload":
        return "offload"
    if job.compiled:
        return "compiled"
    if is_small:
        return "launching"
    if generation in ("Volta", "Turing"):
        return "Volta"
    if generation in ("GA102", "Ada", "RTX Blackwell"):
        return "one workstation card" if box.num_gpus == 1 else "several workstation cards"
    is_sixteen = engine.precision.removeprefix("pure-").removesuffix("-autocast") in ("bf16", "fp16")
    if not is_sixteen or job.attention == "eager":
        return "other arithmetic"
    return "one node" if box.num_nodes == 1 else "several nodes"


def name_of(shape: ModelShape, engine: Engine) -> str:
    """Return the engine's name in the keys of COUNTS_OF: "offload", or `Engine.name`."""
    return "offload" if memory_class(shape, engine) == "offload" else engine.name


# Engines whose name in the tables needs an explanation in a sentence.
_IN_WORDS = {"ZeRO-0": "DeepSpeed without ZeRO (stage 0)", "one process": "plain training"}


def evidence(shape: ModelShape, engine: Engine, box: Cluster, job: StepConfig, is_small: bool = False) -> Evidence:
    """Return the errors on which the interval of a case is based. `is_small` is as in `timing_class`."""
    rests_on = EVIDENCE[timing_class(shape, engine, job, box, is_small)]
    name, generation = name_of(shape, engine), box.gpu.generation
    fewest, most = COUNTS_OF.get((name, generation), (0, 0))
    is_new_count = generation in GENERATIONS and not fewest <= box.num_gpus <= most
    gpus = f"{box.num_gpus} {generation} GPU{'s' * (box.num_gpus > 1)}"
    properties = {
        MIXTURE: bool(shape.experts),
        TCP: box.num_nodes > 1 and box.network == "tcp",
        f"the optimizer {engine.optimizer}": engine.optimizer not in OPTIMIZERS,
        f"the GPU {box.gpu.name}": box.gpu.name not in CARDS,
        f"{_IN_WORDS.get(name, name)} on {gpus}": is_new_count,
        SHARED_SEQUENCES: job.sequence_ranks > 1,
        SMALL_COMPILED: job.compiled and is_small,
        MOVED_CHECKPOINTS: job.activation_checkpointing == "offload",
    }
    lacks = tuple(text for text, is_lacking in properties.items() if is_lacking)
    is_far = is_new_count or generation not in TIMED
    return replace(rests_on, lacks=lacks, is_far=is_far, spread=rests_on.spread * (FAR if is_far else 1))
