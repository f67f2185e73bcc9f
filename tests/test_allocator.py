"""The simulated CUDA allocator: sequences whose reserved bytes are known, and what holds of every sequence."""

from __future__ import annotations

import random

import pytest

from oomc.allocator import GRANULE, LARGE_PAGE, SMALL, SMALL_PAGE, Allocator, Block

MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "reserved"),
    [(1, SMALL_PAGE), (SMALL, SMALL_PAGE), (SMALL + 1, LARGE_PAGE), (LARGE_PAGE, LARGE_PAGE), (21 * MIB, 40 * MIB)],
)
def test_one_allocation_takes_whole_pages_of_its_pool(nbytes: int, reserved: int) -> None:
    allocator = Allocator()
    pool, address, size = allocator.take(nbytes)
    assert allocator.reserved == reserved and address == 0
    assert size == -(-nbytes // GRANULE) * GRANULE
    assert pool is (allocator.small if nbytes <= SMALL else allocator.large)


def test_what_fits_behind_a_block_needs_no_new_page() -> None:
    allocator = Allocator()
    for _ in range(5):
        allocator.take(4 * MIB)
    assert allocator.reserved == LARGE_PAGE
    allocator.take(2 * MIB)
    assert allocator.reserved == 2 * LARGE_PAGE


def test_the_end_grows_by_what_is_lacking() -> None:
    allocator = Allocator()
    allocator.take(12 * MIB)
    assert allocator.take(25 * MIB)[1] == 12 * MIB  # the 8 MiB at the end count, and one page is mapped behind them
    assert allocator.reserved == 2 * LARGE_PAGE
    assert allocator.limit == LARGE_PAGE + 26 * MIB  # though torch compares the whole, rounded up to 2 MiB


def test_a_hole_that_is_too_small_is_left() -> None:
    allocator = Allocator()
    first, _ = allocator.take(30 * MIB), allocator.take(30 * MIB)
    allocator.give(first)
    assert allocator.take(31 * MIB)[1] == 60 * MIB
    assert allocator.reserved == 100 * MIB
    assert allocator.take(10 * MIB)[1] == 0, "the hole, and not the end"


def test_the_smallest_block_that_is_large_enough_is_taken_and_the_lowest_of_equal_ones() -> None:
    allocator = Allocator()
    blocks = [allocator.take(n * MIB) for n in (30, 2, 20, 2, 20, 2)]
    for block in blocks[::2]:
        allocator.give(block)
    assert allocator.take(20 * MIB)[1] == 32 * MIB
    assert allocator.take(20 * MIB)[1] == 54 * MIB
    assert allocator.take(20 * MIB)[1] == 0


def test_the_end_is_kept_though_it_is_smaller() -> None:
    allocator = Allocator()
    first = allocator.take(40 * MIB)
    allocator.take(30 * MIB)  # 10 MiB are free at the end
    allocator.give(first)
    assert allocator.take(5 * MIB)[1] == 0


def test_neighbours_become_one() -> None:
    allocator = Allocator()
    blocks = [allocator.take(30 * MIB) for _ in range(3)]
    allocator.take(30 * MIB)
    for index in (0, 2, 1):
        allocator.give(blocks[index])
    assert allocator.large.free == [(0, 90 * MIB)]
    assert allocator.take(90 * MIB)[1] == 0


@pytest.mark.parametrize("seed", range(8))
def test_any_sequence(seed: int) -> None:
    """Nothing overlaps, all that is live is reserved, free blocks are apart, and everything merges back."""
    rng, allocator = random.Random(seed), Allocator()
    live: list[Block] = []
    for _ in range(600):
        before = allocator.reserved
        if live and rng.random() < 0.45:
            allocator.give(live.pop(rng.randrange(len(live))))
            assert allocator.reserved == before, "nothing is unmapped"
        else:
            live.append(allocator.take(rng.choice((rng.randint(1, 3 * MIB), rng.randint(1, 90 * MIB)))))
        assert allocator.reserved >= sum(size for _, _, size in live)
        assert allocator.limit >= allocator.reserved - LARGE_PAGE
        for pool in (allocator.small, allocator.large):
            taken = [(address, size, 1) for own, address, size in live if own is pool]
            at, was_free = 0, False
            for address, size, used in sorted(taken + [(a, s, 0) for a, s in pool.free]):
                assert address == at and not (was_free and not used)
                at, was_free = address + size, not used
            assert at == pool.end
    for block in live:
        allocator.give(block)
    for pool in (allocator.small, allocator.large):
        assert pool.free == ([(0, pool.end)] if pool.end else [])
