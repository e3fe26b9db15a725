"""Choose a strategy for a model and GPUs, the largest model for GPUs, or the smallest number of GPUs for a model."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from zero_study import command_line, terminal
from zero_study.dryrun.traced import Traced
from zero_study.errors import Refusal, refusing
from zero_study.planner.request import CHECKPOINTED, Request, find_model
from zero_study.strategy import theory_engine
from zero_study.strategy.file import Strategy
from zero_study.theory import adapters, hardware, peaks, prediction, shapes, step_time
from zero_study.theory.engine import Engine, PrecisionClass, StepConfig
from zero_study.theory.hardware import Cluster
from zero_study.theory.peaks import Peak
from zero_study.theory.prediction import Prediction
from zero_study.theory.shapes import DEFAULT_LENGTH, ModelShape
from zero_study.theory.stacks import PASS_THEIR_OPTIMIZER
from zero_study.verdict import Checked, NotChecked, Verdict

# Strategies count as equally fast if the predicted difference is at most this share. Then the simplest is recommended.
EQUALLY_FAST = 0.03
# PyTorch's allocator usually reserves `prediction.RESERVED` times the peak of the tensors. If this share of a GPU stays
# free, that fits, too.
COMFORTABLY_FREE = 0.2
MUCH_FREE = 0.5
# A larger difference counts as none for an option that leaves more memory free than the fastest one, because the median
# error of the times of published rows that were not used for the fit is about 10 %. The same is true where half of a
# GPU stays free, because speed is then the only reason for a strategy that is less simple.
EQUALLY_FAST_IF_ROOMIER = 0.10
EQUALLY_FAST_IF_MUCH_FREE = 0.15
# The share of a GPU's usable memory that should stay free. The largest error of the predicted peak is 19 % for the
# published peaks of grade A. `ALLOCATOR_SLACK` and this share together cover it.
ENOUGH_FREE = 0.10
# If less than this share stays free, a strategy that leaves more is preferred, unless it takes more than `FAR_SLOWER`
# times as long. The largest configuration that was wrongly predicted to fit was predicted to leave 6 % free.
VERY_LITTLE_FREE = 0.05
FAR_SLOWER = 2.0
# What a node's host needs besides offloaded data and weights that are being loaded. A process that imports PyTorch,
# transformers, accelerate, datasets and DeepSpeed has 0.54 GiB in memory (measured without a GPU). The rest of
# `HOST_BYTES_PER_PROCESS`, for CUDA's libraries and the data loader, and the operating system are assumed.
HOST_BYTES_PER_PROCESS = 2 << 30
HOST_BYTES_OF_SYSTEM = 4 << 30
gib = functools.partial(terminal.gib, digits=1)  # formats bytes for all tables of the planner
LARGEST_HIDDEN = 1 << 17
GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
AUTOCAST_OF_FSDP2: dict[PrecisionClass, PrecisionClass] = {"bf16-autocast": "bf16", "fp16-autocast": "fp16"}


@dataclass(frozen=True)
class StrategyPrediction:
    """A strategy with its predicted memory and step time.

    The prediction is for the requested split of the batch. If none is requested, it is for the split that `best_option`
    chooses among all of them.
    """

    shape: ModelShape
    strategy: Strategy
    prediction: Prediction
    traced: Traced | None = None
    is_measured: bool = False  # whether the time is the user's own measurement
    # The fastest split of the batch that leaves `COMFORTABLY_FREE` of a GPU free. None if there is none.
    roomier: StrategyPrediction | None = None

    @functools.cached_property
    def largest_micro_batch(self) -> int:
        """The largest micro batch that is predicted to fit, in sequences. 0 if not even one sequence fits."""
        return prediction.largest_micro_batch(
            self.shape, self.prediction.engine, self.prediction.job, self.prediction.box
        )

    @property
    def traced_bytes(self) -> int | None:
        """The peak bytes of the tensors on one GPU in a traced step. None if the option was not traced."""
        return None if self.traced is None else self.traced.total

    @property
    def needed_bytes(self) -> float:
        """The bytes that one GPU needs: the peak of its tensors and a margin for the allocator.

        The peak is the traced one if there is a trace, else the predicted one.
        """
        # Traces and predictions have the same margin, because traces are no closer to the published peaks of tensors
        # than predictions are (reports/dry_run).
        if self.traced_bytes is None:
            return self.prediction.needed_bytes
        return prediction.needed_bytes(self.traced_bytes)

    @property
    def free_bytes(self) -> float:
        return self.prediction.usable_bytes - self.needed_bytes

    @property
    def free_share(self) -> float:
        """The share of a GPU's usable memory that stays free. Negative if memory is missing."""
        return float(self.free_bytes) / self.prediction.usable_bytes

    @functools.cached_property
    def loaded_bytes(self) -> float:
        """The bytes of 4-bit weights that each process loads before they are sharded. 0 if it loads none.

        transformers 5.23 loads quantized weights in every process (modeling_utils.py), and accelerate 1.15 does not
        keep them on the meta device (utils/fsdp_utils.py). DeepSpeed 0.19.8 moves them to the GPU before it partitions
        them (runtime/engine.py).
        """
        return _loaded_bytes(self.shape, self.prediction.engine)

    @property
    def loads_on_host(self) -> bool:
        """Whether quantized weights have to be loaded into host memory, because the whole model does not fit a GPU.

        FSDP2 then moves one block after another to the GPU. DeepSpeed cannot do this.
        """
        return self.prediction.engine.kind == "fsdp" and self.loaded_bytes > self.needed_bytes

    @property
    def host_needed_bytes(self) -> float:
        """The bytes of host memory that a node needs, including its processes and the operating system.

        0 if the host neither stores offloaded data nor loads weights that do not fit a GPU.
        """
        box = self.prediction.box
        loaded = self.loaded_bytes * box.gpus_of_node if self.loads_on_host else 0.0
        return host_needed_bytes(max(float(self.prediction.host_bytes_per_node), loaded), box)

    @property
    def host_free_share(self) -> float:
        """The share of a node's host memory that stays free. 1 if the host is not needed, or if its size is unknown."""
        return 1 - self.host_needed_bytes / (self.prediction.box.host_memory_bytes or math.inf)

    @property
    def lacking(self) -> str | None:
        """The resource that a node lacks, other than GPU memory: "host memory" or "disk". None if it has enough."""
        return "host memory" if self.host_free_share < 0 else self.prediction.lacking

    @property
    def fits(self) -> bool:
        return self.lacking is None and bool(self.free_bytes >= 0)

    @property
    def scarcest_share(self) -> float:
        """The share of a GPU's memory that stays free, or that of the host's memory if it is smaller."""
        return min(self.free_share, self.host_free_share)

    @property
    def has_enough_free(self) -> bool:
        """Whether the option fits and leaves at least `ENOUGH_FREE` free of a GPU's memory and of the host's."""
        return self.fits and self.scarcest_share >= ENOUGH_FREE

    @property
    def is_rough(self) -> bool:
        """Whether the predicted step time has no upper limit, because no similar step was published."""
        return not self.is_measured and self.prediction.step.evidence.is_rough

    @property
    def seconds(self) -> float:
        return float(self.prediction.step.total)

    @property
    def tokens_per_second(self) -> float:
        """The tokens per second and GPU, which can be compared between batches of different sizes."""
        return float(self.prediction.tokens_per_second_per_gpu)

    @property
    def total_tokens_per_second(self) -> float:
        """The tokens per second of all GPUs together. For a model that reads images, these are images per second."""
        return self.tokens_per_second * self.prediction.box.num_gpus

    @property
    def fastest_seconds(self) -> float:
        """The lower end of the predicted interval of the step time. If the time was measured, the measured time."""
        return self.seconds if self.is_measured else float(self.prediction.step.low)

    @property
    def slowest_seconds(self) -> float:
        """The upper end of the predicted interval of the step time (infinite if it has none), or the measured time."""
        if self.is_measured:
            return self.seconds
        return math.inf if self.is_rough else float(self.prediction.step.high)

    @property
    def offloads(self) -> bool:
        engine = self.prediction.engine
        return (engine.offload_optimizer, engine.offload_param) != ("none", "none")

    @property
    def missing_bytes(self) -> float:
        """The missing bytes per GPU: GPU memory, and the GPU's share of missing host memory and disk."""
        prediction = self.prediction
        ranks = prediction.box.gpus_of_node
        of_node = (
            (self.host_needed_bytes, prediction.box.host_memory_bytes),
            (prediction.disk_bytes_per_node, prediction.box.disk_bytes),
        )
        missing = [max(0.0, float(needed) - there) / ranks for needed, there in of_node if there is not None]
        return max(0.0, -float(self.free_bytes)) + sum(missing)

    @property
    def basis(self) -> str:
        return "predicted" if self.traced_bytes is None else "traced"


