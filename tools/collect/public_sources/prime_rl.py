"""Baselines of prime-rl: time, tokens per second and reserved memory of short trainings with FSDP2."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import PurePosixPath

from public_sources.checkout import Checkout
from public_sources.reading import of_totals
from zero_study.public_runs.schema import PublicRun

FOLDER = "benchmarks/baselines/"
CARDS = {"NVIDIA H100 80GB HBM3": "H100-SXM5-80GB"}
GIB = 1 << 30


def runs(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield the benchmarks. One that failed has no time and no memory, and its ending and marks say so."""
    for path in checkout.under(FOLDER, suffix=".json"):
        content = json.loads(checkout.read(path))
        config, metrics = content["config"], content["metrics"]
        name = PurePosixPath(path).stem.removeprefix("benchmark-")
        has_adapter, error = config["lora_rank"] is not None, config["error_reason"] or ""
        is_full = "OutOfMemoryError" in error
        totals = {
            "seconds_per_step": metrics["step_time"]["mean"],
            "tokens_per_second": metrics["throughput"]["mean"],
            "deviation_of_tokens_per_second": metrics["throughput"]["std"],
            "peak_reserved_bytes": round(metrics["peak_memory"]["gib"] * GIB),
        }
        yield of_totals(
            checkout, path, name, "prime-rl", totals if config["success"] else {},
            ending="finished" if config["success"] else "ended early",
            marks=[] if config["success"] else ["out of memory" if is_full else f"it failed: {error}"],
            entry=name.partition("-")[2],
            model=config["model_name"],
            data="random tokens",
            gpu=CARDS.get(config["device_name"], config["device_name"].removeprefix("NVIDIA ")),
            num_gpus=config["num_gpus"],
            num_nodes=1,
            program="prime-rl",
            engine="FSDP2",
            strategy="fsdp2",
            offload="activations" if config["ac"] == "Offload" else "nothing",
            adapter=f"LoRA, rank {config['lora_rank']}" if has_adapter else None,
            activation_checkpointing=config["ac"] == "Recompute" or None,
            compiled=True,
            accumulation_steps=config["micro_batches"],
            global_batch_size=config["micro_batches"] * config["num_gpus"],
            sequence_length=config["seq_len"],
            training=config["type"],
            attention=config["attention"],
            expert_parallel=config.get("ep"),
            context_parallel=config.get("cp"),
            date=config["timestamp"][:10],
        )  # fmt: skip
