"""Set the same initial weights under every strategy, and compute checksums of initial and final weights."""

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
from study.records.schema import Checksum, StepDigest
from study.run import Run
from study.training import adapters, fixed_order, perturbations
from study.workloads.sources import Splits
from zero_study.engines.readback import full_tensors
from zero_study.engines.readback.facts import base_optimizer, engine_optimizer
from zero_study.engines.readback.parameters import full_value, gathered, plain_name, whole_shape, whole_size

DIGEST_DIGITS = 16  # hexadecimal digits of a step's digests
_SUMMED_AT_ONCE = 1 << 24  # elements; a whole embedding table in fp64 would be the memory peak of a sharded run


def build_model(accelerator: Accelerator, workload: ModuleType, splits: Splits, run: Run) -> torch.nn.Module:
    """Return a model whose initial weights depend only on the seed, not on the strategy.

    Collective: every rank must call this.

    Building under zero.Init draws other random numbers than building the whole model. If the strategy partitions the
    model as it is built, one rank of each machine therefore builds the whole model. All ranks of the machine then load
    its weights in partitions. The same is done to load the weights in 4 bits.
    """
    config = run.config
    if not (run.strategy.zero_stage == 3 and run.strategy.zero3_init) and not config.load_in_4bit:
        model = adapters.add(initial_model(workload, splits, config), config)
        if run.strategy.distributed_type == "FSDP" and config.precision == "bf16":
            # FSDP2's master weights then start like those of DeepSpeed, which are copied from 16-bit parameters.
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16().float()
        if config.precision == "fp64":
            model.double()
        return model
    folder, builds = run.initial_weights_folder, run.is_first_of_machine(accelerator.process_index)
    if builds:
        with unpartitioned():
            whole: Any = initial_model(workload, splits, config)
            whole.should_save_on_this_rank = lambda _: True  # otherwise transformers 5.23 writes on rank 0 only
            whole.save_pretrained(folder)
            del whole
    accelerator.wait_for_everyone()
    loaded: torch.nn.Module = workload.load_model(config, splits, folder, **adapters.quantization(config))
    if config.load_in_4bit:
        adapters.keep_scales(loaded)
    loaded = adapters.add(loaded, config)
    accelerator.wait_for_everyone()
    if builds:
        shutil.rmtree(folder)
    return loaded


def initial_model(workload: ModuleType, splits: Splits, config: RunConfig) -> torch.nn.Module:
    """Return the model with the weights that a run starts from, unsharded and without an adapter."""
    set_seed(config.seed)  # also determines the new head of a published model
    with unpartitioned():
        model: torch.nn.Module = workload.build_model(config, splits)
    if config.nudge_seed is not None:
        perturbations.move_by_one_unit(model, torch.Generator().manual_seed(config.nudge_seed))
    return model


class unpartitioned:
    """A context in which transformers does not use zero.Init.

    At stage 3, transformers would otherwise use it, whatever zero3_init_flag says.
    """

    def __enter__(self) -> None:
        import transformers.integrations.deepspeed as integration

        self._module, self._kept = integration, integration._hf_deepspeed_config_weak_ref
        integration._hf_deepspeed_config_weak_ref = None

    def __exit__(self, *_: Any) -> None:
        self._module._hf_deepspeed_config_weak_ref = self._kept


def make_optimizer(model: torch.nn.Module, config: RunConfig) -> torch.optim.AdamW:
    """Return the AdamW optimizer of a run. An engine that updates the weights on the host replaces it with its own."""
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
    """Return AdamW's two parameter groups: matrices with weight decay, and biases and norms without.

    Biases and norms are the parameters with one dimension. Frozen parameters are in neither. If all trained parameters
    are matrices, as in an adapter, there is only the first group.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if len(whole_shape(p)) > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if len(whole_shape(p)) <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def num_params(model: torch.nn.Module, only_trainable: bool = False) -> int:
    """Return the number of parameters of the unsharded model, with tied ones counted once (Psi in the ZeRO paper).

    `only_trainable` leaves out the frozen ones.
    """
    return sum(whole_size(p) for p in model.parameters() if p.requires_grad or not only_trainable)


def full_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the unsharded tensor of every parameter, in the order of their names.

    Parameters are gathered one at a time. Collective: every rank must call this.
    """
    for name, parameter in sorted((plain_name(name), parameter) for name, parameter in model.named_parameters()):
        with gathered(parameter) as value:
            yield name, value


def checksum(model: torch.nn.Module) -> Checksum:
    """Return the sums and the hash of all parameters of the unsharded model, as fp32 (fp64 parameters as fp64).

    The result is the same on every rank. Collective: every rank must call this.
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
    """Return digests of all weights and of Adam's two moments after a step, all unsharded.

    The result is the same on every rank. Collective: every rank must call this.
    """
    named = sorted(
        (plain_name(name), parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    )
    full_tensors.link_states(engine_optimizer(model, optimizer))
    states = base_optimizer(optimizer).state

    def weight(parameter: Any) -> torch.Tensor | None:
        master = full_tensors.master(parameter) if parameter.dtype in (torch.bfloat16, torch.float16) else None
        return full_value(parameter) if master is None else master

    def moment(key: str) -> Callable[[Any], torch.Tensor | None]:
        return lambda parameter: full_tensors.state(parameter, key, states)

    return StepDigest(
        step=step,
        weights=_digest(named, weight) or "",
        first_moments=_digest(named, moment("exp_avg")),
        second_moments=_digest(named, moment("exp_avg_sq")),
    )


def _digest(tensors: list[tuple[str, Any]], read_tensor: Callable[[Any], torch.Tensor | None]) -> str | None:
    """Return the digest of one tensor per parameter, which `read_tensor` reads.

    None if the tensor of a parameter is missing or does not have as many elements as the parameter.
    """
    digest, is_complete = hashlib.sha256(), True
    for name, parameter in tensors:
        tensor = read_tensor(parameter)  # collective: read on every rank, even after an incomplete parameter
        if tensor is None or tensor.numel() != whole_size(parameter):
            is_complete = False
            continue
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:DIGEST_DIGITS] if is_complete else None
