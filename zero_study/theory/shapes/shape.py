"""The shape of a transformer, and the sizes of its parameters by optimizer group, in the order of an engine.

The modules are those of `transformers` 5.23, models/*/modeling_*.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

from zero_study.theory.shapes.adapter import Adapter
from zero_study.theory.shapes.counts import ImageCounts, ModelCounts

# The `architecture` of a model type in model_types.yaml, or "traced".
Architecture: TypeAlias = str
# The output after the last block. tokens: a logit for every entry of the vocabulary, at every token. The classes are
# for a whole sequence or for every token.
Head = Literal["tokens", "sequence classes", "token classes", "none"]


@dataclass(frozen=True)
class ParameterSizes:
    """The number of elements of each parameter, in the two groups of AdamW: with and without weight decay."""

    matrices: tuple[int, ...]  # with weight decay
    vectors: tuple[int, ...]  # biases and norms, without weight decay

    @property
    def groups(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.matrices, self.vectors

    @property
    def num_params(self) -> int:
        return sum(self.matrices) + sum(self.vectors)


# ---------------------------------------------------------------- the shape

Plain = Literal["bert", "gpt2", "gpt-neo", "gpt-j"]  # the architectures that the workloads train


@dataclass(frozen=True)
class ModelShape:
    """The properties of a transformer that decide its memory and its computation."""

    name: str
    architecture: Architecture
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int  # the longest sequence, and the rows of a learned position embedding
    feed_forward: int
    kv_heads: int  # fewer than heads with grouped-query attention
    head_size: int  # hidden / heads in most models, but not in Gemma
    tied: bool  # whether the output layer shares the weights of the embedding
    activation: str  # name in its config.json, such as gelu, gelu_new or silu
    counts: ModelCounts = field(repr=False)
    head: Head = "tokens"
    labels: int = 2  # number of classes, if the head has classes
    experts: int = 0  # experts per block, each of width feed_forward; 0 without experts
    experts_per_token: int = 0
    notes: tuple[str, ...] = field(default=(), compare=False)  # ignored or guessed settings of its config.json
    # The config.json, from which transformers can build the model. None if only its counts are known.
    config: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    adapter: Adapter | None = None  # adapters that are trained instead of the model's weights, which are frozen
    # The rates of dropout in the model's body by the name in its config.json. None if they are not known.
    dropout: Mapping[str, float] | None = field(default=None, compare=False, repr=False)
    image: str | None = field(default=None, compare=False)  # the size of an image in words, if the model reads images
    # Of a vision-language model: its counts with images, and the images of each text.
    with_image: ImageCounts | None = field(default=None, compare=False, repr=False)
    num_images: int = 0

    @property
    def reads_images(self) -> bool:
        """Whether the model reads images only. One image is then a sequence of one position."""
        return self.architecture == "traced" and self.positions == 1

    @property
    def has_idle_part(self) -> bool:
        """Whether a part of the model does not run, such as the image encoder if only texts are counted."""
        return len(set(self.counts.executed)) < len(self.counts.kinds) or self.counts.frozen is not None

    @property
    def num_image_tokens(self) -> int:
        """The number of tokens that the images of each text become."""
        return 0 if self.with_image is None else self.num_images * self.with_image.tokens

    def with_images(self, number: int, freezes: bool) -> ModelShape:
        """Return the shape with this number of images in each text, and with a frozen vision tower if `freezes`.

        Raises ValueError if images are not counted for the model.
        """
        counts = None if self.with_image is None else self.with_image.of(number, freezes)
        if counts is None:
            raise ValueError(f"images are not counted for {self.name}")
        return dataclasses.replace(self, counts=counts, layers=len(counts.executed), num_images=number)

    @property
    def default_dropout(self) -> dict[str, float]:
        """The rates of dropout above 0 with which the model is trained by default."""
        return {name: rate for name, rate in (self.dropout or {}).items() if rate}

    @cached_property
    def parameters(self) -> ParameterSizes:
        """The sizes of the model's own parameters, without adapters, in the order in which an engine sees them."""
        groups: tuple[list[int], list[int]] = ([], [])
        for kind, numbers in self.counts.declared:
            part = self.counts.outside if kind is None else self.counts.kinds[kind]
            vectors = set(part.vectors)
            for number in numbers:
                groups[number in vectors].append(part.parameters[number])
        return ParameterSizes(tuple(groups[0]), tuple(groups[1]))

    @property
    def num_params(self) -> int:
        return self.counts.num_params

    @property
    def active_params(self) -> int:
        """Number of active parameters: all parameters except those of the experts that a token does not use."""
        return self.counts.active_params

    @property
    def block_params(self) -> int:
        """Number of parameters of the largest transformer block. Sharded blocks are gathered as a whole."""
        return max((kind.num_params for kind in self.counts.kinds), default=0)

    @property
    def outside_params(self) -> int:
        """Number of parameters outside the blocks: embeddings, last norm, head."""
        return self.counts.outside.num_params

    @property
    def feed_forward_params(self) -> int:
        """Number of parameters of a block without its attention."""
        return max((kind.num_params - kind.attention_parameters for kind in self.counts.kinds), default=0)

    @property
    def output_params(self) -> int:
        """Number of parameters of the output layer over the vocabulary."""
        return self.counts.output_params

    @property
    def embedding_params(self) -> int:
        """Number of parameters of the embedding of tokens."""
        return self.counts.embedding_params

    @property
    def has_tied_head(self) -> bool:
        """Whether the output layer shares the embedding's weights. The head of a classifier never does."""
        return self.counts.tied

    @property
    def is_causal(self) -> bool:
        """Whether all attention is causal, and a fused kernel of it needs no mask."""
        kinds = self.counts.kinds
        return all(kind.causal < 1 and not kind.settings["half sdpa"].saved.per_pair for kind in kinds)

    @property
    def has_sliding_window(self) -> bool:
        """Whether the config.json gives some blocks a window of attention."""
        config = self.config or {}
        others = set(config.get("layer_types") or ()) - {"full_attention"}
        return bool(others) or bool(config.get("sliding_window") and config.get("use_sliding_window", True))

    def shortened(self, layers: int) -> ModelShape:
        """Return the shape with at most this many blocks."""
        if len(self.counts.executed) <= layers:
            return self
        executed = self.counts.executed[:layers]
        copies = tuple(min(count, executed.count(kind)) for kind, count in enumerate(self.counts.copies))
        counts = dataclasses.replace(self.counts, executed=executed, copies=copies)
        return dataclasses.replace(self, layers=layers, counts=counts)


