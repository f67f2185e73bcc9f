"""What the device's allocator reserves in a steady step: the step graph's allocations and frees, in order.

All of them are known: a form's are in its profile, every other value is one allocation, and values die where the walk
(oomc.simulate) says. What is there throughout is allocated first, as the runtime does, so that it never fragments; then
come steps until one ends as an earlier one did, since gradients that are carried into the next step lie elsewhere in
each. Loops over tiles or experts are profiled with a few iterations, whose pattern the others repeat.

Kernels allocate for themselves what is not seen here. Small as it is, a block of it in a place where a large one would
have been can shift all that comes after, and some plans come out low by mere luck: one that was projected at 11.7 GB
took 12.3. So a step is replayed several times, with such blocks at random too, and the most counts.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
from torch import fx

from oomc import steps
from oomc.allocator import CARRY, GIVE, RETIRE, TAKE, Allocator, Array, rounded
from oomc.program import Program
from oomc.simulate import Profile, Profiler, Projection, Walk

STEPS = 8
"""Most steps that are replayed; without carried gradients the second one ends as the first did."""
BLAS = 32 << 20
"""Bytes of the workspace that torch allocates for cuBLAS at its first use, on Hopper; elsewhere it is smaller."""
OTHERS = 32 << 20
"""What else is reserved: pools of small allocations of other streams (12 to 14 MiB were measured), and a page."""
HEADROOM = 0.01
"""A share on top of the most that replays reserve."""
DISTURBED = 5
"""Replays with allocations that are not seen here: one in each form's graph, at a random place."""
UNSEEN = (2 << 20, 4 << 20, 8 << 20, 16 << 20)
"""Their bytes."""
LIVES = 3
"""Events that they live for."""


