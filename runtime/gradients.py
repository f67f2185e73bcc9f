"""Gradients on their way from the device into the optimizer, through a small ring of host buffers.

    device gradients --d2h lane--> a ring buffer (a chunk) --host pool--> update of the chunk's elements --> buffer free

A chunk holds runs of gradient elements of one dtype: several small parameters, or a part of a large one. The ring
bounds the host memory: when all buffers are taken, the d2h lane waits for the optimizer. The optimizer never waits for
a lane, so this cannot lock up, however small the ring.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Literal

import numpy as np
import torch

from oomc.runtime.chaos import Adversary
from oomc.runtime.kernels import accumulate
from oomc.runtime.lanes import Lane, Mark, Ticket, mark
from oomc.runtime.memory import HostMemory
from oomc.runtime.optim import Array, UpdateRule, salt_of
from oomc.runtime.pool import Countdown, Pool
from oomc.runtime.slabs import HostSlab

Mode = Literal["update", "accumulate"]
_RUN_ALIGN = 512  # bytes: runs start on multiples of 128 elements, which blocks of state share


@dataclass(frozen=True)
class Run:
    """Elements `[start, stop)` of gradient number `index`; they lie at byte `offset` of the chunk's buffer."""

    index: int
    start: int
    stop: int
    offset: int


