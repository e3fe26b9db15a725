"""Do tests share what is started for them, and does none start another Python without its mark?"""

from __future__ import annotations

import subprocess
import sys
import threading

import launching
import pytest

REFUSED = pytest.fail.Exception


@pytest.fixture(autouse=True)
def _session(tmp_path, monkeypatch):
    """Another session, of a test that may launch."""
    monkeypatch.setattr(launching, "session_folder", tmp_path)
    launching.begin(True)


def test_what_two_want_at_once_is_made_once():
    made = []
    begun = threading.Event()

    def make(folder):
        made.append(folder)
        begun.wait(0.2)
        (folder / "content").write_text("whole")

    contents = []
    wanting = [
        threading.Thread(target=lambda: contents.append((launching.once("it", make) / "content").read_text()))
        for _ in range(2)
    ]
    for thread in wanting:
        thread.start()
    for thread in wanting:
        thread.join()
    launching.begin(False)  # as this test is
    assert (contents, len(made)) == (["whole"] * 2, 1)


def test_a_failure_is_told_to_all():
    tries = []

    def make(folder):
        tries.append(folder)
        raise ValueError("no such strategy")

    with pytest.raises(ValueError, match="no such strategy"):
        launching.once("it", make)
    with pytest.raises(AssertionError, match="ValueError: no such strategy"):
        launching.once("it", make)
    launching.begin(False)  # as this test is
    assert len(tries) == 1


def test_a_mark_is_held_to_what_happens():
    with pytest.raises(REFUSED, match="starts no other Python"):
        launching.end()
    launching.begin(False)
    launching.end()
    with pytest.raises(REFUSED, match=r"mark it with @pytest\.mark\.launches"):
        subprocess.Popen([sys.executable, "-c", ""])
    with pytest.raises(REFUSED, match="has tried"):
        launching.end()
    launching.begin(False)  # as this test is
