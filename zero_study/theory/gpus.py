"""Data sheets of GPUs: memory, dense peak rates, links and prices.

gpus.csv has one row for each GPU, with sources, and gpu_aliases.csv has other names of these GPUs. This module reads
both files, finds a GPU by its name, and makes one from numbers that a user gives.

Rates of links are in bytes per second for one direction. Data sheets give the sum of both directions, which is twice as
much. All rates are limits of the hardware. Software reaches only a share of them, which step_time.py models. None means
unknown.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from zero_study.errors import Refusal, refusing, several_names_message
from zero_study.files import StrictModel

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
    # GeForce and workstation cards have generations of their own, because they have far less memory bandwidth than data
    # center GPUs of the same time. If the GPU was described by numbers, the generation begins with LIKE.
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

    @property
    def resembled(self) -> str:
        """The generation of the GPU, or the one that a GPU described by numbers resembles."""
        return self.generation.removeprefix(LIKE)


FILE = Path(__file__).with_name("gpus.csv")
ALIASES_FILE = Path(__file__).with_name("gpu_aliases.csv")
_NO_PRICE = "not found"
_Positive = Annotated[float, Field(gt=0)]


class _Row(StrictModel):
    """One row of gpus.csv, in the units of its columns. The comments of the file explain them."""

    name: str
    torch_name: str
    generation: str
    memory_gib: _Positive
    torch_gib: _Positive
    context_gib: Annotated[float, Field(ge=0)]
    memory_basis: MemoryBasis
    fp32_tflops: _Positive | None = None
    tf32_tflops: _Positive | None = None
    fp16_tflops: _Positive | None = None
    bf16_tflops: _Positive | None = None
    fp8_tflops: _Positive | None = None
    memory_gb_per_s: _Positive
    link: str
    link_gb_per_s: _Positive
    pcie_gb_per_s: _Positive
    source: str
    price_per_hour: _Positive | None = None
    price_date: str = ""
    price_source: str = ""

    @model_validator(mode="after")
    def _check(self) -> _Row:
        if not self.context_gib < self.torch_gib < self.memory_gib:
            raise ValueError("context_gib must be less than torch_gib, and torch_gib less than memory_gib")
        if self.fp16_tflops is None and self.bf16_tflops is None:
            raise ValueError("it needs fp16_tflops or bf16_tflops")
        if len({self.price_per_hour is None, not self.price_date, not self.price_source}) > 1:
            raise ValueError("fill in all of price_per_hour, price_date and price_source, or none of them")
        return self

    def gpu(self) -> Gpu:
        tera = {kind: getattr(self, f"{kind}_tflops") for kind in ("fp32", "tf32", "fp16", "bf16", "fp8")}
        return Gpu(
            name=self.name,
            torch_name=self.torch_name,
            generation=self.generation,
            memory_bytes=round(self.memory_gib * 2**30),
            torch_memory_bytes=round(self.torch_gib * 2**30),
            context_bytes=round(self.context_gib * 2**30),
            memory_basis=self.memory_basis,
            peak_flops_per_second={kind: value * 1e12 for kind, value in tera.items() if value is not None},
            memory_bandwidth=self.memory_gb_per_s * 1e9,
            link=self.link,
            link_bandwidth=self.link_gb_per_s * 1e9,
            pcie_bandwidth=self.pcie_gb_per_s * 1e9,
            source=self.source,
            price_per_hour=self.price_per_hour,
            price_date=self.price_date,
            price_source=self.price_source or _NO_PRICE,
        )


def _rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each row of a CSV file with its place, such as "gpus.csv, line 41 (t4)". Empty cells are left out.

    Lines at the beginning of the file that start with # are comments, and the next line is the header. Raises Refusal
    if a row cannot be split into as many cells as the header has, or if its first cell is that of an earlier row.
    """
    header, names = list[str](), set[str]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("#") and not header:
            continue
        try:
            cells = next(csv.reader([line], strict=True))
        except csv.Error as error:  # a quotation mark is missing
            raise Refusal(f"{path}, line {number}: it cannot be read as CSV ({error})") from None
        header = header or cells
        place = f"{path}, line {number} ({', '.join(cells[:1])})"
        if len(cells) != len(header):
            raise Refusal(f"{place}: the row has {len(cells)} cells, but the header has {len(header)}")
        if cells[0] in names:
            raise Refusal(f"{place}: {cells[0]} is listed twice")
        names.add(cells[0])
        if cells is not header:
            yield place, {key: cell for key, cell in zip(header, cells, strict=True) if cell}


def read_gpus(path: Path = FILE) -> dict[str, Gpu]:
    """Return the GPUs of a file like gpus.csv, by name. Raises Refusal with the line of a row that is wrong."""
    gpus, rates = dict[str, Gpu](), dict[str, float]()
    for place, cells in _rows(path):
        with refusing(place):
            gpu = _Row.model_validate_strings(cells).gpu()
            if rates.setdefault(gpu.link, gpu.link_bandwidth) != gpu.link_bandwidth:
                raise ValueError(f"link_gb_per_s of {gpu.link} is {rates[gpu.link] / 1e9:g} in an earlier row")
        gpus[gpu.name] = gpu
    return gpus


def read_aliases(gpus: Collection[str], path: Path = ALIASES_FILE) -> dict[str, str]:
    """Return the names of GPUs by their aliases. Raises Refusal with the line of an alias whose GPU is not known."""
    aliases = {}
    for place, cells in _rows(path):
        if cells.keys() != {"alias", "gpu"} or cells["gpu"] not in gpus:
            raise Refusal(f"{place}: it needs an alias and the name of a GPU in {FILE.name}")
        aliases[cells["alias"]] = cells["gpu"]
    return aliases


