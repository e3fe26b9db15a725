"""Estimate which share of its data sheet's rates a GPU reaches, relative to the GPU to which step times are fitted.

Three rates depend on the card and not only on its generation: those of matrix products, of the operands of these
products, and of fused attention.
"""

from __future__ import annotations

import csv
import statistics
from functools import cache
from pathlib import Path

from zero_study.theory import gpus
from zero_study.theory.gpus import CHANGED, Gpu

# Large matrix products (up to 10,240 x 10,240) in PyTorch, as contributors measured them with one program:
# github.com/zzc0721/torch-performance-test-data at 078586871da3, read in November 2026. Cards with another memory than
# that of the data sheet are left out.
#
# Tensor cores of GeForce cards accumulate in fp32 at half of the rate at which they accumulate in fp16 (NVIDIA's white
# papers of GA102, Ada and RTX Blackwell state both rates, and the list of GPUs has the lower one). So do those of A10G
# and L40. At half of the rate, they are neither limited by power nor by the supply of operands. These cards reach
# their listed rate and more, because their clock is then above the boost clock of the data sheet. An H20 has a small
# part of the tensor cores of an H100, with the same memory, and reaches nearly all of its rate for the same reason.
# Cards of 300 W with tensor cores at the full rate are limited by power, and reach less than an A100 does.
MATRIX_PRODUCTS = Path(__file__).parent / "measured_by_others" / "matrix_products.csv"
# Cards that were not measured, with a measured card of the same chip (GA102, AD102, GB202 or GV100), whose tensor cores
# have the same rate with fp32 accumulation.
_SAME_CHIP = {
    "v100-16gb": "v100s", "v100-32gb": "v100s", "v100-pcie-16gb": "v100s", "v100-pcie-32gb": "v100s",
    "a10g": "rtx-3090", "a40": "rtx-a6000", "l40": "rtx-4090", "rtx-pro-6000-max-q": "rtx-pro-6000",
}  # fmt: skip
# An RTX 6000 Ada has the chip of an L40S, but 300 W instead of 350 W (data sheets of both). Assumed: each product needs
# the same energy, so that its rate is 300/350 of that of an L40S, of nearly the same peak.
_SAME_ENERGY = {"rtx-6000-ada": ("l40s", 300 / 350)}

# The cards of most rows to which the constants are fitted, by the generation that a GPU resembles.
_REFERENCE = {"Ampere": "a100-80gb", "Hopper": "h100-sxm"}
# Generations whose warps copy operands themselves. Hopper's and Blackwell's data center chips have units for this
# (TMA), and their operands are as fast as the memory bandwidth lets one expect.
_COPIED_BY_WARPS = ("Volta", "Turing", "Ampere", "GA102", "Ada", "RTX Blackwell")
# Cores for fp32 of a multiprocessor, each with one multiply-add per clock (white papers of the architectures).
_FP32_CORES = {"Volta": 64, "Turing": 64, "Ampere": 64}
_FP32_CORES_OF_OTHERS = 128


def share_of_peak(gpu: Gpu) -> float | None:
    """Return the share of its listed peak rate that a GPU reaches in large 16-bit matrix products.

    None if neither this GPU nor one with the same chip was measured.
    """
    name = gpu.name.removesuffix(CHANGED)
    same, factor = _SAME_ENERGY.get(name, (_SAME_CHIP.get(name, name), 1.0))
    share = _measured_shares().get(same)
    return None if share is None else factor * share


@cache
def _measured_shares() -> dict[str, float]:
    """Return the median share of the listed rate by GPU."""
    shares: dict[str, list[float]] = {}
    with open(MATRIX_PRODUCTS, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            shares.setdefault(row["gpu"], []).append(float(row["teraflops"]) / float(row["listed_teraflops"]))
    return {name: statistics.median(measured) for name, measured in shares.items()}


def relative_share(gpu: Gpu, nearest: str) -> float | None:
    """Return a GPU's share of its peak rate in matrix products, relative to the GPU to which step times are fitted.

    `nearest` is the generation of the GPU to which step times are fitted. None if the GPU was not measured.
    """
    own, reference = share_of_peak(gpu), share_of_peak(_reference(nearest))
    return None if own is None or reference is None else own / reference


def operand_share(gpu: Gpu, nearest: str, fitted: float, streamed: float) -> float:
    """Return the share of a GPU's memory bandwidth at which the operands of matrix products move.

    `fitted` is this share of the card of the fitted constants, and `streamed` is the share that a copy reaches. The
    time of operands is that of a copy, plus a time on the chip. The time on the chip is inversely proportional to the
    number of multiprocessors and their clock. This law describes A100 with 40 and with 80 GB, which differ only in
    bandwidth, better than a share of the bandwidth does.
    """
    reference = _reference(nearest)
    if gpu.resembled not in _COPIED_BY_WARPS or "fp32" not in gpu.peak_flops_per_second or fitted >= streamed:
        return fitted
    on_chip_of_reference = (1 / fitted - 1 / streamed) / reference.memory_bandwidth
    on_chip = on_chip_of_reference * _clocks(reference) / _clocks(gpu)
    return 1 / (1 / streamed + on_chip * gpu.memory_bandwidth)


def flash_share(gpu: Gpu, nearest: str, published: float) -> float:
    """Return the share of a GPU's 16-bit peak that fused attention reaches.

    `published` is the share of the card of the fitted constants. The time is that of the products, plus that of
    exponentials and sums, which is inversely proportional to the number of multiprocessors and their clock.
    """
    reference = _reference(nearest)
    own, of_reference = share_of_peak(gpu), share_of_peak(reference)
    if own is None or of_reference is None or not gpus.has_flash_attention(gpu):
        return published
    others = (1 / published - 1 / of_reference) / gpus.dense_16_bit_rate(reference)
    others *= _clocks(reference) / _clocks(gpu)
    return 1 / (1 / own + others * gpus.dense_16_bit_rate(gpu))


def _reference(nearest: str) -> Gpu:
    return gpus.GPUS[_REFERENCE["Ampere" if nearest == "Volta" else nearest]]


def _clocks(gpu: Gpu) -> float:
    """Return the clocks per second of all multiprocessors together, from the rate of the cores for fp32."""
    cores = _FP32_CORES.get(gpu.resembled, _FP32_CORES_OF_OTHERS)
    return gpu.peak_flops_per_second["fp32"] / (2 * cores)
