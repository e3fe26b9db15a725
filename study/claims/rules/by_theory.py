"""Decide claims by formulas of papers and by this project's predictions in zero_study/theory.

FUNCTIONS has the functions that the ledger may name. Their arguments describe a case: a model, a strategy's file, GPUs
and a batch, in the precision class in which that strategy trains. Gradients accumulate in 16 bits, as DeepSpeed does by
default. Predictions have intervals. For memory, the interval covers the errors that were measured on a CPU. For time,
it is the spread of the model of step times.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from study.claims.rules import Observed, around
from zero_study.errors import refusing
from zero_study.planner.choose import gpt
from zero_study.strategy import file, theory_engine
from zero_study.terminal import GIB
from zero_study.theory import adapters, communication, hardware, model_states, peaks, prediction, shapes
from zero_study.theory.engine import Engine, PrecisionClass, StepConfig
from zero_study.theory.hardware import Cluster
from zero_study.theory.intervals import EVIDENCE
from zero_study.theory.peaks import Peak
from zero_study.theory.prediction import Prediction
from zero_study.theory.shapes import ModelShape

POSITIONS, VOCABULARY = 1024, 50257  # of a model that the ledger describes by its sizes
MEMORY_ERROR = 0.10  # relative, as memory_views.MAX_ERROR; 6 of 7 published peaks are within it
_WORST_AND_BEST = (1 + MEMORY_ERROR, 1 - MEMORY_ERROR)
_LEAST = {"micro_batch": 1, "checkpointing": True}  # the settings that need the least memory
_LEAST_JOB = StepConfig(1, POSITIONS, activation_checkpointing=True, kernels="fused")
WIDEST = 1 << 17  # the largest hidden size that `largest_model` tries

# ---------------------------------------------------------------- cases

Count = Annotated[int, Field(ge=1)]


class _Typed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class GivenModel(_Typed):
    """A model that the ledger describes by its sizes, because zero_study/theory does not know it by name."""

    name: str
    architecture: Literal["bert", "gpt2", "gpt-neo", "gpt-j"]
    layers: Count
    hidden: Count
    heads: Count


class Case(_Typed):
    """The training for which memory and time are predicted, described with the names that the ledger uses."""

    model: str | GivenModel
    strategy: str
    gpu: str
    gpus: Count
    micro_batch: Count
    sequence_length: Count
    precision: PrecisionClass
    checkpointing: bool
    accumulation: Count = 1
    kernels: Literal["fused", "transformers"] = "fused"  # the modules of transformers need more memory and time
    node: Literal["dgx-2", "whole"] | None = None  # whole: few GPUs have a whole rented node; None: a share of it
    lora_rank: Count | None = None  # None: all weights are trained
    lora_target: str | None = None  # as in the planner: names with commas, all-linear, or None for PEFT's default
    load_in_4bit: bool = False  # whether the frozen weights are in NF4

    @classmethod
    def of(cls, arguments: Mapping[str, Any], subject: str = "arguments") -> Case:
        """Return the training that the arguments of a rule in the ledger describe.

        Raises ValueError with the key if a key is missing, unknown or of another type.
        """
        if not isinstance(arguments, Mapping):
            raise ValueError(f"{subject}: {arguments!r} is not a case. Write {', '.join(cls.model_fields)}.")
        if "model" in arguments:
            arguments = {**arguments, "model": model_of(arguments["model"], f"{subject}.model")}
        with refusing(subject):
            return cls.model_validate(arguments)

    @property
    def shape(self) -> ModelShape:
        shape = shape_of(self.model)
        if shape.positions < self.sequence_length:
            shape = shapes.replace_parts(shape, positions=self.sequence_length)
        adapter = adapters.from_options(
            self.lora_rank, self.lora_target, load_in_4bit=self.load_in_4bit, head=shape.head
        )
        return adapters.with_adapter(shape, adapter)

    @property
    def engine(self) -> Engine:
        return engine_in_16_bits(self.strategy, self.shape.hidden, self.gpus, self.precision)

    @property
    def job(self) -> StepConfig:
        return StepConfig(
            self.micro_batch, self.sequence_length, self.accumulation, self.checkpointing, kernels=self.kernels
        )

    @property
    def box(self) -> Cluster:
        return box_of(self.gpu, self.gpus, self.node)

    @property
    def is_offloaded(self) -> bool:
        return (self.engine.offload_optimizer, self.engine.offload_param) != ("none", "none")

    def __str__(self) -> str:
        accumulated = f" x {self.accumulation}" if self.accumulation > 1 else ""
        batch = f"{self.micro_batch} x {self.sequence_length}{accumulated} tokens"
        checkpointed = ", checkpointed" if self.checkpointing else ""
        gpus = f"{self.gpus} x {self.gpu}"
        adapted = f", LoRA of rank {self.lora_rank}" if self.lora_rank else ""
        quantized = " on weights in 4 bits" if self.load_in_4bit else ""
        settings = f"{self.engine.precision}{checkpointed}{adapted}{quantized}"
        return f"{self.shape.name}, {self.strategy}, {gpus}, {batch}, {settings}"


@lru_cache(maxsize=4096)
def peak_of(case: Case) -> Peak:
    """Return the predicted peak memory of a training, for the rank that uses the most."""
    return peaks.peak(case.shape, case.engine, case.job)


@lru_cache(maxsize=4096)
def prediction_of(case: Case) -> Prediction:
    """Return the predicted memory and time of a training."""
    return prediction.predict(case.shape, case.engine, case.job, case.box)


def model_of(model: str | Mapping[str, Any], subject: str = "model") -> str | GivenModel:
    """Return a model from its entry in the ledger, which is a name or a dict of sizes.

    Raises ValueError with the key if a key is missing, unknown or of another type.
    """
    if not isinstance(model, Mapping):
        return model
    with refusing(subject):
        return GivenModel.model_validate(model)


def shape_of(model: str | GivenModel) -> ModelShape:
    """Return the shape of a model. Raises ValueError for a name that zero_study/theory does not know."""
    if isinstance(model, GivenModel):
        return shapes.decoder_shape(**model.model_dump(), positions=POSITIONS, vocabulary=VOCABULARY)
    if model not in shapes.KNOWN:
        raise ValueError(
            f"model {model!r}: the theory does not know this model. Name a known model, or write its shape."
        )
    return shapes.find(model)


def engine_in_16_bits(strategy: str, hidden: int, world_size: int, precision: PrecisionClass) -> Engine:
    """Return a strategy's engine as an input of the predictions, with gradients in 16 bits."""
    chosen = file.read_by_name(strategy)
    return theory_engine.engine_of_strategy(
        chosen, hidden, world_size, theory_engine.precision_class(chosen, precision), "bf16"
    )


