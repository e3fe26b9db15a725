"""Read PyTorch's messages that a GPU has no memory left, in all their forms since PyTorch 2.0."""

from __future__ import annotations

import re
from dataclasses import dataclass

from zero_study.why.log import Failure

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"
_TRIED = re.compile(rf"(out of memory|OutOfMemoryError).{{0,200}}?Tried to allocate {_SIZE}", re.IGNORECASE)
# A message whose numbers were cut off. Ray says "out of memory" of the host.
_SHORT = re.compile(r"^(?:OutOfMemoryError|RuntimeError|AcceleratorError): (?:CUDA|HIP|XPU|NPU) out of memory\b")
_FIELDS = {
    # since 2.1
    "total": re.compile(rf"has (?:a )?total(?: capaci?ty)?(?: of)? {_SIZE}"),
    "free": re.compile(rf"of which {_SIZE} is free"),
    "own": re.compile(rf"Including non-PyTorch memory, this process has {_SIZE} memory in use"),
    "allowed": re.compile(rf"{_SIZE} allowed"),
    "allocated": re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch"),
    "pools": re.compile(rf"with {_SIZE} allocated in private pools"),
    "unused": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
}
_FIELDS_2_0 = {
    "total": re.compile(rf"{_SIZE} total capacity"),
    "free": re.compile(rf"{_SIZE} free"),
    "allocated": re.compile(rf"{_SIZE} already allocated"),
    "reserved": re.compile(rf"{_SIZE} reserved in total by PyTorch"),
}
_PROCESS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_GPU = re.compile(r"GPU (\d+)")
CONTEXT = 700 << 20  # bytes of a CUDA context with the libraries that PyTorch loads, at most


@dataclass(frozen=True)
class OutOfMemory:
    """The numbers of an out-of-memory message, in bytes. None if the message does not state the number."""

    failure: Failure
    tried: int  # 0 if the numbers of the message are not in the log
    gpu: int | None = None
    total: int | None = None
    free: int | None = None
    own: int | None = None  # of this process, with what is not PyTorch's
    allocated: int | None = None
    unused: int | None = None  # reserved by PyTorch and not allocated
    pools: int | None = None
    allowed: int | None = None  # limit that the program set
    processes: tuple[tuple[int, int], ...] = ()  # all that are listed: number and bytes

    @property
    def reserved(self) -> int | None:
        return None if self.allocated is None else self.allocated + (self.unused or 0)

    @property
    def others(self) -> int | None:
        """Bytes of other processes on the GPU. None if the message does not state them.

        In a container, PyTorch does not know which of the listed processes it runs in. The process whose memory is
        nearest to PyTorch's reserved memory is then treated as this process.
        """
        if self.reserved is None:
            return None
        if self.own is not None:
            return sum(size for _, size in self.processes)
        if not self.processes:
            if self.total is None or self.free is None:
                return None
            return max(0, self.total - self.free - self.reserved - CONTEXT)
        expected = self.reserved + CONTEXT // 2
        own = min(self.processes, key=lambda process: abs(process[1] - expected))
        rest = sum(size for process, size in self.processes if process != own[0])
        return rest

    @property
    def outside(self) -> int | None:
        """Bytes that this process uses outside PyTorch: for the CUDA context, NCCL, and other libraries."""
        own = self.own
        if own is None and len(self.processes) == 1:
            own = self.processes[0][1]
        return None if own is None or self.reserved is None else max(0, own - self.reserved)


def read(failure: Failure) -> OutOfMemory | None:
    """Return the numbers of an out-of-memory exception. None if it is not about the memory of a GPU."""
    text = " ".join(failure.text.split())
    tried = _TRIED.search(text)
    if tried is None:
        return OutOfMemory(failure, 0) if _SHORT.match(text) else None
    is_new = "already allocated" not in text and _FIELDS["total"].search(text) is not None
    values = {
        name: _bytes(match)
        for name, pattern in (_FIELDS if is_new else _FIELDS_2_0).items()
        if (match := pattern.search(text))
    }
    if (reserved := values.pop("reserved", None)) is not None and "allocated" in values:
        values["unused"] = max(0, reserved - values["allocated"])
    gpu = _GPU.search(text)
    return OutOfMemory(
        failure,
        int(float(tried[2]) * _UNITS[tried[3]]),
        int(gpu[1]) if gpu else None,
        **values,
        processes=tuple(
            (int(number), int(float(size) * _UNITS[unit])) for number, size, unit in _PROCESS.findall(text)
        ),
    )


def _bytes(match: re.Match[str]) -> int:
    return int(float(match[1]) * _UNITS[match[2]])
