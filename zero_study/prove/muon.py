"""Exchange the parts of a sharded matrix between ranks, for Muon's formula, which needs the whole matrix.

Each rank sends its parts with its report, as text. Rank 0 puts the matrix together and applies the formula. Without an
engine, DeepSpeed's Muon orthogonalizes a matrix in the update. ZeRO does it earlier, so the gradients that reach the
optimizer are no gradients any more. For ZeRO, the gradients are therefore taken from the backward passes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from ..engines.optimizer_formulas import UpdateInputs
from ..engines.readback.facts import inner_module
from ..engines.readback.fragments import Fragment, elements
from ..engines.readback.parameters import whole_shape, whole_size

LARGEST_MATRIX = 2**22  # elements of a matrix that is checked as a whole; the formula then takes seconds on a CPU
MOST_EXCHANGED = 2**24  # elements of a matrix, times the ranks, because under ZeRO each rank sends its own gradient
MATRICES_OF_GROUP = 2  # parameters of each group that are checked as a whole, the smallest ones

_MARK = "zero-study"  # of a node of the graph that has a hook
Shard = dict[str, Any]  # what a rank sends of a matrix; may be written as JSON


def packed(values: torch.Tensor, start: int) -> dict[str, Any]:
    """Encode a part of a flattened matrix as text (float32), with the index of its first element."""
    data = values.detach().reshape(-1).to("cpu", torch.float32).numpy().tobytes()
    return {"start": start, "values": base64.b64encode(data).decode()}


def unpacked(parts: Iterable[dict[str, Any]], shape: Sequence[int]) -> torch.Tensor | None:
    """Return the whole matrix in float64, from the parts of all ranks. None if elements are missing."""
    whole = torch.full((math.prod(shape),), torch.nan, dtype=torch.float64)
    for part in parts:
        values = torch.frombuffer(bytearray(base64.b64decode(part["values"])), dtype=torch.float32)
        whole[part["start"] : part["start"] + len(values)] = values.double()
    return None if bool(whole.isnan().any()) else whole.reshape(tuple(shape))


def put_together(shards: Sequence[Shard], device: torch.device) -> tuple[UpdateInputs, torch.Tensor] | None:
    """Return the gradient that the optimizer used for a matrix, and the change of the matrix, from all ranks' shards.

    None if parts are missing. `shards` has what the ranks sent.
    """
    shape = shards[0]["shape"]

    def whole(key: str) -> torch.Tensor | None:
        return unpacked((shard[key] for shard in shards if key in shard), shape)

    weight, change = whole("weight"), whole("change")
    gradient = _mean_gradient(shards) if shards[0]["has_own_gradients"] else whole("gradient")
    if weight is None or change is None or gradient is None:
        return None
    momentum = whole("momentum_buffer")
    states = {} if momentum is None else {"momentum_buffer": momentum.to(device)}
    settings = next(shard["settings"] for shard in shards if "settings" in shard)
    inputs = UpdateInputs(
        weight.to(device), gradient.to(device), states, settings, None, torch.finfo(torch.float32).eps
    )
    return inputs, change.to(device)


def _mean_gradient(shards: Sequence[Shard]) -> torch.Tensor | None:
    """Return the mean of the ranks' own gradients. None if one is missing."""
    total = torch.zeros(tuple(shards[0]["shape"]), dtype=torch.float64)
    for shard in shards:
        own = unpacked([shard["gradient"]], shard["shape"]) if "gradient" in shard else None
        if own is None:
            return None
        total += own
    return total / len(shards)


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return those settings of a parameter group that JSON can store."""
    plain = {key: float(value) if isinstance(value, torch.Tensor) else value for key, value in group.items()
             if key != "params"}  # fmt: skip
    kinds = (bool, int, float, str, tuple, list, type(None))
    return {key: value for key, value in plain.items() if isinstance(value, kinds)}


class ZeroMuonTracker:
    """The gradients, momenta and master weights of the matrices that DeepSpeed's Muon trains under ZeRO."""

    def __init__(self, model: Any, optimizer: Any, base: Any) -> None:
        """Begin to observe. It has no matrices if the optimizer is another one, or if there is no ZeRO."""
        self.lost: list[str] = []  # the matrices of the model, if Muon trains none of them
        self.shards: dict[str, Shard] = {}
        self._optimizer, self._base = optimizer, base
        self._names: dict[int, str] = {}  # id of a parameter of Muon -> its name
        self._chosen: dict[str, Any] = {}  # name -> parameter, of those to check
        self._gradients: dict[str, torch.Tensor] = {}  # of this rank, added up over the backward passes of the step
        self._weights: dict[str, tuple[Any, Fragment, torch.Tensor]] = {}  # before the update
        if type(base).__name__ != "MuonWithAuxAdam":
            return
        trained = [(name, p) for name, p in inner_module(model).named_parameters() if p.requires_grad]
        muon = [(name, p) for name, p in trained if getattr(p, "use_muon", False)]
        if not muon:
            self.lost = [name for name, p in trained if len(whole_shape(p)) > 1 and not _is_embedding(name)]
        if optimizer is not base:
            self._names = {id(p): name for name, p in muon}
            self._choose()

    @property
    def is_in_use(self) -> bool:
        return bool(self._chosen)

    def has(self, fragment: Fragment) -> bool:
        """Return whether a part of the master weights belongs to a matrix whose gradient ZeRO orthogonalizes."""
        return id(fragment.parameter) in self._names

    def unchecked(self) -> dict[str, str]:
        """Return the reasons why matrices are not checked, by the name of the matrix."""
        names = [name for name in self._names.values() if name not in self.shards]
        return dict.fromkeys(names, "Muon's formula is checked on a few matrices")

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Add up the gradients of the chosen matrices in a `with` block around a backward call.

        The hooks are on the graph of the forward pass, which exists only now. Between the steps, stage 3 has no whole
        parameters, and a hook that is put on them then makes the next backward call fail.
        """
        handles: dict[str, Any] = {}
        with suppress(Exception):  # without its gradient, a matrix is not checked, but the training continues
            handles = {name: self._hook(name) for name, p in self._chosen.items() if _MARK not in _node(p).metadata}
        try:
            yield
        finally:
            for name, handle in handles.items():
                handle.remove()
                _node(self._chosen[name]).metadata.pop(_MARK, None)

    def _hook(self, name: str) -> Any:
        """Add up the gradients of a matrix from now on, and return a handle that removes this hook."""

        def look(gradients: Any) -> None:
            with suppress(Exception):
                added = gradients[0].detach().to("cpu", torch.float32, copy=True)
                self._gradients[name] = self._gradients[name] + added if name in self._gradients else added

        node = _node(self._chosen[name])
        node.metadata[_MARK] = True  # a backward call within this one, as checkpointing makes it, must not add it again
        return node.register_prehook(look)

    def _choose(self) -> None:
        """Choose the smallest matrices of each group. Every rank chooses the same ones."""
        limit = min(LARGEST_MATRIX, MOST_EXCHANGED // dist.get_world_size())
        lists = (getattr(self._optimizer, name, None) for name in ("bit16_groups", "fp16_groups", "bf16_groups"))
        groups: Sequence[Any] = next((each for each in lists if each), ())
        chosen = []
        for group in groups:
            fitting = sorted((whole_size(p), self._names[id(p)], p) for p in group if self._fits(p, limit))
            chosen += fitting[:MATRICES_OF_GROUP]
        for _, name, parameter in sorted(chosen)[: 2 * MATRICES_OF_GROUP]:
            self._chosen[name] = parameter

    def _fits(self, parameter: Any, limit: int) -> bool:
        has_parts = getattr(parameter, "muon_num_heads", None) is not None or getattr(
            parameter, "is_expert_group", False
        )
        shape = whole_shape(parameter)
        return id(parameter) in self._names and len(shape) == 2 and math.prod(shape) <= limit and not has_parts

    def begin_forward(self, fragments: dict[int, list[Fragment]]) -> None:
        """Record the momenta when the step begins, because ZeRO changes them before the optimizer's own update."""
        for name, parameter in self._chosen.items():
            self.shards[name] = {
                "shape": list(whole_shape(parameter)),
                "has_own_gradients": True,
            }
            for flat, state in list(self._base.state.items()):
                buffer = state.get("momentum_buffer")
                part = None if buffer is None else self._momentum(parameter, flat, buffer, fragments)
                if part is not None:
                    self.shards[name]["momentum_buffer"] = part

    def _momentum(
        self, parameter: Any, flat: Any, buffer: torch.Tensor, fragments: dict[int, list[Fragment]]
    ) -> dict[str, Any] | None:
        """Return this rank's part of a parameter's momentum in the flat buffer of a partition. None if it has none."""
        if not hasattr(parameter, "ds_id") and not getattr(self._optimizer, "cpu_offload", False):
            # Stages 1 and 2 keep the whole momentum of each parameter of which this rank updates a part.
            partitions = getattr(self._optimizer, "single_partition_of_fp32_groups", ())
            for tensor, members in zip(partitions, getattr(self._optimizer, "params_in_partition", ()), strict=False):
                start = 0
                for member in members if tensor is flat else ():
                    if member is parameter:
                        return packed(buffer.narrow(0, start, member.numel()), 0)
                    start += member.numel()
            return None
        for fragment in fragments.get(id(flat), []):
            if fragment.parameter is parameter and fragment.size:
                return packed(buffer.narrow(0, fragment.tensor_start, fragment.size), fragment.parameter_start)
        return None

    def note_before(self, group: dict[str, Any], tensor: Any, fragment: Fragment) -> None:
        """Record a part of the master weights at the beginning of the update."""
        if fragment.name in self._chosen and fragment.name in self.shards:
            before = elements(tensor, fragment)
            self._weights[fragment.name] = tensor, fragment, before
            start = fragment.parameter_start
            self.shards[fragment.name] |= {"settings": settings_of(group), "weight": packed(before, start)}

    def end(self) -> None:
        """Complete this rank's shards with gradients and changes of the weights, after the update."""
        for name, (tensor, fragment, before) in self._weights.items():
            self.shards[name]["change"] = packed(elements(tensor, fragment) - before, fragment.parameter_start)
        for name, gradient in self._gradients.items():
            if name in self.shards:
                self.shards[name]["gradient"] = packed(gradient, 0)


def shard_of_matrix(tensor: Any, settings: dict[str, Any]) -> Shard | None:
    """Describe this rank's shard of an FSDP2 matrix that torch.optim.Muon updates, without its elements.

    None if the matrix is not divided by rows, or is too large.
    """
    placements = [placement for placement in tensor.placements if not placement.is_replicate()]
    if len(placements) != 1 or not placements[0].is_shard(0) or tensor.numel() > LARGEST_MATRIX:
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    start = offset[0] * math.prod(tensor.shape[1:])
    return {
        "shape": list(tensor.shape),
        "has_own_gradients": False,
        "settings": settings,
        "start": start,
    }


def _node(parameter: Any) -> Any:
    """Return the node of the graph that accumulates a parameter's gradient. Do not keep it after the backward pass."""
    with torch.enable_grad():
        return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


def _is_embedding(name: str) -> bool:
    """Return whether DeepSpeed leaves a matrix of this name to Adam."""
    return any(word in name.lower() for word in ("embed", "lm_head"))
