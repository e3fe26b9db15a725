"""Build a model from its configuration without memory, to know which tensors its checkpoint has to have."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch


class NotKnown(Exception):
    """Raised if the tensors of a model cannot be derived from its configuration. The message is the reason."""


class Expected(NamedTuple):
    """The tensors of a model, as `state_dict` lists them."""

    shapes: dict[str, tuple[int, ...]]
    groups: list[list[str]]  # names of one and the same parameter
    in_fp32: list[str]  # parts of names whose tensors stay in fp32
    linear: dict[str, tuple[int, int]]  # a layer that multiplies by a matrix -> inputs, outputs
    embeddings: dict[str, tuple[int, int]]  # an embedding -> rows, columns
    ignored: list[str]  # regular expressions of names that transformers ignores


def from_config(config: dict[str, Any]) -> Expected:
    """Return the tensors of the model that a config.json describes. Raises NotKnown."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise NotKnown("transformers is not installed") from None
    names = config.get("architectures") or []
    if not names:
        raise NotKnown("the configuration names no architecture")
    if config.get("auto_map"):
        raise NotKnown("the model has code of its own, which is not run")
    if config.get("quantization_config"):
        raise NotKnown("the weights are quantized")
    model_class = getattr(transformers, names[0], None)
    if model_class is None or config.get("model_type") not in transformers.CONFIG_MAPPING:
        raise NotKnown(f"transformers {transformers.__version__} does not know {names[0]}")
    if _is_converted(config["model_type"]):
        raise NotKnown(f"transformers stores the tensors of {config['model_type']} under other names than it uses")
    try:
        with _quiet():
            built = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
            with torch.device("meta"):
                model = model_class(built)
            model.tie_weights()
    except Exception as error:  # a model's constructor may raise anything
        raise NotKnown(f"{names[0]} cannot be built from its configuration ({type(error).__name__})") from None
    return _describe(model)


def find_config(name_or_path: str | None, beside: Path) -> dict[str, Any] | None:
    """Return the config.json of a base model: of a folder, or in the local cache of the Hugging Face Hub.

    Nothing is downloaded. None if it is not there.
    """
    if not name_or_path:
        return None
    for folder in (Path(name_or_path), beside / name_or_path):
        if (folder / "config.json").is_file():
            content = json.loads((folder / "config.json").read_bytes())
            return content if isinstance(content, dict) else None
    with contextlib.suppress(Exception):  # the name is not one of the Hub, or transformers is not installed
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name_or_path, "config.json")
        if isinstance(cached, str):
            content = json.loads(Path(cached).read_bytes())
            return content if isinstance(content, dict) else None
    return None


def _is_converted(model_type: str) -> bool:
    """Return whether transformers changes names or shapes of a model's tensors when it loads and saves them."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:  # before transformers 5
        return False
    mapping: Any = get_checkpoint_conversion_mapping
    return bool(mapping(model_type))


@contextlib.contextmanager
def _quiet() -> Any:
    """Hide what a model's constructor prints."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _describe(model: Any) -> Expected:
    by_parameter: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_parameter[id(parameter)].append(name)
    in_fp32 = [*(getattr(model, "_keep_in_fp32_modules", None) or [])]
    in_fp32 += getattr(model, "_keep_in_fp32_modules_strict", None) or []
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_missing", None) or [])]
    ignored += getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    linear, embeddings = {}, {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, torch.nn.Embedding):
            embeddings[name] = (module.num_embeddings, module.embedding_dim)
        elif isinstance(module, torch.nn.Linear):
            linear[name] = (module.in_features, module.out_features)
        elif type(module).__name__ == "Conv1D" and weight is not None:  # GPT-2's
            linear[name] = (weight.shape[0], weight.shape[1])
    return Expected(
        shapes={name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
        groups=[names for names in by_parameter.values() if len(names) > 1],
        in_fp32=in_fp32,
        linear=linear,
        embeddings=embeddings,
        ignored=ignored,
    )
