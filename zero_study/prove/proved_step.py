"""Observe one optimizer step, from the end of the previous update to the end of this step's update.

The collective probe is active only during calls that may issue collectives. If it were active from one update to the
next, an exception in the script would leave it active until the process ends.

Nothing is attached to the model or the optimizer itself, because many scripts copy these objects, for example to
average weights or to pickle them. A copy would keep what is attached.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..engines.collective_probe import CollectiveProbe, Issued
from ..engines.hooks import without_graphs, wrap_function
from ..engines.readback.dtypes import dtype_name
from ..engines.readback.facts import inner_module, is_deepspeed, replicated_names
from ..engines.readback.parameters import local
from ..engines.step_recorder import StepRecorder
from . import loss_graph
from .checksums import Checksum, checksums, of_batch, of_weights
from .continuity import Contributions, States, repeated
from .loss_graph import Weight
from .packing import Packing
from .reference import Reference
from .unused import Cuts
from .update import Update

_OF_CROSS_ENTROPY = (  # the arguments of cross_entropy, in their order
    "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing",
)  # fmt: skip
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}  # -> position of the first factor
NEAR = 1e-3  # relative tolerance within which two factors count as equal


# Of a gradient: the sum of the first third of its elements, and of all absolute values.
Fingerprint = tuple[float, float]


def scale_between(before: Sequence[Fingerprint], after: Sequence[Fingerprint]) -> float | None:
    """Return the factor, with its sign, by which all gradients were multiplied between two states.

    `before` and `after` are the `marks` of the two states. None if they were not multiplied by one common number, or if
    all of them are zero.
    """
    if len(before) != len(after):
        return None
    # A tensor of zeros does not show the factor.
    pairs = [pair for pair in zip(before, after, strict=True) if pair[0][1] or pair[1][1]]
    factor = _factor_of_sizes([(old_size, new_size) for (_, old_size), (_, new_size) in pairs])
    if factor is None:
        return None
    products = [old * new for (old, size), (new, _) in pairs if abs(old) > NEAR * size]
    signs = {(product > 0) - (product < 0) for product in products}
    return factor if signs <= {1} else -factor if signs == {-1} else None


def growth_between(before: Sequence[Fingerprint], after: Sequence[Fingerprint]) -> float | None:
    """Return the largest factor by which gradients were multiplied, if the others are unchanged or zero.

    None if gradients changed in any other way. The arguments are those of `scale_between`.
    """
    pairs = [pair for pair in zip(before, after, strict=False) if pair[0][1] and pair[1][1]]
    factors = [factor for old, new in pairs if (factor := scale_between([old], [new])) is not None]
    if not factors or len(factors) < len(pairs):
        return None
    largest = max(factors)
    return largest if all(min(abs(f - 1), abs(f / largest - 1)) <= NEAR for f in factors) else None


def _factor_of_sizes(sizes: Sequence[tuple[float, float]]) -> float | None:
    """Return the ratio of the sizes after and before, if it is the same for all pairs.

    None if the ratios differ, or if a size is zero or not finite.
    """
    if not sizes or not all(size and math.isfinite(size) for pair in sizes for size in pair):
        return None
    factors = [new / old for old, new in sizes]
    return factors[0] if max(factors) - min(factors) <= NEAR * max(factors) else None


class Probe(CollectiveProbe):  # type: ignore[no-untyped-call]
    """A probe that also counts in which data types matrix products are computed."""

    def __init__(self) -> None:
        super().__init__(waits=False)
        self.multiplications: Counter[str] = Counter()  # by the name of the data type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name
        if name in _PRODUCTS:
            left, right = args[_PRODUCTS[name] : _PRODUCTS[name] + 2]
            self.multiplications[dtype_name(left.dtype)] += left.numel() * right.shape[-1]
        return result


class Traffic:
    """The collectives of a step, and the bytes that were reduced in each phase of it."""

    def __init__(self) -> None:
        self.reduced = dict.fromkeys(("forward", "backward", "update", "script"), 0)  # bytes reduced in each phase
        self.phase: str | None = None  # the phase of the current call; None between calls
        self.probe = Probe()
        self.last_backward = 0  # bytes reduced in the last backward call
        self._counted = 0  # bytes reduced until the last change of phase

    def enter(self, phase: str | None) -> None:
        """Count collectives from now on for `phase` of the step. None means that they belong to no phase.

        Bytes that were reduced since the last switch are counted for the previous phase.
        """
        before, self._counted = self._counted, self.probe.reduced_bytes()
        if self.phase:
            self.reduced[self.phase] += self._counted - before
        if self.phase == "backward":
            self.last_backward = self._counted - before
        self.phase = phase

    def collectives(self) -> list[Issued]:
        return self.probe.issued()


class Passes:
    """The forward passes of a step."""

    def __init__(self) -> None:
        self.without_gradients = 0  # forward passes without gradients in training mode
        self.is_disturbed = False  # the model was evaluated in between, or a call raised
        # Forward passes with gradients; True: in training mode, False: in evaluation mode.
        self._with_gradients = {True: 0, False: 0}

    def note(self, is_training: bool) -> bool:
        """Count a forward pass that begins, and return whether it is part of training.

        A pass in evaluation mode without gradients is an evaluation. It is not part of training, and it interrupts the
        step.
        """
        if torch.is_grad_enabled():
            self._with_gradients[is_training] += 1
            return True
        self.without_gradients += is_training
        self.is_disturbed = self.is_disturbed or not is_training
        return is_training

    @property
    def number(self) -> int:
        """The number of forward passes with gradients."""
        return sum(self._with_gradients.values())

    @property
    def are_in_evaluation_mode(self) -> bool:
        """Whether the model trains in evaluation mode, without dropout."""
        return self._with_gradients[False] > 0

    @property
    def only_train(self) -> bool:
        """Whether the step consists only of training passes.

        False if the model was evaluated in between, or if a call raised. Also False if passes with gradients ran both
        in training and in evaluation mode, because one kind is then an evaluation.
        """
        return not self.is_disturbed and not all(self._with_gradients.values())


class Losses:
    """The cross-entropies of a step, and the losses on which backward is called."""

    def __init__(self) -> None:
        self.targets: list[int] = []  # the number of targets of each cross-entropy that is a mean
        self.is_ascent = False  # backward was called on a negative multiple of the cross-entropy
        # How much each target of a backward call counts, if the loss is a multiple of a cross-entropy; otherwise None.
        self.weights: list[Weight | None] = []
        self._entropies: list[float] = []  # the cross-entropies of the current or last forward pass

    def on_cross_entropy(self, call: Any, *arguments: Any, **options: Any) -> Any:
        """Call cross_entropy, and record its value and the number of targets that it averages over.

        Targets that are padding do not count. The arguments are read by the signature of PyTorch 2.13.
        """
        result = call(*arguments, **options)
        named = dict(zip(_OF_CROSS_ENTROPY, arguments, strict=False)) | options
        target, reduction = named.get("target"), named.get("reduction", "mean")
        if isinstance(result, torch.Tensor) and result.requires_grad and isinstance(target, torch.Tensor):
            if result.numel() == 1:
                self._entropies.append(float(result.detach()))
            if reduction == "mean" and not target.is_floating_point():
                self.targets.append(int((target != named.get("ignore_index", -100)).sum()))
        return result

    def note_backward(self, tensors: Any, grad_tensors: Any, scale: float) -> None:
        """Record how much targets count, and whether backward is called on the negative of the cross-entropy.

        The latter is judged only if there is one loss, and the forward pass computed exactly one cross-entropy. `scale`
        is that of a GradScaler.
        """
        leaves = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]
        self.weights.append(_weight_of_targets(leaves, grad_tensors, scale))
        losses = [float(leaf.detach()) for leaf in leaves if leaf.numel() == 1]
        entropies, self._entropies = self._entropies, []
        self.is_ascent = self.is_ascent or (len(losses) == len(entropies) == 1 and losses[0] < 0 < entropies[0])


def _weight_of_targets(losses: list[torch.Tensor], grad_tensors: Any, scale: float) -> Weight | None:
    roots = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    graph = loss_graph.walk(roots, [])
    if graph.has_custom_function or not loss_graph.is_of_targets(graph):
        return None
    given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors or [None] * len(losses))
    try:
        weight = loss_graph.weight(losses, given, graph)
    except RuntimeError:  # a part of the graph cannot be run twice
        return None
    return None if weight is None else weight._replace(of_target=weight.of_target / scale)


class LossScaling:
    """The losses that torch's GradScaler scales in a step."""

    def __init__(self) -> None:
        self.scale_at_update: float | None = None  # by what the gradients are multiplied at the update
        self._last: Any = None  # the scaler of the last loss, until gradients are clipped
        self._scalers: list[Any] = []  # a scaler for each loss that was scaled

    def on_scale(self, call: Any, scaler: Any, *arguments: Any, **options: Any) -> Any:
        self._last = scaler if scaler.is_enabled() else None
        self._scalers += [scaler] if scaler.is_enabled() else []
        return call(scaler, *arguments, **options)

    def on_update(self, call: Any, scaler: Any, *arguments: Any, **options: Any) -> Any:
        self._last = None  # a loss that another model scales later does not belong to this one
        self._scalers = [each for each in self._scalers if each is not scaler or not scaler._per_optimizer_states]
        return call(scaler, *arguments, **options)

    def take_scale(self) -> float | None:
        """Return the factor by which GradScaler has multiplied the gradients at the time of clipping.

        None if they are not scaled: no scaler is in use, its scale is 1, or it has already unscaled them.
        """
        scaler, self._last = self._last, None
        if scaler is None or scaler.get_scale() == 1:
            return None
        stages = [state["stage"].name for state in scaler._per_optimizer_states.values()]
        return None if "UNSCALED" in stages else float(scaler.get_scale())

    @property
    def is_in_use(self) -> bool:
        return bool(self._scalers)

    @property
    def scale(self) -> float:
        """The factor by which the losses of the step are multiplied."""
        return float(self._scalers[-1].get_scale()) if self._scalers else 1.0

    def note_update(self, num_backwards: int) -> None:
        """Record the loss scale at the update, if every loss was scaled and nothing has unscaled the gradients."""
        is_scaled = len(self._scalers) >= num_backwards > 0
        if is_scaled and not any(scaler._per_optimizer_states for scaler in self._scalers):
            self.scale_at_update = self._scalers[-1].get_scale()


