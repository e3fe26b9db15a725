"""Find the smallest changes of a training that make it fit into the memory of the GPUs.

A change is only named if a prediction says that it works. The changes are tried in the order in which one would try
them by hand: first those that compute the same training, then another optimizer, adapters, and other machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from study import command_line
from study.errors import Refusal
from study.planner import choose
from study.planner.choose import StrategyPrediction
from study.planner.request import Request
from study.theory import adapters, computation
from study.theory.peaks import PeakPart

if TYPE_CHECKING:
    from study.planner.choose import Advice
    from study.theory.shapes import ModelShape

# What a remedy changes. "same": the same training, computed in another way.
Kind = Literal["same", "optimizer", "adapters", "batch", "offload", "gpus"]
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
MOST_REMEDIES = 4
SLOWED_DOWN = 1.2  # if the recommended strategy takes this many times as long as the fastest, memory decided


@dataclass(frozen=True)
class Remedy:
    """A change of a request with which a strategy fits, and the prediction for it."""

    kind: Kind
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


def cause(option: StrategyPrediction) -> tuple[Cause, float]:
    """Return what takes most of the memory of an option that does not fit, and its bytes on a GPU, or on a node."""
    prediction = option.prediction
    if option.free_bytes >= 0 and prediction.lacking is not None:
        return "host memory", float(prediction.host_bytes_per_node)
    sums: dict[Cause, float] = {}
    for part, num_bytes in prediction.peak.parts.items():
        sums[CAUSES[part]] = sums.get(CAUSES[part], 0.0) + float(num_bytes)
    largest = max(sums, key=lambda name: sums[name])
    return largest, sums[largest]


# ---------------------------------------------------------------- the changes


def _chunked_loss(request: Request, shape: ModelShape) -> dict[str, Any] | None:
    """Never keep all logits at once. It has an effect on models that predict a token at each position."""
    predicts_tokens = computation.num_logits(shape, request.job()) >= shape.vocabulary
    return {"loss_kernel": "chunked"} if request.job().loss != "chunked" and predicts_tokens else None


def _checkpointing(request: Request, _: ModelShape) -> dict[str, Any] | None:
    """Recompute activations. If the request does not set it, it was tried already."""
    return {"activation_checkpointing": "full"} if request.activation_checkpointing not in (None, "full") else None


def _small_micro_batch(request: Request, _: ModelShape) -> dict[str, Any] | None:
    """Compute the same global batch in more micro steps. If the request sets no micro batch, it was tried already."""
    micro = request.batch()[1]
    return {"micro_batch_size": 1} if micro is not None and micro > 1 else None


def _synchronized_micro_steps(request: Request, _: ModelShape) -> dict[str, Any] | None:
    """Reduce FSDP2's gradients in every micro step, so that no GPU keeps unsharded gradients between micro steps."""
    return None if request.sync_each_batch else {"sync_each_batch": True}


def _8_bit_optimizer(request: Request, _: ModelShape) -> dict[str, Any] | None:
    return {"optimizer": "adamw-8bit"} if request.optimizer == "adamw" and request.lora_rank is None else None


def _lora(request: Request, _: ModelShape) -> dict[str, Any] | None:
    return {"lora_rank": LORA_RANK, "lora_target": "all-linear"} if request.lora_rank is None else None


def _qlora(request: Request, shape: ModelShape) -> dict[str, Any] | None:
    """Keep the frozen weights in four bits, too."""
    return None if request.load_in_4bit else {**(_lora(request, shape) or {}), "load_in_4bit": True}


Change = Callable[[Request, "ModelShape"], "dict[str, Any] | None"]
SAME_TRAINING: tuple[Change, ...] = (_chunked_loss, _checkpointing, _small_micro_batch, _synchronized_micro_steps)
OTHER_TRAINING: tuple[tuple[Kind, Change], ...] = (
    ("optimizer", _8_bit_optimizer), ("adapters", _lora), ("adapters", _qlora),
)  # fmt: skip


# ---------------------------------------------------------------- trying them


def find(advice: Advice) -> list[Remedy]:
    """Return changes with which a strategy fits and leaves enough memory free without offload, the smallest first.

    At most one is returned for each kind of change. If nothing fits, and no change makes it fit without offload, then
    offload with all changes that compute the same training is tried, too.

    The list is empty if the recommended strategy already leaves enough memory free without offload, and if memory does
    not make it slower than another one.
    """
    if not _is_short_of_memory(advice):
        return []
    found = list(_found(advice))
    return found[:MOST_REMEDIES] or _with_offload(advice)


def _is_short_of_memory(advice: Advice) -> bool:
    now = advice.recommended
    if now is None or now.offloads or not now.has_enough_free:
        return True
    fastest = min((option.seconds for option in advice.options if option.fits), default=now.seconds)
    return now.seconds > SLOWED_DOWN * fastest


