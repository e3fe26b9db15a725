"""Of which parameters does a model consist? Sizes by optimizer group, in the order in which the engine sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Architecture = Literal["bert", "gpt2", "gpt-neo", "gpt-j"]


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


def parameter_sizes(
    architecture: Architecture, layers: int, hidden: int, positions: int, num_params: int
) -> ParameterSizes:
    """List the parameters of one of the study's models; the vocabulary follows from the number of parameters.

    Raises ValueError where no vocabulary gives that number, because then the model is another one.
    """
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

    known = layers * (sum(layer_matrices) + sum(layer_vectors))
    known += sum(around_matrices) + sum(around_vectors) + sum(embeddings) + sum(norm)
    # GPT-J alone has an output layer of its own, with a bias.
    per_word = 2 * hidden + 1 if architecture == "gpt-j" else hidden
    vocabulary, rest = divmod(num_params - known, per_word)
    if rest or vocabulary < 1:
        raise ValueError(
            f"{num_params} parameters: not those of {architecture}, {layers} layers of hidden size {hidden}"
        )
    words = vocabulary * hidden
    head = [words] if architecture == "gpt-j" else []
    head_bias = [vocabulary] if architecture == "gpt-j" else []
    first_norm, last_norm = (norm, []) if architecture == "bert" else ([], norm)
    return ParameterSizes(
        matrices=(words, *embeddings, *layer_matrices * layers, *around_matrices, *head),
        vectors=(*first_norm, *layer_vectors * layers, *last_norm, *around_vectors, *head_bias),
    )
