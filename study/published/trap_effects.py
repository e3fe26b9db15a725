"""How large a difference does each parity trap make, and does any remain where the hidden setting is matched?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import ConfigDict, ValidationError, model_validator

from study import files
from study.compare.differences import t_interval
from study.compare.parity import WITHIN
from study.errors import Refusal, describe
from study.records.schema import Facts

COLUMNS = ("trap", "quantity", "arm", "against", "n_seeds", "difference", "low", "high", "size", "verdict")


@dataclass(frozen=True)
class Trap:
    """Arms by name, and what they are compared by: keys of a seed's facts or of what the engine was."""

    what: str
    control: str
    trapped: str
    matched: str
    matched_control: str | None = None  # None: the control
    quantities: tuple[str, ...] = ("train_loss", "eval_loss")

    __pydantic_config__ = ConfigDict(extra="forbid")


class _Learned(Facts):
    """What a seed learned."""

    train_loss: float
    eval_loss: float
    losses: list[float]  # of every step
    initial_weights: str
    samples: str


class _MeasuredArm(Facts):
    """What an arm was started with, what its engine was, and what each seed learned."""

    asked: dict[str, Any]
    ran: dict[str, Any]
    seeds: dict[str, _Learned]


class _TrapsFile(Facts):
    """A file of measured traps; before the first launch it has no date, machine and data."""

    command: str
    date: str | None
    machine: dict[str, Any] | None
    settings: dict[str, Any]
    data: dict[str, Any] | None
    arms: dict[str, _MeasuredArm]
    traps: dict[str, Trap]

    @model_validator(mode="after")
    def _check(self) -> _TrapsFile:
        for name, trap in self.traps.items():
            for arm in (trap.control, trap.trapped, trap.matched, trap.matched_control or trap.control):
                if arm not in self.arms:
                    raise ValueError(f"traps.{name}: arm {arm} is missing")
                known = {*_Learned.model_fields, *self.arms[arm].ran}
                if unknown := [quantity for quantity in trap.quantities if quantity not in known]:
                    raise ValueError(f"traps.{name}: {unknown[0]} of arm {arm} is missing")
        return self


def effects(path: Path) -> pd.DataFrame:
    """Tabulate what each measured trap changes: one row per trap, quantity and arm, "trapped" or "matched".

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
                values, of_control = (_values(content["arms"][side], quantity) for side in (arm, control))
                seeds = [seed for seed in values if seed in of_control]
                differences = np.array([values[seed] / of_control[seed] - 1 for seed in seeds])
                mean, low, high = t_interval(differences)
                size = np.abs(differences).mean()
                row = (name, quantity, kind, control, len(seeds), mean, low, high, size, verdict(low, high))
                rows.append(dict(zip(COLUMNS, row, strict=True)))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def read(path: Path) -> dict[str, Any]:
    """Read a file of `zero-study traps`. Raises Refusal naming the file and what is missing."""
    content = files.load(path, "measured traps")
    try:
        _TrapsFile.model_validate(content)
    except ValidationError as error:
        raise Refusal(f"{describe(error, str(path))}; measure again") from None
    return content


def _values(arm: dict[str, Any], quantity: str) -> dict[str, float]:
    """The value of a quantity, by seed; what the engine was is the same for every seed."""
    return {
        seed: facts[quantity] if quantity in facts else arm["ran"][quantity] for seed, facts in arm["seeds"].items()
    }


def verdict(low: float | None, high: float | None) -> str:
    """The interval of a relative difference, in words."""
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