def _loaded_bytes(shape: ModelShape, engine: Engine) -> float:
    """Return `StrategyPrediction.loaded_bytes` of a model under an engine."""
    if shape.adapter is None or not shape.adapter.is_quantized or engine.zero_stage < 3:
        return 0.0
    return adapters.frozen_bytes(shape, engine)


def _is_too_large_to_load(shape: ModelShape, engine: Engine, box: Cluster) -> bool:
    """Return whether unsharded weights do not fit a GPU on which an engine places them before it shards them."""
    usable = hardware.usable_memory_bytes(box.gpu, box.num_gpus)
    return engine.kind == "deepspeed" and _loaded_bytes(shape, engine) > usable


def host_needed_bytes(stored_bytes: float, box: Cluster) -> float:
    """Return the host memory in bytes that a node needs to store `stored_bytes` of offloaded data. 0 if it stores none.

    Python with its libraries, the data loader and the operating system are included.
    """
    if not stored_bytes:
        return 0.0
    return stored_bytes + box.gpus_of_node * HOST_BYTES_PER_PROCESS + HOST_BYTES_OF_SYSTEM


def _verdict(num_predicted: int, fits: bool, left_out: Mapping[str, str] = MappingProxyType({})) -> Verdict:
    """Return the verdict on predictions. It is a finding if no strategy fits."""
    return Verdict.of(
        int(num_predicted > 0 and not fits),
        [Checked(num_predicted, "strategy", "predicted", "strategies")],
        [NotChecked(name, reason) for name, reason in left_out.items()],
    )


