"""Compute the intervals of predicted step times from the published times that they are based on.

tools/derive/planner_accuracy.py predicts every published time with constants that were fitted to other times only. It
writes the errors to measured_by_others/evidence.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from zero_study.theory import hardware, measured_by_others
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.hardware import Cluster
from zero_study.theory.shapes import ModelShape

# fsdp: PyTorch's FSDP. zero3: DeepSpeed at stage 3. resident: DDP, DeepSpeed at other stages, one process, and mixtures
# of experts. compiled: the same as resident with torch.compile. offload: any engine that stores optimizer states or
# parameters on the host or a disk. usual: the trainings of fsdp, zero3 and resident that most people run: products in
# 16 bits, PyTorch's fused attention, neither compiled nor a mixture of experts.
TimingClass = Literal["fsdp", "zero3", "resident", "compiled", "offload", "usual"]
# How a machine differs from the machines of the published times. known: the same generation, and a number of
# GPUs within the range of the rows. new count: the same generation, but another number of GPUs. new generation: another
# generation.
Distance = Literal["known", "new count", "new generation"]
# The results of the cross-validation.
CROSS_VALIDATION: dict[str, Any] = json.loads((measured_by_others.FOLDER / "evidence.json").read_text(encoding="utf-8"))
# The generations of the rows to which constants are fitted.
GENERATIONS: tuple[str, ...] = tuple(CROSS_VALIDATION["generations"])
# The fewest and the most GPUs of these rows, by engine and generation. Other pairs have no rows.
COUNTS_OF: dict[tuple[str, str], tuple[int, int]] = {
    (engine, generation): (fewest, most)
    for engine, counts in CROSS_VALIDATION["gpu_counts"].items()
    for generation, (fewest, most) in counts.items()
}
OPTIMIZERS = frozenset(CROSS_VALIDATION["optimizers"])  # optimizers of all published times
CARDS = frozenset(CROSS_VALIDATION["cards"])
# What no published time has. The time of such a model is a guess, because transformers may compute the experts one
# after another, and stage 3 may gather them one by one.
MIXTURE = "a mixture of experts"
SHARED_SEQUENCES = "a training in which several GPUs share a sequence"
ADAPTERS = "a training of adapters on frozen weights"  # the constants are fitted to trainings of all weights


@dataclass(frozen=True)
class Evidence:
    """The cross-validation errors for similar engines and machines, and the interval that follows from them."""

    engine: TimingClass
    distance: Distance
    spread: float  # the interval is from prediction / spread to prediction * spread
    cases: int  # number of published times
    sources: int  # number of those who measured them
    left_out: tuple[str, ...]  # what the fits left out, one at a time
    predictions: int
    inside: int  # number of predictions within the interval
    median: float  # median of |predicted / published seconds - 1|
    percentile_90: float
    worst: float  # with its sign; positive if the prediction is too slow
    held: int  # predictions within the factor that was calculated without their own group
    tried: int  # predictions for which there is such a factor
    lacks: tuple[str, ...] = ()  # properties of the case that no published row has

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Evidence:
        """Return the evidence from its entry in the file of the cross-validation."""
        names = [field.name for field in fields(cls) if field.name != "lacks"]  # it depends on the case
        return cls(**{name: entry[name] for name in names} | {"left_out": tuple(entry["left_out"])})

    @property
    def is_rough(self) -> bool:
        """Whether the predicted time is only a guess, so that its interval has no upper end."""
        return bool(self.guessed)

    @property
    def guessed(self) -> str | None:
        """The property of the case for which nobody published a time. None if there is none."""
        return next((name for name in (MIXTURE, SHARED_SEQUENCES) if name in self.lacks), None)

    @property
    def sentence(self) -> str:
        """A text that says on which published times the interval is based, and which times nobody published."""
        return ". ".join(filter(None, [self.basis, missing_times(self.lacks)]))

    @property
    def basis(self) -> str:
        """A text on the published times behind the interval. Unlike `sentence`, it does not list missing times."""
        if self.guessed == SHARED_SEQUENCES:
            return (
                "The time is a rough guess, and a step may take much longer. Only the number of bytes that the GPUs "
                "exchange is known"
            )
        if self.is_rough:
            return (
                "The time is a rough guess, and a step may take much longer, because some programs compute and gather "
                "the experts one after another"
            )
        rows = {
            "fsdp": "FSDP on A100 and H100",
            "zero3": "ZeRO-3 on A100 and V100",
            "resident": "one process, DDP, ZeRO-1 and ZeRO-2 on A100, H100 and V100",
            "compiled": "compiled steps of any engine on A100, H100, H200 and V100",
            "offload": "offload on A100, H100 and V100",
            "usual": "trainings in 16 bits with fused attention and without offload, on A100 and H100",
        }[self.engine]
        if self.distance == "new generation":
            rows += {
                "resident": ", and on RTX 3090, RTX 4090, RTX A6000 and A40",
                "compiled": ", and on an RTX 4090",
                "offload": ", and on a Titan RTX",
                "usual": ", and on RTX 3090, RTX 4090, RTX A6000 and A40",
            }.get(self.engine, "")
        others = [f"from step times {_OTHERS[name]}" for name in self.left_out]
        used = f"only {others[0]}"
        if len(others) > 1:
            used = f"separately {', '.join(others[:-1])}, and {others[-1]}"
        return (
            f"A real step should take between {1 / self.spread:.2f} and {self.spread:g} times the predicted time. This "
            f"range is based on {self.cases} step times that {self.sources} sources published ({rows}). To test the "
            f"range, we predicted each published step time {used}. The median error of these test predictions is "
            f"{100 * self.median:.0f} %, and the largest error is {100 * abs(self.worst):.0f} %. In each test, we "
            "calculated the range again, without the tested time and without similar times. "
            f"In {self.held} of {self.tried} tests, the published time was inside this range"
        )


# The times that a fit uses: those that do not share this property with the predicted one.
_OTHERS = {
    "family": "of other sources", "model size": "of models of other sizes", "card": "on other kinds of GPUs",
    "GPU count": "on other numbers of GPUs", "generation": "on other generations of GPUs",
}  # fmt: skip


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


EVIDENCE: dict[tuple[TimingClass, Distance], Evidence] = {
    (entry["engine"], entry["distance"]): Evidence.of(entry) for entry in CROSS_VALIDATION["intervals"]
}


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
    entries = [entry for entry in CROSS_VALIDATION["memory"] if entry["engine"] == timing_class(shape, engine)]
    names = [field.name for field in fields(MemoryErrors)]
    return [MemoryErrors(**{name: entry[name] for name in names}) for entry in entries]


def timing_class(shape: ModelShape, engine: Engine, job: StepConfig | None = None) -> TimingClass:
    """Return the class of engines and jobs whose interval of step times applies to a case.

    Without a job, it depends on the engine only.
    """
    kind = _class_of_engine(shape, engine)
    if job is not None and _is_usual(shape, engine, job):
        return "usual"
    # torch.compile makes a step of one process or DDP faster by a factor that depends on the model's width and on the
    # release of PyTorch. The rows that are not compiled say nothing of it.
    return "compiled" if kind == "resident" and job is not None and job.compiled else kind


def _is_usual(shape: ModelShape, engine: Engine, job: StepConfig) -> bool:
    """Return whether a case is of the class "usual"."""
    is_offloaded = (engine.offload_optimizer, engine.offload_param) != ("none", "none")
    is_sixteen = engine.precision.removeprefix("pure-").removesuffix("-autocast") in ("bf16", "fp16")
    return is_sixteen and job.attention == "sdpa" and not (is_offloaded or job.compiled or shape.experts)


def _class_of_engine(shape: ModelShape, engine: Engine) -> TimingClass:
    if (engine.offload_optimizer, engine.offload_param) != ("none", "none"):
        return "offload"
    if shape.experts:
        return "resident"
    if engine.kind == "fsdp":
        return "fsdp"
    return "zero3" if engine.zero_stage == 3 else "resident"


def name_of(shape: ModelShape, engine: Engine) -> str:
    """Return the engine's name in the keys of COUNTS_OF: "offload", or `Engine.name`."""
    return "offload" if timing_class(shape, engine) == "offload" else engine.name


