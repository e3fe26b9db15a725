"""What do the models of study/theory say of a claim? The functions that the ledger may name, with their arguments.

A case is a model, a strategy's file, GPUs and a batch, in the precision class in which that strategy trains. Gradients
accumulate in the parameters' type, as DeepSpeed does unless it is told otherwise. What is predicted has an interval:
memory as far as it was seen to be off on a CPU, time by the spread of its model.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from study.claims.observed import Observed
from study.strategy import engines, file
from study.theory import communication, hardware, model_states, on_box, peaks, shapes, step_time
from study.theory.case import Engine, Job
from study.theory.hardware import Box
from study.theory.on_box import Prediction
from study.theory.shapes import ModelShape

GIB = 2**30
MEMORY_ERROR = 0.10  # relative; what compare/peaks.py allows a prediction, and 6 of 7 published ones keep to
_WORST_AND_BEST = (1 + MEMORY_ERROR, 1 - MEMORY_ERROR)
POSITIONS, VOCABULARY = 1024, 50257  # of a model that is given by its shape
# DGX-2, as theory/published/numbers.yaml has it: 16 V100, 1.5 TB of memory, eight drives of 3.84 TB, of which the
# papers count 28 TB; two sockets of 24 cores and six channels of DDR4-2666.
DGX_2 = {
    "gpus_per_node": 16,
    "host_memory_bytes": 1_500_000_000_000,
    "host_memory_bandwidth": 256e9,
    "host_cores": 48,
    "disk_bytes": 28_000_000_000_000,
    "disk_read_bandwidth": 8 * 3.2e9,
    "disk_write_bandwidth": 8 * 2.0e9,
}
_LEAST = {"micro_batch": 1, "checkpointing": True}  # what takes the least memory
WIDEST = 1 << 17  # hidden size of the largest model that is looked for
MOST_GPUS = 1024


# ---------------------------------------------------------------- the papers' counts


def paper_bytes_per_parameter(zero_stage: int, world_size: int, precision: str) -> Observed:
    """Bytes of model states that a rank holds per parameter."""
    parts = model_states.paper_bytes_per_parameter(zero_stage, world_size, precision)
    return Observed(parts.total, (_parts_in_words(parts),))


def paper_total_bytes(num_params: float, zero_stage: int, world_size: int, precision: str) -> Observed:
    """Bytes of model states that a rank holds."""
    parts = model_states.paper_bytes_per_parameter(zero_stage, world_size, precision)
    return Observed(num_params * parts.total, (f"{num_params:g} x ({_parts_in_words(parts)})",), in_bytes=True)


def paper_reduction(zero_stage: int, world_size: int, precision: str) -> Observed:
    """Bytes at stage 0 over those at this stage."""
    return paper_ratio(
        {"zero_stage": 0, "world_size": world_size, "precision": precision},
        {"zero_stage": zero_stage, "world_size": world_size, "precision": precision},
    )


def paper_peak_reduction(zero_stage: int, world_size: int, precision: str) -> Observed:
    """A peak at stage 0 over that at this stage: between none, where activations are all, and that of the states."""
    found = paper_reduction(zero_stage, world_size, precision)
    return Observed(found.value, found.evidence, (1.0, found.value), told="from activations alone to states alone")


def paper_ratio(of: dict[str, Any], to: dict[str, Any]) -> Observed:
    """Bytes per parameter of one case over another's."""
    one, other = paper_bytes_per_parameter(**of), paper_bytes_per_parameter(**to)
    return Observed(one.value / other.value, (f"({one.evidence[0]}) / ({other.evidence[0]})",))


def paper_saving_share(zero_stage: int, of_stage: int, world_size: int, precision: str) -> Observed:
    """What one stage saves against stage 0, over what another saves."""
    whole, mine, theirs = (
        model_states.paper_bytes_per_parameter(stage, world_size, precision).total
        for stage in (0, zero_stage, of_stage)
    )
    told = f"({whole:g} - {mine:g}) / ({whole:g} - {theirs:g})"
    return Observed((whole - mine) / (whole - theirs), (told,))


