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
the first.

Only N, S' and their gradients pass from chunk to chunk, by two small products each; all else is computed for a group of
chunks at once, so that a GPU has something to do in each kernel. Beside inputs, outputs and states, memory is that of
one group, whose tensors take GROUP_BYTES each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor

from oomc.opdef import define, largest, wide

GROUP_BYTES = 8 << 20
"""Of a tensor [B, Hv, chunks, C, D] in the wide dtype: as many chunks are in a group, one at least."""
_EPS = 1e-6  # of the l2 norm, as in transformers and flash-linear-attention


class _Chunk(NamedTuple):
    """What n chunks of C positions compute before they meet the state, [B * Hv, n, C, ...] in the wide dtype."""

    q: Tensor  # normalised and scaled
    k: Tensor  # normalised
    v: Tensor
    beta: Tensor  # [B * Hv, n, C, 1], as the next two
    up: Tensor  # exp(G)
    down: Tensor  # exp(G_last - G)
    pair: Tensor  # D
    a: Tensor  # I + A
    u: Tensor
    w: Tensor
    p: Tensor


class _Group(NamedTuple):
    """Chunks that are computed together: `many` from number `first` on, of `size` positions each from `start` on."""

    first: int
    start: int
    many: int
    size: int

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.start + self.many * self.size

    @property
    def numbers(self) -> slice:
        """Of its chunks."""
        return slice(self.first, self.first + self.many)


