"""Numba helpers that the optimizer kernels share: bits of bf16 and fp32, the split master, accumulation.

All kernels are serial, release the GIL and are IEEE fp32 (no fastmath: nothing is reassociated, and nothing is fused
but what says `fused`): many run side by side on `oomc.runtime.pool`, and another executor can produce the same bits.
bf16 data come as int16 views: with uint16, numba does not vectorise. A loop should touch at most four arrays, since
LLVM gives up vectorising when more than eight pairs of them must be checked for overlap; what needs more goes through
the data twice in blocks of `BLOCK` elements, which stay in the cache between.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from oomc.jit import jit

Array: TypeAlias = np.ndarray[Any, Any]

BLOCK = 4096
HASH_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)  # of a hash of 32 bits found by search, "lowbias32"
SQUARES = 256  # sums kept side by side: numba reorders no additions, so that a single one would not vectorise


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` at its first call: no GIL, IEEE arithmetic. It may call those of this file and of adamw.py."""
    shared = __file__, str(Path(__file__).with_name("adamw.py"))
    return jit(function, *shared, nogil=True, fastmath=False, error_model="numpy")


@intrinsic
def widen(typingctx: Any, value: Any) -> Any:
    """The float32 whose bits are `value` (int32), or whose upper half is `value` (int16: a bf16 number)."""
    if value not in (types.int16, types.int32):
        return None

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = args[0]
        if value == types.int16:
            bits = builder.shl(builder.zext(bits, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(value), build


@intrinsic
def bits_of(typingctx: Any, value: Any) -> Any:
    """The bits of a float32 as int32."""
    if value != types.float32:
        return None

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(value), build


@intrinsic
def fused(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c` in float32 with one rounding: IEEE's fused multiply-add, where torch has one too."""
    if not a == b == c == types.float32:
        return None

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(a, b, c), build


@intrinsic
def random_bits(typingctx: Any, key: Any, index: Any) -> Any:
    """32 random bits (int32) for `key` (int32) and `index` (an integer, of which 32 bits count)."""
    if key != types.int32 or not isinstance(index, types.Integer):
        return None

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        index_bits = args[1] if index.bitwidth == 32 else builder.trunc(args[1], word)
        bits = builder.xor(args[0], index_bits)
        for shift, multiplier in zip((16, 15), HASH_MULTIPLIERS):
            bits = builder.xor(bits, builder.lshr(bits, ir.Constant(word, shift)))
            bits = builder.mul(bits, ir.Constant(word, multiplier))
        return builder.xor(bits, builder.lshr(bits, ir.Constant(word, 16)))

    return types.int32(key, index), build


@kernel
def join(hi: Any, lo: Any) -> Any:
    """`(hi << 16) + lo` as float32: one element of the exact master from its halves (int16 each)."""
    return widen(np.int32((np.int32(hi) << 16) + np.int32(lo)))


@kernel
def nearest_hi(value: Any) -> Any:
    """Bits (int16) of the bf16 nearest to a float32, ties away from zero; the rest is the low half of its bits.

    A NaN gives the canonical one: rounding the bits of some NaNs would carry into the sign and show the model a zero.
    """
    bits = bits_of(value)
    rounded = np.int32(bits + np.int32(0x8000)) >> 16
    return np.int16(rounded) if value == value else np.int16(0x7FC0)


@kernel
def low_bits(value: Any) -> Any:
    """The lower half of a float32's bits, as int16; 0 for NaN, so that all executors store the same one."""
    return np.int16(bits_of(value)) if value == value else np.int16(0)


@kernel
def split_master(master: Any, hi: Any, lo: Any) -> None:
    """Split a float32 `master` into `hi` and `lo` (int16 bits), all 1-d of one length."""
    for i in range(hi.size):
        hi[i] = nearest_hi(master[i])
        lo[i] = low_bits(master[i])


@kernel
def join_master(hi: Any, lo: Any, master: Any) -> None:
    """The inverse of `split_master`, exact."""
    for i in range(hi.size):
        master[i] = join(hi[i], lo[i])


@kernel
def overflow_mark(value: Any) -> Any:
    """An int32 that is negative if and only if a float32 is infinite or NaN.

    An exponent of all ones, plus one, carries into the sign. The OR of many marks tells whether any was negative, and
    is a reduction that vectorises at full width.
    """
    return np.int32((bits_of(value) & np.int32(0x7F800000)) + np.int32(0x00800000))


@kernel
def count_nonfinite(values: Any, factor: Any) -> int:
    """Number of elements of `values` (int16 or int32 bits, as for `widen`) times `factor` that are not finite."""
    count = 0
    for i in range(values.size):
        count += overflow_mark(widen(values[i]) * factor) < 0
    return count


@kernel
def _accumulate(total: Any, gradient: Any, fresh: Any, weight: Any) -> None:
    if fresh:
        for i in range(total.size):
            total[i] = weight * widen(gradient[i])
    else:
        for i in range(total.size):
            total[i] = total[i] + weight * widen(gradient[i])


def accumulate(total: Array, gradient: Array, fresh: bool, weight: float = 1.0) -> None:
    """Add `weight * gradient` to the float32 `total`, or store it there if `fresh`; product and sum round once each.

    Args:
        total: float32 [n].
        gradient: int16 or int32 [n]: bits as for `widen`.
        fresh: whether what is in `total` does not count.
        weight: rounded to fp32; 1.0 leaves the gradient's bits as they are.
    """
    _accumulate(total, gradient, fresh, np.float32(weight))


@kernel
def _sum_of_squares(values: Any) -> float:
    sums = np.zeros(SQUARES, np.float64)
    whole = values.size // SQUARES * SQUARES
    for first in range(0, whole, SQUARES):
        row = values[first : first + SQUARES]
        for j in range(SQUARES):
            x = np.float64(widen(row[j]))
            sums[j] += x * x
    for i in range(whole, values.size):
        x = np.float64(widen(values[i]))
        sums[i - whole] += x * x
    return sums.sum()


def sum_of_squares(values: Array) -> float:
    """Sum of the squares of `values` (int16 or int32 [n], bits as for `widen`), in fp64, where each square is exact.

    The order of the additions depends on n only; sums of other divisions of the same numbers differ by 1e-16 relative.
    """
    return float(_sum_of_squares(values))
