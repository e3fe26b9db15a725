"""Make the view `fits`: the largest model or batch that each strategy trained under a memory cap, and its step time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from study.compare import view
from study.compare.facts import why_untimed
from study.config import RunConfig
from study.records import find as records
from study.records.schema import Outcome
from study.running import estimate
from zero_study import terminal
from zero_study.engines.strategy_names import in_order
from zero_study.models import SIZES
from zero_study.terminal import GIB

HEAD = ["strategy", "largest that trained", "smallest that did not", "predicted", "predicted memory, GiB"]
TIMED = ["strategy", "s/step, of {}'s batch", "times {}'s", "larger batch", "sequences/s", "times {}'s rate"]
EXPLANATION = """\
Each run trains one model with a limit on the memory of each process. The tables show the largest model (or batch)
that trained and the smallest that did not. All sizes between these two were tried.

- predicted: whether the predicted memory, which is theory's peak of tensors plus the rest of a process, fits the
  limit. The prediction uses today's theory. The predictions from before the first run are in the study's protocol.
- last column: the predicted memory of the largest size that trained."""
OF_TIMES = """\
Speed at equal memory: each run is compared with the mean of the nearest runs of {} before and after it. The table
shows the median over the runs of a strategy and, in parentheses, the lowest and the highest ratio."""


class CappedRun(NamedTuple):
    """One run under a memory cap, which may have failed."""

    outcome: Outcome
    config: RunConfig
    cap: float  # GiB
    seconds: float | None  # median step time; None if it was not measured or was disturbed

    @property
    def work(self) -> tuple[Any, ...]:
        """A key that is equal for runs that differ only in strategy, model size and batch."""
        return self.config.workload, self.config.precision, self.config.sequence_length, self.cap

    @property
    def batch(self) -> int:
        return self.config.global_batch_size

    @property
    def needed(self) -> float:
        """The memory that the run was predicted to need, in GiB."""
        return estimate.needed_bytes(self.config, self.outcome.strategy, self.outcome.world_size) / GIB


class Largest(NamedTuple):
    """The largest model or batch that a strategy trained under a cap, and the smallest that ran out of memory."""

    workload: str
    cap_gib: float
    strategy: str
    trained: str | None
    not_trained: str | None
    predicted: str | None  # the largest that was predicted to fit
    struck: str | None  # the memory that ran out: device, host or cap
    needed_gib: float | None  # predicted memory of the largest that trained

    def cells(self) -> list[str]:
        """Return the strategy's row in the table of the largest models or batches."""
        struck = f" (of {self.struck})" if self.struck else ""
        needed = "" if self.needed_gib is None else f"{self.needed_gib:.2f}"
        texts = [value or "none" for value in (self.trained, self.not_trained, self.predicted)]
        return [self.strategy, texts[0], texts[1] + struck, texts[2], needed]


def page(folders: Sequence[Path], control: str = "ddp") -> str:
    """Return the page of the view `fits` in Markdown.

    It has a table for each workload and memory cap, with one row per strategy.
    """
    tried = read(folders)
    lines: list[str] = (
        [] if tried else ["None of these runs had a memory limit. `zero-study run frontier` makes such runs.", ""]
    )
    for _, members in groupby(tried, key=lambda run: run.work):
        lines += _sections(list(members), control)
    record_files = [file for folder in folders for file in records.find([folder])]
    return view.page(
        "Largest models that fit: measured and predicted", EXPLANATION, lines, "--view fits", folders, record_files
    )


def _sections(runs: list[CappedRun], control: str) -> list[str]:
    """Return the tables of runs that differ only in strategy, model size and batch.

    Runs that failed for another reason than memory are listed below the tables.
    """
    workload, precision, length, cap = runs[0].work
    lines = [f"## {cap:g} GiB: {terminal.escape_markdown(workload)}, {precision}, sequences of {length} tokens", ""]
    of_batches = _knob(runs) != "size"
    ladder = f"batches of {runs[0].config.size}" if of_batches else "models"
    lines += [f"Of {ladder}:", "", *terminal.markdown(HEAD, [row.cells() for row in _largest(runs)]), ""]
    if of_batches and (timed := [row.cells() for row in _speeds(runs, control)]):
        head = [name.format(control) for name in TIMED]
        lines += [OF_TIMES.format(control), "", *terminal.markdown(head, timed), ""]
    failed = [run.outcome for run in runs if run.outcome.status not in ("ok", "out_of_memory", "skipped")]
    return lines + [f"- {run.run_id}: {run.status}, {terminal.escape_markdown(run.message)}" for run in failed]


