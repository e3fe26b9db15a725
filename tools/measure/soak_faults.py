"""Inject faults into runs, and record what the user sees, after how long, and which files are left.

    python tools/measure/soak_faults.py [--only TEXT] [--output FILE]

Each fault is injected into the first run of a study with two runs. The second run must succeed in any case. This needs
Linux. Full disks are small tmpfs, which need root; if mounting is not permitted, the row says so. Exit status 1 if a
fault has an unexpected outcome, if record and outcome disagree, or if the study did not continue.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import click
import pairs
import psutil
import soak
import yaml

from study.records import schema
from study.records.schema import OutcomeStatus
from study.running.launch import RUN_FOLDER

STOPPED_SECONDS = 20  # of a collective, where a rank is stopped
WAIT_SECONDS = 400
SMALL = {"num_train_examples": 64, "num_eval_examples": 8, "sequence_length": 32, "learning_rate": 1e-3}
NEXT = {"flags": {**SMALL, "max_steps": 2, "measure": False}, "strategies": ["single"], "seeds": [1], "label": "next"}


@dataclass
class Scene:
    """A study while its first run trains, with what a fault needs: the folder and the processes."""

    run_folder: Path
    runner: subprocess.Popen[bytes]
    filler: Path | None = None

    def process(self, rank: int | None) -> psutil.Process:
        """Return a rank of the run, or the launcher."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                env = process.environ()
                of_run = env.get(RUN_FOLDER) == str(self.run_folder.resolve())
                if of_run and rank is None and "RANK" not in env and "accelerate.commands.launch" in process.cmdline():
                    return process
                if of_run and rank is not None and env.get("RANK") == str(rank):
                    return process
        raise SystemExit(f"no process of rank {rank}")


@dataclass
class Fault:
    name: str
    inject: Callable[[Scene], None]
    expected: str  # outcome
    words: str  # in its message
    strategy: str = "ddp"
    flags: dict[str, Any] = field(default_factory=dict)
    when: Callable[[Scene], bool] = lambda scene: soak.steps(scene.run_folder) >= 3
    disk: str = ""  # a small disk on the run's folder (output), or on the one that it swaps to
    mebibytes: int = 0
    runner_ends: bool = False  # with the fault, and the study goes on with its next call


def send(number: signal.Signals, rank: int | None) -> Callable[[Scene], None]:
    return lambda scene: scene.process(rank).send_signal(number)


def fill(name: str, but: int = 0) -> Callable[[Scene], None]:
    """Fill the disk that contains a folder of the run, except for `but` bytes."""

    def inject(scene: Scene) -> None:
        scene.filler = scene.run_folder / name / "filler"
        with open(scene.filler, "wb", buffering=0) as file:
            remaining = shutil.disk_usage(scene.filler.parent).free - but
            with suppress(OSError):
                while remaining > 0:
                    remaining -= file.write(b"x" * min(remaining, 1 << 20))

    return inject


def remove(name: str) -> Callable[[Scene], None]:
    return lambda scene: shutil.rmtree(scene.run_folder / name)


def swaps(scene: Scene) -> bool:
    return any(path.stat().st_size for path in (scene.run_folder / "swap").rglob("*") if path.is_file())


