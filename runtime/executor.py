"""The runtime that a scheduled module calls: one method for each kind of node in the step graph. It decides nothing.

    rt.begin_step(hypers)
    rt.await_update("layers.0")                # let the h2d lane wait for the slab's updates under way
    f0 = rt.fetch("layers.0", slot=0)          # queue the copy of the slab's weights into a device slot
    rt.wait(f0)                                # the compute waits for it
    w = rt.weights(f0)                         # its parameters, in the layout's order
    ...                                        # compute
    rt.release(f0)                             # the slot may be filled again
    t = rt.offload("layers.0", names, grads, "update")
    rt.wait_gradients(t)                       # the gradients' memory may be reused
    counts = rt.end_step()

All methods are called from one thread, on the stream that computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from oomc.runtime.chaos import Adversary
from oomc.runtime.gradients import GradientSink, GradientTicket, Mode, StepCounts
from oomc.runtime.lanes import Lane
from oomc.runtime.optim import UpdateRule, compile_rule
from oomc.runtime.pool import Pool
from oomc.runtime.slabs import HostSlab
from oomc.runtime.weights import Fetch, WeightBuffers


class Runtime:
    """Lanes, device slots, gradient ring and host workers over a set of slabs.

    Args:
        device: where the compute is: CUDA, or the CPU as its stand-in.
        slabs: the host slabs; a slab is named in calls by its layout's name. `close` closes them.
        slot_bytes: sizes of the device slots for weights.
        rule: the optimizer, or None where nothing is trained.
        groups: parameter group index of each trainable parameter.
        ring_bytes, chunk_elems: size of the gradient ring and of its chunks (see GradientSink).
        workers: host worker threads; None for one a physical core.
        adversary: random delays and poisoned buffers, to make a missing wait show.
        synchronous: no threads and no extra streams: every task is done when its call returns (a reference run).
    """

    def __init__(
        self,
        device: torch.device,
        slabs: Sequence[HostSlab],
        slot_bytes: Sequence[int],
        rule: UpdateRule | None = None,
        groups: Mapping[str, int] | None = None,
        *,
        ring_bytes: int = 256 << 20,
        chunk_elems: int = 4 << 20,
        workers: int | None = None,
        adversary: Adversary | None = None,
        synchronous: bool = False,
    ) -> None:
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.slabs = {slab.name: slab for slab in slabs}
        assert len(self.slabs) == len(slabs), "two slabs have one name"
        self._h2d = Lane("h2d", device, adversary, synchronous)
        self._d2h = Lane("d2h", device, adversary, synchronous)
        self._pool = Pool(workers, adversary, synchronous)
        self._buffers = WeightBuffers(slot_bytes, device, self._h2d, adversary)
        self._sink: GradientSink | None = None
        if rule is not None:
            compile_rule(rule)
            for slab in slabs:
                if slab.layout.state_elements:
                    slab.add_state(rule.arrays)
            self._sink = GradientSink(
                rule, dict(groups or {}), self._pool, self._d2h, ring_bytes, chunk_elems, adversary
            )
        self._counts = StepCounts()
        self._closed = False

    @property
    def device_bytes(self) -> int:
        """Device bytes taken at construction: the weight slots."""
        return sum(slot.nbytes for slot in self._buffers.slots)

    @property
    def host_bytes(self) -> int:
        """Host bytes taken: slabs with their state and accumulators, and the gradient ring."""
        ring = self._sink.ring.nbytes if self._sink is not None else 0
        return ring + sum(slab.host_bytes for slab in self.slabs.values())

    def begin_step(self, hypers: Sequence[Any] = ()) -> None:
        """Start a step; `hypers` are snapshots of the parameter groups (`rule.hyper(group)`), for all its updates."""
        assert not self._closed, "the runtime is closed"
        self._counts = StepCounts()
        if self._sink is not None:
            self._sink.begin_step(hypers, self._counts)

    def end_step(self) -> StepCounts:
        """End the step; its updates may still be under way, and `nonfinite` is final only after them."""
        return self._counts

    def await_update(self, slab: str) -> None:
        """Let the h2d lane go on only when what is under way for a slab is done."""
        updates = self.slabs[slab].pending()

        def wait() -> None:
            for each in updates:
                each.wait()

        if updates:
            self._h2d.submit(wait)

    def fetch(self, slab_id: str, slot: int) -> Fetch:
        """Queue the copy of a slab's weights into a free slot; `await_update` comes before, if it has one under way."""
        slab = self.slabs[slab_id]
        self._counts.h2d_bytes += slab.layout.weight_bytes
        return self._buffers.fetch(slab, slot)

    def wait(self, fetch: Fetch) -> None:
        """Make the compute wait for a fetch."""
        fetch.wait()

    def weights(self, fetch: Fetch) -> tuple[torch.Tensor, ...]:
        """The fetched parameters, in the layout's order: views of the slot, valid between `wait` and `release`."""
        return self._buffers.views(fetch)

    def release(self, fetch: Fetch) -> None:
        """Free a fetch's slot, once the compute issued so far is done."""
        self._buffers.release(fetch)

    def offload(
        self, slab_id: str, names: Sequence[str], grads: Sequence[torch.Tensor | None], mode: Mode = "update"
    ) -> GradientTicket:
        """Take gradients of a slab off the device and update with them, or accumulate them; None leaves a parameter."""
        assert self._sink is not None, "there is no optimizer"
        return self._sink.offload(self.slabs[slab_id], list(zip(names, grads, strict=True)), mode)

    def wait_gradients(self, ticket: GradientTicket) -> None:
        """Make the compute wait until gradients have left the device, and let go of them.

        Must be called for every ticket before the gradients' memory is reused: the ticket holds them until then.
        """
        ticket.wait()

    def update_accumulated(self, slab_id: str, factor: float = 1.0) -> None:
        """Update a slab with what was accumulated for it, times `factor`."""
        assert self._sink is not None, "there is no optimizer"
        self._sink.update_accumulated(self.slabs[slab_id], factor)

    def synchronize(self) -> None:
        """Block until all updates are done; RuntimeError (or LaneError as its cause) if one failed."""
        for slab in self.slabs.values():
            slab.wait_updated()

    def close(self) -> None:
        """Finish what is under way, end the threads and give all memory back; errors of unfinished work are dropped.

        Parameters that alias a slab keep its weights, as pageable memory; masters and optimizer state are gone.
        """
        if self._closed:
            return
        self._closed = True
        self._h2d.close()
        self._d2h.close()
        self._pool.close()
        self._buffers.close()
        if self._sink is not None:
            self._sink.close()
        for slab in self.slabs.values():
            slab.close()