def paper_offload_reduction(world_size: int, precision: str) -> Observed:
    """Bytes on the device at stage 2 over those with the optimizer offloaded."""
    whole, offloaded = (
        model_states.paper_bytes_by_place(Engine("deepspeed", 2, world_size, precision, 2, offload), 1).device
        for offload in ("none", "cpu")
    )
    return Observed(whole / offloaded, (f"{whole:g} / {offloaded:g} bytes per parameter",))


def paper_volume(zero_stage: int, accumulation: int) -> Observed:
    """Parameters that a rank moves in a step, over the model's."""
    value = communication.paper_volume(zero_stage, 1, accumulation)
    return Observed(float(value), (f"stage {zero_stage}, {_micro_steps(accumulation)}: {value:g}",))


def paper_volume_ratio(of: dict[str, Any], to: dict[str, Any]) -> Observed:
    """Parameters moved in one case over those moved in another."""
    one, other = paper_volume(**of), paper_volume(**to)
    return Observed(one.value / other.value, (*one.evidence, *other.evidence))


def num_params(model: str | dict[str, Any]) -> Observed:
    """Parameters of a model."""
    shape = _shape(model)
    return Observed(float(shape.num_params), (f"{shape.name}: {shape.num_params:,} counted",))


def link_bandwidth(gpu: str, directions: str) -> Observed:
    """GB/s of a GPU's links to the others of its node; directions: one or both."""
    found = hardware.find_gpu(gpu)
    if directions not in ("one", "both"):
        raise ValueError(f"directions {directions!r}: must be 'one' or 'both'")
    value = found.link_bandwidth * (2 if directions == "both" else 1) / 1e9
    return Observed(value, (f"{found.name}, {found.link}: {found.source}",))


def _parts_in_words(parts: model_states.Parts) -> str:
    return f"{parts.parameters:.6g} + {parts.gradients:.6g} + {parts.optimizer_states:.6g}"


def _micro_steps(count: int) -> str:
    return f"{count} micro step{'' if count == 1 else 's'}"


# ---------------------------------------------------------------- a case


@dataclass(frozen=True)
class _Case:
    """What a function of the engine's models is asked; named as in the ledger."""

    model: str | dict[str, Any]
    strategy: str
    gpu: str
    gpus: int
    micro_batch: int
    sequence_length: int
    precision: str
    checkpointing: bool
    accumulation: int = 1
    kernels: str = "fused"  # transformers: its own modules, which hold and move more
    node: str | None = None  # dgx-2, or whole: fewer GPUs have all of a rented node's host; None: their share of it

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> _Case:
        try:
            return cls(**arguments)
        except TypeError as error:
            raise ValueError(f"arguments: {str(error).removeprefix('_Case.__init__() ')}") from None

    @property
    def shape(self) -> ModelShape:
        shape = _shape(self.model)
        return dataclasses.replace(shape, positions=max(shape.positions, self.sequence_length))

    @property
    def engine(self) -> Engine:
        return _engine(self.strategy, self.shape.hidden, self.gpus, self.precision)

    @property
    def job(self) -> Job:
        if self.kernels not in ("fused", "transformers"):
            raise ValueError(f"kernels {self.kernels!r}: must be 'fused' or 'transformers'")
        return Job(self.micro_batch, self.sequence_length, self.accumulation, self.checkpointing, kernels=self.kernels)

    @property
    def box(self) -> Box:
        return _box(self.gpu, self.gpus, self.node)

    @property
    def is_offloaded(self) -> bool:
        return (self.engine.offload_optimizer, self.engine.offload_param) != ("none", "none")

    @property
    def name(self) -> str:
        batch = f"{self.micro_batch} x {self.sequence_length}" + (
            f" x {self.accumulation}" if self.accumulation > 1 else ""
        )
        checkpointed = ", checkpointed" if self.checkpointing else ""
        return (
            f"{self.shape.name}, {self.strategy}, {self.gpus} x {self.gpu}, {batch} tokens, {self.engine.precision}"
            f"{checkpointed}"
        )


