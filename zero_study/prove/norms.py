"""Compare the gradient norm that DeepSpeed reports and clips by with the norm of the gradients of the update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

FAR = 1.5  # a larger factor between the two norms is not rounding


class NormReport(TypedDict):
    """The observations of one rank. They can be written as JSON."""

    reported: float | None  # the norm of the gradients of all ranks, as DeepSpeed gives it
    squares: float  # sum of squares of the gradients that the optimizer got on this rank, after clipping
    elements: int  # their number


class NormJudgment(NamedTuple):
    findings: list[str]
    notes: list[str]


def report(model: Any, squares: float, elements: int) -> NormReport:
    """Return this rank's observations of the update that has just been made.

    Nothing is reported for models with experts, because DeepSpeed averages the norms of their gradients.
    """
    norm = getattr(model, "_global_grad_norm", None)
    has_experts = any(not getattr(p, "allreduce", True) for p in model.parameters())
    return {"reported": None if norm is None or has_experts else float(norm), "squares": squares, "elements": elements}


def judge(reports: Sequence[NormReport], facts: Mapping[str, Any]) -> NormJudgment:
    """Compare the norms of a step. `reports` has one entry per rank.

    Clipping divides by the reported norm, so the gradients of the update should have that norm, or the limit of
    clipping if that is smaller. Strong clipping is therefore no fault. Nothing is judged if DeepSpeed reports no norm,
    if the model itself is distributed, or if a part of the gradients was not seen.
    """
    reported = reports[0]["reported"]
    if facts["engine"] != "DeepSpeed" or reported is None or not 0 < reported < math.inf:
        return NormJudgment([], [])
    if len(facts["data_parallel_ranks"] or [0]) != facts["world_size"]:
        return NormJudgment([], [])
    own = reports if facts["zero_stage"] else reports[:1]  # without ZeRO, every rank has all gradients
    squares = sum(entry["squares"] for entry in own)
    if sum(entry["elements"] for entry in own) < facts["num_trainable_params"] or not math.isfinite(squares):
        return NormJudgment([], [])
    limit = facts["gradient_clipping"] or 0.0
    used, expected = math.sqrt(squares), min(reported, limit or math.inf)
    if expected / FAR <= used <= expected * FAR:
        return NormJudgment([], [])
    clips = f" and clips at {limit:g}" if limit else ""
    is_scaled_autocast = facts["precision"] == "fp16-autocast" and used < expected
    if is_scaled_autocast and not limit:
        return NormJudgment([], [f"the gradient norm that DeepSpeed reports, {reported:.4g}, has the loss scale in it"])
    cause = (
        " With the key torch_autocast in float16, DeepSpeed clips gradients that are still multiplied by the loss "
        'scale. Write bfloat16 as its dtype, or "gradient_clipping": 0.'
        if is_scaled_autocast
        else " Try another stage or precision, or another release of DeepSpeed."
    )
    return NormJudgment(
        [
            f"the norm of the gradients is wrong: DeepSpeed reports {reported:.4g}{clips}, but the update used "
            f"gradients with a norm of {used:.3g}, not {expected:.4g}.{cause}"
        ],
        [],
    )
