"""Train the exact problem on one rank of an engine, and compare all gradients, weights and momenta exactly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from study.config import build_config
from study.exact import faults, model, problem, reference
from study.exact.cells import Cell
from study.run import Run
from study.training.accelerators import build_accelerator
from zero_study.engines.readback import full_tensors
from zero_study.engines.readback.facts import base_optimizer
from zero_study.engines.readback.parameters import full_value, plain_name
from zero_study.errors import RunFailed
from zero_study.models import suited_buckets
from zero_study.ranks import worlds
from zero_study.strategy.file import Strategy

# ZeRO stage 3 shards parameters with more elements than this, if the strategy does not set the threshold. The default
# of 100,000 is more than this model has. With this value, matrices are sharded and biases are not, as in a real model.
PERSISTENCE_THRESHOLD = 50


def train(cell: Cell, rank: int, folder: Path) -> dict[str, Any]:
    """Join a training as one rank, run its steps, and return how the bits compare with the reference.

    The result has the first `difference` or None, the digests of the last step (`sha256`), and the number of compared
    tensors (`compared`). Collective.
    """
    if cell.strategy_file.distributed_type != "NO":  # a launcher sets no world for a single process
        worlds.join(rank, cell.num_ranks, folder)
    training = Training(cell, folder)
    for step in range(problem.NUM_STEPS):
        training.take_step(step)
    training.compare_momenta(problem.NUM_STEPS - 1)
    if dist.is_initialized():
        dist.barrier()  # no rank leaves while another still reads
    return {"difference": training.difference, "sha256": training.sha256, "compared": training.num_compared}


class Training:
    """A training of the exact problem with an engine that is built like the engine of a run."""

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell, self.rank = cell, dist.get_rank() if dist.is_initialized() else 0
        self.step = 0
        self.expected = reference.expect()
        self.difference: dict[str, Any] | None = None
        self.sha256: dict[str, str] = {}  # of the last step's gradient, weights and momentum
        self.num_compared = 0  # the number of compared tensors, over all steps
        self.before_update: list[Callable[[], None]] = []  # what a planted fault does between backward pass and update
        self.update: Callable[[], None] | None = None
        fault = faults.FAULTS[cell.fault] if cell.fault else None
        if fault and fault.before_engine:
            fault.plant(self)
        run = _run(cell, folder)
        self.accelerator = build_accelerator(run)
        fit_engine_config(self.accelerator, run.strategy)
        self.module = self._build(run.strategy)
        matrices = [p for name, p in self.module.named_parameters() if not name.endswith("bias")]
        vectors = [p for name, p in self.module.named_parameters() if name.endswith("bias")]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "lr": 2.0**-problem.VECTOR_RATE_BITS}]
        optimizer = torch.optim.SGD(
            groups,
            lr=2.0**-problem.MATRIX_RATE_BITS,
            momentum=problem.MOMENTUM,
        )
        self.model, self.optimizer = self.accelerator.prepare(self.module, optimizer)
        self.is_deepspeed = run.strategy.distributed_type == "DEEPSPEED"
        if run.strategy.distributed_type == "FSDP":
            self.module = self.model
        self.base = base_optimizer(self.optimizer)
        _check_engine(self.model, self.base, run.strategy)
        if self.is_deepspeed:  # accelerate's backward pass includes its step
            self._step_of_engine, self.model.step = self.model.step, self._step_engine
        if fault and fault.before_engine:
            faults.reduce_by_python(self.model)
        elif fault:
            fault.plant(self)

    def _build(self, strategy: Strategy) -> Any:
        partitions: Any = nullcontext()
        if strategy.zero_stage == 3 and strategy.zero3_init:
            import deepspeed

            settings = self.accelerator.state.deepspeed_plugin.deepspeed_config
            partitions = deepspeed.zero.Init(config_dict_or_path=settings)
        with partitions:
            built = model.Model(problem.BATCH_SIZE // self.cell.num_ranks)
        model.set_initial_weights(built)
        return built

    def sequences(self, number: int) -> list[problem.Sequence]:
        """Return the sequences in one of this rank's micro batches of the current step."""
        return self.cell.sequences(self.step, self.rank, number)

    def loss(self, outputs: Tensor, targets: Tensor, number: int) -> Tensor:
        del number  # the number of the micro batch, which only faults use
        return model.loss(outputs, targets)

    def take_step(self, step: int) -> None:
        """Train one step, and compare its gradients, and the weights after it, with the reference."""
        self.step = step
        for number in range(self.cell.accumulation):
            tokens, targets = model.tensors(self.sequences(number))
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.loss(self.model(tokens), targets, number))
                if self.accelerator.sync_gradients and not self.is_deepspeed:
                    self._look_before_update()
                self.optimizer.step()
                self.optimizer.zero_grad()
        self._compare("weights", self.expected.weights, full_value)

    def _step_engine(self, *arguments: Any, **options: Any) -> Any:
        self._look_before_update()
        return self._step_of_engine(*arguments, **options)

    def _look_before_update(self) -> None:
        self._compare("gradient", self.expected.gradients, full_tensors.gradient)
        for act in self.before_update:
            act()

    def compare_momenta(self, step: int) -> None:
        self.step = step
        full_tensors.link_states(getattr(self.model, "optimizer", None))
        self._compare("momentum", self.expected.momenta, self._momentum)

    def _momentum(self, parameter: Any) -> Tensor | None:
        return full_tensors.state(parameter, "momentum_buffer", self.base.state)

    def _compare(self, kind: str, expected: list[reference.Values], read: Callable[[Any], Tensor | None]) -> None:
        """Compare one kind of value for every parameter with the reference, and record the first difference in bits.

        `kind` is the name of the value, `expected` has its bits in each step, and `read` returns it for a parameter.
        Collective.
        """
        value_bytes = {}
        for name, parameter in sorted(self.module.named_parameters()):
            name = plain_name(name)
            values = read(parameter)
            # A sum of zeros may be -0.0 or 0.0, depending on the order. Adding 0.0 makes both 0.0.
            numbers = torch.tensor([]) if values is None else values.detach().cpu() + 0.0
            value_bytes[name] = numbers.contiguous().numpy().tobytes()
            if self.difference is None and value_bytes[name] != expected[self.step][name]:
                self.difference = _difference(numbers, expected[self.step][name])
                self.difference |= {"step": self.step + 1, "what": kind, "parameter": name, "rank": self.rank}
        if value_bytes.keys() != expected[self.step].keys():
            raise AssertionError(
                f"the engine has the parameters {sorted(value_bytes)}, but the "
                f"reference has {sorted(expected[self.step])}"
            )
        self.num_compared += len(value_bytes)
        if self.step == problem.NUM_STEPS - 1:
            self.sha256[kind] = reference.sha256(value_bytes)


