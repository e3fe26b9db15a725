"""Check the types of saved tensors against those that the configuration names, and that the loader converts to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
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
    odd = _not_numbers(saved, model, config_dtype)
    if odd:
        listed = ", ".join(f"{count} {kind}" for kind, count in Counter(odd.values()).items())
        saved.wrong(
            "dtype",
            f"These tensors are no plain real numbers ({listed}), but the model is not quantized. Loading converts "
            "them without a scale or an imaginary part, so the weights are wrong.",
            odd,
        )
    in_fp32 = model.in_fp32 if model else []
    of = {
        name: tensor.dtype
        for name, tensor in saved.tensors.items()
        if tensor.dtype in _COMMON
        and not any(part in name for part in in_fp32)
        and tensor.dtype != (loaded or {}).get(name, "")
    }
    kinds = Counter(tensor.dtype for tensor in saved.tensors.values() if tensor.dtype in _COMMON)
    is_of_hub = saved.format.startswith("Hugging Face")
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    if is_of_hub and config_dtype in _COMMON:
        if different := [name for name, kind in of.items() if kind != config_dtype]:
            saved.wrong("dtype", f"config.json says {config_dtype}, but the tensors are: {listed}.", different)
    elif len(set(of.values())) > 1:
        common = kinds.most_common(1)[0][0]
        add = saved.wrong if is_of_hub and model else saved.note
        add("dtype", f"The weights have several types: {listed}.", [n for n, kind in of.items() if kind != common])


def _not_numbers(saved: Saved, model: Expected | None, config_dtype: str) -> dict[str, str]:
    """Return the tensors that are integers, of 8 bits, or complex, although the model's are plain real numbers."""
    odd = {name: tensor.dtype for name, tensor in saved.tensors.items() if tensor.dtype not in (*_COMMON, config_dtype)}
    if model is None:
        return {name: kind for name, kind in odd.items() if ".lora_A" in name or ".lora_B" in name}
    real = {name for layout in model.layouts for name, kind in layout.dtypes.items() if kind.is_floating_point}
    return {name: kind for name, kind in odd.items() if name in real}
