"""The shape of a transformer, and the sizes of its parameters by optimizer group, in the order of an engine.

The modules are those of `transformers` 5.23, models/*/modeling_*.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

from study.theory.shapes.adapter import Adapter
from study.theory.shapes.counts import ModelCounts

# The name of a model type in config_json.py, or "traced".
Architecture: TypeAlias = str
# The output after the last block. tokens: a logit for every entry of the vocabulary, at every token. The classes are
# for a whole sequence or for every token.
Head = Literal["tokens", "sequence classes", "token classes", "none"]

LEARNED_POSITIONS: tuple[Architecture, ...] = ("bert", "gpt2", "gpt-neo")


@dataclass(frozen=True)
class ParameterSizes:
    """The elements of each parameter, in the two groups of this project's AdamW: with and without weight decay."""

    matrices: tuple[int, ...]  # with weight decay
    vectors: tuple[int, ...]  # biases and norms, without weight decay

    @property
    def groups(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.matrices, self.vectors

    @property
    def num_params(self) -> int:
        return sum(self.matrices) + sum(self.vectors)


@dataclass(frozen=True)
class Widths:
    """The widths of a block, from which the sizes of its parameters follow."""

    architecture: Architecture
    hidden: int
    attention: int  # width of all queries together
    key_value: int  # width of all keys together, and of all values
    feed_forward: int


@dataclass(frozen=True)
class Outside:
    """The properties that decide the sizes of the parameters outside the blocks, and the number of blocks."""

    layers: int
    positions: int
    vocabulary: int
    tied: bool
    head: Head
    labels: int


def block(w: Widths) -> tuple[list[int], list[int]]:
    """Return the sizes of the matrices and of the vectors of one block.

    Both are in the order of named_parameters() of the models of transformers.
    """
    hidden, wide = w.hidden, w.feed_forward
    attention = [hidden * w.attention, hidden * w.key_value, hidden * w.key_value, hidden * w.attention]
    fused = [sum(attention[:3]), attention[3]]  # query, key and value are one matrix
    plain = [hidden * wide, wide * hidden]
    match w.architecture:
        case "bert":  # biases of query, key, value and output; a norm; another norm at the end
            return [*attention, *plain], [hidden] * 6 + [wide] + [hidden] * 3
        case "gpt2":
            return [*fused, *plain], [hidden] * 2 + [3 * hidden] + [hidden] * 3 + [wide, hidden]
        case "gpt-neo":  # in attention, only the output has a bias
            return [*attention, *plain], [hidden] * 5 + [wide, hidden]
        case "gpt-j":  # one norm for both halves of the block; no biases in attention
            return [*attention, *plain], [hidden] * 2 + [wide, hidden]
    raise ValueError(f"there are no formulas for the blocks of {w.architecture}")


def all_sizes(w: Widths, outside: Outside) -> ParameterSizes:
    """Return the sizes of all parameters of a model."""
    hidden = w.hidden
    block_matrices, block_vectors = block(w)
    embeddings, first_norm, last_norm = [outside.vocabulary * hidden], [], [hidden] * 2
    if w.architecture in LEARNED_POSITIONS:
        embeddings.append(outside.positions * hidden)
    if w.architecture == "bert":  # token types; the norm is after the embeddings, not at the end
        embeddings.append(2 * hidden)
        first_norm, last_norm = [hidden] * 2, []
    head, head_vectors = _head(w, outside)
    return ParameterSizes(
        matrices=(*embeddings, *block_matrices * outside.layers, *head),
        vectors=(*first_norm, *block_vectors * outside.layers, *last_norm, *head_vectors),
    )


def _head(w: Widths, outside: Outside) -> tuple[list[int], list[int]]:
    """Return the sizes of the matrices and of the vectors after the last norm."""
    hidden, words = w.hidden, outside.vocabulary
    is_bert = w.architecture == "bert"
    pooler = ([hidden**2], [hidden]) if is_bert else ([], [])
    classifier = [outside.labels * hidden]
    match outside.head:
        case "none":
            return pooler
        case "sequence classes":  # the classifier of a decoder has no bias
            return ([*pooler[0], *classifier], [hidden, outside.labels]) if is_bert else (classifier, [])
        case "token classes":
            return classifier, [outside.labels]
    output = [] if outside.tied else [words * hidden]
    if is_bert:  # a layer and a norm before the output; its bias is tied like its weights
        return [hidden**2, *output], [words, *[hidden] * 3, *([] if outside.tied else [words])]
    return output, [words] if w.architecture == "gpt-j" else []


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
    head: Head = "tokens"
    labels: int = 2  # number of classes, if the head has classes
    experts: int = 0  # experts per block, each of width feed_forward; 0 without experts
    experts_per_token: int = 0
    notes: tuple[str, ...] = field(default=(), compare=False)  # ignored or guessed settings of its config.json
    counts: ModelCounts | None = None  # of a traced model; its sizes above are then only words for them
    # The config.json of a traced model, from which transformers can build it again.
    config: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    adapter: Adapter | None = None  # adapters that are trained instead of the model's weights, which are frozen

    @cached_property
    def parameters(self) -> ParameterSizes:
        """The sizes of the model's own parameters, without adapters, in the order in which an engine sees them."""
        if self.counts is not None:
            return _traced_sizes(self.counts)
        outside = Outside(self.layers, self.positions, self.vocabulary, self.tied, self.head, self.labels)
        return all_sizes(self._widths, outside)

    @property
    def num_params(self) -> int:
        return self.parameters.num_params

    @property
    def active_params(self) -> int:
        """Number of active parameters: all parameters except those of the experts that a token does not use."""
        if self.counts is not None:
            return self.counts.active_params
        return self.num_params

    @property
    def block_params(self) -> int:
        """Number of parameters of one transformer block, which are gathered together if blocks are sharded.

        If blocks differ, this is the number of the largest one.
        """
        if self.counts is not None:
            return max((kind.num_params for kind in self.counts.kinds), default=0)
        matrices, vectors = block(self._widths)
        return sum(matrices) + sum(vectors)

    @property
    def outside_params(self) -> int:
        """Number of parameters outside the blocks: embeddings, last norm, head."""
        if self.counts is not None:
            return self.counts.outside.num_params
        return self.num_params - self.layers * self.block_params

    @property
    def feed_forward_params(self) -> int:
        """Number of parameters of a block without its attention."""
        if self.counts is not None:
            return max((kind.num_params - kind.attention_parameters for kind in self.counts.kinds), default=0)
        return self.block_params - 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)

    @property
    def output_params(self) -> int:
        """Number of parameters of the output layer. 0 if it reads one token per sequence."""
        if self.counts is not None:
            return self.counts.output_params
        return 0 if self.is_pooled else self.output_width * self.hidden

    @property
    def embedding_params(self) -> int:
        """Number of parameters of the embedding of tokens."""
        return self.vocabulary * self.hidden if self.counts is None else self.counts.embedding_params

    def shortened(self, layers: int) -> ModelShape:
        """Return the shape with at most this many blocks."""
        if self.counts is None:
            return dataclasses.replace(self, layers=min(self.layers, layers))
        if len(self.counts.executed) <= layers:
            return self
        executed = self.counts.executed[:layers]
        copies = tuple(min(count, executed.count(kind)) for kind, count in enumerate(self.counts.copies))
        counts = dataclasses.replace(self.counts, executed=executed, copies=copies)
        return dataclasses.replace(self, layers=layers, counts=counts)

    @property
    def is_encoder(self) -> bool:
        """Whether every token attends to all tokens, including later ones."""
        return self.architecture == "bert"

    @property
    def is_pooled(self) -> bool:
        """Whether the head reads one token per sequence, as BERT's pooler does. Decoders classify every token."""
        return self.is_encoder and self.head in ("sequence classes", "none")

    @property
    def has_tied_head(self) -> bool:
        """Whether the embedding is also the output layer. The head of a classifier is separate."""
        if self.counts is not None:
            return self.counts.tied
        return self.tied and self.head == "tokens"

    @property
    def has_transform(self) -> bool:
        """Whether there is a layer and a norm before the output layer, as in BERT with its masked-word head."""
        return self.is_encoder and self.head == "tokens"

    @property
    def output_width(self) -> int:
        """Number of logits per token or sequence."""
        if self.head == "tokens":
            return self.vocabulary
        return 0 if self.head == "none" else self.labels

    @property
    def position_rows(self) -> int:
        """Number of rows of the learned position embedding. 0 if there is none."""
        if self.architecture not in LEARNED_POSITIONS:
            return 0
        return self.positions

    @property
    def _widths(self) -> Widths:
        return Widths(
            self.architecture,
            self.hidden,
            attention=self.heads * self.head_size,
            key_value=self.kv_heads * self.head_size,
            feed_forward=self.feed_forward,
        )


