"""One optimizer step, seen from the end of the update before it to the end of its own.

The probe is on only while a call lasts that may send something. Held on from one update to the next, it would stay on
where the script raises in between, until the process ends. Nothing is put on the model or the optimizer themselves: a
copy of theirs, of which many scripts make one (an average of the weights, a pickle), would carry it along.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.utils._pytree import tree_leaves

from ..listening import CollectiveProbe, Issued, Listener, listening, without_graphs
from . import read_back
from .checksums import Checksum, checksums, of_batch, of_weights

# What a script calls by itself comes here, however it has imported it: gradients averaged by hand, a pipeline's sends.
_COLLECTIVES = ("all", "broadcast", "reduce", "gather", "scatter", "send", "recv", "barrier")  # as methods' names begin
# What torch's clip_grad_norm_ calls: whoever imported that before calls these all the same. The names of two are open
# to scripts too.
_NORMS = ((clip_grad, "_get_total_norm"), (torch.nn.utils, "get_total_norm"))
_OF_CROSS_ENTROPY = (  # its arguments
    "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing",
)  # fmt: skip
NEAR = 1e-3  # relative; of factors that are one
_CLIPPING = ((clip_grad, "_clip_grads_with_norm_"), (torch.nn.utils, "clip_grads_with_norm_"))


def _is_collective(method: str) -> bool:
    return method.lstrip("_").startswith(_COLLECTIVES)


Mark = tuple[float, float]  # of a gradient: the sum of the first third of its elements, and of all absolute values


def marks(tensors: Sequence[torch.Tensor]) -> list[Mark]:
    """By what the factor between two states of tensors is told: sums of all are zero of many gradients."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    thirds = checksums(part.reshape(-1)[: max(1, part.numel() // 3)] for part in parts)
    return [(third[0], whole[1]) for third, whole in zip(thirds, checksums(parts), strict=True)]


def common_factor(before: Sequence[Mark], after: Sequence[Mark]) -> float | None:
    """What all of these tensors were multiplied with; None: not with one number, or nothing tells it."""
    if len(before) != len(after):
        return None
    factors, signs = [], []
    for (part, size), (other_part, other_size) in zip(before, after, strict=True):
        if not (math.isfinite(size) and math.isfinite(other_size)) or (size == 0) != (other_size == 0):
            return None
        if size:
            factors.append(other_size / size)
            signs += [part * other_part] if abs(part) > NEAR * size else []
    if not factors or max(factors) - min(factors) > NEAR * max(factors):
        return None
    is_turned = bool(signs) and all(sign < 0 for sign in signs)
    return -factors[0] if is_turned else factors[0] if all(sign > 0 for sign in signs) else None


