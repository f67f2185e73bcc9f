"""rewrite_convolutions on exported graphs: what becomes oomc::causal_conv1d, the numbers, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomc.passes.rewrite_convolutions import RewriteConvolutions
from tests.traced import assert_same, ops_of, traced, values_are_right

WIDTH, KERNEL = 8, 4
Mix = Callable[[Tensor, nn.Conv1d], Tensor]


class Layer(nn.Module):
    """Embedding, one convolution along positions, projection."""

    def __init__(self, mix: Mix, bias: bool = True, groups: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = mix
        self.embed = nn.Embedding(16, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, KERNEL, groups=groups, bias=bias)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(F.silu(self.mix(self.embed(ids).transpose(1, 2), self.conv)).transpose(1, 2))


def padded(x: Tensor, conv: nn.Conv1d, padding: int = KERNEL - 1, **options: int) -> Tensor:
    """On both sides, as Qwen3-Next and Mamba pad."""
    return F.conv1d(x, conv.weight, conv.bias, padding=padding, groups=conv.groups, **options)


CAUSAL: dict[str, Mix] = {
    "cut to its first positions": lambda x, conv: padded(x, conv)[:, :, : x.shape[2]],
    "cut twice": lambda x, conv: (y := padded(x, conv))[..., : x.shape[2]] * y[:, :, : x.shape[2]].sigmoid(),
    "padded on the left": lambda x, conv: conv(F.pad(x, (KERNEL - 1, 0))),
    "padded with zeros": lambda x, conv: conv(F.pad(x, (KERNEL - 1, 0), "constant", 0.0)),
}
OTHER: dict[str, Mix] = {
    "looks ahead": lambda x, conv: padded(x, conv)[:, :, KERNEL - 1 :],
    "looks ahead as well": lambda x, conv: padded(x, conv)[:, :, : x.shape[2]] + padded(x, conv)[:, :, 1:].sum(),
    "all positions": lambda x, conv: (y := padded(x, conv))[:, :, : x.shape[2]] * y.mean(),
    "too little padding": lambda x, conv: padded(x, conv, 2)[:, :, : x.shape[2]],
    "padded with ones": lambda x, conv: conv(F.pad(x, (KERNEL - 1, 0), "constant", 1.0)),
    "padded further": lambda x, conv: conv(F.pad(x, (KERNEL, 0)))[:, :, : x.shape[2]],
    "every second": lambda x, conv: padded(x, conv, stride=2)[:, :, : x.shape[2]],
    "wider": lambda x, conv: padded(x, conv, dilation=2),
}


def batch() -> dict[str, Tensor]:
    return {"ids": torch.arange(22).reshape(2, 11) % 16}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CAUSAL)
def test_causal(name: str, bias: bool) -> None:
    model = Layer(CAUSAL[name], bias)
    program = traced(model, batch())
    result = RewriteConvolutions()(program)
    assert result.modified
    found = ops_of(program.forward.graph)
    assert found.count("oomc.causal_conv1d") == 1 and not {"conv1d", "pad", "slice"} & set(found)
    assert values_are_right(program.forward.graph)
    assert_same(program, model, batch())


@pytest.mark.parametrize("name", OTHER)
def test_others_stay(name: str) -> None:
    model = Layer(OTHER[name])
    program = traced(model, batch())
    result = RewriteConvolutions()(program)
    changed = name == "looks ahead as well"  # one of its two
    assert result.modified == changed
    assert ops_of(program.forward.graph).count("conv1d") == 1
    assert_same(program, model, batch())


@pytest.mark.parametrize("groups", [1, 2])
def test_channels_that_meet_stay(groups: int) -> None:
    program = traced(Layer(CAUSAL["cut to its first positions"], groups=groups), batch())
    assert not RewriteConvolutions()(program).modified
