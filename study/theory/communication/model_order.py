"""The order in which an engine visits a model's modules, their parameters, and their gradients.

The modules and parameters are those of `transformers` 5.23, models/*/modeling_*.py.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from study.theory.shapes import Architecture, Head, ModelShape
from study.theory.shapes.counts import Item, ModelCounts, PartCounts

# The parameters of a module, each by its group in the optimizer: 0 for matrices, 1 for vectors.
MATRIX = (0,)  # an embedding, or a linear layer without a bias
LINEAR = (0, 1)  # a linear layer with a bias
NORM = (1, 1)  # weight and bias
SCALE = (1,)  # a norm without a bias


@dataclass(frozen=True)
class _Part:
    """One part of a model: its modules in the order of declaration and in the order of the forward pass.

    Declared modules are those with parameters, in the order in which `ModelShape.parameters` lists their sizes.
    Brackets mark a module that contains others. `dropout` and `activation` have no parameters. `output` is the output
    layer, which is either the embedding or all remaining parameters. Modules without gradients, such as rotary
    embeddings, are omitted.
    """

    declared: dict[str, tuple[int, ...]]
    visited: str


# The modules after the last norm. The first bracket ends the base model.
_HEADS: dict[Head, _Part] = {
    "tokens": _Part({}, ") output )"),
    "sequence classes": _Part({"score": MATRIX}, ") score )"),
    "token classes": _Part({"score": LINEAR}, ") dropout score )"),
    "none": _Part({}, ")"),
}
_BERT_HEADS: dict[Head, _Part] = {
    "tokens": _Part(
        {"output_bias": SCALE, "transform": LINEAR, "head_norm": NORM},
        ") ) ( ( transform activation head_norm ) output_bias output ) )",
    ),
    "sequence classes": _Part(
        {"pooler": LINEAR, "classifier": LINEAR}, ") ( pooler activation ) ) dropout classifier )"
    ),
    "token classes": _Part({"classifier": LINEAR}, ") ) dropout classifier )"),
    "none": _Part({"pooler": LINEAR}, ") ( pooler activation ) )"),
}


@dataclass(frozen=True)
class _Order:
    """The parts of a model without its head. The backward pass visits them in reverse order."""

    before: _Part
    block: _Part
    last_norm: tuple[int, ...] = NORM  # empty if there is none or if `before` contains it
    is_linear: bool = True  # matrices are torch.nn.Linear, not Conv1D; DeepSpeed's autocast sends these in 16 bits


_WORDS_AND_POSITIONS = _Part({"words": MATRIX, "positions": MATRIX}, "( ( words positions dropout")
_GATED = {"gate": MATRIX, "up": MATRIX, "down": MATRIX}
_ATTENTION = {"query": MATRIX, "key": MATRIX, "value": MATRIX, "attention_output": MATRIX}
_LLAMA_BLOCK = "( norm_1 ( query key value attention_output ) norm_2 ( gate activation up down ) )"
_LLAMA = _Order(
    before=_Part({"words": MATRIX}, "( ( words"),
    block=_Part({**_ATTENTION, **_GATED, "norm_1": SCALE, "norm_2": SCALE}, _LLAMA_BLOCK),
    last_norm=SCALE,
)
_HEAD_NORMS = {"query_norm": SCALE, "key_norm": SCALE}
_NORMED_BLOCK = _LLAMA_BLOCK.replace("value", "value query_norm key_norm")
_EXPERTS = {"experts": (0, 0)}  # all gates and ups, all downs


def _mixture(declared: dict[str, tuple[int, ...]]) -> _Order:
    """Return the parts of a decoder with a mixture of experts. All experts of a block are one module."""
    attention = _NORMED_BLOCK if "query_norm" in declared else _LLAMA_BLOCK
    visited = attention.replace("gate activation up down", "router ( experts )")
    return dataclasses.replace(_LLAMA, block=_Part(declared, visited))


_ORDERS: dict[Architecture, _Order] = {
    "bert": _Order(
        before=_Part(
            {"words": MATRIX, "positions": MATRIX, "token_types": MATRIX, "norm": NORM},
            "( ( ( words token_types positions norm dropout ) (",
        ),
        block=_Part(
            {
                "query": LINEAR, "key": LINEAR, "value": LINEAR, "attention_output": LINEAR, "norm_1": NORM,
                "up": LINEAR, "down": LINEAR, "norm_2": NORM,
            },
            "( ( ( query key value ) ( attention_output dropout norm_1 ) ) ( up activation ) ( down dropout norm_2 ) )",
        ),
        last_norm=(),
    ),
    "gpt2": _Order(
        before=_WORDS_AND_POSITIONS,
        block=_Part(
            {
                "norm_1": NORM, "query_key_value": LINEAR, "attention_output": LINEAR,
                "norm_2": NORM, "up": LINEAR, "down": LINEAR,
            },
            "( norm_1 ( query_key_value attention_output dropout ) norm_2 ( up activation down dropout ) )",
        ),
        is_linear=False,
    ),
    "gpt-neo": _Order(
        before=_WORDS_AND_POSITIONS,
        block=_Part(
            {
                "norm_1": NORM, "key": MATRIX, "value": MATRIX, "query": MATRIX, "attention_output": LINEAR,
                "norm_2": NORM, "up": LINEAR, "down": LINEAR,
            },
            "( norm_1 ( ( query key value dropout attention_output dropout ) ) norm_2 ( up activation down dropout ) )",
        ),
    ),
    "gpt-j": _Order(
        before=_Part({"words": MATRIX}, "( ( words dropout"),
        block=_Part(
            {
                "norm_1": NORM, "key": MATRIX, "value": MATRIX, "query": MATRIX, "attention_output": MATRIX,
                "up": LINEAR, "down": LINEAR,
            },
            "( norm_1 ( query key value dropout attention_output dropout ) ( up activation down dropout ) )",
        ),
    ),
    "gpt-neox": _Order(
        before=_Part({"words": MATRIX}, "( ( words dropout"),
        block=_Part(
            {
                "norm_1": NORM, "norm_2": NORM, "query_key_value": LINEAR, "attention_output": LINEAR, "up": LINEAR,
                "down": LINEAR,
            },
            "( norm_1 ( query_key_value attention_output ) dropout norm_2 ( up activation down ) dropout )",
        ),
    ),
    "opt": _Order(
        before=_Part({"words": MATRIX, "positions": MATRIX, "last_norm": NORM}, "( ( ( words positions"),
        block=_Part(
            {
                "key": LINEAR, "value": LINEAR, "query": LINEAR, "attention_output": LINEAR, "norm_1": NORM,
                "up": LINEAR, "down": LINEAR, "norm_2": NORM,
            },
            "( norm_1 ( query key value attention_output ) norm_2 up activation down )",
        ),
        last_norm=(),
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _mixture({**_ATTENTION, "router": MATRIX, **_EXPERTS, "norm_1": SCALE, "norm_2": SCALE}),
    "qwen3-moe": _mixture(
        {
            **_ATTENTION, **_HEAD_NORMS, **_EXPERTS, "router": MATRIX, "norm_1": SCALE,
            "norm_2": SCALE,
        }
    ),
    "qwen3": _Order(
        before=_LLAMA.before,
        block=_Part({**_ATTENTION, **_HEAD_NORMS, **_GATED, "norm_1": SCALE, "norm_2": SCALE}, _NORMED_BLOCK),
        last_norm=SCALE,
    ),
    "gemma3": _Order(
        before=_LLAMA.before,
        block=_Part(
            {
                **_ATTENTION, **_HEAD_NORMS, **_GATED, "norm_1": SCALE, "norm_2": SCALE, "norm_3": SCALE,
                "norm_4": SCALE,
            },
            "( norm_1 ( query key value query_norm key_norm attention_output ) norm_2 norm_3 "
            "( gate activation up down ) norm_4 )",
        ),
        last_norm=SCALE,
    ),
    "qwen2": _Order(
        before=_LLAMA.before,
        block=_Part(
            {
                "query": LINEAR, "key": LINEAR, "value": LINEAR, "attention_output": MATRIX, **_GATED,
                "norm_1": SCALE, "norm_2": SCALE,
            },
            _LLAMA_BLOCK,
        ),
        last_norm=SCALE,
    ),
    "gemma2": _Order(
        before=_LLAMA.before,
        block=_Part(
            {**_ATTENTION, **_GATED, "norm_1": SCALE, "norm_2": SCALE, "norm_3": SCALE, "norm_4": SCALE},
            "( norm_1 ( query key value attention_output ) norm_2 norm_3 ( gate activation up down ) norm_4 )",
        ),
        last_norm=SCALE,
    ),
}  # fmt: skip


@dataclass(frozen=True, eq=False)  # a parameter equals only itself
class Parameter:
    """One parameter and its position in the optimizer's flat buffers, in elements."""

    numel: int
    group: int  # group in the optimizer: 0 for matrices, 1 for vectors
    start: int  # in the group's flat buffer
    is_lowered: bool  # communicated in 16 bits under DeepSpeed's autocast
    is_linear: bool = True  # of torch.nn.Linear; known of traced models only

    @property
    def end(self) -> int:
        return self.start + self.numel


