"""Which collectives should an optimizer step run, and how many bytes do they carry: by the paper, and as engines do it?

The engines' steps are followed rather than summed up: which module a pass visits, what stage 3 then gathers, prefetches
and lets go of, and where a bucket is full. Sources in the comments are below deepspeed/runtime/ of release 0.19.8,
torch/ of 2.13 and accelerate/ of 1.15.
"""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from study.theory.case import Engine, Job, Numbers
from study.theory.model_states import is_bf16_optimizer
from study.theory.shapes import Architecture, ModelShape

DDP_FIRST_BUCKET_BYTES = 1 << 20  # torch/csrc/distributed/c10d/reducer.hpp, kDefaultFirstBucketBytes
DDP_BUCKET_BYTES = 25 << 20  # bucket_cap_mb, which the study leaves alone
ENGINE_BUCKET_ELEMENTS = 500_000_000  # engine.py, MEMORY_OPT_ALLREDUCE_SIZE: without ZeRO, whatever is configured


@dataclass(frozen=True)
class ExpectedCollective:
    """One kind of collective in one steady optimizer step of rank 0; arrays where the job is a grid."""

    kind: str
    count: Numbers
    bytes: Numbers  # of the whole tensor: the input of all-reduce and reduce-scatter, the output of all-gather

    @property
    def moved_bytes(self) -> Numbers:
        """What is sent; an all-reduce sends its bytes twice (arXiv:1910.02054, sec. 7.1)."""
        return self.bytes * (2 if self.kind == "all_reduce" else 1)


def paper_volume(zero_stage: int, num_params: int, gradient_accumulation_steps: Numbers = 1) -> Numbers:
    """Count the elements that a rank moves in an optimizer step (arXiv:1910.02054, sec. 7).

    Times the bytes of an element it compares with the sum of `ExpectedCollective.moved_bytes`; like the paper it leaves
    out the
    factor (N - 1) / N of a ring. The paper counts one micro step: 2 Psi to average gradients under data parallelism and
    P_os, as much for P_os+g, 3 Psi for P_os+g+p. Its accounting is carried on to accumulation: where a rank
    keeps whole gradients (stages 0 and 1) they are averaged once; stage 2 gives away what it does not own, so its
    gradients move at every micro step and the parameters once; at stage 3 both parameters' gathers do, too.
    Checkpointing adds nothing: the gather of the backward pass serves the recomputation.
    """
    if zero_stage in (0, 1):
        return 2 * num_params + 0 * gradient_accumulation_steps
    if zero_stage == 2:
        return num_params * (gradient_accumulation_steps + 1)
    if zero_stage == 3:
        return 3 * num_params * gradient_accumulation_steps
    raise ValueError(f"zero_stage {zero_stage}: must be 0, 1, 2 or 3")


def collectives(engine: Engine, shape: ModelShape, job: Job) -> list[ExpectedCollective]:
    """List what rank 0 runs in a steady optimizer step, by kind; counts and bytes are arrays where accumulation is.

    Steady: stage 3 has seen the order of the modules and follows it, which is from the third step on. The norm of the
    gradients counts as the study takes it; DeepSpeed's own at stage 0 would add an all-reduce of 4 bytes. FSDP2's norm
    is one too, which happens inside a DTensor, where `study.training.measure` does not see it. Sub-groups of stage 3,
    each with
    a norm of its own, are taken to be DeepSpeed's default of 1e9 elements.
    """
    once, each = parts(engine, shape, job.activation_checkpointing, job.dropout)
    steps = job.gradient_accumulation_steps
    found = []
    for kind in sorted({*once, *each}):
        (count, size), (count_each, size_each) = once.get(kind, (0, 0)), each.get(kind, (0, 0))
        found.append(ExpectedCollective(kind, count + steps * count_each, size + steps * size_each))
    return found


Sums = dict[str, tuple[int, int]]  # kind -> count, bytes