def _check_engine(engine: Any, optimizer: Any, strategy: Strategy) -> None:
    """Raise RunFailed if the built engine is not the one of the strategy.

    Also raises RunFailed if it does not shard what the strategy shards, or has another optimizer than torch's SGD.
    """
    from torch.distributed.fsdp import FSDPModule

    parameters = list(engine.parameters())
    if strategy.distributed_type == "DEEPSPEED":
        sharded = sum(hasattr(p, "ds_tensor") and not p.ds_persist for p in parameters)
        is_right = engine.zero_optimization_stage() == strategy.zero_stage
        is_right &= (sharded >= 2 * problem.NUM_BLOCKS) == (strategy.zero_stage == 3)
    elif strategy.distributed_type == "FSDP":
        units = sum(isinstance(module, FSDPModule) for module in engine.modules())
        is_right = units == problem.NUM_BLOCKS + 1 and all(hasattr(p, "full_tensor") for p in parameters)
    else:
        replicates = isinstance(engine, torch.nn.parallel.DistributedDataParallel)
        is_right = replicates == (strategy.distributed_type == "MULTI_GPU")
    if not is_right or type(optimizer) is not torch.optim.SGD:
        raise RunFailed(f"{strategy.name} built another engine: {type(engine).__name__}, {type(optimizer).__name__}")


def _difference(numbers: Tensor, expected: bytes) -> dict[str, Any]:
    """Return how many values of a parameter differ from the reference, and the first one that does."""
    right = torch.frombuffer(bytearray(expected), dtype=torch.float32)
    flat = numbers.flatten()
    if flat.shape != right.shape:
        return {"num_different": len(right), "num_values": len(right), "expected": None, "found": None}
    wrong = (flat != right).nonzero().flatten()
    first = int(wrong[0])
    values = {"expected": float(right[first]), "found": float(flat[first])}
    return {"num_different": len(wrong), "num_values": len(right), **values}


def _run(cell: Cell, folder: Path) -> Run:
    """Return the run from which `build_accelerator` makes the engine.

    The run's workload only determines the sizes of buckets.
    """
    config = build_config(
        max_steps=problem.NUM_STEPS,
        global_batch_size=problem.BATCH_SIZE,
        micro_batch_size=cell.micro_batch_size,
        gradient_clipping=0.0,
        collective_timeout=worlds.COLLECTIVE_SECONDS,
        measure=False,
    )
    return Run(config, cell.strategy_file, cell.num_ranks, folder / "run")


def fit_engine_config(accelerator: Any, strategy: Strategy) -> None:
    """Adapt the sizes in the engine's configuration to this small model.

    DeepSpeed is also allowed to use torch's own SGD, including under offload.
    """
    if strategy.distributed_type == "FSDP":
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = [model.Block.__name__]
    if strategy.distributed_type != "DEEPSPEED":
        return
    settings = accelerator.state.deepspeed_plugin.deepspeed_config
    settings |= {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    zero = settings["zero_optimization"]
    own_settings = (strategy.deepspeed_json or {}).get("zero_optimization", {})
    zero |= {key: size for key, size in suited_buckets(problem.WIDTH).items() if own_settings.get(key) == "auto"}
    if strategy.zero_stage == 3 and "stage3_param_persistence_threshold" not in own_settings:
        zero["stage3_param_persistence_threshold"] = PERSISTENCE_THRESHOLD