GPUS: dict[str, Gpu] = read_gpus()
_ALIASES = read_aliases(GPUS)
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

    Raises ValueError with similar names if there is no such GPU, or if the name fits several GPUs.
    """
    compact = _compact(text)
    if compact in _BY_COMPACT_NAME:
        return _BY_COMPACT_NAME[compact]
    if len(possible := kinds(text)) > 1:
        question = several_names_message("the GPU", text, possible)
        raise ValueError(f"{question}. `zero-study advise --gpu list` prints the numbers of each.")
    similar = _similar(compact)
    hint = f"Did you mean {' or '.join(similar)}? If not, use" if similar else "Use"
    raise ValueError(
        f"unknown GPU {text!r}. {hint} one of the names that `zero-study advise --gpu list` prints, or give its "
        "numbers with --gpu-memory, --gpu-tflops and --gpu-bandwidth."
    )


def kinds(text: str) -> list[str]:
    """Return the names of all GPUs of which a name says only the first part, such as those of all A100.

    The part is not one if it ends within a number: an "a1" is no A100.
    """
    compact = _compact(text)
    return list(
        dict.fromkeys(
            gpu.name
            for name, gpu in _BY_COMPACT_NAME.items()
            if compact and name.startswith(compact) and not (compact[-1:] + name[len(compact) :][:1]).isdigit()
        )
    )


def _similar(compact: str) -> list[str]:
    """Return the names of at most four GPUs that resemble a compact name.

    Names that begin with it come first, then names that contain it or are contained in it.
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
    """Return the GPU with exactly the name that torch reports. None if this name is not known.

    The whole name must match, because a slice of a GPU (MIG) or a similar model is another GPU.
    """
    for vendor in _VENDORS:
        torch_name = torch_name.removeprefix(vendor)
    return _BY_TORCH_NAME.get(torch_name)


def table() -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table of all GPUs, for people who look for a name."""
    head = ["name", "GiB", "TFLOP/s", "mem. GB/s", "link GB/s", "$/hour", "link"]
    rows = [
        [
            gpu.name,
            f"{gpu.memory_bytes / 2**30:g}",
            f"{dense_16_bit_rate(gpu) / 1e12:,.0f}",
            f"{gpu.memory_bandwidth / 1e9:,.0f}",
            f"{gpu.link_bandwidth / 1e9:,.0f}",
            "" if gpu.price_per_hour is None else f"{gpu.price_per_hour:.2f}",
            gpu.link.partition(",")[0].partition(" of ")[0],
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
_PCIE_4 = 32e9  # bytes per second in one direction, of 16 lanes


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
                "options, or name a GPU with --gpu. The options then replace numbers of that GPU."
            )
        nearest = "Ampere" if teraflops * 1e12 < _BETWEEN_AMPERE_AND_HOPPER else "Hopper"
        torch_gib = gibibytes * SMALLEST_TORCH_SHARE
        return Gpu(
            name="custom GPU",
            torch_name="",
            generation=f"{LIKE}{nearest}",
            memory_bytes=round(gibibytes * 2**30),
            torch_memory_bytes=round(torch_gib * 2**30),
            context_bytes=round(min(LARGEST_CONTEXT_BYTES / 2**30, torch_gib / 2) * 2**30),
            memory_basis="estimated",
            peak_flops_per_second=dict.fromkeys(("fp16", "bf16"), teraflops * 1e12),
            memory_bandwidth=gigabytes_per_second * 1e9,
            link="PCIe 4",
            link_bandwidth=_PCIE_4,
            pcie_bandwidth=_PCIE_4,
            source="as you requested. The links to the host and between GPUs are assumed to be PCIe 4",
            price_per_hour=None,
            price_date="",
            price_source=_NO_PRICE,
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
        source=f"as you requested. All other numbers are those of {base.name}: {base.source}",
        price_per_hour=None,
        price_date="",
        price_source=_NO_PRICE,
    )


# ---------------------------------------------------------------- rates and memory by use


def has_flash_attention(gpu: Gpu) -> bool:
    """Return whether PyTorch's fused attention can use FlashAttention-2 on a GPU."""
    return gpu.resembled not in ("Volta", "Turing")


# The generation for which a kernel of attention is written.
ONLY_ON = {"flash-3": "Hopper", "flash-4": "Blackwell"}


def can_run_attention(gpu: Gpu, attention: str) -> bool:
    """Return whether a kernel of attention can run on a GPU."""
    if attention == "flash-2":
        return has_flash_attention(gpu)
    return ONLY_ON.get(attention, gpu.resembled) == gpu.resembled


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


SAME_MEMORY = 0.35 * 2**30  # bytes by which the memory that PyTorch states may differ from that of a GPU in the list
# The most common one of several GPUs with the same memory.
USUAL = ["t4", "v100-32gb", "rtx-4090", "l4", "rtx-a6000", "l40s", "a100-40gb", "a100-80gb", "h100-sxm", "h200", "b200"]


def usual_with(torch_bytes: int) -> str | None:
    """Return the name of the most common GPU with this memory, as PyTorch states it. None if no known GPU has it."""
    near = {name for name, gpu in GPUS.items() if abs(gpu.torch_memory_bytes - torch_bytes) <= SAME_MEMORY}
    return next((name for name in USUAL if name in near), min(near, default=None))
