"""Updates under way: a queue of chunks, and the two that take from it.

    gradients --Job--> UpdateQueue --host:   gradient into a ring buffer, kernel on the pool
                                   --device: state in, kernel, state out; in place where the slab is on the device

A job is one slab's update; a chunk holds runs of its gradient's elements, of one dtype: several small parameters, or a
part of a large one. Whoever is free takes the next chunk: of the job that someone waits for, else of the slab that is
used next. An update gives the same bits wherever its chunks go.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from oomc.runtime.lanes import Mark
from oomc.runtime.optim import Array, UpdateRule, salt_of
from oomc.runtime.pool import Countdown
from oomc.runtime.slabs import Part, PartBits, Slab

Where = Literal["host", "device", "both"]
"""Where slabs of the host are updated."""
RUN_ALIGN = 512
"""Bytes: runs in a buffer start on multiples of 128 elements, which the blocks of blocked state divide."""
SMALL = 8
"""A chunk of less than 1/SMALL of the usual size goes to the host if it may: small copies do not pay."""


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


class StepCounts:
    """What one step, or one micro-batch, came to; final when its updates are done.

    Attributes:
        hypers: snapshots of the parameter groups when the step was called (`rule.hyper(group)`).
        weighted: gradients are summed times the number of valid labels.
        h2d_bytes, d2h_bytes: bytes of weights, values and gradients copied each way, counted when the copies are asked
            for.
        state_bytes: bytes of state that updates on the device moved, both ways together.
        nonfinite: gradient elements that were applied and not finite.
        offloads: times that gradients have left for a slab.
        updates: updates of slabs begun.
        applying: whether kept gradients were being taken for updates.
        stalls: seconds for which the thread that issues the compute was blocked, by what it waited for: "weights" that
            were not issued yet, "gradients" that had not left, or "values" on their way out or back.
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
        self.stalls = {"weights": 0.0, "gradients": 0.0, "values": 0.0}
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
        self.events: dict[str | int, Mark] = {}
        self.urgent = False
        self._earlier = slab.pending(names)
        slab.add_pending(names, self.done)

    def _nbytes(self, run: Run) -> int:
        return (run.stop - run.start) * self.dtypes[run.index].itemsize

    def begin(self, rule: UpdateRule, hypers: Sequence[Any], groups: dict[str, int], factor: float) -> None:
        """Count the update of each parameter and compute its constants; call when what came before is done."""
        self.rule, self.factor = rule, factor
        self.constants, self.firsts = [], []
        for name in self.names:
            param, first = self.slab.owner(name)
            steps = self.slab.count_update(name)
            self.constants.append(rule.constants(hypers[groups[param]], steps, salt_of(param)))
            self.firsts.append(first)

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

    def part_bits(self, run: Run) -> PartBits:
        """The same of a slab on the host, as the kernels take it."""
        start = self.starts[run.index]
        return self.slab.part_bits(self.rule.arrays, start + run.start, start + run.stop)

    def _index(self, run: Run) -> int:
        """The first of a run's elements, counted in the parameter."""
        return self.firsts[run.index] + run.start

    def gradient(self, run: Run) -> torch.Tensor:
        """A run of a gradient, where it is."""
        return self.gradients[run.index][run.start : run.stop]

    def apply(self, run: Run, part: PartBits, gradient: Array, counts: StepCounts) -> None:
        """Update a run's elements on the host, or on the device's stand-in."""
        constants = self.constants[run.index]
        counts.add_nonfinite(self.rule.update(*part, gradient, self.factor, constants, self._index(run)))

    def apply_cuda(self, run: Run, part: Part, gradient: torch.Tensor, nonfinite: torch.Tensor) -> None:
        """Update a run's elements on the device, on the current stream."""
        constants = self.constants[run.index]
        self.rule.update_cuda(*part, gradient, self.factor, constants, self._index(run), nonfinite)

    def read_by(self, reader: str | int, event: Mark) -> None:
        """Note that one chunk's gradient has been read once `event` has passed: the last on the reader's stream."""
        self.events[reader] = event
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
