"""The two that take chunks of updates from the queue: the host's workers, and the device.

host:    gradient into a ring buffer, kernel on the pool
device:  weights and state in, kernel, weights and state out; in place where the slab is on the device
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from oomc import private
from oomc.runtime.chaos import Adversary, attempt
from oomc.runtime.kernels import Array
from oomc.runtime.lanes import Mark, mark
from oomc.runtime.layout import StateArray
from oomc.runtime.memory import HostMemory
from oomc.runtime.pool import Countdown, Pool
from oomc.runtime.slabs import Part, bits_of, gradient_bits
from oomc.runtime.updates import Job, Run, StepCounts, UpdateQueue, plan_chunks

STAGES = 3
"""Chunks that are on their way through the device at once: one comes, one is updated, one goes."""


class Ring:
    """Host buffers of `buffer_bytes` each, at least three of them, registered with CUDA if `pin`."""

    def __init__(self, count: int, buffer_bytes: int, pin: bool) -> None:
        self.count = max(3, count)
        self.buffer_bytes = buffer_bytes
        self._memory = HostMemory(self.count * buffer_bytes, pin)
        self._tensor = self._memory.tensor(torch.uint8, (self.count, buffer_bytes))
        self._array = self._tensor.numpy()
        self._views: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(self.count):
            self._free.put(index)
        self._resting: list[int] = []
        self._rest = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self._memory.nbytes

    def use(self, count: int) -> None:
        """Let `count` buffers, at least three, be out at once from now on; others rest, once they are given back."""
        with self._lock:
            self._rest = max(0, self.count - max(3, count))
            while len(self._resting) > self._rest:
                self._free.put(self._resting.pop())
            with suppress(queue.Empty):
                while len(self._resting) < self._rest:
                    self._resting.append(self._free.get_nowait())

    def take(self) -> int:
        """Index of a free buffer; blocks until there is one."""
        return self._free.get()

    def give(self, index: int, adversary: Adversary | None) -> None:
        """Free buffer `index`; the order does not matter, since all are of one size."""
        if adversary is not None:
            adversary.poison(self._tensor[index])
        with self._lock:
            if len(self._resting) < self._rest:
                self._resting.append(index)
            else:
                self._free.put(index)

    def tensor(self, index: int, run: Run, dtype: torch.dtype) -> torch.Tensor:
        """The run's place in buffer `index`; there are few sizes of runs, so that all places are remembered."""
        nbytes = (run.stop - run.start) * dtype.itemsize
        key = index, run.offset, nbytes, dtype
        if key not in self._views:
            self._views[key] = self._tensor[index, run.offset : run.offset + nbytes].view(dtype)
        return self._views[key]

    def bits(self, index: int, run: Run, dtype: torch.dtype) -> Array:
        """The same as the kernels take it."""
        nbytes = (run.stop - run.start) * dtype.itemsize
        bits: Array = self._array[index, run.offset : run.offset + nbytes]
        return bits.view(np.int16 if dtype == torch.bfloat16 else np.int32)

    def close(self) -> None:
        """Give the memory back."""
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._array = self._tensor.numpy()
        self._views.clear()
        self._memory.close()


class HostUpdates:
    """Takes chunks, brings their gradients to the host piece by piece, and updates them on the pool."""

    def __init__(self, ring: Ring, pool: Pool, device: torch.device, adversary: Adversary | None) -> None:
        self._ring, self._pool, self._device, self._adversary = ring, pool, device, adversary
        self._stream = _stream(device)

    def work(self, chunks: UpdateQueue) -> None:
        """Take chunks until the queue is closed."""
        while True:
            # a buffer first: no chunk is claimed for the host before the host can begin with it
            buffer = self._ring.take()
            item = chunks.take(device=False)
            if item is None:
                self._ring.give(buffer, None)
                return
            if self._adversary is not None:
                self._adversary.delay()
            error = attempt(partial(self.issue, *item, buffer))
            if error is not None:
                item[0].fail(error)
            del item  # a thread's last locals would keep gradients alive until the next ones come

    def issue(self, job: Job, chunk: list[Run], counts: StepCounts, buffer: int | None = None) -> None:
        """Hand a chunk to the pool in pieces that fit a ring buffer each; `buffer` is the first one."""
        pieces = _pieces(chunk, job.dtypes, self._ring.buffer_bytes)
        done = Countdown(len(pieces), whole=job.done)
        copied: Mark = None
        for piece in pieces:
            if buffer is None:
                buffer = self._ring.take()
            try:
                gradients, copied = self._bring(job, piece, buffer)
            except BaseException:
                self._ring.give(buffer, None)
                raise
            task = partial(self._apply, job, piece, gradients, counts, buffer, copied)
            self._pool.submit(task, done, job.order)
            buffer = None
        job.read_by("host", copied)

    def _bring(self, job: Job, piece: list[Run], buffer: int) -> tuple[list[Array], Mark]:
        """A piece's gradients on the host, and what they have come with."""
        # a kept gradient takes a buffer too, but only so that the host does not claim more than it soon gets to
        if job.kept:
            return [gradient_bits(job.gradient(run)) for run in piece], None
        with _on(self._stream):
            for run in piece:
                place = self._ring.tensor(buffer, run, job.dtypes[run.index])
                place.copy_(job.gradient(run), non_blocking=True)
            copied = mark(self._device, blocking=True)
        return [self._ring.bits(buffer, run, job.dtypes[run.index]) for run in piece], copied

    def _apply(
        self, job: Job, piece: list[Run], gradients: list[Array], counts: StepCounts, buffer: int, copied: Mark
    ) -> None:
        try:
            if copied is not None and not copied.query():
                copied.synchronize()
            for run, gradient in zip(piece, gradients):
                job.apply(run, job.part_bits(run), gradient, counts)
        finally:
            self._ring.give(buffer, self._adversary)


