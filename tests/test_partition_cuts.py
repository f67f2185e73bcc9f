"""partition_cuts: which nodes run together, in what chunks, and what is named as the reason where they do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.export import Dim

from oomc import meta, ops
from oomc.dim_rules import analyse
from oomc.dims import slots_of, token_symbols, tokens_of
from oomc.match import op_name
from oomc.passes.partition_cuts import Part, cut
from tests.test_dims import delta_rule, flat, routed

D = 8


class Block(nn.Module):
    """A function of x [B, S, D] and two weights."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.w, self.wide = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D, 64 * D))

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.w, self.wide)


class Cuts:
    """The parts of a function, as text: the names of each one's operations, without sizes and getitem.

    Attributes:
        graph: that was cut.
        parts: of it.
        crossing: elements of values that pass between parts, for a batch of 2 x 16.
    """

    def __init__(self, function: Callable[..., Any], whole: bool = False) -> None:
        dims = {0: Dim("B", min=1), 1: Dim("S", min=3, max=64)}
        exported = torch.export.export(Block(function), (torch.zeros(2, 16, D),), dynamic_shapes=(dims,), strict=False)
        self.graph = exported.graph_module.graph
        inputs = self.graph.find_nodes(op="placeholder")
        self.analysis = analyse(self.graph, token_symbols(n for n in inputs if meta.tensor(n) is not None))
        self.nodes = [n for n in self.graph.nodes if n.op == "call_function" and not meta.is_size(n)]
        self.parts = cut(self.nodes, self.analysis, {n for n in inputs if n.name.startswith("p_")}, whole)
        self.graph.lint()
        self.owner = {n: i for i, part in enumerate(self.parts) for n in part.nodes}

    def text(self) -> list[str]:
        """Of each part: its kind of chunks, and its operations."""
        return [f"{part.chunk or 'whole'}: {' '.join(self._names(part))}" for part in self.parts]

    @staticmethod
    def _names(part: Part) -> list[str]:
        return [op_name(n).removeprefix("oomc.") for n in part.nodes if op_name(n) != "getitem"]

    def crossing(self) -> list[fx.Node]:
        """Values that pass from a part to a later one."""
        return [n for n in self.owner if any(self.owner.get(u, self.owner[n]) != self.owner[n] for u in n.users)]

    def elements(self) -> list[int]:
        """How large what crosses is."""
        return sorted(math.prod(hint(s) for s in meta.value(n).shape) for n in self.crossing())

    def fences(self) -> list[str]:
        return [fence for part in self.parts for fence in part.fences]


def hint(size: Any) -> int:
    """A size in the batch that was traced."""
    return size if isinstance(size, int) else int(size.node.hint)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head."""
    heads = (x.unsqueeze(1) for x in (q, k, v))
    return ops.attention(*heads, None, None, 0.5, True, None, 0.0)[0].squeeze(1)


def layer(x: Tensor, w: Tensor, wide: Tensor) -> Tensor:
    h = F.layer_norm(x, (D,))
    x = x + attention(h @ w, h @ w.t(), h) @ w
    return x + (x @ wide).relu() @ wide.t()


def assert_sound(cuts: Cuts) -> None:
    """Every node is in one part; parts come in order; parts of chunks only mix what they do not cut."""
    nodes = [n for n in cuts.graph.nodes if n.op == "call_function" and not meta.is_size(n)]
    assert set(cuts.owner) == set(nodes)
    assert sum(len(part.nodes) for part in cuts.parts) == len(nodes)
    for node, index in cuts.owner.items():
        assert all(cuts.owner.get(n, 0) <= index for n in node.all_input_nodes)
    for part in cuts.parts:
        along = {"tokens": {"B", "S"}, "rows": {"B"}, "": set()}[part.chunk]
        assert not any(cuts.analysis.flows[n].mixes & along for n in part.nodes)
        assert [n for n in cuts.graph.nodes if n in part.nodes] == part.nodes
        assert bool(part.fences) or part.chunk != "rows"


def test_attention_lies_between_what_keeps_tokens_apart() -> None:
    cuts = Cuts(layer)
    assert_sound(cuts)
    assert cuts.text() == [
        "tokens: layer_norm matmul t matmul",
        "rows: unsqueeze unsqueeze unsqueeze attention",
        "tokens: squeeze matmul add matmul relu t matmul add",
    ]
    assert cuts.fences() == ["oomc.attention: mixes positions"]
    assert cuts.elements() == [2 * 16 * D] * 4  # q, k, v and the result: nothing that is wide


@pytest.mark.parametrize("whole", [False, True])
def test_what_needs_positions_in_order_is_no_fence(whole: bool) -> None:
    cuts = Cuts(lambda x, w, _: delta_rule((x @ w)[..., :4]) + (x @ w)[..., :4].unsqueeze(2), whole)
    assert_sound(cuts)
    assert [part.chunk for part in cuts.parts] == ["tokens"]
    assert cuts.fences() == []


def test_positions_in_order_are_a_fence_where_chunks_of_tokens_cannot_be() -> None:
    """What is chosen here is not put together from tiles."""

    def chosen(x: Tensor, w: Tensor, _: Tensor) -> Tensor:
        y = delta_rule((x @ w)[..., :4]).squeeze(2)
        return y.transpose(0, 1).flatten(0, 1).topk(2, -1).values

    cuts = Cuts(chosen)
    assert_sound(cuts)
    assert [part.chunk for part in cuts.parts] == ["tokens", "rows", ""]
    assert cuts.fences() == ["oomc.gated_delta_rule: mixes positions"]


def test_what_costs_next_to_nothing_is_computed_again_after_attention() -> None:
    """The norm is one of the block's input, which is there anyway; what is a product crosses."""

    def parallel(x: Tensor, w: Tensor, wide: Tensor) -> Tensor:
        h = F.layer_norm(x, (D,)).relu()
        gate = (h @ w).sigmoid()
        a = attention(h @ w, h @ w.t(), gate)
        return x + a * gate + ((a + h) @ wide).relu() @ wide.t()

    cuts = Cuts(parallel)
    assert_sound(cuts)
    assert [part.chunk for part in cuts.parts] == ["tokens", "rows", "tokens"]
    assert [op_name(n) for part in cuts.parts for n in part.nodes].count("layer_norm") == 2
    crossing = {op_name(n) for n in cuts.crossing()}
    assert "relu" not in crossing and "layer_norm" not in crossing and "sigmoid" in crossing


