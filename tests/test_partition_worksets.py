"""partition_worksets: golden text, worksets that compute the forward graph, forms and slabs that are shared rightly."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from oomc import ops, pipeline
from oomc.capture import Batch, capture
from oomc.printer import print_program, print_worksets
from oomc.program import Program
from oomc.steps import calc
from oomc.worksets import Workset
from tests import programs
from tests.conftest import Golden

NAMES = [p.name for p in pipeline.MODEL_PASSES]


def partitioned(model: nn.Module, **inputs: Tensor) -> Program:
    program = capture(model, Batch.bind(model, (), inputs))
    return pipeline.run_passes(program, pipeline.MODEL_PASSES[: NAMES.index("partition_worksets") + 1], verify=True)


def run_worksets(program: Program, own: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The loss by the worksets' forms, one after another."""
    known: dict[str, Any] = programs.tensors_of(program, own) | inputs | {"rng": programs.RNG}
    placeholders = program.forward.graph.find_nodes(op="placeholder")
    values: dict[fx.Node, Any] = {n: known[s.target] for n, s in zip(placeholders, program.inputs, strict=True)}
    symbols = program.notes["symbols"]
    sizes = next(iter(inputs.values())).shape
    for workset in (w for b in program.blocks for w in b.worksets):
        args = [values[s] if isinstance(s, fx.Node) else calc(symbols.formula(s), sizes[0], sizes[1])
                for s in workset.inputs]  # fmt: skip
        outputs = fx.Interpreter(program.forms[workset.form].traced).run(*args)
        values |= dict(zip(workset.outputs, outputs, strict=True))
    (output,) = program.forward.graph.find_nodes(op="output")
    return values[output.args[0][0]]


def worksets(program: Program) -> list[Workset]:
    return [w for b in program.blocks for w in b.worksets]


def test_golden(golden: Golden) -> None:
    program = programs.after("mlp", "partition_worksets")
    golden("partition_worksets", programs.stable(print_program(program)))


@pytest.mark.parametrize("kind", ["mlp", "plain", "topk", "tied"])
def test_worksets_compute_the_forward_graph(kind: str) -> None:
    program, own = programs.after(kind, "partition_worksets"), programs.model(kind)
    expected = programs.run_forward(program, own)[0]
    assert torch.equal(run_worksets(program, own, programs.batch()).detach(), expected)


def test_equal_layers_share_their_forms() -> None:
    program = programs.after("topk", "partition_worksets")
    first, second = ([w.form for w in b.worksets] for b in program.blocks[1:3])
    assert first == second
    assert len(first) == 4  # before and at attention, dropout, the rest
    assert len(programs.after("plain", "partition_worksets").blocks[1].worksets) == 3


class Pinned(nn.Module):
    """A layer whose forward holds what is given as a constant or a flag."""

    def __init__(self, scale: float, gate: bool) -> None:
        super().__init__()
        self.linear, self.scale, self.gate = nn.Linear(4, 4), scale, gate

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.scale
        return x + (y.relu() if self.gate else y)


@pytest.mark.parametrize(
    ("layers", "count"),
    [([(2.0, True), (2.0, True)], 1), ([(2.0, True), (3.0, True)], 2), ([(2.0, True), (2.0, False)], 2)],
)
def test_layers_that_differ_in_a_constant_or_flag_do_not_share(layers: list[tuple[float, bool]], count: int) -> None:
    model = programs.Mlp()
    model.layers = nn.ModuleList(Pinned(*layer) for layer in layers)
    program = partitioned(model, **programs.batch())
    assert len({b.worksets[0].form for b in program.blocks[1:3]}) == count


def test_tied_weights_are_one_slab_of_both_blocks() -> None:
    program = programs.after("tied", "partition_worksets")
    (shared,) = [s for s in program.slabs if len(s.users) > 1]
    assert shared.params == ("embed.weight",)
    assert shared.users == (0, len(program.blocks) - 1)


def test_all_that_keeps_tokens_apart_runs_in_chunks() -> None:
    program = programs.after("topk", "partition_worksets")
    layer = ["tokens", "rows", "", "tokens"]
    assert [w.chunk for w in worksets(program)] == ["tokens", *layer, *layer, "tokens", ""]
    for workset in worksets(program):
        assert program.forms[workset.form].chunk == workset.chunk


def test_the_head_is_in_the_worksets_of_the_loss_and_sums_it() -> None:
    program = programs.after("topk", "partition_worksets")
    chunked = program.blocks[-1].worksets[0]
    names = [str(n.target) for n in chunked.nodes]
    assert "aten.cross_entropy_loss.default" in names
    assert "aten.linear.default" in names
    form = program.forms[chunked.form]
    assert form.reduced == (True, True)  # the loss, and the number of valid labels
    assert form.output_layouts == ((), ())
    values = [i.layout for i in form.inputs if i.role == "value"]
    assert values == [(("B",), ("S",), (8,)), (("B",), ("S",))]  # the hidden states and the labels


def test_without_layers_the_top_modules_are_blocks() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

        def forward(self, ids: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), ids.flatten())

    ids = torch.randint(0, 8, (2, 3))
    model = Pair()
    program = partitioned(model, ids=ids)
    assert [b.name for b in program.blocks] == ["embed", "head", "epilogue"]
    torch.testing.assert_close(run_worksets(program, model, {"ids": ids}), model(ids))


def test_fences_are_alone_and_named() -> None:
    program = programs.after("topk", "partition_worksets")
    before, attention, dropout, after = program.blocks[1].worksets
    # q, k and v are copied before it, in chunks; within are views of them
    assert {n.target for n in attention.nodes} == {ops.attention, operator.getitem, torch.ops.aten.transpose.int}
    assert [str(n.target) for n in before.nodes].count("aten.clone.default") == 3
    assert [str(n.target) for n in dropout.nodes] == ["aten.select.int", "oomc.dropout.default"]
    assert attention.fences == ("oomc.attention: mixes positions",)
    assert dropout.fences == ("oomc.dropout: no rule says what it does to tokens",)
    assert before.fences == after.fences == ()


def test_text_is_the_same_each_time() -> None:
    texts = [print_worksets(partitioned(programs.model("mlp"), **programs.batch())) for _ in range(2)]
    assert texts[0] == texts[1]
