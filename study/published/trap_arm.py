"""Train one arm of a trap as published scripts do, seed after seed, and ask the engine what it really was.

    accelerate launch --config_file FILE study/published/trap_arm.py JOB.json

`traps.py` writes the job and starts this. Nothing here guards against anything: the study's own trainer refuses most of
these set-ups. JOB.json: {"program": {...}, "settings": {...}, "seeds": [...], "data_dir": ... or null, "result": FILE}.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.utils import DummyOptim, InitProcessGroupKwargs, set_seed
from torch.utils.data import DataLoader

from study import files, processes
from study.config import RunConfig
from study.records import machine
from study.training import proof, weights
from study.training.measure.memory import model_state_bytes
from study.workloads import bert_imdb
from study.workloads.sources import Examples, Splits


class Prepared(NamedTuple):
    """What one seed trains, as the accelerator prepared it."""

    model: Any
    optimizer: Any
    scheduler: Any | None  # None: the script sets the rate by hand
    train_batches: Any
    eval_batches: Any
    num_steps: int  # of the optimizer


def main() -> None:
    processes.die_with_parent()
    status = 0
    try:
        run(json.loads(Path(sys.argv[1]).read_text()))
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as study/train.py ends, and for the same reason


def run(job: dict[str, Any]) -> None:
    """Train every seed, then the first again, and write what each learned. Raises RuntimeError where it differs."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    program, settings = job["program"], job["settings"]
    config = RunConfig(
        data="files" if job["data_dir"] else "bundled",
        data_dir=job["data_dir"],
        init="scratch",
        **{name: settings[name] for name in settings if name in RunConfig.model_fields},
    )
    splits = with_own_vocabulary(bert_imdb.load(config))
    accelerator = build_accelerator(program)
    ran, seeds = [], {}
    for seed in [*job["seeds"], job["seeds"][0]]:
        facts, learned = train(accelerator, program, settings, config, splits, seed)
        ran.append(facts)
        # The first seed had this process to itself. That it comes out the same after all others shows that no seed
        # leaves anything behind for the next one, which is not so everywhere: old hooks fire, state is inherited.
        if seeds.setdefault(str(seed), learned) != learned:
            raise RuntimeError(f"seed {seed}: trained again in the same process, it comes out differently")
    if any(facts != ran[0] for facts in ran):
        raise RuntimeError(f"the engine is not the same for every seed: {ran}")
    if accelerator.is_main_process:
        described = {"machine": machine.describe(), "data": splits.description}
        files.write_json(Path(job["result"]), {**described, "ran": ran[0], "seeds": seeds})
    accelerator.wait_for_everyone()


def with_own_vocabulary(splits: Splits) -> Splits:
    """Number the tokens that occur from 0: most rows of the embedding would never be trained, but always be sent."""
    parts = (splits.train.tensors, splits.evaluation.tensors)
    present, numbered = torch.cat([part["input_ids"] for part in parts]).unique(return_inverse=True)
    train, evaluation = numbered.split([len(part["input_ids"]) for part in parts])
    return dataclasses.replace(
        splits,
        train=Examples(**parts[0] | {"input_ids": train}),
        evaluation=Examples(**parts[1] | {"input_ids": evaluation}),
        vocab_size=len(present),
        pad_token_id=int((present == splits.pad_token_id).nonzero()),
    )


def build_accelerator(program: dict[str, Any]) -> Accelerator:
    on_cpu = not torch.cuda.is_available()
    is_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    if on_cpu and is_deepspeed:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return Accelerator(
        cpu=on_cpu and not is_deepspeed,
        mixed_precision=program["mixed_precision"],
        gradient_accumulation_steps=program["gradient_accumulation_steps"],
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if on_cpu and is_deepspeed else None,
    )