def _shape(model: str | dict[str, Any]) -> ModelShape:
    if isinstance(model, str):
        if "/" in model or model not in shapes.KNOWN:
            raise ValueError(f"model {model!r}: is none that theory knows; name one of them or give its shape")
        return shapes.find(model)
    try:
        return shapes.plain(**model, positions=POSITIONS, vocabulary=VOCABULARY)
    except TypeError as error:
        raise ValueError(f"model: {error}; give name, architecture, layers, hidden and heads") from None


def _engine(name: str, hidden: int, world_size: int, precision: str) -> Engine:
    chosen = file.read_by_name(name)
    return engines.engine_of(chosen, hidden, world_size, engines.precision_class(chosen, precision), "bf16")


def _box(gpu: str, gpus: int, node: str | None) -> Box:
    found = hardware.find_gpu(gpu)
    box = hardware.typical_box(found, gpus)
    match node:
        case None:
            return box
        case "whole":
            return dataclasses.replace(hardware.typical_box(found, box.gpus_per_node), num_gpus=gpus)
        case "dgx-2":
            return Box(found, gpus, **DGX_2)
    raise ValueError(f"node {node!r}: must be 'dgx-2' or 'whole'")


@lru_cache(maxsize=4096)
def _peak(case: str) -> peaks.Peak:
    asked = _Case.of(json.loads(case))
    return peaks.peak(asked.shape, asked.engine, asked.job)


@lru_cache(maxsize=4096)
def _predicted(case: str) -> Prediction:
    asked = _Case.of(json.loads(case))
    return on_box.predict(asked.shape, asked.engine, asked.job, asked.box)


def _key(arguments: Mapping[str, Any]) -> str:
    _Case.of(arguments)
    return json.dumps(arguments, sort_keys=True)


# ---------------------------------------------------------------- memory


def peak(**arguments: Any) -> Observed:
    """Bytes that a GPU holds at the highest moment of a step."""
    found = _peak(_key(arguments))
    return Observed(found.total, (_peak_in_words(arguments),), _around(found.total, 1 + MEMORY_ERROR), in_bytes=True)


def peak_of_any_batch(**arguments: Any) -> Observed:
    """`peak` where the batch is unknown: from one sequence a GPU, checkpointed, to all of the GPU's memory."""
    least = {**arguments, **_LEAST}
    found = peak(**least)
    low, high = found.interval
    ends = (low, max(high, float(_Case.of(least).box.gpu.memory_bytes)))
    return Observed(found.value, found.evidence, ends, in_bytes=True, told="from the least batch to the whole card")


def memory_ratio(of: dict[str, Any], to: dict[str, Any]) -> Observed:
    """The peak of one case over that of another."""
    value = _peak(_key(of)).total / _peak(_key(to)).total
    return Observed(value, (_peak_in_words(of), _peak_in_words(to)), _around(value, 1 + MEMORY_ERROR))


def fits(**arguments: Any) -> Observed:
    """Whether a GPU has room at the highest moment, and the node for what is offloaded."""
    found, case = _peak(_key(arguments)), _Case.of(arguments)
    worst, best = (_has_room(found, case.box, factor) for factor in _WORST_AND_BEST)
    usable = hardware.usable_memory_bytes(case.box.gpu, case.gpus)
    needed = on_box.needed_bytes(found)
    evidence = f"{case.name}: needs {needed / GIB:.1f} GiB of a GPU, which has {usable / GIB:.1f}"
    lacking = on_box.lacking(found, case.box)
    if lacking:
        evidence += f"; the node has too little {lacking}"
    return Observed(_has_room(found, case.box, 1.0), (evidence,), (worst, best))


def _has_room(found: peaks.Peak, box: Box, factor: float) -> bool:
    needed = factor * on_box.needed_bytes(found)
    return bool(needed <= hardware.usable_memory_bytes(box.gpu, box.num_gpus)) and on_box.lacking(found, box) is None