NVME = "zero3_nvme_offload"
NO_SPACE = "killed", "No space left on device"
SWAP = "crashed", "swap", NVME
FAULTS = [
    Fault("SIGKILL to rank 1", send(signal.SIGKILL, 1), "killed", "rank 1 was ended by SIGKILL"),
    Fault("SIGKILL to rank 0", send(signal.SIGKILL, 0), "killed", "rank 0 was ended by SIGKILL"),
    Fault("SIGKILL to rank 1 that swaps", send(signal.SIGKILL, 1), "killed", "rank 1 was ended by SIGKILL", NVME),
    Fault("SIGKILL to the launcher", send(signal.SIGKILL, None), "killed", "the launcher was ended by SIGKILL", NVME),
    Fault("SIGTERM to the launcher", send(signal.SIGTERM, None), "crashed", "interrupted by SIGTERM"),
    Fault("SIGKILL to everything, runner included", lambda scene: soak.kill_family(scene.runner.pid), "ok", "", NVME,
          {"max_steps": 40}, runner_ends=True),
    *(Fault(f"SIGSTOP to rank {rank}", send(signal.SIGSTOP, rank), "stalled", f"rank {rank} did not call", strategy,
            {"collective_timeout": STOPPED_SECONDS})
      for rank, strategy in ((1, "ddp"), (0, "ddp"), (1, "zero2"), (1, "zero3"), (1, "fsdp2"))),
    Fault("rm -rf of the run folder", remove("."), "killed", "was removed"),
    Fault("rm -rf of the run folder that is swapped to", remove("."), "killed", "was removed", NVME),
    Fault("output disk full while steps are written", fill("."), *NO_SPACE, disk="output", mebibytes=64),
    Fault("output disk full while a checkpoint is written", fill(".", but=1 << 20), *NO_SPACE,
          flags={"checkpoint_every": 40}, disk="output", mebibytes=64),
    Fault("output disk full while the record is written", fill("."), *NO_SPACE,
          flags={"max_steps": 8, "num_eval_examples": 256}, when=lambda scene: soak.steps(scene.run_folder) >= 8,
          disk="output", mebibytes=64),
    Fault("swap disk full at start", lambda scene: None, *SWAP, when=swaps, disk="swap", mebibytes=3),
    Fault("swap disk full in mid-run", fill("swap"), *SWAP, when=swaps, disk="swap", mebibytes=512),
    Fault("swap folder removed", remove("swap"), *SWAP),
]  # fmt: skip


@click.command(help=__doc__.splitlines()[0])
@click.option("--only", default="", metavar="TEXT", help="only faults whose name contains this")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write, and to go on with")
def main(only: str, output: Path | None) -> None:
    pairs.share_cores(num_processes=2)
    rows: list[dict[str, Any]] = soak.kept(output, "faults")
    finished = {(row["fault"], row["strategy"]) for row in rows}
    for fault in FAULTS:
        if only in f"{fault.name} ({fault.strategy})" and (fault.name, fault.strategy) not in finished:
            with tempfile.TemporaryDirectory(prefix="zero-study-faults-") as scratch:
                rows.append(try_fault(fault, Path(scratch)))
            print(json.dumps(rows[-1]), flush=True)
            soak.keep(output, "faults", "python tools/measure/soak_faults.py", faults=rows)
    sys.exit(not all(row["not_injected"] or row["as_expected"] for row in rows))


def try_fault(fault: Fault, scratch: Path) -> dict[str, Any]:
    row = {"fault": fault.name, "strategy": fault.strategy, "not_injected": None}
    flags = {**SMALL, "max_steps": 1500, **fault.flags}
    flags = {"size": "mini", **flags} if fault.strategy == NVME else flags  # of a smaller model nothing is swapped
    study, folder = scratch / "faults.yaml", scratch / "runs"
    parts = [{"flags": flags, "strategies": [fault.strategy], "label": "fault"}, NEXT]
    study.write_text(yaml.safe_dump({"question": "What is left?", "parts": parts}))
    words = [sys.executable, "-m", "study", "run", str(study), "--runs-dir", str(folder), "--timeout", "300"]
    planned = subprocess.run([*words[:3], "plan", *words[4:]], capture_output=True, text=True, check=True).stdout
    run_id = next(word for word in planned.split() if fault.strategy in word and word != fault.strategy)
    run_folder = folder / study.stem / run_id
    small = {"output": run_folder, "swap": run_folder / "swap"}.get(fault.disk)
    if small and (error := mount(small, fault.mebibytes)):
        return {**row, "not_injected": error}
    log = scratch / "log"
    try:
        with open(log, "wb") as log_file:
            runner = subprocess.Popen(words, stdout=log_file, stderr=log_file)
        scene = Scene(run_folder, runner)
        answer = json.dumps(watch(fault, scene, log, words))
        return {**row, **json.loads(answer.replace(f"{scratch}/", ""))}
    finally:
        if runner.poll() is None:
            soak.kill_family(runner.pid)
        if small:
            subprocess.run(["umount", "--lazy", str(small)], check=True)


