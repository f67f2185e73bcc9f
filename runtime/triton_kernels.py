"""The update rules' kernels for CUDA, which give the bits that the numba kernels give (a NaN's fp32 payload aside).

What that takes: no contraction (`enable_fp_fusion=False`) but explicit `fma` where numba has `fused`; square roots and
quotients rounded to nearest and kept where they are denormal (`enable_reflect_ftz=False`, `sqrt_rn`, `div_rn`); bf16
data as int16 bits. Everything that changes from step to step is a plain float argument, or an integer that is not
specialised for, so that a kernel is compiled once for each combination of dtypes (and of the sizes' divisibility by
16, for wide loads), not for each step.

Tiles are of [ROWS, 64] elements: a row is a block of the 8-bit state. Triton is imported here and nowhere else.
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
    return triton.jit(do_not_specialize=list(unspecialised))


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


@_jit("from_gradient")
def _adamw(
    weights, lo, m_at, v_at, gradient, nonfinite, n, factor,
    decay, weight, from_gradient, beta2, one_minus_beta2, step_size, root2, eps,
    SPLIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    at, inside = _places(n, ROWS)
    g = _widen(tl.load(gradient + at, inside, other=0)) * factor
    _count(g, inside, nonfinite)
    m, v = tl.load(m_at + at, inside, other=0.0), tl.load(v_at + at, inside, other=0.0)
    m = tl.fma(weight, g - m, tl.where(from_gradient != 0, g, m))
    v = tl.fma(one_minus_beta2 * g, g, v * beta2)
    p = _load_master(weights, lo, at, inside, SPLIT)
    p = p * decay - tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), root2) + eps)
    _store_master(weights, lo, at, inside, p, SPLIT)
    tl.store(m_at + at, m, inside)
    tl.store(v_at + at, v, inside)


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


def _on(device: torch.device) -> torch.cuda.device:
    """The device as the current one; the CPU (Triton's interpreter) changes nothing."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def _launch(function: Any, device: torch.device, n: int, *arguments: Any, **options: Any) -> None:
    if n > 0:
        with _on(device):
            function[(triton.cdiv(n, _TILE),)](*arguments, **options, ROWS=_ROWS, **_EXACT)


def adamw(
    weights: torch.Tensor, lo: torch.Tensor | None, state: tuple[torch.Tensor, ...], gradient: torch.Tensor,
    factor: float, constants: Sequence[Any], nonfinite: torch.Tensor,
) -> None:  # fmt: skip
    """AdamW with fp32 state (m, v): arguments as of `UpdateRule.update_cuda`."""
    n, split = weights.numel(), lo is not None
    m, v = state
    _launch(
        _adamw, weights.device, n, weights, lo if split else weights, m, v, _bits(gradient), nonfinite, n,
        float(factor), *_numbers(constants), SPLIT=split,
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