def _pieces(chunk: list[Run], dtypes: Sequence[torch.dtype], buffer_bytes: int) -> list[list[Run]]:
    """A chunk's runs, cut so that each piece fits a buffer."""
    cut = plan_chunks([run.stop - run.start for run in chunk], [dtypes[run.index] for run in chunk], buffer_bytes)

    def part(run: Run) -> Run:
        whole = chunk[run.index]
        return Run(whole.index, whole.start + run.start, whole.start + run.stop, run.offset)

    return [[part(run) for run in piece] for piece in cut]


class Staging:
    """Device memory through which one chunk's weights and state pass, and the stream on which they do.

    A chunk's copies and kernel follow each other on one stream, so that nothing need wait for events between them;
    those of the other stages run beside them.
    """

    def __init__(
        self, arrays: Sequence[StateArray], chunk_bytes: int, device: torch.device, stream: torch.cuda.Stream | None
    ) -> None:
        most = chunk_bytes // 2
        self._arrays, self.stream = arrays, stream
        self._weights = torch.empty(chunk_bytes, dtype=torch.uint8, device=device)
        self._lo = torch.empty(most, dtype=torch.int16, device=device)
        self._state = [torch.empty(a.elements(most), dtype=a.dtype, device=device) for a in arrays]
        self._gradient = torch.empty(chunk_bytes, dtype=torch.uint8, device=device)
        self._parts: dict[tuple[int, int, bool], Part] = {}
        self.nonfinite = torch.zeros(1, dtype=torch.int32, device=device)
        self.found = HostMemory(4, pin=device.type == "cuda")
        self.found_tensor = self.found.tensor(torch.int32, (1,))
        self.found_array = self.found_tensor.numpy()

    @staticmethod
    def nbytes(arrays: Sequence[StateArray], chunk_bytes: int) -> int:
        """Device bytes of one."""
        most = chunk_bytes // 2
        return 3 * chunk_bytes + sum(a.dtype.itemsize * a.elements(most) for a in arrays) + 512 * (4 + len(arrays))

    def tensors(self) -> list[torch.Tensor]:
        """All of its memory."""
        return [self._weights, self._lo, *self._state, self._gradient]

    def part(self, run: Run, gradient: torch.Tensor, split: bool) -> Part:
        """The place of a run's weights and state; there are few sizes of runs, so that all places are remembered."""
        start = run.offset // gradient.element_size()
        stop = start + run.stop - run.start
        if (start, stop, split) not in self._parts:
            self._parts[start, stop, split] = self._part(start, stop, split)
        return self._parts[start, stop, split]

    def _part(self, start: int, stop: int, split: bool) -> Part:
        width, dtype = (2, torch.int16) if split else (4, torch.float32)
        weights = self._weights[width * start : width * stop].view(dtype)
        state = tuple(s[a.span(start, stop)] for a, s in zip(self._arrays, self._state))
        return weights, self._lo[start:stop] if split else None, state

    def gradient(self, run: Run, source: torch.Tensor) -> torch.Tensor:
        """The place of a run of a gradient that comes from the host."""
        return self._gradient[run.offset : run.offset + source.nbytes].view(source.dtype)


@dataclass
class _Flight:
    """A chunk on its way through the device, until `event` has passed."""

    job: Job
    counts: StepCounts
    staging: Staging | None
    event: Mark


