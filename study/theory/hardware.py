"""Data of GPUs and of machines with GPUs: memory, dense peak rates, links, disks and prices, with sources.

Rates of links are in bytes per second for one direction. Data sheets give the sum of both directions, which is twice as
much. All rates are limits of the hardware. Software reaches only a share of them, which step_time.py models. None means
unknown.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# ---------------------------------------------------------------- GPUs


@dataclass(frozen=True)
class Gpu:
    """The data sheet of one GPU. Peak rates are those of dense matrix products, without sparsity."""

    name: str  # on the command line
    torch_name: str  # as torch reports it, without the vendor
    memory_bytes: int  # memory of the hardware
    torch_memory_bytes: int  # memory without the driver's part: the smallest total that torch reported
    context_bytes: int  # part of torch_memory_bytes that one process uses outside torch's allocator
    peak_flops_per_second: Mapping[str, float] = field(hash=False)  # by type: fp32, tf32, fp16, bf16, fp8
    memory_bandwidth: float
    link: str  # between the GPUs of a node
    link_bandwidth: float
    pcie_bandwidth: float  # between GPU and host
    source: str  # source of memory, peak rates and links
    price_per_hour: float | None  # USD per GPU, for a machine rented on demand
    price_date: str  # year and, if known, month
    price_source: str


_PCIE_3, _PCIE_4, _PCIE_5 = 16e9, 32e9, 64e9  # 16 lanes; data sheets give 32, 64 and 128 GB/s for both directions
_LINKS = {  # data sheets give 300, 600, 900 and 1,800 GB/s for both directions
    "NVLink 2": 150e9,
    "NVLink 3": 300e9,
    "NVLink 4": 450e9,
    "NVLink 5": 900e9,
    "PCIe 3": _PCIE_3,
    "PCIe 4": _PCIE_4,
    "PCIe 5": _PCIE_5,
}

_V100_SXM = {"fp32": 15.7, "fp16": 125}
_V100_PCIE = {"fp32": 14, "fp16": 112}
_A100 = {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}
_HOPPER_SXM = {"fp32": 67, "tf32": 494.5, "fp16": 989, "bf16": 989, "fp8": 1979}

_HALF = "tensor cores at half the figures, which are with sparsity"
_V100_SHEET = "NVIDIA V100 Tensor Core GPU data sheet"
_A100_SHEET = "NVIDIA A100 Tensor Core GPU data sheet"
_H100_SHEET = f"NVIDIA H100 Tensor Core GPU data sheet, {_HALF}"

# Sources of prices. Amazon's prices are for Linux in Northern Virginia.
_AWS_READ = "Amazon EC2, price list as read by data-receipts/109-gpu-pricing"
_AWS_CATALOG = "Amazon EC2, price list as in SkyPilot's catalog v8"
_AWS_REMEMBERED = "Amazon EC2, as remembered, not looked up"


def _known(rows: list[tuple[Any, ...]]) -> dict[str, Gpu]:
    gpus = {}
    for name, torch_name, gib, torch_gib, context_gib, tera, bandwidth, link, pcie, source, price in rows:
        gpus[name] = Gpu(
            name=name,
            torch_name=torch_name,
            memory_bytes=gib * 2**30,
            torch_memory_bytes=round(torch_gib * 2**30),
            context_bytes=round(context_gib * 2**30),
            peak_flops_per_second={kind: value * 1e12 for kind, value in tera.items()},
            memory_bandwidth=bandwidth * 1e9,
            link=link,
            link_bandwidth=_LINKS[link],
            pcie_bandwidth=pcie,
            source=source,
            price_per_hour=price[0],
            price_date=price[1],
            price_source=price[2],
        )
    return gpus


# Each row has three sizes of memory in GiB: of the hardware, the total that torch reports, and a process's context. The
# total is from messages "CUDA out of memory ... GPU 0 has a total capacity of 39.38 GiB" in public issues and logs,
# about ten for each GPU. Drivers differ by up to 0.2 GiB, so the smallest total is used. (The messages of A10G and L4
# do not name the GPU.) The context is from such messages of processes that were alone on a GPU: memory in use minus
# memory that torch had reserved. It was 0.11 to 0.17 for T4, 0.37 to 0.39 for V100, 0.28 to 0.38 for A10G or L4, 0.49
# for A100, 0.51 for H200 and 0.69 GiB for B200. H100 is assumed to equal H200.
GPUS: dict[str, Gpu] = _known([
    ("t4", "T4", 16, 14.56, 0.2, {"fp32": 8.1, "fp16": 65}, 320, "PCIe 3", _PCIE_3,
     "NVIDIA T4 Tensor Core GPU data sheet and product brief", (0.978, "2025", f"g4dn.metal, {_AWS_REMEMBERED}")),
    ("v100-pcie-16gb", "V100-PCIE-16GB", 16, 15.77, 0.4, _V100_PCIE, 900, "PCIe 3", _PCIE_3, _V100_SHEET,
     (3.06, "before 2026", "NC6s v3, Azure, table of the Hugging Face space sasha/energy-cost-compute")),
    ("v100-pcie-32gb", "V100-PCIE-32GB", 32, 31.73, 0.4, _V100_PCIE, 900, "PCIe 3", _PCIE_3, _V100_SHEET,
     (2.30, "2025", "V100-32G, Paperspace, as in SkyPilot's catalog v7, which does not say which V100")),
    ("v100-16gb", "V100-SXM2-16GB", 16, 15.77, 0.4, _V100_SXM, 900, "NVLink 2", _PCIE_3, _V100_SHEET,
     (3.06, "2026", f"p3.16xlarge, {_AWS_CATALOG}")),
    ("v100-32gb", "V100-SXM2-32GB", 32, 31.73, 0.4, _V100_SXM, 900, "NVLink 2", _PCIE_3, _V100_SHEET,
     (3.902, "2025", f"p3dn.24xlarge, {_AWS_REMEMBERED}")),
    ("a10g", "A10G", 24, 21.96, 0.4, {"fp32": 35, "tf32": 35, "fp16": 70, "bf16": 70}, 600, "PCIe 4", _PCIE_4,
     "NVIDIA A10G data sheet, for Amazon EC2 G5", (2.036, "2025", f"g5.48xlarge, {_AWS_REMEMBERED}")),
    ("l4", "L4", 24, 21.96, 0.4, {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121, "fp8": 242.5}, 300, "PCIe 4",
     _PCIE_4, f"NVIDIA L4 data sheet, {_HALF}", (1.669, "2025", f"g6.48xlarge, {_AWS_REMEMBERED}")),
    ("a100-pcie-40gb", "A100-PCIE-40GB", 40, 39.38, 0.5, _A100, 1555, "PCIe 4", _PCIE_4, _A100_SHEET,
     (None, "", "not found")),
    ("a100-40gb", "A100-SXM4-40GB", 40, 39.38, 0.5, _A100, 1555, "NVLink 3", _PCIE_4, _A100_SHEET,
     (2.745, "2026-11", f"p4d.24xlarge, {_AWS_READ}")),
    ("a100-pcie-80gb", "A100 80GB PCIe", 80, 79.14, 0.5, _A100, 1935, "PCIe 4", _PCIE_4, _A100_SHEET,
     (3.673, "2026-11", "NC24ads A100 v4, Azure, price list as read by data-receipts/109-gpu-pricing")),
    ("a100-80gb", "A100-SXM4-80GB", 80, 79.14, 0.5, _A100, 2039, "NVLink 3", _PCIE_4, _A100_SHEET,
     (3.431, "2026-11", f"p4de.24xlarge, {_AWS_READ}")),
    ("h100-pcie", "H100 PCIe", 80, 79.11, 0.5,
     {"fp32": 51, "tf32": 378, "fp16": 756.5, "bf16": 756.5, "fp8": 1513}, 2000, "PCIe 5", _PCIE_5, _H100_SHEET,
     (3.29, "2026-09", "1x H100 PCIe, Lambda, its page as read by api-evangelist/lambda-labs")),
    ("h100-sxm", "H100 80GB HBM3", 80, 79.11, 0.5, _HOPPER_SXM, 3350, "NVLink 4", _PCIE_5, _H100_SHEET,
     (6.88, "2026-11", f"p5.48xlarge, {_AWS_READ}")),
    ("h200", "H200", 141, 139.80, 0.55, _HOPPER_SXM, 4800, "NVLink 4", _PCIE_5, _H100_SHEET.replace("H100", "H200"),
     (7.912, "2026-08", "p5en.48xlarge, Amazon EC2, as listed in dstack's pull request 4110")),
    ("b200", "B200", 180, 178.35, 0.7, {"fp32": 80, "tf32": 1100, "fp16": 2250, "bf16": 2250, "fp8": 4500}, 8000,
     "NVLink 5", _PCIE_5, "NVIDIA Blackwell Architecture Technical Brief, HGX B200, per GPU and dense",
     (14.242, "2026", f"p6-b200.48xlarge, {_AWS_CATALOG}")),
])  # fmt: skip

_ALIASES = {
    "h100": "h100-sxm",
    "h100-80gb": "h100-sxm",
    "h100-sxm-80gb": "h100-sxm",
    "h100-pcie-80gb": "h100-pcie",
    "h100-80": "h100-sxm",
    "h100-80gb-pcie": "h100-pcie",
    "a100-40": "a100-40gb",
    "a100-80": "a100-80gb",
    "a10g-24gb": "a10g",
    "l4-24gb": "l4",
    "t4-16gb": "t4",
    "h200-141gb": "h200",
    "b200-180gb": "b200",
    "a100-sxm-40gb": "a100-40gb",
    "a100-sxm-80gb": "a100-80gb",
    "v100-sxm-16gb": "v100-16gb",
    "v100-sxm-32gb": "v100-32gb",
}
_BY_TORCH_NAME = {gpu.torch_name: gpu for gpu in GPUS.values()}


def _spelled(text: str) -> str:
    return "-".join(text.strip().lower().replace("_", " ").replace("-", " ").split())


def find_gpu(text: str) -> Gpu:
    """Return the GPU with a name as people write it, such as a100-80gb, H100_80GB or "NVIDIA A100-SXM4-80GB".

    Raises ValueError with similar names if there is no such GPU.
    """
    names = dict(GPUS)
    names |= {_spelled(gpu.torch_name): gpu for gpu in GPUS.values()}
    names |= {alias: GPUS[name] for alias, name in _ALIASES.items()}
    spelling = _spelled(text).removeprefix("nvidia-").removeprefix("tesla-")
    if spelling in names:
        return names[spelling]
    near = [name for name in GPUS if spelling and name.startswith(spelling)]  # such as a100, which is ambiguous
    near = near or list(dict.fromkeys(names[name].name for name in difflib.get_close_matches(spelling, names, n=3)))
    hint = f"near are {', '.join(near)}" if near else f"known are {', '.join(GPUS)}"
    raise ValueError(f"unknown GPU {text!r}: {hint}. Use one of these")


def find(torch_name: str) -> Gpu | None:
    """Return the GPU with exactly the name that torch reports. None if it is not known.

    The whole name must match, because a slice of a GPU (MIG) or a similar model is another GPU.
    """
    return _BY_TORCH_NAME.get(torch_name.removeprefix("NVIDIA ").removeprefix("Tesla "))


def generation_of(gpu: Gpu) -> str:
    """Return the generation of a GPU's chip.

    The A10G has its own generation, because it has only a third of the A100's memory bandwidth.
    """
    return next(name for start, name in _GENERATIONS.items() if gpu.name.startswith(start))


_GENERATIONS = {  # generation by the beginning of a GPU's name
    "t4": "Turing", "v100": "Volta", "a10g": "GA102", "a100": "Ampere", "l4": "Ada", "h100": "Hopper", "h200": "Hopper",
    "b200": "Blackwell",
}  # fmt: skip


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


# ---------------------------------------------------------------- boxes


@dataclass(frozen=True)
class Box:
    """A machine: GPUs of one kind in nodes of equal size, and the host memory, disks and network of a node."""

    gpu: Gpu
    num_gpus: int
    gpus_per_node: int = 8
    node_bandwidth: float = 200e9  # from a node to all others; the default is 8 x 200 Gbit/s
    host_memory_bytes: int | None = None  # per node, as all fields below
    host_memory_bandwidth: float | None = None
    host_cores: int | None = None  # physical cores
    disk_bytes: int | None = None  # local NVMe
    disk_read_bandwidth: float | None = None
    disk_write_bandwidth: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise ValueError(f"{self.num_gpus} GPUs: at least one is needed. Change the number of GPUs")
        if self.num_gpus > self.gpus_per_node and self.num_gpus % self.gpus_per_node:
            raise ValueError(
                f"{self.num_gpus} GPUs do not fill nodes of {self.gpus_per_node}. "
                f"Use a multiple of {self.gpus_per_node}, or change the GPUs per node."
            )

    @property
    def num_nodes(self) -> int:
        return max(1, self.num_gpus // self.gpus_per_node)


# Sequential read and write rates of a drive: data sheets of Samsung's data center drives PM983 and PM9A3, from memory,
# not looked up. Clouds do not publish which drives they have, and may throttle them.
_PCIE_3_DRIVE = (3.2e9, 2.0e9)
_PCIE_4_DRIVE = (6.8e9, 4.0e9)


@dataclass(frozen=True)
class _Node:
    """One node as cloud providers rent it out."""

    gpu: str
    gpus: int
    gigabits: float
    host: tuple[int, int, float]  # GiB, physical cores, GB/s of the processors' memory channels
    drives: tuple[int, float, tuple[float, float]] | None  # number, TB each, read and write rate of one
    source: str

    def box(self, num_gpus: int) -> Box:
        """Return a machine with this number of GPUs.

        If it has fewer GPUs than a node, it has the same share of the node's host.
        """
        share = min(1.0, num_gpus / self.gpus)
        gib, cores, gigabytes_per_second = self.host
        num_drives, terabytes, (read_rate, write_rate) = self.drives or (0, 0, (0, 0))
        return Box(
            gpu=GPUS[self.gpu],
            num_gpus=num_gpus,
            gpus_per_node=self.gpus,
            node_bandwidth=self.node_bandwidth,
            host_memory_bytes=int(share * (gib * 2**30)),
            host_memory_bandwidth=share * (gigabytes_per_second * 1e9),
            host_cores=max(1, int(share * cores)),
            disk_bytes=int(share * round(num_drives * terabytes * 1e12)),
            disk_read_bandwidth=share * (num_drives * read_rate),
            disk_write_bandwidth=share * (num_drives * write_rate),
            source=self.source if share == 1.0 else f"{num_gpus} of {self.gpus} parts of {self.source}",
        )

    @property
    def node_bandwidth(self) -> float:
        return self.gigabits * 1e9 / 8


# Nodes as cloud providers rent them out. Memory and processors of p3.16xlarge, p5, p5en and p6-b200 are from SkyPilot's
# catalog v8. Processors and network of ND A100 v4 are from Azure's page. All else is from memory of the providers'
# pages, not looked up. (p4d and p4de, whose prices are above, have 1,152 GiB and 400 Gbit/s. Most A100 clusters have
# 1,600 Gbit/s.) Memory channels with two sockets: Broadwell 4 x DDR4-2400, Skylake 6 x DDR4-2666, Cascade Lake 6 x
# DDR4-2933, Rome and Milan 8 x DDR4-3200, Sapphire Rapids 8 x DDR5-4800, Emerald Rapids 8 x DDR5-5600.
_NODES = {
    node.gpu: node
    for node in (
        _Node("t4", 8, 100, (384, 48, 281.6), (2, 0.9, _PCIE_3_DRIVE), "Amazon EC2 g4dn.metal"),
        _Node("v100-16gb", 8, 25, (488, 32, 153.6), None, "Amazon EC2 p3.16xlarge, which has no local disk"),
        _Node("v100-32gb", 8, 100, (768, 48, 256), (2, 0.9, _PCIE_3_DRIVE), "Amazon EC2 p3dn.24xlarge"),
        _Node("a10g", 8, 100, (768, 96, 409.6), (2, 3.8, _PCIE_3_DRIVE), "Amazon EC2 g5.48xlarge"),
        _Node("l4", 8, 100, (768, 96, 409.6), (8, 0.94, _PCIE_3_DRIVE), "Amazon EC2 g6.48xlarge"),
        _Node("a100-40gb", 8, 1600, (900, 96, 409.6), (8, 0.8, _PCIE_4_DRIVE), "Azure ND96asr A100 v4"),
        _Node("a100-80gb", 8, 1600, (1900, 96, 409.6), (8, 0.8, _PCIE_4_DRIVE), "Azure ND96amsr A100 v4"),
        _Node("a100-pcie-80gb", 4, 80, (880, 96, 409.6), (4, 0.96, _PCIE_4_DRIVE), "Azure NC96ads A100 v4"),
        _Node("h100-sxm", 8, 3200, (2048, 96, 409.6), (8, 3.84, _PCIE_4_DRIVE), "Amazon EC2 p5.48xlarge"),
        _Node("h200", 8, 3200, (2048, 96, 614.4), (8, 3.84, _PCIE_4_DRIVE), "Amazon EC2 p5en.48xlarge"),
        _Node("b200", 8, 3200, (2048, 96, 716.8), (8, 3.84, _PCIE_4_DRIVE), "Amazon EC2 p6-b200.48xlarge"),
    )
}


def typical_box(gpu: Gpu, num_gpus: int, gpus_per_node: int | None = None) -> Box:
    """Return the machine with these GPUs that cloud providers rent out.

    If it has fewer GPUs than a node, it has the same share of the node's host. If no node with this GPU and this
    `gpus_per_node` is known, the fields of the host are None. Raises ValueError if the GPUs do not fill the nodes.
    """
    node = _NODES.get(gpu.name)
    if node is None:
        return Box(gpu, num_gpus) if gpus_per_node is None else Box(gpu, num_gpus, gpus_per_node)
    if gpus_per_node is not None and gpus_per_node != node.gpus:
        return Box(gpu, num_gpus, gpus_per_node, node_bandwidth=node.node_bandwidth)
    return node.box(num_gpus)
