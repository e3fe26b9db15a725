"""Data of GPUs: memory, dense peak rates, links and prices, with sources.

It finds a GPU by its name, and makes one from numbers that a user gives.

Rates of links are in bytes per second for one direction. Data sheets give the sum of both directions, which is twice as
much. All rates are limits of the hardware. Software reaches only a share of them, which step_time.py models. None means
unknown.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# Where the memory that torch reports is from. messages: published messages of torch for this GPU. same chip: those of
# another GPU with the same chip and the same memory. estimated: a rule, because no message was found.
MemoryBasis = Literal["messages", "same chip", "estimated"]


@dataclass(frozen=True)
class Gpu:
    """The data sheet of one GPU. Peak rates are those of dense matrix products, without sparsity.

    Rates of 16-bit types are those with accumulation in fp32, which is what PyTorch's matrix products use. GeForce
    cards are twice as fast with accumulation in fp16, which other tables often show.
    """

    name: str  # on the command line
    torch_name: str  # as torch reports it, without the vendor
    generation: str
    memory_bytes: int  # memory of the hardware
    torch_memory_bytes: int  # memory without the driver's part: the smallest total that torch reported
    context_bytes: int  # part of torch_memory_bytes that one process uses outside torch's allocator
    memory_basis: MemoryBasis  # where torch_memory_bytes and context_bytes are from
    peak_flops_per_second: Mapping[str, float] = field(hash=False)  # by type: fp32, tf32, fp16, bf16, fp8
    memory_bandwidth: float
    link: str  # between the GPUs of a node
    link_bandwidth: float
    pcie_bandwidth: float  # between GPU and host
    source: str  # source of memory, peak rates and links
    price_per_hour: float | None  # USD per GPU, for a machine rented on demand
    price_date: str  # year and, if known, month
    price_source: str


# Links with their rate in one direction. Data sheets give the sum of both directions: 300, 600, 900 and 1,800 GB/s for
# NVLink 2 to 5, and 32, 64 and 128 GB/s for 16 lanes of PCIe 3 to 5.
_Link = tuple[str, float]
_NVLINK_2, _NVLINK_3, _NVLINK_4, _NVLINK_5 = (
    ("NVLink 2", 150e9), ("NVLink 3", 300e9), ("NVLink 4", 450e9), ("NVLink 5", 900e9)
)  # fmt: skip
_PCIE_3, _PCIE_4, _PCIE_5 = ("PCIe 3", 16e9), ("PCIe 4", 32e9), ("PCIe 5", 64e9)
# The A800 and the H800 have NVLink of 400 GB/s in both directions together.
_NVLINK_3_OF_A800, _NVLINK_4_OF_H800 = ("NVLink 3 of 400 GB/s", 200e9), ("NVLink 4 of 400 GB/s", 200e9)
# Each GPU of a node with 8 is connected to the seven others. Links of MI300X and MI325X have 128 GB/s in both
# directions, and those of MI355X 153.6 GB/s. A ring over all GPUs can use all seven.
_XGMI_3, _XGMI_4 = ("Infinity Fabric, 7 links of 64 GB/s", 448e9), ("Infinity Fabric, 7 links of 76.8 GB/s", 537.6e9)
# The slowest pair of dies of a node has one link of 50 GB/s. A ring over all dies waits for it. Dies of one card are
# connected by four such links.
_XGMI_2 = ("Infinity Fabric, 1 link of 50 GB/s", 50e9)
# Of the 24 network ports of a Gaudi, 21 connect it to the seven others of its node.
_ROCE_GAUDI_2, _ROCE_GAUDI_3 = (
    ("Ethernet, 21 ports of 100 Gbit/s", 262.5e9),
    ("Ethernet, 21 ports of 200 Gbit/s", 525e9),
)
# Between GPU and Grace processor. The data sheets give 900 GB/s for both directions. Two GPUs of a GB200 or GB300 share
# it.
_C2C, _C2C_OF_TWO = 450e9, 225e9

_V100_SXM = {"fp32": 15.7, "fp16": 125}
_V100_PCIE = {"fp32": 14, "fp16": 112}
_A100 = {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}
_HOPPER_SXM = {"fp32": 67, "tf32": 494.5, "fp16": 989, "bf16": 989, "fp8": 1979}
_HOPPER_NVL = {"fp32": 60, "tf32": 417.5, "fp16": 835.5, "bf16": 835.5, "fp8": 1670.5}
_BLACKWELL_GRACE = {"fp32": 80, "tf32": 1250, "fp16": 2500, "bf16": 2500, "fp8": 5000}
_CDNA_3 = {"fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4, "fp8": 2614.9}

_HALF = "tensor cores at half the figures, which are with sparsity"
_V100_SHEET = "NVIDIA V100 Tensor Core GPU data sheet"
_A100_SHEET = "NVIDIA A100 Tensor Core GPU data sheet"
_H100_SHEET = f"NVIDIA H100 Tensor Core GPU data sheet, {_HALF}"
_GA102_PAPER = "NVIDIA Ampere GA102 GPU architecture white paper, dense, with fp32 accumulation"
_ADA_PAPER = "NVIDIA Ada GPU architecture white paper, dense, with fp32 accumulation"
_GB202_PAPER = "NVIDIA RTX Blackwell GPU architecture white paper, dense, with fp32 accumulation"
_PRO_SHEET = "NVIDIA RTX PRO 6000 Blackwell data sheet"
_GB_SHEET = f"NVL72 specifications, divided by 72 GPUs, {_HALF}"
_MI300_SHEET = "AMD Instinct {} data sheet, dense matrix rates"
_GAUDI_SLIDES = "Intel Gaudi 3 at Hot Chips 2024, table of the generations"

# Sources of prices. Amazon's prices are for Linux in Northern Virginia.
_AWS_READ = "Amazon EC2, price list as read by data-receipts/109-gpu-pricing"
_AWS_CATALOG = "Amazon EC2, price list as in SkyPilot's catalog v8"
_AWS_REMEMBERED = "Amazon EC2, as remembered, not looked up"
_LAMBDA = "Lambda, as in SkyPilot's catalog v8"
_RUNPOD = "RunPod community cloud, its list as read by a public benchmark script"
_Price = tuple[float | None, str, str]
_NO_PRICE: _Price = (None, "", "not found")


def _gpu(
    name: str,
    torch_name: str,
    generation: str,
    memory: tuple[float, float, float],
    tera: Mapping[str, float],
    bandwidth: float,
    link: _Link,
    host_link: float | _Link,
    source: str,
    price: _Price = _NO_PRICE,
    basis: MemoryBasis = "messages",
) -> Gpu:
    gib, torch_gib, context_gib = memory
    return Gpu(
        name=name,
        torch_name=torch_name,
        generation=generation,
        memory_bytes=round(gib * 2**30),
        torch_memory_bytes=round(torch_gib * 2**30),
        context_bytes=round(context_gib * 2**30),
        memory_basis=basis,
        peak_flops_per_second={kind: value * 1e12 for kind, value in tera.items()},
        memory_bandwidth=bandwidth * 1e9,
        link=link[0],
        link_bandwidth=link[1],
        pcie_bandwidth=host_link[1] if isinstance(host_link, tuple) else host_link,
        source=source,
        price_per_hour=price[0],
        price_date=price[1],
        price_source=price[2],
    )


# Each row has three sizes of memory in GiB: of the hardware, the total that torch reports, and a process's context. The
# total is from messages "CUDA out of memory ... GPU 0 has a total capacity of 39.38 GiB" in public issues and logs,
# about ten for each GPU. Drivers differ by up to 0.3 GiB, so the smallest total is used. (The messages of A10, A10G,
# L4, RTX 3090, RTX 4090, H20, of the cards with 48 GiB and of GB300 do not name the GPU. They name its size.) The
# context is from such messages of processes that were alone on a GPU: memory in use minus memory that torch had
# reserved. It was 0.11 to 0.17 for T4, 0.37 to 0.39 for V100, 0.28 to 0.38 for A10G or L4, 0.31 to 0.47 for RTX 3090 or
# 4090, 0.29 to 0.49 for RTX 5090, 0.30 to 0.34 for RTX A6000 or 6000 Ada, 0.20 for L40S, 0.54 for RTX PRO 6000, 0.49
# for A100, 0.59 to 0.75 for H100 NVL, 0.53 for H20 or GH200, 0.51 for H200, 0.69 for B200, 0.31 to 0.82 for MI250X and
# 0.45 to 0.78 GiB for MI300X. H100 is assumed to equal H200, GB200, B300 and GB300 to equal B200, and MI325X and MI355X
# to equal MI300X. For Gaudi, the total is the limit of Habana's allocator, as in its example of Optimum Habana, which
# has no context.
# Rates of RTX A6000, RTX 6000 Ada and H200 NVL, and the fp32 rate of MI250X, are as remembered from the data sheets,
# not looked up.
GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in (
    _gpu("t4", "T4", "Turing", (16, 14.56, 0.2), {"fp32": 8.1, "fp16": 65}, 320, _PCIE_3, _PCIE_3,
         "NVIDIA T4 Tensor Core GPU data sheet and product brief", (0.978, "2025", f"g4dn.metal, {_AWS_REMEMBERED}")),
    _gpu("v100-pcie-16gb", "V100-PCIE-16GB", "Volta", (16, 15.77, 0.4), _V100_PCIE, 900, _PCIE_3, _PCIE_3, _V100_SHEET,
         (3.06, "before 2026", "NC6s v3, Azure, table of the Hugging Face space sasha/energy-cost-compute")),
    _gpu("v100-pcie-32gb", "V100-PCIE-32GB", "Volta", (32, 31.73, 0.4), _V100_PCIE, 900, _PCIE_3, _PCIE_3, _V100_SHEET,
         (2.30, "2025", "V100-32G, Paperspace, as in SkyPilot's catalog v7, which does not say which V100")),
    _gpu("v100-16gb", "V100-SXM2-16GB", "Volta", (16, 15.77, 0.4), _V100_SXM, 900, _NVLINK_2, _PCIE_3, _V100_SHEET,
         (3.06, "2026", f"p3.16xlarge, {_AWS_CATALOG}")),
    _gpu("v100-32gb", "V100-SXM2-32GB", "Volta", (32, 31.73, 0.4), _V100_SXM, 900, _NVLINK_2, _PCIE_3, _V100_SHEET,
         (3.902, "2025", f"p3dn.24xlarge, {_AWS_REMEMBERED}")),
    _gpu("rtx-3090", "GeForce RTX 3090", "GA102", (24, 23.52, 0.5),
         {"fp32": 35.6, "tf32": 35.6, "fp16": 71.2, "bf16": 71.2}, 936, _PCIE_4, _PCIE_4, _GA102_PAPER,
         (0.22, "2026-07", _RUNPOD)),
    _gpu("rtx-a6000", "RTX A6000", "GA102", (48, 47.27, 0.4),
         {"fp32": 38.7, "tf32": 77.4, "fp16": 154.8, "bf16": 154.8}, 768, _PCIE_4, _PCIE_4, _GA102_PAPER,
         (0.80, "2025 or later", f"gpu_4x_a6000, {_LAMBDA}")),
    _gpu("a10", "A10", "GA102", (24, 21.96, 0.4), {"fp32": 31.2, "tf32": 62.5, "fp16": 125, "bf16": 125}, 600,
         _PCIE_4, _PCIE_4, "NVIDIA A10 Tensor Core GPU data sheet, dense"),
    _gpu("a10g", "A10G", "GA102", (24, 21.96, 0.4), {"fp32": 35, "tf32": 35, "fp16": 70, "bf16": 70}, 600, _PCIE_4,
         _PCIE_4, "NVIDIA A10G data sheet, for Amazon EC2 G5", (2.036, "2025", f"g5.48xlarge, {_AWS_REMEMBERED}")),
    _gpu("a40", "A40", "GA102", (48, 44.34, 0.4), {"fp32": 37.4, "tf32": 74.8, "fp16": 149.7, "bf16": 149.7}, 696,
         _PCIE_4, _PCIE_4, "NVIDIA A40 data sheet, dense; a bridge between two cards has NVLink of 56 GB/s"),
    _gpu("l4", "L4", "Ada", (24, 21.96, 0.4), {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121, "fp8": 242.5}, 300,
         _PCIE_4, _PCIE_4, f"NVIDIA L4 data sheet, {_HALF}", (1.669, "2025", f"g6.48xlarge, {_AWS_REMEMBERED}")),
    _gpu("rtx-4090", "GeForce RTX 4090", "Ada", (24, 23.52, 0.5),
         {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3}, 1008, _PCIE_4, _PCIE_4, _ADA_PAPER,
         (0.34, "2026-07", _RUNPOD)),
    _gpu("rtx-6000-ada", "RTX 6000 Ada Generation", "Ada", (48, 47.27, 0.4),
         {"fp32": 91.1, "tf32": 182.1, "fp16": 364.2, "bf16": 364.2, "fp8": 728.5}, 960, _PCIE_4, _PCIE_4, _ADA_PAPER),
    _gpu("l40", "L40", "Ada", (48, 44.34, 0.4),
         {"fp32": 90.5, "tf32": 90.5, "fp16": 181.05, "bf16": 181.05, "fp8": 362}, 864, _PCIE_4, _PCIE_4,
         "NVIDIA L40 data sheet, dense"),
    _gpu("l40s", "L40S", "Ada", (48, 44.34, 0.4),
         {"fp32": 91.6, "tf32": 183, "fp16": 362, "bf16": 362, "fp8": 733}, 864, _PCIE_4, _PCIE_4,
         "NVIDIA L40S data sheet, dense",
         (3.766, "2025 or later", "g6e.48xlarge, Amazon EC2, as in a public table of instances")),
    _gpu("rtx-5090", "GeForce RTX 5090", "RTX Blackwell", (32, 31.36, 0.5),
         {"fp32": 104.8, "tf32": 104.8, "fp16": 209.5, "bf16": 209.5, "fp8": 419}, 1792, _PCIE_5, _PCIE_5,
         _GB202_PAPER, (0.69, "2026-07", _RUNPOD)),
    _gpu("rtx-pro-6000", "RTX PRO 6000 Blackwell Workstation Edition", "RTX Blackwell", (96, 94.96, 0.6),
         {"fp32": 126, "tf32": 251.9, "fp16": 503.8, "bf16": 503.8, "fp8": 1007.6}, 1792, _PCIE_5, _PCIE_5,
         f"{_PRO_SHEET}, dense: an eighth of the FP4 rate with sparsity",
         (1.89, "2026", "Jarvislabs, as in SkyPilot's catalog v8, which does not say which edition")),
    _gpu("rtx-pro-6000-max-q", "RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX Blackwell", (96, 94.96, 0.6),
         {"fp32": 110, "tf32": 219.4, "fp16": 438.9, "bf16": 438.9, "fp8": 877.8}, 1792, _PCIE_5, _PCIE_5,
         f"{_PRO_SHEET}, Max-Q edition, dense: an eighth of the FP4 rate with sparsity"),
    _gpu("rtx-pro-6000-server", "RTX PRO 6000 Blackwell Server Edition", "RTX Blackwell", (96, 94.96, 0.6),
         {"fp32": 120, "tf32": 240, "fp16": 480, "bf16": 480, "fp8": 960}, 1597, _PCIE_5, _PCIE_5,
         f"{_PRO_SHEET}, server edition: fp32 and bandwidth; other rates in the proportion of the workstation edition"),
    _gpu("a100-pcie-40gb", "A100-PCIE-40GB", "Ampere", (40, 39.38, 0.5), _A100, 1555, _PCIE_4, _PCIE_4, _A100_SHEET),
    _gpu("a100-40gb", "A100-SXM4-40GB", "Ampere", (40, 39.38, 0.5), _A100, 1555, _NVLINK_3, _PCIE_4, _A100_SHEET,
         (2.745, "2026-11", f"p4d.24xlarge, {_AWS_READ}")),
    _gpu("a100-pcie-80gb", "A100 80GB PCIe", "Ampere", (80, 79.14, 0.5), _A100, 1935, _PCIE_4, _PCIE_4, _A100_SHEET,
         (3.673, "2026-11", "NC24ads A100 v4, Azure, price list as read by data-receipts/109-gpu-pricing")),
    _gpu("a100-80gb", "A100-SXM4-80GB", "Ampere", (80, 79.14, 0.5), _A100, 2039, _NVLINK_3, _PCIE_4, _A100_SHEET,
         (3.431, "2026-11", f"p4de.24xlarge, {_AWS_READ}")),
    _gpu("a800-pcie-80gb", "A800 80GB PCIe", "Ampere", (80, 79.14, 0.5), _A100, 1935, _PCIE_4, _PCIE_4,
         "NVIDIA A800 80GB PCIe data sheet", basis="same chip"),
    _gpu("a800-80gb", "A800-SXM4-80GB", "Ampere", (80, 79.14, 0.5), _A100, 2039, _NVLINK_3_OF_A800, _PCIE_4,
         "NVIDIA A800 data sheet", basis="same chip"),
    _gpu("h100-pcie", "H100 PCIe", "Hopper", (80, 79.11, 0.5),
         {"fp32": 51, "tf32": 378, "fp16": 756.5, "bf16": 756.5, "fp8": 1513}, 2000, _PCIE_5, _PCIE_5, _H100_SHEET,
         (3.29, "2026-09", "1x H100 PCIe, Lambda, its page as read by api-evangelist/lambda-labs")),
    _gpu("h100-nvl", "H100 NVL", "Hopper", (94, 93.0, 0.7), _HOPPER_NVL, 3900, _PCIE_5, _PCIE_5,
         f"{_H100_SHEET}; a bridge between two cards has NVLink of 300 GB/s"),
    _gpu("h100-sxm", "H100 80GB HBM3", "Hopper", (80, 79.11, 0.5), _HOPPER_SXM, 3350, _NVLINK_4, _PCIE_5, _H100_SHEET,
         (6.88, "2026-11", f"p5.48xlarge, {_AWS_READ}")),
    _gpu("h800", "H800", "Hopper", (80, 79.11, 0.5), _HOPPER_SXM, 3350, _NVLINK_4_OF_H800, _PCIE_5,
         f"NVIDIA H800 data sheet, {_HALF}", basis="same chip"),
    _gpu("h20", "H20", "Hopper", (96, 95.0, 0.55), {"fp32": 44, "tf32": 74, "fp16": 148, "bf16": 148, "fp8": 296},
         4000, _NVLINK_4, _PCIE_5, "NVIDIA H20 specifications, dense"),
    _gpu("gh200", "GH200 480GB", "Hopper", (96, 94.5, 0.55), _HOPPER_SXM, 4000, _NVLINK_4, _C2C,
         f"NVIDIA GH200 Grace Hopper Superchip data sheet, model with 96 GB of HBM3, {_HALF}",
         (1.49, "2025 or later", f"gpu_1x_gh200, {_LAMBDA}")),
    _gpu("h200", "H200", "Hopper", (141, 139.80, 0.55), _HOPPER_SXM, 4800, _NVLINK_4, _PCIE_5,
         _H100_SHEET.replace("H100", "H200"),
         (7.912, "2026-08", "p5en.48xlarge, Amazon EC2, as listed in dstack's pull request 4110")),
    _gpu("h200-nvl", "H200 NVL", "Hopper", (141, 139.80, 0.55), _HOPPER_NVL, 4800, _PCIE_5, _PCIE_5,
         f"NVIDIA H200 NVL data sheet, {_HALF}; a bridge between two or four cards has NVLink of 450 GB/s",
         basis="same chip"),
    _gpu("b200", "B200", "Blackwell", (180, 178.35, 0.7),
         {"fp32": 80, "tf32": 1100, "fp16": 2250, "bf16": 2250, "fp8": 4500}, 8000, _NVLINK_5, _PCIE_5,
         "NVIDIA Blackwell Architecture Technical Brief, HGX B200, per GPU and dense",
         (14.242, "2026", f"p6-b200.48xlarge, {_AWS_CATALOG}")),
    _gpu("gb200", "GB200", "Blackwell", (186, 184.31, 0.7), _BLACKWELL_GRACE, 8000, _NVLINK_5, _C2C_OF_TWO,
         f"NVIDIA GB200 {_GB_SHEET}"),
    _gpu("b300", "B300 SXM6 AC", "Blackwell", (270, 267.69, 0.7),
         {"fp32": 75, "tf32": 1125, "fp16": 2250, "bf16": 2250, "fp8": 4500}, 7700, _NVLINK_5, _PCIE_5,
         f"NVIDIA HGX B300 specifications, divided by 8 GPUs, {_HALF}"),
    _gpu("gb300", "GB300", "Blackwell", (279, 276.50, 0.7), _BLACKWELL_GRACE, 8000, _NVLINK_5, _C2C_OF_TWO,
         f"NVIDIA GB300 {_GB_SHEET}"),
    _gpu("mi250x", "Instinct MI250X", "CDNA 2", (64, 63.98, 0.8), {"fp32": 47.9, "fp16": 191.5, "bf16": 191.5}, 1638.4,
         _XGMI_2, _PCIE_4, "AMD Instinct MI250X data sheet, halved: torch shows each of its two dies as one GPU"),
    _gpu("mi300x", "Instinct MI300X", "CDNA 3", (192, 191.69, 0.8), _CDNA_3, 5300, _XGMI_3, _PCIE_5,
         _MI300_SHEET.format("MI300X")),
    _gpu("mi325x", "Instinct MI325X", "CDNA 3", (256, 255.69, 0.8), _CDNA_3, 6000, _XGMI_3, _PCIE_5,
         _MI300_SHEET.format("MI325X")),
    _gpu("mi355x", "Instinct MI355X", "CDNA 4", (288, 287.98, 0.8),
         {"fp32": 157.3, "fp16": 2516.6, "bf16": 2516.6, "fp8": 5033.2}, 8000, _XGMI_4, _PCIE_5,
         _MI300_SHEET.format("MI355X")),
    _gpu("gaudi2", "GAUDI2", "Gaudi 2", (96, 94.62, 0), {"bf16": 432, "fp8": 865}, 2460, _ROCE_GAUDI_2, _PCIE_4,
         f"{_GAUDI_SLIDES}; fp8: Intel Gaudi 2 white paper"),
    _gpu("gaudi3", "GAUDI3", "Gaudi 3", (128, 126.16, 0), {"bf16": 1677, "fp8": 1677}, 3670, _ROCE_GAUDI_3, _PCIE_5,
         f"{_GAUDI_SLIDES}; rates at the clock of 1,600 MHz at which it runs, as in stas00/ml-engineering",
         basis="estimated"),
)}  # fmt: skip

_ALIASES = {
    "h100": "h100-sxm",
    "h100-80gb": "h100-sxm",
    "h100-80": "h100-sxm",
    "h100-sxm-80gb": "h100-sxm",
    "h100-sxm5": "h100-sxm",
    "h100-sxm5-80gb": "h100-sxm",
    "h100-pcie-80gb": "h100-pcie",
    "h100-80gb-pcie": "h100-pcie",
    "h100-nvl-94gb": "h100-nvl",
    "h200-141gb": "h200",
    "h200-sxm": "h200",
    "h20-96gb": "h20",
    "h800-80gb": "h800",
    "h800-sxm": "h800",
    "gh200-96gb": "gh200",
    "b200-180gb": "b200",
    "b200-sxm": "b200",
    "b300-sxm": "b300",
    "gb200-nvl72": "gb200",
    "gb300-nvl72": "gb300",
    "a100-40": "a100-40gb",
    "a100-80": "a100-80gb",
    "a100-sxm-40gb": "a100-40gb",
    "a100-sxm-80gb": "a100-80gb",
    "a100-40gb-sxm": "a100-40gb",
    "a100-80gb-sxm": "a100-80gb",
    "a100-40gb-pcie": "a100-pcie-40gb",
    "a800": "a800-80gb",
    "a800-sxm": "a800-80gb",
    "a800-pcie": "a800-pcie-80gb",
    "v100-sxm-16gb": "v100-16gb",
    "v100-sxm-32gb": "v100-32gb",
    "a10g-24gb": "a10g",
    "a10-24gb": "a10",
    "a40-48gb": "a40",
    "l4-24gb": "l4",
    "l40s-48gb": "l40s",
    "t4-16gb": "t4",
    "3090": "rtx-3090",
    "4090": "rtx-4090",
    "5090": "rtx-5090",
    "a6000": "rtx-a6000",
    "6000-ada": "rtx-6000-ada",
    "ada-6000": "rtx-6000-ada",
    "pro-6000": "rtx-pro-6000",
    "6000-pro": "rtx-pro-6000",
    "rtx-6000-pro": "rtx-pro-6000",
    "rtx-pro-6000-blackwell": "rtx-pro-6000",
    "rtx-pro-6000-workstation": "rtx-pro-6000",
    "mi300x-192gb": "mi300x",
    "mi325x-256gb": "mi325x",
    "mi355x-288gb": "mi355x",
    "mi300x-oam": "mi300x",
}
_VENDORS = ("NVIDIA ", "Tesla ", "AMD ")
# Words that people add to the name of a GPU and that do not tell two GPUs apart.
_FILLERS = {
    "nvidia", "geforce", "tesla", "amd", "instinct", "radeon", "intel", "habana", "generation", "edition", "gpu",
}  # fmt: skip


def _compact(text: str) -> str:
    """Return a name without case, separators and filler words: "NVIDIA GeForce RTX 4090" becomes "rtx4090"."""
    return "".join(word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in _FILLERS)


_BY_TORCH_NAME = {gpu.torch_name: gpu for gpu in GPUS.values()}
_BY_COMPACT_NAME = {
    **{_compact(alias): GPUS[name] for alias, name in _ALIASES.items()},
    **{_compact(gpu.torch_name): gpu for gpu in GPUS.values()},
    **{_compact(name): gpu for name, gpu in GPUS.items()},
}


def find_gpu(text: str) -> Gpu:
    """Return the GPU with a name as people write it, such as a100-80gb, rtx4090 or "NVIDIA A100-SXM4-80GB".

    Raises ValueError with similar names if there is no such GPU.
    """
    compact = _compact(text)
    if compact in _BY_COMPACT_NAME:
        return _BY_COMPACT_NAME[compact]
    similar = _similar(compact)
    hint = f"Did you mean {' or '.join(similar)}? If not, use" if similar else "Use"
    raise ValueError(
        f"unknown GPU {text!r}. {hint} one of the names that `zero-study advise --gpu list` prints, or give its "
        "numbers with --gpu-memory, --gpu-tflops and --gpu-bandwidth."
    )


def _similar(compact: str) -> list[str]:
    """Return the names of at most four GPUs that resemble a compact name.

    Names that begin with it come first, such as those of all A100, then names that contain it or are contained in it.
    """
    if not compact:
        return []
    known = {name: gpu.name for name, gpu in _BY_COMPACT_NAME.items()}
    found = [gpu for name, gpu in known.items() if name.startswith(compact)]
    if len(compact) > 2:
        found = found or [gpu for name, gpu in known.items() if compact in name or (name in compact and len(name) > 2)]
    found = found or [known[name] for name in difflib.get_close_matches(compact, known, n=6, cutoff=0.7)]
    return list(dict.fromkeys(found))[:4]


def find(torch_name: str) -> Gpu | None:
    """Return the GPU with exactly the name that torch reports. None if it is not known.

    The whole name must match, because a slice of a GPU (MIG) or a similar model is another GPU.
    """
    for vendor in _VENDORS:
        torch_name = torch_name.removeprefix(vendor)
    return _BY_TORCH_NAME.get(torch_name)


def table() -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table of all GPUs, for people who look for a name."""
    head = ["name", "GiB", "TFLOP/s", "memory GB/s", "link GB/s", "link"]
    rows = [
        [
            gpu.name,
            f"{gpu.memory_bytes / 2**30:g}",
            f"{dense_16_bit_rate(gpu) / 1e12:,.0f}",
            f"{gpu.memory_bandwidth / 1e9:,.0f}",
            f"{gpu.link_bandwidth / 1e9:,.0f}",
            gpu.link.partition(",")[0],
        ]
        for gpu in GPUS.values()
    ]
    return head, rows


