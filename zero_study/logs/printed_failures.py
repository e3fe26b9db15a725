"""Read the output of a failed run in one pass and in constant memory: its failures, and the lines that may matter.

A failure is an exception with its traceback, or the end of a process by a signal. Nothing in a log is executed.
"""

from __future__ import annotations

import re
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from zero_study.logs.prefix import EXCEPTION, Prefixes, Time, time_of
from zero_study.logs.printed_steps import Line
from zero_study.terminal import printable

MOST_FAILURES = 200  # that are kept, over all ranks
MOST_LINES = 400  # lines that are kept because they may matter
MOST_WATCHDOG_LINES = 20_000  # of PyTorch's watchdogs that are kept, as each rank writes some
MOST_FRAMES = 80  # of a traceback that are kept, the innermost ones
MESSAGE_LINES = 40  # of an exception that are kept
MOST_LAST = 6  # lines before the end of a log that are kept
MOST_BEFORE = 4  # lines before an exception that are kept
MOST_STREAMS = 2000  # ranks and prefixes whose last lines are kept
LONGEST_KEPT = 1000  # characters of a line that may matter
MOST_RAW = 40  # lines before a failure in which its time is looked for
MOST_SHAPES = 4096  # of lines that are remembered
_NO_DIGITS = b"0123456789\xe2\x96\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f"  # what changes from step to step, as in bars
# A line that says something of a failure has one of these words, in lower case. Lines of steps have none.
# (Searching for them one by one is ten times as fast as with a regular expression.)
MATTERING = (
    "error", "exception", "fail", "fatal", "warn", "abort", "kill", "signal", "signum", "timed out", "timeout",
    "watchdog", "out of memory", "oom", " nan", "nan or", "infinit", "overflow", "mismatch", "missing",
    "unexpected", "not found",
    "not initiali", "not supported", "not divisible", "not sharded", "not exist", "cannot", "can't", "could not",
    "unable", "invalid", "refused", "denied", "no space", "no device", "bus error", "segmentation", "terminate",
    "exit", "skipping", "expected", "unused", "deprecat", "cache flushes", "invalidate trace", "recompil",
    "falling back", "disk quota", "duplicate", "_dynamo", "hit config", " hang", "read-only", "due to preemption",
    "due to job requeue", "more processors", "trainable", "too many", "divisible", "not match", "killing subprocess",
    "died", "dead", "xid", "fallen off", "visible_devices", "dumped", "corrupt", "free()", "malloc()", "illegal",
    "forbidden", "rights to", "did not save", "capabilit",
    "low on memory", "available memory", "host memory", "ram usage", " rss", "memory pressure",
    "virtual mem", "sigsegv", "sigabrt", "sigbus", "sigill", "sigfpe",
    "ray::", "#0 ",
    "root cause", "current thread", "compatible", "via net", "using network",
)  # fmt: skip
_SIGNS = (
    "NCCL ", "Traceback (most", 'File "', ".py:", ".py in ", ".py](", "<ipython", "uring handling of the above",
    "was the direct cause of the",
    "Error", "Exception", "Interrupt", "Timeout", "Exit", "Failure", "Empty",
)  # fmt: skip
_RAISES = (*_SIGNS[-7:], ".exc.")  # names of exceptions end with one of these words, or are in a module of exceptions
# Before the name of a signal, if it was received. Arguments of programs name signals, too.
_BY = r"(?:by signal\W{0,3}\d*\W{0,3}|died with <Signals\.|signal \d+ \(|\*\*\* |got |caught )"
# What the system, a launcher or a scheduler prints if a signal ended a process, with the signal.
_CRASHES = tuple(
    (re.compile(pattern), number)
    for pattern, number in (
        (rf"(?i)segmentation fault|{_BY}SIGSEGV\b", signal.SIGSEGV),
        (rf"(?i)\bbus error\b|{_BY}SIGBUS\b", signal.SIGBUS),
        (rf"(?i)illegal instruction\b|{_BY}SIGILL\b", signal.SIGILL),
        (rf"(?i)floating point exception\b|{_BY}SIGFPE\b", signal.SIGFPE),
        (r"double free|corrupted (?:size vs|double)|(?:free|malloc|realloc|munmap_chunk)\(\): (?:inv|mem|cor|una|mis)|"
         rf"heap corruption|stack smashing|terminate called|(?:^\s*|: line \d+:\s+\d+ )Aborted\b|{_BY}SIGABRT\b",
         signal.SIGABRT),
        (r"(?i)oom[-_]kill|out of memory: kill|oomkilled|terminated by signal 9\b|"
         rf"(?-i:(?:^\s*|^\S+ \d+ )Killed\s*$|: line \d+:\s+\d+ Killed\b)|{_BY}SIGKILL\b",
         signal.SIGKILL),
        (rf"(?i){_BY}SIGHUP\b|Received 1 death signal", signal.SIGHUP),
        (rf"(?i)closing signal SIGTERM|{_BY}SIG(?:TERM|INT)\b", signal.SIGTERM),
    )
)  # fmt: skip
_CRASH_WORDS = ("egmentation", "us error", "SIG", "llegal instr", "loating point exc", "free", "corrupt", "malloc()",
    "munmap_chunk", "smashing", "terminate called", "bort", "ill", "oom", "OOM", "xit", "atal Python error", "atchdog",
    "pressure", "Assertion", "out of memory", "Tried", "return code", "TERMINATION", "erminated",
)  # fmt: skip
# Failures that one line states without the name of an exception.
_SINGLE = re.compile(
    r"(?P<Timeout>Watchdog caught collecti|watchdog got stuck for)|(?P<Killed>killed due to memory pressure)|"
    r"(?P<Assertion>Assertion [`'].*failed)|(?P<ExitCode>^Terminated\s*$|(?i:exit(?:ed|s)?(?: with)?(?: return| exit)? "
    r"?(?:code|status)|exitcode|return code)\s?[:=]?\s{0,8}(?:[1-9]|1\d|1[01]\d|2\d\d)(?![\d.])|BAD TERMINATION OF)|"
    r"(?P<OutOfMemoryError>(?:CUDA|HIP|XPU) out of memory\. Tried|^\s*Tried to allocate \d)"
)
_AFTER_BAR = re.compile(r"^.*?%\|[^\]]*\](?=\[)")  # a progress bar that another line followed without a line end
_OWN_RANK = re.compile(
    r"\[(?:PG [^\]]*?)?Rank (\d+)\]|^\[(\d{1,5})\] is setting up NCCL|\b[Rr]ank (\d{1,5}): |on rank (\d{1,5})\b"
)
_EXIT = re.compile(
    r"(?i)(?<![a-z_])(?:exit(?:ed|s)?(?: with)?(?: return| exit)? ?(?:code|status)|exitcode|return code)\s?[:=]?\s{0,8}"
    r"(?:-(?P<signal>[1-9]|[1-5]\d|6[0-4])|(?P<shell>1(?:29|3\d|4\d|5\d)))(?![\d.])"
)
_FATAL = re.compile(r"Fatal Python error: (?P<what>.+)")
# The report of torchrun on the rank that failed first.
_REPORT = re.compile(r"^\s*(?P<name>time|host|rank|exitcode|traceback)\s*: (?P<value>.*)$")
# In rich's tracebacks a frame is `/path/file.py:12 in name`, and every line has a frame of box characters.
_FRAME = re.compile(r'File "?([^",\s][^",]*)"?, line (\d+)(?:,? in (\S+))?')
_COLLECTIVE_FRAME = re.compile(r"#\d+ (\S+) from (\S+\.py):(\d+)")  # of PyTorch's watchdog
# Also of Ray, whose tracebacks begin with the name of the task, and of the watchdog.
_BEGINS_TRACEBACK = re.compile(
    r"Traceback \(most|\(most recent call first\)|^ray::\S+\(|Stack trace of the failed collective"
)
_RICH_FRAME = re.compile(r"^\s*(?:File )?(\S+\.py):(\d+),? in (\w+)")  # also of notebooks
_RICH_PATH = re.compile(r"^\s*(\S+\.py):(\d+)\s*$")  # a long path fills its line, and the function is in the next one
_RICH_FUNCTION = re.compile(r"^\s*in (\w+)\s*$")
# Older notebooks: `FILE in FUNCTION(ARGUMENTS)`, with the number of the line at the arrow below.
_NOTEBOOK_FRAME = re.compile(r"^\s*\[?(\S+\.py|<ipython-input-[\w-]+>)(?:\]\([^)\s]*\))? in (\w+|<[\w :]+>)\(")
_CHAIN = re.compile(r"\s*(?:-> ?)?\S+\.py:\d+ \w+(?: -> \S+\.py:\d+ \w+)*\s*")  # FILE:12 f -> FILE:3 g
_CHAIN_FRAME = re.compile(r"(\S+\.py):(\d+) (\w+)")
_BOX = re.compile(r"^[\s]*[│╭╰╮╯|]\s?|\s*[│╮╯|]\s*$")
# Before the line of the source, in some formats. Lines around the one that was executed have no arrow.
_ARROW = re.compile(r"^\s*(?P<arrow>❱|-{1,4}>|>)?\s*(?P<number>\d*)\s*(?:│\s)?")
FARTHEST = 6  # spaces before the last line of a traceback
TIME_OUT = "Timeout"  # the kind of a failure that PyTorch's watchdog reports
NO_FUNCTION = "<module>"  # of a frame that names none
LONGEST_CODE = 200  # characters of it that are kept
_EXCEPTION = re.compile(
    r"^(?:\s{0,2}[\[\"'`]?|E\s{2,7}|.{0,200}?(?<=\s)(?:ERROR|CRITICAL)\s[-:]?\s{0,4}|.{0,99}?\d{1,3}%\|[^\]]*\]\s?|"
    r"FAILED \S+ - )"
    rf"({EXCEPTION})(?:: (.*)|:?\s*)$"
)
_VALUE = re.compile(r"[-+.\d]+(?:e-?\d+)?%?")  # of a metric such as MeanSquaredError
# The end of a traceback. Many exceptions have no text, and names such as StopIteration.
_AFTER_FRAMES = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?:: (.*))?$")
# What ends the message of an exception, because another program or a logger wrote it.
_NOT_MESSAGE = re.compile(
    r"\s*(?:\[?(?:ERROR|WARNING|INFO|DEBUG|CRITICAL)\b|terminate called|\S+ Caught signal|"
    r"\[?\d{4}[-/]\d\d[-/]\d\d|\[[EWIF]\d{3}|[EWIF]\d{4} |\[E Process|wandb: |srun: |slurmstepd|={12,}|"
    r"\d{1,3}%\||##\[|(?i:\[?(?:step|iter|iteration|epoch)\b|\{?['\"]?loss\b))|"
    r".{0,200}?\d%\|.*(?:it/s|s/it)"
)


