"""Explain why steps take long, from the pattern of their times and from the settings that the log states."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence

from zero_study.why.cause import Cause
from zero_study.why.known import conclude
from zero_study.why.setting import Setting
from zero_study.why.steps import Steps

FIRST_STEPS = 10.0  # times the usual step that the first step may take
SECONDS = 5.0  # that a first step takes if it is worth a word
PEAK = 2.0  # times the usual step that a slow step takes
GROWTH = 1.5  # times the first quarter that the last quarter takes
LONG = 60.0  # seconds of saving or evaluating from which they are worth a note
NOTED = 5.0  # seconds of a step from which what the log states is worth a note
WAITING, FEW_WAITS = 0.4, 5  # share of the time that is spent waiting for data, and steps from which this is a cause
FEW = 12  # steps of which nothing is concluded


def causes(steps: Steps, setting: Setting) -> list[Cause]:
    """Return the causes that the times of the steps show."""
    times = _times(steps)
    patterns = list(_patterns(times, steps)) if len(times) >= 3 else []
    return [*_other_work(steps), *_waiting(steps), *patterns, *(() if patterns else _stated(times, steps, setting))]


def _stated(times: Sequence[tuple[float, float]], steps: Steps, setting: Setting) -> Iterator[Cause]:
    """Yield a note on a logged setting that usually makes steps slow. The most likely one comes first."""
    usual = statistics.median(seconds for _, seconds in times) if times else 0.0
    if usual < NOTED:
        return
    features = setting.features
    bar = steps.step_bar
    evidence = (steps.rows[0].line,) if steps.rows else (bar.line,) if bar is not None else ()
    shards = setting.strategy == "zero3" or "fsdp" in features
    reasons = {
        "slow/stated-network": shards and "several machines" in features,
        "slow/stated-offload": "offload" in features,
        "slow/stated-generation": "reinforcement" in features and "engine" not in features,
        "slow/stated-eager": "eager" in features,
    }
    for id, holds in reasons.items():
        if holds:
            yield conclude(id, evidence, usual=f"{usual:,.3g}")
            return


def _other_work(steps: Steps) -> Iterator[Cause]:
    """Yield a note on the longest time that a log states for saving or evaluating."""
    longest = max(steps.durations, key=lambda each: each[2], default=None)
    if longest is not None and longest[2] > LONG:
        line, what, seconds = longest
        yield conclude("slow/other-work", (line,), what=repr(what.strip()), seconds=f"{seconds:,.0f}")


def _waiting(steps: Steps) -> Iterator[Cause]:
    """Yield the cause that steps wait for data, if the log states both times."""
    waiting = steps.waiting
    if waiting is not None and waiting.count >= FEW_WAITS and waiting.share >= WAITING:
        yield conclude(
            "slow/waiting-for-data", (waiting.line,), share=f"{waiting.share:.0%}".replace("%", " %"),
            count=f"{waiting.count:,}", longest=f"{waiting.longest:,.3g}",
            usual=f"{(waiting.total - waiting.data) / waiting.count:,.3g}",
        )  # fmt: skip


def _times(steps: Steps) -> list[tuple[float, float]]:
    """Return the steps and their seconds, from the logged rows or from the progress bar."""
    stated = [
        (row.step if row.step is not None else place, row.seconds)
        for place, row in enumerate(steps.rows)
        if row.seconds
    ]
    return (
        [(step, seconds) for step, seconds in stated if math.isfinite(seconds)]
        if stated
        else [(float(step), seconds) for step, seconds in steps.bar_times]
    )


def _patterns(times: Sequence[tuple[float, float]], steps: Steps) -> Iterator[Cause]:
    seconds = [value for _, value in times]
    bar = steps.step_bar
    evidence = (steps.rows[0].line,) if steps.rows else (bar.line,) if bar is not None else ()
    usual = statistics.median(seconds[1:])
    if not usual:
        return
    later = seconds[3:] or seconds[1:]
    if steps.rows and seconds[0] > max(SECONDS, FIRST_STEPS * usual) and max(later) < PEAK * usual:
        yield conclude("slow/first-step", evidence, first=f"{seconds[0]:,.3g}", usual=f"{usual:,.3g}")
    if len(seconds) < FEW:
        return
    quarter = len(seconds) // 4
    begin, end = statistics.median(seconds[1 : quarter + 1]), statistics.median(seconds[-quarter:])
    if end > GROWTH * begin and all(
        later > 0.95 * earlier for earlier, later in itertools.pairwise(_quarters(seconds))
    ):
        yield conclude("slow/growth", evidence, begin=f"{begin:,.3g}", end=f"{end:,.3g}")
    slow = [step for step, value in times[1:] if value > PEAK * usual]
    gaps = {round(later - earlier) for earlier, later in itertools.pairwise(slow)}
    if len(slow) >= 3 and len(gaps) == 1 and next(iter(gaps)) > 1:
        share = 1 - usual * len(seconds) / sum(seconds)
        period = str(next(iter(gaps)))
        yield conclude("slow/periodic", evidence, gaps=period, peak=f"{PEAK:g}", share=f"{share:.0%}")


def _quarters(seconds: Sequence[float]) -> list[float]:
    quarter = len(seconds) // 4
    return [statistics.median(seconds[place * quarter : (place + 1) * quarter]) for place in range(4)]