def read(folders: Sequence[Path]) -> list[CappedRun]:
    """Return all runs under a memory cap that are below the folders, sorted by training and cap."""
    return sorted((each for run in records.find_runs(folders) if (each := _tried(run))), key=lambda each: each.work)


def largest(folders: Sequence[Path]) -> list[Largest]:
    """Return the largest model or batch that each strategy trained under each memory cap."""
    return [row for _, runs in groupby(read(folders), key=lambda run: run.work) for row in _largest(list(runs))]


def _tried(run: records.RecordedRun) -> CappedRun | None:
    outcome = run.outcome
    if outcome is None or outcome.config is None or outcome.config.get("memory_cap") is None:
        return None
    record = run.record and run.record.record
    timing = record.timing if record and why_untimed(record) is None else None
    config = RunConfig(**outcome.config)
    return CappedRun(outcome, config, config.memory_cap or 0.0, timing.median_seconds if timing else None)


def _of(strategy: str, runs: list[CappedRun], status: str = "ok") -> list[CappedRun]:
    return [run for run in runs if run.outcome.strategy == strategy and run.outcome.status == status]


# ---------------------------------------------------------------- the largest


def _knob(runs: Sequence[CappedRun]) -> str:
    return "size" if len({run.config.size for run in runs}) > 1 else "global_batch_size"


def _largest(runs: list[CappedRun]) -> list[Largest]:
    """Return the largest model or batch that each strategy trained under one memory cap.

    Predictions are made for every size (or batch) that any of the strategies tried.
    """
    knob = _knob(runs)
    place: Callable[[CappedRun], int] = _parameters if knob == "size" else lambda run: run.batch
    ladder = {place(run): getattr(run.config, knob) for run in runs}
    rungs = [ladder[rung] for rung in sorted(ladder)]
    strategies = in_order(run.outcome.strategy for run in runs)
    return [_largest_of(strategy, runs, knob, rungs, place) for strategy in strategies]


def _largest_of(
    strategy: str, runs: list[CappedRun], knob: str, rungs: Sequence[Any], place: Callable[[CappedRun], int]
) -> Largest:
    """Return the largest value of `knob` that a strategy trained, and the largest of `rungs` predicted to fit."""
    example = next(run for run in runs if run.outcome.strategy == strategy)
    trained = max(_of(strategy, runs), key=place, default=None)
    ended = min(_of(strategy, runs, "out_of_memory"), key=place, default=None)
    ladder = [example._replace(config=example.config.model_copy(update={knob: value})) for value in rungs]
    predicted = max((run for run in ladder if run.needed <= run.cap), key=place, default=None)

    def value(run: CappedRun | None) -> str | None:
        return str(getattr(run.config, knob)) if run else None

    return Largest(
        workload=example.config.workload,
        cap_gib=example.cap,
        strategy=strategy,
        trained=value(trained),
        not_trained=value(ended),
        predicted=value(predicted),
        struck=ended.outcome.memory if ended else None,
        needed_gib=trained.needed if trained else None,
    )


def _parameters(run: CappedRun) -> int:
    """Return a rough number of parameters, from layers and hidden size, by which model sizes are sorted."""
    size = SIZES[run.config.workload][run.config.size]
    return size["layers"] * 12 * size["hidden"] ** 2 + 51_281 * size["hidden"]


# ---------------------------------------------------------------- the speed at equal memory


