"""Which shape does a config.json of `transformers` describe? What it leaves out is as its model_type has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from study.theory.shapes.shape import Architecture, ModelShape

# How most files call the parts of a shape; the first four are understood in every file (its class's attribute_map).
_KEYS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "positions": "max_position_embeddings",
    "feed_forward": "intermediate_size",
    "activation": "hidden_act",
    "vocabulary": "vocab_size",
    "tied": "tie_word_embeddings",
}
_LLAMA_KEYS = {**_KEYS, "kv_heads": "num_key_value_heads", "head_size": "head_dim"}
_GPT2_KEYS = {
    **_KEYS,
    "hidden": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "positions": "n_positions",
    "feed_forward": "n_inner",
    "activation": "activation_function",
}
_GPT_NEO_KEYS = {**_KEYS, "layers": "num_layers", "heads": "num_heads", "activation": "activation_function"}


@dataclass(frozen=True)
class ModelType:
    """What a model_type's config.json calls the parts of a shape, and what it means where it leaves one out."""

    architecture: Architecture
    keys: dict[str, str]  # by part of a shape
    defaults: dict[str, Any]  # by key; of transformers 5.23, models/*/configuration_*.py
    derived: frozenset[str] = frozenset()  # parts that may be null: 4 hidden, as many as heads, hidden / heads

    @property
    def synonyms(self) -> dict[str, str]:
        """The usual key of what this type calls otherwise, with the type's own."""
        names = ((_KEYS[part], self.keys[part]) for part in ("hidden", "layers", "heads", "positions"))
        return {usual: own for usual, own in names if usual != own}


MODEL_TYPES = {
    "bert": ModelType(
        "bert",
        _KEYS,
        {
            "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
            "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512,
            "tie_word_embeddings": True,
        },
    ),
    "gpt2": ModelType(
        "gpt2",
        _GPT2_KEYS,
        {
            "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_inner": None,
            "activation_function": "gelu_new", "tie_word_embeddings": True,
        },
        derived=frozenset({"feed_forward"}),
    ),
    "gpt_neo": ModelType(
        "gpt-neo",
        _GPT_NEO_KEYS,
        {
            "vocab_size": 50257, "hidden_size": 2048, "num_layers": 24, "num_heads": 16,
            "max_position_embeddings": 2048, "intermediate_size": None, "activation_function": "gelu_new",
            "tie_word_embeddings": True,
        },
        derived=frozenset({"feed_forward"}),
    ),
    "gptj": ModelType(
        "gpt-j",
        _GPT2_KEYS,
        {
            "vocab_size": 50400, "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048, "n_inner": None,
            "activation_function": "gelu_new", "tie_word_embeddings": False,
        },
        derived=frozenset({"feed_forward"}),
    ),
    "llama": ModelType(
        "llama",
        _LLAMA_KEYS,
        {
            "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": None, "head_dim": None, "intermediate_size": 11008, "hidden_act": "silu",
            "max_position_embeddings": 2048, "tie_word_embeddings": False,
        },
        derived=frozenset({"kv_heads", "head_size"}),
    ),
    "mistral": ModelType(
        "mistral",
        _LLAMA_KEYS,
        {
            "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": None, "intermediate_size": 14336, "hidden_act": "silu",
            "max_position_embeddings": 131072, "tie_word_embeddings": False,
        },
        derived=frozenset({"head_size"}),
    ),
    "qwen2": ModelType(
        "qwen2",
        _LLAMA_KEYS,
        {
            "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 32, "intermediate_size": 22016, "hidden_act": "silu",
            "max_position_embeddings": 32768, "tie_word_embeddings": False,
        },
        derived=frozenset({"kv_heads", "head_size"}),
    ),
    "gemma2": ModelType(
        "gemma2",
        {**_LLAMA_KEYS, "activation": "hidden_activation"},
        {
            "vocab_size": 256000, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216,
            "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip
# Settings that add parameters which are not counted here, with the one value of each that is: every type's default.
COUNTED = {"type_vocab_size": 2, "add_cross_attention": False, "attention_bias": False, "mlp_bias": False}

LARGEST_WIDTH = 100_000_000  # of anything that a config.json counts, positions included
MOST_LAYERS = 10_000


def from_config(content: dict[str, Any], where: str) -> ModelShape:
    """Read a model's shape from the content of a transformers config.json; `where` becomes its name.

    A BERT gets the two-class head of bert-imdb and the others an output layer over their vocabulary, whatever head the
    file names. Raises ValueError for what is of the wrong type, does not divide, or is not counted here.
    """
    name = content.get("model_type")
    if not isinstance(name, str) or name not in MODEL_TYPES:
        given = "no model_type" if name is None else f"model_type {name!r}"
        raise ValueError(f"{where}: {given}; give a config.json of {', '.join(MODEL_TYPES)}")
    model_type = MODEL_TYPES[name]
    settings = {**model_type.defaults, **_in_own_words(content, model_type.synonyms, where)}
    for key, counted in COUNTED.items():
        if settings.get(key, counted) != counted:
            raise ValueError(
                f"{where}: {key} is {settings[key]!r}, whose parameters are not counted; only {counted} is"
            )

    def number(part: str) -> int | None:
        """None: it follows from the others."""
        key = model_type.keys.get(part, "")
        if settings.get(key) is None and (part in model_type.derived or not key):
            return None
        return _number(settings[key], f"{where}: {key}", MOST_LAYERS if part == "layers" else LARGEST_WIDTH)

    hidden, heads, kv_heads, head_size = map(number, ("hidden", "heads", "kv_heads", "head_size"))
    keys = model_type.keys
    if head_size is None and hidden % heads:
        raise ValueError(
            f"{where}: {keys['hidden']} {hidden} is not a multiple of {keys['heads']} {heads}; correct one"
        )
    if kv_heads is not None and heads % kv_heads:
        raise ValueError(
            f"{where}: {keys['heads']} {heads} is not a multiple of {keys['kv_heads']} {kv_heads}; correct one"
        )
    tied, activation = settings[keys["tied"]], settings[keys["activation"]]
    if not isinstance(tied, bool):
        raise ValueError(f"{where}: {keys['tied']} is {tied!r}; give true or false")
    if not isinstance(activation, str):
        raise ValueError(f'{where}: {keys["activation"]} is {activation!r}; give its name, such as "gelu"')
    return ModelShape(
        name=where,
        architecture=model_type.architecture,
        layers=number("layers"),
        hidden=hidden,
        heads=heads,
        vocabulary=number("vocabulary"),
        positions=number("positions"),
        feed_forward=number("feed_forward") or 4 * hidden,
        kv_heads=kv_heads or heads,
        head_size=head_size or hidden // heads,
        tied=tied,
        activation=activation,
    )


def _in_own_words(content: dict[str, Any], synonyms: dict[str, str], where: str) -> dict[str, Any]:
    """The content with each setting under its type's own key."""
    for usual, own in synonyms.items():
        if usual in content and content[usual] != content.get(own, content[usual]):
            both = f"{own} is {content[own]!r} and {usual} {content[usual]!r}"
            raise ValueError(f"{where}: {both}, which are one setting; leave one out")
    return {synonyms.get(key, key): value for key, value in content.items()}


def _number(value: Any, what: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} is {value!r}; give a whole number of at least 1")
    if value > most:
        raise ValueError(f"{what} is {value}, more than any model's; correct it")
    return value
