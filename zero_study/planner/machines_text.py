"""Format comparisons of machines, and the time and price of whole trainings, as text or as JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from zero_study import terminal
from zero_study.planner import advice_text
from zero_study.planner.advice_text import NARROW, aligned, images_content, training_content, wrapped
from zero_study.planner.choose import ENOUGH_FREE, gib
from zero_study.planner.machines import MOST_GPUS, cheapest
from zero_study.planner.reasons import percent
from zero_study.planner.request import reading
from zero_study.planner.training_text import duration, price_source_of, provider_of, short_duration
from zero_study.planner.units import Unit, price_in_words, unit_of
from zero_study.theory.shapes import DEFAULT_LENGTH

if TYPE_CHECKING:
    from zero_study.planner.machines import Comparison, Machine, NumbersOfGpus
    from zero_study.planner.request import Request
    from zero_study.theory.shapes import ModelShape

NUM_ROWS = 12  # of the table of machines


# ---------------------------------------------------------------- how many GPUs


def answer_of_numbers(numbers: NumbersOfGpus) -> str:
    """Say in one or two sentences how many GPUs a model needs, and how many leave enough memory free."""
    machines, name = numbers.machines, numbers.fewest.shape.name
    if not machines:
        return f"{name} does not fit on any number of these GPUs. Add --gpus with a number to see what would help."
    first, comfortable = machines[0], next((each for each in machines if each.is_comfortable), None)
    if first is comfortable:
        sentence = f"{_count(first)} {'is' if first.num_gpus == 1 else 'are'} enough for {name}: {_state(first)}."
        larger = [] if len(machines) == 1 else [f"With {_count(machines[1])}, {_state(machines[1])}."]
    else:
        need = "offload to the host" if first.option.offloads else "almost all of the memory"
        verb = "needs" if first.num_gpus == 1 else "need"
        sentence = f"{_count(first)} {verb} {need} for {name}: {_state(first)}."
        larger = [] if comfortable is None else [f"Without offload, use {_count(comfortable)}: {_state(comfortable)}."]
        if comfortable is not None and not first.option.offloads:
            larger = [f"To keep more memory free, use {_count(comfortable)}: {_state(comfortable)}."]
    return " ".join([sentence, *larger])


def _count(machine: Machine) -> str:
    return f"{machine.num_gpus} x {machine.gpu.name}"


def _state(machine: Machine) -> str:
    """Describe a recommended machine: strategy, free memory, speed, and time and price of the whole training."""
    option, training = machine.option, machine.training
    words = [f"{option.strategy.name} leaves {percent(option.free_share)} of each GPU free"]
    words.append(f"trains {option.total_tokens_per_second:,.0f} {unit_of(option.shape).plural} per second")
    if training is not None:
        dollars = "" if training.dollars is None else f" and ${price_in_words(training.dollars)}"
        words.append(f"needs {duration(training.hours)}{dollars} for the whole training")
    return terminal.listed(words)


def text_of_numbers(numbers: NumbersOfGpus, everything: bool = False) -> str:
    """Return a table of the numbers of GPUs on which a model fits, with the recommended strategy of each."""
    fewest, machines = numbers.fewest, numbers.machines
    lines = wrapped([answer_of_numbers(numbers)])
    if machines:
        request = fewest.request
        lines += ["", *wrapped([
            f"{fewest.shape.name}, {batch(fewest.shape, request)}. Predicted, not measured."
        ])]  # fmt: skip
        table = _table(machines, unit_of(fewest.shape))
        notes = [f"Note: {note}." for note in (*request.notes_of_file, reading(request.gpu)) if note]
        lines += ["", *table, "", *wrapped([_legend(machines), *_prices(machines), *notes])]
    if everything or not machines:
        return "\n".join([*lines, "", advice_text.text_of_fewest(fewest)])
    more = "--all shows how many GPUs each strategy needs, and all assumptions."
    return "\n".join([*lines, "", more])


def batch(shape: ModelShape, request: Request) -> str:
    """Describe the batch of one GPU, and the global batch that follows for more GPUs."""
    of_one = unit_of(shape).batch(request.batch()[0], request.sequence_length or DEFAULT_LENGTH)
    return f"{of_one} per {request.group} and step, so that more GPUs train a larger global batch"


def _table(machines: list[Machine], unit: Unit) -> list[str]:
    has_training = any(machine.training for machine in machines)
    has_price = any(machine.dollars_per_hour for machine in machines)
    last = (["time"] if has_training else []) + (["$" if has_training else unit.price_column] if has_price else [])
    head = ["machine", "strategy", "fits", "free", *([] if has_training else ["batch"]), unit.total_rate_column, *last]
    return aligned([head, *(_row(machine, last) for machine in machines)])


def _row(machine: Machine, last: list[str]) -> list[str]:
    option, training = machine.option, machine.training
    job, cost = option.prediction.job, price_in_words(machine.cost)
    if machine.cost is not None:
        ends = (machine.cost * end / option.seconds for end in (option.fastest_seconds, option.slowest_seconds))
        low, high = map(price_in_words, ends)
        cost += f" ({low}-{'?' if option.is_rough else high})"
    mark = advice_text.MARKS[job.activation_checkpointing]
    return [
        _count(machine),
        option.strategy.name,
        "yes" if option.has_enough_free else "tight",
        gib(option.free_bytes),
        *([] if training else [f"{job.micro_batch_size} x {job.gradient_accumulation_steps}{mark}"]),
        f"{option.total_tokens_per_second:,.0f}",
        *(short_duration(training.hours) if name == "time" and training else cost for name in last),
    ]


def _legend(machines: list[Machine]) -> str:
    sentences = ["free: GiB of each GPU that stay free."]
    if any(not machine.option.has_enough_free for machine in machines):
        sentences.insert(0, f"tight: fits, but leaves less than {100 * ENOUGH_FREE:.0f} % free.")
    if any(machine.training for machine in machines):
        sentences.append("time: the time of all steps, without setup, evaluation and checkpoints.")
    else:
        sentences.append("batch: micro batch x accumulation steps (c: with activation checkpointing).")
    if any(machine.dollars_per_hour for machine in machines):
        sentences.append("$: the predicted price, and the range in which the real price should be.")
    return " ".join(sentences)


def _prices(machines: list[Machine]) -> list[str]:
    """Return the sources of the prices of these GPUs, which come from several providers."""
    gpus = {machine.gpu.name: machine.gpu for machine in machines if machine.dollars_per_hour is not None}
    named = [f"{name} ${gpu.price_per_hour:,.2f} per hour: {price_source_of(gpu)}" for name, gpu in gpus.items()]
    return [f"Prices: {'; '.join(named)}."] if named else []


def content_of_machine(machine: Machine) -> dict[str, Any]:
    """Return a machine as plain data for JSON."""
    option = machine.option
    images = images_content(option)
    if images:
        images["images_per_second"] = machine.option.total_tokens_per_second
    return {
        "gpu": machine.gpu.name,
        "num_gpus": machine.num_gpus,
        "strategy": option.strategy.name,
        "has_enough_free": option.has_enough_free,
        "offloads": option.offloads,
        "needed_bytes_per_gpu": round(option.needed_bytes),
        "free_share": option.free_share,
        "seconds_per_step": option.seconds,
        "tokens_per_second": machine.option.total_tokens_per_second,
        "dollars_per_hour": machine.dollars_per_hour,
        "dollars_per_billion_tokens": option.prediction.dollars_per_billion_tokens,
        **images,
        "price_source": price_source_of(machine.gpu),
        "whole_training": None if machine.training is None else training_content(machine.training, option.shape),
    }


def content_of_numbers(numbers: NumbersOfGpus) -> dict[str, Any]:
    """Return the numbers of GPUs on which a model fits as plain data for JSON."""
    return {
        **advice_text.content_of_fewest(numbers.fewest),
        "answer": answer_of_numbers(numbers),
        "machines": [content_of_machine(machine) for machine in numbers.machines],
    }


# ---------------------------------------------------------------- machines with several kinds of GPUs


def answer_of_comparison(comparison: Comparison) -> str:
    """Say which machine is the cheapest and which is the fastest, within the limits of the user."""
    cheapest, fastest = comparison.cheapest, comparison.fastest
    if cheapest is None or fastest is None:
        return _answer_beyond_limits(comparison)
    within = {(True, True): " within budget and deadline", (True, False): " within the budget",
              (False, True): " within the deadline", (False, False): ""}[
        comparison.budget is not None, comparison.deadline is not None
    ]  # fmt: skip
    if cheapest is fastest:
        return f"The cheapest and the fastest machine{within} is {_count(cheapest)}: {_state(cheapest)}."
    parts = [f"The cheapest machine{within} is {_count(cheapest)}: {_state(cheapest)}."]
    lowest = comparison.within_limits[0]
    if lowest is not cheapest and lowest.certain_cost > (lowest.cost or math.inf):
        parts.append(
            f"{_count(lowest)} is predicted to cost less, but by less than the error of such predictions for several "
            "GeForce cards."
        )
    parts.append(f"The fastest is {_count(fastest)}: {_state(fastest)}.")
    if cheapest.dollars_per_hour and fastest.dollars_per_hour:
        providers = {provider_of(machine.gpu) for machine in (cheapest, fastest)}
        parts.append(f"The prices are those of {terminal.listed(sorted(providers))}.")
    return " ".join(parts)


def _answer_beyond_limits(comparison: Comparison) -> str:
    """Say that no machine keeps the limits, which machines come nearest, and what would keep them."""
    machines, enough = comparison.machines, comparison.enough
    least, soonest, unit = (
        cheapest(machines) or machines[0],
        min(machines, key=_hours),
        unit_of(comparison.shape).plural,
    )
    limits = [
        *([f"the budget of ${comparison.budget:,.0f}"] if comparison.budget is not None else []),
        *([f"the deadline of {comparison.deadline:g} h"] if comparison.deadline is not None else []),
    ]
    if least is soonest:
        no_machine = "No machine stays" if len(machines) > 1 else "This machine does not stay"
        parts = [f"{no_machine} within {' and '.join(limits)}. On {_count(least)}, {_state(least)}."]
    else:
        parts = [f"None of the {len(machines)} compared machines stays within {' and '.join(limits)}."]
        parts.append(f"The cheapest is {_count(least)}: {_state(least)}.")
        parts.append(f"The fastest is {_count(soonest)}: {_state(soonest)}.")
    in_time = [each for each in machines if comparison.deadline is None or _hours(each) <= comparison.deadline]
    if enough is not None:
        parts.append(f"More GPUs would be enough: on {_count(enough)}, {_state(enough)}.")
    elif comparison.budget is not None and in_time:
        needed = min(each.cost or 0 for each in in_time)
        parts.append(f"Use a budget of at least ${math.ceil(needed):,}, or train fewer {unit}.")
    else:
        parts.append(
            "No larger machine or cluster of these GPUs is predicted to be enough. Allow more time or money, train "
            f"fewer {unit}, or name another GPU."
        )
    return " ".join(parts)


def _hours(machine: Machine) -> float:
    assert machine.training is not None
    return machine.training.hours


def text_of_comparison(comparison: Comparison, everything: bool = False) -> str:
    """Return a table of the machines by price, as text. Only the first rows are shown unless `everything`."""
    kept = comparison.within_limits or comparison.machines
    kept = sorted(kept, key=lambda machine: machine is not comparison.cheapest)
    shown = kept if everything else kept[:NUM_ROWS]
    if comparison.fastest is not None and comparison.fastest not in shown:
        shown = [*shown[: NUM_ROWS - 1], comparison.fastest]
    notes = [
        "Prices come from different providers and dates, for machines rented on demand. Only strategies without "
        f"offload are compared, on powers of two up to {MOST_GPUS} GPUs. GPUs for which no typical machine is known "
        "are compared in one node only.",
        *(f"Note: {note}." for note in comparison.notes),
    ]
    if comparison.without_price:
        notes.append(
            f"No price is known for {', '.join(comparison.without_price)}. To include these GPUs, name them with --gpu."
        )
    if len(kept) > len(shown):
        notes.append(f"--all shows {len(kept) - len(shown)} more machines.")
    return "\n".join(
        [
            *wrapped(
                [
                    answer_of_comparison(comparison),
                    "",
                    f"{comparison.shape.name}, {batch(comparison.shape, comparison.request)}. Predicted.",
                ]
            ),
            "",
            *_table(shown, unit_of(comparison.shape)),
            "",
            *wrapped([_legend(shown)]),
            *(terminal.wrap(line, "", "  ", columns=NARROW) for line in _prices(shown)),
            *wrapped(notes),
        ]
    )


def content_of_comparison(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison of machines as plain data for JSON."""
    cheapest, fastest = comparison.cheapest, comparison.fastest
    return {
        "model": comparison.shape.name,
        "answer": answer_of_comparison(comparison),
        "budget": comparison.budget,
        "deadline_hours": comparison.deadline,
        "cheapest": None if cheapest is None else content_of_machine(cheapest),
        "fastest": None if fastest is None else content_of_machine(fastest),
        "enough": None if comparison.enough is None else content_of_machine(comparison.enough),
        "machines": [content_of_machine(machine) for machine in comparison.machines],
        "without_price": comparison.without_price,
        "notes": comparison.notes,
    }
