"""Order the examples of a run's optimizer steps, and measure the steps' gradient norm, time and FLOPs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils.data import Sampler
from torch.utils.flop_counter import FlopCounterMode

from study.config import RunConfig
from study.records.schema import Timing
from study.training import adapters, fixed_order
from study.workloads.sources import Splits
from zero_study.engines.readback.parameters import local

if TYPE_CHECKING:
    from accelerate import Accelerator


class TrainingOrder(Sampler[int]):
    """The order of all training examples of a run: one seeded permutation per epoch.

    The incomplete last global batch of each epoch is left out. One sampler covers all epochs, and its consecutive micro
    batches go to the ranks in turn. They therefore form the same global batches for every number of processes and every
    accumulation. A resumed run begins after its first `steps_done` steps.
    """

    def __init__(
        self, num_examples: int, global_batch_size: int, num_steps: int, seed: int, steps_done: int = 0
    ) -> None:
        per_epoch = num_examples // global_batch_size * global_batch_size
        generator = torch.Generator().manual_seed(seed)
        order: list[int] = []
        while len(order) < num_steps * global_batch_size:
            order += torch.randperm(num_examples, generator=generator)[:per_epoch].tolist()
        self._order = order[steps_done * global_batch_size : num_steps * global_batch_size]

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


# ---------------------------------------------------------------- the gradient norm


def global_norm(tensors: Iterable[torch.Tensor], is_exact: bool = False) -> torch.Tensor:
    """Return the 2-norm of all tensors together, as exactly as DeepSpeed's stages 1 to 3, which sum in fp64.

    If `is_exact`, all squares are summed in fp64 and the norm is rounded once.

    On a CPU, torch sums the squares of a whole tensor in fp32, so its norm of 31 million gradients is 1.7e-3 too small.
    This function sums each row in fp32 and the rows in fp64, which is correct to 1e-7 and takes no longer. GPUs sum in
    a tree, which is exact enough.
    """
    tensors = list(tensors)
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]  # under FSDP2
    if not sharded:
        return fixed_order.exact_norm(tensors, is_sharded=False) if is_exact else _norm(tensors).to(_norm_type(tensors))
    shards = [local(tensor) for tensor in sharded]
    mesh = sharded[0].device_mesh
    group = mesh.get_group(mesh.ndim - 1)  # sum over the shards only, because all replicas have the same gradients
    if is_exact:
        return fixed_order.exact_norm(shards, group)
    square = _norm([shard for shard in shards if shard.numel()] or shards).square()
    torch.distributed.all_reduce(square, group=group)
    return square.sqrt().to(_norm_type(tensors))


def _norm_type(tensors: list[torch.Tensor]) -> torch.dtype:
    return torch.float64 if tensors[0].dtype == torch.float64 else torch.float32


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of this rank's tensors in double precision."""
    if tensors[0].device.type != "cpu":
        return torch.nn.utils.get_total_norm(tensors).double()
    rows = [torch.linalg.vector_norm(tensor, dim=-1).flatten() for tensor in tensors]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat(rows), dtype=torch.float64)
    return norm