def test_parallel_branches_share_their_levels() -> None:
    """Two attentions that do not need each other run in one part, and what prepares them in another one."""

    def branches(x: Tensor, w: Tensor, _: Tensor) -> Tensor:
        a, b = x @ w, (x @ w).relu()
        return attention(a, a, a) * attention(b, b, b).sigmoid()

    cuts = Cuts(branches)
    assert_sound(cuts)
    assert [part.chunk for part in cuts.parts] == ["tokens", "rows", "tokens"]
    assert cuts._names(cuts.parts[1]).count("attention") == 2


def test_a_branch_that_skips_attention_waits_for_it() -> None:
    """What only the last part uses is computed there, where it is large."""

    def gated(x: Tensor, w: Tensor, wide: Tensor) -> Tensor:
        return attention(x @ w, x, x) @ wide * (x @ wide).sigmoid()

    cuts = Cuts(gated)
    assert_sound(cuts)
    assert cuts.text()[-1].count("matmul") == 2
    assert max(cuts.elements()) == 2 * 16 * D


def test_what_is_small_crosses_and_what_is_large_does_not() -> None:
    """A narrow result of a wide value stays where the wide value is made."""

    def narrow(x: Tensor, w: Tensor, wide: Tensor) -> Tensor:
        hidden = (x @ wide).relu().view(*x.shape, 64).sum(-1)
        return attention(x @ w, x, x) + hidden

    cuts = Cuts(narrow)
    assert_sound(cuts)
    assert max(cuts.elements()) == 2 * 16 * D


def test_two_attentions_in_a_row() -> None:
    def two(x: Tensor, w: Tensor, wide: Tensor) -> Tensor:
        y = layer(x, w, wide)
        return layer(y, w, wide)

    cuts = Cuts(two)
    assert_sound(cuts)
    assert [part.chunk for part in cuts.parts] == ["tokens", "rows", "tokens", "rows", "tokens"]
    assert max(cuts.elements()) == 2 * 16 * D


@pytest.mark.parametrize(
    ("name", "function", "chunks", "fence"),
    [
        ("arange", lambda x, w, _: x @ w + torch.arange(x.shape[1])[:, None], ["", "tokens"], "positions"),
        ("table", lambda x, w, wide: x @ w * wide.view(-1, D)[: x.shape[1]], ["", "tokens"], "positions"),
        ("cumsum", lambda x, w, _: (x @ w).cumsum(1) @ w, ["tokens", "rows", "tokens"], "positions"),
        ("pad", lambda x, w, _: F.pad(x @ w, (0, 0, 2, 0))[:, :-2] @ w, ["tokens", "rows", "tokens"], "positions"),
        ("mean", lambda x, w, _: (x @ w) - (x @ w).mean(0), ["tokens", "", "tokens"], "batch rows"),
    ],
)
def test_position_operations(name: str, function: Callable[..., Any], chunks: list[str], fence: str) -> None:
    cuts = Cuts(function)
    assert_sound(cuts)
    assert [part.chunk for part in cuts.parts] == chunks
    assert cuts.fences()[0].endswith(f": mixes {fence}")


