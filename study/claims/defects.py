"""Compute how the defects in the published program of `a100-replication` change its results.

The results are committed: tools/measure/published runs that program both as published and corrected. Each program
trains several arms: a plain one, and one with ZeRO, each with a batch size. defects.yaml lists the defects, the
programs, and the pairs of arms that are compared. An effect is the value of the ZeRO arm divided by the value of the
plain arm, minus 1. A negative effect means that ZeRO is better. There is one effect per repeat. The interval is
Student's t at 95 % over the repeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from study.compare.differences import t_interval
from study.compare.parity import WITHIN
from zero_study import files
from zero_study.errors import Refusal

Metric = Literal["validation loss", "training loss", "time", "peak memory"]
METRICS: tuple[Metric, ...] = ("validation loss", "training loss", "time", "peak memory")
LOSSES = METRICS[:2]


class Program(NamedTuple):
    """A process that runs the published program: which trainings it runs, in order, and which defects it corrects."""

    arms: tuple[str, ...]  # plain or zero, and the batch size: "zero-8"
    honoured: bool = False  # settings-unread: the DeepSpeed settings take effect
    fresh_model: bool = False  # same-model: each arm trains a new model
    seeded_head: bool = False  # head-unseeded: equal seeds give equal heads
    own_seeds: bool = False  # one-seed: each repeat has its own split, order and dropout
    start: int = 0  # programs with different numbers get different heads, unless heads are seeded


class Comparison(NamedTuple):
    """A plain training and one with ZeRO to compare, and the name of the value that is compared for each metric.

    A training is given by the name of its program and its position in it.
    """

    plain: tuple[str, int]
    zero: tuple[str, int]
    reading: Mapping[Metric, str]


# The observation for each metric, as the published program chose it and corrected. READING_OF lists the defects that
# are corrected by choosing another observation, without another run.
READINGS: dict[str, dict[Metric, str]] = {
    "published": {
        "validation loss": "logged_eval_loss", "training loss": "logged_train_loss", "time": "span",
        "peak memory": "life_peak_bytes",
    },
    "mended": {
        "validation loss": "held_out_loss", "training loss": "last_epoch_loss", "time": "step",
        "peak memory": "peak_bytes",
    },
}  # fmt: skip
READING_OF: dict[str, tuple[Metric, ...]] = {
    "peak-kept": ("peak memory",), "timing-span": ("time",), "losses-of-few": LOSSES,
}  # fmt: skip


def _comparison(plain: list[Any], zero: list[Any], read: str, but: str = "") -> Comparison:
    opposite = READINGS["mended" if read == "published" else "published"]
    otherwise = {metric: opposite[metric] for metric in READING_OF.get(but, ())}
    return Comparison((plain[0], plain[1]), (zero[0], zero[1]), READINGS[read] | otherwise)


_DATA = files.read_yaml(Path(__file__).with_name("defects.yaml"), Path(__file__).parent)
DEFECTS: dict[str, dict[str, str]] = _DATA["defects"]  # short, published, mended
PROGRAMS = {name: Program(**{**keys, "arms": tuple(keys["arms"])}) for name, keys in _DATA["programs"].items()}
GROUPS = {
    title: {name: _comparison(**keys) for name, keys in group.items()} for title, group in _DATA["comparisons"].items()
}
AS_PUBLISHED, MENDED = GROUPS["as published"]["all defects"], GROUPS["all mended"]["batch 8"]
TWICE = GROUPS["all mended"]["plain twice, other heads"]  # without ZeRO on both sides
LEFT_ALONE = GROUPS["all mended but one"]

# ---------------------------------------------------------------- effects


class Effect(NamedTuple):
    """The relative difference between ZeRO and plain training, by repetition. Below 0, ZeRO is better."""

    values: dict[int, float]
    mean: float
    low: float | None  # None if there is only one repeat
    high: float | None
    drawn: bool  # each repeat draws new weights or a new order; otherwise all repeats are the same training

    @classmethod
    def of(cls, values: dict[int, float], drawn: bool) -> Effect | None:
        return cls(values, *t_interval(np.array(list(values.values()))), drawn) if values else None

    @property
    def word(self) -> str:
        """The effect in words: better, worse, no difference or inconclusive, or why there is no interval."""
        if self.low is None or self.high is None:
            return "one repeat"
        if max(abs(self.low), abs(self.high)) <= WITHIN:
            return "no difference"
        if not self.drawn:
            return "the same each time"
        return "better" if self.high < 0 else "worse" if self.low > 0 else "inconclusive"


def read(path: Path) -> dict[str, Any]:
    """Return the measurements of the published program and its corrected variants from a file.

    tools/measure/published writes such files. Raises Refusal if the file has no measurements, or if it names an unknown
    variant of the program.
    """
    content = files.load(path, "results of the protocol")
    if not isinstance(content, dict) or not {"settings", "machine", "runs"} <= content.keys():
        raise Refusal(
            f"{path}: this file has no results of the protocol. Make them with "
            "`python tools/measure/published protocol`."
        )
    if unknown := {name.partition("/")[0] for name in content["runs"]} - PROGRAMS.keys():
        raise Refusal(f"{path}: runs: the program {min(unknown)!r} is unknown. Remove its runs.")
    return content


def effect(results: Mapping[str, Any], comparison: Comparison, metric: Metric) -> Effect | None:
    """Return the effect of ZeRO on one metric in one comparison. None if no repetition has both trainings."""
    plain, zero = (_values(results, place, comparison.reading[metric]) for place in comparison[:2])
    programs = [PROGRAMS[name] for name, _ in (comparison.plain, comparison.zero)]
    drawn = metric not in LOSSES or any(program.own_seeds or not program.seeded_head for program in programs)
    return Effect.of({repeat: zero[repeat] / plain[repeat] - 1 for repeat in sorted(plain.keys() & zero.keys())}, drawn)


def _values(results: Mapping[str, Any], place: tuple[str, int], reading: str) -> dict[int, float]:
    """Return the values of one training by repeat, without the repeats in which it failed.

    `place` is the name of the program and the position of the training in it.
    """
    program, position = place
    # On a CPU, the time of the processor is used, because other programs may share its cores.
    clock = "" if results["machine"]["gpus"] else "cpu_"
    values = {}
    for name, start in results["runs"].items():
        started, _, repeat = name.partition("/")
        if started != program or position >= len(start["arms"]) or "error" in start["arms"][position]:
            continue
        arm: dict[str, Any] = start["arms"][position]
        if reading == "span":
            value = arm[f"{clock}seconds"]
        elif reading == "step":
            value = arm[f"step_{clock}seconds"] / arm["ran"]["batch_size"]
        else:
            value = arm["epoch_losses"][-1] if reading == "last_epoch_loss" else arm[reading]
        values[int(repeat)] = value
    return values
