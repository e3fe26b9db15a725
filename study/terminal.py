"""Format text and tables to the width of the terminal, and keep control characters of foreign texts away from it.

`printable` puts a foreign text (a name, a key, a value of a file that this project did not write) on one line. Use it
where such a text becomes a part of a message or of a written file. `guarded_output` is the safety net behind it: every
command runs within it, so that a forgotten control character is printed as its escape code.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, cast

# Text that is not broken at its spaces: a JSON snippet to paste, or a command in backticks.
_WHOLE = re.compile(r"""("[^"\s]+": )?\{[^{}]{1,60}\}|\[[^\[\]]{1,40}\]|"[^"\s]+": [^\s{]+|`[^`]{1,60}`""")
_KEPT_SPACE = "\N{NO-BREAK SPACE}"  # textwrap does not break lines here

DEFAULT_WIDTH = 80
NARROWEST = 40
WRAPPED_FROM = 16  # characters; shorter cells of a table are not wrapped

_NUMBER = re.compile(r"[-+\N{MINUS SIGN}.<(]*\d[-+\d.,:e\N{MINUS SIGN}]*( ?(%|x|GiB|MiB|KiB|s))?\)?")


def width() -> int:
    """Return the number of columns of the terminal, or 80 if it is unknown. The variable COLUMNS overrides it."""
    return max(NARROWEST, shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns)


def wrapped(text: str, indent: str = "", later_indent: str | None = None, columns: int | None = None) -> str:
    """Return text wrapped to the width of the terminal. Words, paths and JSON snippets are not broken.

    `indent` begins the first line, and `later_indent` begins the others (by default the same). Line breaks in `text`
    are kept.
    """
    later = indent if later_indent is None else later_indent
    lines: list[str] = []
    for line in text.split("\n"):
        begin = later if lines else indent
        lines += textwrap.wrap(
            _WHOLE.sub(lambda snippet: snippet[0].replace(" ", _KEPT_SPACE), line),
            columns or width(),
            initial_indent=begin,
            subsequent_indent=later,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines).replace(_KEPT_SPACE, " ")


def printable(text: str) -> str:
    """Return a text of a foreign file on one line and without control characters, which are shown as escapes."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: "1 run", "2 runs". `plural` is needed if it is not the noun with an "s"."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


# ---------------------------------------------------------------- tables


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], columns: int | None = None) -> list[str]:
    """Return the lines of a table that fits the terminal. Columns that do not fit follow in further tables."""
    width_of_all = columns or width()
    texts = [[str(cell) for cell in row] for row in (head, *rows)]
    lines: list[str] = []
    for group in _groups([list(column) for column in zip(*texts, strict=True)], width_of_all):
        lines += [*([""] if lines else []), *_aligned(group, width_of_all)]
    return lines


def _groups(columns: list[list[str]], width: int) -> Iterator[list[list[str]]]:
    """Divide columns into groups that fit the width. The first column is repeated in every group."""
    first, *others = columns
    group = [first]
    for column in others:
        if len(group) > 1 and _widths([*group, column], width) is None:
            yield group
            group = [first]
        group.append(column)
    yield group


def _aligned(columns: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return the lines of a table. Columns of numbers are aligned to the right, and long cells are wrapped."""
    widths = _widths(columns, width)
    if widths is None:  # a single word is too long and has to be broken
        name = min(max(map(len, columns[0])), width // 2)
        widths = [name, width - 2 - name][: len(columns)]
    sides = ["<", *(">" if all(map(_NUMBER.fullmatch, filter(None, column[1:]))) else "<" for column in columns[1:])]
    lines = []
    for row in zip(*columns, strict=True):
        cells = [
            textwrap.wrap(cell, size, break_on_hyphens=False) or [""] for cell, size in zip(row, widths, strict=True)
        ]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            padded = (f"{part:{side}{size}}" for part, side, size in zip(parts, sides, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
    return lines


def _widths(columns: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Return the width of each column. The widest columns are narrowed until all fit.

    None if they fit only with broken words.
    """
    widths = [max(map(len, column)) for column in columns]
    longest_words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    bodies = [max((len(cell) for cell in column[1:]), default=0) for column in columns]
    least = [max(size if size <= WRAPPED_FROM else 0, word) for size, word in zip(bodies, longest_words, strict=True)]
    available = width - 2 * (len(widths) - 1)
    while sum(widths) > available:
        slack = [size - smallest for size, smallest in zip(widths, least, strict=True)]
        if not any(slack):
            return None
        widest = max(range(len(widths)), key=lambda place: (slack[place] > 0, widths[place]))
        widths[widest] -= 1
    return widths


# ---------------------------------------------------------------- foreign text

# What a terminal acts on: control characters apart from the tab and the end of a line, other ends of lines, and
# characters that reverse the direction of the text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


STREAMS = ("standard output", "standard error")  # their names in the errors of guarded streams


class _Guarded:
    """A stream that shows control characters as their escape codes instead of writing them.

    Errors of the operating system get the name of the stream as their file name.
    """

    def __init__(self, stream: Any, name: str) -> None:
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        # Progress bars begin what they write with a carriage return.
        begin = text[: text.startswith("\r")]
        with self._named():
            return int(self._stream.write(begin + _CONTROL.sub(lambda found: repr(found[0])[1:-1], text[len(begin) :])))

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._named():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = self._name
            raise


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Keep control characters out of everything that is printed in the `with` block, on stdout and on stderr.

    Standard streams that were closed before the program started become `/dev/null`. Otherwise, the next file that is
    opened would get the number of a standard stream, and output of libraries would be written to this file.
    """
    _open_closed_streams()
    streams = sys.stdout, sys.stderr
    guarded = [_Guarded(stream, name) for stream, name in zip(streams, STREAMS, strict=True)]
    sys.stdout, sys.stderr = cast(Any, guarded)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def _open_closed_streams() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def finish_output() -> None:
    """Write what was printed. If a stream cannot take it, for instance because its reader has gone, discard it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # Python would flush again when it ends, and print this error
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
