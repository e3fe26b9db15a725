"""Turn the Markdown of a page into plain text for a terminal: paragraphs, lists and tables within its width."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence

from zero_study import terminal

_LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
_MARKS = re.compile(r"\*\*(.+?)\*\*|(?<!`)`([^`]+)`(?!`)|(?<![*\w])\*(\w[^*]*)\*(?![*\w])|</?a\b[^>]*>")
_ESCAPED = re.compile(r"\\([\\|])")
_CELL_END = re.compile(r"(?<!\\)(?:\\\\)*\|")
_TARGET = re.compile(r"\[\w+\]: #")  # of a link
_ITEM = re.compile(r"(\s*)(- |\d+\. )")
MADE_BY = "Made by `zero-study "  # the start of a page's last line, which shows how to make the page again


def of_markdown(page: str, width: int | None = None) -> str:
    """Return a Markdown page of `compare` as plain text, without its last line, which names the command.

    `width` is in columns. The default is the width of the terminal.
    """
    width = width or terminal.width()
    lines: list[str] = []
    for line in page.rstrip().splitlines():
        if line.startswith("  ") and lines and _ITEM.match(lines[-1]) and not _ITEM.match(line):
            lines[-1] += f" {line.strip()}"  # an item of a list continues
        elif not line.startswith(MADE_BY) and not _TARGET.match(line):
            lines.append(line)
    parts = [part for kind, block in _blocks(lines) for part in _block(kind, block, width)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).strip("\n")


def tables(page: str) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield each table of a Markdown page as a heading, the names of the columns, and the rows."""
    heading = ""
    for kind, block in _blocks(page.rstrip().splitlines()):
        if kind == "heading":
            heading = unmarked(block[-1].partition(" ")[2])
        elif kind == "table" and len(block) > 1:
            head, _, *rows = map(_cells, block)
            yield heading, head, rows


def _blocks(lines: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Divide lines into headings, tables, list items, paragraphs and empty lines."""
    for kind, block in itertools.groupby(lines, key=_kind):
        if kind == "item":
            for line in block:
                yield kind, [line]
        else:
            yield kind, list(block)


def _kind(line: str) -> str:
    if not line.strip():
        return "empty"
    if line.startswith("|"):
        return "table"
    if line.startswith("#"):
        return "heading"
    return "item" if _ITEM.match(line) else "paragraph"


def _block(kind: str, block: list[str], width: int) -> list[str]:
    match kind:
        case "empty":
            return [""]
        case "table":
            head, _, *rows = [_cells(line) for line in block]
            return terminal.table(head, rows, width)
        case "heading":
            return [part for line in block for part in _heading(line, width)]
        case "item":
            mark = _ITEM.match(block[0])
            assert mark is not None
            text = unmarked(block[0][mark.end() :])
            return _wrapped(text, width, mark[0], " " * len(mark[0]))
    return _wrapped(unmarked(" ".join(block)), width)


def _heading(line: str, width: int) -> list[str]:
    level, _, text = line.partition(" ")
    lines = _wrapped(unmarked(text), width)
    return [*lines, {"#": "=", "##": "-"}[level] * max(map(len, lines))] if level in ("#", "##") else lines


def unmarked(text: str) -> str:
    """Return a text without its Markdown formatting and HTML entities."""
    text = _LINK.sub(r"\1 (\2)", text)
    text = _MARKS.sub(lambda match: match[1] or match[2] or match[3] or "", text)
    text = text.replace("<br>", " ").replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    return _ESCAPED.sub(r"\1", text)


def _cells(line: str) -> list[str]:
    """Divide a row of a Markdown table into its cells."""
    cells, start = [], 1
    for end in _CELL_END.finditer(line, 1):
        cells.append(unmarked(line[start : end.end() - 1].strip()))
        start = end.end()
    return cells


def _wrapped(text: str, width: int, first: str = "", other: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=other, break_on_hyphens=False) or [first]
