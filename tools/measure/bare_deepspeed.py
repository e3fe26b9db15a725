"""Train the same work with DeepSpeed alone, as its tutorials do, and measure the speed.

    tools/measure/bare_deepspeed.py STRATEGY FOLDER [run's flags]

This is `tools/measure/hf_trainer.py` with `deepspeed.initialize` and a loop of its own, without accelerate.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import hf_trainer

from study import processes
from study.config import RunConfig
from study.errors import Refusal
from study.run import Run


def check(config: RunConfig, strategy_name: str, num_processes: int) -> None:
    """Refuse settings with which the work would not be the same. Raises Refusal."""
    hf_trainer.check(config, strategy_name, num_processes)
    if not strategy_name.startswith("zero") or "offload" in strategy_name or config.precision != "fp32":
        raise Refusal(f"{strategy_name} in {config.precision}: DeepSpeed alone is compared for ZeRO in fp32; choose it")


def train(run: Run, _folder: Any) -> None:
    """Train with DeepSpeed, and return the result on rank 0. All ranks must call it."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from torch.utils.data import BatchSampler, DataLoader
    from transformers import get_scheduler, set_seed

    from study.engines.readback.facts import facts_of_deepspeed
    from study.training import weights
    from study.training.optimizer_steps import TrainingOrder, make_clock
    from study.workloads import WORKLOADS

    config = run.config
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo", verbose=False)
    rank, micro = dist.get_rank(), run.micro_batch_size
    workload = WORKLOADS[config.workload]
    splits = workload.load(config)
    set_seed(config.seed)
    model = workload.build_model(config, splits)
    optimizer = weights.make_optimizer(model, config)
    schedule = get_scheduler(config.schedule, optimizer, config.warmup_steps, config.num_steps)
    settings = {
        **(hf_trainer.deepspeed_config(config, run.strategy) or {}),
        "gradient_clipping": config.gradient_clipping,
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": micro,
        "train_batch_size": config.global_batch_size,
        "zero_allow_untested_optimizer": True,
    }
    engine, zero, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings)
    now = make_clock(engine.device)
    names = {"labels", *workload.inputs(splits.train.tensors)}
    order = TrainingOrder(len(splits.train), config.global_batch_size, config.num_steps, config.seed)
    dealt = [*BatchSampler(order, micro, drop_last=True)][rank :: run.world_size]
    torch.manual_seed(config.seed * 1_000_003 + rank)  # dropout's, as train.py's
    losses, ends = [], []
    for batch in DataLoader(splits.train, batch_sampler=dealt):
        loss = engine(**{name: batch[name].to(engine.device) for name in names}).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().double())
        ends.append(now())
    mean_losses = torch.stack(losses)
    dist.all_reduce(mean_losses)
    proof = facts_of_deepspeed(engine) | {
        "world_size": dist.get_world_size(),
        "engine_class": type(engine).__name__,
        "optimizer_class": type(getattr(zero, "optimizer", zero)).__name__,
        "reduce_bucket_size": getattr(zero, "reduce_bucket_size", None),
    }
    rates = hf_trainer.speed(ends, config.timing_warmup_steps, config.global_batch_size)
    processes.send_result(
        {**rates, "losses": (mean_losses / run.world_size).tolist(), "proof": proof} if rank == 0 else {}
    )
    dist.barrier()


if __name__ == "__main__":
    hf_trainer.main(sys.modules["__main__"])
