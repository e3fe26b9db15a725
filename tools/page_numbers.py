"""Write the numbers in the sentences of guides, from the records and from the planner.

A number, or the words around several numbers, lie between two comments such as `<!-- peaks -->` and `<!-- /peaks -->`
within a line. tools/docs_tables.py does the same for whole tables.

    python tools/page_numbers.py
"""

from __future__ import annotations

import json
import math
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import docs_tables
import doctor_observed
import first_hour
import first_screen
import numpy as np
import one_gpu
import pandas as pd
from docs_tables import CPU, FRONTIER, ROOT, benchmark

from study.claims import defects, ledger, verdicts
from study.compare import bits, frontier
from study.compare.communication_views import NetworkCell, network_cells
from study.conformance import committed
from study.planner import public_errors, published_rows
from study.records import find as records
from study.records.steps import steps_of
from study.report import plots, tables
from study.running import estimate, studies
from study.strategy.file import names as strategy_names
from study.terminal import scientific
from study.theory import hardware, measured_by_others, prediction

DRY_RUNS = ROOT / "reports" / "dry_run"
# Their buffers are as large as the gradients or smaller, so that every page of them is written.
WITHOUT_DEFAULT_BUFFERS = ("single", "ddp", "ddp_tuned", "zero2_tuned", "zero3_tuned", "fsdp2")
# Families of published rows that ran out of memory and were added after the margin for the allocator was chosen.
AFTER_THE_MARGIN = ("torchtitan 2024", "lightning-thunder checkpointing", "LLaMA-Factory out of memory")


def whole_percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def one_of(texts: Iterable[str]) -> str:
    """Return the text that all of them have in common."""
    (text,) = {*texts}
    return text


def percents(shares: Iterable[float]) -> str:
    """Return the different percentages of several shares."""
    return " and ".join(dict.fromkeys(map(whole_percent, shares)))


def span(values: Iterable[float], digits: int = 1) -> str:
    """Return the smallest and the largest value."""
    values = list(values)
    return " to ".join(dict.fromkeys(f"{value:.{digits}f}" for value in (min(values), max(values))))


def off(error: float) -> str:
    """Say by how much a predicted value differs from a measured one."""
    return f"{whole_percent(abs(error))} too {'low' if error < 0 else 'high'}"


def median_and_worst(errors: Iterable[float]) -> str:
    errors = list(errors)
    median = whole_percent(statistics.median(map(abs, errors)))
    return f"a median error of {median}, and the worst value is {off(max(errors, key=abs))}"


def number_of(part: int, whole: int) -> str:
    """Return a number of cases out of all cases."""
    return f"all {whole}" if part == whole else f"{part} of {whole}"


# ---------------------------------------------------------------- formulas and this project's runs


def exact_states() -> str:
    """Count the runs whose model states are predicted within 0.001 %."""
    inexact = [error for error in docs_tables.against_theory().states if abs(error.error) > docs_tables.EXACT]
    return f"{len(docs_tables.runs()) - len(inexact):,} of {len(docs_tables.runs()):,}"


def close_peaks() -> str:
    """Count the runs whose peak of tensors is predicted within 5 %."""
    peaks = [error.error for error in docs_tables.against_theory().peaks]
    return f"{docs_tables.close(peaks):,} of {len(peaks):,}"


@cache
def errors_of_real_peaks() -> dict[str, float]:
    """Return the error of the predicted peak of each run of `peaks-real`."""
    peaks = docs_tables.against_theory().peaks
    return {error.run: error.error for error in peaks if error.run.startswith("peaks-real/")}


def real_peaks() -> str:
    """Say how well the peaks of `peaks-real` are predicted."""
    errors = [abs(error) for error in errors_of_real_peaks().values()]
    return (
        f"The median error is {docs_tables.percent(statistics.median(errors))}. In {docs_tables.close(errors)} of the "
        f"{len(errors)} runs the error is at most 5 %, and the worst error is {whole_percent(max(errors))}."
    )


def worst_real_peak() -> str:
    """Name the run of `peaks-real` whose peak is predicted worst."""
    run, error = max(errors_of_real_peaks().items(), key=lambda item: abs(item[1]))
    return f"{off(error)} (`{run}`)"


def zero2_in_bf16() -> str:
    """Return the errors of the predicted peaks of ZeRO-2 with default buffers in bf16."""
    errors = [error for run, error in errors_of_real_peaks().items() if "-zero2-" in run and run.endswith("-bf16")]
    return f"{span((100 * error for error in errors), 0)} %"


# ---------------------------------------------------------------- memory and largest models


def peak_ratio(
    size: str, strategy: str, precision: str = "fp32", processes: int = 2, column: str = "peak_gib"
) -> float:
    """Return a peak of `peaks-real` divided by DDP's."""
    runs = plots.filter_runs(docs_tables.peak_runs(), size=size, precision=precision, processes=processes)
    peaks = runs.set_index("strategy")[column]
    return float(peaks[strategy] / peaks["ddp"])


def tuned_zero3_below_fsdp2() -> str:
    """Return the largest share that tuned ZeRO-3 saves compared with FSDP2, on four processes in bf16."""
    runs = plots.filter_runs(docs_tables.peak_runs(), precision="bf16", processes=4)
    peaks = runs.pivot(index="size", columns="strategy", values="peak_gib")
    return whole_percent(float((1 - peaks["zero3_tuned"] / peaks["fsdp2"]).max()))


def beside_tensors() -> str:
    """Return the least and the most memory of a process that is not in tensors."""
    runs = docs_tables.peak_runs()
    runs = runs[runs["strategy"].isin(WITHOUT_DEFAULT_BUFFERS)]
    rest = runs["peak_process_gib"] - runs["peak_gib"]
    return f"{rest.min():.1f} to {rest.max():.1f} GiB"


@cache
def largest_models() -> dict[tuple[float, str], float]:
    """Return the millions of parameters of the largest model that trained, by limit and strategy."""
    return {(row.cap_gib, row.strategy): tables.millions(row.trained) for row in frontier.largest([FRONTIER])}


