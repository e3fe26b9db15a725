"""Match a log with messages of libraries in rules/*.yaml, which say what a check tests and what satisfies it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict

from zero_study.logs.printed_failures import Failure, Log
from zero_study.logs.printed_steps import Line
from zero_study.terminal import mask
from zero_study.why.fact import Fact, Kind

FOLDER = Path(__file__).parent / "rules"
MOST_EVIDENCE = 3  # lines of a rule that are shown
LONGEST_GROUP = 120  # characters of a text from the log that are quoted in a sentence
_PLACES = re.compile(r"(?:\{\w+\})+")
_PLACE = re.compile(r"\{(\w+)\}")


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Return a compiled pattern. Python itself remembers only 512 of them."""
    return re.compile(pattern, re.MULTILINE)


class Rule(BaseModel):
    """A message of a library. Its sentences can contain named groups of the pattern as {name}."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    kind: Kind
    match: str  # a regular expression, searched in a line, or in the text of an exception
    where: Literal["line", "exception"] = "line"
    frames: str | None = None  # a regular expression that a frame of the traceback must match
    code: str | None = None  # a regular expression for the lines before an exception, such as its line of code
    without: str | None = None  # the rule says nothing if this is found in the text, too
    happened: str
    because: str = ""  # what the library's check tests, if that is the cause
    changes: tuple[str, ...] = ()  # each of them removes the cause
    check: str = ""
    documented: str = ""
    raised_by: str = ""  # packages, releases and files that print the message
    is_consequence: bool = False
    is_note: bool = False
    example: str  # a text that the pattern matches, as it is printed
    seen: tuple[str, ...] = ()  # public threads in which the cause of the message was found

    def found(self, log: Log) -> Fact | None:
        """Return what the library states if its message is in a log. None otherwise."""
        by_line: dict[int, tuple[Line, re.Match[str]]] = {}
        for line, match in self._matches(log):
            by_line.setdefault(line.number, (line, match))
        first = list(by_line.values())
        if not first:
            return None
        groups: dict[str, str | None] = dict.fromkeys(compiled(self.match).groupindex)
        for _, match in first:
            for name, value in match.groupdict().items():
                groups[name] = groups[name] or (mask(value.strip())[:LONGEST_GROUP] if value else None)
        happened, because, *changes = (_filled(text, groups) for text in (self.happened, self.because, *self.changes))
        return Fact(
            self.id, self.kind, happened, because, "stated", f"the message of {self.library}",
            tuple(line for line, _ in first[:MOST_EVIDENCE]), tuple(changes), _filled(self.check, groups),
            self.documented, self.is_consequence, self.is_note,
        )  # fmt: skip

    @property
    def library(self) -> str:
        """The first package or program that prints the message."""
        return re.split(r"[\s:,;]", self.raised_by, maxsplit=1)[0] or "a program"

    def _matches(self, log: Log) -> Iterator[tuple[Line, re.Match[str]]]:
        """Yield matches in exceptions before those in lines, because quoted code in a traceback contains no values."""
        pattern = compiled(self.match)
        for failure in log.failures:
            if (match := pattern.search(failure.text)) and self._fits(failure) and not self._is_excluded(failure.text):
                yield failure.evidence, match
        if self.where == "line" and self.frames is None and self.code is None:
            for line, match_of_line in log.search(pattern):
                if not self._is_excluded(line.text):
                    yield line, match_of_line

    def _fits(self, failure: Failure) -> bool:
        if self.code is not None and not any(compiled(self.code).search(line) for line in failure.before):
            return False
        return self.frames is None or any(compiled(self.frames).search(str(frame)) for frame in failure.frames)

    def _is_excluded(self, text: str) -> bool:
        return self.without is not None and compiled(self.without).search(text) is not None


def _filled(sentence: str, values: Mapping[str, str | None]) -> str:
    """Return a sentence with its values.

    Of adjacent names such as {old}{new}, the first known value is used. An unknown value becomes a question mark, or is
    removed if it is alone in parentheses. Other braces stay as they are, because changes contain JSON and Python.
    """

    def value(places: re.Match[str]) -> str:
        names = _PLACE.findall(places[0])
        if not values.keys() >= set(names):
            return places[0]
        return next((text for name in names if (text := values[name])), "?")

    return _PLACES.sub(value, sentence).replace(" (?)", "")


@cache
def rules() -> Sequence[Rule]:
    """Return all rules. Raises pydantic's ValidationError if a file is wrong."""
    return tuple(
        Rule.model_validate(entry)
        for path in sorted(FOLDER.glob("*.yaml"))
        for entry in yaml.safe_load(path.read_text(encoding="utf-8"))
    )


def facts(log: Log) -> Iterator[Fact]:
    """Yield what libraries state in their messages in a log."""
    whole = "\n".join([*(failure.text for failure in log.failures), *(line.text for line in log.lines)])
    for rule in rules():
        if compiled(rule.match).search(whole) and (fact := rule.found(log)) is not None:
            yield fact
