"""Determine in which phase of a training an exception was raised, from its traceback and phases.yaml."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from zero_study.why import frame_signs
from zero_study.why.frame_signs import FrameSigns
from zero_study.why.log import Frame

FILE = Path(__file__).with_suffix(".yaml")
Phase = Literal[
    "saving", "evaluation", "generation", "building", "wrapping", "optimizer step", "gathering", "loss",
    "recomputation", "attention", "backward", "forward", "weight transfer",
]  # fmt: skip


class _Signs(FrameSigns):
    phase: Phase
    place: str
    code: tuple[str, ...] = ()


@cache
def _signs() -> tuple[_Signs, ...]:
    return frame_signs.read(FILE, _Signs)


def phase_of(frames: Sequence[Frame], code: Sequence[str] = ()) -> Phase | None:
    """Return the phase in which a traceback was raised. None if neither its frames nor its code show the phase."""
    names = frame_signs.names_of(frames)
    for signs in _signs():
        if signs.fit(names):
            return signs.phase
    for line in reversed([each for each in code if " --" not in each]):  # a command line is no code
        for signs in _signs():
            if signs.code and re.search("|".join(signs.code), line):
                return signs.phase
    return None


def place_of(phase: Phase) -> str:
    """Return the phase as words for a sentence, such as "in the backward pass"."""
    return next(signs.place for signs in _signs() if signs.phase == phase)