# What a remedy changes. "same": the same training, computed in another way. "sequence": the same, but GPUs share each
# sequence.
RemedyKind = Literal["same", "sequence", "optimizer", "precision", "adapters", "batch", "offload", "gpus"]


@dataclass(frozen=True)
class Remedy:
    """A change of the requested training with which a strategy fits, and the prediction for the changed training."""

    kind: RemedyKind
    changes: Mapping[str, Any]  # fields of the request
    option: StrategyPrediction
    request: Request

    @property
    def flags(self) -> str:
        """The options of `advise` that request the change, such as "--loss-kernel chunked"."""
        fields, words = Request.model_fields, []
        for name, value in self.changes.items():
            flag = command_line.flag(name, fields[name])
            words += [flag] if value is True else [f"{flag} {value}"]
        return " ".join(words)


@dataclass(frozen=True)
class Advice:
    """The predictions of all strategies for a model on given GPUs, and the recommended strategy."""

    shape: ModelShape
    request: Request
    box: Cluster
    notes: list[str]
    options: list[StrategyPrediction]
    recommended: StrategyPrediction | None
    left_out: dict[str, str] = field(default_factory=dict)  # reasons by strategy
    # What would make a strategy fit without offload. Empty if one fits and leaves enough memory free.
    remedies: list[Remedy] = field(default_factory=list)
    change: Remedy | None = None  # the remedy that is recommended in place of the request, if there is one
    changed: Advice | None = None  # the advice about the request with this change

    @property
    def to_start(self) -> Advice:
        """The advice for the training with the recommended change, or this advice if no change is recommended."""
        return self.changed or self

    @property
    def verdict(self) -> Verdict:
        """The command's verdict, which states how many strategies were predicted and whether any of them fits."""
        return _verdict(len(self.options), self.recommended is not None, self.left_out)

    @property
    def is_traced(self) -> bool:
        return any(option.traced_bytes for option in self.options)

    @functools.cached_property
    def largest_known(self) -> ModelShape | None:
        """The largest known model of this kind that leaves enough memory free without offload. None if there is none.

        It is smaller than the model of the request. Each GPU has one sequence.
        """
        request, own = self.request, self.shape
        smaller = (
            model
            for model in sorted(shapes.KNOWN.values(), key=lambda model: -model.num_params)
            if model.num_params < own.num_params and (model.head, model.reads_images) == (own.head, own.reads_images)
        )
        return next((model for model in smaller if _could_fit(model, request)), None)

    @property
    def ranked(self) -> list[StrategyPrediction]:
        """All options: the recommended one, those that fit from fastest to slowest, the rest by missing memory."""
        return sorted(
            self.options,
            key=lambda option: (
                option is not self.recommended,
                not option.fits,
                option.seconds if option.fits else option.missing_bytes,
            ),
        )


