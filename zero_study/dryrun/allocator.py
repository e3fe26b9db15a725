"""Compute how much GPU memory PyTorch's CUDA allocator reserves for given tensors, by simulating the allocator.

The rules are from c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h in PyTorch 2.13, for one stream and
a GPU with unlimited memory. On a GPU that is full, the allocator frees cached memory and tries again, so it reserves
less than this module says.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
UNIT = 512  # bytes; the size of every block is a multiple of this
SMALL = MIB  # the largest request of the pool of small blocks
SMALL_SEGMENT = 2 * MIB  # the memory that is reserved at once for small requests
LARGE_SEGMENT = 20 * MIB  # the memory that is reserved at once for larger requests
OWN_SEGMENT = 10 * MIB  # requests of at least this size get a segment of their own, rounded up to ROUND
ROUND = 2 * MIB


@dataclass(eq=False, slots=True)
class _Block:
    address: int
    size: int
    before: _Block | None = None  # in its segment
    after: _Block | None = None
    is_free: bool = True


class _Pool:
    """The memory blocks for small requests, or those for large requests."""

    def __init__(self, is_small: bool, expands: bool) -> None:
        self.reserved = 0  # bytes; also the address at which the next segment begins
        self._is_small, self._expands = is_small, expands
        self._free: list[tuple[Any, ...]] = []  # (size, address, block), sorted
        self._last: _Block | None = None  # the block at whose end an expandable segment grows

    def take(self, size: int) -> _Block:
        place = bisect_left(self._free, (size,))
        if self._expands and place + 1 < len(self._free) and self._free[place][2] is self._last:
            # The allocator compares the sizes that blocks could grow to, and the last block can grow without limit.
            place += 1
        block = self._free.pop(place)[2] if place < len(self._free) else self._reserve(size)
        remaining = block.size - size
        if remaining >= UNIT if self._is_small or self._expands else remaining > SMALL:
            remainder = _Block(block.address + size, remaining, block, block.after)
            block.size, block.after = size, remainder
            if remainder.after is not None:
                remainder.after.before = remainder
            self._last = remainder if block is self._last else self._last
            insort(self._free, (remaining, remainder.address, remainder))
        block.is_free = False
        return block

    def give_back(self, block: _Block) -> None:
        block.is_free = True
        if block.before is not None and block.before.is_free:
            block = self._join(self._unlisted(block.before), block)
        if block.after is not None and block.after.is_free:
            self._join(block, self._unlisted(block.after))
        insort(self._free, (block.size, block.address, block))

    def _join(self, block: _Block, after: _Block) -> _Block:
        block.size, block.after = block.size + after.size, after.after
        if block.after is not None:
            block.after.before = block
        self._last = block if after is self._last else self._last
        return block

    def _unlisted(self, block: _Block) -> _Block:
        del self._free[bisect_left(self._free, (block.size, block.address))]
        return block

    def _reserve(self, size: int) -> _Block:
        """Reserve memory from the GPU, and return a free block of at least this size.

        If segments are expandable, the block includes the free end of the last segment.
        """
        end = self._last if self._expands else None
        reserved_there = end.size if end is not None and end.is_free else 0
        unit = SMALL_SEGMENT if self._is_small else LARGE_SEGMENT if self._expands or size < OWN_SEGMENT else ROUND
        block = _Block(self.reserved, -(-(size - reserved_there) // unit) * unit, end)
        self.reserved += block.size
        if end is not None and reserved_there:
            return self._join(self._unlisted(end), block)
        if end is not None:
            end.after = block
        self._last = block
        return block


class Allocator:
    """A simulation of PyTorch's CUDA allocator, which counts the memory that it reserves.

    `expands` is True if the allocator has expandable segments (expandable_segments:True).
    """

    def __init__(self, expands: bool) -> None:
        self._pools = _Pool(True, expands), _Pool(False, expands)
        self._blocks: dict[Hashable, tuple[_Pool, _Block]] = {}

    @property
    def reserved(self) -> int:
        """The number of reserved bytes. It never falls, because calls of empty_cache are not simulated."""
        return sum(pool.reserved for pool in self._pools)

    def allocate(self, key: Hashable, num_bytes: int) -> None:
        """Allocate memory for a storage, then free the memory that it had before.

        `key` identifies the storage. If `num_bytes` is 0, the memory is only freed.
        """
        had = self._blocks.pop(key, None)
        if num_bytes:
            size = -(-num_bytes // UNIT) * UNIT
            pool = self._pools[size > SMALL]
            self._blocks[key] = pool, pool.take(size)
        if had is not None:
            had[0].give_back(had[1])
