"""Published measurements with which predictions are compared, each with its source and its conditions.

README.md in this folder describes them.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from zero_study.theory import computation, hardware, shapes
from zero_study.theory.adapters import Adapter
from zero_study.theory.engine import Engine, StepConfig, parameter_bytes
from zero_study.theory.hardware import Cluster
from zero_study.theory.shapes import ModelShape
from zero_study.theory.stacks import STACKS

FOLDER = Path(__file__).parent
THROUGHPUT = FOLDER / "mpt_throughput.csv"
REST = FOLDER / "mpt_throughput_rest.csv"  # the settings of the other rows of these tables

# The GPUs by their names in the tables, with the network bandwidth between nodes in bytes/s from the tables' headings.
_GPUS = {
    "a100_40gb": ("a100-40gb", 8 * 200e9 / 8),
    "a100_80gb": ("a100-80gb", 8 * 200e9 / 8),
    "h100_80gb": ("h100-sxm", 8 * 400e9 / 8),
}


@dataclass(frozen=True)
class MeasuredRow:
    """One row of the published tables of MPT trainings."""

    model: str  # 125m ... 70b
    fp8: bool  # some linear layers are in fp8, which zero_study/theory does not model
    shape: ModelShape
    engine: Engine
    job: StepConfig
    box: Cluster
    tokens_per_second_per_gpu: float
    mfu: float

    @property
    def seconds(self) -> float:
        """Seconds per optimizer step."""
        return float(self.job.tokens * self.job.gradient_accumulation_steps / self.tokens_per_second_per_gpu)

    @property
    def title(self) -> str:
        checkpointing = " checkpointing" if self.job.activation_checkpointing else ""
        batch = f"{self.job.micro_batch_size} x {self.job.gradient_accumulation_steps}"
        return (
            f"{self.box.num_gpus} x {self.box.gpu.name} {self.model} {self.job.sequence_length} tokens {batch}"
            f"{checkpointing}{' fp8' if self.fp8 else ''}"
        )


def throughput_rows() -> list[MeasuredRow]:
    """Return the rows of the published tables of MPT trainings to which constants are fitted."""
    with open(THROUGHPUT, encoding="utf-8", newline="") as file:
        return [_row(line) for line in csv.DictReader(file)]


def rest_of_throughput() -> list[MeasuredCase]:
    """Return the settings of the other rows of these tables, without what was measured."""
    with open(REST, encoding="utf-8", newline="") as file:
        return [_unmeasured(line) for line in csv.DictReader(file)]


def _unmeasured(line: dict[str, str]) -> MeasuredCase:
    row = _row(line | {"tokens_per_second_per_gpu": "nan", "mfu_percent": "nan"})
    sizes = "{num_gpus}x {model} {sequence_length} {micro_batch_size}x{gradient_accumulation_steps} {precision}"
    name = f"{line['gpu']} {sizes.format(**line)}"
    family, path = f"LLM Foundry, {row.box.gpu.name}", "scripts/train/benchmarking/README.md"
    return MeasuredCase(
        name, family, "A", "A", "fp8" if row.fp8 else "", "tokens_per_second_per_gpu", math.nan, "MosaicML",
        "https://github.com/mosaicml/llm-foundry", "", row.shape, row.engine, row.job, row.box, log=f"{path}, {name}",
    )  # fmt: skip


def _row(line: dict[str, str]) -> MeasuredRow:
    gpu, node_bandwidth = _GPUS[line["gpu"]]
    sequence_length, num_gpus = int(line["sequence_length"]), int(line["num_gpus"])
    # The models of the tables have as many positions as their sequences have tokens.
    shape = shapes.replace_parts(shapes.find(f"mpt-{line['model']}"), positions=sequence_length)
    resharded = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}[line["sharding_strategy"]]
    checkpointing = {"True": True, "False": False}[line["activation_checkpointing"]]
    micro_batch_size = int(line["micro_batch_size"])
    micro_steps = int(line["gradient_accumulation_steps"])
    return MeasuredRow(
        model=line["model"],
        fp8=line["precision"] == "amp_fp8",
        shape=shape,
        # LLM Foundry's mixed precision "PURE": parameters, gradients and communication in bf16, masters in fp32.
        engine=Engine(
            "fsdp", 3, num_gpus, "bf16-autocast", 4, reshard_after_forward=resharded, optimizer_kernel="foreach"
        ),
        job=StepConfig(
            micro_batch_size, sequence_length, micro_steps, checkpointing, attention="flash-1", kernels="fused"
        ),
        box=Cluster(hardware.find_gpu(gpu), num_gpus, node_bandwidth=node_bandwidth),
        tokens_per_second_per_gpu=float(line["tokens_per_second_per_gpu"]),
        mfu=float(line["mfu_percent"]) / 100,
    )


Grade = Literal["A", "B", "C"]
Quantity = Literal[
    "tokens_per_second_per_gpu", "samples_per_second", "seconds_per_step", "tflops_per_gpu",
    "peak_allocated_bytes", "allocated_bytes", "peak_unknown_bytes", "peak_reserved_bytes", "used_bytes", "fits",
]  # fmt: skip
# equal lengths: all batches have the same shape. varying lengths: they do not. emptied: the program empties the
# allocator's cache every few steps.
AllocatorUse = Literal["equal lengths", "varying lengths", "emptied"]
TIMES: tuple[Quantity, ...] = ("tokens_per_second_per_gpu", "samples_per_second", "seconds_per_step", "tflops_per_gpu")


@dataclass(frozen=True)
class MeasuredCase:
    """One published measurement of a run, with everything that is known about the run."""

    name: str
    family: str  # the source that measured it
    grade: Grade  # A: everything is published; B: one thing is assumed; C: rough
    collected_as: Grade  # the grade before an assumption changed an A to a B
    outside: str  # why the model of times does not cover it; empty if it does
    quantity: Quantity
    published: float  # a bool if the quantity is "fits"
    source: str
    url: str
    conditions: str  # the published conditions and the assumptions
    shape: ModelShape
    engine: Engine
    job: StepConfig
    box: Cluster
    allocator: AllocatorUse = "equal lengths"
    log: str = ""  # the path of the raw log or table; only of public logs

    @property
    def measured_by(self) -> str:
        """The repository or the paper that published the case. Several families can have the same publisher."""
        place, *_ = self.url.removeprefix("https://").partition("/")
        owner, name = self.url.replace("microsoft", "deepspeedai").split("/")[3:5]
        return owner if place.startswith("gist.") else f"{owner}/{name}"

    @property
    def sequences(self) -> float:
        """Sequences per GPU and step."""
        return float(self.job.micro_batch_size * self.job.gradient_accumulation_steps)

    @property
    def seconds(self) -> float:
        """Seconds per optimizer step, converted from the published time or rate."""
        if self.quantity == "seconds_per_step":
            return self.published
        if self.quantity == "samples_per_second":
            return self.sequences * self.engine.world_size / self.published
        if self.quantity == "tokens_per_second_per_gpu":
            return self.sequences * float(self.job.sequence_length) / self.published
        assert self.quantity == "tflops_per_gpu", self.quantity
        per_sequence = computation.hardware_flops_per_sequence(
            self.shape, self.job.sequence_length, self.job.recomputed
        )
        return float(self.sequences * per_sequence / (self.published * 1e12))


def cases(kind: Literal["times", "memory"] = "times") -> list[MeasuredCase]:
    """Return the published measurements of published.yaml: those of times, or those of memory."""
    return [case for case in _cases() if (case.quantity in TIMES) == (kind == "times")]


def adapter_cases() -> list[MeasuredCase]:
    """Return the cases of adapters.yaml: published memory and times of trainings with adapters."""
    return list(_cases("adapters.yaml"))


def public_logs(file: str = "public_logs.yaml") -> list[MeasuredCase]:
    """Return the settings of trainings with public logs, without what was measured in these trainings."""
    return list(_cases(file))


@cache
def _cases(file: str = "published.yaml") -> tuple[MeasuredCase, ...]:
    content = yaml.safe_load((FOLDER / file).read_text())
    cases, names = [], Counter[str]()
    for family in content["families"]:
        for entry in _entries(family):
            shape, engine, job, box = _setting(entry, content)
            name = _filled(entry, "id") or entry.get("name") or _name(entry, job, box)
            names[name] += 1
            name += f" ({names[name]})" if names[name] > 1 else ""
            collected, outside = entry["grade"], entry.get("outside", "")
            grade: Grade = "B" if collected == "A" and "assumed" in entry else collected
            facts = (family["source"], family["url"], family["conditions"].strip(), shape, engine, job, box)
            use, log = entry.get("allocator", "equal lengths"), _filled(entry, "log")
            values = entry["published"] if "published" in entry else dict.fromkeys(entry["compare"], math.nan)
            cases += [
                MeasuredCase(name, family["family"], grade, collected, outside, quantity, value, *facts, use, log)
                for quantity, value in values.items()
            ]
    return tuple(cases)


def _entries(family: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a family with what they share. A list of micro batch sizes stands for as many rows."""
    same = family["same"]
    for row in family["rows"]:
        entry = {**same, **row} | {part: {**same.get(part, {}), **row.get(part, {})} for part in ("box", "job")}
        sizes = entry["job"]["micro_batch_size"]
        for size in sizes if isinstance(sizes, list) else [sizes]:
            yield entry | {"job": {**entry["job"], "micro_batch_size": size}}


