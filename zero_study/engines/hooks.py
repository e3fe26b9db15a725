"""Put hooks on functions of modules and classes and on optimizer updates, and remove them completely.

A hook replaces an attribute of a module or a class, never of an instance, because scripts copy instances. The last
listener that is removed restores the original function.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

Listener = Callable[..., Any]  # is called with a function and its arguments; returns what the function returns


class _Place(NamedTuple):
    """A function that was replaced by a hook, and its listeners."""

    by: Callable[..., Any]
    listeners: list[Listener]
    put_back: Callable[[], None]


_places: dict[tuple[Any, str], _Place] = {}


@contextmanager
def wrap_function(owner: Any, name: str, listener: Listener) -> Iterator[None]:
    """Call `listener` in place of `owner.name` within the `with` block. It wraps listeners that were added earlier."""
    key = (owner, name)
    place = _places.get(key)
    if place is None or vars(owner)[name] is not place.by:  # other code has replaced it since
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


def before_updates(look: Callable[[torch.optim.Optimizer], None]) -> Any:
    """Call `look` before every optimizer update, and return a handle that removes this hook.

    If a step has a closure, `look` is called after the closure, because that runs forward and backward passes.
    """

    def on_step(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> Any:
        by_name = "closure" in options
        closure = options["closure"] if by_name else next(iter(arguments[1:]), None)
        if not callable(closure):
            return look(optimizer)

        def passes(*given: Any, **named: Any) -> Any:
            result = closure(*given, **named)
            look(optimizer)
            return result

        return (arguments, options | {"closure": passes}) if by_name else ((optimizer, passes, *arguments[2:]), options)

    return register_optimizer_step_pre_hook(on_step)


def _replace(owner: Any, name: str) -> _Place:
    call = getattr(owner, name)
    inherited = object()
    before = vars(owner).get(name, inherited)
    listeners: list[Listener] = []

    def original() -> Any:
        """Return the function that is hidden by this hook. A base class may have got a hook of its own since."""
        if before is not inherited:
            return call
        function = next((vars(base)[name] for base in owner.__mro__[1:] if name in vars(base)), None)
        return function if isinstance(function, FunctionType) else call

    @functools.wraps(call)
    def by(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():  # a graph of the script would outlive the listeners
            return call(*arguments, **options)
        chain = original()
        for listener in listeners:
            chain = functools.partial(listener, chain)
        return chain(*arguments, **options)

    def put_back() -> None:
        if vars(owner).get(name) is not by:
            return  # other code still calls this replacement, which calls the original
        if before is inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    setattr(owner, name, by)
    return _Place(by, listeners, put_back)


def without_graphs() -> AbstractContextManager[Any]:
    """Return a context in which functions that torch.compile has compiled run eagerly.

    Their compiled graphs are kept for later. Without this context, torch.compile would discard them if a probe is
    active.
    """
    # A script that compiled something has imported torch._dynamo already. Importing it here would take seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
