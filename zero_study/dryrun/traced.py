"""Define the result of simulating a step, and decide which models and engines can be simulated. This needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from zero_study.errors import Refusal
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.shapes import ModelShape

# Parameters include the copies that are gathered of them. Buffers are those of modules.
Part = Literal[
    "parameters", "buffers", "gradients", "communication_buffers", "optimizer_states", "activations",
    "temporary_buffers",
]  # fmt: skip
PARTS: tuple[Part, ...] = get_args(Part)
Moment = Literal["forward and backward", "optimizer step"]


@dataclass(frozen=True)
class Traced:
    """The result of simulating a step: the memory of a rank's tensors at the peak, and the collectives."""

    parts: dict[Part, int]  # bytes; empty for DeepSpeed
    moment: Moment | None
    seconds: float  # the time that the trace took
    peak_bytes: int = 0  # the peak, for engines whose parts are not known
    reserved_bytes: int | None = None  # by CUDA's allocator, replayed
    calls: list[dict[str, Any]] = field(default_factory=list)  # collectives in their order, as tracker.Call has them

    @property
    def total(self) -> int:
        return sum(self.parts.values()) or self.peak_bytes

    @property
    def collectives(self) -> list[dict[str, Any]]:
        """The collectives of the step by kind: their number, and the bytes of their full tensors."""
        kinds = dict.fromkeys(call["kind"] for call in self.calls)
        calls = {kind: [call["num_bytes"] for call in self.calls if call["kind"] == kind] for kind in kinds}
        return [{"kind": kind, "count": len(sizes), "bytes": sum(sizes)} for kind, sizes in calls.items()]


def check_traceable(shape: ModelShape, engine: Engine, job: StepConfig) -> None:
    """Raise Refusal if a step of this model, engine and job cannot be simulated. The message has the reason."""
    is_sharded, is_deepspeed, precision = engine.kind == "fsdp", engine.kind == "deepspeed", engine.precision
    adapter = shape.adapter
    reasons = {
        "offload cannot be traced: fake tensors are all on one device": {
            engine.offload_optimizer, engine.offload_param} != {"none"},
        "a mixture of experts cannot be traced: its router needs values, which fake tensors do not have": shape.experts,
        "a model without a head has no loss, so it cannot be traced. Name a class with a head.": shape.head == "none",
        "BERT's language model cannot be sharded: its output layer has a shared bias, which torch's FSDP2 refuses":
            shape.architecture == "bert" and shape.head == "tokens" and is_sharded,
        "dropout is not traced: the trace uses CPU operators, whose dropout masks differ from those of a GPU":
            job.dropout or (adapter is not None and adapter.has_dropout),
        "adapters are not traced under FSDP2: PyTorch 2.13 crashed in some of these traces":
            adapter is not None and is_sharded,
        "weights in 4 bits cannot be traced: fake tensors have no values to quantize":
            adapter is not None and adapter.is_quantized,
        "adapters in fp32 with weights in pure bf16 cannot be traced. Use bf16-autocast.":
            adapter is not None and adapter.in_fp32 and precision == "pure-bf16",
        "fused kernels cannot be traced, only the modules of transformers can":
            job.is_fused or job.loss != "eager",
        "FlashAttention cannot be traced. Use --attention sdpa, which needs as much memory.":
            job.attention.startswith("flash"),
        "trainings in which GPUs share a sequence cannot be traced. Use `zero-study dry-run` with the strategy file.":
            job.sequence_ranks > 1,
        "only activation checkpointing of every block without offload can be traced":
            isinstance(job.activation_checkpointing, str),
        f"{engine.optimizer} cannot be traced, only AdamW can": engine.optimizer != "adamw",
        f"ZeRO-{engine.zero_stage} in {precision} cannot be traced, only ZeRO-1 to ZeRO-3 in fp32 and bf16 can":
            is_deepspeed and (engine.zero_stage == 0 or precision not in ("fp32", "bf16")),
        f"{precision} cannot be traced. Use fp32 or bf16.": precision in ("tf32", "fp8"),
        f"{precision} without sharding: torch's AdamW keeps no fp32 master weights. Use {precision}-autocast.":
            precision in ("bf16", "fp16") and not is_sharded and not is_deepspeed,
    }  # fmt: skip
    for reason, holds in reasons.items():
        if holds:
            raise Refusal(reason)