def mount(folder: Path, mebibytes: int) -> str | None:
    """Mount a small disk on a folder. Return the reason if that is not permitted."""
    folder.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "none", str(folder)]
    process = subprocess.run(words, capture_output=True, text=True)
    return f"not injected: {process.stderr.strip()}" if process.returncode else None


def watch(fault: Fault, scene: Scene, log: Path, words: list[str]) -> dict[str, Any]:
    """Wait for the moment of a fault, inject it, and return what happened."""
    soak.wait(lambda: fault.when(scene) or scene.runner.poll() is not None, WAIT_SECONDS)
    if scene.runner.poll() is not None:
        raise SystemExit(f"{fault.name}: ended before: {log.read_text(errors='replace')[-2000:]}")
    at_step, record = soak.steps(scene.run_folder), None
    fault.inject(scene)
    began = time.monotonic()
    if fault.runner_ends:
        left = left_in(scene.run_folder)
        with open(log, "ab") as said_again:
            exit_status = subprocess.run(words, stdout=said_again, stderr=said_again, timeout=WAIT_SECONDS).returncode
        seconds, in_swap = time.monotonic() - began, swapped(scene.run_folder)
        next_ok = expected = exit_status == 0
        status = "ok" if next_ok else f"exit status {exit_status}"
        message = "nothing, of a runner that is no more; the same command once more did both runs"
    else:
        head = f"[1/2] {scene.run_folder.name}: "
        outcomes = tuple(f"{head}{name}, " for name in get_args(OutcomeStatus))

        def line() -> str | None:
            return next(
                (text for text in log.read_text(errors="replace").splitlines() if text.startswith(outcomes)),
                None,
            )

        soak.wait(lambda: line() is not None or scene.runner.poll() is not None, WAIT_SECONDS)
        seconds = time.monotonic() - began
        left, in_swap = left_in(scene.run_folder), swapped(scene.run_folder)
        if scene.filler:
            scene.filler.unlink(missing_ok=True)
        last_line = line() or log.read_text(errors="replace").strip().splitlines()[-1]
        if (scene.run_folder / "record.json").exists():
            run_record = schema.read(scene.run_folder)
            record = {"status": run_record.status, "error": run_record.failure.error if run_record.failure else None}
        soak.wait(lambda: scene.runner.poll() is not None, WAIT_SECONDS)
        next_ok = any(re.match(r"\[2/2\] .*: ok, ", one) for one in log.read_text(errors="replace").splitlines())
        status, _, message = re.sub(r" \([^()]+\); about .* left$", "", last_line.removeprefix(head)).partition(", ")
        agrees = record is None or record["status"] == status or (record["status"], status) in AGREE
        expected = status == fault.expected and fault.words in message and agrees and next_ok
    return {
        "at_step": at_step, "status": status, "message": message, "seconds": round(seconds, 1), "record": record,
        "left": left, "left_to_swap": in_swap, "next_run": "ok" if next_ok else "did not run",
        "traceback_of_ours": "Traceback" in log.read_text(errors="replace"),
        "as_expected": expected and not in_swap,
    }  # fmt: skip


# A record's word, and the outcome's, where they are not the same and yet agree.
AGREE = {("interrupted", "crashed"), ("failed", "crashed")}


def left_in(folder: Path) -> list[str]:
    return sorted({*os.listdir(folder)} - {"filler"}) if folder.exists() else []


def swapped(run_folder: Path) -> list[str]:
    swap = run_folder / "swap"
    return sorted(str(path.relative_to(swap)) for path in swap.rglob("*") if path.is_file() and path.name != "filler")


if __name__ == "__main__":
    main()
