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
        return with_vocabulary(self.architecture, self.layers, self.hidden, self.positions, self.vocabulary)

    @property
    def num_params(self) -> int:
        return self.parameters.num_params

    @cached_property
    def block_params(self) -> int:
        """Parameters of one transformer block: what is gathered together when blocks are sharded."""
        without = with_vocabulary(self.architecture, 0, self.hidden, self.positions, self.vocabulary)
        return (self.num_params - without.num_params) // self.layers

    @property
    def outside_params(self) -> int:
        """Parameters outside the blocks: embeddings, last norm, head."""
        return self.num_params - self.layers * self.block_params

    @property
    def is_classifier(self) -> bool:
        """BERT here has the two-class head of bert-imdb; all others predict tokens."""
        return self.architecture == "bert"


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
    none, one = (with_vocabulary(architecture, layers, hidden, positions, words).num_params for words in (0, 1))
    vocabulary, rest = divmod(num_params - none, one - none)
    if rest or vocabulary < 1:
        raise ValueError(
            f"{num_params} parameters: not those of {architecture}, {layers} layers of hidden size {hidden}"
        )
    return with_vocabulary(architecture, layers, hidden, positions, vocabulary)


def with_vocabulary(
    architecture: Architecture, layers: int, hidden: int, positions: int, vocabulary: int
) -> ParameterSizes:
    """List the parameters of one of the study's models; `vocabulary` is the rows of its embedding."""
    square, wide = hidden**2, 4 * hidden**2
    per_layer = {
        # Query, key, value, output; then the two of the feed-forward block.
        "bert": ([square] * 4 + [wide] * 2, [hidden] * 6 + [4 * hidden] + [hidden] * 3),
        "gpt2": ([3 * square, square] + [wide] * 2, [hidden] * 2 + [3 * hidden] + [hidden] * 3 + [4 * hidden, hidden]),
        "gpt-neo": ([square] * 4 + [wide] * 2, [hidden] * 5 + [4 * hidden, hidden]),
        "gpt-j": ([square] * 4 + [wide] * 2, [hidden] * 2 + [4 * hidden, hidden]),
    }
    layer_matrices, layer_vectors = per_layer[architecture]
    around_matrices = {"bert": [square, 2 * hidden], "gpt2": [], "gpt-neo": [], "gpt-j": []}[architecture]
    around_vectors = [hidden, 2] if architecture == "bert" else []
    embeddings = {"bert": [positions * hidden, 2 * hidden], "gpt-j": []}.get(architecture, [positions * hidden])
    norm = [hidden] * 2
    words = vocabulary * hidden
    # GPT-J alone has an output layer of its own, with a bias.
    head = [words] if architecture == "gpt-j" else []
    head_bias = [vocabulary] if architecture == "gpt-j" else []
    first_norm, last_norm = (norm, []) if architecture == "bert" else ([], norm)
    return ParameterSizes(
        matrices=(words, *embeddings, *layer_matrices * layers, *around_matrices, *head),
        vectors=(*first_norm, *layer_vectors * layers, *last_norm, *around_vectors, *head_bias),
    )
