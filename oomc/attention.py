"""`oomc::attention` and its backward: grouped heads, causal, sliding window, soft cap, sinks and packed segments.

Query i stands at position i + T - S (the queries are the last S of T positions). It sees key j where all of these hold:

- causal: j <= i + T - S;
- window w (causal only): j > i + T - S - w, that is w keys with itself, as transformers' sliding_window_overlay;
- segments: segments[b, i + T - S] == segments[b, j]. A padded position is a segment of its own value, so what is
  computed for it depends on padding only.

Scores are scale * q.k, then softcap * tanh(scores / softcap). A sink is one more logit of its head that takes part in
the softmax's denominator and carries no value (GPT-OSS).

Key-value heads are never expanded. The tiled form below holds scores for a bounded number of queries. On CUDA it serves
for fp32 and very wide heads; all else takes a kernel of cuDNN, of flash attention or our own (attention_kernels.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from oomc import attention_kernels as kernels
from oomc import target
from oomc.errors import UnsupportedError
from oomc.opdef import define, largest, wide

# Bytes of scores held at once. Several tensors of this size live together (scores, mask, and in the backward their
# gradient). Small on the CPU, where caches want it and memory is metered; large enough on a GPU to fill it.
_SCORE_BYTES = {"cpu": 8 << 20, "cuda": 128 << 20}
_MIN_ROWS = 64  # fewer query rows than this make thin matmuls: lanes are split first

_OPTIONS = "Tensor? segments, float scale, bool causal, SymInt? window, float softcap"


def _check(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, segments: Tensor | None, causal: bool, window: int | None
) -> None:
    """Raise UnsupportedError for calls outside the module's definition."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise UnsupportedError(f"oomc::attention takes [B, H, S, D] tensors, not {q.dim()}, {k.dim()}, {v.dim()} dims")
    if q.shape[1] % k.shape[1] != 0 or k.shape[1] != v.shape[1]:
        raise UnsupportedError(f"oomc::attention: {q.shape[1]} query heads over {k.shape[1]} and {v.shape[1]} KV heads")
    if q.shape[3] != k.shape[3] or not (q.dtype == k.dtype == v.dtype):
        raise UnsupportedError("oomc::attention: q and k differ in head size, or q, k and v in dtype")
    if window is not None and not causal:
        raise UnsupportedError("oomc::attention: a sliding window is supported for causal attention only")
    if sinks is not None and sinks.shape[0] != q.shape[1]:
        raise UnsupportedError("oomc::attention: one sink a query head is needed")
    if segments is not None and segments.dtype.is_floating_point:
        raise UnsupportedError("oomc::attention: segments are integers")


def _part(x: Tensor, dim: int, part: slice) -> Tensor:
    """A slice of one dimension, as a view."""
    return x.narrow(dim, part.start, part.stop - part.start)


@dataclass(frozen=True)
class _Tile:
    """Index ranges of batch rows, KV heads, query rows, and of the keys that any of these rows sees."""

    batch: slice
    heads: slice
    rows: slice
    keys: slice

    def scores(self) -> int:
        """How many scores the tile has, for each query head of a group."""
        sides = (self.batch, self.heads, self.rows, self.keys)
        return math.prod(side.stop - side.start for side in sides)

    def keys_of(self, x: Tensor) -> Tensor:
        """[B, Hkv, T, D], contiguous, as a view [batch * heads, keys, D]."""
        return _part(_part(_part(x, 0, self.batch), 1, self.heads), 2, self.keys).flatten(0, 1)

    def rows_of(self, x: Tensor) -> Tensor:
        """[B, Hkv, group, S, ...] as a view of the tile's part."""
        return _part(_part(_part(x, 0, self.batch), 1, self.heads), 3, self.rows)


