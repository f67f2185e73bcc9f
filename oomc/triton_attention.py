"""Attention with sinks, packed segments, a soft cap and windows as kernels for CUDA: the calls that cuDNN and flash
attention do not take.

FlashAttention-2 (Dao 2023): scores live in registers, a block of queries by a block of keys at a time, and the backward
computes them again from the logarithm of the softmax's denominator. Blocks of keys that a block of queries does not see
(behind it, before its window, of other documents) are skipped. Sums over keys and over the query heads of a KV head run
in a fixed order: the same bits in each call.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (the kernels: an annotation of theirs would be one to Triton)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
_DELTA_ROWS = 64


def _jit(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


@_jit
def _place(HEADS, BATCH, blocks):
    """Batch row, head and block of a program; programs of the last blocks come first, which have most to do."""
    program = tl.program_id(0)
    lane = program % (BATCH * HEADS)
    return (lane // HEADS).to(tl.int64), (lane % HEADS).to(tl.int64), blocks - 1 - program // (BATCH * HEADS)


@_jit
def _block(x, rows, stride, count, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """[rows, WIDTH] of [count, SIZE]; zeros outside."""
    columns = tl.arange(0, WIDTH)
    inside = (rows < count)[:, None] & (columns < SIZE)[None, :]
    return tl.load(x + rows.to(tl.int64)[:, None] * stride + columns[None, :], inside, other=0.0)


@_jit
def _store(x, rows, stride, count, value, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    inside = (rows < count)[:, None] & (columns < SIZE)[None, :]
    places = x + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(places, value.to(x.dtype.element_ty), inside)


@_jit
def _capped(score, softcap):
    """softcap * tanh(score / softcap)."""
    e = tl.exp2(-2.0 * LOG2E * tl.abs(score) / softcap)
    tanh = (1.0 - e) / (1.0 + e)
    return tl.where(score < 0.0, -softcap * tanh, softcap * tanh)


@_jit
def _seen(positions, keys, own, other, T, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr):
    """Which keys are seen; positions and keys broadcast to a block, as do their segments `own` and `other`."""
    seen = keys < T
    if CAUSAL:
        seen = seen & (keys <= positions)
    if WINDOW:
        seen = seen & (keys > positions - window)
    if SEGMENTS:
        seen = seen & (own == other)
    return seen


@_jit
def _meet(own, other, SEGMENTS: tl.constexpr):
    """Whether two blocks of segments may have one in common."""
    if SEGMENTS:
        return (tl.min(own) <= tl.max(other)) & (tl.max(own) >= tl.min(other))
    else:
        return True


@_jit
def _range_of_keys(first, rows, T, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    """The keys that any of `rows` positions from `first` on may see, from a multiple of KEYS on."""
    start, end = 0, T
    if CAUSAL:
        end = tl.minimum(T, first + rows)
    if WINDOW:
        start = tl.maximum(0, first - window + 1) // KEYS * KEYS
    return start, end


@_jit
def _forward(
    q, k, v, sinks, segments, out, lse, S, T, scale, softcap, window,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_s, BATCH, HEADS, GROUP,
    SIZE: tl.constexpr, V_SIZE: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    b, h, block = _place(HEADS, BATCH, tl.cdiv(S, ROWS))
    q, out, lse = q + b * q_b + h * q_h, out + b * o_b + h * o_h, lse + (b * HEADS + h) * S
    k, v = k + b * k_b + h // GROUP * k_h, v + b * v_b + h // GROUP * v_h
    rows = block * ROWS + tl.arange(0, ROWS)
    positions = rows + (T - S)
    own = tl.load(segments + b * T + positions, rows < S, other=0) if SEGMENTS else rows
    queries = _block(q, rows, q_s, S, SIZE, WIDTH)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    start, end = _range_of_keys(block * ROWS + T - S, ROWS, T, window, CAUSAL, WINDOW, KEYS)
    for first in range(start, end, KEYS):
        keys = first + tl.arange(0, KEYS)
        other = tl.load(segments + b * T + keys, keys < T, other=0) if SEGMENTS else keys
        if _meet(own, other, SEGMENTS):
            score = tl.dot(queries, tl.trans(_block(k, keys, k_s, T, SIZE, WIDTH))) * scale
            if SOFTCAP:
                score = _capped(score, softcap)
            seen = _seen(positions[:, None], keys[None, :], own[:, None], other[None, :], T, window,
                         CAUSAL, WINDOW, SEGMENTS)  # fmt: skip
            score = tl.where(seen, score, float("-inf"))
            new = tl.maximum(top, tl.max(score, 1))
            base = tl.where(new == float("-inf"), 0.0, new)  # nothing is seen yet
            p = tl.exp2((score - base[:, None]) * LOG2E)
            share = tl.exp2((top - base) * LOG2E)
            total = total * share + tl.sum(p, 1)
            values = _block(v, keys, v_s, T, V_SIZE, WIDTH)
            sums = sums * share[:, None] + tl.dot(p.to(values.dtype), values)
            top = new
    if SINKS:
        sink = tl.load(sinks + h).to(tl.float32)
        new = tl.maximum(top, sink)
        share = tl.exp2((top - new) * LOG2E)
        total, sums, top = total * share + tl.exp2((sink - new) * LOG2E), sums * share[:, None], new
    _store(out, rows, o_s, S, sums / total[:, None], V_SIZE, WIDTH)
    tl.store(lse + rows, top + tl.log2(total) / LOG2E, rows < S)


@_jit
def _delta(dout, out, delta, S, g_b, g_h, g_s, o_b, o_h, o_s, BATCH, HEADS,
           V_SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    b, h, block = _place(HEADS, BATCH, tl.cdiv(S, ROWS))
    rows = block * ROWS + tl.arange(0, ROWS)
    given = _block(dout + b * g_b + h * g_h, rows, g_s, S, V_SIZE, WIDTH).to(tl.float32)
    made = _block(out + b * o_b + h * o_h, rows, o_s, S, V_SIZE, WIDTH).to(tl.float32)
    tl.store(delta + (b * HEADS + h) * S + rows, tl.sum(given * made, 1), rows < S)


@_jit
def _slopes(score, lse, seen, given, delta, scale, softcap, SOFTCAP: tl.constexpr):
    """Probabilities and the gradient of q.k, of a block of scores without scale; what is broadcast comes so."""
    score *= scale
    slope = scale
    if SOFTCAP:
        score = _capped(score, softcap)
        slope *= 1.0 - (score / softcap) * (score / softcap)
    p = tl.where(seen, tl.exp2((score - lse) * LOG2E), 0.0)
    return p, p * (given - delta) * slope


@_jit
def _backward_keys(
    dout, q, k, v, segments, lse, delta, dk, dv, S, T, scale, softcap, window,
    g_b, g_h, g_s, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,
    e_b, e_h, e_s, f_b, f_h, f_s, BATCH, HEADS, GROUP,
    SIZE: tl.constexpr, V_SIZE: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dk and dv [B, Hkv, T, ...] of a block of keys: over all query heads that share them."""
    kv_heads = HEADS // GROUP
    b, kv, block = _place(kv_heads, BATCH, tl.cdiv(T, KEYS))
    k, v, dk, dv = k + b * k_b + kv * k_h, v + b * v_b + kv * v_h, dk + b * e_b + kv * e_h, dv + b * f_b + kv * f_h
    first_key = (tl.cdiv(T, KEYS) - 1 - block) * KEYS  # the first keys are seen by the most
    keys = first_key + tl.arange(0, KEYS)
    other = tl.load(segments + b * T + keys, keys < T, other=0) if SEGMENTS else keys
    own_keys, own_values = _block(k, keys, k_s, T, SIZE, WIDTH), _block(v, keys, v_s, T, V_SIZE, WIDTH)
    sum_k, sum_v = tl.zeros([KEYS, WIDTH], tl.float32), tl.zeros([KEYS, WIDTH], tl.float32)
    start, end = 0, S
    if CAUSAL:
        start = tl.maximum(0, first_key - (T - S)) // ROWS * ROWS
    if WINDOW:
        end = tl.minimum(S, first_key + KEYS - 1 + window - (T - S))
    for j in range(GROUP):
        h = kv * GROUP + j
        q_of, g_of, row_of = q + b * q_b + h * q_h, dout + b * g_b + h * g_h, (b * HEADS + h) * S
        for first in range(start, end, ROWS):
            rows = first + tl.arange(0, ROWS)
            positions = rows + (T - S)
            own = tl.load(segments + b * T + positions, rows < S, other=0) if SEGMENTS else rows
            if _meet(own, other, SEGMENTS):
                queries = _block(q_of, rows, q_s, S, SIZE, WIDTH)
                given = _block(g_of, rows, g_s, S, V_SIZE, WIDTH)
                seen = _seen(positions[None, :], keys[:, None], own[None, :], other[:, None], T, window,
                             CAUSAL, WINDOW, SEGMENTS) & (rows < S)[None, :]  # fmt: skip
                row_lse = tl.load(lse + row_of + rows, rows < S, other=0.0)
                row_delta = tl.load(delta + row_of + rows, rows < S, other=0.0)
                p, slope = _slopes(
                    tl.dot(own_keys, tl.trans(queries)), row_lse[None, :], seen, tl.dot(own_values, tl.trans(given)),
                    row_delta[None, :], scale, softcap, SOFTCAP,
                )  # fmt: skip
                sum_v += tl.dot(p.to(given.dtype), given)
                sum_k += tl.dot(slope.to(queries.dtype), queries)
    _store(dk, keys, e_s, T, sum_k, SIZE, WIDTH)
    _store(dv, keys, f_s, T, sum_v, V_SIZE, WIDTH)


