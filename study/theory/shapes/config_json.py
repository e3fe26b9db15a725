"""Which shape does a config.json of `transformers` describe? What it leaves out is as its model_type has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from study.theory.shapes.model_types import COUNTED, MODEL_TYPES, REFUSED, ModelType
from study.theory.shapes.shape import ModelShape
from study.theory.shapes.sizes import Head

LARGEST_WIDTH = 100_000_000  # of anything that a config.json counts, positions included
MOST_LAYERS = 10_000


def from_config(content: dict[str, Any], where: str) -> ModelShape:
    """Read a model's shape from the content of a transformers config.json; `where` becomes its name.

    Counted is the class that `architectures` names; without it BERT with the two-class head of bert-imdb, and the
    others with an output layer over their vocabulary. Raises ValueError for what is of the wrong type, does not divide,
    or is not counted here.
    """
    model_type = _model_type(content, where)
    settings = {**model_type.defaults, **_in_own_words(content, model_type.synonyms, where)}
    _check_counted(settings, model_type, where)
    keys = model_type.keys

    def number(part: str) -> int | None:
        """None: it follows from the others."""
        key = keys.get(part)
        if key is None or (settings.get(key) is None and part in model_type.derived):
            return None
        return _number(settings[key], f"{where}: {key}", MOST_LAYERS if part == "layers" else LARGEST_WIDTH)

    hidden, heads, kv_heads, head_size = map(number, ("hidden", "heads", "kv_heads", "head_size"))
    if head_size is None and hidden % heads:
        raise ValueError(
            f"{where}: {keys['hidden']} {hidden} is not a multiple of {keys['heads']} {heads}; correct one"
        )
    if kv_heads is not None and heads % kv_heads:
        raise ValueError(
            f"{where}: {keys['heads']} {heads} is not a multiple of {keys['kv_heads']} {kv_heads}; correct one"
        )
    experts, experts_per_token = number("experts") or 0, number("experts_per_token") or 0
    if experts_per_token > experts:
        raise ValueError(
            f"{where}: {keys['experts_per_token']} {experts_per_token} is more than {keys['experts']} {experts}; "
            "correct one"
        )
    head, labels = _head(content, model_type, where)
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
        head=head,
        labels=labels,
        experts=experts,
        experts_per_token=experts_per_token,
        notes=tuple(_notes(settings, model_type, experts)),
    )


def _model_type(content: dict[str, Any], where: str) -> ModelType:
    name = content.get("model_type")
    if isinstance(name, str) and name in MODEL_TYPES:
        return MODEL_TYPES[name]
    given = "no model_type" if name is None else f"model_type {name!r}"
    if isinstance(name, str) and name in REFUSED:
        raise ValueError(f"{where}: {given} is {REFUSED[name]}")
    raise ValueError(f"{where}: {given}; give a config.json of {', '.join(MODEL_TYPES)}")


def _check_counted(settings: dict[str, Any], model_type: ModelType, where: str) -> None:
    """Raise ValueError for a setting that adds parameters, or changes what is multiplied, in a way not counted."""
    counted_values = {**COUNTED, **model_type.counted}
    if model_type.architecture == "opt" and settings.get("word_embed_proj_dim") is not None:
        counted_values["word_embed_proj_dim"] = settings["hidden_size"]
    for key, counted in counted_values.items():
        if (value := settings.get(key, counted)) != counted and not (counted == [] and value is None):
            raise ValueError(f"{where}: {key} is {value!r}, which is not counted; only {counted} is")


def _head(content: dict[str, Any], model_type: ModelType, where: str) -> tuple[Head, int]:
    """What the class that `architectures` names has after its last block, and how many classes."""
    named = content.get("architectures") or [next(iter(model_type.classes))]
    if not isinstance(named, list) or len(named) != 1 or named[0] not in [*model_type.classes]:
        raise ValueError(
            f"{where}: architectures is {named!r}, which is not counted; give one of {', '.join(model_type.classes)}"
        )
    names = content.get("id2label")
    if names is not None and not isinstance(names, dict):
        raise ValueError(f"{where}: id2label is {names!r}; give an object of names, or leave it out")
    labels = content.get("num_labels")
    labels = len(names or {}) or 2 if labels is None else _number(labels, f"{where}: num_labels", LARGEST_WIDTH)
    if names and len(names) != labels:
        raise ValueError(f"{where}: num_labels is {labels}, id2label names {len(names)}; leave one out")
    return model_type.classes[named[0]], labels


def _notes(settings: dict[str, Any], model_type: ModelType, experts: int) -> Iterator[str]:
    """Say what of a file is ignored, or guessed."""
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
