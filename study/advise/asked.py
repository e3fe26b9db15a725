"""What does one want to know: which GPUs, which batch, which strategies? Refused where it makes no sense."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from study import strategy
from study.config import Refusal
from study.strategy import Strategy
from study.theory import hardware, shapes
from study.theory.case import Precision
from study.theory.hardware import Box
from study.theory.shapes import ModelShape

Kernels = Literal["transformers", "fused"]

SEQUENCES_PER_GPU = 8  # of the global batch, where none is asked for


class refusing:
    """Turn what theory raises for bad input into a refusal."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, ValueError) and not isinstance(error, Refusal):
            raise Refusal(str(error)) from None


@dataclass(frozen=True)
class Asked:
    """What one wants to know. Raises Refusal where it makes no sense."""

    gpu: str
    num_gpus: int = 1
    sequence_length: int = 1024
    global_batch_size: int | None = None
    strategy: str | None = None  # None: all of them
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    precision: Precision | None = None  # None: bf16 where the GPU has it, else fp16
    activation_checkpointing: bool | None = None  # None: where it makes a strategy fit, or faster
    kernels: Kernels = "fused"

    def box(self, num_gpus: int | None = None) -> Box:
        with refusing():
            return hardware.typical_box(hardware.find_gpu(self.gpu), num_gpus or self.num_gpus)

    @cached_property
    def chosen_precision(self) -> Precision:
        has = self.box(1).gpu.peak_flops_per_second
        precision = self.precision or ("bf16" if "bf16" in has else "fp16")
        kind = precision.removeprefix("pure-").removesuffix("-autocast")
        if kind not in has:
            raise Refusal(f"--precision {precision}: {self.box(1).gpu.name} has no unit for it; take fp16 or fp32")
        return precision

    def strategies(self, num_gpus: int) -> list[Strategy]:
        """The one asked for, or all that train on this many GPUs."""
        if self.strategy is not None:
            chosen = strategy.read_strategy(_find(self.strategy))
            if chosen.distributed_type == "NO" and num_gpus > 1:
                raise Refusal(f"--strategy {self.strategy}: runs one process, --gpus asks for {num_gpus}; take ddp")
            return [chosen]
        # One process has nobody to average or share with, and `single` knows no other.
        wrong = ("ddp", "fsdp2", "fsdp2_no_reshard") if num_gpus == 1 else ("single",)
        return [strategy.read_strategy(_find(name)) for name in strategy.names() if name not in wrong]

    def batch(self) -> tuple[int, int | None, int | None]:
        """Sequences per GPU and step; micro batch and accumulation where they are given. Refuses to round."""
        micro, accumulation, whole = self.micro_batch_size, self.gradient_accumulation_steps, self.global_batch_size
        if micro is not None and accumulation is None and whole is None:
            accumulation = 1
        if micro is not None and accumulation is not None:
            made = micro * accumulation * self.num_gpus
            if whole not in (None, made):
                raise Refusal(
                    f"--global-batch-size {whole} is not --micro-batch-size {micro} x --gradient-accumulation-steps "
                    f"{accumulation} x --gpus {self.num_gpus} = {made}; leave one of them out"
                )
            return micro * accumulation, micro, accumulation
        if whole is None:
            whole = SEQUENCES_PER_GPU * self.num_gpus * (accumulation or 1)
        each, rest = divmod(whole, self.num_gpus)
        if rest or each == 0:
            raise Refusal(
                f"--global-batch-size {whole} does not divide over --gpus {self.num_gpus}; change one of them"
            )
        part, flag = (micro, "--micro-batch-size") if micro else (accumulation, "--gradient-accumulation-steps")
        if part:
            other, rest = divmod(each, part)
            if rest or other == 0:
                raise Refusal(
                    f"--global-batch-size {whole} on --gpus {self.num_gpus} is {each} sequences per GPU, which "
                    f"{flag} {part} does not divide; change one of them"
                )
            micro, accumulation = (part, other) if micro else (other, part)
        return each, micro, accumulation


def find_model(name: str, sequence_length: int) -> tuple[ModelShape, list[str]]:
    """Find a model; a learned position embedding grows with the sequence, and that is said. Raises Refusal."""
    with refusing():
        shape = shapes.find(name)
    if sequence_length <= shape.positions:
        return shape, []
    note = f"{shape.name} has {shape.positions:,} positions: taken as if it had {sequence_length:,}"
    return dataclasses.replace(shape, positions=sequence_length), [note]


def _find(name: str) -> Path:
    """The file of a strategy, also of one in accelerate_configs/buckets/."""
    if not name.endswith((".yaml", ".yml", ".json")):
        for path in strategy.CONFIGS.glob(f"*/{name}.yaml"):
            return path
    return strategy.find_strategy(name)
