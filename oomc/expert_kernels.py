"""What moves rows between tokens and expert order, as one kernel each for CUDA.

In plain torch (oomc.experts) each is a loop over the k experts of a token: some 5 kernels an expert that pass over
[tokens, width] in fp32. Here a row is read once, summed in fp32 in the same order, and written once. Of a group of
experts (`own`, the offsets of its slots), rows of other experts' slots are neither read nor written. Rows are placed by
a kernel too: torch's index_copy_ computes a place for each element, and copies one at a time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (the kernels: an annotation of theirs would be one to Triton)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

_WIDTH = 1024  # elements of a row that a program works on at once
_CLEARED = 8192


def _jit(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


@_jit
def _below(own, OWN: tl.constexpr):
    """The end of the slots that count: the last of OWN offsets; all do if there are none."""
    return tl.load(own + OWN - 1).to(tl.int64) if OWN else 1 << 62


@_jit
def _combine(
    y, weights, inverse, own, out, width, y_stride,
    K: tl.constexpr, OWN: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    end = _below(own, OWN)
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(K):
        slot = tl.load(inverse + token * K + j)
        row = tl.load(y + slot * y_stride + columns, inside & (slot < end), other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights + token * K + j).to(tl.float32)
        total += row
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), inside)


@_jit
def _combine_backward(
    dout, y, weights, inverse, own, dy, dweights, width, dout_stride, y_stride,
    K: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    choice = tl.program_id(0).to(tl.int64)
    token = choice // K
    slot = tl.load(inverse + choice)
    weight = tl.load(weights + choice).to(tl.float32)
    mine = slot < _below(own, OWN)
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(BLOCKS):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside = (columns < width) & mine
        given = tl.load(dout + token * dout_stride + columns, inside, other=0.0).to(tl.float32)
        total += given * tl.load(y + slot * y_stride + columns, inside, other=0.0).to(tl.float32)
        tl.store(dy + slot * width + columns, (given * weight).to(dy.dtype.element_ty), inside)
    tl.store(dweights + choice, tl.sum(total, axis=0).to(dweights.dtype.element_ty))


@_jit
def _place(whole, slots, rows, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    slot = tl.load(slots + row)
    tl.store(whole + slot * width + columns, tl.load(rows + row * stride + columns, inside), inside)


@_jit
def _clear_empty(out, offsets, size, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    before = tl.load(offsets + group - 1, group > 0, other=0)
    if tl.load(offsets + group) == before:
        places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + group * size + places, tl.zeros([BLOCK], out.dtype.element_ty), places < size)


def combine(y: Tensor, weights: Tensor, inverse: Tensor, own: Tensor | None = None) -> Tensor:
    """[T, D] in y's dtype (fp32 with `own`): the sum over j of weights[t, j] * y[inverse[t * k + j]]."""
    dtype = y.dtype if own is None else torch.float32
    return _summed(y, weights.contiguous(), inverse, weights.shape[1], own, dtype)


def dispatch_backward(dy: Tensor, inverse: Tensor, k: int, own: Tensor | None = None) -> Tensor:
    """[T, D]: the sum over the k slots of each token of dy [N, D]."""
    return _summed(dy, None, inverse, k, own, dy.dtype)


def _summed(
    y: Tensor, weights: Tensor | None, inverse: Tensor, k: int, own: Tensor | None, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    out = y.new_empty((inverse.shape[0] // k, y.shape[1]), dtype=dtype)
    if out.numel():
        block = min(_WIDTH, triton.next_power_of_2(y.shape[1]))
        _combine[out.shape[0], triton.cdiv(y.shape[1], block)](
            y, weights, inverse, own, out, y.shape[1], y.stride(0), K=k, OWN=0 if own is None else own.shape[0],
            WEIGHTED=weights is not None, BLOCK=block,
        )  # fmt: skip
    return out


def combine_backward(
    dout: Tensor, y: Tensor, weights: Tensor, inverse: Tensor, own: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dy [N, D] and dweights [T, k] of `combine`, from dout [T, D]; dy of slots that do not count is left as it is."""
    dy, dweights = y.new_empty(y.shape), weights.new_empty(weights.shape)
    block = min(_WIDTH, triton.next_power_of_2(y.shape[1]))
    if dy.numel():
        _combine_backward[inverse.shape[0],](
            dout, y, weights.contiguous(), inverse, own, dy, dweights, y.shape[1], dout.stride(0), y.stride(0),
            K=weights.shape[1], OWN=0 if own is None else own.shape[0], BLOCK=block,
            BLOCKS=triton.cdiv(y.shape[1], block),
        )  # fmt: skip
    return dy, dweights


def place(whole: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [n, D] to those of `whole` [N, D], contiguous, that `slots` [n] names."""
    width = whole.shape[1]
    block = min(_WIDTH, triton.next_power_of_2(width))
    if rows.numel():
        _place[rows.shape[0], triton.cdiv(width, block)](whole, slots, rows, width, rows.stride(0), BLOCK=block)


def clear_empty(out: Tensor, offsets: Tensor) -> None:
    """Zero out[e] of each expert that has no slot; out [E, ...] is contiguous, offsets [E] are where slots end."""
    size = out[0].numel()
    if size:
        _clear_empty[out.shape[0], triton.cdiv(size, _CLEARED)](out, offsets, size, BLOCK=_CLEARED)