def test_a_size_that_is_data_is_alone() -> None:
    """There are no tokens in it, but a tile would take the tile's own size."""
    cuts = Cuts(lambda x, w, _: (x @ w) * torch.scalar_tensor(x.shape[1]))
    assert_sound(cuts)
    assert cuts.text() == ["whole: scalar_tensor", "tokens: matmul mul"]
    assert cuts.fences() == ["scalar_tensor: no rule says what it does to tokens"]


def test_all_that_mixes_is_named() -> None:
    cuts = Cuts(lambda x, w, _: attention(x, x, x).cumsum(1).tril() @ w + (x - x.mean()))
    assert_sound(cuts)
    assert sorted(cuts.fences()) == [
        "cumsum: mixes positions", "mean: mixes batch rows and positions", "oomc.attention: mixes positions",
        "tril: no rule says what it does to tokens",
    ]  # fmt: skip


def test_a_sum_over_all_tokens_is_used_in_the_next_part() -> None:
    cuts = Cuts(lambda x, w, _: (x @ w) * (x @ w).sum((0, 1)).tanh())
    assert_sound(cuts)
    assert [part.chunk for part in cuts.parts] == ["tokens", "", "tokens"]
    for part in cuts.parts:
        assert not any(cuts.analysis.flows[n].sums and any(u in part.nodes for u in n.users) for n in part.nodes)
    assert cuts._names(cuts.parts[1]) == ["tanh"] or cuts._names(cuts.parts[2])[0] == "tanh"


def test_logits_stay_with_their_loss() -> None:
    def loss(x: Tensor, w: Tensor, wide: Tensor) -> Tensor:
        logits = F.layer_norm(x, (D,)) @ wide
        labels = F.pad(x.argmax(-1), (0, 1), value=-100)[:, 1:]
        total = F.cross_entropy(flat(logits), labels.flatten(), reduction="sum")
        return total / (labels != -100).sum()

    cuts = Cuts(loss)
    assert_sound(cuts)
    assert max(cuts.elements()) <= 2 * 16 * D
    (part,) = (p for p in cuts.parts if "cross_entropy_loss" in cuts._names(p))
    assert part.chunk == "tokens" and {"layer_norm", "matmul"} <= set(cuts._names(part))


def test_experts_are_one_part_in_chunks() -> None:
    def moe(x: Tensor, w: Tensor, _: Tensor) -> Tensor:
        x = attention(x, x, x)
        slots, weights, order, inverse, offsets = routed(x)
        y = ops.combine(ops.grouped_mm(slots, w[None].expand(3, -1, -1), offsets).relu(), weights, order, inverse)
        return x + y.view(x.shape)

    cuts = Cuts(moe)
    assert_sound(cuts)
    assert [part.chunk for part in cuts.parts][-1] == "tokens"
    assert (
        len({cuts.owner[n] for n in cuts.nodes if op_name(n) in ("oomc.route", "oomc.dispatch", "oomc.combine")}) == 1
    )
    assert not any(slots_of(layout) for n in cuts.crossing() for layout in cuts.analysis.flows[n].layouts)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("order returned", lambda x, y, order: (y, order)),
        ("order summed up", lambda x, y, order: (y, order.cumsum(0))),
        (
            "order that attention uses",
            lambda x, y, order: (y, attention(x, x, x) + order.view(x.shape[0], -1, 1)[:, :1]),
        ),
    ],
)
def test_experts_whose_order_leaks_run_whole(name: str, use: Callable[..., Any]) -> None:
    def moe(x: Tensor, w: Tensor, _: Tensor) -> Any:
        slots, weights, order, inverse, offsets = routed(x)
        y = ops.combine(ops.grouped_mm(slots, w[None].expand(3, -1, -1), offsets), weights, order, inverse)
        return use(x, y.view(x.shape) @ w, order)

    cuts = Cuts(moe)
    assert_sound(cuts)
    (part,) = (p for p in cuts.parts if "combine" in cuts._names(p))
    assert part.chunk == ""
    assert "route: the order of experts is used outside of the experts" in [
        f.removeprefix("oomc.") for f in part.fences
    ]
    (last,) = (cuts.parts[cuts.owner[n]] for n in cuts.nodes if op_name(n) == "matmul" and n in cuts.owner)
    assert last.chunk == "tokens"  # what follows is as before