class Frame(NamedTuple):
    """A frame of a traceback, with its file, function and line of code."""

    file: str
    line: int
    function: str
    code: str = ""  # the line of the source that was executed, if the log has it

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass
class Failure:
    """An exception with its traceback, or the end of a process by a signal, with the lines before it."""

    number: int  # of its line
    rank: int | None
    kind: str  # the name of the exception without its module, or of the signal
    message: str  # all lines of it
    frames: tuple[Frame, ...] = ()  # the innermost last
    before: tuple[str, ...] = ()  # the lines before it: code of the traceback, or what the program printed
    is_handled: bool = False  # another exception was raised because of it, or while it was handled
    earlier: Failure | None = None  # the exception while or because of which it was raised
    is_meant: bool = False  # the log says that the earlier exception is the direct cause
    time: Time | None = None  # the last time stamp before it
    signal: int = 0  # that ended the process; 0 for an exception
    is_line: bool = False  # the message is a line without the name of an exception

    @property
    def text(self) -> str:
        """The name of the exception with its message, or the line that states another failure."""
        if self.is_line or not self.message:
            return self.message or self.kind
        return f"{self.kind}: {self.message}"

    @property
    def first_line(self) -> str:
        return self.text.split("\n")[0]

    @property
    def last_number(self) -> int:
        """The number of the last line of its message."""
        return self.number + self.message.count("\n")

    @property
    def evidence(self) -> Line:
        return Line(self.number, self.rank, self.first_line)


