"""What does measuring cost the steps that are not probed?

    zero-study benchmark overhead [--pairs 5] [--strategy ddp] [--size mini] [--output FILE]

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
from study.records.results import header
from study.run import Run


def measure(num_pairs: int, strategy: str, size: str, output: Path | None, command: str) -> None:
    """Run the pairs, print the ratio of their step times, and write it with the command that asked."""
    pairs.share_cores(num_processes=2)
    flags = {**FLAGS, "size": size}
    measured, plain = (pairs.plan(strategy, {**flags, "measure": on}) for on in (True, False))
    arms = {"measured": functools.partial(run, measured), "plain": functools.partial(run, plain)}

    def say(arm: str, pair: int, facts: dict[str, Any]) -> None:
        probed = facts["probed_step_seconds"]
        more = "" if probed is None else f", the probed step {probed:.4f} s"
        print(f"pair {pair}/{num_pairs} {arm}: {facts['median_step_seconds']:.4f} s a step{more}", flush=True)

    result = summarize([pairs.run_pair(arms, number, say) for number in range(1, num_pairs + 1)])
    print(f"{strategy}: measured/plain seconds a step {pairs.show(result['ratio'])}")
    if output:
        head = {**header("overhead", command), "config": pairs.shown_config(plain.config)}
        files.write_json(output, {**head, **result})


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
