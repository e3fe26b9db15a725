"""The numbers and the pictures of README, and the first picture of the notebook a100-or-h100.

README's first picture shows public runs, which others measured. Its second picture, and the numbers in `NUMBERS`, are
from committed records of this project's runs on CPUs. The picture of the notebook compares models on machines with
GPUs: predictions, measurements by others, and committed records of runs on GPUs if there are any.

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
import pandas as pd
from committed_runs import CPU, learned, of_published_program, releases_with_fault, runs_by_strategy, speeds_by_strategy
from matplotlib.figure import Figure

from study import terminal
from study.claims import defects
from study.compare import frontier, public_comparisons, verdict
from study.files import ROOT
from study.public_runs.schema import PublicRun
from study.records import find as records
from study.report import by_machine, machine_plots, plots, public_figures, sentences

SHOWN = ["ddp", "zero2", "zero2_tuned", "zero3", "zero3_tuned", "fsdp2"]
NAMES = {
    "bert-large": "BERT-large",
    "gpt2-xl": "GPT-2 XL",
    "llama-3.1-8b": "Llama 3.1 8B",
    "qwen2.5-32b": "Qwen2.5 32B",
}
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


def _cap() -> float:
    return min(file.record.config["memory_cap"] for file in records.find([CPU / "equal-memory"]))


@cache
def _ratios(column: str) -> pd.Series:
    """Return a time or rate of each strategy relative to DDP's: the geometric mean over six series of runs."""
    ratios = {name: getattr(row, column) for name, row in speeds_by_strategy().items()}
    return pd.Series({name: frontier.over_series(series)[0] for name, series in ratios.items() if len(series) > 1})


def _of_series(said: str, what: str, strategy: str) -> Number:
    """A time per step at DDP's batch, or a throughput at the largest batch of each, compared with DDP."""
    column = {"time per step": "equal_ratios", "throughput": "own_ratios"}[what]
    return Number(
        said,
        f"{what} of `{strategy}`, compared with DDP",
        "equal-memory-again",
        lambda: f"{_ratios(column)[strategy]:.2f}",
    )


def repaired_time() -> str:
    """Return the step time of the repaired published program with ZeRO, relative to its side without ZeRO."""
    return f"{1 + of_published_program(defects.MENDED, 'time').mean:.2f}"


def _default_bucket() -> str:
    """Millions of elements in the buckets that the measured `zero3` runs had, as their records say."""
    (elements,) = {
        file.record.proof.reduce_bucket_size
        for file in records.find([CPU / "peaks-real"])
        if file.record.strategy == "zero3" and file.record.proof
    }
    return f"{elements / 1e6:g}"


