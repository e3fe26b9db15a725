"""The numbers and the picture of README, and pictures of the notebook a100-or-h100 and of reports/memory-and-time.md.

README's picture shows predictions: the memory of one model under each strategy. The numbers in `NUMBERS`, and the
picture of reports/memory-and-time.md, are from committed records of this project's runs on CPUs. The picture of the
notebook compares models on machines with GPUs: predictions, measurements by others, and committed records of runs on
GPUs if there are any.

python tools/derive/first_screen.py    # draws the pictures, once for light and once for dark pages
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

import committed_runs
import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
from committed_runs import CPU, learned, releases_with_fault, runs_by_strategy, speeds_by_strategy
from matplotlib.figure import Figure
from wording import STRATEGY_NAMES

from study.compare import frontier, verdict
from study.records import find as records
from study.report import by_machine, machine_plots, plots, public_answers, sentences
from zero_study import planner, terminal
from zero_study.conformance import results
from zero_study.files import ROOT
from zero_study.planner.choose import Advice, StrategyPrediction

SHOWN = ["ddp", "zero2", "zero2_tuned", "zero3", "zero3_tuned", "fsdp2"]
NAMES = {
    "bert-large": "BERT-large",
    "gpt2-xl": "GPT-2 XL",
    "llama-3.1-8b": "Llama 3.1 8B",
    "qwen2.5-32b": "Qwen2.5 32B",
}
INKS = {"light": "#1f2328", "dark": "#e6edf3"}
PAPERS = {"light": "#ffffff", "dark": "#0d1117"}  # of a picture that is readable when it is shared alone
FITS_COLOR, LACKS_COLOR = "#2E86D0", "#D55E00"
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


@cache
def on_machines() -> by_machine.Comparison:
    """Return the comparison that the first picture shows: its models and machines are the defaults of `by_machine`."""
    return by_machine.compare()


def first_picture(ink: str) -> Figure:
    """Draw the first picture. Its headings and its title name the models, the precision and the kinds of figures."""
    compared = on_machines()
    headings = {}
    for (model, _), advice in compared.advices.items():
        size = f"{advice.shape.num_params / 1e9:.2g} billion" if advice.shape.num_params > 1e9 else ""
        size = size or f"{advice.shape.num_params / 1e6:.0f} million"
        headings[model] = f"{NAMES[model]}: {size} parameters, {advice.request.sequence_length:,} tokens"
    kinds = by_machine.kinds(compared.rows, compared.others)
    title = textwrap.fill(f"Training in bf16 on A100 (80 GB) and H100 GPUs: {kinds}", 52)
    return machine_plots.overview(compared.rows, compared.others, compared.best, headings, ink, title)


def public_sentences() -> str:
    """Return the sentences of README about public runs on A100 and H100."""
    lines = [
        f"**A100 and H100:** {public_answers.cards()}",
        f"**One GPU and two:** {public_answers.one_and_two()}",
        f"**One GPU and eight:** {public_answers.eight()}",
        f"**DDP and ZeRO,** on 8 A100, by Lightning's developers in 2021 (one run each): {public_answers.lightning()}",
    ]
    return sentences.bullets(lines)


# README's question.
MODEL, MODEL_NAME, GPU, NUM_GPUS = "llama-3.1-8b", "Llama 3.1 8B", "h100", 8


@cache
def advice() -> Advice:
    """Return what `zero-study advise --model llama-3.1-8b --gpu h100 --gpus 8` answers."""
    return planner.advise(MODEL, planner.Request(gpu=GPU, num_gpus=NUM_GPUS))


def shown_options() -> dict[str, StrategyPrediction]:
    """Return the rows of the answer to README's question that its picture shows."""
    return _by_strategy(advice())


def shown_best() -> StrategyPrediction:
    """Return the recommended row."""
    best = advice().recommended
    assert best is not None
    return best


def _by_strategy(answer: Advice) -> dict[str, StrategyPrediction]:
    options = {option.strategy.name: option for option in answer.options}
    return {name: options[name] for name in STRATEGY_NAMES}


