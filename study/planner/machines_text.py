"""Format comparisons of machines, and the time and price of whole trainings, as text or as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from study import terminal
from study.planner import advice_text
from study.planner.advice_text import NARROW, aligned, images_content, training_content, wrapped
from study.planner.choose import ENOUGH_FREE, gib
from study.planner.machines import MOST_GPUS
from study.planner.reasons import percent
from study.planner.training_text import duration, price_of, short_duration
from study.planner.units import Unit, unit_of
from study.theory.shapes import DEFAULT_LENGTH

if TYPE_CHECKING:
    from study.planner.machines import Comparison, Machine, NumbersOfGpus
    from study.planner.request import Request
    from study.theory.shapes import ModelShape

NUM_ROWS = 12  # of the table of machines


# ---------------------------------------------------------------- how many GPUs


def answer_of_numbers(numbers: NumbersOfGpus) -> str:
    """Return one or two sentences: how many GPUs a model needs, and how many are comfortable."""
    machines, name = numbers.machines, numbers.fewest.shape.name
    if not machines:
        return f"{name} does not fit on any number of these GPUs. Add --gpus with a number to see what would help."
    first, comfortable = machines[0], next((each for each in machines if each.is_comfortable), None)
    if first is comfortable:
        sentence = f"{_count(first)} {'is' if first.num_gpus == 1 else 'are'} enough for {name}: {_state(first)}."
        larger = machines[1:2]
    else:
        need = "offload to the host" if first.option.offloads else "almost all of the memory"
        verb = "needs" if first.num_gpus == 1 else "need"
        sentence = f"{_count(first)} {verb} {need} for {name}: {_state(first)}."
        larger = [] if comfortable is None else [comfortable]
    more = [f"{_count(each)} {'is' if each.num_gpus == 1 else 'are'} comfortable: {_state(each)}." for each in larger]
    return " ".join([sentence, *more])


def _count(machine: Machine) -> str:
    return f"{machine.num_gpus} x {machine.gpu.name}"


def _state(machine: Machine) -> str:
    """Return strategy, free memory and speed of a machine, and time and price of the whole training if it is named."""
    option, training = machine.option, machine.training
    words = [f"{option.strategy.name} leaves {percent(option.free_share)} free"]
    words.append(f"{machine.tokens_per_second:,.0f} {unit_of(option.shape).plural} per second")
    if training is not None:
        dollars = "" if training.dollars is None else f" for ${training.dollars:,.0f}"
        words.append(f"the whole training in {duration(training.hours)}{dollars}")
    return ", ".join(words)


def text_of_numbers(numbers: NumbersOfGpus, everything: bool = False) -> str:
    """Return a table of the numbers of GPUs on which a model fits, and of what each strategy needs there."""
    fewest, machines = numbers.fewest, numbers.machines
    lines = wrapped([answer_of_numbers(numbers)])
    if machines:
        request = fewest.request
        lines += ["", *wrapped([
            f"{fewest.shape.name}, {_batch(fewest.shape, request)}. Predicted, not measured."
        ])]  # fmt: skip
        table = _table(machines, unit_of(fewest.shape))
        lines += ["", *table, "", *wrapped([_legend(machines), *_prices(machines)])]
    if everything or not machines:
        return "\n".join([*lines, "", advice_text.text_of_fewest(fewest)])
    more = "--all shows how many GPUs each strategy needs, and all assumptions."
    return "\n".join([*lines, "", more])


def _batch(shape: ModelShape, request: Request) -> str:
    """Return the batch of one GPU, and what it means for more of them."""
    batch = unit_of(shape).batch(request.batch()[0], request.sequence_length or DEFAULT_LENGTH)
    return f"{batch} per {request.group} and step, so that more GPUs train a larger global batch"


def _table(machines: list[Machine], unit: Unit) -> list[str]:
    has_training = any(machine.training for machine in machines)
    has_price = any(machine.dollars_per_hour for machine in machines)
    last = (["time"] if has_training else []) + (["$" if has_training else unit.price_column] if has_price else [])
    head = ["machine", "strategy", "fits", "free", *([] if has_training else ["batch"]), unit.total_rate_column, *last]
    return aligned([head, *(_row(machine, last) for machine in machines)])


def _row(machine: Machine, last: list[str]) -> list[str]:
    option, training = machine.option, machine.training
    job = option.prediction.job
    cells = {
        "time": "" if training is None else short_duration(training.hours),
        "$": "?" if machine.cost is None else f"{machine.cost:,.0f}",
        unit_of(option.shape).price_column: unit_of(option.shape).price_in_words(machine.cost),
    }
    mark = advice_text.MARKS[job.activation_checkpointing]
    return [
        _count(machine),
        option.strategy.name,
        "yes" if option.has_enough_free else "tight",
        gib(option.free_bytes),
        *([] if training else [f"{job.micro_batch_size} x {job.gradient_accumulation_steps}{mark}"]),
        f"{machine.tokens_per_second:,.0f}",
        *(cells[name] for name in last),
    ]


def _legend(machines: list[Machine]) -> str:
    sentences = ["free: GiB of each GPU that stay free."]
    if any(not machine.option.has_enough_free for machine in machines):
        sentences.insert(0, f"tight: fits, but leaves less than {100 * ENOUGH_FREE:.0f} % free.")
    if any(machine.training for machine in machines):
        sentences.append("time: the time of all steps, without setup, evaluation and checkpoints.")
    else:
        sentences.append("batch: micro batch x accumulation steps (c: with activation checkpointing).")
    return " ".join(sentences)


def _prices(machines: list[Machine]) -> list[str]:
    """Return the sources of the prices of these GPUs, which are of several providers."""
    gpus = {machine.gpu.name: machine.gpu for machine in machines if machine.dollars_per_hour is not None}
    named = [f"{name} ${gpu.price_per_hour:,.2f} per hour: {price_of(gpu)}" for name, gpu in gpus.items()]
    return [f"Prices: {'; '.join(named)}."] if named else []


def content_of_machine(machine: Machine) -> dict[str, Any]:
    """Return a machine as plain data for JSON."""
    option = machine.option
    images = images_content(option)
    if images:
        images["images_per_second"] = machine.tokens_per_second
    return {
        "gpu": machine.gpu.name,
        "num_gpus": machine.num_gpus,
        "strategy": option.strategy.name,
        "has_enough_free": option.has_enough_free,
        "offloads": option.offloads,
        "needed_bytes_per_gpu": round(option.needed_bytes),
        "free_share": option.free_share,
        "seconds_per_step": option.seconds,
        "tokens_per_second": machine.tokens_per_second,
        "dollars_per_hour": machine.dollars_per_hour,
        "dollars_per_billion_tokens": option.prediction.dollars_per_billion_tokens,
        **images,
        "price_source": price_of(machine.gpu),
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
    """Return which machine is the cheapest and which is the fastest, within the limits of the user."""
    cheapest, fastest = comparison.cheapest, comparison.fastest
    if cheapest is None or fastest is None:
        return _answer_beyond_limits(comparison)
    within = {(True, True): " within budget and deadline", (True, False): " within the budget",
              (False, True): " within the deadline", (False, False): ""}[
        comparison.budget is not None, comparison.deadline is not None
    ]  # fmt: skip
    if cheapest is fastest:
        return f"The cheapest and the fastest machine{within} is {_count(cheapest)}: {_state(cheapest)}."
    return (
        f"The cheapest machine{within} is {_count(cheapest)}: {_state(cheapest)}. The fastest is {_count(fastest)}: "
        f"{_state(fastest)}."
    )


def _answer_beyond_limits(comparison: Comparison) -> str:
    """Return that no machine keeps the limits, which machines come nearest, and what would keep them."""
    machines, enough = comparison.machines, comparison.enough
    least, soonest = machines[0], min(machines, key=_hours)
    limits = [
        *([f"the budget of ${comparison.budget:,.0f}"] if comparison.budget is not None else []),
        *([f"the deadline of {comparison.deadline:g} h"] if comparison.deadline is not None else []),
    ]
    if least is soonest:
        no_machine = "No machine keeps" if len(machines) > 1 else "This machine does not keep"
        parts = [f"{no_machine} {' and '.join(limits)}. {_count(least)}: {_state(least)}."]
    else:
        parts = [f"None of {len(machines)} machines keeps {' and '.join(limits)}. The cheapest is {_count(least)}:"]
        parts.append(f"{_state(least)}. The fastest is {_count(soonest)}: {_state(soonest)}.")
    if enough is not None:
        parts.append(f"More GPUs would keep {'both' if len(limits) > 1 else 'it'}: {_count(enough)}: {_state(enough)}.")
    elif comparison.deadline is None or (comparison.budget is not None and _hours(soonest) <= comparison.deadline):
        parts.append(f"A budget of ${least.cost or 0:,.0f} would be enough, or a shorter training.")
    else:
        parts.append(
            "No larger machine or cluster of these GPUs is predicted to keep these limits. Allow more time or money, "
            "train fewer tokens, or name another GPU."
        )
    return " ".join(parts)


def _hours(machine: Machine) -> float:
    assert machine.training is not None
    return machine.training.hours


def text_of_comparison(comparison: Comparison, everything: bool = False) -> str:
    """Return the machines by price as a text with a table, which has the first of them unless `everything`."""
    kept = comparison.within_limits or comparison.machines
    shown = kept if everything else kept[:NUM_ROWS]
    if comparison.fastest is not None and comparison.fastest not in shown:
        shown = [*shown[: NUM_ROWS - 1], comparison.fastest]
    batch = _batch(comparison.shape, comparison.request)
    notes = [
        "Prices come from different providers and dates, for machines rented on demand. Only strategies without "
        f"offload are compared, on powers of two up to {MOST_GPUS} GPUs. GPUs for which no typical machine is known "
        "are compared in one node only."
    ]
    if comparison.without_price:
        notes.append(
            f"No price is known for these GPUs, so they are left out: "
            f"{', '.join(comparison.without_price)}. Name them with --gpu."
        )
    if len(kept) > len(shown):
        notes.append(f"--all shows {len(kept) - len(shown)} more machines.")
    return "\n".join(
        [
            *wrapped([answer_of_comparison(comparison), "", f"{comparison.shape.name}, {batch}. Predicted."]),
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