NUMBERS = [
    Number("500", "million elements in the default buckets of `zero3`", "peaks-real", _default_bucket),
    Number("3", "GiB per process: the limit", "equal-memory", lambda: f"{_cap():g}"),
    Number("1.57", "peak of tensors of `zero3`, compared with DDP", "peaks-real", lambda: f"{_of_ddp()['zero3']:.2f}"),
    Number(
        "0.70",
        "peak of tensors of `zero3_tuned`, compared with DDP",
        "peaks-real",
        lambda: f"{_of_ddp()['zero3_tuned']:.2f}",
    ),
    Number("0.56", "peak of tensors of `fsdp2`, compared with DDP", "peaks-real", lambda: f"{_of_ddp()['fsdp2']:.2f}"),
    _of_series("1.36", "time per step", "zero3"),
    Number("124", "million parameters: largest model under 3 GiB, `ddp`", "frontier", lambda: largest_models()["ddp"]),
    Number("110", "the same, `zero3`", "frontier", lambda: largest_models()["zero3"]),
    Number("204", "the same, `zero3_tuned`", "frontier", lambda: largest_models()["zero3_tuned"]),
    Number("229", "the same, `fsdp2`", "frontier", lambda: largest_models()["fsdp2"]),
    _of_series("1.15", "time per step", "zero2_tuned"),
    _of_series("1.55", "time per step", "zero3_tuned"),
    _of_series("0.94", "throughput", "zero2_tuned"),
    _of_series("0.78", "throughput", "zero3_tuned"),
    _of_series("1.37", "time per step", "fsdp2"),
    Number(
        "1.63",
        "time per step of the repaired program's ZeRO side, compared with its plain side",
        "published program",
        repaired_time,
    ),
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
            folders = {
                "conformance": ["[conformance](conformance/README.md)", "", "each cell once"],
                "published program": ["[published program](published-program.md)", "", "1, 5"],
            }
            yield [number.said, number.what, *folders[number.study]]
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


# The comparisons of public runs that README's second screen shows.
CARDS, MORE_NODES, MORE_GPUS = "zero3-a100-h100", "zero3-more-nodes", "one-and-eight-h100-prefix"


@cache
def _public(name: str) -> public_comparisons.Result:
    (comparison,) = (each for each in public_comparisons.comparisons() if each.name == name)
    return public_comparisons.answer(comparison)


def _difference(name: str, quantity: str) -> public_comparisons.Difference:
    (found,) = (each for each in _public(name).differences if each.quantity == quantity)
    return found


def _times(name: str, quantity: str) -> str:
    """Return a ratio of times with its interval."""
    each = _difference(name, quantity)
    assert each.low is not None
    assert each.high is not None
    return f"{1 + each.relative:.2f} times ({1 + each.low:.2f} to {1 + each.high:.2f})"


def public_sentences() -> str:
    """Return the sentences of README about public runs."""
    target, samples = (_difference(MORE_NODES, f"{noun} to the target").relative for noun in ("seconds", "samples"))
    losses = [each for each in _public(MORE_GPUS).differences if each.quantity.startswith("evaluation loss")]
    assert all(each.verdict.startswith("within the margin") for each in losses)
    furthest = max(losses, key=lambda each: abs(each.relative))
    tensors, reserved = (_difference(MORE_GPUS, name).relative for name in ("peak of tensors", "peak reserved"))
    interval = " to ".join(f"{100 * (bound or 0.0):+.2f} %" for bound in (furthest.low, furthest.high))
    lines = [
        "**A100 against H100 under ZeRO-3 (1):** an A100 takes "
        f"{_times(CARDS, 'GPU seconds per sample')} as long per sample as an H100. These are ten runs each on 64 A100 "
        "with 2 x 200 Gbit/s Ethernet and on 32 H100 with 2 x 400 Gbit/s, without the time of evaluations.",
        "**8 against 32 H100 under ZeRO-3 (1):** per sample, a GPU takes "
        f"{_times(MORE_NODES, 'GPU seconds per sample')} as long on four nodes as on one. But each GPU brings its own "
        f"sequence, so the batch is four times as large. The training then needs {1 + samples:.2f} times as many "
        f"samples to reach the target of the benchmark, and takes {1 + target:.2f} times as long (ten runs each).",
        "**1 against 8 H100, one program and one batch (modded-nanogpt):** with gradients and optimizer states sharded "
        f"over 8 GPUs, the held-out loss differs by at most {terminal.percent(abs(furthest.relative))} at "
        f"{len(losses)} evaluations (widest interval: {interval}), less than repeats differ. The 8 GPUs need "
        f"{terminal.percent(_difference(MORE_GPUS, 'GPU seconds').relative)} more GPU time. The peak of tensors is "
        f"{terminal.percent(-tensors)} lower per GPU, and reserved memory {terminal.percent(-reserved)} (ten runs "
        "each; PyTorch 2.11 on one GPU, 2.10 on eight). In an earlier version of the program, with five runs on one "
        "GPU, repeats differ too much at one of the evaluations.",
    ]
    return sentences.bullets(lines)


def public_picture(ink: str) -> Figure:
    """Draw README's first picture: the held-out losses of trainings under ZeRO-3, by time and by samples."""
    groups: dict[str, list[PublicRun]] = {}
    for name in (MORE_NODES, CARDS):
        groups |= public_comparisons.groups(_public(name).comparison)
    title = "ZeRO-3, measured by others: Juniper Networks,\nMLPerf® Training 4.0 Llama 2 70B LoRA (unverified)"
    return public_figures.curves(groups, "evaluation_loss", ("hours", "samples"), ink, title)


def main() -> None:
    """Write the pictures to reports/, for light and dark pages. Equal inputs make equal bytes."""
    mpl.rcParams["svg.hashsalt"] = "zero-study"
    for ground, ink in INKS.items():
        pictures = {
            "first": first_picture(ink),
            "public": public_picture(ink),
            "measured": plots.first_screen(peaks(), times(), ink, TITLE),
        }
        for name, figure in pictures.items():
            path = ROOT / "reports" / f"{name}-{ground}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
