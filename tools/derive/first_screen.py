"""The numbers and answers of README, and the picture of reports/memory-and-time.md.

Both are from committed records: README's answers from public runs, and the rest from this project's runs on CPUs.

python tools/derive/first_screen.py    # draws the picture, once for light and once for dark pages
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

import committed_runs
import matplotlib as mpl
import pandas as pd
from committed_runs import CPU, learned, releases_with_fault, runs_by_strategy, speeds_by_strategy

from study.compare import frontier, verdict
from study.records import find as records
from study.report import plots, public_answers, sentences
from zero_study import terminal
from zero_study.conformance import results
from zero_study.files import ROOT

SHOWN = ["ddp", "zero2", "zero2_tuned", "zero3", "zero3_tuned", "fsdp2"]
INKS = {"light": "#1f2328", "dark": "#e6edf3"}
TITLE = "GPT with 124 million parameters, fp32,\ntwo processes on a CPU (measured)"


class Number(NamedTuple):
    """One number of README, and the function that computes it from records."""

    said: str
    what: str
    study: str  # a folder of committed records, or of conformance
    found: Callable[[], str]


def _strategies() -> list[verdict.Arm]:
    return [arm for arm in learned().verdict.arms if not arm.is_broken]


def largest_difference() -> str:
    """Return the largest difference between a strategy's final loss and DDP's."""
    return terminal.percent(max(abs(difference) for arm in _strategies() for difference in arm.differences.values()))


def variants_of_ddp() -> str:
    """Return the largest difference between the losses of two DDP trainings that differ only in rounding."""
    null = learned().verdict.null
    return terminal.percent(max(abs(difference) for arm in null.values() for difference in arm.values()))


@cache
def _of_ddp() -> pd.Series:
    """Return the peak of each strategy, divided by DDP's."""
    return peaks() / peaks()["ddp"]


@cache
def _ratios(column: str) -> pd.Series:
    """Return a time or rate of each strategy relative to DDP's: the geometric mean over six series of runs."""
    ratios = {name: getattr(row, column) for name, row in speeds_by_strategy().items()}
    return pd.Series({name: frontier.mean_over_series(series)[0] for name, series in ratios.items() if len(series) > 1})


def _of_peaks(said: str, strategy: str) -> Number:
    """A peak compared with DDP's."""
    what = f"peak memory of tensors, `{strategy}` divided by DDP"
    return Number(said, what, "peaks-real", lambda: f"{_of_ddp()[strategy]:.2f}")


def _of_series(said: str, what: str, strategy: str) -> Number:
    """A time per step at DDP's batch, or a throughput at the largest batch of each, compared with DDP."""
    column = {"time per step": "equal_ratios", "throughput": "own_ratios"}[what]
    return Number(
        said,
        f"{what} of `{strategy}`, compared with DDP",
        "equal-memory-again",
        lambda: f"{_ratios(column)[strategy]:.2f}",
    )


def largest_trained() -> str:
    """Return the number of parameters of the largest model that one of our runs trained, in millions."""
    return f"{max(file.record.num_params or 0 for file in records.find([CPU]) if file.record.status == 'ok') / 1e6:.0f}"


def parameters_of_bits() -> str:
    """Return the number of parameters of the GPT of the study `bits`, in millions."""
    (count,) = {
        run.num_params
        for run in (file.record for file in records.find([CPU / "bits"]))
        if run.workload == "gpt-wikitext"
    }
    return f"{count / 1e6:.1f}"


NUMBERS = [
    Number("1.6", "million parameters of the GPT whose weights were compared", "bits", parameters_of_bits),
    Number("617", "million parameters of the largest model that we trained", "frontier", largest_trained),
    _of_peaks("0.56", "fsdp2"),
    _of_peaks("1.57", "zero3"),
    _of_peaks("0.70", "zero3_tuned"),
    Number("124", "million parameters of DDP's largest model under 3 GiB", "frontier", lambda: largest_models()["ddp"]),
    _of_series("1.37", "time per step", "fsdp2"),
    Number(
        "0.17.2 to 0.17.5",
        "releases that almost stop training",
        "conformance",
        lambda: releases_with_fault("autocast-norm"),
    ),
    Number(
        "0.17.6 to 0.18.2",
        "releases that lose gradients",
        "conformance",
        lambda: releases_with_fault("zero2-accumulation"),
    ),
    Number(
        "0.18.3 to 0.19.5",
        "releases that divide gradients twice",
        "conformance",
        lambda: releases_with_fault("outputs-of-outputs"),
    ),
]


def table() -> Iterable[list[str]]:
    """Yield a row for each number: its meaning, study and date, and the numbers of seeds and repeats."""
    for number in NUMBERS:
        folder = CPU / number.study
        if not folder.exists():
            yield [number.said, number.what, "[conformance](conformance/README.md)", "", "each setting once"]
            continue
        strategies = re.findall(r"`(\w+)`", number.what)
        runs = [file.record for file in records.find([folder]) if not strategies or file.record.strategy in strategies]
        alike = Counter(f"{run.strategy} {run.world_size} {dict(run.config, output_dir='')}" for run in runs)
        seeds = len({run.seed for run in runs})
        study, measured = (
            f"[{number.study}](../study/studies/{number.study}.yaml)",
            max(run.started_at for run in runs),
        )
        yield [number.said, number.what, study, measured[:10], f"{seeds}, {max(alike.values())}"]


def peaks() -> pd.Series:
    """Return the peak memory of tensors by strategy, in GiB, of the process that uses the most."""
    return runs_by_strategy("124m")["peak_gib"].reindex(SHOWN)


def times() -> pd.Series:
    """Return step times by strategy at DDP's batch, relative to the nearest DDP runs: means over six series."""
    return _ratios("equal_ratios").reindex(SHOWN).fillna({"ddp": 1.0})


def throughputs() -> pd.Series:
    """Throughput at each strategy's largest batch under 3 GiB relative to DDP's: geometric means over six series."""
    return pd.concat([pd.Series({"ddp": 1.0}), _ratios("own_ratios")])


def largest_models() -> dict[str, str]:
    """Millions of parameters of the largest model that trained under 3 GiB per process, by strategy."""
    return {
        name: str(size).removesuffix("m")
        for (cap_gib, name), size in committed_runs.largest_models().items()
        if cap_gib == 3
    }


def public_sentences() -> str:
    """Return the sentences of README about public runs on A100 and H100."""
    return sentences.bullets(public_answers.in_short())


FAULTS = "docs/releases.md#faults-of-deepspeed-0198"


def release() -> str:
    """Return README's sentence about the newest release that was tested, and the releases to avoid."""
    newest = list(results.read("deepspeed"))[-1]
    first, last = releases_with_fault("autocast-norm").split(" ")[0], releases_with_fault("outputs-of-outputs")
    return (
        f"Use DeepSpeed {newest}, the newest release that we tested, except for [a few settings]({FAULTS}). Avoid "
        f"{first} to {last.split(' ')[-1]}, which train incorrectly with common settings:"
    )


def main() -> None:
    """Write the picture to reports/, for light and dark pages. Equal inputs make equal bytes."""
    mpl.rcParams["svg.hashsalt"] = "zero-study"
    for ground, ink in INKS.items():
        measured = plots.first_screen(peaks(), times(), ink, TITLE)
        measured.savefig(ROOT / "reports" / f"measured-{ground}.svg", facecolor="none", metadata={"Date": None})


if __name__ == "__main__":
    main()
