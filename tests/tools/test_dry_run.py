"""CUDA's allocator by cases worked out by hand; ranks that are pretended, in a Python that no other test has used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zero_study.dryrun.allocator import MIB, Allocator

CASES = Path(__file__).parents[1] / "dry_run_cases.py"


ALLOCATED = {  # MiB that letters stand for; what is reserved of it in MiB, and where segments expand
    "a1 b0.99951171875 c0.0001": (2, 2),  # of small blocks each rest of 512 bytes is another
    "a1 b1 c1 -a -b d2": (24, 24),  # no block goes from one pool to the other
    "a1.001 b10 c10.001": (32, 40),  # b is of the rest of a's segment, c is rounded to 2 MiB
    "a9 b11 -a c8 -b d12": (32, 20),  # a rest of 1 MiB stays with its block; where segments expand it does not
    "a30 b22 -a -b c22 d30": (52, 60),  # the best fit
    "a12 b12 -b -a c40": (64, 40),  # segments are not joined, and one that expands is a single one
    "a10 b4 -a c5 d9": (30, 40),  # what can expand is taken last
    "a12 a12 -a b12": (24, 40),  # other bytes of one storage: there before the first are freed
}


@pytest.mark.parametrize(("steps", "reserved"), ALLOCATED.items())
def test_what_the_allocator_of_a_card_reserves(steps: str, reserved: tuple[int, int]) -> None:
    for expands, expected in enumerate(reserved):
        allocator = Allocator(bool(expands))
        for step in steps.split():
            allocator.allocate(step.strip("-")[0], 0 if step[0] == "-" else int(float(step[1:]) * MIB))
        assert allocator.reserved == expected * MIB


def test_every_block_has_a_multiple_of_512_bytes() -> None:
    allocator = Allocator(False)
    for number in range(4096 + 1):  # the first segment has room for 4,096 blocks
        allocator.allocate(number, 1)
    assert allocator.reserved == 4 * MIB


@pytest.mark.launches
@pytest.mark.parametrize(
    "which",
    [
        "not slow and not nightly",
        pytest.param("slow", marks=pytest.mark.slow),
        pytest.param("nightly", marks=pytest.mark.nightly),
    ],
)
def test_ranks_that_are_pretended(which: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-pno:cacheprovider", "-pno:xdist", "-m", which, str(CASES)]
    completed = subprocess.run(command, capture_output=True, text=True, cwd=CASES.parents[1])
    assert completed.returncode == 0, completed.stdout[-3000:]
