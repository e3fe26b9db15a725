"""Read a model's shape from a config.json of `transformers`. Missing settings have the defaults of its model_type.

model_types.yaml has the keys and the classes of each model_type. Rules that are code are in this module.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from zero_study.errors import Refusal, refusing
from zero_study.files import FROM_LIST, StrictModel, read_yaml
from zero_study.theory.shapes import formulas
from zero_study.theory.shapes.counts import ModelCounts
from zero_study.theory.shapes.shape import Architecture, Head, ModelShape, Plain

# The defaults of the configuration classes of transformers 5.23, written by tools/derive/config_defaults.py.
DEFAULTS_FILE = Path(__file__).with_name("config_defaults.json")
MODEL_TYPES_FILE = Path(__file__).with_name("model_types.yaml")
# Parts of a shape for which every model type has a key, and those for which only some have one.
_PARTS = {"hidden", "layers", "heads", "positions", "feed_forward", "activation", "vocabulary", "tied"}
_FURTHER_PARTS = {"kv_heads", "head_size", "experts", "experts_per_token"}
# Returns the kind of each block, from the settings of a config.json and the number of blocks.
LayerRule: TypeAlias = Callable[[dict[str, Any], int], list[str]]
# Kinds of activation functions by name. Most are one kernel, which saves its input.
ACTIVATIONS = {
    **dict.fromkeys(("gelu", "gelu_pytorch_tanh", "silu", "swish"), "one kernel"),
    "relu": "relu",
    "gelu_new": "gelu_new",
}


def _alternating(every: int, key: str | None = None, full_first: bool = False) -> LayerRule:
    """Return the kinds of blocks of which each `every`-th one attends to all tokens, and the others to a window.

    `key` is an old setting that replaces `every`.
    """

    def layers(settings: dict[str, Any], count: int) -> list[str]:
        if settings.get("layer_types"):
            return list(settings["layer_types"])
        step = settings.get(key) or every if key else every
        shift = 0 if full_first else 1
        return ["sliding_attention" if (number + shift) % step else "full_attention" for number in range(count)]

    return layers


def _modernbert_layers(settings: dict[str, Any], count: int) -> list[str]:
    """Return the kinds of ModernBERT's blocks. The first one has no norm before its attention."""
    kinds = _alternating(3, "global_attn_every_n_layers", full_first=True)(settings, count)
    return [f"first {kinds[0]}", *kinds[1:]]


def _sparse_layers(settings: dict[str, Any], count: int) -> list[str]:
    """Return the kinds of blocks of a mixture of experts in which some blocks have none."""
    dense, step = settings.get("mlp_only_layers") or [], settings.get("decoder_sparse_step") or 1
    return ["dense" if number in dense or (number + 1) % step else "experts" for number in range(count)]


def _rotated_layers(settings: dict[str, Any], count: int) -> list[str]:
    """Return the kinds of SmolLM3's blocks, of which some have no rotary positions."""
    rotated = settings.get("no_rope_layers")  # 1 for a block with rotary positions
    step = settings.get("no_rope_layer_interval") or 4
    rotated = [(number + 1) % step for number in range(count)] if rotated is None else rotated
    return ["rotary positions" if each else "no positions" for each in rotated]


# The head of a class by the end of its name. The first end that fits counts.
_HEADS: dict[str, Head] = {
    "ForCausalLM": "tokens",
    "LMHeadModel": "tokens",
    "ForMaskedLM": "tokens",
    "Model": "none",
    "ForSequenceClassification": "sequence classes",
    "ForTokenClassification": "token classes",
    "ForQuestionAnswering": "token classes",
}


def _heads(names: object) -> dict[str, Head]:
    """Return the heads of classes, by class name. Raises ValueError for a name that does not show the head."""
    if not isinstance(names, list) or not names:
        raise ValueError("classes must be a list of names")
    heads: dict[str, Head] = {}
    for name in map(str, names):
        end = next((end for end in _HEADS if name.endswith(end)), None)
        if end is None:
            raise ValueError(f"classes: {name} must end with one of {', '.join(_HEADS)}")
        heads[name] = _HEADS[end]
    return heads


# How blocks of a model type differ, by the name that model_types.yaml uses.
_RULES_OF_LAYERS: dict[str, LayerRule] = {
    "gemma2": _alternating(2),
    "gemma3": _alternating(6, "sliding_window_pattern"),
    "mixture": _sparse_layers,
    "modernbert": _modernbert_layers,
    "smollm3": _rotated_layers,
}


