"""Which published measurements are the models held against? Each with its source and conditions; see README.md."""

from __future__ import annotations

import csv
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from study.theory import hardware, shapes
from study.theory.case import Engine, Job
from study.theory.hardware import Box
from study.theory.shapes import ModelShape

FOLDER = Path(__file__).parent
THROUGHPUT = FOLDER / "mpt_throughput.csv"

# The tables' names, and what their headings say of the network between nodes, in bytes/s.
_GPUS = {
    "a100_40gb": ("a100-40gb", 8 * 200e9 / 8),
    "a100_80gb": ("a100-80gb", 8 * 200e9 / 8),
    "h100_80gb": ("h100-sxm", 8 * 400e9 / 8),
}


@dataclass(frozen=True)
class MeasuredRow:
    """One row of the published MPT tables."""

    model: str  # 125m ... 70b
    fp8: bool  # some linear layers in fp8, which the models of theory do not know
    shape: ModelShape
    engine: Engine
    job: Job
    box: Box
    tokens_per_second_per_gpu: float
    mfu: float

    @property
    def title(self) -> str:
        checkpointing = " checkpointing" if self.job.activation_checkpointing else ""
        batch = f"{self.job.micro_batch_size} x {self.job.gradient_accumulation_steps}"
        return (
            f"{self.box.num_gpus} x {self.box.gpu.name} {self.model} {self.job.sequence_length} tokens {batch}"
            f"{checkpointing}{' fp8' if self.fp8 else ''}"
        )


def throughput_rows(path: Path = THROUGHPUT) -> list[MeasuredRow]:
    """Read the published MPT tables, or other rows of the same tables.

    Raises ValueError for a row whose number of parameters is not that of its shape, or that names what is not known.
    """
    with open(path, newline="") as file:
        return [_row(line, f"{path}, line {number}") for number, line in enumerate(csv.DictReader(file), 2)]


def _row(line: dict[str, str], where: str) -> MeasuredRow:
    try:
        gpu, node_bandwidth = _GPUS[line["gpu"]]
        sequence_length, num_gpus = int(line["sequence_length"]), int(line["num_gpus"])
        # The tables' models have as many positions as their sequences have tokens.
        shape = dataclasses.replace(shapes.find(f"mpt-{line['model']}"), positions=sequence_length)
        resharded = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}[line["sharding_strategy"]]
        num_params, checkpointing = int(line["num_params"]), _BOOLEANS[line["activation_checkpointing"]]
        micro_batch_size = int(line["micro_batch_size"])
        micro_steps = int(line["gradient_accumulation_steps"])
        speed, mfu = float(line["tokens_per_second_per_gpu"]), float(line["mfu_percent"]) / 100
    except KeyError as error:
        raise ValueError(f"{error}: not known, or a column that is missing, in {where}") from None
    if shape.num_params != num_params:
        raise ValueError(f"num_params {num_params}: mpt-{line['model']} has {shape.num_params}, in {where}")
    return MeasuredRow(
        model=line["model"],
        fp8=line["precision"] == "amp_fp8",
        shape=shape,
        # LLM Foundry's mixed precision "PURE": parameters, gradients and what is communicated in bf16, masters in fp32.
        engine=Engine("fsdp", 3, num_gpus, "bf16-autocast", 4, reshard_after_forward=resharded),
        job=Job(micro_batch_size, sequence_length, micro_steps, checkpointing, kernels="fused"),
        box=Box(hardware.find_gpu(gpu), num_gpus, node_bandwidth=node_bandwidth),
        tokens_per_second_per_gpu=speed,
        mfu=mfu,
    )


_BOOLEANS = {"True": True, "False": False}


@dataclass(frozen=True)
class MeasuredCase:
    """One published number of a whole run, with what is known of how it came about."""

    name: str
    quantity: Literal[
        "samples_per_second",
        "seconds_per_step",
        "tflops_per_gpu",
        "peak_gibibytes",
        "allocated_gibibytes",
        "fits",
    ]
    published: float  # of fits a bool
    source: str
    conditions: str  # as published, and what had to be assumed
    shape: ModelShape
    engine: Engine
    job: Job
    box: Box


def cases(kind: Literal["times", "memory"] = "times") -> list[MeasuredCase]:
    """List the published times, or the published memory, of numbers.yaml."""
    content = yaml.safe_load((FOLDER / "numbers.yaml").read_text())
    return [_case(entry) for entry in content[kind]]


def _case(entry: dict[str, Any]) -> MeasuredCase:
    box = dict(entry["box"])
    gpu = hardware.find_gpu(box.pop("gpu"))
    if "link_bandwidth" in box:  # of a card that theory has with another link
        gpu = dataclasses.replace(gpu, link_bandwidth=box.pop("link_bandwidth"))
    return MeasuredCase(
        name=entry["name"],
        quantity=entry["quantity"],
        published=entry["published"],
        source=entry["source"],
        conditions=entry["conditions"],
        shape=dataclasses.replace(shapes.find(entry["model"]), **entry.get("shape", {})),
        engine=Engine(world_size=box["num_gpus"], **entry["engine"]),
        job=Job(**entry["job"]),
        box=Box(gpu, **box),
    )