class Speed(NamedTuple):
    """The speed of a strategy under a memory cap, compared with the speed of the baseline.

    It is measured at the control's largest batch, and at the strategy's own largest batch.
    """

    strategy: str
    equal_seconds: tuple[float, ...]  # step time of each run at the control's batch; empty if it was not timed
    equal_ratios: tuple[float, ...]  # step times divided by the control's
    batch: int  # the largest that trained and is larger than the control's; 0 if there is none
    own_seconds: tuple[float, ...]
    own_ratios: tuple[float, ...]  # sequences per second divided by the control's
    fits: bool  # whether it trained at the control's batch

    def cells(self) -> list[str]:
        """Return the strategy's row in the table of step times."""
        rates = [self.batch / seconds for seconds in self.own_seconds]
        equal = _median(self.equal_seconds, "not timed" if self.fits else "does not fit")
        own = [str(self.batch or ""), _median(rates, "not timed" if self.batch else "")]
        return [self.strategy, equal, _spread(self.equal_ratios), *own, _spread(self.own_ratios)]


def speeds(folders: Sequence[Path], control: str = "ddp") -> list[Speed]:
    """Return the speed of each strategy compared with that of the baseline, under each memory cap.

    Caps under which the control ran fewer than two times at its largest batch are left out.
    """
    return [row for _, runs in groupby(read(folders), key=lambda run: run.work) for row in _speeds([*runs], control)]


def _speeds(runs: list[CappedRun], control: str) -> list[Speed]:
    # The control's runs at the largest batch that it trained, in the order in which they started.
    of_control = _of(control, runs)
    batch = max((run.batch for run in of_control), default=0)
    controls = sorted((run for run in of_control if run.batch == batch), key=lambda run: run.outcome.started_at)
    if len(controls) < 2:  # a search for the largest batch runs each batch only once
        return []
    strategies = in_order(run.outcome.strategy for run in runs if run.outcome.strategy != control)
    return [_speed_of(strategy, _of(strategy, runs), controls) for strategy in strategies]


def _speed_of(strategy: str, trained: list[CappedRun], controls: list[CappedRun]) -> Speed:
    """Compare the times of a strategy's runs with those of the control's runs that started just before and after.

    The comparison is made at the control's batch, and at the strategy's own largest batch.
    """
    batch = controls[0].batch
    own_batch = max((run.batch for run in trained if run.batch > batch), default=0)
    equal = [run for run in trained if run.batch == batch]
    own = [run for run in trained if run.batch == own_batch]
    return Speed(
        strategy=strategy,
        equal_seconds=_seconds_of(equal),
        equal_ratios=tuple(1 / ratio for ratio in _rate_ratios(equal, controls)),
        batch=own_batch,
        own_seconds=_seconds_of(own),
        own_ratios=_rate_ratios(own, controls),
        fits=bool(equal),
    )


def _seconds_of(runs: list[CappedRun]) -> tuple[float, ...]:
    return tuple(run.seconds for run in runs if run.seconds)


def _rate_ratios(runs: list[CappedRun], controls: list[CappedRun]) -> tuple[float, ...]:
    return tuple(ratio for run in runs if (ratio := _against(run, controls)))


def mean_over_series(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of one ratio per series of runs, and a 95 % prediction interval for one more series.

    The interval is by Student's t on the logarithms.
    """
    from scipy import stats  # part of the extra `report`, which the view itself does not need

    logs = [math.log(ratio) for ratio in ratios]
    half = stats.t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) * math.sqrt(1 + 1 / len(logs))
    middle = statistics.mean(logs)
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def _median(values: Sequence[float], otherwise: str) -> str:
    return f"{statistics.median(values):.2f}" if values else otherwise


def _against(run: CappedRun, controls: list[CappedRun]) -> float | None:
    """Return a run's sequences per second, divided by the mean of the control's runs just before and just after it.

    None if one of the three runs is missing or has no time.
    """
    before = [control for control in controls if control.outcome.started_at < run.outcome.started_at][-1:]
    after = [control for control in controls if control.outcome.started_at > run.outcome.started_at][:1]
    seconds = [control.seconds for control in before + after if control.seconds]
    if len(seconds) < 2 or not run.seconds:
        return None
    return (run.batch / run.seconds) / statistics.mean(controls[0].batch / duration for duration in seconds)


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
