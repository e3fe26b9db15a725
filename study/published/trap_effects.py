"""How large a difference does each parity trap make, and does any remain where the hidden setting is matched?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from study import files
from study.compare.differences import t_interval
from study.compare.parity import WITHIN
from study.errors import Refusal

COLUMNS = ("trap", "quantity", "arm", "against", "n_seeds", "difference", "low", "high", "size", "verdict")


def effects(path: Path) -> pd.DataFrame:
    """Compare the arms of each measured trap; one row per trap, quantity and arm, "trapped" or "matched".

    `difference` is the mean over seeds of value / control - 1 of the same seed, `low` and `high` its 95 % interval by
    Student's t; both are the difference itself where all seeds agree, and None with one seed. `size` is the mean of the
    differences without their sign: what one pair of runs shows. Raises Refusal.
    """
    content = read(path)
    rows = []
    for name, trap in content["traps"].items():
        matched_control = trap["matched_control"] or trap["control"]
        couples = (("trapped", trap["trapped"], trap["control"]), ("matched", trap["matched"], matched_control))
        for quantity in trap["quantities"]:
            for kind, arm, control in couples:
                ones, others = (_facts(content["arms"][each], quantity) for each in (arm, control))
                seeds = [seed for seed in ones if seed in others]
                each = np.array([ones[seed] / others[seed] - 1 for seed in seeds])
                difference, low, high = t_interval(each)
                size = np.abs(each).mean()
                found = (name, quantity, kind, control, len(seeds), difference, low, high, size, verdict(low, high))
                rows.append(dict(zip(COLUMNS, found, strict=True)))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def read(path: Path) -> dict[str, Any]:
    """Read a file of `zero-study traps`. Raises Refusal naming the file and what is missing."""
    content = files.load(path, "measured traps")
    try:
        for trap in content["traps"].values():
            names = [trap["control"], trap["trapped"], trap["matched"]]
            for arm in [*names, trap["matched_control"] or trap["control"]]:
                for quantity in trap["quantities"]:
                    _facts(content["arms"][arm], quantity)
    except (KeyError, TypeError, AttributeError) as error:
        raise Refusal(f"{path}: no file of measured traps, {error} is missing; measure again") from None
    return content


def _facts(arm: dict[str, Any], quantity: str) -> dict[str, float]:
    """One value per seed; what the engine said of itself is the same for every seed."""
    return {
        seed: facts[quantity] if quantity in facts else arm["ran"][quantity] for seed, facts in arm["seeds"].items()
    }


def verdict(low: float | None, high: float | None) -> str:
    """Put an interval of a relative difference into words."""
    if low is None:
        return "one seed: no interval"
    if max(-low, high) <= WITHIN:
        return "no difference"
    if low <= 0 <= high:
        return f"not told from 0 ({_percent(low)} to {_percent(high)})"
    if low == high:
        return f"makes a difference of {_percent(low)}"
    return f"makes a difference of {_percent(low)} to {_percent(high)}"


def _percent(relative: float) -> str:
    return f"{100 * relative:+.3g} %"
