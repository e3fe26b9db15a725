"""Train one arm of a trap as published scripts do, seed after seed, and read the actual settings from the engine.

    accelerate launch --config_file FILE tools/measure/published/trap_arm.py JOB.json

`traps.py` writes the job and starts this script. The script does not check its settings, because it has to run set-ups
that this project's own trainer refuses. JOB.json contains {"program": {...}, "settings": {...}, "seeds": [...],
"data_dir": ... or null}.
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
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.utils import DummyOptim, InitProcessGroupKwargs, set_seed
from torch.utils.data import DataLoader

from study.config import RunConfig
from study.records import machine
from study.training import weights
from study.training.memory import model_state_bytes
from study.workloads import bert_imdb
from study.workloads.sources import Examples, Splits
from zero_study import processes
from zero_study.engines import extensions
from zero_study.engines.readback.facts import base_optimizer, engine_optimizer


def main() -> None:
    processes.die_with_parent()
    extensions.use_built()
    status = 0
    try:
        run(json.loads(Path(sys.argv[1]).read_text()))
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # study/train.py ends in the same way, for the same reason


def run(job: dict[str, Any]) -> None:
    """Train every seed, then the first one again, and send the results.

    Raises RuntimeError if the first seed gives another result the second time, or if the engine differs between seeds.
    """
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    settings = job["settings"]
    config = RunConfig(
        data="files" if job["data_dir"] else "bundled",
        data_dir=job["data_dir"],
        init="scratch",
        **{name: settings[name] for name in settings if name in RunConfig.model_fields},
    )
    splits = with_own_vocabulary(bert_imdb.load(config))
    training = Training(build_accelerator(job["program"]), job["program"], settings, config, splits)
    ran: list[dict[str, Any]] = []
    seeds: dict[str, dict[str, Any]] = {}
    for seed in [*job["seeds"], job["seeds"][0]]:
        facts, learned = training.train(seed)
        ran.append(facts)
        # The first seed ran in a new process. If it gives the same result after all others, no seed affects the next
        # one. This is not always true: hooks of an earlier model can still run, and state can be inherited.
        if seeds.setdefault(str(seed), learned) != learned:
            raise RuntimeError(f"seed {seed}: trained again in the same process, it comes out differently")
    if any(facts != ran[0] for facts in ran):
        raise RuntimeError(f"the engine is not the same for every seed: {ran}")
    if training.accelerator.is_main_process:
        described = {"machine": machine.describe(), "data": splits.description}
        processes.send_result({**described, "ran": ran[0], "seeds": seeds})
    training.accelerator.wait_for_everyone()


def with_own_vocabulary(splits: Splits) -> Splits:
    """Return the splits with only the tokens that occur, numbered from 0.

    Otherwise most rows of the embedding would never be trained, but be communicated in every step.
    """
    parts = (splits.train.tensors, splits.evaluation.tensors)
    tokens: Any = torch.cat([part["input_ids"] for part in parts])
    present, numbered = tokens.unique(return_inverse=True)
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


@dataclasses.dataclass(frozen=True)
class Training:
    """The settings that all seeds of an arm share, and the methods that train. All ranks must call them together."""

    accelerator: Accelerator
    program: dict[str, Any]
    settings: dict[str, Any]
    config: RunConfig
    splits: Splits

    def train(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Train one seed from its own initial weights. Return the actual settings of the engine, and the results."""
        self.accelerator.free_memory()
        set_seed(seed)
        model = self.build_model()
        initial_weights = weights.checksum(model).sha256
        optimizer = self.build_optimizer(model)
        micro_batch_size = self.program["micro_batch_size"]
        examples: Any = Examples(**self.splits.train.tensors, index=torch.arange(len(self.splits.train)))
        evaluation: Any = self.splits.evaluation
        generator = torch.Generator().manual_seed(seed) if self.program["own_generator"] else None
        batches: Any = DataLoader(examples, micro_batch_size, shuffle=True, generator=generator)
        held_out: Any = DataLoader(evaluation, 2 * micro_batch_size)
        per_step = self.accelerator.num_processes * self.program["gradient_accumulation_steps"]
        num_steps = self.settings["epochs"] * len(batches) // per_step
        scheduler: Any = None
        if self.program["prepares_scheduler"]:
            share = lambda done: self.schedule(done + 1, num_steps)  # noqa: E731
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        model, optimizer, batches, held_out = self.accelerator.prepare(model, optimizer, batches, held_out)
        if scheduler is not None:
            scheduler = self.accelerator.prepare(scheduler)
        losses, samples, counts = self.train_epochs(model, optimizer, scheduler, batches, num_steps)
        last = self.settings["last_updates"]
        learned = {
            "train_loss": sum(losses[-last:]) / last,
            "eval_loss": self.evaluate(model, held_out),
            "losses": [round(value, 4) for value in losses],
            "initial_weights": initial_weights[:16],
            "samples": samples[:16],
        }
        if not all(map(math.isfinite, losses)):
            raise RuntimeError(f"seed {seed}: the loss is NaN or infinite: {losses}")
        return self.read_back(model, optimizer) | counts, learned

    def build_model(self) -> Any:
        """Return the model for one seed, built as `initial_weights` of the program says.

        "whole" builds it unpartitioned, "partitioned" lets transformers partition it at stage 3, and "loaded" saves the
        whole model and loads it again.
        """
        how = self.program["initial_weights"]
        if how == "partitioned":
            settings = bert_imdb.model_config(self.config, self.splits)
            return transformers.AutoModelForSequenceClassification.from_config(settings)  # type: ignore[no-untyped-call]
        with weights.unpartitioned():
            model = bert_imdb.build_model(self.config, self.splits)
        if how == "whole":
            return model
        with tempfile.TemporaryDirectory() as folder:  # a folder for each rank
            model.save_pretrained(folder)
            return bert_imdb.load_model(self.config, self.splits, Path(folder))

    def build_optimizer(self, model: Any) -> Any:
        name, decay, rate = (
            self.program["optimizer"], self.settings["weight_decay"], self.settings["learning_rate"],
        )  # fmt: skip
        if name == "config":  # accelerate's placeholder for the optimizer in the DeepSpeed config
            return DummyOptim(model.parameters(), lr=rate, weight_decay=decay)
        groups = weights.parameter_groups(model, decay)
        if name == "sgd":
            return torch.optim.SGD(groups, lr=self.settings["sgd_learning_rate"], momentum=0.9)
        return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](groups, lr=rate)

    def schedule(self, step: int, num_steps: int) -> float:
        """Return the share of the peak learning rate in a step, with linear warm-up and linear decay.

        `step` counts from 1.
        """
        warmup = self.settings["warmup_steps"]
        return float(step / warmup if step <= warmup else max(0.0, 1 - (step - 1 - warmup) / (num_steps - warmup)))

    def train_epochs(
        self, model: Any, optimizer: Any, scheduler: Any, batches: Any, num_steps: int
    ) -> tuple[list[float], str, dict[str, Any]]:
        """Train all epochs. Return the loss of each step, a digest of the examples in each step, and counts of steps.

        A step is a step of the script, after the accumulation that the script asks for. The digest does not depend on
        the order of the examples within a step. Without a scheduler, this function sets the learning rate.
        """
        accumulation, clip = self.program["gradient_accumulation_steps"], self.program["clip_grad_norm"]
        rate = self.settings["sgd_learning_rate" if self.program["optimizer"] == "sgd" else "learning_rate"]
        losses: list[float] = []
        indices: list[int] = []
        drawn, loss_sum, micro_steps, sequences = hashlib.sha256(), 0.0, 0, 0
        model.train()
        for batch in (batch for _ in range(self.settings["epochs"]) for batch in batches):
            if scheduler is None:
                for group in optimizer.param_groups:
                    group["lr"] = rate * self.schedule(micro_steps // accumulation + 1, num_steps)
            with self.accelerator.accumulate(model):
                loss = bert_imdb.loss(model(**bert_imdb.inputs(batch)), batch)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients and clip:
                    self.accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
            micro_steps += 1
            loss_sum += self.accelerator.gather(loss.detach().float()).double().mean().item()
            indices += self.accelerator.gather(batch["index"]).tolist()
            if micro_steps % accumulation == 0:
                losses.append(loss_sum / accumulation)
                drawn.update(json.dumps(sorted(indices)).encode())
                loss_sum, indices, sequences = 0.0, [], len(indices)
        counts = {
            "micro_steps": micro_steps,
            "sequences_per_program_step": sequences,
            "scheduler_steps": None if scheduler is None else scheduler.scheduler.last_epoch,
        }
        return losses, drawn.hexdigest(), counts

    @torch.no_grad()
    def evaluate(self, model: Any, batches: Any) -> float:
        """Return the mean loss over the held-out examples."""
        model.eval()
        losses = []
        for batch in batches:
            each = bert_imdb.sequence_losses(model(**bert_imdb.inputs(batch)), batch)
            losses.append(self.accelerator.gather_for_metrics(each).double().cpu())
        return torch.cat(losses).mean().item()

    def read_back(self, model: Any, optimizer: Any) -> dict[str, Any]:
        """Return the actual settings of the engine after the last step, and how often it stepped.

        This involves no communication between ranks.
        """
        base = base_optimizer(optimizer)
        states = list(base.state.values())
        facts = {
            "world_size": dist.get_world_size() if dist.is_initialized() else 1,
            "device": self.accelerator.device.type,
            "engine": type(model).__name__,
            "optimizer": type(base).__name__,
            "weight_decays": sorted(group["weight_decay"] for group in base.param_groups),
            "parameter_dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}),
            "autocast": self.accelerator.mixed_precision if self.accelerator.native_amp else None,
            "model_state_bytes": model_state_bytes(model, engine_optimizer(model, optimizer), None).model_states,
            # torch counts steps in a tensor, DeepSpeedCPUAdam in a number. SGD does not count them.
            "optimizer_steps": max((int(state["step"]) for state in states if "step" in state), default=None),
        }
        if self.accelerator.distributed_type.value != "DEEPSPEED":
            return facts
        offload = model._config.zero_config.offload_optimizer
        dtype = str(model.torch_autocast_dtype()).removeprefix("torch.") if model.torch_autocast_enabled() else None
        return facts | {
            "zero_stage": model.zero_optimization_stage(),
            "engine_optimizer": type(engine_optimizer(model, optimizer)).__name__,
            "gradient_clipping": model.gradient_clipping(),
            "gradient_accumulation_steps": model.gradient_accumulation_steps(),
            "accumulation_dtype": str(model.get_data_types()[1]).removeprefix("torch."),
            "autocast": dtype,
            "offload_optimizer": None if offload is None else str(getattr(offload.device, "value", offload.device)),
            "engine_micro_steps": model.micro_steps,
            "engine_steps": model.global_steps,
        }


if __name__ == "__main__":
    main()
