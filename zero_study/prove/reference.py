"""Compare the gradient of a step with that of one process on the same samples, without the engine.

Every rank runs its own samples again, through the bare model with whole weights. By linearity, the sum over the ranks
is the gradient of one process with all samples. The loss of that process is the mean over all targets, if the script's
loss is a multiple of such a mean. This is read from the graph between the loss and the model's outputs.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import numpy
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .. import terminal
from ..engines.readback import full_tensors
from ..engines.readback.facts import inner_module, is_deepspeed
from ..engines.readback.parameters import full_value, is_partitioned, local, whole_bytes, whole_size
from .loss_graph import SAME, Weight, named_factor, walk
from .loss_graph import weight as weight_of
from .muon import packed

MOST_ELEMENTS = 2**15  # of all gradients together that are compared
TOLERANCE = 0.05  # of the length of the gradient; mostly for batches whose targets count slightly differently
TOLERANCE_OF_16_BITS = 0.15
_ENGINES = ("torch.distributed", "deepspeed")  # modules whose hooks on the model's modules are left out

Report = dict[str, Any]  # what a rank found; may be written as JSON


class _Pass:
    """A forward pass of the step: its inputs, its outputs, and the gradient of the loss with respect to them."""

    def __init__(self, arguments: Any, options: Any, device: str) -> None:
        self.inputs = tree_map(_copied, (arguments, options))
        self.random = torch.get_rng_state(), _accelerator_state()
        self.autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        self.edges: dict[int, GradientEdge] = {}  # number of an output -> where its gradient arrives
        self.received: dict[int, torch.Tensor] = {}  # number of an output -> its gradient
        self.weight: Weight | None = None  # of the targets, if the loss function is outside of the model
        self.is_own_loss = False  # the loss is no multiple of a mean over targets, or that is not known

    def watched(self, result: Any) -> Any:
        """Return the outputs of the forward pass whose gradients can be recorded."""
        leaves, shape = tree_flatten(result)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                # A copy, because an engine has hooks on the outputs themselves, which must not run twice.
                leaves[number] = leaf.clone()
                self.edges[number] = get_gradient_edge(leaves[number])
        return tree_unflatten(leaves, shape)


class Reference:
    """The samples of one step, and the gradient that one process would compute for them without the engine."""

    def __init__(self, model: Any, facts: dict[str, Any]) -> None:
        self.is_running = False
        self._model, self._facts = model, facts
        self._passes: list[_Pass] = []
        self._got: dict[str, dict[str, Any]] | None = None  # the gradients of the step, before they are clipped
        self._has_new = False  # a backward pass has added to them
        self._factor: float | None = None  # by what the script had multiplied them
        self._is_changed = False  # the script had changed them, and not by one factor
        self.report: Report = {}
        self._reason = _why_impossible(model, facts)
        trainable = [(name, p) for name, p in inner_module(model).named_parameters() if p.requires_grad]
        self._named = dict(trainable)
        total = sum(whole_size(p) for p in self._named.values())
        self._stride = max(1, math.ceil(total / MOST_ELEMENTS))

    # ------------------------------------------------------------ within the step

    def forward(self, call: Any, *arguments: Any, **options: Any) -> Any:
        """Make a forward pass, and record its inputs and outputs."""
        if self._reason or not torch.is_grad_enabled():
            return call(*arguments, **options)
        recorded = _Pass(arguments, options, self._facts["device"])
        result = recorded.watched(call(*arguments, **options))
        self._passes.append(recorded)
        if not recorded.edges:
            self._reason = "the model returns no tensors that prove can read"
        return result

    def note_backward(self, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        """Record the gradients of the outputs, before backward is called with these arguments."""
        if self._reason:
            return
        self._has_new = True
        tensors = arguments[0] if arguments else options.get("tensors")
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors or ())
        grad_tensors = arguments[1] if len(arguments) > 1 else options.get("grad_tensors")
        weights = (
            [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors or [None] * len(losses))
        )
        try:
            self._forget_if_clean()
            self._note(losses, weights)
        except Exception as error:  # the training continues
            self._reason = f"{type(error).__name__}: {error}"

    def _forget_if_clean(self) -> None:
        """Forget earlier backward passes if their gradients have been erased, for instance those of a GAN's other part.

        FSDP2 and DeepSpeed keep gradients elsewhere until they are averaged, so theirs are never forgotten.
        """
        is_stored_by_engine = self._facts["engine"] not in ("none", "DDP")
        gradients = [p.grad for p in self._named.values() if p.grad is not None]
        if is_stored_by_engine or any(bool(gradient.count_nonzero()) for gradient in gradients):
            return
        for forward_pass in self._passes:
            forward_pass.received, forward_pass.weight, forward_pass.is_own_loss = {}, None, False

    def _note(self, losses: list[Any], weights: list[Any]) -> None:
        edges = {
            (at, number): edge
            for at, forward_pass in enumerate(self._passes)
            for number, edge in forward_pass.edges.items()
        }
        graph = walk([loss.grad_fn for loss in losses if loss.grad_fn is not None],
                      [edge.node for edge in edges.values()])  # fmt: skip
        if graph.has_custom_function:
            self._reason = (
                "the loss uses a custom autograd function, which may not be able to run its backward pass twice"
            )
            return
        if graph.leaves & {id(p) for p in self._named.values()}:
            self._reason = "a part of the loss is computed from the weights, not from the outputs of the model"
            return
        received = torch.autograd.grad(losses, list(edges.values()), weights, retain_graph=True, allow_unused=True)
        of_loss = weight_of(losses, weights, graph)
        num_passes = len({at for (at, _), gradient in zip(edges, received, strict=True) if gradient is not None})
        if of_loss is not None and num_passes > 1:  # they share the targets
            of_loss = of_loss._replace(num_targets=of_loss.num_targets / num_passes)
        for (at, number), gradient in zip(edges, received, strict=True):
            if gradient is None:
                continue
            forward_pass = self._passes[at]
            before = forward_pass.received.get(number)
            forward_pass.is_own_loss = (
                forward_pass.is_own_loss or before is not None or (bool(graph.losses) and of_loss is None)
            )
            forward_pass.weight = of_loss
            forward_pass.received[number] = gradient.detach() if before is None else before + gradient.detach()

    def note_gradients(self, factor: float | None = None, is_changed: bool = False) -> None:
        """Record the gradients of the step after the engine has averaged them, if a backward pass has added to them.

        Under DeepSpeed, every rank must call this before the engine's step. `factor` is by what the script has
        multiplied all gradients since the last backward pass. None if it is unknown. `is_changed` says that it has
        changed them in another way.
        """
        if self._has_new and not self._reason:
            self._has_new = False
            try:
                self._got, self._factor, self._is_changed = self._gradients(), factor, is_changed
            except Exception as error:  # the training continues
                self._reason = f"{type(error).__name__}: {error}"

    def _gradients(self) -> dict[str, dict[str, Any]]:
        gradients = {}
        for name, parameter in self._named.items():
            if is_deepspeed(self._model):
                gradient, start = full_tensors.gradient(parameter), 0
            else:
                gradient, start = parameter.grad, _start_of_shard(parameter)
            if gradient is not None:
                flat = local(gradient).detach().reshape(-1)
                first = -start % self._stride
                gradients[name] = packed(flat[first :: self._stride], (start + first) // self._stride)
        return gradients

    # ------------------------------------------------------------ after the step's backward passes

    @property
    def reason(self) -> str | None:
        """The reason why the reference gradient cannot be computed on this rank. None if it can."""
        if not self._reason and not any(forward_pass.received for forward_pass in self._passes):
            return "no backward pass of the loss was seen"
        return self._reason

    def run(self) -> None:
        """Compute the reference gradient of this rank's samples. All ranks must call this if weights are sharded."""
        self.is_running = True
        try:
            with torch.enable_grad(), _bare(self._model, self._facts["device"]) as parameters:
                self.report = self._run(parameters)
        except Exception as error:  # the training continues
            self._reason = f"{type(error).__name__}: {error}"
        finally:
            self.is_running = False
            self._passes.clear()
        if self._reason:
            self.report = {"reason": self._reason}

    def _run(self, parameters: dict[str, Any]) -> Report:
        own, of_mean = (dict[str, torch.Tensor]() for _ in range(2))
        weights: list[Weight] = []
        is_own_loss = False
        for forward_pass in self._passes:
            if not forward_pass.received:
                continue
            weight = self._again(forward_pass)
            sample = {name: _sampled(p, self._stride) for name, p in parameters.items()}
            for parameter in parameters.values():
                parameter.grad = None
            _add(own, sample, 1.0)
            is_own_loss = is_own_loss or weight is None
            if weight is not None and weight.of_target:
                weights.append(weight)
                _add(of_mean, sample, 1 / weight.of_target)
        return {
            "reason": None,
            "got": self._got or {},
            "factor": self._factor,
            "is_changed": self._is_changed,
            "of_loss": {name: packed(values, 0) for name, values in own.items()},
            "of_mean": None if is_own_loss else {name: packed(values, 0) for name, values in of_mean.items()},
            "weights": weights,
            "has_16_bits": self._has_16_bits(),
        }

    def _again(self, forward_pass: _Pass) -> Weight | None:
        """Make a forward and a backward pass again. Return the weight of its targets, or None if that is not known."""
        arguments, options = forward_pass.inputs
        is_enabled, dtype = forward_pass.autocast
        with (
            _other_random_numbers_kept(),
            torch.random.fork_rng(),
            torch.autocast(self._facts["device"], dtype, enabled=is_enabled),
        ):
            torch.set_rng_state(forward_pass.random[0])
            if forward_pass.random[1] is not None:
                torch.cuda.set_rng_state(forward_pass.random[1])
            leaves, _ = tree_flatten(inner_module(self._model)(*arguments, **options))
        outputs = [leaves[number] for number in forward_pass.received]
        gradients = list(forward_pass.received.values())
        weight = forward_pass.weight
        if weight is None and not forward_pass.is_own_loss:
            weight = weight_of(outputs, gradients, walk([output.grad_fn for output in outputs], []))
        torch.autograd.backward(outputs, gradients)
        return weight

    def _has_16_bits(self) -> bool:
        types = {p.dtype for p in self._model.parameters()}
        return bool(types & {torch.bfloat16, torch.float16}) or "16" in str(self._facts["precision"]) or any(
            forward_pass.autocast[0] for forward_pass in self._passes)  # fmt: skip