@lru_cache(maxsize=4096)
def parts(engine: Engine, shape: ModelShape, checkpointing: bool, dropout: bool) -> tuple[Sums, Sums]:
    """Sum up what is done once in a step, and what in each of its micro steps."""
    autocast = engine.precision.endswith("-autocast")
    model = _model(shape, autocast)
    once: list[_Event] = []
    each: list[_Event] = []
    if engine.kind == "ddp":
        once += _ddp(engine, shape, model)
    elif engine.kind == "fsdp":
        each += _fsdp(engine, shape, model)
        once += [("all_reduce", 4)]  # of the norm
    elif engine.kind == "deepspeed" and engine.zero_stage == 0:
        once += _engine_reductions(engine, model)
    elif engine.kind == "deepspeed" and engine.zero_stage == 3:
        if engine.world_size > 1:
            each += _stage_3_gathers(engine, _gathered(shape, autocast, _limits(engine), checkpointing, dropout)[0])
        each += _stage_3_reductions(engine, model)
        once += _stage_3_step(engine, model)
    elif is_bf16_optimizer(engine):
        once += _bf16_reductions(engine, model)
        once += _stages_1_and_2_step(engine, model)
    elif engine.kind == "deepspeed":
        # Stage 2 reduces in hooks of the backward pass; stage 1 when it is over and by group, unless it overlaps.
        in_hooks = engine.zero_stage == 2 or engine.overlap_comm
        order = model.gradient_order() if in_hooks else model.parameters
        (each if engine.zero_stage == 2 else once).extend(_reductions(engine, model, order))
        once += _stages_1_and_2_step(engine, model)
    return _sums(once), _sums(each)


_Event = tuple[str, int]  # kind, bytes


def _sums(events: Iterable[_Event]) -> Sums:
    sums: Sums = {}
    for kind, size in events:
        count, total = sums.get(kind, (0, 0))
        sums[kind] = count + 1, total + size
    return sums


# What a model is made of, in the order in which its forward pass visits it.


@dataclass(frozen=True)
class _Order:
    """The modules of `transformers` 5.23 as a forward pass visits them; the backward pass goes the other way.

    Brackets are a module around others, m0v2 is one that holds the first of its part's matrices and the third of its
    vectors in the order of `ModelShape.parameters`, - one without parameters. What no gradient passes, as rotary
    embeddings, is left out.
    """

    before: str
    block: str
    after: str
    lookups: int = 1  # of embeddings; integers go in, so that the backward pass never leaves them
    dropout_last: bool = False  # a block ends in a dropout
    linear: bool = True  # torch.nn.Linear, which DeepSpeed's autocast communicates in 16 bits, not Conv1D


_HEAD = "v0v1 ) output )"
_LLAMA = _Order("( ( m0", "( v0 ( m0 m1 m2 m3 ) v1 ( m4 - m5 m6 ) )", "v0 ) output )")
_ORDERS: dict[Architecture, _Order] = {
    "bert": _Order(  # token types before positions
        "( ( ( m0 m2 m1 v0v1 - ) (",
        "( ( ( m0v0 m1v1 m2v2 ) ( m3v3 - v4v5 ) ) ( m4v6 - ) ( m5v7 - v8v9 ) )",
        ") ( m0v0 - ) ) - m1v1 )",
        lookups=3,
    ),
    "gpt2": _Order(
        "( ( m0 m1 -",
        "( v0v1 ( m0v2 m1v3 - ) v4v5 ( m2v6 - m3v7 - ) )",
        _HEAD,
        lookups=2,
        dropout_last=True,
        linear=False,
    ),
    # GPT-Neo and GPT-J declare keys and values before queries.
    "gpt-neo": _Order(
        "( ( m0 m1 -",
        "( v0v1 ( ( m2 m0 m1 - m3v2 - ) ) v3v4 ( m4v5 - m5v6 - ) )",
        _HEAD,
        lookups=2,
        dropout_last=True,
    ),
    "gpt-j": _Order("( ( m0 -", "( v0v1 ( m2 m0 m1 - m3 - ) ( m4v2 - m5v3 - ) )", _HEAD, dropout_last=True),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _Order("( ( m0", "( v3 ( m0v0 m1v1 m2v2 m3 ) v4 ( m4 - m5 m6 ) )", "v0 ) output )"),
    "gemma2": _Order("( ( m0", "( v0 ( m0 m1 m2 m3 ) v1 v2 ( m4 - m5 m6 ) v3 )", "v0 ) output )"),
}


@dataclass(frozen=True, eq=False)  # a parameter is equal to itself only
class _Parameter:
    numel: int
    group: int  # of the optimizer: 0 matrices, 1 vectors
    start: int  # in the group's flat buffer
    is_lowered: bool  # communicated in 16 bits under DeepSpeed's autocast


_Module = tuple[_Parameter, ...]
_Layout = list[_Module | str]  # modules, and the brackets around them


