"""Random models in random chunks have eager's loss and gradients; what cannot run in chunks is named as a fence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from oomc import pipeline, steps
from oomc.capture import Batch, capture
from oomc.dim_rules import analyse
from oomc.dims import can_be_cut, tokens_of
from oomc.passes.choose_residency import Candidate, ChooseResidency
from oomc.program import Program
from oomc.worksets import AtOnce
from tests import programs

D, EXPERTS, LONGEST = 4, 3, 16


@dataclass(frozen=True)
class Op:
    """One operation of a random model.

    Attributes:
        takes, gives: kinds of values: `full` [B, S, D], `flat` [B * S, D], `table` [1, S, D], `sum` [D].
        function: of a value, another one of the same kind, and parameters.
        shapes: of the parameters.
        fences: whether it mixes tokens.
    """

    takes: str
    gives: str
    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...] = ()
    fences: bool = False


def experts(x: Tensor, _: Tensor, router: Tensor, up: Tensor) -> Tensor:
    """Top-2 of 3 experts as a loop over the experts."""
    weights, chosen = (x @ router).softmax(-1).topk(2, -1)
    y = torch.zeros_like(x)
    for expert in range(EXPERTS):
        y = y + (weights * (chosen == expert)).sum(-1, keepdim=True) * torch.tanh(x @ up[expert])
    return x + y


def attend(x: Tensor, y: Tensor) -> Tensor:
    """Causal attention of one head."""
    return F.scaled_dot_product_attention(x[:, None], y[:, None], x[:, None], is_causal=True)[:, 0]


OPS: dict[str, Op] = {
    "sin": Op("full", "full", lambda x, _: x.sin()),
    "add": Op("full", "full", lambda x, y: x + y),
    "gate": Op("full", "full", lambda x, y: x * y.sigmoid()),
    "linear": Op("full", "full", lambda x, _, w: x + torch.tanh(x @ w), ((D, D),)),
    "norm": Op("full", "full", lambda x, _, w: F.layer_norm(x, (D,), w), ((D,),)),
    "softmax": Op("full", "full", lambda x, _: x * x.softmax(-1)),
    "swap": Op("full", "full", lambda x, _: x.transpose(1, 2).softmax(1).transpose(1, 2) + x),
    "heads": Op("full", "full", lambda x, y: (x.unflatten(-1, (2, 2)) @ y.unflatten(-1, (2, 2))).flatten(2).tanh()),
    "halves": Op("full", "full", lambda x, _: torch.cat([-x[..., 2:], x[..., :2]], -1)),
    "experts": Op("full", "full", experts, ((D, EXPERTS), (EXPERTS, D, D))),
    "flatten": Op("full", "flat", lambda x, _: x.flatten(0, 1)),
    "flat linear": Op("flat", "flat", lambda x, y, w: y + x @ w, ((D, D),)),
    "flat experts": Op("flat", "flat", experts, ((D, EXPERTS), (EXPERTS, D, D))),
    "table linear": Op("table", "table", lambda x, y, w: x + torch.tanh(y @ w), ((D, D),)),
    "table experts": Op("table", "table", experts, ((D, EXPERTS), (EXPERTS, D, D))),
    "scaled": Op("sum", "sum", lambda x, y, w: x.tanh() * w + y, ((D,),)),
    "total": Op("full", "sum", lambda x, _: x.sum((0, 1)) / 10),
    "flat total": Op("flat", "sum", lambda x, _: x.sum(0) / 10),
    "cumsum": Op("full", "full", lambda x, _: x.cumsum(1).tanh(), fences=True),
    "shift": Op("full", "full", lambda x, _: F.pad(x, (0, 0, 1, 0))[:, :-1], fences=True),
    "center": Op("full", "full", lambda x, _: x - x.mean(1, keepdim=True), fences=True),
    "batch": Op("full", "full", lambda x, _: x - x.mean(0), fences=True),
    "product": Op("full", "full", lambda x, y: (x @ y.transpose(1, 2)).tanh() @ x, fences=True),
    "size": Op("full", "full", lambda x, _: x / x.shape[1], fences=True),
    "filled": Op("full", "full", lambda x, _: x * torch.full_like(x, x.shape[0] * 0.3), fences=True),
    "attention": Op("full", "full", attend, fences=True),
}


class Random(nn.Module):
    """Operations on values of four kinds, all of which the loss is made of.

    Args:
        recipe: names of operations, and which two of the values of their kind they take.
        reduction: of the loss: `sum` or `mean` of squares, or `cross_entropy`.
    """

    def __init__(self, recipe: list[tuple[str, int, int]], reduction: str) -> None:
        super().__init__()
        self.recipe, self.reduction = recipe, reduction
        generator = torch.Generator().manual_seed(len(recipe))
        shapes = [shape for name, _, _ in recipe for shape in OPS[name].shapes]
        shapes += [(LONGEST, D), (D,), (D, D)]
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(s, generator=generator) / 2) for s in shapes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        weights = iter(self.weights)
        *_, table, bias, head = self.weights
        positions = (F.embedding(torch.arange(x.shape[1], device=x.device), table) + table[: x.shape[1]])[None]
        values = {"full": [x + bias], "flat": [x.flatten(0, 1) * bias], "table": [positions], "sum": [bias * 2]}
        for name, i, j in self.recipe:
            op = OPS[name]
            known = values[op.takes]
            own = [next(weights) for _ in op.shapes]
            values[op.gives].append(op.function(known[-1 - i % len(known)], known[-1 - j % len(known)], *own))
        y = values["full"][-1] + values["table"][-1] + values["sum"][-1] + values["flat"][-1].view(x.shape)
        y = y + sum(values["full"]) / 4  # so that nothing is unused
        if self.reduction == "cross_entropy":
            return F.cross_entropy((y @ head).flatten(0, 1), labels.flatten())
        squares = (y @ head).square()
        return squares.sum() / 7 if self.reduction == "sum" else squares.mean()


def inputs(sizes: tuple[int, int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, D, sizes, generator=generator)
    labels[:, 1] = -100
    return {"x": torch.randn(*sizes, D, generator=generator), "labels": labels}


def program_of(model: nn.Module) -> Program:
    """The bare step of a model."""
    return pipeline.run_passes(
        capture(model, Batch.bind(model, (), inputs((2, 6)))), pipeline.MODEL_PASSES, verify=True
    )  # fmt: skip


def in_chunks(bare: Program, sizes: tuple[int, int], chunks: list[tuple[int, int]]) -> Program:
    """The step with what is inside of blocks recomputed, each workset's runs in chunks of another size."""
    choose = ChooseResidency(sizes, candidate=Candidate(2, 0, 0))
    names = ("choose_residency", "insert_chunks", "insert_recompute")
    passes = [p for p in pipeline.step_passes(choose) if p.name in names]
    program = pipeline.run_passes(programs.with_own_step(bare), passes)
    plan = program.plan
    assert plan is not None
    for index, node in enumerate(program.graph.find_nodes(op="call_function", target=steps.run_chunks)):
        rows, columns = chunks[index % len(chunks)]
        whole = program.forms[str(node.args[1])].chunk == "rows"
        chunk = (min(rows, sizes[0]), sizes[1] if whole else min(columns, sizes[1]))
        node.args = (*node.args[:3], chunk, *node.args[4:])
    program.graph.lint()
    return program