def _filled(entry: dict[str, Any], part: str) -> str:
    """Return the id or the log of a row, with the row's settings in place of names in braces."""
    return str(entry.get(part, "")).format(**entry["box"], **entry["job"], **entry)


def _setting(entry: dict[str, Any], content: dict[str, Any]) -> tuple[ModelShape, Engine, StepConfig, Cluster]:
    """Return the model, engine, job and machine of a published run from its entry.

    If the entry names a stack, it has that stack's defaults, as in an answer of `advise`. The entry's own settings take
    precedence.
    """
    box = _box(dict(entry["box"]))
    stack = STACKS[entry["stack"]] if "stack" in entry else None
    job = {**(stack.job if stack else {}), **entry["job"]}
    if job.get("activation_checkpointing") == "full":
        job["activation_checkpointing"] = True
    parts = dict(content["models"].get(entry["model"], {}))
    shape = shapes.find(parts.pop("model", entry["model"]))
    parts["positions"] = max(parts.get("positions", shape.positions), job["sequence_length"])
    changes = {part: value for part, value in parts.items() if getattr(shape, part) != value}
    shape = shapes.replace_parts(shape, **changes) if changes else shape  # models without formulas cannot be changed
    shape = dataclasses.replace(shape, name=parts.get("name", entry["model"]))
    if "adapter" in entry:
        adapter = entry["adapter"]
        shape = dataclasses.replace(shape, adapter=Adapter(**adapter | {"targets": tuple(adapter["targets"])}))
    engine = dict(content["engines"][entry["engine"]])
    precision = entry["precision"]
    if precision in ("fp16", "bf16") and engine["kind"] in ("torch", "ddp") and "accumulation_bytes" not in engine:
        precision += "-autocast"
    if engine.get("replicas") == "nodes":
        engine["replicas"] = box.num_nodes
    own = "foreach" if engine["kind"] in ("torch", "ddp", "fsdp") else "fused"  # defaults of PyTorch and DeepSpeed
    engine = {
        "accumulation_bytes": parameter_bytes(precision),
        "optimizer": entry.get("optimizer", "adamw"),
        "optimizer_kernel": entry.get("optimizer_kernel", own),
        **engine,
    }
    settings = Engine(world_size=box.num_gpus, precision=precision, **engine)
    if stack:
        kernel = {"optimizer_kernel": entry["optimizer_kernel"]} if "optimizer_kernel" in entry else {}
        settings = dataclasses.replace(stack.applied(settings), **kernel)
    return shape, settings, StepConfig(**job), box


