"""The attention kernels of torch's CUDA build, behind three functions.

Everything here uses private operators of ATen; tests/test_attention.py checks that their schemas are the ones written
for, so that a new torch fails there and not in a training run. Both take grouped KV heads as they are.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from oomc import target

Kernel = Literal["cudnn", "flash", "tiled"]
_aten = torch.ops.aten


def choose(q: Tensor, k: Tensor, v: Tensor, special: bool, causal: bool, window: int | None, softcap: float) -> Kernel:
    """The kernel for a call: a function of shapes, dtype and device only, so that both directions agree.

    `special` is whether there are segments, which the kernels do not know, or sinks: rescaling the kernels' outputs by
    a sink rounds them twice, which puts the sink's own gradient out of the bf16 tolerance (measured on an H200: 1.7
    times eager's error).
    """
    if target.kind(q.device) != "cuda" or q.dtype not in (torch.bfloat16, torch.float16):
        return "tiled"
    # The kernels align a causal mask in different corners when S and T differ.
    if special or softcap or (causal and q.shape[2] != k.shape[2]):
        return "tiled"
    size, v_size = q.shape[3], v.shape[3]
    if window is None and target.has_cudnn() and size <= 128 and v_size <= 128 and size % 8 == 0 and v_size % 8 == 0:
        return "cudnn"
    if size % 8 == 0 and size <= 256 and v_size <= size:
        return "flash"
    return "tiled"


def _rows_outside(x: Tensor) -> Tensor:
    """[B, H, S, D] as [B, S, H, D] with unit stride inside, which flash attention needs."""
    x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, S, Dv] in any strides, lse [B, Hq, S] in fp32."""
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


def backward(
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
    """dq, dk, dv in the shapes of q, k, v and any strides, from what `forward` returned."""
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
