"""Find an active compiler in the stacks of a running process, as `py-spy dump` prints them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from zero_study.why.cause import Cause
from zero_study.why.known import conclude
from zero_study.why.log import NO_FUNCTION, Frame, Line

MOST = 500  # threads that are kept
INNER = 12  # frames in which a compiler is looked for

_THREAD = re.compile(r"^\s*Thread (?:0x)?[\da-fA-F]+ \((?P<state>active|idle)\b[\w+ ]*\)")
_FRAME = re.compile(r"^\s+(?P<function>[\w<>.]+) \((?P<file>[^()\s]+\.py):(?P<line>\d+)\)\s*$")
# Packages that compile kernels, and the helpers of Python's library that they call.
_OF_COMPILER = re.compile(
    r"(?:^|/)(?:cutlass/|triton/|tilelang/|tvm/|numba/|torch/_inductor/|torch/_dynamo/|torch/_functorch/|torch/fx/|"
    r"torch/utils/cpp_extension\.py|(?:deep_gemm|flashinfer)/jit|subprocess\.py|threading\.py|concurrent/futures/|"
    r"contextlib\.py|functools\.py)"
)
# Compiled code also runs through these packages, so that the name of a function must say that it compiles.
_COMPILES = re.compile(
    r"(?i)compil|autotun|codegen|lower|generate_(?:mlir|ir|code)|make_(?:ir|ttir|ttgir|llir|ptx|cubin)"
)
_RUNS = re.compile(r"(?i)compiled|_compile_wrapper|^_compile_and_run|compile_wrapper$")


@dataclass
class _Thread:
    line: Line
    is_active: bool
    frames: list[Frame] = field(default_factory=list)  # the innermost first


@dataclass
class Stacks:
    """Reads the lines of a log, and keeps the stacks of running processes."""

    threads: list[_Thread] = field(default_factory=list)

    wants_all = False

    @staticmethod
    def concerns(text: str) -> bool:
        """Return whether a line may belong to a stack. The result does not depend on its digits."""
        return "Thread " in text or (".py:" in text and text.rstrip()[-1:] == ")" and text[:1].isspace())

    def take(self, line: Line) -> None:
        """Read a line of a stack."""
        if header := _THREAD.match(line.text):
            if len(self.threads) < MOST:
                self.threads.append(_Thread(line, header["state"] == "active"))
        elif self.threads and (frame := _FRAME.match(line.text)):
            frames = self.threads[-1].frames
            if len(frames) < INNER:
                frames.append(Frame(frame["file"], int(frame["line"]), frame["function"]))

    def causes(self) -> Iterator[Cause]:
        """Yield a cause if a compiler is active. If the log has several stacks, only the last one counts."""
        active = [thread for thread in self.threads if thread.is_active and thread.frames]
        if not active:
            return
        compiling = [(thread, found) for thread in active if (found := compiled(thread.frames)) is not None]
        if not compiling or compiling[-1][0] is not active[-1]:
            return
        thread, (compiler, caller) = compiling[-1]
        yield conclude(
            "slow/compiler-is-active", (thread.line,), function=compiler.function, file=compiler.file,
            caller=f", called by {caller.function} ({caller.file})" if caller is not None else "",
            count=f"{len(compiling):,}", threads=f"{len(active):,}",
        )  # fmt: skip


def compiled(frames: Sequence[Frame]) -> tuple[Frame, Frame | None] | None:
    """Return the compiling function and its caller, from frames with the innermost first.

    None if the innermost frames do not belong to a compiler. The caller is None if the frames do not contain it.
    """
    inner = []
    for frame in frames:
        if not _OF_COMPILER.search(frame.file):
            break
        inner.append(frame)
    compiling = [frame for frame in inner if _COMPILES.search(frame.function) and not _RUNS.search(frame.function)]
    if not compiling:
        return None
    caller = frames[len(inner)] if len(inner) < len(frames) else None
    return compiling[0], caller if caller is not None and caller.function != NO_FUNCTION else None
