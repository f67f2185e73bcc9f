"""What torch's CUDA allocator reserves for a sequence of allocations, with segments that grow in place.

    allocator = Allocator(limit=12 << 30)
    a = allocator.take(3 << 20)
    allocator.give(a)
    allocator.reserved

The rules are those of c10/cuda/CUDACachingAllocator.cpp with expandable segments, for one stream:

- sizes are rounded up to 512 bytes; up to 1 MiB they come from one pool, larger ones from another;
- the smallest free block that is large enough is taken, the lowest of equal ones; but a free block that could grow
  counts as being as large as it could become, and the one at the end could become the largest of all;
- what a block is too large by stays free behind it, and free neighbours become one;
- where no block is large enough, memory is mapped in pages: into the first gap that makes one, else at the end;
- where that might exceed the limit (the whole size counts, whatever is free beside the new pages), all free pages are
  unmapped first, which leaves gaps; memory is never unmapped otherwise.

What is reserved so depends on the order of allocations, and on nothing else.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

GRANULE = 512
"""Bytes to which sizes are rounded up."""
SMALL = 1 << 20
"""The largest allocation of the pool for small ones."""
SMALL_PAGE = 2 << 20
"""Bytes in which the pool of small allocations grows."""
LARGE_PAGE = 20 << 20
"""Bytes in which the pool of large allocations grows."""


class Full(Exception):
    """An allocation does not fit under the limit, although all that could be unmapped was."""


class Pool:
    """One segment of addresses: taken blocks, free ones, and gaps in which nothing is mapped.

    Args:
        page: bytes in which it grows.

    Attributes:
        mapped: bytes.
        end: the first address behind all that is mapped.
    """

    def __init__(self, page: int) -> None:
        self.page, self.mapped, self.end = page, 0, 0
        self._free: list[tuple[int, int]] = []  # (size, address), sorted
        self._size_at: dict[int, int] = {}
        self._start_of: dict[int, int] = {}  # by the address behind the block
        self._gaps: dict[int, int] = {}  # size by address

    def take(self, size: int) -> int | None:
        """The address of a block of `size` bytes, a multiple of the granule; None if something must be mapped."""
        index = bisect_left(self._free, (size, 0))
        if index == len(self._free):
            return None
        while index + 1 < len(self._free) and self._room(index + 1) < self._room(index):
            index += 1
        have, address = self._free[index]
        self._remove(address)
        self._insert(address + size, have - size)
        return address

    def _room(self, index: int) -> float:
        """What a free block could grow to."""
        size, address = self._free[index]
        behind = address + size
        return size + (math.inf if behind == self.end else self._gaps.get(behind, 0))

    def grow(self, size: int) -> int:
        """Map what a block of `size` bytes lacks; its address."""
        start = next(filter(lambda s: self._could_hold(s, size), self._edges()))
        have = self._size_at.get(start, 0)
        if have:
            self._remove(start)
        while have < size:
            at = start + have
            gap = self._gaps.pop(at, None)
            need = size - have if gap is None else min(size - have, gap)
            more = -(-need // self.page) * self.page
            if gap is None:
                self.end = at + more
            elif more < gap:
                self._gaps[at + more] = gap - more
            self.mapped += more
            have += more
            behind = self._size_at.get(start + have, 0)
            if behind:
                self._remove(start + have)
                have += behind
        self._insert(start + size, have - size)
        return start

    def _edges(self) -> list[int]:
        """Where memory could be mapped, in order: the gaps and the end, each from the free block before it on."""
        return [self._start_of.get(at, at) for at in (*sorted(self._gaps), self.end)]

    def _could_hold(self, at: int, size: int) -> bool:
        left = size
        while left > 0 and at < self.end:
            here = self._size_at.get(at) or self._gaps.get(at)
            if here is None:
                return False
            at, left = at + here, left - here
        return True

    def give(self, address: int, size: int) -> None:
        """Free a block; it becomes one with free neighbours."""
        behind = self._size_at.get(address + size)
        if behind is not None:
            self._remove(address + size)
            size += behind
        before = self._start_of.get(address)
        if before is not None:
            self._remove(before)
            address, size = before, size + address - before
        self._insert(address, size)

    def release(self) -> None:
        """Unmap all pages in which nothing is taken."""
        for address, size in self.free:
            first, last = -(-address // self.page) * self.page, (address + size) // self.page * self.page
            if first >= last:
                continue
            self._remove(address)
            self._insert(address, first - address)
            self._insert(last, address + size - last)
            self._gaps[first] = last - first
            self.mapped -= last - first
        merged: dict[int, int] = {}
        at = -1  # where the gap before ends
        for address, size in sorted(self._gaps.items()):
            start = start if address == at else address
            at = address + size
            merged[start] = at - start
        if at == self.end and merged:
            self.end, _ = merged.popitem()
        self._gaps = merged

    def _remove(self, address: int) -> None:
        size = self._size_at.pop(address)
        del self._start_of[address + size], self._free[bisect_left(self._free, (size, address))]

    def _insert(self, address: int, size: int) -> None:
        if size:
            insort(self._free, (size, address))
            self._size_at[address] = size
            self._start_of[address + size] = address

    @property
    def free(self) -> list[tuple[int, int]]:
        """Free blocks as (address, size), in order of addresses."""
        return sorted(self._size_at.items())


Block = tuple[Pool, int, int]
"""A taken block: its pool, address and bytes."""


class Allocator:
    """See the module's docstring.

    Args:
        limit: most bytes to be reserved.

    Attributes:
        peak: most bytes reserved so far; may be set anew.
        releases: how often free pages were unmapped.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.small, self.large, self.limit = Pool(SMALL_PAGE), Pool(LARGE_PAGE), limit
        self.peak = self.releases = 0

    def take(self, nbytes: int) -> Block:
        """Allocate.

        Raises:
            Full: it does not fit.
        """
        size = max(GRANULE, -(-nbytes // GRANULE) * GRANULE)
        pool = self.small if size <= SMALL else self.large
        address = pool.take(size)
        if address is None:
            if self.reserved + _counted(size) > self.limit:
                self.large.release()
                self.small.release()
                self.releases += 1
                if self.reserved + _counted(size) > self.limit:
                    raise Full(f"{size} bytes beside {self.reserved} reserved do not fit {self.limit}")
            address = pool.grow(size)
            self.peak = max(self.peak, self.reserved)
        return pool, address, size

    def give(self, block: Block) -> None:
        """Free."""
        block[0].give(block[1], block[2])

    @property
    def reserved(self) -> int:
        """Bytes mapped now."""
        return self.small.mapped + self.large.mapped


def _counted(size: int) -> int:
    """Bytes of an allocation in the comparison with the limit: what its own segment would have."""
    if size <= SMALL:
        return SMALL_PAGE
    return LARGE_PAGE if size < LARGE_PAGE // 2 else -(-size // SMALL_PAGE) * SMALL_PAGE