class DeviceUpdates:
    """Takes chunks and updates them on the device: in place, or with weights and state streamed through.

    Args:
        arrays: of the update rule.
        device: where.
        chunk_bytes: gradient bytes of a chunk.
        stages: sets of staging memory; 0 where only slabs on the device are updated here.
        adversary: delays chunks and poisons staging memory if given.
    """

    def __init__(
        self, arrays: Sequence[StateArray], device: torch.device, chunk_bytes: int, stages: int,
        adversary: Adversary | None,
    ) -> None:  # fmt: skip
        self._device, self._adversary = device, adversary
        self._arrays, self._chunk_bytes = arrays, chunk_bytes
        self._free: list[Staging] = []
        self._flights: deque[_Flight] = deque()
        # once: torch hands out the same few streams in turn, and one that a lane has too would wait with it
        self._stream, *self._streams = (_stream(device) for _ in range(1 + STAGES))
        self.set_stages(stages)
        self._nonfinite = torch.zeros(1, dtype=torch.int32, device=device)

    def set_stages(self, stages: int) -> None:
        """Have so many sets of staging memory from now on; nothing may be under way."""
        assert not self._flights, "chunks are on their way through the device"
        if stages != len(self._free):
            self._free.clear()
            streams = self._streams[:stages]
            self._free += [Staging(self._arrays, self._chunk_bytes, self._device, stream) for stream in streams]

    def work(self, chunks: UpdateQueue) -> None:
        """Take chunks until the queue is closed."""
        while True:
            if len(self._flights) == STAGES:
                self.land()
            item = chunks.take(device=True, block=not self._flights)
            if item is not None:
                if self._adversary is not None:
                    self._adversary.delay()
                error = attempt(partial(self.issue, *item))
                if error is not None:
                    item[0].fail(error)
            elif self._flights:
                self.land()
            else:
                return
            del item

    def land(self) -> None:
        """Wait for the oldest chunk under way."""
        flight = self._flights.popleft()
        try:
            if flight.event is not None:
                flight.event.synchronize()
        except RuntimeError as error:
            flight.job.fail(error)
            return
        if flight.staging is not None:
            flight.counts.add_nonfinite(int(flight.staging.found_array[0]))
            if self._adversary is not None:
                with _on(flight.staging.stream):
                    for tensor in flight.staging.tensors():
                        self._adversary.poison(tensor.view(torch.uint8))
            self._free.append(flight.staging)
        flight.job.done.part_done()

    def issue(self, job: Job, chunk: list[Run], counts: StepCounts) -> None:
        """Begin to update a chunk."""
        if job.slab.on_device:
            event = self._in_place(job, chunk, counts)
            self._flights.append(_Flight(job, counts, None, event))
        else:
            staging = self._free.pop()
            try:
                event = self._streamed(job, chunk, counts, staging)
            except BaseException:
                if staging.stream is not None:
                    staging.stream.synchronize()
                self._free.append(staging)
                raise
            self._flights.append(_Flight(job, counts, staging, event))

    def _in_place(self, job: Job, chunk: list[Run], counts: StepCounts) -> Mark:
        with _on(self._stream):
            for run in chunk:
                if self._device.type == "cuda":
                    job.apply_cuda(run, job.part(run), job.gradient(run), self._nonfinite)
                else:
                    job.apply(run, job.part_bits(run), gradient_bits(job.gradient(run)), counts)
            event = mark(self._device, blocking=True)
        job.read_by("device", event)
        return event

    def _streamed(self, job: Job, chunk: list[Run], counts: StepCounts, staging: Staging) -> Mark:
        parts, places = [job.part(run) for run in chunk], []
        with _on(staging.stream):
            staging.nonfinite.zero_()
            for run, part in zip(chunk, parts):
                gradient = job.gradient(run)
                if job.kept:
                    gradient = staging.gradient(run, gradient)
                    gradient.copy_(job.gradient(run), non_blocking=True)
                place = staging.part(run, gradient, split=part[1] is not None)
                places.append(place)
                _copy(place, part)
                if self._device.type == "cuda":
                    job.apply_cuda(run, place, gradient, staging.nonfinite)
                else:
                    job.apply(run, bits_of(place), gradient_bits(gradient), counts)
            # whoever waits for the read lets go of the gradients then, and nothing here may hold them longer
            del gradient
            job.read_by(id(staging), mark(self._device))
            for place, part in zip(places, parts):
                counts.state_bytes += 2 * _copy(part, place)
            staging.found_tensor.copy_(staging.nonfinite, non_blocking=True)
            return mark(self._device, blocking=True)

    def close(self) -> None:
        """Let go of the staging memory."""
        self._free.clear()


def _copy(target: Part, source: Part) -> int:
    """Copy weights, `lo` and state; the bytes copied."""
    pairs = [(target[0], source[0]), *zip(target[2], source[2])]
    if target[1] is not None and source[1] is not None:
        pairs.append((target[1], source[1]))
    private.copy_all([to for to, _ in pairs], [origin for _, origin in pairs])
    return sum(to.nbytes for to, _ in pairs)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
