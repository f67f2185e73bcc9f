"""`oomc::gated_delta_rule`: linear attention with a decaying state (Qwen3-Next), and its backward.

For each head, with a state S [Dk, Dv] that starts at zero or as it is given, position t does

    S = exp(g_t) S
    S = S + k_t (beta_t (v_t - S^T k_t))^T
    out_t = S^T q_t / sqrt(Dk)

computed for a chunk of positions at once, as transformers' torch_chunk_gated_delta_rule does, in fp32 (fp64 for fp64).
Within a chunk, with G the running sum of g and D[i, j] = exp(G_i - G_j) for j <= i:

    A = tril(beta k k^T * D, -1)      U = (I + A)^-1 (beta v)      W = (I + A)^-1 (beta k exp(G))
    P = q k^T * D                     N = U - W S
    out = (q exp(G)) S + P N          S' = exp(G_last) S + (k exp(G_last - G))^T N

The forward keeps the state before each chunk and after the last, which is a result of its own: a sequence may be run in
parts, each with the state that the part before it left. The backward goes over the chunks from last to first, computes
each again and applies the derivative of the equations above; it takes the gradient of the last state and gives that of
the first. Beside inputs, outputs and states, memory is that of one chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from oomc.opdef import define, largest, wide

_EPS = 1e-6  # of the l2 norm, as in transformers and flash-linear-attention


class _Chunk(NamedTuple):
    """What one chunk of C positions computes before it meets the state, [B, Hv, C, ...] in the wide dtype."""

    q: Tensor  # normalised and scaled
    k: Tensor  # normalised
    v: Tensor
    beta: Tensor  # [B, Hv, C, 1], as the next two
    up: Tensor  # exp(G)
    down: Tensor  # exp(G_last - G)
    pair: Tensor  # D
    a: Tensor  # I + A
    u: Tensor
    w: Tensor
    p: Tensor


def _rows(x: Tensor, start: int, end: int, heads: int) -> Tensor:
    """Positions start:end of [B, S, H, ...] as [B, heads, C, ...] in the wide dtype, heads repeated to their number."""
    part = x[:, start:end].transpose(1, 2).to(wide(x.dtype))
    repeat = heads // x.shape[2]
    return part.contiguous() if repeat == 1 else part.repeat_interleave(repeat, dim=1)


def _norm(x: Tensor) -> Tensor:
    """[..., 1]: one over the l2 norm."""
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _solve(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, start: int, end: int, l2norm: bool
) -> tuple[_Chunk, Tensor, Tensor]:
    """The chunk start:end, and the raw q and k that its derivative needs."""
    heads = v.shape[2]
    raw_q, raw_k, v_, g_, beta_ = (_rows(x, start, end, heads) for x in (q, k, v, g, beta))
    dtype = torch.promote_types(raw_q.dtype, g_.dtype)
    raw_q, raw_k, v_, g_, beta_ = (x.to(dtype) for x in (raw_q, raw_k, v_, g_, beta_))
    q_ = (raw_q * _norm(raw_q) if l2norm else raw_q) * q.shape[-1] ** -0.5
    k_ = raw_k * _norm(raw_k) if l2norm else raw_k
    beta_, total = beta_[..., None], g_.cumsum(-1)
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    hidden = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).triu_(1)
    pair = (total[..., :, None] - total[..., None, :]).masked_fill_(hidden, float("-inf")).exp_()
    up, down = total.exp()[..., None], (total[..., -1:] - total).exp_()[..., None]
    a = ((beta_ * k_) @ k_.mT).mul_(pair).tril_(-1)
    a.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    u, w = _solve(a, beta_ * v_), _solve(a, beta_ * k_ * up)
    p = (q_ @ k_.mT).mul_(pair)
    return _Chunk(q_, k_, v_, beta_, up, down, pair, a, u, w, p), raw_q, raw_k


def _bounds(rows: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def _rows_in(item: tuple[int, tuple[int, int]]) -> int:
    return item[1][1] - item[1][0]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, chunk: int, l2norm: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Body of `oomc::gated_delta_rule`: of q and k [B, S, Hk, Dk], v [B, S, Hv, Dv], g and beta [B, S, Hv].

    `state` [B, Hv, Dk, Dv], in the wide dtype, is the one before the first position (None: zero).

    Returns:
        out [B, S, Hv, Dv] in q's dtype; states [chunks + 1, B, Hv, Dk, Dv], without a gradient; the last of them.
    """
    out = v.new_empty(v.shape, dtype=q.dtype)
    bounds = _bounds(v.shape[1], chunk)
    dtype = wide(q.dtype)
    states = q.new_empty((len(bounds) + 1, v.shape[0], v.shape[2], k.shape[3], v.shape[3]), dtype=dtype)
    if state is None:
        states[0].zero_()
    else:
        states[0].copy_(state)
    for i, (start, end) in largest(enumerate(bounds), _rows_in, of=q):
        before = states[i]
        c, _, _ = _chunk(q, k, v, g, beta, start, end, l2norm)
        new = c.u - c.w @ before
        out[:, start:end].copy_(((c.q * c.up) @ before + c.p @ new).transpose(1, 2))
        states[i + 1].copy_(before * c.up[..., -1:, :] + (c.k * c.down).mT @ new)
    return out, states, states[-1].clone()


