"""Of which parameters does a model consist? Sizes by optimizer group, in the order in which the engine sees them.

A model is found by a known name, by a config.json, or by its id on the Hugging Face hub.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

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
    widths = _Widths(architecture, hidden, attention=hidden, key_value=hidden, feed_forward=4 * hidden)
    return _sizes(widths, layers, positions, vocabulary, tied=architecture != "gpt-j")


# ---------------------------------------------------------------- config.json


@dataclass(frozen=True)
class _Keys:
    """How an architecture's config.json calls what a shape consists of."""

    architecture: Architecture
    hidden: str
    layers: str
    heads: str
    positions: str
    feed_forward: str
    activation: str
    tied: bool  # transformers' default; files leave it out where it holds
    feed_forward_default: bool = False  # absent or null: 4 times the hidden size
    kv_heads: Literal["none", "optional", "required"] = "none"  # optional: absent or null means as many as heads
    head_size: Literal["none", "optional", "required"] = "none"  # optional: absent or null means hidden / heads


def _llama_like(architecture: Architecture, **other: Any) -> _Keys:
    return _Keys(
        architecture,
        hidden="hidden_size",
        layers="num_hidden_layers",
        heads="num_attention_heads",
        positions="max_position_embeddings",
        feed_forward="intermediate_size",
        **{"activation": "hidden_act", "tied": False, "kv_heads": "required", "head_size": "optional"} | other,
    )


_GPT2 = {
    "hidden": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "positions": "n_positions",
    "feed_forward": "n_inner",
    "activation": "activation_function",
    "feed_forward_default": True,
}
_KEYS: dict[str, _Keys] = {  # by model_type
    "bert": _llama_like("bert", tied=True, kv_heads="none", head_size="none"),
    "gpt2": _Keys("gpt2", tied=True, **_GPT2),
    "gpt_neo": _Keys(
        "gpt-neo",
        hidden="hidden_size",
        layers="num_layers",
        heads="num_heads",
        positions="max_position_embeddings",
        feed_forward="intermediate_size",
        activation="activation_function",
        tied=True,
        feed_forward_default=True,
    ),
    "gptj": _Keys("gpt-j", tied=False, **_GPT2),
    "llama": _llama_like("llama", kv_heads="optional"),
    "mistral": _llama_like("mistral"),
    "qwen2": _llama_like("qwen2"),
    "gemma2": _llama_like("gemma2", tied=True, head_size="required", activation="hidden_activation"),
}
# Settings that add parameters which are not counted here; every other value of one is refused.
_ONLY = {"type_vocab_size": 2, "add_cross_attention": False, "attention_bias": False, "mlp_bias": False}


LARGEST_WIDTH = 100_000_000  # of anything that a config.json counts, positions included
MOST_LAYERS = 10_000


