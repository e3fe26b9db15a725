"""What is a traced figure, what cannot be traced, and by how much does it differ from what is predicted?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from study.errors import Refusal
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

    parts: dict[Part, int]
    moment: Moment
    seconds: float  # that it took

    @property
    def total(self) -> int:
        return sum(self.parts.values())


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
