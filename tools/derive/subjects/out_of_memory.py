"""The arithmetic of the guide on out-of-memory errors, by the planner's theory, for one model on eight GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from wording import STRATEGY_NAMES, tabulate

from zero_study import planner
from zero_study.planner.choose import StrategyPrediction
from zero_study.theory.model_states import paper_bytes_per_parameter
from zero_study.theory.peaks import PeakPart

PAGE = "docs/out-of-memory.md"
SHOWN = {**STRATEGY_NAMES, "zero3_cpu_offload": "ZeRO-3 with CPU offload"}
COLUMNS: dict[str, tuple[PeakPart, ...]] = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer states": ("optimizer_states",),
    "activations": ("activations", "logits"),
    "buffers, gathered parameters": ("communication_buffers", "gathered_parameters", "temporary_buffers"),
}


@cache
def options() -> dict[str, StrategyPrediction]:
    """Return the predictions of the page's command: one sequence of 1,024 tokens on each of eight GPUs."""
    request = planner.Request(gpu="h100", num_gpus=8, global_batch_size=8, activation_checkpointing="full")
    return {option.strategy.name: option for option in planner.advise("qwen2.5-72b", request).options}


def parts() -> str:
    """Tabulate the parts of a GPU's memory at its peak by strategy, in GiB."""
    rows = []
    for name, words in SHOWN.items():
        peak = options()[name].prediction.peak
        sizes = [sum(peak.parts[part] for part in of_column) for of_column in COLUMNS.values()]
        rows.append([words, *(f"{size / 2**30:,.1f}" for size in [*sizes, peak.total])])
    return tabulate(["strategy", *COLUMNS, "together"], rows)


def states() -> str:
    """Say how many bytes of model states the model has."""
    num_params, each = options()["ddp"].shape.num_params, paper_bytes_per_parameter(0, 1, "bf16").total
    return (
        f"{num_params / 1e9:.1f} billion parameters, so its model states take "
        f"{num_params * each / 1e9:,.0f} GB ({num_params * each / 2**30:,.0f} GiB)"
    )


def usable() -> str:
    """Return the usable memory of one of the GPUs."""
    return f"{options()['ddp'].prediction.usable_bytes / 2**30:.1f}"


TABLES: dict[tuple[str, str], Callable[[], str]] = {(PAGE, "parts"): parts}
NUMBERS: dict[tuple[str, str], Callable[[], str]] = {(PAGE, "states"): states, (PAGE, "usable"): usable}
