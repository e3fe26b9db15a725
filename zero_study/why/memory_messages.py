"""Read PyTorch's messages that a GPU has no memory left, in all their forms since PyTorch 2.0."""

from __future__ import annotations

import re
from dataclasses import dataclass

from zero_study.logs.printed_failures import Failure

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = r"(?<![\d.])(\d{1,15}(?:\.\d{1,9})?) (bytes|KiB|MiB|GiB|TiB)"
_TRIED = re.compile(rf"(?i)(?:out of memory|OutOfMemoryError).{{0,200}}?Tried to allocate {_SIZE}")
# A message whose numbers were cut off. Ray says "out of memory" of the host.
_SHORT = re.compile(r"^(?:OutOfMemoryError|RuntimeError|AcceleratorError): (?:CUDA|HIP|XPU|NPU) out of memory\b")
_FIELDS = {
    "total": rf"has (?:a )?total(?: capaci?ty)?(?: of)? {_SIZE}|{_SIZE} total capacity",
    "free": rf"of which {_SIZE} is free|{_SIZE} free",
    "own": rf"Including non-PyTorch memory, this process has {_SIZE} memory in use",
    "allowed": rf"{_SIZE} allowed",
    "allocated": rf"Of the allocated memory {_SIZE} is allocated by PyTorch|{_SIZE} already allocated",
    "pools": rf"with {_SIZE} allocated in private pools",
    "unused": rf"{_SIZE} is reserved by PyTorch but unallocated",
    "reserved": rf"{_SIZE} reserved in total by PyTorch",  # up to 2.0, in place of `unused`
}
_PATTERNS = {name: re.compile(pattern) for name, pattern in _FIELDS.items()}
_PROCESS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_GPU = re.compile(r"GPU (\d+)")


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
    processes: tuple[int, ...] = ()  # all that are listed

    @property
    def others(self) -> int | None:
        """Bytes of other processes. None if the message does not state which of the processes is this one."""
        if self.own is None or self.total is None or self.free is None:
            return None
        return sum(self.processes) or max(0, self.total - self.free - self.own)

    @property
    def rest(self) -> int | None:
        """Bytes that are neither free nor reserved by PyTorch in this process. None if they are not known."""
        if self.total is None or self.free is None or self.allocated is None:
            return None
        return max(0, self.total - self.free - self.allocated - (self.unused or 0))


def read(failure: Failure) -> OutOfMemory | None:
    """Return the numbers of an out-of-memory exception. None if it is not about the memory of a GPU."""
    text = " ".join(failure.text.split())
    tried = _TRIED.search(text)
    if tried is None:
        return OutOfMemory(failure, 0) if _SHORT.match(text) else None
    found = {name: match for name, pattern in _PATTERNS.items() if (match := pattern.search(text))}
    values = {name: _bytes(*(part for part in match.groups() if part)) for name, match in found.items()}
    if (reserved := values.pop("reserved", None)) is not None and "allocated" in values:
        values["unused"] = max(0, reserved - values["allocated"])
    gpu = _GPU.search(text)
    return OutOfMemory(
        failure, _bytes(tried[1], tried[2]), int(gpu[1]) if gpu else None, **values,
        processes=tuple(_bytes(size, unit) for _, size, unit in _PROCESS.findall(text)),
    )  # fmt: skip


def _bytes(size: str, unit: str) -> int:
    return int(float(size) * _UNITS[unit])