@_jit
def _backward_queries(
    dout, q, k, v, segments, lse, delta, dq, S, T, scale, softcap, window,
    g_b, g_h, g_s, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, d_b, d_h, d_s, BATCH, HEADS, GROUP,
    SIZE: tl.constexpr, V_SIZE: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SEGMENTS: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries, which may lie where these do: no other program reads them. With EXACT, `delta` becomes
    the rows' sums of dout * out from unrounded probabilities, not from an `out` in 16 bits."""
    b, h, block = _place(HEADS, BATCH, tl.cdiv(S, ROWS))
    k, v = k + b * k_b + h // GROUP * k_h, v + b * v_b + h // GROUP * v_h
    rows = block * ROWS + tl.arange(0, ROWS)
    positions = rows + (T - S)
    own = tl.load(segments + b * T + positions, rows < S, other=0) if SEGMENTS else rows
    queries = _block(q + b * q_b + h * q_h, rows, q_s, S, SIZE, WIDTH)
    given = _block(dout + b * g_b + h * g_h, rows, g_s, S, V_SIZE, WIDTH)
    own_lse = tl.load(lse + (b * HEADS + h) * S + rows, rows < S, other=0.0)
    own_delta = tl.load(delta + (b * HEADS + h) * S + rows, rows < S, other=0.0)
    sums, exact = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS], tl.float32)
    start, end = _range_of_keys(block * ROWS + T - S, ROWS, T, window, CAUSAL, WINDOW, KEYS)
    for first in range(start, end, KEYS):
        keys = first + tl.arange(0, KEYS)
        other = tl.load(segments + b * T + keys, keys < T, other=0) if SEGMENTS else keys
        if _meet(own, other, SEGMENTS):
            their_keys = _block(k, keys, k_s, T, SIZE, WIDTH)
            values = _block(v, keys, v_s, T, V_SIZE, WIDTH)
            seen = _seen(positions[:, None], keys[None, :], own[:, None], other[None, :], T, window,
                         CAUSAL, WINDOW, SEGMENTS)  # fmt: skip
            dp = tl.dot(given, tl.trans(values))
            p, slope = _slopes(
                tl.dot(queries, tl.trans(their_keys)), own_lse[:, None], seen, dp, own_delta[:, None], scale,
                softcap, SOFTCAP,
            )  # fmt: skip
            if EXACT:
                exact += tl.sum(p * dp, 1)
            sums += tl.dot(slope.to(their_keys.dtype), their_keys)
    _store(dq + b * d_b + h * d_h, rows, d_s, S, sums, SIZE, WIDTH)
    if EXACT:
        tl.store(delta + (b * HEADS + h) * S + rows, exact, rows < S)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _sizes(q: Tensor, v: Tensor) -> dict[str, int]:
    """Sizes of heads, and the width of their blocks: one for both, a power of two.

    With values of 32 in a narrower block than keys of 64, the output was wrong by 0.9 of its norm (Triton 3.6 on an
    H200; right in Triton's interpreter).
    """
    size, v_size = q.shape[3], v.shape[3]
    return {"SIZE": size, "V_SIZE": v_size, "WIDTH": max(16, triton.next_power_of_2(max(size, v_size)))}


