"""What does one optimizer step do? Seen from the end of the update before it to the end of its own.

The probe is on only while a call lasts that may send something. Held on from one update to the next, it would stay on
where the script raises in between, until the process ends.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from study.prove import built
from study.training.measure.communication import CollectiveProbe, Issued

# What a script calls by itself: gradients averaged by hand, a loss that is logged. Not isend and irecv, which
# torch.distributed knows again by identity.
_COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "broadcast", "broadcast_object_list", "reduce", "barrier"),
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "gather_object"),
    *("reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
    *("all_to_all", "all_to_all_single", "send", "recv", "batch_isend_irecv"),
)


class Step:
    """Watches the calls of a step until `close`: collectives, forward passes, autocast, torch's clipping.

    `called`: what the script calls, a wrapper of torch.compile too; `model`: what is in it. `optimizer` does the
    arithmetic. `done` is called after the update for which `states` are set.
    """

    def __init__(self, called: Any, model: Any, optimizer: torch.optim.Optimizer, device: str, done: Any) -> None:
        self.forward_passes = 0
        self.clipped_at: float | None = None  # None: torch's clipping was not called
        self.autocast_dtype: torch.dtype | None = None
        self.is_disturbed = False  # the model was evaluated in between, or a call raised: the step is no whole one
        self.states: dict[str, Any] | None = None  # the model states, as the step updates
        self._device = device
        self._done = done
        self._probe = CollectiveProbe(waits=False)
        self._is_inside = False  # a call within a call: the engine's backward calls torch's
        self._stack = ExitStack()
        first = next(m for m in model.modules() if next(m.parameters(recurse=False), None) is not None)
        # What is registered last sees the model last: within autocast, which wraps the root's forward.
        self._stack.callback(model.register_forward_pre_hook(self._on_forward).remove)
        self._stack.callback(first.register_forward_pre_hook(self._look_at_autocast).remove)
        compiled = getattr(called, "_compiled_call_impl", None)  # by model.compile()
        self._watch(called, "_call_impl" if compiled is None else "_compiled_call_impl")
        self._watch(torch.autograd, "backward")
        self._clip = torch.nn.utils.clip_grad_norm_
        self._replace(torch.nn.utils, "clip_grad_norm_", self._clip_grad_norm)
        self._watch(torch.nn.utils, "clip_grad_norm_")
        for name in _COLLECTIVES:
            if hasattr(dist, name):
                self._watch(dist, name)
        if built.is_deepspeed(model):
            self._watch(model, "backward")
            self._watch(model, "step", done=self._after_update)  # the engine gathers after the optimizer's own step
        else:
            self._stack.callback(optimizer.register_step_post_hook(self._after_update).remove)

    def close(self) -> None:
        """Take everything back. Again: nothing."""
        self._stack.close()

    def collectives(self) -> list[Issued]:
        return self._probe.issued()

    def _watch(self, owner: Any, name: str, done: Callable[[], None] | None = None) -> None:
        """Have the probe on whenever `owner.name` is called, however the call ends."""
        call = getattr(owner, name)

        @functools.wraps(call)
        def watched(*arguments: Any, **options: Any) -> Any:
            if self._is_inside:
                return call(*arguments, **options)
            self._is_inside = True
            try:
                with self._probe:
                    result = call(*arguments, **options)
            except BaseException:  # a KeyboardInterrupt in a notebook too
                self.is_disturbed = True
                self.close()
                raise
            finally:
                self._is_inside = False
            if done is not None:
                done()
            return result

        self._replace(owner, name, watched)

    def _replace(self, owner: Any, name: str, by: Any) -> None:
        """Put a function in the place of another, until `close`.

        In the instance's own dict: a module's __setattr__, and that of torch.compile's wrapper, do more.
        """
        names = vars(owner)
        before = {name: names[name]} if name in names else {}
        names[name] = by

        def take_back() -> None:
            if names.get(name) is by:  # else somebody else has replaced it since
                names.pop(name)
                names.update(before)

        self._stack.callback(take_back)

    def _after_update(self, *_: Any) -> None:
        if self.states is not None:  # else it is the end of the update before, within which this began
            self.close()
            self._done(self)

    def _on_forward(self, model: torch.nn.Module, _: Any) -> None:
        if model.training:
            self.forward_passes += 1
        else:
            self.is_disturbed = True
            self.close()

    def _look_at_autocast(self, *_: Any) -> None:
        if torch.is_autocast_enabled(self._device):
            self.autocast_dtype = torch.get_autocast_dtype(self._device)

    def _clip_grad_norm(self, parameters: Any, max_norm: float, *arguments: Any, **options: Any) -> torch.Tensor:
        if math.isfinite(max_norm):  # infinity only measures
            self.clipped_at = float(max_norm)
        return self._clip(parameters, max_norm, *arguments, **options)
