"""README's answers, picture and table, the list of its numbers, and predictions of three models for a report."""

from __future__ import annotations

from collections.abc import Callable

import first_screen
from wording import STRATEGY_NAMES, tabulate

from zero_study.planner.choose import StrategyPrediction

MEASURED_STRATEGIES = {
    "ddp": "DDP",
    "zero2": "ZeRO-2, default buffers",
    "zero2_tuned": "ZeRO-2, smaller buffers",
    "zero3": "ZeRO-3, default buffers",
    "zero3_tuned": "ZeRO-3, smaller buffers",
    "fsdp2": "FSDP2",
}


def measured() -> str:
    """Compare the strategies of README's picture with DDP: memory, time, largest model and throughput."""
    peaks, times, rates = first_screen.peaks(), first_screen.times(), first_screen.throughputs()
    largest = first_screen.largest_models()
    rows = []
    for name, label in MEASURED_STRATEGIES.items():
        rate = f"{rates[name]:.2f}x" if name in rates else "did not fit"
        rows.append(
            [label, f"{peaks[name] / peaks['ddp']:.2f}x", f"{times[name]:.2f}x", f"{largest[name]} million", rate]
        )
    return tabulate(["strategy", "memory of tensors", "time per step", "largest model", "throughput"], rows)


# The models of the table of predictions, each with its number of H100 GPUs.
SIZES = {"gpt2-xl": 8, "llama-3.1-8b": 8, "llama-3.1-70b": 64}
SIZE_NAMES = {"gpt2-xl": "GPT-2 XL (1.5B)", "llama-3.1-8b": "Llama 3.1 8B", "llama-3.1-70b": "Llama 3.1 70B"}
NUMBERS_HEAD = "number in README", "what it is", "source", "measured on", "seeds, repeats"
ANSWERED_SIZES = ("gpt2-xl", "llama-3.1-8b")  # what the sentence under the table is about


def sizes() -> str:
    """Predicted memory per GPU and time per step of models that people train, by strategy."""
    columns = {model: first_screen.at_one_batch(model, num_gpus) for model, num_gpus in SIZES.items()}
    head = ["strategy", *(f"{SIZE_NAMES[model]}, {num_gpus} GPUs" for model, num_gpus in SIZES.items())]
    rows = [
        [label, *(_size_cell(options[name]) for options in columns.values())] for name, label in STRATEGY_NAMES.items()
    ]
    return f"{tabulate(head, rows)}\n\n" + " ".join(_size_sentence(model, columns[model]) for model in ANSWERED_SIZES)


def _size_sentence(model: str, options: dict[str, StrategyPrediction]) -> str:
    """Say what ZeRO-3 saves compared with DDP, and what it costs compared with DDP or, if DDP does not fit, ZeRO-2."""
    memory = {name: f"{option.needed_bytes / 2**30:,.0f} GiB" for name, option in options.items()}
    baseline = "ddp" if options["ddp"].fits else "zero2"
    zero3, other = options["zero3"].prediction.step, options[baseline].prediction.step
    overlap = zero3.low <= other.high and other.low <= zero3.high
    time = "about as long as" if overlap else f"{zero3.total / other.total:.2f} times as long as"
    return (
        f"For {SIZE_NAMES[model]} on {SIZES[model]} GPUs, ZeRO-3 needs {memory['zero3']} per GPU and DDP needs "
        f"{memory['ddp']}. We predict that a step with ZeRO-3 takes {time} a step with {STRATEGY_NAMES[baseline]}."
    )


def _size_cell(option: StrategyPrediction) -> str:
    memory = f"{option.needed_bytes / 2**30:,.0f} GiB"
    if not option.fits:
        return f"{memory}, does not fit"
    step = option.prediction.step
    interval = f"at least {step.low:.2f}" if option.is_short else f"{step.low:.2f} to {step.high:.2f}"
    return f"{memory}, {step.total:.2f} s ({interval})"


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "answers"): first_screen.answers,
    ("README.md", "picture"): first_screen.picture,
    ("README.md", "public"): first_screen.public_sentences,
    ("reports/equal-memory.md", "measured"): measured,
    ("reports/predicted/README.md", "sizes"): sizes,
    ("reports/README.md", "numbers"): lambda: tabulate(NUMBERS_HEAD, first_screen.table()),
}


NUMBERS: dict[tuple[str, str], Callable[[], str]] = {}
