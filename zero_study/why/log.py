"""Read the output of a failed run in one pass and in constant memory: its ranks, exceptions and relevant lines.

Launchers mark the lines of a rank in several ways, and the output of ranks may be mixed, even within a line. Nothing in
a log is executed. Tokens and passwords in a log are masked, because users paste answers into public threads.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from zero_study.terminal import printable

LONGEST = 4000  # characters of a line that are examined; logs contain whole data sets in a line
MOST_FAILURES = 200  # exceptions that are kept, over all ranks
MOST_LINES = 400  # lines that are kept because they may matter
FRAMES = 80  # of a traceback that are kept, the innermost ones
MESSAGE_LINES = 40  # of an exception that are kept
CONTEXT = 6  # lines before the end of a log that are kept
BEFORE = 4  # lines before an exception that are kept

# The mark of a rank at the beginning of a line: [rank3]: of PyTorch, [default3]: of torchrun --tee, [1,3]<stderr>: of
# mpirun, 3: of srun --label.
_RANK = r"\[(?:rank|default)(\d{1,5})\]:"
_MARKS = (
    re.compile(rf"\s?{_RANK}\s?"),
    re.compile(r"\[1,(\d{1,5})\]<std(?:err|out)>:\s?"),
    re.compile(r"(\d{1,4}): (?=\s|\[|[A-Z])"),
)
# Marks of machines and of Ray's workers come before the mark of the rank, and so does the date that a collector of logs
# writes. Before other lines, the date stays, except before those of a traceback.
_DATE = (
    r"\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?\s"
    r"(?=\s?\[(?:rank|default)\d|\s?\[1,\d|\(\w[\w.]*[ ,]+pid=|Traceback \(most|\s*File \"|"
    r"(?:\w+\.)*\w*(?:Error|Exception)\b)"
)
_PREFIX = re.compile(
    rf"(?:{_DATE}"
    r"|\(\w[\w.]*(?:[ ,]+(?:pid|ip)=[\w.:\[\]x]+)+\)\s?(?:\[repeated \d+x across cluster\][^\n]*)?"
    r"|(?:worker|node|host)[-_]?\d+:\s)"
)
_BEGINS = frozenset("[( 0123456789wnh")  # letters with which a mark begins
_INSIDE = re.compile(rf"(?<=\S)(?={_RANK})")
_NO_DIGITS = str.maketrans("", "", "0123456789█▉▊▋▌▍▎▏")  # what changes from step to step
MOST_SHAPES = 4096  # of lines that are remembered
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\-_]")
_SECRETS = (
    re.compile(r"\b(hf_|sk-(?:ant-|proj-)?|ghp_|gho_|github_pat_|glpat-|xox[abps]-|AKIA|wandb_v1_)[A-Za-z0-9_\-]{8,}"),
    re.compile(
        r"(?i)((?:api[_-]?key|access[_-]?key|secret|token|passw(?:or)?d)[\"']?\s*[=: ]\s*[\"']?)[A-Za-z0-9_\-./+]{12,}"
    ),
    re.compile(r"(?i)(://[^/\s:@]+:)[^@\s/]+(?=@)"),
    re.compile(r"(?i)(bearer\s+)[A-Za-z0-9_\-.]{12,}"),
)  # fmt: skip

# In rich's tracebacks a frame is `/path/file.py:12 in name`, and every line has a frame of box characters.
_FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in (\S+))?')
_RICH_FRAME = re.compile(r"^\s*(?:File )?(\S+\.py):(\d+),? in (\w+)")  # also of notebooks
# A long path fills its line, and the function is in the next one.
_RICH_PATH = re.compile(r"^\s*(\S+\.py):(\d+)\s*$")
_RICH_FUNCTION = re.compile(r"^\s*in (\w+)\s*$")
# Older notebooks: `FILE in FUNCTION(ARGUMENTS)`, with the number of the line at the arrow below.
_NOTEBOOK_FRAME = re.compile(r"^\s*\[?(\S+\.py|<ipython-input-[\w-]+>)(?:\]\([^)\s]*\))? in (\w+|<[\w :]+>)\(")
# Some reports print a traceback as `FILE:12 f -> FILE:3 g`.
_CHAIN = re.compile(r"\s*(?:-> ?)?\S+\.py:\d+ \w+(?: -> \S+\.py:\d+ \w+)*\s*")
_CHAIN_FRAME = re.compile(r"(\S+\.py):(\d+) (\w+)")
_BOX = re.compile(r"^[\s]*[│╭╰╮╯|]\s?|\s*[│╮╯|]\s*$")
# Before the line of the source, in some formats. Lines around the one that was executed have no arrow.
_ARROW = re.compile(r"^\s*(?P<arrow>❱|-{1,4}>|>)?\s*(?P<number>\d*)\s*(?:│\s)?")
FARTHEST = 6  # spaces before the last line of a traceback
NO_FUNCTION = "<module>"  # of a frame that names none
LONGEST_CODE = 200  # characters of it that are kept
_EXCEPTION = re.compile(
    r"^(?:\s{0,2}|E\s{2,7}|.*?(?<=\s)(?:ERROR|CRITICAL)\s[-:]?\s*|.*?\d+%\|.*?\]\s?|FAILED \S+ - )"
    r"((?:[A-Za-z_]\w*\.)*(?:\w*(?:Error|Exception|Interrupt|Timeout|Exit|Failure|ExitedException)|Empty|Refusal))"
    r"(?:: (.*)|:?\s*)$"
)
# The end of a traceback. Many exceptions have no text, and names such as StopIteration.
_AFTER_FRAMES = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?:: (.*))?$")
# A line that says something of a failure has one of these words, in lower case. Lines of steps have none.
# (Searching for them one by one is ten times as fast as with a regular expression.)
MATTERING = (
    "error", "exception", "fail", "fatal", "warn", "abort", "kill", "signal", "signum", "timed out", "timeout",
    "watchdog", "out of memory", "oom", "nan", "inf", "overflow", "mismatch", "missing", "unexpected", "not found",
    "not initiali", "not supported", "not divisible", "not sharded", "not exist", "cannot", "can't", "could not",
    "unable", "invalid", "refused", "denied", "no space", "no device", "bus error", "segmentation", "terminated",
    "exit", "skipping", "expected", "unused", "deprecat", "cache flushes", "invalidate trace", "recompil",
    "falling back", "disk quota", "duplicate", "_dynamo", "hit config", " hang", "read-only", "due to preemption",
    "due to job requeue", "more processors", "trainable", "too many", "divisible", "not match", "killing subprocess",
    "died", "dead", "xid", "fallen off", "visible_devices", "dumped", "corrupt", "free()", "malloc()", "illegal",
)  # fmt: skip
_SIGNS = (
    "NCCL ", "Traceback (most", 'File "', ".py:", ".py in ", ".py](", "<ipython", "uring handling of the above",
    "was the direct cause of the",
    "Error", "Exception", "Interrupt", "Timeout", "Exit", "Failure", "Empty", "Refusal",
)  # fmt: skip
# What the system, a launcher or a scheduler prints if a process ended without an exception of Python.
_CRASH = re.compile(
    r"(?i)segmentation fault|core dumped|^\s*(?:aborted|killed|terminated)\b|bus error|illegal instruction|"
    r"floating point exception|double free|corrupt(?:ed|ion)|(?:free|malloc)\(\): |node failure|fatal python error|"
    r"exit(?:ed|s)?[ -]?(?:with )?(?:return |exit )?(?:code|status)\s*[:=]?\s*-?[1-9]|(?:terminated|killed) by signal"
)
_RAISES = ("Error", "Exception", "Interrupt", "Timeout", "Exit", "Failure", "Empty", "Refusal")  # names of exceptions


class Frame(NamedTuple):
    """A frame of a traceback, with its file, function and line of code."""

    file: str
    line: int
    function: str
    code: str = ""  # the line of the source that was executed, if the log has it

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Line(NamedTuple):
    """A line of a log, without the prefix of its rank and without control characters."""

    number: int
    rank: int | None  # None if the line does not say it
    text: str


@dataclass
class Failure:
    """An exception in a log, with its traceback and the lines before it."""

    number: int  # of its line
    rank: int | None
    kind: str  # the name of the exception, without its module
    message: str  # all lines of it
    frames: tuple[Frame, ...] = ()  # the innermost last
    before: tuple[str, ...] = ()  # the lines before it: code of the traceback, or what the program printed
    is_handled: bool = False  # another exception was raised because of it, or while it was handled
    earlier: Failure | None = None  # the exception while or because of which it was raised
    is_meant: bool = False  # the log says that the earlier exception is the direct cause

    @property
    def text(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind

    @property
    def first_line(self) -> str:
        return self.text.split("\n")[0]


@dataclass
class Log:
    """The exceptions and relevant lines of a log."""

    num_lines: int = 0
    ranks: set[int] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)  # that may matter, in order
    open_frames: tuple[Frame, ...] = ()  # of a traceback whose exception is not in the log
    open_code: tuple[str, ...] = ()  # the last lines of this traceback
    num_left_out: int = 0  # lines that may matter and were not kept
    crash: Line | None = None  # the first line that says that a process ended without an exception of Python
    last: deque[Line] = field(default_factory=lambda: deque(maxlen=CONTEXT))

    def search(self, pattern: re.Pattern[str]) -> Iterator[tuple[Line, re.Match[str]]]:
        """Yield the relevant lines of the log in which a pattern is found."""
        for line in self.lines:
            if match := pattern.search(line.text):
                yield line, match


def mask(text: str) -> str:
    """Return a text without tokens and passwords."""
    for pattern in _SECRETS:
        text = pattern.sub(r"\1***", text)
    return text


def parts(text: str) -> Iterator[tuple[int | None, str]]:
    """Yield each rank in a line with its text, because several ranks may have written into one line."""
    text = text[:LONGEST]
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    for written in text.split("\r"):
        if "[rank" not in written and "[default" not in written:
            yield _rank_and_rest(written)
            continue
        for part in _INSIDE.split(written):
            if part is not None and not part.isdigit():  # split() also returns the groups of the pattern
                yield _rank_and_rest(part)


def _rank_and_rest(text: str) -> tuple[int | None, str]:
    rank = None
    if text[:1] not in _BEGINS:
        return rank, text
    while match := _PREFIX.match(text):
        text = text[match.end() :]
    for mark in _MARKS:
        if match := mark.match(text):
            rank, text = int(match[1]), text[match.end() :]
    return rank, text


def _plain(text: str) -> str:
    return printable(text.replace("\t", "    "))


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


class Reader:
    """Reads the lines of a log one by one, and keeps the relevant ones.

    Most lines of a long log differ from earlier ones only in their digits. The reader therefore remembers for each line
    without its digits whether it is relevant.
    """

    def __init__(self, others: Sequence[Taker] = ()) -> None:
        self.log = Log()
        self._others = others
        self._shapes: dict[str, tuple[bool, list[bool]]] = {}
        self._frames: dict[int | None, deque[Frame]] = {}
        self._open: dict[int | None, tuple[Failure, int]] = {}  # exceptions whose message may go on, and its lines
        self._before: dict[int | None, deque[str]] = {}  # the last lines
        self._ignored: set[int | None] = set()  # ranks whose next exception Python ignores, such as one in __del__
        self._earlier: dict[int | None, tuple[Failure, bool]] = {}  # an exception that led to the next one

    def read(self, lines: Iterable[str]) -> Log:
        """Read all lines, and return the log."""
        for text in lines:
            self.log.num_lines += 1
            for rank, part in parts(text.rstrip("\r\n")):
                self._take(Line(self.log.num_lines, rank, part if part.isprintable() else _plain(part)))
        for rank, frames in self._frames.items():  # some people paste the traceback below the message
            failure = next((each for each in reversed(self.log.failures) if each.rank == rank), None)
            if failure is not None and not failure.frames:
                failure.frames = tuple(frames)
                failure.before = (*failure.before, *self._before.get(rank, ()))
            elif frames:
                self.log.open_frames = tuple(frames)
                self.log.open_code = tuple(self._before.get(rank, ()))
        return self.log

    def _take(self, line: Line) -> None:
        rank, text = line.rank, line.text
        if rank is not None:
            self.log.ranks.add(rank)
        shape = text.translate(_NO_DIGITS)
        known = self._shapes.get(shape)
        if known is None:
            known = self._concerns(text), [other.concerns(text) for other in self._others]
            if len(self._shapes) >= MOST_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = known
        if known[0] or rank in self._open or rank in self._frames:
            self._read(line)
        else:
            self.log.last.append(line)
            self._remember(rank, text)
        for other, concerned in zip(self._others, known[1], strict=True):
            if concerned or other.wants_all:
                other.take(line)

    @staticmethod
    def _concerns(text: str) -> bool:
        """Return whether a line may belong to a failure. The result does not depend on its digits."""
        lower = text.lower()
        return not text.strip() or any(word in lower for word in MATTERING) or any(word in text for word in _SIGNS)

    def _remember(self, rank: int | None, text: str) -> None:
        if not text.strip(" ^~"):  # the marks below a line of code
            return
        before = self._before.get(rank)
        if before is None:
            before = self._before[rank] = deque(maxlen=BEFORE)
        before.append(text)

    def _read(self, line: Line) -> None:
        """Read a line that may belong to a failure."""
        log, rank = self.log, line.rank
        if not line.text.strip():
            self._open.pop(rank, None)
            return
        log.last.append(line)
        if log.crash is None and _CRASH.search(line.text):
            log.crash = line
        text = _BOX.sub("", line.text) if line.text.lstrip()[:1] in "│╭╰|" else line.text
        if "Traceback (most" in text:
            self._begin_traceback(rank)
        elif ('File "' in text or ".py:" in text) and (match := _FRAME.search(text) or _RICH_FRAME.search(text)):
            self._open.pop(rank, None)
            frames = self._frames.setdefault(rank, deque(maxlen=FRAMES))
            frames.append(Frame(match[1], int(match[2]), match[3] or NO_FUNCTION))
        elif ".py:" in text and text.lstrip()[:1] in "/~." and (match := _RICH_PATH.match(text)):
            self._open.pop(rank, None)
            self._frames.setdefault(rank, deque(maxlen=FRAMES)).append(Frame(match[1], int(match[2]), NO_FUNCTION))
        elif " in " in text and text.rstrip()[-1:] == ")" and (match := _NOTEBOOK_FRAME.match(text)):
            self._open.pop(rank, None)
            frames = self._frames.setdefault(rank, deque(maxlen=FRAMES))
            frames.append(Frame(match[1], 0, match[2]))
        elif " -> " in text and _CHAIN.fullmatch(text):
            self._open.pop(rank, None)
            frames = self._frames.setdefault(rank, deque(maxlen=FRAMES))
            frames.extend(Frame(file, int(number), name) for file, number, name in _CHAIN_FRAME.findall(text))
        elif match := self._exception(rank, text):
            self._fail(line, match[1].rpartition(".")[2], match[2] or "")
        elif rank in self._open:
            self._continue(rank, text)
        elif "uring handling of the above exception" in text or "was the direct cause of the following" in text:
            self._mark_handled(rank, "direct cause" in text)
        elif text.startswith("Exception ignored in"):
            self._ignored.add(rank)
        elif rank in self._frames:
            self._add_code(self._frames[rank], text)
        lower = text.lower()
        if any(word in lower for word in MATTERING) or "NCCL " in text:
            self._keep(line)
        self._remember(rank, text)

    @staticmethod
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

    def _exception(self, rank: int | None, text: str) -> re.Match[str] | None:
        """Return the match of an exception's name and message, or None."""
        has_frames = bool(self._frames.get(rank))
        if any(word in text for word in _RAISES):
            # The report of torchrun and of pytest moves a whole traceback to the right.
            moved = text.lstrip() if has_frames and len(text) - len(text.lstrip()) <= FARTHEST else text
            if match := _EXCEPTION.match(moved) or _EXCEPTION.match(text):
                return match
        return _AFTER_FRAMES.match(text) if has_frames else None

    def _keep(self, line: Line) -> None:
        """Keep a line that may be relevant. Of too many lines, keep the first ones, because the cause comes first."""
        if len(self.log.lines) < MOST_LINES:
            self.log.lines.append(line)
        else:
            self.log.num_left_out += 1

    def _begin_traceback(self, rank: int | None) -> None:
        self._open.pop(rank, None)
        self._frames[rank] = deque(maxlen=FRAMES)

    def _fail(self, line: Line, kind: str, message: str) -> None:
        frames, before = self._frames.pop(line.rank, ()), self._before.get(line.rank, ())
        failure = Failure(line.number, line.rank, kind, message, tuple(frames), tuple(before))
        if line.rank in self._ignored:
            self._ignored.discard(line.rank)
            failure.is_handled = True
        if line.rank in self._earlier:
            failure.earlier, failure.is_meant = self._earlier.pop(line.rank)
        self._open[line.rank] = failure, 1
        if len(self.log.failures) < MOST_FAILURES:
            self.log.failures.append(failure)

    def _continue(self, rank: int | None, text: str) -> None:
        failure, count = self._open[rank]
        if count >= MESSAGE_LINES:
            self._open.pop(rank)
            return
        failure.message = f"{failure.message}\n{text}"
        self._open[rank] = failure, count + 1

    def _mark_handled(self, rank: int | None, is_meant: bool) -> None:
        for failure in reversed(self.log.failures):
            if failure.rank == rank:
                failure.is_handled = True
                self._earlier[rank] = failure, is_meant
                return


def read(lines: Iterable[str]) -> Log:
    """Return the exceptions and the relevant lines of a log."""
    return Reader().read(lines)
