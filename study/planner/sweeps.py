"""What else could be run on the box, and on others: every split of the batch, and every number of GPUs."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from study.planner.choose import Advice, engine_for
from study.theory import on_box, peaks
from study.theory.on_box import Prediction

GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64)


class Choice(NamedTuple):
    """One way to run a strategy."""

    strategy: str
    prediction: Prediction


def choices(advice: Advice) -> list[Choice]:
    """Predict every strategy at every split of the batch, with and without activation checkpointing."""
    sequences, _, _ = advice.asked.batch()
    choices = []
    for option in advice.options:
        best = option.prediction
        for checkpointed in (False, True):
            for micro, accumulation in on_box.splits(sequences):
                job = dataclasses.replace(
                    best.job,
                    micro_batch_size=micro,
                    gradient_accumulation_steps=accumulation,
                    activation_checkpointing=checkpointed,
                )
                choices.append(Choice(option.strategy.name, on_box.predict(advice.shape, best.engine, job, best.box)))
    return choices


def pareto(choices: list[Choice]) -> list[Choice]:
    """Keep those that fit and that no other one that fits beats in both memory and speed; the smallest first."""
    named = {id(choice.prediction): choice for choice in choices}
    return [
        named[id(prediction)]
        for prediction in on_box.pareto(choice.prediction for choice in choices if choice.prediction.fits)
    ]


def needed_by_gpus(advice: Advice) -> dict[str, dict[int, float]]:
    """Predict what each strategy needs of a GPU for one sequence at a time, by the number of GPUs; bytes."""
    asked, shape = advice.asked, advice.shape
    job = dataclasses.replace(asked, activation_checkpointing="none").job()
    needed_bytes: dict[str, dict[int, float]] = {}
    for num_gpus in GPU_COUNTS:
        for chosen in asked.strategies(num_gpus):
            engine = engine_for(shape, asked, chosen, num_gpus)
            needed = on_box.needed_bytes(peaks.peak(shape, engine, job))
            needed_bytes.setdefault(chosen.name, {})[num_gpus] = needed
    return needed_bytes