# ---------------------------------------------------------------- the study's models


def traced(
    name: str,
    counts: ModelCounts,
    positions: int,
    notes: tuple[str, ...] = (),
    config: Mapping[str, Any] | None = None,
) -> ModelShape:
    """Return the shape of a traced model. `positions` is the longest sequence, in tokens."""
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
    )


def _traced_sizes(counts: ModelCounts) -> ParameterSizes:
    groups: tuple[list[int], list[int]] = ([], [])
    for kind, numbers in counts.declared:
        part = counts.outside if kind is None else counts.kinds[kind]
        vectors = set(part.vectors)
        for number in numbers:
            groups[number in vectors].append(part.parameters[number])
    return ParameterSizes(tuple(groups[0]), tuple(groups[1]))


def plain(
    name: str,
    architecture: Plain,
    layers: int,
    hidden: int,
    heads: int,
    positions: int,
    vocabulary: int,
    activation: str | None = None,
) -> ModelShape:
    """Return the shape of a model in which feed-forward layers are four times as wide as the hidden size.

    There is one key and value head per query head. BERT has the two-class head of bert-imdb, and all others predict
    tokens.
    """
    return ModelShape(
        name=name,
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocabulary=vocabulary,
        positions=positions,
        feed_forward=4 * hidden,
        kv_heads=heads,
        head_size=hidden // heads,
        tied=architecture != "gpt-j",
        activation=activation or ("gelu" if architecture == "bert" else "gelu_new"),
        head=_study_head(architecture),
    )


