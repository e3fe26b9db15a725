"""PEFT's comparison of methods on MetaMathQA: full training and adapters of Llama 3.2 3B on one L40S."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from public_sources.checkout import Checkout
from public_sources.reading import of_totals
from zero_study.public_runs.schema import PublicRun, Series

FOLDER = "method_comparison/MetaMathQA/results/"
PACKAGES = ("torch", "transformers", "peft")


def runs(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield the trainings: losses, times and accuracies every 250 steps, and totals of the whole training.

    The reserved memory is that beyond what the process had at its start. It includes the evaluations.
    """
    for path in checkout.under(FOLDER, suffix=".json"):
        content = json.loads(checkout.read(path))
        info, config, trained = content["run_info"], content["run_info"]["train_config"], content["train_info"]
        *logged, last = trained["metrics"]
        packages = content["meta_info"]["package_info"]
        run = of_totals(
            checkout, path, PurePosixPath(path).stem.replace("--", "-"), "peft",
            {
                "seconds": round(trained["train_time"], 3),
                "tokens": last["train total tokens"],
                "loss": last["train loss"],
                "accuracy": last["test accuracy"],
                "peak_reserved_bytes": trained["accelerator_memory_max"],
                "reserved_bytes": trained["accelerator_memory_reserved_avg"],
            },
            ending="finished" if trained["status"] == "success" else "ended early",
            entry=info["experiment_name"],
            model=config["model_id"],
            parameters=trained["num_total_params"],
            data="MetaMathQA",
            gpu=content["meta_info"]["system_info"]["accelerator"].removeprefix("NVIDIA "),
            num_gpus=1,
            num_nodes=1,
            program="PEFT method_comparison",
            strategy="one GPU",
            offload="nothing",
            precision={"bfloat16": "bf16"}.get(config["dtype"], config["dtype"]),
            optimizer=config["optimizer_type"],
            adapter=_adapter(info["peft_config"]),
            activation_checkpointing=config["use_gc"],
            compiled=config["compile"],
            micro_batch_size=config["batch_size"],
            accumulation_steps=1,
            global_batch_size=config["batch_size"],
            learning_rate=config["optimizer_kwargs"].get("lr"),
            planned_steps=config["max_steps"],
            seed=config["seed"],
            versions={name: packages[f"{name}-version"] for name in PACKAGES},
            longest_sequence=config["max_seq_length"],
            trainable_parameters=trained["num_trainable_params"],
        )  # fmt: skip
        training = {
            "step": [entry["step"] for entry in logged],
            "samples": [entry["train samples"] for entry in logged],
            "seconds": [round(entry["elapsed time"], 3) for entry in logged],
            "seconds_per_step": [round(entry["train time"] / config["eval_steps"], 6) for entry in logged],
            "loss": [round(entry["train loss"], 6) for entry in logged],
            "allocated_bytes": [round(entry["mem allocated avg"]) for entry in logged],
        }
        evaluation = {"step": training["step"], "accuracy": [entry["valid accuracy"] for entry in logged]}
        yield run.model_copy(
            update={"training": Series(columns=training), "evaluation": Series(columns=evaluation)}
        )  # fmt: skip


def _adapter(config: dict[str, Any] | None) -> str | None:
    if config is None:
        return None
    rank = config.get("r") or config.get("rank")
    return f"{config['peft_type']}, rank {rank}" if isinstance(rank, int) else str(config["peft_type"])
