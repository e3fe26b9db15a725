"""The table of keys as tools/keys.py writes it: what the engines have, what a key does, what the study takes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .patterns import Pattern

Place = Literal["accelerate", "json"]  # an accelerate file, a DeepSpeed JSON


class Section(NamedTuple):
    """The keys of a section of a DeepSpeed JSON."""

    keys: frozenset[str]
    is_strict: bool  # an unknown key stops DeepSpeed; else it is ignored


@cache
def read() -> dict[str, Any]:
    """The whole table."""
    content: dict[str, Any] = json.loads(Path(__file__).with_name("table.json").read_text())
    return content


def installed(engine: Literal["accelerate", "deepspeed"], name: str) -> Any:
    """What the engines of the table say of themselves."""
    return read()["installed"][engine][name]


def listed(name: str) -> list[str]:
    """A list that the engines have: optimizers, schedulers, distributed_types and the like."""
    engine: Literal["accelerate", "deepspeed"] = "accelerate" if name == "distributed_types" else "deepspeed"
    found: list[str] = installed(engine, name)
    return found


@cache
def accelerate_sections() -> dict[str, frozenset[str]]:
    """The keys of each section of an accelerate file."""
    return {name: frozenset(keys) for name, keys in installed("accelerate", "sections").items()}


@cache
def json_sections() -> dict[str, Section]:
    """The keys of each section of a DeepSpeed JSON."""
    named = read()["named"]
    parts = [(installed("deepspeed", kind) | named[kind], kind == "strict") for kind in ("strict", "loose")]
    return {name: Section(frozenset(keys), strict) for sections, strict in parts for name, keys in sections.items()}


@cache
def taken(place: Place) -> dict[str, Pattern]:
    """What each key of a strategy's file may hold; the engine's own type is put in its place."""
    takes = read()["study"][place]["takes"]
    return {key: _with_own_type(key, pattern) for keys, pattern in takes.items() for key in keys.split()}


def _with_own_type(key: str, pattern: Pattern) -> Pattern:
    if isinstance(pattern, list):
        return [_with_own_type(key, one) for one in pattern]
    section, _, name = key.rpartition(".")
    return installed("deepspeed", "strict")[section][name]["type"] if pattern == "<own>" else pattern