# ---------------------------------------------------------------- the study's models


def shape_from_counts(
    name: str,
    counts: ModelCounts,
    positions: int,
    notes: tuple[str, ...] = (),
    config: Mapping[str, Any] | None = None,
    dropout: Mapping[str, float] | None = None,
    image: str | None = None,
    with_image: ImageCounts | None = None,
) -> ModelShape:
    """Return the shape of a traced model. `positions` is the longest sequence in tokens, and 1 for images."""
    rows = 0 if counts.embedding is None else counts.outside.rows[counts.embedding]
    experts = any(kind.unused_experts for kind in counts.kinds)
    return ModelShape(
        name=name,
        architecture="traced",
        layers=len(counts.executed),
        hidden=counts.hidden,
        heads=1,
        vocabulary=rows,
        positions=positions,
        feed_forward=counts.hidden,
        kv_heads=1,
        head_size=counts.hidden,
        tied=counts.tied,
        activation="",
        head="tokens" if counts.logits.per_token else "sequence classes",
        labels=round(counts.logits.constant),
        experts=int(experts),
        notes=notes,
        counts=counts,
        config=config,
        dropout=dropout,
        image=image,
        with_image=with_image,
    )


def architecture_of(workload: str, size: str) -> Plain:
    """Return the architecture that a workload trains at one of its sizes."""
    if workload == "bert-imdb":
        return "bert"
    by_size: dict[str, Plain] = {"2.7b": "gpt-neo", "6b": "gpt-j"}
    return by_size.get(size, "gpt2")
