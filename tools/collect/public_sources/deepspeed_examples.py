"""DeepSpeedExamples: a GPT with 6.86 billion parameters on four H100 under ZeRO-3, with masters in fp32 and in bf16."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from public_sources.checkout import Checkout
from public_sources.reading import read_run
from zero_study.public_runs.schema import PublicRun

FOLDER = "training/bf16_master_weight/"
LOSSES = f"{FOLDER}logs/7b_loss_run/"
MASTERS = {"baseline": "fp32", "bf16_full": "bf16"}
ROW = re.compile(r"^\| *(Baseline|BF16)[^|]*\| *\W*([\d.]+) GB\W*\| *\W*([\d.]+) GB\W*\| *([\d.]+)s *\|", re.MULTILINE)
GIB = 1 << 30  # the program prints GiB and calls them GB


def runs(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield both trainings: 1,000 losses each, and the memory and the time that the README states."""
    rows = {row[1].lower(): row for row in ROW.finditer(checkout.read(f"{FOLDER}README.md").decode())}
    for name, masters in MASTERS.items():
        config = json.loads(checkout.read(f"{FOLDER}configs/{name}.json"))
        allocated, peak, seconds = map(float, rows[name.partition("_")[0]].groups()[1:])
        run = read_run(
            checkout, f"{LOSSES}{name}_loss.csv", name,
            entry="7b_loss_run",
            model="GPT with 32 layers and a width of 4,096",
            parameters=6_860_000_000,
            data="WikiText-103",
            gpu="H100",
            num_gpus=4,
            num_nodes=1,
            program="DeepSpeedExamples bf16_master_weight",
            engine="DeepSpeed",
            strategy=f"zero{config['zero_optimization']['stage']}",
            offload="nothing",
            precision="bf16",
            optimizer=config["optimizer"]["type"],
            activation_checkpointing=True,
            micro_batch_size=1,
            accumulation_steps=config["gradient_accumulation_steps"],
            global_batch_size=4,
            sequence_length=512,
            learning_rate=config["optimizer"]["params"]["lr"],
            planned_steps=1000,
            seed=42,
            masters=masters,
            autocast=config["torch_autocast"]["enabled"],
        )  # fmt: skip
        totals = {
            "seconds_per_step": seconds,
            "allocated_bytes": round(allocated * GIB),
            "peak_allocated_bytes": round(peak * GIB),
        }
        yield run.model_copy(update={"totals": totals, "ending": "finished"})
