"""What README's first screen shows, from committed records: its picture, and every number in its sentences.

python tools/first_screen.py    # draws the picture, for a light and for a dark ground
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import pandas as pd

from study.compare import verdict_text, what_fits
from study.engines.conformance import committed
from study.records import find as records
from study.report import plots, tables

ROOT = Path(__file__).resolve().parents[1]
CPU = ROOT / "reports" / "cpu" / "records"
SHOWN = ["ddp", "zero2", "zero2_tuned", "zero3", "zero3_tuned", "fsdp2"]
INKS = {"light": "#1f2328", "dark": "#e6edf3"}
SETTING = {"workload": "gpt-wikitext", "size": "124m", "precision": "fp32", "processes": 2, "seed": 0, "status": "ok"}


class Number(NamedTuple):
    """One number of README, and how it is found again."""

    said: str
    what: str
    study: str  # a folder of committed records, or of conformance
    found: Callable[[], str]


@cache
def _apart() -> list[float]:
    """By strategy: how far its mean held-out loss is from DDP's; and last how far the furthest run is."""
    (decided,) = verdict_text.decided_in([CPU / "learning-bert"])
    arms = decided.on(decided.primary)
    return [max(abs(arm.mean) for arm in arms), max(float(abs(arm.differences).max()) for arm in arms)]


@cache
def _trained() -> dict[str, str]:
    return {row.strategy: str(row.trained) for row in what_fits.largest([CPU / "frontier"]) if row.cap_gib == 3}


@cache
def _speeds(column: str) -> pd.Series:
    """By strategy: the median over runs beside DDP's nearest, in seconds a step or sequences a second."""
    return (
        tables.speeds(CPU / "equal-memory")
        .set_index("strategy")[column]
        .map(lambda ratios: statistics.median(ratios) if ratios else math.nan)
    )


def _divided_twice() -> str:
    (fault,) = (fault for fault in committed.faults() if "twice" in fault.what)
    return f"{fault.first} to {fault.last}"


NUMBERS = [
    Number("0.15 %", "furthest mean loss", "learning-bert", lambda: f"{100 * _apart()[0]:.2f} %"),
    Number("1.5 %", "furthest run's loss", "learning-bert", lambda: f"{100 * _apart()[1]:.1f} %"),
    Number("124", "largest model in 3 GiB, `ddp`", "frontier", lambda: _trained()["ddp"][:-1]),
    Number("110", "`zero3`", "frontier", lambda: _trained()["zero3"][:-1]),
    Number("204", "`zero3_tuned`", "frontier", lambda: _trained()["zero3_tuned"][:-1]),
    Number("229", "`fsdp2`", "frontier", lambda: _trained()["fsdp2"][:-1]),
    Number("1.2", "step of `zero2_tuned`", "equal-memory", lambda: f"{_speeds('equal_ratios')['zero2_tuned']:.1f}"),
    Number("1.5", "step of `zero3_tuned`", "equal-memory", lambda: f"{_speeds('equal_ratios')['zero3_tuned']:.1f}"),
    Number("0.94", "rate of `zero2_tuned`", "equal-memory", lambda: f"{_speeds('own_ratios')['zero2_tuned']:.2f}"),
    Number("0.80", "rate of `zero3_tuned`", "equal-memory", lambda: f"{_speeds('own_ratios')['zero3_tuned']:.2f}"),
    Number("0.18.3 to 0.19.5", "releases that divide twice", "conformance", _divided_twice),
]


def table() -> Iterable[list[str]]:
    """By number: what it is, the study, its date, and how many seeds and repeats."""
    for number in NUMBERS:
        folder = CPU / number.study
        if not folder.exists():
            yield [number.said, number.what, "[conformance](conformance/README.md)", "", "each cell once"]
            continue
        named = re.findall(r"`(\w+)`", number.what)
        read = [file.record for file in records.find([folder]) if not named or file.record.strategy in named]
        alike = Counter(f"{run.strategy} {run.world_size} {dict(run.config, output_dir='')}" for run in read)
        seeds = len({run.seed for run in read})
        study = f"[{number.study}](../study/studies/{number.study}.yaml)"
        yield [
            number.said,
            number.what,
            study,
            max(run.started_at for run in read)[:10],
            f"{seeds}, {max(alike.values())}",
        ]


def peaks() -> pd.Series:
    """GiB of tensors at the highest moment of the fullest process."""
    runs = plots.only(tables.runs(CPU / "peaks-real"), **SETTING, strategy=SHOWN)
    return runs.set_index("strategy")["peak_gib"]


def times() -> pd.Series:
    """A step's seconds over those of DDP's nearest runs, at DDP's batch."""
    return _speeds("equal_ratios").reindex(SHOWN).fillna({"ddp": 1.0})


def main() -> None:
    """Write reports/first-light.svg and reports/first-dark.svg; equal records make equal bytes."""
    mpl.rcParams["svg.hashsalt"] = "zero-study"
    for ground, ink in INKS.items():
        figure = plots.first_screen(peaks(), times(), ink)
        figure.savefig(ROOT / "reports" / f"first-{ground}.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
