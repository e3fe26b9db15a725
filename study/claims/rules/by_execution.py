"""Decide claims about code lines by the committed results of running them with current engines (snippets.py).

A result contains the digest of its rule. If the rule has changed since, the result is not used.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, model_validator

from study.claims.rules import MissingEvidence, Observed, Text
from study.records.schema import Facts
from zero_study.errors import refusing
from zero_study.files import ROOT, StrictModel, load

RESULTS = ROOT / "reports" / "cpu" / "published" / "snippets.json"
COMMAND = "python -m study.claims.snippets"

Outcome = Literal["accepted", "rejected", "ignored"]
OUTCOMES: tuple[Outcome, ...] = ("accepted", "rejected", "ignored")
Scalar = bool | int | float | str | None


class Execution(StrictModel):
    """A rule that runs the claim's code lines with the current engine. study/claims/snippets.py runs them."""

    type: Literal["execution"]
    through: Literal["deepspeed-json", "accelerate-yaml", "training-arguments", "python"]
    snippet: Text
    processes: Literal[1, 2] = 1
    wants: dict[Text, Scalar] = Field(default_factory=dict)  # values by expression if the lines take effect
    measures: Text | None = None  # expression of the observed value; None if the outcome is observed

    @model_validator(mode="after")
    def _can_be_given(self) -> Execution:
        try:
            if self.through == "deepspeed-json":
                can = isinstance(json.loads(self.snippet), dict)
            elif self.through == "accelerate-yaml":
                can = isinstance(yaml.safe_load(self.snippet), dict)
            elif self.through == "training-arguments":
                can = isinstance(ast.parse(self.snippet, mode="eval").body, ast.Call)
            else:  # Python itself decides whether the lines are valid
                can = True
        except (ValueError, SyntaxError, yaml.YAMLError):
            can = False
        if not can:
            kind = {"deepspeed-json": "JSON object", "accelerate-yaml": "YAML of keys"}.get(self.through, "call")
            raise ValueError(f"snippet: this is not a {kind}, which `through: {self.through}` needs. Correct it.")
        for expression in [*self.wants, *([self.measures] if self.measures else [])]:
            try:
                ast.parse(expression, mode="eval")
            except SyntaxError:
                raise ValueError(f"wants or measures: {expression!r} is not an expression. Correct it.") from None
        return self

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()


class Result(Facts, strict=True):
    """What the engine did with the code lines of one claim."""

    rule_sha256: str  # digest of the rule that was applied
    outcome: Outcome
    message: str | None  # the engine's message if it refused the lines
    found: dict[str, Scalar | list[Scalar]]  # by expression of `wants`; a list by rank if ranks differ
    measured: Scalar | list[Scalar]


class Results(Facts, strict=True):
    """The content of the file with the results of all claims' code lines."""

    date: str
    command: str
    versions: dict[str, str]
    results: dict[str, Result]


def outcome(wants: Mapping[str, Any], values: Mapping[str, Any], message: str | None) -> Outcome:
    """Return what an engine did with code lines: it rejected, ignored or accepted them.

    The lines are rejected if the engine printed an error `message`. They are accepted if all values are as expected,
    otherwise ignored.
    """
    if message is not None:
        return "rejected"
    return "accepted" if values == wants else "ignored"


def read(path: Path = RESULTS) -> Results:
    """Return the content of the results file. Raises Refusal if the file is invalid or absent."""
    if not path.exists():
        raise MissingEvidence(f"{path}: there is no such file. Run `{COMMAND}`")
    content = load(path, f"results; run `{COMMAND}`")
    with refusing(str(path)):
        return Results.model_validate(content)


@lru_cache(maxsize=1)
def _committed() -> Results:
    return read()


def versions() -> str:
    """Return the names and versions of the packages that produced the results, as text for a sentence."""
    return ", ".join(f"{name} {version}" for name, version in _committed().versions.items())


def observe(name: str, rule: Execution) -> Observed:
    """Return what the engine did with the code lines of a claim, from the committed results.

    Raises ValueError if there is no result, if the rule has changed since, or if the result contradicts itself.
    """
    again = f"Run `{COMMAND} --claim {name}`"
    results_file = RESULTS.relative_to(ROOT)
    result = _committed().results.get(name)
    if result is None:
        raise ValueError(f"snippet: {results_file} has no result for these lines of code. {again}")
    if result.rule_sha256 != rule.sha256:
        raise ValueError(f"snippet: the result in {results_file} belongs to another rule. {again}")
    if result.outcome != outcome(rule.wants, result.found, result.message):
        raise ValueError(
            f"snippet: the result in {results_file} is {result.outcome}, but this does not follow from its content. "
            f"{again}"
        )
    if isinstance(result.measured, list) or (rule.measures and result.measured is None and result.message is None):
        raise ValueError(
            f"measures: {result.measured} in {results_file} is not a single value. Measure a value that is "
            "equal on all ranks."
        )
    observed: bool | float | str = result.outcome
    if rule.measures is not None and result.outcome == "accepted":
        assert result.measured is not None  # because the engine accepted the lines
        observed = result.measured
    return Observed(observed, (f"{results_file}: {name}: {result.outcome}",), told=_what_shows_it(rule, result))


def _what_shows_it(rule: Execution, result: Result) -> str:
    """Return the evidence for the outcome in words: the engine's message, or the values of the expressions."""
    if result.message is not None:
        return result.message
    values = [
        f"{expression} is {result.found[expression]!r}"
        + ("" if result.found[expression] == expected else f", not {expected!r}")
        for expression, expected in rule.wants.items()
        if result.outcome == "accepted" or result.found[expression] != expected
    ]
    return "; ".join(values)
