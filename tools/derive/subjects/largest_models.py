"""The largest model that each strategy trains with a limit on memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from committed_runs import largest_models
from wording import one_of, tabulate, whole_percent

from study.report import tables
from zero_study.files import ROOT


def frozen(caps: tuple[float, ...] = (3, 6)) -> dict[tuple[float, str], str]:
    """Return the corrected predictions in the protocol of `frontier`, by memory limit and strategy."""
    _, _, text = (ROOT / "study" / "studies" / "frontier.yaml").read_text(encoding="utf-8").partition("# Correction")
    sizes = re.findall(r"([a-z]\w+) (none|\d+m) (\d+m)", " ".join(re.split(r"\s+#?\s*", text)))
    return {(cap, name): size for name, *predicted in sizes for cap, size in zip(caps, predicted, strict=True)}


def fits() -> str:
    """List the largest model that each strategy trained under each limit, and the size that was predicted before."""
    predicted, trained = frozen(), largest_models()
    caps = sorted({cap for cap, _ in trained})
    names = list(dict.fromkeys(name for _, name in trained))
    head = ["strategy", *(text for cap in caps for text in (f"{cap:g} GiB: largest that trained", "predicted"))]
    rows = [[name, *(cell for cap in caps for cell in (trained[cap, name], predicted[cap, name]))] for name in names]
    return tabulate(head, [[cell or "none" for cell in row] for row in rows])


def _millions(cap_gib: float, strategy: str) -> float:
    """Return the millions of parameters of the largest model that trained."""
    return tables.millions(largest_models()[cap_gib, strategy])


def largest_model(cap_gib: int, *strategies: str) -> str:
    """Return the millions of parameters of the largest model, which is the same for all of these strategies."""
    return one_of(f"{_millions(cap_gib, name):.0f}" for name in strategies)


def more_parameters(*strategies: str) -> list[str]:
    """Say by how many percent the largest model of a strategy is larger than DDP's under 3 and under 6 GiB.

    Several strategies must have the same largest models.
    """
    shares = {
        tuple(whole_percent(_millions(cap_gib, name) / _millions(cap_gib, "ddp") - 1) for cap_gib in (3, 6))
        for name in strategies
    }
    (under_both_limits,) = shares
    return [*under_both_limits]


def more_parameters_than_ddp(*strategies: str) -> str:
    low, high = more_parameters(*strategies)
    return f"{low} more parameters than the largest model of DDP under 3 GiB, and {high} more under 6 GiB"


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("reports/memory-and-time.md", "fits"): fits,
}


NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/memory-and-time.md", "default_buffers"): partial(more_parameters_than_ddp, "zero1", "zero2"),
    ("docs/memory-and-time.md", "smaller_buffers"): partial(more_parameters_than_ddp, "zero3_tuned"),
    ("docs/memory-and-time.md", "fsdp2"): partial(more_parameters_than_ddp, "fsdp2"),
    ("docs/memory-and-time.md", "largest_zero3"): partial(largest_model, 3, "zero3", "zero3_nvme_offload"),
    ("docs/memory-and-time.md", "largest_zero3_6"): partial(largest_model, 6, "zero3"),
    ("docs/memory-and-time.md", "largest_nvme_6"): partial(largest_model, 6, "zero3_nvme_offload"),
    ("docs/memory-and-time.md", "largest_fsdp2_6"): partial(largest_model, 6, "fsdp2"),
}
