"""Build a model of transformers from its class and its configuration, and make inputs for it.

Both `count` and the dry runs of `models` train what is built here.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zero_study.errors import Refusal

SAMPLES = 16_000  # of a second of sound
# Rates of dropout of one head only, and rates at which whole layers or paths are left out.
NOT_IN_BODY = (
    "classifier_drop", "qa_dropout", "seq_classif_dropout", "summary_", "pooler_dropout", "layerdrop",
    "encoder_layerdrop", "decoder_layerdrop", "drop_path",
)  # fmt: skip
# Model types whose texts are padded in the trainings of this study, so that attention has a mask.
PADDED = ("bert",)
# Names of the maximum sequence length in the configurations of models.
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions")
# Endings of classes that have one label per text, image or sound.
ONE_LABEL = (
    "ForSequenceClassification", "ForImageClassification", "ForAudioClassification", "ForVideoClassification",
)  # fmt: skip


def prepare(config: Any) -> None:
    """Turn off dropout, cache and dropped layers in a model's configuration, and set what a forward pass needs."""
    for part in with_sub_configs(config):
        for name, value in part.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
        if hasattr(part, "apply_spec_augment"):  # which parts are hidden is random, so that this cannot be traced
            part.apply_spec_augment = False
        part.use_cache = False
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if getattr(part, name, None) is None:
                setattr(part, name, 0)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0


def dropout_rates(config: Any) -> dict[str, float]:
    """Return the dropout rates in a model's configuration by name, including those of parts such as text_config."""
    settings = config.to_dict()
    rates = {
        name: value
        for name, value in settings.items()
        if "drop" in name and isinstance(value, float) and not name.startswith(NOT_IN_BODY)
    }
    for part in getattr(config, "sub_configs", None) or ():
        if hasattr(getattr(config, part, None), "to_dict"):
            rates |= {f"{part}.{name}": rate for name, rate in dropout_rates(getattr(config, part)).items()}
    return rates


def with_sub_configs(config: Any) -> Iterator[Any]:
    """Yield a model's configuration and those of its parts, such as the text part and the image part."""
    yield config
    for name in getattr(config, "sub_configs", None) or ():
        part = getattr(config, name, None)
        if part is not None and hasattr(part, "to_dict"):
            yield from with_sub_configs(part)


def first_setting(config: Any, *names: str, default: Any) -> Any:
    """Return the value of the first setting among `names` that a configuration or one of its parts has."""
    for part in with_sub_configs(config):
        for name in names:
            if (value := getattr(part, name, None)) is not None:
                return value
    return default


def positions(config: Any) -> list[int]:
    """Return the maximum sequence lengths in a model's configuration and in those of its parts."""
    lengths = (getattr(part, key, None) for part in with_sub_configs(config) for key in LENGTH_KEYS)
    return [length for length in lengths if isinstance(length, int) and length > 0]


def reads_images(built: Any) -> bool:
    """Return whether a model (or a class) reads images only. A sequence is then one image, and has no length."""
    return bool(getattr(built, "main_input_name", "input_ids") == "pixel_values")


def build(built: type[Any], config: Any, attention: str = "sdpa") -> tuple[Any, bool]:
    """Return a model in training mode, and whether it uses PyTorch's fused attention.

    It does for `attention` "sdpa", if it can. The configuration must be one that `prepare` has changed. Raises Refusal
    if transformers cannot build the model.
    """
    make = getattr(built, "_from_config", None) or (lambda config, **_: built(config))
    has_sdpa = True
    try:
        try:
            model = make(copy.deepcopy(config), attn_implementation=attention)
        except (ValueError, ImportError, TypeError) as error:
            if "scaled_dot_product" not in str(error) and "attn_implementation" not in str(error):
                raise
            has_sdpa = False
            model = make(copy.deepcopy(config), attn_implementation="eager")
    except Exception as error:  # any class and configuration may come here and raise anything
        raise Refusal(f"{built.__name__}: transformers cannot build it ({in_words(error)})") from None
    if hasattr(model, "set_default_language"):
        model.set_default_language(model.config.languages[0])
    return model.train(), has_sdpa


