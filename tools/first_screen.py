"""The numbers and the pictures of README.

The first picture compares models on machines with GPUs: predictions, measurements by others, and committed records of
runs on GPUs if there are any. The second picture and all numbers are from committed records of runs on CPUs.

python tools/first_screen.py    # draws both pictures, once for light and once for dark pages
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from study import formatting
from study.claims import defects
from study.compare import frontier, verdict, verdict_text
from study.engines.conformance import committed
from study.records import find as records
from study.report import by_machine, machine_plots, plots, sentences, tables
from study.running import studies

ROOT = Path(__file__).resolve().parents[1]
CPU = ROOT / "reports" / "cpu" / "records"
PROTOCOL = ROOT / "reports" / "cpu" / "published" / "protocol.json"
SHOWN = ["ddp", "zero2", "zero2_tuned", "zero3", "zero3_tuned", "fsdp2"]
NAMES = {
    "bert-large": "BERT-large",
    "gpt2-xl": "GPT-2 XL",
    "llama-3.1-8b": "Llama 3.1 8B",
    "qwen2.5-32b": "Qwen2.5 32B",
}
INKS = {"light": "#1f2328", "dark": "#e6edf3"}
TITLE = "GPT with 124 million parameters, fp32,\ntwo processes on a CPU (measured)"
SETTING = {"workload": "gpt-wikitext", "size": "124m", "precision": "fp32", "processes": 2, "seed": 0, "status": "ok"}


class Number(NamedTuple):
    """One number of README, and the function that computes it from records."""

    said: str
    what: str
    study: str  # a folder of committed records, or of conformance
    found: Callable[[], str]


@cache
def learned(study: str = "learned") -> verdict_text.Decided:
    """Return the verdict of a study that compares what is learned."""
    return verdict_text.decide([CPU / study, CPU / "learned-release"], studies.find(study))


def _strategies() -> list[verdict.Arm]:
    return [arm for arm in learned().verdict.arms if not arm.is_broken]


def largest_difference() -> str:
    """Return the largest difference between a strategy's final loss and DDP's."""
    return formatting.percent(max(abs(difference) for arm in _strategies() for difference in arm.differences.values()))


def variants_of_ddp() -> str:
    """Return the largest difference between the losses of two DDP trainings that differ only in rounding."""
    null = learned().verdict.null
    return formatting.percent(max(abs(difference) for arm in null.values() for difference in arm.values()))


@cache
def _of_ddp() -> pd.Series:
    """Return the peak of each strategy, divided by DDP's."""
    return peaks() / peaks()["ddp"]


def _cap() -> float:
    return min(file.record.config["memory_cap"] for file in records.find([CPU / "equal-memory"]))


@cache
def _trained() -> dict[str, str]:
    return {row.strategy: str(row.trained) for row in frontier.largest([CPU / "frontier"]) if row.cap_gib == 3}


@cache
def _ratios(column: str) -> pd.Series:
    """Return a time or rate of each strategy relative to DDP's: the geometric mean over six series of runs."""
    rows = frontier.speeds([CPU / "equal-memory-again"])
    ratios = {row.strategy: getattr(row, column) for row in rows}
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
    effect = defects.effect(defects.read(PROTOCOL), defects.MENDED, "time")
    return f"{1 + effect.mean:.2f}"


def _wrong(fault_id: str) -> str:
    (fault,) = (fault for fault in committed.faults() if fault.id == fault_id)
    return f"{fault.first} to {fault.last}"


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
    Number("6 %", "largest difference of a run's loss from DDP", "learned", largest_difference),
    Number("10 %", "largest difference between two DDP trainings", "learned", variants_of_ddp),
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
    Number("124", "million parameters: largest model under 3 GiB, `ddp`", "frontier", lambda: _trained()["ddp"][:-1]),
    Number("110", "the same, `zero3`", "frontier", lambda: _trained()["zero3"][:-1]),
    Number("204", "the same, `zero3_tuned`", "frontier", lambda: _trained()["zero3_tuned"][:-1]),
    Number("229", "the same, `fsdp2`", "frontier", lambda: _trained()["fsdp2"][:-1]),
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
    Number("0.17.6 to 0.18.2", "releases that lose gradients", "conformance", lambda: _wrong("zero2-accumulation")),
    Number(
        "0.18.3 to 0.19.5", "releases that divide gradients twice", "conformance", lambda: _wrong("outputs-of-outputs")
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
    runs = plots.only(tables.runs(CPU / "peaks-real"), **SETTING, strategy=SHOWN)
    return runs.set_index("strategy")["peak_gib"]


def times() -> pd.Series:
    """Return step times by strategy at DDP's batch, relative to the nearest DDP runs: means over six series."""
    return _ratios("equal_ratios").reindex(SHOWN).fillna({"ddp": 1.0})


def throughputs() -> pd.Series:
    """Throughput at each strategy's largest batch under 3 GiB relative to DDP's: geometric means over six series."""
    return pd.concat([pd.Series({"ddp": 1.0}), _ratios("own_ratios")])


def largest_models() -> dict[str, str]:
    """Millions of parameters of the largest model that trained under 3 GiB per process, by strategy."""
    return {name: trained[:-1] for name, trained in _trained().items()}


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


def first_sentences() -> str:
    """Return the sentences of README about the first picture."""
    compared, (one, _, eight, _) = on_machines(), [f"{count} x {gpu}" for gpu, count in by_machine.MACHINES]
    is_measured = (compared.best[["memory_source", "speed_source"]] == by_machine.MEASURED).any(axis=None)
    source = "The following numbers are predicted, not measured."
    if is_measured:
        source = "The following numbers are predicted, except those that the picture marks as measured by this project."
    lines = [sentences.fitting(compared.best, by_machine.MODELS, machine) for machine in (one, eight)]
    lines.append(sentences.faster_and_cheaper(compared.best, one, eight))
    return f"{source}\n\n{sentences.bullets(map(_in_words, lines))}"


def _in_words(sentence: str) -> str:
    """Return a sentence in which models, machines and strategies have the names of the picture."""
    machines = {"1 x a100-80gb": "one A100", "8 x h100-sxm": "eight H100"}
    strategies = {f"`{name}`": words for name, words in machine_plots.WORDS.items()}
    for name, words in {**machines, **NAMES, **strategies}.items():
        sentence = sentence.replace(name, words)
    return sentence[0].upper() + sentence[1:]


def main() -> None:
    """Write first-*.svg and measured-*.svg in reports/, for light and dark pages. Equal inputs make equal bytes."""
    mpl.rcParams["svg.hashsalt"] = "zero-study"
    for ground, ink in INKS.items():
        pictures = {"first": first_picture(ink), "measured": plots.first_screen(peaks(), times(), ink, TITLE)}
        for name, figure in pictures.items():
            path = ROOT / "reports" / f"{name}-{ground}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
