"""How is one command run on all machines of a laboratory, and what does each of them say?"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from typing import IO

from study.lab.machines import Lab


def run(lab: Lab, line: str, say: Callable[[str], None]) -> list[int]:
    """Run a line of shell on every machine at once; return their exit statuses. `say` gets each line they print.

    In the line $MACHINE_RANK, $NUM_MACHINES and $MAIN_PROCESS_IP stand for what a launcher asks.
    """
    started = [
        lab.start(
            machine,
            ["sh", "-c", line],
            env={**os.environ, **lab.variables(machine)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for machine in range(lab.num_machines)
    ]
    readers = [
        threading.Thread(target=_pass_on, args=(process.stdout, f"machine {machine}: ", say), daemon=True)
        for machine, process in enumerate(started)
    ]
    for reader in readers:
        reader.start()
    statuses = [process.wait() for process in started]
    for reader in readers:
        reader.join()
    return statuses


def _pass_on(lines: IO[str], start: str, say: Callable[[str], None]) -> None:
    for line in lines:
        say(start + line.rstrip("\n").rpartition("\r")[2])
