"""Read the lines of a log in constant memory, and turn the texts in them into numbers."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from zero_study.files import open_regular
from zero_study.terminal import printable

LONGEST_LINE = 1 << 20  # characters; a longer line is read in parts
LONGEST_TEXT = 300  # characters of a text that is kept, such as the name of a model
MIB, GIB = 1 << 20, 1 << 30

_WHOLE = re.compile(r"[-+]?[0-9]{1,18}")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?(?:nan|inf|infinity)", re.IGNORECASE)
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]{1,6})?(?:Z|[-+][0-9:]{4,6})?")
_CLOCK = re.compile(r"(?:([0-9]{1,6}) days?, )?([0-9]{1,6}):([0-9]{2}):([0-9]{2}(?:\.[0-9]{1,9})?)")
_UNITS_OF_TIME = re.compile(r"(?:([0-9]{1,6})d ?)?(?:([0-9]{1,6})h ?)?(?:([0-9]{1,6})m ?)?(?:([0-9.]{1,9})s)?")

Number = float | int  # may be NaN or infinite


class Line(NamedTuple):
    """A line of a text file, without its line break."""

    number: int
    text: str
    is_whole: bool  # False if the file ends in this line, so that the rest of it may be missing


def lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a text file. Bytes that are not UTF-8 are replaced."""
    with open_regular(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="\n")
        number = 1
        while line := text.readline(LONGEST_LINE):
            ends = line.endswith("\n")
            if number == 1:
                line = line.removeprefix("\ufeff")
            yield Line(number, line.rstrip("\r\n"), ends or len(line) >= LONGEST_LINE - 1)
            number += ends


def parts(path: Path) -> Iterator[Line]:
    """Yield the lines of a terminal log, without colors. Carriage returns, as in progress bars, end a line too.

    Progress bars write a carriage return before they overwrite a line.
    """
    for line in lines(path):
        if "\x1b" not in line.text and "\r" not in line.text:
            yield line
            continue
        *before, last = _COLORS.sub("", line.text).split("\r")
        for part in before:
            yield Line(line.number, part, True)
        yield Line(line.number, last, line.is_whole)


def number(text: str) -> Number | None:
    """Return a text as a number, which may be NaN or infinite. None if the text is not a number."""
    text = text.strip()
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else None


def seconds_since_1970(text: str) -> float | None:
    """Return a date such as 2026-01-31 23:59:59,123 in seconds since 1970. None if the text is not a date.

    A date without a time zone is read as UTC, because only differences of times are used.
    """
    match = _DATE.match(text)
    try:
        date = datetime.fromisoformat(match[0].replace(",", ".")) if match else None
    except ValueError:  # month 13
        return None
    if date is None:
        return None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def date_in(text: str) -> float | None:
    """Return the date in the first characters of a line, as `seconds_since_1970`. A name of a host may precede it."""
    match = _DATE.search(text[:120])
    return seconds_since_1970(match[0]) if match else None


def duration(text: str) -> float | None:
    """Return a text such as 0:01:30, 1 day, 2:00:00 or 1m 30s in seconds. None if the text is not a duration."""
    match = _CLOCK.fullmatch(text.strip()) or _UNITS_OF_TIME.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        return None
    return sum(
        (number(part or "0") or 0) * unit for part, unit in zip(match.groups(), (86_400, 3_600, 60, 1), strict=True)
    )


def cleaned(text: str) -> str:
    """Return a text on one line, without control characters, and shortened to LONGEST_TEXT characters."""
    text = printable(" ".join(text[: 2 * LONGEST_TEXT].split()))
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."
