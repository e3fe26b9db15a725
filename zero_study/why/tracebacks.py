"""Read a traceback: the frame of the user's program, the frame of a library, and the phase of the training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict

from zero_study.logs.printed_failures import Failure, Frame

FILE = Path(__file__).with_name("phases.yaml")
Phase = Literal[
    "saving", "evaluation", "generation", "building", "wrapping", "optimizer step", "gathering", "loss",
    "recomputation", "attention", "backward", "forward", "weight transfer",
]  # fmt: skip
_PACKAGE = re.compile(r"(?:site|dist)-packages/([A-Za-z_]\w*)")
_PYTHON = re.compile(
    r"/lib(?:64)?/python[\d.]+/(?!(?:site|dist)-packages)|^<|[\\/]lib[\\/](?:threading|runpy)\.py|/bin/\w+$|\.p[yx][xi]$"
)
# Packages that people install from a clone, so that their files are in no folder of packages.
_CLONED = re.compile(
    r"(?i)(?:^|/(?:src|tmp|pytorch|megatron[\w.-]*|ms-swift[\w.-]*|llama-?factory)/|/(?P<repo>\w+)/(?=(?P=repo)/))"
    r"(?P<package>torch|autograd|torchinductor_\w+|transformers|deepspeed|accelerate|trl|peft|torchtitan|verl|megatron|llamafactory|swift|"
    r"axolotl|vllm|sglang|openrlhf|nemo_rl|nemo|skyrl|slime|lightning|pytorch_lightning|datasets|torchtune|diffusers)/"
    r"(?=\S*\.py$)"
)
# Functions that only pass a call on, and say nothing of it.
_PASSES = re.compile(
    r"^(?:wrapper|wrapped_fn|wrapped_func|inner|inner_f|_wrapped_call_impl|_call_impl|decorate_context|_fn|wrapped|"
    r"__call__|log_wrapper|_call_and_handle_interrupt|auto_init_wrapper|<module>|_run_code|_run_module_as_main|"
    r"__getattr__|__getattribute__|helper_fn|_run_script|decorate_autocast|run_module|_resume_span|record|"
    r"_bootstrap\w*|get_result|__get_result)$"
)
# An exception that was raised elsewhere and is passed on.
_CARRIED = re.compile(r"^(?:\w+: )?Caught (\w+) in (?:DataLoader worker|pin memory thread|replica)")


class _Signs(BaseModel):
    """How the frames of a traceback show a phase."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    phase: Phase
    place: str  # as words for a sentence
    frames: tuple[str, ...]  # patterns for `file:function`
    innermost: int = 0  # only so many frames are examined, from the innermost one; 0: all
    code: tuple[str, ...] = ()  # patterns for lines of code, if no frame has a sign


@cache
def _signs() -> tuple[_Signs, ...]:
    return tuple(_Signs.model_validate(entry) for entry in yaml.safe_load(FILE.read_text(encoding="utf-8")))


def names_of(frames: Sequence[Frame]) -> list[str]:
    """Return `file:function` of each frame."""
    return [f"{frame.file}:{frame.function}" for frame in frames]


def phase_of(failure: Failure) -> Phase | None:
    """Return the phase in which an exception was raised. None if neither its frames nor its code show the phase."""
    names = names_of(failure.frames)
    for signs in _signs():
        if any(re.search("|".join(signs.frames), name) for name in names[-signs.innermost :]):
            return signs.phase
    for line in reversed([each for each in failure.before if " --" not in each]):  # a command line is no code
        for signs in _signs():
            if signs.code and re.search("|".join(signs.code), line):
                return signs.phase
    return None


def place_of(phase: Phase) -> str:
    """Return the phase as words for a sentence, such as "in the backward pass"."""
    return next(signs.place for signs in _signs() if signs.phase == phase)


def package_of(frame: Frame) -> str:
    """Return the package of a frame, "python" for Python's standard library, and "" for the user's program."""
    path = frame.file.replace("\\", "/")
    if match := _PACKAGE.search(path):
        return match[1]
    if _PYTHON.search(path):
        return "python"
    cloned = list(_CLONED.finditer(path))
    return cloned[-1]["package"] if cloned else ""


def user_frame(failure: Failure) -> Frame | None:
    """Return the innermost frame of the user's own program. None if all frames are of packages."""
    return next((frame for frame in reversed(failure.frames) if not package_of(frame)), None)


def library_frame(failure: Failure) -> Frame | None:
    """Return the innermost frame of a package that does more than pass a call on. None if there is none."""
    frames = [frame for frame in failure.frames if package_of(frame) not in ("", "python")]
    telling = [frame for frame in frames if not _PASSES.match(frame.function)]
    return next(reversed(telling or frames), None)


def library_frames(failure: Failure) -> tuple[Frame, ...]:
    """Return the innermost frame of a package, after the one that called it if it only raises the exception."""
    inner = library_frame(failure)
    if inner is None or not inner.code.startswith(("raise", "assert")):
        return () if inner is None else (inner,)
    before = failure.frames[: failure.frames.index(inner)]
    is_telling = (
        bool(before) and package_of(before[-1]) not in ("", "python") and not _PASSES.match(before[-1].function)
    )
    return (before[-1], inner) if is_telling else (inner,)


def origin(failure: Failure, failures: Sequence[Failure]) -> Failure:
    """Return the exception with which a failure began: its direct cause, or the one that a worker process carried."""
    chain = [failure]
    while True:
        latest = chain[-1]
        before = latest.earlier if latest.is_meant else None
        if before is None and _CARRIED.match(latest.message):
            later = failures[next(n for n, each in enumerate(failures) if each is latest) + 1 :]
            before = next((each for each in later if each.rank == latest.rank), None)
        if before is None or before in chain:
            return latest
        chain.append(before)