def gradient_norm_reader(accelerator: Accelerator, model: Any, config: RunConfig) -> Callable[[], Any]:
    """Return a function that returns the global gradient norm before clipping, and clips if the engine has not.

    Call the function between the backward pass and the optimizer's step. DeepSpeed clips and steps inside accelerate's
    `backward`.
    """
    is_exact = "norm" in fixed_order.pins(config)
    if accelerator.distributed_type.value != "DEEPSPEED":
        parameters = [p for p in model.parameters() if p.requires_grad]

        def clip() -> torch.Tensor:
            accelerator.unscale_gradients()  # needed for fp16-autocast; does nothing otherwise
            norm = global_norm((p.grad for p in parameters), is_exact)
            if config.gradient_clipping:
                torch.nn.utils.clip_grads_with_norm_(parameters, config.gradient_clipping, norm)
            return norm

        return clip
    if model.zero_optimization_stage():
        norm: Callable[[], Any] = model.get_global_grad_norm
        return norm
    # Stage 0 does not store the norm. Its gradients are unsharded and averaged when the engine steps, so the norm is
    # computed just before that.
    latest: list[torch.Tensor] = []
    take_step = model.step

    def note_norm_and_step(*args: Any, **kwargs: Any) -> Any:
        scaler = model.torch_autocast_z0_gradscaler
        norm = global_norm((p.grad for p in model.module.parameters() if p.requires_grad), is_exact)
        latest[:] = [norm / scaler.get_scale() if scaler else norm]
        return take_step(*args, **kwargs)

    def clip_by_noted_norm() -> None:
        torch.nn.utils.clip_grads_with_norm_(model.module.parameters(), config.gradient_clipping, latest[0])

    model.step = note_norm_and_step
    model.clip_fp32_gradients = clip_by_noted_norm  # the engine's own function clips by torch's inexact norm
    return lambda: latest[0]


# ---------------------------------------------------------------- time and FLOPs


def make_clock(device: torch.device) -> Callable[[], float]:
    """Return a function that waits for the device to finish and then returns the time in seconds."""
    if device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def summarize(
    steps: Sequence[dict[str, float]],
    num_warmup_steps: int,
    probed_steps: Sequence[int],
    resumed_at: Sequence[int] = (),
) -> Timing:
    """Return the statistics of the step times.

    Probed steps do not count, nor do the first `num_warmup_steps` steps of each process. `resumed_at` has the steps
    after which a new process resumed the run. Fields are None if no step is left.
    """
    excluded = {start + n for start in (0, *resumed_at) for n in range(1, num_warmup_steps + 1)} | {*probed_steps}
    timed = [s for s in steps if s["step"] not in excluded]
    seconds = [s["seconds"] for s in timed]
    middle = statistics.median(seconds) if seconds else None
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (None, None, None)
    return Timing(
        num_steps=len(timed),
        num_warmup_steps=num_warmup_steps,
        probed_steps=list(probed_steps),
        median_seconds=middle,
        lower_quartile_seconds=quartiles[0],
        upper_quartile_seconds=quartiles[2],
        data_wait_median_seconds=statistics.median(s["data_wait_seconds"] for s in timed) if timed else None,
        samples_per_second=timed[0]["samples"] / middle if middle is not None else None,
        tokens_per_second=statistics.mean(s["tokens"] for s in timed) / middle if middle is not None else None,
    )


def model_flops_per_sequence(workload: ModuleType, config: RunConfig, splits: Splits) -> int:
    """Return the FLOPs of the forward and backward pass of one sequence.

    Only matrix products count, with two operations per multiply-add. Recomputed activations do not count. A sequence
    has `config.sequence_length` tokens, including padding, because the model computes the padding too.

    `torch.utils.flop_counter` counts on a copy of the model without storage. The copy takes no memory, and the result
    is the same for every strategy. Attention is the eager implementation, because the counter has no formula for the
    CPU's fused kernel. Masked positions of causal attention count. "Model FLOPs" is a term of arXiv:2204.02311,
    appendix B.
    """
    plain = config.model_copy(update={"attention": "eager", "init": "scratch", "weights": None})
    with torch.device("meta"):
        model = adapters.add(workload.build_model(plain, splits), plain)
    with FakeTensorMode():
        _take_from_meta(model)
        ids = torch.zeros(1, config.sequence_length, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids).logits.sum().backward()  # a loss adds no matrix product
    return int(counter.get_total_flops())


def _take_from_meta(model: torch.nn.Module) -> None:
    """Replace a model's tensors on the device "meta" by tensors of a FakeTensorMode, whose values can be asked for.

    `Module.to_empty` does the same, but a fake parameter cannot be swapped.
    """
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                module._parameters[name] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
