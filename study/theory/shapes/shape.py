"""Of which parameters does a model consist? Sizes by optimizer group, in the order in which the engine sees them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Architecture = Literal["bert", "gpt2", "gpt-neo", "gpt-j", "llama", "mistral", "qwen2", "gemma2"]


@dataclass(frozen=True)
class ParameterSizes:
    """Elements of each parameter, in the two groups of the study's AdamW."""

    matrices: tuple[int, ...]  # weight decay
    vectors: tuple[int, ...]  # biases and norms: none

    @property
    def groups(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.matrices, self.vectors

    @property
    def num_params(self) -> int:
        return sum(self.matrices) + sum(self.vectors)


@dataclass(frozen=True)
class ModelShape:
    """What the models need to know of a transformer."""

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

    @cached_property
    def parameters(self) -> ParameterSizes:
        """Every parameter, in the order in which an engine sees them."""
        return _sizes(self._widths, self.layers, self.positions, self.vocabulary, self.tied)

    @property
    def num_params(self) -> int:
        return self.parameters.num_params

    @property
    def block_params(self) -> int:
        """Parameters of one transformer block: what is gathered together when blocks are sharded."""
        matrices, vectors = _block(self._widths)
        return sum(matrices) + sum(vectors)

    @property
    def outside_params(self) -> int:
        """Parameters outside the blocks: embeddings, last norm, head."""
        return self.num_params - self.layers * self.block_params

    @property
    def is_classifier(self) -> bool:
        """BERT here has the two-class head of bert-imdb; all others predict tokens."""
        return self.architecture == "bert"

    @property
    def has_tied_head(self) -> bool:
        """Whether the embedding is multiplied as the output layer too; a classifier's head is its own."""
        return self.tied and not self.is_classifier

    @property
    def _widths(self) -> _Widths:
        return _Widths(
            self.architecture,
            self.hidden,
            attention=self.heads * self.head_size,
            key_value=self.kv_heads * self.head_size,
            feed_forward=self.feed_forward,
        )


# ---------------------------------------------------------------- counting


@dataclass(frozen=True)
class _Widths:
    """The widths of a block; a parameter's size is a product of two of them, or one."""

    architecture: Architecture
    hidden: int
    attention: int  # of all queries together
    key_value: int  # of all keys, and of all values
    feed_forward: int


def _block(w: _Widths) -> tuple[list[int], list[int]]:
    """List matrices and vectors of one block, each in the order of named_parameters() of transformers' models."""
    hidden, wide = w.hidden, w.feed_forward
    attention = [hidden * w.attention, hidden * w.key_value, hidden * w.key_value, hidden * w.attention]
    match w.architecture:
        case "bert":  # norms after attention and after feed-forward; query, key, value and output have biases
            return [*attention, hidden * wide, wide * hidden], [hidden] * 6 + [wide] + [hidden] * 3
        case "gpt2":  # query, key and value are one matrix
            fused = [sum(attention[:3]), attention[3]]
            return [*fused, hidden * wide, wide * hidden], [hidden] * 2 + [3 * hidden] + [hidden] * 3 + [wide, hidden]
        case "gpt-neo":  # of the attention only the output has a bias
            return [*attention, hidden * wide, wide * hidden], [hidden] * 5 + [wide, hidden]
        case "gpt-j":  # one norm for both halves of the block; no biases in attention
            return [*attention, hidden * wide, wide * hidden], [hidden] * 2 + [wide, hidden]
    biases = [w.attention, w.key_value, w.key_value] if w.architecture == "qwen2" else []
    norms = [hidden] * (4 if w.architecture == "gemma2" else 2)  # without biases
    return [*attention, hidden * wide, hidden * wide, wide * hidden], [*biases, *norms]


def _sizes(w: _Widths, layers: int, positions: int, vocabulary: int, tied: bool) -> ParameterSizes:
    hidden = w.hidden
    block_matrices, block_vectors = _block(w)
    embeddings, first_norm, last_norm, head, head_vectors = [vocabulary * hidden], [], [hidden] * 2, [], []
    if w.architecture in ("bert", "gpt2", "gpt-neo"):
        embeddings.append(positions * hidden)
    if w.architecture == "bert":  # token types; a norm after the embeddings; pooler and classifier
        embeddings.append(2 * hidden)
        first_norm, last_norm, head, head_vectors = [hidden] * 2, [], [hidden**2, 2 * hidden], [hidden, 2]
    elif not tied:
        head = [vocabulary * hidden]
    if w.architecture == "gpt-j":
        head_vectors = [vocabulary]
    elif w.architecture in ("llama", "mistral", "qwen2", "gemma2"):
        last_norm = [hidden]
    return ParameterSizes(
        matrices=(*embeddings, *block_matrices * layers, *head),
        vectors=(*first_norm, *block_vectors * layers, *last_norm, *head_vectors),
    )


# ---------------------------------------------------------------- the study's models


def plain(
    name: str,
    architecture: Literal["bert", "gpt2", "gpt-neo", "gpt-j"],
    layers: int,
    hidden: int,
    heads: int,
    positions: int,
    vocabulary: int,
    activation: str | None = None,
) -> ModelShape:
    """Describe a model whose feed-forward is 4 hidden wide and whose every head has keys and values of its own."""
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
    )


def architecture_of(workload: str, size: str) -> Architecture:
    """Which architecture a workload trains at one of its sizes."""
    if workload == "bert-imdb":
        return "bert"
    return {"2.7b": "gpt-neo", "6b": "gpt-j"}.get(size, "gpt2")


def parameter_sizes(
    architecture: Architecture, layers: int, hidden: int, positions: int, num_params: int
) -> ParameterSizes:
    """List the parameters of one of the study's models; the vocabulary follows from the number of parameters.

    Raises ValueError where no vocabulary gives that number, because then the model is another one.
    """
    without, with_one = (with_vocabulary(architecture, layers, hidden, positions, words).num_params for words in (0, 1))
    vocabulary, rest = divmod(num_params - without, with_one - without)
    if rest or vocabulary < 1:
        raise ValueError(
            f"{num_params} parameters: not those of {architecture}, {layers} layers of hidden size {hidden}"
        )
    return with_vocabulary(architecture, layers, hidden, positions, vocabulary)


def with_vocabulary(
    architecture: Architecture, layers: int, hidden: int, positions: int, vocabulary: int
) -> ParameterSizes:
    """List the parameters of one of the study's models; `vocabulary` is the rows of its embedding."""
    widths = _Widths(architecture, hidden, attention=hidden, key_value=hidden, feed_forward=4 * hidden)
    return _sizes(widths, layers, positions, vocabulary, tied=architecture != "gpt-j")