def options_of(
    shape: ModelShape, box: Cluster, request: Request, has_offload: bool = True
) -> tuple[list[StrategyPrediction], dict[str, str]]:
    """Predict every requested strategy. Return the predictions, and the reasons why other strategies have none.

    Without `has_offload`, strategies that offload are not predicted.

    Raises Refusal if only one strategy is requested and it cannot be predicted.
    """
    options, left_out = list[StrategyPrediction](), dict[str, str]()
    for chosen in request.strategies(request.num_gpus):
        if chosen.offloads and not has_offload:
            continue
        try:
            options.append(_option(shape, box, request, chosen))
        except Refusal as refusal:
            if request.strategy is not None:
                raise
            left_out[chosen.name] = str(refusal)
    return options, left_out | request.left_out(box.num_gpus)


def _option(shape: ModelShape, box: Cluster, request: Request, chosen: Strategy) -> StrategyPrediction:
    engine = engine_for(shape, request, chosen, box.num_gpus)
    with refusing():
        tried = [option_of(shape, chosen, split) for split in splits(shape, request, engine, box)]
    comfortable = [split for split in tried if split.fits and split.scarcest_share >= COMFORTABLY_FREE]
    option = dataclasses.replace(best_option(tried), roomier=min(comfortable, key=_seconds, default=None))
    if _is_too_large_to_load(shape, engine, box):
        reason = (
            "DeepSpeed places all 4-bit weights on each GPU before it partitions them: "
            f"{gib(option.loaded_bytes)} GiB, but only {gib(option.prediction.usable_bytes)} GiB are usable"
        )
        if request.strategy is None:
            raise Refusal(reason)
        raise Refusal(f"--strategy {request.strategy}: {reason}. Use fsdp2, or GPUs with more memory.")
    return option


def best_option(options: Sequence[StrategyPrediction]) -> StrategyPrediction:
    """Return the fastest of the `preferred` options. If no option fits, return the one that lacks the least memory."""
    candidates = preferred(options)
    return min(candidates, key=_seconds) if candidates else min(options, key=lambda option: option.missing_bytes)


def preferred(options: Sequence[StrategyPrediction]) -> list[StrategyPrediction]:
    """Return the options from which the fastest is chosen: those with enough free memory, if possible without offload.

    "Enough" is `ENOUGH_FREE` of a GPU's memory. Options that leave less, or that offload, are returned if all others
    are slower than the upper end of the predicted time of the fastest option that fits. If that one leaves less than
    `VERY_LITTLE_FREE`, the others may also take `FAR_SLOWER` times as long. If host memory is needed, the same limits
    apply to it. The list is empty if no option fits.
    """
    fitting = [option for option in options if option.fits]
    if not fitting:
        return []
    fastest = min(fitting, key=_seconds)
    limit = fastest.slowest_seconds
    if fastest.scarcest_share < VERY_LITTLE_FREE:
        limit = max(limit, FAR_SLOWER * fastest.seconds)
    groups: dict[tuple[int, bool], list[StrategyPrediction]] = {}
    for option in fitting:
        shortage = (option.scarcest_share < ENOUGH_FREE) + (option.scarcest_share < VERY_LITTLE_FREE)
        groups.setdefault((shortage, option.offloads), []).append(option)
    return next(group for _, group in sorted(groups.items()) if min(map(_seconds, group)) <= limit)


def option_of(
    shape: ModelShape, chosen: Strategy, best: Prediction, traced: Traced | None = None
) -> StrategyPrediction:
    """Return a strategy with its prediction for one split of the batch."""
    return StrategyPrediction(shape, chosen, best, traced)


