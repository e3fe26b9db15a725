"""Is the study's loop as fast as Hugging Face's Trainer at the same work, everything that it measures included?

    python -m study.benchmarks.throughput [--pairs 5] [--strategies ddp,zero2] [--size mini] [--output FILE]

Two ratios, each ours over Trainer's. `wall`: samples per second from the end of the warm-up to the end of the last
step, on rank 0's clock, nothing left out: our probed step and our gathering of losses count. `step`: samples per second
at the median step; ours is the record's timing, Trainer's the median of the times between two ends of steps.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from study import record
from study.benchmarks import hf_trainer, pairs
from study.benchmarks.pairs import RunFailed, Work
from study.config import Parser, Refusal, RunConfig

# Of one run, 45 steps of some 0.2 s on two cores; the eval split is as small as it may be, since Trainer has none here.
FLAGS: dict[str, Any] = {
    "workload": "bert-imdb",
    "sequence_length": 64,
    "global_batch_size": 16,
    "num_train_examples": 720,
    "num_eval_examples": 16,
    "max_steps": 45,
    "timing_warmup_steps": 5,
    "learning_rate": 3e-4,
    "dropout": 0.1,
}
# The losses of two programs that do the same additions in another order.
LOSS_TOLERANCE = 1e-4
# What both engines must agree on, beside the losses; the rest of the proof is checked in each arm.
SAME = ("world_size", "engine_class", "optimizer_class", "zero_stage", "reduce_bucket_size", "overlap_comm")


def main(words: list[str]) -> int:
    parser = Parser(prog="study.benchmarks.throughput", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs per strategy (default: 5)")
    parser.add_argument("--strategies", default="ddp,zero2", help="of ddp, zero1 and zero2 (default: ddp,zero2)")
    parser.add_argument("--size", default="mini", help="size of BERT (default: mini)")
    parser.add_argument("--data-dir", type=Path, help="folder with imdb/ and tokenizers/ (default: synthetic text)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(words)
    if options.pairs < 1:
        raise Refusal(f"--pairs {options.pairs}: must be at least 1")
    flags = {**FLAGS, "size": options.size, **pairs.text_flags(options.data_dir)}
    pairs.share_cores(num_processes=2)
    planned = {name: plan(name, flags) for name in options.strategies.split(",")}
    results = {name: compare(work, options.pairs) for name, work in planned.items()}
    for name, result in results.items():
        print(f"{name}: ours/Trainer wall {pairs.show(result['wall_ratio'])}, step {pairs.show(result['step_ratio'])}")
    if options.output:
        config = pairs.shown_config(next(iter(planned.values())).config)
        head = pairs.report("throughput", options, {"config": config, "loss_tolerance": LOSS_TOLERANCE})
        record.write_json(options.output, {**head, "strategies": results})
    return 0


def plan(strategy_name: str, flags: dict[str, Any]) -> Work:
    """Check that both arms can do this work. Raises Refusal."""
    work = pairs.plan(strategy_name, flags)
    hf_trainer.check(work.config, strategy_name)
    return work


def compare(work: Work, num_pairs: int) -> dict[str, Any]:
    """Run the pairs of one strategy. Raises RunFailed where a run fails or the arms did not do the same work."""
    arms = {"ours": functools.partial(ours, work), "trainer": functools.partial(trainer, work)}

    def say(arm: str, pair: int, facts: dict[str, Any]) -> None:
        print(
            f"{work.strategy.name} pair {pair}/{num_pairs} {arm}: {facts['wall_samples_per_second']:.2f} samples/s, "
            f"{facts['step_samples_per_second']:.2f} at the median step, final loss {facts['losses'][-1]:.4f}",
            flush=True,
        )

    return summarize(pairs.run_pairs(arms, num_pairs, say))


def summarize(done: list[dict[str, Any]]) -> dict[str, Any]:
    """Reduce pairs to what is kept: rates, ratios and how far apart the losses were. Raises RunFailed as `compare`."""
    kept = []
    for pair in done:
        arms = {arm: dict(pair[arm]) for arm in ("ours", "trainer")}
        differ = [name for name in SAME if arms["ours"]["proof"][name] != arms["trainer"]["proof"][name]]
        if differ:
            seen = {arm: {name: facts["proof"][name] for name in differ} for arm, facts in arms.items()}
            raise RunFailed(f"the arms are not the same work: {seen}")
        losses = list(zip(arms["ours"]["losses"], arms["trainer"]["losses"], strict=True))
        differences = [abs(mine - theirs) / abs(theirs) for mine, theirs in losses]
        for step, difference in enumerate(differences, 1):
            if not difference <= LOSS_TOLERANCE:
                mine, theirs = losses[step - 1]
                raise RunFailed(
                    f"the arms are not the same work: step {step} has loss {mine} in ours, {theirs} in Trainer"
                )
        for facts in arms.values():
            facts["final_loss"] = facts.pop("losses")[-1]
            facts["proof"] = {name: facts["proof"][name] for name in SAME}
        entry = {"order": pair["order"], **arms, "largest_loss_difference": max(differences)}
        for kind in ("wall", "step"):
            rate = f"{kind}_samples_per_second"
            entry[f"{kind}_ratio"] = arms["ours"][rate] / arms["trainer"][rate]
        kept.append(entry)
    spread = {ratio: pairs.summarize([pair[ratio] for pair in kept]) for ratio in ("wall_ratio", "step_ratio")}
    return {"pairs": kept, **spread}


def ours(work: Work) -> dict[str, Any]:
    """One run of train.py, as users start it, measuring."""
    facts, steps = pairs.run_ours(work)
    return {
        "wall_samples_per_second": wall_samples_per_second(steps, work.config),
        "step_samples_per_second": facts.timing.samples_per_second,
        "losses": [step["loss"] for step in steps],
        "proof": facts.proof.model_dump(mode="json"),
    }


def wall_samples_per_second(steps: list[dict[str, Any]], config: RunConfig) -> float:
    """Samples over the time from the end of the warm-up to the end of the last step, nothing left out."""
    warmed, timed = steps[config.timing_warmup_steps - 1], steps[config.timing_warmup_steps :]
    return sum(step["samples"] for step in timed) / (timed[-1]["elapsed_seconds"] - warmed["elapsed_seconds"])


def trainer(work: Work) -> dict[str, Any]:
    """One run of Trainer, started by torchrun. Raises RunFailed with the end of what it said."""
    with tempfile.TemporaryDirectory(prefix="zero-study-benchmark-") as folder:
        result, said = Path(folder) / "result.json", Path(folder) / "stderr.log"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        program = [
            "--nproc-per-node",
            str(work.world_size),
            "-m",
            "study.benchmarks.hf_trainer",
            "--strategy",
            work.strategy.name,
            "--result",
            str(result),
        ]
        command = [*torchrun, *program, *pairs.train_arguments(work.flags)]
        with open(said, "w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
            try:
                status = process.wait(pairs.TIMEOUT_SECONDS)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise RunFailed(f"{' '.join(command)}\nnot done after {pairs.TIMEOUT_SECONDS} s") from None
                raise
        if status or not result.exists():
            tail = "\n".join(said.read_text(errors="replace").splitlines()[-60:])
            raise RunFailed(f"{' '.join(command)}\nexit status {status}\n{tail}")
        return json.loads(result.read_text())


if __name__ == "__main__":
    pairs.end(main)
