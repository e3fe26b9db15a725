"""Predict for a logged run with which changes it fits, and whether its steps are slower than predicted."""

from __future__ import annotations

import statistics
from typing import Any

from zero_study.errors import Refusal
from zero_study.planner import Request, advise
from zero_study.planner.choose import StrategyPrediction
from zero_study.terminal import bytes_text
from zero_study.theory import hardware
from zero_study.why.cause import Cause
from zero_study.why.known import conclude
from zero_study.why.setting import Setting
from zero_study.why.steps import Steps

GIB = 1 << 30
SAME_MEMORY = 0.35  # GiB by which the memory that a message states may differ from that of a GPU in the list
AS_IT_IS = "these settings fit, so that the run probably used others (zero-study prove TRAIN.py shows which)"
# The usual one of several GPUs with the same memory.
_USUAL = (
    "t4",
    "v100-32gb",
    "rtx-4090",
    "l4",
    "rtx-a6000",
    "l40s",
    "a100-40gb",
    "a100-80gb",
    "h100-sxm",
    "h200",
    "b200",
)


def gpu_of(total_bytes: int | None) -> str | None:
    """Return the most common GPU with this memory, as PyTorch states it. None if no known GPU has it."""
    if total_bytes is None:
        return None
    near = {
        name for name, gpu in hardware.GPUS.items()
        if abs(gpu.torch_memory_bytes - total_bytes) <= SAME_MEMORY * GIB
    }  # fmt: skip
    return next((name for name in _USUAL if name in near), min(near, default=None))


def request_of(setting: Setting) -> tuple[str, Request] | None:
    """Return the name of the model and the planner's input for a run. None if too little is known about the run."""
    if setting.model is None or setting.gpu is None or setting.num_gpus is None:
        return None
    given = {
        "strategy": setting.strategy, "micro_batch_size": setting.micro_batch_size,
        "gradient_accumulation_steps": setting.gradient_accumulation_steps, "sequence_length": setting.sequence_length,
    }  # fmt: skip
    try:
        return setting.model, Request(
            setting.gpu, setting.num_gpus, **{k: v for k, v in given.items() if v is not None}
        )
    except Refusal:
        return None


def remedies(setting: Setting) -> tuple[dict[str, Any], ...]:
    """Return the smallest changes with which the training is predicted to fit. Empty without a prediction."""
    asked = request_of(setting)
    if asked is None:
        return ()
    model, request = asked
    try:
        advice = advise(model, request)
    except Refusal:
        return ()
    found = [_content(remedy.option, remedy.flags, remedy.kind, remedy.flags) for remedy in advice.remedies]
    if not found and advice.recommended is not None:
        return (_content(advice.recommended, "", "same", AS_IT_IS),)
    return tuple(found)


def _content(option: StrategyPrediction, options: str, kind: str, what: str) -> dict[str, Any]:
    """Return a change and its prediction, as numbers and as a text."""
    needed, seconds = float(option.needed_bytes), float(option.seconds)
    return {
        "options": options,
        "strategy": option.strategy.name,
        "kind": kind,
        "needed_bytes_per_gpu": round(needed),
        "seconds_per_step": seconds,
        "text": f"{what}: {bytes_text(needed)} per GPU with {option.strategy.name}, {seconds:.3g} s per step",
    }


def slower_than_predicted(steps: Steps, setting: Setting) -> list[Cause]:
    """Return a cause if steps take longer than predicted. Empty if they do not, or if there is no prediction."""
    asked = request_of(setting)
    times = [row.seconds for row in steps.rows[3:] if row.seconds] or [seconds for _, seconds in steps.bar_times[3:]]
    if asked is None or setting.strategy is None or setting.micro_batch_size is None or len(times) < 3:
        return []
    try:
        advice = advise(*asked)
    except Refusal:
        return []
    measured, option = statistics.median(times), advice.options[0]
    if measured <= float(option.slowest_seconds):
        return []
    return [
        conclude(
            "slow/than-predicted", (), measured=f"{measured:,.3g}", predicted=f"{option.seconds:,.3g}",
            slowest=f"{option.slowest_seconds:,.3g}", factor=f"{measured / float(option.seconds):.1f}",
        )
    ]  # fmt: skip
