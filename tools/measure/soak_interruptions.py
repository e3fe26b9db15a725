"""Kill the runner of a study at random moments, resume the study, and compare the results with an undisturbed study.

    python tools/measure/soak_interruptions.py [--kills 20] [--seed 0] [--output FILE]

The study has twelve real runs of both workloads on one and two processes. It runs once undisturbed. Then it is started
again and again, and its runner is killed with SIGKILL after a random part of the time of two runs, until the last call
may finish. Exit status 1 if a finished record has changed, a process was left, the last call failed, or a loss differs
in any bit.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import pairs
import psutil
import soak

from study import files
from study.errors import RunFailed
from study.records import schema
from study.records.steps import read_steps
from study.running import studies

STUDY = """\
question: What is left of a study whose runner is killed?
parts:
  - flags: &short
      workload: bert-imdb
      num_train_examples: 64
      num_eval_examples: 16
      max_steps: 8
      learning_rate: 1.0e-3
    strategies: &few [single, ddp, zero2, zero3]
    seeds: [0, 1]
  - flags: {<<: *short, workload: gpt-wikitext}
    strategies: *few
"""
RUNS_BETWEEN_KILLS = 2  # at most, by the time that runs take undisturbed
LEFT_SECONDS = 10  # for the kernel to end what a killed runner started


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--kills", type=click.IntRange(min=1), default=20, help="times that the runner is killed")
@click.option("--seed", type=int, default=0, help="of the random moments")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write")
def main(kills: int, seed: int, output: Path | None) -> None:
    pairs.share_cores(num_processes=2)
    with tempfile.TemporaryDirectory(prefix="zero-study-benchmark-") as folder:
        study = Path(folder) / "interruptions.yaml"
        study.write_text(STUDY)
        result = measure(study, Path(folder), kills, random.Random(seed))
    print(
        "{num_runs} runs; killed {kills} times; {finished_before_the_last_call} finished before the last call; "
        "{changed} of their records changed, {processes_left} processes left, {differing} runs differ".format(**result)
    )
    command = f"python tools/measure/soak_interruptions.py --kills {kills} --seed {seed}"
    soak.keep(output, "interruptions", command, seed=seed, study=STUDY, **result)
    sys.exit(1 if failed(result) else 0)


def measure(study: Path, folder: Path, kills: int, moments: random.Random) -> dict[str, Any]:
    """Run the study undisturbed and interrupted. Raises RunFailed if the undisturbed study fails."""
    num_runs = len(studies.runs(studies.find(str(study))))
    started = time.monotonic()
    with start(study, folder / "undisturbed") as runner:
        if runner.wait():
            tail = log(folder / "undisturbed").read_text()[-2000:]
            raise RunFailed(f"the undisturbed study: exit status {runner.returncode}\n{tail}")
    undisturbed_seconds = time.monotonic() - started
    print(f"undisturbed: {num_runs} runs in {undisturbed_seconds:.0f} s", flush=True)

    rows, finished, num_left = [], {}, 0
    interrupted = folder / "interrupted"
    for number in range(1, kills + 1):
        seconds = moments.uniform(0, RUNS_BETWEEN_KILLS * undisturbed_seconds / num_runs)
        with start(study, interrupted) as runner:
            time.sleep(seconds)
            ended_before = runner.poll() is not None
            runner.send_signal(signal.SIGKILL)
        num_left += processes_left(interrupted)
        finished = {**finished_records(interrupted), **finished}
        rows.append({"after_seconds": seconds, "ended_before": ended_before, "finished_runs": len(finished)})
        print(f"{number}/{kills}: killed after {seconds:.1f} s, {len(finished)} runs finished", flush=True)
    with start(study, interrupted) as runner:
        status = runner.wait()
    at_the_end = finished_records(interrupted)
    return {
        "num_runs": num_runs, "undisturbed_seconds": undisturbed_seconds, "kills": kills, "each_kill": rows,
        "finished_before_the_last_call": len(finished),
        "changed": sum(at_the_end.get(name) != digest for name, digest in finished.items()),
        "processes_left": num_left, "last_exit_status": status, "finished_at_the_end": len(at_the_end),
        "differing": differing(folder / "undisturbed", interrupted),
    }  # fmt: skip


def failed(result: dict[str, Any]) -> bool:
    complete = result["finished_at_the_end"] == result["num_runs"]
    bad = result["changed"], result["processes_left"], result["last_exit_status"], result["differing"]
    return not complete or any(bad)


def start(study: Path, runs_dir: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "study", "run", str(study), "--runs-dir", str(runs_dir)]
    with open(log(runs_dir), "a") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def log(runs_dir: Path) -> Path:
    return runs_dir.with_suffix(".log")


def processes_left(folder: Path) -> int:
    """Count the processes that still use a folder after the kernel had time to end them."""
    soak.wait(lambda: not _working_below(folder), LEFT_SECONDS, 0.1)
    return _working_below(folder)


def _working_below(folder: Path) -> int:
    commands = (process.info["cmdline"] or [] for process in psutil.process_iter(["pid", "cmdline"]))
    return sum(any(word.startswith(str(folder) + os.sep) for word in command) for command in commands)


def finished_records(folder: Path) -> dict[str, str]:
    """Return the digests of records with status ok, by the names of the runs."""
    paths = folder.glob("*/*/record.json")
    return {path.parent.name: files.sha256(path) for path in paths if schema.read(path).status == "ok"}


def differing(undisturbed: Path, interrupted: Path) -> int:
    """Count the runs whose losses or final parameters differ in any bit between the folders."""
    facts = []
    for folder in (undisturbed, interrupted):
        by_run = {}
        for path in folder.glob("*/*/record.json"):
            record = schema.read(path)
            losses = [line["loss"] for line in read_steps(path)]
            by_run[record.run_id] = losses, record.final_parameters and record.final_parameters.sha256
        facts.append(by_run)
    return sum(facts[0].get(name) != facts[1].get(name) for name in facts[0].keys() | facts[1].keys())


if __name__ == "__main__":
    main()
