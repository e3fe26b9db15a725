"""Find the tensors of a rank's model states, wherever an engine stores them, and count their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .parameters import local


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists and dicts."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        yield from (t for value in values.values() for t in _tensors(value))
    elif isinstance(values, (list, tuple)):
        yield from (t for value in values for t in _tensors(value))


def _stored(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in which this rank stores a tensor.

    For FSDP2, this is the rank's part. For a quantized tensor of torchao, these are its values and its scales.
    """
    part: Any = local(tensor)
    if is_traceable_wrapper_subclass(part):
        yield from (inner for name in part.__tensor_flatten__()[0] for inner in _stored(getattr(part, name)))
    else:
        yield part


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage. For a fake tensor, which has no memory, use the storage object."""
    storage = tensor.untyped_storage()
    return storage._cdata if isinstance(tensor, FakeTensor) else storage.data_ptr()


class StorageCounter:
    """A counter of bytes that counts each storage only once, for the first category that claims it."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self.by_device: dict[str, int] = {}

    def claim(self, tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
        """Count the bytes of these tensors' storages, without storages that were counted before.

        Return the bytes of these storages, and the bytes of them that the tensors cover.
        """
        num_bytes = 0
        covered: dict[tuple[int, Any], int] = {}
        new: set[int] = set()
        for tensor in (part for t in tensors for part in _stored(t)):
            storage = tensor.untyped_storage()
            if tensor.device.type == "meta" or storage.nbytes() == 0:
                continue
            pointer = _address(tensor)
            if pointer not in self._seen:
                self._seen.add(pointer)
                new.add(pointer)
                num_bytes += storage.nbytes()
                kind = tensor.device.type
                self.by_device[kind] = self.by_device.get(kind, 0) + storage.nbytes()
            if pointer in new:
                size = tensor.numel() * tensor.element_size()
                covered[(pointer, tensor.storage_offset())] = max(
                    size, covered.get((pointer, tensor.storage_offset()), 0)
                )
        return num_bytes, min(num_bytes, sum(covered.values()))


def engine_tensors(model: Any, optimizer: Any) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of each model state on this rank, from wherever the engine keeps them.

    `model` is the prepared model, and `optimizer` the innermost ZeRO or torch optimizer. DeepSpeed's flat buffers are
    read by the names of release 0.19 (deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, for bf16 stage 1
    bf16_optimizer.py, and for 16 bits at stage 0 fp16/unfused_optimizer.py or, with a fused Adam, fused_optimizer.py).
    """
    parameters = list(model.parameters())
    base = getattr(optimizer, "optimizer", optimizer)  # the torch optimizer inside a ZeRO optimizer
    base = getattr(base, "optim", base)  # or inside PyTorch's ZeroRedundancyOptimizer
    masters = [
        *_tensors(getattr(optimizer, "single_partition_of_fp32_groups", [])),
        *_tensors(getattr(optimizer, "fp32_partitioned_groups_flat", [])),
        *_tensors(getattr(optimizer, "fp32_groups_flat_partition", [])),
        *_tensors(getattr(optimizer, "fp32_groups", [])),
        *_tensors(getattr(optimizer, "fp32_groups_flat", [])),
    ]
    states = list(_tensors([dict(state) for state in base.state.values()]))
    working = [
        *(p.data for p in parameters),
        *(p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")),
        *(t for p in parameters if (t := getattr(p, "ds_secondary_tensor", None)) is not None),
        *_tensors(getattr(optimizer, "bit16_groups_flat", [])),
        *_tensors(getattr(optimizer, "bf16_groups_flat", [])),
        *_tensors(getattr(optimizer, "lp_param_buffer", None)),
    ]
    gradients = [
        *_tensors(getattr(optimizer, "averaged_gradients", {})),
        *_tensors(getattr(optimizer, "all_grad_tensors", {})),
        *_tensors(getattr(optimizer, "grad_partitions_flat_buffer", None)),
        *_tensors(getattr(optimizer, "accumulated_grads_in_cpu", {})),
        *_tensors(getattr(optimizer, "fp32_groups_gradients_flat", [])),
        *(t.grad for t in [*parameters, *masters] if t.grad is not None),
    ]
    buckets = [bucket.buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values()]
    return {
        "parameters": working,
        "gradients": gradients,
        "optimizer_states": [*masters, *states],
        "communication_buffers": list(_tensors(buckets)),
    }


def count_states(model: Any, optimizer: Any, bucket_bytes: int | None = None) -> dict[str, Any]:
    """Return the bytes of the model states in this rank's memory, by their names in `ModelStateBytes`.

    `bucket_bytes` is the size of DDP's buckets; None if the engine is not DDP, or if buckets are not to be counted.
    """
    counter = StorageCounter()
    tensors = engine_tensors(model, optimizer)
    counts = {name: counter.claim(tensors[name])[0] for name in ("parameters", "optimizer_states")}
    # Stages 1 and 2 keep their gradients as views of whole buffers. The rest of a buffer does not count as gradients.
    storage_bytes, counts["gradients"] = counter.claim(tensors["gradients"])
    counts["communication_buffers"] = (
        storage_bytes - counts["gradients"] + counter.claim(tensors["communication_buffers"])[0]
    )
    if bucket_bytes is not None:
        gradients = tensors["gradients"]
        # Gradients that share storages are views of the buckets, so these buckets are already counted.
        if len({_address(g) for g in gradients}) < len(gradients):
            bucket_bytes -= storage_bytes
        counts["communication_buffers"] += bucket_bytes
        kind = tensors["parameters"][0].device.type
        counter.by_device[kind] = counter.by_device.get(kind, 0) + bucket_bytes
    return {**counts, "by_device": counter.by_device}
