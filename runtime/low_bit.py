"""AdamW with moments of 16 or 8 bits each: opt-in, since they change the numbers.

    expand the moments to fp32, in blocks that stay in the cache
    update them and the weights as `oomc.runtime.adamw` does       (the weights see the moments before they are rounded)
    round the moments at random and store them

`bf16`: the upper halves of the fp32 numbers. `8bit`: `m` is a sign and a code of 7 bits, `v` a code of 8 bits; code c
stands for the float32 whose bits are `(c + base) << 20`: an exponent and three bits of mantissa. `base` is the block's
own (64 elements): its largest finite number has about the largest code, and codes reach down to 2**-15 of it for `m`
and to 2**-31 for `v`, which is 2**-15 for the root. The grid on which numbers are rounded does not depend on `base`, so
that a slow decay of the block's maximum moves nothing. Smaller `m` become 0; smaller `v` take the smallest code, so
that no `v` but 0 becomes 0, and no update grows by rounding. The largest code stands for what is not finite, which does
not count for `base`: a NaN harms its own element only. Zero bytes are zeros.

Rounding is up with the probability that keeps the mean, or a moving average would stall as soon as its changes were
smaller than half a step. The random bits are a hash of the parameter's salt, its step and the element's index in the
parameter, and so independent of how the work was divided, and the same on every executor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from oomc.runtime.adamw import AdamW, Hyper, _descend_split, _descend_whole, _moments
from oomc.runtime.kernels import BLOCK, HASH_MULTIPLIERS, bits_of, kernel, random_bits, widen
from oomc.runtime.layout import StateArray
from oomc.runtime.optim import Array

Width = Literal["bf16", "8bit"]
ELEMENTS = 64  # that share a base


def _mix(value: int) -> int:
    """The hash of `random_bits`, of a Python int."""
    value = ((value ^ (value >> 16)) * HASH_MULTIPLIERS[0]) & 0xFFFFFFFF
    value = ((value ^ (value >> 15)) * HASH_MULTIPLIERS[1]) & 0xFFFFFFFF
    return value ^ (value >> 16)


def key_of(salt: int, step: int) -> int:
    """A parameter's key of 32 bits (signed) for the random bits of one step."""
    key = _mix((_mix(salt & 0xFFFFFFFF) + step) & 0xFFFFFFFF)
    return key - (1 << 32) if key >> 31 else key


@kernel
def _expand_bf16(moment: Any, values: Any) -> None:
    for i in range(moment.size):
        values[i] = widen(moment[i])


@kernel
def _rounded(value: Any, noise: Any) -> Any:
    bits = bits_of(value)
    return np.int16(np.int32(bits + noise) >> 16) if value == value else np.int16(0x7FC0)


@kernel
def _round_bf16(m_values: Any, v_values: Any, m: Any, v: Any, key: Any, start: Any) -> None:
    for i in range(m.size):
        noise = random_bits(key, start + i)
        m[i] = _rounded(m_values[i], np.int32(noise & 0xFFFF))
        v[i] = _rounded(v_values[i], np.int32((noise >> 16) & 0xFFFF))


@kernel
def _m_of(code: Any, base: Any) -> Any:
    magnitude = np.int32(code & 127)
    bits = np.int32((magnitude + base) << 20) if magnitude > 0 else np.int32(0)
    bits = np.int32(bits | np.int32(np.int32(code & -128) << 24))
    return widen(np.int32(0x7FC00000) if magnitude == 127 else bits)


@kernel
def _v_of(code: Any, base: Any) -> Any:
    magnitude = np.int32(code & 255)
    bits = np.int32((magnitude + base) << 20) if magnitude > 0 else np.int32(0)
    return widen(np.int32(0x7FC00000) if magnitude == 255 else bits)


@kernel
def _m_code(value: Any, base: Any, noise: Any) -> Any:
    size = np.int32(bits_of(value) & 0x7FFFFFFF)
    code = np.int32(np.int32(np.int32(size + np.int32((noise & 0xFFFF) << 4)) >> 20) - base)
    code = np.int32(max(code, np.int32(0)) | np.int32((bits_of(value) >> 24) & -128))
    return np.int8(code if size < np.int32(0x7F800000) else np.int32(127))


@kernel
def _v_code(value: Any, base: Any, noise: Any) -> Any:
    size = np.int32(bits_of(value) & 0x7FFFFFFF)
    code = np.int32(np.int32(np.int32(size + np.int32((noise >> 12) & 0xFFFF0)) >> 20) - base)
    code = max(code, np.int32(1) if size > 0 else np.int32(0))
    return np.int8(code if size < np.int32(0x7F800000) else np.int32(255))


# The loops over whole blocks have a constant length: so they are unrolled into vectors, and three times as fast.


@kernel
def _expand_8bit(m: Any, v: Any, m_base: Any, v_base: Any, m_values: Any, v_values: Any) -> None:
    whole = m.size // ELEMENTS
    for block in range(whole):
        first, base = block * ELEMENTS, np.int32(m_base[block])
        for j in range(ELEMENTS):
            m_values[first + j] = _m_of(m[first + j], base)
    for block in range(whole):
        first, base = block * ELEMENTS, np.int32(v_base[block])
        for j in range(ELEMENTS):
            v_values[first + j] = _v_of(v[first + j], base)
    for i in range(whole * ELEMENTS, m.size):
        m_values[i] = _m_of(m[i], np.int32(m_base[whole]))
        v_values[i] = _v_of(v[i], np.int32(v_base[whole]))