def _found(advice: Advice) -> Iterator[Remedy]:
    shape, request, now = advice.shape, advice.request, advice.recommended
    same = [changes for change in SAME_TRAINING if (changes := change(request, shape)) is not None]
    smallest = next((found for changes in same if (found := _try(advice, "same", changes))), None)
    if smallest is None and len(same) > 1:
        smallest = _smallest(advice, "same", {}, same)
    if smallest is not None:
        yield smallest
    if now is None or now.offloads:
        done: set[Kind] = set()
        for kind, change in OTHER_TRAINING:
            changes = change(request, shape)
            if kind in done or changes is None:
                continue
            if found := _try(advice, kind, changes) or (_smallest(advice, kind, changes, same) if same else None):
                done.add(kind)
                yield found
    if smallest is None and request.batch()[0] > 1:
        changes = {"global_batch_size": request.num_gpus}
        if found := _try(advice, "batch", changes) or (_smallest(advice, "batch", changes, same) if same else None):
            yield found
    if found := _more_gpus(advice, {}) or (_more_gpus(advice, _together(same)) if smallest is None and same else None):
        yield found


def _together(changes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for each in changes for name, value in each.items()}


def _with_offload(advice: Advice) -> list[Remedy]:
    """Return the offload that fits if everything that computes the same training is changed. Empty if none fits."""
    if advice.recommended is not None:
        return []
    changes = _together(change(advice.request, advice.shape) or {} for change in SAME_TRAINING)
    try:
        request = _changed(advice.request, changes)
        found = choose.recommend(choose.options_of(advice.shape, request.box(), request)[0])
    except Refusal:
        return []
    if found is None:
        return []
    remedy = Remedy("offload" if found.offloads else "same", _as_predicted(changes, found), found, request)
    return [remedy] if _can_start(remedy) else []


def _smallest(
    advice: Advice, kind: Kind, changes: Mapping[str, Any], more: Sequence[Mapping[str, Any]]
) -> Remedy | None:
    """Return a remedy with as few of `more` changes as are needed. None if even all of them do not suffice."""
    needed = list(more)
    found = _try(advice, kind, {**changes, **_together(needed)})
    for each in more if found else ():
        fewer = [other for other in needed if other is not each]
        combined = {**changes, **_together(fewer)}
        if combined and (smaller := _try(advice, kind, combined)) is not None:
            needed, found = fewer, smaller
    return found


def _try(advice: Advice, kind: Kind, changes: Mapping[str, Any]) -> Remedy | None:
    """Return the remedy that these changes are. None if they do not suffice, or if the program cannot do them.

    A strategy must leave enough memory free without offload.
    """
    try:
        request = _changed(advice.request, changes)
        shape = request.with_adapter(adapters.base_of(advice.shape))
        if not choose.could_leave_enough_free(shape, _without_batch(request), request.num_gpus):
            return None
        options, _ = choose.options_of(shape, request.box(), request, has_offload=False)
    except Refusal:
        return None
    option = choose.recommend([each for each in options if each.has_enough_free])
    if option is None:
        return None
    remedy = Remedy(kind, _as_predicted(changes, option), option, request)
    return remedy if _can_start(remedy) else None


def _changed(request: Request, changes: Mapping[str, Any]) -> Request:
    """Return a request with changes. A smaller micro batch, and more GPUs, leave the sequences per GPU as they are."""
    changes = dict(changes)
    sequences, num_gpus = request.batch()[0], changes.get("num_gpus", request.num_gpus)
    if changes.pop("micro_batch_size", None) is not None or "num_gpus" in changes or "global_batch_size" in changes:
        batch = {"global_batch_size": sequences * num_gpus, "micro_batch_size": None}
        changes = {**batch, "gradient_accumulation_steps": None, **changes}
    return request.replace(**changes)


def _as_predicted(changes: Mapping[str, Any], option: StrategyPrediction) -> Mapping[str, Any]:
    """Return the changes with the micro batch of the prediction, which may be larger than 1."""
    if "micro_batch_size" not in changes:
        return changes
    return {**changes, "micro_batch_size": option.prediction.job.micro_batch_size}


def _without_batch(request: Request) -> Request:
    return request.replace(global_batch_size=None, micro_batch_size=None, gradient_accumulation_steps=None)


def _can_start(remedy: Remedy) -> bool:
    """Return whether the requested program can start the training of a remedy."""
    from study.planner import launch

    option = remedy.option
    changed = choose.Advice(option.shape, remedy.request, option.prediction.box, [], [option], option)
    try:
        launch.launch(changed)
    except Refusal:
        return False
    return True


def _more_gpus(advice: Advice, changes: Mapping[str, Any]) -> Remedy | None:
    """Return the smallest larger number of GPUs with which the training fits, with as many sequences per GPU.

    None if there is none, because more GPUs do not help against activations and logits.
    """
    for count in choose.GPU_COUNTS:
        if count <= advice.box.num_gpus or not advice.request.could_run(count):
            continue
        if found := _try(advice, "gpus", {**changes, "num_gpus": count}):
            return found
    return None
