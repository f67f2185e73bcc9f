"""Device buffers for weights: slots that are taken once, filled by whole-slab copies and read through views."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from oomc.runtime.chaos import Adversary
from oomc.runtime.lanes import Lane, Mark, Ticket, mark
from oomc.runtime.slabs import Slab


class Fetch:
    """One copy of a slab's weights into a slot, from `WeightBuffers.fetch` until `WeightBuffers.release`."""

    def __init__(self, slab: Slab, slot: int, ticket: Ticket) -> None:
        self.slab = slab
        self.slot = slot
        self._ticket = ticket
        self.waited = False

    def wait(self) -> None:
        """Make the current stream wait until the weights are there; LaneError if the copy failed."""
        self._ticket.wait_on()
        self.waited = True


class WeightBuffers:
    """The slots, and their copies on the h2d lane.

    All calls come from the thread that issues the compute, and their order is the program's order.

    Args:
        sizes: bytes of each slot.
        device: where they are.
        lane: the h2d lane.
        adversary: poisons the slots at first and after each release if given.
    """

    def __init__(
        self, sizes: Sequence[int], device: torch.device, lane: Lane, adversary: Adversary | None = None
    ) -> None:
        self.slots = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        self._device = device
        self._lane = lane
        self._adversary = adversary
        self._holder: list[Fetch | None] = [None] * len(sizes)
        self._free: list[Mark] = []
        for slot in self.slots:
            if adversary is not None:
                adversary.poison(slot)
            self._free.append(mark(device))
        self._views: dict[tuple[int, str], tuple[torch.Tensor, ...]] = {}

    def fetch(self, slab: Slab, slot: int) -> Fetch:
        """Queue the copy of `slab` into `slot`, after the slot's last use.

        The lane does not wait for updates of the slab here: `await_update` does, where the step graph says so.
        """
        assert self._holder[slot] is None, f"fetch of {slab.name}: slot {slot} holds {_name(self._holder[slot])}"
        size = slab.layout.weight_bytes
        assert size <= self.slots[slot].numel(), f"fetch of {slab.name}: {size} bytes do not fit slot {slot}"
        target = self.slots[slot][:size]
        fetch = Fetch(slab, slot, self._lane.submit(partial(slab.copy_weights, target), after=self._free[slot]))
        self._holder[slot] = fetch
        return fetch

    def views(self, fetch: Fetch) -> tuple[torch.Tensor, ...]:
        """The slab's parameters as views of the slot, in the layout's order; valid from `wait` to `release`."""
        assert fetch.waited, f"{fetch.slab.name}: weights are used before the wait for their copy"
        assert self._holder[fetch.slot] is fetch, f"{fetch.slab.name}: weights are used after their release"
        key = (fetch.slot, fetch.slab.name)
        if key not in self._views:
            self._views[key] = fetch.slab.layout.views(self.slots[fetch.slot])
        return self._views[key]

    def release(self, fetch: Fetch) -> None:
        """Say that the compute issued so far was the last to use the weights; the slot may be filled again after it."""
        assert self._holder[fetch.slot] is fetch, f"{fetch.slab.name}: slot {fetch.slot} is released twice"
        assert fetch.waited, f"{fetch.slab.name}: slot {fetch.slot} is released before the wait for its copy"
        if self._adversary is not None:
            self._adversary.poison(self.slots[fetch.slot])
        self._free[fetch.slot] = mark(self._device)
        self._holder[fetch.slot] = None

    def reset(self) -> None:
        """Take all slots back, whatever they hold; the lane must be idle."""
        for index in range(len(self.slots)):
            self._free[index] = mark(self._device)
            self._holder[index] = None

    def close(self) -> None:
        """Let go of the slots."""
        self._views.clear()
        self.slots.clear()
        self._holder.clear()


def _name(fetch: Fetch | None) -> str:
    return "nothing" if fetch is None else fetch.slab.name
