"""What does theory say of a GPU's memory: what a step needs, whether it fits, and the largest model that does?

What is predicted has an interval: as far as predictions of memory were seen to be off on a CPU.
"""

from __future__ import annotations

import bisect
from functools import lru_cache
from typing import Any

from study.claims.observed import Observed
from study.claims.rules.cases import POSITIONS, Case, GivenModel, around, box_of, engine_of, model_of, peak_of, shape_of
from study.planner.choose import GPU_COUNTS, gpt
from study.theory import hardware, on_box, peaks
from study.theory.case import Job
from study.theory.hardware import Box
from study.theory.peaks import Peak
from study.theory.shapes import ModelShape

GIB = 2**30
MEMORY_ERROR = 0.10  # relative; what compare/peaks.py allows a prediction, and 6 of 7 published ones keep to
_WORST_AND_BEST = (1 + MEMORY_ERROR, 1 - MEMORY_ERROR)
_LEAST = {"micro_batch": 1, "checkpointing": True}  # what takes the least memory
_LEAST_JOB = Job(1, POSITIONS, activation_checkpointing=True, kernels="fused")
WIDEST = 1 << 17  # hidden size of the largest model that is looked for


def peak(**arguments: Any) -> Observed:
    """Bytes that a GPU holds at the highest moment of a step."""
    case = Case.of(arguments)
    total = peak_of(case).total
    return Observed(total, (_in_words(case),), around(total, 1 + MEMORY_ERROR), in_bytes=True)


def case_of_any_batch(arguments: dict[str, Any]) -> Case:
    """Read a case that names no batch."""
    return Case.of({**arguments, **_LEAST})


def peak_of_any_batch(**arguments: Any) -> Observed:
    """`peak` where the batch is unknown: from one sequence a GPU, checkpointed, to all of the GPU's memory."""
    case = case_of_any_batch(arguments)
    total = peak_of(case).total
    low, high = around(total, 1 + MEMORY_ERROR)
    ends = (low, max(high, float(case.box.gpu.memory_bytes)))
    return Observed(total, (_in_words(case),), ends, in_bytes=True, told="from the least batch to the whole card")


def memory_ratio(of: dict[str, Any], to: dict[str, Any]) -> Observed:
    """The peak of one case over that of another."""
    above, below = Case.of(of), Case.of(to)
    value = peak_of(above).total / peak_of(below).total
    return Observed(value, (_in_words(above), _in_words(below)), around(value, 1 + MEMORY_ERROR))


def fits(**arguments: Any) -> Observed:
    """Whether a GPU has room at the highest moment, and the node for what is offloaded."""
    case = Case.of(arguments)
    held = peak_of(case)
    worst, best = (_has_room(held, case.box, factor) for factor in _WORST_AND_BEST)
    usable = hardware.usable_memory_bytes(case.box.gpu, case.gpus)
    needed = on_box.needed_bytes(held)
    evidence = f"{case}: needs {needed / GIB:.1f} GiB of a GPU, which has {usable / GIB:.1f}"
    lacking = on_box.lacking(held, case.box)
    if lacking:
        evidence += f"; the node has too little {lacking}"
    return Observed(_has_room(held, case.box, 1.0), (evidence,), (worst, best))


def largest_model(strategy: str, gpu: str, gpus: int, node: str | None = None) -> Observed:
    """Parameters of the largest GPT that fits, with one sequence of 1,024 tokens a GPU, checkpointed, in 16 bits."""
    value, low, high = (_largest(strategy, gpu, gpus, node, factor) for factor in (1.0, *_WORST_AND_BEST))
    return Observed(value, (f"{strategy}, {gpus} x {gpu}: {value / 1e9:.2f} billion",), (low, high))


def capacity_ratio(of: dict[str, Any], to: dict[str, Any]) -> Observed:
    """The largest model of one strategy and box over that of another."""
    above, below = largest_model(**of), largest_model(**to)
    ends = (above.interval[0] / below.interval[1], above.interval[1] / below.interval[0])
    return Observed(above.value / below.value, (*above.evidence, *below.evidence), ends)


@lru_cache(maxsize=256)
def _largest(strategy: str, gpu: str, gpus: int, node: str | None, factor: float) -> float:
    box = box_of(gpu, gpus, node)
    family = [gpt(hidden, POSITIONS) for hidden in range(256, WIDEST + 1, 64)]
    fitting = bisect.bisect_left(family, True, key=lambda shape: not _holds(shape, strategy, box, factor))
    return float(family[fitting - 1].num_params) if fitting else 0.0


def fewest_gpus(model: str | dict[str, Any], strategy: str, gpu: str) -> Observed:
    """The fewest GPUs, a power of two, that train a model with one sequence of 1,024 tokens each, checkpointed."""
    read = model_of(model)
    value, high, low = (_fewest(read, strategy, gpu, factor) for factor in (1.0, *_WORST_AND_BEST))
    return Observed(value, (f"{shape_of(read).name}, {strategy}, {gpu}: {value:g} GPUs",), (low, high))


@lru_cache(maxsize=256)
def _fewest(model: str | GivenModel, strategy: str, gpu: str, factor: float) -> float:
    shape = shape_of(model)
    for gpus in GPU_COUNTS:
        if _holds(shape, strategy, box_of(gpu, gpus, None), factor):
            return float(gpus)
    raise ValueError(f"{shape.name} under {strategy} fits no number of {gpu} up to {GPU_COUNTS[-1]}")


def _holds(shape: ModelShape, strategy: str, box: Box, factor: float) -> bool:
    """Whether a box holds a model with the least batch, in 16 bits."""
    precision = "bf16" if "bf16" in box.gpu.peak_flops_per_second else "fp16"
    engine = engine_of(strategy, shape.hidden, box.num_gpus, precision)
    return _has_room(peaks.peak(shape, engine, _LEAST_JOB), box, factor)


def _has_room(held: Peak, box: Box, factor: float) -> bool:
    """Whether there is room for a peak that is this factor of the predicted one."""
    needed = factor * on_box.needed_bytes(held)
    return bool(needed <= hardware.usable_memory_bytes(box.gpu, box.num_gpus)) and on_box.lacking(held, box) is None


def _in_words(case: Case) -> str:
    return f"{case}: {peak_of(case).total / GIB:.2f} GiB"
