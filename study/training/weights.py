"""Set the initial weights of a run, equal under every strategy, and take checksums of initial and final weights."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from study.config import RunConfig
from study.engines.readback import full_tensors
from study.engines.readback.facts import base_optimizer, engine_optimizer
from study.records.schema import Checksum, StepDigest
from study.run import Run
from study.training import fixed_order, perturbations
from study.workloads.sources import Splits

DIGEST_DIGITS = 16  # hexadecimal digits of a step's digests
_SUMMED_AT_ONCE = 1 << 24  # elements: a table of words as fp64, whole, would be the highest moment of a sharded run


def build_model(accelerator: Accelerator, workload: ModuleType, splits: Splits, run: Run) -> torch.nn.Module:
    """Build the model so that equal seeds give equal weights under every strategy. Collective.

    Building under zero.Init draws other random numbers than building whole. So where the strategy wants a partitioned
    model, one rank of each machine builds it whole and all there load those weights partitioned.
    """
    config = run.config
    set_seed(config.seed)  # for a published model's new head too
    if not (run.strategy.zero_stage == 3 and run.strategy.zero3_init):
        with unpartitioned():
            model = _whole(workload, splits, config)
        if run.strategy.distributed_type == "FSDP" and config.precision == "bf16":
            _round_to_bf16(model)
        if config.precision == "fp64":
            model.double()
        return model
    folder, builds = run.initial_weights_folder, run.is_first_of_machine(accelerator.process_index)
    if builds:
        with unpartitioned():
            whole: Any = _whole(workload, splits, config)
            whole.should_save_on_this_rank = lambda _: True  # transformers else writes on rank 0 alone (5.23)
            whole.save_pretrained(folder)
            del whole
    accelerator.wait_for_everyone()
    loaded: torch.nn.Module = workload.load_model(config, splits, folder)
    accelerator.wait_for_everyone()
    if builds:
        shutil.rmtree(folder)
    return loaded


def _whole(workload: ModuleType, splits: Splits, config: RunConfig) -> torch.nn.Module:
    model: torch.nn.Module = workload.build_model(config, splits)
    if config.nudge_seed is not None:
        perturbations.move_by_one_unit(model, torch.Generator().manual_seed(config.nudge_seed))
    return model


def _round_to_bf16(model: torch.nn.Module) -> None:
    """Let FSDP2's masters begin as DeepSpeed's do, which copies them from parameters of 16 bits."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()


class unpartitioned:
    """Keep transformers from building under zero.Init, which it does at stage 3 whatever zero3_init_flag says."""

    def __enter__(self) -> None:
        import transformers.integrations.deepspeed as integration

        self._module, self._kept = integration, integration._hf_deepspeed_config_weak_ref
        integration._hf_deepspeed_config_weak_ref = None

    def __exit__(self, *_: Any) -> None:
        self._module._hf_deepspeed_config_weak_ref = self._kept


def make_optimizer(model: torch.nn.Module, config: RunConfig) -> torch.optim.AdamW:
    """The optimizer of every run; an engine that steps on the host puts its own in its place."""
    is_pinned = "optimizer" in fixed_order.pins(config)
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=not is_pinned,
        foreach=False if is_pinned else None,
    )


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two AdamW groups: matrices decay; biases and norms (one dimension) do not."""

    def dimensions(parameter: Any) -> int:
        return len(getattr(parameter, "ds_shape", parameter.shape))  # a partitioned parameter is empty

    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if dimensions(p) > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if dimensions(p) <= 1], "weight_decay": 0.0},
    ]


def num_params(model: torch.nn.Module) -> int:
    """Parameters of the unsharded model, tied ones counted once (the paper's Psi)."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())


def plain_name(name: str) -> str:
    """Return a parameter's name without what torch.compile and an engine put before it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def full_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter whole, gathered one at a time, in the order of their names. Collective."""
    parameter: Any  # an engine adds attributes to some
    for name, parameter in sorted(model.named_parameters()):
        name = plain_name(name)
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach()
        elif hasattr(parameter, "full_tensor"):
            yield name, parameter.detach().full_tensor()
        else:
            yield name, parameter.detach()


def checksum(model: torch.nn.Module) -> Checksum:
    """Sum and hash all parameters of the unsharded model as fp32, or fp64 if they are that.

    Collective; the same on every rank.
    """
    digest = hashlib.sha256()
    absolute = square = 0.0
    for name, tensor in full_parameters(model):
        values = (tensor if tensor.dtype == torch.float64 else tensor.float()).cpu().contiguous()
        digest.update(name.encode())
        digest.update(values.numpy().data)
        for part in torch.split(values.flatten(), _SUMMED_AT_ONCE):
            exact = part.double()
            absolute += exact.abs().sum().item()
            square += exact.square().sum().item()
    return Checksum(absolute_sum=absolute, square_sum=square, sha256=digest.hexdigest())


def digest_states(step: int, model: Any, optimizer: Any) -> StepDigest:
    """Digest all weights and both of Adam's moments, in full, after a step. Collective; the same on every rank."""
    named = sorted(
        (plain_name(name), parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    )
    full_tensors.link_states(engine_optimizer(model, optimizer))
    states = base_optimizer(optimizer).state

    def weight(parameter: Any) -> torch.Tensor | None:
        master = full_tensors.master(parameter) if parameter.dtype in (torch.bfloat16, torch.float16) else None
        return full_tensors.weight(parameter) if master is None else master

    def moment(key: str) -> Callable[[Any], torch.Tensor | None]:
        return lambda parameter: full_tensors.state(parameter, key, states)

    return StepDigest(
        step=step,
        weights=_digest(named, weight) or "",
        first_moments=_digest(named, moment("exp_avg")),
        second_moments=_digest(named, moment("exp_avg_sq")),
    )


def _digest(tensors: list[tuple[str, Any]], read_tensor: Callable[[Any], torch.Tensor | None]) -> str | None:
    """Digest what is read of each parameter; None: of one there is nothing, or it is not of its shape."""
    digest, is_complete = hashlib.sha256(), True
    for name, parameter in tensors:
        tensor = read_tensor(parameter)  # on every rank, also after one that lacks it
        if tensor is None or tensor.numel() != getattr(parameter, "ds_numel", parameter.numel()):
            is_complete = False
            continue
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:DIGEST_DIGITS] if is_complete else None