def box_of(gpu: str, gpus: int, node: str | None) -> Cluster:
    """Return the cluster with the GPUs and nodes that a rule of the ledger names.

    Raises ValueError for an unknown GPU or node, and if the GPUs do not fill the nodes.
    """
    card = hardware.find_gpu(gpu)
    box = hardware.rented_box(card, gpus)
    match node:
        case None:
            return box
        case "whole":
            return dataclasses.replace(hardware.typical_box(card, box.gpus_per_node), num_gpus=gpus)
        case "dgx-2":
            # As in theory/measured_by_others/published.yaml: 16 V100, 1.5 TB of memory, and eight drives of 3.84 TB, of
            # which
            # the papers count 28 TB. Two sockets, each with 24 cores and six channels of DDR4-2666.
            return Cluster(
                card,
                gpus,
                gpus_per_node=16,
                host_memory_bytes=1_500_000_000_000,
                host_memory_bandwidth=256e9,
                host_cores=48,
                disk_bytes=28_000_000_000_000,
                disk_read_bandwidth=8 * 3.2e9,
                disk_write_bandwidth=8 * 2.0e9,
            )
    raise ValueError(f"node {node!r}: must be 'dgx-2' or 'whole'")


# ---------------------------------------------------------------- the papers' formulas, and counts


def paper_bytes_per_parameter(zero_stage: int, world_size: int, precision: str) -> Observed:
    """Return the bytes of model states per parameter on one rank, as the ZeRO paper's formulas give them."""
    parts = model_states.paper_bytes_per_parameter(zero_stage, world_size, precision)
    return Observed(parts.total, (f"{parts.parameters:.6g} + {parts.gradients:.6g} + {parts.optimizer_states:.6g}",))


