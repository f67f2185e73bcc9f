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
    v = rt.store("h1", h1, slot=0)             # queue the copy of a value into a host slot
    rt.discard(v)                              # the compute waits for it; the value's memory may be reused
    r = rt.restore(v)                          # queue the copy back
    h1 = rt.restored(r)                        # the compute waits for it
    counts = rt.end_step()

All methods are called from one thread, on the stream that computes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from oomc.runtime.chaos import Adversary
from oomc.runtime.gradients import BUFFER_ELEMENTS, CHUNK_ELEMENTS, Clipping, GradientSink, GradientTicket, Mode
from oomc.runtime.groups import SlabGroup
from oomc.runtime.lanes import Lane, mark
from oomc.runtime.optim import UpdateRule, compile_rule
from oomc.runtime.pool import Copying, Pool
from oomc.runtime.slabs import HostSlab, Slab
from oomc.runtime.updates import StepCounts, Where
from oomc.runtime.values import HostValues, StoredValue
from oomc.runtime.weights import Fetch, WeightBuffers


class Runtime:
    """Lanes, device slots, gradient ring and workers over a set of slabs.

    Args:
        device: where the compute is: CUDA, or the CPU as its stand-in.
        slabs: on the host or the device; a slab is named in calls by its layout's name. `close` closes them.
        slot_bytes: sizes of the device slots for weights.
        rule: the optimizer, or None where nothing is trained.
        groups: parameter group index of each trainable parameter.
        host_slot_bytes: sizes of the host slots for values.
        chunk_elems, buffer_elems, buffers: sizes of an update's chunks and of the gradient ring (see GradientSink).
        where: who updates slabs on the host.
        workers: host worker threads; None for one a physical core.
        adversary: random delays and poisoned buffers, to make a missing wait show.
        synchronous: no threads and no extra streams: every task is done when its call returns (a reference run).
    """

    def __init__(
        self,
        device: torch.device,
        slabs: Sequence[Slab],
        slot_bytes: Sequence[int],
        rule: UpdateRule | None = None,
        groups: Mapping[str, int] | None = None,
        *,
        host_slot_bytes: Sequence[int] = (),
        chunk_elems: int = CHUNK_ELEMENTS,
        buffer_elems: int = BUFFER_ELEMENTS,
        buffers: int | None = None,
        where: Where = "host",
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
        self._values = HostValues(host_slot_bytes, device, self._d2h, self._h2d, adversary)
        self._sink: GradientSink | None = None
        if rule is not None:
            compile_rule(rule)
            for slab in slabs:
                if slab.layout.state_elements:
                    slab.add_state(rule.arrays)
            self._sink = GradientSink(
                rule, dict(groups or {}), self._pool, self._d2h, chunk_elems=chunk_elems,
                buffer_elems=buffer_elems, buffers=buffers, where=where, adversary=adversary, synchronous=synchronous,
            )  # fmt: skip
        self._counts = StepCounts()
        self._leaving: dict[str, list[GradientTicket]] = {}
        self._closed = False

    @property
    def device_bytes(self) -> int:
        """Device bytes of the weight slots."""
        return sum(slot.nbytes for slot in self._buffers.slots)

    @property
    def host_bytes(self) -> int:
        """Host bytes taken: slabs with their state and kept gradients, the gradient ring, and slots for values."""
        ring = self._sink.ring.nbytes if self._sink is not None else 0
        slabs = sum(slab.host_bytes for slab in self.slabs.values() if isinstance(slab, HostSlab | SlabGroup))
        return ring + sum(self._values.sizes) + slabs

    def begin_step(self, hypers: Sequence[Any] = (), *, weighted: bool = False, carried: Collection[str] = ()) -> None:
        """Start a step.

        Args:
            hypers: snapshots of the parameter groups (`rule.hyper(group)`), for all its updates.
            weighted: gradients are summed times the number of valid labels.
            carried: slabs whose gradients of the step before may stay until the step says `retire_carried`.
        """
        assert not self._closed, "the runtime is closed"
        self._counts = StepCounts(hypers, weighted)
        if self._sink is not None:
            self._sink.begin_step(self._counts)
        for slab in [slab for slab in self._leaving if slab not in carried]:
            self.retire_carried(slab)

    def end_step(self) -> StepCounts:
        """End the step; its updates may still be under way, and its counts are final only after them."""
        return self._counts

    def count(self, valid: torch.Tensor) -> None:
        """Let the number of valid labels, a 0-dim tensor, leave for the host; it is there before any gradient is."""
        counts = self._counts

        def read() -> None:
            counts.valid = float(valid)
            counts.counted.set()

        self._d2h.submit(read, mark(self.device), lambda _: counts.counted.set())

    def await_update(self, slab: str) -> None:
        """Let the h2d lane go on only when what is under way for a slab is done."""
        updates = self.slabs[slab].pending(to_read=True)

        def wait() -> None:
            for each in updates:
                each.wait()

        if updates:
            self._h2d.submit(wait)

    def fetch(self, slab_id: str, slot: int) -> Fetch:
        """Queue the copy of a slab's weights into a free slot; `await_update` comes before, if it has one under way."""
        slab = self.slabs[slab_id]
        assert not slab.on_device, f"{slab_id} is on the device"
        self._counts.h2d_bytes += slab.layout.weight_bytes
        if self._sink is not None:
            self._sink.used(slab_id)
        return self._buffers.fetch(slab, slot)

    def wait(self, fetch: Fetch) -> None:
        """Make the compute wait for a fetch."""
        with self._counts.stall("weights"):
            fetch.wait()

    def weights(self, fetch: Fetch) -> tuple[torch.Tensor, ...]:
        """The fetched parameters, in the layout's order: views of the slot, valid between `wait` and `release`."""
        return self._buffers.views(fetch)

    def held(self, slab_id: str) -> tuple[torch.Tensor, ...]:
        """The parameters of a slab on the device, in the layout's order, once its updates are done."""
        slab = self.slabs[slab_id]
        with self._counts.stall("weights"):
            slab.wait_updated(to_read=True)
        if self._sink is not None:
            self._sink.used(slab_id)
        return slab.layout.views(slab.weights)

    def release(self, fetch: Fetch) -> None:
        """Free a fetch's slot, once the compute issued so far is done."""
        self._buffers.release(fetch)

    def offload(
        self, slab_id: str, names: Sequence[str], grads: Sequence[torch.Tensor | None], mode: Mode = "update"
    ) -> GradientTicket:
        """Take gradients of a slab and update with them, keep them or sum them up; None leaves a parameter."""
        assert self._sink is not None, "there is no optimizer"
        ticket = self._sink.offload(self.slabs[slab_id], list(zip(names, grads, strict=True)), mode)
        self._leaving.setdefault(slab_id, []).append(ticket)
        return ticket

    def wait_gradients(self, ticket: GradientTicket) -> None:
        """Make the compute wait until gradients have left the device, and let go of them.

        Must be called for every ticket before the gradients' memory is reused: the ticket holds them until then.
        """
        with self._counts.stall("gradients"):
            ticket.wait()
        for slab, tickets in list(self._leaving.items()):
            if ticket in tickets:
                tickets.remove(ticket)
            if not tickets:
                del self._leaving[slab]

    def retire_carried(self, slab_id: str) -> None:
        """`wait_gradients` for what is left of the step before."""
        with self._counts.stall("gradients"):
            for ticket in self._leaving.pop(slab_id, ()):
                ticket.wait()

    def retire_all(self) -> None:
        """`wait_gradients` for all gradients that have not left yet."""
        for slab in list(self._leaving):
            self.retire_carried(slab)

    def store(self, name: str, value: torch.Tensor, slot: int) -> StoredValue:
        """Queue the copy of a value into a free host slot; its device memory is held until `discard`."""
        copy = self._values.store(name, value, slot)
        self._counts.d2h_bytes += copy.nbytes
        return copy

    def discard(self, copy: StoredValue) -> None:
        """Make the compute wait until a stored value has left the device, and let go of it."""
        with self._counts.stall("values"):
            self._values.discard(copy)

    def restore(self, copy: StoredValue) -> StoredValue:
        """Queue the copy of a stored value into new device memory."""
        self._counts.h2d_bytes += copy.nbytes
        return self._values.restore(copy)

    def restored(self, copy: StoredValue) -> torch.Tensor:
        """Make the compute wait for a value that comes back; its host slot is free."""
        with self._counts.stall("values"):
            return self._values.restored(copy)

    def update_sum(self, slab_id: str) -> None:
        """Update a slab with what was summed for it in this step."""
        assert self._sink is not None, "there is no optimizer"
        self._sink.update_sum(self.slabs[slab_id])

    def apply_kept(self, clipping: Clipping) -> None:
        """Update all slabs with what was kept or summed for them, once the norm of it all is known."""
        assert self._sink is not None, "there is no optimizer"
        self._sink.apply_kept(self.slabs.values(), clipping)

    def set_where(self, where: Where) -> None:
        """Change who updates slabs on the host, once what is under way is done."""
        if self._sink is not None and self._sink.where != where:
            self.drain()
            self._sink.set_where(where)

    def drain(self) -> None:
        """Block until the lanes are idle and all updates are done; an error if one failed."""
        self._h2d.drain()
        self._d2h.drain()
        self.synchronize()

    def synchronize(self) -> None:
        """Block until all updates are done; RuntimeError (or LaneError as its cause) if one failed."""
        for slab in self.slabs.values():
            slab.wait_updated(to_read=True)

    def drop_kept(self) -> None:
        """Forget gradients that were kept or summed and not applied."""
        if self._sink is not None:
            self._sink.drop_kept(self.slabs.values())

    def close(self, with_slabs: bool = True) -> None:
        """Finish what is under way, end the threads and give all memory back; errors of unfinished work are dropped.

        Parameters that alias a slab keep its weights, as pageable memory; masters and optimizer state are gone, but
        not without `with_slabs`. What an interrupt has left is closed when this is called again.
        """
        self._closed = True
        self._h2d.close()
        self._d2h.close()
        if self._sink is not None:
            self._sink.close()
        self._pool.close()
        self._leaving.clear()
        self._buffers.close()
        self._values.close()
        for slab in self.slabs.values() if with_slabs else ():
            for countdown in slab.pending():
                if isinstance(countdown, Copying):  # a checkpoint is still being written
                    countdown.wait()
            slab.close()
