"""Match a log with the known messages in rules/*.yaml, which state their causes, changes and checks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from zero_study.why import sizes
from zero_study.why.cause import Cause, Certainty, Kind
from zero_study.why.log import Failure, Line, Log, mask
from zero_study.why.setting import Feature
from zero_study.why.tracebacks import Traceback, package_of

FOLDER = Path(__file__).parent / "rules"
MOST_EVIDENCE = 3  # lines of a rule that are shown
_PLACE = re.compile(r"\{(\w+)\}")  # of a value in a sentence
SHORTEST_WORD = 3  # letters of a text by which rules are chosen before their patterns are searched
_ENDS = ("where", "code", "sizes")  # values of a traceback that are appended to the value before them
_PLACES = re.compile(r"(?:\{\w+\})+")
LONGEST_GROUP = 120  # characters of a text from the log that are quoted in a sentence
LONGEST_MESSAGE = 240  # characters of the message of an exception that are quoted in a sentence
INNERMOST = 4  # frames in which a rule for unknown exceptions looks for its pattern
CUT_OFF_FRAMES = 3  # the innermost frames of a traceback without its last line that decide


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Return a compiled pattern. Python itself remembers only 512 of them."""
    return re.compile(pattern)


@cache
def words_of(pattern: str) -> tuple[str, ...]:
    """Return words in lower case. Every text that the pattern matches contains at least one of them.

    Searching for words is far faster than searching for the pattern. The result is empty if no word is long enough.
    """
    try:
        parsed = re._parser.parse(pattern)  # type: ignore[attr-defined]
    except AttributeError:  # another Python keeps its parser elsewhere
        return ()
    return tuple(_words(parsed) or ())


def _words(parsed: Any) -> list[str] | None:
    """Return the words for a parsed pattern, as `words_of` describes them. None if no word is long enough."""
    found: list[list[str]] = []
    literal = ""
    for operation, argument in [*parsed, (None, None)]:
        name = str(operation)
        if name == "LITERAL":
            literal += chr(argument).lower()
            continue
        if len(literal) >= SHORTEST_WORD:
            found.append([literal])
        literal = ""
        inner: list[str] | None = None
        if name == "SUBPATTERN":
            inner = _words(argument[-1])
        elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT") and argument[0] > 0:
            inner = _words(argument[2])
        elif name == "BRANCH":
            branches = [_words(branch) for branch in argument[1]]
            inner = None if None in branches else [word for branch in branches for word in branch or ()]
        if inner:
            found.append(inner)
    return max(found, key=lambda words: min(map(len, words)), default=None)


