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
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path

import docs_tables
import first_screen
import numpy as np
import one_gpu
from docs_tables import CPU, FRONTIER, ROOT

from study.claims import defects
from study.compare import bits, frontier
from study.engines.conformance import committed
from study.planner import published_rows
from study.records import find as records
from study.report import plots, tables
from study.running import estimate, studies
from study.theory import hardware, measured_by_others, prediction

DRY_RUNS = ROOT / "reports" / "dry_run"
# Their buffers are as large as the gradients or smaller, so that every page of them is written.
WITHOUT_DEFAULT_BUFFERS = ("single", "ddp", "ddp_tuned", "zero2_tuned", "zero3_tuned", "fsdp2")


def whole_percent(share: float) -> str:
    return f"{100 * share:.0f} %"


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


# ---------------------------------------------------------------- memory and largest models


def peak_ratio(
    size: str, strategy: str, precision: str = "fp32", processes: int = 2, column: str = "peak_gib"
) -> float:
    """Return a peak of `peaks-real` divided by DDP's."""
    runs = plots.only(docs_tables.peak_runs(), size=size, precision=precision, processes=processes)
    peaks = runs.set_index("strategy")[column]
    return float(peaks[strategy] / peaks["ddp"])


def tuned_zero3_below_fsdp2() -> str:
    """Return the largest share that tuned ZeRO-3 saves compared with FSDP2, on four processes in bf16."""
    runs = plots.only(docs_tables.peak_runs(), precision="bf16", processes=4)
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
    peaks = plots.only(docs_tables.peak_runs(), size="124m", precision="fp32", processes=2)
    gib = peaks.set_index("strategy")["peak_process_gib"]
    return (
        f"{gib['zero2_cpu_offload']:.2f} GiB under ZeRO-2 with CPU offload, and {gib['zero2']:.2f} GiB under ZeRO-2 "
        "without offload"
    )


def ddp_without_buckets() -> str:
    """Give the peak of DDP with `gradient_as_bucket_view`, and compare it with DDP."""
    peaks = plots.only(docs_tables.peak_runs(), size="124m", precision="fp32", processes=2)
    gib = peaks.set_index("strategy")["peak_gib"]
    return f"{gib['ddp_tuned']:.2f} GiB ({gib['ddp_tuned'] / gib['ddp']:.2f} times the memory of DDP)"


# ---------------------------------------------------------------- times


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


def repaired_losses() -> str:
    """Return a power of ten above the difference of the validation losses with and without ZeRO, after the repair."""
    effect = defects.effect(defects.read(first_screen.PROTOCOL), defects.MENDED, "validation loss")
    assert effect is not None
    return f"1e{math.floor(math.log10(abs(effect.mean))) + 1}"


def releases(fault_id: str) -> str:
    """Return the first and the last release of DeepSpeed with a fault that `zero-study conformance` found."""
    (fault,) = (fault for fault in committed.faults() if fault.id == fault_id)
    return f"{fault.first} to {fault.last}"


# ---------------------------------------------------------------- dry runs


def dry_run_pairs() -> str:
    """Count the pairs of a simulated and a real process, and those with equal collectives and model states."""
    pairs = json.loads((DRY_RUNS / "checked.json").read_text())["equal"]
    same = sum({*differences} <= {"peak_bytes"} for *_, differences, _ in pairs)
    return f"all {same} pairs" if same == len(pairs) else f"{same} of {len(pairs)} pairs"


def dry_run_reserved() -> str:
    """Say how far traced values of reserved memory and of whole cards are from published ones."""
    quantities = [row[3] for row in json.loads((DRY_RUNS / "published.json").read_text())["rows"]]
    num_reserved, num_used = (quantities.count(name) for name in ("peak_reserved_bytes", "used_bytes"))
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


# By page and name: what lies between the two comments.
PLACES: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "zero3_series"): partial(series, "zero3", "zero3_tuned"),
    ("README.md", "peaks"): close_peaks,
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
    ("docs/gpus.md", "single_gpu"): hours_of_single_gpu,
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
    ("docs/losses.md", "furthest"): furthest_strategies,
    ("docs/losses.md", "ddp_again"): first_screen.variants_of_ddp,
    ("docs/losses.md", "exact"): exact_trainings,
    ("docs/losses.md", "faults"): planted_faults,
    ("docs/memory-and-time.md", "beside_tensors"): beside_tensors,
    ("docs/memory-and-time.md", "ddp_tuned"): ddp_without_buckets,
    ("docs/memory-and-time.md", "bf16"): saved_in_bf16,
    ("docs/memory-and-time.md", "default_buffers"): partial(more_parameters_than_ddp, "zero1", "zero2"),
    ("docs/memory-and-time.md", "smaller_buffers"): partial(more_parameters_than_ddp, "zero3_tuned"),
    ("docs/memory-and-time.md", "fsdp2"): partial(more_parameters_than_ddp, "fsdp2"),
    ("docs/memory-and-time.md", "offload"): with_offload,
    ("docs/memory-and-time.md", "real_peaks"): real_peaks,
    ("docs/planner.md", "printed"): printed_peaks,
    ("docs/planner.md", "out_of_memory"): out_of_memory,
    ("docs/planner.md", "trained"): trained,
    ("docs/planner.md", "adapters_trained"): adapters_that_trained,
    ("docs/planner.md", "adapter_peaks"): adapter_peaks,
    ("docs/planner.md", "times"): times,
    ("docs/planner.md", "offload_times"): offload_times,
    ("docs/planner.md", "adapter_times"): adapter_times,
    ("docs/planner.md", "states"): exact_states,
    ("docs/planner.md", "peaks"): close_peaks,
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
