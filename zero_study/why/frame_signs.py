"""Recognize what a traceback shows by patterns for `file:function` of its frames, which YAML files list."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ConfigDict

from zero_study.why.log import Frame


class FrameSigns(BaseModel):
    """Patterns for one kind of traceback. The kind is recognized if a frame matches one of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    frames: tuple[str, ...]
    innermost: int = 0  # only so many frames are examined, from the innermost one; 0: all

    def fit(self, names: Sequence[str]) -> bool:
        """Return whether a pattern matches one of the frames, which are given as `names_of` writes them."""
        pattern = _compiled(self.frames)
        return any(pattern.search(name) for name in names[-self.innermost :])


Signs = TypeVar("Signs", bound=FrameSigns)


@cache
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(patterns))


def names_of(frames: Iterable[Frame]) -> list[str]:
    """Return `file:function` of each frame."""
    return [f"{frame.file}:{frame.function}" for frame in frames]


def read(file: Path, kind: type[Signs]) -> tuple[Signs, ...]:
    """Return the patterns in a file. Raises pydantic's ValidationError if the file is wrong."""
    return tuple(kind.model_validate(entry) for entry in yaml.safe_load(file.read_text(encoding="utf-8")))
