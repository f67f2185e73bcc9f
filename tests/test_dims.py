"""Rules of token independence: what they say of layouts and of mixing is what computing in tiles shows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.export import Dim

from oomc import dims as words
from oomc import meta, ops
from oomc.dim_rules import RULES, analyse
from oomc.dims import (
    Analysis,
    Layout,
    Mixed,
    NoRule,
    Slots,
    TokenSymbols,
    can_be_cut,
    regroup,
    slots_of,
    token_symbols,
    tokens_of,
)  # fmt: skip
from oomc.match import op_name
from oomc.runtime.tiles import narrow, tiles

aten = torch.ops.aten
WEIGHT = torch.linspace(-1, 1, 16).view(4, 4)
BIAS, TABLE = torch.linspace(-1, 1, 4), torch.linspace(-1, 1, 32).view(8, 4)
PICK, EXPERTS = torch.tensor([2, 0]), torch.linspace(-1, 1, 48).view(3, 4, 4)
Function = Callable[[Tensor], Any]
POSITION: frozenset[words.Token] = frozenset({"S"})


class _Function(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(WEIGHT.clone())

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@cache
def graph_of(function: Function) -> tuple[Analysis, list[fx.Node], fx.Node]:
    """The analysis of the exported function of x [B, S, 4], its computing nodes, and its result."""
    dims = {0: Dim("B", min=1, max=8), 1: Dim("S", min=3, max=8)}  # so that S - 1 is no broadcast size
    exported = torch.export.export(_Function(function), (torch.zeros(3, 5, 4),), dynamic_shapes=(dims,), strict=False)
    graph = exported.graph_module.graph
    symbols = token_symbols(n for n in graph.find_nodes(op="placeholder") if meta.tensor(n) is not None)
    analysis = analyse(graph, symbols)
    nodes = [n for n in graph.nodes if n in analysis.flows and n.op == "call_function" and "_assert" not in op_name(n)]
    (output,) = graph.find_nodes(op="output")
    return analysis, nodes, output.args[0][0]


def mixes(analysis: Analysis, nodes: list[fx.Node]) -> str:
    """The tokens that any of the nodes mixes; "?" if there is no rule for one."""
    if not all(analysis.flows[n].known for n in nodes):
        return "?"
    return "".join(sorted({t for n in nodes for t in analysis.flows[n].mixes}))


def values() -> Tensor:
    return torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(0))


def agree_in_tiles(function: Function, layout: Layout, chunk: tuple[int, int]) -> bool:
    """Whether each tile of the result, laid out as the analysis says, is the function of that tile of x alone."""
    x = values()
    whole = function(x)
    return all(
        torch.allclose(part, want, rtol=1e-5, atol=1e-6)
        for tile in tiles(3, 7, chunk)
        for part, want in [(function(x[tile.rows, tile.columns]), narrow(whole, layout, tile))]
        if part.shape == want.shape or pytest.fail(f"a tile is {tuple(part.shape)}, not {tuple(want.shape)}")
    )


def ids(x: Tensor) -> Tensor:
    """A small number for each token."""
    return x.argmax(-1)


def flat(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def sized(x: Tensor, *rest: int) -> tuple[int, ...]:
    """The sizes of x's batch and sequence, and more."""
    return (x.shape[0], x.shape[1], *rest)


