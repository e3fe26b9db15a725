"""Lightning's comparison of strategies on eight A100: one row of a table per training, without its course."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from typing import Any

from public_sources.checkout import Checkout
from public_sources.reading import of_totals
from zero_study.public_runs.schema import PublicRun

FILES = {"250m": 0.25e9, "500m": 0.5e9, "1": 1e9, "4.1": 4.1e9, "16": 16e9}  # parameters by the name of the file
STRATEGIES = {"DDP": "ddp", "DeepSpeed ZeRO Stage 2": "zero2", "DeepSpeed ZeRO Stage 3": "zero3"}
MIB = 1 << 20


def runs(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield the rows of the five sizes. Empty cells stay unknown."""
    for file, parameters in FILES.items():
        path = f"results/{file}.csv"
        content = checkout.read(path)
        for number, row in enumerate(csv.DictReader(io.StringIO(content.decode())), 2):
            title = row["Plugin"].strip()
            has_checkpointing = title.endswith("w checkpointing")
            plugin = title.removesuffix("w checkpointing").strip()
            rest = plugin.partition(" Offload")[2]
            seconds, peak, batch = (
                float(row[name]) if row[name].strip() else None
                for name in ("Time per iteration (s)", "Peak Memory (MiB)", "Max Per GPU Batch Size")
            )
            yield of_totals(
                checkout, path, f"{file}-{title}".replace(" ", "-"), "csv",
                {
                    "seconds_per_step": seconds,
                    "peak_allocated_bytes": None if peak is None else round(peak * MIB),
                    "largest_micro_batch_size": None if batch is None else int(batch),
                },
                lines=[number, number],
                entry=file,
                parameters=round(parameters),
                activation_checkpointing=has_checkpointing,
                plugin=row["Plugin Alias"],
                note=rest.strip() or None,
                **_stated(plugin),
            )  # fmt: skip


def largest_models(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield the largest model that each strategy trained.

    The column of the time per iteration is empty. The time of an epoch is that of 120 iterations, with their start.
    """
    path = "results/size.csv"
    content = checkout.read(path)
    for number, row in enumerate(csv.DictReader(io.StringIO(content.decode())), 2):
        layers, heads, width, iterations = (
            int(re.search(rf"--{option} (\d+)", row["CMD"])[1])  # type: ignore[index]
            for option in ("n_layer", "n_head", "n_embd", "limit_train_batches")
        )
        yield of_totals(
            checkout, path, f"size-{row['Plugin']}".replace(" ", "-"), "csv",
            {"seconds": float(row["Epoch Time (s)"]), "step": iterations},
            lines=[number, number],
            entry="size",
            parameters=round(float(row["Parameters"]) * 1e9),
            activation_checkpointing="--checkpoint" in row["CMD"] or None,
            plugin=row["Plugin Alias"],
            layers=layers,
            heads=heads,
            width=width,
            **_stated(row["Plugin"]),
        )  # fmt: skip


def _stated(plugin: str) -> dict[str, Any]:
    base = plugin.partition(" Offload")[0]
    is_offloaded = plugin != base
    return {
        "model": "minGPT",
        "gpu": "A100",
        "num_gpus": 8,
        "num_nodes": 1,
        "program": "Lightning with minGPT",
        "engine": "DeepSpeed" if "DeepSpeed" in plugin else "DDP" if plugin == "DDP" else "FairScale",
        "strategy": STRATEGIES.get(base, base),
        "offload": "optimizer states and parameters" if "3" in base and is_offloaded
        else "optimizer states" if is_offloaded else "nothing",
        "precision": "fp16",
        "micro_batch_size": 8,
        "sequence_length": 128,
    }  # fmt: skip
