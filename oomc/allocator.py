"""What torch's CUDA allocator reserves for a sequence of allocations, with segments that grow in place.

    allocator = Allocator()
    a = allocator.take(3 << 20)
    allocator.give(a)
    allocator.reserved

The rules are those of c10/cuda/CUDACachingAllocator.cpp with expandable segments, for one stream:

- sizes are rounded up to 512 bytes; up to 1 MiB they come from one pool, larger ones from another;
- the smallest free block that is large enough is taken, the lowest of equal ones; but the free block at the end, which
  could grow, counts as the largest of all;
- what a block is too large by stays free behind it, and free neighbours become one;
- where no block is large enough, pages are mapped at the end. They are unmapped again only where the limit is hit. That
  is not simulated: the limit is set such that it is not hit (`Allocator.limit`).

What is reserved so depends on the order of allocations, and on nothing else.
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
    """A segment of addresses from 0 on: taken blocks and free ones.

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

    def take(self, size: int) -> int | None:
        """The address of a block of `size` bytes, a multiple of the granule; None if the pool must grow for it."""
        index = bisect_left(self._free, (size, 0))
        if index == len(self._free):
            return None
        have, address = self._free[index]
        if address + have == self.end and index + 1 < len(self._free):
            have, address = self._free[index + 1]
        self._remove(address, have)
        if have > size:
            self._insert(address + size, have - size)
        return address

    def grow(self, size: int) -> int:
        """Map what a block of `size` bytes lacks at the end; its address."""
        start = self._start_of.get(self.end, self.end)
        if start < self.end:
            self._remove(start, self.end - start)
        self.end = -(-(start + size) // self.page) * self.page
        if start + size < self.end:
            self._insert(start + size, self.end - start - size)
        return start

    def give(self, address: int, size: int) -> None:
        """Free a block; it becomes one with free neighbours."""
        behind = self._size_at.get(address + size, 0)
        if behind:
            self._remove(address + size, behind)
        before = self._start_of.get(address, address)
        if before < address:
            self._remove(before, address - before)
        self._insert(before, address - before + size + behind)

    def _remove(self, address: int, size: int) -> None:
        del self._size_at[address], self._start_of[address + size]
        del self._free[bisect_left(self._free, (size, address))]

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
    """See the module's docstring.

    Attributes:
        limit: the smallest limit under which torch's allocator does all this without unmapping anything. It is more
            than is reserved: before the allocator grows, it adds the whole allocation to what is reserved, whatever is
            free at the end, and compares that.
    """

    def __init__(self) -> None:
        self.small, self.large = Pool(SMALL_PAGE), Pool(LARGE_PAGE)
        self.limit = 0

    def take(self, nbytes: int) -> Block:
        """Allocate."""
        size = max(GRANULE, -(-nbytes // GRANULE) * GRANULE)
        pool = self.small if size <= SMALL else self.large
        address = pool.take(size)
        if address is None:
            self.limit = max(self.limit, self.reserved + _counted(size))
            address = pool.grow(size)
        return pool, address, size

    def give(self, block: Block) -> None:
        """Free."""
        block[0].give(block[1], block[2])

    @property
    def reserved(self) -> int:
        """Bytes mapped; never less than before."""
        return self.small.end + self.large.end


def _counted(size: int) -> int:
    """Bytes of an allocation in the comparison with the limit: what a segment of its own would have."""
    if size <= SMALL:
        return SMALL_PAGE
    return LARGE_PAGE if size < LARGE_PAGE // 2 else -(-size // SMALL_PAGE) * SMALL_PAGE
