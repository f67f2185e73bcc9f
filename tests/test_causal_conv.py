"""The causal convolution against torch's, whole and in parts that hand on their last positions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from oomc.causal_conv import causal_conv1d

CHANNELS = 5


def inputs(rows: int, kernel: int, bias: bool) -> list[Tensor | None]:
    """x, weight and bias in fp64; x lies as a transposed [B, S, C]."""
    torch.manual_seed(0)
    x = torch.randn(2, rows, CHANNELS, dtype=torch.float64).transpose(1, 2).requires_grad_()
    weight = torch.randn(CHANNELS, 1, kernel, dtype=torch.float64, requires_grad=True)
    return [x, weight, torch.randn(CHANNELS, dtype=torch.float64, requires_grad=True) if bias else None]


def torchs(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As models write it."""
    return F.conv1d(x, weight, bias, padding=weight.shape[2] - 1, groups=x.shape[1])[:, :, : x.shape[2]]


def gradients(out: Tensor, given: list[Tensor | None]) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return torch.autograd.grad(out, [x for x in given if x is not None], torch.randn_like(out))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "kernel", "bounds"), [
    (9, 4, (9,)), (9, 4, (4, 9)), (9, 2, (1, 2, 8, 9)), (7, 4, (1, 2, 3, 4, 5, 6, 7)), (2, 4, (2,)),
])  # fmt: skip
def test_parts_are_the_whole(rows: int, kernel: int, bounds: tuple[int, ...], bias: bool) -> None:
    """Also parts that are shorter than what they hand on."""
    given = inputs(rows, kernel, bias)
    x, weight, bias_ = given
    assert x is not None and weight is not None
    want, state, parts = torchs(x, weight, bias_), None, []
    for start, end in zip((0, *bounds), bounds, strict=False):
        out, state = causal_conv1d(x[:, :, start:end], weight, bias_, state)
        parts.append(out)
    got = torch.cat(parts, 2)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    assert state is not None and torch.equal(state, F.pad(x, (kernel - 1, 0))[:, :, rows:])
    for a, b in zip(gradients(got, given), gradients(want, given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_all_results(bias: bool) -> None:
    given = [*inputs(3, 4, bias), torch.randn(2, CHANNELS, 3, dtype=torch.float64, requires_grad=True)]
    assert torch.autograd.gradcheck(causal_conv1d, given)  # type: ignore[arg-type]
    last = causal_conv1d(*given)[1]  # the results before are not used
    assert torch.equal(torch.autograd.grad(last.sum(), given[0])[0], torch.ones_like(given[0]))  # type: ignore[arg-type]


@pytest.mark.parametrize("with_state", [True, False])
def test_registration(with_state: bool) -> None:
    state = torch.randn(2, CHANNELS, 3, dtype=torch.float64, requires_grad=True) if with_state else None
    torch.library.opcheck(causal_conv1d, (*inputs(6, 4, with_state), state))
