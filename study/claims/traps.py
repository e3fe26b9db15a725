"""Read the measured differences that each parity trap makes between runs that look like the same training.

A trap is an arm and its control that differ in a setting which nobody wrote down, and a pair of arms in which that
setting is matched. tools/published measures them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from study import files
from study.compare.differences import t_interval
from study.compare.parity import WITHIN
from study.errors import Refusal

COLUMNS = ("trap", "quantity", "arm", "against", "n_seeds", "difference", "low", "high", "verdict")


def effects(path: Path) -> pd.DataFrame:
    """Tabulate what each measured trap changes: one row per trap, quantity and arm, "trapped" or "matched".

    `difference` is the mean over seeds of value / control - 1 of the same seed, `low` and `high` its 95 % interval by
    Student's t; both are the difference itself where all seeds agree, and None with one seed. Raises Refusal.
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
    """Read a file of measured traps. Raises Refusal."""
    content = files.load(path, "measured traps")
    if not isinstance(content, dict) or not {"settings", "data", "arms", "traps"} <= content.keys():
        raise Refusal(f"{path}: this file has no measured traps. Make them with `python tools/published traps`.")
    return content


def _values(arm: dict[str, Any], quantity: str) -> dict[str, float]:
    """The value of a quantity, by seed; what the engine was is the same for every seed."""
    return {
        seed: facts[quantity] if quantity in facts else arm["ran"][quantity] for seed, facts in arm["seeds"].items()
    }


def verdict(low: float | None, high: float | None) -> str:
    """The interval of a relative difference, in words."""
    if low is None or high is None:
        return "one seed: no interval"
    if max(-low, high) <= WITHIN:
        return "no difference"
    if low <= 0 <= high:
        return f"not told from 0 ({100 * low:+.3g} % to {100 * high:+.3g} %)"
    return f"makes a difference of {100 * low:+.3g} %" + ("" if low == high else f" to {100 * high:+.3g} %")
