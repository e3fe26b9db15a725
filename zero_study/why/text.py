"""Print the answer of `zero-study why`."""

from __future__ import annotations

import math
import statistics

from zero_study import terminal
from zero_study.why import tracebacks
from zero_study.why.answer import MOST_OTHERS, MOST_SHOWN, Answer
from zero_study.why.cause import Cause
from zero_study.why.log import Failure, Line, mask
from zero_study.why.training import LARGE_NORM

_SURE = {
    "certain": "The log states this cause",
    "likely": "This reason is likely",
    "possible": "This is one of several possible reasons",
}
_HAPPENED = {
    "certain": "The log states what happened. ",
    "likely": "What happened is likely. ",
    "possible": "What happened is possible. ",
}


def text(answer: Answer) -> str:
    """Return the answer as text: what happened, why, what to change, how to check it, and where it is documented."""
    if answer.cause is None or answer.cause.is_note:
        lines = _unknown(answer) if answer.cause is None else _note(answer, answer.cause)
        return "\n".join([*lines, *_faults(answer)])
    lines = _cause(answer.cause)
    if answer.remedies:
        lines += ["", *_remedies(answer)]
    told = {line.number for line in answer.cause.evidence}
    others = [
        cause
        for cause in answer.causes
        if cause is not answer.cause
        and not cause.is_consequence
        and not told.intersection(line.number for line in cause.evidence)
    ][:MOST_OTHERS]
    if others:
        lines += ["", "Also in this log:"]
        lines += [terminal.wrap(f"* {cause.happened} {cause.because}", "", "  ") for cause in others]
    return "\n".join([*lines, *_faults(answer)])


def _cause(cause: Cause) -> list[str]:
    lines = [
        terminal.wrap(f"What happened: {mask(cause.happened)}", "", "  "),
        terminal.wrap(f"Why: {mask(cause.because)}", "", "  "),
        terminal.wrap(_sure(cause), "  ", "  "),
    ]
    lines += [_quoted(line) for line in cause.evidence[:3]]
    if cause.changes:
        lines += ["", "What to change, the smallest first:"]
        lines += [
            terminal.wrap(f"{place}. {change}", "  ", "     ") for place, change in enumerate(cause.changes, start=1)
        ]
    if cause.check:
        lines += ["", terminal.wrap(f"How to check it: {cause.check}", "", "  ")]
    if cause.documented:
        lines += [f"Documented: {cause.documented}"]
    return lines


def _sure(cause: Cause) -> str:
    """Return a sentence on how certain the description and the reason are."""
    if cause.is_open:
        return f"{_HAPPENED[cause.symptom]}The log does not state why."
    sure = _SURE["certain"] if cause.sureness == "certain" else _HAPPENED[cause.symptom] + _SURE[cause.sureness]
    return f"{sure} (from {cause.basis})."


def _quoted(line: Line) -> str:
    rank = "" if line.rank is None else f", rank {line.rank}"
    place = f"line {line.number:,}{rank}: " if line.number else ""
    start, shown = f"  {place}", mask(line.text.strip())
    room = max(40, terminal.width() - len(start))
    return start + (shown if len(shown) <= room else f"{shown[: room - 3]}...")


def _unknown(answer: Answer) -> list[str]:
    if answer.is_sound:
        steps = terminal.count(answer.steps.num_steps, "step")
        seconds = answer.steps.usual_seconds
        speed = (
            ""
            if seconds is None
            else f" A step takes {seconds:,.3g} s. If this seems slow, --model, --gpu, --gpus, --strategy, "
            "--micro-batch-size and --sequence-length compare it with a prediction."
        )
        start, end = f"Nothing wrong was found: the log has {steps} of a training, without an exception", ""
        if (bar := answer.stopped_at) is not None:
            start = f"No failure was found up to step {bar.done:,.0f} of {bar.total:,.0f}, where the log ends"
            end = (
                " If the run ended or hangs at this step, the log does not say why: py-spy dump --pid PID shows what "
                "each rank is doing."
            )
        return [
            terminal.wrap(
                f"{start}. Its losses, gradient norms and times show none of the signs that this command knows."
                f"{_large_norms(answer)} Values that the log does not contain were not checked.{end}{speed}"
            )
        ]
    lines = terminal.count(answer.log.num_lines, "line")
    if (failure := answer.first_failure) is not None:
        return _unknown_failure(answer, failure)
    if answer.log.open_frames:
        return _cut_off(answer)
    if not answer.log.failures and not answer.log.lines:
        return [
            terminal.wrap(
                f"In {lines}, no sign of a failure was found, and no training step that could be checked. If the run "
                "failed, the message is in other output: pass the standard error and the logs of all ranks, too."
            )
        ]
    if answer.steps.num_steps and answer.doubt:
        return [terminal.wrap(f"The cause is not known, but the log does not show a sound training: {answer.doubt}.")]
    return [
        terminal.wrap(
            f"The cause is not known: none of the {lines} has a sign that this command knows. The most relevant lines "
            "are probably:"
        ),
        *[_quoted(line) for line in answer.lines[:MOST_SHOWN]],
        "",
        terminal.wrap(
            "If the run had several ranks, pass the logs of all of them: the first failure may be in another log."
        ),
    ]