def plan_chunks(sizes: Sequence[int], dtypes: Sequence[torch.dtype], buffer_bytes: int) -> list[list[Run]]:
    """Pack gradients of `sizes` elements into chunks of at most `buffer_bytes`, in order, one dtype a chunk."""
    chunks: list[list[Run]] = []
    used, last = buffer_bytes, None
    for index, (size, dtype) in enumerate(zip(sizes, dtypes)):
        start = 0
        while start < size:
            offset = -(-used // _RUN_ALIGN) * _RUN_ALIGN
            if dtype != last or offset + dtype.itemsize > buffer_bytes:
                chunks.append([])
                offset, last = 0, dtype
            stop = min(size, start + (buffer_bytes - offset) // dtype.itemsize)
            chunks[-1].append(Run(index, start, stop, offset))
            used = offset + (stop - start) * dtype.itemsize
            start = stop
    return chunks


class StepCounts:
    """What one step's gradients came to; final when the step's updates are done.

    Attributes:
        h2d_bytes, d2h_bytes: bytes copied each way, counted when the copies are asked for.
        nonfinite: gradient elements that were applied and not finite.
        updates: updates of slabs begun.
    """

    def __init__(self) -> None:
        self.h2d_bytes = 0
        self.d2h_bytes = 0
        self.nonfinite = 0
        self.updates = 0
        self._lock = Lock()

    def add_nonfinite(self, count: int) -> None:
        """Count from any thread."""
        if count:
            with self._lock:
                self.nonfinite += count


class GradientTicket:
    """Gradients that are leaving the device; holds them until `wait`, which must come before their memory is reused."""

    def __init__(self, ticket: Ticket, gradients: list[torch.Tensor]) -> None:
        self._ticket = ticket
        self._gradients = gradients

    def wait(self) -> None:
        """Make the current stream wait until they have left, and let go of them; LaneError if a copy failed."""
        self._ticket.wait_on()
        self._gradients.clear()


class Ring:
    """Host buffers of `buffer_bytes` each, at least two of them, registered with CUDA if `pin`."""

    def __init__(self, ring_bytes: int, buffer_bytes: int, pin: bool) -> None:
        self.count = max(2, ring_bytes // buffer_bytes)
        self.buffer_bytes = buffer_bytes
        self._memory = HostMemory(self.count * buffer_bytes, pin)
        self._tensor = self._memory.tensor(torch.uint8, (self.count, buffer_bytes))
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(self.count):
            self._free.put(index)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self._memory.nbytes

    def take(self) -> int:
        """Index of a free buffer; blocks until there is one."""
        return self._free.get()

    def give(self, index: int) -> None:
        """Free buffer `index`; the order does not matter, since all are of one size."""
        self._free.put(index)

    def tensor(self, index: int, run: Run, dtype: torch.dtype) -> torch.Tensor:
        """The run's place in buffer `index`."""
        nbytes = (run.stop - run.start) * dtype.itemsize
        return self._tensor[index, run.offset : run.offset + nbytes].view(dtype)

    def array(self, index: int, run: Run, dtype: torch.dtype) -> Array:
        """The same as int16 or int32 bits."""
        bits = np.dtype(np.int16 if dtype == torch.bfloat16 else np.int32)
        return self._memory.array(bits, index * self.buffer_bytes + run.offset, run.stop - run.start)

    def poison(self, index: int, adversary: Adversary) -> None:
        """Fill buffer `index` with NaN."""
        adversary.poison(self._tensor[index])

    def close(self) -> None:
        """Give the memory back."""
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._memory.close()


class GradientSink:
    """Takes gradients off the device and applies them.

    All calls come from the thread that issues the compute. What is given for one parameter is applied in that order.

    Args:
        rule: the optimizer.
        groups: index into the hyperparameters, for each trainable parameter's name.
        pool: where updates run.
        lane: the d2h lane.
        ring_bytes: host memory of the ring (two chunks at least).
        chunk_elems: elements of bf16 in a chunk, half as many of fp32; 4 M suit both copies and kernels.
        adversary: poisons freed ring buffers if given.
    """

    def __init__(
        self,
        rule: UpdateRule,
        groups: dict[str, int],
        pool: Pool,
        lane: Lane,
        ring_bytes: int = 256 << 20,
        chunk_elems: int = 4 << 20,
        adversary: Adversary | None = None,
    ) -> None:
        self._rule = rule
        self._groups = groups
        self._pool = pool
        self._lane = lane
        self._chunk_bytes = -(-2 * chunk_elems // _RUN_ALIGN) * _RUN_ALIGN
        self.ring = Ring(ring_bytes, self._chunk_bytes, pin=lane.device.type == "cuda")
        self._adversary = adversary
        self._hypers: tuple[Any, ...] = ()
        self.counts = StepCounts()

    def begin_step(self, hypers: Sequence[Any], counts: StepCounts) -> None:
        """From now on use `hypers` (a snapshot for each parameter group), and count in `counts`."""
        self._hypers = tuple(hypers)
        self.counts = counts

    def offload(self, slab: HostSlab, grads: Sequence[tuple[str, torch.Tensor | None]], mode: Mode) -> GradientTicket:
        """Copy gradients off the device and apply them.

        Args:
            slab: the parameters' slab.
            grads: names of trainable parameters with their gradients: bf16 or fp32, of the parameter's shape, on the
                device; best contiguous, since one that is not is made so here, on the device. None leaves the parameter
                and its state as they are, as in torch.
            mode: "update" the parameters, or "accumulate" in fp32 until `update_accumulated`.
        """
        names = [name for name, grad in grads if grad is not None]
        flat = [grad.detach().contiguous().view(-1) for _, grad in grads if grad is not None]
        ranges = slab.layout.gradient_ranges
        for name, grad in zip(names, flat):
            start, stop = ranges[name]
            assert grad.numel() == stop - start, f"gradient of {name}: {grad.numel()} elements, not {stop - start}"
            assert grad.dtype in (torch.bfloat16, torch.float32), f"gradient of {name} is {grad.dtype}"
        starts = [ranges[name][0] for name in names]
        dtypes = [grad.dtype for grad in flat]
        apply = self._updates(slab, names, starts) if mode == "update" else _accumulations(slab, names, starts)
        chunks = plan_chunks([grad.numel() for grad in flat], dtypes, self._chunk_bytes)
        self.counts.d2h_bytes += sum(grad.nbytes for grad in flat)
        earlier, countdown = slab.pending(names), Countdown(len(chunks))
        slab.add_pending(names, countdown)

        def copy(held: list[torch.Tensor]) -> None:
            for other in earlier:
                other.wait()
            for chunk in chunks:
                buffer = self.ring.take()
                for run in chunk:
                    target = self.ring.tensor(buffer, run, dtypes[run.index])
                    target.copy_(held[run.index][run.start : run.stop], non_blocking=True)
                copied = mark(self._lane.device, blocking=True)
                self._pool.submit(partial(self._apply, chunk, dtypes, buffer, copied, apply), countdown)

        ticket = self._lane.submit(partial(copy, list(flat)), mark(self._lane.device), countdown.fail)
        return GradientTicket(ticket, flat)

    def update_accumulated(self, slab: HostSlab, factor: float = 1.0) -> None:
        """Update what has been accumulated in `slab`, times `factor`; the next accumulation starts afresh."""
        ranges = slab.layout.gradient_ranges
        names = [name for name in ranges if name in slab.accumulated]
        slab.accumulated.clear()
        starts = [ranges[name][0] for name in names]
        sizes = [ranges[name][1] - ranges[name][0] for name in names]
        apply = self._updates(slab, names, starts, factor)
        # no buffer is used: the chunks only divide the work
        chunks = plan_chunks(sizes, [torch.float32] * len(names), 2 * self._chunk_bytes)
        earlier, countdown = slab.pending(names), Countdown(len(chunks))
        slab.add_pending(names, countdown)
        gradient = slab.accumulator_array.view(np.int32)

        def update(chunk: list[Run]) -> None:
            for run in chunk:
                start = starts[run.index]
                apply(run, gradient[start + run.start : start + run.stop])

        def submit() -> None:
            for other in earlier:
                other.wait()
            for chunk in chunks:
                self._pool.submit(partial(update, chunk), countdown)

        # by way of the lane, which brings the accumulations that this must wait for
        self._lane.submit(submit, on_error=countdown.fail)

    def close(self) -> None:
        """Give the ring back."""
        self.ring.close()

    def _updates(
        self, slab: HostSlab, names: Iterable[str], starts: Sequence[int], factor: float = 1.0
    ) -> Callable[[Run, Array], None]:
        rule, counts, constants = self._rule, self.counts, []
        slab.add_state(rule.arrays)
        counts.updates += 1
        for name in names:
            slab.steps[name] += 1
            constants.append(rule.constants(self._hypers[self._groups[name]], slab.steps[name], salt_of(name)))
        split_stop = slab.layout.bf16.elements
        states = [(array, slab.state_arrays[array.name]) for array in rule.arrays]
        hi, lo_all, fp32 = slab.hi_array, slab.lo_array, slab.fp32_array

        def apply(run: Run, gradient: Array) -> None:
            start, stop = starts[run.index] + run.start, starts[run.index] + run.stop
            if start < split_stop:
                weights, lo = hi[start:stop], lo_all[start:stop]
            else:
                weights, lo = fp32[start - split_stop : stop - split_stop], None
            state = tuple(memory[array.span(start, stop)] for array, memory in states)
            counts.add_nonfinite(rule.update(weights, lo, state, gradient, factor, constants[run.index], run.start))

        return apply

    def _apply(
        self,
        chunk: list[Run],
        dtypes: list[torch.dtype],
        buffer: int,
        copied: Mark,
        apply: Callable[[Run, Array], None],
    ) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            for run in chunk:
                apply(run, self.ring.array(buffer, run, dtypes[run.index]))
        finally:
            if self._adversary is not None:
                self.ring.poison(buffer, self._adversary)
            self.ring.give(buffer)


def _accumulations(slab: HostSlab, names: Sequence[str], starts: Sequence[int]) -> Callable[[Run, Array], None]:
    slab.add_accumulator()
    fresh = [name not in slab.accumulated for name in names]
    slab.accumulated.update(names)
    total = slab.accumulator_array

    def apply(run: Run, gradient: Array) -> None:
        start = starts[run.index]
        accumulate(total[start + run.start : start + run.stop], gradient, fresh[run.index])

    return apply
