"""Look up in `stack_tables` which settings make a training program match a prediction, or why none do.

Options about sizes, the batch, adapters and full activation checkpointing are in `launch`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from zero_study.errors import Refusal
from zero_study.planner import stack_tables as tables
from zero_study.planner.stack_tables import NOTHING, Cell, Cells, Kind, Parts, Refused
from zero_study.strategy.file import Strategy
from zero_study.theory.adapters import AdapterKind
from zero_study.theory.engine import (
    Attention,
    Checkpointing,
    Kernels,
    LossKernel,
    Optimizer,
    OptimizerKernel,
    PrecisionClass,
)
from zero_study.theory.shapes import ModelShape
from zero_study.theory.stacks import GradientType, StackName

# The names of programs in messages.
_NAMES: dict[StackName, str] = {
    "trainer": "transformers' Trainer",
    "trl": "TRL",
    "deepspeed": "DeepSpeed",
    "study": "this project's trainer",
}
DROPOUT_RATE = 0.1  # an example, because the memory does not depend on the rate


@dataclass(frozen=True)
class Training:
    """The assumptions of a prediction about the training program, for one strategy."""

    stack: StackName
    kinds: tuple[Kind, ...]  # of the strategy; the first one that a cell has counts
    precision: PrecisionClass  # as requested
    adapter: AdapterKind | None  # None if all weights are trained
    is_in_4bit: bool  # whether the frozen weights are
    accumulates: bool  # over more than one micro step
    optimizer: Optimizer
    optimizer_kernel: OptimizerKernel
    attention: Attention
    kernels: Kernels
    loss: LossKernel
    compiled: bool
    dropout: bool
    checkpointing: Checkpointing | None  # None if the planner chooses between full and none
    grad_accum_dtype: GradientType
    sync_each_batch: bool
    reduce_dtype: GradientType
    context_parallel: int  # ranks that share a sequence under FSDP2; 1 if none do
    sequence_parallel: int  # the same under ZeRO
    shape: ModelShape | None = None  # None if the training is not of one model

    @property
    def model_type(self) -> str | None:
        """The model_type of the model's config.json. None if it is not known."""
        return None if self.shape is None or self.shape.config is None else self.shape.config.get("model_type")


def kinds_of(chosen: Strategy) -> tuple[Kind, ...]:
    """Return the kinds of engine that a strategy belongs to, the most specific one first, such as "zero3", "zero"."""
    if chosen.distributed_type == "DEEPSPEED":
        stages: tuple[Kind, ...] = ("zero3", "zero") if chosen.zero_stage == 3 else ("zero",)
        if not chosen.zero_stage:
            return ("zero0",)
        return stages if chosen.offload_optimizer_device == "none" else ("zero offload", *stages)
    if chosen.distributed_type == "FSDP":
        return ("fsdp offload", "fsdp") if chosen.offloads else ("fsdp",)
    return ("plain",)


def why_not(training: Training) -> Refused | None:
    """Return why a program cannot train what a prediction assumes. None if it can.

    Whether Liger has kernels for a model is not considered; `parts` does.
    """
    for table, cell in _cells_of(training):
        if isinstance(cell, Refused):
            return _of_option(table.flag, table.value(training), cell, training)
    return None


def parts(training: Training) -> Parts:
    """Return the flags and the lines of code that make a program train as the prediction assumes.

    Raises Refusal if the program cannot train so.
    """
    if (refused := why_not(training)) is not None:
        raise Refusal(refused.message)
    total = sum((cell for _, cell in _cells_of(training) if isinstance(cell, Parts)), NOTHING)
    total = total + _of_liger(total.liger, training) + _of_dropout(training)
    if training.stack != "trl":
        return total
    # TRL's script is not the user's own program.
    lines = [line.replace("Trainer(", "SFTTrainer(") for line in total.lines]
    return replace(total, lines=tuple(f"in sft.py: {line}" for line in lines))


# ---------------------------------------------------------------- which cells count


@dataclass(frozen=True)
class Table:
    """The settings that each program needs for one option of `advise`, depending on the training."""

    flag: str
    cells: Mapping[str, Cells]
    row: Callable[[Training], str | None]  # None if the option has no effect on the training
    value: Callable[[Training], str] = lambda _: ""  # as the user writes it; empty for a switch


