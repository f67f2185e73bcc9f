"""Lanes: what runs beside the compute. A lane is a thread that takes tasks in order; on CUDA it has its own stream.

    ticket = lane.submit(copy, after=mark(device))     # the lane's stream first waits for what compute has issued
    ...
    ticket.wait_on()                                   # the caller's current stream waits for the copy

On the CPU stand-in a task is done when its function returns, and a wait blocks the caller.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

import torch

from oomc.runtime.chaos import Adversary, attempt

Mark = torch.cuda.Event | None


class LaneError(RuntimeError):
    """A task of a lane failed; the cause is the task's own error."""


def mark(device: torch.device, blocking: bool = False) -> Mark:
    """An event after all that the current stream has been given so far; None on the CPU, where that is done already.

    Args:
        device: where the work is.
        blocking: whether a host thread that waits for it sleeps instead of spinning.
    """
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=blocking)
    event.record(torch.cuda.current_stream(device))
    return event


class Ticket:
    """The completion of one task of a lane."""

    def __init__(self, lane: str) -> None:
        self._lane = lane
        self._issued = threading.Event()
        self._event: Mark = None
        self._error: BaseException | None = None

    def wait_issued(self) -> None:
        """Block until the task's function has returned; LaneError if it failed."""
        self._issued.wait()
        if self._error is not None:
            raise LaneError(f"lane {self._lane}: a task failed") from self._error

    def wait_host(self) -> None:
        """Block until the task's work is done, on the device too."""
        self.wait_issued()
        if self._event is not None:
            self._event.synchronize()

    def wait_on(self) -> None:
        """Block until the task has been issued, then make the current stream wait for its work."""
        self.wait_issued()
        if self._event is not None:
            self._event.wait()

    def _finish(self, event: Mark, error: BaseException | None = None) -> None:
        self._event, self._error = event, error
        self._issued.set()


class Lane:
    """A first-in, first-out worker.

    After a task has failed, those behind it fail with the same error and are not run, since they may rely on it.

    Args:
        name: shown in errors and thread names.
        device: on CUDA, tasks run under a stream that the lane owns.
        adversary: delays each task at random if given.
        synchronous: run each task inside `submit`, on the caller's stream.
    """

    def __init__(
        self, name: str, device: torch.device, adversary: Adversary | None = None, synchronous: bool = False
    ) -> None:
        self.name = name
        self.device = device
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._state = _State(None if device.type != "cuda" or synchronous else torch.cuda.Stream(device))
        self._thread: threading.Thread | None = None
        if not synchronous:
            arguments = (self._queue, self._state, device, adversary)
            self._thread = threading.Thread(target=_work, args=arguments, name=f"oomc-{name}", daemon=True)
            self._thread.start()
            # the thread knows only the queue, so that a lane that nobody holds any more is collected, and ends it
            self._ender = weakref.finalize(self, self._queue.put, None)

    def submit(
        self, task: Callable[[], None], after: Mark = None, on_error: Callable[[BaseException], None] | None = None
    ) -> Ticket:
        """Queue `task`.

        Args:
            task: issues work on the current stream (CUDA) or does it (CPU); may block the lane.
            after: an event that the lane's stream waits for first.
            on_error: called with the error if the task fails or is not run because one before it failed.
        """
        ticket = Ticket(self.name)
        item = _Item(task, ticket, after, on_error)
        if self._thread is None:
            _execute(item, self._state, self.device)
        else:
            self._queue.put(item)
        return ticket

    def drain(self) -> None:
        """Block until all that was submitted is done; LaneError if a task failed."""
        self.submit(_nothing).wait_host()

    def close(self) -> None:
        """Finish what was submitted and end the thread; errors stay with their tickets."""
        if self._thread is not None:
            self._ender()
            self._thread.join()
        if self._state.stream is not None:
            self._state.stream.synchronize()


def _nothing() -> None:
    """The task that `drain` waits for."""


class _Item:
    """A task on its way through a lane."""

    def __init__(
        self, task: Callable[[], None], ticket: Ticket, after: Mark, on_error: Callable[[BaseException], None] | None
    ) -> None:
        self.task: Callable[[], None] | None = task
        self.ticket, self.after, self.on_error = ticket, after, on_error

    def run(self) -> BaseException | None:
        """Run the task and let go of it: whoever waits for the ticket counts on the memory that it held."""
        task, self.task = self.task, None
        assert task is not None
        return attempt(task)


class _State:
    """What a lane's thread keeps between tasks: its stream, and the error that broke it."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream
        self.error: BaseException | None = None


def _work(items: queue.SimpleQueue[_Item | None], state: _State, device: torch.device, chaos: Adversary | None) -> None:
    while True:
        item = items.get()
        if item is None:
            return
        if chaos is not None:
            chaos.delay()
        if state.stream is None:
            _execute(item, state, device)
        else:
            with torch.cuda.device(device), torch.cuda.stream(state.stream):
                _execute(item, state, device)
        del item  # a thread's last locals would keep the ticket alive until the next one comes


def _execute(item: _Item, state: _State, device: torch.device) -> None:
    if state.error is None:
        if item.after is not None:
            item.after.wait()
        state.error = item.run()
    item.task = None
    if state.error is None:
        item.ticket._finish(mark(device, blocking=True))
    else:
        if item.on_error is not None:
            item.on_error(state.error)
        item.ticket._finish(None, state.error)
