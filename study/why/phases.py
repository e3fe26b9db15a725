"""In which phase of a training an exception was raised, by the frames of its traceback. phases.yaml has the signs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict

from study.why.log import Frame

FILE = Path(__file__).with_suffix(".yaml")
Phase = Literal[
    "saving", "evaluation", "generation", "building", "wrapping", "optimizer step", "gathering", "loss",
    "recomputation", "attention", "backward", "forward", "weight transfer",
]  # fmt: skip


class _Signs(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    phase: Phase
    place: str
    frames: tuple[str, ...]
    innermost: int = 0
    code: tuple[str, ...] = ()


@cache
def _signs() -> tuple[_Signs, ...]:
    return tuple(_Signs.model_validate(entry) for entry in yaml.safe_load(FILE.read_text(encoding="utf-8")))


def phase_of(frames: Sequence[Frame], code: Sequence[str] = ()) -> Phase | None:
    """Return the phase to which a traceback belongs. None if neither its frames nor its code say it."""
    texts = [f"{frame.file}:{frame.function}" for frame in frames]
    for signs in _signs():
        if any(re.search("|".join(signs.frames), text) for text in texts[-signs.innermost :]):
            return signs.phase
    for line in reversed([each for each in code if " --" not in each]):  # a command line is no code
        for signs in _signs():
            if signs.code and re.search("|".join(signs.code), line):
                return signs.phase
    return None


def place_of(phase: Phase) -> str:
    """Return how a sentence names a phase, such as "in the backward pass"."""
    return next(signs.place for signs in _signs() if signs.phase == phase)
