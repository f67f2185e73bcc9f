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

What is reserved so depends on the order of allocations, and on nothing else. A plan's check replays some hundred
thousand of them, so that the rules are compiled; `replay` follows whole steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from oomc.jit import jit

Array = np.ndarray[Any, np.dtype[np.int64]]

GRANULE = 512
"""Bytes to which sizes are rounded up."""
SMALL = 1 << 20
"""The largest allocation of the pool for small ones."""
SMALL_PAGE = 2 << 20
"""Bytes in which the pool of small allocations grows."""
LARGE_PAGE = 20 << 20
"""Bytes in which the pool of large allocations grows."""
SIZE, ADDRESS = 0, 1
"""Rows of a pool's free blocks [2, capacity], in order of size and then of address."""
PAGE, END, COUNT = 0, 1, 2
"""A pool's numbers: bytes in which it grows, bytes that are mapped, and how many free blocks there are."""
LIMIT, MOST_SMALL = 0, 1
"""The allocator's numbers: its limit so far, and the largest allocation of the pool for small ones."""
TAKE, GIVE, CARRY, RETIRE = 0, 1, 2, 3
"""Events of a step: a block is taken, is freed, dies but stays into the next step, or is freed that an earlier one
left."""


def njit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of this file; it runs without Python's lock."""
    return jit(function, nogil=True)


@njit
def _place(free: Array, count: int, size: int, address: int) -> int:
    """Where a free block of this size and address is, or would be."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if free[SIZE, middle] < size or (free[SIZE, middle] == size and free[ADDRESS, middle] < address):
            low = middle + 1
        else:
            high = middle
    return low


@njit
def _drop(free: Array, pool: Array, index: int) -> None:
    """One free block less."""
    pool[COUNT] -= 1
    for i in range(index, pool[COUNT]):
        free[SIZE, i], free[ADDRESS, i] = free[SIZE, i + 1], free[ADDRESS, i + 1]


@njit
def _insert(free: Array, pool: Array, address: int, size: int) -> None:
    """One free block more."""
    index = _place(free, pool[COUNT], size, address)
    for i in range(pool[COUNT], index, -1):
        free[SIZE, i], free[ADDRESS, i] = free[SIZE, i - 1], free[ADDRESS, i - 1]
    free[SIZE, index], free[ADDRESS, index] = size, address
    pool[COUNT] += 1


@njit
def _take(free: Array, pool: Array, size: int) -> int:
    """The address of a block of `size` bytes, a multiple of the granule; -1 if the pool must grow for it."""
    index = _place(free, pool[COUNT], size, 0)
    if index == pool[COUNT]:
        return -1
    if free[ADDRESS, index] + free[SIZE, index] == pool[END] and index + 1 < pool[COUNT]:
        index += 1
    have, address = free[SIZE, index], free[ADDRESS, index]
    _drop(free, pool, index)
    if have > size:
        _insert(free, pool, address + size, have - size)
    return int(address)


@njit
def _grow(free: Array, pool: Array, size: int) -> int:
    """Map what a block of `size` bytes lacks at the end; its address."""
    start = pool[END]
    for i in range(pool[COUNT]):
        if free[ADDRESS, i] + free[SIZE, i] == pool[END]:
            start = free[ADDRESS, i]
            _drop(free, pool, i)
            break
    pool[END] = -(-(start + size) // pool[PAGE]) * pool[PAGE]
    if start + size < pool[END]:
        _insert(free, pool, start + size, pool[END] - start - size)
    return int(start)


@njit
def _give(free: Array, pool: Array, address: int, size: int) -> None:
    """Free a block; it becomes one with free neighbours."""
    start, end = address, address + size
    for i in range(pool[COUNT] - 1, -1, -1):
        if free[ADDRESS, i] == address + size:
            end += free[SIZE, i]
            _drop(free, pool, i)
        elif free[ADDRESS, i] + free[SIZE, i] == address:
            start = free[ADDRESS, i]
            _drop(free, pool, i)
    _insert(free, pool, start, end - start)


@njit
def _counted(pools: Array, which: int, size: int) -> int:
    """Bytes of an allocation in the comparison with the limit: what a segment of its own would have."""
    small_page, large_page = pools[0, PAGE], pools[1, PAGE]
    if which == 0:
        return int(small_page)
    return int(large_page) if size < large_page // 2 else int(-(-size // small_page) * small_page)


@njit
def _allocate(free: Array, pools: Array, numbers: Array, size: int) -> int:
    """The address of a new block of `size` bytes, a multiple of the granule, in its pool."""
    which = 0 if size <= numbers[MOST_SMALL] else 1
    address = _take(free[which], pools[which], size)
    if address < 0:
        numbers[LIMIT] = max(numbers[LIMIT], pools[0, END] + pools[1, END] + _counted(pools, which, size))
        address = _grow(free[which], pools[which], size)
    return int(address)


@njit
def _state(free: Array, pools: Array, blocks: Array, state: Array) -> int:
    """Write down all that the next step's addresses depend on: what is free, and what lies where; how much that is."""
    at = 0
    for which in range(2):
        for value in pools[which]:
            state[at] = value
            at += 1
        for row in range(2):
            for i in range(pools[which, COUNT]):
                state[at] = free[which, row, i]
                at += 1
    for address in blocks[2]:
        state[at] = address
        at += 1
    return at


