"""Implement `zero-study exact`: train the exact problem with every strategy, and compare the bits.

Every strategy trains the same batches on 1, 2, 3, 4 and 8 processes of this machine's CPU, with and without gradient
accumulation. Every sum is exact in fp32, so all of them must end with the bits of a reference in Python's integers.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.exact import cells, faults, json_answer, problem, reference
from zero_study import files, terminal
from zero_study.answers.envelope import Answer
from zero_study.errors import Refusal
from zero_study.strategy import file
from zero_study.verdict import Checked, NotChecked, Verdict

if TYPE_CHECKING:
    from study.exact.cells import Cell
    from study.exact.runner import Outcome

HEARTBEAT_SECONDS = 10


def run(
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    ranks: str | None = None,
    with_faults: bool = False,
    fault_names: Sequence[str] = (),
    output: Path | None = None,
    as_json: bool = False,
) -> Verdict | Answer:
    """Run the requested trainings with exact arithmetic, print the results, and return the verdict or the JSON answer.

    `only` has names of strategies, and `ranks` numbers of processes, separated by commas. With `fault_names`, only
    trainings with the planted faults whose names contain one of these texts are run. A training that is not bitwise
    identical to the reference is a finding, and so is a fault that was not detected. A strategy that `only` names and
    that was never trained could not be checked. Raises Refusal for a request that names nothing that exists.
    """
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}  # before torch
    start = time.monotonic()
    strategies = list(dict.fromkeys(name for text in only for name in text.split(",")))
    plain_cells, faulty_cells = _chosen_cells(quick, strategies, ranks, with_faults, fault_names)
    _print_reference()
    from study.exact import runner

    if not all(cell.refusal for cell in [*plain_cells, *faulty_cells]):
        print("Importing the engines ...", flush=True)
        runner.import_engines()
    outcomes = _follow(runner.run(plain_cells), len(plain_cells), "cells")
    _print_table(outcomes)
    faulty = _follow(runner.run(faulty_cells), len(faulty_cells), "trainings with a fault")
    _print_faults(faulty)
    _print_summary(outcomes, faulty, time.monotonic() - start)
    verdict = _verdict(outcomes, faulty, strategies)
    if output:
        files.write_json(output, _as_json(outcomes, faulty))
        print(f"Wrote {output}.")
    return json_answer.of(verdict, outcomes, faulty, _as_json(outcomes, faulty)) if as_json else verdict


def _chosen_cells(
    quick: bool, strategies: Sequence[str], ranks: str | None, with_faults: bool, fault_names: Sequence[str]
) -> tuple[list[Cell], list[Cell]]:
    """Return the requested trainings without faults, and those with planted faults."""
    for name in strategies:
        file.find_strategy(name)  # raises Refusal for a name that is not known
    if not fault_names:
        names = list(faults.FAULTS) if with_faults else []
        return cells.plain_cells(quick, strategies, _numbers(ranks)), cells.with_faults(names, strategies)
    names = [name for name in faults.FAULTS if any(text in name for text in fault_names)]
    if not names:
        raise Refusal(
            f"--fault {' --fault '.join(fault_names)}: no planted fault has this name. The planted faults are: "
            f"{'; '.join(faults.FAULTS)}."
        )
    return [], cells.with_faults(names, strategies)


def _numbers(text: str | None) -> list[int]:
    """Return the numbers of processes in a text such as "1,2,4".

    Raises Refusal for a number over which the batch cannot be divided.
    """
    numbers = {str(number): number for number in cells.NUM_RANKS}
    words = text.split(",") if text else []
    if wrong := [word for word in words if word not in numbers]:
        raise Refusal(f"--ranks {text}: {wrong[0]!r} is not one of {', '.join(numbers)}.")
    return [numbers[word] for word in words]


def _verdict(outcomes: Sequence[Outcome], faulty: Sequence[Outcome], strategies: Iterable[str]) -> Verdict:
    wrong = [outcome for outcome in outcomes if not (outcome.is_same or outcome.refusal)]
    unseen = [outcome for outcome in faulty if not outcome.is_seen]
    trained = {outcome.cell.strategy for outcome in [*outcomes, *faulty] if outcome.answers}
    return Verdict.of(
        len(wrong) + len(unseen),
        [
            Checked(sum(not outcome.refusal for outcome in outcomes), "training", "compared with the exact reference"),
            Checked(len(faulty), "planted fault"),
        ],
        [NotChecked(name, "no training with this strategy was possible", True) for name in set(strategies) - trained],
    )


def _print_reference() -> None:
    expected = reference.expect()
    print(
        f"Reference: {problem.NUM_STEPS} steps of {problem.BATCH_SIZE} sequences in integers. The loss goes from "
        f"{expected.losses[0]:.2f} to {expected.losses[-1]:.2f}.\n"
        f"In any order of additions, the largest sum takes {max(expected.bits.values())} of the "
        f"{reference.SIGNIFICANT_BITS} significant bits of fp32."
    )


def _print_summary(outcomes: Sequence[Outcome], faulty: Sequence[Outcome], seconds: float) -> None:
    """Print how many trainings have the bits of the reference, how many faults were detected, and the time."""
    trained = [outcome for outcome in outcomes if not outcome.refusal]
    if outcomes:
        num_same = sum(outcome.is_same for outcome in trained)
        num_compared = sum(answer["compared"] for outcome in outcomes for answer in outcome.answers)
        print(
            f"{num_same} of {len(trained)} trainings agree with the reference in every bit of every gradient, weight "
            f"and momentum ({num_compared:,} tensors were compared). {len(outcomes) - len(trained)} trainings were "
            "refused."
        )
    if faulty:
        num_detected = sum(outcome.is_seen for outcome in faulty)
        print(f"{num_detected} of {len(faulty)} planted faults were found in their first step.")
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"Time: {seconds:.0f} s. Processor time: {children.ru_utime + children.ru_stime:.0f} s.")


def _follow(outcomes: Iterable[Outcome], number: int, what: str) -> list[Outcome]:
    """Return the outcomes of all trainings, and print the progress while they arrive.

    `number` is how many outcomes are expected, and `what` is the name for them in the progress line.
    """
    collected: list[Outcome] = []
    last_print = time.monotonic()
    for outcome in outcomes:
        collected.append(outcome)
        if time.monotonic() - last_print > HEARTBEAT_SECONDS:
            last_print = time.monotonic()
            print(f"  {len(collected)} of {number} {what} ...", flush=True)
    return sorted(collected, key=lambda outcome: outcome.number)


def _print_table(outcomes: Sequence[Outcome]) -> None:
    """Print a line for each strategy and number of micro batches.

    Below the table, print which trainings differ from the reference, and why trainings were refused.
    """
    if not outcomes:
        return
    by_cell = {(o.cell.strategy, o.cell.accumulation, o.cell.num_ranks): o for o in outcomes}
    numbers = sorted({num_ranks for _, _, num_ranks in by_cell})
    rows = [
        [name, steps, *(by_cell[name, steps, number].word for number in numbers)]
        for name, steps in dict.fromkeys((name, steps) for name, steps, _ in by_cell)
    ]
    head = ["strategy", "micro batches", *(terminal.count(number, "rank") for number in numbers)]
    print("\n".join(["", *terminal.table(head, rows), ""]))
    for outcome in outcomes:
        if not (outcome.refusal or outcome.is_same):
            print(f"{outcome.cell.name}: {outcome.text}{_difference_text(outcome)}")
    _print_refusals(outcomes)


def _difference_text(outcome: Outcome) -> str:
    difference = outcome.difference
    if not difference:
        return ""
    return f", {difference['what']} of {difference['parameter']} on rank {difference['rank']}"


def _print_refusals(outcomes: Sequence[Outcome]) -> None:
    """Print a line for each strategy and reason, with the numbers of ranks for which it was refused."""
    refused: dict[tuple[str, str], set[int]] = {}
    for outcome in outcomes:
        if outcome.refusal:
            refused.setdefault((outcome.cell.strategy, outcome.text), set()).add(outcome.cell.num_ranks)
    for (name, text), numbers in refused.items():
        print(f"{name} on {', '.join(map(str, sorted(numbers)))} ranks: {text}")


def _print_faults(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        difference = outcome.difference
        detail = outcome.text
        if difference:
            detail = f"step {difference['step']}, {difference['what']} of {difference['parameter']}"
        verdict = "found" if outcome.is_seen else "NOT FOUND"
        print(f"{verdict:<10}{outcome.cell.fault}, {outcome.cell.strategy}: {detail}")


def _as_json(outcomes: Sequence[Outcome], faulty: Sequence[Outcome]) -> dict[str, Any]:
    """Return the problem and the outcome of every training for JSON, without times and names of this machine."""
    from zero_study.engines.readback.facts import versions

    expected = reference.expect()
    return {
        "versions": versions(),
        "problem": {
            "steps": problem.NUM_STEPS,
            "batch_size": problem.BATCH_SIZE,
            "parameters": sum(len(values) for values in problem.initial_weights().values()),
            "losses": expected.losses,
            "significant_bits": expected.bits,
        },
        "sha256": {
            "gradient": reference.sha256(expected.gradients[-1]),
            "weights": reference.sha256(expected.weights[-1]),
            "momentum": reference.sha256(expected.momenta[-1]),
        },
        "cells": [outcome.as_json() for outcome in outcomes],
        "faults": [outcome.as_json() for outcome in faulty],
    }
