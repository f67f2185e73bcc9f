"""extract: forms are named by their structure and by nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from oomc import meta, private
from oomc.dim_rules import analyse
from oomc.dims import TokenSymbols
from oomc.extract import describe, external_inputs, extract, structure_text
from oomc.fxutil import insert_call
from oomc.worksets import Form, Workset

aten = torch.ops.aten
Build = Callable[[fx.Graph, fx.Node, fx.Node], list[fx.Node]]


def form_of(
    build: Build, dtype: torch.dtype = torch.float32, size: int = 4, transposed: bool = False, prefix: str = "p"
) -> tuple[Form, Workset]:
    """The form of the nodes that `build` makes of a value and a parameter."""
    graph = fx.Graph()
    x, w = graph.placeholder(f"{prefix}_x"), graph.placeholder(f"{prefix}_w")
    with private.fake_mode(symbolic=False):
        val = torch.empty(size, 4, dtype=dtype)
        meta.set_value(x, torch.empty(4, size, dtype=dtype).t() if transposed else val)
        meta.set_value(w, torch.empty(4, 4, dtype=dtype))
    nodes = build(graph, x, w)
    graph.output((nodes[-1],))
    workset = Workset(f"{prefix}/0", 0, nodes, outputs=[nodes[-1]])
    return extract(workset, {w}, analyse(graph, TokenSymbols(None, None))), workset


def scaled(scale: float) -> Build:
    def build(graph: fx.Graph, x: fx.Node, w: fx.Node) -> list[fx.Node]:
        y = insert_call(graph, aten.mm.default, (x, w))
        return [y, insert_call(graph, aten.mul.Tensor, (y, scale))]

    return build


def swapped(graph: fx.Graph, x: fx.Node, w: fx.Node) -> list[fx.Node]:
    y = insert_call(graph, aten.mul.Tensor, (x, 2.0))
    return [y, insert_call(graph, aten.mm.default, (y, w))]


def test_names_do_not_matter() -> None:
    first, _ = form_of(scaled(2.0))
    second, _ = form_of(scaled(2.0), prefix="other")
    assert first.key == second.key
    assert structure_text(first) == structure_text(second)


@pytest.mark.parametrize(
    ("build", "change"),
    [
        (scaled(3.0), {}), (scaled(2), {}), (swapped, {}), (scaled(2.0), {"dtype": torch.bfloat16}),
        (scaled(2.0), {"size": 5}), (scaled(2.0), {"transposed": True}),
    ],
)  # fmt: skip
def test_what_the_computation_depends_on_matters(build: Build, change: dict[str, Any]) -> None:
    assert form_of(build, **change)[0].key != form_of(scaled(2.0))[0].key


def test_whether_a_workset_runs_in_chunks_matters() -> None:
    form, _ = form_of(scaled(2.0))
    texts = [structure_text(form)]
    for chunk in ("rows", "tokens"):
        form.chunk = chunk
        assert structure_text(form) not in texts
        texts.append(structure_text(form))


def test_inputs_come_in_order_of_first_use_with_their_roles() -> None:
    form, workset = form_of(scaled(2.0))
    assert [i.role for i in form.inputs] == ["value", "parameter"]
    assert [n.name for n in workset.inputs] == ["p_x", "p_w"]
    assert external_inputs(workset.nodes) == workset.inputs
    form, _ = form_of(lambda g, x, w: [insert_call(g, aten.mm.default, (w, x))])
    assert [i.role for i in form.inputs] == ["parameter", "value"]


def test_the_form_computes_the_workset() -> None:
    form, _ = form_of(scaled(2.0))
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    assert torch.equal(form.traced(x, w)[0], (x @ w) * 2)


def test_descriptions() -> None:
    assert describe(torch.zeros(2, 3, dtype=torch.bfloat16)) == "bf16[2, 3]"
    assert describe(torch.zeros(2, 3).t()) == "f32[3, 2] strides (1, 3)"
    assert describe((torch.zeros(1), 7)) == "(f32[1], 7)"
