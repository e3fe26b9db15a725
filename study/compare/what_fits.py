"""The view `fits`: the largest model, or batch, that each strategy trained under a cap, beside what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from study.compare import words
from study.config import RunConfig
from study.models import SIZES
from study.records import find as records
from study.records.schema import Outcome
from study.running import caps

HEAD = ["strategy", "largest that trained", "smallest that did not", "predicted", "it was predicted to need, GiB"]
EXPLANATION = """\
Each run takes three steps of one model under a cap on what each of its processes may hold. Largest that trained and
smallest that did not: by the runs, between which no size of the ladder was left. Predicted: theory's peak of tensors,
and what a process holds beside them, against the cap; it was written down before the first run. The last column is
that need of the largest that trained."""


class Tried(NamedTuple):
    """One run under a cap, and the place of its model among all of the study's."""

    outcome: Outcome
    config: RunConfig
    cap: float  # GiB

    @property
    def work(self) -> tuple[Any, ...]:
        """Equal for runs that differ in strategy and size alone."""
        config = self.config
        return (config.workload, config.precision, config.sequence_length, config.global_batch_size, self.cap,
                config.memory_cap is None)  # fmt: skip

    @property
    def needed(self) -> float:
        """GiB that it was predicted to need."""
        return caps.needed_bytes(self.config, self.outcome.strategy, self.outcome.world_size) / caps.GIB


def table(folders: Sequence[Path]) -> str:
    """Make the page: by workload and cap, one row per strategy."""
    tried = [each for run in records.find_runs(folders) if (each := _tried(run.outcome))]
    lines: list[str] = [] if tried else ["No run here had a cap; `zero-study run frontier` makes some.", ""]
    for work, members in groupby(sorted(tried, key=lambda each: each.work), key=lambda each: each.work):
        runs = list(members)
        workload, precision, length, batch, cap, _ = work
        lines += [f"## {cap:g} GiB: {workload}, {precision}, {batch} sequences of {length} tokens a step", ""]
        by_name = {name: [run for run in runs if run.outcome.strategy == name] for name in _names(runs)}
        lines += [*words.markdown(HEAD, [_row(name, mine, runs) for name, mine in by_name.items()]), ""]
        lines += [f"- {each.outcome.run_id}: {each.outcome.status}, {each.outcome.message}"
                  for each in runs if each.outcome.status not in ("ok", "out_of_memory", "skipped")]  # fmt: skip
    found = [file for folder in folders for file in records.find([folder])]
    return words.page("What fits: measured, and predicted", EXPLANATION, lines, "--view fits", folders, found)


def _tried(outcome: Outcome | None) -> Tried | None:
    if outcome is None or outcome.config is None or outcome.config.get("memory_cap") is None:
        return None
    config = RunConfig(**outcome.config)
    return Tried(outcome, config, config.memory_cap or 0.0)


def _names(runs: list[Tried]) -> list[str]:
    return words.in_order(run.outcome.strategy for run in runs)


def _row(name: str, mine: list[Tried], runs: list[Tried]) -> list[str]:
    """What one strategy trained. `runs`: of all strategies, whose sizes are the ladder."""
    trained = max((run for run in mine if run.outcome.status == "ok"), key=_parameters, default=None)
    ended = min((run for run in mine if run.outcome.status == "out_of_memory"), key=_parameters, default=None)
    ladder = sorted({run.config.size: run for run in runs}.values(), key=_parameters)
    like = mine[0]
    asked = [Tried(like.outcome, like.config.model_copy(update={"size": run.config.size}), like.cap) for run in ladder]
    predicted = max((each for each in asked if each.needed <= each.cap), key=_parameters, default=None)
    struck = f" (of {ended.outcome.memory})" if ended and ended.outcome.memory else ""
    return [
        name,
        _shown(trained),
        _shown(ended) + struck,
        _shown(predicted),
        f"{trained.needed:.2f}" if trained else "",
    ]


def _shown(run: Tried | None) -> str:
    return run.config.size if run else "none"


def _parameters(run: Tried) -> int:
    """A size's place, by layers and hidden size: what a GPT's parameters grow with."""
    size = SIZES[run.config.workload][run.config.size]
    return size["layers"] * 12 * size["hidden"] ** 2 + 51_281 * size["hidden"]
