"""SGD on the host and on CUDA: fp32 arithmetic on the exact master, as `torch.optim.SGD`.

    g = fma(weight_decay, p, g)                                 left out where weight_decay is 0
    b = fma(1 - dampening, g, b * momentum), or g at the first step
    d = fma(momentum, b, g) with nesterov, else b
    p = fma(-lr, d, p)

Without momentum d is g and there is no state. The fused multiply-adds are those of torch's own `add(other, alpha=)` on
the CPU, so that parameters and momentum are torch's bit for bit (tests/test_sgd.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from oomc.errors import UnsupportedError
from oomc.runtime.kernels import count_nonfinite, fused, join, kernel, low_bits, nearest_hi, overflow_mark, widen
from oomc.runtime.layout import StateArray
from oomc.runtime.optim import Array


@dataclass(frozen=True)
class Hyper:
    """A parameter group's hyperparameters at the moment of the step call."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool


@kernel
def _decayed(g: Any, p: Any, constants: Any) -> Any:
    return fused(constants[1], p, g) if constants[0] else g


@kernel
def _momentum(g: Any, b: Any, constants: Any) -> Any:
    _, _, first, momentum, undamped, _, _ = constants
    if momentum == np.float32(0.0):
        return b  # torch leaves it alone
    return g if first else fused(undamped, g, b * momentum)


@kernel
def _direction(g: Any, b: Any, constants: Any) -> Any:
    _, _, _, momentum, _, nesterov, _ = constants
    if momentum == np.float32(0.0):
        return g
    return fused(momentum, b, g) if nesterov else b


@kernel
def _split(hi: Any, lo: Any, gradient: Any, factor: Any, constants: Any) -> int:
    descent, mark = constants[6], np.int32(0)
    for i in range(hi.size):
        g = widen(gradient[i]) * factor
        mark = np.int32(mark | overflow_mark(g))
        p = join(hi[i], lo[i])
        p = fused(descent, _decayed(g, p, constants), p)
        hi[i] = nearest_hi(p)
        lo[i] = low_bits(p)
    return count_nonfinite(gradient, factor) if mark < 0 else 0


@kernel
def _whole(weights: Any, gradient: Any, factor: Any, constants: Any) -> int:
    descent, mark = constants[6], np.int32(0)
    for i in range(weights.size):
        g = widen(gradient[i]) * factor
        mark = np.int32(mark | overflow_mark(g))
        weights[i] = fused(descent, _decayed(g, weights[i], constants), weights[i])
    return count_nonfinite(gradient, factor) if mark < 0 else 0


@kernel
def _momentum_split(hi: Any, lo: Any, buffer: Any, gradient: Any, factor: Any, constants: Any) -> int:
    descent, mark = constants[6], np.int32(0)
    for i in range(hi.size):
        g = widen(gradient[i]) * factor
        mark = np.int32(mark | overflow_mark(g))
        p = join(hi[i], lo[i])
        g = _decayed(g, p, constants)
        buffer[i] = _momentum(g, buffer[i], constants)
        p = fused(descent, _direction(g, buffer[i], constants), p)
        hi[i] = nearest_hi(p)
        lo[i] = low_bits(p)
    return count_nonfinite(gradient, factor) if mark < 0 else 0


@kernel
def _momentum_whole(weights: Any, buffer: Any, gradient: Any, factor: Any, constants: Any) -> int:
    descent, mark = constants[6], np.int32(0)
    for i in range(weights.size):
        g = widen(gradient[i]) * factor
        mark = np.int32(mark | overflow_mark(g))
        g = _decayed(g, weights[i], constants)
        buffer[i] = _momentum(g, buffer[i], constants)
        weights[i] = fused(descent, _direction(g, buffer[i], constants), weights[i])
    return count_nonfinite(gradient, factor) if mark < 0 else 0


@lru_cache(maxsize=1024)
def _constants(hyper: Hyper, first: bool) -> tuple[Any, ...]:
    return (
        hyper.weight_decay != 0.0,
        np.float32(hyper.weight_decay),
        first,
        np.float32(hyper.momentum),
        np.float32(1.0 - hyper.dampening),
        hyper.nesterov,
        np.float32(-hyper.lr),
    )


@dataclass(frozen=True)
class SGD:
    """The `UpdateRule` of `torch.optim.SGD` (no maximize). State: an fp32 momentum buffer, none without momentum.

    Args:
        momentum: whether any parameter group has momentum.
    """

    momentum: bool = True

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """The momentum buffer, if there is one."""
        return (StateArray("momentum_buffer"),) if self.momentum else ()

    def hyper(self, group: Mapping[str, Any]) -> Hyper:
        """Snapshot of one of a torch SGD's `param_groups`; tensors (a tensor lr) are read now.

        Raises:
            UnsupportedError: the group has momentum now, but no group had when the rule was made.
        """
        lr, momentum, dampening, decay = (float(group[k]) for k in ("lr", "momentum", "dampening", "weight_decay"))
        if momentum != 0.0 and not self.momentum:
            raise UnsupportedError(
                f"a parameter group's momentum became {momentum}, but all were 0 when the optimizer was given to "
                "compile, so there is no momentum buffer; start with a momentum that is not 0"
            )
        return Hyper(lr, momentum, dampening, decay, bool(group["nesterov"]))

    def constants(self, hyper: Hyper, step: int, salt: int) -> tuple[Any, ...]:
        """What the kernels need of `hyper`, rounded once to fp32; step 1 starts the momentum."""
        return _constants(hyper, step == 1)

    def update(
        self, weights: Array, lo: Array | None, state: tuple[Array, ...], gradient: Array, factor: float,
        constants: Any, start: int,
    ) -> int:  # fmt: skip
        """Update one run of elements in place; see `UpdateRule.update`."""
        tail = (*state, gradient, np.float32(factor), constants)
        if lo is None:
            return int((_momentum_whole if self.momentum else _whole)(weights, *tail))
        return int((_momentum_split if self.momentum else _split)(weights, lo, *tail))

    def update_cuda(
        self, weights: torch.Tensor, lo: torch.Tensor | None, state: tuple[torch.Tensor, ...], gradient: torch.Tensor,
        factor: float, constants: Any, start: int, nonfinite: torch.Tensor,
    ) -> None:  # fmt: skip
        """Update one run of elements on the device; see `UpdateRule.update_cuda`."""
        from oomc.runtime.triton_kernels import sgd  # triton is there only where CUDA is

        sgd(weights, lo, state, gradient, factor, constants, nonfinite)