class Rule(BaseModel):
    """The texts for one cause: what happened, why, what to change, and how to check it.

    A rule with a pattern recognizes a message. Its sentences can contain named groups of the pattern as {name}. A rule
    without a pattern is a conclusion: Python code draws it (`conclude`), and passes the values by name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    kind: Kind
    match: str | None = None  # a regular expression, searched in a line, or in the text of an exception
    where: Literal["line", "exception", "end"] = "line"  # end: the last lines of a log in which nothing failed
    frames: str | None = None  # a regular expression that a frame of the traceback must match
    code: str | None = None  # a regular expression for the lines before an exception, such as its line of code
    without: str | None = None  # the rule says nothing if this is found in the text, too
    cut_off: str | None = None  # a regular expression for the last frames and code of a traceback without its last line
    needs: tuple[Feature, ...] = ()  # what the log must state of the setting, all of it
    excludes: tuple[Feature, ...] = ()  # what it must not state
    general: bool = False  # it is for exceptions that no other rule knows
    task: tuple[str, ...] = ()  # what the program was doing, by tasks.yaml or phases.yaml, one of these
    at: Literal["program", "package"] | None = None  # in whose code the exception was raised
    inner: str | None = None  # a regular expression for the innermost frames and their lines of code
    certainty: Certainty = "likely"  # that this is the cause
    reason: Certainty | None = None  # of `because`, if it is less sure
    happened: str
    because: str
    basis: str = "the message"  # from what the cause follows
    changes: tuple[str, ...] = ()
    check: str = ""
    documented: str = ""
    raised_by: str = ""  # packages, releases and files that print the message
    is_consequence: bool = False
    is_open: bool = False  # the log states what happened and not why; `because` says what usually does it
    is_note: bool = False
    strength: int = 0
    example: str = ""  # a text that the pattern matches, as it is printed
    seen: tuple[str, ...] = ()  # public threads in which the cause of the message was found

    @field_validator("match", "frames", "code", "without", "cut_off", "inner")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            re.compile(pattern)
        return pattern

    @model_validator(mode="after")
    def _has_example(self) -> Rule:
        if self.is_conclusion != (not self.example):
            raise ValueError("a rule has an example exactly if it has a pattern")
        return self

    @property
    def is_conclusion(self) -> bool:
        """Whether Python code finds this cause. All other causes are found by a pattern."""
        return self.match is None and self.cut_off is None

    def found(self, log: Log, features: frozenset[Feature] = frozenset()) -> Cause | None:
        """Return the cause if the pattern matches a log and the training has these features. None otherwise."""
        if not features.issuperset(self.needs) or not features.isdisjoint(self.excludes):
            return None
        by_line: dict[int, tuple[Line, re.Match[str]]] = {}
        for line, match in self._matches(log):
            by_line.setdefault(line.number, (line, match))
        matches = list(by_line.values())
        if not matches:
            return self._found_cut_off(log)
        groups: dict[str, str] = {}
        for _, match in matches:
            for name, value in match.groupdict().items():
                if value:
                    groups.setdefault(name, mask(value.strip())[:LONGEST_GROUP])
        return self.cause(tuple(line for line, _ in matches[:MOST_EVIDENCE]), self._values(groups))

    def found_in(self, failure: Failure, traceback: Traceback, features: frozenset[Feature]) -> Cause | None:
        """Return the cause if this rule for unknown exceptions matches an exception and its traceback, or None."""
        match = compiled(self.match or "").search(failure.text)
        if match is None or self._is_excluded(failure.text) or not self._has_frame(failure):
            return None
        if not features.issuperset(self.needs) or not features.isdisjoint(self.excludes):
            return None
        if self.task and traceback.task not in self.task:
            return None
        if self.at is not None and traceback.is_in_package != (self.at == "package"):
            return None
        if self.inner is not None and not any(compiled(self.inner).search(text) for text in _innermost(traceback)):
            return None
        groups = {name: mask(value.strip())[:LONGEST_GROUP] for name, value in match.groupdict().items() if value}
        values = {
            **self._values(groups), **traceback.values, "message": mask(failure.first_line)[:LONGEST_MESSAGE],
            "sizes": sizes.relation(failure.text),
        }  # fmt: skip
        line = Line(failure.number, failure.rank, failure.first_line)
        cause = self.cause((line,), values)
        return replace(cause, basis="the message and its traceback") if failure.frames else cause

    def _found_cut_off(self, log: Log) -> Cause | None:
        """Return the cause if the functions of an incomplete traceback match `cut_off`, or None."""
        if self.cut_off is None or not log.open_frames:
            return None
        texts = [*map(str, log.open_frames[-CUT_OFF_FRAMES:]), *log.open_code]
        if not any(compiled(self.cut_off).search(text) for text in texts):
            return None
        line = Line(log.num_lines, None, str(log.open_frames[-1]))
        return replace(
            self.cause((line,), self._values({})),
            certainty="possible" if self.certainty == "possible" else "likely",
            symptom="likely",
            basis="the last functions of an incomplete traceback",
        )

    def _values(self, groups: Mapping[str, str]) -> dict[str, str | None]:
        return {name: groups.get(name) for name in compiled(self.match or "").groupindex}

    def cause(self, evidence: Sequence[Line], values: Mapping[str, str | None]) -> Cause:
        """Return the cause, with the values filled into its sentences.

        Of adjacent names such as {old}{new}, the first known value is used. An unknown value becomes a question mark,
        or is removed if it is alone in parentheses. Other braces stay as they are, because changes contain JSON and
        Python.
        """

        def filled(sentence: str) -> str:
            def value(places: re.Match[str]) -> str:
                names = _PLACE.findall(places[0])
                if not values.keys() >= set(names):
                    return places[0]
                ends = "".join(values[name] or "" for name in names if name in _ENDS)
                of_message = [name for name in names if name not in _ENDS]
                first = next((text for name in of_message if (text := values[name]) is not None), "?")
                return f"{first if of_message else ''}{ends}"

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
            is_open=self.is_open,
            is_note=self.is_note,
            reason=self.reason,
            strength=self.strength,
        )

    def _matches(self, log: Log) -> Iterator[tuple[Line, re.Match[str]]]:
        """Yield matches in exceptions before those in lines, because quoted code in a traceback contains no values."""
        if self.match is None:
            return
        pattern = compiled(self.match)
        if self.where == "end":
            is_over = any(self._is_excluded(line.text) for line in log.last)
            if not log.failures and not log.open_frames and not is_over:
                for line in log.last:
                    if match := pattern.search(line.text):
                        yield line, match
            return
        for failure in log.failures:
            match = pattern.search(failure.text)
            if match and self._has_frame(failure) and not self._is_excluded(failure.text):
                yield Line(failure.number, failure.rank, failure.first_line), match
        if self.where == "line" and self.frames is None:
            for line, match_of_line in log.search(pattern):
                if not self._is_excluded(line.text):
                    yield line, match_of_line

    def _has_frame(self, failure: Failure) -> bool:
        if self.code is not None and not any(compiled(self.code).search(line) for line in failure.before):
            return False
        return self.frames is None or any(compiled(self.frames).search(str(frame)) for frame in failure.frames)

    def _is_excluded(self, text: str) -> bool:
        return self.without is not None and compiled(self.without).search(text) is not None


def _innermost(traceback: Traceback) -> Iterator[str]:
    """Yield the innermost frames with their lines of code, without those of Python's standard library."""
    own = [frame for frame in traceback.frames if package_of(frame) != "python"] or list(traceback.frames)
    for frame in own[-INNERMOST:]:
        yield f"{frame.file}:{frame.function}: {frame.code}"


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
    """Return the cause `id` with the values filled in. `certainty` and `strength` replace those of its rule."""
    cause = _conclusions()[id].cause(evidence, values)
    return replace(
        cause,
        certainty=cause.certainty if certainty is None else certainty,
        strength=cause.strength if strength is None else strength,
    )


