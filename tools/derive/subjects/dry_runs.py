"""How dry runs compare with real processes and with published memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from wording import median_and_worst, number_of, span, tabulate

from study.accuracy import published_rows
from subjects import published_memory
from zero_study.files import ROOT
from zero_study.theory import measured_by_others, prediction
from zero_study.theory.measured_by_others import MeasuredCase

DRY_RUNS = ROOT / "reports" / "dry_run"
WITH_EXPANDABLE_SEGMENTS = ("torchao",)  # families of traced rows: torchtitan sets this option of the allocator


class Traced(NamedTuple):
    """A published amount of GPU memory, with what a dry run and the planner give for it, in bytes."""

    case: MeasuredCase
    traced: float
    predicted: float


@cache
def traced_memory() -> list[Traced]:
    """Return the published amounts of memory that a dry run traced. For a whole card, what is outside is added."""
    loss = ", eager loss"  # which names did not state when the traces were recorded
    cases = {
        (case.family, case.name.replace(loss, ""), case.published): case for case in measured_by_others.cases("memory")
    }
    rows = []
    for family, name, _, quantity, published, _, peak, reserved in json.loads(
        (DRY_RUNS / "published.json").read_text()
    )["rows"]:
        if quantity == "fits":
            continue
        case = cases[family, name.replace(loss, ""), published]
        outside = prediction.outside_bytes(case.box) if quantity == "used_bytes" else 0
        allocator = "expandable_segments" if family in WITH_EXPANDABLE_SEGMENTS else "default"
        traced = peak if quantity == "peak_allocated_bytes" else reserved[allocator] + outside
        rows.append(Traced(case, traced, published_rows.without_its_source(case)))
    return rows


def traced() -> str:
    """Tabulate published memory, what a dry run traced, and what the planner predicts, in GB."""
    rows = [
        [published_memory.PRINTED[each.case.quantity], each.case.name,
         *(f"{num_bytes / 1e9:.1f}" for num_bytes in (each.case.published, each.traced, each.predicted))]
        for each in traced_memory()
    ]  # fmt: skip
    return tabulate(["what was published", "configuration", "published", "traced", "predicted by the planner"], rows)


def checked_dry_runs() -> dict[str, Any]:
    return json.loads((DRY_RUNS / "checked.json").read_text())


def dry_run_pairs() -> str:
    """Count the pairs of a simulated and a real process, and those with equal collectives and model states."""
    pairs = checked_dry_runs()["equal"]
    same = sum({*differences} <= {"peak_bytes"} for *_, differences, _ in pairs)
    return f"{number_of(same, len(pairs))} pairs"


def hangs() -> str:
    """Count the planted faults that make a dry run report a hang."""
    is_hang = [hang for fault, by_strategy in checked_dry_runs()["hangs"].items() if fault != "sound"
             for hang in by_strategy.values()]  # fmt: skip
    return f"{sum(is_hang)} of {len(is_hang)}"


def traced_reserved() -> list[Traced]:
    """Return the traced values of reserved memory and of whole cards."""
    return [each for each in traced_memory() if each.case.quantity in published_rows.RESERVED_OR_USED]


def errors_of_traces(value: str) -> str:
    """Say how far traced or predicted values are from published ones."""
    return median_and_worst(getattr(each, value) / each.case.published - 1 for each in traced_reserved())


def outside_of_traces() -> str:
    """Return the GB that are assumed for the driver, the CUDA context and NCCL."""
    boxes = [each.case.box for each in traced_reserved() if each.case.quantity == "used_bytes"]
    return span(prediction.outside_bytes(box) / 1e9 for box in boxes)


def dry_run_reserved() -> str:
    """Count the published values of reserved memory and of whole cards that were traced."""
    quantities = [each.case.quantity for each in traced_reserved()]
    num_reserved, num_used = (quantities.count(name) for name in published_rows.RESERVED_OR_USED)
    return (
        f"{num_reserved + num_used} measurements that others published. {num_reserved} of them are of reserved memory. "
        f"The other {num_used} measurements are of all memory in use on the GPU"
    )


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("reports/dry-run.md", "traced"): traced,
}


NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    ("reports/expectations-for-gpus.md", "dry_run_rows"): dry_run_reserved,
    ("reports/expectations-for-gpus.md", "outside"): outside_of_traces,
    ("docs/dry-run.md", "pairs"): dry_run_pairs,
    ("docs/dry-run.md", "hangs"): hangs,
    ("docs/dry-run.md", "rows"): lambda: str(len(traced_reserved())),
    ("docs/dry-run.md", "traced"): partial(errors_of_traces, "traced"),
    ("docs/dry-run.md", "predicted"): partial(errors_of_traces, "predicted"),
    ("reports/dry-run.md", "rows"): lambda: str(len(traced_reserved())),
    ("reports/dry-run.md", "traced_errors"): partial(errors_of_traces, "traced"),
    ("reports/dry-run.md", "predicted"): partial(errors_of_traces, "predicted"),
}