def paper_total_bytes(num_params: float, zero_stage: int, world_size: int, precision: str) -> Observed:
    """Return the bytes of model states on one rank, as the ZeRO paper's formulas give them."""
    per_parameter = paper_bytes_per_parameter(zero_stage, world_size, precision)
    evidence = f"{num_params:g} x ({per_parameter.evidence[0]})"
    return Observed(num_params * per_parameter.number, (evidence,), in_bytes=True)


def paper_reduction(zero_stage: int, world_size: int, precision: str) -> Observed:
    """Return the bytes of model states at stage 0 divided by those at `zero_stage`."""
    above, below = (paper_bytes_per_parameter(stage, world_size, precision) for stage in (0, zero_stage))
    return Observed(above.number / below.number, (f"({above.evidence[0]}) / ({below.evidence[0]})",))


def paper_peak_reduction(zero_stage: int, world_size: int, precision: str) -> Observed:
    """Return the peak memory at stage 0 divided by that at `zero_stage`, as an interval.

    The lower end of the interval, 1, is the ratio if there are only activations. The upper end is the ratio if there
    are only model states.
    """
    states = paper_reduction(zero_stage, world_size, precision)
    ends = (1.0, states.number)
    return Observed(
        states.value, states.evidence, ends, told="from a peak with only activations to a peak with only model states"
    )


def paper_saving_share(zero_stage: int, of_stage: int, world_size: int, precision: str) -> Observed:
    """Return the bytes that `zero_stage` saves compared with stage 0, divided by the bytes that `of_stage` saves."""
    whole, mine, theirs = (
        paper_bytes_per_parameter(stage, world_size, precision).number for stage in (0, zero_stage, of_stage)
    )
    formula = f"({whole:g} - {mine:g}) / ({whole:g} - {theirs:g})"
    return Observed((whole - mine) / (whole - theirs), (formula,))


def paper_offload_reduction(world_size: int, precision: PrecisionClass) -> Observed:
    """Return the GPU's bytes of model states at ZeRO stage 2, divided by those if the optimizer is offloaded."""
    plain, offloaded = (Engine("deepspeed", 2, world_size, precision, 2, device) for device in ("none", "cpu"))
    above, below = (model_states.paper_bytes_by_place(engine, 1).device for engine in (plain, offloaded))
    return Observed(above / below, (f"{above:g} / {below:g} bytes per parameter",))


def paper_volume(zero_stage: int, accumulation: int) -> Observed:
    """Return the number of elements that a rank sends in a step, per parameter of the model, by the ZeRO paper."""
    value = communication.paper_volume(zero_stage, 1, accumulation)
    micro_steps = f"{accumulation} micro step{'' if accumulation == 1 else 's'}"
    return Observed(float(value), (f"stage {zero_stage}, {micro_steps}: {value:g}",))


def paper_volume_ratio(of: dict[str, Any], to: dict[str, Any]) -> Observed:
    """Return how many elements a training sends per step, divided by those of another one, by the ZeRO paper."""
    above, below = paper_volume(**of), paper_volume(**to)
    return Observed(above.number / below.number, (*above.evidence, *below.evidence))


def num_params(model: str | dict[str, Any]) -> Observed:
    """Return the number of parameters of a model."""
    shape = shape_of(model_of(model))
    return Observed(float(shape.num_params), (f"{shape.name}: {shape.num_params:,} counted",))


def link_bandwidth(gpu: str, directions: str) -> Observed:
    """Return the bandwidth of a GPU's links to the other GPUs of its node in GB/s. `directions` is "one" or "both"."""
    card = hardware.find_gpu(gpu)
    if directions not in ("one", "both"):
        raise ValueError(f"directions {directions!r}: must be 'one' or 'both'")
    value = card.link_bandwidth * (2 if directions == "both" else 1) / 1e9
    return Observed(value, (f"{card.name}, {card.link}: {card.source}",))


# ---------------------------------------------------------------- memory: a peak, what fits, the largest model


def peak(**arguments: Any) -> Observed:
    """Return the predicted peak memory of a GPU in a step, in bytes."""
    case = Case.of(arguments)
    total = float(peak_of(case).total)
    return Observed(total, (_peak_in_words(case),), around(total, 1 + MEMORY_ERROR), in_bytes=True)


