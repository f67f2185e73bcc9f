"""What kind of device a graph's kernels are chosen for: that of its tensors, or one that is planned for and not here.

Plans are made by running forms on fake tensors. A torch that is built without CUDA cannot do that for fakes of a GPU,
so that a plan for one is made with fakes of the CPU, and the few places that choose by device ask here instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

Capability = tuple[int, int]
"""CUDA's compute capability: (9, 0) is Hopper."""

_planned: ContextVar[Capability | None] = ContextVar("planned", default=None)


@contextmanager
def planning_for(capability: Capability | None) -> Iterator[None]:
    """Choose as on a GPU of this compute capability while the context lasts; None leaves it to the tensors."""
    token = _planned.set(capability)
    try:
        yield
    finally:
        _planned.reset(token)


def kind(device: torch.device) -> str:
    """`cuda` or `cpu`: the kind of device that computes what is on `device` now."""
    return device.type if _planned.get() is None else "cuda"


def has_cudnn() -> bool:
    """Whether cuDNN's attention is the better choice: Hopper and later. Its kernels for older GPUs are slower."""
    planned = _planned.get()
    if planned is not None:
        return planned >= (9, 0)
    return torch.backends.cudnn.is_available() and torch.cuda.get_device_capability() >= (9, 0)
