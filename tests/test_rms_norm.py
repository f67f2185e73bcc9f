"""oomc::rms_norm against what models write, and the kernels of torch that it is on CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oomc import ops, private, target
from oomc import rms_norm as rms_norm_module
from oomc.rms_norm import PLAIN, plain, plain_backward, rms_norm, rms_norm_backward
from tests.kernel_devices import CUDA

DTYPES = [torch.bfloat16, torch.float16]
EPS = 1e-5


def written(x: Tensor, eps: float = EPS) -> Tensor:
    """As Llama and its like write it, but for the weight."""
    values = x.to(torch.float32)
    variance = values.pow(2).mean(-1, keepdim=True)
    return (values * torch.rsqrt(variance + eps)).to(x.dtype)


def given(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    """x and a gradient of the result."""
    torch.manual_seed(0)
    return (3 * torch.randn(shape)).to(dtype), torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 64), (2, 5, 3, 33), (4, 1), (0, 8)])
def test_bits_are_those_of_what_is_written(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, dout = given(dtype, *shape)
    x.requires_grad_()
    out, scale = rms_norm(x, EPS)
    assert torch.equal(out, written(x)) and out.dtype == dtype
    assert scale.shape == (*shape[:-1], 1) and scale.dtype == torch.float32 and not scale.requires_grad
    (found,) = torch.autograd.grad(out, x, dout)
    (wanted,) = torch.autograd.grad(written(x), x, dout)
    assert torch.equal(found, wanted)


def test_the_gradient_is_the_derivative() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, EPS)[0], x)


@pytest.mark.parametrize("op", [rms_norm, rms_norm_backward])
def test_results_lie_as_the_fake_says(op: torch._ops.OpOverload) -> None:
    """Also those of what lies otherwise."""
    x, dout = (t.transpose(0, 1) for t in given(torch.bfloat16, 6, 4, 8))
    scale = rms_norm(x, EPS)[1]
    args = (x, EPS) if op is rms_norm else (dout, x, scale)
    torch.library.opcheck(op, args)


def test_planned_for_a_gpu_it_takes_its_results_alone() -> None:
    """And a copy of what does not lie in order."""
    forward, backward = ops.BODIES[rms_norm], ops.BODIES[rms_norm_backward]
    with private.fake_mode(symbolic=False), target.planning_for((9, 0)):
        x = torch.empty(4, 64, dtype=torch.bfloat16)
        for one in (x, torch.empty(64, 4, dtype=torch.bfloat16).t()):
            out, scale = forward(one, EPS)
            dx = backward(one, one, scale)
            assert out.is_contiguous() and dx.is_contiguous() and out.shape == dx.shape == one.shape


def test_for_a_compiler_there_are_plain_forms() -> None:
    x, dout = given(torch.bfloat16, 5, 16)
    out, scale = PLAIN[rms_norm](x, EPS)
    assert torch.equal(out, rms_norm(x, EPS)[0])
    assert torch.equal(PLAIN[rms_norm_backward](dout, x, scale), rms_norm_backward(dout, x, scale))
    assert set(PLAIN) == {rms_norm, rms_norm_backward}


@pytest.mark.parametrize("shape", [(7, 5, 8), (35, 8), (1, 8)])
def test_more_than_kernels_can_count_is_done_in_pieces(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are stood in for, as is what they can count."""
    x, dout = given(torch.bfloat16, *shape)
    calls: list[int] = []

    def forward(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        calls.append(x.numel())
        return plain(x, eps)

    def backward(dout: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        calls.append(x.numel())
        return plain_backward(dout, x, scale)

    monkeypatch.setattr(private, "fused_rms_norm", forward)
    monkeypatch.setattr(private, "fused_rms_norm_backward", backward)
    monkeypatch.setattr(rms_norm_module, "LARGEST", 7)
    monkeypatch.setattr(rms_norm_module, "PIECE", 35)
    with target.planning_for((9, 0)):
        out, scale = ops.BODIES[rms_norm].function(x, EPS)
        dx = ops.BODIES[rms_norm_backward].function(dout, x, scale)
    wanted = plain(x, EPS)
    assert torch.equal(out, wanted[0]) and torch.equal(scale, wanted[1]) and scale.shape == (*shape[:-1], 1)
    assert torch.equal(dx, plain_backward(dout, x, scale)) and dx.shape == shape
    assert max(calls) <= 35 and sum(calls) == 2 * x.numel()


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(300, 2048), (64, 32, 128), (17, 1000), (9, 33), (0, 64)])
def test_on_a_gpu_it_is_one_kernel_and_as_exact(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, dout = given(dtype, *shape)
    on_gpu = x.cuda(), dout.cuda()
    out, scale = rms_norm(on_gpu[0], EPS)
    dx = rms_norm_backward(on_gpu[1], on_gpu[0], scale)
    want, exact_scale = plain(x.double(), EPS)
    want_dx = plain_backward(dout.double(), x.double(), exact_scale)
    assert out.dtype == dx.dtype == dtype and scale.dtype == torch.float32 and scale.shape == (*shape[:-1], 1)
    assert torch.allclose(scale.cpu().double(), exact_scale, rtol=1e-6)
    unit = torch.finfo(dtype).eps
    for found, wanted in ((out, want), (dx, want_dx)):
        # rounded once: half a unit in the last place, and what fp32 adds to it
        assert (found.cpu().double() - wanted).abs().le(0.51 * unit * wanted.abs() + 1e-6).all()


@pytest.mark.cuda
@CUDA
def test_on_a_gpu_rows_do_not_depend_on_how_many_there_are() -> None:
    """So that chunks of tokens are the whole, bit for bit; also where x lies otherwise."""
    x, dout = (t.cuda() for t in given(torch.bfloat16, 257, 4, 128))
    out, scale = rms_norm(x, EPS)
    dx = rms_norm_backward(dout, x, scale)
    for part in (slice(0, 1), slice(3, 200), slice(200, 257)):
        one, own = rms_norm(x[part], EPS)
        assert torch.equal(one, out[part]) and torch.equal(own, scale[part])
        assert torch.equal(rms_norm_backward(dout[part], x[part], own), dx[part])
    turned = x.transpose(0, 1)
    assert torch.equal(rms_norm(turned, EPS)[0], out.transpose(0, 1))
