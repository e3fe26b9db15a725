"""Predict with which changes a run fits that ran out of memory."""

from __future__ import annotations

from typing import Any

from zero_study.errors import Refusal
from zero_study.logs.printed_settings import Setting
from zero_study.planner import Request, advise
from zero_study.planner.choose import StrategyPrediction
from zero_study.planner.request import find_model
from zero_study.terminal import bytes_text
from zero_study.why import tensors

AS_IT_IS = "these settings fit, so that the run used others, or something that the prediction does not contain"
ANY_GPU = "a100-80gb"  # a model is found in the same way for each GPU
_OF_RUN = ("strategy", "micro_batch_size", "gradient_accumulation_steps", "sequence_length")


def check(setting: Setting) -> None:
    """Raise Refusal if the options of the command name an unknown GPU or model."""
    request = Request(setting.gpu or ANY_GPU, 1)
    request.box()
    if setting.model is not None and tensors.shape_of(setting.model) is None:
        find_model(setting.model, request)


def remedies(setting: Setting) -> tuple[dict[str, Any], ...]:
    """Return the smallest changes with which the training is predicted to fit. Empty without a prediction."""
    if setting.model is None or setting.gpu is None or setting.num_gpus is None:
        return ()
    values = {name: value for name in _OF_RUN if (value := getattr(setting, name)) is not None}
    try:
        advice = advise(setting.model, Request(setting.gpu, setting.num_gpus, **values))
    except Refusal:
        return ()
    found = [_content(remedy.option, remedy.flags, remedy.kind, remedy.flags) for remedy in advice.remedies]
    if not found and advice.recommended is not None:
        job, box = advice.recommended.prediction.job, advice.box
        assumed = (
            f"{AS_IT_IS} ({box.num_gpus} x {box.gpu.name}, {job.micro_batch_size} x {job.sequence_length:,} tokens per "
            f"GPU and micro step, {'with' if job.activation_checkpointing else 'without'} activation checkpointing)"
        )
        return (_content(advice.recommended, "", "same", assumed),)
    return tuple(found)


def _content(option: StrategyPrediction, options: str, kind: str, what: str) -> dict[str, Any]:
    """Return a change and its prediction, as numbers and as a text."""
    needed, seconds = float(option.needed_bytes), float(option.seconds)
    return {
        "options": options, "strategy": option.strategy.name, "kind": kind, "needed_bytes_per_gpu": round(needed),
        "seconds_per_step": seconds,
        "text": f"{what}: {bytes_text(needed)} per GPU with {option.strategy.name}, {seconds:.3g} s per step",
    }  # fmt: skip
