"""Print the answer of `zero-study why`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zero_study import terminal
from zero_study.logs.printed_failures import TIME_OUT, Failure, Frame
from zero_study.logs.printed_steps import Line
from zero_study.terminal import count, mask
from zero_study.why.answer import Answer, is_after
from zero_study.why.fact import Fact
from zero_study.why.tracebacks import library_frames, package_of, user_frame

COLUMNS = {
    "loss": "loss",
    "norm": "gradient norm",
    "rate": "learning rate",
    "seconds": "seconds per step",
    "speed": "speed",
}
MOST_FACTS = 6  # in the answer
MOST_LINES = 12  # of a message that are printed; --json has all
MOST_QUOTED, MOST_NEAR = 3, 5  # lines that show a fact, and that may matter in a log without a failure


def text(answer: Answer) -> str:
    """Return the answer: the first failure, what is certain about it, and otherwise what to ask and to record."""
    lines = list(_failure(answer, answer.first_failure)) if answer.first_failure is not None else list(_rows(answer))
    shown = {line.number for line in (answer.first_failure.evidence,)} if answer.first_failure is not None else set()
    first, log = answer.first_failure, answer.log
    facts = [each for each in answer.facts if not each.is_consequence and not is_after(each.line, first, log)]
    for fact in facts[:MOST_FACTS]:
        lines += ["", *_fact(answer, fact, shown)]
    if answer.remedies:
        lines += ["", "Predicted to fit (by zero-study advise):"]
        lines += [terminal.wrap(f"* {remedy['text']}", "  ", "    ") for remedy in answer.remedies]
    if answer.cause is None and answer.verdict.result != "sound":
        start = _no_cause(answer)
        lines += [
            "",
            terminal.wrap(f"{start}The question: {answer.next_step.question}", "", "  "),
        ]
        if answer.next_step.record:
            lines += ["To find out:", *(f"  {line}" for line in answer.next_step.record)]
    return mask("\n".join(lines))


def _no_cause(answer: Answer) -> str:
    """Return a sentence that says that the log does not show the cause. Empty if it shows no failure."""
    first = answer.first_failure
    if first is not None and not first.signal and first.kind not in (TIME_OUT, "ExitCode"):
        return "The log shows no cause beyond this message. "
    return "The cause is not in this log. " if answer.num_found else ""


def _failure(answer: Answer, failure: Failure) -> Iterator[str]:
    """Yield the lines about the first failure: where, when, its message, its frames, and what followed."""
    who = "a process" if failure.rank is None else f"{'local ' * answer.log.are_ranks_local}rank {failure.rank}"
    file, number = answer.log.place(failure.number)
    place = f"line {number:,}" + (f" of {file}" if file else "") + (f", {failure.time.text}" if failure.time else "")
    did = f"{failure.kind} ended {who}" if failure.signal else f"{who} raised {failure.kind}"
    if failure.kind in (TIME_OUT, "ExitCode"):
        did = f"{who} gave up waiting" if failure.kind == TIME_OUT else f"{who} failed"
    yield terminal.wrap(f"The first failure: {did} ({place}).", "", "  ")
    message = [mask(line.rstrip()) for line in failure.message.split("\n") if line.strip()]
    for line in message[:MOST_LINES]:
        yield terminal.wrap(line.strip(), "  | ", "  | ")
    if len(message) > MOST_LINES:
        yield f"  | ... {count(len(message) - MOST_LINES, 'more line')}: --json"
    if (user := user_frame(failure)) is not None:
        yield from _frame("In the program", user, user.code)
    for frame in library_frames(failure):
        code = frame.code or (answer.environment.source_of(frame) if answer.environment is not None else "")
        yield from _frame(f"In {package_of(frame)}", frame, code)
    if failure.earlier is not None and not failure.is_meant:
        yield terminal.wrap(f"It was raised while {mask(failure.earlier.first_line)!r} was handled.", "  ", "    ")
    if answer.num_later:
        how_many = "" if answer.num_alike == answer.num_later else f"{answer.num_alike:,} of them "
        alike = f", {how_many}with the same message but other numbers" if answer.num_alike else ""
        yield terminal.wrap(f"{count(answer.num_later, 'later error')} in the log{alike}.", "  ", "    ")


def _frame(where: str, frame: Frame, code: str) -> Iterator[str]:
    # The folder of packages is left out.
    place = f"{where}: {frame.function} ({frame.file.rpartition('-packages/')[2]}, line {frame.line})"
    yield terminal.wrap(place, "  ", "    ")
    if code:
        yield terminal.wrap(mask(code), "    > ", "    > ")


def _rows(answer: Answer) -> Iterator[str]:
    """Yield the lines about a log without a failure."""
    log, rows = answer.log, len(answer.steps.rows)
    if log.open_frames:
        yield terminal.wrap("The log ends in a traceback without its last line, which names the exception:")
        yield from (terminal.wrap(str(frame), "  ", "    ") for frame in log.open_frames[-3:])
        return
    if not log.num_lines:
        return
    lines = f"{count(log.num_lines, 'line')} read. None of them was recognized as an exception or a crash."
    if rows:
        stated = {
            name: sum(getattr(row, field) is not None for row in answer.steps.rows) for field, name in COLUMNS.items()
        }
        has = ", ".join(f"{name} ({number:,})" for name, number in stated.items() if number)
        missing = ", ".join(name for name, number in stated.items() if not number)
        lines += f" {count(rows, 'row')} of steps with {has}." + (
            f" Not recognized, so not checked: {missing}." if missing else ""
        )
    yield terminal.wrap(lines)
    bar = answer.steps.step_bar
    if bar is not None and bar.done < bar.total:
        yield terminal.wrap(f"The log ends at step {bar.done:,.0f} of {bar.total:,.0f}.")
    if answer.doubt is not None and not answer.num_found:
        yield terminal.wrap(f"Whether the training is sound could not be checked: {answer.doubt}.")
        if log.lines:
            yield from (
                "",
                "Lines that may matter:",
                *_quoted(answer, log.lines[:MOST_NEAR]),
            )


def _fact(answer: Answer, fact: Fact, shown: set[int]) -> list[str]:
    """Return the lines about a fact. `shown` are lines of the log that are quoted already."""
    names = {"computed": "Computed", "stated": "Stated"}
    title = "A note" if fact.is_note else names[fact.certainty]
    lines = [terminal.wrap(f"{title} (from {fact.basis}): {mask(fact.happened)}", "", "  ")]
    if fact.because:
        lines += [
            terminal.wrap(
                f"{'Cause' if answer.is_about_first(fact) and not fact.is_note else 'Reason'}: {mask(fact.because)}",
                "",
                "  ",
            )
        ]
    quoted = [line for line in fact.evidence if line.number not in shown][:MOST_QUOTED]
    shown.update(line.number for line in quoted)
    lines += _quoted(answer, quoted)
    lines += _numbered("Change", fact.changes)
    if fact.check:
        lines += [terminal.wrap(f"Check: {fact.check}", "", "  ")]
    if fact.documented:
        lines += [f"See {fact.documented}"]
    return lines


def _quoted(answer: Answer, lines: Iterable[Line]) -> Iterator[str]:
    """Yield lines of the log with their places, cut to the width of the terminal."""
    for line in lines:
        file, number = answer.log.place(line.number)
        start = f"  line {number:,}" + (f" of {file}" if file else "")
        start += ": " if line.rank is None else f", rank {line.rank}: "
        text, room = mask(line.text.strip()), max(40, terminal.width() - len(start))
        yield start + (text if len(text) <= room else f"{text[: room - 3]}...")


def _numbered(title: str, changes: Iterable[str]) -> list[str]:
    listed = list(changes)
    if len(listed) < 2:
        return [terminal.wrap(f"{title}: {change}", "", "  ") for change in listed]
    wrapped = [terminal.wrap(f"{place}. {change}", "  ", "     ") for place, change in enumerate(listed, start=1)]
    return [f"{title} one of these, the smallest first:", *wrapped]
