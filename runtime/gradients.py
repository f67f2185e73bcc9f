"""Gradients on their way from the device into the optimizer.

    offload(..., "update")   the slab's update starts: its chunks are taken by host and device (oomc.runtime.updates)
    offload(..., "keep")     into memory of the slab's own, as they are: the norm of all must be known first
    offload(..., "sum")      added up there in fp32, through the ring: several micro-batches, or several uses
    apply_kept()             norm, clipping, and the updates of all that was kept or summed

The optimizer never waits for a lane, so nothing here can lock up, however small the ring.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from oomc.runtime.chaos import Adversary
from oomc.runtime.kernels import accumulate, sum_of_squares
from oomc.runtime.lanes import Lane, Ticket, mark
from oomc.runtime.optim import UpdateRule
from oomc.runtime.pool import Countdown, Pool
from oomc.runtime.slabs import Slab, bits, gradient_bits
from oomc.runtime.update_workers import STAGES, DeviceUpdates, HostUpdates, Ring
from oomc.runtime.updates import (
    Job,
    Run,
    StepCounts,
    UpdateQueue,
    Where,
    chunk_bytes_of,
    plan_chunks,
)

CHUNK_ELEMENTS = 8 << 20
"""bf16 gradients in a chunk: copies of this size are near their best rate."""
ON_DEVICE = 8
"""By how much larger chunks are of a slab on the device, where nothing is copied: each takes some 0.2 ms of Python, for
which the thread that issues the compute waits. A kernel of 64 M elements keeps compute off the device for 0.5 ms."""
BUFFER_ELEMENTS = 4 << 20
"""bf16 gradients in a ring buffer: with fewer, Python's share of an update (about 0.2 ms) shows (docs/RESULTS.md)."""
Mode = Literal["update", "keep", "sum"]


