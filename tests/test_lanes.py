"""Lanes, the host pool and the adversary: order, errors, shutdown, nothing kept alive."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from oomc.runtime.chaos import Adversary
from oomc.runtime.lanes import Lane, LaneError
from oomc.runtime.pool import Countdown, Pool, physical_cores

CPU = torch.device("cpu")


def explode() -> None:
    held = torch.ones(1000)
    raise ZeroDivisionError(f"boom {held.numel()}")


@pytest.mark.parametrize("synchronous", [False, True])
def test_tasks_run_in_order(synchronous: bool) -> None:
    lane = Lane("h2d", CPU, Adversary(0), synchronous)
    seen: list[int] = []
    tickets = [lane.submit(lambda i=i: seen.append(i)) for i in range(20)]  # type: ignore[misc]
    tickets[-1].wait_on()
    assert seen == list(range(20))
    for ticket in tickets:
        ticket.wait_host()
    lane.close()
    lane.close()


@pytest.mark.parametrize("synchronous", [False, True])
def test_an_error_surfaces_at_each_wait_and_stops_the_lane(synchronous: bool) -> None:
    lane = Lane("d2h", CPU, synchronous=synchronous)
    reported: list[BaseException] = []
    ran = threading.Event()
    bad = lane.submit(explode, on_error=reported.append)
    after = lane.submit(ran.set, on_error=reported.append)
    for ticket in (bad, bad, after):
        with pytest.raises(LaneError, match="lane d2h") as caught:
            ticket.wait_host()
        cause = caught.value.__cause__
        assert isinstance(cause, ZeroDivisionError)
        frames = []
        trace = cause.__traceback__
        while trace is not None:
            frames.append(trace.tb_frame)
            trace = trace.tb_next
        assert frames[-1].f_code.co_name == "explode", "the traceback leads to the task"
        assert "held" not in frames[-1].f_locals, "and keeps no tensors alive"
    assert len(reported) == 2
    assert not ran.is_set()
    lane.close()


def test_nothing_of_a_finished_task_stays_alive() -> None:
    lane = Lane("h2d", CPU)
    tensor = torch.ones(10)
    alive = weakref.ref(tensor)
    lane.submit(lambda t=tensor: t.add_(1)).wait_host()  # type: ignore[misc]
    del tensor
    deadline = time.monotonic() + 5
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert alive() is None
    lane.close()


def test_a_forgotten_lane_ends_its_thread() -> None:
    lane = Lane("forgotten", CPU)
    thread = lane._thread
    assert thread is not None
    del lane
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_countdown_and_pool() -> None:
    pool = Pool(3, Adversary(1))
    seen: list[int] = []
    countdown = Countdown(10)
    for i in range(10):
        pool.submit(lambda i=i: seen.append(i), countdown)  # type: ignore[misc]
    countdown.wait()
    assert sorted(seen) == list(range(10))
    assert countdown.succeeded()
    failing = Countdown(2)
    pool.submit(explode, failing)
    pool.submit(lambda: None, failing)
    with pytest.raises(RuntimeError) as caught:
        failing.wait()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not failing.succeeded()
    Countdown(0).wait()
    pool.close()


def test_the_pool_does_not_listen_to_omp_num_threads() -> None:
    code = "from oomc.runtime.pool import Pool; print(Pool().workers)"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(output.stdout) == physical_cores()


def test_cores_follow_the_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert physical_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_poison_is_nan() -> None:
    buffer = torch.zeros(64, dtype=torch.uint8)
    Adversary(0).poison(buffer)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert buffer.view(dtype).isnan().all()


def test_the_same_seed_gives_the_same_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for _ in range(2):
        adversary = Adversary(7)
        for _ in range(50):
            adversary.delay()
    assert slept[: len(slept) // 2] == slept[len(slept) // 2 :]
    assert all(0 < s <= 0.002 for s in slept)
