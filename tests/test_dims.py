"""Rules of token independence: what they call independent gives the same when it is computed in chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.export import Dim

from oomc import meta
from oomc.dims import TokenSymbols, is_independent, is_token_sum, token_symbols

WEIGHT = torch.linspace(-1, 1, 16).view(4, 4)


class _Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(WEIGHT.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def graph_of(function: Callable[[Tensor], Tensor]) -> tuple[fx.GraphModule, TokenSymbols, list[fx.Node]]:
    """The exported function of x [B, S, 4], its symbols, and its computing nodes."""
    dims = {0: Dim("B", min=1), 1: Dim("S", min=3)}  # so that S - 1 is no broadcast size
    exported = torch.export.export(_Function(function), (torch.zeros(3, 5, 4),), dynamic_shapes=(dims,), strict=False)
    module = exported.graph_module
    inputs = [n for n in module.graph.find_nodes(op="placeholder") if meta.tensor(n) is not None]
    symbols = token_symbols(inputs)
    nodes = [n for n in module.graph.nodes if n.op == "call_function" and meta.tensor(n) is not None]
    return module, symbols, nodes


INDEPENDENT: dict[str, Callable[[Tensor], Tensor]] = {
    "pointwise": lambda x: x.sin() * 2 + x,
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "linear": lambda x: F.linear(x, WEIGHT),
    "matmul": lambda x: x @ WEIGHT,
    "mean of features": lambda x: x.mean(-1, keepdim=True),
    "flatten": lambda x: x.flatten(0, 1).relu(),
    "heads": lambda x: x.unflatten(-1, (2, 2)).sum(-1),
    "transpose": lambda x: x.transpose(1, 2).exp(),
    "cast": lambda x: x.to(torch.float64).cos(),
    "slice of features": lambda x: x[..., :2],
}
MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax of tokens": lambda x: x.softmax(1),
    "cumsum": lambda x: x.cumsum(1),
    "mean of tokens": lambda x: x - x.mean(1, keepdim=True),
    "flip": lambda x: x.flip(1),
    "shift": lambda x: F.pad(x, (0, 0, 1, 0)),
    "product of tokens": lambda x: x @ x.transpose(1, 2),
    "slice of tokens": lambda x: x[:, 1:],
    "size as data": lambda x: x / x.shape[1],
    "position": lambda x: x + torch.arange(x.shape[1])[:, None],
    "batch norm": lambda x: x - x.mean(0),
    "sort of tokens": lambda x: x.sort(1).values,
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent(name: str) -> None:
    _, symbols, nodes = graph_of(INDEPENDENT[name])
    assert all(is_independent(n, symbols) for n in nodes), nodes
    assert_chunks_agree(INDEPENDENT[name])


@pytest.mark.parametrize("name", MIXING)
def test_mixing(name: str) -> None:
    _, symbols, nodes = graph_of(MIXING[name])
    assert not all(is_independent(n, symbols) for n in nodes), nodes


def assert_chunks_agree(function: Callable[[Tensor], Tensor]) -> None:
    """Each (batch, sequence) tile alone gives the tile of the whole."""
    x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    whole = function(x)
    for b in range(2):
        for s in (slice(0, 4), slice(4, 6)):
            part = function(x[b : b + 1, s])
            if whole.shape[:2] == (2, 6):
                torch.testing.assert_close(part, whole[b : b + 1, s])
            elif whole.shape[0] == 12:
                torch.testing.assert_close(part, whole.unflatten(0, (2, 6))[b, s])
            else:
                torch.testing.assert_close(part, whole[b : b + 1, :, s])


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin, "softmax": lambda x: x.softmax(-1), "linear": lambda x: F.linear(x, WEIGHT),
    "center": lambda x: x - x.mean(-1, keepdim=True), "softmax1": lambda x: x.softmax(1), "flip": lambda x: x.flip(1),
    "cumsum": lambda x: x.cumsum(1), "norm": lambda x: F.layer_norm(x, (4,)), "center1": lambda x: x - x.mean(1, True),
    "flat": lambda x: x.flatten(0, 1).sin().view_as(x), "sum0": lambda x: x + x.sum(0),
}  # fmt: skip


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=4))
def test_what_is_called_independent_can_be_computed_in_chunks(names: list[str]) -> None:
    def function(x: Tensor) -> Tensor:
        for name in names:
            x = OPS[name](x)
        return x

    _, symbols, nodes = graph_of(function)
    if all(is_independent(n, symbols) for n in nodes):
        assert_chunks_agree(function)
    else:
        assert set(names) & {"softmax1", "flip", "cumsum", "center1", "sum0", "flat"}


def test_token_sums() -> None:
    _, symbols, nodes = graph_of(
        lambda x: F.cross_entropy(x.flatten(0, 1), x.flatten(0, 1).argmax(-1), reduction="sum")
    )
    assert [is_token_sum(n, symbols) for n in nodes][-1]
    _, symbols, nodes = graph_of(lambda x: F.cross_entropy(x.flatten(0, 1), x.flatten(0, 1).argmax(-1)))
    assert not any(is_token_sum(n, symbols) for n in nodes)
    _, symbols, nodes = graph_of(lambda x: x.sum())
    assert [is_token_sum(n, symbols) for n in nodes] == [True]
    _, symbols, nodes = graph_of(lambda x: (x > 0).sum())
    assert not any(is_token_sum(n, symbols) for n in nodes)  # a count: nothing is differentiated through it


def test_symbols_of_values() -> None:
    module, symbols, nodes = graph_of(lambda x: x.flatten(0, 1))
    x = next(n for n in module.graph.find_nodes(op="placeholder") if symbols.atoms(meta.value(n))[0])
    assert symbols.axes(meta.value(x)) == (0, 1)
    assert symbols.order(meta.value(x)) == ["B", "S"]
    assert symbols.atoms(meta.value(nodes[-1])) == [("B", "S"), ()]
    assert symbols.axes(meta.value(nodes[-1])) == (None, None)
    assert symbols.formula(symbols.batch * symbols.sequence + 1) == "B*S + 1"
    _, symbols, nodes = graph_of(lambda x: x[:, 1:])
    assert symbols.mixed(meta.value(nodes[-1]))
    assert not symbols.mixed(7)