def chunks_together(lanes: Any, chunk: int, width: int) -> Any:
    """Chunks in a group, for so many heads of all rows (a number or an expression) and the wider of the head sizes."""
    size = 4 * lanes * chunk * width
    return (
        max(1, GROUP_BYTES // max(1, size)) if isinstance(size, int) else sympy.Max(1, sympy.floor(GROUP_BYTES / size))
    )


def _groups(v: Tensor, width: int, chunk: int) -> list[_Group]:
    """All chunks of v [B, S, Hv, Dv]; the last one, if it is shorter, by itself."""
    batch, rows, heads = v.shape[:3]
    most, whole = chunks_together(batch * heads, chunk, width), rows // chunk
    groups = [_Group(i, i * chunk, min(most, whole - i), chunk) for i in range(0, whole, most)]
    if rows % chunk:
        groups.append(_Group(whole, whole * chunk, 1, rows % chunk))
    return groups


def _positions(group: _Group) -> int:
    return group.many * group.size


def _rows(x: Tensor, group: _Group, heads: int) -> Tensor:
    """A group's positions of [B, S, H, ...] as [B * heads, n, C, ...] in the wide dtype, heads repeated."""
    part = x[:, group.start : group.end].transpose(1, 2).to(wide(x.dtype))
    repeat = heads // x.shape[2]
    part = part.contiguous() if repeat == 1 else part.repeat_interleave(repeat, dim=1)
    return part.flatten(0, 1).unflatten(1, (group.many, group.size))


def _norm(x: Tensor) -> Tensor:
    """[..., 1]: one over the l2 norm."""
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _solve(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, group: _Group, l2norm: bool
) -> tuple[_Chunk, Tensor, Tensor]:
    """A group's chunks, and the raw q and k that their derivative needs."""
    heads, size = v.shape[2], group.size
    raw_q, raw_k, v_, g_, beta_ = (_rows(x, group, heads) for x in (q, k, v, g, beta))
    dtype = torch.promote_types(raw_q.dtype, g_.dtype)
    raw_q, raw_k, v_, g_, beta_ = (x.to(dtype) for x in (raw_q, raw_k, v_, g_, beta_))
    q_ = (raw_q * _norm(raw_q) if l2norm else raw_q) * q.shape[-1] ** -0.5
    k_ = raw_k * _norm(raw_k) if l2norm else raw_k
    beta_, total = beta_[..., None], g_.cumsum(-1)
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    hidden = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
    pair = (total[..., :, None] - total[..., None, :]).masked_fill_(hidden, float("-inf")).exp_()
    up, down = total.exp()[..., None], (total[..., -1:] - total).exp_()[..., None]
    a = ((beta_ * k_) @ k_.mT).mul_(pair).tril_(-1)
    a.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    u, w = _solve(a, beta_ * v_), _solve(a, beta_ * k_ * up)
    p = (q_ @ k_.mT).mul_(pair)
    return _Chunk(q_, k_, v_, beta_, up, down, pair, a, u, w, p), raw_q, raw_k


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, chunk: int, l2norm: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Body of `oomc::gated_delta_rule`: of q and k [B, S, Hk, Dk], v [B, S, Hv, Dv], g and beta [B, S, Hv].

    `state` [B, Hv, Dk, Dv], in the wide dtype, is the one before the first position (None: zero).

    Returns:
        out [B, S, Hv, Dv] in q's dtype; states [chunks + 1, B, Hv, Dk, Dv], without a gradient; the last of them.
    """
    out = v.new_empty(v.shape, dtype=q.dtype)
    sizes = v.shape[0], v.shape[2], k.shape[3], v.shape[3]
    states = q.new_empty((-(-v.shape[1] // chunk) + 1, *sizes), dtype=wide(q.dtype))
    if state is None:
        states[0].zero_()
    else:
        states[0].copy_(state)
    each = states.flatten(1, 2)  # [chunks + 1, B * Hv, Dk, Dv]
    for group in largest(_groups(v, max(sizes[2:]), chunk), _positions, of=q):
        c, _, _ = _chunk(q, k, v, g, beta, group, l2norm)
        new, k_down, last = torch.empty_like(c.u), (c.k * c.down).mT, c.up[..., -1:, :]
        for j, before in enumerate(each[group.numbers]):
            torch.baddbmm(c.u[:, j], c.w[:, j], before, alpha=-1, out=new[:, j])
            torch.baddbmm(before * last[:, j], k_down[:, j], new[:, j], out=each[group.first + j + 1])
        part = (c.q * c.up) @ each[group.numbers].transpose(0, 1) + c.p @ new
        _store(out, part, group)
    return out, states, states[-1].clone()


def _norm_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Gradient of x from that of y = x / |x|."""
    r = _norm(x)
    y = x * r
    return (dy - y * (dy * y).sum(-1, keepdim=True)).mul_(r)


def _store(into: Tensor, part: Tensor, group: _Group) -> None:
    """Write [B * Hv, n, C, ...] to a group's positions of [B, S, H, ...], summed over the heads that share one."""
    part = part.flatten(1, 2).unflatten(0, (into.shape[0], -1))
    repeat = part.shape[1] // into.shape[2]
    if repeat > 1:
        part = part.unflatten(1, (-1, repeat)).sum(2)
    into[:, group.start : group.end].copy_(part.transpose(1, 2))


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
    carried = (torch.zeros_like(states[0]) if dlast_state is None else dlast_state.clone()).flatten(0, 1)
    each = states.flatten(1, 2)
    for group in reversed(largest(_groups(v, max(k.shape[3], v.shape[3]), chunk), _positions, of=q)):
        state = each[group.numbers].transpose(0, 1)
        c, raw_q, raw_k = _chunk(q, k, v, g, beta, group, l2norm)
        do = _rows(dout, group, v.shape[2]).to(state.dtype)
        new = c.u - c.w @ state
        q_up, k_down, last = c.q * c.up, c.k * c.down, c.up[..., -1:, :]
        # out = q_up S + P N and S' = last S + k_down^T N
        dnew, of_out = c.p.mT @ do, q_up.mT @ do
        dstate = torch.empty_like(of_out)  # of S' of each chunk
        for j in range(group.many - 1, -1, -1):
            dstate[:, j].copy_(carried)
            torch.baddbmm(dnew[:, j], k_down[:, j], carried, out=dnew[:, j])
            carried = torch.baddbmm(of_out[:, j] + last[:, j] * carried, c.w[:, j].mT, dnew[:, j], alpha=-1)
        dp, dq_up, dk_down = do @ new.mT, do @ state.mT, new @ dstate.mT
        dlast = (state * dstate).sum((-2, -1)) * last[..., 0, 0]
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
        _store(dq, _norm_gradient(dq_, raw_q) if l2norm else dq_, group)
        _store(dk, _norm_gradient(dk_, raw_k) if l2norm else dk_, group)
        _store(dv, c.beta * dy_u, group)
        _store(dg, dtotal.flip(-1).cumsum(-1).flip(-1), group)
        _store(dbeta, (dy_u * c.v).sum(-1) + (dk_beta * c.k).sum(-1), group)
    return dq, dk, dv, dg, dbeta, carried.view(states[0].shape)


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
