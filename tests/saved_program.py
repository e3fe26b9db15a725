"""Train a small model under every engine in one launch, and save it in every format: `saved_program.py FOLDER`.

`saved_program.py FOLDER quick` writes only one of each engine and format: the folders that saved_faults.QUICK names.
Each training makes two optimizer steps. Two ranks write what the tests of `zero-study saved` read.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from zero_study.engines import extensions

CONFIG = {
    "hidden_size": 15,  # odd, so that shards have padding
    "head_dim": 4,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "vocab_size": 33,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
}


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def lora() -> Any:
    import peft

    settings = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], modules_to_save=["model.norm"], task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(build(), settings)


def tokens(step: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(0, CONFIG["vocab_size"], (2, 8), generator=draws)


def deepspeed_engine(model: Any, stage: int, precision: str, **more: Any) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 1.0,
        precision: {"enabled": True} if precision != "fp32" else {},
        **more,
    }
    config.pop("fp32", None)
    trained = [p for p in model.parameters() if p.requires_grad]
    # two groups, as trainers make them: one with weight decay, one without
    groups = [
        {"params": [p for p in trained if p.ndim > 1]},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    return engine


def train_deepspeed(engine: Any, steps: range = range(2)) -> None:
    for step in steps:
        engine.backward(engine(input_ids=tokens(step), labels=tokens(step)).loss)
        engine.step()


def on_first(action: Any) -> None:
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def deepspeed_stages(folder: Path) -> None:
    for stage in (0, 1, 2, 3):
        engine = deepspeed_engine(build(), stage, "bf16" if stage else "fp32")
        train_deepspeed(engine)
        engine.save_checkpoint(folder / f"zero{stage}", client_state={"epoch": 1})
        if stage == 3:
            engine.save_16bit_model(folder / "zero3-16bit")
            config = LlamaConfig(**CONFIG, dtype="bfloat16")
            on_first(lambda config=config: config.save_pretrained(folder / "zero3-16bit"))
        engine.destroy()


def other_settings_of_deepspeed(folder: Path) -> None:
    small = {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 500}
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    for name, stage, precision, more in (
        ("zero1-fp32", 1, "fp32", {}),
        ("zero0-bf16", 0, "bf16", {}),  # which saves no optimizer states
        ("zero3-subgroups", 3, "bf16", {"zero_optimization": small}),
        ("zero2-offload", 2, "bf16", {"zero_optimization": offload, "zero_force_ds_cpu_optimizer": False}),
    ):
        engine = deepspeed_engine(build(), stage, precision, **more)
        train_deepspeed(engine)
        engine.save_checkpoint(folder / name)
        engine.destroy()


def universal(folder: Path) -> None:
    import argparse

    from deepspeed.checkpoint import ds_to_universal

    for name in ("zero1", "zero3"):
        step = folder / name / "global_step2"
        arguments = argparse.Namespace(
            input_folder=str(step), output_folder=str(folder / f"universal-{name}" / "global_step2"),
            num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
        )  # fmt: skip
        on_first(lambda arguments=arguments: ds_to_universal.main(arguments))
        latest = folder / f"universal-{name}" / "latest_universal"
        on_first(lambda latest=latest: latest.write_text("global_step2"))
    on_first(
        lambda: [(folder / f"universal-{name}" / "latest").write_text("global_step2") for name in ("zero1", "zero3")]
    )
    # DeepSpeed 0.19.8 loads what stages 1 and 2 wrote into stages 1 and 2 only.
    for stage, source in ((2, "universal-zero1"), (3, "universal-zero3")):
        engine = deepspeed_engine(build(), stage, "bf16", checkpoint={"load_universal": True})
        engine.load_checkpoint(folder / source, tag="global_step2")
        engine.save_checkpoint(folder / f"zero{stage}-from-{source}", tag="global_step2")
        engine.destroy()


def adapters(folder: Path) -> None:
    """Train an adapter under ZeRO-3 and without an engine."""
    adapters_of_zero(folder, 3)
    model = lora()
    train_plain(model, model, [p for p in model.parameters() if p.requires_grad])
    on_first(lambda: model.save_pretrained(folder / "adapter-plain"))
    on_first(lambda: build().save_pretrained(folder / "base"))


def adapters_of_zero(folder: Path, stage: int) -> None:
    import deepspeed

    engine = deepspeed_engine(lora(), stage, "bf16")
    train_deepspeed(engine)
    engine.save_checkpoint(folder / f"lora-zero{stage}")
    model = engine.module
    name = "adapter-zero3-empty" if stage == 3 else "adapter-zero2"  # under stage 3, nobody has gathered
    on_first(lambda: model.save_pretrained(folder / name))
    if stage == 3:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            on_first(lambda: model.save_pretrained(folder / "adapter-zero3"))
    engine.destroy()


def other_adapters(folder: Path) -> None:
    """Train an adapter under ZeRO-2 and under FSDP2."""
    adapters_of_zero(folder, 2)
    sharded = lora()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in sharded.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    train_plain(sharded, sharded, [p for p in sharded.parameters() if p.requires_grad])
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    plain = lora()
    on_first(lambda: plain.save_pretrained(folder / "adapter-fsdp2", state_dict=state))


def train_plain(model: Any, forward: Any, parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        forward(input_ids=tokens(step), labels=tokens(step)).loss.backward()
        optimizer.step()
    return optimizer


def fsdp2(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = train_plain(model, model, model.parameters())
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states, "step": 2}, checkpoint_id=folder / "fsdp2-dcp")
    # as accelerate's save_state lays it out, which on CPUs does not build FSDP
    dcp.save({"model": weights}, checkpoint_id=folder / "fsdp2-accelerate" / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": states}, checkpoint_id=folder / "fsdp2-accelerate" / "optimizer_0")


def with_accelerate(folder: Path) -> None:
    """Train under DDP by accelerate, and save with `save_state` and `save_pretrained`."""
    accelerator = Accelerator(cpu=True)
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(2):
        optimizer.zero_grad()
        accelerator.backward(model(input_ids=tokens(step), labels=tokens(step)).loss)
        optimizer.step()
    accelerator.save_state(str(folder / "accelerate-ddp"))
    inner = accelerator.unwrap_model(model)
    on_first(lambda: inner.save_pretrained(folder / "pretrained", max_shard_size="8KB"))


class Texts(torch.utils.data.Dataset):
    """A few rows of tokens."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, CONFIG["vocab_size"], (8,), generator=torch.Generator().manual_seed(row))
        return {"input_ids": ids, "labels": ids}


