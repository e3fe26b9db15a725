"""Answer what a log shows about a failed run: the first failure, and what is certain about it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero_study.errors import Refusal
from zero_study.files import open_regular, reading
from zero_study.logs import formats
from zero_study.logs.printed_failures import TIME_OUT, Failure, Frame, Log, Reader
from zero_study.logs.printed_settings import Setting, SettingReader
from zero_study.logs.printed_steps import Steps
from zero_study.terminal import masked
from zero_study.theory import gpus
from zero_study.upgrade.faults import Fault
from zero_study.verdict import Checked, NotChecked, Verdict
from zero_study.why import (
    environment,
    hangs,
    known_faults,
    memory,
    next_step,
    planned,
    rules,
    stated_values,
    tracebacks,
    training_facts,
)  # fmt: skip
from zero_study.why.environment import Environment
from zero_study.why.fact import Fact
from zero_study.why.next_step import NextStep

LONGEST_LINE = 1 << 16  # bytes that are read at once, so that a log in one line needs little memory
MOST_SHOWN = 5  # lines that are shown if the log has no failure
SURVIVED = 8  # the depth of a failure after which the training went on
GOES_ON = 10  # rows of steps after an exception that show that the training went on
# Exceptions with which launchers report what another process did.
_REPORTS = (
    "ChildFailedError", "CalledProcessError", "SignalException", "SystemExit", "KeyboardInterrupt",
    "RayTaskError", "ExitCode", "CancelledError", "ProcessExitedException", "ProcessRaisedException",
)  # fmt: skip
_OF_RANK = re.compile(r"(?i)(?<![a-z_])rank[-_.]?(\d{1,5})(?!\d)|/(\d{1,5})/std(?:err|out)(?:\.log)?$")


@dataclass(frozen=True)
class Answer:
    """What a log shows, the first failure first."""

    facts: tuple[Fact, ...]  # those about the first failure first, and notes last
    first_failure: Failure | None
    num_later: int  # failures that follow
    num_alike: int  # of them that have the same message
    log: Log
    steps: Steps
    setting: Setting
    next_step: NextStep
    environment: Environment | None = None
    remedies: tuple[dict[str, Any], ...] = ()  # of the planner, for the memory of a GPU
    faults: tuple[Fault, ...] = ()  # known faults whose signature the log has

    @property
    def cause(self) -> Fact | None:
        """The first fact that says why the run failed. None if the cause is not in the log."""
        causes = (fact for fact in self.facts if fact.because and not fact.is_note and not fact.is_consequence)
        return next((fact for fact in causes if self.is_about_first(fact)), None)

    def is_about_first(self, fact: Fact) -> bool:
        """Return whether a fact is about the first failure: its own lines, or those of watchdogs and recordings."""
        first = self.first_failure
        return first is None or not fact.line or fact.kind == "hang" or _is_of(fact, first)

    @property
    def doubt(self) -> str | None:
        """What is wrong with the logged steps, or that they are too few. None if nothing is wrong."""
        return (
            training_facts.doubt(self.steps)
            if self.steps.num_steps
            else "no line was recognized as a step of a training"
        )

    @property
    def num_found(self) -> int:
        """How many things are wrong: the first failure, and facts that are not notes."""
        return (self.first_failure is not None) + sum(not fact.is_note for fact in self.facts)

    @property
    def verdict(self) -> Verdict:
        """Return the verdict: something was found, the logged steps show nothing, or they are too few."""
        is_open = self.log.open_frames or self.doubt is not None
        why = "the log ends in a traceback without its exception" if self.log.open_frames else self.doubt or ""
        unknown = [NotChecked("whether the run is sound", why, True)] if not self.num_found and is_open else []
        checked = [Checked(self.log.num_lines, "line", "read"), Checked(len(self.steps.rows), "row", "of steps")]
        return Verdict.of(self.num_found, checked, unknown)


def answer(
    logs: Iterable[Path | Iterable[bytes]],
    requested: Setting | None = None,
    recorded: Sequence[Fact] = (),
    is_environment_requested: bool | None = False,
) -> Answer:
    """Return what one or more logs show, given as files or as lines.

    Several logs are those of several ranks, or consecutive parts of one log. `recorded` are the facts of recordings of
    PyTorch. `is_environment_requested`: see `environment.look`. Raises Refusal if a file cannot be read, if the logs
    are empty, or if the request names an unknown model or GPU.
    """
    requested = requested or Setting()
    planned.check(requested)
    sources = list(logs)
    steps, stated = Steps(), SettingReader()
    reader = Reader((steps, stated))
    for source in sources:
        if not isinstance(source, Path):
            reader.read(source)
            continue
        match = _OF_RANK.search(str(source)) if len(sources) > 1 else None
        rank = int(match[1] or match[2]) if match else None
        reader.read(_lines(source), str(source) if len(sources) > 1 else None, rank)
    steps.finish()
    if not steps.rows and not reader.log.failures:
        for source in sources:
            if isinstance(source, Path):
                _add_imported(steps, source)
    log = reader.log
    if not log.num_lines and not recorded:
        raise Refusal("The log is empty. Name the file with the output of the run, or pipe the output to this command.")
    return _answer(log, steps, stated.setting(requested), recorded, is_environment_requested)


def _add_imported(steps: Steps, path: Path) -> None:
    """Add the steps of a log, if `zero-study import` can read its format."""
    try:
        _, drafts = formats.read(path)
    except Refusal:
        return
    for draft in drafts:
        draft.finish()
        series = draft.training.series()
        if series is not None:
            steps.add_series(series.columns)


def _answer(
    log: Log, steps: Steps, setting: Setting, recorded: Sequence[Fact], is_environment_requested: bool | None
) -> Answer:
    messages = memory.messages(log)
    if setting.gpu is None and messages and messages[0].total:
        setting = replace(setting, gpu=gpus.usual_with(messages[0].total))
    of_rules = list(rules.facts(log))
    first = first_failure(log, steps, {fact.line for fact in of_rules if fact.is_consequence})
    installed = environment.look([first] if first is not None else [], is_environment_requested)
    releases = dict(setting.versions) | (installed.versions if installed is not None else {})
    faults = list(known_faults.facts(log, releases))
    found = [
        *recorded,
        *(fact for message in messages[:MOST_SHOWN] for fact in memory.facts(message, steps, setting)),
        *hangs.facts(log, steps),
        *stated_values.facts(log, setting),
        *([stated_values.of_signal(first, log)] if first is not None and first.signal else []),
        *of_rules,
        *(fact for _, fact in faults),
        *training_facts.facts(steps, setting.total_steps),
    ]
    facts = _ordered(found, first, log)
    is_of_gpu = first is not None and any(message.failure.number == first.number for message in messages)
    later = [each for each in log.failures if _is_later(each, first, log)]
    return Answer(
        facts, first, len(later) + log.num_failures - len(log.failures),
        sum(first is not None and _is_alike(each, first) for each in later), log, steps, setting,
        next_step.after(first, log, facts, len(steps.rows)), installed, planned.remedies(setting) if is_of_gpu else (),
        tuple(fault for fault, _ in faults),
    )  # fmt: skip


def first_failure(log: Log, steps: Steps, consequences: Iterable[int] = ()) -> Failure | None:
    """Return the failure that came first and is not the consequence of another one. None if the log has none.

    `consequences` are the lines of messages that libraries print only after another failure. Failures after which the
    training went on do not count. Time stamps decide the order if all candidates have comparable ones.
    """
    places = set(consequences)
    rows = {rank: [row.line.number for row in series.rows] for rank, series in steps.by_rank.items()}

    def depth(failure: Failure) -> int:
        went_on = sum(number > failure.number for number in rows.get(failure.rank, ())) >= GOES_ON
        return SURVIVED * went_on + _depth(failure, log, places)

    candidates = [failure for failure in log.failures if not failure.is_handled]
    if not candidates:
        return None
    if (least := min(map(depth, candidates))) >= SURVIVED:
        return None
    best = [failure for failure in candidates if depth(failure) == least]
    times = [failure.time for failure in best]
    if len(log.files) > 1 and all(time is not None and time.date[1:] != (0, 0) for time in times):
        best.sort(key=lambda failure: failure.time.key if failure.time is not None else ())
    first = tracebacks.origin(best[0], log.failures)
    with_frames = [each.frames for each in log.failures if each.frames and _is_alike(each, first)]
    first.frames = first.frames or next(iter(with_frames), ())  # of another rank that raised the same
    return first


def _depth(failure: Failure, log: Log, consequences: set[int]) -> int:
    """Return 0 for a failure by itself, and more for what other failures lead to."""
    is_waiting = failure.kind == TIME_OUT or "Watchdog caught" in failure.text
    if failure.signal in (signal.SIGTERM, signal.SIGHUP) or failure.kind in _REPORTS:
        return 4
    if failure.signal == signal.SIGABRT and any(each.kind == TIME_OUT for each in log.failures):
        return 2
    if is_waiting:
        return 1
    return 3 if next_step.LOST.search(failure.text) or failure.number in consequences else 0


def is_after(number: int, first: Failure | None, log: Log) -> bool:
    """Return whether a line comes after the first failure, in the same file."""
    return first is not None and number > first.last_number and log.place(number)[0] == log.place(first.number)[0]


def _is_later(failure: Failure, first: Failure | None, log: Log) -> bool:
    """Return whether a failure comes after the first one: by its line, or in another file by its time."""
    if first is None or failure is first:
        return False
    if log.place(failure.number)[0] == log.place(first.number)[0]:
        return failure.number >= first.number
    return failure.time is None or first.time is None or failure.time.key >= first.time.key


def _is_of(fact: Fact, first: Failure) -> bool:
    return any(first.number <= line.number <= first.last_number for line in fact.evidence)


def _is_alike(failure: Failure, first: Failure) -> bool:
    shapes = {re.sub(r"[\d.]+", "", each.first_line) for each in (failure, first)}
    return len(shapes) == 1


def _ordered(found: Iterable[Fact], first: Failure | None, log: Log) -> tuple[Fact, ...]:
    """Return each fact once: those about the first failure, then the others, and notes last."""

    def key(fact: Fact) -> tuple[bool, bool, bool, bool, int]:
        is_about = first is None or _is_of(fact, first)
        is_later = is_after(fact.line, first, log)
        is_of_steps = fact.kind in ("wrong", "slow") and first is not None
        return fact.is_note, fact.is_consequence or is_later, not is_about, is_of_steps, fact.line

    by_id: dict[str, Fact] = {}
    for fact in sorted(found, key=key):
        by_id.setdefault(fact.id, fact)
    return tuple(by_id.values())


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file. A very long line is read in parts."""
    with reading(path, "a log"), open_regular(path) as file:
        while line := file.readline(LONGEST_LINE):
            yield line


