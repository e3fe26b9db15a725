"""Find the smallest changes of a training that make it fit into the memory of the GPUs.

A change is only named if a prediction says that it works. The changes are tried in the order in which one would try
them by hand: first those that compute the same training, then another optimizer, adapters, and other machines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zero_study.errors import Refusal
from zero_study.planner import choose
from zero_study.planner.choose import (
    COMFORTABLY_FREE,
    ENOUGH_FREE,
    EQUALLY_FAST,
    VERY_LITTLE_FREE,
    Advice,
    Remedy,
    RemedyKind,
    StrategyPrediction,
)
from zero_study.planner.request import Request
from zero_study.theory import adapters, computation
from zero_study.theory.peaks import PeakPart
from zero_study.theory.shapes import ModelShape

Cause = Literal["weights and optimizer states", "activations", "logits and loss", "gathered layers", "host memory"]
CAUSES: dict[PeakPart, Cause] = {
    "parameters": "weights and optimizer states",
    "gradients": "weights and optimizer states",
    "optimizer_states": "weights and optimizer states",
    "communication_buffers": "weights and optimizer states",
    "gathered_parameters": "gathered layers",
    "activations": "activations",
    "temporary_buffers": "activations",
    "logits": "logits and loss",
}
LORA_RANK = 16
MOST_REMEDIES = 5
LEANER = 0.1  # of a GPU's memory that a change has to free
COMFORTABLE = 0.15  # free share from which memory is no reason to change a training that fits
SLOWED_DOWN = 1.2  # if the recommended strategy takes this many times as long as the fastest, memory decided
Changes = dict[str, Any]  # new values of fields of a request
CanStart = Callable[[Remedy], bool]


def cause(option: StrategyPrediction) -> tuple[Cause, float]:
    """Return what takes most of the memory of an option that does not fit, and its bytes per GPU or per node."""
    prediction = option.prediction
    if option.free_bytes >= 0 and option.lacking is not None:
        return "host memory", option.host_needed_bytes
    sums: dict[Cause, float] = {}
    for part, num_bytes in prediction.peak.parts.items():
        sums[CAUSES[part]] = sums.get(CAUSES[part], 0.0) + float(num_bytes)
    largest = max(sums, key=lambda name: sums[name])
    return largest, sums[largest]


def is_caused_by_tokens(advice: Advice) -> bool:
    """Return whether the memory of the best strategy is taken by what grows with the tokens of a sequence."""
    return cause(advice.ranked[0])[0] in ("activations", "logits and loss")


# ---------------------------------------------------------------- the changes: None where one has no effect


def _chunked_loss(request: Request, shape: ModelShape) -> Changes | None:
    """Compute the loss in chunks, so that all logits never exist at once. Only for models that predict each token."""
    predicts_tokens = computation.num_logits(shape, request.job()) >= shape.vocabulary
    return {"loss_kernel": "chunked"} if request.job().loss != "chunked" and predicts_tokens else None


def _checkpointing(request: Request, _: ModelShape) -> Changes | None:
    """Recompute activations. If the request does not set it, it was tried already."""
    kept = ("none", "selective", "selective-op")
    return {"activation_checkpointing": "full"} if request.activation_checkpointing in kept else None


def _small_micro_batch(request: Request, _: ModelShape) -> Changes | None:
    """Compute the same global batch in more micro steps. If the request sets no micro batch, it was tried already."""
    micro = request.batch()[1]
    return {"micro_batch_size": 1} if micro is not None and micro > 1 else None


def _synchronized_micro_steps(request: Request, _: ModelShape) -> Changes | None:
    """Reduce FSDP2's gradients in every micro step, so that no GPU keeps unsharded gradients between micro steps."""
    return None if request.sync_each_batch else {"sync_each_batch": True}


def _8_bit_optimizer(request: Request, _: ModelShape) -> Changes | None:
    return {"optimizer": "adamw-8bit"} if request.optimizer == "adamw" and request.lora_rank is None else None


def _pure_bf16(request: Request, _: ModelShape) -> Changes | None:
    """Keep no fp32 copies of the weights. Several GPUs can shard these copies, so this is for one GPU."""
    is_usual = request.chosen_precision == "bf16" and request.lora_rank is None
    return {"precision": "pure-bf16"} if is_usual and request.num_gpus == 1 else None


def _pure_bf16_and_8_bit_optimizer(request: Request, shape: ModelShape) -> Changes | None:
    changes, optimizer = _pure_bf16(request, shape), _8_bit_optimizer(request, shape)
    return None if changes is None or optimizer is None else changes | optimizer


