"""Can a row's memory be? Against the card, against what model states must take, and against the rows beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from study.planner.check import settings
from study.planner.check.known import CLASSES, IN_WORDS, OPTIMIZERS, Masters, Reported, billions
from study.planner.check.suspicion import Certainty, Outcome
from study.planner.check.table import Result
from study.theory import hardware
from study.theory.model_states import Parts, paper_bytes_per_parameter

GIB = 2**30
# The planner's peaks were within 8.4 % of measured ones where the count is exact (docs/planner.md), on CPUs.
DOUBT = 0.1
# Kernels may be leaner than those that it knows: published peaks were down to 5 % below its least.
LEANER = 0.2
SAME_CLASS = (-0.005, 0.03)  # of measured bytes over a formula's: workspaces and padding add, nothing takes away
DIFFERS = 1.25  # times what states can give: allocators, too, make rows differ


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _held(each: Parts) -> float:
    """Without gradients, which an optimizer can let go of as it makes them."""
    return each.parameters + each.optimizer_states


@dataclass(frozen=True)
class Least:
    """The least bytes per parameter that a GPU holds, by a row's words."""

    held: float  # for good
    stepping: float  # and with gradients
    what: str
    certainty: Certainty


def least_states(case: Reported, masters: Masters) -> Least:
    """What a class of precision holds at least: AdamW's states; of a run whose optimizer is not said, parameters."""
    states, ranks = case.states(masters), case.num_shards or 1
    split = f", split over {ranks:,} GPUs" if ranks > 1 else ""
    if case.says_no_optimizer:
        alone = min(each.parameters for each in states)
        return Least(alone, alone, f"parameters{split if alone < 2 else ''}", "likely")
    named = "AdamW" if case.optimizer else "AdamW (assumed)"
    what = f"states of {named} {IN_WORDS[masters]}{split}"
    stepping = min(each.total for each in states)
    return Least(min(map(_held, states)), stepping, what, "certain" if case.optimizer else "likely")


def _sparing(case: Reported) -> Least:
    """By the class, of those that a precision may mean, that holds the least."""
    return min((least_states(case, masters) for masters in case.masters), key=lambda least: least.stepping)


def _in_words(each: float, case: Reported) -> str:
    params = case.num_params or 0
    return f"{each:.4g} bytes x {billions(params)} parameters = {gib(each * params)}"


def has_states(case: Reported) -> bool:
    """Whether the formulas of states say anything of this row."""
    named = case.sharding is not None or not case.row.cells["strategy"]
    return bool(named and case.num_params and case.num_shards and case.has_whole_states and case.is_adam)


def _planned(case: Reported, doubt: float) -> tuple[float, str] | None:
    """The planner's least peak in bytes, less a doubt, and what to say of it; None: it has none."""
    peak = settings.least_peak(case)
    if peak is None:
        return None
    # A loss in pieces never makes logits whole; what no optimizer is said for may be smaller, or on the host.
    unsure = ("logits", "gradients", "optimizer_states") if case.says_no_optimizer else ("logits",)
    parts = {name: float(size) for name, size in peak.parts.items() if name not in unsure}
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    said = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.1f}" for name, size in largest if size)
    without = " and ".join((", ".join(unsure[:-1]), unsure[-1])) if len(unsure) > 1 else unsure[0]
    total = sum(parts.values())
    words = f"the planner's least peak, {gib(total)} without {without.replace('_', ' ')} ({said}),"
    return total * (1 - doubt), f"{words} is above {{}}, by more than a doubt of {100 * doubt:.0f} %"


# ---------------------------------------------------------------- against the card


def does_not_fit(cases: Sequence[Reported]) -> Outcome:
    """Runs whose states, or whose least peak, are larger than the card."""
    outcome = Outcome()
    runs: dict[tuple[str, ...], list[Reported]] = defaultdict(list)
    for case in cases:
        if has_states(case) and case.cards and not case.row.out_of_memory:
            runs[_but(case, "metric", "unit", "notes")].append(case)
    for run in runs.values():
        outcome.look(run)
        # Where memory is printed, it is held against the planner itself.
        has_memory = any(case.row.result and "memory" in case.row.result.quantity for case in run)
        if found := _misfit(run[0]) or (None if has_memory else _peak_misfit(run[0])):
            outcome.suspect(run, *found)
    return outcome


def _misfit(case: Reported) -> tuple[Certainty, str] | None:
    gpu = max(case.cards, key=lambda card: card.memory_bytes)
    params, built = case.least_params, gpu.memory_bytes
    least, above = _sparing(case), f"above the {gib(built)} of {gpu.name}"
    if least.held * params > built:
        return least.certainty, f"{least.what} take {_in_words(least.held, case)} a GPU, {above}"
    if least.stepping * params > built:
        return "likely", f"{least.what} and gradients take {_in_words(least.stepping, case)} a GPU, {above}"
    # Where there is a result, it ran, so that the class is the one that fits.
    if "masters" in case.masters and case.row.result is None:
        usual = least_states(case, "masters")
        if usual.held * params > built:
            said = f"{usual.what} take {_in_words(usual.held, case)} a GPU, {above}"
            return "likely", f"{said}; only all in 16 bits they would fit, which the precision does not say"
    return None


