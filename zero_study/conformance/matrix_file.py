"""Read a file with a conformance matrix, and compare its failures with those of an earlier matrix."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .. import files
from ..errors import Refusal, describe

# A deviation of more than this multiple of the earlier one is another fault. Between two releases with the same fault,
# 99 % of the deviations differ by a factor of less than 1.71.
MOST_TIMES_FURTHER = 4
# Deviations of a scale from 1 below this are not compared, because rounding may cause them.
SMALLEST_SCALE = 0.02


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Failed(_Part):
    verdict: Literal["refused", "crashed"]
    stage: str
    message: str


class _Same(_Part):
    verdict: Literal["same"]
    share_of_bound: float
    of: str


class _Difference(_Part):
    step: int
    of: list[str] = Field(min_length=1)


class _Wrong(_Part):
    verdict: Literal["wrong"]
    share_of_bound: float | None  # None: infinite, for a quantity that must not change, or that is NaN
    of: str
    first_step: int | None
    beyond: list[str]
    norm_scale: list[float | None]
    update_scale: list[float | None] = Field(min_length=1)
    ranks_apart: bool | _Difference  # older files do not name the difference
    wrong_states: list[str] = []
    # Files from before 2026-11-29 have neither of these.
    not_finite: list[str] | None = None
    deviation: float | None = None


class _Matrix(_Part):
    versions: dict[str, str]
    seconds: dict[str, float]
    cells: dict[str, Annotated[_Failed | _Same | _Wrong, Field(discriminator="verdict")]] = Field(min_length=1)


def load(path: Path) -> dict[str, Any]:
    """Return the conformance matrix in a file. Raises Refusal if the file is not a matrix, or has no cells."""
    matrix: dict[str, Any] = files.load(path, "a matrix of conformance")
    try:
        _Matrix.model_validate(matrix)
    except ValidationError as error:
        raise Refusal(
            f"{describe(error, f'{path}: this is not a file that `zero-study conformance --output` wrote')}. "
            "Name a file that this command wrote."
        ) from None
    return matrix


# ---------------------------------------------------------------- two matrices


def failed_before(cell: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    """Return whether a configuration failed in the same way in an earlier matrix.

    A failure is a wrong training or a crash. A crash is the same if the stage and the message are equal. A wrong
    training is the same if no other quantity is wrong, nothing is wrong at an earlier step, and no deviation is much
    larger.
    """
    if cell["verdict"] != earlier.get("verdict"):
        return False
    if "message" in cell:
        return _crash(cell) == _crash(earlier)
    return (
        _has_no_new_kind(_kinds(cell["beyond"]), _kinds(earlier["beyond"]))
        and _not_finite(cell) <= _not_finite(earlier)
        and set(cell.get("wrong_states", ())) <= set(earlier.get("wrong_states", ()))
        and bool(cell["ranks_apart"]) <= bool(earlier["ranks_apart"])
        and (cell["first_step"] or 0) >= (earlier["first_step"] or 0)
        and _is_no_larger(cell, earlier)
    )


def _crash(cell: Mapping[str, Any]) -> tuple[str, str]:
    """Return the stage in which a training crashed, and its message without what differs from launch to launch."""
    message = re.sub(r"(?:/[^\s/'\":,]+)+/", "", cell["message"])  # folders
    message = re.sub(r"\btmp[a-z0-9_]{8}\b", "tmp", message)
    return cell["stage"], " ".join(re.sub(r"0x[0-9a-f]+|\d+", "#", message).split())


def _kinds(quantities: list[str]) -> set[str]:
    """Return the kinds of quantities: loss, norm and weights. Master weights count as weights."""
    return {quantity.partition("/")[0].replace("masters", "weights") for quantity in quantities}


def _has_no_new_kind(now: set[str], before: set[str]) -> bool:
    """Return whether no kind of quantity is wrong now that was right before.

    Wrong weights make the losses and norms of later steps wrong, which then may lie just within or just beyond their
    bounds. How wrong they are is compared separately.
    """
    return "weights" in before or now <= before


def _not_finite(cell: Mapping[str, Any]) -> set[str]:
    """Return the quantities of a training that are NaN or infinite. Older files only record it for the weights."""
    if cell.get("not_finite") is not None:
        return set(cell["not_finite"])
    return {"masters", "weights", "loss", "norm"} if None in cell["update_scale"] else set()


def _is_no_larger(cell: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    if cell["share_of_bound"] is None and earlier["share_of_bound"] is None:
        pairs = [(cell.get("deviation"), earlier.get("deviation"))]
    else:
        pairs = [(_share(cell), _share(earlier))]
    for name in ("norm_scale", "update_scale"):
        pairs += [
            (max(abs(scale - 1), SMALLEST_SCALE), max(abs(earlier_scale - 1), SMALLEST_SCALE))
            for scale, earlier_scale in zip(cell[name], earlier[name], strict=False)
            if scale is not None and earlier_scale is not None
        ]
    return not any(
        size > earlier_size * MOST_TIMES_FURTHER
        for size, earlier_size in pairs
        if size is not None and earlier_size is not None and size != earlier_size
    )


def _share(cell: Mapping[str, Any]) -> float:
    return math.inf if cell["share_of_bound"] is None else float(cell["share_of_bound"])