def _dollars(option: StrategyPrediction) -> float:
    dollars = option.prediction.dollars_per_billion_tokens
    assert dollars is not None
    return dollars


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"


def usable_gib() -> str:
    """Return the usable memory of a GPU of README's question."""
    return _gib(advice().options[0].prediction.usable_bytes)


def strategies_picture(ink: str) -> Figure:
    """Draw README's picture: memory, time and price of training one model under each strategy, and the GPU's limit.

    The figure is narrow and its letters are large, so that the letters are more than 10 pixels high on a phone.
    """
    options = shown_options()
    needed = [option.needed_bytes / 2**30 for option in options.values()]
    figure, axes = plt.subplots(figsize=(4.5, 2.75), layout="constrained")
    colors = [FITS_COLOR if option.fits else LACKS_COLOR for option in options.values()]
    bars = axes.barh([STRATEGY_NAMES[name] for name in options], needed, color=colors, height=0.68)
    limit = float(usable_gib())
    for bar, size, option in zip(bars, needed, options.values(), strict=True):
        place = bar.get_y() + bar.get_height() / 2
        axes.text(size - 2, place, f"{size:.1f}", color="white", fontsize=11, ha="right", va="center")
        note = f"{option.seconds:.2f} s, ${_dollars(option):,.0f}" if option.fits else "too large"
        note += ": recommended" if option is shown_best() else ""
        axes.text(max(size, limit) + 3, place, note, color=ink, fontsize=11, va="center")
    axes.axvline(limit, color=ink, linewidth=1.2, linestyle="--")
    axes.set_xlim(0, max(needed) * 1.25)
    axes.invert_yaxis()
    axes.tick_params(colors=ink, labelsize=11, bottom=False, labelbottom=False, left=False)
    axes.spines[:].set_visible(False)
    title = f"Training {MODEL_NAME} on {NUM_GPUS} H100 (predicted)"
    figure.suptitle(title, color=ink, fontsize=11.5, fontweight="bold", x=0.01, ha="left")
    legend = f"Bars: GiB per GPU. Dashed line: usable memory ({limit} GiB).\n"
    legend += "Right: time per step, and price of a billion tokens.\n"
    legend += "Batches: the fastest that fit (ZeRO-1: a smaller one)."
    figure.supxlabel(legend, color=ink, fontsize=10.5, x=0.01, ha="left")
    plt.close(figure)
    return figure


def picture() -> str:
    """Return README's picture with a text that says the same."""
    parts = [
        f"{STRATEGY_NAMES[name]} {_gib(option.needed_bytes)} GiB"
        + (f", {option.seconds:.2f} s, ${_dollars(option):,.0f}" if option.fits else " (does not fit)")
        for name, option in shown_options().items()
    ]
    text = f"Predictions for training {MODEL_NAME} on {NUM_GPUS} H100: memory per GPU, time per step and price of a "
    text += f"billion tokens. {'; '.join(parts)}"
    text += f". Usable memory of a GPU: {usable_gib()} GiB"
    return "\n".join(
        [
            "<picture>",
            '  <source media="(prefers-color-scheme: dark)" srcset="reports/strategies-dark.svg">',
            f'  <img src="reports/strategies-light.svg" alt="{text}" width="500">',
            "</picture>",
        ]
    )


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
    """Write the pictures to reports/, for light and dark pages. Equal inputs make equal bytes."""
    mpl.rcParams["svg.hashsalt"] = "zero-study"
    for ground, ink in INKS.items():
        pictures = {
            "first": first_picture(ink),
            "strategies": strategies_picture(ink),
            "measured": plots.first_screen(peaks(), times(), ink, TITLE),
        }
        for name, figure in pictures.items():
            path = ROOT / "reports" / f"{name}-{ground}.svg"
            paper = PAPERS[ground] if name == "strategies" else "none"
            figure.savefig(path, facecolor=paper, metadata={"Date": None})


if __name__ == "__main__":
    main()
