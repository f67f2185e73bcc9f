"""AdamW on the host and on CUDA: fp32 arithmetic on the exact master, as `torch.optim.AdamW` without approximations.

    p = p * (1 - lr * weight_decay)
    m = fma(1 - beta1, g - m, m), or fma(-beta1, g - m, g) where beta1 <= 1/2: torch's lerp
    v = fma((1 - beta2) * g, g, v * beta2)
    p = p - (lr / c1) * m / (sqrt(v) / sqrt(c2) + eps)          with c = 1 - beta**step

Every operation rounds once to fp32, in this order, and the constants are computed in double precision and rounded once,
so that any executor can produce the same bits. The two fused multiply-adds are there because torch has them: where g
and m cancel, nothing else stays near torch. The moments are then torch's own on the CPU, bit for bit, and parameters
differ from torch's only where its vectorised square root is not the nearest number (tests/test_adamw.py).
`UpdateRule` in `oomc.runtime.optim` is the protocol that this file implements; another optimizer is another such file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from oomc.runtime.kernels import BLOCK, count_nonfinite, fused, join, kernel, low_bits, nearest_hi, overflow_mark, widen
from oomc.runtime.layout import StateArray
from oomc.runtime.optim import Array


@dataclass(frozen=True)
class Hyper:
    """A parameter group's hyperparameters at the moment of the step call; `bias_corrections` come with the step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    def bias_corrections(self, step: int) -> tuple[float, float]:
        """1 - beta**step for both moments; `step` counts from 1 and is the parameter's own, as in torch."""
        return 1.0 - self.beta1**step, 1.0 - self.beta2**step


@kernel
def _moments(m: Any, v: Any, gradient: Any, factor: Any, constants: Any) -> int:
    _, weight, from_gradient, beta2, one_minus_beta2, _, _, _ = constants
    mark = np.int32(0)
    for i in range(m.size):
        g = widen(gradient[i]) * factor
        mark = np.int32(mark | overflow_mark(g))
        m[i] = fused(weight, g - m[i], g if from_gradient else m[i])
        v[i] = fused(one_minus_beta2 * g, g, v[i] * beta2)
    return count_nonfinite(gradient, factor) if mark < 0 else 0


@kernel
def _descend_split(hi: Any, lo: Any, m: Any, v: Any, constants: Any) -> None:
    decay, _, _, _, _, step_size, root2, eps = constants
    for i in range(hi.size):
        p = join(hi[i], lo[i]) * decay - step_size * m[i] / (np.sqrt(v[i]) / root2 + eps)
        hi[i] = nearest_hi(p)
        lo[i] = low_bits(p)


@kernel
def _descend_whole(p: Any, m: Any, v: Any, constants: Any) -> None:
    decay, _, _, _, _, step_size, root2, eps = constants
    for i in range(p.size):
        p[i] = p[i] * decay - step_size * m[i] / (np.sqrt(v[i]) / root2 + eps)


@kernel
def _update_split(hi: Any, lo: Any, m: Any, v: Any, gradient: Any, factor: Any, constants: Any) -> int:
    nonfinite = 0
    for start in range(0, hi.size, BLOCK):
        stop = min(start + BLOCK, hi.size)
        nonfinite += _moments(m[start:stop], v[start:stop], gradient[start:stop], factor, constants)
        _descend_split(hi[start:stop], lo[start:stop], m[start:stop], v[start:stop], constants)
    return nonfinite


@kernel
def _update_whole(p: Any, m: Any, v: Any, gradient: Any, factor: Any, constants: Any) -> int:
    nonfinite = 0
    for start in range(0, p.size, BLOCK):
        stop = min(start + BLOCK, p.size)
        nonfinite += _moments(m[start:stop], v[start:stop], gradient[start:stop], factor, constants)
        _descend_whole(p[start:stop], m[start:stop], v[start:stop], constants)
    return nonfinite


@lru_cache(maxsize=1024)
def _constants(hyper: Hyper, step: int) -> tuple[Any, ...]:
    correction1, correction2 = hyper.bias_corrections(step)
    weight = np.float32(1.0 - hyper.beta1)
    from_gradient = bool(weight >= 0.5)
    return (
        np.float32(1.0 - hyper.lr * hyper.weight_decay),
        np.float32(weight - np.float32(1.0)) if from_gradient else weight,
        from_gradient,
        np.float32(hyper.beta2),
        np.float32(1.0 - hyper.beta2),
        np.float32(hyper.lr / correction1),
        np.float32(math.sqrt(correction2)),
        np.float32(hyper.eps),
    )


@dataclass(frozen=True)
class AdamW:
    """The `UpdateRule` of `torch.optim.AdamW` (no amsgrad, no maximize). State: fp32 `m` and `v`."""

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """The two moments."""
        return StateArray("m"), StateArray("v")

    def hyper(self, group: Mapping[str, Any]) -> Hyper:
        """Snapshot of one of a torch AdamW's `param_groups`; tensors (a tensor lr) are read now."""
        beta1, beta2 = group["betas"]
        values = (group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
        return Hyper(*(float(x) for x in values))

    def constants(self, hyper: Hyper, step: int, salt: int) -> tuple[Any, ...]:
        """What the kernel needs of `hyper` at the parameter's `step` (from 1), rounded once to fp32."""
        return _constants(hyper, step)

    def update(
        self, weights: Array, lo: Array | None, state: tuple[Array, ...], gradient: Array, factor: float,
        constants: Any, start: int,
    ) -> int:  # fmt: skip
        """Update one run of elements in place; see `UpdateRule.update`."""
        m, v = state
        if lo is None:
            return int(_update_whole(weights, m, v, gradient, np.float32(factor), constants))
        return int(_update_split(weights, lo, m, v, gradient, np.float32(factor), constants))

    def update_cuda(
        self, weights: torch.Tensor, lo: torch.Tensor | None, state: tuple[torch.Tensor, ...], gradient: torch.Tensor,
        factor: float, constants: Any, start: int, nonfinite: torch.Tensor,
    ) -> None:  # fmt: skip
        """Update one run of elements on the device; see `UpdateRule.update_cuda`."""
        from oomc.runtime.triton_kernels import adamw  # triton is there only where CUDA is

        adamw(weights, lo, state, gradient, factor, constants, nonfinite)