def content(answer: Answer) -> dict[str, Any]:
    """Return the answer as a dictionary that can be written as JSON, without secrets."""
    return {name: masked(value) for name, value in _content(answer).items()}


def _content(answer: Answer) -> dict[str, Any]:
    return {
        **answer.verdict.content(),
        "first_failure": None if answer.first_failure is None else _failure(answer, answer.first_failure),
        "cause": answer.cause.content() if answer.cause else None,
        "other_causes": [fact.content() for fact in answer.facts if fact is not answer.cause],
        "question": answer.next_step.question,
        "record": list(answer.next_step.record),
        "lines": [
            {"line": line.number, "rank": line.rank, "text": line.text}
            for line in [*answer.log.lines[:MOST_SHOWN]] or answer.log.last
        ],
        "files": [{"file": name, "first_line": number + 1} for number, name in answer.log.files],
        "num_lines": answer.log.num_lines,
        "num_rows": len(answer.steps.rows),
        "ranks": sorted(answer.log.ranks),
        "num_steps": answer.steps.num_steps,
        "setting": {name: value for name, value in vars(answer.setting).items() if value not in (None, False)},
        "environment": None if answer.environment is None else {
            "folder": str(answer.environment.folder), "releases": answer.environment.versions,
        },
        "remedies": list(answer.remedies),
        "known_faults_of_the_releases": [
            {"id": fault.id, "summary": fault.summary, "fixed_in": fault.fixed} for fault in answer.faults
        ],
    }  # fmt: skip


def _failure(answer: Answer, failure: Failure) -> dict[str, Any]:
    """Return the first failure as a dictionary that can be written as JSON."""
    file, number = answer.log.place(failure.number)

    def frame(of: Frame | None) -> dict[str, Any] | None:
        return None if of is None else of._asdict()

    return {
        "file": file, "line": number, "rank": failure.rank,
        "is_rank_local": answer.log.are_ranks_local, "time": failure.time and failure.time.text,
        "kind": failure.kind, "signal": failure.signal or None, "message": failure.message,
        "user_frame": frame(tracebacks.user_frame(failure)), "library_frame": frame(tracebacks.library_frame(failure)),
        "frames": [str(each) for each in failure.frames[-MOST_SHOWN:]],
        "num_later": answer.num_later, "num_later_alike": answer.num_alike,
    }  # fmt: skip
