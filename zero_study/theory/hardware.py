"""Describe machines with GPUs: number of GPUs, host memory, cores, disks and network of a node, with sources.

The data of the GPUs themselves are in gpus.py, whose names this module offers too. Rates are in bytes per second, and
those of links in one direction. All rates are limits of the hardware. None means unknown.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from zero_study.theory.gpus import (
    CHANGED,
    GPUS,
    Gpu,
    can_run_attention,
    dense_16_bit_rate,
    find,
    find_gpu,
    from_numbers,
    has_flash_attention,
    peak_flops_per_second,
    product_flops_per_second,
    usable_memory_bytes,
)

__all__ = (
    "GPUS", "Cluster", "Gpu", "can_run_attention", "described", "find", "find_gpu", "from_numbers",
    "has_flash_attention", "peak_flops_per_second", "product_flops_per_second", "rented_box",
    "typical_box", "usable_memory_bytes", "whole_host_note", "with_host",
)  # fmt: skip


# ---------------------------------------------------------------- boxes


# How GPUs of different nodes exchange data. rdma: network adapters read and write the memory of GPUs (InfiniBand, RoCE,
# Amazon's EFA). tcp: the kernel of the operating system copies everything.
Network = Literal["rdma", "tcp"]


@dataclass(frozen=True)
class Cluster:
    """A machine: GPUs of one kind in nodes of equal size, and the host memory, disks and network of a node."""

    gpu: Gpu
    num_gpus: int
    gpus_per_node: int = 8
    node_bandwidth: float = 200e9  # from a node to all others; the default is 8 x 200 Gbit/s
    network: Network = "rdma"
    host_memory_bytes: int | None = None  # per node, as all fields below
    host_memory_bandwidth: float | None = None
    host_cores: int | None = None  # physical cores
    disk_bytes: int | None = None  # local NVMe
    disk_read_bandwidth: float | None = None
    disk_write_bandwidth: float | None = None
    source: str = ""
    requested: frozenset[str] = frozenset()  # names of fields, and "link_bandwidth", whose values the user gave

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise ValueError(
                f"the number of GPUs is {self.num_gpus}, but at least 1 is needed. Change the number of GPUs"
            )
        if self.num_gpus > self.gpus_per_node and self.num_gpus % self.gpus_per_node:
            raise ValueError(
                f"{self.num_gpus} GPUs cannot be divided equally among nodes of {self.gpus_per_node} GPUs. "
                f"Use a multiple of {self.gpus_per_node}, or change the GPUs per node."
            )

    @property
    def num_nodes(self) -> int:
        return max(1, self.num_gpus // self.gpus_per_node)

    @property
    def gpus_of_node(self) -> int:
        """The GPUs of a node that are used."""
        return min(self.num_gpus, self.gpus_per_node)

    @property
    def is_part_of_node(self) -> bool:
        return self.num_gpus < self.gpus_per_node


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
    linked_gpus: int = 0  # GPUs whose NVLink connects several nodes; 0: it ends at the node
    network: Network = "rdma"

    def box(self, gpu: Gpu, num_gpus: int) -> Cluster:
        """Return a machine with this number of GPUs, which has the whole host of each node.

        If it has fewer GPUs than a node, the others are idle, and the processes share the whole host.
        """
        gib, cores, gigabytes_per_second = self.host
        num_drives, terabytes, (read_rate, write_rate) = self.drives or (0, 0, (0, 0))
        return Cluster(
            gpu=gpu,
            num_gpus=num_gpus,
            gpus_per_node=self.gpus,
            node_bandwidth=self.node_bandwidth(num_gpus),
            network=self.network,
            host_memory_bytes=gib * 2**30,
            host_memory_bandwidth=gigabytes_per_second * 1e9,
            host_cores=cores,
            disk_bytes=round(num_drives * terabytes * 1e12),
            disk_read_bandwidth=num_drives * read_rate,
            disk_write_bandwidth=num_drives * write_rate,
            source=self.source,
        )

    def node_bandwidth(self, num_gpus: int) -> float:
        """Return the bytes per second between nodes: by NVLink if it connects all of them, else by the network."""
        if num_gpus <= self.linked_gpus:
            return self.gpus * GPUS[self.gpu].link_bandwidth
        return self.gigabits * 1e9 / 8


# Nodes as cloud providers rent them out. Memory and processors of p3.16xlarge, p5, p5en and p6-b200 are from SkyPilot's
# catalog v8. Processors and network of ND A100 v4 are from Azure's page. All else is from memory of the providers'
# pages, not looked up. (p4d and p4de, whose prices are above, have 1,152 GiB and 400 Gbit/s. Most A100 clusters have
# 1,600 Gbit/s.) g6e, g7e and p6-b300 are from public tables of instances, GH200 from SkyPilot's catalog v8, ND MI300X
# v5 from Azure's page. The trays of GB200 and GB300 NVL72 are from NVIDIA's specifications, which name no drives. 72
# GPUs in 18 trays are connected by NVLink. Memory channels with two sockets: Broadwell 4 x DDR4-2400, Skylake 6 x
# DDR4-2666, Cascade Lake 6 x DDR4-2933, Rome and Milan 8 x DDR4-3200, Sapphire Rapids 8 x DDR5-4800, Emerald Rapids 8 x
# DDR5-5600. A Grace processor has 480 GB of LPDDR5X, with up to 512 GB/s.
_NODES = {
    node.gpu: node
    for node in (
        _Node("t4", 8, 100, (384, 48, 281.6), (2, 0.9, _PCIE_3_DRIVE), "Amazon EC2 g4dn.metal"),
        _Node(
            "v100-16gb", 8, 25, (488, 32, 153.6), None, "Amazon EC2 p3.16xlarge, which has no local disk", network="tcp"
        ),
        _Node("v100-32gb", 8, 100, (768, 48, 256), (2, 0.9, _PCIE_3_DRIVE), "Amazon EC2 p3dn.24xlarge"),
        _Node("a10g", 8, 100, (768, 96, 409.6), (2, 3.8, _PCIE_3_DRIVE), "Amazon EC2 g5.48xlarge"),
        _Node("l4", 8, 100, (768, 96, 409.6), (8, 0.94, _PCIE_3_DRIVE), "Amazon EC2 g6.48xlarge"),
        _Node("a100-40gb", 8, 1600, (900, 96, 409.6), (8, 0.8, _PCIE_4_DRIVE), "Azure ND96asr A100 v4"),
        _Node("a100-80gb", 8, 1600, (1900, 96, 409.6), (8, 0.8, _PCIE_4_DRIVE), "Azure ND96amsr A100 v4"),
        _Node(
            "a100-pcie-80gb", 4, 80, (880, 96, 409.6), (4, 0.96, _PCIE_4_DRIVE), "Azure NC96ads A100 v4", network="tcp"
        ),
        _Node("h100-sxm", 8, 3200, (2048, 96, 409.6), (8, 3.84, _PCIE_4_DRIVE), "Amazon EC2 p5.48xlarge"),
        _Node("h200", 8, 3200, (2048, 96, 614.4), (8, 3.84, _PCIE_4_DRIVE), "Amazon EC2 p5en.48xlarge"),
        _Node("b200", 8, 3200, (2048, 96, 716.8), (8, 3.84, _PCIE_4_DRIVE), "Amazon EC2 p6-b200.48xlarge"),
        _Node("b300", 8, 6400, (4096, 96, 716.8), (8, 3.84, _PCIE_4_DRIVE), "Amazon EC2 p6-b300.48xlarge"),
        _Node("gb200", 4, 1600, (894, 144, 1024), None, "tray of NVIDIA GB200 NVL72", linked_gpus=72),
        _Node("gb300", 4, 3200, (894, 144, 1024), None, "tray of NVIDIA GB300 NVL72", linked_gpus=72),
        _Node("gh200", 1, 400, (432, 64, 512), None, "Lambda gpu_1x_gh200, with 400 Gbit/s assumed"),
        _Node("l40s", 8, 400, (1536, 96, 409.6), (4, 1.9, _PCIE_4_DRIVE), "Amazon EC2 g6e.48xlarge"),
        _Node("rtx-pro-6000-server", 8, 1600, (2048, 96, 614.4), (4, 3.8, _PCIE_4_DRIVE), "Amazon EC2 g7e.48xlarge"),
        _Node("mi300x", 8, 3200, (1850, 96, 614.4), (8, 3.5, _PCIE_4_DRIVE), "Azure ND96isr MI300X v5"),
    )
}


def typical_box(gpu: Gpu, num_gpus: int, gpus_per_node: int | None = None) -> Cluster:
    """Return the machine that cloud providers usually rent out with these GPUs.

    It has the whole host of each node, even if it has fewer GPUs than a node. If no node with this GPU and this
    `gpus_per_node` is known, the fields of the host are None. Raises ValueError if the GPUs do not fill the nodes.
    """
    node = _NODES.get(gpu.name.removesuffix(CHANGED))
    if node is None:
        return Cluster(gpu, num_gpus) if gpus_per_node is None else Cluster(gpu, num_gpus, gpus_per_node)
    if gpus_per_node is not None and gpus_per_node != node.gpus:
        return Cluster(gpu, num_gpus, gpus_per_node, node.gigabits * 1e9 / 8, node.network)
    return node.box(gpu, num_gpus)


def rented_box(gpu: Gpu, num_gpus: int) -> Cluster:
    """Return the part of a typical machine that cloud providers rent out with this number of GPUs.

    If it has fewer GPUs than a node, it has the same share of the node's host. The predictions of this project's
    studies and the ledger of claims are about such parts. `advise` is about whole nodes.
    """
    box = typical_box(gpu, num_gpus)
    if not box.is_part_of_node or not box.source:
        return box
    share = num_gpus / box.gpus_per_node

    def part(name: str) -> float | None:
        value = getattr(box, name)
        return None if value is None else share * value

    sizes = {name: int(part(name) or 0) for name in ("host_memory_bytes", "disk_bytes")}
    rates = {name: part(name) for name in ("host_memory_bandwidth", "disk_read_bandwidth", "disk_write_bandwidth")}
    changes: dict[str, Any] = {**sizes, **rates, "host_cores": max(1, int(part("host_cores") or 0))}
    source = f"{num_gpus} of {box.gpus_per_node} parts of {box.source}"
    return dataclasses.replace(box, **changes, source=source)


def with_host(
    box: Cluster,
    *,
    memory_gib: float | None = None,
    cores: int | None = None,
    gigabytes_per_second: float | None = None,
    disk_terabytes: float | None = None,
    disk_gigabytes_per_second: tuple[float, float] | None = None,
    link_gigabytes_per_second: float | None = None,
    network_gigabits_per_second: float | None = None,
    network: Network | None = None,
) -> Cluster:
    """Return a machine in which the user's numbers replace the assumed ones. None keeps the assumed number.

    Memory, cores, disks and their rates (read, write) are those of a node. The rate of a link is that between the GPUs
    of a node, in one direction. If another rate of the network than that of the machine is given, but not its kind, a
    network of up to `TCP_UP_TO` is assumed to have no RDMA.
    """
    read, write = disk_gigabytes_per_second or (None, None)
    values: dict[str, Any] = {
        "host_memory_bytes": None if memory_gib is None else round(memory_gib * 2**30),
        "host_cores": cores,
        "host_memory_bandwidth": _times(gigabytes_per_second, 1e9),
        "disk_bytes": None if disk_terabytes is None else round(disk_terabytes * 1e12),
        "disk_read_bandwidth": _times(read, 1e9),
        "disk_write_bandwidth": _times(write, 1e9),
        "node_bandwidth": _times(network_gigabits_per_second, 1e9 / 8),
    }
    rate = values["node_bandwidth"]
    if network is None and rate not in (None, box.node_bandwidth):
        network = "tcp" if rate <= TCP_UP_TO else "rdma"
    values["network"] = network
    given = {name: value for name, value in values.items() if value is not None}
    requested = box.requested | given.keys()
    gpu = box.gpu
    if link_gigabytes_per_second is not None:
        gpu = dataclasses.replace(gpu, link="", link_bandwidth=link_gigabytes_per_second * 1e9)
        requested |= {"link_bandwidth"}
    return dataclasses.replace(box, gpu=gpu, requested=requested, **given)


TCP_UP_TO = 100e9 / 8  # bytes/s of a node; assumed, because machines with RDMA mostly have several network adapters
# The host of a machine of which nothing is known, per GPU: GiB of memory, physical cores and GB/s of memory. This is an
# assumption about workstations and about hosts that are rented with GPUs of consumers, and no published number.
ASSUMED_HOST = (128, 16, 60.0)
_ASSUMED_SOURCE = (
    "assumed, because no typical machine is known: {:g} GiB, {} cores and {:g} GB/s of host memory per GPU"
)


def with_assumed_host(box: Cluster) -> Cluster:
    """Return a machine in which `ASSUMED_HOST` replaces the unknown properties of the host."""
    ranks = box.gpus_of_node
    memory, cores, rate = ASSUMED_HOST
    assumed: dict[str, Any] = {
        "host_memory_bytes": ranks * memory * 2**30, "host_cores": ranks * cores,
        "host_memory_bandwidth": ranks * rate * 1e9,
    }  # fmt: skip
    unknown = {name: value for name, value in assumed.items() if getattr(box, name) is None}
    return dataclasses.replace(box, source=_ASSUMED_SOURCE.format(*ASSUMED_HOST), **unknown) if unknown else box


def has_assumed_host(box: Cluster) -> bool:
    """Return whether a property of the host is assumed, because no typical machine with this GPU is known."""
    return box.source == _ASSUMED_SOURCE.format(*ASSUMED_HOST)


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def described(box: Cluster) -> list[tuple[str, str]]:
    """Return what a prediction assumes about the machine, as pairs of a label and a text.

    Numbers that the user gave are marked. If the machine has fewer GPUs than a node, the text says that the host's
    numbers are those of the whole node.
    """
    gpu = box.gpu
    kind = "bf16" if "bf16" in gpu.peak_flops_per_second else "fp16"
    total = f"{gpu.torch_memory_bytes / 2**30:.1f} GiB"
    sees = {"messages": "", "same chip": " (as another GPU with this chip)", "estimated": " (estimated)"}
    several = f"{box.num_nodes} nodes with {box.gpus_per_node} GPUs each"
    nodes = several if box.num_nodes > 1 else f"1 node with {box.gpus_per_node} GPUs"
    if box.is_part_of_node:
        nodes = f"{box.num_gpus} of the {box.gpus_per_node} GPUs of one node"
    link = f"{gpu.link}: " if gpu.link else ""
    network = f"; {box.node_bandwidth * 8e-9:,g} Gbit/s per node{_mark(box, 'node_bandwidth')}"
    network += f", {_NETWORKS[box.network]}{_mark(box, 'network')}"
    pairs = [
        (
            "GPU",
            f"{gpu.name}: {gpu.memory_bytes / 2**30:g} GiB, of which PyTorch can use {total}{sees[gpu.memory_basis]}, "
            f"dense peak rate {dense_16_bit_rate(gpu) / 1e12:,g} TFLOP/s in {kind}, memory bandwidth "
            f"{gpu.memory_bandwidth / 1e9:,g} GB/s",
        ),
        ("link", f"{link}{gpu.link_bandwidth / 1e9:,g} GB/s in one direction{_mark(box, 'link_bandwidth')}"),
        ("nodes", nodes + (network if box.num_nodes > 1 else "")),
        ("host", _host_in_words(box)),
        ("disks", _disks_in_words(box)),
    ]
    if box.source:
        pairs.append(("machine", box.source))
    pairs.append(
        (
            "not included",
            "the host memory for loading and saving a model, which can be more than the host memory for a step",
        )
    )
    return pairs


_NETWORKS: dict[Network, str] = {"rdma": "with RDMA", "tcp": "without RDMA (TCP)"}


def whole_host_note(box: Cluster) -> str | None:
    """Return a note that the host's numbers are those of a whole node. None if all its GPUs are used or it is unknown.

    A user who rents only a part of a node has less.
    """
    names = ("host_memory_bytes", "host_cores", "host_memory_bandwidth")
    assumed = [name for name in names if getattr(box, name) is not None and name not in box.requested]
    if not box.is_part_of_node or not assumed or has_assumed_host(box):
        return None
    return (
        f"for offload, the whole host of a node is assumed ({_host_in_words(box)}; {box.source}), although the "
        f"training uses only {box.num_gpus} of its {box.gpus_per_node} GPUs. If you rent only a part of the host, "
        "state its size with --host-memory, --host-cores and --host-bandwidth"
    )


def _mark(box: Cluster, name: str) -> str:
    return " (given)" if name in box.requested else ""


def _host_in_words(box: Cluster) -> str:
    known = [
        f"{value}{_mark(box, name)}"
        for name, value in (
            ("host_memory_bytes", box.host_memory_bytes and f"{box.host_memory_bytes / 2**30:,.0f} GiB"),
            ("host_cores", box.host_cores and f"{box.host_cores} cores"),
            ("host_memory_bandwidth", box.host_memory_bandwidth and f"{box.host_memory_bandwidth / 1e9:,.0f} GB/s"),
        )
        if value
    ]
    missing = [flag for name, flag in _HOST_FLAGS.items() if getattr(box, name) is None]
    whole = box.is_part_of_node and not has_assumed_host(box)
    parts = [", ".join(known) + (" in the whole node" if whole else " per node")] if known else []
    parts += [f"{', '.join(missing)} must be given for CPU offload, because the values are unknown"] if missing else []
    return "; ".join(parts)


def _disks_in_words(box: Cluster) -> str:
    if not box.disk_read_bandwidth or not box.disk_write_bandwidth:
        return "no local disk is known, so NVMe offload needs --disk and --disk-bandwidth"
    size = f"{box.disk_bytes / 1e12:.3g} TB{_mark(box, 'disk_bytes')}" if box.disk_bytes else "of unknown size"
    read, write = box.disk_read_bandwidth / 1e9, box.disk_write_bandwidth / 1e9
    return f"{size}, reads {read:.3g} GB/s, writes {write:.3g} GB/s{_mark(box, 'disk_read_bandwidth')}"


_HOST_FLAGS = {
    "host_memory_bytes": "--host-memory",
    "host_cores": "--host-cores",
    "host_memory_bandwidth": "--host-bandwidth",
}