@dataclass
class Log:
    """The failures and the relevant lines of a log."""

    num_lines: int = 0
    files: list[tuple[int, str]] = field(default_factory=list)  # the first line of each file, if there are several
    ranks: set[int] = field(default_factory=set)
    are_ranks_local: bool = False  # the numbers count the processes of one machine, as those of torchrun --tee do
    failures: list[Failure] = field(default_factory=list)
    num_failures: int = 0  # also those that were not kept
    lines: list[Line] = field(default_factory=list)  # that may matter, in order
    of_watchdogs: list[Line] = field(default_factory=list)
    streams: set[str] = field(default_factory=set)  # some of the prefixes
    open_frames: tuple[Frame, ...] = ()  # of a traceback whose exception is not in the log
    last: deque[Line] = field(default_factory=lambda: deque(maxlen=MOST_LAST))

    def search(
        self, pattern: re.Pattern[str], lines: Sequence[Line] | None = None
    ) -> Iterator[tuple[Line, re.Match[str]]]:
        """Yield the lines in which a pattern is found: of the relevant lines, or of others."""
        for line in self.lines if lines is None else lines:
            if match := pattern.search(line.text):
                yield line, match

    def place(self, number: int) -> tuple[str | None, int]:
        """Return the file of a line, if there are several files, and the line's number in it."""
        start, name = max((each for each in self.files if each[0] < number), default=(0, None))
        return name, number - start