Module = tuple[Parameter, ...]  # empty for dropouts and activation functions
Layout = list[Module | str]  # modules in the order of a forward pass, and the brackets around them


class Model:
    """A shape's modules by part, and its parameters in the orders in which engines visit them."""

    def __init__(self, shape: ModelShape, autocast: bool) -> None:
        order = _ORDERS[shape.architecture]
        after = _after(shape, order)
        self.groups: tuple[list[Parameter], list[Parameter]] = ([], [])
        self.ends_in_dropout = order.block.visited.rstrip(" )").endswith("dropout")  # each block
        self._sizes_left = [list(sizes) for sizes in shape.parameters.groups]
        self._tied_output: Module = ()  # the embedding, if it is the output layer too
        self._modules: dict[str, Module] = {}
        tied = shape.has_tied_head
        self.before = self._take(order.before, {"words"} if autocast and tied else set())
        # Embeddings. Their inputs are integers, so the backward pass has no hook that leaves them.
        self.lookups = [module for module in modules_of(self.before) if module[0].group == 0]
        lowered = set(order.block.declared) - {"router", "experts"} if autocast and order.is_linear else set()
        self.blocks = [self._take(order.block, lowered) for _ in range(shape.layers)]
        if tied:
            self._tied_output = self.lookups[0]
        self.after = self._take(after, {*after.declared, "output"} if autocast else set())
        assert not any(self._sizes_left), shape

    def _take(self, part: _Part, lowered: set[str]) -> Layout:
        """Return the modules of a part in the order of the forward pass.

        The sizes of their parameters are removed from the remaining sizes of the groups. `lowered` names modules whose
        parameters are sent in 16 bits if they have a matrix. A module without a matrix is a norm, which is not.
        """
        self._modules |= {
            name: tuple(self._next(group, name in lowered and 0 in groups) for group in groups)
            for name, groups in part.declared.items()
        }
        layout: Layout = []
        for word in part.visited.split():
            if word in "()":
                layout.append(word)
            elif word == "output":  # all remaining parameters: the output layer, or only its bias if it is tied
                unused = (self._next(group, "output" in lowered) for group in (0, 1) if self._sizes_left[group])
                layout.append((*self._tied_output, *unused))
            else:
                layout.append(() if word in ("dropout", "activation") else self._modules[word])
        return layout

    def _next(self, group: int, is_lowered: bool) -> Parameter:
        members = self.groups[group]
        start = members[-1].end if members else 0
        members.append(Parameter(self._sizes_left[group].pop(0), group, start, is_lowered))
        return members[-1]

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


