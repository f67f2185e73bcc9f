"""The host's worker threads, and a countdown that says when a set of their tasks is done.

The kernels that run here are serial and release the GIL, so one Python thread a physical core is all the parallelism
there is: neither OMP_NUM_THREADS nor numba's own threads have a say.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from oomc.runtime.chaos import Adversary, attempt


def physical_cores() -> int:
    """Physical cores that this process may use: its affinity and its cgroup's CPU quota count; at least 1."""
    allowed = os.sched_getaffinity(0)
    cores = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    count = len(cores)
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, period = quota.read_text().split()
        if limit != "max":
            count = min(count, round(int(limit) / int(period)))
    return max(count, 1)


class Countdown:
    """Done when `parts` parts are; `wait` raises the first error that a part reported."""

    def __init__(self, parts: int) -> None:
        self._left = parts
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | None = None
        if parts == 0:
            self._done.set()

    def part_done(self) -> None:
        """One part less."""
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._done.set()

    def fail(self, error: BaseException) -> None:
        """End now, with an error; parts that still report are ignored."""
        with self._lock:
            if self._error is None:
                self._error = error
            self._done.set()

    def succeeded(self) -> bool:
        """Whether all parts are done, without an error."""
        return self._done.is_set() and self._error is None

    def wait(self) -> None:
        """Block until all parts are done; RuntimeError from the first error of a part."""
        self._done.wait()
        if self._error is not None:
            raise RuntimeError("a task on the host's worker threads failed") from self._error


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
        self._adversary = adversary
        self._threads = None if synchronous else ThreadPoolExecutor(self.workers, thread_name_prefix="oomc-host")

    def submit(self, task: Callable[[], None], countdown: Countdown) -> None:
        """Run `task` on a worker, in the order of submission as workers become free, then count down."""
        if self._threads is None:
            _run(task, countdown, None)
        else:
            self._threads.submit(_run, task, countdown, self._adversary)

    def close(self) -> None:
        """Finish what was submitted and end the threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)


def _run(task: Callable[[], None], countdown: Countdown, adversary: Adversary | None) -> None:
    if adversary is not None:
        adversary.delay()
    error = attempt(task)
    if error is None:
        countdown.part_done()
    else:
        countdown.fail(error)
