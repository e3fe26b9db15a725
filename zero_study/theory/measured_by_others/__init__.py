"""Published measurements with which predictions are compared, each with its source and its conditions.

README.md in this folder describes them.
"""

from __future__ import annotations

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
    return [case for case in cases_of("published") if (case.quantity in TIMES) == (kind == "times")]


@cache
def cases_of(name: str) -> tuple[MeasuredCase, ...]:
    """Return the cases of a YAML file of this folder, by its name without the suffix.

    Cases of trainings that are predicted before their logs are read have no measured value.
    """
    content = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    cases, names = [], Counter[str]()
    for family in content["families"]:
        for entry in _entries(family):
            shape, engine, job, box = _setting(entry, content)
            title = _filled(entry, "id") or entry.get("name") or _name(entry, job, box)
            names[title] += 1
            title += f" ({names[title]})" if names[title] > 1 else ""
            collected, outside = entry["grade"], entry.get("outside", "")
            grade: Grade = "B" if collected == "A" and "assumed" in entry else collected
            facts = (family["url"], family["conditions"].strip(), shape, engine, job, box)
            use, log = entry.get("allocator", "equal lengths"), _filled(entry, "log")
            values = entry["published"] if "published" in entry else dict.fromkeys(entry["compare"], math.nan)
            cases += [
                MeasuredCase(title, family["family"], grade, collected, outside, quantity, value, *facts, use, log)
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