def _row_of_precision(training: Training) -> str:
    """Return the row of the precision. Frozen weights may be in 16 bits, so with adapters autocast is no other row."""
    if training.adapter is not None and "plain" in training.kinds:
        return training.precision.removesuffix("-autocast")
    return training.precision


def _row_of_optimizer_kernel(training: Training) -> str | None:
    if training.optimizer == "adamw":
        return training.optimizer_kernel
    return None if training.optimizer_kernel == "fused" else "of another optimizer"


def _row_of_kernels(training: Training) -> str:
    is_in_chunks = training.kernels == "fused" and training.loss == "chunked"
    return f"{training.kernels}, with a loss in chunks" if is_in_chunks else training.kernels


def _row_of_accumulation(training: Training) -> str | None:
    """Return the row of the type in which DeepSpeed accumulates gradients of 16-bit parameters."""
    if "zero" not in training.kinds or training.precision not in ("bf16", "fp16"):
        return None
    return "fp32" if training.grad_accum_dtype == "fp32" else f"model {training.precision}"


def _row_of_reduction(training: Training) -> str | None:
    """Return the row of the type in which FSDP2 reduces gradients, which is fp32 anyway unless products are 16-bit."""
    name = tables.SIXTEEN_BITS.get(training.precision)
    if name is None or "fsdp" not in training.kinds:
        return None
    return f"fp32 {name}" if training.reduce_dtype == "fp32" else "model"


def _row_of_synchronization(training: Training) -> str | None:
    if not training.accumulates or "fsdp" not in training.kinds:
        return None
    return _switch(training.sync_each_batch)


def _switch(is_on: bool) -> str:
    return "on" if is_on else "off"


TABLES = (
    Table(
        "--activation-checkpointing",
        tables.CHECKPOINTING,
        lambda training: training.checkpointing,
        lambda training: training.checkpointing or "",
    ),
    Table("--precision", tables.PRECISIONS, _row_of_precision, lambda training: training.precision),
    Table("--optimizer", tables.OPTIMIZERS, lambda training: training.optimizer, lambda training: training.optimizer),
    Table(
        "--optimizer-kernel",
        tables.KERNELS_OF_OPTIMIZER,
        _row_of_optimizer_kernel,
        lambda training: training.optimizer_kernel,
    ),
    Table("--kernels", tables.KERNELS_OF_MODEL, _row_of_kernels, lambda training: training.kernels),
    Table(
        "--loss-kernel",
        tables.LOSSES,
        lambda training: f"{training.loss} compiled" if training.compiled else training.loss,
        lambda training: training.loss,
    ),
    Table("--adapter", tables.ADAPTERS, lambda training: training.adapter, lambda training: training.adapter or ""),
    Table("--load-in-4bit", tables.LOAD_IN_4BIT, lambda training: _switch(training.is_in_4bit)),
    Table("--attention", tables.ATTENTION, lambda training: training.attention, lambda training: training.attention),
    Table("--dropout", tables.DROPOUT, lambda training: _switch(training.dropout)),
    Table(
        "--context-parallel",
        tables.CONTEXT_PARALLEL,
        lambda training: _switch(training.context_parallel > 1),
        lambda training: str(training.context_parallel),
    ),
    Table(
        "--sequence-parallel",
        tables.SEQUENCE_PARALLEL,
        lambda training: _switch(training.sequence_parallel > 1),
        lambda training: str(training.sequence_parallel),
    ),
    Table("--compile", tables.COMPILE, lambda training: _switch(training.compiled)),
    Table("--reduce-dtype", tables.REDUCE_DTYPE, _row_of_reduction, lambda training: training.reduce_dtype),
    Table("--sync-each-batch", tables.SYNC_EACH_BATCH, _row_of_synchronization),
    Table(
        "--grad-accum-dtype", tables.GRAD_ACCUM_DTYPE, _row_of_accumulation, lambda training: training.grad_accum_dtype
    ),
)


def _cells_of(training: Training) -> Iterator[tuple[Table, Cell]]:
    """Yield the settings that a training needs, for each option that has an effect on it."""
    for table in TABLES:
        row = table.row(training)
        if row is None:
            continue
        cell = next(cell for stacks, cell in table.cells[row].items() if training.stack in stacks)
        if not isinstance(cell, (Parts, Refused)):  # one cell for each kind of strategy
            cell = next((cell[kind] for kind in training.kinds if kind in cell), cell["any"])
        if isinstance(cell, Parts) and table.cells is tables.OPTIMIZERS:
            # Some optimizers do not work with an engine, whichever program uses them.
            refused = tables.OF_ENGINES.get(training.optimizer, {})
            cell = next((refused[kind] for kind in training.kinds if kind in refused), cell)
        yield table, cell


