"""What memory is held: a meter for the CPU stand-in (and projections on fake tensors), and readings of the machine.

The meter is a dispatch mode: it sees the result of every ATen operation, so each temporary between two operations. It
does not see what a single CPU kernel allocates inside itself (an im2col buffer, a packed GEMM operand), nor what other
threads allocate; the runtime's lanes only copy.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from oomc import target

_LIFTS = (torch.ops.aten.lift_fresh.default,)


def _of_embedding_backward(grad: torch.Tensor, ids: torch.Tensor, rows: int, padding: int, *_: Any) -> int:
    """Sorted indices, and fp32 sums of up to 10 gradients of a row each (ATen, EmbeddingBackwardKernel.cu)."""
    count, width = ids.numel(), grad.shape[-1]
    if count <= 3072 and padding < 0:
        return 0
    partial = min(count, rows) + count // 10
    return 4 * partial * width + 8 * (6 * count + 2 * partial)


_WORKSPACES: dict[Any, Callable[..., int]] = {torch.ops.aten.embedding_dense_backward.default: _of_embedding_backward}
"""Bytes that operators take in torch's CUDA kernels, out of sight, for their arguments; small ones are left out."""


class Meter(TorchDispatchMode):
    """Counts the bytes of live storages.

    Counted is every storage that an operation creates while the meter is active, until it dies (also after the meter
    has been left), and what is given to `track`. Storages from before, such as host slabs, are not, nor are views of
    them. The body of an `oomc` custom operation is run under the meter, so that its temporaries are seen too; under
    fake tensors only where the body can be traced, and there workspaces of torch's CUDA kernels count as well. Enter it
    inside of a FakeTensorMode, not around one.

    Args:
        bodies: overload -> a callable body with an attribute `traceable`; None for those of `oomc.opdef`.
        granule: bytes that an allocator rounds each storage up to.
        log: takes what happens, in order: (number of a storage, its bytes) at its birth, (number, 0) at its death.

    Attributes:
        current: bytes held now.
        peak: the most that was held since the start or `reset_peak`.
        peak_op: name of the operation whose result made the peak.
    """

    def __init__(
        self, bodies: Mapping[Any, Any] | None = None, granule: int = 1, log: list[tuple[int, int]] | None = None
    ) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self.peak_op = ""
        self._granule = granule
        self._bodies = _registered_bodies() if bodies is None else bodies
        # weak keys: what is held here must not hold the storage
        self._live: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._log, self._numbers = log, 0

    def track(self, *tensors: torch.Tensor) -> None:
        """Count the storages of `tensors` too, from now until they die."""
        for tensor in tensors:
            self._add(tensor.untyped_storage(), "track")

    def reset_peak(self) -> None:
        """Start a new peak at the current bytes."""
        self.peak = self.current
        self.peak_op = ""

    def number(self, storage: torch.UntypedStorage) -> int:
        """The number of a storage in the log."""
        number: int = self._live[storage]
        return number

    def _add(self, storage: torch.UntypedStorage, name: str) -> None:
        if storage in self._live:
            return
        nbytes = -(-int(storage.nbytes()) // self._granule) * self._granule
        self._live[storage] = number = self._numbers
        self._numbers += 1
        if self._log is not None:
            self._log.append((number, nbytes))
        weakref.finalize(storage, _forget, weakref.ref(self), number, nbytes).atexit = False
        self.current += nbytes
        if self.current > self.peak:
            self.peak, self.peak_op = self.current, name

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        given = list(_tensors((args, kwargs)))
        workspace = self._workspace(func, given, args)
        result = self._run(func, given)(*args, **kwargs)
        # a result in a storage that was given is a view or an in-place update; of a lifted constant it is news
        old = set() if func in _LIFTS else {tensor.untyped_storage()._cdata for tensor in given}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in old:
                self._add(storage, str(func))
        del workspace  # only now: it lives beside the result
        return result

    def _workspace(self, func: Any, given: Sequence[torch.Tensor], args: Sequence[Any]) -> torch.Tensor | None:
        """What a CUDA kernel takes beside its result, where memory is what is asked for (on fake tensors)."""
        if func not in _WORKSPACES or not isinstance(given[0], FakeTensor) or target.kind(given[0].device) != "cuda":
            return None
        held = given[0].new_empty(_WORKSPACES[func](*args), dtype=torch.uint8)
        self._add(held.untyped_storage(), str(func))
        return held

    def _run(self, func: Any, given: Sequence[torch.Tensor]) -> Callable[..., Any]:
        body = self._bodies.get(func)
        if body is None or (not body.traceable and any(isinstance(tensor, FakeTensor) for tensor in given)):
            return func

        def metered(*args: Any, **kwargs: Any) -> Any:
            with self:
                return body(*args, **kwargs)

        return metered


def _forget(meter: weakref.ref[Meter], number: int, nbytes: int) -> None:
    held = meter()
    if held is not None:
        held.current -= nbytes
        if held._log is not None:
            held._log.append((number, 0))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _registered_bodies() -> Mapping[Any, Any]:
    module: ModuleType = importlib.import_module("oomc.opdef")
    bodies: Mapping[Any, Any] = module.BODIES
    return bodies


@dataclass(frozen=True)
class CudaUsage:
    """Bytes on one device.

    Attributes:
        allocated, reserved: by torch's allocator, now.
        allocated_peak, reserved_peak: their peaks since `torch.cuda.reset_peak_memory_stats`.
        outside: what is taken outside of the allocator (context, library workspaces, other processes on the device).
    """

    allocated: int
    reserved: int
    allocated_peak: int
    reserved_peak: int
    outside: int

    @property
    def measured(self) -> int:
        """The process's device memory at its peak: the reserved peak and what lies outside the allocator."""
        return self.reserved_peak + self.outside


def cuda_usage(device: torch.device) -> CudaUsage:
    """Read a CUDA device's memory. `outside` counts other processes too: the driver tells only what is free in all."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return CudaUsage(
        allocated=torch.cuda.memory_allocated(device),
        reserved=reserved,
        allocated_peak=torch.cuda.max_memory_allocated(device),
        reserved_peak=torch.cuda.max_memory_reserved(device),
        outside=total - free - reserved,
    )


def others(device: torch.device, own: Iterable[torch.Tensor]) -> int:
    """Bytes that torch's allocator has given on a CUDA device to anything but the storages of `own`."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in own if t.device == device}
    return max(0, torch.cuda.memory_allocated(device) - sum(storages.values()))


def host_bytes() -> int:
    """Resident set of this process: shared pages and memory registered with CUDA included."""
    return int(psutil.Process().memory_info().rss)
