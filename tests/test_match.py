"""Running parts of a graph on small real tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from oomc import meta, private
from oomc.fxutil import insert_call
from oomc.match import Concrete, Unknown, erase_dead_writes, functional, int_literals, movement_chain, op_name
from tests.traced import traced


class Parts(nn.Module):
    """Sizes, half precision, an in-place op on fresh memory and one on a part of it."""

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.arange(ids.shape[1]).to(torch.bfloat16)[None, :].expand(ids.shape[0], -1) + 0.001
        y = torch.zeros(ids.shape[0], ids.shape[1])
        y[:, :1].add_(7.0)
        return x[..., None] * y[..., None] * ids[..., None]


@pytest.fixture(scope="module")
def nodes() -> dict[str, torch.fx.Node]:
    program = traced(Parts(), {"ids": torch.ones(2, 5, dtype=torch.int64)})
    return {n.name: n for n in program.forward.graph.nodes}


def test_values_at_sizes_of_our_choice(nodes: dict[str, torch.fx.Node]) -> None:
    node = next(n for n in nodes.values() if op_name(n) == "add")
    sizes = {s.node.expr.name: n for s, n in zip(node.meta["val"].shape, (3, 4))}
    value = Concrete(sizes, {})(node)
    # Half precision is widened, or 3.001 would be 3.
    torch.testing.assert_close(value, torch.arange(4.0).expand(3, 4) + 0.001)
    with pytest.raises(Unknown, match="size"):
        Concrete({}, {})(node)


def test_literals_can_be_read_as_others() -> None:
    node = torch.fx.Graph().call_function(torch.ops.aten.arange.default, (4096,))
    assert int_literals([node]) == {4096}
    assert Concrete({}, {}, literals={4096: 3})(node).tolist() == [0, 1, 2]


def test_inputs_are_not_made_up(nodes: dict[str, torch.fx.Node]) -> None:
    placeholder = next(n for n in nodes.values() if n.op == "placeholder")
    with pytest.raises(Unknown, match="not given"):
        Concrete({}, {})(placeholder)


def test_writes_to_shared_memory_are_refused_and_kept() -> None:
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    with private.fake_mode():
        meta.set_value(x, torch.empty(4, 4))
    made = insert_call(graph, aten.relu.default, (x,))
    node = insert_call(graph, aten.add_.Tensor, (insert_call(graph, aten.squeeze.dim, (made, 1)), 1.0))
    graph.output((made,))
    with pytest.raises(Unknown, match="others read"):
        functional(node)
    erase_dead_writes(graph)
    assert node in graph.nodes


def test_a_dead_write_to_its_own_memory_goes() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(torch.ops.aten.relu.default, (x,))
    graph.call_function(torch.ops.aten.add_.Tensor, (graph.call_function(torch.ops.aten.squeeze.dim, (made, 1)), x))
    graph.output((x,))
    erase_dead_writes(graph)
    assert [n.op for n in graph.nodes] == ["placeholder", "output"]


def test_movement_stops_at_arithmetic(nodes: dict[str, torch.fx.Node]) -> None:
    node = next(n for n in nodes.values() if op_name(n) == "expand")
    names = [op_name(n) for n in movement_chain(node)]
    assert names[0] == "expand"
    assert names[-1] not in ("expand", "unsqueeze")
