"""`oomc::dropout`: dropout whose mask is a function of seed, step, call site and element position.

So chunks, recomputation and any order of execution see the same mask, on every device, with nothing saved for the
backward but 16 bytes. The mask is not that of torch's dropout for the same seed.

Positions are hashed with the finaliser of splitmix64 (Steele, Lea, Flood 2014) applied twice, with a key that is
itself a hash of seed, step and site; the arithmetic is that of int64 with wrap-around, which CPU and CUDA do alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oomc import target
from oomc.opdef import define

_BITS = 31  # of the hash that are compared with p: p is honoured to within 2**-31
_BLOCK = 1 << 18  # elements hashed at once on the CPU, where the int64 temporaries are metered


def _signed(x: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return x - (1 << 64) if x >= 1 << 63 else x


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _shift_xor(x: Tensor, bits: int) -> Tensor:
    """x ^ (x >>> bits) in place; int64 shifts keep the sign, so the bits that it brings in are masked off."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser, in place: a bijection of int64 whose output bits depend on all input bits."""
    x = _shift_xor(x, 30).mul_(_MIX1)
    x = _shift_xor(x, 27).mul_(_MIX2)
    return _shift_xor(x, 31)


def _key(rng: Tensor, site: int) -> Tensor:
    """0-dim int64: one well-mixed number for seed, step and site."""
    key = _mix(rng[0] + _GOLDEN)
    key = _mix(key + rng[1] * _GOLDEN)
    return _mix(key + _signed((site + 1) * 0x632BE59BD9B4E019 % (1 << 64)))


def _dropped(key: Tensor, first: int, count: int, p: float) -> Tensor:
    """Bool [count]: whether the elements from position `first` are dropped, each with probability p."""
    x = torch.arange(count, device=key.device, dtype=torch.int64).add_(first).mul_(_GOLDEN)
    x = _mix(_mix(x.add_(key)).add_(key))
    return (x >> (64 - _BITS)).bitwise_and_((1 << _BITS) - 1) < round(p * (1 << _BITS))


def _dropout(x: Tensor, p: float, rng: Tensor, site: int, offset: int) -> Tensor:
    """Body of `oomc::dropout`.

    Args:
        x: any shape, any float dtype; elements are numbered row-major from `offset`.
        p: probability of zero, 0 <= p <= 1. The others are scaled by 1 / (1 - p).
        rng: int64 [2], seed and step, on x's device.
        site: number of the call site in the graph.
        offset: position of x's first element in the whole tensor of which x is a contiguous part.
    """
    key = _key(rng, site)
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    out = x.new_empty(x.shape)
    flat_in, flat_out = x.reshape(-1), out.view(-1)
    count = flat_in.shape[0]
    block = _BLOCK if target.kind(x.device) == "cpu" else max(count, 1)
    for start in range(0, count, block):
        end = min(start + block, count)
        kept = flat_in[start:end].mul(scale).masked_fill_(_dropped(key, offset + start, end - start, p), 0.0)
        flat_out[start:end].copy_(kept)
    return out


def _dropout_fake(x: Tensor, p: float, rng: Tensor, site: int, offset: int) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.p, rng, ctx.site, ctx.offset = inputs
    ctx.save_for_backward(rng)


def _gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (rng,) = ctx.saved_tensors
    return dropout(dy, ctx.p, rng, ctx.site, ctx.offset), None, None, None, None


dropout = define(
    "dropout",
    "(Tensor x, float p, Tensor rng, int site, SymInt offset) -> Tensor",
    _dropout,
    _dropout_fake,
    traceable=True,
    setup_context=_setup_context,
    backward=_gradient,
)
