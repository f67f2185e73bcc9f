"""What the device's allocator reserves in a steady step: the step graph's allocations and frees, in order.

All of them are known: a form's are in its profile, every other value is one allocation, and values die where the walk
(oomc.simulate) says. What is there throughout is allocated first, as the runtime does, so that it never fragments; then
come steps until one ends as an earlier one did, since gradients that are carried into the next step lie elsewhere in
each. Loops over tiles or experts are profiled with a few iterations, whose pattern the others repeat.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from oomc import steps
from oomc.allocator import Allocator, Block
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
        self._dead = walk.last_uses()
        self._live: dict[Any, Block] = {}
        self._holders: dict[Any, int] = {}
        self._slab_of = {
            storage: str(node.args[1])
            for node in walk.graph.nodes if node.target is steps.offload and node.args[1] in walk.carried
            for grad in node.args[3] for storage in walk.storages.get(grad, ())
        }  # fmt: skip
        self._carried: dict[str, list[Block]] = {}
        for nbytes in filter(None, (BLAS, *walk.pieces())):
            self.allocator.take(nbytes)

    def run(self) -> Allocator:
        """Steps until they repeat themselves; the allocator after them."""
        seen: set[Any] = set()
        while len(seen) < STEPS and self._state() not in seen:
            seen.add(self._state())
            self._step()
        return self.allocator

    def _state(self) -> Any:
        """All that the next step's addresses depend on: what is free, and which gradients lie where."""
        pools = self.allocator.small, self.allocator.large
        carried = [(slab, *(address for _, address, _ in blocks)) for slab, blocks in self._carried.items()]
        return (*((pool.end, *pool.free) for pool in pools), *carried)

    def _step(self) -> None:
        for node in self.walk.graph.nodes:
            self._node(node)
        for block in self._live.values():
            self.allocator.give(block)
        self._live.clear()
        self._holders.clear()

    def _node(self, node: fx.Node) -> None:
        walk, holders = self.walk, self._holders
        if node.target is steps.retire_carried:
            for block in self._carried.pop(str(node.args[1]), ()):
                self.allocator.give(block)
        storages = walk.storages.get(node, ())
        if node in walk.profiles:
            self._form(node, walk.profiles[node])
        elif storages == (node,):
            self._live[node] = self.allocator.take(walk.bytes[node])
        for storage in storages:
            holders[storage] = holders.get(storage, 0) + 1
        for dead in self._dead.get(node, ()):
            for storage in walk.storages.get(dead, ()):
                holders[storage] -= 1
                if holders[storage] == 0 and storage in self._live:
                    self._die(storage)

    def _die(self, storage: Any) -> None:
        block = self._live.pop(storage)
        if storage in self._slab_of:
            self._carried.setdefault(self._slab_of[storage], []).append(block)
        else:
            self.allocator.give(block)

    def _form(self, node: fx.Node, profile: Profile) -> None:
        take, give = self.allocator.take, self.allocator.give
        own: dict[int, Block] = {}
        for number, nbytes in profile.log:
            if nbytes:
                own[number] = take(nbytes)
            elif number in own:
                give(own.pop(number))
        for place, number in enumerate(profile.numbers):
            if number in own:
                self._live[node, place] = own.pop(number)
        for block in own.values():
            give(block)


def project_reserved(program: Program, profiler: Profiler) -> Projection:
    """The projection of a scheduled step graph with what torch's allocator reserves for it on a GPU."""
    walk = Walk(program, profiler)
    projection = walk.run()
    allocator = Replay(walk).run()
    more = int((HEADROOM_CARRIED if walk.carried else HEADROOM) * allocator.reserved) + OTHERS
    return replace(projection, reserved=allocator.reserved + more, limit=allocator.limit + more)
