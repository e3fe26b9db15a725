"""Check the values of saved tensors, and compare their names, shapes and types with the configuration."""

from __future__ import annotations

import contextlib
import copy
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from ..engines.readback.parameters import ADAPTER_PREFIX, base_name, wrapper_of
from ..verdict import Checked
from . import expected, invariants, loading, pickles, vocabulary
from .adapters import check_adapter as check_adapter
from .against import WIDEST_FIRST
from .content import Kind, Saved, Tensor
from .expected import Expected, Layout
from .number_types import check_types
from .patterns import Patterns
from .values import numbers, same, values_of

# What may be zero for a whole training: biases, tokens and positions that are not used, and matrices of LoRA that
# start at zero.
_MAY_BE_ZERO = re.compile(
    r".*(?:bias\w*|_tokens?|_embeddings?|_embed)|.*\.lora_(?:B|embedding_A)(?:\.[^.]+?)??(?:\.weight)?"
)
_NEVER_ZERO = re.compile(r"running_var$|(?:scales?|scale_inv|SCB|absmax)$")  # variances, scales of quantized weights
_LARGEST = 1e12  # of a weight; sums of squares of larger ones overflow, and no training has such weights
# What can be wrong with the values of a tensor -> the kind of the finding, and its text.
_WRONG_VALUES: dict[str, tuple[Kind, str]] = {
    "weight": ("not finite", "These weights have values that are NaN or infinite."),
    "state": ("not finite", "These optimizer states have values that are NaN or infinite."),
    "huge": ("not finite", f"These weights have values above {_LARGEST:g}, which is too large for a weight."),
    "negative": ("optimizer", "These second moments have negative values."),
    "variance": ("not finite", "These variances of BatchNorm have negative values."),
    "magnitude": ("zero", "Half of the values of these magnitudes of DoRA are zero, or all of them."),
    "zero": ("zero", "All values of these tensors are zero."),
}