def largest_model(cap_gib: int, *strategies: str) -> str:
    """Return the millions of parameters of the largest model, which is the same for all of these strategies."""
    return one_of(f"{largest_models()[cap_gib, name]:.0f}" for name in strategies)


def more_parameters(*strategies: str) -> list[str]:
    """Say by how many percent the largest model of a strategy is larger than DDP's under 3 and under 6 GiB.

    Several strategies must have the same largest models.
    """
    sizes = largest_models()
    shares = {
        tuple(whole_percent(sizes[cap_gib, name] / sizes[cap_gib, "ddp"] - 1) for cap_gib in (3, 6))
        for name in strategies
    }
    (under_both_limits,) = shares
    return [*under_both_limits]


def more_parameters_than_ddp(*strategies: str) -> str:
    low, high = more_parameters(*strategies)
    return f"{low} more parameters than the largest model of DDP under 3 GiB, and {high} more under 6 GiB"


def more_parameters_in_short() -> str:
    low, high = more_parameters("zero1", "zero2")
    return f"{low} more parameters with 3 GiB per process, {high} more with 6 GiB"


def saved_in_bf16() -> str:
    """Say how much less memory than DDP ZeRO-2 and ZeRO-3 need in bf16."""

    def less(strategy: str, size: str) -> str:
        return whole_percent(1 - peak_ratio(size, strategy, "bf16"))

    return (
        f"ZeRO-2 needs {less('zero2', 'large')} less memory for BERT-large, and {less('zero2', '124m')} less for the "
        f"GPT of 124 million parameters. ZeRO-3 needs {less('zero3', 'large')} less memory for BERT-large, and "
        f"{less('zero3', '124m')} less for the GPT"
    )


def with_offload() -> str:
    """Say how much memory a whole process needs under ZeRO-2 with offload to the CPU, and without it."""
    peaks = plots.filter_runs(docs_tables.peak_runs(), size="124m", precision="fp32", processes=2)
    gib = peaks.set_index("strategy")["peak_process_gib"]
    return (
        f"{gib['zero2_cpu_offload']:.2f} GiB under ZeRO-2 with CPU offload, and {gib['zero2']:.2f} GiB under ZeRO-2 "
        "without offload"
    )


def ddp_without_buckets() -> str:
    """Give the peak of DDP with `gradient_as_bucket_view`, and compare it with DDP."""
    peaks = plots.filter_runs(docs_tables.peak_runs(), size="124m", precision="fp32", processes=2)
    gib = peaks.set_index("strategy")["peak_gib"]
    return f"{gib['ddp_tuned']:.2f} GiB ({gib['ddp_tuned'] / gib['ddp']:.2f} times the memory of DDP)"


# ---------------------------------------------------------------- adapters


def adapters(size: str, kind: str = "lora", column: str = "peak_gib") -> pd.Series:
    """Return the values of a column of the study `lora`, by strategy."""
    return plots.filter_runs(docs_tables.adapter_runs(), size=size, kind=kind).set_index("strategy")[column]


def saved_with_adapters(size: str, *strategies: str) -> list[float]:
    """Return the share of DDP's peak that each strategy saves if an adapter is trained."""
    peaks = adapters(size)
    return [1 - peaks[name] / peaks["ddp"] for name in strategies]


def sent_with_adapters(*strategies: str) -> list[float]:
    """Return the bytes that strategies send for an adapter, divided by those that they send for all weights."""
    column = "sent_gib_per_step"
    shares = pd.concat(adapters(size, "lora", column) / adapters(size, "whole", column) for size in ("124m", "large"))
    return [100 * share for name, share in shares.dropna().items() if name in strategies]


def less_with_sharded_adapters() -> str:
    """Return a bound of what ZeRO-2 saves compared with DDP if an adapter is trained."""
    trained = ("124m", "lora"), ("124m", "in_4_bits"), ("large", "lora")
    ratios = [peaks["zero2_tuned"] / peaks["ddp"] for peaks in (adapters(*each) for each in trained)]
    return f"less than {math.ceil(100 * (1 - min(ratios)))} %"


def adapters_in_default_buckets() -> str:
    peaks = adapters("124m")
    return span(peaks[name] / peaks["ddp"] for name in ("zero1", "zero2", "zero3"))


def adapters_of_gpt() -> str:
    """Compare the peaks of the GPT with all weights and with an adapter."""
    whole, lora, in_4_bits = (adapters("124m", kind) for kind in ("whole", "lora", "in_4_bits"))
    return (
        f"from {whole['ddp']:.2f} to {lora['ddp']:.2f} GiB, and with weights in 4 bits to {in_4_bits['ddp']:.2f} GiB. "
        f"FSDP2 with all weights needs {whole['fsdp2']:.2f} GiB"
    )


def adapters_in_bf16() -> str:
    peaks = 1024 * adapters("124m", "bf16")
    *first, last = (f"{peaks[name]:.0f} MiB under `{name}`" for name in ("zero2_tuned", "zero3_tuned", "fsdp2"))
    return f"{', '.join(first)}, and {last}"


def errors_of_adapters() -> str:
    """Say how well the peaks of the study `lora` are predicted."""
    errors = [error for error in docs_tables.against_theory().peaks if error.run.startswith("lora/")]
    within = number_of(sum(abs(error.error) <= docs_tables.NEARLY_EXACT for error in errors), len(errors))
    worst = max(errors, key=lambda error: abs(error.error))
    return f"{within} peaks of these runs within 1 %. The worst prediction is {off(worst.error)} (`{worst.run}`)"


def against_llama_factory() -> str:
    """Compare the predicted peaks with LLaMA-Factory's table."""
    (source,) = (each for each in ledger.read() if each.source == "llama-factory")
    found = verdicts.read()
    claims = [claim for claim in source.claims if found[claim.id].by == "theory"]
    errors = [found[claim.id].observed.value / claim.expected.value - 1 for claim in claims]
    return (
        f"the {len(errors)} predicted peaks of full training, LoRA and QLoRA lie between {whole_percent(-min(errors))} "
        f"below and {whole_percent(max(errors))} above"
    )