def _lora(request: Request, _: ModelShape) -> Changes | None:
    return {"lora_rank": LORA_RANK, "lora_target": "all-linear"} if request.lora_rank is None else None


def _qlora(request: Request, shape: ModelShape) -> Changes | None:
    """Keep the frozen weights in four bits, too."""
    return None if request.load_in_4bit else {**(_lora(request, shape) or {}), "load_in_4bit": True}


Change = Callable[[Request, ModelShape], Changes | None]
SAME_TRAINING: tuple[Change, ...] = (_chunked_loss, _checkpointing, _small_micro_batch, _synchronized_micro_steps)
OTHER_TRAINING: tuple[tuple[RemedyKind, tuple[Change, ...]], ...] = (
    ("optimizer", (_8_bit_optimizer,)),
    ("precision", (_pure_bf16, _pure_bf16_and_8_bit_optimizer)),
    ("adapters", (_lora, _qlora)),
)


# ---------------------------------------------------------------- trying them


def find(advice: Advice, can_start: CanStart) -> list[Remedy]:
    """Return changes with which a strategy fits and leaves enough memory free, the smallest first.

    At most one is returned for each kind of change, and offload counts only for changes that compute the same training,
    if they do not fit without it. A change counts only if `can_start` says that the requested program can start what is
    recommended then.

    The list is empty if the recommended strategy leaves much memory free without offload, and if memory does not make
    it slower than another one. If the training fits without offload, a change is only named if it is faster or leaves
    more memory free.
    """
    if not _is_short_of_memory(advice):
        return []
    search = _Search(advice, can_start)
    found = [*filter(None, search.remedies())][:MOST_REMEDIES]
    return found if found or advice.recommended else [*filter(None, [search.with_offload(enough=0)])]


def helps(option: StrategyPrediction, now: StrategyPrediction) -> bool:
    """Return whether a changed training is faster than what is recommended, or leaves more memory free."""
    is_faster = option.total_tokens_per_second > (1 + EQUALLY_FAST) * now.total_tokens_per_second
    return is_faster or option.free_share >= now.free_share + LEANER


def synchronized(advice: Advice, option: StrategyPrediction) -> StrategyPrediction | None:
    """Return an option that lacks memory as it is if gradients are reduced in every micro step.

    None if this makes no difference, or if it does not leave enough memory free either.
    """
    if option.prediction.engine.kind != "fsdp" or advice.request.sync_each_batch:
        return None
    request = advice.request.replace(sync_each_batch=True, strategy=option.strategy.name)
    try:
        (found,), _ = choose.options_of(advice.shape, advice.box, request)
    except Refusal:
        return None
    return found if found.has_enough_free else None


def with_adapters(advice: Advice) -> list[Remedy]:
    """Return LoRA and QLoRA as changes for a training that does not fit, each with its best strategy.

    The list is empty if a strategy fits, or if the training has adapters already.
    """
    if advice.recommended is not None or advice.request.lora_rank is not None:
        return []
    found = []
    for change in (_lora, _qlora):
        if (changes := change(advice.request, advice.shape)) is None:
            continue
        try:
            request = _changed(advice.request, changes)
            shape = request.with_adapter(adapters.base_of(advice.shape))
            options, _ = choose.options_of(shape, request.box(), request)
        except Refusal:
            continue
        if options:
            option = choose.recommend(options) or max(options, key=lambda option: option.free_bytes)
            found.append(Remedy("adapters", _shown(advice.request, changes, option), option, request))
    return found


def _is_short_of_memory(advice: Advice) -> bool:
    now = advice.recommended
    if now is None or now.offloads or not now.has_enough_free:
        return True
    if now.free_share < COMFORTABLE:
        return True
    fastest = min((option for option in advice.options if option.fits), key=lambda option: option.seconds)
    return not fastest.has_enough_free and now.seconds > SLOWED_DOWN * fastest.seconds


