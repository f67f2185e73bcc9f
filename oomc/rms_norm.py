"""`oomc::rms_norm`: root mean square layer normalization (Zhang and Sennrich 2019), without a weight, and its backward.

    scale = 1 / sqrt(mean(x ** 2) + eps)        over the last dimension, in fp32
    out = x * scale                             rounded once, to x's dtype

Models write it as some eight operators that pass over x in fp32; its backward is fifteen. On CUDA it is one kernel of
torch's each way, elsewhere the operators that models write, and what autograd makes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from oomc import private, target
from oomc.opdef import define, wide

LARGEST = 1 << 31
"""Elements of one call of torch's kernels, which compute places in 32 bits."""
PIECE = 1 << 26
"""Elements of a call where there are more."""


def plain(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Body of `oomc::rms_norm` in operators."""
    values = x.to(wide(x.dtype))
    scale = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    return (values * scale).to(x.dtype).contiguous(), scale.contiguous()


def plain_backward(dout: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """Body of `oomc::rms_norm_backward` in operators: those of autograd, in their order."""
    values, given = x.to(scale.dtype), dout.to(scale.dtype)
    of_mean = -0.5 * (given * values).sum(-1, keepdim=True) * scale.pow(3) / x.shape[-1]
    return (given * scale + of_mean * (2.0 * values)).to(x.dtype).contiguous()


def _forward(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Body of `oomc::rms_norm`: of x [..., D] in a 16-bit dtype.

    Returns:
        out [..., D] in x's dtype, contiguous, and scale [..., 1] in fp32.
    """
    if target.kind(x.device) != "cuda":
        return plain(x, eps)
    x = x.contiguous()
    if isinstance(x, private.FakeTensor):
        return _forward_fake(x, eps)
    if x.numel() <= LARGEST:
        return private.fused_rms_norm(x, eps)
    out, scale = _forward_fake(x, eps)
    for rows, into, scales in zip(_pieces(x, x), _pieces(out, x), _pieces(scale, x), strict=True):
        results = private.fused_rms_norm(rows, eps)
        into.copy_(results[0])
        scales.copy_(results[1])
    return out, scale


def _pieces(values: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """A value's rows [rows, ...] by as many as there are in a piece of x."""
    return values.view(-1, values.shape[-1]).split(max(1, PIECE // x.shape[-1]))


def _backward(dout: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """Body of `oomc::rms_norm_backward`: the gradient of x, contiguous; dout [..., D] in x's dtype."""
    if target.kind(x.device) != "cuda":
        return plain_backward(dout, x, scale)
    dout, x = dout.contiguous(), x.contiguous()
    if isinstance(x, private.FakeTensor):
        return _backward_fake(dout, x, scale)
    if x.numel() <= LARGEST:
        return private.fused_rms_norm_backward(dout, x, scale)
    dx = _backward_fake(dout, x, scale)
    for into, *given in zip(*(_pieces(values, x) for values in (dx, dout, x, scale)), strict=True):
        into.copy_(private.fused_rms_norm_backward(*given))
    return dx


def _forward_fake(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=wide(x.dtype))


def _backward_fake(dout: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], output[1])


def _gradient(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, None]:
    return (None if dout is None else rms_norm_backward(dout, *ctx.saved_tensors)), None


rms_norm_backward = define(
    "rms_norm_backward",
    "(Tensor dout, Tensor x, Tensor scale) -> Tensor",
    _backward,
    _backward_fake,
    traceable=True,
)
rms_norm = define(
    "rms_norm",
    "(Tensor x, float eps) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    traceable=True,
    setup_context=_setup_context,
    backward=_gradient,
)
PLAIN: dict[OpOverload, Callable[..., Any]] = {rms_norm: plain, rms_norm_backward: plain_backward}
"""For a compiler that makes one kernel of such operators by itself."""