class Step:
    """Watches the calls of a step until `close`: collectives, forward passes, autocast, torch's clipping.

    `called`: what the script calls, a wrapper of torch.compile too; `model`: what is in it. `optimizer` does the
    arithmetic. `done` is called after the update for which `states` are set.
    """

    def __init__(self, called: Any, model: Any, optimizer: torch.optim.Optimizer, device: str, done: Any) -> None:
        self.passes_without_gradients = 0  # of a model in training
        self.clipped_at: float | None = None  # None: none of torch's functions clipped the model's gradients
        self.autocast_dtype: torch.dtype | None = None
        self.clipped_scaled_by: float | None = None  # what GradScaler had the gradients times as they were clipped
        self.num_clipped = 0  # gradients that torch's functions were given
        self.added_after_clipping = 0  # backward calls after it that changed the gradients
        self.added_to_clipped = 0  # backward calls that added to gradients which a clipping had made smaller
        self.updated_scaled_by: float | None = None  # what it had them times as the step updates
        self.states: dict[str, Any] | None = None  # the model states, as the step updates
        self.weights: dict[str, Checksum] = {}  # as its first forward pass begins
        self.replicated: set[str] = set()  # parameters that are whole then
        self.batches: list[list[Checksum]] = []  # of the first two forward passes' inputs
        self.engine_backwards = 0  # through DeepSpeed's engine, of the last micro batch
        self.backwards = 0
        self.reduced = dict.fromkeys(("forward", "backward", "update", "script"), 0)  # bytes, by what was called
        self.began_clean = read_back.is_deepspeed(model)  # no gradients before one of them; DeepSpeed has its own
        self.num_gradients = self.num_zero_gradients = self.num_missing_gradients = 0  # tensors, as the step updates
        self._passes = {True: 0, False: 0}  # with gradients, in training mode and in evaluation mode
        self._is_disturbed = False  # the model was evaluated in between, or a call raised
        self._model = model
        self._device = device
        self._done = done
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        of_model = set(map(id, model.parameters()))
        self._parameters = updated & of_model or of_model  # ZeRO updates masters
        self._updated = [p for p in model.parameters() if p.requires_grad and id(p) in updated]
        self._parts = {id(module) for module in model.modules()}
        self._kinds = {type(module) for module in model.modules()}
        self._probe = CollectiveProbe(waits=False)
        self._scaler: Any = None  # that scaled a loss of the step
        self._scalings: list[Any] = []  # a scaler for each loss that was scaled
        self.scaled: float | None = (
            None  # what the gradients were multiplied with after the last backward; None: unknown
        )
        self.targets: list[int] = []  # of each cross-entropy that is a mean: how many it is of
        self.is_ascent = False  # backward was called on a negative multiple of the cross-entropy
        self._entropies: list[float] = []  # of the forward pass that lasts, or was last
        self._made: list[Mark] = []  # gradients, as the last backward call left them
        self._clipped: tuple[int, list[Checksum]] | None = None  # backward calls before it, and the gradients after it
        self._shrunk: dict[int, Checksum] = {}  # parameter -> its gradient, where the last clipping made it smaller
        self._phase: str | None = None  # that of the call which lasts
        self._counted = 0  # bytes reduced when it was looked last
        self._stack = ExitStack()
        self._listen_to(called, "__call__", self._on_forward)
        by_script, in_update = (functools.partial(self._under_probe, phase) for phase in ("script", "update"))
        scalers = {torch.amp.GradScaler, *torch.amp.GradScaler.__subclasses__()}  # FSDP's has a `scale` of its own
        listeners: list[tuple[tuple[Any, str], Listener]] = [
            ((torch.autograd, "backward"), self._on_backward),
            ((torch.nn.functional, "cross_entropy"), self._on_cross_entropy),
            *((place, in_update) for place in _NORMS),
            *(((dist.ProcessGroup, name), by_script) for name in vars(dist.ProcessGroup) if _is_collective(name)),
            *((place, self._on_clipping) for place in _CLIPPING),
            *(((kind, "scale"), self._on_scaling) for kind in scalers if "scale" in vars(kind)),
            *(((kind, "update"), self._on_scale_update) for kind in scalers if "update" in vars(kind)),
        ]
        for (owner, name), listener in listeners:
            if hasattr(owner, name):
                self._stack.enter_context(listening(owner, name, listener))
        if read_back.is_deepspeed(model):
            self._listen_to(model, "backward", self._on_engine_backward)
            self._listen_to(model, "step", self._on_step)  # it gathers after the optimizer's own step
        else:
            # What torch calls after an update for its profiler. A hook could not take itself back: torch fails where
            # hooks change as it goes through them.
            self._listen_to(optimizer, "_optimizer_step_code", self._on_step)

    @property
    def forward_passes(self) -> int:
        """Forward passes with gradients."""
        return sum(self._passes.values())

    @property
    def is_in_evaluation_mode(self) -> bool:
        """Whether the model trains as if it were evaluated: without dropout."""
        return self._passes[False] > 0

    @property
    def is_whole(self) -> bool:
        """Whether the step was one of training alone; one of both modes has an evaluation with gradients in it."""
        return not self._is_disturbed and not all(self._passes.values())

    def close(self) -> None:
        """Take everything back. Again: nothing."""
        self._stack.close()

    def collectives(self) -> list[Issued]:
        return self._probe.issued()

    def updates(self, states: dict[str, Any]) -> None:
        """Take the model states as the step updates, and see which gradients are nothing."""
        self.states = states
        gradients = checksums(self._gradients())
        self.num_gradients, self.num_zero_gradients = len(gradients), gradients.count((0.0, 0.0))
        self.scaled = common_factor(self._made, marks(self._gradients()))
        self.num_missing_gradients = sum(p.grad is None and p.numel() > 0 for p in self._updated)
        num_before, clipped = self._clipped or (self.backwards, gradients)
        self.added_after_clipping = self.backwards - num_before if clipped != gradients else 0
        if len(self._scalings) >= self.backwards > 0 and not any(s._per_optimizer_states for s in self._scalings):
            self.updated_scaled_by = self._scalings[-1].get_scale()

    def _by_parameter(self) -> dict[int, Checksum]:
        with_gradients = [p for p in self._updated if p.grad is not None and p.grad.numel()]
        return dict(zip(map(id, with_gradients), checksums(self._gradients()), strict=True))

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._updated if p.grad is not None and p.grad.numel()]

    def _listen_to(self, owner: Any, name: str, listener: Listener) -> None:
        """Listen to a method of one model or optimizer; others of its class are let through."""

        def listen(call: Any, called: Any, *arguments: Any, **options: Any) -> Any:
            if called is not owner:
                return call(called, *arguments, **options)
            return listener(functools.partial(call, called), *arguments, **options)

        self._stack.enter_context(listening(type(owner), name, listen))

    def _under_probe(self, phase: str, call: Any, *arguments: Any, **options: Any) -> Any:
        """Have the probe on while a call lasts, however it ends. Of a call within a call (the engine's backward calls
        torch's) the outer is the phase, but for the forward pass: Lightning's has a step by hand in it.
        """
        outer = self._phase
        if outer not in (None, "forward") or (outer and phase == "script"):
            return call(*arguments, **options)
        self._enter(phase)
        try:
            with ExitStack() if outer else without_graphs(), ExitStack() if outer else self._probe:
                return call(*arguments, **options)
        except BaseException:  # a KeyboardInterrupt in a notebook too
            self._is_disturbed = True
            self.close()
            raise
        finally:
            self._enter(outer)

    def _enter(self, phase: str | None) -> None:
        """Go on to a phase, or to none. What was reduced since the last belongs to the one before."""
        before, self._counted = self._counted, self._probe.reduced_bytes()
        if self._phase:
            self.reduced[self._phase] += self._counted - before
        self._phase = phase

    def _on_forward(self, call: Any, *arguments: Any, **options: Any) -> Any:
        if self._end():  # an update that is compiled does not say that it is done
            return call(*arguments, **options)
        is_training = read_back.inner(self._model).training
        if torch.is_grad_enabled():
            self._passes[is_training] += 1
        elif is_training:
            self.passes_without_gradients += 1
        else:
            self._is_disturbed = True
            self.close()
            return call(*arguments, **options)
        if not self.weights:
            self.weights, self.replicated = of_weights(self._model), read_back.replicated(self._model)
        if len(self.batches) < 2:
            self.batches.append(of_batch(arguments, options))
        # Only for so long: a class's method that is replaced has whoever compiles others of the class compile anew.
        with ExitStack() as parts:
            for kind in self._kinds:
                parts.enter_context(listening(kind, "__call__", self._on_module))
            return self._under_probe("forward", call, *arguments, **options)

    def _on_module(self, call: Any, module: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        """See whether a part is called within autocast, which may wrap no more than the root's forward."""
        if id(module) in self._parts and torch.is_autocast_enabled(self._device):
            self.autocast_dtype = torch.get_autocast_dtype(self._device)
        return call(module, *arguments, **options)

    def _on_clipping(self, call: Any, parameters: Any, max_norm: float, *arguments: Any, **options: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # Infinity only measures, and another model's gradients are none of the step's.
        is_ours = math.isfinite(max_norm) and any(id(parameter) in self._parameters for parameter in parameters)
        if is_ours:
            self.clipped_at = float(max_norm)
            scaler, self._scaler = self._scaler, None
            stages = [] if scaler is None else [state["stage"].name for state in scaler._per_optimizer_states.values()]
            if scaler is not None and "UNSCALED" not in stages and scaler.get_scale() != 1:
                self.clipped_scaled_by = scaler.get_scale()
            self.num_clipped += sum(p.grad is not None for p in parameters)
        before = self._by_parameter() if is_ours else {}
        result = self._under_probe("update", call, parameters, max_norm, *arguments, **options)
        if is_ours:
            after = self._by_parameter()
            self._clipped = self.backwards, [*after.values()]
            self._shrunk = {key: pair for key, pair in after.items() if pair[1] < (1 - NEAR) * before[key][1]}
        return result

    def _on_scaling(self, call: Any, scaler: Any, *arguments: Any, **options: Any) -> Any:
        self._scaler = scaler if scaler.is_enabled() else None
        self._scalings += [scaler] if scaler.is_enabled() else []
        return call(scaler, *arguments, **options)

    def _on_scale_update(self, call: Any, scaler: Any, *arguments: Any, **options: Any) -> Any:
        self._scaler = None  # what another model scales is none of this one's
        self._scalings = [each for each in self._scalings if each is not scaler or not scaler._per_optimizer_states]
        return call(scaler, *arguments, **options)

    def _on_backward(self, call: Any, *arguments: Any, **options: Any) -> Any:
        if self._phase in (None, "forward"):
            self.backwards += 1
            found = self._by_parameter() if self._shrunk or not self.began_clean else {}
            self.began_clean = self.began_clean or not any(pair[1] > 0 for pair in found.values())
            clipped, self._shrunk = self._shrunk.items() & found.items(), {}
            self._note_loss(arguments[0] if arguments else options.get("tensors"))
            result = self._under_probe("backward", call, *arguments, **options)
            self._made = marks(self._gradients())
            self.added_to_clipped += bool(clipped and clipped - self._by_parameter().items())
            return result
        return self._under_probe("backward", call, *arguments, **options)

    def _note_loss(self, tensors: Any) -> None:
        """See whether a loss is the negative of the one cross-entropy that its forward pass had."""
        losses = [float(leaf.detach()) for leaf in tree_leaves(tensors)
                  if isinstance(leaf, torch.Tensor) and leaf.numel() == 1]  # fmt: skip
        entropies, self._entropies = self._entropies, []
        self.is_ascent = self.is_ascent or (len(losses) == len(entropies) == 1 and losses[0] < 0 < entropies[0])

    def _on_cross_entropy(self, call: Any, *arguments: Any, **options: Any) -> Any:
        """Count what a mean is of: targets that are no padding. Signature of torch 2.13."""
        result = call(*arguments, **options)
        given = dict(zip(_OF_CROSS_ENTROPY, arguments, strict=False)) | options
        target, reduction = given.get("target"), given.get("reduction", "mean")
        if isinstance(result, torch.Tensor) and result.requires_grad and isinstance(target, torch.Tensor):
            if result.numel() == 1:
                self._entropies.append(float(result.detach()))
            if reduction == "mean" and not target.is_floating_point():
                self.targets.append(int((target != given.get("ignore_index", -100)).sum()))
        return result

    def _on_engine_backward(self, call: Any, *arguments: Any, **options: Any) -> Any:
        self.engine_backwards += bool(self._model.is_gradient_accumulation_boundary())
        return self._under_probe("backward", call, *arguments, **options)

    def _on_step(self, call: Any, *arguments: Any, **options: Any) -> Any:
        result = self._under_probe("update", call, *arguments, **options)
        self._end()
        return result

    def _end(self) -> bool:
        """End the step if its update has been made. Whether it has: a step begins within the update before it."""
        if self.states is None:
            return False
        self._enter(self._phase)
        self.close()
        self._done(self)
        return True