def with_trainer(folder: Path) -> None:
    """Train by transformers' Trainer: a model under ZeRO-3, an adapter under ZeRO-2, and a model under DDP."""
    from transformers import Trainer, TrainingArguments

    for name, model, stage in (
        ("trainer-ddp", build(), 0),
        ("trainer-zero3", build(), 3),
        ("trainer-lora-zero2", lora(), 2),
    ):
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        zero = {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
        engine = {
            "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "zero_optimization": zero,
        }  # fmt: skip
        arguments = TrainingArguments(
            output_dir=str(folder / name), use_cpu=True, ddp_backend="gloo", max_steps=2, save_steps=2,
            per_device_train_batch_size=2, report_to=[], deepspeed=engine if stage else None, disable_tqdm=True,
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=Texts()).train()
        dist.barrier()


def main() -> None:
    folder, is_quick = Path(sys.argv[1]), "quick" in sys.argv
    os.environ["DS_ACCELERATOR"] = "cpu"
    extensions.use_own_folder()
    extensions.use_built()  # or DeepSpeed compiles a kernel that no training here calls, for a minute
    import deepspeed

    deepspeed.init_distributed("gloo")
    parts = [deepspeed_stages, adapters, fsdp2, with_accelerate]
    if not is_quick:
        parts += [other_settings_of_deepspeed, universal, other_adapters, with_trainer]
    for part in parts:
        began = time.process_time()
        part(folder)
        print(part.__name__, round(time.process_time() - began, 1), file=sys.stderr)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
