"""The view `fits`: the largest model, or batch, that each strategy trained under a cap, and how fast it then was."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from study import formatting
from study.compare import view
from study.compare.facts import why_untimed
from study.config import RunConfig
from study.models import SIZES
from study.records import find as records
from study.records.schema import Outcome
from study.running import caps

HEAD = ["strategy", "largest that trained", "smallest that did not", "predicted", "it was predicted to need, GiB"]
TIMED = ["strategy", "s/step, of {}'s batch", "times {}'s", "larger batch", "sequences/s", "times {}'s rate"]
EXPLANATION = """\
Each run trains one model under a cap on what each of its processes may hold. Largest that trained and smallest that did
not, of models or of batches: by the runs, between which nothing of the ladder was left. Predicted: theory's peak of
tensors, and what a process holds beside them, against the cap, as theory is now; what it said before the first run
is in the study's protocol. The last column is that need of the largest that trained."""
OF_TIMES = """\
Speed at equal memory: each run beside the mean of the nearest runs of {} before and after it, the median of its runs,
and in parentheses the lowest and the highest."""


class Tried(NamedTuple):
    """One run under a cap."""

    outcome: Outcome
    config: RunConfig
    cap: float  # GiB
    seconds: float | None  # of the median step; None: none was timed, or others disturbed it

    @property
    def work(self) -> tuple[Any, ...]:
        """Equal for runs that differ in strategy, size and batch alone."""
        return self.config.workload, self.config.precision, self.config.sequence_length, self.cap

    @property
    def batch(self) -> int:
        return self.config.global_batch_size

    @property
    def needed(self) -> float:
        """GiB that it was predicted to need."""
        return caps.needed_bytes(self.config, self.outcome.strategy, self.outcome.world_size) / caps.GIB


class Largest(NamedTuple):
    """The largest model, or batch, that a strategy trained under a cap, and the smallest that it did not."""

    workload: str
    cap_gib: float
    strategy: str
    trained: str | None
    not_trained: str | None
    predicted: str | None  # the largest whose predicted need is within the cap
    struck: str | None  # where memory was out: device, host or cap
    needed_gib: float | None  # what the largest that trained was predicted to need

    def cells(self) -> list[str]:
        """A row of the page."""
        struck = f" (of {self.struck})" if self.struck else ""
        needed = "" if self.needed_gib is None else f"{self.needed_gib:.2f}"
        shown = [each or "none" for each in (self.trained, self.not_trained, self.predicted)]
        return [self.strategy, shown[0], shown[1] + struck, shown[2], needed]


def page(folders: Sequence[Path], control: str = "ddp") -> str:
    """Make the page: by workload and cap, one row per strategy."""
    tried = read(folders)
    lines: list[str] = [] if tried else ["No run here had a cap; `zero-study run frontier` makes some.", ""]
    for work, members in groupby(tried, key=lambda each: each.work):
        runs = list(members)
        workload, precision, length, cap = work
        lines += [f"## {cap:g} GiB: {formatting.shown(workload)}, {precision}, sequences of {length} tokens", ""]
        of = "models" if _knob(runs) == "size" else f"batches of {runs[0].config.size}"
        lines += [f"Of {of}:", "", *formatting.markdown(HEAD, [each.cells() for each in _largest(runs)]), ""]
        if of != "models" and (timed := [each.cells() for each in _speeds(runs, control)]):
            lines += [
                OF_TIMES.format(control),
                "",
                *formatting.markdown([name.format(control) for name in TIMED], timed),
                "",
            ]
        lines += [f"- {each.outcome.run_id}: {each.outcome.status}, {formatting.shown(each.outcome.message)}"
                  for each in runs if each.outcome.status not in ("ok", "out_of_memory", "skipped")]  # fmt: skip
    found = [file for folder in folders for file in records.find([folder])]
    return view.page("What fits: measured, and predicted", EXPLANATION, lines, "--view fits", folders, found)


def read(folders: Sequence[Path]) -> list[Tried]:
    """Every run under a cap below these folders, by what was trained under which."""
    return sorted((each for run in records.find_runs(folders) if (each := _tried(run))), key=lambda each: each.work)


def largest(folders: Sequence[Path]) -> list[Largest]:
    """What each strategy trained under each cap."""
    return [row for _, runs in groupby(read(folders), key=lambda each: each.work) for row in _largest(list(runs))]


def _tried(run: records.RecordedRun) -> Tried | None:
    outcome = run.outcome
    if outcome is None or outcome.config is None or outcome.config.get("memory_cap") is None:
        return None
    record = run.record and run.record.record
    timing = record.timing if record and why_untimed(record) is None else None
    config = RunConfig(**outcome.config)
    return Tried(outcome, config, config.memory_cap or 0.0, timing.median_seconds if timing else None)


def _of(strategy: str, runs: list[Tried], status: str = "ok") -> list[Tried]:
    return [run for run in runs if run.outcome.strategy == strategy and run.outcome.status == status]