# ---------------------------------------------------------------- times and messages


def step_time(strategy: str) -> str:
    """Return a step time compared with DDP: the mean over all series of runs."""
    return f"{first_screen.times()[strategy]:.2f}"


def interval_of_time(strategy: str) -> str:
    (ratios,) = (row.equal_ratios for row in frontier.speeds([CPU / "equal-memory-again"]) if row.strategy == strategy)
    return span(frontier.over_series(ratios)[1:], 2)


def identical_runs(strategy: str) -> str:
    """Return the largest difference between the times of identical runs of `cpu-time`."""
    runs = plots.filter_runs(tables.runs(CPU / "cpu-time"), status="ok", strategy=strategy)
    seconds = runs["step_seconds"].groupby(runs["run"].str.replace(r"-repeat\d+", "", regex=True))
    return whole_percent(float((seconds.max() / seconds.min() - 1).max()))


def sent(strategy: str) -> float:
    """Return the bytes that a step of the GPT sends, divided by the bytes of all parameters."""
    runs = plots.filter_runs(docs_tables.peak_runs(), size="124m", precision="fp32", processes=2, strategy=strategy)
    (run,) = runs.itertuples()
    return float(run.sent_gib_per_step * 2**30 / (4 * run.parameters))


def sent_bytes(*strategies: str) -> str:
    return one_of(f"{sent(name):.2f}" for name in strategies)


@cache
def on_a_network() -> list[tuple[NetworkCell, float]]:
    """Return the results of the study `network`, each with its step time compared with DDP on the same network."""
    cells = network_cells(records.find([CPU / "network"]))
    ddp = {(cell.layout, cell.rate): cell.median_seconds for cell in cells if cell.strategy == "ddp"}
    return [(cell, cell.median_seconds / ddp[cell.layout, cell.rate]) for cell in cells if cell.strategy != "ddp"]


def one_rank_per_machine() -> str:
    """Return the shortest step time of all strategies with one rank per machine, compared with DDP."""
    return f"{min(ratio for cell, ratio in on_a_network() if cell.layout.ranks == 1):.2f}"


def hybrid(megabits: int) -> str:
    """Return the step time of hybrid FSDP2 on a network of this rate, compared with DDP."""
    asked = "fsdp2_hybrid", 1e6 * megabits
    (ratio,) = (ratio for cell, ratio in on_a_network() if (cell.strategy, cell.rate) == asked)
    return f"{ratio:.2f}"


def equal_on_several_machines() -> str:
    """Count the runs of the study `machines` whose losses are those of the same run on one machine."""
    cells = network_cells(records.find([CPU / "machines"]))
    return number_of(sum(cell.from_one_machine == 0 for cell in cells), len(cells))


def series(*strategies: str) -> str:
    """Return the lowest and the highest ratio of step times of strategies and DDP, over all series of runs."""
    rows = frontier.speeds([CPU / "equal-memory-again"])
    ratios = [ratio for row in rows if row.strategy in strategies for ratio in row.equal_ratios]
    return f"{min(ratios):.2f} and {max(ratios):.2f}"


def published_zero3_times() -> str:
    """Say how many published times of ZeRO-3 are longer, and how many are shorter, than predicted."""
    errors = [time.error for time in docs_tables.unseen_times() if time.strategy.startswith("ZeRO-3")]
    longer = sum(error < 0 for error in errors)
    return (
        f"of the {len(errors)} published times of ZeRO-3, {longer} are longer than predicted and "
        f"{len(errors) - longer} are shorter"
    )


# ---------------------------------------------------------------- losses and weights


