"""Traced peaks of memory beside predicted ones: what a step of the real modules and engines holds, on no GPU."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from study.errors import Refusal
from study.planner.advice_text import LINE
from study.planner.choose import Advice, Option
from study.theory import on_box, peaks
from study.theory.case import Engine, Job
from study.theory.peaks import MOMENTS, Peak
from study.theory.peaks import Part as PredictedPart
from study.theory.shapes import ModelShape

Part = Literal[
    "parameters",  # with what is gathered of them
    "buffers",  # a module's own
    "gradients",
    "communication_buffers",
    "optimizer_states",
    "activations",
    "temporary_buffers",
]
Moment = Literal["forward and backward", "optimizer step"]
# What both name, with the traced and the predicted parts that are in it: logits are activations to a tracker.
GROUPS: dict[str, tuple[tuple[Part, ...], tuple[PredictedPart, ...]]] = {
    "parameters": (("parameters", "buffers"), ("parameters", "gathered_parameters")),
    "gradients and their buckets": (("gradients", "communication_buffers"), ("gradients", "communication_buffers")),
    "optimizer states": (("optimizer_states",), ("optimizer_states",)),
    "activations and temporaries": (
        ("activations", "temporary_buffers"),
        ("activations", "logits", "temporary_buffers"),
    ),
}


@dataclass(frozen=True)
class Traced:
    """Bytes of rank 0's tensors at the highest moment of a step, as they were counted."""

    parts: dict[Part, int]  # none of DeepSpeed's
    moment: Moment | None  # as the parts
    seconds: float  # that it took
    peak_bytes: int = 0  # where no part is known
    reserved_bytes: int | None = None  # where CUDA's allocator was replayed

    @property
    def total(self) -> int:
        return sum(self.parts.values()) or self.peak_bytes


@dataclass(frozen=True)
class Difference:
    """One group of parts, in bytes."""

    group: str
    traced: float
    predicted: float

    @property
    def num_bytes(self) -> float:
        return self.traced - self.predicted


def differences(traced: Traced, predicted: Peak, engine: Engine) -> list[Difference]:
    """Hold a traced figure against a prediction, a group of parts at a time; they add up to the whole difference."""
    foreseen = dict(predicted.parts)
    if engine.kind == "fsdp" and MOMENTS[int(predicted.moment)] == "end of backward":
        # What a unit's gradients are flattened into is temporary then, and in every other moment a buffer.
        foreseen["gradients"] += foreseen["temporary_buffers"]
        foreseen["temporary_buffers"] = 0.0
    return [
        Difference(group, sum(traced.parts[part] for part in ours), float(sum(foreseen[part] for part in theirs)))
        for group, (ours, theirs) in GROUPS.items()
    ]


def check_traceable(shape: ModelShape, engine: Engine, job: Job) -> None:
    """Raise Refusal, with the reason, for what fake tensors cannot show."""
    if engine.kind == "deepspeed":
        raise Refusal("DeepSpeed's engine is not traced, only torch's own are")
    if (engine.offload_optimizer, engine.offload_param) != ("none", "none"):
        raise Refusal("offload cannot be traced: fake tensors are all on one device")
    if shape.experts:
        raise Refusal("a mixture of experts cannot be traced: tokens go where their values send them, which are fake")
    if shape.architecture == "gpt2" and shape.kv_heads != shape.heads:
        raise Refusal("a GPT-2 with fewer heads of keys cannot be traced: transformers' has as many as of queries")
    if shape.head == "none":
        raise Refusal("a model without a head cannot be traced: it has no loss; name a class with one")
    if shape.has_transform and engine.kind == "fsdp":
        raise Refusal(
            "BERT over words cannot be sharded: its output layer shares its bias, which torch's FSDP2 refuses"
        )
    if job.dropout:
        raise Refusal(
            "dropout is not traced: what is traced runs a CPU's operators, which keep other masks than a GPU's"
        )
    if job.is_fused or job.loss != "eager":
        raise Refusal("fused kernels cannot be traced: what is traced are the modules of transformers")
    if job.activation_checkpointing == "selective":
        raise Refusal("selective checkpointing is not traced, only that of every block")
    if engine.optimizer != "adamw":
        raise Refusal(f"{engine.optimizer} is not traced, only AdamW is")
    if engine.precision in ("tf32", "fp8"):
        raise Refusal(f"{engine.precision} is not traced, which knows no such type; take fp32 or bf16")
    if engine.precision in ("bf16", "fp16") and engine.kind != "fsdp":
        raise Refusal(
            f"{engine.precision} without sharding cannot be traced: torch's AdamW has no fp32 masters; take "
            f"{engine.precision}-autocast"
        )


Tracer = Callable[[ModelShape, Engine, Job], Traced]  # of fake_tensors, which needs torch
SHOWN = 0.01  # of the traced peak: parts that differ by less are not listed
HEAD = """
Traced, not measured: a step of transformers' own modules over fake tensors; of DeepSpeed, as one rank of many.
Predicted: what is expected of the same modules (--kernels transformers). Tensors of one GPU, in GiB."""


def lines(advice: Advice, trace: Tracer) -> Iterator[str]:
    """Yield a line for each strategy as it is traced, and which cannot be traced and why."""
    yield HEAD
    not_traced: dict[str, list[str]] = {}
    # DeepSpeed's ranks are forks, which do without the threads that a backward in this process has made.
    for option in sorted(advice.options, key=lambda option: option.prediction.engine.kind != "deepspeed"):
        try:
            yield _line(advice, option, trace)
        except Refusal as refusal:
            not_traced.setdefault(str(refusal), []).append(option.strategy.name)
    for reason, names in not_traced.items():
        yield textwrap.fill(f"Not traced: {', '.join(names)}: {reason}.", LINE)


def _line(advice: Advice, option: Option, trace: Tracer) -> str:
    engine = option.prediction.engine
    job = dataclasses.replace(option.prediction.job, kernels="transformers", compiled=False, loss_kernel=None)
    traced = trace(advice.shape, engine, job)
    predicted = peaks.peak(advice.shape, engine, job)
    total = float(predicted.total)
    said = (
        f"{option.strategy.name}: traced {_gib(traced.total)}, predicted {_gib(total)}, "
        f"residual {(traced.total - total) / 2**30:+.2f} ({100 * (traced.total / total - 1):+.1f} %)"
    )
    needed = traced.total * (1 + on_box.ALLOCATOR_SLACK)
    why = _parts(traced, differences(traced, predicted, engine)) if traced.parts else "its parts are not told apart"
    if traced.reserved_bytes is not None:
        needed, why = traced.reserved_bytes, f"reserved {_gib(traced.reserved_bytes)}; {why}"
    verdict = "fits" if needed <= option.prediction.usable_bytes else "does not fit"
    return f"{said}: {why}; {verdict} by what was traced; {traced.seconds:.0f} s"


def _parts(traced: Traced, found: list[Difference]) -> str:
    """Name the parts that differ, the largest difference first."""
    differing = [each for each in found if abs(each.num_bytes) >= SHOWN * traced.total]
    if not differing:
        return f"no part differs by {100 * SHOWN:.0f} % of it"
    differing.sort(key=lambda each: -abs(each.num_bytes))
    return ", ".join(
        f"{each.group} {each.num_bytes / 2**30:+.2f} ({_gib(each.traced)} against {_gib(each.predicted)})"
        for each in differing
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"
