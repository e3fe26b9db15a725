"""OpenTau: time and memory of vision-language-action models under DDP, ZeRO-2 and ZeRO-3 on eight A100."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from public_sources.checkout import Checkout
from public_sources.reading import line_of, number_in, of_totals
from zero_study.public_runs.schema import PublicRun

TUTORIAL, MODELS = "docs/source/tutorials/benchmarking.rst", "docs/source/model.rst"
ROW = re.compile(r"^ *\* - (ZeRO-[23])\n((?: +- .*\n)+)", re.MULTILINE)
PROFILE = re.compile(
    r"DDP, pi05 / LIBERO at ``bs=(\d+)``.*?\n +total +mean=.*?median= *([\d.]+)ms.*?([\d.]+) global samples/s",
    re.DOTALL,
)
MATCHED = re.compile(r"([\d.]+) vs ([\d.]+) samples/s at\s+batch (\d+); ([\d.]+) vs\s+([\d.]+) at batch (\d+)")
GIB = 1 << 30
SAME: dict[str, Any] = {"gpu": "A100-SXM4-80GB", "num_gpus": 8, "num_nodes": 1, "program": "OpenTau"}
PI05: dict[str, Any] = SAME | {"model": "pi05", "parameters": 3_300_000_000}
COSMOS3: dict[str, Any] = SAME | {
    "model": "cosmos3", "adapter": "the action expert is trained, and the backbone is frozen",
    "activation_checkpointing": True, "accumulation_steps": 1,
}  # fmt: skip


def runs(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield the rows of the tables, the profile under DDP, and the rates at equal batches that the text states.

    The tutorial does not say how it measured the memory of a GPU. The page on models says "GB" for reserved memory.
    Both numbers keep a name of their own.
    """
    text = checkout.read(TUTORIAL).decode()
    profile = PROFILE.search(text)
    assert profile is not None
    batch, milliseconds, rate = profile.groups()
    yield of_totals(
        checkout, TUTORIAL, f"pi05-ddp-b{batch}", "text",
        {"seconds_per_step": round(float(milliseconds) / 1000, 6), "samples_per_second": float(rate)},
        lines=line_of(text, profile), entry=f"pi05, batch {batch}", engine="DDP", strategy="ddp",
        micro_batch_size=int(batch), global_batch_size=8 * int(batch), file="configs/libero/reproduce_pi05_libero.json",
        **PI05,
    )  # fmt: skip
    for row in ROW.finditer(text):
        cells = row[2].replace("-", "").split("\n")
        micro, batch, seconds, rate, peak = map(number_in, cells[:5])
        yield of_totals(
            checkout, TUTORIAL, f"pi05-{_stage(row[1])}-b{micro:.0f}", "text",
            {"seconds_per_step": seconds, "samples_per_second": rate, "peak_gpu_memory_bytes": round(peak * GIB)},
            lines=line_of(text, row), entry=f"pi05, batch {micro:.0f}", engine="DeepSpeed", strategy=_stage(row[1]),
            micro_batch_size=int(micro), global_batch_size=int(batch), accumulation_steps=1, compiled=False,
            precision="bf16",
            file="configs/examples/pi05_training_config.json", **PI05,
        )  # fmt: skip
    text = checkout.read(MODELS).decode()
    for row in ROW.finditer(text):
        micro, peak, rate = map(number_in, row[2].split("\n")[:3])
        yield of_totals(
            checkout, MODELS, f"cosmos3-{_stage(row[1])}-b{micro:.0f}", "text",
            {"samples_per_second": rate, "peak_reserved_gb": peak},
            lines=line_of(text, row), entry=f"cosmos3, batch {micro:.0f}", engine="DeepSpeed", strategy=_stage(row[1]),
            micro_batch_size=int(micro), note="the largest useful batch of this stage", **COSMOS3,
        )  # fmt: skip
    matched = MATCHED.search(text)
    assert matched is not None
    for first, second, micro in (matched.groups()[:3], matched.groups()[3:]):
        for stage, rate in (("zero2", first), ("zero3", second)):
            yield of_totals(
                checkout, MODELS, f"cosmos3-{stage}-b{micro}", "text",
                {"samples_per_second": float(rate)},
                lines=line_of(text, matched), entry=f"cosmos3, batch {micro}", engine="DeepSpeed", strategy=stage,
                micro_batch_size=int(micro), **COSMOS3,
            )  # fmt: skip


def _stage(cell: str) -> str:
    return cell.lower().replace("-", "")
