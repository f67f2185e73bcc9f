"""The sum of an fp32 and a low-precision tensor as one kernel for CUDA (oomc.sums)."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (the kernel: an annotation of its would be one to Triton)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

_BLOCK = 4096


def _jit(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


@_jit
def _add(total, part, out, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    value = tl.load(total + places, inside) + tl.load(part + places, inside).to(tl.float32)
    tl.store(out + places, value.to(out.dtype.element_ty), inside)


def add(total: Tensor, part: Tensor, out: Tensor) -> None:
    """out = total + part, rounded to out's dtype; all lie alike, without holes, and `out` may be one of them."""
    count = total.numel()
    if count:
        _add[triton.cdiv(count, _BLOCK),](total, part, out, count, BLOCK=_BLOCK, num_warps=8)
