"""Records when each word of one step runs: on the CPU stand-in by the clock, on CUDA by events in the streams.

    with Recorder(program) as recorder:
        loss = recorder(runtime, *inputs)       # instead of program.step(runtime, *inputs)
    recorder.recording.events                   # (lane, name, block, start, end, bytes), seconds since the step began

While it runs, the runtime's methods and what its lanes and update workers call are wrapped; nothing is left of that
afterwards, and other steps are run as if there was no recorder. Whoever leaves the `with` waits for the step's updates.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from oomc import meta, steps
from oomc.offloadable import value_bytes
from oomc.runtime.lanes import Lane, Mark, Ticket

if TYPE_CHECKING:
    from oomc.program import Program
    from oomc.runtime.step import StepRuntime
    from oomc.runtime.update_workers import Staging
    from oomc.runtime.updates import Job, Run, StepCounts

METHODS = {
    steps.run: "run", steps.run_chunks: "run_chunks", steps.wait: "wait_weights", steps.retire: "wait_gradients",
    steps.await_update: "await_update", steps.device_weights: "device_weights", steps.fetch: "fetch",
    steps.release: "release", steps.count: "count", steps.offload: "offload", steps.update: "update",
    steps.apply: "apply", steps.retire_carried: "retire_carried", steps.store: "store", steps.discard: "discard",
    steps.restore: "restore", steps.restored: "restored", steps.rng: "rng", steps.resident: "resident",
}  # fmt: skip
"""The runtime's method that each word calls."""
SHOWN = frozenset({
    steps.run, steps.run_chunks, steps.wait, steps.retire, steps.device_weights, steps.retire_carried, steps.discard,
    steps.restored,
})  # fmt: skip
"""Words that take time of the compute lane."""
COPIES = frozenset({steps.fetch, steps.offload, steps.store, steps.restore})
"""Words whose tasks on a copy lane are copies; those of others only wait there."""
GAP = 0.002
"""Pieces of one slab's update that are less than this share of the step apart are one event."""


class Recorded(NamedTuple):
    """Something that ran, in seconds since the step began."""

    lane: str
    name: str
    block: int
    start: float
    end: float
    bytes: int


class Recording(NamedTuple):
    """One step as it ran.

    Attributes:
        step_s: seconds until the compute was done.
        events: by start.
        memory: most bytes that were held on the device during each word of the compute lane, by its node's name.
    """

    step_s: float
    events: tuple[Recorded, ...]
    memory: tuple[tuple[str, int], ...] = ()


