"""rewrite_norms on exported graphs: what becomes oomc::rms_norm, the numbers, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from oomc.passes.rewrite_norms import RewriteNorms
from tests.traced import assert_same, ops_of, traced, values_are_right

WIDTH = 8
Norm = Callable[[Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Embedding, one norm, projection."""

    def __init__(self, norm: Norm, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = norm
        self.embed = nn.Embedding(16, WIDTH)
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.norm(self.embed(ids), self.weight))


def scale(x: Tensor, eps: float = 1e-6) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def llama(x: Tensor, weight: Tensor) -> Tensor:
    values = x.to(torch.float32)
    return weight * (values * scale(values)).to(x.dtype)


def squared(x: Tensor, weight: Tensor) -> Tensor:
    values = x.float()
    mean = (values * values).mean(dim=[2], keepdim=True)
    return (torch.rsqrt(mean + 1e-5) * values).type_as(x) * weight


RMS: dict[str, Norm] = {"llama": llama, "squared": squared}


def twice(x: Tensor, weight: Tensor) -> Tensor:
    values = x.float()
    normal = values * scale(values)
    return normal.to(x.dtype) * weight + normal.to(x.dtype).sin()


def copied(x: Tensor, weight: Tensor) -> Tensor:
    values = x.float()
    return weight * (values * scale(values)).to(x.dtype) + (values * 3.3).to(x.dtype)


def gemma(x: Tensor, weight: Tensor) -> Tensor:
    values = x.float()
    return (values * scale(values) * (1.0 + weight.float())).type_as(x)


def with_scale(x: Tensor, weight: Tensor) -> Tensor:
    values = x.float()
    own = scale(values)
    return weight * (values * own).to(x.dtype) * own.to(x.dtype)


OTHER: dict[str, Norm] = {
    "multiplied in fp32": gemma,
    "rounded twice": twice,
    "its fp32 copy is used": copied,
    "its scale is used": with_scale,
    "of other values": lambda x, w: w * (x.float() * scale(x.float() + 1)).to(x.dtype),
    "in 16 bits": lambda x, w: w * (x * scale(x)),
    "of positions": lambda x, w: w * (x.float() * torch.rsqrt(x.float().pow(2).mean(1, True) + 1e-6)).to(x.dtype),
    "cubes": lambda x, w: w * (x.float() * torch.rsqrt(x.float().pow(4).mean(-1, True) + 1e-6)).to(x.dtype),
    "to another dtype": lambda x, w: (w * (x.float() * scale(x.float())).half()).to(x.dtype),
    "scaled": lambda x, w: (
        w * (x.float() * torch.rsqrt(torch.add(x.float().pow(2).mean(-1, True), 1e-6, alpha=2))).to(x.dtype)
    ),
}


def batch() -> dict[str, Tensor]:
    return {"ids": torch.arange(22).reshape(2, 11) % 16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RMS)
def test_norms_become_one_operator(name: str, dtype: torch.dtype) -> None:
    model = Layer(RMS[name], dtype).eval()
    program = traced(model, batch())
    result = RewriteNorms()(program)
    assert result.modified
    names = ops_of(result.program.forward.graph)
    assert "oomc.rms_norm" in names and "rsqrt" not in names and "mean" not in names
    assert values_are_right(result.program.forward.graph)
    assert_same(result.program, model, batch())
    assert not RewriteNorms()(result.program).modified


@pytest.mark.parametrize("name", OTHER)
def test_what_is_no_such_norm_stays(name: str) -> None:
    model = Layer(OTHER[name]).eval()
    program = traced(model, batch())
    result = RewriteNorms()(program)
    assert not result.modified
    assert "oomc.rms_norm" not in ops_of(result.program.forward.graph) and "rsqrt" in ops_of(
        result.program.forward.graph
    )
    assert_same(result.program, model, batch())


def test_norms_of_fp32_values_stay() -> None:
    assert not RewriteNorms()(traced(Layer(llama, torch.float32).eval(), batch())).modified
