"""Logs of ds_verify_loss: Llama 3 8B under ZeRO-1, 2 and 3 on eight GPUs of a type that is not stated."""

from __future__ import annotations

import re
from collections.abc import Iterator

from public_sources.checkout import Checkout
from public_sources.reading import numbers_in, of_totals
from zero_study.public_runs.schema import PublicRun, Series

FOLDER = "results/results_20250617_035117/"
STEP = re.compile(r"Step (\d+), Loss: ([\d.]+) .*?time: ([\d.]+) alloc_mem: (\d+) peak_mem: (\d+)")
SUMMARY = re.compile(r" np=(\d+) batch_size=(\d+) seq=(\d+) zero_stage=(\d) acc=(\d+) .*?iteration time: ([\d.]+) ")
VERSION = re.compile(r"DeepSpeed info: version=([\d.]+)")
RATE = re.compile(r"learning_rate=([\d.e-]+)")


def runs(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield the trainings without DeepCompile."""
    for path in checkout.under(FOLDER, suffix="_baseline.log"):
        text = checkout.read(path).decode(errors="replace")
        *counts, seconds_per_step = numbers_in(text, SUMMARY)
        gpus, size, length, stage, accumulation = map(int, counts)
        rows = [[float(value) for value in row] for row in STEP.findall(text)]
        steps, losses, seconds, allocated, peaks = map(list, zip(*rows, strict=True))
        run = of_totals(
            checkout, path, path.rpartition("/")[2].removesuffix(".log"), "ds_verify_loss",
            {"seconds_per_step": seconds_per_step},
            ending="finished",
            entry=f"zero{stage}",
            model="Llama 3 8B",
            data="WikiText",
            num_gpus=gpus,
            program="ds_verify_loss, started by accelerate",
            engine="DeepSpeed",
            strategy=f"zero{stage}",
            offload="nothing",
            precision="bf16",
            optimizer="AdamW",
            activation_checkpointing=False,
            micro_batch_size=size,
            accumulation_steps=accumulation,
            global_batch_size=gpus * size * accumulation,
            sequence_length=length,
            learning_rate=numbers_in(text, RATE)[0],
            versions={"deepspeed": VERSION.findall(text)[0]},
        )  # fmt: skip
        columns = {
            "step": [int(step) // accumulation for step in steps],  # the program counts micro steps
            "loss": losses,
            "seconds_of_this_step": seconds,
            "allocated_bytes": [int(value) for value in allocated],
            "peak_allocated_bytes": [int(value) for value in peaks],
        }
        yield run.model_copy(update={"training": Series(columns=columns)})