class Replay:
    """Replays a step graph on an allocator.

    Args:
        walk: over it; has been run.

    Attributes:
        events: of a step, as `Allocator.replay` takes them.
        sizes: of its blocks.
    """

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self._dead = walk.last_use
        self._slab_of = {
            storage: str(node.args[1])
            for node in walk.graph.nodes if node.target is steps.offload and node.args[1] in walk.carried
            for grad in node.args[3] for storage in walk.storages.get(grad, ())
        }  # fmt: skip
        self._events: list[Array] = []
        self._sizes: list[Array] = []
        self._count = self._blocks = 0
        self._live: dict[Any, int] = {}  # numbers of blocks
        self._carried: dict[str, list[int]] = {}
        self._runs: list[tuple[int, int, int]] = []
        """Of each run of a form: the profile's identity, its first event, and how many it has."""
        self._graphs: dict[int, _Graph] = {}
        self.events = self._step()
        self.sizes = np.concatenate([np.empty(0, np.int64), *self._sizes])

    def run(self) -> Allocator:
        """Steps until they repeat themselves; the allocator after them."""
        return self._replayed(self.events, self.sizes)

    def disturbed(self, seed: int) -> Allocator:
        """The same with blocks that are not seen here."""
        events, random = self.events, Random(seed)
        found: dict[int, tuple[float, int]] = {}
        places: list[int] = []
        more: list[tuple[int, int]] = []
        extra: list[int] = []
        for profile, first, count in self._runs:
            share, nbytes = found.setdefault(profile, (random.random(), random.choice(UNSEEN)))
            at = int(share * (count + 1))
            number = len(self.sizes) + len(extra)
            extra.append(nbytes)
            places += [first + at, first + min(at + LIVES, count)]
            more += [(TAKE, number), (GIVE, number)]
        if more:
            events = np.insert(events, places, more, axis=0)
        return self._replayed(events, np.append(self.sizes, np.array(extra, np.int64)))

    def _replayed(self, events: Array, sizes: Array) -> Allocator:
        allocator = Allocator()
        for nbytes in filter(None, (BLAS, *self.walk.pieces())):
            allocator.take(nbytes)
        allocator.replay(events, sizes, STEPS)
        return allocator

    def _step(self) -> Array:
        """What a step takes and gives."""
        holders: dict[Any, int] = {}
        retired: list[tuple[int, str]] = []
        for node in self.walk.graph.nodes:
            if node.target is steps.retire_carried:
                retired.append((self._count, str(node.args[1])))
            self._node(node, holders)
        self._add([(GIVE, number) for number in self._live.values()])
        events = np.concatenate([np.empty((0, 2), np.int64), *self._events])
        for place, slab in reversed(retired):  # what the step before has left; it took the same blocks
            gone = [(RETIRE, number) for number in self._carried.get(slab, ())]
            if gone:
                events = np.insert(events, place, gone, axis=0)
                self._runs = [(p, first + len(gone) * (first >= place), n) for p, first, n in self._runs]
        return events

    def _node(self, node: fx.Node, holders: dict[Any, int]) -> None:
        walk = self.walk
        storages = walk.storages.get(node, ())
        if node in walk.profiles:
            self._form(node, walk.profiles[node])
        elif storages == (node,):
            self._live[node] = self._blocks
            self._add([(TAKE, self._blocks)], [rounded(walk.bytes[node])])
        for storage in storages:
            holders[storage] = holders.get(storage, 0) + 1
        for dead in self._dead.get(node, ()):
            for storage in walk.storages.get(dead, ()):
                holders[storage] -= 1
                if holders[storage] == 0 and storage in self._live:
                    self._die(storage)

    def _add(self, events: Any, sizes: Any = ()) -> None:
        if len(events):
            self._events.append(np.asarray(events, np.int64))
            self._sizes.append(np.asarray(sizes, np.int64))
            self._count += len(events)
            self._blocks += len(sizes)

    def _die(self, storage: Any) -> None:
        number = self._live.pop(storage)
        if storage in self._slab_of:
            self._carried.setdefault(self._slab_of[storage], []).append(number)
            self._add([(CARRY, number)])
        else:
            self._add([(GIVE, number)])

    def _form(self, node: fx.Node, profile: Profile) -> None:
        if id(profile) not in self._graphs:
            self._graphs[id(profile)] = _Graph.of(profile)
        graph, first = self._graphs[id(profile)], self._blocks
        self._runs.append((id(profile), self._count, graph.within))
        for place, block in graph.results:
            self._live[node, place] = first + block
        self._add(graph.events + np.array((0, first)), graph.sizes)


@dataclass(frozen=True)
class _Graph:
    """What one run of a form's graph takes and gives, its blocks counted from 0.

    Attributes:
        events: the first `within` of them come while it runs.
        sizes: of its blocks.
        results: which of its results are which blocks.
    """

    events: Array
    sizes: Array
    within: int
    results: tuple[tuple[int, int], ...]

    @staticmethod
    def of(profile: Profile) -> _Graph:
        own: dict[int, int] = {}
        events: list[tuple[int, int]] = []
        sizes: list[int] = []
        for number, nbytes in profile.log:
            if nbytes:
                own[number] = len(sizes)
                events.append((TAKE, len(sizes)))
                sizes.append(rounded(nbytes))
            elif number in own:
                events.append((GIVE, own.pop(number)))
        within = len(events)
        results = tuple((place, own.pop(number)) for place, number in enumerate(profile.numbers) if number in own)
        events += [(GIVE, block) for block in own.values()]
        return _Graph(np.array(events, np.int64).reshape(-1, 2), np.array(sizes, np.int64), within, results)


def project_reserved(program: Program, profiler: Profiler) -> Projection:
    """The projection of a scheduled step graph with what torch's allocator reserves for it on a GPU."""
    walk = Walk(program, profiler)
    projection = walk.run()
    replay = Replay(walk)
    with ThreadPoolExecutor(DISTURBED) as pool:  # what takes the time runs without Python's lock
        found = [replay.run(), *pool.map(replay.disturbed, range(DISTURBED))]
    reserved, limit = max(a.reserved for a in found), max(a.limit for a in found)
    more = int(HEADROOM * reserved) + OTHERS
    return replace(projection, reserved=reserved + more, limit=limit + more)
