"""Inject faults between machines, and write down what each machine prints and after how many seconds it ends.

    python tools/measure/soak_machines.py [--only TEXT] [--output FILE]

The machines are two or three network namespaces of this one (tools/measure/laboratory.py; Linux, root). Each runs the
command that a user would start there. With --only, FILE keeps its rows of the other faults. Exit status 1 if a machine
prints something else than expected, or does not end in time.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import click
import psutil
import soak
from laboratory import Lab

from study.records.schema import OutcomeStatus

TIMEOUT_SECONDS = 30  # --collective-timeout
LONGEST_SECONDS = 300
FLAGS = (
    "--num-train-examples 64 --num-eval-examples 8 --global-batch-size 12 --sequence-length 32 --learning-rate 1e-3 "
    f"--max-steps 400 --collective-timeout {TIMEOUT_SECONDS}"
)
COMMAND = (
    "train --strategy {fault.strategy} --num-processes {fault.processes} --num-machines {fault.machines} "
    "--machine-rank {rank} --main-process-ip {ip} --output-dir {folder} " + FLAGS
)


@dataclass
class Scene:
    """The simulated machines, and the process that was started on each."""

    lab: Lab
    started: dict[int, subprocess.Popen[str]]

    def ranks(self, machine: int) -> list[psutil.Process]:
        """List the ranks on a machine in order."""
        processes = {}
        for process in psutil.Process(self.started[machine].pid).children(recursive=True):
            with suppress(psutil.Error):
                if "RANK" in (variables := process.environ()):
                    processes[int(variables["RANK"])] = process
        return [processes[rank] for rank in sorted(processes)]


@dataclass
class Fault:
    name: str
    expected: Mapping[int, str]  # machine -> words of its last line
    inject: Callable[[Scene], None] | None = None  # after three steps; None: it is there from the start
    strategy: str = "ddp"
    machines: int = 2
    processes: int = 2
    starts: tuple[int, ...] = (0, 1)  # the machines on which the command is started
    ranks: Mapping[int, int] = field(default_factory=dict)  # machine -> what it takes for its rank
    ip: str | None = None  # that machine 1 takes for machine 0's
    flags: Mapping[int, str] = field(default_factory=dict)
    variables: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    before: Callable[[Lab], None] | None = None


def another_version(folder: Path) -> dict[str, str]:
    """Return an environment in which transformers reports the version 4.0.0."""
    described = folder / "transformers-4.0.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.0.0\n")
    return {"PYTHONPATH": str(folder)}


def to_rank_of_machine_1(number: signal.Signals) -> Callable[[Scene], None]:
    return lambda scene: scene.ranks(1)[0].send_signal(number)


TWICE = "Give each machine its own --machine-rank"
GONE = "killed: the connection to rank {} (machine {}) was lost"
NOT_THERE = "machine 0 did not answer at"
NO_RANK_1 = "stalled: rank 1 (machine 1) did not call"
FAULTS = [
    Fault("machine 1 is never started", {0: "1 of 2 machines connected within"}, starts=(0,)),
    Fault("machine 0 is never started: a closed port", {1: NOT_THERE}, starts=(1,)),
    Fault("an address that nobody has", {0: "1 of 2 machines connected", 1: NOT_THERE}, ip="10.77.0.99"),
    Fault("a firewall that drops all", {0: "1 of 2 machines connected", 1: NOT_THERE}, before=lambda lab: lab.cut(1)),
    Fault("machine rank 1 twice", dict.fromkeys((0, 1, 2), TWICE), machines=3, processes=3, starts=(0, 1, 2),
          ranks={2: 1}),
    Fault("machine rank 0 twice", dict.fromkeys((0, 1), TWICE), ranks={1: 0}),
    Fault("machine rank 2 of 2", {1: "machine_rank 2 of 2 machine(s)"}, ranks={1: 2}, starts=(1,)),
    Fault("three processes on two machines", {0: "pass --num_processes 2", 1: "pass --num_processes 2"}, processes=3),
    Fault("another version on machine 1", {0: "transformers 4.0.0", 1: "transformers 4.0.0"}),
    Fault("another seed on machine 1", {0: "has seed 1", 1: "has seed 1"}, flags={1: "--seed 1"}),
    Fault("an extension that machine 1 cannot build",
          {0: "1 of 2 machines connected", 1: "set TORCH_EXTENSIONS_DIR to a folder"}, strategy="zero2_cpu_offload",
          variables={1: {"TORCH_EXTENSIONS_DIR": "/dev/null"}}),
    Fault("checkpoints without a shared disk", {0: "does not see", 1: "does not see"},
          flags=dict.fromkeys((0, 1), "--checkpoint-every 2")),
    *(Fault(f"the cable of machine 1 is pulled{stage}", {0: NO_RANK_1, 1: "rank 0 (machine 0)"},
            lambda scene: scene.lab.cut(1), strategy) for stage, strategy in (("", "ddp"), (", stage 3", "zero3"))),
    Fault("all of machine 1 is killed", {0: GONE.format(1, 1)}, lambda scene: scene.lab.kill(1)),
    Fault("all of machine 0 is killed", {1: GONE.format(0, 0)}, lambda scene: scene.lab.kill(0)),
    Fault("SIGKILL to the rank of machine 1", {0: GONE.format(1, 1), 1: "killed: rank 1"},
          to_rank_of_machine_1(signal.SIGKILL)),
    Fault("SIGSTOP to the rank of machine 1",
          {0: NO_RANK_1, 1: "stalled: machine 0 has not"},
          to_rank_of_machine_1(signal.SIGSTOP)),
]  # fmt: skip


def play(fault: Fault) -> list[dict[str, object]]:
    """Start the command on all machines and inject the fault. Return each machine's message, and after how long."""
    place = Path(tempfile.mkdtemp(prefix="machines-"))
    folder = place / "run"
    folder.mkdir()
    variables = dict(fault.variables)
    if "version" in fault.name:
        variables = {1: another_version(place / "packages")}
    outputs = {machine: place / f"machine{machine}.txt" for machine in range(fault.machines)}
    try:
        with Lab(fault.machines, own_folders=[folder]) as lab:
            if fault.before:
                fault.before(lab)
            started = {}
            for machine in fault.starts:
                rank, ip = fault.ranks.get(machine, machine), fault.ip if fault.ip and machine else lab.main_ip
                line = COMMAND.format(fault=fault, rank=rank, ip=ip, folder=folder)
                words = [sys.executable, "-m", "study", *line.split(), *fault.flags.get(machine, "").split()]
                with open(outputs[machine], "w") as output:
                    started[machine] = lab.start(
                        machine, words, stdout=output, stderr=output, text=True,
                        env={**os.environ, "OMP_NUM_THREADS": "1", **variables.get(machine, {})},
                    )  # fmt: skip
            scene = Scene(lab, started)
            began = time.monotonic()
            if fault.inject:
                soak.wait(lambda: soak.steps(folder) >= 3, LONGEST_SECONDS, 0.1)
                began = time.monotonic()
                fault.inject(scene)
            ended: dict[int, float] = {}
            while len(ended) < len(started) and time.monotonic() - began < LONGEST_SECONDS:
                time.sleep(0.2)
                for machine, process in started.items():
                    if machine not in ended and process.poll() is not None:
                        ended[machine] = time.monotonic() - began
        return [_row(fault, machine, started[machine], ended.get(machine), outputs[machine]) for machine in started]
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _row(
    fault: Fault, machine: int, process: subprocess.Popen[str], seconds: float | None, output: Path
) -> dict[str, object]:
    lines = output.read_text(errors="replace").splitlines()
    outcomes = ("zero-study: ", *(f"{name}: " for name in get_args(OutcomeStatus)))
    lines = [re.sub(r"/\S*/machines-\w+/", "", line) for line in lines if line.startswith(outcomes)]
    last_line = lines[-1] if lines else ""
    words = fault.expected.get(machine)
    # What was killed with its machine says nothing.
    is_expected = words is None or (seconds is not None and any(words in line for line in lines))
    return {
        "fault": fault.name, "strategy": fault.strategy, "machine": machine, "status": process.poll(),
        "seconds": None if seconds is None else round(seconds, 1),
        "said": last_line if words is None else next((line for line in lines if words in line), last_line),
        "is_expected": is_expected,
    }  # fmt: skip