def distance_of(shape: ModelShape, engine: Engine, box: Cluster) -> Distance:
    """Return how a machine differs from the machines that have published times with this engine."""
    generation = hardware.generation_of(box.gpu)
    if generation not in GENERATIONS:
        return "new generation"
    least, most = COUNTS_OF.get((name_of(shape, engine), generation), (0, 0))
    return "known" if least <= box.num_gpus <= most else "new count"


# Engines whose name in the tables needs an explanation in a sentence.
_IN_WORDS = {"ZeRO-0": "DeepSpeed without ZeRO (stage 0)", "one process": "plain training"}


def _lacks(shape: ModelShape, engine: Engine, box: Cluster) -> tuple[str, ...]:
    """Return the properties of a case for which nobody published a time.

    These are a mixture of experts, the optimizer, the GPU, and the engine on this number of GPUs of this generation.
    """
    lacking = [MIXTURE] if shape.experts else []
    lacking += [ADAPTERS] if shape.adapter is not None else []
    lacking += [f"the optimizer {engine.optimizer}"] if engine.optimizer not in OPTIMIZERS else []
    lacking += [f"the GPU {box.gpu.name}"] if box.gpu.name not in CARDS else []
    name, generation = name_of(shape, engine), hardware.generation_of(box.gpu)
    if distance_of(shape, engine, box) == "new count":
        noun = "GPU" if box.num_gpus == 1 else "GPUs"
        lacking.append(f"{_IN_WORDS.get(name, name)} on {box.num_gpus} {generation} {noun}")
    return tuple(lacking)


def evidence(shape: ModelShape, engine: Engine, box: Cluster, job: StepConfig | None = None) -> Evidence:
    """Return the cross-validation errors on which the interval of a case is based.

    Without a job, the case is assumed to run without torch.compile.
    """
    kind = timing_class(shape, engine, job)
    if kind == "usual" and not hardware.has_flash_attention(box.gpu):
        kind = timing_class(shape, engine)
    rests_on = EVIDENCE[kind, distance_of(shape, engine, box)]
    shares = job is not None and job.sequence_ranks > 1
    return replace(rests_on, lacks=(*_lacks(shape, engine, box), *([SHARED_SEQUENCES] if shares else [])))
