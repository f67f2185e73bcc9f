"""The host's worker threads, and a countdown that says when a set of their tasks is done.

The kernels that run here are serial and release the GIL, so one Python thread a physical core is all the parallelism
there is: neither OMP_NUM_THREADS nor numba's own threads have a say.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from oomc.limits import cpu_quota
from oomc.runtime.chaos import Adversary, attempt

NICE = 10
"""Scheduling priority of the workers: below that of other threads of the process."""


def physical_cores() -> int:
    """Physical cores that this process may use: its affinity and its cgroup's CPU quota count; at least 1."""
    allowed = os.sched_getaffinity(0)
    cores = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    count = len(cores)
    quota = cpu_quota()
    return max(count if quota is None else min(count, round(quota)), 1)


class Countdown:
    """Done when `parts` parts are; `wait` raises the first error that a part reported.

    With `whole`, it is itself one part of that countdown.

    Attributes:
        begun: set by whoever is to bring its parts, once it has been told so; else nobody ever will (`abandon`).
    """

    def __init__(self, parts: int, whole: Countdown | None = None) -> None:
        self.begun = False
        self._left = parts
        self._whole = whole
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | None = None
        if parts == 0:
            self._end()

    def part_done(self) -> None:
        """One part less."""
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._end()

    def _end(self) -> None:
        self._done.set()
        if self._whole is not None:
            self._whole.part_done()

    def finish(self) -> None:
        """End now, without an error; parts that still report are ignored."""
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """End now, with an error; parts that still report are ignored."""
        with self._lock:
            if self._error is None:
                self._error = error
            self._done.set()
        if self._whole is not None:
            self._whole.fail(error)

    def abandon(self) -> None:
        """End it if nobody has begun with it: who made it was interrupted before it could be handed over."""
        if not self.begun:
            self.finish()

    def succeeded(self) -> bool:
        """Whether all parts are done, without an error."""
        return self._done.is_set() and self._error is None

    def wait(self) -> None:
        """Block until all parts are done; RuntimeError from the first error of a part."""
        self._done.wait()
        if self._error is not None:
            raise RuntimeError("a task on the host's worker threads failed") from self._error


class Copying(Countdown):
    """Something only reads meanwhile: what writes must wait, but what reads need not."""

    def abandon(self) -> None:
        """Whoever copies ends it."""


class _Tasks:
    """What the threads of a pool share: a heap of tasks, smallest priority first, in order of submission within one."""

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, Callable[[], None], Countdown]] = []
        self.numbers = itertools.count()
        self.changed = threading.Condition()
        self.closed = False

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class Pool:
    """Worker threads for short tasks that release the GIL.

    Args:
        workers: number of threads; None for one a physical core.
        adversary: delays each task at random if given.
        synchronous: run each task inside `submit`.
    """

    def __init__(
        self, workers: int | None = None, adversary: Adversary | None = None, synchronous: bool = False
    ) -> None:
        self.workers = physical_cores() if workers is None else workers
        self._tasks = _Tasks()
        self._threads: list[threading.Thread] = []
        if not synchronous:
            for index in range(self.workers):
                thread = threading.Thread(
                    target=_work, args=(self._tasks, adversary), name=f"oomc-host-{index}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
            # the threads know only the tasks, so that a pool that nobody holds any more is collected, and ends them
            self._ender = weakref.finalize(self, self._tasks.close)

    def submit(self, task: Callable[[], None], countdown: Countdown, priority: int = 0) -> None:
        """Run `task` on a worker, the smallest `priority` first and then in order of submission; then count down."""
        if not self._threads:
            _run(task, countdown)
            return
        with self._tasks.changed:
            heapq.heappush(self._tasks.heap, (priority, next(self._tasks.numbers), task, countdown))
            self._tasks.changed.notify()

    def close(self) -> None:
        """Finish what was submitted and end the threads."""
        if self._threads:
            self._ender()
            for thread in self._threads:
                thread.join()


def is_worker() -> bool:
    """Whether this is a thread of oomc's own, which can wait for none of the others."""
    return threading.current_thread().name.startswith("oomc-")


def _work(tasks: _Tasks, adversary: Adversary | None) -> None:
    with contextlib.suppress(OSError):
        # behind the threads that issue compute and copies, which need little and must not wait for a core
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    while True:
        with tasks.changed:
            while not tasks.heap and not tasks.closed:
                tasks.changed.wait()
            if not tasks.heap:
                return
            item = heapq.heappop(tasks.heap)
        if adversary is not None:
            adversary.delay()
        _run(item[2], item[3])
        del item  # a thread's last locals would keep the task's memory alive until the next one comes


def _run(task: Callable[[], None], countdown: Countdown) -> None:
    error = attempt(task)
    if error is None:
        countdown.part_done()
    else:
        countdown.fail(error)