def from_config(content: dict[str, Any], where: str) -> ModelShape:
    """Read a model's shape from the content of a transformers config.json; `where` becomes its name.

    A BERT gets the two-class head of bert-imdb and the others an output layer over their vocabulary, whatever head the
    file names. Raises ValueError for what is missing, of the wrong type, does not divide, or is not counted here.
    """
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in _KEYS:
        seen = "no model_type" if model_type is None else f"model_type {model_type!r}"
        raise ValueError(f"{where}: {seen}; give a config.json of {', '.join(_KEYS)}")
    keys = _KEYS[model_type]

    def number(key: str) -> int:
        if key not in content:
            raise ValueError(f"{where}: {key} is missing, which a {model_type} needs; add it or give a complete file")
        value = content[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{where}: {key} is {value!r}; give a whole number of at least 1")
        if value > LARGEST_WIDTH or (key == keys.layers and value > MOST_LAYERS):
            raise ValueError(f"{where}: {key} is {value}, more than any model's; correct it")
        return value

    for key, only in _ONLY.items():
        if content.get(key, only) != only:
            raise ValueError(f"{where}: {key} is {content[key]!r}, whose parameters are not counted; only {only} is")
    hidden, heads = number(keys.hidden), number(keys.heads)
    kv_heads = head_size = None
    if keys.head_size == "required" or (keys.head_size == "optional" and content.get("head_dim") is not None):
        head_size = number("head_dim")
    elif hidden % heads:
        raise ValueError(f"{where}: {keys.hidden} {hidden} is not a multiple of {keys.heads} {heads}; correct one")
    if keys.kv_heads == "required" or (keys.kv_heads == "optional" and content.get("num_key_value_heads") is not None):
        kv_heads = number("num_key_value_heads")
        if heads % kv_heads:
            seen = f"{keys.heads} {heads} is not a multiple of num_key_value_heads {kv_heads}"
            raise ValueError(f"{where}: {seen}; correct one")
    feed_forward = None
    if not keys.feed_forward_default or content.get(keys.feed_forward) is not None:
        feed_forward = number(keys.feed_forward)
    tied = content.get("tie_word_embeddings", keys.tied)
    if not isinstance(tied, bool):
        raise ValueError(f"{where}: tie_word_embeddings is {tied!r}; give true or false")
    activation = content.get(keys.activation)
    if not isinstance(activation, str):
        seen = "missing" if activation is None else repr(activation)
        raise ValueError(f'{where}: {keys.activation} is {seen}; give its name, such as "gelu"')
    return ModelShape(
        name=where,
        architecture=keys.architecture,
        layers=number(keys.layers),
        hidden=hidden,
        heads=heads,
        vocabulary=number("vocab_size"),
        positions=number(keys.positions),
        feed_forward=feed_forward or 4 * hidden,
        kv_heads=kv_heads or heads,
        head_size=head_size or hidden // heads,
        tied=tied,
        activation=activation,
    )


# ---------------------------------------------------------------- known models


def _gated(
    name: str, architecture: Architecture, layers: int, hidden: int, heads: int, kv_heads: int, feed_forward: int,
    vocabulary: int, positions: int, *, head_size: int | None = None, tied: bool = False,
) -> ModelShape:  # fmt: skip
    activation = "gelu_pytorch_tanh" if architecture == "gemma2" else "silu"
    head_size = head_size or hidden // heads
    return ModelShape(
        name, architecture, layers, hidden, heads, vocabulary, positions, feed_forward, kv_heads, head_size, tied,
        activation,
    )  # fmt: skip


def _known() -> Iterator[tuple[ModelShape, tuple[str, ...]]]:
    """Yield shapes as their config.json on the hub has them, each with its ids there."""
    # Devlin et al., arXiv:1810.04805, and its miniatures, Turc et al., arXiv:1908.08962.
    for size, layers, hidden in (
        ("tiny", 2, 128), ("micro", 4, 128), ("mini", 4, 256), ("small", 4, 512), ("medium", 8, 512),
    ):  # fmt: skip
        heads = hidden // 64
        shape = plain(f"bert-{size}", "bert", layers, hidden, heads, 512, 30522)
        yield shape, (f"google/bert_uncased_L-{layers}_H-{hidden}_A-{heads}",)
    for size, layers, hidden in (("base", 12, 768), ("large", 24, 1024)):
        shape = plain(f"bert-{size}", "bert", layers, hidden, hidden // 64, 512, 30522)
        yield shape, (f"google-bert/bert-{size}-uncased", f"bert-{size}-uncased")

    for name, layers, hidden, heads in (
        ("gpt2", 12, 768, 12), ("gpt2-medium", 24, 1024, 16), ("gpt2-large", 36, 1280, 20), ("gpt2-xl", 48, 1600, 25),
    ):  # fmt: skip
        yield plain(name, "gpt2", layers, hidden, heads, 1024, 50257), (f"openai-community/{name}",)
    for name, layers, hidden, heads in (
        ("gpt-neo-125m", 12, 768, 12), ("gpt-neo-1.3b", 24, 2048, 16), ("gpt-neo-2.7b", 32, 2560, 20),
    ):  # fmt: skip
        yield plain(name, "gpt-neo", layers, hidden, heads, 2048, 50257), (f"EleutherAI/{name}",)
    yield plain("gpt-j-6b", "gpt-j", 28, 4096, 16, 2048, 50400), ("EleutherAI/gpt-j-6b",)

    # LLM Foundry's benchmark tables: the parameters they count are those of a GPT-2 with biases, exactly, and with as
    # many positions as the sequence has tokens; 2048 in most rows.
    for size, layers, hidden, heads in (
        ("125m", 12, 768, 12), ("350m", 24, 1024, 16), ("760m", 24, 1536, 12), ("1b", 24, 2048, 16),
        ("3b", 32, 2560, 20), ("7b", 32, 4096, 32), ("13b", 40, 5120, 40), ("30b", 48, 7168, 56), ("70b", 80, 8192, 64),
    ):  # fmt: skip
        yield plain(f"mpt-{size}", "gpt2", layers, hidden, heads, 2048, 50368, "gelu"), ()

    for name, layers, hidden, heads, kv_heads, feed_forward, vocabulary, positions, ids in (
        ("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, 4096, ("meta-llama/Llama-2-7b-hf",)),
        ("llama-2-13b", 40, 5120, 40, 40, 13824, 32000, 4096, ("meta-llama/Llama-2-13b-hf",)),
        ("llama-2-70b", 80, 8192, 64, 8, 28672, 32000, 4096, ("meta-llama/Llama-2-70b-hf",)),
        ("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, 8192, ("meta-llama/Meta-Llama-3-8B",)),
        ("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, 8192, ("meta-llama/Meta-Llama-3-70B",)),
        ("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256, 131072, ("meta-llama/Llama-3.1-8B",)),
        ("llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256, 131072, ("meta-llama/Llama-3.1-70B",)),
    ):  # fmt: skip
        yield _gated(name, "llama", layers, hidden, heads, kv_heads, feed_forward, vocabulary, positions), ids
    yield _gated("mistral-7b", "mistral", 32, 4096, 32, 8, 14336, 32000, 32768), ("mistralai/Mistral-7B-v0.1",)

    for size, layers, hidden, heads, kv_heads, feed_forward, vocabulary in (
        ("0.5b", 24, 896, 14, 2, 4864, 151936), ("1.5b", 28, 1536, 12, 2, 8960, 151936),
        ("7b", 28, 3584, 28, 4, 18944, 152064), ("72b", 80, 8192, 64, 8, 29568, 152064),
    ):  # fmt: skip
        for version in ("2", "2.5"):
            positions = 32768 if (version, size) == ("2.5", "0.5b") else 131072
            shape = _gated(
                f"qwen{version}-{size}", "qwen2", layers, hidden, heads, kv_heads, feed_forward, vocabulary, positions,
                tied=size in ("0.5b", "1.5b"),
            )  # fmt: skip
            yield shape, (f"Qwen/Qwen{version}-{size.upper()}",)
    for size, layers, hidden, heads, kv_heads, feed_forward, head_size in (
        ("2b", 26, 2304, 8, 4, 9216, 256), ("9b", 42, 3584, 16, 8, 14336, 256), ("27b", 46, 4608, 32, 16, 36864, 128),
    ):  # fmt: skip
        shape = _gated(
            f"gemma2-{size}", "gemma2", layers, hidden, heads, kv_heads, feed_forward, 256000, 8192,
            head_size=head_size, tied=True,
        )  # fmt: skip
        yield shape, (f"google/gemma-2-{size}", f"gemma-2-{size}")


KNOWN: dict[str, ModelShape] = {shape.name: shape for shape, _ in _known()}
_BY_NAME = KNOWN | {alias.lower(): KNOWN[shape.name] for shape, ids in _known() for alias in ids}


LONGEST_PATH = 1024  # beyond what a file system takes, asking it is an error


def find(text: str) -> ModelShape:
    """Find a model by a known name or hub id, in any case, by a config.json or its folder, or on the hub.

    The hub is asked, through transformers, only for an id that is not known here. Raises ValueError with the remedy.
    """
    if known := _BY_NAME.get(text.strip().lower()):
        return known
    if not text.strip():
        raise ValueError("the model has no name; give a known name, a config.json or a hub id, owner/name")
    path = Path(text if len(text) < LONGEST_PATH else "\0")  # no file can have that name
    if (path / "config.json").is_file():
        return _from_file(path / "config.json")
    if text.endswith(".json") or path.is_file():
        return _from_file(path)
    if path.is_dir():
        raise ValueError(f"{text}: a folder without a config.json; add one, or give a known name or a hub id")
    owner, slash, name = text.partition("/")
    if slash and owner and name and "/" not in name and " " not in text:
        return _from_hub(text)
    near = list(dict.fromkeys(_BY_NAME[n].name for n in difflib.get_close_matches(text.lower(), _BY_NAME, n=3)))
    hint = f"near are {', '.join(near)}" if near else f"known are {', '.join(KNOWN)}"
    raise ValueError(f"unknown model {text!r}: {hint}; give one, a config.json or a hub id, owner/name")


def _from_file(path: Path) -> ModelShape:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give the path of a transformers config.json") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise ValueError(f"{path}: not JSON ({error}); give the path of a transformers config.json") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: no JSON object; give the path of a transformers config.json")
    return from_config(content, str(path))


def _from_hub(hub_id: str) -> ModelShape:
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ValueError(f"{hub_id}: the hub is asked through transformers; install it or give a config.json") from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it says each of its retries
    try:
        content = AutoConfig.from_pretrained(hub_id).to_dict()
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{hub_id}: not read from the hub ({reason}); give a config.json") from None
    return from_config(content, hub_id)
