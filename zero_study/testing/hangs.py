"""Run a training as many ranks without GPUs, and compare their collectives: `assert_never_hangs`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .. import files, processes, terminal
from ..errors import Refusal
from ..verdict import FOUND, REFUSED, SOUND
from . import outcomes, programs
from .training import Strategy

PAIR = re.compile(r"(HANG|WRONG VALUES): ranks \d+ and \d+ ")  # begins the description of two ranks


def check(
    train: programs.Trained,
    ranks: int,
    strategy: str | os.PathLike[str],
    arguments: Sequence[object],
    seconds: float,
    missing: str | None,
) -> None:
    """Raise AssertionError unless all ranks of a training make the same collectives and end."""
    __tracebackhide__ = True
    if ranks < 2:
        raise Refusal(f"ranks={ranks}: a hang needs at least two ranks, which wait for each other. Choose at least 2.")
    chosen = Strategy.of(strategy)
    if absent := chosen.missing_packages():
        outcomes.skip_or_fail(f"not checked: {chosen.name} ({absent}).", missing)
    with tempfile.TemporaryDirectory(prefix="zero-study-test-") as name:
        folder = Path(name)
        script = programs.script_of(train, arguments, folder)
        output = folder / "dry-run.json"
        options = ["--world", str(ranks), "--output", str(output), str(chosen.file)]
        words = programs.words("__main__.py", "dry-run", *options, str(script.path))
        try:
            completed = subprocess.run(
                processes.with_parent_death_signal([sys.executable, *words, *script.arguments_for(chosen.name)]),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                env=programs.environment(),
            )
        except subprocess.TimeoutExpired:
            raise outcomes.CouldNotBeChecked(
                f"{script.name} did not end within {seconds:g} s on {ranks} ranks. Make its training shorter, or pass "
                "a larger timeout."
            ) from None
        title = f"{script.name} under {chosen.name} on {ranks} ranks"
        _judge(title, completed, output)


def _judge(title: str, completed: subprocess.CompletedProcess[str], output: Path) -> None:
    __tracebackhide__ = True
    # The answer comes first. Memory and collectives follow after an empty line.
    answer = _shortened(completed.stdout.strip().partition("\n\n")[0])
    if completed.returncode == SOUND:
        return
    if completed.returncode == FOUND and answer:
        raise AssertionError(f"{title}: ranks make different calls, or do not end.\n{answer}")
    if completed.returncode == REFUSED:
        raise Refusal(terminal.last_error(completed.stderr))
    content = files.load(output, "a dry run's result") if output.exists() else {}
    reasons = [f"{each['what']} ({each['why']})" for each in content.get("could_not_check", []) if each["requested"]]
    reason = "; ".join(reasons) or answer or terminal.last_error(completed.stderr)
    raise outcomes.CouldNotBeChecked(f"{title} could not be checked: {reason}")


def _shortened(answer: str) -> str:
    """Return an answer with its first pair of ranks only. If rank 0 makes another call, seven pairs say the same."""
    blocks = re.split(r"\n(?=\S)", answer)
    first, *others = [block for block in blocks if PAIR.match(block)] or [""]
    rest = [block for block in blocks if not PAIR.match(block)]
    more = [f"{terminal.count(len(others), 'more pair')} of ranks with different calls"] if others else []
    return "\n".join(filter(None, [first, *more, *rest]))
