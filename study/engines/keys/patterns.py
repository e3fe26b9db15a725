"""The patterns of the table: which values one stands for, and whether a rule's condition holds in a file."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

Pattern = Any  # a literal, a word in <>, a list of patterns, {not: a pattern}
Lists = Callable[[str], list[str]]  # the lists that the engines have, by name


class Mark:
    """A value that no file can hold."""

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
    "number": lambda value: _is_number(value),
}
_NAMES = {"bool": "true or false", "text": "text", "int": "a whole number", "count": "a whole number"}
_BOUNDED = re.compile(r"<(\w+) (<=?|>=?) ([\d.]+)>")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def fits(pattern: Pattern, value: Any, listed: Lists, exactly: bool = False) -> bool:
    """Whether a value is one of those that a pattern stands for; `exactly`: a number is not true or false."""
    if isinstance(pattern, list):
        return any(fits(one, value, listed, exactly) for one in pattern)
    if isinstance(pattern, dict):
        return not fits(pattern["not"], value, listed, exactly)
    if isinstance(pattern, str) and pattern.startswith("<"):
        return _fits_word(pattern, value, listed)
    if exactly and isinstance(value, bool) and not isinstance(pattern, bool):
        return False
    if isinstance(pattern, bool) and not exactly:
        return value is pattern
    return bool(value == pattern)


def _fits_word(word: str, value: Any, listed: Lists) -> bool:
    if bounded := _BOUNDED.fullmatch(word):
        kind, sign, bound = bounded.groups()
        return _WORDS[kind](value) and _BOUNDS[sign](value, float(bound))
    name = word[1:-1]
    if name.startswith("one of "):
        return value in listed(name.removeprefix("one of "))
    if name.startswith("ends with "):
        return str(value).endswith(name.removeprefix("ends with "))
    return _WORDS[name](value)


def shown(value: Any) -> str:
    """A value as a file has it: true, false, null."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def in_words(pattern: Pattern) -> str:
    """What a pattern stands for, to be read in a message."""
    if isinstance(pattern, list):
        first, *others = map(in_words, pattern)
        return f"{', '.join([first, *others[:-1]])} or {others[-1]}" if others else first
    if not (isinstance(pattern, str) and pattern.startswith("<")):
        return shown(pattern)
    bounded = _BOUNDED.fullmatch(pattern)
    kind, bound = (bounded[1], f" {bounded[2]} {bounded[3]}") if bounded else (pattern[1:-1], "")
    return _NAMES.get(kind, f"a {kind}") + bound


def holds(when: Mapping[str, Pattern], key: str, value: Any, file: Any, listed: Lists) -> bool:
    """Whether all that a rule asks for is so: of the key's value, of other keys, of what decides in the whole file."""
    return all(fits(pattern, _subject(name, key, value, file), listed) for name, pattern in when.items())


def _subject(name: str, key: str, value: Any, file: Any) -> Any:
    if name == "value":
        return value
    if name in ("text", "lower", "upper"):
        return str(value) if name == "text" else getattr(str(value), name)()
    if name.startswith("."):
        return file.get(key.rpartition(".")[0] + name)
    return getattr(file, name) if "." not in name and hasattr(type(file), name) else file.get(name)
