"""Make the answer of `zero-study advise --json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zero_study.answers import envelope
from zero_study.answers.envelope import Answer
from zero_study.planner import machines_text, reasons
from zero_study.planner.choose import Advice
from zero_study.planner.machines import Comparison, NumbersOfGpus
from zero_study.theory import gpus
from zero_study.theory.shapes import known_models

NOTHING_FITS, LIMITS = "advise/nothing-fits", "advise/beyond-limits"


def of(predicted: Any, content: Mapping[str, Any]) -> Answer:
    """Return predictions and their verdict as a JSON answer. `content` has the keys that only this answer has."""
    return envelope.answer("advise", predicted.verdict, findings(predicted), content)


def findings(predicted: Any) -> Iterator[envelope.Finding]:
    """Yield a finding if no strategy fits, with the change that helps most."""
    if predicted.verdict.result != "found":
        return
    if isinstance(predicted, Advice):
        change = next((remedy for remedy in predicted.remedies), None)
        remedy = "" if change is None else f"Add {change.flags}: {change.option.strategy.name} then fits."
        name = predicted.ranked[0].strategy.name
        yield envelope.Finding(NOTHING_FITS, "error", reasons.answer(predicted), remedy, name=name)
    elif isinstance(predicted, Comparison):
        yield envelope.Finding(LIMITS, "error", machines_text.answer_of_comparison(predicted))
    elif isinstance(predicted, NumbersOfGpus):
        yield envelope.Finding(NOTHING_FITS, "error", machines_text.answer_of_numbers(predicted))
    else:
        yield envelope.Finding(NOTHING_FITS, "error", "Not even the smallest model fits.")


def of_gpus() -> Answer:
    """Return the data sheets of all GPUs that --gpu accepts, as a JSON answer without a verdict."""
    sheets = [
        {
            "name": gpu.name,
            "torch_name": gpu.torch_name,
            "memory_bytes": gpu.memory_bytes,
            "dense_16_bit_flops_per_second": gpus.dense_16_bit_rate(gpu),
            "memory_bytes_per_second": gpu.memory_bandwidth,
            "link_bytes_per_second": gpu.link_bandwidth,
            "link": gpu.link,
            "dollars_per_hour": gpu.price_per_hour,
        }
        for gpu in gpus.GPUS.values()
    ]
    return envelope.answer("advise", None, (), {"gpus": sheets})


def of_models() -> Answer:
    """Return all models that --model accepts by name, as a JSON answer without a verdict."""
    models = [
        {
            "name": name,
            "num_params": shape.num_params,
            "positions": shape.positions,
            "hub_ids": known_models.KNOWN.hub_ids[name],
        }
        for name, shape in known_models.KNOWN.items()
    ]
    return envelope.answer("advise", None, (), {"models": models})