class Gradients:
    """The gradients that the optimizer uses in a step, and the backward calls that compute them."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self.num_backwards = 0
        # Some backward call found no gradients before it; DeepSpeed manages its own.
        self.began_clean = is_deepspeed(model)
        self.number = self.num_zero = self.num_missing = 0  # tensors, as the step updates
        self.factor: float | None = None  # by what they are multiplied after the last backward call; None: unknown
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        of_model = set(map(id, model.parameters()))
        # ZeRO's optimizer has master weights, so no parameter may be in both.
        self._ids = updated & of_model or of_model
        self.parameters = self._parameters = [p for p in model.parameters() if p.requires_grad and id(p) in updated]
        self._made: list[Fingerprint] = []  # the marks of the gradients after the last backward call
        self._contributions = Contributions(self._parameters)
        self._of_last_update = list(self.sums().values())  # a step begins within the update before it
        self.are_repeated = False  # the update gets the gradients of the update before it
        self.are_replaced = False  # the update gets gradients that no backward call left
        self.num_too_few = 0  # elements, if the gradients have changed and are too few to tell whether by noise
        self.erased_share = 0.0  # of the elements that the last backward call left; they are zero at the update
        self.growth: float | None = None  # by what some gradients were multiplied, if the rest did not change

    def are_of(self, parameters: Sequence[Any]) -> bool:
        """Return whether any of these parameters belongs to the model that the optimizer updates."""
        return any(id(parameter) in self._ids for parameter in parameters)

    def sums(self) -> dict[int, Checksum]:
        """Return the checksum of each gradient, by the `id` of its parameter."""
        parameters = self._with_gradients()
        return dict(zip(map(id, parameters), checksums(p.grad for p in parameters), strict=True))

    def begin_backward(self, needs_sums: bool) -> dict[int, Checksum]:
        """Count the backward call that begins now, and return the checksums of the gradients before it.

        They are computed only if `needs_sums` is True, or if every backward call of the step so far found gradients
        from before. Otherwise the result is empty.
        """
        self.num_backwards += 1
        self._contributions.begin_backward()
        sums = self.sums() if needs_sums or not self.began_clean else {}
        self.began_clean = self.began_clean or not any(size > 0 for _, size in sums.values())
        return sums

    def end_backward(self) -> None:
        self._made = self._fingerprints()
        self._contributions.end_backward()

    def scale_since_backward(self) -> float | None:
        """Return by what all gradients were multiplied since the last backward call. None if that is unknown."""
        return scale_between(self._made, self._fingerprints())

    @property
    def are_known(self) -> bool:
        """Whether gradients were seen after the last backward call. DeepSpeed keeps them elsewhere."""
        return bool(self._made)

    def compare_with_last_update(self) -> None:
        """Record whether this update uses the gradients of the last one again, with no backward call in between."""
        self.are_repeated = not self.num_backwards and repeated(self.sums().values(), self._of_last_update)

    def note_update(self) -> list[Checksum]:
        """Record how many gradients are zero or missing at the update, and by which factor they changed since backward.

        Returns the checksums of the gradients.
        """
        sums = list(self.sums().values())
        self.number, self.num_zero = len(sums), sums.count((0.0, 0.0))
        self.num_missing = sum(p.grad is None and p.numel() > 0 for p in self._parameters)
        marks = self._fingerprints()
        self.factor, self.growth = scale_between(self._made, marks), growth_between(self._made, marks)
        self.are_replaced = self.factor is None and self._contributions.are_unrelated()
        self.erased_share = self._contributions.erased_share()
        if self.factor is None and self.growth is None and marks != self._made:
            self.num_too_few = self._contributions.num_too_few
        return sums

    def _fingerprints(self) -> list[Fingerprint]:
        """Return two sums of each gradient, from which `scale_between` finds how two states of the gradients differ.

        The first sum is over the first third of the elements, because the sum over all elements is zero for many
        gradients. The second sum is over all absolute values. For a DTensor, only this rank's shard is summed.
        """
        parts = [local(p.grad) for p in self._with_gradients()]
        thirds = checksums(part.reshape(-1)[: max(1, part.numel() // 3)] for part in parts)
        return [(third[0], whole[1]) for third, whole in zip(thirds, checksums(parts), strict=True)]

    def _with_gradients(self) -> list[Any]:
        return [p for p in self._parameters if p.grad is not None and p.grad.numel()]


class Clipping:
    """The calls of PyTorch's gradient clipping in a step."""

    def __init__(self, gradients: Gradients, scaling: LossScaling) -> None:
        self.limit: float | None = None  # None if torch's functions did not clip the model's gradients
        self.scale: float | None = None  # by what GradScaler had multiplied the gradients as they were clipped
        self.cut = 1.0  # by what the last clipping divided the gradients
        self.num_gradients = 0  # gradients that were passed to torch's functions
        self.num_backwards_after = 0  # backward calls after the last clipping, if they changed the gradients
        self.num_backwards_onto = 0  # backward calls that added to gradients that had been clipped
        self._gradients = gradients
        self._scaling = scaling
        # Backward calls before the last clipping, and the gradients after it.
        self._last: tuple[int, list[Checksum]] | None = None
        # Id of a parameter -> its gradient, if the last clipping made it smaller.
        self._shrunk: dict[int, Checksum] = {}

    def begin(self, parameters: Sequence[Any], limit: float) -> dict[int, Checksum]:
        """Record a clipping call that begins, and return the checksums of the gradients before it."""
        self.limit = float(limit)
        scale = self._scaling.take_scale()
        self.scale = self.scale if scale is None else scale
        self.num_gradients += sum(p.grad is not None for p in parameters)
        return self._gradients.sums()

    def end(self, before: dict[int, Checksum]) -> None:
        after = self._gradients.sums()
        self._last = self._gradients.num_backwards, [*after.values()]
        sizes = [(sum(sums[1] for sums in gradients.values())) for gradients in (before, after)]
        self.cut = sizes[0] / sizes[1] if sizes[1] and math.isfinite(sizes[0]) else 1.0
        self._shrunk = {key: sums for key, sums in after.items() if sums[1] < (1 - NEAR) * before[key][1]}

    @property
    def has_shrunk(self) -> bool:
        return bool(self._shrunk)

    def begin_backward(self, sums: dict[int, Checksum]) -> set[tuple[int, Checksum]]:
        """Return the gradients that the last clipping reduced and that have not changed since then.

        `sums` has the checksums of the gradients as a backward call begins. The result has pairs of a parameter's `id`
        and the checksum of its gradient.
        """
        still_clipped, self._shrunk = self._shrunk.items() & sums.items(), {}
        return still_clipped

    def end_backward(self, clipped: set[tuple[int, Checksum]]) -> None:
        self.num_backwards_onto += bool(clipped and clipped - self._gradients.sums().items())

    def note_update(self, sums: list[Checksum]) -> None:
        """Record how many backward calls followed the last clipping.

        The number is 0 if the gradients are still as the clipping left them. `sums` has their checksums at the update.
        """
        num_before, clipped = self._last or (self._gradients.num_backwards, sums)
        self.num_backwards_after = self._gradients.num_backwards - num_before if clipped != sums else 0


