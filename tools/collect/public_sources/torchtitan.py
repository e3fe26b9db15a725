"""Losses of torchtitan's debug models, with which its tests compare every change: on CUDA and on MI350X."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from public_sources.checkout import Checkout
from public_sources.reading import read_run
from zero_study.public_runs.schema import PublicRun

FOLDER = "tests/assets/losses/"
# By the workflow of torchtitan that compares these losses on eight GPUs. It does not use those of the third model.
STATED: dict[str, dict[str, Any]] = {
    "llama3": {"num_gpus": 8, "engine": "FSDP2", "strategy": "fsdp2"},
    "qwen3_moe": {
        "num_gpus": 8, "engine": "FSDP2", "strategy": "fsdp2", "tensor_parallel": 2, "expert_parallel": 4
    },
    "sft_debugmodel": {},
}  # fmt: skip


def runs(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield the files. The card of those on CUDA is not stated."""
    for path in checkout.under(FOLDER, suffix=".txt"):
        name = PurePosixPath(path).stem
        entry, _, card = name.removesuffix("_cuda").partition("_rocm_")
        yield read_run(
            checkout, path, name,
            entry=entry,
            model=f"{entry}, debug model",
            gpu=card.upper() or None,
            system="ROCm" if card else "CUDA",
            **STATED.get(entry, {}),
        )  # fmt: skip
