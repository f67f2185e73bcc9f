"""The update rules' kernels for CUDA, which give the bits that the numba kernels give (a NaN's fp32 payload aside).

What that takes: no contraction (`enable_fp_fusion=False`) but explicit `fma` where numba has `fused`; square roots and
quotients rounded to nearest and kept where they are denormal (`enable_reflect_ftz=False`, `sqrt_rn`, `div_rn`); bf16
data as int16 bits. Everything that changes from step to step is a plain float argument, or an integer that is not
specialised for, so that a kernel is compiled once for each combination of dtypes (and of sizes and addresses being
multiples of 16 or not, for wide loads), not for each step.

Tiles are of [ROWS, 64] elements: a row is a block of the 8-bit state. Triton is imported here, in
oomc.expert_kernels, oomc.sum_kernels and oomc.triton_attention.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (the kernels: an annotation of theirs would be one to Triton)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

_ROWS, _COLUMNS = 16, 64
COLUMNS = tl.constexpr(_COLUMNS)
_TILE = _ROWS * _COLUMNS
_TILES = 16  # that a program sums up
_EXACT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}


def _jit(*unspecialised: str) -> Callable[[Callable[..., Any]], Any]:
    return triton.jit(do_not_specialize=list(unspecialised), do_not_specialize_on_alignment=["m_base", "v_base"])


@_jit()
def _places(n, ROWS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return places, places < n


@_jit()
def _widen(values):
    """float32 of bf16 bits; float32 as it is."""
    if values.dtype == tl.int16:
        values = (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return values


@_jit()
def _count(g, inside, nonfinite):
    bad = ((g.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000) & inside
    count = tl.sum(tl.sum(bad.to(tl.int32), axis=1), axis=0)
    tl.atomic_add(nonfinite, count, mask=count > 0, sem="relaxed")


@_jit()
def _load_master(weights, lo, at, inside, SPLIT: tl.constexpr):
    if SPLIT:
        high = tl.load(weights + at, inside, other=0).to(tl.int32) << 16
        p = (high + tl.load(lo + at, inside, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        p = tl.load(weights + at, inside, other=0.0)
    return p


@_jit()
def _store_master(weights, lo, at, inside, p, SPLIT: tl.constexpr):
    if SPLIT:
        bits = p.to(tl.int32, bitcast=True)
        number = p == p
        tl.store(weights + at, tl.where(number, (bits + 0x8000) >> 16, 0x7FC0).to(tl.int16), inside)
        tl.store(lo + at, tl.where(number, bits, 0).to(tl.int16), inside)
    else:
        tl.store(weights + at, p, inside)


@_jit()
def _random_bits(key, index):
    """uint32, as `oomc.runtime.low_bit.random_bits`."""
    bits = index.to(tl.uint32) ^ key.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@_jit()
def _rounded(value, noise):
    bits = (value.to(tl.int32, bitcast=True) + noise) >> 16
    return tl.where(value == value, bits, 0x7FC0).to(tl.int16)


@_jit()
def _expand_8bit(code, base, CODES: tl.constexpr):
    """float32 of the codes 0 to `CODES`, of which the last is NaN; the bits above are left out."""
    magnitude = code.to(tl.int32) & CODES
    bits = tl.where(magnitude > 0, (magnitude + base.to(tl.int32)[:, None]) << 20, 0)
    return tl.where(magnitude == CODES, 0x7FC00000, bits)


@_jit()
def _base(value, CODES: tl.constexpr):
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top = tl.max(tl.where(bits < 0x7F800000, bits, 0), axis=1)
    return tl.maximum((top >> 20) + 1 - (CODES - 1), 0)


@_jit()
def _code(value, noise, base, LEAST: tl.constexpr):
    """The code of a number that is finite, at least `LEAST` for all but 0."""
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.maximum(((bits + noise) >> 20) - base[:, None], tl.where(bits > 0, LEAST, 0))


@_jit()
def _is_finite(value):
    return (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000


@_jit()
def _load_moments(m_at, v_at, m_base, v_base, at, inside, rows, held, WIDTH: tl.constexpr):
    m, v = tl.load(m_at + at, inside, other=0), tl.load(v_at + at, inside, other=0)
    if WIDTH == 16:
        m, v = _widen(m), _widen(v)
    elif WIDTH == 8:
        sign = (m.to(tl.int32) & -128) << 24
        magnitude = _expand_8bit(m, tl.load(m_base + rows, held, other=0), 127)
        m = tl.where(magnitude == 0x7FC00000, magnitude, magnitude | sign).to(tl.float32, bitcast=True)
        v = _expand_8bit(v, tl.load(v_base + rows, held, other=0), 255).to(tl.float32, bitcast=True)
    return m, v


@_jit()
def _store_moments(m_at, v_at, m_base, v_base, at, inside, rows, held, m, v, noise, WIDTH: tl.constexpr):
    if WIDTH == 32:
        tl.store(m_at + at, m, inside)
        tl.store(v_at + at, v, inside)
    elif WIDTH == 16:
        tl.store(m_at + at, _rounded(m, (noise & 0xFFFF).to(tl.int32)), inside)
        tl.store(v_at + at, _rounded(v, (noise >> 16).to(tl.int32)), inside)
    else:
        m_new, v_new = _base(m, 127), _base(v, 255)
        code = _code(m, ((noise & 0xFFFF) << 4).to(tl.int32), m_new, 0)
        code = code | ((m.to(tl.int32, bitcast=True) >> 24) & -128)
        tl.store(m_at + at, tl.where(_is_finite(m), code, 127).to(tl.int8), inside)
        code = _code(v, ((noise >> 16) << 4).to(tl.int32), v_new, 1)
        tl.store(v_at + at, tl.where(_is_finite(v), code, 255).to(tl.int8), inside)
        tl.store(m_base + rows, m_new.to(tl.int16), held)
        tl.store(v_base + rows, v_new.to(tl.int16), held)


@_jit("from_gradient", "key", "start")
def _adamw(
    weights, lo, m_at, v_at, m_base, v_base, gradient, nonfinite, n, factor,
    decay, weight, from_gradient, beta2, one_minus_beta2, step_size, root2, eps, key, start,
    SPLIT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    at, inside = _places(n, ROWS)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    held = rows * COLUMNS < n
    g = _widen(tl.load(gradient + at, inside, other=0)) * factor
    _count(g, inside, nonfinite)
    m, v = _load_moments(m_at, v_at, m_base, v_base, at, inside, rows, held, WIDTH)
    m = tl.fma(weight, g - m, tl.where(from_gradient != 0, g, m))
    v = tl.fma(one_minus_beta2 * g, g, v * beta2)
    p = _load_master(weights, lo, at, inside, SPLIT)
    p = p * decay - tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), root2) + eps)
    _store_master(weights, lo, at, inside, p, SPLIT)
    noise = _random_bits(key, start + at)
    _store_moments(m_at, v_at, m_base, v_base, at, inside, rows, held, m, v, noise, WIDTH)


@_jit("decays", "first", "nesterov")
def _sgd(
    weights, lo, buffer, gradient, nonfinite, n, factor,
    decays, weight_decay, first, momentum, undamped, nesterov, descent,
    SPLIT: tl.constexpr, MOMENTUM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    at, inside = _places(n, ROWS)
    g = _widen(tl.load(gradient + at, inside, other=0)) * factor
    _count(g, inside, nonfinite)
    p = _load_master(weights, lo, at, inside, SPLIT)
    g = tl.where(decays != 0, tl.fma(weight_decay, p, g), g)
    if MOMENTUM:
        old = tl.load(buffer + at, inside, other=0.0)
        moved = tl.where(first != 0, g, tl.fma(undamped, g, old * momentum))
        moved = tl.where(momentum == 0.0, old, moved)
        tl.store(buffer + at, moved, inside)
        ahead = tl.where(nesterov != 0, tl.fma(momentum, moved, g), moved)
        g = tl.where(momentum == 0.0, g, ahead)
    _store_master(weights, lo, at, inside, tl.fma(descent, g, p), SPLIT)


@_jit()
def _accumulate(total, gradient, n, weight, FRESH: tl.constexpr, ROWS: tl.constexpr):
    at, inside = _places(n, ROWS)
    value = weight * _widen(tl.load(gradient + at, inside, other=0))
    if not FRESH:
        value = tl.load(total + at, inside, other=0.0) + value
    tl.store(total + at, value, inside)


@_jit()
def _squares(values, partial, n, TILE: tl.constexpr, TILES: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    sums = tl.zeros([TILE], tl.float64)
    for tile in range(TILES):
        at = (program * TILES + tile) * TILE + tl.arange(0, TILE)
        x = _widen(tl.load(values + at, at < n, other=0)).to(tl.float64)
        sums += x * x
    tl.store(partial + program, tl.sum(sums, axis=0))


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16) if values.dtype == torch.bfloat16 else values


def _numbers(constants: Sequence[Any]) -> list[float | int]:
    """Constants for the host as kernel arguments: an fp32 number is exact as a Python float, a flag an int."""
    return [int(x) if isinstance(x, bool) else float(x) for x in constants]


def _wrapped(value: int) -> int:
    """The lower 32 bits as a signed number: a larger integer would be of another type to the kernel."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def _on(device: torch.device) -> torch.cuda.device:
    """The device as the current one; the CPU (Triton's interpreter) changes nothing."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def _launch(function: Any, device: torch.device, n: int, *arguments: Any, **options: Any) -> None:
    if n > 0:
        with _on(device):
            function[(triton.cdiv(n, _TILE),)](*arguments, **options, ROWS=_ROWS, **_EXACT)


def adamw(
    weights: torch.Tensor, lo: torch.Tensor | None, state: tuple[torch.Tensor, ...], gradient: torch.Tensor,
    factor: float, constants: Sequence[Any], nonfinite: torch.Tensor, key: int = 0, start: int = 0,
) -> None:  # fmt: skip
    """AdamW with state (m, v) in fp32 or bf16, or (m, v, m_base, v_base) in 8 bits.

    `key` and `start` (which may wrap around at 32 bits) are for low-bit state; the rest is as for
    `UpdateRule.update_cuda`.
    """
    n, split = weights.numel(), lo is not None
    m, v = _bits(state[0]), _bits(state[1])
    bases = state[2:] or (m, v)
    _launch(
        _adamw, weights.device, n, weights, lo if split else weights, m, v, *bases, _bits(gradient), nonfinite, n,
        float(factor), *_numbers(constants), key, _wrapped(start), SPLIT=split, WIDTH=8 * m.element_size(),
    )  # fmt: skip


def sgd(
    weights: torch.Tensor, lo: torch.Tensor | None, state: tuple[torch.Tensor, ...], gradient: torch.Tensor,
    factor: float, constants: Sequence[Any], nonfinite: torch.Tensor,
) -> None:  # fmt: skip
    """SGD with a momentum buffer, or with no state: arguments as of `UpdateRule.update_cuda`."""
    n, split = weights.numel(), lo is not None
    _launch(
        _sgd, weights.device, n, weights, lo if split else weights, state[0] if state else weights, _bits(gradient),
        nonfinite, n, float(factor), *_numbers(constants), SPLIT=split, MOMENTUM=bool(state),
    )  # fmt: skip


def accumulate_cuda(total: torch.Tensor, gradient: torch.Tensor, fresh: bool, weight: float = 1.0) -> None:
    """`oomc.runtime.kernels.accumulate` on the current stream: total float32 [n], gradient bfloat16 or float32 [n]."""
    n = total.numel()
    weight = float(torch.tensor(weight, dtype=torch.float32))
    _launch(_accumulate, total.device, n, total, _bits(gradient), n, weight, FRESH=bool(fresh))


def sum_of_squares_cuda(gradient: torch.Tensor) -> torch.Tensor:
    """Sum of squares of bfloat16 or float32 [n] in fp64, as a float64 0-dim tensor, on the current stream.

    The order of the additions depends on n only, but is not that of `oomc.runtime.kernels.sum_of_squares`.
    """
    n, device = gradient.numel(), gradient.device
    programs = triton.cdiv(n, _TILE * _TILES)
    partial = torch.empty(programs, dtype=torch.float64, device=device)
    if n > 0:
        with _on(device):
            _squares[(programs,)](_bits(gradient), partial, n, TILE=_TILE, TILES=_TILES, **_EXACT)
    return partial.sum()