def largest_model(strategy: str, gpu: str, gpus: int, node: str | None = None) -> Observed:
    """Parameters of the largest GPT that fits, with one sequence of 1,024 tokens a GPU, checkpointed, in 16 bits."""
    value, low, high = (_largest(strategy, gpu, gpus, node, factor) for factor in (1.0, *_WORST_AND_BEST))
    return Observed(value, (f"{strategy}, {gpus} x {gpu}: {value / 1e9:.2f} billion",), (low, high))


def capacity_ratio(of: dict[str, Any], to: dict[str, Any]) -> Observed:
    """The largest model of one strategy and box over that of another."""
    one, other = largest_model(**of), largest_model(**to)
    ends = (one.interval[0] / other.interval[1], one.interval[1] / other.interval[0])
    return Observed(one.value / other.value, (*one.evidence, *other.evidence), ends)


@lru_cache(maxsize=256)
def _largest(name: str, gpu: str, gpus: int, node: str | None, factor: float) -> float:
    from study.planner.choose import gpt

    box = _box(gpu, gpus, node)
    precision = "bf16" if "bf16" in box.gpu.peak_flops_per_second else "fp16"
    job = Job(1, POSITIONS, activation_checkpointing=True, kernels="fused")
    family = [gpt(hidden, POSITIONS) for hidden in range(256, WIDEST + 1, 64)]

    def is_too_large(shape: ModelShape) -> bool:
        found = peaks.peak(shape, _engine(name, shape.hidden, gpus, precision), job)
        return not _has_room(found, box, factor)

    fitting = bisect.bisect_left(family, True, key=is_too_large)
    return float(family[fitting - 1].num_params) if fitting else 0.0


def fewest_gpus(model: str | dict[str, Any], strategy: str, gpu: str) -> Observed:
    """The fewest GPUs, a power of two, that train a model with one sequence of 1,024 tokens each, checkpointed."""
    value, high, low = (_fewest(json.dumps(model), strategy, gpu, factor) for factor in (1.0, *_WORST_AND_BEST))
    return Observed(value, (f"{_shape(model).name}, {strategy}, {gpu}: {value:g} GPUs",), (low, high))


@lru_cache(maxsize=256)
def _fewest(model: str, name: str, gpu: str, factor: float) -> float:
    shape = _shape(json.loads(model))
    job = Job(1, POSITIONS, activation_checkpointing=True, kernels="fused")
    gpus = 1
    while gpus <= MOST_GPUS:
        box = _box(gpu, gpus, None)
        precision = "bf16" if "bf16" in box.gpu.peak_flops_per_second else "fp16"
        if _has_room(peaks.peak(shape, _engine(name, shape.hidden, gpus, precision), job), box, factor):
            return float(gpus)
        gpus *= 2
    raise ValueError(f"{shape.name} under {name} fits no number of {gpu} up to {MOST_GPUS}")


def _peak_in_words(arguments: Mapping[str, Any]) -> str:
    return f"{_Case.of(arguments).name}: {_peak(_key(arguments)).total / GIB:.2f} GiB"


# ---------------------------------------------------------------- communication and time


def engine_volume(
    strategy: str, model: str | dict[str, Any], world_size: int, accumulation: int, checkpointing: bool
) -> Observed:
    """Parameters that a rank of today's DeepSpeed moves in a step, over the model's, in bf16."""
    shape = _shape(model)
    engine = _engine(strategy, shape.hidden, world_size, "bf16")
    found = communication.collectives(engine, shape, Job(1, POSITIONS, accumulation, checkpointing, kernels="fused"))
    value = sum(one.moved_bytes for one in found) / (engine.parameter_bytes * shape.num_params)
    kinds = ", ".join(f"{one.count:g} {one.kind}" for one in found)
    return Observed(value, (f"{shape.name}, {strategy}, {world_size} ranks: {kinds}",))


def tokens_per_second_per_gpu(**arguments: Any) -> Observed:
    """Tokens that a GPU trains on in a second."""
    found = _predicted(_key(arguments))
    value = float(found.tokens_per_second_per_gpu)
    return Observed(value, (_speed_in_words(arguments),), _around(value, found.step.spread))


