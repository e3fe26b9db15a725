"""Which functions of the models of study/theory may the ledger name, and with which arguments?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from study.claims.observed import Observed
from study.claims.rules import memory, paper, speed
from study.claims.rules.cases import Case

FUNCTIONS: dict[str, Callable[..., Observed]] = {
    function.__name__: function
    for function in (
        paper.paper_bytes_per_parameter, paper.paper_total_bytes, paper.paper_reduction, paper.paper_peak_reduction,
        paper.paper_ratio, paper.paper_saving_share, paper.paper_offload_reduction, paper.paper_volume,
        paper.paper_volume_ratio, paper.num_params, paper.link_bandwidth,
        memory.peak, memory.peak_of_any_batch, memory.memory_ratio, memory.fits, memory.largest_model,
        memory.capacity_ratio, memory.fewest_gpus,
        speed.engine_volume, speed.tokens_per_second_per_gpu, speed.speed_ratio, speed.least_speed_ratio,
        speed.speed_ratio_change, speed.speed_ratio_growth, speed.published_tflops,
    )
}  # fmt: skip

# Functions whose arguments are a case, and those that hold one case against another.
_OF_A_CASE = ("peak", "fits", "tokens_per_second_per_gpu")
_OF_TWO = (
    "memory_ratio", "speed_ratio", "least_speed_ratio", "speed_ratio_change", "speed_ratio_growth",
)  # fmt: skip


def check_cases(function: str, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError where an argument of a case is missing, unknown or of another type."""
    if function in _OF_A_CASE:
        Case.of(arguments)
    elif function == "peak_of_any_batch":
        memory.case_of_any_batch(arguments)
    elif function in _OF_TWO:
        for side in ("of", "to"):
            Case.of(arguments[side], f"arguments.{side}")