def recommend(options: Sequence[StrategyPrediction]) -> StrategyPrediction | None:
    """Return the option to use. None if no option fits.

    It is the simplest of the `preferred` options that are as fast as the fastest of them. If some of these leave
    `COMFORTABLY_FREE` of a GPU free, it is one of those, or a simpler strategy that is as fast as it and leaves as much
    free with another split of the batch. On one GPU, it is a training without an engine if that fits and leaves more
    than `VERY_LITTLE_FREE`, because there is nothing to shard.
    """
    alone = [option for option in options if option.fits and option.prediction.engine.kind == "torch"]
    alone = [option for option in alone if option.free_share >= VERY_LITTLE_FREE]
    near = equally_fast(alone or preferred(options))
    best = [option for option in near if not any(_is_better(other, option) for other in near)]
    comfortable = [option for option in best if option.free_share >= COMFORTABLY_FREE]
    if not comfortable:
        return min(best, key=complexity, default=None)
    chosen = min(comfortable, key=complexity)
    least, rivals = (1 - EQUALLY_FAST) * _speed(chosen), filter(None, (option.roomier for option in options))
    as_good = [rival for rival in rivals if _speed(rival) >= least and rival.free_share >= chosen.free_share]
    return min([chosen, *as_good], key=complexity)


def _is_better(other: StrategyPrediction, option: StrategyPrediction) -> bool:
    """Return whether an option is faster than a sharded one and leaves more memory free, if little is free."""
    is_faster = _speed(option) < (1 - EQUALLY_FAST) * _speed(other)
    is_small = option.free_share < min(MUCH_FREE, other.free_share)
    return is_small and is_faster and bool(option.prediction.engine.zero_stage)


def equally_fast(options: Sequence[StrategyPrediction]) -> list[StrategyPrediction]:
    """Return the options whose predicted speed cannot be distinguished from that of the fastest one."""
    fastest = max(options, key=_speed, default=None)
    if fastest is None:
        return []
    return [option for option in options if _is_as_fast(option, fastest)]


def _is_as_fast(option: StrategyPrediction, fastest: StrategyPrediction) -> bool:
    """Return whether the difference in speed to the fastest option counts as none.

    Where half of a GPU stays free, both are compared in the same precision. Where a fifth stays free, a difference that
    is mostly due to the precision may be as large.
    """
    speed, reference, tolerance = _speed(option), _speed(fastest), EQUALLY_FAST
    in_same_precision = speed * option.seconds / seconds_in_precision_of(fastest, option)
    if option.free_share >= MUCH_FREE:
        speed = in_same_precision
        tolerance = EQUALLY_FAST_IF_MUCH_FREE
    elif option.free_share >= max(COMFORTABLY_FREE, fastest.free_share):
        tolerance = EQUALLY_FAST_IF_ROOMIER
    elif option.free_share >= COMFORTABLY_FREE and in_same_precision > max(
        speed, (1 - EQUALLY_FAST_IF_ROOMIER) * reference
    ):
        tolerance = EQUALLY_FAST_IF_MUCH_FREE
    return speed >= (1 - tolerance) * reference


def seconds_in_precision_of(reference: StrategyPrediction, option: StrategyPrediction) -> float:
    """Return the seconds per step of an option, as if it trained in the precision of another one if it shards nothing.

    DDP, ZeRO-0 and one process train fp32 parameters under autocast. The other strategies train 16-bit parameters, so
    that they cast less and send half as many bytes of gradients.
    """
    own, precision = option.prediction, reference.prediction.engine.precision
    if own.engine.zero_stage or own.engine.precision == precision:
        return option.seconds
    engine = dataclasses.replace(own.engine, precision=precision)
    return float(step_time.seconds(option.shape, engine, own.job, own.box).total)


def _seconds(option: StrategyPrediction) -> float:
    return option.seconds


def _speed(option: StrategyPrediction) -> float:
    return option.tokens_per_second


def complexity(option: StrategyPrediction) -> tuple:
    """Return a sort key that puts first the strategies that are simplest to configure and least likely to go wrong.

    Offload counts first, then the ZeRO stage, then whether the strategy has a file with buffer sizes.
    """
    engine, chosen = option.prediction.engine, option.strategy
    offloaded = (engine.offload_optimizer, engine.offload_param)
    return (
        [("none", "cpu", "nvme").index(device) for device in offloaded],
        engine.zero_stage,
        (chosen.deepspeed_json or chosen.ddp_json) is not None,
        chosen.name,
    )


# ---------------------------------------------------------------- the other way round


@dataclass(frozen=True)
class LargestModels:
    """The largest GPT that each strategy can train on given GPUs. None if not even the smallest GPT fits."""

    request: Request
    shapes: dict[str, ModelShape | None]

    @property
    def verdict(self) -> Verdict:
        """The command's verdict, which states how many strategies were predicted and whether any model fits."""
        return _verdict(len(self.shapes), any(self.shapes.values()))