def dense_16_bit_rate(gpu: Gpu) -> float:
    """Return the peak rate of a GPU in FLOP/s for bf16, or for fp16 if it does not support bf16."""
    return gpu.peak_flops_per_second.get("bf16") or gpu.peak_flops_per_second["fp16"]


# ---------------------------------------------------------------- GPUs given by their numbers

# The generation of a GPU whose numbers were given is this and the generation that it resembles.
LIKE = "like "
CHANGED = " (changed)"  # is added to the name of a GPU of which some numbers were given
# No GPU with published messages leaves a smaller share of its memory to torch. It is that of the T4.
SMALLEST_TORCH_SHARE = min(gpu.torch_memory_bytes / gpu.memory_bytes for gpu in GPUS.values())
LARGEST_CONTEXT_BYTES = max(gpu.context_bytes for gpu in GPUS.values())
# The dense rate of an A100 and that of an H100, in the middle on a logarithmic scale. A GPU with a lower rate is
# compared with the A100's generation.
_BETWEEN_AMPERE_AND_HOPPER = 555e12


def from_numbers(
    base: Gpu | None, gibibytes: float | None, teraflops: float | None, gigabytes_per_second: float | None
) -> Gpu:
    """Return a GPU with the given memory, dense 16-bit rate and memory bandwidth.

    With a base, numbers that are not given are those of the base, and all rates scale with the 16-bit rate. Without a
    base, all three are needed. The GPU then multiplies in fp16 and bf16 only, and its link is PCIe 4.

    The memory that torch reports is estimated: the base's share of the memory, or the smallest share of all known GPUs.

    Raises ValueError if a number is missing.
    """
    if base is None:
        if gibibytes is None or teraflops is None or gigabytes_per_second is None:
            raise ValueError(
                "without --gpu, a GPU needs all of --gpu-memory, --gpu-tflops and --gpu-bandwidth. Add the missing "
                "ones, or name a GPU with --gpu, whose numbers they replace."
            )
        nearest = "Ampere" if teraflops * 1e12 < _BETWEEN_AMPERE_AND_HOPPER else "Hopper"
        torch_gib = gibibytes * SMALLEST_TORCH_SHARE
        return _gpu(
            "custom GPU",
            "",
            f"{LIKE}{nearest}",
            (gibibytes, torch_gib, min(LARGEST_CONTEXT_BYTES / 2**30, torch_gib / 2)),
            {"fp16": teraflops, "bf16": teraflops},
            gigabytes_per_second,
            _PCIE_4,
            _PCIE_4,
            "numbers of the request; link and host link: PCIe 4, assumed",
            basis="estimated",
        )
    if gibibytes is None and teraflops is None and gigabytes_per_second is None:
        return base
    factor = 1.0 if teraflops is None else teraflops * 1e12 / dense_16_bit_rate(base)
    memory = base.memory_bytes if gibibytes is None else round(gibibytes * 2**30)
    return dataclasses.replace(
        base,
        name=base.name + CHANGED,
        torch_name="",
        generation=f"{LIKE}{base.generation}",
        memory_bytes=memory,
        torch_memory_bytes=round(memory * base.torch_memory_bytes / base.memory_bytes),
        memory_basis=base.memory_basis if gibibytes is None else "estimated",
        peak_flops_per_second={kind: rate * factor for kind, rate in base.peak_flops_per_second.items()},
        memory_bandwidth=base.memory_bandwidth if gigabytes_per_second is None else gigabytes_per_second * 1e9,
        source=f"numbers of the request; all else as {base.name}: {base.source}",
        price_per_hour=None,
        price_date="",
        price_source="not found",
    )


