"""Compare the speed of this project's trainer with Hugging Face's Trainer, at the same work.

    python tools/measure/throughput.py [--pairs 5] [--strategies ddp,zero2] [--size mini] [--output FILE]
    python tools/measure/throughput.py --work bert-large --strategies all --num-processes 1 --minutes 10 --output F

There are two ratios, each this project's value divided by the other's. `wall`: samples per second from the end of the
warm-up to the end of the last step, on rank 0's clock, with nothing left out. The small work has no measured step,
because such a step takes the same time in every run and would weigh too much in 40 steps. `step`: samples per second at
the median step. For this project's trainer it is the timing in the record, for the other the median of the times
between the ends of two steps.

On one process, Trainer builds no DDP. There, `ddp` is compared with `single`, which is what users of Trainer get.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import hf_trainer
import pairs

from study.compare import predicted
from study.compare.acceptance import tolerance
from study.config import RunConfig
from study.records import schema
from study.records.machine import benchmark_header
from study.records.steps import read_steps
from study.run import Run, as_words
from study.running.runner import Slot
from zero_study import files, processes
from zero_study.errors import Refusal, RunFailed
from zero_study.strategy.file import read_by_name

# Of one run, 45 steps of some 0.2 s on two cores; the eval split is as small as it may be, since Trainer has none here.
FLAGS: dict[str, Any] = {
    "workload": "bert-imdb", "sequence_length": 64, "global_batch_size": 16, "learning_rate": 3e-4, "dropout": 0.1,
    "num_train_examples": 720, "num_eval_examples": 16, "max_steps": 45, "timing_warmup_steps": 5, "measure": False,
}  # fmt: skip
# What a GPU is asked: long enough steps, in the arithmetic that it is made for.
_ON_GPU = {"precision": "bf16-autocast", "max_steps": 25, "num_eval_examples": 4, "init": "scratch"}
WORKS: dict[str, dict[str, Any]] = {
    "small": {**FLAGS, "size": "mini"},
    "bert-large": {
        **_ON_GPU,
        **{"workload": "bert-imdb", "size": "large", "sequence_length": 512, "global_batch_size": 32},
        "num_train_examples": 800,
    },
    "gpt2-xl": {
        **_ON_GPU,
        **{"workload": "gpt-wikitext", "size": "1.5b", "sequence_length": 1024, "global_batch_size": 8},
        "num_train_examples": 200,
    },
}
SOME_MISSING = 3  # exit status, as that of `zero-study run`
# What both engines must agree on, beside the losses; the rest of the proof is checked in each arm.
SAME = ("world_size", "engine_class", "optimizer_class", "zero_stage", "reduce_bucket_size", "overlap_comm")


def measure(
    strategies: str,
    num_pairs: int,
    work: str,
    size: str | None,
    num_processes: int | None,
    data_dir: Path | None,
    output: Path | None,
    slot: Slot,
    command: str,
    pair_seconds: float = 0.0,
) -> int:
    """Run the pairs that the output lacks, print the ratios, and return the exit status.

    `pair_seconds` is the expected time of a pair before one has run.
    """
    flags = {**WORKS[work], **({"data": "files", "data_dir": data_dir} if data_dir else {})}
    flags |= {"size": size} if size else {}
    pairs.share_cores(num_processes or 2)
    names = hf_trainer.STRATEGIES if strategies == "all" else strategies.split(",")
    planned = {name: plan(name, flags, num_processes) for name in names}
    config = next(iter(planned.values())).config
    settings = config.model_dump(mode="json", exclude={"data_dir", "output_dir", "swap_dir"})
    head = {"command": command, "config": settings, "loss_tolerance": tolerance(config.precision)}
    results = earlier(output, head)

    def keep(**machine: Any) -> None:
        if output:
            files.write_json(output, {**machine, **head, "strategies": results})

    try:
        status = _compare_all(planned, num_pairs, slot, pair_seconds, results, keep)
    finally:  # with the machine only now, because describing a GPU takes some of its memory
        if output and results:
            keep(**benchmark_header("throughput", command))
    if status != SOME_MISSING:
        for name, result in results.items():
            mfu = result["mfu"]
            share = f"; MFU {100 * mfu['ours']:.1f} % against {100 * mfu['trainer']:.1f} %" if mfu else ""
            ratios = f"wall {pairs.show(result['wall_ratio'])}, step {pairs.show(result['step_ratio'])}"
            print(f"{name}: ours/trainer {ratios}{share}")
    return status


def _compare_all(
    planned: dict[str, Run],
    num_pairs: int,
    slot: Slot,
    longest: float,
    results: dict[str, Any],
    keep: Callable[[], None],
) -> int:
    """Add missing pairs to the results, call `keep` after each, and return the exit status."""
    status = 0
    for name, work in planned.items():
        pairs_done = results[name]["pairs"] if name in results else []
        while len(pairs_done) < num_pairs:
            if not slot.first_runs_regardless and longest > slot.seconds_left:
                print(f"left for the next call, from pair {len(pairs_done) + 1} on: {name} and those after it")
                return SOME_MISSING
            began = time.monotonic()
            slot.first_runs_regardless = False
            try:
                pairs_done = [*pairs_done, compare(work, len(pairs_done) + 1, num_pairs)]
            except RunFailed as failure:  # the strategies after it can be compared all the same
                print(f"zero-study: {name}: {failure}", file=sys.stderr)
                status = 1
                break
            results[name] = summarize(pairs_done)
            longest = max(longest, time.monotonic() - began)
            keep()  # a machine that is lent may end this at any moment
    return status


def earlier(output: Path | None, head: dict[str, Any]) -> dict[str, Any]:
    """Return what an earlier call wrote for the same work. Raises Refusal if the file is about other work."""
    if output is None or not output.exists():
        return {}
    content = files.load(output, "a benchmark's result")
    if not isinstance(content, dict) or {key: content.get(key) for key in head} != head:
        raise Refusal(f"--output {output}: holds the result of other work; name another file")
    return content["strategies"]


def plan(strategy_name: str, flags: dict[str, Any], num_processes: int | None = None) -> Run:
    """Check that both arms can do this work. Raises Refusal."""
    work = pairs.plan(strategy_name, flags, num_processes)
    theirs = of_trainer(work)
    hf_trainer.check(theirs.config, theirs.strategy.name, theirs.world_size)
    return work


def of_trainer(work: Run) -> Run:
    """Return the strategy under Trainer, which builds no DDP for one process."""
    alone = work.strategy.distributed_type == "MULTI_GPU" and work.world_size == 1
    return dataclasses.replace(work, strategy=read_by_name("single")) if alone else work


def compare(work: Run, number: int, num_pairs: int) -> dict[str, Any]:
    """Run one pair of a strategy. Raises RunFailed if a run fails or if the two did not do the same work."""
    theirs = of_trainer(work)
    arms = {"ours": functools.partial(ours, work), "trainer": functools.partial(other, theirs)}

    def say(arm: str, pair: int, facts: dict[str, Any]) -> None:
        print(
            f"{work.strategy.name} pair {pair}/{num_pairs} {arm}: {facts['wall_samples_per_second']:.2f} samples/s, "
            f"{facts['step_samples_per_second']:.2f} at the median step, final loss {facts['losses'][-1]:.4f}",
            flush=True,
        )

    pair = pairs.run_pair(arms, number, say)
    equal_keys = SAME if theirs is work else tuple(name for name in SAME if name != "engine_class")
    return reduced(pair, tolerance(work.config.precision), equal_keys)


def reduced(pair: dict[str, Any], loss_tolerance: float, same: Sequence[str] = SAME) -> dict[str, Any]:
    """Reduce a pair to what is kept: rates, ratios and the difference of losses. Raises RunFailed as `compare` does."""
    arms = {arm: dict(facts) for arm, facts in pair.items() if arm != "order"}
    proofs = {arm: {name: facts["proof"][name] for name in same} for arm, facts in arms.items()}
    if proofs["ours"] != proofs["trainer"]:
        raise RunFailed(f"the arms do not do the same work: {proofs}")
    losses = list(zip(arms["ours"]["losses"], arms["trainer"]["losses"], strict=True))
    differences = [abs(mine - theirs) / abs(theirs) for mine, theirs in losses]
    for step, difference in enumerate(differences, 1):
        if not difference <= loss_tolerance:
            mine, theirs = losses[step - 1]
            mismatch = f"step {step} has loss {mine} in ours, {theirs} in trainer"
            raise RunFailed(f"the arms do not do the same work: {mismatch}")
    for facts in arms.values():
        facts["final_loss"] = facts.pop("losses")[-1]
        facts["proof"] = {name: facts["proof"][name] for name in SAME}
    entry = {"order": pair["order"], **arms, "largest_loss_difference": max(differences)}
    for kind in ("wall", "step"):
        rate = f"{kind}_samples_per_second"
        entry[f"{kind}_ratio"] = arms["ours"][rate] / arms["trainer"][rate]
    return entry


def summarize(pairs_kept: list[dict[str, Any]]) -> dict[str, Any]:
    """Add median and range of the ratios to a strategy's pairs, and MFU if the GPU's peak FLOPS are known."""
    spread = {ratio: pairs.summarize([pair[ratio] for pair in pairs_kept]) for ratio in ("wall_ratio", "step_ratio")}
    # Of the same model on the same GPU, so that the arms' ratio is that of their samples per second.
    throughputs = [pair["ours"]["peak_samples_per_second"] for pair in pairs_kept]
    mfu = None
    if None not in throughputs:
        common = pairs_kept[0].keys() & {"ours", "trainer"}
        rates = {arm: [pair[arm]["step_samples_per_second"] for pair in pairs_kept] for arm in common}
        mfu = {arm: statistics.median(rates[arm]) / throughputs[0] for arm in rates}
    return {"pairs": pairs_kept, **spread, "mfu": mfu}


def ours(work: Run) -> dict[str, Any]:
    """Run train.py as users start it."""
    with pairs.finished(work) as outcome:
        facts, steps = schema.read(outcome.folder), read_steps(outcome.folder)
    peak = predicted.peak_flops_per_second(facts)  # None on a CPU and for an unknown GPU
    return {
        "wall_samples_per_second": wall_samples_per_second(steps, work.config),
        "step_samples_per_second": facts.timing.samples_per_second,
        "losses": [step["loss"] for step in steps],
        "proof": facts.proof.model_dump(mode="json"),
        "box": facts.box,
        "peak_samples_per_second": peak and facts.world_size * peak / facts.model_flops_per_sequence,
    }


def wall_samples_per_second(steps: list[dict[str, Any]], config: RunConfig) -> float:
    """Return samples per second from the end of the warm-up to the end of the last step, with nothing left out."""
    warmed, timed = steps[config.timing_warmup_steps - 1], steps[config.timing_warmup_steps :]
    return sum(step["samples"] for step in timed) / (timed[-1]["elapsed_seconds"] - warmed["elapsed_seconds"])


def other(work: Run) -> dict[str, Any]:
    """Run Trainer, on ranks of its own. Raises RunFailed and Refusal."""
    environment = dict(os.environ)
    if work.strategy.name == "single":  # of several GPUs, Trainer would take all
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    else:
        environment["WORLD_SIZE"] = str(work.world_size)
    with tempfile.TemporaryDirectory(prefix="zero-study-benchmark-") as folder:
        words = work.arguments()
        program = [str(hf_trainer.__file__), work.strategy.name, folder, *words]
        work_name, limit = f"Trainer under {work.strategy.name}", pairs.TIMEOUT_SECONDS
        ranks = {"num_ranks": work.world_size, "environment": environment}
        answers = processes.run_ranks(program, work_name, timeout_seconds=limit, **ranks)
    return next(answer for answer in answers if answer)


@click.command()
@click.option("--pairs", "num_pairs", type=click.IntRange(1), default=5, help="pairs of runs per strategy")
@click.option("--strategies", default="ddp,zero2", metavar="NAMES", help="some, with commas between, or all")
@click.option("--work", type=click.Choice(tuple(WORKS)), default="small", help="what is trained")
@click.option("--size", help="size of the model [default: the work's; mini]")
@click.option("--num-processes", type=click.IntRange(1), help="of all but single [default: the strategy's]")
@click.option("--minutes", type=click.IntRange(1), help="begin no pair that is not expected to end in time")
@click.option("--data-dir", type=click.Path(path_type=Path), help="folder with imdb/ and tokenizers/")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write, or to complete")
def main(minutes: int | None, **options: Any) -> None:
    """Compare the training loop with Hugging Face's Trainer, at the same work.

    Exit status: 0 if every pair was compared, 1 if a strategy failed, 3 if pairs remain for the next call (--minutes).
    """
    slot = Slot(math.inf if minutes is None else 60.0 * minutes)
    try:
        sys.exit(measure(**options, slot=slot, command=recorded(options)))
    except Refusal as refusal:
        print(f"tools/measure/throughput.py: {refusal}", file=sys.stderr)
        sys.exit(2)


def recorded(options: dict[str, Any]) -> str:
    """Return the command line for the result's file, without its output, its time limit and folders of this machine."""
    options_told = {"pairs": options["num_pairs"]}
    options_told |= {name: options[name] for name in ("strategies", "work", "size", "num_processes")}
    options_told |= {"data_dir": "DIR"} if options["data_dir"] else {}
    return " ".join(["python tools/measure/throughput.py", *as_words(options_told)])


if __name__ == "__main__":
    main()
