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
    from study.exact.runner import Outcome

HEARTBEAT_SECONDS = 10


def main(words: Sequence[str] | None = None) -> int:
    """Print the table; return 0 if all that trained has the reference's bits and every planted fault was seen."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}  # before torch
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
    given = parser.parse_args(words)

    from study.exact import cells, faults, problem, reference
    from study.strategy import file

    began = time.monotonic()
    only = given.only.split(",") if given.only else None
    for name in only or ():
        file.find_strategy(name)  # raises Refusal for a name that is not known
    chosen = cells.table(given.quick, only, given.ranks)
    names = [name for name in faults.FAULTS if any(text in name for text in given.fault or [""])]
    faulty = cells.with_faults(names, only) if given.faults or given.fault is not None else []
    if given.fault is not None and not names:
        parser.error(f"no fault's name contains {' or '.join(given.fault)}; the faults are: {'; '.join(faults.FAULTS)}")
    chosen = [] if given.fault is not None else chosen

    expected = reference.expect()
    print(
        f"Reference: {problem.NUM_STEPS} steps of {problem.BATCH_SIZE} sequences in integers; the loss goes from "
        f"{expected.losses[0]:.2f} to {expected.losses[-1]:.2f}.\n"
        f"The longest sum takes {max(expected.bits.values())} of the {reference.SIGNIFICANT_BITS} significant bits of "
        "fp32, in any order of additions."
    )
    from study.exact import runner

    if not all(cell.refusal for cell in [*chosen, *faulty]):
        print("Importing the engines ...", flush=True)
        runner.import_engines()
    outcomes = _follow(runner.run(chosen), len(chosen), "cells")
    _print_table(outcomes)
    seen = _follow(runner.run(faulty), len(faulty), "trainings with a fault")
    _print_faults(seen)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    num_compared = sum(answer["compared"] for outcome in outcomes for answer in outcome.answers)
    trained = [outcome for outcome in outcomes if not outcome.refusal]
    same = [outcome for outcome in trained if outcome.is_same]
    if outcomes:
        print(
            f"{len(same)} of {len(trained)} trainings have the reference's bits in every gradient, weight and momentum "
            f"({num_compared:,} tensors compared). {len(outcomes) - len(trained)} were refused."
        )
    if seen:
        print(f"{sum(each.is_seen for each in seen)} of {len(seen)} planted faults were seen in their first step.")
    print(f"{time.monotonic() - began:.0f} s, of which processors worked {used.ru_utime + used.ru_stime:.0f} s.")
    if given.output:
        given.output.write_text(json.dumps(_as_json(outcomes, seen), indent=1) + "\n")
        print(f"Wrote {given.output}.")
    ran = {each.cell.strategy for each in [*outcomes, *seen] if each.answers}
    complete = len(same) == len(trained) and all(each.is_seen for each in seen)
    return 0 if complete and ran.issuperset(only or ran) else 1


def _numbers(text: str) -> list[int]:
    """Read numbers of processes. Raises ArgumentTypeError for one over which the batch does not divide."""
    from study.exact.cells import NUM_RANKS

    known = {str(number): number for number in NUM_RANKS}
    if wrong := [word for word in text.split(",") if word not in known]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not one of {', '.join(known)}")
    return [known[word] for word in text.split(",")]


def _follow(outcomes: Iterable[Outcome], number: int, what: str) -> list[Outcome]:
    """Collect outcomes, and print how far they are."""
    found: list[Outcome] = []
    said = time.monotonic()
    for outcome in outcomes:
        found.append(outcome)
        if time.monotonic() - said > HEARTBEAT_SECONDS:
            said = time.monotonic()
            print(f"  {len(found)} of {number} {what} ...", flush=True)
    return sorted(found, key=lambda outcome: outcome.number)


def _print_table(outcomes: Sequence[Outcome]) -> None:
    """Print a line for each strategy and accumulation, and below the table what the words in it stand for."""
    if not outcomes:
        return
    by_place = {(each.cell.strategy, each.cell.accumulation, each.cell.num_ranks): each for each in outcomes}
    columns = sorted({ranks for _, _, ranks in by_place})
    print(
        f"\n{'strategy':<20}{'micro batches':>14}  "
        + "".join(f"{f'{n} ranks' if n > 1 else '1 rank':<11}" for n in columns)
    )
    for name, steps in dict.fromkeys((name, steps) for name, steps, _ in by_place):
        cells = [by_place[name, steps, number].word for number in columns]
        print(f"{name:<20}{steps:>14}  " + "".join(f"{word:<11}" for word in cells))
    print()
    refused: dict[tuple[str, str], set[int]] = {}
    for each in outcomes:
        if each.refusal:
            refused.setdefault((each.cell.strategy, each.text), set()).add(each.cell.num_ranks)
        elif not each.is_same:
            found = each.difference
            where = f", {found['what']} of {found['parameter']} on rank {found['rank']}" if found else ""
            print(f"{each.cell.name}: {each.text}{where}")
    for (name, text), numbers in refused.items():
        print(f"{name} on {', '.join(map(str, sorted(numbers)))} ranks: {text}")


def _print_faults(outcomes: Sequence[Outcome]) -> None:
    for each in outcomes:
        found = each.difference
        where = f"step {found['step']}, {found['what']} of {found['parameter']}" if found else each.text
        print(f"{'seen' if each.is_seen else 'NOT SEEN':<9}{each.cell.fault}, {each.cell.strategy}: {where}")


def _as_json(outcomes: Sequence[Outcome], seen: Sequence[Outcome]) -> dict[str, Any]:
    """What was trained, compared and found; no times and no names of this machine."""
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
        "cells": [each.as_json() for each in outcomes],
        "faults": [each.as_json() for each in seen],
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Refusal as refusal:
        print(f"zero-study: {refusal}", file=sys.stderr)
        sys.exit(2)
