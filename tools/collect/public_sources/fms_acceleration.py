"""Benchmarks of fms-acceleration: one program on one A100 without sharding, and with accelerate and FSDP on several."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

from public_sources.checkout import Checkout
from public_sources.reading import of_totals
from zero_study.public_runs.schema import PublicRun

FOLDER = "scripts/benchmarks/"
# table -> name here, releases, accumulation steps, steps (None: the whole data once), tokens per sequence, AdamW's eps
FILES: dict[str, tuple[str, str, int, int | None, int | None, float]] = {
    "refs/a100_80gb.csv": ("packed", "refs/requirements", 1, 100, 4096, 1e-4),
    "refs/a100_80gb_granite.csv": ("packed", "refs/requirements_granite", 1, 100, 4096, 1e-4),
    "refs/a100_80gb_liger.csv": ("liger", "refs/requirements_liger", 1, 100, 4096, 1e-4),
    # This table has the accumulation steps.
    "refs/a100_80gb_moe.csv": ("experts", "refs/requirements_moe", 0, 100, None, 1e-8),
    "refs_orca/a100_80gb_mp.csv": ("multipack", "refs_orca/requirements", 2, None, None, 1e-4),
    "refs_orca/a100_80gb_pf.csv": ("padding-free", "refs_orca/requirements_pf", 2, None, None, 1e-4),
}
RELEASE = re.compile(r"^(torch|accelerate|transformers|trl|peft)==(\S+)", re.MULTILINE)
SHORTER = {"gpt_bigcode-santacoder": 2048}  # the model has no more positions
FROZEN = {"bnb": "NF4", "autogptq": "GPTQ"}
MODEL_OF_MULTIPACK = "mistralai/Mistral-7B-v0.1"  # by the scenarios of refs_orca
RATE_OF_EXPERTS, RATE_OF_MULTIPACK = 5e-5, 2e-5  # by the scenarios of each table
MIB = 1 << 20


def runs(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield every row. One without results has no totals and ended early: the source does not say why."""
    for file, (table, releases, accumulation, planned, length, eps) in FILES.items():
        path = f"{FOLDER}{file}"
        versions = dict(RELEASE.findall(checkout.read(f"{FOLDER}{releases}.txt").decode()))
        for line, row in enumerate(csv.DictReader(io.StringIO(checkout.read(path).decode())), 2):
            model = row.get("model_name_or_path") or MODEL_OF_MULTIPACK
            short = model.rpartition("/")[2]
            has_adapter, plugin = row.get("peft_method") == "lora", row["framework_config"]
            training = "adapters" if has_adapter else "full"
            gpus, size = int(row["num_gpus"]), int(row["per_device_train_batch_size"])
            steps_each = accumulation or int(row["gradient_accumulation_steps"])
            mixed = next((name for name in ("bf16", "fp16") if (row.get(name) or "").lower() == "true"), "no")
            batch = gpus * size * steps_each
            rate = row.get("learning_rate") or (RATE_OF_EXPERTS if table == "experts" else RATE_OF_MULTIPACK)
            frozen = next((kind for name, kind in FROZEN.items() if name in plugin), "16 bits")
            yield of_totals(
                checkout, path, f"{table}-{plugin}-{short}-{training}-{gpus}x-b{size}", "fms-acceleration",
                _totals(row, planned),
                lines=[line, line],
                ending="finished" if row["train_loss"] else "ended early",
                marks=[] if row["train_loss"] else ["without results; the source does not state the reason"],
                entry=f"{table}/{plugin}/{short}/{training}/{mixed}/{batch}",
                model=short,
                gpu="A100-SXM4-80GB",
                num_gpus=gpus,
                num_nodes=1,
                program="SFTTrainer of fms-hf-tuning",
                engine="FSDP1" if gpus > 1 else "none",
                strategy="fsdp" if gpus > 1 else "one GPU",
                offload="nothing",
                precision={"bfloat16": "bf16", "float16": "fp16"}[row["torch_dtype"]],
                optimizer="AdamW",
                adapter=f"LoRA, rank 16, on {row['target_modules']}; frozen: {frozen}" if has_adapter else None,
                activation_checkpointing=True,
                micro_batch_size=size,
                accumulation_steps=steps_each,
                global_batch_size=batch,
                sequence_length=SHORTER.get(short, length),
                learning_rate=float(rate),
                planned_steps=planned,
                versions=versions,
                table=table,
                training=training,
                plugin=plugin,
                mixed_precision=mixed,
                quantized_kernels=frozen != "16 bits" and "foak" in plugin,
                eps=eps,
            )  # fmt: skip


def _totals(row: dict[str, str], planned: int | None) -> dict[str, float | None]:
    if not row["train_loss"]:
        return {}
    seconds = float(row["train_runtime"])
    used = {name: row.get(f"mem_{name}") for name in ("torch_mem_alloc_in_bytes", "peak_torch_mem_alloc_in_bytes")}
    allocated, peak = (round(float(value)) if value else None for value in used.values())
    return {
        "loss": float(row["train_loss"]),  # the mean over all steps
        "seconds": seconds,
        "seconds_per_step": seconds / (planned or round(seconds * float(row["train_steps_per_second"]))),
        "tokens_per_second_per_gpu": float(row["train_tokens_per_second"]),
        "allocated_bytes": allocated,
        "peak_allocated_bytes": peak,
        "used_bytes": round(float(row["mem_nvidia_mem_reserved"]) * MIB),
    }
