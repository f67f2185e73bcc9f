"""The search for decisions: over instances (one for each tiling), global choices and those of each block and slab.

    best = Search(instances, device=24 << 30, host=None).best(3)

First a grid: every global choice with all blocks at one level, and as many slabs on the device as fit. Then local
search from the best of them: single changes, and, where a change that would help does not fit, pairs with one that
makes room. Of many equal blocks in the same state only the first and the last are tried alone, and they are moved
together too, so that many layers cost little more than few.

Against an integer program: the time of a step is no sum over decisions (lanes overlap, and the largest of them counts),
and memory peaks at another node for each plan; both would have to be cut down to bounds that the evaluation then
contradicts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from oomc.quick import Decisions, Instance, Outcome

T = TypeVar("T")
PREFETCH = (1, 2, 3, 0)
HOLD = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24)
STARTS = 4
"""How many points of the grid are improved."""
EVALUATIONS = 40_000
"""How many evaluations of one block an improvement may take."""
TRIED = 12
"""How many changes that do not fit are paired with ones that make room, each time."""
REPAIRED = 8
"""How many points that do not fit are repaired where none fits."""
LEAST = 1e-6
"""The relative gain for which a change is made."""


@dataclass(frozen=True)
class Found:
    """Decisions about one of the instances, and what they come to."""

    index: int
    decisions: Decisions
    outcome: Outcome


@dataclass(frozen=True)
class Beyond:
    """Device bytes beside an instance's, that an allocator reserves: by how much gradient is held, and elsewhere."""

    known: Mapping[int, int] = field(default_factory=dict)
    other: int = 0

    def at(self, hold: int) -> int:
        """The bytes where so much is held."""
        return self.known.get(hold, self.other)


