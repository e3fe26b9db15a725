"""How does one run take place on all machines of a laboratory? The others are started, waited for and removed here."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

from study.lab.machines import Lab
from study.run import Run
from study.running import bound

MAIN_PORT = 29500
LEAVING_SECONDS = 30.0  # for the others, once machine 0 has ended


@contextmanager
def others(
    run: Run, command: Callable[[Run], list[str]], environment: dict[str, str]
) -> Iterator[tuple[Run, Callable[[list[str]], list[str]]]]:
    """Start a run's part on every machine but the first, while inside; a run without a laboratory has none.

    Yields the run as machine 0 has it, and what makes of a command one that runs there. What the others print is in
    machine1.log and so on in the run directory.
    """
    if run.laboratory is None:
        yield run, lambda words: words
        return
    with Lab(run.num_machines, run.laboratory, [run.folder]) as lab, ExitStack() as logs:
        run = replace(run, main_process_ip=lab.main_ip, main_process_port=MAIN_PORT)
        started = []
        for machine in range(1, run.num_machines):
            log = logs.enter_context(open(run.folder / f"machine{machine}.log", "w"))
            words = bound.command(lab.command(machine, command(replace(run, machine_rank=machine))))
            started.append(subprocess.Popen(words, stdout=log, stderr=log, env=environment))
        yield run, lambda words: lab.command(0, words)
        deadline = time.monotonic() + LEAVING_SECONDS
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