def _large_norms(answer: Answer) -> str:
    """Return a sentence that says that the gradient norms are large. Empty if they are not."""
    norms = [row.norm for row in answer.steps.rows if row.norm is not None and math.isfinite(row.norm)]
    if not norms or (middle := statistics.median(norms)) <= LARGE_NORM:
        return ""
    return f" The gradient norms are large (median {middle:,.4g}), which is usual for some models."


def _note(answer: Answer, cause: Cause) -> list[str]:
    """Return the lines for a log without a known failure that has a note."""
    has_failure = answer.first_failure is not None or bool(answer.log.open_frames)
    is_described = answer.is_sound or has_failure or answer.log.crash is not None
    start = _unknown(answer) if is_described else [terminal.wrap("No failure was found in this log.")]
    changes = [f"If this matters: {cause.changes[0]}"] if cause.changes else []
    note = terminal.wrap(f"A note: {cause.happened} {cause.because}", "", "  ")
    return [*start, "", note, *map(_quoted, cause.evidence[:1]), *[terminal.wrap(each, "  ", "  ") for each in changes]]


def _cut_off(answer: Answer) -> list[str]:
    """Return the lines for a traceback whose last line is not in the log."""
    frames = [terminal.wrap(f"  {frame}", "  ", "    ") for frame in answer.log.open_frames[-3:]]
    return [
        terminal.wrap(
            "The cause is not known: the log has a traceback without its last line, which names the exception. The "
            "last functions in it are:"
        ),
        *frames,
        *[_quoted(line) for line in answer.lines[:MOST_SHOWN]],
        "",
        terminal.wrap("Pass the complete log, or the logs of all ranks."),
    ]


def _unknown_failure(answer: Answer, failure: Failure) -> list[str]:
    """Return the lines for an exception whose cause is not known."""
    who = "A process" if failure.rank is None else f"Rank {failure.rank}"
    own = next((frame for frame in reversed(failure.frames) if "site-packages" not in frame.file), None)
    where = "" if own is None else f", in {own.function} ({own.file}, line {own.line})"
    traceback = tracebacks.of(failure)
    inner = traceback.inner
    deepest = "" if inner is None or inner == own else f" It was raised in {inner.function} ({inner.file})"
    code = f" by: {mask(inner.code)}" if deepest and inner is not None and inner.code else ""
    doing = f" It happened {traceback.doing}." if traceback.doing else ""
    lines = [
        terminal.wrap(f"The first failure: {who} raised {mask(failure.first_line)}{where}.", "", "  "),
        *([terminal.wrap(f"{deepest}{code}.{doing}".strip(), "  ", "  ")] if deepest or doing else []),
        _quoted(Line(failure.number, failure.rank, failure.first_line)),
        "",
        terminal.wrap(
            "This exception is not in the list of known messages, so that its cause is not known. Solve this "
            "failure first: later errors are usually its consequences."
        ),
    ]
    if answer.causes:
        lines += ["", "Consequences that the log also shows:"]
        lines += [terminal.wrap(f"* {cause.happened}", "", "  ") for cause in answer.causes[:MOST_OTHERS]]
    return lines


def _remedies(answer: Answer) -> list[str]:
    lines = ["Predicted to fit (by zero-study advise):"]
    for remedy in answer.remedies:
        lines.append(terminal.wrap(f"* {remedy['text']}", "  ", "    "))
    return lines


def _faults(answer: Answer) -> list[str]:
    """Return the lines about known faults of the releases in the log."""
    if not answer.faults:
        return []
    lines = ["", terminal.wrap("The package releases in the log have known faults that make training results wrong:")]
    for fault in answer.faults[:MOST_OTHERS]:
        until = f" Fixed in {fault.package} {fault.fixed}." if fault.fixed else ""
        lines.append(terminal.wrap(f"* {fault.package}: {fault.summary or fault.what}{until}", "  ", "    "))
    if len(answer.faults) > MOST_OTHERS:
        lines.append(f"  and {len(answer.faults) - MOST_OTHERS} more: zero-study doctor FILE --for deepspeed==VERSION")
    return lines