class Taker(Protocol):
    """The interface of objects that also receive the lines of a log."""

    @property
    def wants_all(self) -> bool:
        """Whether the next line is needed, whatever it contains."""
        ...

    def concerns(self, text: str) -> bool:
        """Return whether a line may be relevant. The result must not depend on the digits of the line."""
        ...

    def take(self, line: Line) -> None:
        """Process a line for which `concerns` or `wants_all` is true."""
        ...


_Stream = tuple[int | None, str]  # a rank, and what precedes its lines


class Reader:
    """Reads the lines of a log one by one, and keeps the relevant ones.

    Most lines of a long log differ from earlier ones only in their digits. The reader therefore remembers for each line
    without its digits whether it is relevant, and does not even decode the others.
    """

    def __init__(self, others: Sequence[Taker] = ()) -> None:
        self.log = Log()
        self._others = others
        self._prefixes = Prefixes()
        self._shapes: dict[bytes, tuple[bool, list[bool]]] = {}  # for the log, and for each of the others
        self._irrelevant = False, [False for _ in others]
        self._raw: deque[bytes] = deque(maxlen=MOST_RAW)
        self._frames: dict[_Stream, deque[Frame]] = {}
        self._began: dict[_Stream, Time | None] = {}  # when a traceback began
        self._reversed: dict[_Stream, bool] = {}  # streams with a stack, innermost frame first; of the failing thread
        self._open: dict[_Stream, tuple[Failure, int]] = {}  # exceptions whose message may go on, and its lines
        self._before: dict[_Stream, deque[str]] = {}  # the last lines
        self._ignored: set[_Stream] = set()  # whose next exception Python ignores, such as one in __del__
        self._earlier: dict[_Stream, tuple[Failure, bool]] = {}  # an exception that led to the next one
        self._report: dict[str, str] | None = None  # of torchrun, while it is read

    def read(self, lines: Iterable[bytes], file: str | None = None, rank: int | None = None) -> None:
        """Read the lines of one file. `rank` is that of lines that state none. Call `finish` after the last file."""
        if file is not None:
            self.log.files.append((self.log.num_lines, file))
        shapes, raw, log = self._shapes, self._raw, self.log
        for text in lines:
            log.num_lines += 1
            raw.append(text)
            shape = text.translate(None, _NO_DIGITS)
            if shapes.get(shape) is not self._irrelevant or self._is_inside or self._is_wanted():
                self._take(text, shape, rank)
        self._end_file()

    @property
    def _is_inside(self) -> bool:
        """Whether a message, a traceback or a report has not ended, so that each line may belong to it."""
        return bool(self._open or self._frames or self._report is not None)

    def _is_wanted(self) -> bool:
        return any(other.wants_all for other in self._others)

    def _take(self, raw: bytes, shape: bytes, default: int | None) -> None:
        """Read a line that may be relevant, or whose shape is new."""
        self.log.are_ranks_local |= b"[default" in raw
        parts = self._prefixes.parts(raw.decode("utf-8", errors="replace").rstrip("\r\n"))
        known = self._shapes.get(shape)
        if known is None:
            concerned = [any(other.concerns(part.text) for part in parts) for other in self._others]
            known = any(self._concerns(part.text) for part in parts), concerned
            if len(self._shapes) >= MOST_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = known if any((known[0], *concerned)) else self._irrelevant
        matters = known[0]
        for part in parts:
            if matters:
                part = self._prefixes.learn(part)
            text, rank = part.text, default if part.rank is None else part.rank
            if not text.isprintable():
                text = printable(text.replace("\t", "    "))
            line, stream = Line(self.log.num_lines, rank, text), (rank, part.stream)
            if rank is not None:
                self.log.ranks.add(rank)
            if part.stream and len(self.log.streams) < MOST_FAILURES:
                self.log.streams.add(part.stream)
            if matters or self._is_inside:
                self._read(line, stream)
            else:
                self.log.last.append(line)
                self._remember(stream, text)
            for other, is_concerned in zip(self._others, known[1], strict=True):
                if is_concerned or other.wants_all:
                    other.take(line)

    @staticmethod
    def _concerns(text: str) -> bool:
        """Return whether a line may belong to a failure. The result does not depend on its digits."""
        lower = text.lower()
        return any(word in lower for word in MATTERING) or any(word in text for word in _SIGNS)

    def _remember(self, stream: _Stream, text: str) -> None:
        if len(self._before) > MOST_STREAMS:
            self._before.clear()
        if text.strip(" ^~"):  # the marks below a line of code say nothing
            self._before.setdefault(stream, deque(maxlen=MOST_BEFORE)).append(text)

    def _read(self, line: Line, stream: _Stream) -> None:
        """Read a line that may belong to a failure."""
        log = self.log
        if not line.text.strip():
            if stream in self._open and not self._open[stream][0].message.endswith(":"):  # which announces more
                del self._open[stream]
            self._end_stack(stream)
            return
        log.last.append(line)
        text = _BOX.sub("", line.text) if line.text.lstrip()[:1] in "│╭╰╮|" else line.text
        if self._report is not None and self._read_report(line, text):
            return
        if _BEGINS_TRACEBACK.search(text):
            self._open.pop(stream, None)
            self._end_stack(stream)
            self._frames[stream] = deque(maxlen=MOST_FRAMES)
            self._began[stream] = self._time()
            if "Traceback" not in text and not text.startswith("ray::"):
                self._reversed[stream] = "Thread 0x" not in text or "Current" in text
        elif frames := list(_frames(text)):
            if text.startswith("#") and self._reversed:  # the frames of a failed collective have no prefix
                stream = next(reversed(self._reversed))
            self._open.pop(stream, None)
            if len(self._frames) > MOST_STREAMS:
                self._frames.clear()
            kept = self._frames.setdefault(stream, deque(maxlen=MOST_FRAMES))
            kept.extendleft(frames) if stream in self._reversed else kept.extend(frames)
        elif match := self._exception(stream, text):
            self._fail(line, stream, match[1].rpartition(".")[2], match[2] or "")
        elif "uring handling of the above exception" in text or "was the direct cause of the following" in text:
            self._mark_handled(line.rank, stream, "direct cause" in text)
        elif text.startswith("Exception ignored in"):
            self._ignored.add(stream)
        elif "Root Cause (first observed failure)" in text:
            self._report = {}
        elif (stream := self._continued(stream)) in self._open and "atchdog caught" not in text:
            self._continue(stream, text)
        elif not self._crash(line, stream, text) and stream in self._frames:
            _add_code(self._frames[stream], text)
        # Of too many lines the first ones are kept, because the cause comes first.
        if len(log.lines) < MOST_LINES and ("NCCL " in text or any(word in text.lower() for word in MATTERING)):
            log.lines.append(line._replace(text=line.text[:LONGEST_KEPT]))
        if ("NCCL" in text or "timed out" in text or "atchdog" in text) and len(log.of_watchdogs) < MOST_WATCHDOG_LINES:
            log.of_watchdogs.append(line._replace(text=text[:LONGEST_KEPT]))
        self._remember(stream, text)

    def _exception(self, stream: _Stream, text: str) -> re.Match[str] | None:
        """Return the match of an exception's name and message, or None."""
        has_frames = bool(self._frames.get(stream))
        if any(word in text for word in _RAISES):
            # The report of torchrun and of pytest moves a whole traceback to the right.
            moved = text.lstrip() if has_frames and len(text) - len(text.lstrip()) <= FARTHEST else text
            match = _EXCEPTION.match(moved) or _EXCEPTION.match(text)
            if match and (has_frames or not _VALUE.fullmatch(match[2] or "")):
                return match
        return _AFTER_FRAMES.match(text) if has_frames and stream not in self._reversed else None

    def _crash(self, line: Line, stream: _Stream, text: str) -> bool:
        """Add a failure if a line says that a signal ended a process. Return whether it does."""
        if not any(word in text for word in _CRASH_WORDS) or "in worker" in text:  # of a data loader
            return False
        if (match := _SINGLE.search(text)) and "Warning" not in text:
            kind = next(name for name, value in match.groupdict().items() if value)
            own = _OWN_RANK.search(text)
            rank = line.rank if own is None or line.rank is not None else int(next(filter(None, own.groups())))
            if not any(each.kind == kind and each.rank == rank for each in self.log.failures):
                self._fail(line, stream, kind, _AFTER_BAR.sub("", text).strip(), is_line=True)
                if "WorkNCCL(" in text or "stuck" in text or kind == "ExitCode":  # the message ends in its line
                    self._open.pop(stream, None)
            return True
        number = crash_of(text)
        if number:
            self._fail(line, stream, signal.Signals(number).name, text.strip(), number, True)
        return bool(number)

    def _fail(
        self, line: Line, stream: _Stream, kind: str, message: str, number: int = 0, is_line: bool = False
    ) -> None:
        frames: Sequence[Frame] = () if number else self._frames.pop(stream, ())
        others = [each for each, kept in self._frames.items() if kept and each not in self._reversed]
        if not frames and not number and stream == (None, "") and len(others) == 1:  # its last line lost its prefix
            frames, line = self._frames.pop(others[0]), line._replace(rank=others[0][0])
        if line.rank is None and (own := _OWN_RANK.search(message)):
            line = line._replace(rank=int(next(filter(None, own.groups()))))
        failure = Failure(
            line.number, line.rank, kind, message, tuple(frames), tuple(self._before.get(stream, ())),
            time=self._began.pop(stream, None), signal=number, is_line=is_line,
        )  # fmt: skip
        if stream in self._ignored:
            self._ignored.discard(stream)
            failure.is_handled = True
        if stream in self._earlier:
            failure.earlier, failure.is_meant = self._earlier.pop(stream)
        if len(self._open) > MOST_STREAMS:
            self._open.clear()
        if not number or "terminate called" in message or "***" in message:  # others of signals have one line
            self._open[stream] = failure, 1
        self._add(failure)

    def _end_stack(self, stream: _Stream) -> None:
        """Give the stack that faulthandler prints after a crash to the crash, if it is that of the failing thread."""
        is_of_failure = self._reversed.pop(stream, None)
        if is_of_failure is None:
            return
        frames = self._frames.pop(stream, ())
        kinds = (each for each in reversed(self.log.failures) if each.signal or each.kind == TIME_OUT)
        crash = next((each for each in kinds if not each.frames), None)
        if is_of_failure and crash is not None:
            crash.frames = tuple(frames)

    def _add(self, failure: Failure) -> None:
        self.log.num_failures += 1
        if len(self.log.failures) < MOST_FAILURES:
            failure.time = failure.time or self._time()
            self.log.failures.append(failure)

    def _continued(self, stream: _Stream) -> _Stream:
        """Return the stream whose message a line continues, which may have lost the prefix of the first line."""
        announced = [each for each, (failure, _) in self._open.items() if failure.message.endswith(":")]
        return announced[0] if stream == (None, "") and stream not in self._open and len(announced) == 1 else stream

    def _continue(self, stream: _Stream, text: str) -> None:
        failure, count = self._open[stream]
        if count >= MESSAGE_LINES or _NOT_MESSAGE.match(text):
            self._open.pop(stream)
            return
        failure.message = f"{failure.message}\n{text}"
        self._open[stream] = failure, count + 1

    def _mark_handled(self, rank: int | None, stream: _Stream, is_meant: bool) -> None:
        for failure in reversed(self.log.failures):
            if failure.rank == rank:
                failure.is_handled = True
                self._earlier[stream] = failure, is_meant
                return

    def _read_report(self, line: Line, text: str) -> bool:
        """Read a line of torchrun's report. Return whether it is one."""
        report = {} if self._report is None else self._report
        if match := _REPORT.match(text):
            report[match["name"]] = match["value"].strip()
        elif not re.match(r"\s*(?:\[\d+\]:|error_file\s*:)", text) or len(report) > 4:
            self._report = None
            return False
        if match and match["name"] == "traceback":
            self._report = None
            rank, code = re.match(r"\d+", report.get("rank", "")), re.match(r"-?\d+", report.get("exitcode", ""))
            number = -int(code[0]) if code and code[0].startswith("-") else 0
            kind = signal.Signals(number).name if number in set(signal.Signals) else "ExitCode"
            what = f"torchrun reports that this rank failed first, with exit code {code[0] if code else '?'}"
            failure = Failure(line.number, int(rank[0]) if rank else None, kind, what, signal=number)
            failure.time = time_of(report.get("time", ""))
            self._add(failure)
        return True

    def _time(self) -> Time | None:
        """Return the last time stamp that the log has so far, in the last lines."""
        texts = (raw[:200].decode("utf-8", errors="replace") for raw in reversed(self._raw))
        for is_before, text in enumerate(texts):
            if (time := time_of(text)) is not None:
                return time._replace(text=f"after {time.text}") if is_before else time
        return None

    def _end_file(self) -> None:
        """Give a traceback without an exception to the exception above it, or keep it as one without its last line."""
        for stream in list(self._reversed):
            self._end_stack(stream)
        for stream, frames in self._frames.items():  # some people paste the traceback below the message
            failure = next((each for each in reversed(self.log.failures) if each.rank == stream[0]), None)
            if failure is not None and not failure.frames and not failure.signal:
                failure.frames = tuple(frames)
                failure.before = (*failure.before, *self._before.get(stream, ()))
            elif frames:
                self.log.open_frames = tuple(frames)
        for streams in (self._frames, self._began, self._open, self._before, self._earlier):
            streams.clear()
        self._raw.clear()
        self._report = None