def furthest_strategies() -> str:
    """Name the three largest differences from DDP's final loss, each with its strategy and seed."""
    names = {"zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
    arms = [arm for arm in first_screen.learned().verdict.arms if not arm.is_broken]
    differences = [(value, arm.name, seed) for arm in arms for seed, value in arm.differences.items()]
    largest = sorted(differences, key=lambda each: -abs(each[0]))[:3]
    texts = [f"{100 * value:+.2f} % ({names[name]}, seed {seed})" for value, name, seed in largest]
    return f"{texts[0]}, {texts[1]} and {texts[2]}"


def equal_weights() -> str:
    """Count the seeds of `learned` with which FSDP2 and DDP end with the same weights, bit by bit."""
    weights = {name: file.record.final_parameters for name, file in runs_of_learned().items()}
    seeds = [seed for strategy, seed in weights if strategy == "fsdp2"]
    return f"{sum(weights['fsdp2', seed] == weights['ddp', seed] for seed in seeds)} of {len(seeds)}"


@cache
def runs_of_learned() -> dict[tuple[str, int], records.RecordFile]:
    """Return the runs of `learned` that are no variations of DDP, by strategy and seed."""
    files = records.find([CPU / "learned"])
    plain = [file for file in files if file.record.run_id.endswith(f"-seed{file.record.seed}")]
    return {(file.record.strategy, file.record.seed): file for file in plain}


def norms_of_seed_24() -> str:
    """Name the first step in which the gradient norms of DDP and FSDP2 differ, and these norms."""
    steps = zip(*(steps_of(runs_of_learned()[name, 24]) for name in ("ddp", "fsdp2")), strict=True)
    ddp, fsdp2 = next(pair for pair in steps if pair[0]["grad_norm"] != pair[1]["grad_norm"])
    return f"step {ddp['step']} was {ddp['grad_norm']:.9g} under DDP and {fsdp2['grad_norm']:.9g} under FSDP2"


def difference_of_seed_24() -> str:
    (fsdp2,) = (arm for arm in first_screen.learned().verdict.arms if arm.name == "fsdp2")
    return docs_tables.percent(abs(fsdp2.differences[24]))


def largest_difference(study: str, precision: str) -> str:
    """Return the largest difference from DDP's held-out loss in a study with digests, without planted faults."""
    settings = bits.settings([CPU / study]).items()
    columns = [
        column for heading, groups in settings if f", {precision}, " in heading for group in groups for column in group
    ]
    rows = [row for column in columns for row in bits.grid([column]).items()]
    return scientific(max(cell.held_out or 0 for name, (cell,) in rows if name in strategy_names()))


@cache
def with_digests() -> list[records.RecordFile]:
    return [file for file in records.find([CPU / "bits"]) if file.record.status == "ok" and file.record.digests]


def bits_recorded() -> str:
    return str(len(with_digests()))


def bits_planned() -> str:
    """Return the number of runs of the study `bits`, rounded to ten."""
    return f"about {round(len(studies.runs(studies.find('bits'))), -1)}"


def single_cause(cause: str) -> str:
    """Say how many pairs of runs differ in only this cause of rounding."""
    effect = bits.single_roundings(with_digests()).get(cause)
    number = effect.num_pairs if effect else 0
    return "one pair of runs" if number == 1 else f"{number} pairs of runs"


def exact_trainings() -> str:
    """Say how many trainings in exact arithmetic have the result of the reference."""
    cells = json.loads((ROOT / "reports" / "exact.json").read_text())["cells"]
    trained = [cell for cell in cells if not cell["outcome"].startswith("refused")]
    same = sum(cell["outcome"] == "same bits" for cell in trained)
    return f"All {same} trainings" if same == len(trained) else f"{same} of {len(trained)} trainings"


def planted_faults() -> str:
    """Say how many planted faults the trainings in exact arithmetic show."""
    faults = json.loads((ROOT / "reports" / "exact.json").read_text())["faults"]
    seen = sum(fault["seen"] for fault in faults)
    number = f"all {seen}" if seen == len(faults) else f"{seen} of {len(faults)}"
    return (
        f"We planted {len({fault['fault'] for fault in faults})} faults, each under DDP, ZeRO-2, ZeRO-3 and FSDP2. "
        f"The test detected the fault in {number} of these trainings"
    )


def of_published_program(comparison: defects.Comparison, metric: defects.Metric) -> defects.Effect:
    effect = defects.effect(defects.read(first_screen.PROTOCOL), comparison, metric)
    assert effect is not None
    return effect


def repaired_losses() -> str:
    """Return a power of ten above the difference of the validation losses with and without ZeRO, after the repair."""
    effect = of_published_program(defects.MENDED, "validation loss")
    return f"1e{math.floor(math.log10(abs(effect.mean))) + 1}"


def repaired_time() -> str:
    effect = of_published_program(defects.MENDED, "time")
    return f"{1 + effect.mean:.2f} times as long ({span((1 + effect.low, 1 + effect.high), 2)})"


def published_loss() -> str:
    """Compare the validation losses of the two trainings of the published program."""
    effect = of_published_program(defects.AS_PUBLISHED, "validation loss")
    interval = span((-100 * effect.low, -100 * effect.high), 0)
    return f"{whole_percent(-effect.mean)} lower (95 % interval {interval} %, {len(effect.values)} repeats)"


def releases(fault_id: str) -> str:
    """Return the first and the last release of DeepSpeed with a fault that `zero-study conformance` found."""
    (fault,) = (fault for fault in committed.faults() if fault.id == fault_id)
    return f"{fault.first} to {fault.last}"


def cells(engines: str = "", *outcomes: str) -> str:
    """Count the tests of the newest installation with engines whose names begin so, and with these verdicts."""
    of_engines = [
        cell for name, cell in committed.newest()["cells"].items() if re.match(f"(accelerate_)?({engines})", name)
    ]
    return f"{sum(cell['verdict'] in (outcomes or committed.VERDICTS) for cell in of_engines):,}"


# ---------------------------------------------------------------- tools


@cache
def doctor_findings() -> list[str]:
    """Return whether each finding of doctor about the public files was right."""
    verdicts_of = doctor_observed.judged()
    return [verdict for row in doctor_observed.index() for _, verdict in verdicts_of[row["file"]]]


def doctor_right() -> str:
    """Count the findings of doctor that could be compared, and those that were right."""
    outcomes = Counter(doctor_findings())
    compared = outcomes["right"] + outcomes["wrong"]
    return f"{compared} of them could be compared, and {outcomes['right']} of these were right"


def started_files() -> str:
    """Count the public configuration files, and those that were started."""
    observed = [doctor_observed.committed()[row["file"]] for row in doctor_observed.index()]
    started = sum("not_started" not in each for each in observed)
    return f"{len(observed)} configuration files from public repositories. We started {started} of them"


def other_ranks(value: str) -> str:
    """Return the largest difference between a run that resumed on other ranks and one that was never interrupted."""
    return f"{max(case[value] for case in benchmark('other_ranks')['cases'] if not case['refused']):.0e}"


def checkpoint_sizes() -> str:
    """Return the GB of a checkpoint of the GPT of 124 million parameters, over all strategies."""
    return span(tries[0]["checkpoint_bytes"] / 1e9 for tries in benchmark("saving")["strategies"].values())


def resumed_runs() -> str:
    """Count the runs that were killed and resumed, and those that are identical to a run without interruption."""
    kills = [kill["identical"] for case in benchmark("resume")["cases"] for kill in case["kills"]]
    return number_of(sum(kills), len(kills))


def throughputs() -> str:
    """Return the samples per second of this project's trainer, divided by those of other programs."""
    results = [benchmark(name)["strategies"].values() for name in ("throughput", "throughput_deepspeed")]
    return span((each["wall_ratio"]["median"] for group in results for each in group), 2)


def limit_of_diff(change: str) -> str:
    return f"{json.loads(docs_tables.LIMITS.read_text())['smallest_seen'][change]['fp32']:.0e}"


def time_of_diff(step: str) -> str:
    return f"{json.loads(docs_tables.LIMITS.read_text())['times_of_a_step'][step]:.1f}"


# ---------------------------------------------------------------- dry runs


def checked_dry_runs() -> dict[str, Any]:
    return json.loads((DRY_RUNS / "checked.json").read_text())


def dry_run_pairs() -> str:
    """Count the pairs of a simulated and a real process, and those with equal collectives and model states."""
    pairs = checked_dry_runs()["equal"]
    same = sum({*differences} <= {"peak_bytes"} for *_, differences, _ in pairs)
    return f"{number_of(same, len(pairs))} pairs"


def hangs() -> str:
    """Count the planted faults that make a dry run report a hang."""
    found = [hang for fault, by_strategy in checked_dry_runs()["hangs"].items() if fault != "sound"
             for hang in by_strategy.values()]  # fmt: skip
    return f"{sum(found)} of {len(found)}"


def traced_memory() -> list[docs_tables.Traced]:
    """Return the traced values of reserved memory and of whole cards."""
    return [each for each in docs_tables.traced_memory() if each.case.quantity in published_rows.RESERVED_OR_USED]


def errors_of_traces(value: str) -> str:
    """Say how far traced or predicted values are from published ones."""
    return median_and_worst(getattr(each, value) / each.case.published - 1 for each in traced_memory())


def outside_of_traces() -> str:
    """Return the GB that are assumed for the driver, the CUDA context and NCCL."""
    boxes = [each.case.box for each in traced_memory() if each.case.quantity == "used_bytes"]
    return span(prediction.outside_bytes(box) / 1e9 for box in boxes)


def dry_run_reserved() -> str:
    """Count the published values of reserved memory and of whole cards that were traced."""
    quantities = [each.case.quantity for each in traced_memory()]
    num_reserved, num_used = (quantities.count(name) for name in published_rows.RESERVED_OR_USED)
    return (
        f"{num_reserved + num_used} measurements that others published. {num_reserved} of them are of reserved memory. "
        f"The other {num_used} are of all memory in use on the GPU"
    )


# ---------------------------------------------------------------- time on GPUs


def minutes_of_list(*numbers: int) -> str:
    """Return the predicted minutes of items of `make gpu` on an H200. The items are counted from 1."""
    with tempfile.TemporaryDirectory() as folder:
        place = one_gpu.Place(Path(folder), None, False)
        return f"{sum(one_gpu.ITEMS[number - 1].state(place).seconds for number in numbers) / 60:.0f}"


def hours_of_list() -> str:
    return f"about {float(minutes_of_list(*range(1, len(one_gpu.ITEMS) + 1))) / 60:.0f} hours"


def num_runs(study: str) -> str:
    return str(len(studies.runs(studies.find(study))))


def num_strategies(study: str) -> str:
    """Count the strategies of a study, and all strategies."""
    return f"{len({run.strategy.name for run in studies.runs(studies.find(study))})} of the {len(strategy_names())}"


def usable_gib(gpu: str, num_gpus: int = 1) -> str:
    return f"{hardware.usable_memory_bytes(hardware.find_gpu(gpu), num_gpus) / 2**30:.1f}"


def host_gib() -> str:
    """Return the host memory that the runs with offload need in the first hour on one GPU."""
    runs = [run for study in first_hour.OF_ONE_GPU for run in first_hour.predicted_runs(study, "a100-80gb")]
    return f"{max(run.host_bytes for run in runs) / 2**30:.0f}"


def hours_of_single_gpu() -> str:
    """Return the predicted hours of the study `single-gpu` on three kinds of GPUs."""
    hours = []
    for gpu in ("h200", "l4", "t4"):
        history = estimate.History(True, hardware.find_gpu(gpu))
        runs = studies.runs(studies.find("single-gpu"))
        hours.append(sum(history.estimate(run).seconds for run in runs) / 3600)
    return "about {:.0f} hours on an H200, {:.0f} hours on an L4, or {:.0f} hours on a T4".format(*hours)


# ---------------------------------------------------------------- published measurements


def _median_and_tail(errors: Iterable[float]) -> str:
    sizes = np.abs(list(errors))
    tail = whole_percent(float(np.quantile(sizes, 0.9)))
    return f"the median error is {whole_percent(float(np.median(sizes)))}, and one in ten errors is larger than {tail}"


def printed_peaks() -> str:
    """Say how far the value that `advise` prints is from published peaks of tensors."""
    errors = [error for case, error in published_rows.printed_memory() if case.quantity == "peak_allocated_bytes"]
    return f"For {len(errors)} published peaks of tensors, {_median_and_tail(errors)}"


def out_of_memory() -> str:
    """Say how many published configurations that ran out of memory are predicted not to fit."""
    predicted = [verdict.predicted for verdict in published_rows.fits_verdicts() if not verdict.trained]
    return f"Of {len(predicted)} published configurations that ran out of memory, {predicted.count(False)}"


def with_chosen_margin() -> str:
    """Count those of these configurations that the margin for the allocator was chosen for."""
    cases = [verdict.case for verdict in published_rows.fits_verdicts() if not verdict.trained]
    return str(sum(case.family not in AFTER_THE_MARGIN for case in cases))


def trained() -> str:
    """Say how many published configurations that trained are predicted not to fit."""
    predicted = [verdict.predicted for verdict in published_rows.fits_verdicts() if verdict.trained]
    return f"Of {len(predicted)} other configurations that trained, {predicted.count(False)}"


def adapters_that_trained() -> str:
    """Say how many published configurations with adapters trained although they are predicted not to fit."""
    cases = [case for case in measured_by_others.adapter_cases() if case.quantity == "fits" and case.published]
    wrong = sum(not prediction.predicted_memory(case) for case in cases)
    return f"Of {len(cases)} published configurations that trained, {wrong or 'none'}"


def adapter_peaks() -> str:
    """Say how far predicted peaks of tensors of trainings with adapters are from published ones."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    for each in published_rows.adapter_errors():
        if each.case.quantity == "peak_allocated_bytes":
            errors[each.case.box.num_gpus == 1].append(abs(each.error))
    return (
        f"a median error of about {whole_percent(statistics.median(errors[True]))}, and those of FSDP1 with an error "
        f"of up to {whole_percent(max(errors[False]))}"
    )


def adapter_reserved() -> str:
    """Say how far reserved memory with adapters is from published values to which no constant was fitted."""
    errors = [each.error for each in published_rows.adapter_errors()
              if (each.case.quantity, each.case.allocator) == ("peak_reserved_bytes", "varying lengths")]  # fmt: skip
    others = [abs(error) for error in errors[1::2]]  # `RESERVED_IF_LENGTHS_VARY` is fitted to every second value
    return f"a median error of about {whole_percent(statistics.median(others))}"


def adapter_times() -> str:
    """Say how far predicted times of trainings with adapters are from published ones."""
    quantities = "seconds_per_step", "tokens_per_second_per_gpu"
    errors = [abs(each.error) for each in published_rows.adapter_errors() if each.case.quantity in quantities]
    return f"In {len(errors)} of them, the median error is about {whole_percent(statistics.median(errors))}"


def errors_of_times() -> dict[str, list[float]]:
    """Return the errors of predicted step times by strategy, for times that the model describes."""
    errors: dict[str, list[float]] = {}
    for time in docs_tables.unseen_times():
        if time.is_described:
            errors.setdefault(time.strategy, []).append(abs(time.error))
    return errors


def times() -> str:
    """Say how far predicted step times without offload are from published ones."""
    errors = [each for strategy, each in errors_of_times().items() if strategy != "offload"]
    medians, tails = ([float(np.quantile(each, share)) for each in errors] for share in (0.5, 0.9))
    return (
        f"the median error is between {100 * min(medians):.0f} and {whole_percent(max(medians))} for all strategies "
        f"without offload, and one in ten errors is larger than {100 * min(tails):.0f} to {whole_percent(max(tails))}"
    )


def offload_times() -> str:
    return f"their median error is about {whole_percent(statistics.median(errors_of_times()['offload']))}"


def ratio(size: str, strategy: str, column: str = "peak_gib") -> str:
    return f"{peak_ratio(size, strategy, column=column):.2f}"


def blind_memory() -> str:
    """Say how far peaks of tensors are off that were predicted before their logs were read."""
    errors = [abs(row.error) for row in public_errors.compared() if row.quantity == "peak_allocated_bytes"]
    tail = whole_percent(float(np.quantile(errors, 0.9)))
    return f"by {whole_percent(statistics.median(errors))} in the median, and by more than {tail} in one of ten cases"


GOOD_TIME = 0.3  # median error of the times of a source; the sources are far from it on either side


def blind_times() -> str:
    """Say how far times are off, by source, that were predicted before their logs were read."""
    errors: dict[str, list[float]] = {}
    for row in public_errors.compared():
        if row.quantity in ("seconds_per_step", "tokens_per_second_per_gpu") and row.error is not None:
            errors.setdefault(public_errors.SOURCES[row.family], []).append(abs(row.error))
    medians = sorted(statistics.median(of_source) for of_source in errors.values())
    sides = [[median for median in medians if (median <= GOOD_TIME) == is_good] for is_good in (True, False)]
    good, bad = (f"{100 * side[0]:.0f} to {whole_percent(side[-1])}" for side in sides)
    numbers = {3: "three", 4: "four", 5: "five"}
    return (
        f"by {good} in the median for {numbers[len(sides[0])]} sources, and by {bad} for the {numbers[len(sides[1])]} "
        "others"
    )


# By page and name: what lies between the two comments.
PLACES: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "blind_memory"): blind_memory,
    ("README.md", "blind_times"): blind_times,
    ("docs/CONTRIBUTING.md", "throughputs"): throughputs,
    ("docs/carry-over.md", "rounding"): first_screen.largest_difference,
    ("docs/carry-over.md", "tuned_zero3"): tuned_zero3_below_fsdp2,
    ("docs/carry-over.md", "zero3_gpt"): partial(ratio, "124m", "zero3"),
    ("docs/carry-over.md", "zero3_bert"): partial(ratio, "large", "zero3"),
    ("docs/carry-over.md", "whole_process"): partial(ratio, "124m", "zero3", "peak_process_gib"),
    ("docs/carry-over.md", "more_parameters"): more_parameters_in_short,
    ("docs/carry-over.md", "beside_tensors"): beside_tensors,
    ("docs/carry-over.md", "repaired"): first_screen.repaired_time,
    ("docs/carry-over.md", "repaired_losses"): repaired_losses,
    ("docs/carry-over.md", "states"): exact_states,
    ("docs/carry-over.md", "peaks"): close_peaks,
    ("docs/carry-over.md", "zero3_times"): published_zero3_times,
    ("docs/carry-over.md", "lost"): partial(releases, "zero2-accumulation"),
    ("docs/carry-over.md", "divided_twice"): partial(releases, "outputs-of-outputs"),
    ("docs/carry-over.md", "dry_runs"): dry_run_pairs,
    ("docs/carry-over.md", "dry_run_rows"): dry_run_reserved,
    ("docs/carry-over.md", "outside"): outside_of_traces,
    ("docs/carry-over.md", "traced"): partial(errors_of_traces, "traced"),
    ("docs/checkpoints.md", "pairs"): lambda: str(
        sum(not case["refused"] for case in benchmark("other_ranks")["cases"])
    ),
    ("docs/checkpoints.md", "loss"): partial(other_ranks, "loss"),
    ("docs/checkpoints.md", "grad_norm"): partial(other_ranks, "grad_norm"),
    ("docs/checkpoints.md", "sizes"): checkpoint_sizes,
    ("docs/checkpoints.md", "resumed"): resumed_runs,
    ("docs/claims.md", "published_loss"): published_loss,
    ("docs/claims.md", "repaired_losses"): repaired_losses,
    ("docs/claims.md", "repaired_time"): repaired_time,
    ("docs/concepts.md", "zero3_time"): partial(step_time, "zero3"),
    ("docs/concepts.md", "zero3_tuned_time"): partial(step_time, "zero3_tuned"),
    ("docs/concepts.md", "sent_tuned"): lambda: f"{sent('zero3_tuned') / sent('zero3'):.1f}",
    ("docs/concepts.md", "sent_ddp"): partial(sent_bytes, "ddp"),
    ("docs/concepts.md", "sent_zero2"): partial(sent_bytes, "zero1", "zero2"),
    ("docs/concepts.md", "sent_zero2_tuned"): partial(sent_bytes, "zero2_tuned"),
    ("docs/concepts.md", "sent_zero3"): partial(sent_bytes, "zero3"),
    ("docs/concepts.md", "sent_zero3_tuned"): partial(sent_bytes, "zero3_tuned"),
    ("docs/concepts.md", "sent_fsdp2"): partial(sent_bytes, "fsdp2"),
    ("docs/diff.md", "output"): partial(limit_of_diff, "a module's output"),
    ("docs/diff.md", "gradient"): partial(limit_of_diff, "a parameter's gradient"),
    ("docs/diff.md", "recorded"): partial(time_of_diff, "recorded"),
    ("docs/diff.md", "with_noise"): partial(time_of_diff, "recorded_with_noise"),
    ("docs/doctor.md", "files"): started_files,
    ("docs/doctor.md", "findings"): lambda: f"{len(doctor_findings()):,}",
    ("docs/doctor.md", "right"): doctor_right,
    ("docs/dry-run.md", "pairs"): dry_run_pairs,
    ("docs/dry-run.md", "hangs"): hangs,
    ("docs/dry-run.md", "rows"): lambda: str(len(traced_memory())),
    ("docs/dry-run.md", "traced"): partial(errors_of_traces, "traced"),
    ("docs/dry-run.md", "predicted"): partial(errors_of_traces, "predicted"),
    ("docs/first-hour.md", "host"): host_gib,
    ("docs/first-hour.md", "usable_40"): partial(usable_gib, "a100-40gb"),
    ("docs/first-hour.md", "usable_80"): lambda: one_of(map(usable_gib, ("a100-80gb", "h100-sxm"))),
    ("docs/gpus.md", "single_gpu"): hours_of_single_gpu,
    ("docs/gpus.md", "runs"): partial(num_runs, "single-gpu"),
    ("docs/gpus.md", "acceptance_runs"): partial(num_runs, "gpu-acceptance"),
    ("docs/gpus.md", "acceptance_strategies"): partial(num_strategies, "gpu-acceptance"),
    ("docs/gpus.md", "lora_runs"): partial(num_runs, "gpu-lora"),
    ("docs/gpus.md", "whole_list"): hours_of_list,
    ("docs/gpus.md", "item_1"): partial(minutes_of_list, 1),
    ("docs/gpus.md", "items_2_3"): partial(minutes_of_list, 2, 3),
    ("docs/gpus.md", "item_4"): partial(minutes_of_list, 4),
    ("docs/gpus.md", "item_5"): partial(minutes_of_list, 5),
    ("docs/gpus.md", "item_6"): partial(minutes_of_list, 6),
    ("docs/gpus.md", "items_7_8_9"): partial(minutes_of_list, 7, 8, 9),
    ("docs/losses.md", "linear"): partial(single_cause, "linear"),
    ("docs/losses.md", "grouping"): partial(single_cause, "grouping"),
    ("docs/losses.md", "planned"): bits_planned,
    ("docs/losses.md", "recorded"): bits_recorded,
    ("docs/losses.md", "short"): partial(largest_difference, "bits", "fp32"),
    ("docs/losses.md", "furthest"): furthest_strategies,
    ("docs/losses.md", "ddp_again"): first_screen.variants_of_ddp,
    ("docs/losses.md", "equal_weights"): equal_weights,
    ("docs/losses.md", "norms"): norms_of_seed_24,
    ("docs/losses.md", "seed_24"): difference_of_seed_24,
    ("docs/losses.md", "fp64"): partial(largest_difference, "bits-learned", "fp64"),
    ("docs/losses.md", "exact"): exact_trainings,
    ("docs/losses.md", "faults"): planted_faults,
    ("docs/machines.md", "faults"): lambda: str(len({row["fault"] for row in benchmark("machines")["rows"]})),
    ("docs/machines.md", "equal"): equal_on_several_machines,
    ("docs/machines.md", "one_rank"): one_rank_per_machine,
    ("docs/machines.md", "hybrid_300"): partial(hybrid, 300),
    ("docs/machines.md", "hybrid_100"): partial(hybrid, 100),
    ("docs/memory-and-time.md", "beside_tensors"): beside_tensors,
    **{
        ("docs/memory-and-time.md", f"{name}_{what}"): partial(make, name)
        for name in ("zero2_tuned", "zero3", "zero3_tuned", "fsdp2")
        for what, make in {"peak": partial(ratio, "124m"), "time": step_time}.items()
    },
    ("docs/memory-and-time.md", "zero2_tuned_interval"): partial(interval_of_time, "zero2_tuned"),
    ("docs/memory-and-time.md", "ddp_tuned"): ddp_without_buckets,
    **{
        ("docs/memory-and-time.md", f"{name}_{size}"): partial(ratio, size, name)
        for name in ("zero3", "zero3_tuned")
        for size in ("11m", "large")
    },
    ("docs/memory-and-time.md", "bf16"): saved_in_bf16,
    ("docs/memory-and-time.md", "default_buffers"): partial(more_parameters_than_ddp, "zero1", "zero2"),
    ("docs/memory-and-time.md", "smaller_buffers"): partial(more_parameters_than_ddp, "zero3_tuned"),
    ("docs/memory-and-time.md", "fsdp2"): partial(more_parameters_than_ddp, "fsdp2"),
    ("docs/memory-and-time.md", "offload"): with_offload,
    ("docs/memory-and-time.md", "largest_fsdp2"): partial(largest_model, 3, "fsdp2"),
    ("docs/memory-and-time.md", "largest_zero2"): partial(largest_model, 3, "zero2"),
    ("docs/memory-and-time.md", "largest_zero3"): partial(largest_model, 3, "zero3", "zero3_nvme_offload"),
    ("docs/memory-and-time.md", "largest_offload"): partial(largest_model, 3, "zero2_cpu_offload", "zero3_cpu_offload"),
    ("docs/memory-and-time.md", "largest_zero3_6"): partial(largest_model, 6, "zero3"),
    ("docs/memory-and-time.md", "largest_nvme_6"): partial(largest_model, 6, "zero3_nvme_offload"),
    ("docs/memory-and-time.md", "largest_fsdp2_6"): partial(largest_model, 6, "fsdp2"),
    ("docs/memory-and-time.md", "adapter_states"): less_with_sharded_adapters,
    ("docs/memory-and-time.md", "adapter_buckets"): adapters_in_default_buckets,
    ("docs/memory-and-time.md", "adapters_large"): lambda: percents(
        saved_with_adapters("large", "zero3_tuned", "fsdp2")
    ),
    ("docs/memory-and-time.md", "adapters_124m"): lambda: percents(saved_with_adapters("124m", "zero3_tuned", "fsdp2")),
    ("docs/memory-and-time.md", "adapters_sent"): lambda: (
        f"{span(sent_with_adapters('ddp', 'zero1', 'zero2_tuned'))} %"
    ),
    ("docs/memory-and-time.md", "adapters_gathered"): lambda: (
        f"{span(sent_with_adapters('zero3_tuned', 'fsdp2'), 0)} %"
    ),
    ("docs/memory-and-time.md", "adapters_gpt"): adapters_of_gpt,
    ("docs/memory-and-time.md", "adapters_bf16"): adapters_in_bf16,
    ("docs/memory-and-time.md", "llama_factory"): against_llama_factory,
    ("docs/memory-and-time.md", "adapter_errors"): errors_of_adapters,
    ("docs/memory-and-time.md", "real_peaks"): real_peaks,
    ("docs/memory-and-time.md", "worst_peak"): worst_real_peak,
    ("docs/memory-and-time.md", "zero2_bf16"): zero2_in_bf16,
    ("docs/memory-and-time.md", "identical_zero1"): partial(identical_runs, "zero1"),
    ("docs/memory-and-time.md", "identical_ddp"): partial(identical_runs, "ddp"),
    ("docs/planner.md", "slack"): lambda: whole_percent(prediction.ALLOCATOR_SLACK),
    ("docs/planner.md", "optimizer_slack"): lambda: whole_percent(prediction.OPTIMIZER_SLACK),
    ("docs/planner.md", "usable"): partial(usable_gib, "a100-80gb", 8),
    ("docs/planner.md", "least_reserved"): lambda: f"{prediction.RESERVED_RANGE[0]}",
    ("docs/planner.md", "reserved"): lambda: span(published_rows.reserve_by_source().values()),
    ("docs/planner.md", "printed"): printed_peaks,
    ("docs/planner.md", "out_of_memory"): out_of_memory,
    ("docs/planner.md", "chosen"): with_chosen_margin,
    ("docs/planner.md", "trained"): trained,
    ("docs/planner.md", "adapters_trained"): adapters_that_trained,
    ("docs/planner.md", "adapter_peaks"): adapter_peaks,
    ("docs/planner.md", "adapter_reserved"): adapter_reserved,
    ("docs/planner.md", "times"): times,
    ("docs/planner.md", "offload_times"): offload_times,
    ("docs/planner.md", "adapter_times"): adapter_times,
    ("docs/planner.md", "states"): exact_states,
    ("docs/planner.md", "peaks"): close_peaks,
    ("docs/prove.md", "counted_step"): lambda: f"{benchmark('prove')['counted_step_ratio']['median']:.2f}",
    ("docs/records.md", "faults"): lambda: str(len(benchmark("faults")["faults"])),
    ("docs/releases.md", "deepspeed"): partial(cells, "zero"),
    ("docs/releases.md", "wrong"): partial(cells, "zero", "wrong"),
    ("docs/releases.md", "not_wrong"): partial(cells, "zero", "same", "refused", "crashed"),
    ("docs/releases.md", "same"): partial(cells, "zero", "same"),
    ("docs/releases.md", "stopped"): partial(cells, "zero", "refused", "crashed"),
    ("docs/releases.md", "all"): cells,
    ("docs/releases.md", "others"): partial(cells, "ddp|fsdp2"),
    ("docs/releases.md", "minutes"): lambda: f"{sum(committed.newest()['seconds'].values()) / 60:.1f}",
    ("reports/dry-run.md", "rows"): lambda: str(len(traced_memory())),
    ("reports/dry-run.md", "traced_errors"): partial(errors_of_traces, "traced"),
    ("reports/dry-run.md", "predicted"): partial(errors_of_traces, "predicted"),
}


def pattern(name: str) -> re.Pattern[str]:
    """Return the pattern of the text between the two comments of this name, within a line."""
    return re.compile(rf"(<!-- {name} -->)([^\n]*?)(<!-- /{name} -->)")


def written(page: str, name: str) -> set[str]:
    """Return the texts between the comments of this name in a page. A page may say one number in several places."""
    return {match[2] for match in pattern(name).finditer((ROOT / page).read_text(encoding="utf-8"))}


def main() -> None:
    """Write every number into its page."""
    for (page, name), make in PLACES.items():
        path, text = ROOT / page, make()
        content = path.read_text(encoding="utf-8")
        path.write_text(pattern(name).sub(lambda m, text=text: f"{m[1]}{text}{m[3]}", content), encoding="utf-8")


if __name__ == "__main__":
    main()