def _of_option(flag: str, value: str, refused: Refused, training: Training) -> Refused:
    """Return a refusal whose reason names the option and the program."""
    reason = refused.reason.format(stack=_NAMES.get(training.stack, training.stack))
    return Refused(f"{f'{flag} {value}'.strip()}: {reason}", refused.remedy)


# ---------------------------------------------------------------- what depends on the model


def _of_liger(wanted: frozenset[str], training: Training) -> Parts:
    """Return how Liger's kernels are applied to a model. Raises Refusal if it has none for the model."""
    if not wanted:
        return NOTHING
    stack, model_type = training.stack, training.model_type or ""
    names = tables.LIGER.get(model_type)
    if names is None or ("chunked" in wanted and model_type in tables.WITHOUT_CHUNKS):
        return _without_liger(wanted, training)
    if stack == "axolotl":
        of_names = {tables.KEYS_OF_LIGER[name]: True for name in names} if "kernels" in wanted else {}
        of_losses = {key: True for loss, key in tables.LOSSES_OF_LIGER.items() if loss in wanted}
        return Parts(keys={"plugins": [tables.LIGER_PLUGIN], **of_names, **of_losses})
    arguments = {} if "kernels" in wanted else dict.fromkeys(names, False)
    if training.loss != "chunked":
        # Granite's default is Liger's other loss.
        loss = "cross_entropy" if model_type in tables.WITHOUT_CHUNKS else "fused_linear_cross_entropy"
        arguments[loss] = False
    if stack in ("trainer", "trl"):
        lines = (f"training_args.liger_kernel_config = {arguments}",) if arguments else ()
        return Parts(flags=("--use_liger_kernel True",), lines=lines)
    words = ", ".join(f"{name}={value}" for name, value in arguments.items())
    call = f"apply_liger_kernel_to_{model_type}({words})"
    return Parts(lines=(f"{call} of liger_kernel.transformers, before the model is created",))


def _without_liger(wanted: frozenset[str], training: Training) -> Parts:
    """Return what a program of one's own does for a model that Liger has no kernels for.

    Raises Refusal for the other programs.
    """
    name = "this model" if training.shape is None else training.shape.name
    if training.stack in ("accelerate", "deepspeed"):
        lines = {
            "kernels": f"modules with one kernel for each norm and activation function. Liger has none for {name}",
            "chunked": "LigerFusedLinearCrossEntropyLoss() in the model's forward, for the output layer and the loss",
        }
        return Parts(lines=tuple(line for part, line in lines.items() if part in wanted))
    if "kernels" in wanted:
        refused = Refused(f"Liger has no kernels for {name}", "Use --stack accelerate, and modules of your own")
        raise Refusal(_of_option("--kernels", training.kernels, refused, training).message)
    refused = Refused(f"Liger has no fused loss for {name}", "Use --stack trl, or --stack accelerate")
    raise Refusal(_of_option("--loss-kernel", training.loss, refused, training).message)


def _of_dropout(training: Training) -> Parts:
    """Return the rates of dropout, if dropout is predicted and the model has none by default.

    A model that has dropout by default keeps its rates. If the prediction is without dropout, `assumptions` says so.
    """
    stack, shape = training.stack, training.shape
    if stack == "study":
        return Parts(flags=(f"--dropout {DROPOUT_RATE if training.dropout else 0}",))
    if shape is None or stack == "torchtitan" or not training.dropout or not shape.counts.has_dropout:
        return NOTHING
    if shape.default_dropout:
        return NOTHING
    rates: dict[str, Any] = dict.fromkeys(shape.dropout or (), DROPOUT_RATE)
    if not rates or any("." in name for name in rates):  # of a part of the configuration, such as text_config
        names = " and ".join(rates) or "every dropout rate"
        return Parts(lines=(f"set {names} of the model's configuration to {DROPOUT_RATE}",))
    if stack == "axolotl":
        return Parts(keys={"overrides_of_model_config": rates})
    if stack == "trl":
        return Parts(lines=(f"training_args.model_init_kwargs |= {json.dumps(rates)}",))
    return Parts(model=tuple(f"{name}={value}" for name, value in rates.items()))
