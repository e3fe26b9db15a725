"""Separate what launchers, machines, containers and loggers write before a line from what the program printed.

The marks of a rank are known, and those of Ray: [rank3]: of PyTorch, [default3]: of torchrun --tee, [1,3]<stderr>: of
mpirun, 3: of srun --label. For all other marks there is one rule: what precedes "Traceback (most recent call last)" in
its line is the prefix of a stream. The same prefix, with other digits, is then removed from every later line, such as
lines of code and of messages, which nothing else identifies. Frames and exceptions without that line are found behind
tokens such as times, names of machines and levels.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MOST_LEARNED = 32  # prefixes of streams
LONGEST_PREFIX = 160  # characters
_RANK = r"\[(?:rank|default)(\d{1,5})\]:?"
_MARKS = (
    re.compile(rf"\s?{_RANK}\s?"),
    re.compile(r"\[1,(\d{1,5})\]<std(?:err|out)>:\s?"),
    re.compile(r"(\d{1,4}): (?=\s|\[|[A-Z])"),
)
_INSIDE = re.compile(rf"(?<=\S)(?={_RANK}(?<=:))")
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
_STAMP = (
    rf"\d{{4}}[-/]\d\d[-/]\d\d[T_ ]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?|{_MONTH} [ \d]\d {_CLOCK}|"
    rf"[IWEF]\d{{4}} {_CLOCK}|{_CLOCK}"
)
_TIME = re.compile(
    rf"(?<![\d:<])(?:(?:(?P<year>\d{{4}})[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T_ ]|"
    rf"(?P<name>{_MONTH}) (?P<of_month>[ \d]\d) |"
    rf"[IWEF](?P<glog>\d{{4}}) )?(?P<clock>{_CLOCK}))(?!<)"
)
_LEVEL = r"(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)"
# The name of an exception begins what a program printed, and never belongs to a prefix.
EXCEPTION = (
    r"(?:[A-Za-z_]\w{0,60}\.){0,9}(?:\w{0,60}(?:Error|Exception)|[A-Za-z]\w{0,60}(?:Interrupt|Timeout|Exit|Failure)|"
    r"(?<=queue\.)Empty|(?<=exc\.)[A-Z]\w{0,60})"
)
_TOKENS = re.compile(
    rf"(?!{EXCEPTION}(?::|$))(?!Traceback \(most|\s*File \")(?:"
    rf"{_MONTH} [ \d]\d {_CLOCK} \S+ [\w.-]+(?:\[\d+\])?:|\[?(?:{_STAMP})\]?|std(?:out|err) [FP]\b|"
    rf"{_RANK}|\[1,\d+\]<std(?:err|out)>:|{_LEVEL}\s?[-:]?"
    r"|\([^()\n]{0,30}?(?:pid|ip|rank|actor)[=:][^()\n]{1,80}\)"
    r"|\[[^\[\]\n]{1,90}\]:?"
    r"|[\w.@/-]{1,80}(?:\[\d+\])?\s?:(?=\s)|[\w.-]{1,60}\s*\|(?=\s)|[a-z][\w.-]*-\d[\w.-]*(?=\s)|[\w.-]+\[\d+\]:|[\w.]+\s-(?=\s)|-(?=\s)"
    r")\s?"
)
_ANCHOR = re.compile(rf"Traceback \(most|\s{{0,8}}File \"[^\"]+\", line \d|{EXCEPTION}(?::\s|:?$)")
_NO_PREFIX = re.compile(rf"%\||(?<!\w){EXCEPTION}(?::|\s*$)")
_OF_RANK = re.compile(r"(?i)(?<![a-z_])rank[ =:_-]?(\d{1,5})\b|\[1,(\d+)\]<")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\-_]")
_OF_RAY = re.compile(r"(\(\w[\w.:-]*(?: \w+)?[, ]+pid=\d+[^()]{0,60}\))\s?")
_REPEATED = re.compile(r"\s?\[repeated \d+x across cluster\].*$")  # by Ray
_BEGINS = frozenset("[( 0123456789")  # with which the mark of a rank begins
LONGEST = 4000  # characters of a line that are examined; logs contain whole data sets in a line
MONTHS = {name: number for number, name in enumerate(_MONTH[3:-1].split("|"), start=1)}


class Part(NamedTuple):
    """What one rank wrote into a line."""

    rank: int | None  # None if the line does not say it
    stream: str  # the prefix without times and levels, such as "gpu01:"; empty without one
    text: str


class Prefixes:
    """Removes prefixes, and remembers those that it has seen."""

    def __init__(self) -> None:
        self._learned: dict[str, None] = {}
        self._pattern: re.Pattern[str] | None = None

    def parts(self, text: str) -> list[Part]:
        """Return what each rank wrote into a line, because several ranks may have written into one line.

        A program that draws a progress bar writes its states into one line.
        """
        if len(text) > LONGEST:
            text = f"{text[: LONGEST // 2]}\r{text[-LONGEST // 2 :]}"
        if "\x1b" in text:
            text = _ANSI.sub("", text)
        if "\r" not in text and text.find("[rank", 1) < 0 and text.find("[default", 1) < 0:
            return [self._part(text)]
        found = []
        for written in text.split("\r"):
            pieces = _INSIDE.split(written) if "[rank" in written or "[default" in written else [written]
            found += [self._part(piece) for piece in pieces if piece is not None and not piece.isdigit()]
        return found

    def _part(self, text: str) -> Part:
        rank, stream = None, ""
        if self._pattern is not None and (match := self._pattern.match(text)):
            rank, stream, text = *_identity(match[0]), text[match.end() :]
        if "across cluster]" in text:
            text = _REPEATED.sub("", text)
        if text[:1] == "(" and (match := _OF_RAY.match(text)):
            stream, text = match[1], text[match.end() :]
        if text[:1] in _BEGINS:
            for mark in _MARKS:
                if match := mark.match(text):
                    rank, text = int(match[1]), text[match.end() :]
        return Part(rank, stream, text)

    def learn(self, part: Part) -> Part:
        """Return a part without a prefix that precedes a traceback, a frame or an exception, and remember it."""
        head = part.text[: 2 * LONGEST_PREFIX]
        end = max(0, head.find("Traceback (most"))
        is_certain = 0 < end <= LONGEST_PREFIX and not _NO_PREFIX.search(head[:end])
        while not is_certain and not _ANCHOR.match(head, end) and (match := _TOKENS.match(head, end)):
            end = match.end()
        if not end or not _ANCHOR.match(head, end):
            return part
        prefix = part.text[:end]
        if is_certain and prefix.strip() and len(self._learned) < MOST_LEARNED:
            self._learned[re.sub(r"\d+", r"\\d+", re.escape(prefix.rstrip())) + r"\s?"] = None
            self._pattern = re.compile("|".join(sorted(self._learned, key=len, reverse=True)))
        rank, stream = _identity(prefix) if "%|" not in prefix else (None, "")
        return Part(part.rank if rank is None else rank, part.stream + stream, part.text[end:])


def _identity(prefix: str) -> tuple[int | None, str]:
    """Return the rank that a prefix states, and the prefix without times and levels."""
    match = _OF_RANK.search(prefix)
    stream = re.sub(rf"\[?(?:{_STAMP})\]?|{_LEVEL}|[\s|:-]+$", "", prefix).strip()
    return (int(match[1] or match[2]) if match else None), stream


class Time(NamedTuple):
    """A time stamp. Two of them can be compared if both have a date, or both have none."""

    text: str
    date: tuple[int, int, int]  # year, or 0 if it is not stated; month and day, or 0
    seconds: float  # of the day

    @property
    def key(self) -> tuple[int, int, int, float]:
        return (*self.date, self.seconds)


def time_of(text: str) -> Time | None:
    """Return the first time stamp in the beginning of a line, or None."""
    if (match := _TIME.search(text[:120])) is None:
        return None
    if match["glog"]:
        month, day = int(match["glog"][:2]), int(match["glog"][2:])
    elif match["name"]:
        month, day = MONTHS[match["name"]], int(match["of_month"])
    else:
        month, day = int(match["month"] or 0), int(match["day"] or 0)
    hours, minutes, seconds = match["clock"].replace(",", ".").split(":")
    return Time(match[0], (int(match["year"] or 0), month, day), 3600 * int(hours) + 60 * int(minutes) + float(seconds))