@kernel
def _base(values: Any, codes: Any) -> Any:
    """The base for which the largest finite number, rounded up, has the code `codes`."""
    top = np.int32(0)
    for i in range(values.size):
        bits = np.int32(bits_of(values[i]) & 0x7FFFFFFF)
        top = max(top, bits if bits < np.int32(0x7F800000) else np.int32(0))
    return max(np.int32(np.int32(top >> 20) + 1 - codes), np.int32(0))


@kernel
def _round_8bit(m_values: Any, v_values: Any, m: Any, v: Any, m_base: Any, v_base: Any, key: Any, start: Any) -> None:
    for block in range(m_base.size):
        first = block * ELEMENTS
        m_base[block] = _base(m_values[first : first + ELEMENTS], 126)
        v_base[block] = _base(v_values[first : first + ELEMENTS], 254)
    whole = m.size // ELEMENTS
    for block in range(whole):
        first, m_now, v_now = block * ELEMENTS, np.int32(m_base[block]), np.int32(v_base[block])
        for j in range(ELEMENTS):
            noise = random_bits(key, start + first + j)
            m[first + j] = _m_code(m_values[first + j], m_now, noise)
            v[first + j] = _v_code(v_values[first + j], v_now, noise)
    for i in range(whole * ELEMENTS, m.size):
        noise = random_bits(key, start + i)
        m[i] = _m_code(m_values[i], np.int32(m_base[whole]), noise)
        v[i] = _v_code(v_values[i], np.int32(v_base[whole]), noise)


@kernel
def _update_bf16(weights: Any, lo: Any, m: Any, v: Any, gradient: Any, factor: Any, constants: Any, start: Any) -> int:
    shared, key = constants
    m_all, v_all = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    nonfinite = 0
    for first in range(0, weights.size, BLOCK):
        stop = min(first + BLOCK, weights.size)
        m_now, v_now = m_all[: stop - first], v_all[: stop - first]
        _expand_bf16(m[first:stop], m_now)
        _expand_bf16(v[first:stop], v_now)
        nonfinite += _moments(m_now, v_now, gradient[first:stop], factor, shared)
        if lo is None:
            _descend_whole(weights[first:stop], m_now, v_now, shared)
        else:
            _descend_split(weights[first:stop], lo[first:stop], m_now, v_now, shared)
        _round_bf16(m_now, v_now, m[first:stop], v[first:stop], key, start + first)
    return nonfinite


@kernel
def _update_8bit(
    weights: Any, lo: Any, m: Any, v: Any, m_base: Any, v_base: Any, gradient: Any, factor: Any, constants: Any,
    start: Any,
) -> int:  # fmt: skip
    shared, key = constants
    m_all, v_all = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    nonfinite = 0
    for first in range(0, weights.size, BLOCK):
        stop = min(first + BLOCK, weights.size)
        m_now, v_now = m_all[: stop - first], v_all[: stop - first]
        blocks = slice(first // ELEMENTS, -(-stop // ELEMENTS))
        _expand_8bit(m[first:stop], v[first:stop], m_base[blocks], v_base[blocks], m_now, v_now)
        nonfinite += _moments(m_now, v_now, gradient[first:stop], factor, shared)
        if lo is None:
            _descend_whole(weights[first:stop], m_now, v_now, shared)
        else:
            _descend_split(weights[first:stop], lo[first:stop], m_now, v_now, shared)
        _round_8bit(m_now, v_now, m[first:stop], v[first:stop], m_base[blocks], v_base[blocks], key, start + first)
    return nonfinite


@dataclass(frozen=True)
class LowBitAdamW(AdamW):
    """The `UpdateRule` of AdamW with moments of `width` bits; beside the weights' 4 bytes they take 4 or 2.0625.

    Args:
        width: "bf16" or "8bit".
    """

    width: Width = "bf16"

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """The moments, and for 8 bits a base for each block of them."""
        if self.width == "bf16":
            return StateArray("m", torch.bfloat16), StateArray("v", torch.bfloat16)
        return (
            StateArray("m", torch.int8),
            StateArray("v", torch.int8),
            StateArray("m_base", torch.int16, ELEMENTS),
            StateArray("v_base", torch.int16, ELEMENTS),
        )

    def constants(self, hyper: Hyper, step: int, salt: int) -> tuple[Any, ...]:
        """Those of `AdamW`, and the key of this step's random bits."""
        return super().constants(hyper, step, salt), np.int32(key_of(salt, step))

    def update(
        self, weights: Array, lo: Array | None, state: tuple[Array, ...], gradient: Array, factor: float,
        constants: Any, start: int,
    ) -> int:  # fmt: skip
        """Update one run of elements in place; see `UpdateRule.update`."""
        kernel = _update_bf16 if self.width == "bf16" else _update_8bit
        return int(kernel(weights, lo, *state, gradient, np.float32(factor), constants, start))

    def update_cuda(
        self, weights: torch.Tensor, lo: torch.Tensor | None, state: tuple[torch.Tensor, ...], gradient: torch.Tensor,
        factor: float, constants: Any, start: int, nonfinite: torch.Tensor,
    ) -> None:  # fmt: skip
        """Update one run of elements on the device; see `UpdateRule.update_cuda`."""
        from oomc.runtime.triton_kernels import adamw  # triton is there only where CUDA is

        shared, key = constants
        adamw(weights, lo, state, gradient, factor, shared, nonfinite, int(key), start)
