"""How do several look on as one function is called? The last that goes puts the original back.

What is replaced is a module's function or a class's method, never anything of an instance, of which a script may make
copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

Listener = Callable[..., Any]  # is given the call to make, and its arguments; returns what the call returns


class _Place(NamedTuple):
    """What stands in the place of a function."""

    by: Callable[..., Any]
    listeners: list[Listener]
    put_back: Callable[[], None]


_places: dict[tuple[Any, str], _Place] = {}


@contextmanager
def listening(owner: Any, name: str, listener: Listener) -> Iterator[None]:
    """Have `listener` called in the place of `owner.name`, around the listeners before it."""
    key = (owner, name)
    place = _places.get(key)
    if place is None or vars(owner)[name] is not place.by:  # somebody else has put theirs around it
        place = _places[key] = _replace(owner, name)
    place.listeners.append(listener)
    try:
        yield
    finally:
        place.listeners.remove(listener)
        if not place.listeners:
            place.put_back()
            if _places.get(key) is place:
                del _places[key]


def _replace(owner: Any, name: str) -> _Place:
    call = getattr(owner, name)
    inherited = object()
    before = vars(owner).get(name, inherited)
    listeners: list[Listener] = []

    @functools.wraps(call)
    def by(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():  # a graph of the script's outlives the listeners
            return call(*arguments, **options)
        chain = call
        for listener in listeners:
            chain = functools.partial(listener, chain)
        return chain(*arguments, **options)

    def put_back() -> None:
        if vars(owner).get(name) is not by:
            return  # what somebody else has put around it calls it still, and it calls the original
        if before is inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    setattr(owner, name, by)
    return _Place(by, listeners, put_back)
