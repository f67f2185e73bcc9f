"""The sum of an fp32 and a low-precision tensor: one kernel on CUDA, with torch's bits.

Without a GPU it can run in Triton's interpreter, if Triton is installed and TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import pytest
import torch

from oomc import sums
from tests.kernel_devices import DEVICES


def case(device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    total, part = torch.randn(3, 1001, 7), torch.randn(3, 1001, 7).to(dtype)
    total[0, :3, 0] = torch.tensor([torch.inf, -torch.inf, 3e38])
    return total.transpose(1, 2).to(device), part.transpose(1, 2).to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_the_bits_are_torchs(device: str, dtype: torch.dtype) -> None:
    from oomc import sum_kernels

    total, part = case(device, dtype)
    wanted = total + part
    out = torch.empty_like(part)
    sum_kernels.add(total, part, out)
    if device == "cpu" and dtype == torch.bfloat16:  # Triton's interpreter cuts bf16 off instead of rounding
        torch.testing.assert_close(out, wanted.to(dtype), rtol=2**-7, atol=0)
    else:
        assert torch.equal(out, wanted.to(dtype))
    assert out.stride() == part.stride()
    sum_kernels.add(total, part, total)
    assert torch.equal(total, wanted)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_what_lies_otherwise_is_added_too(device: str) -> None:
    for change in (lambda x: x, lambda x: x.contiguous(), lambda x: x[:, 1:]):
        total, part = case(device, torch.bfloat16)
        part = change(part)
        total = total if part.shape == total.shape else total[:, 1:]
        wanted = total + part
        copy = total.clone()
        sums.add_(copy, part)
        assert torch.equal(copy, wanted)
        sums.add_to(part, total)
        assert torch.equal(part, wanted.bfloat16())