def peak_of_any_batch(**arguments: Any) -> Observed:
    """Return the range of a GPU's peak memory, in bytes, for a training whose batch size is not known.

    The range is from one checkpointed sequence per GPU to the whole memory of the GPU. If already this sequence needs
    more than the GPU has, the range is that of its prediction.
    """
    least = peak(**arguments, **_LEAST)
    card = float(Case.of({**arguments, **_LEAST}).box.gpu.memory_bytes)
    ends = (least.ends[0], max(least.ends[1], card))
    range_of_batches = "low: the smallest batch, high: the memory of the GPU"
    told = "at the smallest batch" if least.ends[1] > card else range_of_batches
    return Observed(least.value, least.evidence, ends, in_bytes=True, told=told)


def memory_ratio(of: dict[str, Any], to: dict[str, Any]) -> Observed:
    """Return the predicted peak memory of the training `of` divided by that of the training `to`."""
    above, below = Case.of(of), Case.of(to)
    value = float(peak_of(above).total / peak_of(below).total)
    return Observed(value, (_peak_in_words(above), _peak_in_words(below)), around(value, 1 + MEMORY_ERROR))


def fits(**arguments: Any) -> Observed:
    """Return whether a training is predicted to fit into the memory of the GPUs and, with offload, of the nodes."""
    case = Case.of(arguments)
    predicted_peak = peak_of(case)
    expected, worst, best = (_has_room(predicted_peak, case.box, factor) for factor in (1.0, *_WORST_AND_BEST))
    usable = hardware.usable_memory_bytes(case.box.gpu, case.gpus)
    needed = prediction.needed_for(predicted_peak)
    evidence = f"{case}: needs {needed / GIB:.1f} GiB of a GPU, which has {usable / GIB:.1f}"
    if lacking := prediction.lacking(predicted_peak, case.box):
        evidence += f"; the node has too little {lacking}"
    return Observed(expected, (evidence,), (worst, best))


def largest_model(strategy: str, gpu: str, gpus: int, node: str | None = None) -> Observed:
    """Return the number of parameters of the largest GPT that fits on the GPUs with a strategy.

    It trains one sequence of 1,024 tokens per GPU, in 16 bits and with activation checkpointing.
    """
    value, low, high = (_largest(strategy, gpu, gpus, node, factor) for factor in (1.0, *_WORST_AND_BEST))
    return Observed(value, (f"{strategy}, {gpus} x {gpu}: {value / 1e9:.2f} billion",), (low, high))


def capacity_ratio(of: dict[str, Any], to: dict[str, Any]) -> Observed:
    """Return the size of the largest model of one strategy and machine divided by that of another."""
    above, below = largest_model(**of), largest_model(**to)
    ends = (above.ends[0] / below.ends[1], above.ends[1] / below.ends[0])
    return Observed(above.number / below.number, (*above.evidence, *below.evidence), ends)


@lru_cache(maxsize=256)
def _largest(strategy: str, gpu: str, gpus: int, node: str | None, factor: float) -> float:
    box = box_of(gpu, gpus, node)
    family = [gpt(hidden, POSITIONS) for hidden in range(256, WIDEST + 1, 64)]
    fitting = bisect.bisect_left(family, True, key=lambda shape: not _holds(shape, strategy, box, factor))
    return float(family[fitting - 1].num_params) if fitting else 0.0


def _holds(shape: ModelShape, strategy: str, box: Cluster, factor: float) -> bool:
    """Return whether a model fits on a machine with one checkpointed sequence per GPU, in 16 bits.

    `factor` is the assumed peak divided by the predicted one.
    """
    precision: PrecisionClass = "bf16" if "bf16" in box.gpu.peak_flops_per_second else "fp16"
    engine = engine_in_16_bits(strategy, shape.hidden, box.num_gpus, precision)
    return _has_room(peaks.peak(shape, engine, _LEAST_JOB), box, factor)


def _has_room(predicted_peak: Peak, box: Cluster, factor: float) -> bool:
    """Return whether there is enough memory if the peak is `factor` times the predicted one."""
    needed = factor * prediction.needed_for(predicted_peak)
    fits_gpu = bool(needed <= hardware.usable_memory_bytes(box.gpu, box.num_gpus))
    return fits_gpu and prediction.lacking(predicted_peak, box) is None


