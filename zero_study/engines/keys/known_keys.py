"""Read the table of keys, which tools/derive/keys.py writes: what each key does, and which keys runs accept."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

Pattern = Any  # a literal, a word in <>, a list of patterns, {not: a pattern}; `patterns` reads it
Place = Literal["accelerate", "json"]  # an accelerate file, a DeepSpeed JSON


OF_ACCELERATE = ("distributed_types", "dynamo_backends")  # lists; all others are DeepSpeed's


class Section(NamedTuple):
    """The keys that a section of a DeepSpeed JSON may have."""

    keys: frozenset[str]
    is_strict: bool  # True: DeepSpeed fails if a key is unknown; False: it ignores the key


@cache
def read() -> dict[str, Any]:
    """Return the whole table of keys."""
    content: dict[str, Any] = json.loads(Path(__file__).with_name("table.json").read_text())
    return content


def engine_schema(engine: Literal["accelerate", "deepspeed"], name: str) -> Any:
    """Return an entry of the table of keys for an engine, such as its fields, sections or types."""
    return read()["installed"][engine][name]


def engine_list(name: str) -> list[str]:
    """Return the names in a list of DeepSpeed or accelerate, such as the names of the supported optimizers.

    `name` is the kind: optimizers, schedulers, distributed_types and so on.
    """
    engine: Literal["accelerate", "deepspeed"] = "accelerate" if name in OF_ACCELERATE else "deepspeed"
    names: list[str] = engine_schema(engine, name)
    return names


@cache
def accelerate_sections() -> dict[str, frozenset[str]]:
    """Return the keys of each section of an accelerate file."""
    return {name: frozenset(keys) for name, keys in engine_schema("accelerate", "sections").items()}


@cache
def json_sections() -> dict[str, Section]:
    """Return the keys of each section of a DeepSpeed JSON."""
    added = read()["named"]  # keys that cannot be read from an installed engine
    parts = [(engine_schema("deepspeed", kind) | added[kind], kind == "strict") for kind in ("strict", "loose")]
    return {name: Section(frozenset(keys), strict) for sections, strict in parts for name, keys in sections.items()}


@cache
def accepted_values(place: Place) -> dict[str, Pattern]:
    """Return the pattern of the values that this project accepts, for each key of a strategy file.

    The word <own> in a pattern is replaced by the engine's type of that key.
    """
    patterns = read()["study"][place]["takes"]
    return {key: _with_own_type(key, pattern) for keys, pattern in patterns.items() for key in keys.split()}


def _with_own_type(key: str, pattern: Pattern) -> Pattern:
    if isinstance(pattern, list):
        return [_with_own_type(key, alternative) for alternative in pattern]
    section, _, name = key.rpartition(".")
    return engine_schema("deepspeed", "strict")[section][name]["type"] if pattern == "<own>" else pattern