def check(model: Random, sizes: tuple[int, int], chunks: list[tuple[int, int]]) -> Program:
    """Loss and gradients in chunks are eager's; what is no chunk of tokens has its reason."""
    bare = program_of(model)
    analysis = analyse(bare.forward.graph, bare.notes["symbols"])
    for workset in (w for b in bare.blocks for w in b.worksets):
        layouts = [layout for n in workset.nodes for layout in analysis.flows[n].layouts]
        nodes = [n for n in (*workset.inputs, *workset.outputs) if isinstance(n, fx.Node)]
        fits = all(can_be_cut(layout, ("B", "S")) for n in nodes for layout in analysis.flows[n].layouts)
        if workset.chunk != "tokens" and any(tokens_of(layout) for layout in layouts):
            assert workset.fences or not fits, workset  # [B, S, S] for example is cut by rows only
    batch = inputs(sizes)
    want = programs.run_eager(model, batch)
    program = in_chunks(bare, sizes, chunks)
    for at_once in (AtOnce.pays, lambda *_: True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AtOnce, "pays", at_once)
            got = programs.run_step(program, model, batch)
        assert abs(got[0] - want[0]) <= 1e-5 * abs(want[0])
        assert got[1].keys() == want[1].keys()
        scale = max(float(g.norm()) for g in want[1].values())
        for name, grad in want[1].items():
            assert (got[1][name] - grad).norm() <= 1e-5 * grad.norm() + 1e-6 * scale, name
    return bare


POSITIONS = ("arange: mixes positions", "slice: mixes positions")
STEP = st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 2), st.integers(0, 2))
CHUNK = st.tuples(st.integers(1, 3), st.integers(1, 6))


@settings(max_examples=10, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    st.lists(STEP, min_size=3, max_size=9), st.sampled_from(["sum", "mean", "cross_entropy"]),
    st.sampled_from([(2, 6), (3, 7), (1, 9)]), st.lists(CHUNK, min_size=3, max_size=3),
)  # fmt: skip
def test_random_models(
    recipe: list[tuple[str, int, int]], reduction: str, sizes: tuple[int, int], chunks: list[tuple[int, int]]
) -> None:
    check(Random(recipe, reduction), sizes, chunks)


@pytest.mark.parametrize("names", [sorted(OPS)[i::4] for i in range(4)])
def test_every_operation_in_a_chain(names: list[str]) -> None:
    program = check(Random([(name, 0, 1) for name in names], "cross_entropy"), (3, 7), [(2, 4), (1, 3)])
    fences = [fence for b in program.blocks for w in b.worksets for fence in w.fences]
    assert any(OPS[name].fences for name in names) == bool([f for f in fences if f not in POSITIONS])
