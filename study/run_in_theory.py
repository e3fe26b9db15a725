"""Convert a run into the ModelShape, Engine and StepConfig of theory."""

from __future__ import annotations

from typing import Literal

from study.config import RunConfig
from zero_study.errors import Refusal
from zero_study.models import BUNDLED_VOCABULARY, SIZES, VOCABULARY
from zero_study.strategy.file import Strategy
from zero_study.strategy.theory_engine import engine_of_strategy
from zero_study.theory import adapters, shapes
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.shapes import ModelShape


def shape_of(config: RunConfig) -> ModelShape:
    """Return the shape of the model that a run trains, without building the model."""
    architecture = shapes.architecture_of(config.workload, config.size)
    vocabulary = BUNDLED_VOCABULARY if config.data == "bundled" else VOCABULARY[architecture]
    size = SIZES[config.workload][config.size]
    return shapes.decoder_shape(
        f"{config.workload} {config.size}", architecture, size["layers"], size["hidden"], size["heads"],
        size["positions"], vocabulary,
    )  # fmt: skip


def of_run(config: RunConfig, chosen: Strategy, world_size: int) -> tuple[ModelShape, Engine]:
    """Return the shape of the model that a run trains, with its adapter, and its engine.

    Theory has no fp64, so fp64 is treated as fp32. Raises Refusal if the model has no modules of the requested names.
    """
    shape = _with_adapter(shape_of(config), config)
    precision = "fp32" if config.precision == "fp64" else config.precision
    return shape, engine_of_strategy(chosen, shape.hidden, world_size, precision, config.accumulation_dtype)


def _with_adapter(shape: ModelShape, config: RunConfig) -> ModelShape:
    """Return the shape with the adapter that a run trains. The trainer builds the frozen weights in fp32."""
    adapter = adapters.from_options(
        config.lora_rank,
        config.lora_target,
        dropout=config.lora_dropout,
        load_in_4bit=config.load_in_4bit,
        head=shape.head,
        frozen="fp32",
    )
    try:
        return adapters.with_adapter(shape, adapter)
    except ValueError as error:
        raise Refusal(f"--lora-target {config.lora_target}: {error}. Use other names, or all-linear.") from None


def job_of(config: RunConfig, world_size: int, device: Literal["cpu", "gpu"]) -> StepConfig:
    """Return the work of one rank in an optimizer step of a run."""
    micro_batch_size, accumulation = config.batches(world_size)
    return StepConfig(
        micro_batch_size=micro_batch_size,
        sequence_length=config.sequence_length,
        gradient_accumulation_steps=accumulation,
        activation_checkpointing=config.activation_checkpointing,
        attention=config.attention,
        dropout=config.dropout > 0,
        kernels="transformers",
        device=device,
    )
