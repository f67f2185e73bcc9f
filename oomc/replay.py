"""What the device's allocator reserves in a steady step: the step graph's allocations and frees, in order.

All of them are known: a form's are in its profile, every other value is one allocation, and values die where the walk
(oomc.simulate) says. What is there throughout is allocated first, as the runtime does, so that it never fragments; then
come several steps, until the reserved bytes stay as they are. Loops over tiles or experts are profiled with a few
iterations, whose pattern the others repeat.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from oomc import steps
from oomc.allocator import Allocator, Block
from oomc.simulate import Profile, Walk

STEPS = 4
"""Most steps that are replayed; the second one rarely needs more than the first, and later ones hardly ever do."""


class Replay:
    """Replays a walked step graph on an allocator.

    Args:
        walk: has been run.
        fixed: allocations that are there throughout, in order.
    """

    def __init__(self, walk: Walk, fixed: list[int], limit: float = math.inf) -> None:
        self.walk, self.allocator = walk, Allocator(limit)
        self.dead = walk.last_uses()
        self.live: dict[Any, Block] = {}
        self.holders: dict[Any, int] = {}
        self.slab_of = {
            storage: str(node.args[1])
            for node in walk.graph.nodes if node.target is steps.offload and node.args[1] in walk.carried
            for grad in node.args[3] for storage in walk.storages.get(grad, ())
        }  # fmt: skip
        self.waiting: dict[str, list[Block]] = {}
        for nbytes in filter(None, fixed):
            self.allocator.take(nbytes)

    def run(self) -> int:
        """The reserved bytes of a steady step."""
        reserved = -1
        for _ in range(STEPS):
            before, reserved = reserved, self.step()
            if reserved == before:
                break
        return reserved

    def step(self) -> int:
        """Replay one step; the most bytes reserved in it."""
        self.allocator.peak = self.allocator.reserved
        for node in self.walk.graph.nodes:
            self._node(node)
        for block in self.live.values():  # what the step gives back
            self.allocator.give(block)
        self.live.clear()
        self.holders.clear()
        return self.allocator.peak

    def _node(self, node: fx.Node) -> None:
        walk = self.walk
        if node.target is steps.retire_carried:
            for block in self.waiting.pop(str(node.args[1]), ()):
                self.allocator.give(block)
        storages = walk.storages.get(node, ())
        if node in walk.profiles:
            self._form(node, walk.profiles[node])
        elif storages == (node,):
            self.live[node] = self.allocator.take(walk.bytes[node])
        for storage in storages:
            self.holders[storage] = self.holders.get(storage, 0) + 1
        for dead in self.dead.get(node, ()):
            for storage in walk.storages.get(dead, ()):
                self.holders[storage] -= 1
                if self.holders[storage] == 0:
                    self._die(storage)

    def _die(self, storage: Any) -> None:
        block = self.live.pop(storage, None)
        if block is None:
            return
        if storage in self.slab_of:
            self.waiting.setdefault(self.slab_of[storage], []).append(block)
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
                self.live[node, place] = own.pop(number)
        for block in own.values():
            give(block)


def reserved_bytes(walk: Walk) -> int:
    """Bytes that torch's allocator reserves on a GPU for a step graph that was walked."""
    return Replay(walk, walk.pieces()).run()
