"""Ranks that are pretended are forks: dry_run_cases.py, in a Python that no other test has used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("dry_run_cases.py")


@pytest.mark.launches
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_ranks_that_are_pretended(which: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        which,
        str(CASES),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CASES.parents[1])
    assert done.returncode == 0, done.stdout[-3000:]