@dataclass(frozen=True)
class _Search:
    """A search for changes of a request that make its training fit or leave more memory free."""

    advice: Advice
    can_start: CanStart
    has_offload: bool = False  # whether strategies with offload count

    def remedies(self) -> Iterator[Remedy | None]:
        """Yield the remedies in the order in which one would try them, and None for each that does not suffice."""
        request, now, every = self.advice.request, self.advice.recommended, self._applicable(SAME_TRAINING)
        smallest = self._try_with("same", {}, every)
        yield smallest
        equivalent = every if smallest is None else []
        shared, trainings = list[Remedy](), list[Remedy]()
        if now is None or now.offloads or now.scarcest_share < VERY_LITTLE_FREE:
            if smallest is None:
                shared = [*self._shared_sequences("sequence", {}, equivalent)]
                yield from shared
                yield None if shared else self.with_offload()
            trainings = [*self._other_trainings(every)]
            yield from trainings
        elif now.free_share < COMFORTABLE or smallest is None:
            yield from (self._try("optimizer", changes) for changes in self._applicable([_8_bit_optimizer]))
        if smallest is None and request.batch()[0] > 1:
            yield self._try_with("batch", {"global_batch_size": request.num_groups}, equivalent)
        more = self._more_gpus("gpus", {}, equivalent, can_share=smallest is None and not shared)
        if now is None and all(remedy.kind != "adapters" for remedy in trainings):
            yield self._adapters_on_fewer_gpus(more, every)
        yield more

    def with_offload(self, enough: float = ENOUGH_FREE) -> Remedy | None:
        """Return the smallest change with which the same training fits with offload, if it does not fit without one."""
        search, now = dataclasses.replace(self, has_offload=True), self.advice.recommended
        is_needed = now is None or (now.offloads and not now.has_enough_free)
        return search._try_with("same", {}, self._applicable(SAME_TRAINING), enough) if is_needed else None

    def _adapters_on_fewer_gpus(self, full: Remedy | None, equivalent: Sequence[Changes]) -> Remedy | None:
        """Return LoRA or QLoRA with more GPUs, if these are fewer than training all weights needs."""
        tried = [self._more_gpus("adapters", changes, equivalent) for changes in self._applicable([_lora, _qlora])]
        fewest = min(filter(None, tried), key=lambda remedy: remedy.request.num_gpus, default=None)
        return fewest if fewest and (full is None or fewest.request.num_gpus < full.request.num_gpus) else None

    def _applicable(self, changes: Iterable[Change]) -> list[Changes]:
        request, shape = self.advice.request, self.advice.shape
        return [found for change in changes if (found := change(request, shape)) is not None]

    def _shared_sequences(self, kind: RemedyKind, changes: Changes, equivalent: Sequence[Changes]) -> Iterator[Remedy]:
        """Yield how many GPUs should share a sequence, under FSDP2 and under ZeRO.

        It is the smallest number that leaves `COMFORTABLY_FREE`, if necessary with changes that compute the same
        training. Without such a number, it is the one that leaves the most, unless `changes` are made, too. Nothing is
        yielded if something else than the tokens takes the memory.
        """
        request = self.advice.request
        if request.sequence_ranks > 1 or not is_caused_by_tokens(self.advice):
            return
        num_gpus = changes.get("num_gpus", request.num_gpus)
        counts = [count for count in choose.GPU_COUNTS[1:] if num_gpus % count == 0]
        for name in ("context_parallel", "sequence_parallel"):
            sharings = [{**changes, name: count} for count in counts]
            tried = (self._try_with(kind, sharing, equivalent, COMFORTABLY_FREE) for sharing in sharings)
            if roomy := next(filter(None, tried), None):
                yield roomy
                continue
            narrow = filter(None, (self._try_with(kind, sharing, equivalent) for sharing in sharings if not changes))
            if best := max(narrow, key=lambda remedy: remedy.option.free_share, default=None):
                yield best

    def _try_with(
        self, kind: RemedyKind, changes: Changes, more: Sequence[Changes], enough: float = ENOUGH_FREE
    ) -> Remedy | None:
        """Return a remedy with these changes and as few of `more` as are needed. None if even all do not suffice."""
        for alone in [changes] if changes else more:
            if remedy := self._try(kind, alone, enough):
                return remedy
        needed = list(more)
        remedy = self._try(kind, {**changes, **_together(needed)}, enough) if needed else None
        for change in more if remedy else ():
            fewer = [addition for addition in needed if addition is not change]
            combined = {**changes, **_together(fewer)}
            if combined and (smaller := self._try(kind, combined, enough)) is not None:
                needed, remedy = fewer, smaller
        return remedy

    def _other_trainings(self, equivalent: Sequence[Changes]) -> Iterator[Remedy]:
        """Yield the smallest change to each kind of training that suffices.

        If it leaves less than `choose.COMFORTABLY_FREE`, the next one that leaves more follows, or comes first if it is
        as fast.
        """
        for kind, kinds_of_changes in OTHER_TRAINING:
            narrow: Remedy | None = None
            for change in kinds_of_changes:
                changes = change(self.advice.request, self.advice.shape)
                found = None if changes is None else self._try_with(kind, changes, equivalent)
                if found is None or (narrow and found.option.free_share < narrow.option.free_share + LEANER):
                    continue
                if narrow is None and found.option.free_share < COMFORTABLY_FREE:
                    narrow = found
                    continue
                is_as_fast = narrow is None or found.option.tokens_per_second >= narrow.option.tokens_per_second
                yield from filter(None, [found, narrow] if is_as_fast else [narrow, found])
                break
            else:
                yield from filter(None, [narrow])

    def _try(self, kind: RemedyKind, changes: Changes, enough: float = ENOUGH_FREE) -> Remedy | None:
        """Return the change of the request as a remedy. None if it does not suffice, or if the program cannot do it.

        A strategy must leave this share of a GPU's memory free.
        """
        try:
            request = _changed(self.advice.request, changes)
            shape = request.with_adapter(adapters.base_of(self.advice.shape))
            if request.why_not_shared(shape) is not None or not choose.could_leave_free(
                shape, request, request.num_gpus, enough, self.has_offload
            ):
                return None
            options, _ = choose.options_of(shape, request.box(), request, self.has_offload)
        except Refusal:
            return None
        option = choose.recommend([each for each in options if each.has_enough_free or not enough])
        if option is None or option.free_share < enough or not self._is_better(option):
            return None
        remedy = Remedy(
            "offload" if option.offloads else kind, _shown(self.advice.request, changes, option), option, request
        )
        return remedy if self.can_start(remedy) else None

    def _is_better(self, option: StrategyPrediction) -> bool:
        """Return whether an option is worth a change: nothing fits without offload, or it is faster or needs less."""
        now = self.advice.recommended
        if now is None or now.offloads or not now.has_enough_free:
            return True
        return option.tokens_per_second > SLOWED_DOWN * now.tokens_per_second or (
            option.free_share >= now.free_share + LEANER
            and option.tokens_per_second >= now.tokens_per_second / SLOWED_DOWN
        )

    def _more_gpus(
        self, kind: RemedyKind, changes: Changes, equivalent: Sequence[Changes], can_share: bool = False
    ) -> Remedy | None:
        """Return the smallest larger number of GPUs with which the training fits, with as many sequences per GPU.

        With `can_share`, GPUs share each sequence if the number is too small without it. None if there is no number,
        because more GPUs do not help against activations and logits.
        """
        for count in choose.GPU_COUNTS:
            if count <= self.advice.box.num_gpus or not self.advice.request.could_run(count):
                continue
            more = {**changes, "num_gpus": count}
            shared = self._shared_sequences(kind, more, equivalent) if can_share else iter(())
            if found := self._try_with(kind, more, equivalent) or next(shared, None):
                return found
        return None


