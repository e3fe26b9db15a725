"""What does a rule of the ledger ask the models of study/theory about? A case, as the ledger writes it, with its types.

A case is a model, a strategy's file, GPUs and a batch, in the precision class in which that strategy trains. Gradients
accumulate in the parameters' type, as DeepSpeed does unless it is told otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from study.errors import refusing
from study.strategy import engines, file
from study.theory import hardware, on_box, peaks, shapes
from study.theory.case import Engine, Job, Precision
from study.theory.hardware import Box
from study.theory.on_box import Prediction
from study.theory.peaks import Peak
from study.theory.shapes import ModelShape

POSITIONS, VOCABULARY = 1024, 50257  # of a model that is given by its shape
# DGX-2, as theory/measured_by_others/published.yaml has it: 16 V100, 1.5 TB of memory, eight drives of 3.84 TB, of
# which the papers count 28 TB; two sockets of 24 cores and six channels of DDR4-2666.
DGX_2 = {
    "gpus_per_node": 16,
    "host_memory_bytes": 1_500_000_000_000,
    "host_memory_bandwidth": 256e9,
    "host_cores": 48,
    "disk_bytes": 28_000_000_000_000,
    "disk_read_bandwidth": 8 * 3.2e9,
    "disk_write_bandwidth": 8 * 2.0e9,
}

Count = Annotated[int, Field(ge=1)]


class _Typed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class GivenModel(_Typed):
    """A model that theory knows by no name."""

    name: str
    architecture: Literal["bert", "gpt2", "gpt-neo", "gpt-j"]
    layers: Count
    hidden: Count
    heads: Count


class Case(_Typed):
    """What the models of memory and time are asked, named as in the ledger."""

    model: str | GivenModel
    strategy: str
    gpu: str
    gpus: Count
    micro_batch: Count
    sequence_length: Count
    precision: Precision
    checkpointing: bool
    accumulation: Count = 1
    kernels: Literal["fused", "transformers"] = "fused"  # transformers: its own modules, which hold and move more
    node: Literal["dgx-2", "whole"] | None = None  # whole: fewer GPUs have all of a rented node; None: their share

    @classmethod
    def of(cls, arguments: Mapping[str, Any], where: str = "arguments") -> Case:
        """Read a case of the ledger. Raises ValueError naming the key that is missing, unknown or of another type."""
        if not isinstance(arguments, Mapping):
            raise ValueError(f"{where}: {arguments!r} is not a case; give {', '.join(cls.model_fields)}")
        if "model" in arguments:
            arguments = {**arguments, "model": model_of(arguments["model"], f"{where}.model")}
        with refusing(where):
            return cls.model_validate(arguments)

    @property
    def shape(self) -> ModelShape:
        shape = shape_of(self.model)
        return dataclasses.replace(shape, positions=max(shape.positions, self.sequence_length))

    @property
    def engine(self) -> Engine:
        return engine_of(self.strategy, self.shape.hidden, self.gpus, self.precision)

    @property
    def job(self) -> Job:
        return Job(self.micro_batch, self.sequence_length, self.accumulation, self.checkpointing, kernels=self.kernels)

    @property
    def box(self) -> Box:
        return box_of(self.gpu, self.gpus, self.node)

    @property
    def is_offloaded(self) -> bool:
        return (self.engine.offload_optimizer, self.engine.offload_param) != ("none", "none")

    def __str__(self) -> str:
        accumulated = f" x {self.accumulation}" if self.accumulation > 1 else ""
        batch = f"{self.micro_batch} x {self.sequence_length}{accumulated} tokens"
        checkpointed = ", checkpointed" if self.checkpointing else ""
        gpus = f"{self.gpus} x {self.gpu}"
        return f"{self.shape.name}, {self.strategy}, {gpus}, {batch}, {self.engine.precision}{checkpointed}"


@lru_cache(maxsize=4096)
def peak_of(case: Case) -> Peak:
    """Predict the highest moment of a rank of the case."""
    return peaks.peak(case.shape, case.engine, case.job)


@lru_cache(maxsize=4096)
def prediction_of(case: Case) -> Prediction:
    """Predict memory and time of the case."""
    return on_box.predict(case.shape, case.engine, case.job, case.box)


def model_of(model: str | Mapping[str, Any], where: str = "model") -> str | GivenModel:
    """Read a model of the ledger. Raises ValueError naming the key that is missing, unknown or of another type."""
    if not isinstance(model, Mapping):
        return model
    with refusing(where):
        return GivenModel.model_validate(model)


def shape_of(model: str | GivenModel) -> ModelShape:
    """Find the shape of a model. Raises ValueError for a name that is none of theory's."""
    if isinstance(model, GivenModel):
        return shapes.plain(**model.model_dump(), positions=POSITIONS, vocabulary=VOCABULARY)
    if model not in shapes.KNOWN:
        raise ValueError(f"model {model!r}: is none that theory knows; name one of them or give its shape")
    return shapes.find(model)


def engine_of(strategy: str, hidden: int, world_size: int, precision: str) -> Engine:
    """Describe the engine of a strategy, in the class in which it trains and with gradients in 16 bits."""
    chosen = file.read_by_name(strategy)
    return engines.engine_of(chosen, hidden, world_size, engines.precision_class(chosen, precision), "bf16")


def box_of(gpu: str, gpus: int, node: str | None) -> Box:
    """Find the box of a case. Raises ValueError for an unknown GPU or node, and for GPUs that fill no nodes."""
    card = hardware.find_gpu(gpu)
    box = hardware.typical_box(card, gpus)
    match node:
        case None:
            return box
        case "whole":
            return dataclasses.replace(hardware.typical_box(card, box.gpus_per_node), num_gpus=gpus)
        case "dgx-2":
            return Box(card, gpus, **DGX_2)
    raise ValueError(f"node {node!r}: must be 'dgx-2' or 'whole'")


def around(value: float, factor: float) -> tuple[float, float]:
    """The interval from a factor below a value to the factor above it."""
    return value / factor, value * factor
