"""Accumulation and the sum of squares of the host; the split master and the counts are in test_adamw.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from oomc.runtime.kernels import SQUARES, accumulate, sum_of_squares

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def bits(values: torch.Tensor) -> Any:
    return values.view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32).numpy()


@DTYPES
@pytest.mark.parametrize("n", [1, SQUARES - 1, SQUARES, 100_003])
def test_sum_of_squares_is_exact_to_fp64(dtype: torch.dtype, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    values = (
        torch.randn(n, generator=generator) * torch.exp2(torch.randint(-60, 60, (n,), generator=generator).float())
    ).to(dtype)
    exact = math.fsum((values.double() ** 2).tolist())
    assert sum_of_squares(bits(values)) == pytest.approx(exact, rel=1e-14)


def test_sum_of_squares_goes_beyond_fp32_and_shows_what_is_not_finite() -> None:
    huge, tiny = torch.full((1000,), 3e38), torch.full((1000,), 1e-44)
    assert sum_of_squares(bits(huge)) == pytest.approx(1000 * float(huge[0].double() ** 2), rel=1e-14)
    assert sum_of_squares(bits(tiny)) == pytest.approx(1000 * float(tiny[0].double() ** 2), rel=1e-14)
    assert sum_of_squares(bits(torch.tensor([1.0, math.inf]))) == math.inf
    assert math.isnan(sum_of_squares(bits(torch.tensor([1.0, math.nan]).bfloat16())))
    assert sum_of_squares(np.zeros(0, np.int16)) == 0.0


@DTYPES
def test_accumulate_rounds_product_and_sum(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    total = torch.full((10_007,), math.nan)
    gradients = [torch.randn(10_007, generator=generator).to(dtype) for _ in range(3)]
    accumulate(total.numpy(), bits(gradients[0]), True)
    assert torch.equal(total, gradients[0].float())
    accumulate(total.numpy(), bits(gradients[1]), False)
    assert torch.equal(total, gradients[0].float() + gradients[1].float())
    weight = torch.tensor(0.3)
    accumulate(total.numpy(), bits(gradients[2]), False, 0.3)
    product = gradients[2].float() * weight
    assert torch.equal(total, gradients[0].float() + gradients[1].float() + product)
    accumulate(total.numpy(), bits(gradients[2]), True, 0.3)
    assert torch.equal(total, product)
