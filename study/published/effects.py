"""How much of "ZeRO is better" does each defect of the a100-replication's protocol make?

First, as data, which programs are run (PROGRAMS) and which of their arms are compared (AS_PUBLISHED to LEFT_ALONE);
then the file that `zero-study protocol` writes, and the effects that follow from it. An effect is what ZeRO's arm has
over what the plain arm has, less 1: below 0 ZeRO is better. It is taken repeat by repeat; its interval is Student's t
of 95 % over repeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Discriminator, Tag, ValidationError

from study.compare.differences import t_interval
from study.compare.parity import WITHIN
from study.errors import Refusal, describe
from study.files import load
from study.records.schema import Facts

PUBLISHED_SEED = 42  # of split, order and dropout, in every start of the published program


class Program(NamedTuple):
    """What one process runs: its arms, in order, and which defects of the published program are mended in it."""

    arms: tuple[str, ...]  # plain or zero, and the batch size: "zero-8"
    honoured: bool = False  # settings-unread: the DeepSpeed settings are given where they are read
    fresh_model: bool = False  # same-model: each arm has a model of its own
    seeded_head: bool = False  # head-unseeded: equal seeds draw equal heads
    own_seeds: bool = False  # one-seed: each repeat has its own split, order and dropout
    start: int = 0  # programs with different numbers draw different heads, unless these are seeded


class Defect(NamedTuple):
    """What is wrong in the published program, and what the mended one does instead."""

    short: str  # the published way, in a few words
    published: str
    mended: str


DEFECTS = {
    "settings-unread": Defect(
        "settings that nothing reads",
        "The DeepSpeed settings are assigned to TrainingArguments after these were built, and nothing reads them "
        "there: the arm called ZeRO is plain training.",
        "They are given when TrainingArguments is built, with a batch size and a launcher's variables.",
    ),
    "same-model": Defect(
        "one model for all arms",
        "Every arm trains the same model object, so that ZeRO's go on from what plain training has learned.",
        "Each arm has a model of its own.",
    ),
    "batch-differs": Defect(
        "batches of 8 beside batches of 16",
        "The table sets plain training at batch 8 beside ZeRO at batch 16; the row of ZeRO at 8 is commented out.",
        "Batch 8 beside batch 8.",
    ),
    "head-unseeded": Defect(
        "first weights drawn without a seed",
        "The classifier's weights are drawn before any seed is set.",
        "Equal seeds draw equal weights in both arms.",
    ),
    "one-seed": Defect(
        "one seed at every start",
        "Split, order and dropout have the seed 42 at every start.",
        "Each repeat has its own, the same in both arms.",
    ),
    "one-process": Defect(
        "all arms in one process",
        "All arms run in one process.",
        "Each arm has a process of its own, and so a model and a head of its own.",
    ),
    "fixed-order": Defect("plain training always first", "Plain training goes first.", "ZeRO goes first."),
    "peak-kept": Defect("a peak that is never reset", "The peak of memory is never reset.", "Each arm's own peak."),
    "timing-span": Defect(
        "a time in which everything is",
        "The time is that of all of train(): engine set-up, first steps, evaluations and a checkpoint are in it.",
        "The median training step without the first five, per review.",
    ),
    "losses-of-few": Defect(
        "losses of a few reviews",
        "The losses are those of the last ten steps (80 reviews at batch 8, 160 at 16) and of 200 held-out reviews.",
        "Those of all reviews in the last epoch, and of ten times as many held-out ones, none of which is trained on.",
    ),
}

# Wrong too, but in no number.
IN_WORDS = {
    "label": Defect(
        "wrong names of rows",
        "Rows are called Stage2, over settings of stage 3.",
        "Rows are called what the engine says.",
    ),
}

_THREE = ("plain-8", "zero-8", "zero-16")  # as published
_MENDED = {"honoured": True, "fresh_model": True, "seeded_head": True, "own_seeds": True}

PROGRAMS = {
    "published": Program(_THREE),
    "honoured": Program(_THREE, honoured=True),
    "fresh": Program(_THREE, fresh_model=True),
    "seeded-head": Program(_THREE, seeded_head=True),
    "own-seeds": Program(_THREE, own_seeds=True),
    "zero-first": Program(_THREE[::-1]),
    "alone-plain-8": Program(("plain-8",)),
    "alone-zero-8": Program(("zero-8",), start=1),
    "alone-zero-16": Program(("zero-16",), start=2),
    "mended-plain-8": Program(("plain-8",), **_MENDED),
    "mended-zero-8": Program(("zero-8",), **_MENDED),
    "mended-plain-16": Program(("plain-16",), **_MENDED),
    "mended-zero-16": Program(("zero-16",), **_MENDED),
    "left-unread": Program(("zero-8",), **{**_MENDED, "honoured": False}),
    "left-same-model": Program(("plain-8", "zero-8"), **{**_MENDED, "fresh_model": False}),
    "left-unseeded": Program(("zero-8",), **{**_MENDED, "seeded_head": False}),
    "left-one-process": Program(("plain-8", "zero-8"), **_MENDED),
    "left-zero-first": Program(("zero-8", "plain-8"), **_MENDED),
}

Metric = Literal["validation loss", "training loss", "time", "peak memory"]
METRICS: tuple[Metric, ...] = ("validation loss", "training loss", "time", "peak memory")
LOSSES = METRICS[:2]
# Which observation of an arm is its value: as the published program takes it, and mended. Times are per review.
PUBLISHED_READING: dict[Metric, str] = {
    "validation loss": "logged_eval_loss",
    "training loss": "logged_train_loss",
    "time": "span",
    "peak memory": "life_peak_bytes",
}
MENDED_READING: dict[Metric, str] = {
    "validation loss": "held_out_loss",
    "training loss": "last_epoch_loss",
    "time": "step",
    "peak memory": "peak_bytes",
}
READING_OF = {
    "peak-kept": ("peak memory",),
    "timing-span": ("time",),
    "losses-of-few": ("validation loss", "training loss"),
}  # defects that are mended in reading what ran, not in running


class Comparison(NamedTuple):
    """Two arms, each of a program by name and position, and how they are read."""

    plain: tuple[str, int]
    zero: tuple[str, int]
    reading: Mapping[Metric, str]


def _reading(mended: bool, but: str | None) -> dict[Metric, str]:
    """How arms are read where all defects of reading are mended, or none; `but` names a defect that is otherwise."""
    reading = dict(MENDED_READING if mended else PUBLISHED_READING)
    for metric in READING_OF.get(but, ()):
        reading[metric] = (PUBLISHED_READING if mended else MENDED_READING)[metric]
    return reading


def _published(name: str = "published", plain: int = 0, zero: int = 2, mended: str | None = None) -> Comparison:
    return Comparison((name, plain), (name, zero), _reading(False, mended))


def _mended(zero: tuple[str, int] = ("mended-zero-8", 0), left: str | None = None) -> Comparison:
    return Comparison(("mended-plain-8", 0), zero, _reading(True, left))


AS_PUBLISHED = _published()
MENDED = _mended()
MENDED_AT_16 = Comparison(("mended-plain-16", 0), ("mended-zero-16", 0), MENDED_READING)
# Neither is ZeRO: two starts of plain training, each with the head that it happened to draw.
CHANCE = Comparison(("alone-plain-8", 0), ("alone-zero-8", 0), MENDED_READING)

# The published program with this defect mended, and no other.
MENDED_ALONE = {
    "settings-unread": _published("honoured"),
    "same-model": _published("fresh"),
    "batch-differs": _published(zero=1),
    "head-unseeded": _published("seeded-head"),
    "one-seed": _published("own-seeds"),
    "one-process": Comparison(("alone-plain-8", 0), ("alone-zero-16", 0), PUBLISHED_READING),
    "fixed-order": _published("zero-first", plain=2, zero=0),
    **{name: _published(mended=name) for name in READING_OF},
}
# In one process ZeRO goes first: what plain training then really is, its "ran" says.
ZERO_FIRST = Comparison(("left-zero-first", 1), ("left-zero-first", 0), MENDED_READING)
# The mended program with this defect, and no other; same-model and peak-kept need one process to show, and have it.
# One seed has no interval, and in processes of their own the order of arms says nothing.
LEFT_ALONE = {
    "settings-unread": _mended(("left-unread", 0)),
    "same-model": Comparison(("left-same-model", 0), ("left-same-model", 1), MENDED_READING),
    "batch-differs": _mended(("mended-zero-16", 0)),
    "head-unseeded": _mended(("left-unseeded", 0)),
    "one-process": Comparison(("left-one-process", 0), ("left-one-process", 1), MENDED_READING),
    "peak-kept": Comparison(("left-one-process", 0), ("left-one-process", 1), _reading(True, "peak-kept")),
    **{name: _mended(left=name) for name in ("timing-span", "losses-of-few")},
}


class Effect(NamedTuple):
    """What ZeRO's arm has over the plain one's, less 1, by repeat; below 0 ZeRO is better."""

    values: dict[int, float]
    mean: float
    low: float | None  # None: one repeat has no interval
    high: float | None
    drawn: bool  # weights or order are drawn anew in each repeat; otherwise repeats are the same training

    @property
    def word(self) -> str:
        """The effect in words: ZeRO is better or worse, there is no difference, or why repeats cannot decide."""
        if self.low is None:
            return "one repeat"
        if max(abs(self.low), abs(self.high)) <= WITHIN:
            return "no difference"
        if not self.drawn:
            return "the same each time"
        return "better" if self.high < 0 else "worse" if self.low > 0 else "not told apart"


class _Engine(Facts):
    """What an arm was, read from the engine."""

    engine_class: str
    optimizer_class: str
    zero_stage: int | None
    offload_optimizer_device: str
    gradient_clipping: float
    batch_size: int
    num_steps: int
    num_evaluations: int


class _EndedArm(Facts):
    """What was observed of an arm that trained to its end."""

    arm: str
    ran: _Engine
    first_weights: float  # the sum of their absolutes, which tells weights apart
    seconds: float
    cpu_seconds: float
    step_seconds: float
    step_cpu_seconds: float
    peak_bytes: int
    life_peak_bytes: int
    checkpoint_bytes: int
    logged_train_loss: float
    logged_eval_loss: float
    epoch_losses: list[float]
    held_out_loss: float
    held_out_accuracy: float


class _FailedArm(Facts):
    """An arm that failed, and its process with it."""

    arm: str
    error: str


class _Start(Facts):
    """What came of one start of a program."""

    arms: list[
        Annotated[
            Annotated[_EndedArm, Tag("ended")] | Annotated[_FailedArm, Tag("failed")],
            Discriminator(lambda arm: "failed" if isinstance(arm, dict) and "error" in arm else "ended"),
        ]
    ]
    data: str  # digest of what it was given


class _ProtocolFile(Facts):
    """The file of `zero-study protocol`."""

    settings: dict[str, Any]
    body: dict[str, Any] | None = None
    machine: dict[str, Any]
    finished_at: str
    runs: dict[str, _Start]  # by program/repeat


def read(path: Path) -> dict[str, Any]:
    """Read what `zero-study protocol` wrote. Raises Refusal naming the file and the key."""
    content = load(path, "results of the protocol")
    try:
        results = _ProtocolFile.model_validate(content)
    except ValidationError as error:
        raise Refusal(f"{describe(error, str(path))}; make it with zero-study protocol") from None
    if unknown := {name.partition("/")[0] for name in results.runs} - set(PROGRAMS):
        raise Refusal(f"{path}: runs: {min(unknown)} is no program; take it out")
    return content


def arms(results: Mapping[str, Any], place: tuple[str, int]) -> dict[int, dict[str, Any]]:
    """The arms at a place (program, position), by repeat; one that failed has its error under "error"."""
    program, position = place
    by_repeat = {}
    for name, start in results["runs"].items():
        started, _, repeat = name.partition("/")
        if started == program and position < len(start["arms"]):
            by_repeat[int(repeat)] = start["arms"][position]
    return by_repeat


def effect(results: Mapping[str, Any], comparison: Comparison, metric: Metric) -> Effect | None:
    """The effect of a comparison on one metric; None where no repeat has both arms."""
    plain, zero = arms(results, comparison.plain), arms(results, comparison.zero)
    clock = clock_of(results)
    values = {}
    for repeat in sorted(plain.keys() & zero.keys()):
        of_plain, of_zero = (_value(arm[repeat], comparison.reading[metric], clock) for arm in (plain, zero))
        if of_plain is not None and of_zero is not None:
            values[repeat] = of_zero / of_plain - 1
    programs = [PROGRAMS[name] for name, _ in (comparison.plain, comparison.zero)]
    drawn = metric not in LOSSES or any(program.own_seeds or not program.seeded_head for program in programs)
    return Effect(values, *t_interval(np.array(list(values.values()))), drawn) if values else None


def added(results: Mapping[str, Any], defect: str, metric: Metric) -> Effect | None:
    """What a defect adds to the published effect: that effect less the one with the defect mended, repeat by repeat.

    None where no repeat has both, or where the mended program is the same training in each.
    """
    published, mended = (effect(results, pair, metric) for pair in (AS_PUBLISHED, MENDED_ALONE[defect]))
    if published is None or mended is None or not mended.drawn:
        return None
    values = {
        repeat: published.values[repeat] - mended.values[repeat]
        for repeat in published.values
        if repeat in mended.values
    }
    return Effect(values, *t_interval(np.array(list(values.values()))), True) if values else None


def clock_of(results: Mapping[str, Any]) -> str:
    """How the keys of times begin: with the processor's clock on a CPU, whose cores others may share, or the wall's."""
    return "" if results["machine"]["gpus"] else "cpu_"


def _value(arm: Mapping[str, Any], reading: str, clock: str) -> float | None:
    """What an arm is compared by: one thing observed of it; None where the arm failed."""
    if "error" in arm:
        return None
    if reading == "span":
        return arm[f"{clock}seconds"]
    if reading == "step":
        return arm[f"step_{clock}seconds"] / arm["ran"]["batch_size"]
    if reading == "last_epoch_loss":
        return arm["epoch_losses"][-1]
    return arm[reading]
