"""split_experts on exported graphs: the groups, the numbers, and what stays together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomc import meta, ops, pipeline
from oomc.errors import VerifyError
from oomc.passes.partition_worksets import find_blocks
from oomc.passes.split_experts import SplitExperts
from oomc.printer import print_program
from oomc.program import Program
from oomc.verify import verify_program
from tests import programs
from tests.traced import assert_same, traced, values_are_right

E, K, D, H = 5, 2, 16, 8


class Layer(nn.Module):
    """Experts in canonical form; `gate(self, hidden slots, offsets, expert of each slot)` is between the products."""

    def __init__(self, gate: Callable[[Any, Tensor, Tensor, Tensor], Tensor], before: bool = False) -> None:
        super().__init__()
        self.gate, self.before = gate, before
        self.router = nn.Linear(D, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, H, D) * 0.3), nn.Parameter(torch.randn(E, H, D) * 0.3)
        self.bias, self.scale = nn.Parameter(torch.randn(E, H) * 0.3), nn.Parameter(torch.randn(H))
        self.register_buffer("shift", torch.randn(H))

    def weights(self) -> tuple[Tensor, Tensor]:
        return self.up.transpose(1, 2), self.down

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).flatten(0, 1).topk(K, -1)
        order, inverse, offsets = ops.route(chosen, E)
        slots = ops.dispatch(x.flatten(0, 1), order, inverse, K)
        if self.before:
            slots = slots * weights.flatten().index_select(0, order)[:, None]
            weights = torch.ones_like(weights)
        up, down = self.weights()
        owner = chosen.flatten().index_select(0, order) if self.gate is scaled_each else order
        y = ops.grouped_mm(self.gate(self, ops.grouped_mm(slots, up, offsets), offsets, owner), down, offsets)
        return ops.combine(y, weights, order, inverse).view(x.shape)


class Separate(Layer):
    """A parameter for each expert."""

    def __init__(self) -> None:
        super().__init__(plain)
        self.parts = nn.ParameterList(each.detach().clone() for each in self.up)
        del self.up

    def weights(self) -> tuple[Tensor, Tensor]:
        return torch.stack(list(self.parts)).transpose(1, 2), self.down


class Model(nn.Module):
    """Embedding and two layers of experts; with `also`, something else uses the first one's weights."""

    def __init__(self, layer: Callable[[], nn.Module], also: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.also = nn.Embedding(32, D), also
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        first: Any = self.layers[0]
        return x + first.up.mean() if self.also else x


def plain(layer: Any, h: Tensor, offsets: Tensor, owner: Tensor) -> Tensor:
    return F.silu(h)


def shifted(layer: Any, h: Tensor, offsets: Tensor, owner: Tensor) -> Tensor:
    """With a constant and a buffer."""
    return 0.5 * (h + layer.shift).tanh()


def biased(layer: Any, h: Tensor, offsets: Tensor, owner: Tensor) -> Tensor:
    return F.silu(ops.grouped_bias(h, layer.bias, offsets))


def scaled(layer: Any, h: Tensor, offsets: Tensor, owner: Tensor) -> Tensor:
    """With a parameter that all experts share."""
    return F.silu(h) * layer.scale


def scaled_each(layer: Any, h: Tensor, offsets: Tensor, owner: Tensor) -> Tensor:
    """With a parameter that is read slot by slot."""
    return F.silu(h) * layer.bias.index_select(0, owner)


IDS = {"ids": torch.randint(0, 32, (2, 12), generator=torch.Generator().manual_seed(1))}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "plain": partial(Layer, plain), "shifted": partial(Layer, shifted), "biased": partial(Layer, biased),
    "weighted before": partial(Layer, plain, before=True), "a parameter each": Separate,
}  # fmt: skip


def canonical(model: nn.Module) -> Program:
    return traced(model, IDS)


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("layer", LAYERS)
def test_groups_compute_the_layer(layer: str, groups: int) -> None:
    model = Model(LAYERS[layer])
    result = SplitExperts(groups)(canonical(model))
    assert result.modified and result.program.groups == groups and "whole experts" not in result.program.notes
    graph = result.program.graph
    assert values_are_right(graph)
    routes = [n.args[1:] for n in graph.nodes if n.target is ops.route]
    assert routes == 2 * ([(2, 0), (3, 2)] if groups == 2 else [(1, 0), (2, 1), (2, 3)])
    assert_same(result.program, model, IDS)
    assert_same(result.program, model, {"ids": torch.randint(0, 32, (3, 7))})