def _options(causal: bool, window: int | None, softcap: float, segments: Tensor | None) -> dict[str, bool]:
    return {
        "CAUSAL": causal, "WINDOW": window is not None, "SOFTCAP": softcap != 0.0, "SEGMENTS": segments is not None,
    }  # fmt: skip


def _blocks(width: int, backward: bool) -> tuple[int, int, dict[str, int]]:
    """Positions that a program keeps, positions that it goes over at a time, warps and stages: what fits shared memory
    and registers."""
    if width > 128:
        return 32 if backward else 64, 32, {"num_warps": 8, "num_stages": 1 if backward else 2}
    return 64, 64, {"num_warps": 8 if backward and width == 128 else 4, "num_stages": 2 if backward else 3}


def forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, segments: Tensor | None, out: Tensor, lse: Tensor,
    scale: float, causal: bool, window: int | None, softcap: float,
) -> None:  # fmt: skip
    """Attention of q [B, Hq, S, D], k, v [B, Hkv, T, ...] into out [B, Hq, S, Dv] and lse [B, Hq, S].

    Last dimensions have unit stride; segments [B, T] and lse are contiguous. S <= T.
    """
    batch, heads, count, keys = *q.shape[:3], k.shape[2]
    sizes = _sizes(q, v)
    kept, over, how = _blocks(sizes["WIDTH"], backward=False)
    _forward[triton.cdiv(count, kept) * batch * heads,](
        q, k, v, sinks, segments, out, lse, count, keys, scale, softcap, window or 0, *_strides(q, k, v, out),
        batch, heads, heads // k.shape[1], **sizes, SINKS=sinks is not None,
        **_options(causal, window, softcap, segments), ROWS=kept, KEYS=over, **how,
    )  # fmt: skip


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Tensor | None, delta: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, scale: float, causal: bool, window: int | None, softcap: float, exact: bool,
) -> None:  # fmt: skip
    """dq, dk and dv, and delta [B, Hq, S], the rows' sums of dout * out, with `exact` from unrounded probabilities.

    dq may be q. The rest is as for `forward`.
    """
    batch, heads, count, keys = *q.shape[:3], k.shape[2]
    sizes, options = _sizes(q, v), _options(causal, window, softcap, segments)
    kept, over, how = _blocks(sizes["WIDTH"], backward=True)
    numbers = (count, keys, scale, softcap, window or 0)
    shared = (batch, heads, heads // k.shape[1])
    values = {name: sizes[name] for name in ("V_SIZE", "WIDTH")}
    _delta[triton.cdiv(count, _DELTA_ROWS) * batch * heads,](
        dout, out, delta, count, *_strides(dout, out), batch, heads, **values, ROWS=_DELTA_ROWS
    )
    _backward_keys[triton.cdiv(keys, kept) * batch * k.shape[1],](
        dout, q, k, v, segments, lse, delta, dk, dv, *numbers, *_strides(dout, q, k, v, dk, dv), *shared,
        **sizes, **options, ROWS=over, KEYS=kept, **how,
    )  # fmt: skip
    _backward_queries[triton.cdiv(count, kept) * batch * heads,](
        dout, q, k, v, segments, lse, delta, dq, *numbers, *_strides(dout, q, k, v, dq), *shared,
        **sizes, **options, EXACT=exact, ROWS=kept, KEYS=over, **how,
    )  # fmt: skip
