"""Counter-based dropout: what its mask depends on, and that it looks random."""

import pytest
import torch
from torch import Tensor

from oomc.dropout import dropout


def _rng(seed: int, step: int) -> Tensor:
    return torch.tensor([seed, step])


def _mask(shape: tuple[int, ...], p: float, seed: int = 1, step: int = 0, site: int = 0, offset: int = 0) -> Tensor:
    return dropout(torch.ones(shape), p, _rng(seed, step), site, offset) == 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate_and_scale(p: float) -> None:
    n = 1 << 20
    out = dropout(torch.ones(n), p, _rng(3, 5), 7, 0)
    rate = (out == 0).double().mean()
    assert abs(rate - p) < 5 * (p * (1 - p) / n) ** 0.5
    torch.testing.assert_close(out[out != 0].unique(), torch.tensor([1 / (1 - p)]))


def test_extremes() -> None:
    x = torch.randn(100)
    assert torch.equal(dropout(x, 0.0, _rng(0, 0), 0, 0), x)
    assert not dropout(x, 1.0, _rng(0, 0), 0, 0).any()


def test_masks_of_other_seeds_steps_sites_and_positions_are_independent() -> None:
    n = 1 << 18
    base = _mask((n,), 0.5)
    others = [
        _mask((n,), 0.5, **{key: value}) for key in ("seed", "step", "site", "offset") for value in (2, 3, 1 << 30)
    ]
    others += [base.roll(lag) for lag in (1, 2, 64, 1024)]
    for other in others:
        agreement = (base == other).double().mean()
        assert abs(agreement - 0.5) < 5 * 0.5 / n**0.5


def test_bytes_of_the_mask_are_uniform() -> None:
    bits = _mask((1 << 20,), 0.5).view(-1, 8).long()
    counts = torch.bincount((bits << torch.arange(8)).sum(-1), minlength=256).double()
    mean = counts.mean()
    chi2 = float(((counts - mean) ** 2 / mean).sum())
    assert 255 - 5 * 510**0.5 < chi2 < 255 + 5 * 510**0.5


def test_chunks_see_the_whole_tensors_mask() -> None:
    x = torch.randn(600_000)
    whole = dropout(x, 0.3, _rng(9, 1), 4, 0)
    parts = [dropout(part, 0.3, _rng(9, 1), 4, at) for part, at in ((x[:1000], 0), (x[1000:], 1000))]
    assert torch.equal(torch.cat(parts), whole)


def test_backward_uses_the_forward_mask() -> None:
    x = torch.ones(1000, requires_grad=True)
    out = dropout(x, 0.3, _rng(9, 1), 4, 0)
    out.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, out.detach())


def test_registration() -> None:
    torch.library.opcheck(dropout, (torch.randn(4, 6, requires_grad=True), 0.5, _rng(1, 2), 3, 4))


@pytest.mark.cuda
def test_cuda_has_the_same_mask() -> None:
    here = dropout(torch.ones(4097), 0.3, _rng(9, 1), 4, 0)
    there = dropout(torch.ones(4097, device="cuda"), 0.3, _rng(9, 1).cuda(), 4, 0)
    assert torch.equal(here, there.cpu())
