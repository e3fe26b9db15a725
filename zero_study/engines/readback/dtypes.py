"""Convert names of data types between torch's (bfloat16) and the short ones of configurations (bf16), without torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Names in DeepSpeed's JSON, accelerate's mixed_precision and the study's --precision -> names in torch.
TORCH_NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SHORT_NAMES = {torch_name: short for short, torch_name in TORCH_NAMES.items()}


def dtype_name(dtype: Any) -> str:
    """Return the name of a torch type as proofs write it, for instance bfloat16."""
    return str(dtype).removeprefix("torch.")


def dtype_names(dtypes: Iterable[Any]) -> list[str]:
    """Return the distinct names of torch types, sorted, for instance bfloat16, float32."""
    return sorted({dtype_name(dtype) for dtype in dtypes})


def precision_of(names: Iterable[str]) -> str:
    """Return the short names of data types joined by "+", for instance bf16+fp32.

    A type without a short name keeps its own. The integers of quantized weights are left out, because nothing is
    computed in them.
    """
    return "+".join(SHORT_NAMES.get(name, name) for name in names if "int" not in name)


def precision_of_autocast(dtype: Any) -> str:
    """Return the name of the precision in which autocast computes with this torch type, for instance bf16-autocast."""
    return f"{precision_of([dtype_name(dtype)])}-autocast"


def computed_in(precision: str) -> str:
    """Return the data type of matrix products under a precision: bfloat16 for bf16 and bf16-autocast."""
    return TORCH_NAMES[precision.removesuffix("-autocast")]
