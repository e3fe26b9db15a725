"""What does DeepSpeed's stage 3 gather, prefetch and let go of, module by module of a micro step? Sizes in elements.

zero/parameter_offload.py has the hooks, zero/partitioned_param_coordinator.py what they call.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from study.theory.case import Engine
from study.theory.communication.model_order import Layout, Model, Module, Parameter

Visit = tuple[str, Module]  # enter or leave


class Sections(NamedTuple):
    """The visits of one micro step, by what is computed; the blocks in backward's order."""

    forward: list[Visit]
    after: list[Visit]  # backward of what follows the blocks
    blocks: list[list[Visit]]
    before: list[Visit]

    @property
    def visits(self) -> list[Visit]:
        return [*self.forward, *self.after, *(visit for block in self.blocks for visit in block), *self.before]


def sections(model: Model, checkpointing: bool, dropout: bool) -> Sections:
    """Follow one micro step from module to module, as the hooks of zero/parameter_offload.py see it."""
    blocks = [list(_backward_of_block(model, block, checkpointing, dropout)) for block in model.blocks[::-1]]
    before = [
        (action, module)
        for item in model.before[::-1]
        for action, module in _backward([item])
        if action == "enter" or module not in model.lookups
    ]
    return Sections(list(_forward(model.layout)), list(_backward(model.after)), blocks, before)


def _backward_of_block(model: Model, block: Layout, checkpointing: bool, dropout: bool) -> Iterator[Visit]:
    if not checkpointing:
        yield from _backward(block)
        return
    # Checkpointing without re-entry computes a block again when the backward pass first needs what was not kept, in the
    # block's last module, and stops inside that module, as soon as all is there.
    last = max(
        at
        for at, item in enumerate(block)
        if not isinstance(item, str) and (item or (dropout and model.ends_in_dropout))
    )
    yield from _backward(block[last + 1 :])
    yield "enter", block[last]
    yield from _forward(block[1:last])
    yield "enter", block[last]
    yield "leave", block[last]
    yield from _backward(block[:last])


def _forward(layout: Layout) -> Iterator[Visit]:
    for item in layout:
        if item != ")":
            module = () if item == "(" else item
            yield from (("enter", module), ("leave", module))


def _backward(layout: Layout) -> Iterator[Visit]:
    for item in layout[::-1]:
        if item != "(":
            module = () if item == ")" else item
            yield from (("enter", module), ("leave", module))


class Limits(NamedTuple):
    """What decides how long stage 3 holds on to parameters, in elements; as in `Engine`."""

    persistence_threshold: int
    prefetch_bucket_size: int
    max_live_parameters: int
    max_reuse_distance: int

    @classmethod
    def of(cls, engine: Engine) -> Limits:
        return cls(*(getattr(engine, name) for name in cls._fields))


class Gather(NamedTuple):
    """What is gathered in one go."""

    parameters: list[Parameter]
    were_released: bool  # in this micro step before


class Coordinator:
    """What stage 3 gathers, prefetches and lets go of in one micro step (zero/partitioned_param_coordinator.py).

    Every micro step begins with what stays whole between steps and ends with it, so that one is as the other. With
    `apart`, what was released before is gathered apart from what was not: it has a secondary copy, in a smaller group.
    """

    def __init__(self, limits: Limits, model: Model, visits: list[Visit], apart: bool = False) -> None:
        self._limits = limits
        self._visits = visits
        self._persistent = {p for p in model.parameters if p.numel <= limits.persistence_threshold}
        self._available = set(self._persistent)
        self._live = 0  # elements gathered in this micro step
        self.live: list[int] = []  # the same, after each visit
        self._gathered: list[Gather] = []
        self._apart = apart
        self._released: set[Parameter] = set()
        entered = [module for action, module in visits if action == "enter"]
        self._queue = deque((p, step) for step, module in enumerate(entered) for p in module)
        self._fetched_for: dict[Parameter, int] = {}  # the last step that a parameter is known to be gathered for
        self._elements_before = [0, *accumulate(sum(p.numel for p in module) for module in entered)]
        self._uses: dict[Parameter, list[int]] = defaultdict(list)  # steps
        for parameter, step in self._queue:
            self._uses[parameter].append(step)

    def gathered(self) -> list[Gather]:
        active: dict[Parameter, set[int]] = defaultdict(set)  # modules that a parameter is in use by
        step = 0
        for action, module in self._visits:
            if action == "leave":
                for parameter in module:
                    active[parameter].discard(id(module))
                    if not (active[parameter] or self._is_kept(parameter, step)):
                        self._release(parameter)
                self.live.append(self._live)
                continue
            for parameter in module:
                active[parameter].add(id(module))
            self._gather(module)
            for _ in {p for p in module if self._fetched_for.get(p, -1) < step}:
                parameter, last_used = self._queue.popleft()
                self._fetched_for[parameter] = last_used
            self._prefetch()
            self.live.append(self._live)
            step += 1
        return self._gathered

    def _prefetch(self) -> None:
        room = min(self._limits.max_live_parameters - self._live, self._limits.prefetch_bucket_size)
        wanted: dict[Parameter, None] = {}
        elements = 0
        while self._queue and elements < room:
            parameter, last_used = self._queue.popleft()
            self._fetched_for[parameter] = max(self._fetched_for.get(parameter, -1), last_used)
            if parameter not in self._available and parameter not in wanted:
                wanted[parameter] = None
                elements += parameter.numel
        self._gather(wanted)

    def _gather(self, parameters: Iterable[Parameter]) -> None:
        missing = [p for p in parameters if p not in self._available]
        if missing:
            self._available.update(missing)
            self._live += sum(p.numel for p in missing)
            released = [p for p in missing if self._apart and p in self._released]
            others = [p for p in missing if p not in released]
            self._gathered += [Gather(each, each is released) for each in (released, others) if each]

    def _release(self, parameter: Parameter) -> None:
        if parameter in self._available:
            self._available.discard(parameter)
            self._released.add(parameter)
            self._live -= parameter.numel

    def _is_kept(self, parameter: Parameter, step: int) -> bool:
        """Say whether a parameter stays although its module is left: __params_to_release."""
        if parameter in self._persistent or self._fetched_for.get(parameter, -1) > step:
            return True
        uses = self._uses[parameter]
        following = bisect_left(uses, step)
        if following == len(uses):
            return False
        distance = self._elements_before[uses[following]] - self._elements_before[step]
        return distance < self._limits.max_reuse_distance
