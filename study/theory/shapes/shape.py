"""The shape of a transformer, and the sizes of its parameters by optimizer group, in the order of the engine.

Modules of `transformers` 5.23, models/*/modeling_*.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Architecture = Literal[
    "bert", "gpt2", "gpt-neo", "gpt-j", "gpt-neox", "opt",
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3-moe",
]  # fmt: skip
# What follows the last block: a logit for every word at every token, classes for a sequence or for every token.
Head = Literal["tokens", "sequence classes", "token classes", "none"]

# Their feed-forward multiplies its inside by a gate, so that it has three matrices, not two.
GATED: tuple[Architecture, ...] = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3-moe")
LEARNED_POSITIONS: tuple[Architecture, ...] = ("bert", "gpt2", "gpt-neo", "opt")
FOUR_NORMS: tuple[Architecture, ...] = ("gemma2", "gemma3")  # in a block
HEAD_NORMS: tuple[Architecture, ...] = ("qwen3", "gemma3", "qwen3-moe")  # of every query and key
OPT_OFFSET = 2  # rows of its position embedding that no token has


@dataclass(frozen=True)
class ParameterSizes:
    """Elements of each parameter, in the two groups (with and without weight decay) of this project's AdamW."""

    matrices: tuple[int, ...]  # weight decay
    vectors: tuple[int, ...]  # biases and norms: none

    @property
    def groups(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.matrices, self.vectors

    @property
    def num_params(self) -> int:
        return sum(self.matrices) + sum(self.vectors)


@dataclass(frozen=True)
class Widths:
    """The widths of a block. The size of each parameter is a product of widths."""

    architecture: Architecture
    hidden: int
    attention: int  # of all queries together
    key_value: int  # of all keys, and of all values
    feed_forward: int  # of one expert, where there are several
    head_size: int
    experts: int = 0


@dataclass(frozen=True)
class Outside:
    """The sizes of the parameters outside the blocks."""

    layers: int
    positions: int
    vocabulary: int
    tied: bool
    head: Head
    labels: int


def block(w: Widths) -> tuple[list[int], list[int]]:
    """List matrices and vectors of one block, each in the order of named_parameters() of transformers' models."""
    hidden, wide = w.hidden, w.feed_forward
    attention = [hidden * w.attention, hidden * w.key_value, hidden * w.key_value, hidden * w.attention]
    fused = [sum(attention[:3]), attention[3]]  # query, key and value are one matrix
    plain = [hidden * wide, wide * hidden]
    match w.architecture:
        case "bert" | "opt":  # query, key, value and output have biases; a norm; and one at the end
            return [*attention, *plain], [hidden] * 6 + [wide] + [hidden] * 3
        case "gpt2":
            return [*fused, *plain], [hidden] * 2 + [3 * hidden] + [hidden] * 3 + [wide, hidden]
        case "gpt-neox":  # both norms first
            return [*fused, *plain], [hidden] * 4 + [3 * hidden, hidden, wide, hidden]
        case "gpt-neo":  # of the attention only the output has a bias
            return [*attention, *plain], [hidden] * 5 + [wide, hidden]
        case "gpt-j":  # one norm for both halves of the block; no biases in attention
            return [*attention, *plain], [hidden] * 2 + [wide, hidden]
    biases = [w.attention, w.key_value, w.key_value] if w.architecture == "qwen2" else []
    head_norms = [w.head_size] * 2 if w.architecture in HEAD_NORMS else []
    norms = [hidden] * (4 if w.architecture in FOUR_NORMS else 2)  # without biases
    return [*attention, *_gated_feed_forward(w)], [*biases, *head_norms, *norms]


def _gated_feed_forward(w: Widths) -> list[int]:
    """List gate, up and down projections. With experts, gates and ups are one parameter, and the router is another."""
    matrix = w.hidden * w.feed_forward
    if not w.experts:
        return [matrix, matrix, matrix]
    router, experts = w.hidden * w.experts, [w.experts * 2 * matrix, w.experts * matrix]
    return [router, *experts] if w.architecture == "mixtral" else [*experts, router]


def all_sizes(w: Widths, outside: Outside) -> ParameterSizes:
    """List every parameter of a model."""
    hidden = w.hidden
    block_matrices, block_vectors = block(w)
    embeddings, first_norm, last_norm = [outside.vocabulary * hidden], [], [hidden] * 2
    if w.architecture in LEARNED_POSITIONS:
        embeddings.append((outside.positions + (OPT_OFFSET if w.architecture == "opt" else 0)) * hidden)
    if w.architecture == "bert":  # token types; a norm after the embeddings, and none at the end
        embeddings.append(2 * hidden)
        first_norm, last_norm = [hidden] * 2, []
    elif w.architecture == "opt":  # declared before the blocks
        first_norm, last_norm = [hidden] * 2, []
    elif w.architecture in GATED:
        last_norm = [hidden]
    head, head_vectors = _head(w, outside)
    return ParameterSizes(
        matrices=(*embeddings, *block_matrices * outside.layers, *head),
        vectors=(*first_norm, *block_vectors * outside.layers, *last_norm, *head_vectors),
    )


def _head(w: Widths, outside: Outside) -> tuple[list[int], list[int]]:
    """List the matrices and vectors after the last norm."""
    hidden, words = w.hidden, outside.vocabulary
    is_bert = w.architecture == "bert"
    pooler = ([hidden**2], [hidden]) if is_bert else ([], [])
    classifier = [outside.labels * hidden]
    match outside.head:
        case "none":
            return pooler
        case "sequence classes":  # a decoder's has no bias
            return ([*pooler[0], *classifier], [hidden, outside.labels]) if is_bert else (classifier, [])
        case "token classes":
            return classifier, [outside.labels]
    output = [] if outside.tied else [words * hidden]
    if is_bert:  # a layer and a norm before the output, whose bias is tied as its weights are
        return [hidden**2, *output], [words, *[hidden] * 3, *([] if outside.tied else [words])]
    return output, [words] if w.architecture == "gpt-j" else []


# ---------------------------------------------------------------- the shape

Plain = Literal["bert", "gpt2", "gpt-neo", "gpt-j"]  # what the workloads train


@dataclass(frozen=True)
class ModelShape:
    """The properties of a transformer that decide its memory and its computation."""

    name: str
    architecture: Architecture
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int  # the longest sequence; rows of the position embedding where the architecture learns one
    feed_forward: int
    kv_heads: int  # fewer than heads: grouped-query attention
    head_size: int  # hidden / heads in most, not in Gemma
    tied: bool  # the output layer's weights are the embedding's
    activation: str  # as its config.json calls it: gelu, gelu_new, silu ...
    head: Head = "tokens"
    labels: int = 2  # of a head of classes
    experts: int = 0  # in every block, each as wide as feed_forward; 0: one feed-forward for every token
    experts_per_token: int = 0
    notes: tuple[str, ...] = field(default=(), compare=False)  # what of its config.json is ignored, or guessed

    @cached_property
    def parameters(self) -> ParameterSizes:
        """Every parameter, in the order in which an engine sees them."""
        outside = Outside(self.layers, self.positions, self.vocabulary, self.tied, self.head, self.labels)
        return all_sizes(self._widths, outside)

    @property
    def num_params(self) -> int:
        return self.parameters.num_params

    @property
    def active_params(self) -> int:
        """Number of active parameters: all parameters except those of the experts that a token does not use."""
        idle = self.experts - self.experts_per_token
        return self.num_params - self.layers * idle * 3 * self.hidden * self.feed_forward

    @property
    def block_params(self) -> int:
        """Number of parameters of one transformer block, which are gathered together if blocks are sharded."""
        matrices, vectors = block(self._widths)
        return sum(matrices) + sum(vectors)

    @property
    def outside_params(self) -> int:
        """Number of parameters outside the blocks: embeddings, last norm, head."""
        return self.num_params - self.layers * self.block_params

    @property
    def is_encoder(self) -> bool:
        """Whether every token attends to all others, including later ones."""
        return self.architecture == "bert"

    @property
    def is_pooled(self) -> bool:
        """Whether the head reads one token per sequence, as BERT's pooler does. Decoders classify every token."""
        return self.is_encoder and self.head in ("sequence classes", "none")

    @property
    def has_tied_head(self) -> bool:
        """Whether the embedding is also the output layer. The head of a classifier is separate."""
        return self.tied and self.head == "tokens"

    @property
    def has_transform(self) -> bool:
        """Whether a layer and a norm precede the output layer, as in BERT with its masked-word head."""
        return self.is_encoder and self.head == "tokens"

    @property
    def output_width(self) -> int:
        """Number of logits per token or sequence."""
        if self.head == "tokens":
            return self.vocabulary
        return 0 if self.head == "none" else self.labels

    @property
    def position_rows(self) -> int:
        """Rows of a learned position embedding."""
        if self.architecture not in LEARNED_POSITIONS:
            return 0
        return self.positions + (OPT_OFFSET if self.architecture == "opt" else 0)

    @property
    def feed_forward_per_token(self) -> int:
        """The feed-forward width per token, summed over the experts that a token uses."""
        return self.feed_forward * (self.experts_per_token or 1)

    @property
    def _widths(self) -> Widths:
        return Widths(
            self.architecture,
            self.hidden,
            attention=self.heads * self.head_size,
            key_value=self.kv_heads * self.head_size,
            feed_forward=self.feed_forward,
            head_size=self.head_size,
            experts=self.experts,
        )


# ---------------------------------------------------------------- the study's models


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
    """Describe a model with a feed-forward width of four hidden sizes, and one key and value head per query head.

    BERT has the head of bert-imdb, two classes; the others predict tokens.
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
    """List the parameters of one of this project's models. The vocabulary follows from the number of parameters.

    Raises ValueError if no vocabulary gives that number of parameters.
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
    """List the parameters of one of this project's models; `vocabulary` is the number of rows of its embedding."""
    widths = Widths(architecture, hidden, attention=hidden, key_value=hidden, feed_forward=4 * hidden, head_size=0)
    tied, head = architecture != "gpt-j", _study_head(architecture)
    return all_sizes(widths, Outside(layers, positions, vocabulary, tied, head, labels=2))


def _study_head(architecture: Architecture) -> Head:
    return "sequence classes" if architecture == "bert" else "tokens"
