"""Golden values of NeMo Automodel: trainings of 100 steps with FSDP2 on eight H100."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import yaml

from public_sources.checkout import Checkout
from public_sources.reading import read_run
from zero_study.public_runs.schema import PublicRun

FOLDER = "tests/ci_tests/golden_values/"
NOT_FINITE = {"nemotron_flash_1b_squad"}  # its losses are NaN


def runs(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield the trainings whose losses are numbers."""
    for path in checkout.under(FOLDER, suffix="_h100.jsonl"):
        entry = PurePosixPath(path).name.removesuffix("_h100.jsonl")
        if entry in NOT_FINITE:
            continue
        config = _config(checkout, entry)
        yield read_run(
            checkout, path, entry,
            entry=entry,
            model=_get(config, "model", "pretrained_model_name_or_path"),
            gpu="H100",
            num_gpus=8,
            num_nodes=1,
            program="NeMo Automodel",
            engine="FSDP2",
            strategy="fsdp2",
            adapter="LoRA" if "peft" in config else None,
            global_batch_size=_get(config, "step_scheduler", "global_batch_size"),
            micro_batch_size=_get(config, "step_scheduler", "local_batch_size"),
            optimizer=str(_get(config, "optimizer", "_target_") or "").rpartition(".")[2] or None,
            learning_rate=_get(config, "optimizer", "lr"),
            tensor_parallel=_get(config, "distributed", "tp_size"),
            pipeline_parallel=_get(config, "distributed", "pp_size"),
            context_parallel=_get(config, "distributed", "cp_size"),
            expert_parallel=_get(config, "distributed", "ep_size"),
        )  # fmt: skip


def _config(checkout: Checkout, entry: str) -> dict[str, Any]:
    paths = list(checkout.under("examples/", suffix=f"/{entry}.yaml"))
    return yaml.safe_load(checkout.read(paths[0])) if len(paths) == 1 else {}


def _get(config: dict[str, Any], *names: str) -> Any:
    for name in names:
        config = config.get(name) if isinstance(config, dict) else None  # type: ignore[assignment]
    return config
