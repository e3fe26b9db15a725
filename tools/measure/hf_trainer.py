"""Train the same work with Hugging Face's Trainer, and measure the speed.

    tools/measure/hf_trainer.py STRATEGY FOLDER [run's flags]

This program is one rank, and `tools/measure/throughput.py` starts all of them. The strategy `single` starts one process
that is not distributed. Trainer writes into FOLDER.

Model, weights, data, batches, order, optimizer, schedule, clipping and dropout are those of the run, so the losses of
every step agree with train.py's. Everything else is Trainer's default: its logging, its progress bar,
`find_unused_parameters` (true), and the settings of the engine.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.config import RunConfig, build_config, parse_flags
from study.run import Run, make_run
from study.running.launch import QUIET_ENVIRONMENT
from zero_study import processes
from zero_study.engines import extensions
from zero_study.errors import Refusal
from zero_study.strategy import file
from zero_study.strategy.file import Strategy

if TYPE_CHECKING:
    from published.watched_trainer import Watched
    from transformers import TrainingArguments

# On a CPU the engine rounds weights that it puts on a disk and did not build itself; FSDP is set up otherwise.
STRATEGIES = [  # Trainer has no argument for DDP's gradient_as_bucket_view
    name for name in file.names() if "nvme" not in name and not name.startswith("fsdp") and name != "ddp_tuned"
]
PRECISIONS = ("fp32", "bf16-autocast", "bf16")
ONLY = {"schedule": "linear", "warmup_steps": 0, "micro_batch_size": None, "share_device": False}


def main(engine: Any) -> None:
    """Train on one rank. `engine` is the module whose `check` and `train` are called."""
    extensions.use_own_folder()
    extensions.use_built()
    os.environ.update(QUIET_ENVIRONMENT | dict(os.environ))
    chosen, folder, *words = sys.argv[1:]
    config = build_config(**parse_flags(words))
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    engine.check(config, chosen, num_processes)
    engine.train(make_run(config, file.read_strategy(file.find_strategy(chosen)), num_processes), Path(folder))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as train.py ends, and for the same reason


def check(config: RunConfig, strategy_name: str, num_processes: int) -> None:
    """Refuse settings with which the work would not be the same. Raises Refusal."""
    if strategy_name not in STRATEGIES:
        raise Refusal(f"strategy {strategy_name!r}: Trainer runs under {', '.join(STRATEGIES)}; choose from them")
    for name, value in ONLY.items():
        if getattr(config, name) != value:
            raise Refusal(f"{name}={getattr(config, name)!r}: Trainer is compared for {value!r} only; change the flag")
    if config.precision not in PRECISIONS:
        raise Refusal(f"precision={config.precision!r}: Trainer is compared for {', '.join(PRECISIONS)}; change it")
    if strategy_name == "ddp" and num_processes == 1:
        raise Refusal("strategy 'ddp' on one process: Trainer builds no DDP there on a GPU; take single")


def arguments(run: Run, folder: Path, on_cpu: bool) -> dict[str, Any]:
    """Return the TrainingArguments of this work. All other settings are Trainer's defaults."""
    config = run.config
    deepspeed = deepspeed_config(config, run.strategy)
    by_engine = deepspeed is not None and config.precision == "bf16-autocast"  # the engine's own autocast
    return {
        "output_dir": str(folder),
        "use_cpu": on_cpu,
        "ddp_backend": "gloo" if on_cpu and run.strategy.distributed_type != "NO" else None,
        "deepspeed": deepspeed,
        "bf16": config.precision.startswith("bf16") and not by_engine,
        "gradient_checkpointing": config.activation_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "torch_compile": config.compile,
        "per_device_train_batch_size": run.micro_batch_size,
        "max_steps": config.num_steps,
        "optim": "adamw_torch_fused",
        "learning_rate": config.learning_rate,
        "weight_decay": config.weight_decay,
        "adam_beta1": config.adam_beta1,
        "adam_beta2": config.adam_beta2,
        "adam_epsilon": config.adam_epsilon,
        "seed": config.seed,
        "lr_scheduler_type": config.schedule,
        "max_grad_norm": config.gradient_clipping,
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        # By default transformers 5.23 multiplies the loss by the number of processes, even of a model which ignores
        # `num_items_in_batch`, as BERT's classifier does: twice the gradient on two processes, another training.
        "average_tokens_across_devices": False,
    }


