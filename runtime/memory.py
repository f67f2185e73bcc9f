"""Host memory of exact size, page-aligned, registered with CUDA."""

from __future__ import annotations

import contextlib
import mmap
import threading
import warnings
from typing import Any, TypeAlias

import numpy as np
import torch

Array: TypeAlias = np.ndarray[Any, Any]
_pin_warning = threading.Event()


class HostMemory:
    """`nbytes` of zeroed, page-aligned, anonymous memory, registered with CUDA if `pin`.

    torch's own pinned allocator rounds sizes up to powers of two; this does not. Forked processes (data loader workers)
    do not get the memory: a copy-on-write page of theirs would move ours away from the pages that CUDA has registered.
    The memory is given back when `close` was called and the last tensor over it is gone.

    Attributes:
        pinned: whether CUDA has it registered; if the driver refuses, it stays pageable and a warning is given once.
    """

    def __init__(self, nbytes: int, pin: bool = False) -> None:
        self.nbytes = nbytes
        self.pinned = False
        self._map: mmap.mmap | None = None
        if nbytes:
            self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
                if hasattr(mmap, advice):
                    _advise(self._map, getattr(mmap, advice))
            if pin:
                self.pinned = _register(self._address(), nbytes)

    def _address(self) -> int:
        return int(self.array(np.dtype(np.uint8), 0, 1).ctypes.data)

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
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self._address())
            self.pinned = False
        self._map = None


def _advise(memory: mmap.mmap, advice: int) -> None:
    with contextlib.suppress(OSError):  # a kernel without this advice: it is only advice
        memory.madvise(advice)


def _clear_last_error() -> None:
    # a refusal stays behind as CUDA's last error, and the next check of a launch would report it as its own
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _register(address: int, nbytes: int) -> bool:
    result = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if result == 0:
        return True
    _clear_last_error()
    if not _pin_warning.is_set():
        _pin_warning.set()
        warnings.warn(
            f"CUDA refused to register {nbytes} bytes of host memory (error {result}); copies from pageable memory are "
            "about 8 times slower. Check the container's memory limit and `ulimit -l`.",
            stacklevel=3,
        )
    return False