# ---------------------------------------------------------------- rates and memory by use


def generation_of(gpu: Gpu) -> str:
    """Return the generation of a GPU's chip. For a GPU that was given by its numbers, it begins with LIKE.

    GeForce and workstation cards have generations of their own, because they have far less memory bandwidth than data
    center GPUs of the same time.
    """
    return gpu.generation


def has_flash_attention(gpu: Gpu) -> bool:
    """Return whether PyTorch's fused attention can use FlashAttention-2 on a GPU."""
    return gpu.generation.removeprefix(LIKE) not in ("Volta", "Turing")


def has_flash_attention_3(gpu: Gpu) -> bool:
    """Return whether FlashAttention-3 can run on a GPU. It is written for Hopper."""
    return gpu.generation.removeprefix(LIKE) == "Hopper"


def peak_flops_per_second(gpu: Gpu, precision: str, tf32: bool | None) -> float | None:
    """Return the peak rate of a GPU for the type in which a precision class multiplies. None if the GPU lacks it.

    `tf32` says whether fp32 products may use tensor cores.
    """
    kind = precision.removeprefix("pure-").removesuffix("-autocast")
    return gpu.peak_flops_per_second.get("tf32" if kind == "fp32" and tf32 else kind)


def product_flops_per_second(gpu: Gpu, precision: str) -> float:
    """Return the peak rate of a GPU for a precision class. For fp32, this is the rate without TF32.

    Raises ValueError if the GPU does not support the type.
    """
    peak = peak_flops_per_second(gpu, precision, tf32=False)
    if peak is None:
        raise ValueError(
            f"{precision}: {gpu.name} does not support it. It supports {', '.join(gpu.peak_flops_per_second)}"
        )
    return peak


# Memory that NCCL uses outside torch's allocator if there are several processes. It is from a single message of an H200
# under Megatron with 1.14 GiB outside the allocator, including the context above. It grows with channels and
# communicators.
NCCL_BYTES = round(0.6 * 2**30)


def usable_memory_bytes(gpu: Gpu, world_size: int = 1) -> int:
    """Return the bytes of a GPU that torch's allocator can use, without those of driver, CUDA context and NCCL."""
    return gpu.torch_memory_bytes - gpu.context_bytes - (NCCL_BYTES if world_size > 1 else 0)
