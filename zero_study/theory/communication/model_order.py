"""Determine the order in which an engine visits a model's modules, parameters and gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from zero_study.theory.shapes import ModelShape
from zero_study.theory.shapes.counts import Item, ModelCounts, PartCounts


@dataclass(frozen=True, eq=False)  # a parameter equals only itself
class Parameter:
    """One parameter and its position in the optimizer's flat buffers, in elements."""

    numel: int
    group: int  # group in the optimizer: 0 for matrices, 1 for vectors
    start: int  # in the group's flat buffer
    is_lowered: bool  # communicated in 16 bits under DeepSpeed's autocast
    is_linear: bool  # of torch.nn.Linear

    @property
    def end(self) -> int:
        return self.start + self.numel


Module = tuple[Parameter, ...]  # empty for dropouts and activation functions
Layout = list[Module | str]  # modules in the order of a forward pass, and the brackets around them


class Model:
    """A model's modules in the order of its forward pass, and its parameters in the orders of engines."""

    def __init__(self, counts: ModelCounts, autocast: bool) -> None:
        self._autocast = autocast
        self.groups: tuple[list[Parameter], list[Parameter]] = ([], [])
        self.ends_in_dropout = all(kind.ends_in_dropout for kind in counts.kinds)  # each block
        outside: dict[int, Parameter] = {}
        sets: list[list[dict[int, Parameter]]] = [[] for _ in counts.kinds]
        for kind, numbers in counts.declared:
            if kind is None:
                outside |= self._parameters(counts.outside, numbers)
            else:
                sets[kind].append(self._parameters(counts.kinds[kind], numbers))
        embedding = None if counts.embedding is None else outside[counts.embedding]
        # The embedding, if it is the output layer too.
        self._tied_output: Module = (embedding,) if counts.tied and embedding is not None else ()
        self.before = _placed(counts.before, outside, outside)
        # Embeddings. Their inputs are integers, so the backward pass has no hook that leaves them.
        self.lookups = [
            module
            for module in modules_of(self.before)
            if module[0].group == 0 and (module[0] is embedding or not module[0].is_linear)
        ]
        used: Counter[int] = Counter()
        self.blocks: list[Layout] = []
        for kind in counts.executed:
            own = sets[kind][used[kind] % len(sets[kind])]
            self.blocks.append(_placed(counts.kinds[kind].layout, own, outside))
            used[kind] += 1
        self.after = _placed(counts.after, outside, outside)

    def _parameters(self, part: PartCounts, numbers: Iterable[int]) -> dict[int, Parameter]:
        """Return parameters of a part by their numbers, and add them to the groups of the optimizer."""
        made = {}
        vectors, linear = set(part.vectors), set(part.linear)
        for number in numbers:
            group = int(number in vectors)
            members = self.groups[group]
            start = members[-1].end if members else 0
            is_linear = number in linear
            members.append(Parameter(part.parameters[number], group, start, self._autocast and is_linear, is_linear))
            made[number] = members[-1]
        return made

    @property
    def parameters(self) -> list[Parameter]:
        return [*self.groups[0], *self.groups[1]]

    @property
    def layout(self) -> Layout:
        return [*self.before, *(item for block in self.blocks for item in block), *self.after]

    def gradient_order(self) -> list[Parameter]:
        """Return the parameters in the order in which their gradients are complete.

        A bias comes before its matrix, and a tied embedding comes last.
        """
        modules = modules_of(self.layout)
        if self._tied_output and modules:
            modules[-1] = tuple(p for p in modules[-1] if p not in self._tied_output)
        ready: dict[Parameter, None] = {}
        for module in reversed(modules):
            ready.update(dict.fromkeys(module if module and module[0].group else module[::-1]))
        return list(ready)


def _placed(layout: Iterable[Item], own: dict[int, Parameter], outside: dict[int, Parameter]) -> Layout:
    """Return a layout with parameters in place of their numbers. Negative numbers are those of the outside."""
    return [
        item if isinstance(item, str) else tuple(own[n] if n >= 0 else outside[-1 - n] for n in item) for item in layout
    ]


@lru_cache(maxsize=64)
def model_of(shape: ModelShape, autocast: bool) -> Model:
    """Return the modules and parameters of a model in the order in which engines visit them, from its shape.

    With `autocast`, which is DeepSpeed's, the parameters of linear layers are sent in 16 bits.
    """
    return Model(shape.counts, autocast)


def modules_of(layout: Layout) -> list[Module]:
    """Return the modules of a layout that have parameters. The layout's marks of container modules are left out."""
    return [item for item in layout if item and not isinstance(item, str)]
