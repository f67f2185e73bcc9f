"""Updates under way: a queue of chunks, and the two that take from it.

    gradients --Job--> UpdateQueue --host:   gradient into a ring buffer, kernel on the pool
                                   --device: state in, kernel, state out; in place where the slab is on the device

A job is one slab's update; a chunk holds runs of its gradient's elements, of one dtype: several small parameters, or a
part of a large one. Whoever is free takes the next chunk: of the job that someone waits for, else of the slab that is
used next. An update gives the same bits wherever its chunks go.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from oomc.runtime.chaos import Adversary, attempt
from oomc.runtime.lanes import Mark, mark
from oomc.runtime.layout import StateArray
from oomc.runtime.memory import HostMemory
from oomc.runtime.optim import Array, UpdateRule, salt_of
from oomc.runtime.pool import Countdown, Pool
from oomc.runtime.slabs import Part, Slab

Where = Literal["host", "device", "both"]
"""Where slabs of the host are updated."""
RUN_ALIGN = 512
"""Bytes: runs in a buffer start on multiples of 128 elements, which the blocks of blocked state divide."""
SMALL = 8
"""A chunk of less than 1/SMALL of the usual size goes to the host if it may: small copies do not pay."""
STAGES = 3
"""Chunks that are on their way through the device at once: one comes, one is updated, one goes."""


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
            offset = -(-used // RUN_ALIGN) * RUN_ALIGN
            if dtype != last or offset + dtype.itemsize > buffer_bytes:
                chunks.append([])
                offset, last = 0, dtype
            stop = min(size, start + (buffer_bytes - offset) // dtype.itemsize)
            chunks[-1].append(Run(index, start, stop, offset))
            used = offset + (stop - start) * dtype.itemsize
            start = stop
    return chunks


def chunk_bytes_of(chunk_elems: int) -> int:
    """Bytes of a chunk of so many bf16 elements."""
    return -(-2 * chunk_elems // RUN_ALIGN) * RUN_ALIGN


def bits(tensor: torch.Tensor) -> Array:
    """A host tensor as numpy array over the same memory; bf16 as int16."""
    array: Array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def gradient_bits(tensor: torch.Tensor) -> Array:
    """A host gradient as int16 or int32 bits, as the kernels take it."""
    array: Array = tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32).numpy()
    return array


class StepCounts:
    """What one step, or one micro-batch, came to; final when its updates are done.

    Attributes:
        hypers: snapshots of the parameter groups when the step was called (`rule.hyper(group)`).
        weighted: gradients are summed times the number of valid labels.
        h2d_bytes, d2h_bytes: bytes of weights and gradients copied each way, counted when the copies are asked for.
        state_bytes: bytes of state that updates on the device moved, both ways together.
        nonfinite: gradient elements that were applied and not finite.
        offloads: times that gradients have left for a slab.
        updates: updates of slabs begun.
        applying: whether kept gradients were being taken for updates.
        stalls: seconds for which the thread that issues the compute was blocked, by what it waited for: "weights" that
            were not issued yet, or "gradients" that had not left.
        valid: number of valid labels, once it has arrived; None where the loss has no count.
        counted: set when `valid` has arrived.
        grad_norm: norm of the whole gradient before clipping, where it was asked for, once `decided` is set.
        skipped: why nothing was updated, or "".
        decided: set when it is known whether kept gradients are applied.
    """

    def __init__(self, hypers: Sequence[Any] = (), weighted: bool = False) -> None:
        self.hypers = tuple(hypers)
        self.weighted = weighted
        self.h2d_bytes = 0
        self.d2h_bytes = 0
        self.state_bytes = 0
        self.nonfinite = 0
        self.offloads = 0
        self.updates = 0
        self.applying = False
        self.stalls = {"weights": 0.0, "gradients": 0.0}
        self.valid: float | None = None
        self.grad_norm: float | None = None
        self.skipped = ""
        self.decided = threading.Event()
        self.counted = threading.Event()
        self._lock = threading.Lock()

    @property
    def weight(self) -> float:
        """What gradients are multiplied by when they are summed."""
        return self.valid if self.weighted and self.valid is not None else 1.0

    @contextmanager
    def stall(self, what: str) -> Iterator[None]:
        """Count the time that is spent inside."""
        begun = time.perf_counter()
        yield
        self.stalls[what] += time.perf_counter() - begun

    def add_nonfinite(self, count: int) -> None:
        """Count from any thread."""
        if count:
            with self._lock:
                self.nonfinite += count


class Job:
    """One slab's update.

    Args:
        slab: whose parameters are updated.
        names: of trainable parameters of the slab.
        gradients: for each of them, flat, bf16 or fp32, on the device or kept on the host.
        chunk_bytes: gradient bytes of a chunk.
        order: the smaller, the sooner the slab is used next.
        kept: whether the gradients are in memory of the slab's own, and stay there.

    Attributes:
        done: counts chunks that are applied.
        read: counts chunks whose gradients have been read, or will have been when `events` have passed.
        urgent: someone waits for it.
    """

    def __init__(
        self, slab: Slab, names: Sequence[str], gradients: Sequence[torch.Tensor], chunk_bytes: int, order: int,
        kept: bool = False,
    ) -> None:  # fmt: skip
        ranges = slab.layout.gradient_ranges
        self.kept = kept
        self.slab, self.names, self.gradients, self.order = slab, list(names), list(gradients), order
        self.starts = [ranges[name][0] for name in names]
        for name, gradient in zip(names, gradients, strict=True):
            wanted = ranges[name][1] - ranges[name][0]
            assert gradient.numel() == wanted, f"gradient of {name}: {gradient.numel()} elements, not {wanted}"
            assert gradient.dtype in (torch.bfloat16, torch.float32), f"gradient of {name} is {gradient.dtype}"
        self.dtypes = [gradient.dtype for gradient in gradients]
        chunks = plan_chunks([gradient.numel() for gradient in gradients], self.dtypes, chunk_bytes)
        least = chunk_bytes // SMALL
        self.small = deque(c for c in chunks if c[-1].offset + self._nbytes(c[-1]) < least)
        self.large = deque(c for c in chunks if c[-1].offset + self._nbytes(c[-1]) >= least)
        self.done, self.read = Countdown(len(chunks)), Countdown(len(chunks))
        self.events: dict[str, Mark] = {}
        self.urgent = False
        self._earlier = slab.pending(names)
        slab.add_pending(names, self.done)

    def _nbytes(self, run: Run) -> int:
        return (run.stop - run.start) * self.dtypes[run.index].itemsize

    def begin(self, rule: UpdateRule, hypers: Sequence[Any], groups: dict[str, int], factor: float) -> None:
        """Count the update of each parameter and compute its constants; call when what came before is done."""
        self.rule, self.factor = rule, factor
        self.constants = []
        for name in self.names:
            self.slab.steps[name] += 1
            self.constants.append(rule.constants(hypers[groups[name]], self.slab.steps[name], salt_of(name)))

    def wait_earlier(self) -> None:
        """Block until all that was under way for these parameters before this job is done."""
        for countdown in self._earlier:
            countdown.wait()
        self._earlier = []

    def skip(self) -> None:
        """End without a change."""
        self._drop()
        self.done.finish()
        self.read.finish()

    def fail(self, error: BaseException) -> None:
        """End with an error, for whoever waits."""
        self._drop()
        self.done.fail(error)
        self.read.fail(error)

    def _drop(self) -> None:
        self.small.clear()
        self.large.clear()
        self.gradients.clear()

    def part(self, run: Run) -> Part:
        """Weights and state of a run's elements."""
        start = self.starts[run.index]
        return self.slab.part(self.rule.arrays, start + run.start, start + run.stop)

    def gradient(self, run: Run) -> torch.Tensor:
        """A run of a gradient, where it is."""
        return self.gradients[run.index][run.start : run.stop]

    def apply(self, run: Run, part: Part, gradient: torch.Tensor, counts: StepCounts) -> None:
        """Update a run's elements on the host, or on the device's stand-in."""
        weights, lo, state = part
        low = None if lo is None else bits(lo)
        values, constants = tuple(bits(array) for array in state), self.constants[run.index]
        found = self.rule.update(
            bits(weights), low, values, gradient_bits(gradient), self.factor, constants, run.start
        )  # fmt: skip
        counts.add_nonfinite(found)

    def apply_cuda(self, run: Run, part: Part, gradient: torch.Tensor, nonfinite: torch.Tensor) -> None:
        """Update a run's elements on the device, on the current stream."""
        constants = self.constants[run.index]
        self.rule.update_cuda(*part, gradient, self.factor, constants, run.start, nonfinite)

    def read_by(self, who: str, event: Mark) -> None:
        """Note that one chunk's gradient has been read once `event` has passed."""
        self.events[who] = event
        self.read.part_done()

    def wait_read(self) -> None:
        """Block until all reads are issued, and make the current stream wait for them; then let go of the gradients."""
        self.urgent = True
        self.read.wait()
        for event in self.events.values():
            if event is not None:
                event.wait()
        self.gradients.clear()