def routed(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Slots, weights, order, inverse and offsets of top-2 of 3 experts."""
    weights, chosen = flat(x)[:, :3].softmax(-1).topk(2, -1)
    order, inverse, offsets = ops.route(chosen, 3)
    return ops.dispatch(flat(x), order, inverse, 2), weights, order, inverse, offsets


def delta_rule(x: Tensor) -> Tensor:
    """One head; g and beta are features."""
    return ops.gated_delta_rule(*[x.unsqueeze(2)] * 3, -x[..., :1].exp(), x[..., 1:2], None, 4, True)[0]


def convolution(x: Tensor) -> Tensor:
    """Each feature along the positions."""
    return ops.causal_conv1d(x.transpose(1, 2), WEIGHT[:, None], None, None)[0].transpose(1, 2)


def torch_attention(x: Tensor) -> Tensor:
    """One head."""
    head = x.unsqueeze(1)
    return F.scaled_dot_product_attention(head, head, head, is_causal=True)


def positions_first(x: Tensor) -> Tensor:
    """There and back through tokens in another order."""
    return x.transpose(0, 1).flatten(0, 1).sin().view(x.shape[1], x.shape[0], 4).transpose(0, 1)


def experts(x: Tensor) -> Tensor:
    """Top-2 of 3 experts with a bias."""
    slots, weights, order, inverse, offsets = routed(x)
    hidden = ops.grouped_bias(ops.grouped_mm(slots, EXPERTS, offsets), EXPERTS[:, 0], offsets)
    return ops.combine(hidden.tanh(), weights, order, inverse)


def other_experts(x: Tensor) -> Tensor:
    """The groups of another choice of experts."""
    slots, weights, order, inverse, _ = routed(x)
    return ops.combine(ops.grouped_mm(slots, EXPERTS, routed(-x)[4]), weights, order, inverse)


INDEPENDENT: dict[str, Function] = {
    "pointwise": lambda x: torch.where(x > 0, x.sin() * 2 + x, x.clamp(max=0.5)),
    "broadcast": lambda x: x * BIAS + x[..., :1],
    "cast": lambda x: x.to(torch.float64).cos(),
    "clone": lambda x: aten.alias(x.clone().transpose(1, 2).contiguous().detach()).sin(),
    "like": lambda x: torch.zeros_like(x) + torch.ones_like(x) * torch.full_like(x, 2) + (torch.empty_like(x) > 0) * 0,
    "type_as": lambda x: (x > 0).type_as(x) + torch.positive(x),
    "view": lambda x: x.view(*sized(x, 2, 2)).sin().view(x.shape),
    "view_as": lambda x: flat(x).sin().view_as(x) + flat(x).cos().reshape_as(x),
    "flatten": lambda x: flat(x).relu(),
    "all in one": lambda x: x.reshape(-1).relu(),
    "tokens and features": lambda x: x.reshape(-1, 2).relu(),
    "positions and features": lambda x: x.flatten(1).relu(),
    "unflatten": lambda x: x.unflatten(-1, (2, 2)).sum(-1),
    "unsqueeze": lambda x: x.unsqueeze(1).sin().squeeze(1).unsqueeze(-1),
    "transpose": lambda x: x.transpose(1, 2).exp(),
    "permute": lambda x: x.permute(2, 1, 0).exp(),
    "swapaxes": lambda x: x.swapaxes(0, 1).exp(),
    "positions first and flat": lambda x: x.transpose(0, 1).flatten(0, 1).relu(),
    "mT": lambda x: x.mT.relu(),
    "t": lambda x: flat(x).t().relu(),
    "T": lambda x: flat(x).T.relu(),
    "expand": lambda x: x.unsqueeze(2).expand(-1, -1, 3, -1).relu() * BIAS.expand(*sized(x, 3, 4)),
    "expand_as": lambda x: x * BIAS.expand_as(x) + torch.broadcast_to(BIAS, x.shape),
    "select of features": lambda x: x.select(-1, 1).relu(),
    "slice of features": lambda x: x[..., 1:3].relu(),
    "slice of everything": lambda x: x[:, :].relu(),
    "narrow": lambda x: x.narrow(-1, 1, 2).relu(),
    "pad of features": lambda x: F.pad(x, (1, 2)).cos(),
    "roll of features": lambda x: x.roll(1, -1) + x.flip(-1),
    "slice_scatter": lambda x: torch.slice_scatter(x, x[..., :2] * 2, 2, 0, 2),
    "select_scatter": lambda x: torch.select_scatter(x, x[..., 0] * 2, 2, 0),
    "split": lambda x: x.split(2, -1)[1] * x.split([2, 2], -1)[0] * x.chunk(2, -1)[1] * x.tensor_split(2, -1)[0],
    "unbind": lambda x: x.unbind(-1)[2].relu(),
    "unsafe": lambda x: torch.unsafe_chunk(x, 2, -1)[0] + torch.unsafe_split(x, 2, -1)[1],
    "cat": lambda x: torch.cat([x, x.sin(), torch.zeros(sized(x, 1))], -1),
    "stack": lambda x: torch.stack([x, x.sin()], 1),
    "factories": lambda x: (torch.zeros(sized(x)) + torch.ones(sized(x)) + torch.full(sized(x), 2.0))[..., None] + x,
    "new": lambda x: x.new_zeros(sized(x, 4)) + x.new_ones(sized(x, 4)) + x.new_full(sized(x, 4), 2.0) + x,
    "new empty": lambda x: (x.new_empty(sized(x)) > torch.empty(sized(x)))[..., None] * 0 + x,
    "layer_norm": lambda x: F.layer_norm(x, (4,), BIAS),
    "rms_norm": lambda x: F.rms_norm(x, (4,), BIAS),
    "native_layer_norm": lambda x: torch.native_layer_norm(x, [4], BIAS, None, 1e-5)[0],
    "statistics of a norm": lambda x: torch.native_layer_norm(x, [4], BIAS, None, 1e-5)[1],
    "oomc.rms_norm": lambda x: ops.rms_norm(x, 1e-5)[0] * ops.rms_norm(x, 1e-5)[1],
    "glu": lambda x: F.glu(x, -1),
    "softmax": lambda x: x.softmax(-1) + x.log_softmax(-1),
    "cumsum of features": lambda x: x.cumsum(-1) + x.cumprod(-1) + x.logcumsumexp(-1),
    "topk": lambda x: x.topk(2, -1).values * x.topk(2, -1).indices,
    "sort": lambda x: x.sort(-1).values * x.argsort(-1) + x.sort(dim=-1, stable=True).values,
    "extremes": lambda x: x.max(-1).values + x.min(-1).values + x.median(-1).values + x.kthvalue(2, -1).values,
    "maximum of two": lambda x: torch.max(x, x.sin()) + torch.min(x, x.cos()),
    "where they are": lambda x: x.argmax(-1) + x.argmin(-1) + ids(x).unsqueeze(-1).mode(-1).values,
    "sums of features": lambda x: x.sum(-1, keepdim=True) + x.mean(-1, keepdim=True) + x.prod(-1, keepdim=True),
    "spread of features": lambda x: x.var(-1) + x.std(-1, unbiased=False) + x.amax(-1) + x.amin(-1),
    "norms of features": lambda x: x.norm(dim=-1) + torch.linalg.vector_norm(x, dim=-1) + x.logsumexp(-1),
    "any of features": lambda x: (x > 0).any(-1) & (x > 0).all(-1) | ((x > 0).count_nonzero(-1) > 2),
    "loss of each token": lambda x: F.cross_entropy(flat(x), flat(ids(x)), reduction="none"),
    "nll of each token": lambda x: F.nll_loss(flat(x), flat(ids(x)), reduction="none"),
    "linear": lambda x: F.linear(x, WEIGHT, BIAS),
    "matmul": lambda x: x @ WEIGHT,
    "matmul from the left": lambda x: WEIGHT @ x.transpose(1, 2),
    "matmul of a token": lambda x: x.unsqueeze(2) @ x.unsqueeze(3),
    "mm": lambda x: torch.mm(flat(x), WEIGHT) + torch.addmm(BIAS, flat(x), WEIGHT),
    "bmm": lambda x: torch.bmm(flat(x).unsqueeze(1), flat(x).unsqueeze(2)),
    "baddbmm": lambda x: torch.baddbmm(BIAS, flat(x).t().unsqueeze(-1), WEIGHT.unsqueeze(1)),
    "embedding": lambda x: F.embedding(ids(x), WEIGHT),
    "one_hot": lambda x: F.one_hot(ids(x), 4),
    "gather": lambda x: x.gather(-1, x.argsort(-1)),
    "scatter": lambda x: x.scatter(-1, x.topk(1, -1).indices, 7.0) + x.scatter_add(-1, x.argsort(-1), x),
    "scatter_reduce": lambda x: x.scatter_reduce(-1, x.argsort(-1), x, "sum"),
    "index_select of features": lambda x: x.index_select(-1, PICK),
    "index_select of a table": lambda x: WEIGHT.index_select(0, flat(ids(x))),
    "index of a table": lambda x: WEIGHT[ids(x)] + BIAS[ids(x)][..., None],
    "index of features": lambda x: x[..., PICK],
    "experts": experts,
    "bits": lambda x: ((x > 0) & (x < 1)) ^ ((x > 0) | (x < -1)),
    "shifted bits": lambda x: (ids(x) << 1) + (ids(x) >> 1),
}  # fmt: skip
"""What keeps all tokens apart; every rule that can is here."""

MIXING: dict[str, tuple[str, Function]] = {
    "softmax of positions": ("S", lambda x: x.softmax(1)),
    "softmax of rows": ("B", lambda x: x.log_softmax(0)),
    "cumsum": ("S", lambda x: x.cumsum(1)),
    "cumsum of all": ("BS", lambda x: flat(x).cumsum(0)),
    "mean of positions": ("S", lambda x: x - x.mean(1, keepdim=True)),
    "mean of rows": ("B", lambda x: x - x.mean(0)),
    "mean of all": ("BS", lambda x: x - x.mean()),
    "mean of tokens": ("BS", lambda x: x - x.mean((0, 1))),
    "sum of positions": ("S", lambda x: x.sum(1)),
    "spread": ("BS", lambda x: x.var()),
    "biased spread": ("BS", lambda x: x.std(unbiased=False)),
    "norm": ("BS", lambda x: x.norm()),
    "greatest": ("S", lambda x: x - x.amax(1, keepdim=True)),
    "any": ("BS", lambda x: (x > 2).any() & x.bool().all()),
    "flip": ("S", lambda x: x.flip(1)),
    "roll": ("S", lambda x: x.roll(1, 1)),
    "roll of all": ("BS", lambda x: x.roll(1)),
    "shift": ("S", lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1]),
    "select of a position": ("S", lambda x: x - x[:, 0:1] + x[:, 2].unsqueeze(1)),
    "select of a row": ("B", lambda x: x * x[0]),
    "position": ("S", lambda x: x + torch.arange(x.shape[1])[:, None]),
    "row": ("B", lambda x: x + torch.arange(x.shape[0])[:, None, None]),
    "rows of a table": ("S", lambda x: x + TABLE[: x.shape[1]]),
    "last rows of a table": ("S", lambda x: x + TABLE[8 - x.shape[1] :]),
    "sort of positions": ("S", lambda x: x.sort(1).values),
    "top of positions": ("S", lambda x: x.topk(2, 1).values.sum(1)),
    "greatest position": ("S", lambda x: x.max(1).values + x.argmax(1)),
    "halves of positions": ("S", lambda x: F.glu(torch.stack([x, x], 2).flatten(1, 2), 1)),
    "convolution": ("S", lambda x: F.conv1d(x.transpose(1, 2), WEIGHT[:, :, None].expand(4, 4, 3), padding=1)),
    "attention": ("S", lambda x: ops.attention(*[x.unsqueeze(1)] * 3, None, None, 0.5, True, None, 0.0)[0]),
    "torch's attention": ("S", torch_attention),
}  # fmt: skip
"""What mixes tokens, and which."""

IN_ORDER: list[Function] = [delta_rule, convolution]

UNKNOWN: dict[str, Function] = {
    "no rule": lambda x: x.tril(),
    "size as a factor": lambda x: x / x.shape[1],
    "size as a bound": lambda x: x.clamp(max=x.shape[1] / 10),
    "size to fill with": lambda x: x * torch.full_like(x, x.shape[1]) * x.new_full((4,), x.shape[0] / 2),
    "size as a scalar": lambda x: x * torch.scalar_tensor(x.shape[1]),
    "size as a shift": lambda x: x.roll(x.shape[1], -1),
    "size as an index": lambda x: x + TABLE[x.shape[1] - 1],
    "size that pads": lambda x: F.pad(x, (0, x.shape[1]))[..., :4],
    "norm of positions": lambda x: F.layer_norm(x.transpose(1, 2), (x.shape[1],)),
    "rms norm of positions": lambda x: ops.rms_norm(x.transpose(1, 2), 1e-5)[0],
    "product of tokens": lambda x: x @ x.transpose(1, 2),
    "product over tokens": lambda x: x.transpose(1, 2) @ x,
    "product over all tokens": lambda x: torch.mm(flat(x).t(), flat(x)),
    "vector products": lambda x: torch.dot(x.reshape(-1), x.reshape(-1)) + torch.mv(flat(x), BIAS),
    "weights of tokens": lambda x: F.linear(BIAS, flat(x)),
    "bias of each token": lambda x: torch.addmm(flat(x), flat(x), WEIGHT),
    "convolution over rows": lambda x: F.conv1d(x.permute(2, 0, 1), torch.ones(4, x.shape[0], 1)),
    "lookups that are counted": lambda x: F.embedding(ids(x), WEIGHT, scale_grad_by_freq=True),
    "table of tokens": lambda x: F.embedding(torch.tensor([0, 1]), flat(x)),
    "gather of positions": lambda x: x.gather(1, x.argsort(1)),
    "scatter over positions": lambda x: x.scatter_add(1, x.argsort(1), x),
    "index of positions": lambda x: x.index_select(1, torch.tensor([1, 0])) * x[:, torch.tensor([0, 0])],
    "mask of tokens": lambda x: x[x > 0],
    "two indices": lambda x: WEIGHT[ids(x), ids(x)],
    "reflected": lambda x: F.pad(x, (1, 1), mode="reflect"),
    "split of positions": lambda x: x.split([1, x.shape[1] - 1], 1)[0],
    "cat of positions": lambda x: torch.cat([x, x], 1),
    "cat of rows": lambda x: torch.cat([x, x], 0),
    "scatter of a position": lambda x: torch.select_scatter(x, x[:, 0] * 2, 1, 0),
    "rows against positions": lambda x: flat(x) * x.transpose(0, 1).flatten(0, 1),
    "another order": lambda x: x.transpose(0, 1).reshape(x.shape),
    "features among positions": lambda x: x.transpose(1, 2).reshape(x.shape[0], 4 * x.shape[1]).view(x.shape),
    "greatest of all": lambda x: x * x.max() + x.argmax(),
    "median of all": lambda x: x * x.median(),
    "mean loss": lambda x: F.cross_entropy(flat(x), flat(ids(x))),
    "weighed loss": lambda x: F.cross_entropy(flat(x), flat(ids(x)), BIAS.abs(), reduction="none"),
    "loss of pictures": lambda x: F.cross_entropy(x.transpose(1, 2), ids(x), reduction="none"),
    "mean of a negative likelihood": lambda x: F.nll_loss(flat(x), flat(ids(x))),
    "bins that follow the data": lambda x: torch.histc(x, 4),
    "groups of other experts": other_experts,
    "order of experts that mixes": lambda x: routed(x)[0].cumsum(0),
    "sum in the order of experts": lambda x: routed(x)[0].sum(0),
    "experts of experts": lambda x: ops.dispatch(routed(x)[0], *routed(x)[2:4], 2),
    "choice without rows": lambda x: ops.route(ids(x).t().flatten()[None].expand(2, -1), 4)[0],
    "stack of tokens and other tokens": lambda x: torch.stack([flat(x), x.transpose(0, 1).flatten(0, 1)]),
}  # fmt: skip
"""Of what no rule knows anything; a few do keep tokens apart, and would only be slow."""

SUMS: dict[str, Function] = {
    "sum": lambda x: x.sum(),
    "sum over tokens": lambda x: x.sin().sum((0, 1)),
    "sum of flat tokens": lambda x: flat(x).sum(0),
    "count": lambda x: (x > 0).sum(),
    "count of nonzeros": lambda x: x.relu().count_nonzero((0, 1)),
    "loss": lambda x: F.cross_entropy(flat(x), flat(ids(x)), reduction="sum"),
    "likelihood": lambda x: F.nll_loss(flat(x), flat(ids(x)), reduction="sum"),
    "bins": lambda x: torch.histc(x, 4, -1, 1),
}
"""Sums over all tokens of what each has of its own."""


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent(name: str) -> None:
    analysis, nodes, result = graph_of(INDEPENDENT[name])
    assert mixes(analysis, nodes) == "", {n: analysis.flows[n] for n in nodes}
    for chunk in ((1, 7), (3, 2), (2, 3)):
        assert agree_in_tiles(INDEPENDENT[name], analysis.layout(result), chunk)


@pytest.mark.parametrize("name", MIXING)
def test_mixing(name: str) -> None:
    """Rows alone agree if only positions are mixed, and the other way round; with both, nothing does."""
    mixed, function = MIXING[name]
    analysis, nodes, result = graph_of(function)
    assert mixes(analysis, nodes) == mixed, {n: analysis.flows[n] for n in nodes}
    layout = analysis.layout(result)
    for token, chunk in (("B", (1, 7)), ("S", (3, 3))):
        if token in mixed and token in tokens_of(layout):
            assert not agree_in_tiles(function, layout, chunk), token
        elif token not in mixed:
            assert agree_in_tiles(function, layout, chunk), token


@pytest.mark.parametrize("function", IN_ORDER)
def test_what_is_in_order_keeps_rows_apart_and_leaves_a_state(function: Function) -> None:
    analysis, nodes, result = graph_of(function)
    assert mixes(analysis, nodes) == ""
    (node,) = (n for n in nodes if analysis.flows[n].ordered)
    out, *_, state = analysis.flows[node].layouts
    assert tokens_of(out) == {"B", "S"} and tokens_of(state) == {"B"}
    assert agree_in_tiles(function, analysis.layout(result), (1, 7))
    assert not agree_in_tiles(function, analysis.layout(result), (3, 3))  # without the state


@pytest.mark.parametrize("function", IN_ORDER)
def test_what_is_in_order_along_another_dimension_mixes(function: Function) -> None:
    """Rows as positions, or a dimension that is made of both."""
    for other in (lambda x: function(x.transpose(0, 1)), lambda x: function(x.flatten(0, 1)[None])):
        analysis, nodes, _ = graph_of(other)
        assert mixes(analysis, nodes) != ""
        assert not any(analysis.flows[n].ordered for n in nodes)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_no_rule_knows_mixes_everything(name: str) -> None:
    analysis, nodes, _ = graph_of(UNKNOWN[name])
    assert mixes(analysis, nodes) == "?", {n: analysis.flows[n] for n in nodes}
    assert all(analysis.flows[n].mixes == {"B", "S"} for n in nodes if not analysis.flows[n].known)


@pytest.mark.parametrize("name", SUMS)
def test_sums(name: str) -> None:
    analysis, nodes, result = graph_of(SUMS[name])
    assert mixes(analysis, nodes) == ""
    assert [n for n in nodes if analysis.flows[n].sums] == [result]
    x = values()
    parts = [SUMS[name](x[t.rows, t.columns]) for t in tiles(3, 7, (2, 3))]
    torch.testing.assert_close(sum(parts), SUMS[name](x), rtol=1e-5, atol=1e-5)


NEVER_EXPORTED = {
    "_fused_rms_norm", "_log_softmax", "_softmax", "_to_copy", "_unsafe_view", "concat", "constant_pad_nd", "conv2d",
    "conv3d", "convolution", "empty", "lift_fresh_copy", "nll_loss", "norm",
}  # fmt: skip
"""Names under which export does not leave operations, or only for more dimensions."""


def test_every_rule_is_tried() -> None:
    functions = [*INDEPENDENT.values(), *(f for _, f in MIXING.values()), *IN_ORDER, *UNKNOWN.values(), *SUMS.values()]
    seen = {op_name(n) for function in functions for n in graph_of(function)[1]}
    assert set(RULES) - seen == NEVER_EXPORTED - seen


def test_the_order_of_experts_is_an_order_of_its_own() -> None:
    analysis, nodes, _ = graph_of(experts)
    by_name = {op_name(n): analysis.flows[n] for n in nodes}
    (slot,) = slots_of(by_name["oomc.dispatch"].layout)
    assert by_name["oomc.grouped_mm"].layout == ((slot,), (4,))
    assert by_name["oomc.combine"].layout == (("B", "S"), (4,))
    assert tokens_of(((slot,),)) == {"B", "S"}
    assert not can_be_cut(((slot,),), ["S"]) and not can_be_cut(((slot,),), [])
    order, inverse, offsets = by_name["oomc.route"].layouts
    assert order == inverse == ((slot,),)
    assert {s.route for s in slots_of(offsets)} == {slot.route}


# --- layouts


def symbols_of_two_sizes() -> TokenSymbols:
    return graph_of(torch.sin)[0].symbols


def test_symbols_of_values() -> None:
    analysis, nodes, _ = graph_of(lambda x: flat(x))
    symbols = analysis.symbols
    (x,) = (n for n in analysis.flows if n.op == "placeholder" and "B" in tokens_of(analysis.layout(n)))
    assert symbols.axes(meta.value(x)) == (0, 1)
    assert symbols.layout(meta.value(x)) == (("B",), ("S",), (4,))
    assert symbols.layout(meta.value(nodes[-1])) == (("B", "S"), (4,))
    assert symbols.axes(meta.value(nodes[-1])) == (None, None)
    assert symbols.layout(7) is None
    assert symbols.tokens == {"B", "S"}
    assert symbols.formula(symbols.batch * symbols.sequence + 1) == "B*S + 1"
    assert TokenSymbols(None, None).tokens == set()
    assert TokenSymbols(symbols.batch, None).tokens == {"B"}


def test_sizes_that_are_no_products_of_tokens() -> None:
    analysis, _, result = graph_of(lambda x: x[:, 1:])
    symbols = analysis.symbols
    b, s = symbols.batch, symbols.sequence
    assert analysis.layout(result) == (("B",), (Mixed(s - 1, POSITION),), (4,))
    assert symbols.dim(1) == () and symbols.dim(6) == (6,)
    assert symbols.dim(4 * b * s) == ("B", "S", 4)
    assert symbols.dim(b + s) == (Mixed(b + s, frozenset({"B", "S"})),)
    assert symbols.dim(s**2) == (Mixed(s**2, POSITION),)
    assert symbols.dim(s // 2) == (Mixed(s // 2, POSITION),)


@pytest.mark.parametrize(
    ("layout", "along", "can"),
    [
        ((("B",), ("S",), (4,)), "BS", True), ((("B", "S", 4),), "BS", True), (((), (4,)), "BS", True),
        ((("B",), ("S",), ("S",)), "BS", False), ((("B",), ("S",), ("S",)), "B", True),
        ((("S", "S"),), "S", False), ((("B",), (Mixed(7, POSITION),)), "BS", False),
        ((("B",), (Mixed(7, POSITION),)), "B", True), (((Slots("r", 6),), (4,)), "B", False), (None, "BS", True),
    ],
)  # fmt: skip
def test_what_can_be_cut(layout: Layout | None, along: str, can: bool) -> None:
    assert can_be_cut(layout, list(along)) == can  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "shape", "want"),
    [
        ("B|S|4", "B*S|4", "B S|4"), ("B S|4", "B|S|2|2", "B|S|2|2"), ("B|S|2|2", "B|S|4", "B|S|4"),
        ("B|S|6", "B|S*2|3", "B|S 2|3"), ("B|S 2|3", "B|S|6", "B|S|6"), ("B|S|4", "B*S*4", "B S 4"),
        ("B S 4", "B|1|S|4", "B||S|4"), ("B||S", "B*S", "B S"), ("S|B", "B*S", "S B"), ("S B", "S|B", "S|B"),
        ("6|S", "2|3*S", "2|3 S"), ("B|4|S", "B|2|2|S", "B|2|2|S"),
        ("S B", "B|S", None), ("B|S|4", "B|4|S", None), ("B|4|S", "B*2|S*2", "B 2|2 S"), ("B|S|4", "S|B|4", None),
        ("B|S|6", "B|S|4", None), ("B|S|4", "B|S", None), ("B|6|S", "B|4|S", None), ("B|S", "B|S|2", None),
    ],
)  # fmt: skip
def test_the_same_elements_in_another_shape(layout: str, shape: str, want: str | None) -> None:
    symbols = symbols_of_two_sizes()
    known = {"B": symbols.batch, "S": symbols.sequence}

    def dims(text: str) -> tuple[words.Dim, ...]:
        return tuple(tuple(int(a) if a.isdigit() else a for a in dim.split()) for dim in text.split("|"))

    sizes = [eval(size, dict(known)) for size in shape.split("|")]
    if want is None:
        with pytest.raises(NoRule):
            regroup(dims(layout), sizes, symbols)
    else:
        assert regroup(dims(layout), sizes, symbols) == dims(want)


OPS: dict[str, Function] = {
    "sin": torch.sin, "softmax": lambda x: x.softmax(-1), "linear": lambda x: F.linear(x, WEIGHT),
    "center": lambda x: x - x.mean(-1, keepdim=True), "softmax1": lambda x: x.softmax(1), "flip": lambda x: x.flip(1),
    "cumsum": lambda x: x.cumsum(1), "norm": lambda x: F.layer_norm(x, (4,)), "center1": lambda x: x - x.mean(1, True),
    "flat": lambda x: flat(x).sin().view_as(x), "sum0": lambda x: x + x.sum(0), "turn": positions_first,
    "size": lambda x: x / x.shape[1], "experts": lambda x: experts(x).view_as(x),
}  # fmt: skip
MIXERS = {"softmax1", "flip", "cumsum", "center1", "sum0", "size"}


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=4))
def test_what_is_called_independent_can_be_computed_in_chunks(names: list[str]) -> None:
    def function(x: Tensor) -> Tensor:
        for name in names:
            x = OPS[name](x)
        return x

    analysis, nodes, result = graph_of(function)
    assert (mixes(analysis, nodes) == "") == (not set(names) & MIXERS)
    if not set(names) & MIXERS:
        assert agree_in_tiles(function, analysis.layout(result), (2, 3))


def test_what_is_known_of_placeholders_may_be_given() -> None:
    analysis, _, _ = graph_of(torch.sin)
    graph = next(iter(analysis.flows)).graph
    (x,) = (n for n in analysis.flows if n.op == "placeholder" and "B" in tokens_of(analysis.layout(n)))
    given_ = analyse(graph, analysis.symbols, {x: (("S",), ("B",), (4,))})
    assert given_.layout(x) == (("S",), ("B",), (4,))
    assert given_.layout(next(iter(x.users))) == (("S",), ("B",), (4,))


def test_writes_mix_everything() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.clone()
        y.add_(1)
        return y

    analysis, nodes, _ = graph_of(function)
    assert [op_name(n) for n in nodes if not analysis.flows[n].known] == ["add_"]
