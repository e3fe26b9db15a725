"""What does measuring cost the steps that are not probed?

    python -m study.benchmarks.overhead [--pairs 5] [--strategy ddp] [--size mini] [--output FILE]

Runs with --measure and with --no-measure alternate; the ratio is of their median step seconds, from which timing leaves
the probed step out. What the probed step itself took is shown beside it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from study import files
from study.benchmarks import pairs
from study.benchmarks.throughput import FLAGS
from study.config import Parser
from study.errors import Refusal
from study.records.results import command_line, header
from study.run import Run


def main(words: list[str]) -> int:
    parser = Parser(prog="study.benchmarks.overhead", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs (default: 5)")
    parser.add_argument("--strategy", default="ddp", help="(default: ddp)")
    parser.add_argument("--size", default="mini", help="size of BERT (default: mini)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(words)
    if options.pairs < 1:
        raise Refusal(f"--pairs {options.pairs}: must be at least 1")
    pairs.share_cores(num_processes=2)
    flags = {**FLAGS, "size": options.size}
    measured, plain = (pairs.plan(options.strategy, {**flags, "measure": measure}) for measure in (True, False))
    arms = {"measured": functools.partial(run, measured), "plain": functools.partial(run, plain)}

    def say(arm: str, pair: int, facts: dict[str, Any]) -> None:
        probed = facts["probed_step_seconds"]
        more = "" if probed is None else f", the probed step {probed:.4f} s"
        print(f"pair {pair}/{options.pairs} {arm}: {facts['median_step_seconds']:.4f} s a step{more}", flush=True)

    result = summarize([pairs.run_pair(arms, number, say) for number in range(1, options.pairs + 1)])
    print(f"{options.strategy}: measured/plain seconds a step {pairs.show(result['ratio'])}")
    if options.output:
        command = command_line("python -m study.benchmarks.overhead", vars(options))
        head = {**header("overhead", command), "config": pairs.shown_config(plain.config)}
        files.write_json(options.output, {**head, **result})
    return 0


def run(work: Run) -> dict[str, Any]:
    facts, steps = pairs.run_ours(work)
    probed = facts.timing.probed_steps
    return {
        "median_step_seconds": facts.timing.median_seconds,
        "num_timed_steps": facts.timing.num_steps,
        "probed_step_seconds": next((step["seconds"] for step in steps if step["step"] in probed), None),
    }


def summarize(done: list[dict[str, Any]]) -> dict[str, Any]:
    """Add each pair's ratio and the median and range of all."""
    seconds = "median_step_seconds"
    kept = [{**pair, "ratio": pair["measured"][seconds] / pair["plain"][seconds]} for pair in done]
    return {"pairs": kept, "ratio": pairs.summarize([pair["ratio"] for pair in kept])}


if __name__ == "__main__":
    pairs.end(main)