def ring_buffers(workers: int, where: Where = "host") -> int:
    """Buffers of the ring that are in use: each worker updates from one, one waits for a chunk, and some fill.

    A copy takes a hundredth of an update. Beside a device that updates too there are as many as three quarters of the
    cores: the device leaves less of the host's memory bandwidth, so that fewer workers do as much, and the threads that
    issue compute and copies need not wait for a core (measured on 16 cores, docs/RESULTS.md).
    """
    workers = max(2, workers)
    if where == "both":
        return max(3, 3 * workers // 4)
    return workers + max(2, workers // 4)


class GradientTicket:
    """Gradients that are leaving the device; holds them until `wait`, which must come before their memory is reused."""

    def __init__(self, gradients: list[torch.Tensor], ticket: Ticket | None = None, job: Job | None = None) -> None:
        self.job = job
        self._ticket = ticket
        self._gradients = gradients

    def wait(self) -> None:
        """Make the current stream wait until they have left, and let go of them; an error if that failed."""
        if self._ticket is not None:
            self._ticket.wait_on()
        if self.job is not None:
            self.job.wait_read()
        self._gradients.clear()


@dataclass(frozen=True)
class Clipping:
    """How kept gradients are applied.

    Attributes:
        max_norm: the global norm is clipped to it, as by `torch.nn.utils.clip_grad_norm_`; None: it is not.
        window: counts of the micro-batches that were summed, whose valid labels divide the sum.
    """

    max_norm: float | None = None
    window: tuple[StepCounts, ...] = ()


class GradientSink:
    """Takes gradients off the device and applies them.

    All calls come from the thread that issues the compute. What is given for one parameter is applied in that order.

    Args:
        rule: the optimizer.
        groups: index into the hyperparameters, for each trainable parameter's name.
        pool: where updates on the host run.
        lane: the d2h lane.
        chunk_elems: elements of bf16 in a chunk, half as many of fp32: what is taken from the queue at a time.
        buffer_elems: elements of bf16 in a buffer of the ring: what a host worker updates at a time.
        buffers: of the ring; None for as many as `ring_buffers` says.
        where: who updates slabs on the host.
        adversary: delays, and poisons freed buffers, if given.
        synchronous: no threads: every update is done when its call returns.
    """

    def __init__(
        self,
        rule: UpdateRule,
        groups: dict[str, int],
        pool: Pool,
        lane: Lane,
        *,
        chunk_elems: int = CHUNK_ELEMENTS,
        buffer_elems: int = BUFFER_ELEMENTS,
        buffers: int | None = None,
        where: Where = "host",
        adversary: Adversary | None = None,
        synchronous: bool = False,
    ) -> None:
        self._rule, self._groups, self._pool, self._lane = rule, groups, pool, lane
        self._adversary = adversary
        self.chunk_bytes = chunk_bytes_of(chunk_elems)
        count = buffers or ring_buffers(pool.workers)
        buffer = min(self.chunk_bytes, chunk_bytes_of(buffer_elems))
        self.ring = Ring(count, buffer, pin=lane.device.type == "cuda")
        self._queue = UpdateQueue(where)
        self._host = HostUpdates(self.ring, pool, lane.device, adversary)
        self._device = DeviceUpdates(rule.arrays, lane.device, self.chunk_bytes, _stages(where), adversary)
        self._synchronous = synchronous
        self._threads: list[threading.Thread] = []
        if not synchronous:
            for worker in (self._host, self._device):
                thread = threading.Thread(
                    target=worker.work, args=(self._queue,), name=f"oomc-{type(worker).__name__}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
            self._ender = weakref.finalize(self, self._queue.close)
        self.counts = StepCounts()
        self._order: dict[str, int] = {}
        self._squares: dict[str, list[tuple[Countdown | None, Any]]] = {}
        self._on_device: dict[str, list[tuple[list[str], list[torch.Tensor], GradientTicket]]] = {}

    def begin_step(self, counts: StepCounts) -> None:
        """From now on use the hyperparameters of `counts`, and count there."""
        self.counts = counts

    def used(self, slab: str) -> None:
        """Note that the step uses this slab's weights now: updates are made in the order of first uses."""
        self._order.setdefault(slab, len(self._order))

    @property
    def where(self) -> Where:
        """Who updates slabs on the host."""
        return self._queue.where

    def set_where(self, where: Where) -> None:
        """Change who updates slabs on the host, and take or give back device memory for it; nothing is under way."""
        self._device.set_stages(_stages(where))
        self._queue.where = where

    def offload(self, slab: Slab, grads: Sequence[tuple[str, torch.Tensor | None]], mode: Mode) -> GradientTicket:
        """Take gradients of a slab.

        Args:
            slab: the parameters' slab.
            grads: names of trainable parameters with their gradients: bf16 or fp32, of the parameter's shape, on the
                device; best contiguous, since one that is not is made so here, on the device. None leaves the parameter
                and its state as they are, as in torch.
            mode: "update" with them, "keep" them or add them to a "sum" until `apply_kept` or `update_sum`.
        """
        self.counts.offloads += 1
        names = [name for name, grad in grads if grad is not None]
        flat = [grad.detach().contiguous().view(-1) for _, grad in grads if grad is not None]
        if not slab.on_device:
            self.counts.d2h_bytes += sum(grad.nbytes for grad in flat)
        if mode == "update":
            job = self._job(slab, names, flat)
            self._start([job], self.counts)
            return GradientTicket(flat, job=job)
        if mode == "sum":
            return GradientTicket(flat, self._sum(slab, names, flat))
        if slab.on_device:
            return self._keep_on_device(slab, names, flat)
        return GradientTicket(flat, self._keep(slab, names, flat))

    def update_sum(self, slab: Slab) -> None:
        """Update a slab with what was summed for it in this step."""
        job = self._kept_job(slab)
        if job is not None:
            self._start([job], self.counts)

    def apply_kept(self, slabs: Iterable[Slab], clipping: Clipping) -> None:
        """Update with all that was kept or summed, once its norm is known; nothing if there are no valid labels, or
        the norm is not finite. The counts of this step tell which."""
        counts, window = self.counts, clipping.window
        counts.applying = True
        self.ring.use(self.ring.count)  # the next forward waits for these updates, and so leaves the cores to them
        kept = {slab.name: (slab, slab.pending()) for slab in slabs}
        squares, self._squares = self._squares, {}
        jobs, summed = [], []
        for slab, _ in kept.values():
            if slab.kept is not None and slab.kept.wide and slab.kept.names:
                summed.append((slab, sorted(slab.kept.names)))
            job = self._kept_job(slab)
            if job is not None:
                jobs.append(job)
        jobs.sort(key=lambda job: job.order)

        def decide() -> None:
            for job in jobs:
                job.done.begun = True
            for _, pending in kept.values():
                for countdown in pending:
                    countdown.wait()
            total = math.fsum(value for parts in squares.values() for value in _values(parts))
            total += math.fsum(self._square_sums(slab, names) for slab, names in summed)
            valid = _valid(window) if window else None
            share = 1.0 if not window else 1.0 / len(window) if valid is None else 1.0 / valid if valid else 0.0
            norm = math.sqrt(total) * share if math.isfinite(total) else math.nan
            counts.grad_norm = norm
            if valid == 0 or (not window and counts.valid == 0):
                counts.skipped = "no valid labels"
            elif not math.isfinite(norm):
                counts.skipped = "the gradient is not finite"
            factor = share
            if clipping.max_norm is not None:
                factor *= min(1.0, clipping.max_norm / (norm + 1e-6))
            for job in jobs:
                if counts.skipped:
                    job.skip()
                else:
                    self._begin(job, counts, factor)
            counts.decided.set()

        def failed(error: BaseException) -> None:
            for job in jobs:
                job.fail(error)
            counts.decided.set()

        counts.updates += len(jobs)
        self._lane.submit(decide, mark(self._lane.device), failed)

    def drop_kept(self, slabs: Iterable[Slab]) -> None:
        """Forget what was kept or summed and not applied; the lanes must be idle."""
        self._squares.clear()
        self._on_device.clear()
        for slab in slabs:
            if slab.kept is not None:
                slab.kept.names.clear()

    def close(self) -> None:
        """End the threads and give the ring back; the lane must be closed."""
        if self._threads:
            self._ender()
            for thread in self._threads:
                thread.join()
        self._device.close()
        self.ring.close()

    # -- updates --------------------------------------------------------------------------------------------------

    def _job(self, slab: Slab, names: list[str], flat: list[torch.Tensor], kept: bool = False) -> Job:
        order = self._order.get(slab.name, len(self._order))
        chunk_bytes = self.chunk_bytes * (ON_DEVICE if slab.on_device else 1)
        return Job(slab, names, flat, chunk_bytes, order, kept)

    def _kept_job(self, slab: Slab) -> Job | None:
        """The update with what a slab has kept or summed; the memory is free for new gradients once it is done."""
        if slab.name in self._on_device:
            parts = self._on_device.pop(slab.name)
            job = self._job(
                slab, [n for names, _, _ in parts for n in names], [g for _, flat, _ in parts for g in flat]
            )
            for _, _, ticket in parts:
                ticket.job = job
            return job
        if slab.kept is None or not slab.kept.names:
            return None
        ranges = slab.layout.gradient_ranges
        names = [name for name in ranges if name in slab.kept.names]
        flat = [slab.kept.tensor(*ranges[name]) for name in names]
        slab.kept.names.clear()
        return self._job(slab, names, flat, kept=True)

    def _start(self, jobs: list[Job], counts: StepCounts) -> None:
        """Update as soon as all that compute has been told so far is done."""
        self.ring.use(ring_buffers(self._pool.workers, "both") if self.where == "both" else self.ring.count)
        counts.updates += len(jobs)
        computed = mark(self._lane.device, blocking=True)

        def begin() -> None:
            for job in jobs:
                job.done.begun = True
            # the host waits, so that whoever takes a chunk finds its gradient there and does not wait with it
            if computed is not None:
                computed.synchronize()
            for job in jobs:
                if counts.valid == 0:
                    counts.skipped = "no valid labels"
                    job.skip()
                else:
                    self._begin(job, counts, 1.0)

        def failed(error: BaseException) -> None:
            for job in jobs:
                job.fail(error)

        # by way of the lane, which brings the sums that a job may wait for, and the count of valid labels
        self._lane.submit(begin, on_error=failed)

    def _begin(self, job: Job, counts: StepCounts, factor: float) -> None:
        job.wait_earlier()
        job.begin(self._rule, counts.hypers, self._groups, factor)
        if not self._synchronous:
            self._queue.put(job, counts)
            return
        device = job.slab.on_device or self._queue.where == "device"
        for chunk in (*job.small, *job.large):
            if device:
                self._device.issue(job, chunk, counts)
                self._device.land()
            else:
                self._host.issue(job, chunk, counts)

    # -- keeping --------------------------------------------------------------------------------------------------

    def _keep(self, slab: Slab, names: list[str], flat: list[torch.Tensor]) -> Ticket:
        """Copy gradients into the slab's own memory, and sum up their squares."""
        kept = slab.keep_gradients(wide=False)
        if kept.wide:
            return self._sum(slab, names, flat)
        earlier = slab.pending(names)
        kept.names.update(names)
        ranges = slab.layout.gradient_ranges
        targets = [kept.tensor(*ranges[name]) for name in names]
        chunks = plan_chunks([t.numel() for t in targets], [t.dtype for t in targets], self.ring.buffer_bytes)
        values = [0.0] * len(chunks)
        countdown = Countdown(len(chunks))
        slab.add_pending(names, countdown)
        self._squares.setdefault(slab.name, []).append((countdown, values))

        def square(index: int, copied: Any) -> None:
            if copied is not None:
                copied.synchronize()
            runs = chunks[index]
            values[index] = math.fsum(
                sum_of_squares(gradient_bits(targets[r.index][r.start : r.stop])) for r in runs
            )  # fmt: skip

        def copy(held: list[torch.Tensor]) -> None:
            countdown.begun = True
            for other in earlier:
                other.wait()
            for index, chunk in enumerate(chunks):
                for run in chunk:
                    target, source = targets[run.index], held[run.index]
                    target[run.start : run.stop].copy_(source[run.start : run.stop], non_blocking=True)
                self._pool.submit(partial(square, index, mark(self._lane.device, blocking=True)), countdown)

        return self._lane.submit(partial(copy, list(flat)), mark(self._lane.device), countdown.fail)

    def _keep_on_device(self, slab: Slab, names: list[str], flat: list[torch.Tensor]) -> GradientTicket:
        parts = self._on_device.setdefault(slab.name, [])
        known = {name for others, _, _ in parts for name in others}
        assert not known & set(names), f"{slab.name}: gradients of the step before were not applied"
        squares: list[torch.Tensor] = []

        def square(held: list[torch.Tensor]) -> None:
            squares.extend(_squares_of(gradient) for gradient in held)

        issued = self._lane.submit(partial(square, list(flat)), mark(self._lane.device))
        self._squares.setdefault(slab.name, []).append((None, squares))
        ticket = GradientTicket(flat, issued)
        parts.append((names, flat, ticket))
        return ticket

    def _sum(self, slab: Slab, names: list[str], flat: list[torch.Tensor]) -> Ticket:
        """Add gradients, times the batch's valid labels, to the slab's sums."""
        kept, counts = slab.keep_gradients(wide=True), self.counts
        fresh = [name not in kept.names for name in names]
        kept.names.update(names)
        ranges = slab.layout.gradient_ranges
        targets = [kept.tensor(*ranges[name]) for name in names]
        chunks = plan_chunks([g.numel() for g in flat], [g.dtype for g in flat], self.ring.buffer_bytes)
        earlier, countdown = slab.pending(names), Countdown(len(chunks))
        slab.add_pending(names, countdown)

        def add(chunk: list[Run], gradients: list[torch.Tensor], buffer: int, copied: Any, weight: float) -> None:
            try:
                if copied is not None:
                    copied.synchronize()
                for run, gradient in zip(chunk, gradients):
                    total = bits(targets[run.index][run.start : run.stop])
                    accumulate(total, gradient_bits(gradient), fresh[run.index], weight)
            finally:
                self.ring.give(buffer, self._adversary)

        def copy(held: list[torch.Tensor]) -> None:
            countdown.begun = True
            for other in earlier:
                other.wait()
            weight = counts.weight
            for chunk in chunks:
                if slab.on_device:
                    for run in chunk:
                        _accumulate_on_device(
                            targets[run.index][run.start : run.stop], held[run.index][run.start : run.stop],
                            fresh[run.index], weight,
                        )  # fmt: skip
                    countdown.part_done()
                    continue
                buffer = self.ring.take()
                gradients = []
                for run in chunk:
                    source = held[run.index][run.start : run.stop]
                    gradients.append(self.ring.tensor(buffer, run, source.dtype))
                    gradients[-1].copy_(source, non_blocking=True)
                copied = mark(self._lane.device, blocking=True)
                self._pool.submit(partial(add, chunk, gradients, buffer, copied, weight), countdown)

        return self._lane.submit(partial(copy, list(flat)), mark(self._lane.device), countdown.fail)

    def _square_sums(self, slab: Slab, names: list[str]) -> float:
        """The sum of the squares of a slab's sums."""
        assert slab.kept is not None
        ranges = slab.layout.gradient_ranges
        targets = [slab.kept.tensor(*ranges[name]) for name in names]
        if slab.on_device:
            return math.fsum(float(_squares_of(target)) for target in targets)
        chunks = plan_chunks([t.numel() for t in targets], [t.dtype for t in targets], self.ring.buffer_bytes)
        values, countdown = [0.0] * len(chunks), Countdown(len(chunks))

        def square(index: int) -> None:
            values[index] = math.fsum(
                sum_of_squares(gradient_bits(targets[r.index][r.start : r.stop])) for r in chunks[index]
            )  # fmt: skip

        for index in range(len(chunks)):
            self._pool.submit(partial(square, index), countdown)
        countdown.wait()
        return math.fsum(values)


def _stages(where: Where) -> int:
    return 0 if where == "host" else STAGES


def _valid(window: Sequence[StepCounts]) -> float | None:
    """Valid labels of a window of micro-batches; None where one has no count."""
    known = [counts.valid for counts in window if counts.valid is not None]
    return sum(known) if len(known) == len(window) else None


def _values(parts: list[tuple[Countdown | None, Any]]) -> Iterable[float]:
    for countdown, values in parts:
        if countdown is not None:
            countdown.wait()
        yield from (float(value) for value in values)


def _squares_of(gradient: torch.Tensor) -> torch.Tensor:
    """The fp64 sum of squares, where the gradient is."""
    if gradient.device.type != "cuda":
        return torch.tensor(sum_of_squares(gradient_bits(gradient)), dtype=torch.float64)
    from oomc.runtime.triton_kernels import sum_of_squares_cuda

    return sum_of_squares_cuda(gradient)


def _accumulate_on_device(total: torch.Tensor, gradient: torch.Tensor, fresh: bool, weight: float) -> None:
    if gradient.device.type != "cuda":
        accumulate(bits(total), gradient_bits(gradient), fresh, weight)
        return
    from oomc.runtime.triton_kernels import accumulate_cuda

    accumulate_cuda(total, gradient, fresh, weight)