def architecture_of(workload: str, size: str) -> Plain:
    """Return the architecture that a workload trains at one of its sizes."""
    if workload == "bert-imdb":
        return "bert"
    by_size: dict[str, Plain] = {"2.7b": "gpt-neo", "6b": "gpt-j"}
    return by_size.get(size, "gpt2")


def parameter_sizes(
    architecture: Architecture, layers: int, hidden: int, positions: int, num_params: int
) -> ParameterSizes:
    """Return the sizes of the parameters of one of this project's models, from its number of parameters.

    The size of the vocabulary follows from the number of parameters. Raises ValueError if no vocabulary gives this
    number.
    """
    no_words, one_word = (
        with_vocabulary(architecture, layers, hidden, positions, words).num_params for words in (0, 1)
    )
    vocabulary, remainder = divmod(num_params - no_words, one_word - no_words)
    if remainder or vocabulary < 1:
        raise ValueError(
            f"{num_params} parameters do not fit {architecture} with {layers} layers of hidden size {hidden}"
        )
    return with_vocabulary(architecture, layers, hidden, positions, vocabulary)


def with_vocabulary(
    architecture: Architecture, layers: int, hidden: int, positions: int, vocabulary: int
) -> ParameterSizes:
    """Return the sizes of the parameters of one of this project's models.

    `vocabulary` is the number of rows of its embedding.
    """
    widths = Widths(architecture, hidden, attention=hidden, key_value=hidden, feed_forward=4 * hidden)
    tied, head = architecture != "gpt-j", _study_head(architecture)
    return all_sizes(widths, Outside(layers, positions, vocabulary, tied, head, labels=2))


def _study_head(architecture: Architecture) -> Head:
    return "sequence classes" if architecture == "bert" else "tokens"
