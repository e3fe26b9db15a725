"""Build a model from its configuration without memory, to learn which tensors its checkpoint must have."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch


class NotKnown(Exception):
    """Raised if the tensors of a model cannot be derived from its configuration. The message is the reason."""


class Layout(NamedTuple):
    """Names and shapes of a model's tensors, and the names that share a parameter."""

    shapes: dict[str, tuple[int, ...]]
    groups: list[list[str]]
    dtypes: dict[str, torch.dtype]


class Expected(NamedTuple):
    """The tensors that a checkpoint of a model must have."""

    layouts: list[Layout]  # as the module names its tensors, and as `save_pretrained` does if that is different
    in_fp32: list[str]  # parts of names whose tensors stay in fp32
    linear: dict[str, tuple[int, int]]  # a layer that multiplies by a matrix -> inputs, outputs
    embeddings: dict[str, tuple[int, int]]  # an embedding -> rows, columns
    ignored: list[str]  # regular expressions of names that transformers ignores
    modules: set[str]  # the names of all modules
    num_tokens: int | None  # rows of the embedding of tokens, or of the head if that has more
    model: Any  # on the meta device

    def layout_of(self, names: Iterable[str]) -> Layout:
        """Return the layout that contains the most of these names."""
        name_set = set(names)
        return max(self.layouts, key=lambda layout: len(name_set & layout.shapes.keys()))


def from_config(config: dict[str, Any], model_class: Any = None) -> Expected:
    """Return the tensors of the model that a config.json describes, by default in its own class. Raises NotKnown."""
    built, model_class = class_of(config, model_class)
    try:
        with quiet(), torch.device("meta"):
            model = model_class(built)
            model.tie_weights()
    except Exception as error:  # a model's constructor may raise anything
        name = model_class.__name__
        raise NotKnown(f"{name} cannot be built from its configuration ({type(error).__name__})") from None
    return _describe(model)


def class_of(config: dict[str, Any], model_class: Any = None) -> tuple[Any, Any]:
    """Return the configuration and the class of the model that a config.json describes. Raises NotKnown."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if model_class is None and not isinstance(name, str):
        raise NotKnown("the configuration names no architecture")
    if config.get("auto_map"):
        raise NotKnown("the model has its own code, which is not run")
    if config.get("quantization_config"):
        raise NotKnown("the weights are quantized")
    built = configuration(config)
    kind = config.get("model_type")
    if model_class is None or not _is_for(model_class, kind):
        model_class = class_called(str(name))
    chosen_class = None if model_class is None else _class_for(model_class, built)
    if chosen_class is None:
        raise NotKnown(f"transformers has no {name if model_class is None else model_class.__name__} for {kind}")
    return built, chosen_class


def configuration(config: dict[str, Any]) -> Any:
    """Return a config.json as transformers reads it, with derived values and defaults. Raises NotKnown."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise NotKnown("transformers is not installed") from None
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise NotKnown(f"transformers {transformers.__version__} does not know models of type {kind}")
    try:
        with quiet():
            kind_class = transformers.CONFIG_MAPPING[kind]
            decode = getattr(kind_class, "_decode_special_floats", dict)  # JSON has no infinity
            return kind_class.from_dict(decode(_without_code(config)))
    except Exception as error:
        raise NotKnown(f"transformers cannot read the configuration ({type(error).__name__})") from None


def class_called(name: str) -> Any:
    """Return the model class with this name in transformers. None if there is none."""
    import transformers

    named = getattr(transformers, name, None)
    return named if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel) else None


def _class_for(model_class: Any, built: Any) -> Any:
    """Return the class itself, or that which an AutoModel takes for a configuration; None if it takes none."""
    classes = getattr(model_class, "_model_mapping", None)
    chosen_class = model_class if classes is None else classes.get(type(built), None)
    return chosen_class[0] if isinstance(chosen_class, tuple) else chosen_class


def _is_for(model_class: Any, kind: Any) -> bool:
    """Return whether a class of models is for a kind of configurations. An AutoModel is for all."""
    own = getattr(model_class, "config_class", None)
    return own is None or getattr(own, "model_type", kind) == kind


def _without_code(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without the keys that make transformers fetch and run kernels, or need a GPU."""
    dropped_keys = ("attn_implementation", "_attn_implementation", "experts_implementation", "fusion_config")
    return {
        key: _without_code(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in dropped_keys
    }


def find_config(name_or_path: str | None, beside: Path) -> dict[str, Any] | None:
    """Find the config.json of a base model in a folder, or in the local cache of the Hugging Face Hub.

    Nothing is downloaded. None if it is in neither.
    """
    if not name_or_path:
        return None
    for folder in (Path(name_or_path), beside / name_or_path):
        if (folder / "config.json").is_file():
            return _object_in(folder / "config.json")
    with contextlib.suppress(Exception):  # the name is not one of the Hub, or transformers is not installed
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name_or_path, "config.json")
        return _object_in(Path(cached)) if isinstance(cached, str) else None
    return None


def _object_in(path: Path) -> dict[str, Any] | None:
    content = json.loads(path.read_bytes())
    return content if isinstance(content, dict) else None


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
def quiet() -> Iterator[None]:
    """Suppress the output of transformers in a `with` block."""
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)


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
        modules={name for name, _ in model.named_modules()},
        num_tokens=_num_tokens(model),
        model=model,
    )


def _num_tokens(model: Any) -> int | None:
    """Return how many tokens a model has: the rows of its embedding, or of its head if that has more."""
    modules = []
    for find in ("get_input_embeddings", "get_output_embeddings"):
        with contextlib.suppress(Exception):  # a model of images may have neither
            modules.append(getattr(model, find)())
    if not modules or not isinstance(modules[0], torch.nn.Embedding):
        return None
    return max(module.weight.shape[0] for module in modules if isinstance(module, torch.nn.Embedding | torch.nn.Linear))


def _layout(tensors: dict[str, torch.Tensor]) -> Layout:
    by_tensor: dict[int, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        by_tensor[id(tensor)].append(name)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    return Layout(shapes, [names for names in by_tensor.values() if len(names) > 1], dtypes)
