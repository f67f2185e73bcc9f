"""What torch's CUDA allocator reserves for a sequence of allocations, with segments that grow in place.

    allocator = Allocator()
    a = allocator.take(3 << 20)
    allocator.give(a)
    allocator.reserved

The rules are those of c10/cuda/CUDACachingAllocator.cpp with expandable segments, for one stream and without a limit:

- sizes are rounded up to 512 bytes; up to 1 MiB they come from one pool, larger ones from another;
- the smallest free block that is large enough is taken, the lowest of equal ones; but the free block at the end of the
  memory, which could grow, counts as the largest of all;
- what a block is too large by stays free behind it, and free neighbours become one;
- where no block is large enough, memory is mapped behind the last one, in pages, and is never unmapped.

What is reserved so depends on the order of allocations and on nothing else.
"""

from __future__ import annotations

from bisect import bisect_left, insort

GRANULE = 512
"""Bytes to which sizes are rounded up."""
SMALL = 1 << 20
"""The largest allocation of the pool for small ones."""
SMALL_PAGE = 2 << 20
"""Bytes in which the pool of small allocations grows."""
LARGE_PAGE = 20 << 20
"""Bytes in which the pool of large allocations grows."""


class Pool:
    """One segment that grows: addresses from 0 to `end`, taken and free blocks.

    Args:
        page: bytes in which it grows.

    Attributes:
        end: bytes that are mapped.
    """

    def __init__(self, page: int) -> None:
        self.page, self.end = page, 0
        self._free: list[tuple[int, int]] = []  # (size, address), sorted
        self._size_at: dict[int, int] = {}
        self._start_of: dict[int, int] = {}  # by the address behind the block

    def take(self, size: int) -> int:
        """The address of a block of `size` bytes, a multiple of the granule."""
        free = self._free
        index = bisect_left(free, (size, 0))
        if index + 1 < len(free) and free[index][1] + free[index][0] == self.end:
            index += 1
        if index < len(free):
            have, address = free.pop(index)
            del self._size_at[address], self._start_of[address + have]
            if have > size:
                self._insert(address + size, have - size)
            return address
        start = self._start_of.pop(self.end, None)
        if start is None:
            start = self.end
        else:
            have = self._size_at.pop(start)
            del free[bisect_left(free, (have, start))]
        self.end = -(-(start + size) // self.page) * self.page
        if self.end > start + size:
            self._insert(start + size, self.end - start - size)
        return start

    def give(self, address: int, size: int) -> None:
        """Free a block; it becomes one with free neighbours."""
        behind = self._size_at.pop(address + size, None)
        if behind is not None:
            del self._free[bisect_left(self._free, (behind, address + size))]
            size += behind
        before = self._start_of.pop(address, None)
        if before is not None:
            have = self._size_at.pop(before)
            del self._free[bisect_left(self._free, (have, before))]
            address, size = before, size + have
        self._insert(address, size)

    def _insert(self, address: int, size: int) -> None:
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
    """See the module's docstring."""

    def __init__(self) -> None:
        self.small, self.large = Pool(SMALL_PAGE), Pool(LARGE_PAGE)

    def take(self, nbytes: int) -> Block:
        """Allocate."""
        size = max(GRANULE, -(-nbytes // GRANULE) * GRANULE)
        pool = self.small if size <= SMALL else self.large
        return pool, pool.take(size), size

    def give(self, block: Block) -> None:
        """Free."""
        block[0].give(block[1], block[2])

    @property
    def reserved(self) -> int:
        """Bytes mapped, now and at the peak: memory is never unmapped."""
        return self.small.end + self.large.end