def _peak_misfit(case: Reported) -> tuple[Certainty, str] | None:
    gpu = max(case.cards, key=lambda card: card.memory_bytes)
    usable = hardware.usable_memory_bytes(gpu, case.num_gpus or 1)
    planned = _planned(case, DOUBT)
    if planned is None or planned[0] <= usable:
        return None
    return "likely", planned[1].format(f"the {gib(usable)} that a {gpu.name} leaves")


# ---------------------------------------------------------------- against what must be there


def too_little(cases: Sequence[Reported]) -> Outcome:
    """Memory below what the states must take, or below the planner's least peak by more than leaner kernels explain."""
    outcome = Outcome()
    for case in cases:
        result = case.row.result
        if result is None or "memory" not in result.quantity or not has_states(case):
            continue
        outcome.look([case])
        least, params = _sparing(case), case.least_params
        if least.held * params > result.most:
            text = f"{result.text} is too little: {least.what} alone take {_in_words(least.held, case)} a GPU"
            outcome.suspect([case], least.certainty, text)
        elif result.quantity == "peak memory" and least.stepping * params > result.most:
            said = f"{least.what} and gradients take {_in_words(least.stepping, case)} a GPU"
            outcome.suspect([case], "likely", f"{result.text} is too little for a peak: {said}")
        elif (above := _above(case, result)) and _formula(case, result) is None:
            outcome.suspect([case], "likely", f"{result.text} is too little: {above}")
    return outcome


def _above(case: Reported, result: Result) -> str | None:
    """Say that the planner's least peak is above a printed one; None where it is not."""
    planned = _planned(case, LEANER) if result.quantity == "peak memory" else None
    return planned[1].format("it") if planned and planned[0] > result.most else None


# ---------------------------------------------------------------- formulas


def formulas(cases: Sequence[Reported]) -> Outcome:
    """Peaks that are a formula's to the printed digits, and leave no room for activations."""
    outcome = Outcome()
    series: dict[tuple[str, ...], list[Reported]] = defaultdict(list)
    for case in cases:
        result = case.row.result
        if result is None or result.quantity != "peak memory" or not has_states(case):
            continue
        if case.shape is not None and case.row.whole("micro_batch") and case.row.whole("seq_len"):
            outcome.look([case])
        if _sparing(case).stepping * case.least_params > result.most:  # which is told already
            continue
        if (above := _above(case, result)) and (formula := _formula(case, result)):
            outcome.suspect([case], "likely", f"{result.text} is the states' formula, {formula}; {above}")
        if case.sharding and case.sharding.stage == 3 and case.row.whole("micro_batch"):
            series[_but(case, "num_gpus", "global_batch", "notes", "gradient_accumulation_steps")].append(case)
    for rows in series.values():
        _falls_as_one_over_n(rows, outcome)
    return outcome


FEWEST, MOST_ROUNDED = 3, 0.02  # rows of a series, and half a printed digit over the number


def _falls_as_one_over_n(rows: list[Reported], outcome: Outcome) -> None:
    by_ranks = {case.num_gpus or 0: case for case in rows}
    if len(by_ranks) < FEWEST or len(by_ranks) < len(rows):
        return
    outcome.look(rows)
    spans = [(n * case.row.result.printed.low, n * case.row.result.printed.high) for n, case in by_ranks.items()
             if case.row.result]  # fmt: skip
    rounded = max(high / low - 1 for low, high in spans) / 2
    if max(low for low, _ in spans) <= min(high for _, high in spans) and rounded <= MOST_ROUNDED:
        made = ", ".join(f"{n} x {case.row.result.text}" for n, case in sorted(by_ranks.items()) if case.row.result)
        text = f"peaks fall exactly as 1/GPUs ({made}), though activations and buffers of one micro batch do not"
        outcome.suspect(rows, "likely", text)


def _formula(case: Reported, result: Result) -> str | None:
    """The formula of states that gives a row's memory to the printed digits, in its unit; None: none does."""
    params, sharding = case.num_params or 0, case.sharding
    stage = sharding.stage if sharding else 3
    stages = (2, 3) if sharding and sharding.keeps_parameters else (stage,)
    for masters in case.masters:
        for precision in CLASSES[masters]:
            for each in stages:
                parts = paper_bytes_per_parameter(each, case.num_shards or 1, precision)
                for part in (parts.total, _held(parts)):
                    # In the printed unit, and in its twin of powers of two.
                    for size in {part * params, part * params / result.loose}:
                        if result.printed.low <= size < result.printed.high:
                            return f"{part:.4g} bytes x {billions(params)} parameters"
    return None


# ---------------------------------------------------------------- against the rows beside it


def _but(case: Reported, *free: str) -> tuple[str, ...]:
    """What rows have in common that may differ in some columns only."""
    cells = case.row.cells
    return tuple(value for name, value in sorted(cells.items()) if name not in (*free, "value"))