@dataclass
class Search:
    """A search under budgets.

    Attributes:
        instances: tilings, of one program or of several with the same slabs.
        device, host: bytes that may be taken, None for any.
        pinned: slabs that stay on the device.
        prefetches, holds: what these may be (`holds` None: HOLD, and as many as there are blocks).
        more: what is reserved beside each instance's own bytes; empty for nothing.
    """

    instances: Sequence[Instance]
    device: int | None = None
    host: int | None = None
    pinned: Collection[int] = ()
    prefetches: Sequence[int] = PREFETCH
    holds: Sequence[int] | None = None
    more: Sequence[Beyond] = ()
    evaluations: int = 0
    _beyond: dict[int, Beyond] = field(init=False)

    def __post_init__(self) -> None:
        nothing = [Beyond()] * len(self.instances)
        self._beyond = {id(each): more for each, more in zip(self.instances, self.more or nothing, strict=True)}

    def best(self, count: int = 1) -> list[Found]:
        """The best decisions that fit, best first; empty if none do."""
        grid = self.grid() or self.repaired()
        found = {(f.index, f.decisions): f for f in grid[:count]}
        for start in _spread(grid, STARTS):
            better = self.improve(start)
            found[better.index, better.decisions] = better
        return sorted(found.values(), key=lambda f: f.outcome.score)[:count]

    # -- what fits ------------------------------------------------------------------------------------------------

    def fits(self, instance: Instance, d: Decisions) -> bool:
        """Whether both budgets hold."""
        if self.host is not None and instance.host_bytes(d) > self.host:
            return False
        return self._fits_device(instance, d)

    # -- the grid -------------------------------------------------------------------------------------------------

    def grid(self) -> list[Found]:
        """What fits of uniform decisions with slabs filled in, best first."""
        found: list[Found] = []
        least = np.inf
        for index, instance in enumerate(self.instances):
            for base in self._uniform(instance):
                compute = _compute(instance, base)
                if compute > least * 1.05:
                    continue
                for d in self._filled(instance, base):
                    outcome = instance.evaluate(d)
                    self.evaluations += 1
                    least = min(least, outcome.seconds)
                    found.append(Found(index, d, outcome))
        return sorted(found, key=lambda f: f.outcome.score)

    def _uniform(self, instance: Instance) -> Iterator[Decisions]:
        seen = set()
        n = instance.blocks
        holds = sorted({h for h in (1, 2, 4, 8) if h < n} | {0, n}) if self.holds is None else self.holds
        for level in range(len(instance.levels)):
            for away in (False, True):
                base = instance.uniform(level, away)
                if (base.level, base.away) in seen:
                    continue
                seen.add((base.level, base.away))
                for where in instance.wheres:
                    for prefetch in self.prefetches[:2] if n > 12 else self.prefetches:
                        for hold in holds:
                            yield replace(base, prefetch=prefetch, hold=hold, where=where)

    def _filled(self, instance: Instance, base: Decisions) -> list[Decisions]:
        """The decisions with as many slabs on the device as fit, in a few orders."""
        free = [i for i, ok in enumerate(instance.movable) if ok and i not in self.pinned]
        none = tuple(i in self.pinned for i in range(len(instance.weight)))
        if not self._fits_device(instance, replace(base, resident=none)):
            return []
        by_size = sorted(free, key=lambda i: -instance.home[i])
        result: list[Decisions] = []
        for order in (free, free[::-1], by_size):
            low, high = 0, len(order)  # the most of the order that fits
            while low < high:
                middle = (low + high + 1) // 2
                if self._fits_device(instance, _with(base, none, order[:middle])):
                    low = middle
                else:
                    high = middle - 1
            d = _with(base, none, order[:low])
            if d not in result and self.fits(instance, d):
                result.append(d)
        return result

    def _fits_device(self, instance: Instance, d: Decisions) -> bool:
        return self.device is None or self._held(instance, d) <= self.device

    def _held(self, instance: Instance, d: Decisions) -> int:
        return instance.device_bytes(d) + self._beyond[id(instance)].at(d.hold)

    def repaired(self) -> list[Found]:
        """What fits although nothing uniform does: single changes that bring it nearer to both budgets."""
        starts: list[tuple[float, int, Decisions]] = []
        for index, instance in enumerate(self.instances):
            order = [i for i, ok in enumerate(instance.movable) if ok and i not in self.pinned]
            none = tuple(i in self.pinned for i in range(len(instance.weight)))
            for base in self._uniform(instance):
                for count in range(0, len(order) + 1, max(1, len(order) // 4)):
                    d = _with(base, none, order[:count])
                    starts.append((self._over(instance, d), index, d))
        starts.sort(key=lambda each: each[0])
        found: list[Found] = []
        for over, index, d in starts[:REPAIRED]:
            instance = self.instances[index]
            while over > 0:
                nearest = min(self.changes(instance, d), key=lambda o: self._over(instance, o))
                if self._over(instance, nearest) >= over:
                    break
                over, d = self._over(instance, nearest), nearest
            if over <= 0:
                found.append(Found(index, d, instance.evaluate(d)))
        return sorted(found, key=lambda f: f.outcome.score)

    def _over(self, instance: Instance, d: Decisions) -> float:
        """By how much the budgets are exceeded, as shares of them."""
        over = 0.0
        if self.device is not None:
            over += max(0.0, self._held(instance, d) / self.device - 1)
        if self.host is not None:
            over += max(0.0, instance.host_bytes(d) / self.host - 1)
        return over

    def with_less_host(self, start: Found) -> Found:
        """The decisions after single changes that each take less of the host, and still fit the device."""
        instance, d = self.instances[start.index], start.decisions
        while True:
            least = min(
                (o for o in self.changes(instance, d) if self._fits_device(instance, o)),
                key=instance.host_bytes, default=d,
            )  # fmt: skip
            if instance.host_bytes(least) >= instance.host_bytes(d):
                return Found(start.index, d, instance.evaluate(d))
            d = least

    # -- local search ---------------------------------------------------------------------------------------------

    def improve(self, start: Found) -> Found:
        """The decisions after local search."""
        instance, best = self.instances[start.index], start
        until = self.evaluations + EVALUATIONS // instance.blocks
        while self.evaluations < until:
            better = self._step(instance, best)
            if better is None:
                return best
            best = better
        return best

    def _step(self, instance: Instance, now: Found) -> Found | None:
        """The best of all changes that fit and help; else the first pair of changes that does."""
        limit = now.outcome.score * (1 - LEAST)
        best: Found | None = None
        too_large: list[Decisions] = []
        for d in self.changes(instance, now.decisions):
            if not self.fits(instance, d):
                too_large.append(d)  # their time is asked for only where nothing else helps
                continue
            outcome = instance.evaluate(d)
            self.evaluations += 1
            if outcome.score < (best.outcome.score if best else limit):
                best = Found(now.index, d, outcome)
        if best is not None:
            return best
        beyond: list[tuple[float, Decisions]] = []
        for d in too_large:
            outcome = instance.evaluate(d)
            self.evaluations += 1
            if outcome.score < limit:
                beyond.append((outcome.score, d))
        beyond.sort(key=lambda each: each[0])
        for _, d in beyond[:TRIED]:
            for other in self.changes(instance, d):
                if not self.fits(instance, other):
                    continue
                outcome = instance.evaluate(other)
                self.evaluations += 1
                if outcome.score < limit and (best is None or outcome.score < best.outcome.score):
                    best = Found(now.index, other, outcome)
            if best is not None:
                return best
        return None

    def changes(self, instance: Instance, d: Decisions) -> Iterator[Decisions]:
        """Decisions that differ in one thing, or in one thing of all equal blocks in the same state."""
        n = instance.blocks
        for prefetch in self.prefetches:
            if abs(prefetch - d.prefetch) == 1:
                yield replace(d, prefetch=prefetch)
        holds = sorted({h for h in HOLD if h < n} | {n, d.hold} if self.holds is None else self.holds)
        at = holds.index(d.hold)
        for hold in holds[max(0, at - 2) : at] + holds[at + 1 : at + 3]:
            yield replace(d, hold=hold)
        for where in instance.wheres:
            if where != d.where:
                yield replace(d, where=where)
        yield from _moved(instance, d, self.pinned)


def frugal(instances: Sequence[Instance], count: int = 1) -> list[Found]:
    """The decisions that take the least of the device, least first."""
    tried: list[tuple[int, int, Decisions]] = []
    for index, instance in enumerate(instances):
        for base in _starts(instance):
            for prefetch, hold in ((0, 0), (0, 1), (1, 0)):
                d = replace(base, prefetch=prefetch, hold=hold)
                tried.append((instance.device_bytes(d), index, d))
    tried.sort(key=lambda each: each[0])
    found: dict[tuple[int, Decisions], int] = {}
    blocks = max(instance.blocks for instance in instances)
    for size, index, d in tried[: max(4 * count, 1200 // blocks)]:
        size, d = _descent(instances[index], size, d)
        found.setdefault((index, d), size)
    least = sorted(found, key=lambda each: found[each])[:count]
    return [Found(index, d, instances[index].evaluate(d)) for index, d in least]


def _descent(instance: Instance, size: int, d: Decisions) -> tuple[int, Decisions]:
    """The decisions after single changes that each take less of the device; of equal ones together where that helps."""
    for changes in (_moved, _one_block):
        while True:
            found = ((instance.device_bytes(o), o) for o in changes(instance, d))
            lower = min(found, key=lambda each: each[0], default=(size, d))
            if lower[0] >= size:
                break
            size, d = lower
    return size, d


def _starts(instance: Instance) -> Iterator[Decisions]:
    """Uniform decisions, with nothing on the device, or the smallest slab: that may save a slot."""
    small = min((s for s, ok in enumerate(instance.movable) if ok), key=lambda s: instance.home[s], default=-1)
    for level in range(len(instance.levels)):
        for away in (False, True):
            base = instance.uniform(level, away)
            yield base
            if small >= 0:
                yield _with(base, base.resident, (small,))


def _moved(instance: Instance, d: Decisions, pinned: Collection[int] = ()) -> Iterator[Decisions]:
    """Decisions that differ in one block or slab, or in the same way in equal ones that are in the same state."""
    blocks: dict[object, list[int]] = {}
    for b, kind in enumerate(instance.kinds):
        slab = instance.uses[b, 0]
        blocks.setdefault((kind, d.level[b], d.away[b], slab >= 0 and d.resident[slab]), []).append(b)
    for group in blocks.values():
        for chosen in _parts(group):
            for level in range(len(instance.levels)):
                if level != d.level[group[0]] and instance.allowed[group[0], level]:
                    yield replace(d, level=_set(d.level, chosen, level))
            if instance.bound[group[0]] > 0:
                yield replace(d, away=_set(d.away, chosen, not d.away[group[0]]))
    slabs: dict[object, list[int]] = {}
    for s, resident in enumerate(d.resident):
        if instance.movable[s] and s not in pinned:
            slabs.setdefault((instance.home[s], instance.host[s], resident), []).append(s)
    for group in slabs.values():
        for chosen in _parts(group):
            yield replace(d, resident=_set(d.resident, chosen, not d.resident[group[0]]))


def _set(values: tuple[T, ...], places: Collection[int], value: T) -> tuple[T, ...]:
    """The values with another one at these places."""
    changed = list(values)
    for place in places:
        changed[place] = value
    return tuple(changed)


def _one_block(instance: Instance, d: Decisions) -> Iterator[Decisions]:
    """Decisions that differ in one block or slab."""
    for b in range(instance.blocks):
        for level in range(len(instance.levels)):
            if level != d.level[b] and instance.allowed[b, level]:
                yield replace(d, level=_set(d.level, (b,), level))
        if instance.bound[b] > 0:
            yield replace(d, away=_set(d.away, (b,), not d.away[b]))
    for s, movable in enumerate(instance.movable):
        if movable:  # a small one that lives on the device may save a slot
            yield replace(d, resident=_set(d.resident, (s,), not d.resident[s]))


def _with(base: Decisions, none: tuple[bool, ...], slabs: Collection[int]) -> Decisions:
    return replace(base, resident=_set(none, slabs, True))


def _parts(group: list[int]) -> list[list[int]]:
    """Which of equal things are changed together."""
    if len(group) <= 4:
        single = [[b] for b in group]
        return single if len(group) == 1 else [*single, group]
    half = len(group) // 2
    return [[group[0]], [group[-1]], group[:half], group[half:], group]


def _compute(instance: Instance, d: Decisions) -> float:
    return float(instance.forward.sum() + instance.backward[np.arange(instance.blocks), np.array(d.level)].sum())


def _spread(grid: list[Found], count: int) -> list[Found]:
    """The best, and the best of other tilings, executors or levels."""
    chosen: list[Found] = []
    seen: set[object] = set()
    for found in grid:
        key = found.index, found.decisions.where, found.decisions.level
        if key not in seen:
            seen.add(key)
            chosen.append(found)
        if len(chosen) == count:
            break
    return chosen
