"""Count parameters, FLOPs and bytes of a traced forward and backward pass, from which memory and time follow.

`zero_study.dryrun.count` traces a model of `transformers` and makes these counts. hub_models.json contains the counts
of widely used models. This module needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

# The settings in which a model is traced: the arithmetic of theory/computation.py, and the kernel of attention.
Setting = Literal["fp32 sdpa", "autocast sdpa", "half sdpa", "fp32 eager", "autocast eager", "half eager"]
# Layouts list the modules of a part in the order of the forward pass: "(" and ")" enclose a module that contains
# others, and a tuple has the numbers of the parameters that a module itself has (empty if it has none).
Item: TypeAlias = "str | tuple[int, ...]"


@dataclass(frozen=True)
class Polynomial:
    """A quantity of one micro step as a polynomial of the sequence length: constant, per token, per pair of tokens."""

    constant: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0

    def of(self, batch: float, length: float) -> float:
        """Return the quantity for `batch` sequences of `length` tokens each."""
        return batch * (self.constant + length * (self.per_token + length * self.per_pair))

    @property
    def content(self) -> list[float]:
        """The three coefficients, as JSON files store them."""
        return [_short(self.constant), _short(self.per_token), _short(self.per_pair)]


def _short(value: float) -> float:
    """Return a number without the digits that come from rounding."""
    rounded = round(value, 4)
    return int(rounded) if rounded == int(rounded) else rounded


@dataclass(frozen=True)
class SettingCounts:
    """The bytes that one part of a model uses in one setting of precision and attention."""

    saved: Polynomial  # saved for the backward pass, without parameters and their casts
    entering: Polynomial  # the part's input, which is all that activation checkpointing saves
    temporary: Polynomial  # at the peak of the part's backward pass, beyond all saved tensors and parameter gradients
    moved_forward: Polynomial  # read and written by kernels other than matrix products and attention
    moved_backward: Polynomial
    kernels: int  # number of kernels in the forward pass
    casts: int = 0  # bytes of autocast's copies of the weights
    temporary_elsewhere: Polynomial = Polynomial()  # a peak at another moment, which is the higher one at some lengths
    # With frozen weights, `saved` is smaller by what only the gradients of weights need, and `temporary` is larger by
    # the part of it that a trained block frees before its peak.
    for_weights: Polynomial = Polynomial()
    freed_early: Polynomial = Polynomial()


@dataclass(frozen=True)
class LinearCounts:
    """A Linear module of each block of one kind, or a Linear module outside the blocks."""

    name: str  # without the number of the block
    inner: int  # width of the input
    outer: int  # width of the output
    rows: Polynomial = Polynomial(per_token=1.0)  # that it multiplies in one pass of one block
    has_bias: bool = False  # outside the blocks only
    is_output: bool = False  # whether it makes the logits
    group: str = ""  # the first Linear with the same input
    input_is_saved: bool = False  # whether another operator of the block saves the input anyway
    is_down: bool = False  # whether it makes the output of the feed-forward part

    @property
    def elements(self) -> int:
        return self.inner * self.outer


@dataclass(frozen=True)
class PartCounts:
    """The parameters, FLOPs and bytes of one kind of block, or of everything outside the blocks."""

    parameters: tuple[int, ...]  # elements of each parameter, in the order of named_parameters()
    rows: tuple[int, ...]  # length of the first dimension of each parameter
    vectors: tuple[int, ...]  # numbers of the parameters with one dimension, which have no weight decay
    linear: tuple[int, ...]  # numbers of the parameters of torch.nn.Linear
    layout: tuple[Item, ...]
    attention_parameters: int  # elements of the parameters of attention
    products: Polynomial  # FLOPs of the forward pass's matrix products and convolutions
    product_elements: Polynomial  # elements that these products read and write, without their weights
    weights: int  # elements of the weights that are multiplied
    attention: Polynomial  # FLOPs of attention's two products in the forward pass, with all pairs of tokens
    causal: float  # the share of these FLOPs with a causal mask
    composed: Polynomial  # elements that are saved in fp32 only because norms and activations are several kernels
    gated: Polynomial  # elements of products of an activation function's output with a gate
    fused_forward: Polynomial  # elements that kernels move in forward if each norm and activation is one kernel
    fused_backward: Polynomial
    unused_experts: int  # elements of the experts that a token does not use
    buffers: int  # bytes of the buffers
    dropped: Polynomial  # elements that pass through dropout, without those that attention drops in a fused kernel
    dropped_scores: Polynomial  # more of them with eager attention, which drops elements of its matrices
    ends_in_dropout: bool  # whether the last module that the forward pass visits is a dropout
    settings: Mapping[str, SettingCounts] = field(hash=False)
    linears: tuple[LinearCounts, ...] = ()  # empty if they are not known

    @property
    def num_params(self) -> int:
        return sum(self.parameters)


POLYNOMIALS = tuple(member.name for member in fields(PartCounts) if member.type == "Polynomial")


@dataclass(frozen=True)
class ModelCounts:
    """The parameters, FLOPs and bytes of a whole model, by kind of block."""

    outside: PartCounts
    before: tuple[Item, ...]  # the outside's modules before the first block, in the order of the forward pass
    after: tuple[Item, ...]  # those after the last block
    kinds: tuple[PartCounts, ...]
    executed: tuple[int, ...]  # the kind of each block, in the order of the forward pass
    copies: tuple[int, ...]  # for each kind, how often its parameters exist; fewer than executions if blocks share them
    hidden: int  # the width of a block's input
    logits: Polynomial  # elements of the model's output
    output: tuple[int, ...]  # numbers of the outside's parameters that make the output
    embedding: int | None  # number of the outside's parameter that is the largest embedding; None without one
    tied: bool  # whether the output layer shares the weights of the embedding
    is_dropout_counted: bool = True  # False for older entries of hub_models.json.gz
    # A part of the model that is frozen and needs no gradients, such as a vision tower. It runs in the forward pass
    # only. Its parameters are not among those of the other fields.
    frozen: ModelCounts | None = None

    @cached_property
    def num_params(self) -> int:
        blocks = sum(copies * kind.num_params for copies, kind in zip(self.copies, self.kinds, strict=True))
        return self.outside.num_params + blocks

    @cached_property
    def active_params(self) -> int:
        idle = sum(copies * kind.unused_experts for copies, kind in zip(self.copies, self.kinds, strict=True))
        return self.num_params - idle

    @property
    def has_dropout(self) -> bool:
        """Whether any module applies dropout if the dropout rate is above 0."""
        is_in_attention = any(kind.dropped_scores != Polynomial() for kind in self.kinds)
        return self.has_dropout_outside_attention or is_in_attention

    @property
    def has_dropout_outside_attention(self) -> bool:
        """Whether dropout is applied anywhere except inside a fused kernel of attention."""
        return any(part.dropped != Polynomial() for part in (self.outside, *self.kinds))

    @property
    def buffers(self) -> int:
        """The bytes of the model's buffers."""
        return self.outside.buffers + sum(
            copies * kind.buffers for copies, kind in zip(self.copies, self.kinds, strict=True)
        )

    @property
    def output_params(self) -> int:
        """The number of elements of the parameters that compute the output."""
        return sum(self.outside.parameters[number] for number in self.output)

    @property
    def embedding_params(self) -> int:
        """The number of elements of the largest embedding."""
        return 0 if self.embedding is None else self.outside.parameters[self.embedding]

    @property
    def declared(self) -> Iterator[tuple[int | None, Sequence[int]]]:
        """Yield each kind of block and the indices of its parameters, in the usual order of the parameters.

        The kind is None for the parameters outside the blocks.

        Outside parameters come first if the forward pass visits their module before the blocks. The others come last.
        """
        early = {number for item in self.before if not isinstance(item, str) for number in item}
        outside = range(len(self.outside.parameters))
        yield None, [number for number in outside if number in early]
        left = list(self.copies)
        for kind in self.executed:
            if left[kind]:
                left[kind] -= 1
                yield kind, range(len(self.kinds[kind].parameters))
        for kind, copies in enumerate(left):
            for _ in range(copies):
                yield kind, range(len(self.kinds[kind].parameters))
        yield None, [number for number in outside if number not in early]


