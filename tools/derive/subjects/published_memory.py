"""How far the planner is from published memory, and from what fitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wording import OF_SOURCES, errors_in_short, median_of_sources, span, summary_in_short, tabulate, whole_percent

from study.accuracy import published_rows
from zero_study.theory import measured_by_others, prediction
from zero_study.theory import peaks as peaks_of

MEASUREMENTS = {  # of published memory, as a reader names them
    "peak of tensors": "peak of tensors",
    published_rows.ACTIVATIONS: "of these: peaks in the forward or backward pass",
    "peak, instrument not named": "peak, without the name of the measuring tool",
    "peak reserved by the allocator": "peak reserved by PyTorch's allocator",
    "whole card": "memory used on the whole card",
    "tensors between steps": "tensors between two steps",
}


def memory_errors(by: str) -> dict[str, list[dict[str, Any]]]:
    """Return the errors of predicted memory by metric or by source: of the planner first, then of the estimators."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in published_rows.memory():
        if row["by"] == by:
            groups.setdefault(row["group"], []).append(row)
    return groups


def planner_memory() -> str:
    """Tabulate the errors of the planner's memory by what was measured, and of peaks of tensors by source."""
    rows = []
    for group, (errors, *_) in memory_errors("metric").items():
        name, _, grade = group.rpartition(", grade ")
        rows.append([MEASUREMENTS[name], grade, str(errors["count"]), summary_in_short(errors)])
    for group, (errors, *_) in memory_errors("source").items():
        source, _, grade = group.rpartition(", ")
        rows.append([f"peak of tensors, from {source}", grade, str(errors["count"]), summary_in_short(errors)])
    return tabulate(["what was measured", "grade", "values", "error: median / 90th percentile / worst"], rows)


PRINTED = {
    "peak_allocated_bytes": "peak of tensors",
    "peak_reserved_bytes": "reserved by PyTorch's allocator",
    "used_bytes": "whole card",
}


def printed_memory() -> str:
    """Compare the memory that `advise` prints with published memory, by what was measured and by source."""
    rows = []
    for quantity, words in PRINTED.items():
        by_source: dict[str, list[float]] = {}
        for case, error in published_rows.printed_memory():
            if case.quantity == quantity:
                by_source.setdefault(published_rows.source_of(case), []).append(error)
        every = [error for errors in by_source.values() for error in errors]
        rows.append([words, f"all {len(by_source)} sources", *_printed(every), median_of_sources(by_source)])
        rows += [[words, source, *_printed(errors), ""] for source, errors in sorted(by_source.items())]
    column = "error: median / 90th percentile / worst"
    return tabulate(["measured", "source", "values", column, "printed value is too low", OF_SOURCES], rows)


def _printed(errors: list[float]) -> list[str]:
    return [str(len(errors)), errors_in_short(errors), str(sum(error < 0 for error in errors))]


def estimators() -> str:
    """Compare peaks of tensors with the planner and with two estimators of model states."""
    groups = {name: each for name, each in memory_errors("metric").items() if name.startswith("peak of tensors, ")}
    groups |= memory_errors("source")
    rows = [
        [f"{'all sources, ' * name.startswith('peak of')}{name.removeprefix('peak of tensors, ')}",
         str(each[0]["count"]), *map(summary_in_short, each)]
        for name, each in groups.items()
    ]  # fmt: skip
    return tabulate(["source and grade", "values", *published_rows.ESTIMATORS], rows)


def planner_fits() -> str:
    """Compare which published configurations are predicted to fit with what trained, and list the wrong predictions."""
    foundry = [bool(prediction.fits(peaks_of.peak(case.shape, case.engine, case.job), case.box))
               for case in measured_by_others.cases_of("mpt_throughput")]  # fmt: skip
    verdicts = published_rows.fits_verdicts()
    rows = [["LLM Foundry, trained", str(len(foundry)), str(sum(foundry)), str(foundry.count(False))]]
    wrong: list[str] = []
    for label, trained in (("other sources, trained", True), ("other sources, out of memory", False)):
        mine = [verdict for verdict in verdicts if verdict.trained == trained]
        wrong += [
            f"- {verdict.case.family}: {verdict.case.name}: it {'trained' if trained else 'ran out of memory'}"
            for verdict in mine
            if verdict.predicted != trained
        ]
        yes = sum(verdict.predicted for verdict in mine)
        rows.append([label, str(len(mine)), str(yes), str(len(mine) - yes)])
    table = tabulate(["configurations", "number", "predicted to fit", "predicted not to fit"], rows)
    legend = (
        "These configurations are predicted wrongly. `1024 tokens x 32 x 2` means 1,024 tokens per sequence, 32 "
        "sequences per micro batch and 2 micro batches per step:"
    )
    return "\n\n".join([table, legend, "\n".join(wrong)])


# Families of published rows that ran out of memory and were added after the margin for the allocator was chosen.
AFTER_THE_MARGIN = (
    "torchtitan 2024", "lightning-thunder checkpointing", "LLaMA-Factory out of memory", "parallelism-benchmark",
)  # fmt: skip


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


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("reports/planner-accuracy.md", "memory"): planner_memory,
    ("reports/planner-accuracy.md", "printed"): printed_memory,
    ("reports/planner-accuracy.md", "estimators"): estimators,
    ("reports/planner-accuracy.md", "fits"): planner_fits,
}


NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/planner.md", "slack"): lambda: whole_percent(prediction.ALLOCATOR_SLACK),
    ("docs/planner.md", "optimizer_slack"): lambda: whole_percent(prediction.OPTIMIZER_SLACK),
    ("reports/planner-rules.md", "least_reserved"): lambda: f"{prediction.RESERVED_RANGE[0]}",
    ("docs/planner.md", "reserved"): lambda: span(published_rows.reserve_by_source().values()),
    ("docs/planner.md", "out_of_memory"): out_of_memory,
    ("docs/planner.md", "chosen"): with_chosen_margin,
    ("docs/planner.md", "trained"): trained,
    ("reports/planner-accuracy.md", "out_of_memory"): out_of_memory,
    ("reports/planner-accuracy.md", "chosen"): with_chosen_margin,
    ("reports/planner-accuracy.md", "trained"): trained,
}
