"""Test what reaches a terminal: no control characters of foreign texts, and no traceback if nobody can read."""

from __future__ import annotations

import io
import subprocess
import sys

import launching
import pytest

from zero_study import __main__, cli, terminal

HOSTILE = "\x1b[2J\x1b]0;title\x07\x00\x9b31m\u202e\u2028\ufeff\r\x7f"


def _main(monkeypatch: pytest.MonkeyPatch, run: object) -> int:
    monkeypatch.setattr(cli, "run", run)
    monkeypatch.setattr(sys, "argv", ["zero-study"])
    with pytest.raises(SystemExit) as end:
        __main__.main()
    return int(end.value.code)


def test_no_command_can_print_control_characters(monkeypatch, capsys):
    """The filter is in the entry point, so a new command cannot forget it."""

    def command(_words: list[str]) -> int:
        print(f"model_type {HOSTILE}\tand é, 5 %, 😀")
        print(HOSTILE, file=sys.stderr)
        sys.stdout.writelines([HOSTILE, "\n"])
        return 0

    assert _main(monkeypatch, command) == 0
    for text in capsys.readouterr():
        assert text.endswith("\n")
        assert not set(text) & set(HOSTILE) - set("[2J]0;title31m")
    assert sys.stdout is not None
    assert not isinstance(sys.stdout, terminal._Guarded)  # it ends with the command


def test_what_people_print_stays_as_it_is(monkeypatch, capsys):
    text = "Zeile\tmit é, 5 %, \N{NO-BREAK SPACE}日本語, 👩\N{ZERO WIDTH JOINER}🚀\nzweite Zeile\n"
    bar = "\rLoading: 50 %"  # a progress bar returns to the start of its line

    def command(_words: list[str]) -> int:
        print(text, end="")
        sys.stderr.write(bar)
        return 0

    assert _main(monkeypatch, command) == 0
    assert capsys.readouterr() == (text, bar)


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb", "a\u2028b", HOSTILE])
def test_a_foreign_text_is_one_printable_line(text):
    assert terminal.printable(text).isprintable()
    assert len(terminal.printable(text).splitlines()) == 1


def test_an_error_of_the_program_is_no_finding(monkeypatch, capsys):
    def command(_words: list[str]) -> int:
        raise ZeroDivisionError(HOSTILE)

    assert _main(monkeypatch, command) == 3
    out, err = capsys.readouterr()
    assert "ZeroDivisionError" in err
    assert "\x1b" not in out + err


class _Full(io.StringIO):
    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_behind_the_output_is_no_finding(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", _Full())
    assert _main(monkeypatch, lambda _words: 0) == 3
    assert capsys.readouterr().err == "zero-study: standard output: No space left on device\n"


@pytest.mark.launches
@pytest.mark.parametrize(
    ("redirected", "status"),
    [
        ("<&- >&- 2>&-", 0),
        ("nosuchsource 2>/dev/full", 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((">&-", 0), ("2>&-", 0), ("nosuchsource 2>&-", 2))),
    ],
)
def test_closed_streams_give_no_traceback(redirected, status, tmp_path):
    command = f'"$0" -m zero_study claims --search zero3 {redirected}'.replace("--search zero3 nosuch", "nosuch")
    completed = subprocess.run(
        ["bash", "-c", command, sys.executable], cwd=tmp_path, env=launching.environment(), capture_output=True
    )
    assert (completed.returncode, completed.stderr) == (status, b"")