def speed_ratio(of: dict[str, Any], to: dict[str, Any]) -> Observed:
    """Tokens per second and GPU of one case over those of another."""
    one, other = (float(_predicted(_key(case)).tokens_per_second_per_gpu) for case in (of, to))
    value = one / other
    return Observed(value, (_speed_in_words(of), _speed_in_words(to)), _around(value, _ratio_spread(of, to)))


def least_speed_ratio(of: dict[str, Any], to: dict[str, Any], along: str, values: list[float]) -> Observed:
    """The smallest `speed_ratio` over some values of an argument, set on both sides."""
    found = [speed_ratio({**of, along: value}, {**to, along: value}) for value in values]
    return min(found, key=lambda one: one.value)


def speed_ratio_change(of: dict[str, Any], to: dict[str, Any], along: str, start: Any, end: Any) -> Observed:
    """How much `speed_ratio` rises from one value of an argument, set on both sides, to another."""
    return _change(speed_ratio, of, to, along, start, end, _ratio_spread(of, to))


def speed_ratio_growth(of: dict[str, Any], to: dict[str, Any], along: str, start: Any, end: Any) -> Observed:
    """`speed_ratio` at one value of an argument, set on both sides, over that at another."""
    first, last = (speed_ratio({**of, along: value}, {**to, along: value}) for value in (start, end))
    value = last.value / first.value
    return Observed(value, (*last.evidence, *first.evidence), _around(value, _ratio_spread(of, to)))


def published_tflops(case: str) -> Observed:
    """Predicted TFLOP/s of a GPU, recomputation counted, of a case of theory/published/numbers.yaml."""
    from study.theory import flops, measured_by_others

    found = next(
        (one for one in measured_by_others.cases() if one.name == case and one.quantity == "tflops_per_gpu"), None
    )
    if found is None:
        raise ValueError(f"case {case!r}: is none in TFLOP/s of theory/published/numbers.yaml")
    job = found.job
    each = flops.hardware_flops_per_sequence(found.shape, job.sequence_length, job.activation_checkpointing)
    time = step_time.seconds(found.shape, found.engine, job, found.box)
    value = float(job.micro_batch_size * job.gradient_accumulation_steps * each / time.total / 1e12)
    return Observed(value, (f"{found.name}: {float(time.total):.4g} s per step",), _around(value, time.spread))


def _ratio_spread(of: Mapping[str, Any], to: Mapping[str, Any]) -> float:
    """How far a ratio of two predicted times may be off.

    What both have in common cancels: where nothing but sharding, batch or length differs it is taken to be as uncertain
    as a single time of what the constants were fitted to. Offload, other GPUs, models or types, autocast against 16-bit
    parameters among them: as a time of all else.
    """
    sides = [_Case.of(of), _Case.of(to)]
    alike = len({(json.dumps(one.model), one.gpu, one.gpus, one.kernels, one.engine.precision) for one in sides}) == 1
    offloaded = any(one.is_offloaded for one in sides)
    return step_time.FITTED_SPREAD if alike and not offloaded else step_time.OTHER_SPREAD


def _speed_in_words(arguments: Mapping[str, Any]) -> str:
    speed = float(_predicted(_key(arguments)).tokens_per_second_per_gpu)
    return f"{_Case.of(arguments).name}: {speed:,.0f} tokens/s per GPU"


def _around(value: float, factor: float) -> tuple[float, float]:
    return value / factor, value * factor


def _change(
    ratio: Callable[..., Observed], of: Mapping[str, Any], to: Mapping[str, Any], along: str, start: Any, end: Any,
    factor: float,
) -> Observed:  # fmt: skip
    first, last = (ratio({**of, along: value}, {**to, along: value}) for value in (start, end))
    low, high = _around(last.value / first.value, factor)
    told = tuple(f"{along} {at}: {found.value:.4g}" for at, found in ((start, first), (end, last)))
    return Observed(last.value - first.value, told, (first.value * (low - 1), first.value * (high - 1)))


