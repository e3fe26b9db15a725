"""`python -m study.exact`: train the exact problem with every strategy and compare the bits.

Every strategy trains the same batches on 1, 2, 3, 4 and 8 processes of this machine's CPU, with and without gradient
accumulation. Every sum is exact in fp32, so all of them must end with the bits of a reference in Python's integers.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.errors import Refusal

if TYPE_CHECKING:
    from study.exact.cells import Cell
    from study.exact.runner import Outcome

HEARTBEAT_SECONDS = 10


def main(words: Sequence[str] | None = None) -> int:
    """Run the chosen trainings, print the results, and return the exit status.

    The status is 0 if every training that ran is bitwise identical to the reference, every planted fault was detected,
    and each strategy that --only names was trained at least once. Otherwise it is 1.
    """
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}  # before torch
    parser = _parser()
    options = parser.parse_args(words)
    start = time.monotonic()
    cells, faulty_cells, only = _chosen_cells(parser, options)
    _print_reference()
    from study.exact import runner

    if not all(cell.refusal for cell in [*cells, *faulty_cells]):
        print("Importing the engines ...", flush=True)
        runner.import_engines()
    outcomes = _follow(runner.run(cells), len(cells), "cells")
    _print_table(outcomes)
    faulty = _follow(runner.run(faulty_cells), len(faulty_cells), "trainings with a fault")
    _print_faults(faulty)
    _print_summary(outcomes, faulty, time.monotonic() - start)
    if options.output:
        options.output.write_text(json.dumps(_as_json(outcomes, faulty), indent=1) + "\n")
        print(f"Wrote {options.output}.")
    trained = {outcome.cell.strategy for outcome in [*outcomes, *faulty] if outcome.answers}
    is_complete = all(outcome.is_same or outcome.refusal for outcome in outcomes)
    are_detected = all(outcome.is_seen for outcome in faulty)
    return 0 if is_complete and are_detected and trained.issuperset(only or trained) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m study.exact", allow_abbrev=False, description=__doc__)
    parser.add_argument("--quick", action="store_true", help="five strategies on two and three processes")
    parser.add_argument("--only", metavar="STRATEGIES", help="these strategies, separated by commas")
    parser.add_argument(
        "--ranks", metavar="NUMBERS", type=_numbers, help="these numbers of processes, separated by commas"
    )
    parser.add_argument("--faults", action="store_true", help="also plant faults, each of which must be seen")
    parser.add_argument(
        "--fault", metavar="TEXT", action="append", help="no table, and only the faults whose names contain this"
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="write the outcomes as JSON")
    return parser


def _chosen_cells(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> tuple[list[Cell], list[Cell], list[str] | None]:
    """Return the cells of the table, the cells with faults, and the strategies that --only names.

    The strategies are None if --only is not given. Raises Refusal for a strategy that does not exist, and ends the
    program if --fault matches no fault.
    """
    from study.exact import cells, faults
    from study.strategy import file

    only = options.only.split(",") if options.only else None
    for name in only or ():
        file.find_strategy(name)  # raises Refusal for a name that is not known
    if options.fault is None:
        names = list(faults.FAULTS) if options.faults else []
        return cells.table(options.quick, only, options.ranks), cells.with_faults(names, only), only
    names = [name for name in faults.FAULTS if any(text in name for text in options.fault)]
    if not names:
        all_names = "; ".join(faults.FAULTS)
        parser.error(f"no fault's name contains {' or '.join(options.fault)}; the faults are: {all_names}")
    return [], cells.with_faults(names, only), only


def _print_reference() -> None:
    from study.exact import problem, reference

    expected = reference.expect()
    print(
        f"Reference: {problem.NUM_STEPS} steps of {problem.BATCH_SIZE} sequences in integers; the loss goes from "
        f"{expected.losses[0]:.2f} to {expected.losses[-1]:.2f}.\n"
        f"The longest sum takes {max(expected.bits.values())} of the {reference.SIGNIFICANT_BITS} significant bits of "
        "fp32, in any order of additions."
    )


def _print_summary(outcomes: Sequence[Outcome], faulty: Sequence[Outcome], seconds: float) -> None:
    """Print how many trainings have the reference's bits, how many faults were detected, and the time."""
    trained = [outcome for outcome in outcomes if not outcome.refusal]
    if outcomes:
        num_same = sum(outcome.is_same for outcome in trained)
        num_compared = sum(answer["compared"] for outcome in outcomes for answer in outcome.answers)
        print(
            f"{num_same} of {len(trained)} trainings have the reference's bits in every gradient, weight and momentum "
            f"({num_compared:,} tensors compared). {len(outcomes) - len(trained)} were refused."
        )
    if faulty:
        num_detected = sum(outcome.is_seen for outcome in faulty)
        print(f"{num_detected} of {len(faulty)} planted faults were seen in their first step.")
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{seconds:.0f} s, of which processors worked {children.ru_utime + children.ru_stime:.0f} s.")


def _numbers(text: str) -> list[int]:
    """Return the numbers of processes in a text that separates them by commas.

    Raises ArgumentTypeError for a number over which the batch cannot be divided.
    """
    from study.exact.cells import NUM_RANKS

    numbers = {str(number): number for number in NUM_RANKS}
    if wrong := [word for word in text.split(",") if word not in numbers]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not one of {', '.join(numbers)}")
    return [numbers[word] for word in text.split(",")]


def _follow(outcomes: Iterable[Outcome], number: int, what: str) -> list[Outcome]:
    """Return all outcomes in the order of their cells, and print the progress while they arrive.

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
    """Print a line for each strategy and accumulation.

    Below the table, print which cells differ from the reference, and why cells were refused.
    """
    if not outcomes:
        return
    by_cell = {(o.cell.strategy, o.cell.accumulation, o.cell.num_ranks): o for o in outcomes}
    columns = sorted({ranks for _, _, ranks in by_cell})
    print(
        f"\n{'strategy':<20}{'micro batches':>14}  "
        + "".join(f"{f'{n} ranks' if n > 1 else '1 rank':<11}" for n in columns)
    )
    for name, steps in dict.fromkeys((name, steps) for name, steps, _ in by_cell):
        cells = [by_cell[name, steps, number].word for number in columns]
        print(f"{name:<20}{steps:>14}  " + "".join(f"{word:<11}" for word in cells))
    print()
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
        verdict = "seen" if outcome.is_seen else "NOT SEEN"
        print(f"{verdict:<9}{outcome.cell.fault}, {outcome.cell.strategy}: {detail}")


def _as_json(outcomes: Sequence[Outcome], faulty: Sequence[Outcome]) -> dict[str, Any]:
    """Return the problem and the outcome of every cell, without times and without names of this machine."""
    from study.engines.readback.facts import versions
    from study.exact import problem, reference

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


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Refusal as refusal:
        print(f"zero-study: {refusal}", file=sys.stderr)
        sys.exit(2)
