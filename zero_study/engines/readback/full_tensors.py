"""Read complete master weights, gradients and optimizer states from an engine that may shard them.

If the engine shards, the functions that read values of whole tensors are collective: every rank must read the same
parameters in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from .dtypes import dtype_name
from .parameters import local


def kind_of_state(state: Any) -> str:
    """Return the data type of an optimizer state, or the class in which a library quantizes it.

    Examples are "float32" and "OptimState8bit".
    """
    part = local(state)
    is_plain = type(part) in (torch.Tensor, torch.nn.Parameter)
    return dtype_name(part.dtype) if is_plain else type(part).__name__


def master(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return DeepSpeed's complete fp32 master weight of a parameter. None if there is none or it cannot be read."""
    if not (is_of_zero(parameter) and parameter.requires_grad):
        return None
    from deepspeed.utils import safe_get_full_fp32_param

    full = safe_get_full_fp32_param(parameter)
    return None if full is None else full.detach().clone()


def gradient(parameter: Any) -> torch.Tensor | None:
    """Return the complete averaged gradient of a parameter. None if there is none.

    It can be read between the last backward pass of a step and its update.
    """
    if hasattr(parameter, "ds_id"):
        return parameter._z3_optimizer.get_fp32_grad_for_param(parameter)  # type: ignore[no-any-return]
    if is_of_zero(parameter):  # not DeepSpeed's safe_get_full_grad, which prefers this rank's own gradient
        return parameter.get_full_hp_grad()  # type: ignore[no-any-return]
    local: Any = parameter.grad
    return local.full_tensor() if hasattr(local, "full_tensor") else local  # type: ignore[no-any-return]


def have_moments(optimizer: Any, parameters: Iterable[Any]) -> bool:
    """Return whether the ZeRO optimizer has first moments on every rank. Collective: every rank must call it.

    Without this check, a rank without moments would raise an error, and the other ranks would wait forever.
    """
    link_states(optimizer)
    mappings = [getattr(parameter, "_hp_mapping", None) for parameter in parameters]
    lacks = any(state is not None and "exp_avg" not in (state.optim_fragment or {}) for state in mappings)
    lacks_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lacks_by_rank, lacks)
    return not any(lacks_by_rank)


def link_states(optimizer: Any) -> None:
    """Make a ZeRO optimizer of stage 1 or 2 find the optimizer states of all parameters.

    DeepSpeed 0.19.8 looks for them only once, after its first parameter group has stepped. The other groups have no
    states at that time.
    """
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def moment(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the complete first moment of a parameter. None if no ZeRO optimizer has the parameter.

    The optimizer must have moments, which `have_moments` checks.
    """
    return state(parameter, "exp_avg", {})


def state(parameter: torch.Tensor, key: str, states: Mapping[Any, Mapping[str, Any]]) -> torch.Tensor | None:
    """Return a complete optimizer state of a parameter. None if it has no state of that name.

    `states` are the states of the optimizer. They are only used if it is not a ZeRO optimizer.
    """
    if is_of_zero(parameter):
        from deepspeed.utils import safe_get_full_optimizer_state

        return safe_get_full_optimizer_state(parameter, key)  # type: ignore[no-any-return]
    local: Any = states.get(parameter, {}).get(key)
    return local.full_tensor() if hasattr(local, "full_tensor") else local  # type: ignore[no-any-return]


def is_of_zero(parameter: torch.Tensor) -> bool:
    """Return whether a parameter belongs to a ZeRO optimizer, on this rank or on another one."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")
