"""Read a model's shape from a config.json of `transformers`. Missing settings have the defaults of its model_type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from study.theory.shapes.shape import Architecture, Head, ModelShape

# The defaults of the configuration classes of transformers 5.23, written by tools/config_defaults.py.
DEFAULTS_FILE = Path(__file__).with_name("config_defaults.json")
# The keys that most files use for the parts of a shape.
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
_EXPERT_KEYS = {**_LLAMA_KEYS, "experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}
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
    """The keys that a model_type's config.json uses for the parts of a shape, and the defaults of missing ones."""

    architecture: Architecture
    classes: dict[str, Head]  # classes that `architectures` may name; the first is the default
    keys: dict[str, str]  # keys by part of a shape
    derived: frozenset[str] = frozenset()  # parts that follow from others if null: 4 hidden, heads, hidden / heads
    counted: dict[str, Any] = field(default_factory=dict)  # additions to COUNTED and exceptions from it
    window_switch: str | None = None  # the setting that switches sliding_window on


def _decoder(prefix: str, output: str = "ForCausalLM", labels_tokens: bool = True) -> dict[str, Head]:
    """Return the heads of a decoder's classes, by class name, if the classes have the usual names."""
    classes: dict[str, Head] = {
        f"{prefix}{output}": "tokens",
        f"{prefix}Model": "none",
        f"{prefix}ForSequenceClassification": "sequence classes",
    }
    return {**classes, f"{prefix}ForTokenClassification": "token classes"} if labels_tokens else classes