# ---------------------------------------------------------------- advice over the planner's grid


def tree_share(tree: str) -> Observed:
    """In which share of the planner's cases that it answers a tree's advice fits and keeps up with the fastest.

    Its interval is from where the advice is the fastest itself to where it is no further behind than times may be off.
    """
    judged = _grid().judged
    if tree not in judged:
        raise ValueError(f"tree {tree!r} is unknown; take one of {', '.join(judged)}")
    return _agreeing(tree, [one.outcome for one in judged[tree]])


def strategy_share(strategy: str) -> Observed:
    """In which share of the planner's cases one strategy, always advised, does what `tree_share` asks of a tree."""
    from study.theory.decision_trees import Recommendation, compare

    cases = [case for case in _grid().cases if any(fits for fits, _ in case.results.values())]
    if not any(strategy in case.results for case in cases):
        raise ValueError(f"strategy {strategy!r}: is not in the planner's grid")
    found = [compare(Recommendation(strategy, "", None), case.results) for case in cases if strategy in case.results]
    return _agreeing(strategy, found)


def trees_agree(first: str, second: str, purpose: str) -> Observed:
    """Whether two published trees give one answer in every case of the planner's grid of this purpose."""
    from study.theory.decision_trees import TREES

    for name in (first, second):
        if name not in TREES:
            raise ValueError(f"tree {name!r} is unknown; take one of {', '.join(TREES)}")
    questions = [one for case in _grid().cases for one in case.questions() if one.purpose == purpose]
    if not questions:
        raise ValueError(f"purpose {purpose!r}: is none of the grid's; take production or research")
    equal = sum(TREES[first](one).strategy == TREES[second](one).strategy for one in questions)
    return Observed(equal == len(questions), (f"{equal:,} of {len(questions):,} cases have one answer",))


def _agreeing(name: str, outcomes: Iterable[Any]) -> Observed:
    from study.theory.decision_trees import KEEPS_UP

    outcomes = list(outcomes)
    kinds = Counter(one.kind for one in outcomes)
    answered = kinds.total() - kinds["no answer"]
    counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    behind = [one.left_behind for one in outcomes if one.left_behind is not None]
    ends = (sum(one <= most for one in behind) / answered for most in (0, 1 - KEEPS_UP / step_time.FITTED_SPREAD))
    told = "only where it is the fastest, to where predicted times cannot tell"
    return Observed(kinds["agrees"] / answered, (f"{name}, {kinds.total():,} cases: {counts}",), tuple(ends), told=told)


@lru_cache(maxsize=1)
def _grid() -> Any:
    from study.planner import trees  # pandas and matplotlib come with it

    return trees.evaluate()


# Functions whose arguments are a case, and those that hold one case against another.
_OF_A_CASE = ("peak", "fits", "tokens_per_second_per_gpu")
_OF_TWO = (
    "memory_ratio", "speed_ratio", "least_speed_ratio", "speed_ratio_change", "speed_ratio_growth",
)  # fmt: skip


def check_cases(function: str, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError where an argument of a case is missing or unknown."""
    if function in _OF_A_CASE:
        _Case.of(arguments)
    elif function == "peak_of_any_batch":
        _Case.of({**arguments, **_LEAST})
    elif function in _OF_TWO:
        for side in ("of", "to"):
            _Case.of(arguments[side])


FUNCTIONS: dict[str, Callable[..., Observed]] = {
    function.__name__: function
    for function in (
        paper_bytes_per_parameter, paper_total_bytes, paper_reduction, paper_peak_reduction, paper_ratio,
        paper_saving_share, paper_offload_reduction, paper_volume, paper_volume_ratio, num_params, link_bandwidth,
        peak, peak_of_any_batch, memory_ratio, fits, largest_model, capacity_ratio, fewest_gpus, engine_volume,
        tokens_per_second_per_gpu, speed_ratio, least_speed_ratio, speed_ratio_change,
        speed_ratio_growth, published_tflops, tree_share, strategy_share, trees_agree,
    )
}  # fmt: skip