def test_groups_are_blocks_between_their_layers() -> None:
    program = SplitExperts(2)(canonical(Model(LAYERS["plain"]))).program
    names = [f"model.layers.{i}{part}" for i in range(2) for part in ("", ".experts.0", ".experts.1")]
    blocks = find_blocks(program.graph)
    assert [b.name for b in blocks] == ["prologue", *names, "epilogue"]
    assert [b.layer for b in blocks] == [0, 1, 1, 1, 2, 2, 2, 3]
    for block in blocks[2:4]:
        assert {meta.expert_group(n) for n in block.nodes} <= {None, block is blocks[3]}
        assert sum(n.target is ops.combine for n in block.nodes) == 1


def test_no_group_without_experts() -> None:
    program = SplitExperts(9)(canonical(Model(LAYERS["plain"]))).program
    assert program.groups == E
    assert [s.rows.start for s in program.inputs if s.rows is not None and s.target == "layers.0.up"] == list(range(E))


def test_rows_are_aligned() -> None:
    """Groups end where elements that share a number of low-bit state do: here H of a row of `bias`."""
    program = canonical(Model(LAYERS["biased"]))
    program = SplitExperts(3, align=2 * H)(program).program
    assert {s.rows.start for s in program.inputs if s.rows is not None} == {0, 2}
    assert all(s.rows.stop in (2, E) for s in program.inputs if s.rows is not None)


@pytest.mark.parametrize(
    ("layer", "also", "why"),
    [
        (partial(Layer, scaled), False, "mul mixes slots with %"),
        (partial(Layer, scaled_each), False, "something reads which expert each slot belongs to"),
        (LAYERS["plain"], True, "layers.0.up is used elsewhere too"),
    ],
)
def test_what_needs_all_experts_stays_whole(layer: Callable[[], nn.Module], also: bool, why: str) -> None:
    model = Model(layer, also)
    program = canonical(model)
    result = SplitExperts(2)(program)
    notes = result.program.notes["whole experts"]
    assert result.modified and len(notes) == (1 if also else 2)
    assert notes[0].startswith("model.layers.0: its experts stay together, ") and why in notes[0]
    assert result.program.groups == (2 if also else 1)
    assert_same(result.program, model, IDS)


def test_nothing_to_do() -> None:
    for kind, groups in (("mlp", 4), ("plain", 1)):
        program = programs.after(kind, "rewrite_experts")
        before = print_program(program)
        result = SplitExperts(groups)(program)
        assert not result.modified and print_program(result.program) == before


@pytest.mark.skipif(not programs.TRACES_AS_GOLDEN, reason="another torch names and decomposes otherwise")
def test_golden(golden: Callable[[str, str], None]) -> None:
    result = SplitExperts(2)(programs.after("plain", "rewrite_experts"))
    golden("split_experts", programs.stable(print_program(result.program)))


@pytest.mark.parametrize("kind", ["topk", "plain", "tied"])
@pytest.mark.parametrize("groups", [2, 3])
def test_every_stage_is_verified(kind: str, groups: int) -> None:
    program = pipeline.in_groups(programs.bare(kind), groups, verify=True)
    assert program is not None and program.groups == groups
    wholes = {slab.whole for slab in program.slabs if slab.whole}
    assert wholes == {"layers.0.experts", "layers.1.experts"}
    rows = [place.spec.rows for slab in program.slabs if slab.whole for place in slab.layout.places]
    assert len(rows) == 2 * groups and all(r is not None and r.of == 3 for r in rows)


def test_the_verifier_misses_no_row() -> None:
    program = pipeline.in_groups(programs.bare("plain"), 2)
    assert program is not None

    def spoil(**changes: Any) -> Program:
        slabs = []
        for slab in program.slabs:
            if slab.name == "layers.0.experts.1":
                (place,) = slab.layout.places
                spec = replace(place.spec, rows=replace(place.spec.rows, **changes.get("rows", {})))  # type: ignore[type-var]
                layout = replace(slab.layout, places=(replace(place, spec=spec),))
                slab = replace(slab, layout=layout, whole=changes.get("whole", slab.whole))
            slabs.append(slab)
        return replace(program, slabs=slabs)

    verify_program(spoil(), after="assemble")
    for changes, fault in (
        ({"rows": {"start": 2}}, r"the groups of layers\.0\.up are not all of its rows"),
        ({"rows": {"of": 4}}, r"the groups of layers\.0\.up are not all of its rows"),
        ({"whole": "other"}, r"the groups of layers\.0\.up are parts of several slabs"),
        ({"whole": ""}, r"slab layers\.0\.experts\.1 is to be a part of none, and is not"),
    ):
        with pytest.raises(VerifyError, match=fault):
            verify_program(spoil(**changes), after="partition_worksets")
