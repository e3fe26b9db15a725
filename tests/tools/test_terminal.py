"""Output for a terminal: wrapped lines and progress."""

from __future__ import annotations

import time

import pytest

from zero_study import progress, terminal


def test_lines_fit_the_width_and_words_stay_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    path = "/a/path/that/is/longer-than-the-terminal-is-wide/file.json"
    lines = terminal.wrap(f"The file {path} is read, and then something else happens.", "- ", "  ").splitlines()
    assert [line for line in lines if len(line) > 40] == [f"  {path}"]
    assert lines[0].startswith("- ")
    assert all(line.startswith("  ") for line in lines[1:])


@pytest.mark.parametrize(("seconds", "printed"), [(0.0, ""), (0.4, "Reading 600 records ...\n")])
def test_progress_is_printed_only_for_slow_work(monkeypatch, capsys, seconds, printed):
    monkeypatch.setattr(progress, "SECONDS", 0.1)
    with progress.after_two_seconds("Reading 600 records"):
        time.sleep(seconds)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", printed)
