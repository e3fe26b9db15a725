"""Where the home folder cannot be written, a run keeps its caches elsewhere, and only then."""

from __future__ import annotations

import os
from pathlib import Path

import launching
import pytest

from study.running import caches


def test_a_home_that_can_be_written_is_left_alone(tmp_path):
    assert caches.outside_home({"HOME": str(tmp_path)}) == {}
    assert caches.outside_home({"HOME": "/proc/none", "HF_HOME": str(tmp_path / "hf")}) == {}


def test_otherwise_caches_are_in_the_temporary_folder_but_for_those_that_are_set():
    said = caches.outside_home({"HOME": "/proc/none", "TRITON_CACHE_DIR": "/mine"})
    assert {"HF_MODULES_CACHE", "HF_EVALUATE_CACHE", "HF_DATASETS_CACHE"} <= said.keys()
    assert "TRITON_CACHE_DIR" not in said
    assert "HF_HUB_CACHE" not in said  # from which models are read
    assert all(os.access(Path(folder).parents[1], os.W_OK) for folder in said.values())


@pytest.mark.slow
@pytest.mark.launches
def test_a_run_trains_where_the_home_cannot_be_made(tmp_path):
    """/proc takes no folder, not even from root."""
    environment = {"HOME": "/proc/none", "XDG_CACHE_HOME": None, "HF_HOME": None}
    done = launching.attempt(
        ["zero-study", "train", "--strategy", "ddp", "--max-steps", "2", "--output-dir", str(tmp_path / "run")],
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