class UpdateQueue:
    """Jobs whose gradients are there, and whose chunks may be taken in any order.

    Args:
        where: who may take chunks of slabs on the host; those of slabs on the device go to the device.
    """

    def __init__(self, where: Where) -> None:
        self.where = where
        self._jobs: list[tuple[Job, StepCounts]] = []
        self._changed = threading.Condition()
        self._closed = False

    def put(self, job: Job, counts: StepCounts) -> None:
        """Let the job's chunks be taken."""
        with self._changed:
            self._jobs.append((job, counts))
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing comes any more; what is there is still taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self, device: bool, block: bool = True) -> tuple[Job, list[Run], StepCounts] | None:
        """The next chunk for the host or for the device; None if there is none (with `block`: and none will come)."""
        with self._changed:
            while True:
                item = self._pick(device)
                if item is not None or not block or self._closed:
                    return item
                self._changed.wait()

    def _pick(self, device: bool) -> tuple[Job, list[Run], StepCounts] | None:
        best, chunks = None, None
        for job, counts in self._jobs:
            found = self._chunks(job, device)
            if found is None:
                continue
            key = (not job.slab.on_device, not job.urgent, job.order)
            if best is None or key < best[0]:
                best, chunks = (key, job, counts), found
        if best is None or chunks is None:
            return None
        _, job, counts = best
        chunk = chunks.popleft()
        if not job.small and not job.large:
            self._jobs = [each for each in self._jobs if each[0] is not job]
        return job, chunk, counts

    def _chunks(self, job: Job, device: bool) -> deque[list[Run]] | None:
        """Those of the job's chunks that may be taken."""
        order: list[deque[list[Run]]] = []
        if not device and not job.slab.on_device and self.where != "device":
            order = [job.small, job.large]
        elif device and (job.slab.on_device or self.where == "device"):
            order = [job.large, job.small]
        elif device and self.where == "both":
            order = [job.large]
        return next((chunks for chunks in order if chunks), None)


