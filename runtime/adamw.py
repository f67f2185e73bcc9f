"""AdamW on the host: fp32 arithmetic on the exact master, as `torch.optim.AdamW` without fused or approximate steps.

    p = p * (1 - lr * weight_decay)
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + (1 - beta2) * g * g
    p = p - (lr / c1) * m / (sqrt(v) / sqrt(c2) + eps)                with c = 1 - beta**step
      = p - (lr * sqrt(c2) / c1) * m / (sqrt(v) + eps * sqrt(c2))    as it is computed: one division less

Every operation rounds once to fp32 (no FMA), in this order; the constants are computed in double precision and rounded
once. Each result is within 2 ulp of torch's on the same state (tests/test_adamw.py). `UpdateRule` in
`oomc.runtime.optim` is the protocol that this file implements; another optimizer is another such file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from oomc.runtime.kernels import BLOCK, bits_of, count_nonfinite, join, kernel, nearest_hi, overflow_mark, widen
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
    _, one_minus_beta1, beta2, one_minus_beta2, _, _ = constants
    mark = np.int32(0)
    for i in range(m.size):
        g = widen(gradient[i]) * factor
        mark = np.int32(mark | overflow_mark(g))
        m[i] = m[i] + one_minus_beta1 * (g - m[i])
        v[i] = v[i] * beta2 + one_minus_beta2 * g * g
    return count_nonfinite(gradient, factor) if mark < 0 else 0


@kernel
def _descend_split(hi: Any, lo: Any, m: Any, v: Any, constants: Any) -> None:
    decay, _, _, _, step_size, eps = constants
    for i in range(hi.size):
        p = join(hi[i], lo[i]) * decay - step_size * m[i] / (np.sqrt(v[i]) + eps)
        hi[i] = nearest_hi(p)
        lo[i] = np.int16(bits_of(p))


@kernel
def _descend_whole(p: Any, m: Any, v: Any, constants: Any) -> None:
    decay, _, _, _, step_size, eps = constants
    for i in range(p.size):
        p[i] = p[i] * decay - step_size * m[i] / (np.sqrt(v[i]) + eps)


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
def _constants(hyper: Hyper, step: int) -> tuple[np.float32, ...]:
    correction1, correction2 = hyper.bias_corrections(step)
    root = math.sqrt(correction2)
    doubles = (
        1.0 - hyper.lr * hyper.weight_decay,
        1.0 - hyper.beta1,
        hyper.beta2,
        1.0 - hyper.beta2,
        hyper.lr * root / correction1,
        hyper.eps * root,
    )
    return tuple(np.float32(x) for x in doubles)


@dataclass(frozen=True)
class AdamW:
    """The `UpdateRule` of `torch.optim.AdamW` (no amsgrad, no maximize). State: fp32 `m` and `v`."""

    state_names: tuple[str, ...] = ("m", "v")

    def hyper(self, group: Mapping[str, Any]) -> Hyper:
        """Snapshot of one of a torch AdamW's `param_groups`; tensors (a tensor lr) are read now."""
        beta1, beta2 = group["betas"]
        values = (group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
        return Hyper(*(float(x) for x in values))

    def constants(self, hyper: Hyper, step: int) -> tuple[np.float32, ...]:
        """What the kernel needs of `hyper` at the parameter's `step` (from 1), rounded once to fp32."""
        return _constants(hyper, step)

    def update(
        self, weights: Array, lo: Array | None, state: tuple[Array, ...], gradient: Array, factor: float, constants: Any
    ) -> int:
        """Update one run of elements in place; see `UpdateRule.update`."""
        m, v = state
        if lo is None:
            return int(_update_whole(weights, m, v, gradient, np.float32(factor), constants))
        return int(_update_split(weights, lo, m, v, gradient, np.float32(factor), constants))