class _Model:
    """A shape's modules by part, and its parameters in the orders in which engines go through them."""

    def __init__(self, shape: ModelShape, autocast: bool) -> None:
        order = _ORDERS[shape.architecture]
        self.dropout_last = order.dropout_last
        self.groups: tuple[list[_Parameter], list[_Parameter]] = ([], [])
        self._left = [list(sizes) for sizes in shape.parameters.groups]
        self._output: _Module = ()  # where it is the embedding
        tied = shape.has_tied_head
        self.before = self._take(order.before, "m0" if autocast and tied else "")  # linear as the output layer
        self.lookups = _modules(self.before)[: order.lookups]
        self.blocks = [
            self._take(order.block, order.block if autocast and order.linear else "") for _ in range(shape.layers)
        ]
        if tied:
            self._output = self.lookups[0]
        self.after = self._take(order.after, order.after if autocast else "")
        assert not any(self._left), shape

    def _take(self, text: str, lowered: str) -> _Layout:
        """Take the next part's parameters off the groups' sizes, and lay them out as its modules.

        Of the modules that are `lowered` those with a matrix are linear layers; one without is a norm.
        """
        words = text.split()
        places = {word: re.findall(r"[mv]\d+", word) for word in words}
        linear = {place for word in lowered.split() if "m" in word for place in places[word]}
        every = sorted((place for found in places.values() for place in found), key=lambda place: int(place[1:]))
        taken = {place: self._next("mv".index(place[0]), place in linear) for place in every}
        layout: _Layout = []
        for word in words:
            if word == "output":
                layout.append(self._output or self._take_output(bool(lowered)))
            else:
                layout.append(word if word in "()" else tuple(taken[place] for place in places[word]))
        return layout

    def _take_output(self, lowered: bool) -> _Module:
        """Take what is left over: an output layer of its own, in GPT-J with a bias."""
        return tuple(self._next(group, lowered) for group in (0, 1) if self._left[group])

    def _next(self, group: int, lowered: bool) -> _Parameter:
        members = self.groups[group]
        start = members[-1].start + members[-1].numel if members else 0
        members.append(_Parameter(self._left[group].pop(0), group, start, lowered))
        return members[-1]

    @property
    def parameters(self) -> list[_Parameter]:
        return [*self.groups[0], *self.groups[1]]

    @property
    def layout(self) -> _Layout:
        return [*self.before, *(item for block in self.blocks for item in block), *self.after]

    def gradient_order(self) -> list[_Parameter]:
        """The order in which gradients are complete: a bias before its matrix, a tied embedding's with its lookup."""
        modules = _modules(self.layout)
        ready: dict[_Parameter, None] = {}
        for module in reversed(modules[:-1] if self._output else modules):
            ready.update(dict.fromkeys(module if module[0].group else module[::-1]))
        return list(ready)


@lru_cache(maxsize=64)
def _model(shape: ModelShape, autocast: bool) -> _Model:
    return _Model(shape, autocast)


def _modules(layout: _Layout) -> list[_Module]:
    """The modules with parameters."""
    return [item for item in layout if item and not isinstance(item, str)]


def _elements(layout: _Layout) -> int:
    return sum(p.numel for p in {p: None for module in _modules(layout) for p in module})


# What engines do without sharding parameters.


def _chunks(numels: Iterable[int], limit: int) -> Iterator[int]:
    """Yield elements of flat tensors that are closed when they hold more than a limit (engine.py)."""
    held = 0
    for numel in numels:
        held += numel
        if held > limit:
            yield held
            held = 0
    if held:
        yield held


def _ddp(engine: Engine, shape: ModelShape, model: _Model) -> Iterator[_Event]:
    """Follow DistributedDataParallel: buckets in the order of gradients, as rebuilt after the first step."""
    held, limit = 0, DDP_FIRST_BUCKET_BYTES
    for parameter in model.gradient_order():
        held += parameter.numel * engine.parameter_bytes
        if held >= limit:
            yield "all_reduce", held
            held, limit = 0, DDP_BUCKET_BYTES
    if held:
        yield "all_reduce", held
    buffers = _buffer_bytes(shape)
    if buffers:  # rank 0's, at the first forward pass after a reduction
        yield "broadcast", buffers


