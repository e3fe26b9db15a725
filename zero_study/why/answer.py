"""Answer why a run failed: find the first cause in its log, further causes, and the most important lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero_study.errors import Refusal
from zero_study.files import open_regular, reading
from zero_study.logs import formats
from zero_study.upgrade.changes import known_faults
from zero_study.upgrade.faults import Fault
from zero_study.verdict import Checked, NotChecked, Verdict
from zero_study.why import general, hangs, known, launch, memory, planned, slow, training
from zero_study.why.cause import Cause, rank_causes
from zero_study.why.log import Failure, Line, Log, Reader, mask
from zero_study.why.setting import Setting, SettingReader
from zero_study.why.signs import Signs
from zero_study.why.stacks import Stacks
from zero_study.why.steps import Bar, Steps
from zero_study.why.tables import Tables

LONGEST_LINE = 1 << 16  # characters that are read at once, so that a log in one line needs little memory
MOST_OTHERS = 3  # further causes in the answer
MOST_SHOWN = 5  # lines that are shown if no cause is known
_ENDS = ("ChildFailedError", "CalledProcessError", "SignalException", "SystemExit", "KeyboardInterrupt", "RayTaskError")


@dataclass(frozen=True)
class Answer:
    """The causes that a log shows, the first one first, and what was read from the log."""

    causes: tuple[Cause, ...]  # the first one is the answer
    lines: tuple[Line, ...]  # the first lines that matter
    log: Log
    steps: Steps
    setting: Setting
    remedies: tuple[dict[str, Any], ...] = ()  # of the planner, for memory of a GPU
    faults: tuple[
        Fault, ...
    ] = ()  # known faults of the releases that the log states, if the training gives wrong results
    has_signs: bool = False  # of trouble, so that the log is not called sound

    @property
    def cause(self) -> Cause | None:
        """The first cause. None if only consequences are known and an unknown exception came before them."""
        if not self.causes or (self.causes[0].is_consequence and self.first_failure is not None):
            return None
        return self.causes[0]

    @property
    def first_failure(self) -> Failure | None:
        """The first exception that is explained by no known cause, and by no other exception or rank."""
        return _first_unknown(self.log, self.causes)

    @property
    def is_sound(self) -> bool:
        """Whether the log shows steps of a training and nothing that is wrong."""
        has_failure = self.log.failures or self.log.open_frames
        return self.num_found == 0 and not has_failure and not self.has_signs and self.doubt is None

    @property
    def doubt(self) -> str | None:
        """What in a log without a known cause does not fit a sound training. None if everything does."""
        if crash := self.log.crash:
            return f"line {crash.number:,} says: {mask(crash.text.strip())}"
        return training.doubt(self.steps) if self.steps.num_steps else "it has no step of a training"

    @property
    def stopped_at(self) -> Bar | None:
        """The progress bar of the steps at the end of the log, if it is not full. None if there is none."""
        bar = self.steps.step_bar
        return bar if bar is not None and bar.done < bar.total else None

    @property
    def num_found(self) -> int:
        """How many causes there are, without notes."""
        return 0 if self.cause is None else sum(not cause.is_note for cause in self.causes)

    @property
    def verdict(self) -> Verdict:
        """Return the verdict: a cause was found, the logged steps show nothing wrong, or the cause is unknown."""
        unknown = (
            []
            if self.num_found or self.is_sound
            else [NotChecked("the cause", self.doubt or "the log has no known sign of one", True)]
        )
        return Verdict.of(self.num_found, [Checked(self.log.num_lines, "line", "read")], unknown)


def answer(paths: Iterable[Path], requested: Setting | None = None, recorded: Sequence[Cause] = ()) -> Answer:
    """Return why a run failed, from one or more log files.

    Several files are the logs of several ranks, or consecutive parts of one log. `recorded` are the causes that
    recordings of PyTorch show. Raises Refusal if a file cannot be read, or if the log is empty.
    """
    files = list(paths)
    log_content = _read(line for path in files for line in _lines(path))
    if not log_content.steps.rows:
        for path in files:
            _add_imported(log_content.steps, path)
    return _answer(log_content, requested, recorded)


def answer_lines(lines: Iterable[str], requested: Setting | None = None, recorded: Sequence[Cause] = ()) -> Answer:
    """Return why a run failed, from the lines that it printed. Raises Refusal if there are no lines."""
    return _answer(_read(lines), requested, recorded)


@dataclass
class _Read:
    """Everything that was read from the lines of a log."""

    log: Log
    steps: Steps
    stated: SettingReader
    signs: Signs
    tables: Tables
    stacks: Stacks


def _read(lines: Iterable[str]) -> _Read:
    steps, stated, signs, tables, stacks = Steps(), SettingReader(), Signs(), Tables(), Stacks()
    log = Reader((steps, stated, signs, tables, stacks)).read(lines)
    steps.finish()
    return _Read(log, steps, stated, signs, tables, stacks)


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


def _answer(log_content: _Read, requested: Setting | None, recorded: Sequence[Cause]) -> Answer:
    log, steps = log_content.log, log_content.steps
    if not log.num_lines and not recorded:
        raise Refusal("The log is empty. Name the file with the output of the run, or pipe the output to this command.")
    setting = log_content.stated.setting(requested or Setting())
    messages = memory.messages(log)
    if setting.gpu is None and messages:
        setting = replace(setting, gpu=planned.gpu_of(messages[0].total))
    found = list(
        _not_refuted(
            [
                *recorded,
                *known.causes(log, setting.features),
                *memory.causes(messages, steps, setting),
                *hangs.causes(log, steps, setting),
                *training.causes(steps, setting),
                *slow.causes(steps, setting),
                *log_content.signs.causes(steps),
                *log_content.tables.causes(),
                *log_content.stacks.causes(),
                *launch.causes(log),
                *planned.slower_than_predicted(steps, setting),
            ],
            steps,
        )
    )
    if not any(not cause.is_note and not cause.is_consequence for cause in found):
        found += general.causes(log, _first_unknown(log, found), setting)
    if not any(not cause.is_note and not cause.is_consequence for cause in found):
        found += [*memory.of_cut_off(log), *_of_end(log_content, setting, found)]
    causes = rank_causes(found)
    first = causes[0] if causes else None
    is_of_gpu = bool(messages) and first is not None and first.kind == "memory"
    remedies = planned.remedies(setting) if is_of_gpu else ()
    runs_wrong = first is None or first.kind == "wrong"
    faults = tuple(_faults(setting)) if runs_wrong else ()
    return Answer(
        tuple(causes), tuple(_first_lines(log)), log, steps, setting, remedies, faults, log_content.signs.are_there
    )


def _first_unknown(log: Log, causes: Iterable[Cause]) -> Failure | None:
    """Return the first exception that no cause explains, and that no other exception or rank explains."""
    explained = {line.number for cause in causes for line in cause.evidence}
    return next(
        (
            failure
            for failure in log.failures
            if failure.kind not in _ENDS and not failure.is_handled and failure.number not in explained
        ),
        None,
    )


def _of_end(log_content: _Read, setting: Setting, found: Sequence[Cause]) -> Iterator[Cause]:
    """Yield causes from the last lines of a log without a failure.

    A hang at the start is excluded if the log has training steps, or if it shows why the run is slow.
    """
    may_hang = not log_content.steps.num_steps and not any(cause.kind == "slow" for cause in found)
    for cause in known.causes_of_end(log_content.log, setting.features):
        if cause.kind != "hang" or may_hang:
            yield cause


def _not_refuted(causes: Iterable[Cause], steps: Steps) -> Iterator[Cause]:
    """Yield the causes, without warnings that the logged numbers disprove.

    Logged gradient norms show that gradients arrive. If all losses are above 0, most samples count for the loss.
    """
    losses = [row.loss for row in steps.rows if row.loss is not None]
    refuted = {
        "wrong/no-gradient": any(row.norm for row in steps.rows),
        "wrong/response-template": bool(losses) and all(loss > 0 for loss in losses),
    }
    yield from (cause for cause in causes if not refuted.get(cause.id, False))


def _faults(setting: Setting) -> Iterator[Fault]:
    """Yield known faults of the logged releases that give wrong results and can affect the strategy."""
    stage = {"zero1": 1, "zero2": 2, "zero3": 3}.get(setting.strategy or "")
    releases = dict(setting.versions)
    for change in known_faults():
        stages = change.needs.get("zero_optimization.stage")
        if stage is not None and stages is not None and stage not in stages:
            continue
        if change.kind == "fault" and change.effect == "training" and change.is_among(releases):
            yield change


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file. Bytes that are not UTF-8 are replaced, and a very long line is read in parts."""
    with reading(path, "a log"), open_regular(path) as file:
        while line := file.readline(LONGEST_LINE):
            yield line.decode("utf-8", errors="replace")


