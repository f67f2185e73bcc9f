"""Random instances of steps, budgets for them, and all their plans."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np

from oomc import machine
from oomc.quick import Decisions, Instance, rates_of
from oomc.quick_lanes import KEEP, UPDATE

MIB = float(1 << 20)


def random_instance(seed: int, blocks: int = 6) -> Instance:
    """Blocks of one slab each; seconds and bytes as of layers of some 100 M parameters."""
    rng = random.Random(seed)
    n, levels = blocks, 3

    def each(low: float, high: float) -> np.ndarray:
        return np.array([rng.uniform(low, high) for _ in range(n)])

    weight = rng.choice([200, 400, 800]) * MIB * np.array([rng.choice([0.3, 1, 1, 1]) for _ in range(n)])
    forward = each(0.005, 0.03)
    again = forward * each(0.3, 0.8)
    own, fence, need = each(1, 20) * MIB, each(20, 400) * MIB, each(200, 900) * MIB
    nothing = np.zeros(n)
    # half of them may send values for others away, and have one level less, so that not too many plans are possible
    away = seed % 2 * each(50, 300) * MIB
    away[-1] = 0
    allowed = np.ones((n, levels), np.bool_)
    allowed[:, 1] = seed % 2 == 0
    rates = rates_of(machine.default(rng.choice(["h200", "4090"])), 12.0, 2.0)
    peaks = need[:, None] * np.ones(levels)
    slabs = np.arange(n)
    return Instance(
        levels=("recomputes", "keeps", "on the host"), allowed=allowed, forward=forward,
        backward=np.stack([3 * forward, 3 * forward - again, 3 * forward - again], 1), uses=slabs[:, None],
        uses_back=np.repeat(slabs[:, None, None], levels, 1), weight=weight, home=7 * weight, host=6 * weight,
        order=slabs.astype(np.float64), kind=np.full(n, rng.choice([UPDATE, UPDATE, UPDATE, KEEP]), np.int64),
        movable=np.ones(n, np.bool_), part_slab=slabs[:, None], part_params=weight[:, None] / 2,
        part_bytes=weight[:, None], own_grad=weight, device=np.stack([own, own + fence, own], 1),
        inner=np.stack([nothing, nothing, fence], 1), bound=away, other=nothing, fwd_need=peaks / 2, bwd_need=peaks,
        bwd_first=peaks, bwd_rest=peaks + weight[:, None], fixed=50 * MIB, staging=176 * MIB, host_fixed=500 * MIB,
        rates=rates,
    )  # fmt: skip


def random_budgets(instance: Instance, seed: int) -> tuple[int, int | None]:
    """A device budget between what the most frugal plan and what the most generous takes, and a host budget or none."""
    rng = random.Random(seed)
    low = min(
        instance.device_bytes(instance.uniform(level, away, prefetch=1, hold=1))
        for level in range(3) for away in (False, True)
    )  # fmt: skip
    n = instance.blocks
    high = instance.device_bytes(instance.uniform(1, resident=(True,) * n, hold=2, prefetch=2))
    host = int(instance.host_fixed + instance.host.sum() * rng.uniform(0.7, 1.1)) if rng.random() < 0.3 else None
    return int(low + (high - low) * rng.uniform(0.05, 0.8)), host


def ahead(instance: Instance) -> tuple[int, ...]:
    """What prefetch and hold may be, each."""
    return (1,) if instance.bound.any() else (1, 2)


def all_plans(instance: Instance, prefetches: Sequence[int], holds: Sequence[int]) -> Iterator[Decisions]:
    """Every plan of an instance."""
    n = instance.blocks
    away = [(False, True) if size else (False,) for size in instance.bound]
    levels = [[level for level, ok in enumerate(row) if ok] for row in instance.allowed]
    for level in itertools.product(*levels):
        for gone in itertools.product(*away):
            for resident in itertools.product((False, True), repeat=n):
                for prefetch in prefetches:
                    for hold in holds:
                        yield Decisions(level, gone, resident, prefetch, hold)
