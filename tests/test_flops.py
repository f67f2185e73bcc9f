"""Formulas of single operators, against torch's own counter, against brute force, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import flop_counter

from oomc import attention_kernels, ops, private, target
from oomc.flops import calls, visible_pairs

aten = torch.ops.aten


def cost(op: OpOverload, *args: Any, **kwargs: Any) -> tuple[float, float]:
    """FLOPs and bytes of one call on real tensors."""
    found = calls(op, args, kwargs, op(*args, **kwargs))
    return float(sum(c.flops for c in found)), float(sum(c.bytes for c in found))


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        (aten.mm.default, [(6, 4), (4, 10)]),
        (aten.bmm.default, [(3, 6, 4), (3, 4, 10)]),
        (aten.addmm.default, [(10,), (6, 4), (4, 10)]),
        (aten.baddbmm.default, [(3, 6, 10), (3, 6, 4), (3, 4, 10)]),
    ],
)
def test_products_are_those_of_torchs_counter(op: OpOverload, shapes: list[tuple[int, ...]]) -> None:
    args = [torch.ones(shape) for shape in shapes]
    with flop_counter.FlopCounterMode(display=False) as counter:
        op(*args)
    flops, moved = cost(op, *args)
    assert flops == counter.get_total_flops()
    assert moved == 4 * (sum(x.numel() for x in args) + op(*args).numel())


@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_are_those_of_torchs_counter(transposed: bool) -> None:
    function: Callable[..., Tensor] = F.conv_transpose1d if transposed else F.conv1d
    x = torch.ones(2, 4, 9, requires_grad=True)
    weight = torch.ones(*((4, 3, 3) if transposed else (6, 4, 3)), requires_grad=True)
    with flop_counter.FlopCounterMode(display=False) as counter:
        y = function(x, weight)
        forward = counter.get_total_flops()
        y.sum().backward()
        backward = counter.get_total_flops() - forward
    options = ([1], [0], [1], transposed, [0], 1)
    assert cost(aten.convolution.default, x, weight, None, *options)[0] == forward
    args = (torch.ones_like(y), x, weight, [0], *options, [True, True, False])
    assert cost(aten.convolution_backward.default, *args)[0] == backward


def test_a_depthwise_convolution_multiplies_each_channel_alone() -> None:
    x, weight = torch.ones(2, 4, 9), torch.ones(4, 1, 3)
    options = ([1], [0], [1], False, [0], 4)
    assert cost(aten.convolution.default, x, weight, None, *options)[0] == 2 * (2 * 4 * 7) * 3
    # torch's counter takes a group's weight gradient for that of all channels
    args = (torch.ones(2, 4, 7), x, weight, [0], *options, [True, True, False])
    assert cost(aten.convolution_backward.default, *args)[0] == 2 * 2 * (2 * 4 * 7) * 3


@pytest.mark.parametrize(("rows", "keys", "causal", "window"), [
    (5, 5, False, None), (5, 5, True, None), (5, 5, True, 3), (5, 5, True, 9), (1, 7, True, None), (3, 7, True, None),
])  # fmt: skip
def test_visible_pairs_by_counting(rows: int, keys: int, causal: bool, window: int | None) -> None:
    shift = keys - rows
    seen = [
        (i, j) for i in range(rows) for j in range(keys)
        if not causal or (j <= i + shift and (window is None or j > i + shift - window))
    ]  # fmt: skip
    assert visible_pairs(rows, keys, causal, window) == len(seen)


def test_attention_is_that_of_torchs_counter_where_all_is_visible() -> None:
    q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 12)
    options = (None, None, 0.25, False, None, 0.0)
    out, lse = ops.attention(q, k, v, *options)
    wide_k, wide_v = (2, 4, 8, 16), (2, 4, 8, 12)
    assert cost(ops.attention, q, k, v, *options)[0] == flop_counter.sdpa_flop_count(q.shape, wide_k, wide_v)
    theirs = flop_counter.sdpa_backward_flop_count(out.shape, q.shape, wide_k, wide_v)
    assert cost(ops.attention_backward, out, q, k, v, out, lse, *options)[0] == theirs


def test_attention_without_a_kernel_moves_its_scores() -> None:
    """In fp32, and with heads so wide that none is made for them; what is counted is what is chosen."""
    with target.planning_for((9, 0)):
        for size, dtype, keys, softcap, kind in (
            (8, torch.bfloat16, 32, 0.0, "attention"), (8, torch.bfloat16, 32, 5.0, "triton"),
            (257, torch.bfloat16, 32, 5.0, "tiled"), (20, torch.bfloat16, 32, 0.0, "triton"),
            (8, torch.float32, 32, 0.0, "tiled"), (8, torch.bfloat16, 40, 0.0, "triton"),
            (8, torch.bfloat16, 20, 0.0, "tiled"),
        ):  # fmt: skip
            q, k = torch.randn(1, 1, 32, size, dtype=dtype), torch.randn(1, 1, keys, size, dtype=dtype)
            (call,) = calls(ops.attention, (q, k, k, None, None, 1.0, True, None, softcap), {}, (q, q[..., 0]))
            assert call.kind == kind
            chosen = attention_kernels.choose(q, k, k, False, True, None, softcap)
            assert (chosen if chosen in ("triton", "tiled") else "attention") == kind
    q = torch.randn(1, 1, 32, 8)
    plain = calls(ops.attention, (q, q, q, None, None, 1.0, True, None, 0.0), {}, (q, q[..., 0]))
    capped = calls(ops.attention, (q, q, q, None, None, 1.0, True, None, 5.0), {}, (q, q[..., 0]))
    assert [c.kind for c in plain + capped] == ["attention", "tiled"]
    assert capped[0].bytes > plain[0].bytes
    assert capped[0].flops == plain[0].flops == 2 * (32 * 33 / 2) * 16


def test_the_delta_rule_is_its_bodys_products_and_solves() -> None:
    c, dk, dv, heads, chunks = 4, 8, 16, 3, 2
    q, v = torch.randn(1, c * chunks, heads, dk), torch.randn(1, c * chunks, heads, dv)
    g, beta = torch.randn(2, 1, c * chunks, heads).sigmoid().neg().unbind()
    args = (q, q, v, g, beta, None, c, True)
    out, states, _ = ops.gated_delta_rule(*args)
    solves = heads * chunks * c * c * (dk + dv)
    back = (out, None, q, q, v, g, beta, states, c, True)
    for op, own, factor in ((ops.gated_delta_rule, args, 1), (ops.gated_delta_rule_backward, back, 2)):
        with flop_counter.FlopCounterMode(display=False) as counter:
            ops.BODIES[op](*own)
        assert cost(op, *own)[0] == counter.get_total_flops() + factor * solves


def test_grouped_products_count_slots() -> None:
    x, w, offsets = torch.randn(12, 4), torch.randn(3, 4, 6), torch.tensor([4, 8, 12], dtype=torch.int32)
    assert cost(ops.grouped_mm, x, w, offsets)[0] == 2 * 12 * 4 * 6
    found = calls(ops.grouped_mm, (x, w, offsets), {}, ops.grouped_mm(x, w, offsets))
    assert (found[0].kind, found[0].size) == ("grouped", 4)
    assert cost(ops.grouped_mm_weight, x, torch.randn(12, 6), offsets, False)[0] == 2 * 12 * 4 * 6


def test_all_else_costs_its_bytes_and_views_nothing() -> None:
    x = torch.ones(8, 4)
    assert cost(aten.add.Tensor, x, torch.ones(4)) == (0, 4 * (32 + 4 + 32))
    assert cost(aten.mul.Tensor, x, x) == (0, 4 * 64)
    assert cost(aten.add.Tensor, torch.ones(1, 4).expand(8, 4), x) == (0, 4 * (4 + 32 + 32))
    assert cost(aten.embedding.default, torch.ones(1000, 4), torch.zeros(8, dtype=torch.int64)) == (0, 2 * 128 + 64)
    for op, args in ((aten.view.default, (x, [32])), (aten.t.default, (x,)), (aten.split.Tensor, (x, 2))):
        assert calls(op, args, {}, op(*args)) == []
    assert calls(aten.empty_like.default, (x,), {}, x) == []
    assert cost(aten.reshape.default, x.t(), [32]) == (0, 2 * 128)


def test_an_operator_of_ours_costs_what_its_body_does() -> None:
    mode = private.fake_mode()
    shape = mode.shape_env
    assert shape is not None
    with mode:
        y = mode.from_tensor(torch.empty(24, 4), symbolic_context=None)
        weights, order = torch.empty(12, 2), torch.empty(24, dtype=torch.int64)
        out = ops.combine(y, weights, order, order)
    found = calls(ops.combine, (y, weights, order, order), {}, out)
    assert all(c.kind == "memory" for c in found)
    assert len(found) > 4
    assert sum(c.bytes for c in found) > 2 * (24 * 4 * 4) + 12 * 4 * 4