MODEL_TYPES = {
    "bert": ModelType(
        "bert",
        {
            "BertForSequenceClassification": "sequence classes", "BertForMaskedLM": "tokens", "BertModel": "none",
            "BertForTokenClassification": "token classes", "BertForQuestionAnswering": "token classes",
        },
        _KEYS,
    ),
    "gpt2": ModelType("gpt2", _decoder("GPT2", "LMHeadModel"), _GPT2_KEYS, derived=frozenset({"feed_forward"})),
    "gpt_neo": ModelType("gpt-neo", _decoder("GPTNeo"), _GPT_NEO_KEYS, derived=frozenset({"feed_forward"})),
    "gptj": ModelType("gpt-j", _decoder("GPTJ", labels_tokens=False), _GPT2_KEYS, derived=frozenset({"feed_forward"})),
    "llama": ModelType("llama", _decoder("Llama"), _LLAMA_KEYS, derived=frozenset({"kv_heads", "head_size"})),
    "mistral": ModelType("mistral", _decoder("Mistral"), _LLAMA_KEYS, derived=frozenset({"head_size"})),
    "qwen2": ModelType(
        "qwen2",
        _decoder("Qwen2"),
        _LLAMA_KEYS,
        derived=frozenset({"kv_heads", "head_size"}),
        window_switch="use_sliding_window",
    ),
    "gemma2": ModelType("gemma2", _decoder("Gemma2"), {**_LLAMA_KEYS, "activation": "hidden_activation"}),
    "qwen3": ModelType(
        "qwen3",
        _decoder("Qwen3"),
        _LLAMA_KEYS,
        derived=frozenset({"kv_heads"}),
        window_switch="use_sliding_window",
    ),
    "gemma3_text": ModelType(
        "gemma3",
        {
            "Gemma3ForCausalLM": "tokens", "Gemma3TextModel": "none",
            "Gemma3TextForSequenceClassification": "sequence classes",
        },
        {**_LLAMA_KEYS, "activation": "hidden_activation"},
        counted={"use_bidirectional_attention": False},
    ),
    "mixtral": ModelType("mixtral", _decoder("Mixtral"), _EXPERT_KEYS, derived=frozenset({"kv_heads", "head_size"})),
    "qwen3_moe": ModelType(
        "qwen3-moe",
        _decoder("Qwen3Moe"),
        {**_EXPERT_KEYS, "feed_forward": "moe_intermediate_size"},
        derived=frozenset({"head_size"}),
        counted={"decoder_sparse_step": 1, "mlp_only_layers": []},
        window_switch="use_sliding_window",
    ),
    "gpt_neox": ModelType("gpt-neox", _decoder("GPTNeoX"), _KEYS, counted={"attention_bias": True}),
    "opt": ModelType(
        "opt",
        _decoder("OPT", labels_tokens=False),
        {**_KEYS, "feed_forward": "ffn_dim", "activation": "activation_function"},
        counted={
            "do_layer_norm_before": True, "_remove_final_layer_norm": False, "enable_bias": True,
            "layer_norm_elementwise_affine": True,
        },
    ),
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = json.loads(DEFAULTS_FILE.read_text(encoding="utf-8"))
# Settings that add parameters or change the matrix products. Only the given value, which is the default, is supported.
COUNTED = {"type_vocab_size": 2, "add_cross_attention": False, "attention_bias": False, "mlp_bias": False}
# Model types that users request but that are not supported, with the explanation.
REFUSED = {
    "t5": "an encoder and a decoder, which are not counted",
    "modernbert": "an encoder whose blocks differ, which is not counted",
    "gemma3": (
        "text and images in one model, which is not counted; its text alone is: make a config.json of its "
        'text_config, with model_type "gemma3_text"'
    ),
}
LARGEST_WIDTH = 100_000_000  # upper limit for all sizes in a config.json, including positions
MOST_LAYERS = 10_000


# ---------------------------------------------------------------- reading a file


def from_config(content: dict[str, Any], source: str) -> ModelShape:
    """Return a model's shape from the content of a transformers config.json. `source` becomes the name of the shape.

    The shape is that of the class in `architectures`. If there is none, BERT has the two-class head of bert-imdb, and
    all others have an output layer over their vocabulary. Raises ValueError for a value of the wrong type, for sizes
    that are not multiples of each other, and for settings that are not supported.
    """
    model_type = _model_type(content, source)
    of_class = _DEFAULTS[content["model_type"]]
    settings = {**of_class["defaults"], **_in_own_words(content, of_class["own_names"], source)}
    _check_counted(settings, model_type, source)
    keys = model_type.keys

    def number(part: str) -> int:
        key = keys[part]
        return _number(settings[key], f"{source}: {key}", MOST_LAYERS if part == "layers" else LARGEST_WIDTH)

    def number_or(part: str, otherwise: int) -> int:
        """Return the number for a part of the shape, or `otherwise` if the file does not have it."""
        key = keys.get(part)
        return otherwise if key is None or (settings.get(key) is None and part in model_type.derived) else number(part)

    hidden, heads = number("hidden"), number("heads")
    kv_heads, head_size = number_or("kv_heads", heads), number_or("head_size", 0)
    if not head_size:
        _check_multiple(f"{keys['hidden']} {hidden}", f"{keys['heads']} {heads}", hidden % heads, source)
    if kv_heads != heads:
        _check_multiple(f"{keys['heads']} {heads}", f"{keys['kv_heads']} {kv_heads}", heads % kv_heads, source)
    experts, experts_per_token = number_or("experts", 0), number_or("experts_per_token", 0)
    if experts_per_token > experts:
        raise ValueError(
            f"{source}: {keys['experts_per_token']} {experts_per_token} is more than {keys['experts']} {experts}. "
            "Correct one of them."
        )
    head, labels = _head(content, model_type, source)
    tied, activation = settings[keys["tied"]], settings[keys["activation"]]
    if not isinstance(tied, bool):
        raise ValueError(f"{source}: {keys['tied']} is {tied!r}. Use true or false")
    if not isinstance(activation, str):
        raise ValueError(
            f'{source}: {keys["activation"]} is {activation!r}. Use the name of a function, such as "gelu"'
        )
    return ModelShape(
        name=source,
        architecture=model_type.architecture,
        layers=number("layers"),
        hidden=hidden,
        heads=heads,
        vocabulary=number("vocabulary"),
        positions=number("positions"),
        feed_forward=number_or("feed_forward", 4 * hidden),
        kv_heads=kv_heads,
        head_size=head_size or hidden // heads,
        tied=tied,
        activation=activation,
        head=head,
        labels=labels,
        experts=experts,
        experts_per_token=experts_per_token,
        notes=tuple(_notes(settings, model_type, experts)),
    )


def _check_multiple(key: str, divisor_key: str, remainder: int, source: str) -> None:
    if remainder:
        raise ValueError(f"{source}: {key} is not a multiple of {divisor_key}. Correct one of them")


def _model_type(content: dict[str, Any], source: str) -> ModelType:
    name = content.get("model_type")
    if isinstance(name, str) and name in MODEL_TYPES:
        return MODEL_TYPES[name]
    stated = "no model_type" if name is None else f"model_type {name!r}"
    if isinstance(name, str) and name in REFUSED:
        raise ValueError(f"{source}: {stated} is {REFUSED[name]}")
    raise ValueError(f"{source}: {stated}. Use a config.json of {', '.join(MODEL_TYPES)}")


def _check_counted(settings: dict[str, Any], model_type: ModelType, source: str) -> None:
    """Raise ValueError for a setting that adds parameters or matrix products that are not supported here."""
    counted_values = {**COUNTED, **model_type.counted}
    if model_type.architecture == "opt" and settings.get("word_embed_proj_dim") is not None:
        counted_values["word_embed_proj_dim"] = settings["hidden_size"]
    for key, counted in counted_values.items():
        if (value := settings.get(key, counted)) != counted and not (counted == [] and value is None):
            raise ValueError(
                f"{source}: {key} is {value!r}, which this project cannot count. Only {counted} is supported"
            )


def _head(content: dict[str, Any], model_type: ModelType, source: str) -> tuple[Head, int]:
    """Return the head of the class in `architectures`, and its number of classes."""
    classes = content.get("architectures") or [next(iter(model_type.classes))]
    if not isinstance(classes, list) or len(classes) != 1 or classes[0] not in [*model_type.classes]:
        raise ValueError(
            f"{source}: architectures is {classes!r}, which this project cannot count. Use one of"
            f" {', '.join(model_type.classes)}"
        )
    names = content.get("id2label")
    if names is not None and not isinstance(names, dict):
        raise ValueError(f"{source}: id2label is {names!r}. Use an object of names, or remove it")
    labels = content.get("num_labels")
    labels = len(names or {}) or 2 if labels is None else _number(labels, f"{source}: num_labels", LARGEST_WIDTH)
    if names and len(names) != labels:
        raise ValueError(f"{source}: num_labels is {labels}, but id2label has {len(names)} names. Remove one of them")
    return model_type.classes[classes[0]], labels


def _notes(settings: dict[str, Any], model_type: ModelType, experts: int) -> Iterator[str]:
    """Yield notes on settings of a file that are ignored or guessed."""
    if quantization := settings.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        yield (
            f"its quantization_config{f' ({method})' if isinstance(method, str) else ''} is ignored: quantised weights "
            "are not trained in 16 bits, and what is counted here is the model without quantisation"
        )
    if not settings.get("architectures") and model_type.architecture == "bert":
        yield f"it names no architectures: counted as {next(iter(model_type.classes))}"
    window, switch = settings.get("sliding_window"), model_type.window_switch
    if isinstance(window, int) and window and (switch is None or settings.get(switch)):
        yield f"its sliding_window of {window:,} tokens is ignored: attention is counted over the whole sequence"
    if experts:
        yield (
            "model states are of all experts, FLOPs and activations of those that a token is sent to; seconds are a "
            "guess: tokens are taken to spread evenly over experts, and no mixture has been timed"
        )


def _in_own_words(content: dict[str, Any], own_names: dict[str, str], source: str) -> dict[str, Any]:
    """Return the content with each setting under the key that its model_type uses.

    Raises ValueError if the file has two keys for the same setting with different values.
    """
    for usual, own in own_names.items():
        if usual in content and content[usual] != content.get(own, content[usual]):
            conflict = f"{own} is {content[own]!r} and {usual} {content[usual]!r}"
            raise ValueError(f"{source}: {conflict}, which are the same setting. Remove one of them")
    return {own_names.get(key, key): value for key, value in content.items()}


def _number(value: Any, name: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}. Use a whole number of at least 1")
    if value > most:
        raise ValueError(f"{name} is {value}, which is more than any model has. Correct it")
    return value