@njit
def _equal(a: Array, b: Array, count: int) -> bool:
    for i in range(count):  # noqa: SIM110  what is compiled is a loop
        if a[i] != b[i]:
            return False
    return True


@njit
def _replay(events: Array, blocks: Array, free: Array, pools: Array, numbers: Array, states: Array) -> int:
    """See `Allocator.replay`; blocks [3, n]: of each, its size, where it lies and where the step before has left it."""
    most = states.shape[0] - 1
    for step in range(most):
        count = _state(free, pools, blocks, states[step])
        for before in range(step):
            if _equal(states[before], states[step], count):
                return step
        for i in range(events.shape[0]):
            kind, number = events[i, 0], events[i, 1]
            size = blocks[0, number]
            which = 0 if size <= numbers[MOST_SMALL] else 1
            if kind == TAKE:
                blocks[1, number] = _allocate(free, pools, numbers, size)
            elif kind == GIVE:
                _give(free[which], pools[which], blocks[1, number], size)
            elif kind == CARRY:
                blocks[2, number] = blocks[1, number]
            elif blocks[2, number] >= 0:
                _give(free[which], pools[which], blocks[2, number], size)
                blocks[2, number] = -1
    return most


class Pool:
    """A view of a segment of addresses from 0 on: taken blocks and free ones."""

    def __init__(self, allocator: Allocator, which: int) -> None:
        self._allocator, self.which = allocator, which

    @property
    def end(self) -> int:
        """Bytes that are mapped."""
        return int(self._allocator.pools[self.which, END])

    @property
    def free(self) -> list[tuple[int, int]]:
        """Free blocks as (address, size), in order of addresses."""
        blocks = self._allocator.blocks[self.which, :, : self._allocator.pools[self.which, COUNT]]
        return sorted((int(address), int(size)) for size, address in blocks.T)


Block = tuple[Pool, int, int]
"""A taken block: its pool, address and bytes."""


class Allocator:
    """See the module's docstring.

    Attributes:
        blocks: the free blocks of both pools, [2, 2, capacity].
        pools: their numbers, [2, 3].
    """

    def __init__(self) -> None:
        self.small, self.large = Pool(self, 0), Pool(self, 1)
        self.pools: Array = np.array([[SMALL_PAGE, 0, 0], [LARGE_PAGE, 0, 0]], np.int64)
        self.blocks: Array = np.zeros((2, 2, 64), np.int64)
        # sizes are read here and not compiled in, where what is kept on disk would keep them
        self._numbers: Array = np.array([0, SMALL], np.int64)

    def _make_room(self, more: int) -> None:
        """A call adds at most one free block."""
        capacity = int(self.pools[:, COUNT].max()) + more + 1
        if capacity > self.blocks.shape[2]:
            wider = np.zeros((2, 2, 2 * capacity), np.int64)
            wider[:, :, : self.blocks.shape[2]] = self.blocks
            self.blocks = wider

    def take(self, nbytes: int) -> Block:
        """Allocate."""
        self._make_room(1)
        size = rounded(nbytes)
        address = _allocate(self.blocks, self.pools, self._numbers, size)
        return self.small if size <= self._numbers[MOST_SMALL] else self.large, address, size

    def give(self, block: Block) -> None:
        """Free."""
        self._make_room(1)
        pool, address, size = block
        _give(self.blocks[pool.which], self.pools[pool.which], address, size)

    def replay(self, events: Array, sizes: Array, most: int) -> int:
        """Repeat a step until one ends as an earlier one did: how many steps that were.

        Args:
            events: [n, 2] (TAKE, GIVE, CARRY or RETIRE, number of a block). A block is taken once in a step, and is
                given or carried in it.
            sizes: of the blocks by number, as `rounded` gives them.
            most: so many steps in any case.
        """
        self._make_room(2 * len(sizes))
        blocks = np.full((3, len(sizes)), -1, np.int64)
        blocks[0] = sizes
        states = np.empty((most + 1, self.pools.size + self.blocks.size + len(sizes)), np.int64)
        return int(_replay(events, blocks, self.blocks, self.pools, self._numbers, states))

    @property
    def limit(self) -> int:
        """The smallest limit under which torch's allocator does all this without unmapping anything.

        It is more than is reserved: before the allocator grows, it adds the whole allocation to what is reserved,
        whatever is free at the end, and compares that.
        """
        return int(self._numbers[LIMIT])

    @property
    def reserved(self) -> int:
        """Bytes mapped; never less than before."""
        return int(self.pools[:, END].sum())


def rounded(nbytes: int) -> int:
    """Bytes that an allocation takes."""
    return max(GRANULE, -(-nbytes // GRANULE) * GRANULE)
