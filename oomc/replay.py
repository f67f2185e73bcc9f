"""What the device's allocator reserves in a steady step: the step graph's allocations and frees, in order.

All of them are known: a form's are in its profile, every other value is one allocation, and values die where the walk
(oomc.simulate) says. What is there throughout is allocated first, as the runtime does, so that it never fragments; then
come steps until one ends as an earlier one did, since gradients that are carried into the next step lie elsewhere in
each. Loops over tiles or experts are profiled with a few iterations, whose pattern the others repeat.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import fx

from oomc import steps
from oomc.allocator import CARRY, GIVE, RETIRE, TAKE, Allocator, rounded
from oomc.program import Program
from oomc.simulate import Profile, Profiler, Projection, Walk

STEPS = 8
"""Most steps that are replayed; without carried gradients the second one ends as the first did."""
BLAS = 32 << 20
"""Bytes of the workspace that torch allocates for cuBLAS at its first use, on Hopper; elsewhere it is smaller."""
OTHERS = 32 << 20
"""What else is reserved: pools of small allocations of other streams (12 to 14 MiB were measured), and a page."""
HEADROOM = 0.01
"""A share on top, since kernels allocate for themselves what is not seen here, and so shift what comes after. Replays
with such allocations at random reserve up to 1% more."""
HEADROOM_CARRIED = 0.025
"""The same where gradients stay among temporaries into the next step: up to 2% more."""


class Replay:
    """Replays a step graph on an allocator.

    Args:
        walk: over it; has been run.
    """

    def __init__(self, walk: Walk) -> None:
        self.walk, self.allocator = walk, Allocator()
        self._dead = walk.last_use
        self._slab_of = {
            storage: str(node.args[1])
            for node in walk.graph.nodes if node.target is steps.offload and node.args[1] in walk.carried
            for grad in node.args[3] for storage in walk.storages.get(grad, ())
        }  # fmt: skip
        self._events: list[tuple[int, int]] = []
        self._sizes: list[int] = []
        self._live: dict[Any, int] = {}  # numbers of blocks
        self._carried: dict[str, list[int]] = {}
        for nbytes in filter(None, (BLAS, *walk.pieces())):
            self.allocator.take(nbytes)

    def run(self) -> Allocator:
        """Steps until they repeat themselves; the allocator after them."""
        self._step()
        events, sizes = np.array(self._events, np.int64).reshape(-1, 2), np.array(self._sizes, np.int64)
        self.allocator.replay(events, sizes, STEPS)
        return self.allocator

    def _step(self) -> None:
        """Note what a step takes and gives."""
        holders: dict[Any, int] = {}
        retired: list[tuple[int, str]] = []
        for node in self.walk.graph.nodes:
            if node.target is steps.retire_carried:
                retired.append((len(self._events), str(node.args[1])))
            self._node(node, holders)
        self._events += [(GIVE, number) for number in self._live.values()]
        for place, slab in reversed(retired):  # what the step before has left; it took the same blocks
            self._events[place:place] = [(RETIRE, number) for number in self._carried.get(slab, ())]

    def _node(self, node: fx.Node, holders: dict[Any, int]) -> None:
        walk = self.walk
        storages = walk.storages.get(node, ())
        if node in walk.profiles:
            self._form(node, walk.profiles[node])
        elif storages == (node,):
            self._live[node] = self._take(walk.bytes[node])
        for storage in storages:
            holders[storage] = holders.get(storage, 0) + 1
        for dead in self._dead.get(node, ()):
            for storage in walk.storages.get(dead, ()):
                holders[storage] -= 1
                if holders[storage] == 0 and storage in self._live:
                    self._die(storage)

    def _take(self, nbytes: int) -> int:
        number = len(self._sizes)
        self._sizes.append(rounded(nbytes))
        self._events.append((TAKE, number))
        return number

    def _die(self, storage: Any) -> None:
        number = self._live.pop(storage)
        if storage in self._slab_of:
            self._carried.setdefault(self._slab_of[storage], []).append(number)
            self._events.append((CARRY, number))
        else:
            self._events.append((GIVE, number))

    def _form(self, node: fx.Node, profile: Profile) -> None:
        own: dict[int, int] = {}
        for number, nbytes in profile.log:
            if nbytes:
                own[number] = self._take(nbytes)
            elif number in own:
                self._events.append((GIVE, own.pop(number)))
        for place, number in enumerate(profile.numbers):
            if number in own:
                self._live[node, place] = own.pop(number)
        self._events += [(GIVE, block) for block in own.values()]


def project_reserved(program: Program, profiler: Profiler) -> Projection:
    """The projection of a scheduled step graph with what torch's allocator reserves for it on a GPU."""
    walk = Walk(program, profiler)
    projection = walk.run()
    allocator = Replay(walk).run()
    more = int((HEADROOM_CARRIED if walk.carried else HEADROOM) * allocator.reserved) + OTHERS
    return replace(projection, reserved=allocator.reserved + more, limit=allocator.limit + more)
