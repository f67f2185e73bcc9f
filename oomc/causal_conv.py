"""`oomc::causal_conv1d`: a depthwise convolution that looks back only (Mamba, Qwen3-Next), and its backward.

With K weights a channel, and P = K - 1 positions before the first, which are zero or as they are given,

    out[c, t] = bias[c] + sum over j < K of weight[c, j] * x[c, t + j - P]

The last P positions are a result of their own: a sequence may be run in parts, each with what the part before it left.
The backward takes their gradient and gives that of the P positions before the first. Both use torch's convolution, on
the positions before and x side by side; that copy is all the memory beside inputs and outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oomc.opdef import define

aten = torch.ops.aten


def _beside(x: Tensor, weight: Tensor, state: Tensor | None) -> Tensor:
    """[B, C, P + S]: the positions before x, and x."""
    before = x.new_zeros((x.shape[0], x.shape[1], weight.shape[2] - 1)) if state is None else state
    return torch.cat([before, x], dim=2)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Body of `oomc::causal_conv1d`: of x [B, C, S], weight [C, 1, K] with K > 1, bias [C] if there is one.

    `state` [B, C, K - 1] is the positions before the first (None: zero).

    Returns:
        out [B, C, S], and the last K - 1 positions [B, C, K - 1], both in x's dtype.
    """
    every = _beside(x, weight, state)
    out = F.conv1d(every, weight, bias, groups=x.shape[1])
    return out.contiguous(), _own(every[:, :, x.shape[2] :])


def _own(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _backward(
    dout: Tensor, dlast: Tensor | None, x: Tensor, weight: Tensor, state: Tensor | None, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Body of `oomc::causal_conv1d_backward`; `dlast` is the last positions' gradient (None: zero).

    Returns:
        Gradients of x, weight, bias (empty if there is none) and state.
    """
    every, before = _beside(x, weight, state), weight.shape[2] - 1
    dx, dweight, dbias = aten.convolution_backward(
        dout, every, weight, [x.shape[1]] if bias else None, [1], [0], [1], False, [0], x.shape[1], [True, True, bias]
    )
    if dlast is not None:
        dx[:, :, x.shape[2] :].add_(dlast)
    dbias = dbias if bias else weight.new_empty(0)
    return _own(dx[:, :, before:]), dweight.contiguous(), dbias, _own(dx[:, :, :before])


def _forward_fake(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((x.shape[0], x.shape[1], weight.shape[2] - 1))


def _backward_fake(
    dout: Tensor, dlast: Tensor | None, x: Tensor, weight: Tensor, state: Tensor | None, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape),
        weight.new_empty((x.shape[1],) if bias else (0,)),
        x.new_empty((x.shape[0], x.shape[1], weight.shape[2] - 1)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, state = inputs
    ctx.bias, ctx.given = bias is not None, state is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, state)


def _gradient(ctx: Any, dout: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None and dlast is None:
        return (None,) * 4
    x, weight, state = ctx.saved_tensors
    dout = x.new_zeros(x.shape) if dout is None else dout
    dx, dweight, dbias, dstate = causal_conv1d_backward(dout, dlast, x, weight, state, ctx.bias)
    return dx, dweight, dbias if ctx.bias else None, dstate if ctx.given else None


causal_conv1d_backward = define(
    "causal_conv1d_backward",
    "(Tensor dout, Tensor? dlast, Tensor x, Tensor weight, Tensor? state, bool bias)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    traceable=True,
)
causal_conv1d = define(
    "causal_conv1d",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? state) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    traceable=True,
    setup_context=_setup_context,
    backward=_gradient,
)