@dataclass(frozen=True)
class FewestGpus:
    """For each strategy, the smallest number of GPUs that trains a model, and the free bytes and share of one GPU.

    The value is None if the model does not fit on `most` GPUs.
    """

    request: Request
    shape: ModelShape
    notes: list[str]
    fewest: dict[str, tuple[int, float, float] | None]
    unsharded: frozenset[str]  # strategies that do not shard, so that more GPUs do not help
    most: int

    @property
    def verdict(self) -> Verdict:
        """The command's verdict: how many strategies were predicted, and whether some number of GPUs is enough."""
        return _verdict(len(self.fewest), any(self.fewest.values()))


def gpt(hidden: int, positions: int) -> ModelShape:
    """Return the shape of a GPT with this hidden size.

    The number of layers is about that of GPT-3's models of the same width (arXiv:2005.14165, table 2.1).
    """
    layers = max(24 if hidden >= 1024 else 12, hidden // 128)
    return shapes.decoder_shape(f"GPT {hidden} x {layers}", "gpt2", layers, hidden, hidden // 64, positions, 50257)


def largest_models(request: Request) -> LargestModels:
    """Find the largest GPT that each strategy can train on the requested GPUs.

    Each GPU has one sequence. Full activation checkpointing is assumed unless the request has another setting. Raises
    Refusal if the request has a batch, or if GPUs share sequences.
    """
    if request.sequence_ranks > 1:
        raise Refusal(f"{request.sharing_flag} needs a model. Add --model, or leave the option out.")
    length = request.sequence_length or DEFAULT_LENGTH
    request = request.replace(sequence_length=length)
    box, job = request.box(), _smallest_job(request, "--model")
    sizes = range(256, LARGEST_HIDDEN + 1, 256)
    family = [request.with_adapter(gpt(hidden, max(2048, length))) for hidden in sizes]
    largest = {}
    for chosen in request.strategies(request.num_gpus):

        def is_too_large(shape: ModelShape, chosen: Strategy = chosen) -> bool:
            engine = engine_for(shape, request, chosen, box.num_gpus)
            return not _fits(shape, engine, peaks.peak(shape, engine, job), box)

        fitting = bisect.bisect_left(family, True, key=is_too_large)
        largest[chosen.name] = family[fitting - 1] if fitting else None
    return LargestModels(request, largest)


def fewest_gpus(model: str, request: Request) -> FewestGpus:
    """Find the smallest number of GPUs, among powers of two, on which each strategy can train a model.

    Each GPU has one sequence. Full activation checkpointing is assumed unless the request has another setting. Raises
    Refusal if the request has a batch.
    """
    shape, request, notes = find_model(model, request)
    job = _smallest_job(request, "--gpus")
    counts = [count for count in GPU_COUNTS if request.could_run(count)]
    if not counts:
        raise Refusal(
            f"--strategy {request.strategy}: with these options, this strategy cannot run on 1, 2, 4 ... or "
            f"{GPU_COUNTS[-1]} GPUs. Add --gpus."
        )
    fewest: dict[str, tuple[int, float, float] | None] = {}
    unsharded = set[str]()
    for num_gpus in counts:
        for chosen in request.strategies(num_gpus):
            if fewest.get(chosen.name) is None:
                box, engine = request.box(num_gpus), engine_for(shape, request, chosen, num_gpus)
                peak = peaks.peak(shape, engine, job)
                free = float(prediction.free_bytes(peak, box))
                found = (num_gpus, free, free / hardware.usable_memory_bytes(box.gpu, num_gpus))
                fewest[chosen.name] = found if _fits(shape, engine, peak, box) else None
                if not engine.zero_stage:
                    unsharded.add(chosen.name)
    return FewestGpus(request, shape, notes, fewest, frozenset(unsharded), counts[-1])


def _smallest_job(request: Request, missing: str) -> StepConfig:
    """Return a job with one sequence per GPU, and with activation checkpointing by default.

    Raises Refusal if the request has a batch, because it would have no effect.
    """
    for name in ("global_batch_size", "micro_batch_size", "gradient_accumulation_steps"):
        if getattr(request, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise Refusal(f"{flag} needs both --model and --gpus. Add {missing}, or leave {flag} out.")
    return _job_of_one_sequence(request)


def _job_of_one_sequence(request: Request) -> StepConfig:
    return request.replace(activation_checkpointing=request.activation_checkpointing or "full").job()


def could_leave_free(
    shape: ModelShape, request: Request, num_gpus: int, enough: float = ENOUGH_FREE, has_offload: bool = False
) -> bool:
    """Return whether any strategy leaves this share of a GPU free, with one sequence per GPU.

    If not, larger batches do not leave it free either. The batch of the request does not count. Strategies with offload
    count only with `has_offload`.
    """
    job, box = _job_of_one_sequence(request), request.box(num_gpus)
    least = enough * hardware.usable_memory_bytes(box.gpu, num_gpus)
    engines = (
        engine_for(shape, request, chosen, num_gpus)
        for chosen in request.strategies(num_gpus)
        if has_offload or not chosen.offloads
    )
    return any(prediction.free_bytes(peaks.peak(shape, engine, job), box) >= least for engine in engines)


def _could_fit(model: ModelShape, request: Request) -> bool:
    try:
        shape = request.with_adapter(model)
    except Refusal:  # the adapters of the request do not suit this model
        return False
    is_long_enough = model.positions >= (request.sequence_length or DEFAULT_LENGTH)
    return is_long_enough and could_leave_free(shape, request, request.num_gpus)


def _fits(shape: ModelShape, engine: Engine, peak: Peak, box: Cluster) -> bool:
    """Return whether a training fits the GPU and the node, with the host memory that it needs, and can be loaded."""
    if _is_too_large_to_load(shape, engine, box):
        return False
    needed = host_needed_bytes(peak.host_bytes * box.gpus_of_node, box)
    return prediction.fits(peak, box) and needed <= (box.host_memory_bytes or math.inf)


def engine_for(shape: ModelShape, request: Request, chosen: Strategy, num_gpus: int) -> Engine:
    """Return the engine of a strategy with the settings of the user and the defaults of the training program.

    Raises Refusal if a setting is requested for a strategy that does not have it.
    """
    settings = request.settings
    if chosen.zero_stage is not None and request.stack not in PASS_THEIR_OPTIMIZER:
        if request.optimizer_kernel != "fused" and (request.strategy is not None or request.stack == "deepspeed"):
            raise Refusal(
                f"--optimizer-kernel {request.optimizer_kernel}: {chosen.name} has a fused optimizer with --stack "
                f"{request.stack}. Leave --optimizer-kernel out, or use --stack {' or '.join(PASS_THEIR_OPTIMIZER)}."
            )
        settings = dataclasses.replace(settings, optimizer_kernel="fused")
    precision = request.chosen_precision
    if chosen.distributed_type == "FSDP":  # it trains in one way in 16 bits
        precision = AUTOCAST_OF_FSDP2.get(precision, precision)
    elif chosen.distributed_type in ("NO", "MULTI_GPU") and shape.adapter is None:
        # A model that is loaded in 16 bits trains without fp32 master weights, and any other one under autocast. With
        # adapters, it always trains under autocast, and the adapter's `frozen` is the type of the frozen weights.
        precision = "pure-bf16" if precision == "bf16" and settings.weights == "16-bit" else precision
    engine = theory_engine.advised_engine(chosen, shape.hidden, num_gpus, precision, settings.grad_accum_dtype)
    engine = dataclasses.replace(
        settings.applied(engine), optimizer=request.optimizer, replicas=request.replicas(chosen, num_gpus)
    )
    # DeepSpeed reduces in fp32 with sequence parallelism.
    return dataclasses.replace(engine, reduces_in_fp32=True) if request.uses_ulysses else engine


# ---------------------------------------------------------------- every split of the batch


def splits(shape: ModelShape, request: Request, engine: Engine, box: Cluster) -> Iterator[Prediction]:
    """Yield predictions of one engine at every split of the batch, with and without activation checkpointing.

    If the request sets the micro batch or activation checkpointing, only that setting is predicted.
    """
    sequences, micro, accumulation = request.batch()
    pairs = prediction.splits(sequences) if micro is None else [(micro, accumulation or 1)]
    checkpointing = request.activation_checkpointing
    for checkpointed in (False, True) if checkpointing is None else (CHECKPOINTED[checkpointing],):
        for size, steps in pairs:
            job = dataclasses.replace(request.job(size, steps), activation_checkpointing=checkpointed)
            yield prediction.predict(shape, engine, job, box)
