"""Say in words how long a whole training takes, and what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_study import terminal
from zero_study.planner.machines import whole_training
from zero_study.planner.units import price_in_words, unit_of

if TYPE_CHECKING:
    from zero_study.planner.choose import Advice
    from zero_study.theory.gpus import Gpu


def duration(hours: float) -> str:
    """Return a time in words, in the unit in which one would say it, such as hours or days."""
    if hours < 2:
        return f"{terminal.significant(60 * hours, 2)} minutes"
    if hours < 72:
        return f"{terminal.significant(hours, 2)} hours"
    return f"{terminal.significant(hours / 24, 2)} days"


def short_duration(hours: float) -> str:
    """Return a time with the symbol of its unit, as tables show it."""
    number, unit = duration(hours).split()
    return f"{number} { ({'minutes': 'min'}.get(unit) or unit[0]) }"


def provider_of(gpu: Gpu) -> str:
    """Return who rents out a GPU. The source of its price begins with the provider, or with the instance before it."""
    first, second, *_ = gpu.price_source.split(", ")
    return second if second[0].isupper() else first


def price_source_of(gpu: Gpu) -> str:
    """Return the source and the date of a GPU's price."""
    return f"{gpu.price_source} ({gpu.price_date})" if gpu.price_date else gpu.price_source


def whole_training_sentence(advice: Advice) -> str | None:
    """Return how long the whole training takes and what it costs. None if the request names no length."""
    option = advice.recommended
    training = None if option is None else whole_training(option, advice.request)
    if training is None:
        return None
    units, hours, low = unit_of(advice.shape).plural, duration(training.hours), duration(training.hours_low)
    interval = f"at least {low}" if training.hours_high is None else f"{low} to {duration(training.hours_high)}"
    takes, costs = f"It is predicted to take {hours} ({interval})", "to cost"
    if option is not None and option.is_measured:
        takes, costs = f"With the step time that you measured, it takes {hours}", "costs"
    cost = ". The price of the GPU is not known"
    if training.dollars is not None:
        cost = f" and {costs} ${price_in_words(training.dollars)} at the price of {price_source_of(advice.box.gpu)}"
    return f"The whole training of {training.tokens:,.0f} {units} has {training.steps:,} steps. {takes}{cost}."