def make_inputs(
    model: nn.Module, batch: int, length: int, dtype: torch.dtype, adds_image: bool = False
) -> dict[str, Any]:
    """Return a batch of zeros as input for a model: tokens, images or sound.

    `length` is in tokens. Images and sound have the type `dtype`. With `adds_image`, each text has an image.
    """
    config: Any = model.config
    accepted = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    tokens = torch.zeros(batch, length, dtype=torch.long)
    inputs: dict[str, Any] = {}
    if main == "pixel_values" or adds_image:
        inputs["pixel_values"] = torch.zeros(batch, *image_shape(config, set(accepted)), dtype=dtype)
    if main == "input_features":  # a spectrogram
        bins = first_setting(config, "num_mel_bins", "input_feat_per_channel", default=80)
        frames = 2 * first_setting(config, "max_source_positions", default=1500)
        inputs["input_features"] = torch.zeros(batch, bins, frames, dtype=dtype)
    elif main == "input_values":  # a second of sound
        inputs["input_values"] = torch.zeros(batch, SAMPLES, dtype=dtype)
    elif main != "pixel_values":
        inputs["input_ids"] = tokens
        if config.model_type in PADDED:
            inputs["attention_mask"] = torch.ones_like(tokens)
    if "decoder_input_ids" in accepted and getattr(config, "is_encoder_decoder", True):
        inputs["decoder_input_ids"] = tokens
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    return inputs


def make_labels(model: nn.Module, batch: int, length: int) -> dict[str, Tensor]:
    """Return labels of zeros for a batch. Empty if the model computes its loss without labels.

    There is a label for each token, or one for a whole text, image or sound.
    """
    if "labels" not in inspect.signature(model.forward).parameters:
        return {}
    tokens = torch.zeros(batch, length, dtype=torch.long)
    return {"labels": tokens[:, 0] if type(model).__name__.endswith(ONE_LABEL) else tokens}


def image_shape(config: Any, accepted: set[str]) -> tuple[int, ...]:
    """Return the shape of an image that a model reads, or of its patches if the model reads images of any size."""
    channels = first_setting(config, "num_channels", "in_channels", "in_chans", default=3)
    if {"pixel_attention_mask", "spatial_shapes"} <= accepted:
        patch, patches = (first_setting(config, name, default=16) for name in ("patch_size", "num_patches"))
        return patches, channels * patch**2
    size = first_setting(config, "image_size", default=224)
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    return channels, height, width


def block_lists(model: nn.Module) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Return the model's lists of repeated blocks, each with its blocks.

    These are the blocks that transformers says must not be split, or else the members of the outermost lists.
    """
    whole = set(getattr(model, "_no_split_modules", None) or ())
    lists = [(each, list(each)) for each in model.modules() if isinstance(each, nn.ModuleList | nn.Sequential)]
    named = [(each, blocks) for each, blocks in lists if blocks and all(type(b).__name__ in whole for b in blocks)]
    if not named and whole:  # blocks of several classes, of which not all are named
        named = [(each, blocks) for each, blocks in lists if any(type(b).__name__ in whole for b in blocks)]
    chosen: list[tuple[nn.Module, list[nn.Module]]] = []
    inside: set[nn.Module] = set()
    for each, blocks in named or lists:
        if each in inside or not any(True for block in blocks for _ in block.parameters()):
            continue
        if not named and not (isinstance(each, nn.ModuleList) and len({type(block) for block in blocks}) == 1):
            continue
        chosen.append((each, blocks))
        inside.update(part for block in blocks for part in block.modules())
    return chosen


def in_words(error: Exception) -> str:
    """Return the class and the message of an error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