def deepspeed_config(config: RunConfig, chosen: Strategy) -> dict[str, Any] | None:
    """Return DeepSpeed's configuration for Trainer: the strategy's, with "auto" for the settings of the run."""
    if chosen.zero_stage is None:
        return None
    devices = {"offload_optimizer": chosen.offload_optimizer_device, "offload_param": chosen.offload_param_device}
    offloads = {key: {"device": device} for key, device in devices.items() if device != "none"}
    engine: dict[str, Any] = {"zero_optimization": {"stage": chosen.zero_stage, **offloads}}
    engine |= chosen.deepspeed_json or {}
    batches = ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size")
    engine |= dict.fromkeys(("gradient_clipping", *batches), "auto")
    if config.precision == "bf16":
        engine |= {"bf16": {"enabled": "auto"}, "data_types": {"grad_accum_dtype": config.accumulation_dtype}}
    elif config.precision == "bf16-autocast":
        engine["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    return engine


def train(run: Run, folder: Path) -> None:
    """Train with Trainer, verify the work, and return the result on rank 0. All ranks must call it."""
    import torch
    import torch.distributed as dist
    from transformers import TrainingArguments

    from study.training import proof

    config, on_cpu = run.config, not torch.cuda.is_available()
    if on_cpu and run.strategy.zero_stage is not None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    settings = TrainingArguments(**arguments(run, folder, on_cpu))
    ends: list[float] = []
    trainer = build_trainer(run, settings, ends)
    trainer.train()

    facts = proof.read_back(trainer.accelerator, trainer.model_wrapped, trainer.optimizer, run)
    proof.verify(facts, run)
    if len(ends) != config.num_steps:
        raise RuntimeError(f"Trainer took {len(ends)} steps, the run asks for {config.num_steps}")
    mean_losses = torch.stack(trainer.seen_losses).double()
    if dist.is_initialized():
        dist.all_reduce(mean_losses)
    mean_losses /= run.world_size
    result = {}
    if settings.process_index == 0:
        rates = speed(ends, config.timing_warmup_steps, config.global_batch_size)
        result = {**rates, "losses": mean_losses.tolist(), "proof": facts.model_dump(mode="json")}
    processes.send_result(result)
    if dist.is_initialized():
        dist.barrier()


def build_trainer(run: Run, settings: TrainingArguments, ends: list[float]) -> Watched:
    """Build Trainer with the run's model, data, order and dropout. It appends the end of each step to `ends`."""
    import torch
    from published.watched_trainer import Watched
    from transformers import TrainerCallback, set_seed

    from study.training import weights
    from study.training.optimizer_steps import TrainingOrder, make_clock
    from study.workloads import WORKLOADS, sources

    config = run.config
    now = make_clock(settings.device)
    workload = WORKLOADS[config.workload]
    splits = workload.load(config)
    set_seed(config.seed)
    with weights.unpartitioned():
        model = workload.build_model(config, splits)
    model.accepts_loss_kwargs = False  # the loss is a batch's mean, as in train.py
    tensors = splits.train.tensors
    examples = sources.Examples(**{name: tensors[name] for name in {"labels", *workload.inputs(tensors)}})

    class Ordered(Watched):
        """Trainer with this project's order of samples."""

        def _get_train_sampler(self, *_: Any) -> TrainingOrder:
            return TrainingOrder(len(splits.train), config.global_batch_size, config.num_steps, config.seed)

    class StepEnds(TrainerCallback):
        """Seed dropout as train.py does, and record the time at which each step ends."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            torch.manual_seed(config.seed * 1_000_003 + settings.process_index)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(now())

    return Ordered(model, settings, train_dataset=examples, callbacks=[StepEnds()])


def speed(ends: list[float], num_warmup_steps: int, global_batch_size: int) -> dict[str, float]:
    """Return samples per second without warm-up: over the whole time, and at the median step."""
    timed = ends[num_warmup_steps - 1 :]
    steps = [after - before for before, after in itertools.pairwise(timed)]
    return {
        "wall_samples_per_second": global_batch_size * len(steps) / (timed[-1] - timed[0]),
        "step_samples_per_second": global_batch_size / statistics.median(steps),
    }


if __name__ == "__main__":
    main(sys.modules["__main__"])