def _peak_in_words(case: Case) -> str:
    return f"{case}: {peak_of(case).total / GIB:.2f} GiB"


# ---------------------------------------------------------------- what is sent, and speed


def engine_volume(
    strategy: str, model: str | dict[str, Any], world_size: int, accumulation: int, checkpointing: bool
) -> Observed:
    """Return how many elements a rank sends in a step of current DeepSpeed in bf16, per parameter of the model.

    The step is simulated.
    """
    shape = shape_of(model_of(model))
    engine = engine_in_16_bits(strategy, shape.hidden, world_size, "bf16")
    job = StepConfig(1, POSITIONS, accumulation, checkpointing, kernels="fused")
    collectives = communication.collectives(engine, shape, job)
    value = sum(collective.moved_bytes for collective in collectives) / (engine.parameter_bytes * shape.num_params)
    kinds = ", ".join(f"{collective.count:g} {collective.kind}" for collective in collectives)
    return Observed(float(value), (f"{shape.name}, {strategy}, {world_size} ranks: {kinds}",))


def speed_ratio(of: dict[str, Any], to: dict[str, Any]) -> Observed:
    """Return the predicted tokens per second and GPU of the training `of` divided by those of the training `to`."""
    above, below = Case.of(of), Case.of(to)
    value = _speed(above) / _speed(below)
    evidence = (_speed_in_words(above), _speed_in_words(below))
    return Observed(value, evidence, around(value, _ratio_spread(above, below)))


def speed_ratio_change(of: dict[str, Any], to: dict[str, Any], along: str, start: Any, end: Any) -> Observed:
    """Return by how much the ratio of two trainings' speeds increases if one argument changes in both trainings.

    `along` is the name of the argument, which changes from `start` to `end`.
    """
    first, last = (speed_ratio({**of, along: value}, {**to, along: value}) for value in (start, end))
    low, high = around(last.number / first.number, _ratio_spread(Case.of(of), Case.of(to)))
    evidence = tuple(f"{along} {value}: {ratio.value:.4g}" for value, ratio in ((start, first), (end, last)))
    ends = (first.number * (low - 1), first.number * (high - 1))
    return Observed(last.number - first.number, evidence, ends)


def _ratio_spread(above: Case, below: Case) -> float:
    """Return the factor by which a ratio of two predicted times may be wrong.

    Errors that both times share cancel. If only sharding, batch or sequence length differ, the ratio is assumed to be
    as uncertain as a single time of the class to which the constants were fitted. In all other cases, the errors of the
    two times are assumed to be independent. These are offload and different GPUs, models, kernels or precisions, which
    include autocast compared with 16-bit parameters.
    """
    sides = (above, below)
    alike = len({(case.model, case.gpu, case.gpus, case.kernels, case.engine.precision) for case in sides}) == 1
    if alike and not any(case.is_offloaded for case in sides):
        return EVIDENCE["one node"].spread
    return math.exp(math.hypot(*(math.log(prediction_of(case).step.evidence.spread) for case in sides)))


def _speed(case: Case) -> float:
    return float(prediction_of(case).tokens_per_second_per_gpu)


def _speed_in_words(case: Case) -> str:
    return f"{case}: {_speed(case):,.0f} tokens/s per GPU"


# ---------------------------------------------------------------- what the ledger may name

FUNCTIONS: dict[str, Callable[..., Observed]] = {
    function.__name__: function
    for function in (
        paper_bytes_per_parameter, paper_total_bytes, paper_reduction, paper_peak_reduction, paper_saving_share,
        paper_offload_reduction, paper_volume, paper_volume_ratio, num_params, link_bandwidth,
        peak, peak_of_any_batch, memory_ratio, fits, largest_model, capacity_ratio, engine_volume,
        speed_ratio, speed_ratio_change,
    )
}  # fmt: skip


def check_cases(function: str, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if an argument of a function in FUNCTIONS is missing, unknown or of another type."""
    if function in ("peak", "fits"):
        Case.of(arguments)
    elif function == "peak_of_any_batch":
        Case.of({**arguments, **_LEAST})
    elif function in ("memory_ratio", "speed_ratio", "speed_ratio_change"):
        for side in ("of", "to"):
            Case.of(arguments[side], f"arguments.{side}")