def mixed_classes(cases: Sequence[Reported]) -> Outcome:
    """Rows of one column whose bytes per parameter are of different precision classes, though they print the same."""
    outcome = Outcome()
    series: dict[tuple[str, ...], list[tuple[Reported, dict[bool, str]]]] = defaultdict(list)
    for case in cases:
        result = case.row.result
        if result is None or result.quantity != "resting memory" or not has_states(case) or case.sharding is None:
            continue
        if found := _classes(case, result):
            free = ("num_gpus", "strategy", "micro_batch", "global_batch", "gradient_accumulation_steps", "notes")
            series[_but(case, *free)].append((case, found))
    for rows in series.values():
        if len(rows) < 2:
            continue
        outcome.look(case for case, _ in rows)
        kinds = {kind: [(case, said[kind]) for case, said in rows if [*said] == [kind]] for kind in (False, True)}
        if all(kinds.values()):
            said = [f"{'with' if kind else 'without'} fp32 masters ({found[0][1]})" for kind, found in kinds.items()]
            numbers = [
                f"row{'s' if len(found) > 1 else ''} {', '.join(str(case.row.number) for case, _ in found)}"
                for found in kinds.values()
            ]
            text = f"two precision classes in one column: {numbers[0]} {said[0]}, {numbers[1]} {said[1]}"
            outcome.suspect([case for found in kinds.values() for case, _ in found], "likely", text)
    return outcome


def _classes(case: Reported, result: Result) -> dict[bool, str]:
    """Which classes explain a row's bytes: by whether they keep anything in fp32, with the formula."""
    measured = result.printed.value / (case.num_params or 1)
    stage, ranks = case.sharding.stage if case.sharding else 0, case.num_shards or 1
    found: dict[bool, str] = {}
    for masters, precisions in CLASSES.items():
        for precision in precisions:
            parts = paper_bytes_per_parameter(stage, ranks, precision)
            for size in (_held(parts), parts.total):
                if SAME_CLASS[0] <= measured / size - 1 <= SAME_CLASS[1]:
                    split = f"{size * ranks:g} / {ranks}" if ranks > 1 and stage == 3 else f"{size:.4g}"
                    found.setdefault(masters != "pure", f"{measured:.3f} bytes a parameter, {split} by formula")
    return found


def differences(cases: Sequence[Reported]) -> Outcome:
    """Savings between two rows that are larger than all the states that could be split or dropped."""
    outcome = Outcome()
    series: dict[tuple[str, ...], list[Reported]] = defaultdict(list)
    for case in cases:
        result = case.row.result
        whole = case.num_params and case.num_shards and case.sharding and case.has_whole_states
        if result and "memory" in result.quantity and whole and not (case.sharding and case.sharding.in_groups):
            series[_but(case, "strategy", "optimizer", "notes")].append(case)
    for rows in series.values():
        for first, second in _unlike(rows):
            _difference(first, second, outcome)
    return outcome


MOST_IN_SERIES = 40  # rows that differ in strategy or optimizer only; beyond, not every pair is held together


def _unlike(rows: list[Reported]) -> Iterator[tuple[Reported, Reported]]:
    """Pairs of a series, the larger memory first, that differ in strategy or in optimizer, not in both."""
    for pair in combinations(rows[:MOST_IN_SERIES], 2):
        first, second = sorted(pair, key=lambda case: -(case.row.result.printed.value if case.row.result else 0))
        if (first.sharding != second.sharding) != (first.optimizer != second.optimizer):
            yield first, second


def _difference(first: Reported, second: Reported, outcome: Outcome) -> None:
    a, b, params = first.row.result, second.row.result, first.num_params or 0
    if a is None or b is None:
        return
    least = a.printed.low - b.printed.high
    in_fp32 = first.masters != ("pure",)
    if first.sharding == second.sharding:
        fuller, sparer = (OPTIMIZERS.get(case.optimizer or "") for case in (first, second))
        if fuller is None or sparer is None or fuller[1] <= sparer[0]:
            return
        each = (fuller[1] - sparer[0]) * (1.0 if in_fp32 else 0.5)
        most = each * params / (first.num_shards or 1)
        split = f" / {first.num_shards:,} GPUs" if (first.num_shards or 1) > 1 else ""
        gives = (
            f"{second.optimizer} in place of {first.optimizer} saves at most {each:g} bytes x {billions(params)} "
            f"parameters{split} = {most / GIB:.2f} GiB"
        )
    else:
        # Parameters, gradients, masters and moments; DDP's buckets and an optimizer's copy beside them.
        each = (18 if in_fp32 else 8) + (8 if in_fp32 else 4)
        most = each * params
        gives = (
            f"all states and buffers that could be split are {each} bytes x {billions(params)} parameters = {gib(most)}"
        )
    outcome.look([first, second])
    if least > most * DIFFERS:
        saved = (a.printed.value - b.printed.value) / GIB
        outcome.suspect(
            [first, second],
            "likely",
            f"{saved:.2f} GiB less ({a.text} and {b.text}) is more than states can give: {gives}",
        )
