"""Host memory of exact size, page-aligned, registered with CUDA; taken by all cores at once, with progress shown."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import torch
from tqdm import tqdm

from oomc.runtime.pool import physical_cores

Array: TypeAlias = np.ndarray[Any, Any]
BAR_FROM = 4 << 30
"""Bytes from which on a bar shows how far the taking of memory is."""
_PIECE = 64 << 20  # bytes touched by one task
_pin_warning = threading.Event()


def empty_cache(device: torch.device) -> None:
    """Give all memory back that torch's allocator does not use."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def give_back_free() -> None:
    """Give what C's allocator holds free back to the system: tracing and compiling leave some 100 MB of it."""
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


class _Mapping(mmap.mmap):
    """Anonymous memory that takes back its registration with CUDA before it goes."""

    registered: tuple[int, int] | None = None  # address and process

    def unregister(self) -> None:
        # a forked child has the object but neither the pages nor CUDA; at exit CUDA may be gone first
        if self.registered is not None and self.registered[1] == os.getpid() and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.registered[0])
        self.registered = None

    def __del__(self) -> None:  # runs before the pages are unmapped
        self.unregister()


class HostMemory:
    """`nbytes` of zeroed, page-aligned, anonymous memory, registered with CUDA if `pin`.

    torch's own pinned allocator rounds sizes up to powers of two; this does not. Forked processes (data loader workers)
    do not get the memory: a copy-on-write page of theirs would move ours away from the pages that CUDA has registered.
    The memory is given back when the last tensor over it is gone and `close` was called or this object is gone too.
    It is one registration, so that any copy within it is one copy.

    Args:
        nbytes: size; 0 is fine.
        pin: register it with CUDA.
        now: register at once. Otherwise it is there and can be used, but `Preparation.prepare` registers it.

    Attributes:
        nbytes: size in bytes.
        ready: whether nothing is left to prepare.
    """

    def __init__(self, nbytes: int, pin: bool = False, now: bool = True) -> None:
        self.nbytes = nbytes
        self.ready = now or nbytes == 0
        self._pin = pin
        self._map: _Mapping | None = None
        if nbytes:
            self._map = _Mapping(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
                if hasattr(mmap, advice):
                    _advise(self._map, getattr(mmap, advice))
            if now:
                self._register()

    @property
    def pinned(self) -> bool:
        """Whether CUDA has it registered; if the driver refuses, it stays pageable and a warning is given once."""
        return self._map is not None and self._map.registered is not None

    def _register(self) -> None:
        if self._map is not None and self._pin:
            address = int(self.array(np.dtype(np.uint8), 0, 1).ctypes.data)
            if _register(address, self.nbytes):
                self._map.registered = (address, os.getpid())

    def array(self, dtype: np.dtype[Any], offset: int, count: int) -> Array:
        """`count` elements of `dtype` from byte `offset` on, as a numpy array over the memory."""
        if self._map is None or count == 0:
            return np.empty(0, dtype)
        return np.frombuffer(self._map, dtype, count, offset)

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> torch.Tensor:
        """A tensor over the memory from byte `offset` on, with a storage of its own of just its size."""
        count = int(np.prod(shape, dtype=np.int64))
        if self._map is None or count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)

    def close(self) -> None:
        """Unregister the memory and let go of it; tensors over it stay valid, as pageable memory."""
        if self._map is not None:
            self._map.unregister()
        self._map = None


class Preparation:
    """Touches and registers memory with all cores, and shows how far it is. A context manager.

    The pages of unprepared memory are first touched by many threads, so that they come quickly and are spread over the
    machine's memory controllers as the threads that will work on them are; touched pages are also registered faster.
    Each memory is registered whole, several at a time.

    Args:
        total: bytes that will be prepared in all, for the bar.
        workers: threads; None for one a physical core, whatever OMP_NUM_THREADS says.
        progress: whether to show a bar on stderr; None for one if `total` is above `BAR_FROM` and stderr is a terminal.
    """

    def __init__(self, total: int, workers: int | None = None, progress: bool | None = None) -> None:
        show = total > BAR_FROM and sys.stderr.isatty() if progress is None else progress
        self._threads = ThreadPoolExecutor(workers or physical_cores(), thread_name_prefix="oomc-memory")
        self._bar = tqdm(
            total=total, desc="host memory", unit="B", unit_scale=True, unit_divisor=1024, disable=not show,
            file=sys.stderr,
        )  # fmt: skip

    def __enter__(self) -> Preparation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._bar.close()

    def prepare(self, memories: Sequence[HostMemory]) -> None:
        """Block until `memories` are touched and, where that was asked for, registered.

        Those that are ready are left alone. The others are to be prepared before anything is written to them, since
        touching a page writes a zero to it.
        """
        memories = [memory for memory in memories if not memory.ready]
        pin = any(memory._pin for memory in memories)
        device = torch.cuda.current_device() if pin and torch.cuda.is_available() else None
        tasks = []
        for memory in memories:
            starts = range(0, memory.nbytes, _PIECE)
            done = itertools.count(1)
            for start in starts:
                tasks.append(self._threads.submit(_touch, memory, start, done, len(starts), device))
        for task in as_completed(tasks):
            self._bar.update(task.result())


def take(
    sizes: Sequence[int], pin: bool = False, workers: int | None = None, progress: bool | None = None
) -> list[HostMemory]:
    """A prepared memory for each of `sizes` (bytes), registered with CUDA if `pin`; see `Preparation`."""
    memories = [HostMemory(size, pin, now=False) for size in sizes]
    with Preparation(sum(sizes), workers, progress) as preparation:
        preparation.prepare(memories)
    return memories


def _touch(memory: HostMemory, start: int, done: Iterator[int], pieces: int, device: int | None) -> int:
    size = min(_PIECE, memory.nbytes - start)
    # numpy lets go of the GIL for this; mmap.madvise, which could populate the pages, does not
    memory.array(np.dtype(np.uint8), start, size)[:: mmap.PAGESIZE] = 0
    if next(done) == pieces:
        # a thread starts on device 0: registering from there would make a context on it
        with contextlib.nullcontext() if device is None else torch.cuda.device(device):
            memory._register()
        memory.ready = True
    return size


def _advise(memory: mmap.mmap, advice: int) -> None:
    with contextlib.suppress(OSError):  # a kernel without this advice: it is only advice
        memory.madvise(advice)


def _clear_last_error() -> None:
    # a refusal stays behind as the thread's last CUDA error, and the next check of a launch would report it as its own
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _register(address: int, nbytes: int) -> bool:
    result = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))  # without the GIL
    if result == 0:
        return True
    _clear_last_error()
    if not _pin_warning.is_set():
        _pin_warning.set()
        warnings.warn(
            f"CUDA refused to register {nbytes} bytes of host memory (error {result}); copies from pageable memory are "
            "about 8 times slower. Check the container's memory limit and `ulimit -l`.",
            stacklevel=4,
        )
    return False
