"""Explain an exception whose message no rule knows, from its type, the values in its message and its traceback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zero_study.why import known, tracebacks, versions
from zero_study.why.cause import Cause
from zero_study.why.log import Failure, Line, Log
from zero_study.why.setting import Setting


def causes(log: Log, unknown: Failure | None, setting: Setting) -> Iterator[Cause]:
    """Yield the cause of the first exception that no other rule explains."""
    if unknown is None:
        return
    failure = tracebacks.origin(unknown, log.failures)
    cause = _of(failure, setting) or (_of(unknown, setting) if unknown is not failure else None)
    if cause is None:
        cause = next(versions.of(failure), None)
    if cause is not None:
        yield _with_lines(cause, [unknown, failure])


def _of(failure: Failure, setting: Setting) -> Cause | None:
    return known.general_cause(failure, tracebacks.of(failure), setting.features)


def _with_lines(cause: Cause, failures: Sequence[Failure]) -> Cause:
    """Return the cause with the lines of all failures that it explains, so that none of them counts as unknown."""
    lines = {failure.number: Line(failure.number, failure.rank, failure.first_line) for failure in failures}
    return replace(cause, evidence=tuple(lines[number] for number in sorted(lines)))
