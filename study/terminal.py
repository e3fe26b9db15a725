"""Format text and tables to the width of the terminal."""

from __future__ import annotations

import itertools
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

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
