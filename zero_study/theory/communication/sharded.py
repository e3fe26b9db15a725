"""Predict the gathers and reductions of sharded parameters, module by module: DeepSpeed's stage 3 and FSDP2.

In DeepSpeed, zero/parameter_offload.py has the hooks, zero/partitioned_param_coordinator.py the gathers, and
zero/stage3.py the reductions and the optimizer's step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from zero_study.theory.communication.buckets import Collective, chunks, full_buckets, sent_bytes
from zero_study.theory.communication.model_order import Layout, Model, Module, Parameter, model_of, modules_of
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.shapes import ModelShape

# "enter", "leave" or "release", and the module. Parameters that are left may stay gathered, but not released ones.
Visit = tuple[str, Module]


class Sections(NamedTuple):
    """The modules that one micro step visits, by phase. The blocks are in the order of the backward pass."""

    forward: list[Visit]
    after: list[Visit]  # backward pass of the modules after the blocks
    blocks: list[list[Visit]]
    before: list[Visit]

    @property
    def visits(self) -> list[Visit]:
        return [*self.forward, *self.after, *(visit for block in self.blocks for visit in block), *self.before]


def sections(model: Model, checkpointing: bool, dropout: bool, is_frozen: bool = False) -> Sections:
    """Return the order in which one micro step enters and leaves modules, as DeepSpeed's hooks see it.

    The hooks are in zero/parameter_offload.py. If the weights are frozen (`is_frozen`), the backward pass ends with the
    first adapter. This is in a block, so the modules before the blocks, which are the embeddings, are not visited
    again.
    """
    blocks = [list(_backward_of_block(model, block, checkpointing, dropout, is_frozen)) for block in model.blocks[::-1]]
    before = [
        (action, module)
        for item in ([] if is_frozen else model.before[::-1])
        for action, module in _backward([item])
        if action == "enter" or module not in model.lookups
    ]
    return Sections(list(_forward(model.layout)), list(_backward(model.after)), blocks, before)


def _backward_of_block(
    model: Model, block: Layout, checkpointing: bool, dropout: bool, is_frozen: bool
) -> Iterator[Visit]:
    """Yield the visits of a block in the backward pass.

    Frozen parameters that a recomputation gathers stay gathered until the backward pass of the module that needed the
    recomputation ends. They are released then, even if they are used again (partitioned_param_coordinator.py,
    update_recompute_parameters and release_sub_module).
    """
    if not checkpointing:
        yield from _backward(block)
        return
    # Non-reentrant checkpointing recomputes a block when the backward pass first needs a tensor that was not saved.
    # This is in the block's last module. The recomputation stops inside that module, as soon as all tensors exist.
    last, module = max(
        (at, item)
        for at, item in enumerate(block)
        if not isinstance(item, str) and (item or (dropout and model.ends_in_dropout))
    )
    yield from _backward(block[last + 1 :])
    yield "enter", module
    recomputed = list(_forward(block[1:last]))
    yield from (visit for visit in recomputed if visit[0] == "enter" or not is_frozen)
    yield "enter", module
    yield "leave", module
    if is_frozen:
        yield from (("release", each) for action, each in recomputed if action == "enter")
    yield from _backward(block[:last])


def _forward(layout: Layout) -> Iterator[Visit]:
    for item in layout:
        if item != ")":
            yield from _passed(item)


def _backward(layout: Layout) -> Iterator[Visit]:
    for item in layout[::-1]:
        if item != "(":
            yield from _passed(item)


def _passed(item: Module | str) -> Iterator[Visit]:
    """Yield the visits on entering and leaving a module. A bracket stands for a module that contains others."""
    module: Module = () if isinstance(item, str) else item
    yield "enter", module
    yield "leave", module


class Limits(NamedTuple):
    """The fields of `Engine` that decide how long stage 3 keeps parameters gathered, in elements."""

    persistence_threshold: int
    prefetch_bucket_size: int
    max_live_parameters: int
    max_reuse_distance: int

    @classmethod
    def of(cls, engine: Engine) -> Limits:
        return cls(*(getattr(engine, name) for name in cls._fields))


class Gather(NamedTuple):
    """The parameters that are gathered in one collective."""

    parameters: list[Parameter]
    were_released: bool  # whether they were already gathered and released in this micro step


class Coordinator:
    """A simulation of the gathers, prefetches and releases of stage 3 in one micro step.

    DeepSpeed implements them in zero/partitioned_param_coordinator.py. Every micro step begins and ends with the
    parameters that stay gathered between steps, so all micro steps are equal. With `splits_released`, parameters that
    were released before in the micro step are gathered separately from the others, because they have a secondary copy
    in a smaller group.
    """

    def __init__(self, limits: Limits, model: Model, visits: list[Visit], splits_released: bool = False) -> None:
        self._limits = limits
        self._visits = visits
        self._persistent = {p for p in model.parameters if p.numel <= limits.persistence_threshold}
        self._available = set(self._persistent)
        self._live = 0  # elements gathered in this micro step
        self.live: list[int] = []  # `_live` after each visit
        self._gathered: list[Gather] = []
        self.gathering: list[list[Gather]] = []  # the gathers of each visit
        self._splits_released = splits_released
        self._released: set[Parameter] = set()
        entered = [module for action, module in visits if action == "enter"]
        self._queue = deque((p, step) for step, module in enumerate(entered) for p in module)
        self._fetched_for: dict[Parameter, int] = {}  # the last step that a parameter is known to be gathered for
        self._elements_before = [0, *accumulate(sum(p.numel for p in module) for module in entered)]
        self._uses: dict[Parameter, list[int]] = defaultdict(list)  # steps
        for parameter, step in self._queue:
            self._uses[parameter].append(step)

    def gathered(self) -> list[Gather]:
        active: dict[Parameter, set[int]] = defaultdict(set)  # modules that use a parameter at present
        step = 0
        for action, module in self._visits:
            num_earlier = len(self._gathered)
            if action != "enter":
                for parameter in module:
                    active[parameter].discard(id(module))
                    is_kept = parameter in self._persistent if action == "release" else self._is_kept(parameter, step)
                    if parameter in self._available and not (active[parameter] or is_kept):
                        self._available.discard(parameter)
                        self._released.add(parameter)
                        self._live -= parameter.numel
                self._note_visit(num_earlier)
                continue
            for parameter in module:
                active[parameter].add(id(module))
            self._gather(module)
            for _ in {p for p in module if self._fetched_for.get(p, -1) < step}:
                parameter, last_used = self._queue.popleft()
                self._fetched_for[parameter] = last_used
            self._prefetch()
            self._note_visit(num_earlier)
            step += 1
        return self._gathered

    def _note_visit(self, num_earlier: int) -> None:
        """Note what is gathered after a visit, before which there were `num_earlier` gathers."""
        self.live.append(self._live)
        self.gathering.append(self._gathered[num_earlier:])

    def _prefetch(self) -> None:
        room = min(self._limits.max_live_parameters - self._live, self._limits.prefetch_bucket_size)
        upcoming: dict[Parameter, None] = {}
        elements = 0
        while self._queue and elements < room:
            parameter, last_used = self._queue.popleft()
            self._fetched_for[parameter] = max(self._fetched_for.get(parameter, -1), last_used)
            if parameter not in self._available and parameter not in upcoming:
                upcoming[parameter] = None
                elements += parameter.numel
        self._gather(upcoming)

    def _gather(self, parameters: Iterable[Parameter]) -> None:
        missing = [p for p in parameters if p not in self._available]
        if missing:
            self._available.update(missing)
            self._live += sum(p.numel for p in missing)
            released = [p for p in missing if self._splits_released and p in self._released]
            unreleased = [p for p in missing if p not in released]
            self._gathered += [Gather(group, group is released) for group in (released, unreleased) if group]

    def _is_kept(self, parameter: Parameter, step: int) -> bool:
        """Return whether a parameter stays gathered after a module has used it (__params_to_release)."""
        if parameter in self._persistent or self._fetched_for.get(parameter, -1) > step:
            return True
        uses = self._uses[parameter]
        following = bisect_left(uses, step)
        if following == len(uses):
            return False
        distance = self._elements_before[uses[following]] - self._elements_before[step]
        return distance < self._limits.max_reuse_distance


# ---------------------------------------------------------------- what stage 3 sends


class Whole(NamedTuple):
    """The largest number of elements that stage 3 has gathered at one time, by the phase of a micro step.

    Elements that stay gathered between steps are not included. The last three include the copies that a gather makes.
    """

    at_loss: int  # between the forward and the backward pass
    last_block: int  # in the backward pass of the last block
    first_block: int  # in the backward pass of the first block
    embedding: int  # in the forward pass of the modules before the blocks
    output: int  # in the backward pass of the modules after the blocks
    gathering: int  # while a block is recomputed or gathers parameters, before they are used


def whole_elements(engine: Engine, shape: ModelShape, job: StepConfig, is_frozen: bool = False) -> Whole:
    """Return, for each phase of a micro step, the largest number of elements that stage 3 gathers at one time.

    `is_frozen` is for a model whose own weights are frozen.
    """
    limits = Limits.of(engine)
    # All blocks are equal. If the blocks fill the limits three times, more blocks change only the time of the
    # simulation.
    filled = 3 * (limits.max_live_parameters + limits.prefetch_bucket_size) // shape.block_params + 8
    fewer = shape.shortened(filled)
    _, whole = _gathered(
        fewer,
        _autocast(engine),
        limits,
        bool(job.activation_checkpointing),
        job.dropout,
        is_frozen=is_frozen,
        copied_from=_copied_from(engine, job),
    )
    return whole


def gathered_elements(engine: Engine, shape: ModelShape, job: StepConfig) -> int:
    """Return the number of elements that a micro step gathers.

    With one process, the elements are fetched from the host or disk to which they are offloaded.
    """
    return _gathered_elements(shape, _autocast(engine), Limits.of(engine), job.activation_checkpointing, job.dropout)


@lru_cache(maxsize=256)
def _gathered_elements(shape: ModelShape, autocast: bool, limits: Limits, checkpointing: bool, dropout: bool) -> int:
    gathered, _ = _gathered(shape, autocast, limits, checkpointing, dropout)
    return sum(parameter.numel for gather in gathered for parameter in gather.parameters)


def gathers(
    engine: Engine,
    shape: ModelShape,
    checkpointing: bool,
    dropout: bool,
    is_first: bool = False,
    is_frozen: bool = False,
) -> Iterator[Collective]:
    """Yield the gathers of a micro step, in bytes. `is_frozen` says that only adapters of the model are trained.

    With a secondary copy, the first micro step of an optimizer step (`is_first`) differs from the others. The secondary
    copy of a parameter is made when the parameter is first released. From then until the optimizer step, the parameter
    is gathered from the group of ranks that shares the copy. Sources: partition_parameters.py, _partition_param_sec,
    and stage3.py, invalidate_secondary_tensor.
    """
    has_secondary = engine.secondary_partition_size > 1
    splits_released = has_secondary and is_first
    limits = Limits.of(engine)
    gathered, _ = _gathered(shape, _autocast(engine), limits, checkpointing, dropout, splits_released, is_frozen)
    within = "subgroup_all_gather" if engine.secondary_partition_size < engine.world_size else "all_gather"
    for gather in gathered:
        kind = within if has_secondary and (gather.were_released or not is_first) else "all_gather"
        sizes: dict[int, int] = defaultdict(int)  # one collective for each type
        for parameter in gather.parameters:
            size = sent_bytes(engine, parameter)
            sizes[size] += size * _padded_elements(engine, parameter)
        yield from ((kind, num_bytes) for num_bytes in sizes.values())


def reductions(engine: Engine, model: Model) -> Iterator[Collective]:
    """Yield the reductions of a micro step, in bytes."""
    for size, bucket in full_buckets(engine, model.gradient_order()):
        yield "reduce_scatter", size * sum(_padded_elements(engine, p) for p in bucket)


def step(engine: Engine, model: Model) -> Iterator[Collective]:
    """Yield the collectives of the optimizer step: those for norms, and the gather of persistent parameters."""
    norm_bytes = 4 if engine.offload_optimizer != "none" else 8
    for group in model.groups:  # _create_fp16_sub_groups
        shards = [_padded_elements(engine, p) // engine.world_size for p in group]
        for _ in chunks(shards, engine.sub_group_size - 1):
            yield "all_reduce", norm_bytes
    if engine.precision == "fp16":
        yield "all_reduce", 1
    if engine.world_size > 1:
        for parameter in model.parameters:
            if parameter.numel <= engine.persistence_threshold:
                yield "all_gather", engine.parameter_bytes * _padded_elements(engine, parameter)


@lru_cache(maxsize=256)
def _gathered(
    shape: ModelShape,
    autocast: bool,
    limits: Limits,
    checkpointing: bool,
    dropout: bool,
    splits_released: bool = False,
    is_frozen: bool = False,
    copied_from: int | None = None,
) -> tuple[list[Gather], Whole]:
    """Return the gathers of one micro step, and the most elements that are gathered at one time by its phase."""
    model = model_of(shape, autocast)
    followed = sections(model, checkpointing, dropout, is_frozen)
    coordinator = Coordinator(limits, model, followed.visits, splits_released)
    gathered, live = coordinator.gathered(), coordinator.live
    backward = len(followed.forward)
    blocks = backward + len(followed.after)
    end = len(live) - len(followed.before)
    last, first = followed.blocks[0], followed.blocks[-1]
    with_copies = [
        elements + _copied_elements(gathers, copied_from)
        for elements, gathers in zip(live, coordinator.gathering, strict=True)
    ]
    return gathered, Whole(
        at_loss=live[backward - 1],
        last_block=max(live[blocks + _num_recomputed(last) : blocks + len(last)]),
        first_block=max(live[end - len(first) + _num_recomputed(first) : end]),
        embedding=max(with_copies[: len(list(_forward(model.before)))]),
        output=max(with_copies[backward:blocks], default=0),
        gathering=max(with_copies[blocks:end]),
    )


def _num_recomputed(block: list[Visit]) -> int:
    """Return the number of visits of a block until recomputed parameters are released. 0 if they are not kept."""
    return max((at for at, (action, _) in enumerate(block) if action == "release"), default=0)


def _copied_from(engine: Engine, job: StepConfig) -> int | None:
    """Return how many parameters a gather has at least if it copies them. None if no gather does.

    Several parameters are gathered into one buffer, from which each of them is then copied (partition_parameters.py,
    AllGatherCoalescedHandle). A single parameter is gathered in place. Gloo gathers everything into a buffer of its own
    and copies from there (AsyncAllgatherWork in PyTorch's ProcessGroupGloo.cpp). One process gathers nothing.
    """
    if engine.world_size == 1:
        return None
    return 1 if job.device == "cpu" else 2


def _copied_elements(gathers: list[Gather], copied_from: int | None) -> int:
    """Return the most elements that one of these gathers copies."""
    if copied_from is None:
        return 0
    copied = (gather.parameters for gather in gathers if len(gather.parameters) >= copied_from)
    return max((sum(p.numel for p in parameters) for parameters in copied), default=0)


def _padded_elements(engine: Engine, parameter: Parameter) -> int:
    return -(-parameter.numel // engine.world_size) * engine.world_size


def _autocast(engine: Engine) -> bool:
    return engine.precision.endswith("-autocast")


# ---------------------------------------------------------------- FSDP2, as accelerate wraps a model


def fsdp_micro_step(
    engine: Engine, shape: ModelShape, model: Model, checkpointing: bool
) -> tuple[list[Collective], list[Collective]]:
    """Return FSDP2's gathers and its reductions of a micro step.

    The rows of each parameter are padded to a multiple of the number of shards. Each block is a unit, and the
    parameters outside the blocks are another (accelerate/utils/fsdp_utils.py, fsdp2_prepare_model). Every micro step
    gathers. Every micro step also reduces, or only the last one does (`Engine.syncs_each_micro_step`). Checkpointing
    adds no gather, because the backward pass gathers a block before it recomputes it
    (fsdp/_fully_shard/_fsdp_state.py).
    """
    words = _row_padded(model.lookups[0][0], shape, engine) if model.lookups else 0
    around = _row_padded_elements(model.before, shape, engine) - words
    end = _row_padded_elements(model.after, shape, engine)
    # Without an output layer, the modules after the blocks are in the unit of the root module.
    unsharded = [end, around] if shape.head == "tokens" else [around + end]
    resharded = [] if shape.has_tied_head else [words]
    resharded += [_row_padded_elements(block, shape, engine) for block in model.blocks]
    groups = [elements for elements in (*unsharded, *resharded) if elements]
    again = resharded if engine.reshard_after_forward else []
    again = again * (2 if engine.is_fsdp1 and checkpointing else 1)
    size, reduced = engine.compute_bytes, engine.reduced_bytes
    gathers: list[Collective] = []
    reductions: list[Collective] = []
    among = "subgroup_" if engine.replicas > 1 else ""
    if engine.num_shards > 1:
        gathers += [(f"{among}all_gather", size * elements) for elements in (*groups, *again)]
        reductions += [(f"{among}reduce_scatter", reduced * elements) for elements in groups]
    if engine.replicas > 1:
        reductions += [("subgroup_all_reduce", reduced * elements // engine.num_shards) for elements in groups]
    return gathers, reductions


def _row_padded_elements(layout: Layout, shape: ModelShape, engine: Engine) -> int:
    """Return the elements of all parameters of a layout with their padding. Each parameter counts once."""
    return sum(_row_padded(p, shape, engine) for p in {p: None for module in modules_of(layout) for p in module})


def _row_padded(parameter: Parameter, shape: ModelShape, engine: Engine) -> int:
    """Return the elements of a parameter after its rows are padded to equal shards. Rows have the hidden size.

    GPT-2 stores the matrices of its blocks transposed, so for GPT-2 this is exact only if the number of shards divides
    the hidden size.
    """
    row = shape.hidden if parameter.group == 0 else 1
    return -(-parameter.numel // row // engine.num_shards) * engine.num_shards * row