@dataclass(frozen=True)
class ImageCounts:
    """The counts (`ModelCounts`) of a vision-language model for texts with one image each."""

    size: str  # of an image, in words
    tokens: int  # of a text that an image becomes
    trained: ModelCounts | None  # None if only the counts with a frozen vision tower are known
    frozen: ModelCounts | None  # with a frozen vision tower

    def of(self, number: int, freezes: bool) -> ModelCounts | None:
        """Return the counts for texts with this number of images, which may be 0. None if they are not known."""
        counts = self.frozen if freezes else self.trained
        return None if counts is None else _with_images(counts, number)


def _with_images(counts: ModelCounts, number: int) -> ModelCounts:
    """Return counts for `number` images, from those for one. Only what depends on images is constant in them."""
    is_of_images = [not any(each.entering.per_token for each in kind.settings.values()) for kind in counts.kinds]
    return replace(
        counts,
        outside=_times(counts.outside, number),
        kinds=tuple(_times(kind, number) if is_of_images[at] else kind for at, kind in enumerate(counts.kinds)),
        executed=tuple(kind for kind in counts.executed if number or not is_of_images[kind]),
        frozen=None if counts.frozen is None else _with_images(counts.frozen, number),
    )


def _times(part: PartCounts, number: int) -> PartCounts:
    """Return a part with `number` times its constants."""

    def times(polynomial: Polynomial) -> Polynomial:
        return replace(polynomial, constant=number * polynomial.constant)

    settings = {}
    for name, setting in part.settings.items():
        values = {member.name: getattr(setting, member.name) for member in fields(SettingCounts)}
        scaled: dict[str, Any] = {key: times(each) for key, each in values.items() if isinstance(each, Polynomial)}
        settings[name] = replace(setting, **scaled)
    polynomials: dict[str, Any] = {name: times(getattr(part, name)) for name in POLYNOMIALS}
    linears = tuple(replace(linear, rows=times(linear.rows)) for linear in part.linears)
    return replace(part, settings=settings, linears=linears, **polynomials)