# ---------------------------------------------------------------- the largest


def _knob(runs: Sequence[Tried]) -> str:
    return "size" if len({run.config.size for run in runs}) > 1 else "global_batch_size"


def _largest(runs: list[Tried]) -> list[Largest]:
    """What each strategy trained. The ladder is that of all strategies together."""
    knob = _knob(runs)
    place: Callable[[Tried], int] = _parameters if knob == "size" else lambda run: run.batch
    ladder = {place(run): getattr(run.config, knob) for run in runs}
    rows = []
    for name in formatting.in_order(run.outcome.strategy for run in runs):
        trained = max(_of(name, runs), key=place, default=None)
        ended = min(_of(name, runs, "out_of_memory"), key=place, default=None)
        like = next(run for run in runs if run.outcome.strategy == name)
        asked = [like._replace(config=like.config.model_copy(update={knob: ladder[rung]})) for rung in sorted(ladder)]
        predicted = max((each for each in asked if each.needed <= each.cap), key=place, default=None)
        first, second, third = (str(getattr(run.config, knob)) if run else None for run in (trained, ended, predicted))
        struck = ended.outcome.memory if ended else None
        needed = trained.needed if trained else None
        rows.append(Largest(like.config.workload, like.cap, name, first, second, third, struck, needed))
    return rows


def _parameters(run: Tried) -> int:
    """A size's place, by layers and hidden size: what a GPT's parameters grow with."""
    size = SIZES[run.config.workload][run.config.size]
    return size["layers"] * 12 * size["hidden"] ** 2 + 51_281 * size["hidden"]


# ---------------------------------------------------------------- the speed at equal memory


class Speed(NamedTuple):
    """How fast a strategy was, beside the control: at the control's batch, and at its own largest under the cap."""

    strategy: str
    equal_seconds: tuple[float, ...]  # a step, by run, at the control's batch; empty: it was not timed
    equal_ratios: tuple[float, ...]  # over the control's step
    batch: int  # the largest above the control's that trained; 0: none did, or none was asked
    own_seconds: tuple[float, ...]
    own_ratios: tuple[float, ...]  # sequences per second over the control's
    fits: bool  # at the control's batch

    def cells(self) -> list[str]:
        """A row of the page."""
        rates = [self.batch / seconds for seconds in self.own_seconds]
        equal = _median(self.equal_seconds, "not timed" if self.fits else "does not fit")
        own = [str(self.batch or ""), _median(rates, "not timed" if self.batch else "")]
        return [self.strategy, equal, _spread(self.equal_ratios), *own, _spread(self.own_ratios)]


def speeds(folders: Sequence[Path], control: str = "ddp") -> list[Speed]:
    """Each strategy that was timed beside the control under a cap."""
    return [row for _, runs in groupby(read(folders), key=lambda each: each.work) for row in _speeds([*runs], control)]


def _speeds(runs: list[Tried], control: str) -> list[Speed]:
    controls = _of(control, runs)
    batch = max((run.batch for run in controls), default=0)
    controls = sorted((run for run in controls if run.batch == batch), key=lambda run: run.outcome.started_at)
    if len(controls) < 2:  # a ladder's runs, one of each batch
        return []
    rows = []
    for name in formatting.in_order(run.outcome.strategy for run in runs if run.outcome.strategy != control):
        trained = _of(name, runs)
        largest = max((run.batch for run in trained if run.batch > batch), default=0)
        equal, own = ([run for run in trained if run.batch == each] for each in (batch, largest))
        seconds = [tuple(run.seconds for run in each if run.seconds) for each in (equal, own)]
        ratios = [tuple(ratio for run in each if (ratio := _against(run, controls))) for each in (equal, own)]
        over = tuple(1 / ratio for ratio in ratios[0])
        rows.append(Speed(name, seconds[0], over, largest, seconds[1], ratios[1], bool(equal)))
    return rows


def over_series(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean of one ratio a series, and the 95 % interval for one more series (t on the logarithms)."""
    from scipy import stats  # of the extra `report`, which the view itself can do without

    logs = [math.log(ratio) for ratio in ratios]
    half = stats.t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) * math.sqrt(1 + 1 / len(logs))
    middle = statistics.mean(logs)
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def _median(values: Sequence[float], otherwise: str) -> str:
    return f"{statistics.median(values):.2f}" if values else otherwise


def _against(run: Tried, controls: list[Tried]) -> float | None:
    """A run's sequences per second over the mean of those of the control's nearest runs on both sides."""
    before = [other for other in controls if other.outcome.started_at < run.outcome.started_at][-1:]
    after = [other for other in controls if other.outcome.started_at > run.outcome.started_at][:1]
    seconds = [other.seconds for other in before + after if other.seconds]
    if len(seconds) < 2 or not run.seconds:
        return None
    return (run.batch / run.seconds) / statistics.mean(controls[0].batch / each for each in seconds)


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