@cache
def _conclusions() -> dict[str, Rule]:
    return {rule.id: rule for rule in rules() if rule.is_conclusion}


def causes(log: Log, features: frozenset[Feature] = frozenset()) -> list[Cause]:
    """Return the causes of all known messages in a log. `features` are features of the logged training."""
    texts = [failure.text for failure in log.failures] + [line.text for line in log.lines]
    whole = "\n".join(texts).lower()
    return [
        cause
        for rule in rules()
        if rule.where != "end" and not rule.general and ((rule.cut_off and log.open_frames) or _may_match(rule, whole))
        if (cause := rule.found(log, features)) is not None
    ]


def general_cause(failure: Failure, traceback: Traceback, features: frozenset[Feature] = frozenset()) -> Cause | None:
    """Return the cause of an exception that no other rule knows, from its kind, message and traceback, or None."""
    text = failure.text.lower()
    causes_of_rules = [
        cause
        for rule in rules()
        if rule.general and _may_match(rule, text)
        if (cause := rule.found_in(failure, traceback, features)) is not None
    ]
    return max(causes_of_rules, key=lambda cause: cause.strength, default=None)


def causes_of_end(log: Log, features: frozenset[Feature] = frozenset()) -> list[Cause]:
    """Return the causes that the last lines of a log without a failure suggest: the run may hang at this point."""
    return [cause for rule in rules() if rule.where == "end" if (cause := rule.found(log, features)) is not None]


def _may_match(rule: Rule, whole: str) -> bool:
    """Return whether the text contains one of the words that each match of the rule contains."""
    if rule.match is None:
        return False
    words = words_of(rule.match)
    return not words or any(word in whole for word in words)
