"""Attention's kernels for CUDA: those of torch's build, and our own for calls that these do not take.

The backward kernels sum the gradient of q in fp32, in memory of their own. So that this does not grow with the batch
and the context, a call is made for so many batch rows and heads at once as keep it small.

cuDNN and flash attention are private operators of ATen; tests/test_attention.py checks that their schemas are the ones
written for, so that a new torch fails there and not in a training run. Sinks, packed segments and soft caps, and
queries that are the last of longer keys, go to oomc.triton_attention. All take grouped KV heads as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from oomc import target
from oomc.opdef import largest
from oomc.private import FakeTensor

WORKSPACE_BYTES = 256 << 20
"""Most that one call takes for the fp32 sum of the gradient of q."""
WIDEST = 256
"""Elements of a head that our own kernel takes at most."""
FARTHEST = 1 << 31
"""Elements between the first and the last of what a kernel gets are fewer."""
Kernel = Literal["cudnn", "flash", "triton", "tiled"]
Order = Literal["same", "last", "more"]
"""Queries are as many as keys, the last of them, or more."""
_aten = torch.ops.aten


def choose(q: Tensor, k: Tensor, v: Tensor, special: bool, causal: bool, window: int | None, softcap: float) -> Kernel:
    """The kernel for a call: a function of shapes, dtype and device only, so that both directions agree.

    `special` is whether there are segments, which the libraries' kernels do not know, or sinks: rescaling their outputs
    by a sink rounds them twice, which puts the sink's own gradient out of the bf16 tolerance (measured on an H200: 1.7
    times eager's error).
    """
    if target.kind(q.device) != "cuda":
        return "tiled"
    special = special or softcap != 0.0
    rows: Order = "same" if q.shape[2] == k.shape[2] else "last" if q.shape[2] < k.shape[2] else "more"
    return choose_on_cuda(q.dtype, q.shape[3], v.shape[3], rows, special, causal, window)


def choose_on_cuda(
    dtype: torch.dtype, size: int, v_size: int, rows: Order, special: bool, causal: bool, window: int | None
) -> Kernel:  # fmt: skip
    """The kernel for heads of these sizes."""
    if dtype not in (torch.bfloat16, torch.float16):
        return "tiled"
    ours: Kernel = "triton" if max(size, v_size) <= WIDEST and rows != "more" else "tiled"
    if special or (causal and rows != "same"):
        return ours  # the libraries' kernels align a causal mask in different corners when S and T differ
    if window is None and target.has_cudnn() and size <= 128 and v_size <= 128 and size % 8 == 0 and v_size % 8 == 0:
        return "cudnn"
    if size % 8 == 0 and size <= 256 and v_size <= size:
        return "flash"
    return ours


def _rows_outside(x: Tensor) -> Tensor:
    """[B, H, S, D] as [B, S, H, D] with unit stride inside, which flash attention needs."""
    x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _in_reach(x: Tensor) -> Tensor:
    """`x`, or a compact copy if an offset within it does not fit 32 bits, in which some kernels compute offsets.

    cuDNN's backward gave wrong gradients past the 2**31st element of a [1, 1M, 32, 128] tensor, of which a call took
    one head (measured on an H200).
    """
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x if last < FARTHEST else x.new_empty(x.shape).copy_(x)


@dataclass(frozen=True)
class Part:
    """Batch rows, query heads and the KV heads that they share, of one call."""

    batch: slice
    heads: slice
    kv_heads: slice

    def queries(self, x: Tensor) -> Tensor:
        """[B, Hq, ...] as a view of the part."""
        return _cut(x, self.batch, self.heads)

    def keys(self, x: Tensor) -> Tensor:
        """[B, Hkv, ...] as a view of the part."""
        return _cut(x, self.batch, self.kv_heads)


def _cut(x: Tensor, rows: slice, heads: slice) -> Tensor:
    return x.narrow(0, rows.start, rows.stop - rows.start).narrow(1, heads.start, heads.stop - heads.start)


def parts(q: Tensor, k: Tensor) -> list[Part]:
    """Cover all batch rows and heads so that an fp32 tensor of a part's queries takes at most WORKSPACE_BYTES.

    One row's one query head is the least there can be.
    """
    batch, heads, group = q.shape[0], q.shape[1], q.shape[1] // k.shape[1]
    most = max(1, WORKSPACE_BYTES // (4 * q.shape[2] * q.shape[3]))  # rows times heads
    rows = max(1, min(batch, most // heads))
    if most >= heads:
        count = heads
    elif most >= group:
        count = most // group * group
    else:
        count = max(n for n in range(1, most + 1) if group % n == 0)
    cover = []
    for b in range(0, batch, rows):
        for h in range(0, heads, count):
            end = min(h + count, heads)
            cover.append(Part(slice(b, min(b + rows, batch)), slice(h, end), slice(h // group, (end - 1) // group + 1)))
    return cover


def _workspace(part: Part, q: Tensor) -> Tensor | None:
    """What a call allocates out of sight, where memory is what is asked for (on fake tensors)."""
    x = part.queries(q)
    return x.new_empty(x.shape, dtype=torch.float32) if isinstance(q, FakeTensor) else None


def _empty_heads_inside(x: Tensor) -> Tensor:
    """Empty [B, H, S, D], laid out as [B, S, H, D]."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def _heads_of(part: Part) -> int:
    return part.heads.stop - part.heads.start


def forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, S, Dv] in any strides, lse [B, Hq, S] in fp32."""
    cover = parts(q, k)
    if len(cover) == 1:
        return _forward(kernel, q, k, v, scale, causal, window)
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    for part in largest(cover, _heads_of, of=q):
        results = _forward(kernel, part.queries(q), part.keys(k), part.keys(v), scale, causal, window)
        part.queries(out).copy_(results[0])
        part.queries(lse).copy_(results[1])
    return out, lse


def backward(
    kernel: Kernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    causal: bool, window: int | None, in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv as q, k and v, from what `forward` returned: in any strides, or in the memory of q, k and v.

    `in_place` is sound part by part: a part's queries are read by that part only, and its keys and values by no part
    after that with the last of their query heads. The gradients of a KV head whose query heads are in several parts are
    summed in fp32.
    """
    cover, group = parts(q, k), q.shape[1] // k.shape[1]
    if len(cover) == 1 and not in_place:
        workspace = _workspace(cover[0], q)
        gradients = _backward(kernel, dout, q, k, v, out, lse, scale, causal, window)
        del workspace
        return gradients
    dq, dk, dv = (q, k, v) if in_place else map(_empty_heads_inside, (q, k, v))
    sums: list[Tensor] = []
    for part in largest(cover, _heads_of, of=q):
        workspace = _workspace(part, q)
        dq_part, *others = _backward(
            kernel, part.queries(dout), part.queries(q), part.keys(k), part.keys(v), part.queries(out),
            part.queries(lse), scale, causal, window,
        )  # fmt: skip
        del workspace
        part.queries(dq).copy_(dq_part)
        if part.heads.start % group == 0:
            sums = [x.float() for x in others] if _heads_of(part) < group else others
        else:
            sums = [total.add_(others.pop(0)) for total in sums]
        if part.heads.stop % group == 0:
            part.keys(dk).copy_(sums[0])
            part.keys(dv).copy_(sums[1])
            sums = []
        del dq_part, others  # or they would live through the next part's call
    return dq, dk, dv


def _forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    q, k, v = map(_in_reach, (q, k, v))
    if kernel == "cudnn":
        q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return out, lse.reshape(q.shape[:3])
    padded = F.pad(v, (0, q.shape[3] - v.shape[3])) if v.shape[3] != q.shape[3] else v
    left, right = (-1, -1) if window is None else (window - 1, 0)
    out, lse, *_ = _aten._flash_attention_forward(
        _rows_outside(q), _rows_outside(k), _rows_outside(padded), None, None, q.shape[2], k.shape[2], 0.0, causal,
        False, scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out.narrow(-1, 0, v.shape[3]).transpose(1, 2), lse


def _backward(
    kernel: Kernel,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out, lse = map(_in_reach, (dout, q, k, v, out, lse))
    if kernel == "cudnn":
        q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
        # cuDNN wants the gradient in the layout of the output.
        dout = torch.empty_like(out).copy_(dout) if dout.stride() != out.stride() else dout
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # read only with dropout, of which there is none
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.unsqueeze(-1), seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
            scale=scale,
        )  # fmt: skip
        return dq, dk, dv
    pad = q.shape[3] - v.shape[3]
    dout, out, padded = (F.pad(x, (0, pad)) if pad else x for x in (dout, out, v))
    left, right = (-1, -1) if window is None else (window - 1, 0)
    state = torch.empty((2,), dtype=torch.uint64, device=q.device)  # read only with dropout, as above
    dq, dk, dv = _aten._flash_attention_backward(
        _rows_outside(dout), _rows_outside(q), _rows_outside(k), _rows_outside(padded), _rows_outside(out), lse,
        None, None, q.shape[2], k.shape[2], 0.0, causal, state, state.new_empty(()),
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.narrow(-1, 0, v.shape[3]).transpose(1, 2)


def own_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, segments: Tensor | None, scale: float, causal: bool,
    window: int | None, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [B, Hq, S, Dv], heads inside, and lse [B, Hq, S] in fp32, by oomc.triton_attention."""
    q, k, v = map(_unit_stride, (q, k, v))
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    sinks, segments = (None if x is None else x.contiguous() for x in (sinks, segments))
    if out.numel() and not isinstance(q, FakeTensor):
        from oomc import triton_attention

        with torch.cuda.device_of(q):
            triton_attention.forward(q, k, v, sinks, segments, out, lse, scale, causal, window, softcap)
    return out, lse


def own_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Tensor | None, scale: float,
    causal: bool, window: int | None, softcap: float, in_place: bool, exact: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, heads inside or in the memory of q, k and v, and the rows' sums of dout * out, [B, Hq, S] in fp32,
    with `exact` from unrounded probabilities.

    Both kernels read k and v, so that dk and dv are copied there at the end; dq is written where its queries were.
    """
    given = q, k, v
    dout, q, k, v, out = map(_unit_stride, (dout, q, k, v, out))
    dq = q if in_place else _empty_heads_inside(q)
    dk, dv, delta = _empty_heads_inside(k), _empty_heads_inside(v), torch.empty_like(lse)
    segments = None if segments is None else segments.contiguous()
    if q.numel() and not isinstance(q, FakeTensor):
        from oomc import triton_attention

        with torch.cuda.device_of(q):
            triton_attention.backward(
                dout, q, k, v, out, lse, segments, delta, dq, dk, dv, scale, causal, window, softcap, exact
            )  # fmt: skip
    if not in_place:
        return dq, dk, dv, delta
    for memory, gradient in zip(given, (dq, dk, dv), strict=True):
        if memory is not gradient:
            memory.copy_(gradient)
    return (*given, delta)