# ---------------------------------------------------------------- files


def to_content(value: Any) -> Any:
    """Return counts as plain data for JSON, without the fields that have their defaults."""
    if isinstance(value, Polynomial):
        return value.content
    if is_dataclass(value):
        values = {member.name: (getattr(value, member.name), member.default) for member in fields(value)}
        return {name: to_content(own) for name, (own, default) in values.items() if own != default}
    if isinstance(value, Mapping):
        return {name: to_content(each) for name, each in value.items()}
    return [to_content(each) for each in value] if isinstance(value, tuple) else value


def images_from_content(content: Mapping[str, Any]) -> ImageCounts:
    """Return the counts of a model with images from the plain data that `to_content` made."""
    trained, frozen = (
        from_content(counts) if (counts := content.get(name)) else None for name in ("trained", "frozen")
    )
    return ImageCounts(content["size"], content["tokens"], trained, frozen)


def from_content(content: Mapping[str, Any]) -> ModelCounts:
    """Return the counts of a model from the plain data that `to_content` made."""
    return ModelCounts(
        outside=_part(content["outside"]),
        before=_layout(content["before"]),
        after=_layout(content["after"]),
        kinds=tuple(map(_part, content["kinds"])),
        executed=tuple(content["executed"]),
        copies=tuple(content["copies"]),
        hidden=content["hidden"],
        logits=Polynomial(*content["logits"]),
        output=tuple(content["output"]),
        embedding=content["embedding"],
        tied=content["tied"],
        is_dropout_counted="dropped" in content["outside"],
        frozen=from_content(content["frozen"]) if "frozen" in content else None,
    )


# What older counts do not have.
_UNCOUNTED = {"dropped": (), "dropped_scores": (), "ends_in_dropout": False, "gated": ()}


def _part(content: Mapping[str, Any]) -> PartCounts:
    settings = {setting: SettingCounts(**_values(counts)) for setting, counts in content["settings"].items()}
    values: dict[str, Any] = {**_UNCOUNTED, **content, "settings": settings, "layout": _layout(content["layout"])}
    values["linears"] = tuple(LinearCounts(**_values(linear)) for linear in content.get("linears", ()))
    for name in POLYNOMIALS:
        values[name] = Polynomial(*values[name])
    for name in ("parameters", "rows", "vectors", "linear"):
        values[name] = tuple(content[name])
    return PartCounts(**values)


def _values(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: Polynomial(*value) if isinstance(value, list) else value for name, value in content.items()}


def _layout(content: Iterable[Any]) -> tuple[Item, ...]:
    return tuple(item if isinstance(item, str) else tuple(item) for item in content)
