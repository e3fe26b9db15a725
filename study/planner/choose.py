"""Every strategy on a box, and the one to take; the largest model of a box; the fewest GPUs of a model."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from study.dryrun.traced import Traced
from study.errors import Refusal, refusing
from study.planner.asked import CHECKPOINTED, Asked, find_model
from study.strategy import file, in_theory
from study.strategy.file import Strategy
from study.theory import intervals, on_box, peaks, shapes
from study.theory.case import Engine, Job, Numbers
from study.theory.hardware import Box
from study.theory.on_box import Prediction
from study.theory.peaks import Peak
from study.theory.shapes import DEFAULT_LENGTH, ModelShape

# Strategies this close to the fastest are taken for equally fast: then the simplest is recommended.
EQUALLY_FAST = 0.03
# Seconds that a GPU computes for a layer in a micro step: no published time that an interval rests on has less than
# this, but for one with offload, whose host is slower still. Others took 1.1 to 5.4 times what is predicted.
SHORTEST = 4e-3
LARGEST_HIDDEN = 1 << 17
GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Option:
    """One strategy, at its best or as asked."""

    strategy: Strategy
    prediction: Prediction
    largest_micro_batch: int
    is_short: bool  # too short a step for its interval
    traced: Traced | None = None

    @property
    def traced_bytes(self) -> int | None:
        """The peak of its tensors, if it was traced."""
        return None if self.traced is None else self.traced.total

    @property
    def needed_bytes(self) -> Numbers:
        """Of one GPU: the traced peak, or else the predicted one, and what the allocator adds to either."""
        # One margin: published peaks of tensors are no nearer to traces than to predictions (reports/dry_run).
        return on_box.needed_bytes(self.prediction.peak.total if self.traced_bytes is None else self.traced_bytes)

    @property
    def free_bytes(self) -> Numbers:
        return self.prediction.usable_bytes - self.needed_bytes

    @property
    def fits(self) -> bool:
        return self.prediction.lacking is None and bool(self.free_bytes >= 0)

    @property
    def basis(self) -> str:
        return "predicted" if self.traced_bytes is None else "traced"


@dataclass(frozen=True)
class Advice:
    """Every strategy on one box, and the one to take."""

    shape: ModelShape
    asked: Asked
    box: Box
    notes: list[str]
    options: list[Option]
    recommended: Option | None
    reason: str

    @property
    def is_traced(self) -> bool:
        return any(option.traced_bytes for option in self.options)


Trace = Callable[[ModelShape, Asked, Sequence[Option]], list[Option]]  # the same options, those that can be traced so


def advise(model: str, asked: Asked, trace: Trace | None = None) -> Advice:
    """Predict every strategy for a model on a box, each at its fastest split of the batch that fits, or as asked."""
    shape, asked, notes = find_model(model, asked)
    box = asked.box()
    asked.batch()  # what is wrong with it is wrong for every strategy
    _ = asked.chosen_precision
    options, left_out = [], dict[str, list[str]]()
    for chosen in asked.strategies(asked.num_gpus):
        try:
            options.append(_option(shape, box, asked, chosen))
        except Refusal as refusal:
            if asked.strategy is not None:
                raise
            left_out.setdefault(str(refusal), []).append(chosen.name)
    notes += [f"left out: {', '.join(names)}: {why}" for why, names in left_out.items()]
    if not options:
        raise Refusal(notes[-1])
    if trace is not None:
        options = trace(shape, asked, options)
    notes += _short(options)
    recommended, reason = _recommend(options)
    return Advice(shape, asked, box, notes, options, recommended, reason)


def _option(shape: ModelShape, box: Box, asked: Asked, chosen: Strategy) -> Option:
    sequences, micro, accumulation = asked.batch()
    engine = engine_for(shape, asked, chosen, box.num_gpus)
    predictions = []
    asked_for = asked.activation_checkpointing
    with refusing():
        for checkpointed in (False, True) if asked_for is None else (CHECKPOINTED[asked_for],):
            job = asked.job(micro or 1, accumulation or 1)
            job = dataclasses.replace(job, activation_checkpointing=checkpointed)
            if micro is None:
                predictions.append(on_box.best_split(shape, engine, job, box, sequences))
            else:
                predictions.append(on_box.predict(shape, engine, job, box))
        # The fastest that fits; where none does, what misses least.
        best = min(predictions, key=lambda p: (not p.fits, p.step.total if p.fits else -p.free_bytes))
        return option_of(shape, chosen, best)


def option_of(shape: ModelShape, chosen: Strategy, best: Prediction, traced: Traced | None = None) -> Option:
    largest = on_box.largest_micro_batch(shape, best.engine, best.job, best.box)
    computed = best.step.forward + best.step.backward + best.step.recompute
    is_short = bool(computed < SHORTEST * shape.layers * best.job.gradient_accumulation_steps)
    is_short = is_short and intervals.engine_of(shape, best.engine) != "offload"
    return Option(chosen, best, largest, is_short, traced)


def _short(options: Sequence[Option]) -> list[str]:
    """Say which steps are shorter than those that intervals are known of."""
    short = [option for option in options if option.is_short]
    if not short:
        return []
    whose = "all" if len(short) == len(options) else ", ".join(option.strategy.name for option in short)
    said = (
        f"short steps ({whose}), below {1e3 * SHORTEST:g} ms of computing a layer and micro step: launching kernels, "
        "hardly counted, may bound them; published ones took 1.1 to 5.4 times what is predicted, most about 3 to 5: no "
        "upper end"
    )
    lacks = dict.fromkeys(lack for option in short for lack in option.prediction.step.evidence.lacks)
    return [said, *([f"no published row has {' or '.join(lacks)}"] if lacks else [])]


def _recommend(options: Sequence[Option]) -> tuple[Option | None, str]:
    fitting = [option for option in options if option.fits]
    if not fitting:
        nearest = max(options, key=lambda option: option.free_bytes)
        lacking = nearest.prediction.lacking or f"{gib(-nearest.free_bytes)} GiB a GPU"
        return None, f"none fits; {nearest.strategy.name} is nearest, short of {lacking}: take more GPUs"
    fastest = max(fitting, key=_speed)
    near = [option for option in fitting if _speed(option) >= (1 - EQUALLY_FAST) * _speed(fastest)]
    simplest = min(near, key=_complexity)
    by = f", by what was {simplest.basis}" if any(option.traced_bytes for option in options) else ""
    room = f"fits with {gib(simplest.free_bytes)} GiB of a GPU to spare{by}"
    if simplest is fastest:
        return simplest, f"{simplest.strategy.name}: it {room}, and of those that fit it is predicted to be the fastest"
    behind = 100 * (1 - _speed(simplest) / _speed(fastest))
    return simplest, (
        f"{simplest.strategy.name}: it {room}, and is the simplest of those within {100 * EQUALLY_FAST:.0f} % of the "
        f"fastest ({fastest.strategy.name}, {behind:.1f} % ahead)"
    )


def gib(num_bytes: Numbers) -> str:
    return f"{float(num_bytes) / 2**30:.1f}"


def _speed(option: Option | Choice) -> float:
    return float(option.prediction.tokens_per_second_per_gpu)


def _complexity(option: Option) -> tuple:
    """What there is to configure and to go wrong: offload, then sharding, then files with sizes of their own."""
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
    """The largest GPT that each strategy holds on a box; None: not even the smallest."""

    asked: Asked
    shapes: dict[str, ModelShape | None]


@dataclass(frozen=True)
class FewestGpus:
    """The fewest GPUs on which each strategy trains a model, and bytes left of one; None: not on `most` of them."""

    asked: Asked
    shape: ModelShape
    notes: list[str]
    fewest: dict[str, tuple[int, float] | None]
    unsharded: frozenset[str]  # strategies whose every GPU holds all: more of them are no help
    most: int


def gpt(hidden: int, positions: int) -> ModelShape:
    """Make a GPT of this width, with about the layers of GPT-3's models of that width (arXiv:2005.14165, table 2.1)."""
    layers = max(24 if hidden >= 1024 else 12, hidden // 128)
    return shapes.plain(f"GPT {hidden} x {layers}", "gpt2", layers, hidden, hidden // 64, positions, 50257)


def largest_models(asked: Asked) -> LargestModels:
    """Find the largest GPT by strategy, with one sequence a GPU, and checkpointed unless that is refused."""
    length = asked.sequence_length or DEFAULT_LENGTH
    asked = dataclasses.replace(asked, sequence_length=length)
    box, job = asked.box(), _smallest_job(asked, "--model")
    family = [gpt(hidden, max(2048, length)) for hidden in range(256, LARGEST_HIDDEN + 1, 256)]
    largest = {}
    for chosen in asked.strategies(asked.num_gpus):

        def is_too_large(shape: ModelShape, chosen: Strategy = chosen) -> bool:
            return not on_box.fits(_peak(shape, asked, chosen, job, box), box)

        fitting = bisect.bisect_left(family, True, key=is_too_large)
        largest[chosen.name] = family[fitting - 1] if fitting else None
    return LargestModels(asked, largest)


def fewest_gpus(model: str, asked: Asked) -> FewestGpus:
    """Find the fewest GPUs, a power of two, by strategy, with one sequence a GPU and checkpointed unless refused."""
    shape, asked, notes = find_model(model, asked)
    job = _smallest_job(asked, "--gpus")
    counts = [count for count in GPU_COUNTS if asked.could_run(count)]
    if not counts:
        raise Refusal(f"--strategy {asked.strategy}: runs on no power of two up to {GPU_COUNTS[-1]}; add --gpus")
    fewest: dict[str, tuple[int, float] | None] = {}
    for num_gpus in counts:
        for chosen in asked.strategies(num_gpus):
            if fewest.get(chosen.name) is None:
                box = asked.box(num_gpus)
                peak = _peak(shape, asked, chosen, job, box)
                fewest[chosen.name] = (
                    (num_gpus, float(on_box.free_bytes(peak, box))) if on_box.fits(peak, box) else None
                )
    unsharded = frozenset(
        name for name in fewest if not engine_for(shape, asked, file.read_by_name(name), counts[-1]).zero_stage
    )
    return FewestGpus(asked, shape, notes, fewest, unsharded, counts[-1])


def _smallest_job(asked: Asked, missing: str) -> Job:
    """One sequence a GPU; a batch would be ignored, and is refused."""
    for name in ("global_batch_size", "micro_batch_size", "gradient_accumulation_steps"):
        if getattr(asked, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise Refusal(f"{flag} goes with both --model and --gpus; add {missing}, or leave {flag} out")
    return dataclasses.replace(asked, activation_checkpointing=asked.activation_checkpointing or "full").job()


def _peak(shape: ModelShape, asked: Asked, chosen: Strategy, job: Job, box: Box) -> Peak:
    return peaks.peak(shape, engine_for(shape, asked, chosen, box.num_gpus), job)


def engine_for(shape: ModelShape, asked: Asked, chosen: Strategy, num_gpus: int) -> Engine:
    engine = in_theory.advised_engine(chosen, shape.hidden, num_gpus, asked.chosen_precision)
    if asked.strategy is not None and engine.kind == "deepspeed" and asked.optimizer_kernel != "fused":
        raise Refusal(f"--optimizer-kernel {asked.optimizer_kernel}: {chosen.name} has DeepSpeed's own; leave it out")
    return dataclasses.replace(
        engine,
        optimizer=asked.optimizer,
        optimizer_kernel=asked.optimizer_kernel,
        replicas=asked.replicas(chosen, num_gpus),
    )


# ---------------------------------------------------------------- every split of the batch


class Choice(NamedTuple):
    """One way to run a strategy."""

    strategy: str
    prediction: Prediction


def choices(advice: Advice) -> list[Choice]:
    """Predict every strategy at every split of the batch, with and without activation checkpointing, or as asked."""
    shape, asked = advice.shape, advice.asked
    return [Choice(each.strategy.name, one) for each in advice.options for one in splits(shape, asked, each.prediction)]


def splits(shape: ModelShape, asked: Asked, one: Prediction) -> Iterator[Prediction]:
    """Yield the same at every split of the batch, with and without activation checkpointing, or as asked."""
    sequences, micro, _ = asked.batch()
    asked_for = asked.activation_checkpointing
    for checkpointed in (False, True) if asked_for is None else (CHECKPOINTED[asked_for],):
        for size, accumulation in on_box.splits(sequences):
            if micro in (None, size):
                job = dataclasses.replace(one.job, micro_batch_size=size, gradient_accumulation_steps=accumulation)
                job = dataclasses.replace(job, activation_checkpointing=checkpointed)
                yield on_box.predict(shape, one.engine, job, one.box)


def pareto(choices: list[Choice]) -> list[Choice]:
    """Keep those that fit and that no other one that fits beats in both memory and speed; the smallest first."""
    kept: list[Choice] = []
    fitting = [choice for choice in choices if choice.prediction.fits]
    for choice in sorted(fitting, key=lambda one: (one.prediction.peak.total, -_speed(one))):
        if not kept or _speed(choice) > _speed(kept[-1]):
            kept.append(choice)
    return kept
