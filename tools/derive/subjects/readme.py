"""README's answers, picture and table, and the list of its numbers."""

from __future__ import annotations

from collections.abc import Callable

import first_screen
import measured_on_gpus
from wording import tabulate

MEASURED_STRATEGIES = {
    "ddp": "DDP",
    "zero2": "ZeRO-2, default buffers",
    "zero2_tuned": "ZeRO-2, smaller buffers",
    "zero3": "ZeRO-3, default buffers",
    "zero3_tuned": "ZeRO-3, smaller buffers",
    "fsdp2": "FSDP2",
}


def measured() -> str:
    """Compare the strategies with DDP: memory, time, largest model and throughput."""
    peaks, times, rates = first_screen.peaks(), first_screen.times(), first_screen.throughputs()
    largest = first_screen.largest_models()
    rows = []
    for name, label in MEASURED_STRATEGIES.items():
        rate = f"{rates[name]:.2f}x" if name in rates else "did not fit"
        rows.append(
            [label, f"{peaks[name] / peaks['ddp']:.2f}x", f"{times[name]:.2f}x", f"{largest[name]} million", rate]
        )
    return tabulate(["strategy", "memory of tensors", "time per step", "largest model", "throughput"], rows)


NUMBERS_HEAD = "number in README", "what it is", "source", "measured on", "seeds, repeats"


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "picture"): measured_on_gpus.picture,
    ("README.md", "public"): first_screen.public_sentences,
    ("README.md", "release"): first_screen.release,
    ("reports/memory-and-time.md", "measured"): measured,
    ("reports/README.md", "numbers"): lambda: tabulate(NUMBERS_HEAD, first_screen.table()),
}


NUMBERS: dict[tuple[str, str], Callable[[], str]] = {}
