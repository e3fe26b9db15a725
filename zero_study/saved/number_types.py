"""Check that saved tensors have the types that the configuration names and that the loader converts to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ..engines.readback.dtypes import TORCH_NAMES
from .content import Saved
from .expected import Expected

_COMMON = tuple(TORCH_NAMES.values())


def check_types(
    saved: Saved, config: dict[str, Any] | None, model: Expected | None, loaded: Mapping[str, str] | None = None
) -> None:
    """Check that the weights have one type: the one that the configuration names.

    `loaded` has the types to which transformers converts.
    """
    if saved.format.startswith("DeepSpeed"):
        return  # trained parameters have fp32 master weights, and frozen ones do not
    config_dtype = str((config or {}).get("dtype") or (config or {}).get("torch_dtype") or "").removeprefix("torch.")
    if odd := _not_numbers(saved, model, config_dtype):
        listed = _counts_text(Counter(odd.values()).items())
        saved.wrong(
            "dtype",
            f"These tensors do not contain plain real numbers ({listed}), but the model is not quantized. Loading "
            "converts them without a scale or an imaginary part, so the weights are wrong.",
            odd,
        )
    _check_one_type(saved, config_dtype, model, loaded or {})


def _check_one_type(saved: Saved, config_dtype: str, model: Expected | None, loaded: Mapping[str, str]) -> None:
    """Check that all weights have the type of the configuration, or without one that they have the same type."""
    types = {name: tensor.dtype for name, tensor in saved.tensors.items() if tensor.dtype in _COMMON}
    own = _without_converted(types, model, loaded)
    listed = _counts_text(Counter(types.values()).most_common())
    is_of_hub = saved.format.startswith("Hugging Face")
    if is_of_hub and config_dtype in _COMMON:
        if different := [name for name, kind in own.items() if kind != config_dtype]:
            text = f"config.json says {config_dtype}, but the tensors are: {listed}."
            saved.wrong("dtype", text, different)
    elif len(set(own.values())) > 1:
        common = Counter(types.values()).most_common(1)[0][0]
        add = saved.wrong if is_of_hub and model else saved.note
        text = f"The weights have several types: {listed}."
        add("dtype", text, [name for name, kind in own.items() if kind != common])


def _without_converted(types: dict[str, str], model: Expected | None, loaded: Mapping[str, str]) -> dict[str, str]:
    """Return the types of the weights that are neither loaded in their own type nor kept in fp32 by the model."""
    in_fp32 = model.in_fp32 if model else []
    return {
        name: kind
        for name, kind in types.items()
        if kind != loaded.get(name, "") and not any(part in name for part in in_fp32)
    }


def _counts_text(counts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts)


def _not_numbers(saved: Saved, model: Expected | None, config_dtype: str) -> dict[str, str]:
    """Return the tensors that are integers, of 8 bits, or complex, although the model's are plain real numbers."""
    odd = {name: tensor.dtype for name, tensor in saved.tensors.items() if tensor.dtype not in (*_COMMON, config_dtype)}
    if model is None:
        return {name: kind for name, kind in odd.items() if ".lora_A" in name or ".lora_B" in name}
    real = {name for layout in model.layouts for name, kind in layout.dtypes.items() if kind.is_floating_point}
    return {name: kind for name, kind in odd.items() if name in real}