def _buffer_bytes(shape: ModelShape) -> int:
    """Bytes of the tensors that a model of `transformers` keeps beside its parameters, and DDP makes equal."""
    if shape.architecture == "gpt2":
        return 0
    if shape.architecture == "bert":  # positions and token types, as int64
        return 2 * 8 * shape.positions
    if shape.architecture == "gpt-neo":  # each block has a causal mask of booleans
        return shape.layers * shape.positions**2
    if shape.architecture == "gpt-j":  # sines and cosines of its 64 rotary dimensions in each block
        return shape.layers * shape.positions * 64 * 4
    frequencies = 2 * 4 * (shape.head_size // 2)
    return frequencies + (4 if shape.architecture == "gemma2" else 0)  # the embedding's scale


def _engine_reductions(engine: Engine, model: _Model) -> Iterator[_Event]:
    """Follow engine.py's allreduce_no_retain; it takes parameters as declared, which is about as visited."""
    order = dict.fromkeys(p for module in _modules(model.layout) for p in module)
    for elements in _chunks((p.numel for p in order), ENGINE_BUCKET_ELEMENTS):
        yield "all_reduce", elements * engine.parameter_bytes


# DeepSpeed's stages 1 and 2.


def _communicated_bytes(engine: Engine, parameter: _Parameter) -> int:
    """Per element of a gradient; engine.py, communication_data_type, and torch_autocast.py."""
    return 2 if parameter.is_lowered else engine.parameter_bytes


def _partition_elements(engine: Engine, group: Sequence[_Parameter]) -> int:
    """Elements of a group's flat buffer that one rank owns; zero/stage_1_and_2.py, nccl_start_alignment_factor."""
    alignment = 2 * engine.world_size
    return -(-sum(p.numel for p in group) // alignment) * alignment // engine.world_size


def _buckets(engine: Engine, order: Sequence[_Parameter]) -> Iterator[tuple[int, list[_Parameter]]]:
    """Yield full buckets, with the bytes of their elements: one is open for each type that is communicated."""
    held: dict[int, list[_Parameter]] = defaultdict(list)
    elements: dict[int, int] = defaultdict(int)
    for parameter in order:
        size = _communicated_bytes(engine, parameter)
        if held[size] and elements[size] + parameter.numel > engine.reduce_bucket_size:
            yield size, held.pop(size)
            elements[size] = 0
        held[size].append(parameter)
        elements[size] += parameter.numel
    yield from held.items()


def _reductions(engine: Engine, model: _Model, order: Sequence[_Parameter]) -> Iterator[_Event]:
    """Follow stage_1_and_2.py's average_tensor: a bucket to every rank, or its slices to their owners."""
    partitions = [_partition_elements(engine, group) for group in model.groups]
    for size, bucket in _buckets(engine, order):
        if engine.multi_rank_allreduce:
            yield "all_reduce", size * sum(p.numel for p in bucket)
            continue
        owned: dict[int, int] = defaultdict(int)  # owner -> elements
        for p in bucket:
            partition = partitions[p.group]
            for owner in range(p.start // partition, -(-(p.start + p.numel) // partition)):
                inside = min(p.start + p.numel, partition * (owner + 1)) - max(p.start, partition * owner)
                owned[owner] += inside
        for elements in owned.values():
            yield "reduce", size * elements


def _bf16_reductions(engine: Engine, model: _Model) -> Iterator[_Event]:
    """Follow bf16_optimizer.py, whose fp32 gradients are flat, padded and cast to be averaged."""
    flat = [_partition_elements(engine, group) * engine.world_size for group in model.groups]
    for elements in _chunks(flat, ENGINE_BUCKET_ELEMENTS):
        yield "all_reduce", elements * engine.parameter_bytes


def _stages_1_and_2_step(engine: Engine, model: _Model) -> Iterator[_Event]:
    if not is_bf16_optimizer(engine):
        yield from [("all_reduce", 4)] * len(model.groups)  # the norm of each group
        if engine.parameter_bytes == 2:  # check_grad_overflow
            yield "all_reduce", 1
    if engine.world_size > 1:
        for group in model.groups:
            yield "all_gather", engine.parameter_bytes * _partition_elements(engine, group) * engine.world_size


# DeepSpeed's stage 3.


def _padded(engine: Engine, parameter: _Parameter) -> int:
    return -(-parameter.numel // engine.world_size) * engine.world_size


def _stage_3_reductions(engine: Engine, model: _Model) -> Iterator[_Event]:
    for size, bucket in _buckets(engine, model.gradient_order()):
        yield "reduce_scatter", size * sum(_padded(engine, p) for p in bucket)


def _stage_3_step(engine: Engine, model: _Model) -> Iterator[_Event]:
    """Follow stage3.py's step: norms, and the gather of what stays whole between steps (_post_step)."""
    norm_bytes = 4 if engine.offload_optimizer != "none" else 8
    for group in model.groups:  # _create_fp16_sub_groups
        shards = [_padded(engine, p) // engine.world_size for p in group]
        for _ in _chunks(shards, engine.sub_group_size - 1):
            yield "all_reduce", norm_bytes
    if engine.precision == "fp16":
        yield "all_reduce", 1
    if engine.world_size > 1:
        for parameter in model.parameters:
            if parameter.numel <= engine.persistence_threshold:
                yield "all_gather", engine.parameter_bytes * _padded(engine, parameter)


_Visit = tuple[str, _Module]  # enter or leave


def _visits(model: _Model, checkpointing: bool, dropout: bool) -> Iterator[_Visit]:
    """Follow one micro step from module to module, as the hooks of zero/parameter_offload.py see it."""
    yield from _forward(model.layout)
    yield from _backward(model.after)
    for block in model.blocks[::-1]:
        if not checkpointing:
            yield from _backward(block)
            continue
        # Checkpointing without re-entry computes a block again when the backward pass first needs what was not kept,
        # in the block's last module, and stops inside that module, as soon as all is there.
        last = max(
            at
            for at, item in enumerate(block)
            if not isinstance(item, str) and (item or (dropout and model.dropout_last))
        )
        yield from _backward(block[last + 1 :])
        yield "enter", block[last]
        yield from _forward(block[1:last])
        yield "enter", block[last]
        yield "leave", block[last]
        yield from _backward(block[:last])
    for item in model.before[::-1]:
        visits = _backward([item])
        yield from ((action, module) for action, module in visits if action == "enter" or module not in model.lookups)


def _forward(layout: _Layout) -> Iterator[_Visit]:
    for item in layout:
        if item != ")":
            module = () if item == "(" else item
            yield from (("enter", module), ("leave", module))


def _backward(layout: _Layout) -> Iterator[_Visit]:
    for item in layout[::-1]:
        if item != "(":
            module = () if item == ")" else item
            yield from (("enter", module), ("leave", module))


class _Limits(NamedTuple):
    """What decides how long stage 3 holds on to parameters, in elements; as in `Engine`."""

    persistence_threshold: int
    prefetch_bucket_size: int
    max_live_parameters: int
    max_reuse_distance: int


def _limits(engine: Engine) -> _Limits:
    return _Limits(*(getattr(engine, name) for name in _Limits._fields))


def _stage_3_gathers(engine: Engine, gathered: Iterable[Iterable[_Parameter]]) -> Iterator[_Event]:
    for together in gathered:
        sizes: dict[int, int] = defaultdict(int)  # one collective for each type
        for parameter in together:
            size = _communicated_bytes(engine, parameter)
            sizes[size] += size * _padded(engine, parameter)
        yield from (("all_gather", num_bytes) for num_bytes in sizes.values())


@lru_cache(maxsize=256)
def _gathered(
    shape: ModelShape, autocast: bool, limits: _Limits, checkpointing: bool, dropout: bool
) -> tuple[list[list[_Parameter]], int]:
    """List what is gathered together in one micro step, and count the most elements there at once; on any ranks."""
    model = _model(shape, autocast)
    coordinator = _Coordinator(limits, model, list(_visits(model, checkpointing, dropout)))
    return coordinator.gathered(), coordinator.most_live


def most_gathered_elements(engine: Engine, shape: ModelShape, job: Job) -> int:
    """Count the most elements that stage 3 has gathered at once, beside those that stay whole between steps."""
    autocast = engine.precision.endswith("-autocast")
    limits = _limits(engine)
    # Blocks are alike: more of them than fill the limits three times over change nothing but the time that this takes.
    filled = 3 * (limits.max_live_parameters + limits.prefetch_bucket_size) // shape.block_params + 8
    fewer = dataclasses.replace(shape, layers=min(shape.layers, filled))
    return _gathered(fewer, autocast, limits, job.activation_checkpointing, job.dropout)[1]


def gathered_elements(engine: Engine, shape: ModelShape, job: Job) -> int:
    """Count the elements that a micro step gathers at stage 3, on one process from where they are offloaded to."""
    autocast = engine.precision.endswith("-autocast")
    gathered, _ = _gathered(shape, autocast, _limits(engine), job.activation_checkpointing, job.dropout)
    return sum(parameter.numel for together in gathered for parameter in together)


class _Coordinator:
    """What stage 3 gathers, prefetches and lets go of in one micro step (zero/partitioned_param_coordinator.py).

    Every micro step begins with what stays whole between steps and ends with it, so that one is as the other.
    """

    def __init__(self, limits: _Limits, model: _Model, visits: list[_Visit]) -> None:
        self._limits = limits
        self._visits = visits
        self._persistent = {p for p in model.parameters if p.numel <= limits.persistence_threshold}
        self._available = set(self._persistent)
        self._live = 0  # elements gathered in this micro step
        self.most_live = 0
        self._gathered: list[list[_Parameter]] = []
        entered = [module for action, module in visits if action == "enter"]
        self._queue = deque((p, step) for step, module in enumerate(entered) for p in module)
        self._fetched_for: dict[_Parameter, int] = {}  # the last step that a parameter is known to be gathered for
        self._elements_before = [0, *accumulate(sum(p.numel for p in module) for module in entered)]
        self._uses: dict[_Parameter, list[int]] = defaultdict(list)  # steps
        for parameter, step in self._queue:
            self._uses[parameter].append(step)

    def gathered(self) -> list[list[_Parameter]]:
        active: dict[_Parameter, set[int]] = defaultdict(set)  # modules that a parameter is in use by
        step = 0
        for action, module in self._visits:
            if action == "leave":
                for parameter in module:
                    active[parameter].discard(id(module))
                    if not (active[parameter] or self._is_kept(parameter, step)):
                        self._release(parameter)
                continue
            for parameter in module:
                active[parameter].add(id(module))
            self._gather(module)
            for _ in {p for p in module if self._fetched_for.get(p, -1) < step}:
                parameter, last_used = self._queue.popleft()
                self._fetched_for[parameter] = last_used
            self._prefetch()
            step += 1
        return self._gathered

    def _prefetch(self) -> None:
        room = min(self._limits.max_live_parameters - self._live, self._limits.prefetch_bucket_size)
        wanted: dict[_Parameter, None] = {}
        elements = 0
        while self._queue and elements < room:
            parameter, last_used = self._queue.popleft()
            self._fetched_for[parameter] = max(self._fetched_for.get(parameter, -1), last_used)
            if parameter not in self._available and parameter not in wanted:
                wanted[parameter] = None
                elements += parameter.numel
        self._gather(wanted)

    def _gather(self, parameters: Iterable[_Parameter]) -> None:
        missing = [p for p in parameters if p not in self._available]
        if missing:
            self._available.update(missing)
            self._live += sum(p.numel for p in missing)
            self.most_live = max(self.most_live, self._live)
            self._gathered.append(missing)

    def _release(self, parameter: _Parameter) -> None:
        if parameter in self._available:
            self._available.discard(parameter)
            self._live -= parameter.numel

    def _is_kept(self, parameter: _Parameter, step: int) -> bool:
        """Say whether a parameter stays although its module is left: __params_to_release."""
        if parameter in self._persistent or self._fetched_for.get(parameter, -1) > step:
            return True
        uses = self._uses[parameter]
        following = bisect_left(uses, step)
        if following == len(uses):
            return False
        distance = self._elements_before[uses[following]] - self._elements_before[step]
        return distance < self._limits.max_reuse_distance


# FSDP2, as accelerate wraps a model of `transformers`.


def _fsdp(engine: Engine, shape: ModelShape, model: _Model) -> list[_Event]:
    """List the gathers and reductions of a micro step; padding of a parameter's rows is left out.

    One group for each block, and for what surrounds them (accelerate/utils/fsdp_utils.py, fsdp2_prepare_model).
    Gradients are reduced in every micro step, as the study asks accelerate to (`sync_each_batch`) and as the published
    rows' trainer does: kept whole, they would undo what sharding saves. Checkpointing adds no gather: the backward pass
    has gathered a block before it is computed again (fsdp/_fully_shard/_fsdp_state.py).
    """
    word = model.lookups[0]
    around = _elements(model.before) - word[0].numel  # of the root itself
    if shape.is_classifier:  # without a norm at its end, or an output layer
        resharded, kept = [word[0].numel], [around + _elements(model.after)]
    elif shape.tied:
        resharded, kept = [], [_elements(model.after), around]
    else:
        resharded, kept = [word[0].numel], [_elements(model.after), around]
    resharded += [_elements(block) for block in model.blocks]
    groups = [elements for elements in (*kept, *resharded) if elements]
    again = resharded if engine.reshard_after_forward else []
    size = engine.compute_bytes
    gathers = [("all_gather", size * elements) for elements in (*groups, *again)] if engine.world_size > 1 else []
    return [*gathers, *(("reduce_scatter", size * elements) for elements in groups)]
