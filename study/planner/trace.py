"""Traced peaks of memory beside predicted ones: what a step of the real modules and engines holds, on no GPU."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from study.errors import Refusal, RunFailed
from study.formatting import gib
from study.planner.advice_text import LINE, MARKS
from study.planner.choose import Option, option_of, splits
from study.planner.request import Request
from study.theory.engine import Engine, Job
from study.theory.peaks import PEAK_MOMENTS, Peak, PeakPart
from study.theory.shapes import ModelShape

Part = Literal[  # parameters with what is gathered of them; buffers of a module's own
    "parameters", "buffers", "gradients", "communication_buffers", "optimizer_states", "activations",
    "temporary_buffers",
]  # fmt: skip
Moment = Literal["forward and backward", "optimizer step"]
# What both name, with the traced and the predicted parts that are in it: logits are activations to a tracker.
GROUPS: dict[str, tuple[tuple[Part, ...], tuple[PeakPart, ...]]] = {
    "parameters": (("parameters", "buffers"), ("parameters", "gathered_parameters")),
    "gradients and their buckets": (("gradients", "communication_buffers"),) * 2,
    "optimizer states": (("optimizer_states",),) * 2,
    "activations, temporaries": (("activations", "temporary_buffers"), ("activations", "logits", "temporary_buffers")),
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


def check_traceable(shape: ModelShape, engine: Engine, job: Job) -> None:
    """Raise Refusal, with the reason, for what fake tensors cannot show."""
    is_sharded, precision = engine.kind == "fsdp", engine.precision
    reasons = {
        "DeepSpeed's engine is not traced, only torch's own are": engine.kind == "deepspeed",
        "offload cannot be traced: fake tensors are all on one device": {
            engine.offload_optimizer, engine.offload_param} != {"none"},
        "a mixture of experts cannot be traced: tokens go where their values send them, which are fake": shape.experts,
        "a GPT-2 with fewer heads of keys cannot be traced: transformers' has as many as of queries":
            shape.architecture == "gpt2" and shape.kv_heads != shape.heads,
        "a model without a head cannot be traced: it has no loss; name a class with one": shape.head == "none",
        "BERT over words cannot be sharded: its output layer shares its bias, which torch's FSDP2 refuses":
            shape.has_transform and is_sharded,
        "dropout is not traced: what is traced runs a CPU's operators, with other masks than a GPU's": job.dropout,
        "fused kernels cannot be traced: what is traced are the modules of transformers":
            job.is_fused or job.loss != "eager",
        "FlashAttention of 2022 is not traced, only PyTorch's attention and operators are": job.attention == "flash-1",
        "selective checkpointing is not traced, only that of every block":
            job.activation_checkpointing == "selective",
        f"{engine.optimizer} is not traced, only AdamW is": engine.optimizer != "adamw",
        f"{precision} is not traced, which knows no such type; take fp32 or bf16": precision in ("tf32", "fp8"),
        f"{precision} without sharding cannot be traced: torch's AdamW has no fp32 masters; take {precision}-autocast":
            precision in ("bf16", "fp16") and not is_sharded,
    }  # fmt: skip
    for reason, holds in reasons.items():
        if holds:
            raise Refusal(reason)


Tracer = Callable[[ModelShape, Engine, Job], Traced]  # of fake_tensors, which needs torch
SHOWN = 0.01  # of the traced peak: parts that differ by less are not listed
HEAD = """Traced, not measured: a step of transformers' modules over fake tensors; of DeepSpeed, as one rank of many.
Predicted: what is expected of the same modules (--kernels transformers). Tensors of one GPU, in GiB.
"""


def trace_options(tracer: Tracer, shape: ModelShape, asked: Request, options: Sequence[Option]) -> list[Option]:
    """Trace what can be; print a line for each trace, and which cannot be and why."""
    print(HEAD)
    found = {option.strategy.name: option for option in options}
    not_traced: dict[str, list[str]] = {}
    # DeepSpeed's ranks are forks, which do without the threads that a backward in this process has made.
    for option in sorted(options, key=lambda option: option.prediction.engine.kind != "deepspeed"):
        name = option.strategy.name
        try:
            found[name] = _trace(tracer, shape, asked, option)
        except (Refusal, RunFailed) as stopped:  # an engine that stops at one file says nothing of the others
            not_traced.setdefault(str(stopped), []).append(name)
    for reason, names in not_traced.items():
        print(textwrap.fill(f"Not traced, but predicted: {', '.join(names)}: {reason}.", LINE))
    print()
    return list(found.values())


def _trace(tracer: Tracer, shape: ModelShape, asked: Request, option: Option) -> Option:
    """Trace an option's split; while one does not fit, the fastest that does if it is as far off as that one was."""
    chosen, others = option.prediction, list(splits(shape, asked, option.prediction))
    while True:
        traced = tracer(shape, chosen.engine, chosen.job)
        option = option_of(shape, option.strategy, chosen, traced.total)
        print(_line(option, traced), flush=True)
        slower = [one for one in others if one.step.total > chosen.step.total]
        off = traced.total / chosen.peak.total
        others = [one for one in slower if one.needed_bytes * off <= one.usable_bytes]
        if option.fits or not others:
            return option
        chosen = min(others, key=lambda one: one.step.total)


def _line(option: Option, traced: Traced) -> str:
    job, predicted = option.prediction.job, option.prediction.peak
    total = float(predicted.total)
    reserved = "" if traced.reserved_bytes is None else f"reserved {gib(traced.reserved_bytes)}; "
    why = _parts(traced, predicted, option.prediction.engine) if traced.parts else "its parts are not told apart"
    return (
        f"{option.strategy.name}, {job.micro_batch_size} x {job.gradient_accumulation_steps}"
        f"{MARKS[job.activation_checkpointing]}: traced {gib(traced.total)}, predicted {gib(total)}, "
        f"residual {(traced.total - total) / 2**30:+.2f} ({100 * (traced.total / total - 1):+.1f} %): {reserved}{why}; "
        f"{'fits' if option.fits else 'does not fit'} by what was traced; {traced.seconds:.0f} s"
    )


def _parts(traced: Traced, predicted: Peak, engine: Engine) -> str:
    """Name the groups of parts that differ, the largest difference first; all of them add up to the residual."""
    foreseen = dict(predicted.parts)
    if engine.kind == "fsdp" and PEAK_MOMENTS[int(predicted.moment)] == "end of backward":
        # What a unit's gradients are flattened into is temporary then, and in every other moment a buffer.
        foreseen["gradients"] += foreseen["temporary_buffers"]
        foreseen["temporary_buffers"] = 0.0
    said: list[tuple[float, str]] = []
    for group, (ours, theirs) in GROUPS.items():
        found, expected = sum(traced.parts[part] for part in ours), float(sum(foreseen[part] for part in theirs))
        if (size := abs(found - expected)) >= SHOWN * traced.total:
            beside = f"({gib(found)} against {gib(expected)})"
            said.append((size, f"{group} {(found - expected) / 2**30:+.2f} {beside}"))
    said.sort(reverse=True)
    return ", ".join(words for _, words in said) or f"no part differs by {100 * SHOWN:.0f} % of it"
