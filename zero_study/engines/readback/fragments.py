"""Find which elements of which parameter are in each tensor that an optimizer updates.

ZeRO and FSDP1 give the optimizer flat tensors with parts of several parameters. Reads only this rank, without
collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .facts import inner_module
from .parameters import local, whole_size


class Fragment(NamedTuple):
    """The part of a parameter that an optimizer's tensor contains. Counts and offsets are in elements."""

    name: str
    parameter: Any  # of the model; None if it is unknown
    tensor_start: int  # where the part begins in the flattened tensor of the optimizer
    parameter_start: int  # where it begins in the flattened parameter
    size: int


def fragments_of(model: Any, optimizer: Any) -> dict[int, list[Fragment]]:
    """Return the part of a parameter in each tensor that an optimizer updates, by the `id` of the tensor.

    `optimizer` is the one that holds the model states: DeepSpeed's own, or torch's. A tensor that is missing in the
    result is one whose parameters are unknown.
    """
    named = {id(parameter): (name, parameter) for name, parameter in inner_module(model).named_parameters()}
    found: dict[int, list[Fragment]] = {}
    for key, (name, parameter) in named.items():
        if not hasattr(parameter, "ds_tensor"):
            found[key] = [Fragment(name, parameter, 0, 0, local(parameter).numel())]
    for tensor, fragment in (
        *_of_flat(named, optimizer),
        *_of_stage_3(named, optimizer),
        *_of_masters(named, optimizer),
    ):
        found.setdefault(id(tensor), []).append(fragment)
    return found


def elements(tensor: Any, fragment: Fragment, stride: int = 1) -> torch.Tensor:
    """Return a copy of the elements of one fragment in an optimizer's tensor, as a flat float64 tensor on the CPU.

    `tensor` is the tensor itself, its gradient or one of its states. With `stride`, only every so many elements are
    copied.
    """
    flat = local(tensor).detach().reshape(-1)[fragment.tensor_start : fragment.tensor_start + fragment.size : stride]
    return flat.cpu().to(torch.float64, copy=True)


def _of_flat(named: dict[int, Any], optimizer: Any) -> Iterator[tuple[torch.Tensor, Fragment]]:
    """Yield the fragments in the flat master weights of ZeRO stages 1 and 2, and of DeepSpeed's bf16 optimizer."""
    flat = [
        *(getattr(optimizer, "single_partition_of_fp32_groups", None) or ()),
        *(getattr(optimizer, "fp32_groups_flat_partition", None) or ()),
    ]
    for name, parameter in named.values():
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            continue
        begin, end = mapping.hp_fragment_address, mapping.lp_fragment_address
        for tensor in flat:
            if tensor.data_ptr() + begin.start * tensor.element_size() == mapping.hp_fragment.data_ptr():
                yield tensor, Fragment(name, parameter, int(begin.start), int(end.start), int(begin.numel))


def _of_stage_3(named: dict[int, Any], optimizer: Any) -> Iterator[tuple[torch.Tensor, Fragment]]:
    """Yield the fragments in the flat master weights of ZeRO stage 3, without padding."""
    positions = getattr(optimizer, "grad_position", None) or {}
    for name, parameter in named.values():
        if not hasattr(parameter, "ds_tensor") or not positions:
            continue
        position = positions.get(optimizer.get_param_id(parameter))
        if position is not None:
            group, start, size = position
            begin = torch.distributed.get_rank(parameter.ds_process_group) * size
            size = max(0, min(size, whole_size(parameter) - begin))
            yield optimizer.fp32_partitioned_groups_flat[group], Fragment(name, parameter, start, begin, size)


def _of_masters(named: dict[int, Any], optimizer: Any) -> Iterator[tuple[torch.Tensor, Fragment]]:
    """Yield the whole parameters of the master weights that DeepSpeed keeps one by one at stage 0 in 16 bits."""
    halves, masters = (getattr(optimizer, name, None) or () for name in ("fp16_groups", "fp32_groups"))
    for parameters, tensors in zip(halves, masters, strict=False):
        if not isinstance(tensors, (list, tuple)) or len(parameters) != len(tensors):
            continue
        for parameter, tensor in zip(parameters, tensors, strict=True):
            name, _ = named.get(id(parameter), (None, None))
            if name is not None and tensor.shape == parameter.shape:
                yield tensor, Fragment(name, parameter, 0, 0, tensor.numel())