class Recorder:
    """Runs one step of a program and records it.

    Args:
        program: with a scheduled step graph.
        peak: most device bytes that were held since it was called last; None where nobody counts them.

    Attributes:
        recording: what came out, after the `with`.
    """

    def __init__(self, program: Program, peak: Callable[[], int] | None = None) -> None:
        assert program.step is not None
        self.program = program
        self._peak = peak
        self._memory: list[tuple[str, int]] = []
        self.recording: Recording | None = None
        self._weights = {slab.name: slab.layout.weight_bytes for slab in program.slabs}
        self._blocks = {name: i for i, block in reversed(list(enumerate(program.blocks))) for name in block.slabs}
        self._raw: list[tuple[str, str, int, Any, Any, int]] = []
        self._wrapped: list[tuple[Any, str]] = []
        self._words: Iterator[fx.Node] = iter(n for n in program.step.graph.nodes if n.target in METHODS)
        self._now: fx.Node | None = None
        self._lock = threading.Lock()
        self._runtime: StepRuntime | None = None
        self._clock: _Clock | None = None
        self._end: Any = None

    def __call__(self, runtime: StepRuntime, *inputs: Any) -> Any:
        """Run the step."""
        assert self.program.step is not None
        self._runtime, self._clock = runtime, _Clock(runtime.device)
        self._wrap_all(runtime)
        loss = self.program.step(runtime, *inputs)
        self._end = self._clock.mark()
        return loss

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            if kind is None and self._runtime is not None:
                self._runtime.drain()
        finally:
            for thing, name in self._wrapped:
                delattr(thing, name)
            self._wrapped.clear()
        if kind is None and self._clock is not None:
            self._read(self._clock)
        self._runtime = None

    # -- wrapping -------------------------------------------------------------------------------------------------

    def _wrap_all(self, runtime: StepRuntime) -> None:
        for name in set(METHODS.values()):
            self._wrap(runtime, name, partial(self._word, name))
        self._wrap(runtime._h2d, "submit", self._submit)
        self._wrap(runtime._d2h, "submit", self._submit)
        if runtime._sink is not None:
            self._wrap(runtime._sink._host, "issue", self._leave)
            self._wrap(runtime._sink._host, "_apply", self._on_host)
            self._wrap(runtime._sink._device, "_in_place", self._on_device)
            self._wrap(runtime._sink._device, "_streamed", self._on_device)

    def _wrap(self, thing: Any, name: str, how: Callable[[Any, Callable[..., Any]], Callable[..., Any]]) -> None:
        method = getattr(thing, name)
        setattr(thing, name, wraps(method)(how(thing, method)))
        self._wrapped.append((thing, name))

    def _word(self, name: str, runtime: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            node = next(self._words)
            assert METHODS[node.target] == name, f"{name} is called, and not {node.name}"  # type: ignore[index]
            self._now = node
            try:
                if node.target not in SHOWN:
                    return method(*args, **kwargs)
                with self._timed("compute", node.name, meta.note(node).block):
                    result = method(*args, **kwargs)
                if self._peak is not None:  # memory is taken in the order in which work is issued, also on CUDA
                    self._memory.append((node.name, self._peak()))
                return result
            finally:
                self._now = None

        return call

    def _submit(self, lane: Lane, method: Callable[..., Ticket]) -> Callable[..., Ticket]:
        """A copy that a word gives to a lane; tasks of others, and of workers, are left alone."""

        def call(task: Callable[[], None], *args: Any, **kwargs: Any) -> Ticket:
            node = self._now
            if node is None or node.target not in COPIES or (node.target is steps.offload and node.args[4] == "update"):
                return method(task, *args, **kwargs)
            timed = self._timed(lane.name, node.name, meta.note(node).block, self._nbytes(node))

            def run() -> None:
                with timed:
                    task()

            return method(run, *args, **kwargs)

        return call

    def _nbytes(self, node: fx.Node) -> int:
        """Bytes that a copy moves."""
        assert self.program.plan is not None
        if node.target is steps.fetch:
            return self._weights[str(node.args[1])]
        copied: Any = node.args[3] if node.target is steps.offload else (node,)
        if node.target is steps.restore:
            copied = node.args[1:]
        return sum(value_bytes(self.program, each, self.program.plan.sizes) for each in copied if each is not None)

    def _leave(self, host: Any, method: Callable[..., None]) -> Callable[..., None]:
        """Gradients that are brought to the host for an update."""

        def call(job: Job, chunk: list[Run], *args: Any, **kwargs: Any) -> None:
            if job.kept:
                method(job, chunk, *args, **kwargs)
                return
            with self._timed("d2h", *self._slab(job), _gradient_bytes(job, chunk), host._stream):
                method(job, chunk, *args, **kwargs)

        return call

    def _on_host(self, host: Any, method: Callable[..., None]) -> Callable[..., None]:
        def call(job: Job, piece: list[Run], *args: Any, **kwargs: Any) -> None:
            start = time.perf_counter()
            method(job, piece, *args, **kwargs)
            self._add("host", *self._slab(job), start, time.perf_counter(), _gradient_bytes(job, piece))

        return call

    def _on_device(self, device: Any, method: Callable[..., Mark]) -> Callable[..., Mark]:
        def call(job: Job, chunk: list[Run], counts: StepCounts, staging: Staging | None = None) -> Mark:
            stream, stage = (device._stream, ()) if staging is None else (staging.stream, (staging,))
            with self._timed("device", *self._slab(job), _gradient_bytes(job, chunk), stream):
                return method(job, chunk, counts, *stage)

        return call

    def _slab(self, job: Job) -> tuple[str, int]:
        return f"update {job.slab.name}", self._blocks.get(job.slab.name, -1)

    # -- recording ------------------------------------------------------------------------------------------------

    def _timed(self, lane: str, name: str, block: int, nbytes: int = 0, stream: Any = None) -> _Timed:
        return _Timed(self, (lane, name, block, nbytes), stream)

    def _add(self, lane: str, name: str, block: int, start: Any, end: Any, nbytes: int) -> None:
        with self._lock:
            self._raw.append((lane, name, block, start, end, nbytes))

    def _read(self, clock: _Clock) -> None:
        clock.settle()
        step_s = clock.seconds(self._end)
        events = [
            Recorded(lane, name, block, clock.seconds(start), clock.seconds(end), nbytes)
            for lane, name, block, start, end, nbytes in self._raw
        ]
        self.recording = Recording(step_s, tuple(merged(events, GAP * step_s)), tuple(self._memory))
        self._raw.clear()


class _Timed:
    """Times what is inside, on a stream (None: the current one)."""

    def __init__(self, recorder: Recorder, what: tuple[str, str, int, int], stream: Any) -> None:
        self._recorder, self._what, self._stream = recorder, what, stream

    def __enter__(self) -> None:
        assert self._recorder._clock is not None
        self._start = self._recorder._clock.mark(self._stream)

    def __exit__(self, *_: object) -> None:
        assert self._recorder._clock is not None
        lane, name, block, nbytes = self._what
        self._recorder._add(lane, name, block, self._start, self._recorder._clock.mark(self._stream), nbytes)


class _Clock:
    """Marks moments, by the clock or in a stream, and reads them once all is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: Any = None
        if device.type == "cuda":
            # the clock of the streams and that of the host are read at one moment, when nothing computes
            self._began = self.mark()
            self._began.synchronize()
        self._zero = time.perf_counter()

    def mark(self, stream: Any = None) -> Any:
        """This moment; on CUDA that in which the stream (None: the current one) comes here."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait until all marks have passed."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self, moment: Any) -> float:
        """A mark in seconds since the first one."""
        if isinstance(moment, float):
            return moment - self._zero
        return float(self._began.elapsed_time(moment)) / 1e3


def _gradient_bytes(job: Job, runs: list[Run]) -> int:
    return sum((run.stop - run.start) * job.dtypes[run.index].itemsize for run in runs)


def merged(events: list[Recorded], gap: float) -> list[Recorded]:
    """Events by start; pieces of one update that overlap or nearly touch are one."""
    found: list[Recorded] = []
    last: dict[tuple[str, str], int] = {}
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        key = event.lane, event.name
        before = found[last[key]] if key in last and event.name.startswith("update ") else None
        if before is not None and event.start - before.end <= gap:
            end, nbytes = max(before.end, event.end), before.bytes + event.bytes
            found[last[key]] = before._replace(end=end, bytes=nbytes)
        else:
            last[key] = len(found)
            found.append(event)
    return found