@dataclass(frozen=True)
class _Tiled:
    """The sizes and options of one call, and what both directions of the tiled form share."""

    batch: int
    kv_heads: int
    group: int
    rows: int
    keys: int
    scale: float
    causal: bool
    window: int | None
    softcap: float
    device: torch.device
    dtype: torch.dtype

    def tiles(self) -> Iterator[_Tile]:
        """Tiles whose scores stay under the device's bound where one query row of one head group does."""
        row = self.group * max(self.keys, 1) * self.dtype.itemsize
        bound = _SCORE_BYTES.get(target.kind(self.device), _SCORE_BYTES["cuda"])
        lanes = max(1, bound // (row * min(_MIN_ROWS, max(self.rows, 1))))
        heads = min(lanes, self.kv_heads)
        batch = max(1, min(lanes // self.kv_heads, self.batch))
        rows = max(1, min(self.rows, bound // (row * heads * batch)))
        shift = self.keys - self.rows
        for b, h, r in product(range(0, self.batch, batch), range(0, self.kv_heads, heads), range(0, self.rows, rows)):
            end = min(r + rows, self.rows)
            hi = min(self.keys, end + shift) if self.causal else self.keys
            lo = 0 if self.window is None else max(0, r + shift - self.window + 1)
            yield _Tile(
                slice(b, min(b + batch, self.batch)),
                slice(h, min(h + heads, self.kv_heads)),
                slice(r, end),
                slice(lo, hi),
            )

    def wide(self, x: Tensor) -> Tensor:
        """Contiguous and in the wide dtype; a copy only where one of them asks for it."""
        return x.to(self.dtype).contiguous()

    def grouped(self, x: Tensor) -> Tensor:
        """[B, Hq, S, ...] as a view [B, Hkv, group, S, ...]."""
        return x.unflatten(1, (self.kv_heads, self.group))

    def block(self, x: Tensor, t: _Tile) -> Tensor:
        """A tile's rows of [B, Hkv, group, S, D] as [batch * heads, group * rows, D] in the wide dtype."""
        part = t.rows_of(x).to(self.dtype)
        return part.flatten(2, 3).flatten(0, 1)

    def hidden(self, t: _Tile, segments: Tensor | None) -> Tensor | None:
        """Bool mask of what a tile must not see, broadcastable to [batch, heads, group, rows, keys], or None."""
        first, last = t.rows.start + self.keys - self.rows, t.rows.stop + self.keys - self.rows
        mask: Tensor | None = None
        if self.causal:
            row = torch.arange(first, last, device=self.device).unsqueeze(1)
            key = torch.arange(t.keys.start, t.keys.stop, device=self.device)
            mask = key > row
            if self.window is not None:
                mask = mask.logical_or_(key <= row - self.window)
        if segments is not None:
            of_row, of_key = (
                _part(_part(segments, 0, t.batch), 1, slice(first, last)).reshape(-1, 1, 1, last - first, 1),
                _part(_part(segments, 0, t.batch), 1, t.keys).unsqueeze(1).unsqueeze(1).unsqueeze(1),
            )
            mask = of_row != of_key if mask is None else (of_row != of_key).logical_or_(mask)
        return mask

    def scores(self, t: _Tile, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Masked scores of a tile, [batch, heads, group, rows, keys]; `q` is its block, `k` the keys of all."""
        flat = torch.bmm(q, t.keys_of(k).mT).mul_(self.scale)
        if self.softcap:
            flat.div_(self.softcap).tanh_().mul_(self.softcap)
        score = flat.view(
            t.batch.stop - t.batch.start, t.heads.stop - t.heads.start, self.group, t.rows.stop - t.rows.start, -1
        )
        return score if mask is None else score.masked_fill_(mask, float("-inf"))

    def sinks(self, sinks: Tensor, t: _Tile) -> Tensor:
        """[Hq] as [1, heads, group, 1] in the wide dtype."""
        return _part(sinks.to(self.dtype).view(1, self.kv_heads, self.group, 1), 1, t.heads)


def _tiled(q: Tensor, k: Tensor, scale: float, causal: bool, window: int | None, softcap: float) -> _Tiled:
    return _Tiled(
        q.shape[0], k.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], scale, causal, window, softcap,
        q.device, wide(q.dtype),
    )  # fmt: skip


def _heads_inside(x: Tensor, heads: int, rows: int, size: int, dtype: torch.dtype | None = None) -> Tensor:
    """Empty [B, heads, rows, size] laid out as [B, rows, heads, size], as models store it before and after."""
    return x.new_empty(x.shape[0], rows, heads, size, dtype=dtype or x.dtype).transpose(1, 2)


def _as_heads_inside(x: Tensor) -> Tensor:
    """The same values in the layout of `_heads_inside`; no copy where they have it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    segments: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Body of `oomc::attention`: out [B, Hq, S, Dv] in q's dtype and lse [B, Hq, S] in fp32 (fp64 for fp64)."""
    _check(q, k, v, sinks, segments, causal, window)
    kernel = kernels.choose(q, k, v, segments is not None or sinks is not None, causal, window, softcap)
    if kernel == "triton":
        return kernels.own_forward(q, k, v, sinks, segments, scale, causal, window, softcap)
    if kernel != "tiled":
        out, lse = kernels.forward(kernel, q, k, v, scale, causal, window)
        return _as_heads_inside(out), lse.contiguous()
    call = _tiled(q, k, scale, causal, window, softcap)
    out = _heads_inside(q, q.shape[1], q.shape[2], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=call.dtype)
    k, v = call.wide(k), call.wide(v)
    q_rows, out_rows, lse_rows = call.grouped(q), call.grouped(out), call.grouped(lse)
    for t in largest(call.tiles(), _Tile.scores, of=q):
        p = call.scores(t, call.block(q_rows, t), k, call.hidden(t, segments))
        top = p.amax(-1)
        if sinks is not None:
            top = torch.maximum(top, call.sinks(sinks, t))
        total = p.sub_(top.unsqueeze(-1)).exp_().sum(-1)
        if sinks is not None:
            total += (call.sinks(sinks, t) - top).exp_()
        o = torch.bmm(p.view(-1, call.group * p.shape[3], p.shape[4]), t.keys_of(v)).view(*top.shape, -1)
        t.rows_of(out_rows).copy_(o.div_(total.unsqueeze(-1)))
        t.rows_of(lse_rows).copy_(total.log_().add_(top))
    return out, lse


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    segments: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Body of `oomc::attention_backward`: gradients of q, k, v and sinks (an empty tensor where there are none).

    Probabilities are recomputed from lse. The order of every sum is fixed in the tiled form; the kernels of cuDNN and
    flash attention are deterministic only as torch.use_deterministic_algorithms makes them.
    """
    return _gradients(False, dout, q, k, v, out, lse, sinks, segments, scale, causal, window, softcap)


def _backward_in_place(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    segments: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float,
) -> Tensor:
    """Body of `oomc::attention_backward_in_place`: as `_backward`, with the gradients of q, k and v in their memory.

    The same bits as from `_backward`. Returns the gradient of sinks.
    """
    written = [x.untyped_storage()._cdata for x in (q, k, v)]
    read = {x.untyped_storage()._cdata for x in (dout, out, lse)}
    assert len({*written, *read}) == 3 + len(read), "q, k or v shares its memory with another argument"
    return _gradients(True, dout, q, k, v, out, lse, sinks, segments, scale, causal, window, softcap)[3]


def _gradients(
    in_place: bool,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    segments: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and sinks; with `in_place`, the first three in the memory of q, k and v."""
    kernel = kernels.choose(q, k, v, segments is not None or sinks is not None, causal, window, softcap)
    if kernel == "triton":
        dq, dk, dv, delta = kernels.own_backward(
            dout, q, k, v, out, lse, segments, scale, causal, window, softcap, in_place, sinks is not None
        )  # fmt: skip
        return dq, dk, dv, _sink_gradient(sinks, lse, delta)
    if kernel != "tiled":
        found = kernels.backward(kernel, dout, q, k, v, out, lse, scale, causal, window, in_place)
        dq, dk, dv = found if in_place else map(_as_heads_inside, found)
        return dq, dk, dv, _sink_gradient(None, lse, lse)
    call = _tiled(q, k, scale, causal, window, softcap)
    dq, dk, dv = (q, k, v) if in_place else (_heads_inside(x, *x.shape[1:]) for x in (q, k, v))
    k, v = call.wide(k), call.wide(v)
    dk_sum, dv_sum = torch.zeros_like(k), torch.zeros_like(v)
    delta = torch.empty_like(lse)
    q_rows, lse_rows, dout_rows, dq_rows, delta_rows = (call.grouped(x) for x in (q, lse, dout, dq, delta))
    for t in largest(call.tiles(), _Tile.scores, of=q):
        q_block, dout_block = call.block(q_rows, t), call.block(dout_rows, t)
        score = call.scores(t, q_block, k, call.hidden(t, segments))
        # A hidden score is -inf; its slope may be any number, since its probability is 0.
        slope = (score / softcap).clamp_(min=-1.0).square_().neg_().add_(1.0) if softcap else None
        p = score.sub_(t.rows_of(lse_rows).unsqueeze(-1)).exp_().view(-1, q_block.shape[1], score.shape[4])
        t.keys_of(dv_sum).baddbmm_(p.mT, dout_block)
        ds = torch.bmm(dout_block, t.keys_of(v).mT)
        # a tile has all keys of its rows: the row sum of dout * out from unrounded probabilities, not from a bf16 out
        inner = torch.linalg.vecdot(ds, p).unsqueeze(-1)
        t.rows_of(delta_rows).copy_(inner.view(score.shape[:-1]))
        ds.sub_(inner).mul_(p)
        if slope is not None:
            ds.mul_(slope.view(ds.shape))
        t.keys_of(dk_sum).baddbmm_(ds.mT, q_block, alpha=scale)
        dq_part = torch.bmm(ds, t.keys_of(k)).mul_(scale)
        t.rows_of(dq_rows).copy_(dq_part.view(*score.shape[:-1], -1))  # last: these may be the rows of q
    return dq, dk.copy_(dk_sum), dv.copy_(dv_sum), _sink_gradient(sinks, lse, delta)


def _sink_gradient(sinks: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor:
    """[Hq]: minus the sink's probability times the row's sum of dout * out, over batch and rows; [0] without sinks."""
    if sinks is None:
        return lse.new_empty(0)
    return (sinks.to(lse.dtype).view(1, -1, 1) - lse).exp_().mul_(delta).sum((0, 2)).neg_().to(sinks.dtype)


def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    segments: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    _check(q, k, v, sinks, segments, causal, window)
    return _heads_inside(q, q.shape[1], q.shape[2], v.shape[3]), q.new_empty(q.shape[:3], dtype=wide(q.dtype))


def _backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (_heads_inside(x, *x.shape[1:]) for x in (q, k, v))
    return dq, dk, dv, _in_place_fake(dout, q, k, v, out, lse, sinks)


def _in_place_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, *_: Any
) -> Tensor:
    return lse.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, segments, *ctx.options = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, sinks, segments)


def _gradient(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 9
    q, k, v, out, lse, sinks, segments = ctx.saved_tensors
    dq, dk, dv, dsinks = attention_backward(dout, q, k, v, out, lse, sinks, segments, *ctx.options)
    return dq, dk, dv, None if sinks is None else dsinks, None, None, None, None, None


attention_backward = define(
    "attention_backward",
    f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? sinks, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    traceable=True,
)
attention_backward_in_place = define(
    "attention_backward_in_place",
    "(Tensor dout, Tensor(a!) q, Tensor(b!) k, Tensor(c!) v, Tensor out, Tensor lse, Tensor? sinks, "
    f"{_OPTIONS}) -> Tensor",
    _backward_in_place,
    _in_place_fake,
    traceable=True,
    mutates=("q", "k", "v"),
)
attention = define(
    "attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_OPTIONS}) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    traceable=True,
    setup_context=_setup_context,
    backward=_gradient,
)