def depends_on_mode(module: torch.nn.Module) -> bool:
    """Return whether a model has dropout or batch norm, which work differently in evaluation mode."""
    kinds = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._BatchNorm)
    return any(isinstance(part, kinds) and bool(getattr(part, "p", 1.0)) for part in module.modules())


def _random_state() -> int:
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]
    return zlib.crc32(b"".join(state.numpy().tobytes() for state in states))


class Step:
    """The observations of one step: collectives, forward passes, autocast and PyTorch's gradient clipping.

    Calls are observed from the creation of this object until `close`. `called` is the object that the script calls,
    which may be torch.compile's wrapper. `model` is the model inside it. `optimizer` is the one that does the
    arithmetic. `update` compares the change of the weights with the optimizer's formula. `done` is called with this
    object after the update that `begin_update` announced. `reference` computes the gradients without the engine,
    if `agree` returns True, which is called with the reason why that is not possible on this rank.
    """

    def __init__(
        self, called: Any, model: Any, optimizer: torch.optim.Optimizer, device: str, update: Update, done: Any,
        reference: Reference | None = None, agree: Any = None,
    ) -> None:  # fmt: skip
        self.update = update
        self.reference = reference
        self.states: dict[str, Any] | None = None  # the model states, as the update begins
        self.weights: dict[str, Checksum] = {}  # the weights as the first forward pass begins
        self.replicated: set[str] = set()  # parameters that every rank has in full at that time
        self.batches: list[list[Checksum]] = []  # the inputs of the first two forward passes
        self.autocast_dtype: torch.dtype | None = None
        self.random_state: int | None = None  # a checksum, as the first forward pass begins; None without dropout
        self.cuts = Cuts(model)
        self.packing = Packing()
        self.last_states = States(optimizer)
        self.is_last_update_over = False  # a step begins within the update before it
        self.engine_backwards = 0  # backward calls of DeepSpeed's engine in the last micro batch
        self.passes = Passes()
        self.traffic = Traffic()
        self.losses = Losses()
        self.scaling = LossScaling()
        self.gradients = Gradients(model, optimizer)
        self.clipping = Clipping(self.gradients, self.scaling)
        self._model = model
        self._device = device
        self._done = done
        self._agree = agree
        self._parts = {id(module) for module in model.modules()}
        self._kinds = {type(module) for module in model.modules()}
        self._recorder = StepRecorder(called, model, optimizer)
        self._recorder.listen(
            forward=self._on_forward,
            backward=self._on_backward,
            cross_entropy=self._on_cross_entropy,
            norm=functools.partial(self._under_probe, "update"),
            collective=self._on_collective,
            clipping=self._on_clipping,
            scale=self.scaling.on_scale,
            scaler_update=self.scaling.on_update,
            update=self._on_end_of_last_update,
        )
        if is_deepspeed(model):  # DeepSpeed gathers parameters after the optimizer's own step
            self._recorder.listen(engine_backward=self._on_engine_backward, engine_step=self._on_step)
        else:
            self._recorder.listen(update=self._on_step)

    @property
    def is_whole(self) -> bool:
        """Whether the step consisted only of training."""
        return self.passes.only_train

    @property
    def is_within_last_update(self) -> bool:
        """Whether this step began inside of an update that is still running.

        For example, an optimizer's step may call the step of its base optimizer.
        """
        return not (self.is_last_update_over or self.gradients.num_backwards or self.passes.number)

    def run_reference(self) -> None:
        """Compute the gradient of the step's samples without the engine, if requested. Called on every rank."""
        if self.reference is None or self.reference.report:
            return
        # The ranks agree first, because gathering weights is a collective.
        if not self._agree(self.reference.reason):
            self.reference.report = {"reason": self.reference.reason or "another rank could not compute it"}
            return
        factor = self.gradients.scale_since_backward()
        self.reference.note_gradients(factor, factor is None and self.gradients.are_known)
        self.reference.run()

    def close(self) -> None:
        """Remove all listeners. Further calls have no effect."""
        self._recorder.close()

    def begin_update(self, states: dict[str, Any]) -> None:
        """Record the model states and the gradients as the update of the step begins.

        `states` is the result of `count_states`.
        """
        self.states = states
        sums = self.gradients.note_update()
        self.clipping.note_update(sums)
        self.scaling.note_update(self.gradients.num_backwards)

    def _under_probe(self, phase: str, call: Any, *arguments: Any, **options: Any) -> Any:
        """Make a call while the collective probe is active, and count its traffic for a phase.

        The probe is switched off however the call ends. If a call is made within another one (the engine's backward
        calls torch's), the outer call determines the phase. The forward pass is an exception, because Lightning runs
        backward and update inside it: these count as their own phase.
        """
        outer = self.traffic.phase
        if outer not in (None, "forward") or (outer and phase == "script"):
            return call(*arguments, **options)
        self.traffic.enter(phase)
        try:
            with ExitStack() if outer else without_graphs(), ExitStack() if outer else self.traffic.probe:
                return call(*arguments, **options)
        except BaseException:  # including a KeyboardInterrupt in a notebook
            self.passes.is_disturbed = True
            self.close()
            raise
        finally:
            self.traffic.enter(outer)

    def _on_forward(self, call: Any, *arguments: Any, **options: Any) -> Any:
        if self._is_reference():
            return call(*arguments, **options)
        if self._end():  # a compiled update does not call the listener at its end
            return call(*arguments, **options)
        if not self.passes.note(inner_module(self._model).training):
            self.close()
            return call(*arguments, **options)
        if not self.weights:
            self.weights, self.replicated = of_weights(self._model), replicated_names(self._model)
            self.random_state = _random_state() if depends_on_mode(inner_module(self._model)) else None
            self.update.begin_forward()
        if len(self.batches) < 2:
            self.batches.append(of_batch(arguments, options))
        # The methods are replaced only during the forward pass. While a method of a class is replaced, PyTorch compiles
        # other modules of that class again.
        with ExitStack() as parts:
            for kind in self._kinds:
                parts.enter_context(wrap_function(kind, "__call__", self._on_module))
            if self.reference is not None:
                call = functools.partial(self.reference.forward, call)
            with self.cuts.observed(), self.packing.observed(options):
                result = self._under_probe("forward", call, *arguments, **options)
            self.cuts.end_forward()
            return result

    def _on_collective(self, call: Any, *arguments: Any, **options: Any) -> Any:
        if not self._is_reference():
            self.cuts.note_sent((arguments, options))
        return self._under_probe("script", call, *arguments, **options)

    def _is_reference(self) -> bool:
        """Return whether the samples of the step are run again, which is no part of the step."""
        return self.reference is not None and self.reference.is_running

    def _on_cross_entropy(self, call: Any, *arguments: Any, **options: Any) -> Any:
        if self._is_reference():
            return call(*arguments, **options)
        return self.losses.on_cross_entropy(call, *arguments, **options)

    def _on_module(self, call: Any, module: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        """Record the dtype if a module of the model is called within autocast.

        All modules are observed, because autocast may be active only inside the root's forward method.
        """
        if id(module) in self._parts and torch.is_autocast_enabled(self._device):
            self.autocast_dtype = torch.get_autocast_dtype(self._device)
        result = call(module, *arguments, **options)
        if id(module) in self._parts and any(p is not None for p in module._parameters.values()):
            self.cuts.note_module(module, result)
        return result

    def _on_clipping(self, call: Any, parameters: Any, max_norm: float, *arguments: Any, **options: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # A limit of infinity only measures the norm, and gradients of another model do not belong to this step.
        if not (math.isfinite(max_norm) and self.gradients.are_of(parameters)):
            return self._under_probe("update", call, parameters, max_norm, *arguments, **options)
        if self.reference is not None:
            self.reference.note_gradients()
        before = self.clipping.begin(parameters, max_norm)
        result = self._under_probe("update", call, parameters, max_norm, *arguments, **options)
        self.clipping.end(before)
        return result

    def _on_backward(self, call: Any, *arguments: Any, **options: Any) -> Any:
        if self._is_reference():
            return call(*arguments, **options)
        if self.reference is not None:
            self.reference.note_backward(arguments, options)
        self.cuts.note_backward(arguments[0] if arguments else options.get("tensors"))
        with self.update.in_backward():
            return self._observe_backward(call, *arguments, **options)

    def _observe_backward(self, call: Any, *arguments: Any, **options: Any) -> Any:
        if self.traffic.phase not in (None, "forward"):  # within the engine's own backward
            return self._under_probe("backward", call, *arguments, **options)
        sums = self.gradients.begin_backward(needs_sums=self.clipping.has_shrunk)
        clipped = self.clipping.begin_backward(sums)
        tensors, grad_tensors = (
            arguments[i] if len(arguments) > i else options.get(name)
            for i, name in enumerate(("tensors", "grad_tensors"))
        )
        self.losses.note_backward(tensors, grad_tensors, self.scaling.scale)
        result = self._under_probe("backward", call, *arguments, **options)
        self.gradients.end_backward()
        self.clipping.end_backward(clipped)
        return result

    def _on_engine_backward(self, call: Any, *arguments: Any, **options: Any) -> Any:
        self.engine_backwards += bool(self._model.is_gradient_accumulation_boundary())
        return self._under_probe("backward", call, *arguments, **options)

    def _on_end_of_last_update(self, call: Any, *arguments: Any, **options: Any) -> Any:
        result = call(*arguments, **options)
        if self.states is None:
            self.is_last_update_over = True
            self.last_states.note_left()
        return result

    def _on_step(self, call: Any, *arguments: Any, **options: Any) -> Any:
        if self.reference is not None and is_deepspeed(self._model) and self._model.is_gradient_accumulation_boundary():
            self.run_reference()  # DeepSpeed's step releases its gradients
        result = self._under_probe("update", call, *arguments, **options)
        self._end()
        return result

    def _end(self) -> bool:
        """End the step if its update has been made, and return whether that is the case.

        A step is created during the previous update, and the end of that update must not end it.
        """
        if self.states is None:
            return False
        self.traffic.enter(self.traffic.phase)
        self.close()
        self._done(self)
        return True
