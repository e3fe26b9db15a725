"""Train cells of the conformance matrix that are drawn at random, and shrink those that fail.

    python tools/measure/fuzz_conformance.py --seed 1 --minutes 60 --output fuzz.json

The seed determines the sequence of cells. The report is written after each batch. The exit status is 1 if a failure is
not known. The optimizers of bitsandbytes must be installed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study.records.machine import benchmark_header
from zero_study import files, terminal
from zero_study.conformance import fuzz, matrix
from zero_study.conformance.cells import Cell

CELLS_PER_BATCH = 60


def main(seed: int, minutes: float, output: Path, cells_per_batch: int = CELLS_PER_BATCH) -> int:
    """Draw batches of cells until the time is over, but no less than one, and return the exit status."""
    began = time.monotonic()
    campaign = fuzz.Campaign(seed, _examine)
    command = f"python tools/measure/fuzz_conformance.py --seed {seed} --minutes {minutes:g} --output {output.name}"
    reported: set[Cell] = set()
    seconds = 0
    while not campaign.drawn or seconds < 60 * minutes:
        campaign.draw(cells_per_batch)
        seconds = round(time.monotonic() - began)
        report = campaign.report()
        files.write_json(
            output,
            {
                **benchmark_header("fuzz_conformance", command),
                "versions": matrix.installed(),
                "seconds": seconds,
                **report,
            },
        )
        counts = ", ".join(f"{count} {verdict}" for verdict, count in report["verdicts"].items())
        print(f"After {seconds / 60:.0f} min: {report['cells_drawn']} cells drawn ({counts}).", flush=True)
        for simple in campaign.minimal.keys() - reported:
            _print_failure(campaign, simple)
        reported |= set(campaign.minimal)
    return int(any(campaign.reason(simple) is None for simple in campaign.minimal))


def _examine(cells: Sequence[Cell]) -> dict[str, Any]:
    verdicts: dict[str, Any] = matrix.run(cells, lambda text: print(f"  {text}", flush=True))["cells"]
    return verdicts


def _print_failure(campaign: fuzz.Campaign, simple: Cell) -> None:
    reason = campaign.reason(simple)
    explanation = fuzz.results.explanation(campaign.verdicts[simple.name])
    print(terminal.wrap(f"{'Known' if reason else 'NEW'}: {simple.name}: {explanation}", "  ", "    "), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    raise SystemExit(main(options.seed, options.minutes, options.output))