class Ring:
    """Host buffers of `buffer_bytes` each, at least three of them, registered with CUDA if `pin`."""

    def __init__(self, count: int, buffer_bytes: int, pin: bool) -> None:
        self.count = max(3, count)
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

    def give(self, index: int, adversary: Adversary | None) -> None:
        """Free buffer `index`; the order does not matter, since all are of one size."""
        if adversary is not None:
            adversary.poison(self._tensor[index])
        self._free.put(index)

    def tensor(self, index: int, run: Run, dtype: torch.dtype) -> torch.Tensor:
        """The run's place in buffer `index`."""
        nbytes = (run.stop - run.start) * dtype.itemsize
        return self._tensor[index, run.offset : run.offset + nbytes].view(dtype)

    def close(self) -> None:
        """Give the memory back."""
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._memory.close()


class HostUpdates:
    """Takes chunks, brings their gradients to the host piece by piece, and updates them on the pool."""

    def __init__(self, ring: Ring, pool: Pool, device: torch.device, adversary: Adversary | None) -> None:
        self._ring, self._pool, self._device, self._adversary = ring, pool, device, adversary
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

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
            # a kept gradient takes a buffer too, but only so that the host does not claim more than it soon gets to
            if job.kept:
                gradients = [job.gradient(run) for run in piece]
            else:
                gradients = [self._ring.tensor(buffer, run, job.dtypes[run.index]) for run in piece]
                with _on(self._stream):
                    for run, gradient in zip(piece, gradients):
                        gradient.copy_(job.gradient(run), non_blocking=True)
                    copied = mark(self._device, blocking=True)
            task = partial(self._apply, job, piece, gradients, counts, buffer, copied)
            self._pool.submit(task, done, job.order)
            buffer = None
        job.read_by("host", copied)

    def _apply(
        self, job: Job, piece: list[Run], gradients: list[torch.Tensor], counts: StepCounts, buffer: int, copied: Mark
    ) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            for run, gradient in zip(piece, gradients):
                job.apply(run, job.part(run), gradient, counts)
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
    """Device memory through which one chunk's weights and state pass."""

    def __init__(self, arrays: Sequence[StateArray], chunk_bytes: int, device: torch.device) -> None:
        most = chunk_bytes // 2
        self._arrays = arrays
        self._weights = torch.empty(chunk_bytes, dtype=torch.uint8, device=device)
        self._lo = torch.empty(most, dtype=torch.int16, device=device)
        self._state = [torch.empty(a.elements(most), dtype=a.dtype, device=device) for a in arrays]
        self._gradient = torch.empty(chunk_bytes, dtype=torch.uint8, device=device)
        self.nonfinite = torch.zeros(1, dtype=torch.int32, device=device)
        self.found = HostMemory(4, pin=device.type == "cuda")
        self.found_tensor = self.found.tensor(torch.int32, (1,))

    @staticmethod
    def nbytes(arrays: Sequence[StateArray], chunk_bytes: int) -> int:
        """Device bytes of one."""
        most = chunk_bytes // 2
        return 3 * chunk_bytes + sum(a.dtype.itemsize * a.elements(most) for a in arrays) + 512 * (4 + len(arrays))

    def tensors(self) -> list[torch.Tensor]:
        """All of its memory."""
        return [self._weights, self._lo, *self._state, self._gradient]

    def part(self, run: Run, gradient: torch.Tensor, split: bool) -> Part:
        """The place of a run's weights and state."""
        start = run.offset // gradient.element_size()
        stop = start + run.stop - run.start
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
        self.set_stages(stages)
        self._nonfinite = torch.zeros(1, dtype=torch.int32, device=device)
        cuda = device.type == "cuda"
        self._in, self._compute, self._out = (torch.cuda.Stream(device) if cuda else None for _ in range(3))

    def set_stages(self, stages: int) -> None:
        """Have so many sets of staging memory from now on; nothing may be under way."""
        assert not self._flights, "chunks are on their way through the device"
        if stages != len(self._free):
            self._free.clear()
            self._free += [Staging(self._arrays, self._chunk_bytes, self._device) for _ in range(stages)]

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
            flight.counts.add_nonfinite(int(flight.staging.found_tensor))
            if self._adversary is not None:
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
            event = self._streamed(job, chunk, counts, staging)
            self._flights.append(_Flight(job, counts, staging, event))

    def _in_place(self, job: Job, chunk: list[Run], counts: StepCounts) -> Mark:
        with _on(self._compute):
            for run in chunk:
                if self._device.type == "cuda":
                    job.apply_cuda(run, job.part(run), job.gradient(run), self._nonfinite)
                else:
                    job.apply(run, job.part(run), job.gradient(run), counts)
            event = mark(self._device, blocking=True)
        job.read_by("device", event)
        return event

    def _streamed(self, job: Job, chunk: list[Run], counts: StepCounts, staging: Staging) -> Mark:
        parts, places, gradients = [job.part(run) for run in chunk], [], []
        with _on(self._in):
            for run, part in zip(chunk, parts):
                gradient = job.gradient(run)
                if job.kept:
                    gradient = staging.gradient(run, gradient)
                    gradient.copy_(job.gradient(run), non_blocking=True)
                places.append(staging.part(run, gradient, split=part[1] is not None))
                gradients.append(gradient)
                _copy(places[-1], part)
            del gradient
            arrived = mark(self._device)
        with _on(self._compute):
            if arrived is not None:
                arrived.wait()
            staging.nonfinite.zero_()
            for run, place, gradient in zip(chunk, places, gradients):
                if self._device.type == "cuda":
                    job.apply_cuda(run, place, gradient, staging.nonfinite)
                else:
                    job.apply(run, place, gradient, counts)
            updated = mark(self._device)
        # whoever waits for the read lets go of the gradients then, and nothing here may hold them longer
        del gradient, gradients
        job.read_by("device", updated)
        with _on(self._out):
            if updated is not None:
                updated.wait()
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
    for to, origin in pairs:
        to.copy_(origin, non_blocking=True)
    return sum(to.nbytes for to, _ in pairs)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
