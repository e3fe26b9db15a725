"""Compare values with the patterns of the table of keys, and evaluate the conditions of rules."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from .known_keys import Pattern, engine_list


class Mark:
    """A special value that no file can contain, such as `ABSENT`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


ABSENT = Mark("(absent)")  # the key is not in the file

_BOUNDS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_WORDS: dict[str, Callable[[Any], bool]] = {
    "any": lambda value: True,
    "absent": lambda value: value is ABSENT,
    "filled": lambda value: value is not ABSENT and bool(value),
    "section": lambda value: isinstance(value, dict),
    "bool": lambda value: isinstance(value, bool),
    "text": lambda value: isinstance(value, str),
    "list": lambda value: "," in str(value),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "count": lambda value: _is_number(value) and value == value // 1,
    "positive": lambda value: str(value).isdecimal() and int(value) > 0,  # also as text
    "number": lambda value: _is_number(value),
}
_NAMES = {"bool": "true or false", "text": "text", "int": "a whole number", "count": "a whole number"}
_BOUNDED = re.compile(r"<(\w+) (<=?|>=?) ([\d.]+)>")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_above(value: Any, limit: Any) -> bool:
    """Return whether a number is above another one. False if one of them is no number."""
    return _is_number(value) and _is_number(limit) and bool(value > limit)


def matches(pattern: Pattern, value: Any, exactly: bool = False) -> bool:
    """Return whether a value matches a pattern.

    If `exactly`, the values true and false only match a pattern that is true or false. Otherwise a pattern that is true
    or false only matches these values.
    """
    if isinstance(pattern, list):
        return any(matches(alternative, value, exactly) for alternative in pattern)
    if isinstance(pattern, dict):
        return not matches(pattern["not"], value, exactly)
    if isinstance(pattern, str) and pattern.startswith("<"):
        return _matches_word(pattern, value)
    if exactly and isinstance(value, bool) and not isinstance(pattern, bool):
        return False
    if isinstance(pattern, bool) and not exactly:
        return value is pattern
    return bool(value == pattern)


def _matches_word(word: str, value: Any) -> bool:
    if bounded := _BOUNDED.fullmatch(word):
        kind, sign, bound = bounded.groups()
        return _WORDS[kind](value) and _BOUNDS[sign](value, float(bound))
    name = word[1:-1]
    if name.startswith("one of "):
        return value in engine_list(name.removeprefix("one of "))
    if name.startswith("has "):
        return name.removeprefix("has ") in str(value)
    if name.startswith("ends with "):
        return str(value).endswith(name.removeprefix("ends with "))
    return _WORDS[name](value)


def as_in_file(value: Any) -> str:
    """Return a value as it is written in a file, such as true, false or null."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def in_words(pattern: Pattern) -> str:
    """Return a text for messages that describes the values which match a pattern."""
    if isinstance(pattern, list):
        *alternatives, last = map(in_words, pattern)
        return f"{', '.join(alternatives)} or {last}" if alternatives else last
    if not (isinstance(pattern, str) and pattern.startswith("<")):
        return as_in_file(pattern)
    bounded = _BOUNDED.fullmatch(pattern)
    kind, bound = (bounded[1], f" {bounded[2]} {bounded[3]}") if bounded else (pattern[1:-1], "")
    return _NAMES.get(kind, f"a {kind}") + bound


def condition_holds(condition: Mapping[str, Pattern], key: str, value: Any, file: Any) -> bool:
    """Return whether the condition of a rule holds: each of its operands matches its pattern.

    An operand is the value of the rule's key, the value of another key, or a property of the whole file.
    """
    return all(matches(pattern, _operand(name, key, value, file)) for name, pattern in condition.items())


def _operand(name: str, key: str, value: Any, file: Any) -> Any:
    """Return the value of an operand in a condition. A name that begins with a dot is a key of the same section."""
    if name == "value":
        return value
    if name in ("text", "lower", "upper"):
        return str(value) if name == "text" else getattr(str(value), name)()
    if name.startswith("."):
        return file.get(key.rpartition(".")[0] + name)
    return getattr(file, name) if "." not in name and hasattr(type(file), name) else file.get(name)