@click.command(help=__doc__)
@click.option("--only", default="", metavar="TEXT", help="inject only faults whose name contains this")
@click.option("--output", type=click.Path(path_type=Path), help="write the table here as JSON")
def main(only: str, output: Path | None) -> None:
    earlier = json.loads(output.read_text()) if output and output.exists() else {"rows": []}
    earlier_rows = earlier.pop("rows")
    rows: list[dict[str, object]] = []
    are_expected = []
    for fault in FAULTS:
        if only not in fault.name:
            rows += [
                {"finished_at": earlier["finished_at"], **row} for row in earlier_rows if row["fault"] == fault.name
            ]
            continue
        for row in play(fault):
            rows.append({"finished_at": datetime.now(UTC).isoformat(timespec="seconds"), **row})
            are_expected.append(row["is_expected"])
            print("  ".join(str(value) for value in row.values()), flush=True)
    # Rows that are kept were measured by an earlier call, perhaps on another machine.
    calls = [*earlier.pop("earlier_calls", []), earlier] if only and earlier_rows else []
    soak.keep(
        output, "machines", "python tools/measure/soak_machines.py",
        collective_timeout=TIMEOUT_SECONDS, rows=rows, earlier_calls=calls,
    )  # fmt: skip
    sys.exit(not all(are_expected))


if __name__ == "__main__":
    main()
