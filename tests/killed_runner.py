"""Runs a study of fake runs, kills its runner at random moments, and ends with one undisturbed call. It forks.

python killed_runner.py STUDY.yaml FOLDER RUNS.json KILLS SEED
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import fake_train

from study import files
from study.running import checks, launch, runner, studies


def main() -> None:
    study, folder, fakes = studies.find(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    kills, moments = int(sys.argv[4]), random.Random(int(sys.argv[5]))
    launch.command = fake_train.command(fakes)
    checks.check = lambda *_: None
    files.ROOT = folder  # no reports to read times from
    landed, finished = 0, {}
    for _ in range(kills):
        runner_process = start(study, folder)
        time.sleep(moments.uniform(0, 0.3))
        os.kill(runner_process, signal.SIGKILL)
        landed += os.WIFSIGNALED(os.waitpid(runner_process, 0)[1])
        finished |= {str(path): path.read_text() for path in folder.glob("*/record.json") if str(path) not in finished}
    status = os.waitstatus_to_exitcode(os.waitpid(start(study, folder), 0)[1])
    intact = all(Path(path).read_text() == content for path, content in finished.items())
    print(json.dumps({"landed": landed, "finished": len(finished), "intact": intact, "status": status}))


def start(study: studies.Study, folder: Path) -> int:
    child = os.fork()
    if not child:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os._exit(runner.run(study, studies.runs(study, folder=folder), folder, timeout_seconds=60, fail_fast=False))
    return child


if __name__ == "__main__":
    main()