def _box(box: dict[str, Any]) -> Cluster:
    """Return a machine from its entry.

    Properties of the host that the source does not give are those of a typical rented machine.
    """
    gpu = hardware.find_gpu(box.pop("gpu"))
    rented = {}
    if "gpus_per_node" not in box and "host_cores" not in box:
        typical = hardware.typical_box(gpu, box["num_gpus"])
        rented = {name: getattr(typical, name) for name in _OF_HOST}
    # The GPU of this run has another link or memory bandwidth than the GPU in hardware.py.
    own = {name: box.pop(name) for name in ("link_bandwidth", "memory_bandwidth") if name in box}
    if "network_gbps" in box:
        box["node_bandwidth"] = box.pop("network_gbps") * 1e9 / 8
    return Cluster(dataclasses.replace(gpu, **own), **{**rented, **box})


_OF_HOST = ("host_memory_bytes", "host_memory_bandwidth", "host_cores", "disk_bytes", "disk_read_bandwidth",
            "disk_write_bandwidth")  # fmt: skip


def _name(entry: dict[str, Any], job: StepConfig, box: Cluster) -> str:
    """Return the name of a configuration, made of the settings that distinguish it from others."""
    words = [entry["model"]]
    if adapter := entry.get("adapter"):
        quantized = "Q" if adapter.get("frozen") == "nf4" else ""
        words.append(f"{quantized}LoRA {adapter['rank']} on {' '.join(adapter['targets'])}")
    words += [f"{box.num_gpus} x {box.gpu.name}", entry["engine"].replace("_", " "), entry["precision"]]
    words.append(f"{job.sequence_length} tokens x {job.micro_batch_size} x {job.gradient_accumulation_steps}")
    checkpointing = {False: [], True: ["checkpointing"], "selective": ["selective checkpointing"]}
    checkpointing |= {"selective-op": ["selective checkpointing of operators"], "offload": ["checkpoints on the host"]}
    words += checkpointing[job.activation_checkpointing]
    words += ["compiled"] if job.compiled else []
    words += [f"{job.loss_kernel} loss"] if job.loss_kernel else []
    words += [job.attention] if job.attention not in ("sdpa", "flash-2") else []
    return ", ".join(words)