def _why_impossible(model: Any, facts: dict[str, Any]) -> str | None:
    inner = inner_module(model)
    if any(isinstance(part, (DistributedDataParallel, FullyShardedDataParallel)) for part in inner.modules()):
        return "the model contains DDP or FSDP1"
    ranks = facts["data_parallel_ranks"]
    if facts["world_size"] > 1 and (ranks is None or len(ranks) != facts["world_size"]):
        return "not all ranks average their gradients with each other"
    if facts["engine"] == "DeepSpeed" and facts["precision"] == "fp16":
        return "DeepSpeed scales the loss"
    needed = 3 * sum(map(whole_bytes, inner.parameters()))
    free = _free_bytes(facts["device"])
    if free is not None and needed > free:
        return f"whole weights and gradients take {needed / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB are free"
    return None


def _free_bytes(device: str) -> int | None:
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    with suppress(ValueError, OSError, AttributeError):  # systems without these names
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _accelerator_state() -> Any:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else None


@contextmanager
def _other_random_numbers_kept() -> Iterator[None]:
    before = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])


def _copied(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _sampled(parameter: Any, stride: int) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros(len(range(0, parameter.numel(), stride)), dtype=torch.float64)
    return parameter.grad.detach().reshape(-1)[::stride].cpu().double()  # type: ignore[no-any-return]


def _add(total: dict[str, torch.Tensor], values: dict[str, torch.Tensor], factor: float) -> None:
    for name, value in values.items():
        total[name] = total.get(name, torch.zeros_like(value)) + factor * value


def _start_of_shard(parameter: Any) -> int:
    """Return the number of the first element of this rank's shard. Raises ValueError if a shard is not of rows."""
    shards = [placement for placement in getattr(parameter, "placements", ()) if not placement.is_replicate()]
    if not shards:
        return 0
    if len(shards) != 1 or not shards[0].is_shard(0):
        raise ValueError("a parameter is not sharded by rows")
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return int(offset[0] * math.prod(parameter.shape[1:]))


# ---------------------------------------------------------------- the bare model


@contextmanager
def _bare(model: Any, device: str) -> Iterator[dict[str, Any]]:
    """Within a `with` block, let the model have whole weights and no hooks of an engine.

    Yields the trainable weights, by name. A collective, if the engine shards the weights.
    """
    inner = inner_module(model)
    whole = {
        id(p): torch.nn.Parameter(full_value(p).to(device), requires_grad=p.requires_grad)
        for p in inner.parameters()
        if p.requires_grad or is_partitioned(p)
    }
    trainable = {name: whole[id(p)] for name, p in inner.named_parameters() if p.requires_grad}
    buffers = [(buffer, buffer.detach().clone()) for buffer in inner.buffers()]
    with ExitStack() as stack:
        for module in inner.modules():
            stack.enter_context(_with_weights(module, whole))
        try:
            yield trainable
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


@contextmanager
def _with_weights(module: torch.nn.Module, whole: dict[int, Any]) -> Iterator[None]:
    before = dict(module.__dict__)  # a forward pass may change attributes, such as a counter
    parameters = {name: whole.get(id(p), p) for name, p in before["_parameters"].items()}
    module.__dict__["_parameters"] = parameters
    for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
        hooks = before.get(name) or {}
        module.__dict__[name] = type(hooks)((key, hook) for key, hook in hooks.items() if not _is_of_engine(hook))
    if "_flat_weights" in before:  # of a recurrent network
        module.__dict__["_flat_weights"] = [parameters.get(name) for name in module._flat_weights_names]  # type: ignore[union-attr]
    try:
        yield
    finally:
        module.__dict__.clear()
        module.__dict__.update(before)


def _is_of_engine(hook: Any) -> bool:
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", "")).startswith(_ENGINES)


# ---------------------------------------------------------------- of all ranks


class Judgment(NamedTuple):
    """The result of comparing a step's gradient with that of one process."""

    findings: list[str]
    not_checked: list[str]  # what of it could not be checked, and why
    num_checked: int  # elements of gradients
    numbers: dict[str, Any]  # for proof.json
    notes: tuple[str, ...] = ()


def judge(reports: Sequence[Report], averages: bool, is_requested: bool = True) -> Judgment:
    """Compare the ranks' gradient with that of one process. `averages` tells if the engine averages over ranks.

    If the user did not request it, only another direction counts, with targets that count equally. Other differences
    can be meant.
    """
    reasons = [
        report.get("reason", "a rank could not compute its part of the reference")
        for report in reports
        if "got" not in report
    ]
    if reasons:
        return Judgment([], [reasons[0]], 0, {})
    is_own_loss = any(report["of_mean"] is None for report in reports)
    key, divisor = ("of_loss", float(len(reports))) if is_own_loss else (
        "of_mean", sum(number for report in reports for _, number in report["weights"]))  # fmt: skip
    actual, expected = _gathered(reports, key)
    if not divisor or not actual.numel():
        return Judgment([], ["the step had no targets or no gradients"], 0, {})
    expected = expected / divisor
    length, expected_length = float(actual.norm()), float(expected.norm())
    if not (math.isfinite(length) and math.isfinite(expected_length) and expected_length):
        return Judgment([], ["a gradient is zero or not finite"], 0, {})
    ratio, cosine = length / expected_length, float(actual @ expected) / (length * expected_length) if length else 0.0
    difference = float((actual - expected).norm()) / expected_length
    tolerance = TOLERANCE_OF_16_BITS if any(report["has_16_bits"] for report in reports) else TOLERANCE
    numbers: dict[str, Any] = {
        "norm_ratio": ratio,
        "cosine": cosine,
        "difference": difference,
        "loss_is_own": is_own_loss,
    }
    if averages and any(report.get("is_changed") for report in reports):
        return Judgment([], ["the script changes gradients after the last backward pass, and not by one factor"], 0, {})
    not_checked = ["the script's loss is not a mean that a loss function of PyTorch computed, so its scale is unknown"]
    findings: list[str] = []
    notes: list[str] = []
    if difference > tolerance and (averages or not is_own_loss or cosine < 1 - tolerance):
        factors = [report["factor"] or 0.0 for report in reports]
        factor = factors[0]
        if factor and all(abs(each / factor - 1) < SAME for each in factors) and not _named_factor(factor, reports):
            numbers["factor_of_script"] = factor  # a division by a number of ranks would be no clipping
        if float((actual / numbers.get("factor_of_script", 1.0) - expected).norm()) <= tolerance * expected_length:
            notes = [
                f"the script multiplied all gradients by {factor:.4g} after the last backward pass, as clipping does. "
                "Before that, the gradient was that of one process."
            ]
        elif is_requested or (cosine < 1 - tolerance and not _has_unequal_targets(reports, tolerance)):
            findings = [_finding(reports, ratio, cosine, tolerance, is_own_loss)]
    return Judgment(findings, not_checked if is_own_loss else [], actual.numel(), numbers, tuple(notes))


def _gathered(reports: Sequence[Report], key: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements of the gradient of the step, and the sum of the ranks' references."""
    actual, expected = [], []
    for name, first in reports[0][key].items():
        total = torch.zeros_like(_values(first))
        own = torch.zeros_like(total)
        for report in reversed(reports):  # if each rank has the whole gradient, that of rank 0 counts
            total += _values(report[key][name]) if report[key] and name in report[key] else 0
            if (part := report["got"].get(name)) is not None:
                values = _values(part)
                own[part["start"] : part["start"] + len(values)] = values
        actual.append(own)
        expected.append(total)
    return (torch.cat(actual), torch.cat(expected)) if actual else (torch.empty(0), torch.empty(0))


def _values(part: dict[str, Any]) -> torch.Tensor:
    import base64

    data = bytearray(base64.b64decode(part["values"]))
    return torch.frombuffer(data, dtype=torch.float32).double() if data else torch.empty(0, dtype=torch.float64)


def _finding(reports: Sequence[Report], ratio: float, cosine: float, tolerance: float, is_own_loss: bool) -> str:
    num_ranks = len(reports)
    begin = f"the gradient is not that of one process with the same samples on {terminal.count(num_ranks, 'rank')}"
    if cosine > 1 - tolerance:
        name = _named_factor(ratio, reports)
        return (
            f"{begin}: it is {ratio:.4g} times as long{name}, in the same direction (cosine "
            f"{cosine:.3f}). Look at what the loss is divided by."
        )
    if cosine < tolerance - 1:
        return f"{begin}: it has the opposite direction (cosine {cosine:.3f}) and is {ratio:.4g} times as long."
    if not is_own_loss and _has_unequal_targets(reports, tolerance):
        weights = [abs(weight) for report in reports for weight, _ in report["weights"]]
        return (
            f"{begin}: a target in one micro batch counts up to {max(weights) / min(weights):.3g} times "
            f"as much as a target in another micro batch. The gradient is {ratio:.4g} times as long, and "
            f"the cosine is {cosine:.3f}. Divide the sum of "
            "the losses by the number of targets of the whole step on all ranks."
        )
    return (
        f"{begin}: it is {ratio:.4g} times as long, and the cosine is {cosine:.3f}. Look for "
        "contributions to the gradient that are lost or counted twice."
    )


def _has_unequal_targets(reports: Sequence[Report], tolerance: float) -> bool:
    weights = [abs(weight) for report in reports for weight, _ in report["weights"]]
    return bool(weights) and max(weights) > (1 + tolerance) * min(weights)


def _named_factor(ratio: float, reports: Sequence[Report]) -> str:
    targets = [number for report in reports for _, number in report["weights"]]
    return named_factor(ratio, len(reports), max(len(report["weights"]) for report in reports), targets)