class TracedModel(Model):
    """The modules of a traced model, in the order in which its forward pass visited them."""

    def __init__(self, counts: ModelCounts, autocast: bool) -> None:
        self._autocast = autocast
        self.groups = ([], [])
        self.ends_in_dropout = False
        outside = self._parameters(counts.outside)
        self.before = _placed(counts.before, outside, outside)
        self.lookups = [
            module for module in modules_of(self.before) if module[0].group == 0 and not module[0].is_linear
        ]
        sets = [
            [self._parameters(kind) for _ in range(copies)]
            for kind, copies in zip(counts.kinds, counts.copies, strict=True)
        ]
        used: Counter[int] = Counter()
        self.blocks = []
        for kind in counts.executed:
            own = sets[kind][used[kind] % len(sets[kind])]
            self.blocks.append(_placed(counts.kinds[kind].layout, own, outside))
            used[kind] += 1
        self.after = _placed(counts.after, outside, outside)
        embedding = None if counts.embedding is None else outside[counts.embedding]
        self._tied_output = (embedding,) if counts.tied and embedding is not None else ()

    def _parameters(self, part: PartCounts) -> list[Parameter]:
        made = []
        vectors, linear = set(part.vectors), set(part.linear)
        for number, numel in enumerate(part.parameters):
            group = int(number in vectors)
            members = self.groups[group]
            start = members[-1].end if members else 0
            is_linear = number in linear
            members.append(Parameter(numel, group, start, self._autocast and is_linear, is_linear))
            made.append(members[-1])
        return made


def _placed(layout: Iterable[Item], own: list[Parameter], outside: list[Parameter]) -> Layout:
    """Return a layout with parameters in place of their numbers. Negative numbers are those of the outside."""
    return [
        item if isinstance(item, str) else tuple(own[n] if n >= 0 else outside[-1 - n] for n in item) for item in layout
    ]


def _after(shape: ModelShape, order: _Order) -> _Part:
    """Return the modules after the last block: a norm, and the head."""
    if shape.is_encoder:
        return _BERT_HEADS[shape.head]
    head = _HEADS[shape.head]
    declared = {"last_norm": order.last_norm} if order.last_norm else {}
    return _Part({**declared, **head.declared}, f"last_norm {head.visited}")


@lru_cache(maxsize=64)
def model_of(shape: ModelShape, autocast: bool) -> Model:
    """Return the modules of a shape.

    With `autocast`, which is DeepSpeed's, the parameters of linear layers are sent in 16 bits.
    """
    return Model(shape, autocast) if shape.counts is None else TracedModel(shape.counts, autocast)


def modules_of(layout: Layout) -> list[Module]:
    """Return the modules of a layout that have parameters, without brackets."""
    return [item for item in layout if item and not isinstance(item, str)]
