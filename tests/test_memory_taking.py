"""Host memory taken by many threads: what is touched, registered, shown, refused and given back."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from oomc.runtime import cores, memory
from oomc.runtime.memory import HostMemory, Preparation, give_back_free, take
from oomc.runtime.meter import host_bytes
from oomc.runtime.pool import physical_cores
from tests.helpers import own_threads

PAGE = os.sysconf("SC_PAGE_SIZE")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Driver:
    """Stands in for CUDA's runtime: notes what is registered, refuses what is larger than `limit`."""

    def __init__(self, limit: int = 1 << 62) -> None:
        self.limit = limit
        self.live: dict[int, int] = {}
        self.threads: set[str] = set()

    def __call__(self) -> Driver:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.threads.add(threading.current_thread().name)
        if nbytes > self.limit:
            return 2
        self.live[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.live[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(memory, "_clear_last_error", lambda: None)
    monkeypatch.setattr(memory, "_pin_warning", threading.Event())
    yield driver
    gc.collect()  # what a failed test left registered is unregistered here, not with the real runtime


@pytest.mark.parametrize("piece", [PAGE, 3 * PAGE, 64 << 20])
def test_sizes_are_exact_and_every_page_is_there(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PIECE", piece)
    sizes = [0, 1, PAGE - 1, PAGE, 5 * PAGE + 7]
    memories = take(sizes, workers=3)
    assert [m.nbytes for m in memories] == sizes
    assert all(m.ready and not m.pinned for m in memories)
    for size, taken in zip(sizes, memories):
        whole = taken.tensor(torch.uint8, (size,))
        assert whole.numel() == size
        assert not whole.any()
        if size:
            assert whole.data_ptr() % PAGE == 0
            whole.fill_(7)


def test_preparing_touches_the_pages_and_no_more() -> None:
    size = 96 << 20
    lazy = HostMemory(size, now=False)
    before = host_bytes()
    with Preparation(size) as preparation:
        preparation.prepare([lazy])
        taken = host_bytes() - before
        assert 0.98 * size <= taken <= size + (8 << 20)
        lazy.tensor(torch.uint8, (size,)).fill_(3)
        preparation.prepare([lazy])  # ready: left alone
    assert lazy.tensor(torch.uint8, (size,)).eq(3).all()


@pytest.mark.parametrize("closed", [True, False])
def test_closing_or_forgetting_gives_everything_back(closed: bool, driver: Driver) -> None:
    size = 64 << 20
    before = host_bytes()
    memories = take([size, size], pin=True)
    assert sorted(driver.live.values()) == [size, size]
    tensor = memories[0].tensor(torch.uint8, (size,))
    assert host_bytes() - before > 1.9 * size
    gone = weakref.ref(memories[0])
    if closed:
        for taken in memories:
            taken.close()
            taken.close()
        assert not driver.live, "closed: pageable, whoever still looks at it"
    del memories
    if closed:
        taken = HostMemory(0)
    gc.collect()
    assert gone() is None
    assert len(driver.live) == (0 if closed else 1), "a tensor keeps its memory, and not closed it stays registered"
    assert tensor.sum() == 0
    del tensor
    gc.collect()
    assert not driver.live
    assert host_bytes() - before < 0.2 * size


def test_each_memory_is_one_registration_made_by_workers(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PIECE", PAGE)
    sizes = [7 * PAGE, 1, 3 * PAGE, 0]
    memories = take(sizes, pin=True, workers=4)
    addresses = [m.tensor(torch.uint8, (m.nbytes,)).data_ptr() for m in memories[:3]]
    assert driver.live == dict(zip(addresses, sizes))
    assert [m.pinned for m in memories] == [True, True, True, False]
    assert all(name.startswith("oomc-memory") for name in driver.threads)


def test_a_refusal_is_one_warning_and_pageable_memory(driver: Driver) -> None:
    driver.limit = PAGE
    with pytest.warns(UserWarning, match="refused to register") as caught:
        memories = take([4 * PAGE, PAGE, 5 * PAGE], pin=True, workers=2)
    assert len(caught) == 1
    assert [m.pinned for m in memories] == [False, True, False]
    assert all(m.tensor(torch.uint8, (m.nbytes,)).fill_(1).sum() == m.nbytes for m in memories)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take([4 * PAGE], pin=True)


def test_touching_lets_go_of_the_gil() -> None:
    """With no forced switches, another thread counts on only when this one gives the GIL away by itself."""
    count, stop = 0, threading.Event()

    def work() -> None:
        nonlocal count
        while not stop.is_set():
            count += 1
            time.sleep(0)

    taken = HostMemory(memory._PIECE, now=False)
    thread = threading.Thread(target=work)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        before = count
        memory._touch(taken, 0, itertools.count(1), 1, None)
        after = count
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert after > before
    assert taken.ready


@pytest.mark.parametrize(("tty", "size", "shown"), [(True, PAGE, True), (False, PAGE, False), (True, PAGE - 1, False)])
def test_a_bar_above_a_size_on_a_terminal(
    tty: bool, size: int, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "BAR_FROM", PAGE - 1)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: tty, raising=False)
    take([size])
    assert ("host memory" in capsys.readouterr().err) == shown


def test_the_bar_counts_bytes_over_several_calls(capsys: pytest.CaptureFixture[str]) -> None:
    with Preparation(4 << 20, progress=True) as preparation:
        for _ in range(4):
            preparation.prepare([HostMemory(1 << 20, now=False)])
        assert preparation._bar.n == 4 << 20
    assert "4.00M/4.00M" in capsys.readouterr().err


def test_an_interrupt_leaves_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(memory, "_touch", broken)
    before = own_threads()
    with pytest.raises(KeyboardInterrupt):
        take([PAGE] * 10)
    assert own_threads() == before


def test_workers_are_one_a_core_whatever_omp_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = ThreadPoolExecutor

    def note(workers: int, thread_name_prefix: str) -> ThreadPoolExecutor:
        asked.append(workers)
        return real(workers, thread_name_prefix)

    monkeypatch.setattr(memory, "ThreadPoolExecutor", note)
    monkeypatch.setattr(memory, "physical_cores", lambda: 5)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    take([PAGE])
    assert asked == [5]


def run_child(code: str, **environment: str) -> str:
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], env={**os.environ, **environment, "PYTHONPATH": str(root)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stderr


@pytest.mark.skipif(physical_cores() < 2, reason="needs two cores")
def test_one_core_left_is_one_warning_and_omp_num_threads_is_not_the_reason() -> None:
    code = (
        "import os, sys; from oomc.runtime.cores import warn_if_single_threaded as warn; warn(); "
        "print('all cores', file=sys.stderr); os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); warn(); warn()"
    )
    before, after = run_child(code, OMP_NUM_THREADS="1").split("all cores")
    assert "has one thread" not in before
    assert after.count("has one thread") == 1


@pytest.mark.parametrize(
    ("workers", "machine", "warned"), [(1, 8, True), (2, 8, False), (1, 1, False), (1, None, False)]
)
def test_a_machine_of_one_is_not_warned_about(
    workers: int, machine: int | None, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "_warned", threading.Event())
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cores.warn_if_single_threaded(workers)
    assert bool(caught) == warned


def test_a_forked_child_does_not_touch_registrations(driver: Driver) -> None:
    taken = HostMemory(PAGE, pin=True)

    def child() -> None:
        taken.close()
        os._exit(0 if driver.live else 1)

    assert _forked(child) == 0
    assert taken.pinned


def _forked(run: Callable[[], None]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads
        pid = os.fork()
    if pid == 0:
        try:
            run()
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.cuda
@needs_cuda
def test_parallel_registration_is_real_and_one_copy_spans_a_slab() -> None:
    size = 300 << 20
    memories = take([size, size, 1], pin=True)
    assert all(m.pinned for m in memories)
    whole = memories[0].tensor(torch.uint8, (size,))
    assert whole.is_pinned()
    assert whole[size - 1 :].is_pinned()
    whole.fill_(5)
    on_device = torch.empty(size, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        on_device.copy_(whole, non_blocking=True)
    assert not stream.query(), "300 MiB were copied synchronously"
    stream.synchronize()
    assert on_device.eq(5).all()
    address = whole.data_ptr()
    del whole, memories
    gc.collect()
    again = HostMemory(size, pin=True)
    assert again.pinned, f"the registration at {address:#x} was left behind"


@pytest.mark.cuda
@needs_cuda
def test_registering_makes_no_context_on_another_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    code = (
        "import torch; from oomc.runtime.memory import take; torch.cuda.set_device(1); torch.zeros(1, device='cuda');"
        "before = torch.cuda.mem_get_info(0)[0]; take([1 << 20] * 4, pin=True);"
        "import sys; sys.exit(before - torch.cuda.mem_get_info(0)[0] > 64 << 20)"
    )
    run_child(code)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_what_the_allocator_holds_free_goes_back_to_the_system() -> None:
    blocks = [bytes(1000) for _ in range(200_000)]  # each from the heap
    top = [bytes(1000)]  # above them, so that they are a hole
    held = host_bytes()
    del blocks
    give_back_free()
    assert host_bytes() < held - 150_000_000
    assert len(top[0]) == 1000