def crash_of(text: str) -> int:
    """Return the signal that ended a process, according to a line. 0 if the line does not say that one did."""
    if match := _FATAL.search(text):
        text = match["what"]
    for pattern, number in _CRASHES:
        if pattern.search(text):
            return int(number)
    if exit := _EXIT.search(text):
        code = int(exit["signal"] or int(exit["shell"]) - 128)
        return code if code in set(signal.Signals) else 0
    return int(signal.SIGABRT) if match else 0


def _frames(text: str) -> Iterator[Frame]:
    """Yield the frames in a line, in one of the formats of Python, rich, notebooks and reports."""
    if text.startswith("#") and (match := _COLLECTIVE_FRAME.match(text)):
        yield Frame(match[2], int(match[3]), match[1])
    elif (", line " in text or ".py:" in text) and (match := _FRAME.search(text) or _RICH_FRAME.search(text)):
        yield Frame(match[1], int(match[2]), match[3] or NO_FUNCTION)
    elif ".py:" in text and text.lstrip()[:1] in "/~." and (match := _RICH_PATH.match(text)):
        yield Frame(match[1], int(match[2]), NO_FUNCTION)
    elif " in " in text and text.rstrip()[-1:] == ")" and (match := _NOTEBOOK_FRAME.match(text)):
        yield Frame(match[1], 0, match[2])
    elif " -> " in text and _CHAIN.fullmatch(text):
        yield from (Frame(file, int(number), name) for file, number, name in _CHAIN_FRAME.findall(text))


def _add_code(frames: deque[Frame], text: str) -> None:
    """Add the line of the source below a frame of a traceback: the one with an arrow, or else the first one."""
    mark = _ARROW.match(text)
    has_arrow = mark is not None and mark["arrow"] is not None
    code = (text if mark is None else text[mark.end() :]).strip().lstrip("│ ")
    if frames and frames[-1].function == NO_FUNCTION and (function := _RICH_FUNCTION.match(text)):
        frames[-1] = frames[-1]._replace(function=function[1])
    elif frames and (has_arrow or not frames[-1].code) and code.strip("^~ "):
        line = int(mark["number"]) if mark is not None and mark["number"] and has_arrow else frames[-1].line
        frames[-1] = frames[-1]._replace(code=code[:LONGEST_CODE], line=line or frames[-1].line)


def read(lines: Iterable[bytes], others: Sequence[Taker] = ()) -> Log:
    """Return the failures and the relevant lines of one log."""
    reader = Reader(others)
    reader.read(lines)
    return reader.log