def train(
    accelerator: Accelerator,
    program: dict[str, Any],
    settings: dict[str, Any],
    config: RunConfig,
    splits: Splits,
    seed: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train one seed from its own weights; return what the engine was, and what was learned. Collective."""
    accelerator.free_memory()
    set_seed(seed)
    model = build_model(accelerator, program["initial_weights"], config, splits)
    initial_weights = weights.checksum(model).sha256
    prepared = prepare(accelerator, program, settings, model, splits, seed)
    losses, samples, counts = train_epochs(accelerator, program, settings, prepared)
    last = settings["last_updates"]
    learned = {
        "train_loss": sum(losses[-last:]) / last,
        "eval_loss": evaluate(accelerator, prepared.model, prepared.eval_batches),
        "losses": [round(value, 4) for value in losses],
        "initial_weights": initial_weights[:16],
        "samples": samples[:16],
    }
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"seed {seed}: the loss is NaN or infinite: {losses}")
    return read_back(accelerator, prepared.model, prepared.optimizer) | counts, learned


def prepare(
    accelerator: Accelerator,
    program: dict[str, Any],
    settings: dict[str, Any],
    model: torch.nn.Module,
    splits: Splits,
    seed: int,
) -> Prepared:
    """Build optimizer, loaders and schedule, and give them to the accelerator as the program does. Collective."""
    optimizer = build_optimizer(program["optimizer"], settings, model)
    examples = Examples(**splits.train.tensors, index=torch.arange(len(splits.train)))
    generator = torch.Generator().manual_seed(seed) if program["own_generator"] else None
    train_batches = DataLoader(examples, program["micro_batch_size"], shuffle=True, generator=generator)
    eval_batches = DataLoader(splits.evaluation, 2 * program["micro_batch_size"])
    num_ranks, accumulation = accelerator.num_processes, program["gradient_accumulation_steps"]
    num_steps = settings["epochs"] * len(train_batches) // (num_ranks * accumulation)
    scheduler = None
    if program["prepares_scheduler"]:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: schedule(done + 1, num_steps, settings))
    model, optimizer, train_batches, eval_batches = accelerator.prepare(model, optimizer, train_batches, eval_batches)
    if scheduler is not None:
        scheduler = accelerator.prepare(scheduler)
    return Prepared(model, optimizer, scheduler, train_batches, eval_batches, num_steps)


def train_epochs(
    accelerator: Accelerator, program: dict[str, Any], settings: dict[str, Any], prepared: Prepared
) -> tuple[list[float], str, dict[str, Any]]:
    """Train; return each step's loss, a digest of the examples in each step, and what was counted. Collective.

    A step is the program's, after its own accumulation; the digest is the same in whatever order a step has them.
    """
    accumulation = program["gradient_accumulation_steps"]
    rate = settings["sgd_learning_rate" if program["optimizer"] == "sgd" else "learning_rate"]
    losses, drawn = [], hashlib.sha256()
    loss_sum, indices, micro_steps = 0.0, [], 0
    prepared.model.train()
    for _ in range(settings["epochs"]):
        for batch in prepared.train_batches:
            if prepared.scheduler is None:
                for group in prepared.optimizer.param_groups:
                    group["lr"] = rate * schedule(micro_steps // accumulation + 1, prepared.num_steps, settings)
            with accelerator.accumulate(prepared.model):
                loss = bert_imdb.loss(prepared.model(**bert_imdb.inputs(batch)), batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients and program["clip_grad_norm"]:
                    accelerator.clip_grad_norm_(prepared.model.parameters(), program["clip_grad_norm"])
                prepared.optimizer.step()
                if prepared.scheduler is not None:
                    prepared.scheduler.step()
                prepared.optimizer.zero_grad()
            micro_steps += 1
            loss_sum += accelerator.gather(loss.detach().float()).double().mean().item()
            indices += accelerator.gather(batch["index"]).tolist()
            if micro_steps % accumulation == 0:
                losses.append(loss_sum / accumulation)
                drawn.update(json.dumps(sorted(indices)).encode())
                loss_sum, indices, sequences = 0.0, [], len(indices)
    counts = {
        "micro_steps": micro_steps,
        "sequences_per_program_step": sequences,
        "scheduler_steps": None if prepared.scheduler is None else prepared.scheduler.scheduler.last_epoch,
    }
    return losses, drawn.hexdigest(), counts


def schedule(step: int, num_steps: int, settings: dict[str, Any]) -> float:
    """Share of the peak learning rate in step `step` (1-based): linear warm-up, linear decay."""
    warmup = settings["warmup_steps"]
    return step / warmup if step <= warmup else max(0.0, 1 - (step - 1 - warmup) / (num_steps - warmup))


def build_model(accelerator: Accelerator, how: str, config: RunConfig, splits: Splits) -> torch.nn.Module:
    """Build the model "whole"; "partitioned", as transformers does at stage 3; or "loaded", the whole one's weights."""
    if how == "partitioned":
        settings = bert_imdb.model_config(config, splits)
        return transformers.AutoModelForSequenceClassification.from_config(settings)
    with weights.unpartitioned():
        model = bert_imdb.build_model(config, splits)
    if how == "whole":
        return model
    with tempfile.TemporaryDirectory() as folder:  # of each rank's own
        model.save_pretrained(folder)
        return bert_imdb.load_model(config, splits, Path(folder))


def build_optimizer(name: str, settings: dict[str, Any], model: torch.nn.Module) -> Any:
    decay, rate = settings["weight_decay"], settings["learning_rate"]
    if name == "config":  # accelerate's stand-in for the one in the DeepSpeed config
        return DummyOptim(model.parameters(), lr=rate, weight_decay=decay)
    groups = weights.parameter_groups(model, decay)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=settings["sgd_learning_rate"], momentum=0.9)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](groups, lr=rate)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, batches: DataLoader) -> float:
    """Mean loss over the held-out examples. Collective."""
    model.eval()
    losses = []
    for batch in batches:
        each = bert_imdb.sequence_losses(model(**bert_imdb.inputs(batch)), batch)
        losses.append(accelerator.gather_for_metrics(each).double().cpu())
    return torch.cat(losses).mean().item()


def read_back(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """Ask the engine, after the last step, what it is and how often it stepped. Rank-local."""
    base = proof.base_optimizer(optimizer)
    states = list(base.state.values())
    facts = {
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "device": accelerator.device.type,
        "engine": type(model).__name__,
        "optimizer": type(base).__name__,
        "weight_decays": sorted(group["weight_decay"] for group in base.param_groups),
        "parameter_dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}),
        "autocast": accelerator.mixed_precision if accelerator.native_amp else None,
        "model_state_bytes": model_state_bytes(model, proof.innermost(optimizer), None).model_states,
        # torch counts in a tensor, DeepSpeedCPUAdam in a number; SGD does not count.
        "optimizer_steps": max((int(state["step"]) for state in states if "step" in state), default=None),
    }
    if accelerator.distributed_type.value != "DEEPSPEED":
        return facts
    offload = model._config.zero_config.offload_optimizer
    return facts | {
        "zero_stage": model.zero_optimization_stage(),
        "engine_optimizer": type(proof.innermost(optimizer)).__name__,
        "gradient_clipping": model.gradient_clipping(),
        "gradient_accumulation_steps": model.gradient_accumulation_steps(),
        "accumulation_dtype": str(model.get_data_types()[1]).removeprefix("torch."),
        "autocast": str(model.torch_autocast_dtype()).removeprefix("torch.")
        if model.torch_autocast_enabled()
        else None,
        "offload_optimizer": None if offload is None else str(getattr(offload.device, "value", offload.device)),
        "engine_micro_steps": model.micro_steps,
        "engine_steps": model.global_steps,
    }


if __name__ == "__main__":
    main()