def _norm_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Gradient of x from that of y = x / |x|."""
    r = _norm(x)
    y = x * r
    return (dy - y * (dy * y).sum(-1, keepdim=True)).mul_(r)


def _store(into: Tensor, grad: Tensor, start: int, end: int) -> None:
    """Write [B, Hv, C, ...] to positions start:end of [B, S, H, ...], summed over the heads that share one."""
    repeat = grad.shape[1] // into.shape[2]
    if repeat > 1:
        grad = grad.unflatten(1, (-1, repeat)).sum(2)
    into[:, start:end].copy_(grad.transpose(1, 2))


def _backward(
    dout: Tensor,
    dlast_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    chunk: int,
    l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Body of `oomc::gated_delta_rule_backward`; `dlast_state` is the last state's gradient (None: zero).

    Returns:
        Gradients in the shapes and dtypes of q, k, v, g and beta, and of the first state.
    """  # fmt: skip
    dq, dk, dv, dg, dbeta = (x.new_empty(x.shape) for x in (q, k, v, g, beta))
    dstate = torch.zeros_like(states[0]) if dlast_state is None else dlast_state.clone()
    bounds = _bounds(v.shape[1], chunk)
    for i, (start, end) in reversed(largest(enumerate(bounds), _rows_in, of=q)):
        state = states[i]
        c, raw_q, raw_k = _chunk(q, k, v, g, beta, start, end, l2norm)
        do = dout[:, start:end].transpose(1, 2).to(state.dtype)
        new = c.u - c.w @ state
        q_up, k_down, last = c.q * c.up, c.k * c.down, c.up[..., -1:, :]
        # out = q_up S + P N and S' = last S + k_down^T N
        dnew = c.p.mT @ do + k_down @ dstate
        dp, dq_up, dk_down = do @ new.mT, do @ state.mT, new @ dstate.mT
        dlast = (state * dstate).sum((-2, -1)) * last[..., 0, 0]
        dstate = q_up.mT @ do + last * dstate - c.w.mT @ dnew
        # N = U - W S; U and W solve (I + A) X = Y, so dY = (I + A)^-T dX and dA = -dY X^T
        dy_u = torch.linalg.solve_triangular(c.a.mT, dnew, upper=True, unitriangular=True)
        dy_w = torch.linalg.solve_triangular(c.a.mT, -dnew @ state.mT, upper=True, unitriangular=True)
        da = (dy_u @ c.u.mT + dy_w @ c.w.mT).neg_().tril_(-1)
        k_beta = c.beta * c.k
        dgram, dp_pair = da * c.pair, dp * c.pair
        dk_beta = dgram @ c.k + dy_w * c.up
        dq_ = dq_up * c.up + dp_pair @ c.k
        dk_ = dk_down * c.down + dp_pair.mT @ c.q + dgram.mT @ k_beta + c.beta * dk_beta
        # D enters through A and P: d log D[i, j] adds to G_i and takes from G_j. On the diagonal, whose terms are the
        # largest, the two cancel: they are left out rather than left to rounding.
        dlog = (da * c.a + dp * c.p).tril_(-1)
        tail = (dk_down * k_down).sum(-1)
        dtotal = dlog.sum(-1) - dlog.sum(-2) + (dq_up * q_up).sum(-1) + (dy_w * k_beta * c.up).sum(-1) - tail
        dtotal[..., -1] += tail.sum(-1) + dlast
        dq_ = dq_ * q.shape[-1] ** -0.5
        _store(dq, _norm_gradient(dq_, raw_q) if l2norm else dq_, start, end)
        _store(dk, _norm_gradient(dk_, raw_k) if l2norm else dk_, start, end)
        _store(dv, c.beta * dy_u, start, end)
        _store(dg, dtotal.flip(-1).cumsum(-1).flip(-1), start, end)
        _store(dbeta, (dy_u * c.v).sum(-1) + (dk_beta * c.k).sum(-1), start, end)
    return dq, dk, dv, dg, dbeta, dstate


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, chunk: int, l2norm: bool
) -> tuple[Tensor, Tensor, Tensor]:
    one = (v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    # One more than there are chunks: never 1, on which a symbolic size would be specialised.
    states = q.new_empty(((v.shape[1] + chunk - 1) // chunk + 1, *one), dtype=wide(q.dtype))
    return v.new_empty(v.shape, dtype=q.dtype), states, states.new_empty(one)


def _backward_fake(
    dout: Tensor, dlast_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv, dg, dbeta = (x.new_empty(x.shape) for x in (q, k, v, g, beta))
    return dq, dk, dv, dg, dbeta, states.new_empty(states.shape[1:])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, state, ctx.chunk, ctx.l2norm = inputs
    ctx.given = state is not None
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1])


def _gradient(ctx: Any, dout: Tensor | None, dstates: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None and dlast is None:
        return (None,) * 8
    q, _, v, *_ = ctx.saved_tensors
    dout = v.new_zeros(v.shape, dtype=q.dtype) if dout is None else dout
    *grads, dstate = gated_delta_rule_backward(dout, dlast, *ctx.saved_tensors, ctx.chunk, ctx.l2norm)
    return *grads, dstate if ctx.given else None, None, None


gated_delta_rule_backward = define(
    "gated_delta_rule_backward",
    "(Tensor dout, Tensor? dlast_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor states, int chunk,"
    " bool l2norm) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    traceable=True,
)
gated_delta_rule = define(
    "gated_delta_rule",
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? state, int chunk, bool l2norm)"
    " -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    traceable=True,
    setup_context=_setup_context,
    backward=_gradient,
)
