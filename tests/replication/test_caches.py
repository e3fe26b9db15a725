"""Where the home folder cannot be written, a run keeps its caches elsewhere, and only then."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import launching
import pytest

from study.running import caches
from zero_study import files
from zero_study.engines import extensions


def test_a_home_that_can_be_written_is_left_alone(tmp_path):
    assert caches.outside_home({"HOME": str(tmp_path)}) == {}
    assert caches.outside_home({"HOME": "/proc/none", "HF_HOME": str(tmp_path / "hf")}) == {}


def test_otherwise_caches_are_in_the_temporary_folder_but_for_those_that_are_set():
    output = caches.outside_home({"HOME": "/proc/none", "TRITON_CACHE_DIR": "/mine"})
    assert {"HF_MODULES_CACHE", "HF_EVALUATE_CACHE", "HF_DATASETS_CACHE"} <= output.keys()
    assert "TRITON_CACHE_DIR" not in output
    assert "HF_HUB_CACHE" not in output  # from which models are read
    assert all(os.access(Path(folder).parents[1], os.W_OK) for folder in output.values())


@pytest.mark.slow
@pytest.mark.launches
def test_a_run_trains_where_the_home_cannot_be_made(tmp_path):
    """/proc takes no folder, not even from root."""
    environment = {"HOME": "/proc/none", "XDG_CACHE_HOME": None, "HF_HOME": None}
    completed = launching.attempt(
        ["zero-study", "train", "--strategy", "ddp", "--max-steps", "2", "--output-dir", str(tmp_path / "run")],
        env=environment,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr


# ---------------------------------------------------------------- folders that another user may have made


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_temporary_folder_is_made_for_this_user_alone_and_found_again(temporary):
    folder = files.own_temporary_folder("mine")
    assert folder == temporary / f"mine-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert files.own_temporary_folder("mine") == folder


@pytest.mark.parametrize(
    "trap", ["writable by everybody", "writable by a group", "of another user", "a link", "a file"]
)
def test_a_folder_that_somebody_else_may_change_is_not_used(trap, temporary, monkeypatch):
    usual = temporary / f"mine-{os.getuid()}"
    if trap.startswith("writable"):
        usual.mkdir()
        usual.chmod(0o777 if "everybody" in trap else 0o775)
    elif trap == "of another user":
        usual.mkdir(mode=0o700)
        of_others = usual.stat().st_ino
        seen = Path.lstat

        def lstat(path):
            status = seen(path)
            return (
                os.stat_result((*status[:4], status.st_uid + 1, *status[5:10]))
                if status.st_ino == of_others
                else status
            )

        monkeypatch.setattr(Path, "lstat", lstat)
    elif trap == "a link":
        (temporary / "elsewhere").mkdir(mode=0o700)
        usual.symlink_to(temporary / "elsewhere")
    else:
        usual.write_text("")
    folder = files.own_temporary_folder("mine")
    assert folder not in (usual, temporary / "elsewhere")
    assert files.is_private(folder)
    assert files.own_temporary_folder("mine") == folder  # other processes use the same one
    output = caches.outside_home({"HOME": "/proc/none"})
    assert all(files.is_private(Path(place).parent) for place in output.values())


def test_compiled_code_is_loaded_from_a_folder_of_this_user(temporary, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(extensions, "EXTENSIONS_DIR", Path("/proc/none"))
    cache = temporary / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert extensions._base_folder().parent == cache / "zero-study" / "extensions"
    cache.chmod(0o777)
    assert extensions._base_folder().parent == temporary / f"zero-study-extensions-{os.getuid()}"
