"""Do a few hundred cases of tests/fuzz.py hold? Thousands: `python tests/fuzz.py --cases 5000`."""

from __future__ import annotations

import fuzz
import pytest


@pytest.mark.parametrize("kind", fuzz.CASES)
def test_a_sample_holds(kind):
    assert fuzz.run(30, seed=0, only=kind) == {}


def test_a_case_that_does_not_hold_is_seen(monkeypatch):
    """Were a file taken for another one, or half of it written, it would be said."""
    monkeypatch.setattr(fuzz.shapes, "find", lambda path: fuzz.shapes.KNOWN["gpt2"])
    assert any("the file says" in said for said in fuzz.run(20, seed=0, only="models").values())


def test_a_refusal_that_changes_a_file_is_seen(monkeypatch, tmp_path):
    def collect(runs, folder):
        folder.mkdir()
        raise fuzz.Refusal("no")

    (tmp_path / "alone").mkdir()  # the folder above is watched as well: not that of all tests
    monkeypatch.chdir(tmp_path / "alone")
    monkeypatch.setattr("study.records.pack.collect", collect)
    with pytest.raises(fuzz.Broken, match="refused, and changed"):
        fuzz.ask("pack", "runs", "out")
