"""The canonical form of a MoE layer against one written with loops, and what its operators promise."""

import pytest
import torch
from torch import Tensor

from oomc import experts
from oomc.opdef import BODIES

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def _layer(x: Tensor, index: Tensor, weights: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    """up is [E, F, D], used as a transposed view; down is [E, F, D]."""

    def run(slots: Tensor, offsets: Tensor) -> Tensor:
        h = experts.grouped_bias(experts.grouped_mm(slots, up.transpose(1, 2), offsets), bias, offsets)
        out: Tensor = experts.grouped_mm(torch.nn.functional.silu(h), down, offsets)
        return out

    return experts.moe_forward(x, index, weights, run, up.shape[0])


def _naive(x: Tensor, index: Tensor, weights: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    rows = []
    for t in range(x.shape[0]):
        parts = [
            weights[t, j] * (torch.nn.functional.silu(up[e] @ x[t] + bias[e]) @ down[e])
            for j, e in enumerate(index[t].tolist())
        ]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


def _inputs(dtype: torch.dtype, device: str = "cpu", tokens: int = 37) -> list[Tensor]:
    torch.manual_seed(0)
    num, k, d, f = 8, 2, 16, 24
    index = torch.rand(tokens, num - 1).topk(k).indices + 1  # expert 0 gets no token
    floats = [torch.randn(tokens, d), torch.rand(tokens, k), *(torch.randn(num, f, d) / 4, torch.randn(num, f))]
    floats.append(torch.randn(num, f, d) / 4)
    x, w, up, bias, down = (t.to(device, dtype).requires_grad_() for t in floats)
    return [x, index.to(device), w, up, bias, down]


def _distance(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_layer_equals_loops(dtype: torch.dtype, bound: float, device: str) -> None:
    inputs = _inputs(dtype, device)
    exact = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in inputs]
    out, want = _layer(*inputs), _naive(*exact)
    assert _distance(out, want) < bound
    seed = torch.randn_like(want)
    out.backward(seed.to(dtype))
    want.backward(seed)
    for got, ref in zip(inputs, exact, strict=True):
        if got.is_floating_point():
            assert got.grad is not None and ref.grad is not None
            assert got.grad.is_contiguous()
            assert _distance(got.grad, ref.grad) < bound
    for weight in inputs[3:]:
        assert weight.grad is not None and not weight.grad[0].any(), "an expert without tokens has a zero gradient"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("ends", [(4, 8), (2, 5, 8), (1, 1, 8)])
def test_groups_add_up_to_the_layer(ends: tuple[int, ...], dtype: torch.dtype, bound: float, device: str) -> None:
    """Also with NaN where a group's products leave others' slots, forward and backward."""
    inputs = _inputs(dtype, device)
    exact = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in inputs]
    x, index, weights, up, bias, down = inputs

    def spoil(rows: Tensor, offsets: Tensor) -> Tensor:
        others = torch.arange(rows.shape[0], device=rows.device) >= offsets[-1]
        rows.register_hook(lambda grad: grad.masked_fill(others[:, None], torch.nan))
        return rows.masked_fill(others[:, None], torch.nan)

    out: Tensor | None = None
    for first, end in zip((0, *ends), ends, strict=False):
        if end > first:
            order, inverse, offsets = experts.route(index, end - first, first)
            slots = spoil(experts.dispatch(x, order, inverse, index.shape[1], offsets), offsets)
            h = experts.grouped_mm(slots, up[first:end].transpose(1, 2), offsets)
            h = spoil(experts.grouped_bias(h, bias[first:end], offsets), offsets)
            y = spoil(experts.grouped_mm(torch.nn.functional.silu(h), down[first:end], offsets), offsets)
            share = experts.combine(y, weights, order, inverse, offsets)
            assert share.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            out = share if out is None else out + share
    assert out is not None
    want = _naive(*exact)
    assert _distance(out, want) < bound
    seed = torch.randn_like(want)
    out.backward(seed.to(out.dtype))
    want.backward(seed)
    for got, ref in zip(inputs, exact, strict=True):
        if got.is_floating_point():
            assert got.grad is not None and ref.grad is not None
            assert _distance(got.grad, ref.grad) < bound


def test_gradcheck() -> None:
    x, index, w, up, bias, down = _inputs(torch.float64, tokens=5)
    assert torch.autograd.gradcheck(lambda *a: _layer(a[0], index, *a[1:]), (x, w, up, bias, down))


def test_route() -> None:
    index = torch.tensor([[2, 0], [2, 5], [0, 2]])
    order, inverse, offsets = experts.route(index, 6)
    assert order.tolist() == [1, 4, 0, 2, 5, 3]
    assert inverse[order].tolist() == list(range(6))
    assert offsets.tolist() == [2, 2, 5, 5, 5, 6] and offsets.dtype == torch.int32
    order, inverse, offsets = experts.route(index, 3, 2)
    assert order.tolist() == [0, 2, 5, 1, 3, 4] and offsets.tolist() == [3, 3, 3]  # pairs with 0 and 5 last
    assert inverse[order].tolist() == list(range(6))


@pytest.mark.parametrize("count", [8, 255, 256, 300, 40_000])
@pytest.mark.parametrize("first", [None, 0, 3])
def test_pairs_with_experts_that_there_are_not_come_last(count: int, first: int | None) -> None:
    """However large their numbers are: keys are sorted in as few bytes as hold the experts that there are."""
    torch.manual_seed(0)
    begin = first or 0
    index = torch.randint(0, 3 * count, (500, 3))
    index[:7, 0] = torch.tensor([count, count + 256, 65_536 + count, 2**31, 2**40, -1, -(2**33)])
    order, inverse, offsets = experts.route(index, count, first)
    pairs = index.flatten() - begin
    own = (pairs >= 0) & (pairs < count)
    wanted = [i for e in range(count) for i in (pairs == e).nonzero().flatten().tolist()] if count < 1000 else None
    if wanted is not None:
        assert order[: len(wanted)].tolist() == wanted
    assert int(offsets[-1]) == int(own.sum()) and not own[order[int(offsets[-1]) :]].any()
    assert torch.equal(offsets.diff(prepend=offsets.new_zeros(1)), torch.bincount(pairs[own], minlength=count).int())
    assert torch.equal(inverse[order], torch.arange(1500))


def test_opcheck() -> None:
    x, index, w, up, bias, down = _inputs(torch.float32)
    order, inverse, offsets = experts.route(index, 8)
    y = experts.dispatch(x, order, inverse, 2)
    h = experts.grouped_mm(y, up.transpose(1, 2), offsets).detach()
    torch.library.opcheck(experts.route, (index, 8))
    torch.library.opcheck(experts.dispatch, (x, order, inverse, 2))
    torch.library.opcheck(experts.grouped_mm, (y.detach().requires_grad_(), up.transpose(1, 2), offsets))
    torch.library.opcheck(experts.grouped_mm, (h, down, offsets))
    torch.library.opcheck(experts.grouped_bias, (h, bias, offsets))
    torch.library.opcheck(experts.combine, (y.detach().requires_grad_(), w, order, inverse))
    torch.library.opcheck(experts.grouped_mm_weight, (y.detach(), h, offsets, True))
    torch.library.opcheck(experts.grouped_mm_weight, (y.detach(), h, offsets, False))


def test_no_tokens_and_strange_strides() -> None:
    offsets = torch.zeros(3, dtype=torch.int32)
    w = torch.randn(3, 4, 5)
    assert experts.grouped_mm(torch.empty(0, 4), w, offsets).shape == (0, 5)
    assert not experts.grouped_mm_weight(torch.empty(0, 4), torch.empty(0, 5), offsets, True).any()
    dy = torch.ones(1, 1).expand(6, 5)
    offsets = torch.tensor([2, 2, 6], dtype=torch.int32)
    x = torch.randn(6, 4)
    torch.testing.assert_close(experts.grouped_mm_weight(x, dy, offsets, False)[2], x[2:].t() @ dy[2:])


def test_expert_loops_hold_no_temporaries() -> None:
    """A body that cannot be traced allocates nothing but its outputs on the CPU."""
    x, _, _, up, bias, _ = (t.detach() for t in _inputs(torch.float32))
    offsets = torch.tensor([0, 4, 8, 12, 20, 25, 30, 37], dtype=torch.int32)
    dy = torch.randn(37, 24)
    calls = [
        (experts.grouped_mm, (x, up.transpose(1, 2), offsets)),
        (experts.grouped_mm_weight, (x, dy, offsets, True)),
        (experts.grouped_bias, (dy, bias, offsets)),
        (experts.grouped_sum, (dy, offsets)),
    ]
    for op, args in calls:
        assert not BODIES[op].traceable
        with torch.profiler.profile(profile_memory=True) as profile, torch.no_grad():
            out = BODIES[op](*args)
        taken = sum(e.self_cpu_memory_usage for e in profile.events() if e.self_cpu_memory_usage > 0)
        assert taken <= out.numel() * out.element_size() + 64, op


def test_gradients_are_deterministic() -> None:
    runs = []
    for _ in range(2):
        inputs = _inputs(torch.bfloat16)
        _layer(*inputs).sum().backward()
        runs.append([t.grad for t in inputs if t.grad is not None])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)