def _first_lines(log: Log) -> Iterator[Line]:
    """Yield the lines to show if no cause is known: the first exception of each kind, or else the first kept lines."""
    seen: set[str] = set()
    for failure in log.failures:
        if failure.kind in _ENDS or failure.kind in seen or failure.is_handled:
            continue
        seen.add(failure.kind)
        yield Line(failure.number, failure.rank, failure.first_line)
    if not seen:
        yield from log.lines[:MOST_SHOWN]
    if not seen and not log.lines:
        yield from log.last


def content(answer: Answer) -> dict[str, Any]:
    """Return the answer as a dictionary that can be written as JSON."""
    return {
        **answer.verdict.content(),
        "cause": answer.cause.content() if answer.cause else None,
        "other_causes": [cause.content() for cause in answer.causes if cause is not answer.cause],
        "first_failure": None if answer.first_failure is None else _failure(answer.first_failure),
        "lines": [
            {"line": line.number, "rank": line.rank, "text": mask(line.text)} for line in answer.lines[:MOST_SHOWN]
        ],
        "num_lines": answer.log.num_lines,
        "ranks": sorted(answer.log.ranks),
        "num_steps": answer.steps.num_steps,
        "setting": {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in vars(answer.setting).items()
            if value not in (None, False)
        },
        "remedies": list(answer.remedies),
        "known_faults_of_the_releases": [
            {"id": fault.id, "summary": fault.summary, "fixed_in": fault.fixed} for fault in answer.faults
        ],
    }


def _failure(failure: Failure) -> dict[str, Any]:
    """Return an exception as a dictionary that can be written as JSON."""
    return {
        "line": failure.number,
        "rank": failure.rank,
        "kind": failure.kind,
        "message": mask(failure.message),
        "frames": [str(frame) for frame in failure.frames[-5:]],
    }
