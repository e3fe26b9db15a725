"""Build a model from its configuration without memory, to know which tensors its checkpoint has to have."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch


class NotKnown(Exception):
    """Raised if the tensors of a model cannot be derived from its configuration. The message is the reason."""


class Layout(NamedTuple):
    """Names and shapes of a model's tensors, and the names that share a parameter."""

    shapes: dict[str, tuple[int, ...]]
    groups: list[list[str]]


class Expected(NamedTuple):
    """The tensors that a checkpoint of a model has to have."""

    layouts: list[Layout]  # as the module names its tensors, and as `save_pretrained` does if that is different
    in_fp32: list[str]  # parts of names whose tensors stay in fp32
    linear: dict[str, tuple[int, int]]  # a layer that multiplies by a matrix -> inputs, outputs
    embeddings: dict[str, tuple[int, int]]  # an embedding -> rows, columns
    ignored: list[str]  # regular expressions of names that transformers ignores

    def layout_of(self, names: Iterable[str]) -> Layout:
        """Return the layout with the most of these names."""
        known = set(names)
        return max(self.layouts, key=lambda layout: len(known & layout.shapes.keys()))


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


def _as_saved(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's tensors under the names and in the shapes in which `save_pretrained` writes them."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5, which changes no names
        return tensors
    revert: Any = revert_weight_conversion
    reverted: dict[str, torch.Tensor] = dict(revert(model, tensors))
    return reverted


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
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = {name: parameters.get(name, tensor) for name, tensor in model.state_dict().items()}
    layouts = [_layout(tensors)]
    with contextlib.suppress(Exception):  # a conversion that needs values
        as_saved = _layout(_as_saved(model, tensors))
        layouts += [as_saved] if as_saved.shapes != layouts[0].shapes else []
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
        layouts=layouts,
        in_fp32=in_fp32,
        linear=linear,
        embeddings=embeddings,
        ignored=ignored,
    )


def _layout(tensors: dict[str, torch.Tensor]) -> Layout:
    by_tensor: dict[int, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        by_tensor[id(tensor)].append(name)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Layout(shapes, [names for names in by_tensor.values() if len(names) > 1])
