"""Kill and resume runs under every strategy, and compare them bit by bit with undisturbed runs.

    python tools/measure/soak_resume.py [--kills 3] [--seed 0] [--only zero3] [--output FILE]

For each strategy and workload, one run is undisturbed, and its model is exported. As many runs as `--kills` says are
killed at a random step, launcher and ranks, one of three while it writes a checkpoint. Each is resumed by the same
command. Exit status 1 if a loss, a gradient norm, an evaluation or the final weights differ in any bit.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import pairs
import soak

from study.config import build_config
from study.errors import Refusal
from study.records import schema
from study.records.steps import read_steps
from study.run import Run, make_run
from study.running import checks, launch
from study.strategy import file

FLAGS: dict[str, Any] = {**soak.SHORT, "max_steps": 24, "eval_every": 8}
# In fp32 every strategy, in bf16 one of each way to keep masters.
CASES = [(name, workload, "fp32") for name in file.names() for workload in ("bert-imdb", "gpt-wikitext")]
CASES += [(name, "bert-imdb", "bf16") for name in ("zero1", "zero2_cpu_offload", "zero3", "fsdp2")]
WAIT_SECONDS = 600


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--kills", type=click.IntRange(min=1), default=3, help="of each strategy and workload")
@click.option("--seed", type=int, default=0, help="of the random moments")
@click.option("--only", default="", metavar="TEXT", help="only strategies whose name contains this")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write, and to go on with")
def main(kills: int, seed: int, only: str, output: Path | None) -> None:
    pairs.share_cores(num_processes=2)
    finished: list[dict[str, Any]] = soak.kept(output, "cases")
    for name, workload, precision in CASES:
        names = {"strategy": name, "workload": workload, "precision": precision}
        if only not in name or any(names.items() <= case.items() for case in finished):
            continue
        draw = random.Random(f"{seed} {name} {workload} {precision}")
        with tempfile.TemporaryDirectory(prefix="zero-study-resume-") as folder:
            case = {**names, **try_case(name, workload, precision, kills, draw, Path(folder))}
        finished.append(case)
        print(json.dumps(case), flush=True)
        soak.keep(
            output, "resume", f"python tools/measure/soak_resume.py --kills {kills} --seed {seed}", cases=finished
        )
    sys.exit(not all(case["skipped"] or all(kill["identical"] for kill in case["kills"]) for case in finished))


def try_case(
    strategy: str, workload: str, precision: str, kills: int, draw: random.Random, folder: Path
) -> dict[str, Any]:
    """Run one strategy undisturbed and killed, and return the result of each kill."""
    flags = dict(FLAGS, workload=workload, precision=precision)
    chosen = file.read_by_name(strategy)
    if chosen.offloads_to_nvme:
        flags["size"] = "mini"  # of a smaller model nothing is swapped
    processes = chosen.fixed_processes or 2
    if processes < 4:
        flags["micro_batch_size"] = 2  # and so accumulation
    run = make_run(build_config(**flags, output_dir=folder / "undisturbed"), chosen, processes)
    case: dict[str, Any] = {"num_processes": processes, "skipped": None, "kills": []}
    try:
        checks.check(run)
    except Refusal as refusal:
        return {**case, "skipped": str(refusal)}
    expected = finish(run, flags, folder / "undisturbed")
    case["exported"] = export(folder / "undisturbed")
    for number in range(kills):
        while_writing = number % 3 == 2
        case["kills"].append(kill_and_resume(run, flags, folder / str(number), draw, while_writing, expected))
    return case


def kill_and_resume(
    run: Run, flags: dict[str, Any], folder: Path, draw: random.Random, while_writing: bool, expected: dict[str, Any]
) -> dict[str, Any]:
    """Start a run, kill it at a random moment, resume it, and compare it with the undisturbed run."""
    while not kill(run, flags, folder, draw, while_writing):  # the run was quicker
        shutil.rmtree(folder)
    unfinished = bool(list(folder.glob("checkpoints/*.part")))
    killed_at = soak.steps(folder)
    result = finish(run, flags, folder)
    differing = [name for name, value in expected.items() if name != "resumed_at" and result[name] != value]
    return {
        "while_writing": while_writing, "left_an_unfinished_checkpoint": unfinished, "killed_after_step": killed_at,
        "resumed_after_step": max(result["resumed_at"], default=0), "identical": not differing, "differing": differing,
        "left": sorted(path.name for path in folder.glob("checkpoints/*.part")),
    }  # fmt: skip


def kill(run: Run, flags: dict[str, Any], folder: Path, draw: random.Random, while_writing: bool) -> bool:
    """Start a run and kill launcher and ranks at a random moment. Return whether the run was still alive."""
    every, last = flags["checkpoint_every"], flags["max_steps"]
    at = draw.choice(range(every, last, every)) if while_writing else draw.randrange(1, last - 1)
    process = start(run, flags, folder)

    def has_come() -> bool:
        exists = any(folder.glob(f"checkpoints/step-{at:08d}.part/*"))
        return exists if while_writing else soak.steps(folder) >= at

    soak.wait(lambda: has_come() or process.poll() is not None, WAIT_SECONDS, 0.002)
    time.sleep(draw.random() * 0.05 if while_writing else 0)
    if process.poll() is not None:
        check_end(run, process)
        return False
    soak.kill_family(process.pid)
    process.communicate()
    return not (folder / "record.json").exists()


def export(folder: Path) -> dict[str, float | int]:
    """Export a run's model by the command. Return the model's held-out loss, and that of the run."""
    words = [sys.executable, "-m", "study", "export", str(folder)]
    process = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_SECONDS)
    if process.returncode:
        raise SystemExit(f"export: status {process.returncode}: {process.stderr[-500:]}")
    loss = float(process.stdout.split("held-out examples ")[1].split(",")[0])
    return {"loss": loss, "own_loss": schema.read(folder).evaluation[-1]["loss"]}


def start(run: Run, flags: dict[str, Any], folder: Path) -> subprocess.Popen[bytes]:
    """Start `accelerate launch` with a run's flags, to begin or to resume the run."""
    requested = make_run(build_config(**flags, output_dir=folder), run.strategy, run.world_size)
    return subprocess.Popen(launch.command(requested), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def check_end(run: Run, process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=WAIT_SECONDS)
    if process.returncode:
        raise SystemExit(f"{run.strategy.name}: status {process.returncode}: {errors.decode()[-800:]}")


def finish(run: Run, flags: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run to the end, and return all values that must be equal."""
    check_end(run, start(run, flags, folder))
    record, steps = schema.read(folder), read_steps(folder)
    return {
        "losses": [step["loss"] for step in steps], "gradient_norms": [step["grad_norm"] for step in steps],
        "evaluation": record.evaluation, "final_parameters": record.final_parameters.sha256,
        "collectives": [collective.model_dump() for collective in record.collectives_per_step],
        "tokens": record.tokens, "resumed_at": record.resumed_at,
    }  # fmt: skip


if __name__ == "__main__":
    main()
