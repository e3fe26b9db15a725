"""Compute how much an undocumented option changes trainings that seem to be equal (a parity trap).

In a trap, two runs differ in a setting that is easily overlooked: the arm and its control. In a second pair of runs,
this setting is equal. tools/measure/published measures both pairs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from study.compare.differences import t_interval
from study.compare.parity import WITHIN
from zero_study import files
from zero_study.errors import Refusal

COLUMNS = ("trap", "quantity", "arm", "against", "n_seeds", "difference", "low", "high", "verdict")


def effects(path: Path) -> pd.DataFrame:
    """Return a table of how much each measured trap changes each quantity.

    There is a row per trap, quantity and pair of trainings ("trapped" or "matched"). `difference` is the mean over
    seeds of value / control - 1, where both values have the same seed. `low` and `high` are its 95 % interval by
    Student's t. They equal the difference if all seeds agree, and are None with one seed. Raises Refusal if the file
    has no measured traps.
    """
    content = read(path)
    rows = []
    for name, trap in content["traps"].items():
        matched_control = trap["matched_control"] or trap["control"]
        couples = (("trapped", trap["trapped"], trap["control"]), ("matched", trap["matched"], matched_control))
        for quantity in trap["quantities"]:
            for kind, arm, control in couples:
                values, of_control = (_values(content["arms"][side], quantity) for side in (arm, control))
                seeds = [seed for seed in values if seed in of_control]
                differences = np.array([values[seed] / of_control[seed] - 1 for seed in seeds])
                mean, low, high = t_interval(differences)
                row = (name, quantity, kind, control, len(seeds), mean, low, high, verdict(low, high))
                rows.append(dict(zip(COLUMNS, row, strict=True)))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def read(path: Path) -> dict[str, Any]:
    """Return the content of a file of measured traps. Raises Refusal if the file contains no traps."""
    content = files.load(path, "measured traps")
    if not isinstance(content, dict) or not {"settings", "data", "arms", "traps"} <= content.keys():
        raise Refusal(
            f"{path}: this file has no measured traps. Make them with `python tools/measure/published traps`."
        )
    return content


def _values(arm: dict[str, Any], quantity: str) -> dict[str, float]:
    """Return the values of a quantity by seed. Properties of the engine are the same for every seed."""
    return {
        seed: facts[quantity] if quantity in facts else arm["ran"][quantity] for seed, facts in arm["seeds"].items()
    }


def verdict(low: float | None, high: float | None) -> str:
    """Return a relative difference and its interval as text. With one seed, `low` and `high` are None."""
    if low is None or high is None:
        return "one seed: no interval"
    if max(-low, high) <= WITHIN:
        return "no difference"
    if low <= 0 <= high:
        return f"not distinguishable from 0 ({100 * low:+.3g} % to {100 * high:+.3g} %)"
    return f"makes a difference of {100 * low:+.3g} %" + ("" if low == high else f" to {100 * high:+.3g} %")