def _rule_of_layers(name: object) -> LayerRule:
    if not isinstance(name, str) or name not in _RULES_OF_LAYERS:
        raise ValueError(f"layers={name!r}: config_json.py has rules for {', '.join(_RULES_OF_LAYERS)} only")
    return _RULES_OF_LAYERS[name]


class ModelType(StrictModel):
    """The keys that a model_type's config.json uses for the properties of a shape, and the defaults of missing ones."""

    architecture: Architecture
    # Heads of the classes that `architectures` may name. The first class is the default.
    classes: Annotated[dict[str, Head], BeforeValidator(_heads)]
    keys: dict[str, str]  # keys by part of a shape
    # Parts that follow from others if they are null: four times hidden, heads, hidden / heads.
    derived: Annotated[tuple[str, ...], FROM_LIST] = ()
    counted: dict[str, bool | int | None] = Field(default_factory=dict)  # additions to COUNTED and exceptions from it
    window_switch: str | None = None  # the setting that switches sliding_window on
    more: dict[str, str] = Field(default_factory=dict)  # keys of further numbers in the formulas of the type
    switches: Annotated[tuple[str, ...], FROM_LIST] = ()  # settings of which both values have formulas
    # Kinds of activation functions that have formulas.
    activations: Annotated[tuple[str, ...], Field(min_length=1), FROM_LIST] = ("one kernel",)
    # The kind of each block, if blocks differ.
    layers: Annotated[LayerRule, BeforeValidator(_rule_of_layers)] | None = None
    # The default modules of PEFT. None: PEFT has none for this model.
    default_targets: Annotated[tuple[str, ...], Field(min_length=1), FROM_LIST] | None = None
    # Parameters of routers and experts by the names that PEFT knows.
    expert_names: dict[str, Literal["gate", "gate_up_proj", "down_proj"]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> ModelType:
        for part in sorted(_PARTS - self.keys.keys()):
            raise ValueError(f"keys.{part} is missing")
        for part in sorted(self.keys.keys() - _PARTS - _FURTHER_PARTS):
            raise ValueError(f"keys.{part} is no part of a shape")
        for part in sorted(set(self.derived) - self.keys.keys()):
            raise ValueError(f"derived names {part}, for which keys has no key")
        for kind in sorted(set(self.activations) - set(ACTIVATIONS.values())):
            raise ValueError(f"activations names {kind!r}, which is no kind of ACTIVATIONS in config_json.py")
        return self


def read_model_types(path: Path = MODEL_TYPES_FILE) -> dict[str, ModelType]:
    """Return the model types of a file like model_types.yaml, by name.

    Raises Refusal with the name of a model type that is wrong.
    """
    entries = read_yaml(path, path.parent).get("model_types")
    if not isinstance(entries, dict):
        raise Refusal(f"{path}: `model_types` must have an entry for each model_type")
    types = {}
    for name, entry in entries.items():
        with refusing(f"{path}, {name}"):
            types[name] = ModelType.model_validate(entry)
    return types


MODEL_TYPES = read_model_types()
LARGEST_ROTARY = 64  # the rotary dimension of GPT-J, as published
_DEFAULTS: dict[str, dict[str, Any]] = json.loads(DEFAULTS_FILE.read_text(encoding="utf-8"))
# Settings that add parameters or change the matrix products. Only the given value, which is the default, is supported.
COUNTED = {"type_vocab_size": 2, "add_cross_attention": False, "attention_bias": False, "mlp_bias": False}
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
    settings: dict[str, Any] = {**of_class["defaults"], **_in_own_words(content, of_class["own_names"], source)}
    _check_counted(settings, model_type, source)
    keys = model_type.keys

    def number(part: str) -> int:
        key = keys[part]
        return _number(settings[key], f"{source}: {key}", MOST_LAYERS if part == "layers" else LARGEST_WIDTH)

    def number_or(part: str, otherwise: int) -> int:
        """Return a number from the config.json, or `otherwise` if the file does not have it."""
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
    class_name, labels = _class(content, model_type, source)
    head = model_type.classes[class_name]
    tied, activation = settings[keys["tied"]], settings[keys["activation"]]
    if not isinstance(tied, bool):
        raise ValueError(f"{source}: {keys['tied']} is {tied!r}. Use true or false")
    if not isinstance(activation, str):
        raise ValueError(
            f'{source}: {keys["activation"]} is {activation!r}. Use the name of a function, such as "gelu"'
        )
    sizes: dict[str, Any] = {
        "layers": number("layers"),
        "hidden": hidden,
        "heads": heads,
        "vocabulary": number("vocabulary"),
        "positions": number("positions"),
        "feed_forward": number_or("feed_forward", 4 * hidden),
        "kv_heads": kv_heads,
        "head_size": head_size or hidden // heads,
        "labels": labels,
        "experts": experts,
    }
    more = {part: _number(settings[key], f"{source}: {key}", LARGEST_WIDTH) for part, key in model_type.more.items()}
    numbers = {**sizes, "active": experts_per_token, **more}
    counts = _counts(numbers, model_type, class_name, tied and head == "tokens", settings, source)
    return ModelShape(
        name=source,
        architecture=model_type.architecture,
        **sizes,
        tied=tied,
        activation=activation,
        head=head,
        experts_per_token=experts_per_token,
        notes=tuple(_notes(settings, model_type, experts)),
        counts=counts,
        config=content,
        dropout={name: _rate(settings.get(name, rate)) for name, rate in of_class["dropout"].items()},
    )


def _rate(value: Any) -> float:
    """Return a rate of dropout of a config.json. Transformers does not train with one that is no number."""
    return float(value) if isinstance(value, int | float) else 0.0


def _counts(
    sizes: Mapping[str, int],
    model_type: ModelType,
    class_name: str,
    tied: bool,
    settings: dict[str, Any],
    source: str,
) -> ModelCounts:
    """Return the counts of a model of these sizes from the formulas of its model_type.

    Raises ValueError if there are none for one of its settings.
    """
    name, num_layers = settings["model_type"], sizes["layers"]
    variant = _variant(model_type, settings, source)
    blocks = formulas.architectures()[name]["blocks"]
    if variant not in blocks:
        raise ValueError(f"{source}: there are no formulas for {name} with {variant}. Change the settings")
    layers = _layers(model_type, settings, num_layers, source)
    if len(layers) != num_layers or any(kind not in blocks[variant] for kind in layers):
        key = next((key for key in ("layer_types", "no_rope_layers") if settings.get(key)), model_type.keys["layers"])
        raise ValueError(
            f"{source}: {key} is {settings.get(key)!r}, but there are formulas for {num_layers} blocks of the kinds "
            f"{', '.join(blocks[variant])}"
        )
    queries, keys = (sizes[heads] * sizes["head_size"] for heads in ("heads", "kv_heads"))
    return formulas.counts(name, {**sizes, "queries": queries, "keys": keys}, class_name, tied, variant, layers)


def _layers(model_type: ModelType, settings: dict[str, Any], count: int, source: str) -> list[str]:
    """Return the kind of each block. Raises ValueError if a setting that decides it has the wrong type."""
    if model_type.layers is None:
        return ["block"] * count
    try:
        return model_type.layers(settings, count)
    except (TypeError, ZeroDivisionError):
        keys = ("layer_types", "mlp_only_layers", "decoder_sparse_step", "no_rope_layers", "no_rope_layer_interval")
        given = ", ".join(f"{key} {settings[key]!r}" for key in keys if settings.get(key) is not None)
        raise ValueError(f"{source}: a setting of its blocks has the wrong type ({given or 'of layers'})") from None


def _variant(model_type: ModelType, settings: dict[str, Any], source: str) -> str:
    """Return the name of the formulas for the settings that change the modules of a block."""
    key = model_type.keys["activation"]
    activation = ACTIVATIONS.get(settings[key])
    if activation not in model_type.activations:
        known = [name for name, kind in ACTIVATIONS.items() if kind in model_type.activations]
        raise ValueError(f"{source}: {key} is {settings[key]!r}, but there are formulas for {', '.join(known)} only")
    different = [] if activation == model_type.activations[0] else [activation]
    for switch in model_type.switches:
        if not isinstance(settings[switch], bool):
            raise ValueError(f"{source}: {switch} is {settings[switch]!r}. Use true or false")
        different += [switch] if settings[switch] else []
    return " and ".join(different)


def from_parts(architecture: Architecture, name: str, head: Head, **parts: Any) -> ModelShape:
    """Return a model's shape from the properties that `ModelType.keys` names, such as hidden=4096.

    Properties that are not given have the defaults of the model type.
    """
    type_name, model_type = next(each for each in MODEL_TYPES.items() if each[1].architecture == architecture)
    settings = {key: parts[part] for part, key in model_type.keys.items() if part in parts}
    class_name = next(each for each, of_class in model_type.classes.items() if of_class == head)
    labels = {"num_labels": parts["labels"]} if "labels" in parts else {}
    settings |= _settings_of_blocks(type_name, parts)
    return from_config({"model_type": type_name, "architectures": [class_name], **settings, **labels}, name)


def _settings_of_blocks(type_name: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without which transformers cannot build some models with these parts.

    GPT-Neo lists the attention of each block. The rotary dimension of GPT-J is at most the size of a head.
    """
    if type_name == "gpt_neo" and "layers" in parts:
        return {"attention_types": [[["global", "local"], parts["layers"] // 2], [["global"], parts["layers"] % 2]]}
    if type_name == "gptj" and "head_size" in parts:
        return {"rotary_dim": min(LARGEST_ROTARY, parts["head_size"])}
    return {}


@lru_cache(maxsize=1024)  # records of runs name the same few models again and again
def decoder_shape(
    name: str,
    architecture: Plain,
    layers: int,
    hidden: int,
    heads: int,
    positions: int,
    vocabulary: int,
    activation: str | None = None,
) -> ModelShape:
    """Return the shape of a model whose feed-forward layers are four times as wide as the hidden size.

    There is one key and value head per query head. BERT has the two-class head of bert-imdb, and all others predict
    tokens.
    """
    return from_parts(
        architecture,
        name,
        "sequence classes" if architecture == "bert" else "tokens",
        layers=layers,
        hidden=hidden,
        heads=heads,
        positions=positions,
        vocabulary=vocabulary,
        feed_forward=4 * hidden,
        head_size=hidden // heads,
        tied=architecture != "gpt-j",
        activation=activation or ("gelu" if architecture == "bert" else "gelu_new"),
    )


def vocabulary_of(architecture: Plain, layers: int, hidden: int, positions: int, num_params: int) -> int:
    """Return the vocabulary size with which a model of this project has this number of parameters.

    Raises ValueError if there is none.
    """
    one_word, two_words = (
        decoder_shape("", architecture, layers, hidden, 1, positions, words).num_params for words in (1, 2)
    )
    more_words, remainder = divmod(num_params - one_word, two_words - one_word)
    if remainder or more_words < 0:
        raise ValueError(
            f"{num_params} parameters are impossible for {architecture} with {layers} layers of hidden size {hidden}"
        )
    return 1 + more_words


def replace_parts(shape: ModelShape, **parts: Any) -> ModelShape:
    """Return a copy of a shape with some properties replaced, such as positions=4096, and with matching counts.

    Raises ValueError if models of this type have no such property, as GPT-2 has no key heads besides its query heads.
    """
    new = dataclasses.replace(shape, **parts)
    if shape.config is None:
        return new
    type_name, model_type = next(each for each in MODEL_TYPES.items() if each[1].architecture == new.architecture)
    before = shape.config if shape.config is not None and new.architecture == shape.architecture else {}
    settings = {key: getattr(new, part) for part, key in model_type.keys.items()}
    own_names = _DEFAULTS[type_name]["own_names"]
    content = {own_names.get(key, key): value for key, value in before.items()} | settings
    content |= {"model_type": type_name, "num_labels": new.labels, **_settings_of_blocks(type_name, parts)}
    if new.head != shape.head or not before:
        content["architectures"] = [next(name for name, head in model_type.classes.items() if head == new.head)]
        content.pop("id2label", None)
    result = dataclasses.replace(from_config(content, new.name), notes=shape.notes, adapter=shape.adapter)
    for part, value in parts.items():
        if (own := getattr(result, part)) != value:
            raise ValueError(f"{new.name}: {part} cannot be {value}, because {type_name} has {own} with these sizes")
    return result


def _check_multiple(key: str, divisor_key: str, remainder: int, source: str) -> None:
    if remainder:
        raise ValueError(f"{source}: {key} is not a multiple of {divisor_key}. Correct one of them")


def _model_type(content: dict[str, Any], source: str) -> ModelType:
    name = content.get("model_type")
    if isinstance(name, str) and name in MODEL_TYPES:
        return MODEL_TYPES[name]
    missing = "it has no model_type" if name is None else f"there are no formulas for model_type {name!r}"
    raise ValueError(f"{source}: {missing}. There are formulas for {', '.join(MODEL_TYPES)}")


def _check_counted(settings: dict[str, Any], model_type: ModelType, source: str) -> None:
    """Raise ValueError for a setting that adds parameters or matrix products that are not supported here."""
    counted_values = {**COUNTED, **model_type.counted}
    if model_type.architecture == "opt" and settings.get("word_embed_proj_dim") is not None:
        counted_values["word_embed_proj_dim"] = settings["hidden_size"]
    for key in model_type.switches:
        counted_values.pop(key, None)
    for key, counted in counted_values.items():
        if (value := settings.get(key, counted)) != counted:
            raise ValueError(f"{source}: {key} is {value!r}, but there are formulas for {counted} only")


def _class(content: dict[str, Any], model_type: ModelType, source: str) -> tuple[str, int]:
    """Return the class in `architectures`, and its number of labels."""
    classes = content.get("architectures") or [next(iter(model_type.classes))]
    if not isinstance(classes, list) or len(classes) != 1 or classes[0] not in [*model_type.classes]:
        raise ValueError(
            f"{source}: architectures is {classes!r}, but there are formulas for one of {', '.join(model_type.classes)}"
        )
    names = content.get("id2label")
    if names is not None and not isinstance(names, dict):
        raise ValueError(f"{source}: id2label is {names!r}. Use an object of names, or remove it")
    labels = content.get("num_labels")
    labels = len(names or {}) or 2 if labels is None else _number(labels, f"{source}: num_labels", LARGEST_WIDTH)
    if names and len(names) != labels:
        raise ValueError(f"{source}: num_labels is {labels}, but id2label has {len(names)} names. Remove one of them")
    return classes[0], labels


_EXPERTS = re.compile(r"^(n|num|moe|n_routed|n_shared)\w*experts?\b|^moe_|^num_experts_per_tok$")


def unread_settings(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on settings of a file that can make it another model than the one that is predicted."""
    if quantization := settings.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        yield (
            f"its quantization_config{f' ({method})' if isinstance(method, str) else ''} is ignored: "
            "quantized weights are not trained in 16 bits, so the model without quantization is predicted"
        )
    name = settings.get("model_type")
    if settings.get("auto_map"):
        yield f"its config.json names its own code (auto_map), which is not read: transformers' {name} is predicted"
    model_type = MODEL_TYPES.get(str(name))
    experts = sorted(key for key in settings if _EXPERTS.search(key) and settings[key])
    if experts and model_type is not None and "experts" not in model_type.keys:
        yield (
            f"its config.json has experts ({', '.join(experts)}), and transformers' {name} has none: a model without "
            "experts is predicted"
        )


def ignored_settings(settings: Mapping[str, Any], window_switch: str | None) -> Iterator[str]:
    """Yield notes on settings of a file that are ignored.

    `window_switch` is the key that switches sliding_window on. None if the model has no such key.
    """
    yield from unread_settings(settings)
    window = settings.get("sliding_window")
    if isinstance(window, int) and window and (window_switch is None or settings.get(window_switch)):
        yield f"its sliding_window of {window:,} tokens is ignored: attention is counted over the whole sequence"


def _notes(settings: dict[str, Any], model_type: ModelType, experts: int) -> Iterator[str]:
    """Yield notes on settings of a file that are ignored or guessed."""
    yield from ignored_settings(settings, model_type.window_switch)
    if not settings.get("architectures") and next(iter(model_type.classes.values())) != "tokens":
        yield f"its config.json names no architectures, so we assume {next(iter(model_type.classes))}"
    if experts:
        yield (
            "the model states include all experts, but FLOPs and activations include only the experts to "
            "which a token is sent. "
            "The times are rough guesses, because there is no published time of a mixture of experts, and we assume "
            "that tokens are spread evenly over the experts"
        )


def _in_own_words(content: dict[str, Any], own_names: dict[str, str], source: str) -> dict[str, Any]:
    """Return the content with each setting under the key that its model_type uses.

    Raises ValueError if the file has two keys for the same setting with different values.
    """
    for usual, own in own_names.items():
        if usual in content and content[usual] != content.get(own, content[usual]):
            conflict = f"{own} is {content[own]!r} and {usual} is {content[usual]!r}"
            raise ValueError(f"{source}: {conflict}, but the two keys are the same setting. Remove one of them")
    return {own_names.get(key, key): value for key, value in content.items()}


def _number(value: Any, name: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}. Use a whole number of at least 1")
    if value > most:
        raise ValueError(f"{name} is {value}, which is more than any model has. Correct it")
    return value


def kinds_of_layers(name: str, shape: ModelShape) -> list[str]:
    """Return the kind of each block of a model with this model_type, if its blocks differ."""
    model_type = MODEL_TYPES[name]
    if model_type.layers is None:
        return ["block"] * shape.layers
    settings = {**_DEFAULTS[name]["defaults"], **(shape.config or {})}
    return model_type.layers(settings, shape.layers)
