"""Pass the calls that make up an optimizer step to subscribers, and put the original functions back at the end.

A subscriber gives one listener per event. A listener gets a function and its arguments, and returns what the function
returns. The events of one model, engine or optimizer leave out the calls of other objects of the same class.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook

from .hooks import Listener, before_updates, wrap_function
from .readback.facts import is_deepspeed

# Collectives that a script calls itself are methods of ProcessGroup in the end, however it has imported them. Examples
# are gradients averaged by hand and the sends of a pipeline.
# Beginnings of the methods' names.
_COLLECTIVES = ("all", "broadcast", "reduce", "gather", "scatter", "send", "recv", "barrier")


class StepRecorder:
    """The listeners of one subscriber, from the calls of `listen` until `close`."""

    def __init__(self, called: Any = None, model: Any = None, optimizer: Any = None) -> None:
        """Choose the objects for the events of single objects.

        `called` is the object that the script calls, which may be torch.compile's wrapper. `model` is the model inside
        it. `optimizer` is the one that does the arithmetic.
        """
        self._objects = {"called": called, "model": model, "optimizer": optimizer}
        self._stack = ExitStack()

    def listen(self, **listeners: Listener) -> None:
        """Call each listener at the event that its keyword names, outside of listeners that were added earlier.

        Events of all objects: `module` (any module is called), `backward`, `cross_entropy`, `norm` (of gradients),
        `clipping`, `collective` (issued by the script), `scale`, `scaler_update` and `scaler_step` (of a GradScaler),
        `before_update` and `after_update` (called with the optimizer only).
        Events of the given objects: `forward` (of `called`), `engine_backward` and `engine_step` (of `model`, if it is
        a DeepSpeed engine), `update` (of `optimizer`, which may be within that of another optimizer).
        """
        for event, listener in listeners.items():
            if event == "before_update":
                self._stack.callback(before_updates(listener).remove)
            elif event == "after_update":
                hook = register_optimizer_step_post_hook(lambda optimizer, *_, tell=listener: tell(optimizer))
                self._stack.callback(hook.remove)
            elif event in _OF_OBJECTS:
                of, name = _OF_OBJECTS[event]
                owner = self._objects[of]
                if of != "model" or is_deepspeed(owner):
                    self._stack.enter_context(wrap_function(type(owner), name, _only_of(owner, listener)))
            else:
                for place in _places(event):
                    self._stack.enter_context(wrap_function(*place, listener))

    def close(self) -> None:
        """Remove all listeners. Further calls have no effect."""
        self._stack.close()


# Event -> the object whose method it is, and the method. PyTorch calls the method of the optimizer after an update, for
# its profiler. A hook on the optimizer could not remove itself, because PyTorch fails if hooks change while it iterates
# over them.
_OF_OBJECTS = {
    "forward": ("called", "__call__"),
    "engine_backward": ("model", "backward"),
    "engine_step": ("model", "step"),
    "update": ("optimizer", "_optimizer_step_code"),
}
# Event -> functions of torch. Those of `clip_grad` are called by clip_grad_norm_, and are observed even if a script
# imported clip_grad_norm_ earlier. Scripts may also call the two public ones directly.
_FUNCTIONS: dict[str, tuple[tuple[Any, str], ...]] = {
    "module": ((torch.nn.Module, "__call__"),),
    "backward": ((torch.autograd, "backward"),),
    "cross_entropy": ((torch.nn.functional, "cross_entropy"),),
    "norm": ((clip_grad, "_get_total_norm"), (torch.nn.utils, "get_total_norm")),
    "clipping": ((clip_grad, "_clip_grads_with_norm_"), (torch.nn.utils, "clip_grads_with_norm_")),
}
_OF_SCALERS = {"scale": "scale", "scaler_update": "update", "scaler_step": "step"}


def _places(event: str) -> Iterator[tuple[Any, str]]:
    """Yield the functions whose calls are an event, as (owner, name)."""
    if event == "collective":
        names = (name for name in vars(dist.ProcessGroup) if name.lstrip("_").startswith(_COLLECTIVES))
        yield from ((dist.ProcessGroup, name) for name in names)
    elif event in _OF_SCALERS:
        for scaler in {torch.amp.GradScaler, *torch.amp.GradScaler.__subclasses__()}:  # FSDP's has a `scale` of its own
            if _OF_SCALERS[event] in vars(scaler):
                yield scaler, _OF_SCALERS[event]
    else:
        yield from (place for place in _FUNCTIONS[event] if hasattr(*place))


def _only_of(owner: Any, listener: Listener) -> Listener:
    """Return a listener for the methods of one object. Those of other objects of the class work as before."""

    def listen(call: Any, called: Any, *arguments: Any, **options: Any) -> Any:
        if called is not owner:
            return call(called, *arguments, **options)
        return listener(functools.partial(call, called), *arguments, **options)

    return listen
