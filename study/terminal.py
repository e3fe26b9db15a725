"""Format text for a terminal: its width, and lines that are wrapped between words."""

from __future__ import annotations

import shutil
import textwrap

DEFAULT_WIDTH = 80
NARROWEST = 40


def width() -> int:
    """Return the number of columns of the terminal; 80 if it is unknown. The variable COLUMNS sets it."""
    return max(NARROWEST, shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns)


def wrapped(text: str, indent: str = "", later_indent: str | None = None, columns: int | None = None) -> str:
    """Return text wrapped to the terminal's width; words, paths and JSON snippets are never broken.

    `indent` begins the first line, and `later_indent` the others (by default the same). Line breaks in `text` stay.
    """
    later = indent if later_indent is None else later_indent
    lines: list[str] = []
    for line in text.split("\n"):
        begin = later if lines else indent
        lines += textwrap.wrap(
            line,
            columns or width(),
            initial_indent=begin,
            subsequent_indent=later,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines)
