"""Read the plain name, the whole shape, this rank's shard and the full value of an engine's parameters.

Wrappers add parts to names. An engine's checkpoint may have them, but a folder for `from_pretrained` must not.

Functions that return full values are collective if the engine shards: every rank must call them for the same parameters
in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DataParallel, DistributedDataParallel

# ---------------------------------------------------------------- names

COMPILED = "_orig_mod"
_DATA_PARALLEL = "module"
# A wrapper's attribute that holds the wrapped module -> what wraps.
WRAPPERS = {
    _DATA_PARALLEL: "DDP or DeepSpeed",
    COMPILED: "torch.compile",
    "_forward_module": "Lightning Fabric",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
ADAPTER_PREFIX = "base_model.model."  # which PEFT adds to each name of its base model
TRAINED_COPY = ".modules_to_save."  # follows the name of a module of which PEFT trains a copy
_REPLACED = ".original_module."  # follows it in the names of the module that the copy replaces
_PREFIX_PARTS = ADAPTER_PREFIX.rstrip(".").split(".")
_COPY_OR_REPLACED = re.compile(r"\.(?:modules_to_save|original_module)(?:\.default)?\.")
_ADAPTER = re.compile(r"(?<=lora_A)\.default(?=\.)|(?<=lora_B)\.default(?=\.)|\.modules_to_save\.default(?=\.)")
_BASE_LAYER = re.compile(r"\.base_layer(?=\.|$)")


def plain_name(name: str, model: Any = None) -> str:
    """Return the name of a parameter or module without the parts that engines and other wrappers add.

    A module of the model itself may be called "module", too. That part is therefore removed only at the start, or where
    the `model` that has the name wraps a part of itself for data parallelism.
    """
    kept: list[str] = []
    owner = model
    for part in name.split("."):
        is_wrapper = part in WRAPPERS
        if part == _DATA_PARALLEL:
            is_at_start = kept == _PREFIX_PARTS * (len(kept) // 2)
            is_data_parallel = isinstance(owner, (DataParallel, DistributedDataParallel))
            is_wrapper = is_at_start or is_data_parallel or hasattr(owner, "zero_optimization_stage")
        if not is_wrapper:
            kept.append(part)
        owner = getattr(owner, part, None)
    return ".".join(kept)


def base_name(name: str) -> str:
    """Return a parameter's name in the base model of an adapter: without the prefixes of PEFT and of wrappers."""
    name = plain_name(name)
    while name.startswith(ADAPTER_PREFIX):
        name = name.removeprefix(ADAPTER_PREFIX)
    return name


def adapter_name(name: str) -> str | None:
    """Return the name of a parameter in the base model, or the name of an adapter's parameter in the adapter's file.

    None if PEFT replaced the parameter by a copy, which has the same name then.
    """
    return None if _REPLACED in name else _ADAPTER.sub("", base_name(name))


def name_among(name: str, known_names: Container[str]) -> str:
    """Return a plain name, or its form without "module" inside if only that form is among the known names.

    Without the model, it is unknown whether such a part belongs to a wrapper.
    """
    shorter = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    return shorter if name not in known_names and shorter in known_names else name


def name_of_copied(name: str) -> str:
    """Return a name without the parts that PEFT adds for modules that it copies (modules_to_save)."""
    return _COPY_OR_REPLACED.sub(".", name)


def without_base_layers(module: str) -> str:
    """Return a module's name without the part ".base_layer" that PEFT adds."""
    return _BASE_LAYER.sub("", module)


def wrapper_of(name: str) -> tuple[str, str] | None:
    """Return the part of a name that a wrapper added, and the wrapper, such as ("_orig_mod.", "torch.compile")."""
    parts = name.removeprefix(ADAPTER_PREFIX).split(".")
    wrapper_part = next((part for part in parts if part in WRAPPERS and part != _DATA_PARALLEL), None)
    if wrapper_part is None and parts[0] == _DATA_PARALLEL:
        wrapper_part = _DATA_PARALLEL
    return None if wrapper_part is None else (f"{wrapper_part}.", WRAPPERS[wrapper_part])


# ---------------------------------------------------------------- shapes and values


def whole_parameters(model: Any) -> list[Any]:
    """Return a model's parameters. Under FSDP1, these are the flat parameters.

    FSDP1's original parameters are only views of a shard.
    """
    flat = [m._handle.flat_param for m in model.modules() if getattr(m, "_handle", None) is not None]
    views = {id(p) for flat_parameter in flat for p in flat_parameter._params or ()}
    distinct = {id(p): p for p in (*flat, *(p for p in model.parameters() if id(p) not in views))}
    return list(distinct.values())


def is_partitioned(parameter: Any) -> bool:
    """Return whether ZeRO stage 3 or FSDP2 manages a parameter, so that this rank may have only a shard of it."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "full_tensor")


def whole_shape(parameter: Any) -> torch.Size:
    """Return the shape of a full parameter, even if this rank stores only a shard of it.

    ZeRO stage 3, FSDP1 and FSDP2 store shards. bitsandbytes stores two elements in one byte.
    """
    if (quantized := getattr(parameter, "quant_state", None)) is not None:
        return torch.Size(quantized.shape)
    of_flat = getattr(parameter, "_unpadded_unsharded_size", None)  # of FSDP1
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape) if of_flat is None else of_flat)


def whole_size(parameter: Any) -> int:
    """Return the number of elements of a full parameter."""
    return whole_shape(parameter).numel()


def whole_bytes(parameter: Any) -> int:
    """Return the bytes of a full parameter in the data type in which the engine stores it."""
    is_packed = hasattr(parameter, "quant_state")  # all of it, in bytes
    return int(parameter.nbytes) if is_packed else whole_size(parameter) * int(parameter.element_size())


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def local_shard(parameter: Any) -> torch.Tensor:
    """Return this rank's shard of a parameter. Under ZeRO stage 3, it is flat and without padding.

    The values of the padding are arbitrary. The shard is used even where stage 3 has the whole parameter in memory,
    because that is the case only for some parameters and only at some times.
    """
    if not hasattr(parameter, "ds_tensor"):
        return local(parameter)
    shard: torch.Tensor = parameter.ds_tensor
    group = getattr(parameter, "ds_process_group", None)
    if group is None:
        return shard
    begin = dist.get_rank(group) * shard.numel()
    return shard.flatten()[: max(0, whole_size(parameter) - begin)]


@contextmanager
def gathered(parameter: Any) -> Iterator[torch.Tensor]:
    """Yield the full value of a parameter, as the model computes with it, for a `with` block. Do not change it.

    FSDP1's parameters are not gathered.
    """
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter.detach()
    else:
        detached = parameter.detach()
        yield detached.full_tensor() if hasattr(detached, "full_tensor") else detached


def full_value(parameter: Any) -> torch.Tensor:
    """Return a copy of the full value of a parameter, as the model computes with it."""
    with gathered(parameter) as value:
        return value if hasattr(parameter, "full_tensor") else value.clone()
