"""Read a traceback: what the program was doing, which code called which library, and which line raised."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from zero_study.why import frame_signs, phases
from zero_study.why.frame_signs import FrameSigns
from zero_study.why.log import Failure, Frame, mask

FILE = Path(__file__).with_name("tasks.yaml")
LONGEST_PLACE = 160  # characters of a place in a sentence
_PACKAGE = re.compile(r"(?:site|dist)-packages/([A-Za-z_]\w*)")
_PYTHON = re.compile(
    r"/lib(?:64)?/python[\d.]+/(?!(?:site|dist)-packages)|^<frozen |[\\/]lib[\\/](?:threading|runpy)\.py"
)
# Packages that people install from a clone, so that their files are in no folder of packages.
_CLONED = re.compile(
    r"/(?:[Dd]eep[Ss]peed/)?(transformers|deepspeed|accelerate|trl|peft|torchtitan|verl|megatron|llamafactory|swift|"
    r"axolotl|vllm|sglang|openrlhf|nemo_rl|nemo|skyrl|slime|lightning|pytorch_lightning|datasets|torchtune|diffusers)/"
    r"(?=\S*\.py$)"
)
# Functions that only pass a call on, and say nothing of it.
_PASSES = re.compile(
    r"^(?:wrapper|wrapped_fn|wrapped_func|inner|inner_f|_wrapped_call_impl|_call_impl|decorate_context|_fn|wrapped|"
    r"__call__|log_wrapper|_call_and_handle_interrupt|auto_init_wrapper|<module>|_run_code|_run_module_as_main|"
    r"__getattr__|__getattribute__|_format_and_raise|format_and_raise|_raise|helper_fn|_run_script|decorate_autocast|run_module|_resume_span|record|_bootstrap\w*|get_result|__get_result)$"
)
# An exception that was raised elsewhere and is passed on.
_CARRIED = re.compile(r"^(?:\w+: )?Caught (\w+) in (?:DataLoader worker|pin memory thread|replica)")


class _Signs(FrameSigns):
    task: str
    doing: str


@cache
def _signs() -> tuple[_Signs, ...]:
    return frame_signs.read(FILE, _Signs)


def package_of(frame: Frame) -> str:
    """Return the package of a frame, "python" for Python's standard library, and "" for the user's program."""
    path = frame.file.replace("\\", "/")
    if match := _PACKAGE.search(path):
        return match[1]
    if _PYTHON.search(path):
        return "python"
    cloned = _CLONED.findall(path)
    return cloned[-1] if cloned else ""


@dataclass(frozen=True)
class Traceback:
    """What the frames of a traceback show, without its last line."""

    frames: tuple[Frame, ...]
    task: str  # of tasks.yaml, or a phase of phases.yaml; "" if the frames do not say it
    doing: str  # the same as words for a sentence

    @property
    def inner(self) -> Frame | None:
        """The innermost frame outside Python's standard library that does more than pass a call on."""
        own = [frame for frame in self.frames if package_of(frame) != "python"]
        telling = [frame for frame in own if not _PASSES.match(frame.function)]
        candidates = telling or own or list(self.frames)
        return candidates[-1] if candidates else None

    @property
    def is_in_package(self) -> bool:
        """Whether the exception was raised in an installed package, and not in the user's program."""
        return self.inner is not None and bool(package_of(self.inner))

    @property
    def user(self) -> Frame | None:
        """The innermost frame of the user's own program. None if all frames are of packages."""
        return next((frame for frame in reversed(self.frames) if not package_of(frame)), None)

    @property
    def packages(self) -> list[str]:
        """The packages of the frames, the innermost first and each once. "" stands for the user's program."""
        names = [package_of(frame) for frame in reversed(self.frames) if not _PASSES.match(frame.function)]
        return list(dict.fromkeys(name for name in names if name != "python"))

    @property
    def raised(self) -> str:
        """The line of the source that was executed last."""
        return self.frames[-1].code if self.frames else ""

    @property
    def values(self) -> dict[str, str]:
        """Values for the sentences of rules. A value is empty if the traceback does not show it."""
        inner, user, packages = self.inner, self.user, self.packages
        code = (inner.code if inner else "") or self.raised
        library = next((name for name in packages if name), "")
        libraries = [name for name in packages if name]
        place = "" if inner is None else f" in {_place(inner)}"
        if inner is not None and user is not None and user is not inner:
            place += f", called by {_place(user)}"
        return {
            "where": place + (f", {self.doing}" if self.doing else ""),
            "doing": self.doing,
            "code": f": {mask(code)[:LONGEST_PLACE]}" if code and not code.startswith("raise ") else "",
            "library": library or "the program",
            "caller": (libraries[1] if len(libraries) > 1 else "the program") if library else "the program",
            "function": inner.function if inner else "a function",
        }


def _place(frame: Frame) -> str:
    file = "/".join(re.sub(r"^.*(?:site|dist)-packages/", "", frame.file.replace("\\", "/")).split("/")[-3:])
    return f"{frame.function} ({mask(file)[-LONGEST_PLACE:]}, line {frame.line})"


def of(failure: Failure) -> Traceback:
    """Evaluate the traceback of an exception, and return the result."""
    return read(failure.frames, failure.before)


def read(frames: Sequence[Frame], code: Sequence[str] = ()) -> Traceback:
    """Evaluate the frames of a traceback, or the lines of code before the exception if there are no frames."""
    names = frame_signs.names_of(frames)
    for signs in _signs():
        if signs.fit(names):
            return Traceback(tuple(frames), signs.task, signs.doing)
    phase = phases.phase_of(frames, code if not frames else ())
    if phase is None:
        return Traceback(tuple(frames), "", "")
    return Traceback(tuple(frames), phase, phases.place_of(phase))


def origin(failure: Failure, failures: Sequence[Failure]) -> Failure:
    """Return the exception with which a failure began: its direct cause, or the one that a worker process carried."""
    chain = [failure]
    while True:
        latest = chain[-1]
        before = latest.earlier if latest.is_meant else None
        if before is None and _CARRIED.match(latest.text):
            before = next(_after(latest, failures), None)
        if before is None or before in chain:
            return latest
        chain.append(before)


def _after(failure: Failure, failures: Sequence[Failure]) -> Iterator[Failure]:
    place = next((number for number, failed in enumerate(failures) if failed is failure), len(failures))
    yield from (later for later in failures[place + 1 :] if later.rank == failure.rank)