def test_views_that_several_parts_use_are_copied() -> None:
    """What is viewed crosses once; a view of it in another part would count its memory twice."""

    def heads(x: Tensor, w: Tensor, _: Tensor) -> Tensor:
        h = (x @ w).unflatten(-1, (2, 4)).transpose(1, 2)
        return ops.attention(h.sin(), h, h, None, None, 0.5, True, None, 0.0)[0] + h.cos()

    cuts = Cuts(heads)
    assert_sound(cuts)
    assert [part.chunk for part in cuts.parts] == ["tokens", "rows", "tokens"]
    assert [cuts._names(p).count("transpose") for p in cuts.parts] == [1, 1, 1]
    assert [op_name(n) for n in cuts.crossing()] == ["matmul", "sin", "getitem"]


def test_a_view_that_only_a_later_part_uses_moves_there() -> None:
    cuts = Cuts(lambda x, w, _: attention(x @ w, x, x).flatten(0, 1) + flat(x @ w).sin())
    assert_sound(cuts)
    assert all("flatten" not in cuts._names(part) for part in cuts.parts[:-1])


def test_nothing_passes_a_write() -> None:
    def writes(x: Tensor, w: Tensor, _: Tensor) -> Tensor:
        y = x @ w
        before = y.sum(-1)
        y.mul_(2)
        return attention(y, y, y) + before[..., None] + y.relu()

    cuts = Cuts(writes)
    assert_sound(cuts)
    write = next(n for n in cuts.nodes if op_name(n) == "mul_")
    order = cuts.owner[write]
    assert cuts.parts[order].chunk == ""
    assert all(cuts.owner[n] <= order for n in cuts.nodes[: cuts.nodes.index(write)])
    assert all(cuts.owner[n] >= order for n in cuts.nodes[cuts.nodes.index(write) :])
    assert "mul_: no rule says what it does to tokens" in cuts.fences()


def test_values_that_cannot_be_cut_along_positions_run_in_rows_only() -> None:
    """Scores of all positions against all: their rows of the batch are apart."""
    cuts = Cuts(lambda x, w, _: ((x @ x.transpose(1, 2)).softmax(-1) @ x).cumsum(1))
    assert_sound(cuts)
    assert {part.chunk for part in cuts.parts} <= {"tokens", "rows", ""}
    for part in cuts.parts:
        squares = [
            n for n in part.nodes if len([d for d in cuts.analysis.flows[n].layouts[0] or () if d == ("S",)]) > 1
        ]
        assert not squares or part.chunk != "tokens"


def test_whole_blocks() -> None:
    """A block may be left in one, in chunks of rows if it holds attention; not if it uses its own sum over rows."""
    cuts = Cuts(layer, whole=True)
    assert_sound(cuts)
    assert [(p.chunk, p.fences) for p in cuts.parts] == [("rows", ("oomc.attention: mixes positions",))]
    assert [p.chunk for p in Cuts(lambda x, w, _: (x @ w).relu(), whole=True).parts] == ["tokens"]
    sums = Cuts(lambda x, w, _: (x @ w) * (x @ w).sum((0, 1)), whole=True)
    assert_sound(sums)
    assert len(sums.parts) > 1
    mixed = Cuts(lambda x, w, _: (x @ w) - (x @ w).mean(0), whole=True)
    assert [p.chunk for p in mixed.parts] == ["tokens", "", "tokens"]


@cache
def random_function(seed: int) -> Callable[..., Any]:
    """Random operations, some of which mix."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    steps = [(draw(8), draw(9), draw(9)) for _ in range(12)]

    def function(x: Tensor, w: Tensor, wide: Tensor) -> Tensor:
        values = [x]
        for kind, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(
                [
                    lambda a, b: a + b, lambda a, b: a @ w, lambda a, b: (a @ wide).relu() @ wide.t(), attention3,
                    lambda a, b: a * b.sum((0, 1)), lambda a, b: a.cumsum(1),
                    lambda a, b: b.transpose(0, 1).sin().transpose(0, 1), lambda a, b: a - b.mean(1, keepdim=True),
                ][kind](a, b)
            )  # fmt: skip
        return sum(values[1:], values[0])

    return function


def attention3(a: Tensor, b: Tensor) -> Tensor:
    return attention(a, b, a)


@pytest.mark.parametrize("seed", range(8))
def test_random_blocks(seed: int) -> None:
    cuts = Cuts(random_function(seed))
    assert_sound(cuts)
    assert max(cuts.elements(), default=0) <= 2 * 16 * D
    for part in cuts.parts:
        carries = any(tokens_of(layout) for n in part.nodes for layout in cuts.analysis.flows[n].layouts)
        assert part.chunk == "tokens" or part.fences or not carries