def _together(changes: Iterable[Changes]) -> Changes:
    return {name: value for each in changes for name, value in each.items()}


def _changed(request: Request, changes: Changes) -> Request:
    """Return a request with changes. The sequences per GPU stay, apart from those of another global batch.

    If the micro batch is to be smaller, every split of the batch is a candidate.
    """
    changes, settings = dict(changes), dict[str, Any]()
    if changes.pop("micro_batch_size", None) is not None or "global_batch_size" in changes:
        settings |= {"micro_batch_size": None, "gradient_accumulation_steps": None}
    groups = changes.get("num_gpus", request.num_gpus) // request.sequence_ranks
    return request.replace(**{**settings, "global_batch_size": request.batch()[0] * groups, **changes})


def _shown(request: Request, changes: Changes, option: StrategyPrediction) -> Changes:
    """Return the changes of a request that lead to a prediction if they are added to its options."""
    job, num_gpus = option.prediction.job, changes.get("num_gpus", request.num_gpus)
    sequences = job.micro_batch_size * job.gradient_accumulation_steps
    if "micro_batch_size" in changes:
        changes = {**changes, "micro_batch_size": job.micro_batch_size}
        if request.gradient_accumulation_steps is not None:
            changes["gradient_accumulation_steps"] = job.gradient_accumulation_steps
    elif "global_batch_size" in changes and request.micro_batch_size is not None:
        changes = {"micro_batch_size": job.micro_batch_size, **changes}
    try:
        is_same = request.replace(**changes).batch()[0] == sequences
    except Refusal:  # the options contradict each other without the global batch
        is_same = False
    return changes if is_same else {**changes, "global_batch_size": sequences * num_gpus // job.sequence_ranks}
