"""How far predicted step times are from published ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import cross_validation
from wording import OF_SOURCES, errors_in_short, median_of_sources, tabulate, whole_percent

from study.accuracy import published_rows
from zero_study.theory import intervals


class Unseen(NamedTuple):
    """A published step time of grade A or B, predicted by constants that were fitted without its source."""

    strategy: str
    source: str
    grade: str
    is_described: bool
    error: float


def unseen_times() -> list[Unseen]:
    """List the published step times with the errors of predictions that were made without their source."""
    times = {(timed.name, timed.family): timed for timed in cross_validation.published()}
    found = []
    for row in published_rows.load()["unseen"]:
        timed = times[row["name"], row["family"]]
        if timed.grade != "C":
            found.append(Unseen(timed.strategy, timed.measured_by, timed.grade, not timed.outside, row["error"]))
    return found


def planner_times() -> str:
    """Tabulate the errors of predicted step times by strategy and by source, each predicted without its source."""
    times = unseen_times()
    groups = {name: [time for time in times if time.strategy == name] for name in sorted({t.strategy for t in times})}
    groups |= {f"all of grade {grade}": [time for time in times if time.grade == grade] for grade in "AB"}
    groups["all"] = times
    rows = []
    for name, members in groups.items():
        described = [time for time in members if time.is_described]
        by_source: dict[str, list[float]] = {}
        for time in described:
            by_source.setdefault(time.source, []).append(time.error)
        cells = (
            [errors_in_short(time.error for time in described), median_of_sources(by_source)] if described else ["", ""]
        )
        every = errors_in_short(time.error for time in members)
        rows.append([name, str(len(members)), every, str(len(described)), str(len(by_source)), *cells])
    error = "error: median / 90th percentile / worst"
    head = ["strategy", "all published times", error, "times that the model describes", "sources", error, OF_SOURCES]
    sources = {time.source: [t for t in times if t.source == time.source] for time in times}
    of_source = [
        [
            name,
            ", ".join(sorted({time.strategy for time in members})),
            str(len(members)),
            errors_in_short(t.error for t in members),
        ]
        for name, members in sorted(sources.items())
    ]
    by_source_head = ["source", "strategies", "published times", error]
    return "\n\n".join(
        [tabulate(head, rows), "The next table has the same times by source:", tabulate(by_source_head, of_source)]
    )


def planner_intervals() -> str:
    """Tabulate the intervals of step times, and how often they contain times of a source that was not used for them."""
    rows = [
        [NAMES[kind], f"{evidence.spread:g}", str(evidence.sources), str(evidence.cases),
         f"{100 * evidence.median:.1f} % / {100 * evidence.percentile_90:.1f} % / {100 * evidence.worst:+.0f} %",
         f"{evidence.held} of {evidence.cases}"]
        for kind, evidence in intervals.EVIDENCE.items()
    ]  # fmt: skip
    head = ["class", "factor", "sources", "times", "error: median / 90th percentile / worst", "inside"]
    return tabulate(head, rows)


NAMES: dict[intervals.TimingClass, str] = {
    "one node": "one node with A100 or H100, 16 bits, fused attention",
    "several nodes": "several nodes with A100 or H100, 16 bits, fused attention",
    "other arithmetic": "A100 or H100, eager attention, or products in 32 or 8 bits",
    "compiled": "`torch.compile`",
    "launching": "steps so small that the GPU waits for launches of kernels",
    "offload": "offload",
    "one workstation card": "one card with GDDR memory (GeForce, RTX, A10, L4 ...)",
    "several workstation cards": "several of these cards",
    "Volta": "V100",
}


def left_out() -> str:
    """List why the model of times does not describe some published times, and how far they are from a prediction."""
    reasons: dict[str, list[tuple[str, float]]] = {}
    for row in published_rows.load()["unseen"]:
        if row["outside"]:
            reasons.setdefault(row["outside"], []).append((row["family"], row["error"]))
    rows = []
    for reason, entries in reasons.items():
        sources = ", ".join(dict.fromkeys(family for family, _ in entries))
        rows.append(
            [LEFT_OUT[reason.partition(":")[0]], sources, str(len(entries)), errors_in_short(e for _, e in entries)]
        )
    return tabulate(["reason", "source", "times", "error: median / 90th percentile / worst"], rows)


LEFT_OUT = {  # why, by how published.yaml begins to say it
    "the engine's timers": "the source used DeepSpeed's own timers, which leave out data loading and other work",
    "the source contradicts itself": "the source contradicts itself",
    "FlashAttention-4": "FlashAttention-4, whose speed the model does not know",
    "uneven lengths": "sequences of different lengths: every rank waits for the rank with the longest batch, and only "
    "the mean length is published",
}


def errors_of_times() -> dict[str, list[float]]:
    """Return the errors of predicted step times by strategy, for times that the model describes."""
    errors: dict[str, list[float]] = {}
    for time in unseen_times():
        if time.is_described:
            errors.setdefault(time.strategy, []).append(abs(time.error))
    return errors


def offload_times() -> str:
    return f"their median error is about {whole_percent(statistics.median(errors_of_times()['offload']))}"


def zero3_times(where: str) -> str:
    """Say how far predicted times of ZeRO-3 on one node, or on several nodes, are from published ones."""
    errors = [100 * error for error in errors_of_times()[f"ZeRO-3, {where}"]]
    return (
        f"The median error of the {len(errors)} times that the model describes is {statistics.median(errors):.0f} %, "
        f"and the largest is {max(errors):.0f} %"
    )


def published_zero3_times() -> str:
    """Say how many published times of ZeRO-3 are longer, and how many are shorter, than predicted."""
    errors = [time.error for time in unseen_times() if time.strategy.startswith("ZeRO-3")]
    longer = sum(error < 0 for error in errors)
    return (
        f"of the {len(errors)} published times of ZeRO-3, {longer} are longer than predicted and "
        f"{len(errors) - longer} are shorter"
    )


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("reports/planner-accuracy.md", "intervals"): planner_intervals,
    ("reports/planner-accuracy.md", "times"): planner_times,
    ("reports/planner-accuracy.md", "excluded"): left_out,
}


NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    ("reports/expectations-for-gpus.md", "zero3_times"): published_zero3_times,
    ("docs/planner.md", "offload_times"): offload_times,
    ("reports/planner-accuracy.md", "zero3_one_node"): partial(zero3_times, "one node"),
    ("reports/planner-accuracy.md", "zero3_several_nodes"): partial(zero3_times, "several nodes"),
}