def check_values(saved: Saved) -> None:
    """Read every saved tensor, and report empty ones, zeros, and values that no trained weight has."""
    empty: list[str] = []
    names_of_kind: dict[str, list[str]] = defaultdict(list)
    patterns = Patterns(saved)
    for name, tensor in [*saved.tensors.items(), *saved.states.items()]:
        is_state = name in saved.states
        if not tensor.size:
            if not is_state:
                empty.append(name)
            continue
        try:
            values = tensor.read()
        except (pickles.Unreadable, OSError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            saved.wrong("unreadable", f"The values of {name} cannot be read: {reason}.", [name])
            continue
        row = numbers(values)
        if row is None:
            continue
        kind = _state_kind(name, row) if is_state else _weight_kind(name, row, values.ndim > 1)
        if kind:
            names_of_kind[kind].append(name)
        elif not is_state and tensor.dtype in WIDEST_FIRST:
            patterns.add(name, row, values.shape)
    if empty:
        saved.wrong("empty", _empty_text(saved, empty), empty)
    for kind, (kind_of_finding, text) in _WRONG_VALUES.items():
        if names_of_kind[kind]:
            saved.wrong(kind_of_finding, text, names_of_kind[kind])
    patterns.report()


def _weight_kind(name: str, row: torch.Tensor, is_matrix: bool) -> str:
    """Return what is wrong with the values of a weight. Empty if nothing is wrong."""
    smallest, largest = map(float, torch.aminmax(row))
    if not abs(smallest) + abs(largest) < float("inf"):
        return "weight"
    if not smallest and not largest and (_NEVER_ZERO.search(name) or (is_matrix and not _MAY_BE_ZERO.fullmatch(name))):
        return "zero"
    if "lora_magnitude_vector" in name and 2 * int(torch.count_nonzero(row)) <= row.numel():
        return "magnitude"
    if smallest < 0 and name.endswith("running_var"):
        return "variance"
    return "huge" if max(-smallest, largest) > _LARGEST and "mask" not in name else ""


def _state_kind(name: str, row: torch.Tensor) -> str:
    smallest, largest = map(float, torch.aminmax(row))
    if not abs(smallest) + abs(largest) < float("inf"):
        return "state"
    return "negative" if name.endswith("/exp_avg_sq") and smallest < 0 else ""


def _empty_text(saved: Saved, empty: list[str]) -> str:
    subject = "All tensors" if len(empty) == len(saved.tensors) else "These tensors"
    return (
        f"{subject} have no elements. Under ZeRO-3, this happens if a model is saved without gathering its parameters "
        "(deepspeed.zero.GatheredParameters)."
    )


# ---------------------------------------------------------------- names, shapes and types


def check_model(saved: Saved, config: dict[str, Any] | None) -> None:
    """Compare the saved tensors with those of the model that the configuration describes.

    If the configuration is in the folder itself, `from_pretrained` reads it, and transformers decides which tensors are
    loaded. Names in an engine's checkpoint may have prefixes of wrappers.
    """
    if config is None:
        saved.unchecked.append("names and shapes of the tensors, because there is no config.json (--model FOLDER)")
        check_types(saved, None, None)
        invariants.check_scales(saved)
        return
    try:
        model = expected.from_config(config)
    except expected.NotKnown as reason:
        saved.unchecked.append(f"names and shapes of the tensors, because {reason}")
        if _is_for_transformers(saved):
            _report_wrapped(saved, _certainly_wrapped(saved, config))
        check_types(saved, config, None)
        invariants.check_scales(saved)
        vocabulary.check_numbers(saved, config)
        return
    loaded = _load(saved, config) if _is_for_transformers(saved) else None
    tensors = saved.whole()
    tensors = tensors if _is_for_transformers(saved) else {base_name(name): tensor for name, tensor in tensors.items()}
    if loaded is None and any(".lora_" in name for name in tensors):
        saved.unchecked.append("names and shapes of the tensors, because the model has an adapter")
        return
    invariants.check_order(saved, [tuple(parameter.shape) for parameter in model.model.parameters()])
    layout = model.layout_of(tensors)
    _report(saved, _differences(saved, model, layout, tensors) if loaded is None else _unwrapped(saved, loaded, layout))
    if loaded is not None:
        saved.checked.append(Checked(len(saved.tensors), "tensor", "compared with what transformers loads"))
    _check_tied(saved, layout, tensors, loaded is not None)
    _check_norms(saved, model, tensors)
    check_types(saved, config, model, {} if loaded is None else loaded.dtypes)
    vocabulary.check(saved.folder, saved, model.num_tokens, config)


def _is_for_transformers(saved: Saved) -> bool:
    """Return whether a folder is one for `from_pretrained`, and not a checkpoint of a wrapped model."""
    return saved.config is not None and saved.format.startswith("Hugging Face")


def _load(saved: Saved, config: dict[str, Any]) -> loading.Loaded | None:
    """Return what transformers loads of these tensors. None if that is not known."""
    try:
        return loading.model(config, saved.tensors.values())
    except expected.NotKnown as reason:
        saved.unchecked.append(f"what transformers loads of the tensors, because {reason}")
        return None


def _differences(saved: Saved, model: Expected, layout: Layout, tensors: dict[str, Tensor]) -> loading.Loaded:
    """Return how names and shapes differ from those of the model, as far as rules can say without transformers."""
    partner = {name: group for group in layout.groups for name in group}
    missing = [
        name
        for name in layout.shapes
        if not any(alias in tensors for alias in partner.get(name, [name])) and not _matches(model.ignored, name)
    ]
    unexpected = [name for name in tensors if name not in layout.shapes and not _matches(model.ignored, name)]
    reshaped = _reshaped(layout, tensors)
    differences = loading.Loaded(missing, unexpected, reshaped, {})
    if _is_for_transformers(saved):
        differences = _unwrapped(saved, differences, layout)
    has_other_names = len(differences.missing) == len(layout.shapes) or len(model.layouts) > 1
    if differences.missing and differences.unexpected and has_other_names:
        saved.unchecked.append("names and shapes of the tensors, because their names differ from those of the model")
        return loading.Loaded([], [], reshaped, {})
    return differences


def _reshaped(layout: Layout, tensors: dict[str, Tensor]) -> dict[str, tuple[list[int], list[int]]]:
    return {
        name: (list(tensors[name].shape), list(layout.shapes[name]))
        for name in layout.shapes.keys() & tensors.keys()
        if tensors[name].shape != layout.shapes[name]
    }


def _unwrapped(saved: Saved, loaded: loading.Loaded, layout: Layout) -> loading.Loaded:
    """Report the tensors that transformers does not know because of a wrapper, and return what else differs."""
    wrapped = _wrapped(loaded.unexpected)
    _report_wrapped(saved, wrapped)
    partner = {name: group for group in layout.groups for name in group}
    plain = {alias for name in wrapped for alias in partner.get(base_name(name), [base_name(name)])}
    missing = [name for name in loaded.missing if name not in plain]
    return loaded._replace(missing=missing, unexpected=[name for name in loaded.unexpected if name not in wrapped])


def _wrapped(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the names that have a wrapper's prefix, with this prefix and the wrapper."""
    of_adapter = (ADAPTER_PREFIX, "PEFT")
    parts = {name: wrapper_of(name) or (of_adapter if name.startswith(ADAPTER_PREFIX) else None) for name in names}
    return {name: part for name, part in parts.items() if part is not None}


def _certainly_wrapped(saved: Saved, config: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the names with a wrapper's part if transformers loads the tensors, but nobody knows which names it needs.

    A model with code of its own may have a part that is called as a wrapper's, unless the part begins with "_".
    """
    if not {"model_type", "architectures", "auto_map"} & config.keys():
        return {}  # the settings of another library
    has_own_code = bool(config.get("auto_map"))
    wrapped = _wrapped(saved.tensors)
    return {name: part for name, part in wrapped.items() if part[0].startswith("_") or not has_own_code}


def _report_wrapped(saved: Saved, wrapped: dict[str, tuple[str, str]]) -> None:
    if not wrapped:
        return
    text, wrapper = next(iter(wrapped.values()))
    count = "All names" if len(wrapped) == len(saved.tensors) else "These names"
    saved.wrong(
        "unexpected",
        f"{count} contain {text}, which {wrapper} adds. transformers does not know these names, ignores the tensors "
        f"and initializes those of the model at random. Unwrap the model before you save it, or remove "
        f"{text} from the names.",
        wrapped,
    )


def _report(saved: Saved, loaded: loading.Loaded) -> None:
    if loaded.missing:
        saved.wrong("missing", "The model of config.json has these tensors, but they were not saved.", loaded.missing)
    if loaded.unexpected:
        saved.wrong(
            "unexpected",
            "These tensors were saved, but the model of config.json does not have them.",
            loaded.unexpected,
        )
    for name, (saved_shape, needed_shape) in sorted(loaded.reshaped.items()):
        if 0 not in saved_shape:  # check_values reports empty tensors
            saved.wrong("partial", f"{name} has shape {saved_shape}, but config.json says {needed_shape}.", [name])


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _check_tied(saved: Saved, layout: Layout, tensors: dict[str, Tensor], is_for_transformers: bool) -> None:
    """Check that tensors that share a parameter in the model have the same values."""
    then = (
        "For this reason, transformers does not tie them" if is_for_transformers else "Loading keeps only one of them"
    )
    for group in layout.groups:
        stored_names = [name for name in group if name in tensors and tensors[name].size]
        first, *further_names = stored_names or [""]
        if stored_names:
            saved.ties |= {name: _own_name(saved, first) for name in group if name not in tensors}
        for name in further_names:
            if tensors[name] is tensors[first]:
                continue
            a, b = values_of(tensors[first]), values_of(tensors[name])
            if a is not None and b is not None and not same(a, b):
                saved.wrong(
                    "untied",
                    f"config.json ties {name} to {first}, but they were saved with different values. {then}.",
                    [first, name],
                )


def _own_name(saved: Saved, plain: str) -> str:
    """Return the name under which a tensor was saved."""
    return next(name for name in saved.whole() if plain in (name, base_name(name)))


def _check_norms(saved: Saved, model: Expected, tensors: dict[str, Tensor]) -> None:
    """Report weights of norms that are zero, unless this kind of norm starts there."""
    zero = []
    for name, module in model.model.named_modules():
        tensor = tensors.get(f"{name}.weight")
        if "Norm" not in type(module).__name__ or tensor is None or len(tensor.shape) != 1 or not tensor.size:
            continue
        values = values_of(tensor)
        if values is not None and not bool(values.any()) and not _starts_at_zero(model.model, module):
            zero.append(tensor.name)
    if zero:
        saved.wrong(
            "zero", "The weights of these norms are zero, so their outputs do not depend on their inputs.", zero
        )


def _starts_at_zero(model: Any, module: torch.nn.Module) -> bool:
    """Return whether transformers initializes the weight of a norm with zeros, because the norm adds one to it."""
    with contextlib.suppress(Exception):  # a model may raise anything; then nothing is claimed
        own: Any = copy.deepcopy(module).to_empty(device="cpu")
        torch.nn.init.constant_(own.weight, 0.5)
        model._init_weights(own)
        return not bool(own.weight.any())
    return True
