"""Read a JSON document of any size part by part, so that it needs little memory."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from zero_study.files import open_regular

CHUNK = 1 << 20  # characters
LARGEST_PART = 16 << 20  # characters
MOST_DIGITS = 300  # of an integer; Python refuses to read more than 4,300

_SPACE = re.compile(r"[ \t\r\n]*")


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= MOST_DIGITS else math.copysign(math.inf, -1 if digits[0] == "-" else 1)


_DECODER = json.JSONDecoder(parse_int=_integer)  # NaN and infinity are read as such, because Python writes them


class Part(NamedTuple):
    """A value at the top level of a JSON document. A list at the top level is divided into its elements."""

    key: str | None  # None if the document is a list
    value: Any
    is_element: bool


def decoded(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError if the text is not JSON."""
    try:
        value, end = _DECODER.raw_decode(text.strip())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if end < len(text.strip()):
        raise ValueError("there is more text after the value")
    return value


def parts(path: Path) -> Iterator[Part]:
    """Yield the parts of a JSON document one by one. Raises ValueError where the document is damaged."""
    with open_regular(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace")
        try:
            yield from _Document(text).parts()
        except RecursionError:
            raise ValueError("it is nested too deeply") from None


class _Document:
    def __init__(self, file: io.TextIOWrapper) -> None:
        self._file = file
        self._text = ""  # what was read of the file
        self._at = 0  # position in the text

    def parts(self) -> Iterator[Part]:
        if self._next() == "[":
            yield from (Part(None, value, True) for value in self._elements())
        elif self._next() == "{":
            for key in self._keys():
                if self._next() == "[":
                    yield from (Part(key, value, True) for value in self._elements())
                else:
                    yield Part(key, self._value(), False)
        else:
            raise ValueError("it begins neither with { nor with [")
        if self._next():
            raise ValueError("there is more text after the value")

    def _keys(self) -> Iterator[str]:
        """Yield the keys of an object. Whoever takes a key also reads its value."""
        self._at += 1
        while self._next() != "}":
            key = self._value()
            if not isinstance(key, str) or self._next() != ":":
                raise ValueError("a key is missing")
            self._at += 1
            yield key
            self._comma("}")
        self._at += 1

    def _elements(self) -> Iterator[Any]:
        self._at += 1
        while self._next() != "]":
            yield self._value()
            self._comma("]")
        self._at += 1

    def _comma(self, end: str) -> None:
        if self._next() == ",":
            self._at += 1
            if self._next() != end:
                return
        elif self._next() == end:
            return
        raise ValueError("it ends in the middle" if not self._next() else "a comma is missing or in the wrong place")

    def _next(self) -> str:
        """Return the next character that is no space. It is empty at the end of the file."""
        while True:
            space = _SPACE.match(self._text, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Read more text, and drop what was passed. False at the end of the file."""
        rest = self._text[self._at :]
        read = self._file.read(max(CHUNK, len(rest)))  # twice as much each time, so that long parts take no longer
        self._text, self._at = rest + read, 0
        return bool(read)

    def _value(self) -> Any:
        """Read one value."""
        self._next()
        while True:
            value, length = None, 0
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                length = end - self._at
            except json.JSONDecodeError:  # there is no value, or its end was not read yet
                pass
            if not length and len(self._text) - self._at > LARGEST_PART:
                raise ValueError(f"a part of it is damaged, or larger than {LARGEST_PART >> 20} MiB")
            # More of a number may follow: the 5 of 1.5 or of 1e5.
            if (length and self._at + length + 2 < len(self._text)) or not self._more():
                if not length:
                    raise ValueError("it is damaged, or it ends in the middle")
                self._at += length
                return value
