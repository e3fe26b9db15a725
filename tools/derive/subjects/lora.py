"""Memory and messages of this project's trainings of a LoRA adapter."""

from __future__ import annotations

import math
from collections.abc import Callable

import pandas as pd
from committed_runs import adapter_runs, against_theory
from wording import number_of, percents, span, tabulate, too_high_or_low

from study.report import plots
from subjects import theory


def adapters() -> str:
    """Compare training of all weights and of a LoRA adapter: peak memory, and bytes sent per step, by model."""
    runs = plots.filter_runs(adapter_runs(), precision="fp32")
    kinds = {"whole": "all weights", "lora": "LoRA", "in_4_bits": "LoRA, weights in 4 bits"}
    rows = []
    for size, model in (("124m", "GPT 124M"), ("large", "BERT-large")):
        of_model = plots.filter_runs(runs, size=size)
        control = of_model[of_model["strategy"] == "ddp"].set_index("kind")["peak_gib"]
        for kind, words in kinds.items():
            for row in of_model[of_model["kind"] == kind].itertuples():
                peak = f"{row.peak_gib:.2f} GiB ({row.peak_gib / control[kind]:.2f}x)"
                sent = 1024 * row.sent_gib_per_step
                rows.append([f"{model}: {words}", f"`{row.strategy}`", peak, f"{sent:,.1f} MiB"])
    head = ["model: what is trained", "strategy", "peak memory of the tensors (compared with DDP)", "sent per step"]
    return tabulate(head, rows)


def adapter_column(size: str, kind: str = "lora", column: str = "peak_gib") -> pd.Series:
    """Return the values of a column of the study `lora`, by strategy."""
    return plots.filter_runs(adapter_runs(), size=size, kind=kind).set_index("strategy")[column]


def saved_with_adapters(size: str, *strategies: str) -> list[float]:
    """Return the share of DDP's peak that each strategy saves if an adapter is trained."""
    peaks = adapter_column(size)
    return [1 - peaks[name] / peaks["ddp"] for name in strategies]


def sent_with_adapters(*strategies: str) -> list[float]:
    """Return the bytes that strategies send for an adapter, divided by those that they send for all weights."""
    column = "sent_gib_per_step"
    shares = pd.concat(
        adapter_column(size, "lora", column) / adapter_column(size, "whole", column) for size in ("124m", "large")
    )
    return [100 * share for name, share in shares.dropna().items() if name in strategies]


def less_with_sharded_adapters() -> str:
    """Return a bound of what ZeRO-2 saves compared with DDP if an adapter is trained."""
    trained = ("124m", "lora"), ("124m", "in_4_bits"), ("large", "lora")
    ratios = [peaks["zero2_tuned"] / peaks["ddp"] for peaks in (adapter_column(*each) for each in trained)]
    return f"less than {math.ceil(100 * (1 - min(ratios)))} %"


def adapters_in_default_buckets() -> str:
    peaks = adapter_column("124m")
    return span(peaks[name] / peaks["ddp"] for name in ("zero1", "zero2", "zero3"))


def adapters_of_gpt() -> str:
    """Compare the peaks of the GPT with all weights and with an adapter."""
    whole, lora, in_4_bits = (adapter_column("124m", kind) for kind in ("whole", "lora", "in_4_bits"))
    return (
        f"from {whole['ddp']:.2f} to {lora['ddp']:.2f} GiB, and with weights in 4 bits to {in_4_bits['ddp']:.2f} GiB. "
        f"FSDP2 with all weights needs {whole['fsdp2']:.2f} GiB"
    )


def adapters_in_bf16() -> str:
    peaks = 1024 * adapter_column("124m", "bf16")
    *first, last = (f"{peaks[name]:.0f} MiB under `{name}`" for name in ("zero2_tuned", "zero3_tuned", "fsdp2"))
    return f"{', '.join(first)}, and {last}"


def errors_of_adapters() -> str:
    """Say how well the peaks of the study `lora` are predicted."""
    errors = [error for error in against_theory().peaks if error.run.startswith("lora/")]
    within = number_of(sum(abs(error.error) <= theory.NEARLY_EXACT for error in errors), len(errors))
    worst = max(errors, key=lambda error: abs(error.error))
    return f"{within} peaks within 1 %. The worst prediction is {too_high_or_low(worst.error)} (`{worst.run}`)"


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("reports/memory-and-time.md", "adapters"): adapters,
}


IN_GUIDE_AND_REPORT: dict[str, Callable[[], str]] = {
    "adapter_states": less_with_sharded_adapters,
    "adapter_buckets": adapters_in_default_buckets,
    "adapters_large": lambda: percents(saved_with_adapters("large", "zero3_tuned", "fsdp2")),
    "adapters_124m": lambda: percents(saved_with_adapters("124m", "zero3_tuned", "fsdp2")),
    "adapters_sent": lambda: f"{span(sent_with_adapters('ddp', 'zero1', 'zero2_tuned'))} %",
    "adapters_gathered": lambda: f"{span(sent_with_adapters('zero3_tuned', 'fsdp2'), 0)} %",
}
NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    **{
        (page, name): make
        for page in ("docs/memory-and-time.md", "reports/memory-and-time.md")
        for name, make in IN_GUIDE_AND_REPORT.items()
    },
    ("docs/memory-and-time.md", "adapters_gpt"): adapters_of_gpt,
    ("reports/memory-and-time.md", "adapters_bf16"): adapters_in_bf16,
    ("reports/memory-and-time.md", "adapter_errors"): errors_of_adapters,
}
