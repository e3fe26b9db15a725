"""Of which parameters does a model consist? Sizes by optimizer group, in the order in which the engine sees them.

Modules of `transformers` 5.23, models/*/modeling_*.py.
"""

from __future__ import annotations

from dataclasses import dataclass
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
class Widths:
    """The widths of a block; a parameter's size is a product of them."""

    architecture: Architecture
    hidden: int
    attention: int  # of all queries together
    key_value: int  # of all keys, and of all values
    feed_forward: int  # of one expert, where there are several
    head_size: int
    experts: int = 0


@dataclass(frozen=True)
class Outside:
    """What surrounds the blocks."""

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
    """List gate, up and down; of experts all gates and ups are one parameter, and the router is one."""
    one = w.hidden * w.feed_forward
    if not w.experts:
        return [one, one, one]
    router, experts = w.hidden * w.experts, [w.experts * 2 * one, w.experts * one]
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
    """List matrices and vectors of what follows the last norm."""
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
