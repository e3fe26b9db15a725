"""The messages that are known: rules/*.yaml has them, each with its cause, the change and the check."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from study.why.cause import Cause, Certainty, Kind
from study.why.log import Failure, Line, Log, mask

FOLDER = Path(__file__).parent / "rules"
MOST_EVIDENCE = 3  # lines of a rule that are shown
_PLACE = re.compile(r"\{(\w+)\}")  # of a value in a sentence
_PLACES = re.compile(r"(?:\{\w+\})+")
LONGEST_GROUP = 120  # characters of a text from the log that are quoted in a sentence


class Rule(BaseModel):
    """What is said of a cause: what happened, why, and what to change.

    A rule with a pattern is a message that is known. Groups of the pattern with a name can be used in the sentences as
    {name}. A rule without a pattern is a conclusion: a program finds it (`conclude`), and gives the values by name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    kind: Kind
    match: str | None = None  # a regular expression, searched in a line, or in the text of an exception
    where: Literal["line", "exception"] = "line"
    frames: str | None = None  # a regular expression that a frame of the traceback must match
    code: str | None = None  # a regular expression for the lines before an exception, such as its line of code
    without: str | None = None  # the rule says nothing if this is found in the text, too
    certainty: Certainty = "likely"
    happened: str
    because: str
    basis: str = "the message"  # from what the cause follows
    changes: tuple[str, ...] = ()
    check: str = ""
    documented: str = ""
    raised_by: str = ""  # packages, releases and files that print the message
    is_consequence: bool = False
    is_note: bool = False
    strength: int = 0
    example: str = ""  # a text that the pattern matches, as it is printed

    @field_validator("match", "frames", "code", "without")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            re.compile(pattern)
        return pattern

    @model_validator(mode="after")
    def _has_example(self) -> Rule:
        if (self.match is None) != (not self.example):
            raise ValueError("a rule has an example exactly if it has a pattern")
        return self

    def found(self, log: Log) -> Cause | None:
        """Return the cause that the pattern finds in a log, or None."""
        by_line: dict[int, tuple[Line, re.Match[str]]] = {}
        for line, match in self._matches(log):
            by_line.setdefault(line.number, (line, match))
        matches = list(by_line.values())
        if not matches:
            return None
        groups: dict[str, str] = {}
        for _, match in matches:
            for name, value in match.groupdict().items():
                if value:
                    groups.setdefault(name, mask(value.strip())[:LONGEST_GROUP])
        names = re.compile(self.match or "").groupindex
        values = {name: groups.get(name) for name in names}
        return self.cause(tuple(line for line, _ in matches[:MOST_EVIDENCE]), values)

    def cause(self, evidence: Sequence[Line], values: Mapping[str, str | None]) -> Cause:
        """Return the cause with values in its sentences.

        Names side by side, such as {old}{new}, are values of which one is known. A value that is None is shown as a
        question mark, or left out if it stands alone in brackets. Other braces stay as they are: changes have lines of
        JSON and Python.
        """

        def filled(sentence: str) -> str:
            def value(places: re.Match[str]) -> str:
                names = _PLACE.findall(places[0])
                if not values.keys() >= set(names):
                    return places[0]
                return next((known for name in names if (known := values[name]) is not None), "?")

            return _PLACES.sub(value, sentence).replace(" (?)", "")

        return Cause(
            id=self.id,
            kind=self.kind,
            happened=filled(self.happened),
            because=filled(self.because),
            certainty=self.certainty,
            basis=filled(self.basis),
            evidence=tuple(evidence),
            changes=tuple(map(filled, self.changes)),
            check=filled(self.check),
            documented=self.documented,
            is_consequence=self.is_consequence,
            is_note=self.is_note,
            strength=self.strength,
        )

    def _matches(self, log: Log) -> Iterator[tuple[Line, re.Match[str]]]:
        """Yield exceptions before lines: a traceback also quotes the code that raised, which has no values in it."""
        if self.match is None:
            return
        pattern = re.compile(self.match)
        for failure in log.failures:
            match = pattern.search(failure.text)
            if match and self._has_frame(failure) and not self._is_excluded(failure.text):
                yield Line(failure.number, failure.rank, failure.first_line), match
        if self.where == "line" and self.frames is None:
            for line, match_of_line in log.search(pattern):
                if not self._is_excluded(line.text):
                    yield line, match_of_line

    def _has_frame(self, failure: Failure) -> bool:
        if self.code is not None and not any(re.search(self.code, line) for line in failure.before):
            return False
        return self.frames is None or any(re.search(self.frames, str(frame)) for frame in failure.frames)

    def _is_excluded(self, text: str) -> bool:
        return self.without is not None and re.search(self.without, text) is not None


@cache
def rules() -> tuple[Rule, ...]:
    """Return all rules. Raises pydantic's ValidationError if a file is wrong."""
    return tuple(
        Rule.model_validate(entry)
        for path in sorted(FOLDER.glob("*.yaml"))
        for entry in yaml.safe_load(path.read_text(encoding="utf-8"))
    )


def conclude(
    id: str,
    evidence: Sequence[Line],
    certainty: Certainty | None = None,
    strength: int | None = None,
    **values: str,
) -> Cause:
    """Return a conclusion with values in its sentences, and another certainty or strength if these are given."""
    cause = _conclusions()[id].cause(evidence, values)
    return replace(
        cause,
        certainty=cause.certainty if certainty is None else certainty,
        strength=cause.strength if strength is None else strength,
    )


@cache
def _conclusions() -> dict[str, Rule]:
    return {rule.id: rule for rule in rules() if rule.match is None}


def causes(log: Log) -> list[Cause]:
    """Return the causes that known messages name."""
    return [cause for rule in rules() if (cause := rule.found(log)) is not None]
