"""What do a published program, and pairs of settings that differ unseen, do when they run?

`defects` has the a100-replication's program and its comparisons, of which `program` is one start; `traps` has the
pairs, of which `trap_arm` trains one side. `python -m study.claims.published` runs either.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from study import files, processes
from study.errors import Refusal, RunFailed


def run_python(
    arguments: Sequence[str],
    result: Path,
    what: str,
    timeout_seconds: float,
    remedy: str,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run Python, no longer than this process lives, and return the JSON that it wrote to `result`.

    Raises Refusal where the program refused, and RunFailed where it failed or took too long: then `remedy` says what to
    try. `what` begins either message.
    """
    try:
        done = subprocess.run(
            processes.bound([sys.executable, *arguments]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{what}: not done after {timeout_seconds} s; {remedy}") from None
    if done.returncode or not result.exists():
        raised = processes.raised_in(done.stderr.splitlines())
        for error in raised:  # a refusal may have been raised from another error
            if error.type == Refusal.__name__:
                raise Refusal(error.text.partition(": ")[2])
        raise RunFailed(f"{what}: {raised[0].text if raised else f'ended with status {done.returncode}'}")
    return files.load(result, f"the result of {what}")
