"""split_projections on exported graphs: what becomes a linear layer of its own, the numbers, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomc import pipeline
from oomc.capture import Batch, capture
from oomc.models import tiny
from oomc.passes.split_projections import SplitProjections
from tests.helpers import tokens
from tests.traced import assert_same, ops_of, traced, values_are_right

HEADS, SIZE = 2, 4
WIDTH = HEADS * SIZE
Project = Callable[[Tensor, nn.Linear], tuple[Tensor, Tensor]]


class Layer(nn.Module):
    """Attention of one projection's first part, weighed with the other one's."""

    def __init__(self, project: Project, bias: bool, both: bool) -> None:
        super().__init__()
        self.project, self.both = project, both
        self.norm, self.into, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, gate = self.project(self.norm(x), self.into)
        heads = (q * gate if self.both else q).view(*x.shape[:2], HEADS, SIZE).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.out(y * gate.sigmoid())


class Model(nn.Module):
    """Embedding and two layers."""

    def __init__(self, project: Project, bias: bool = True, both: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Layer(project, bias, both) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def of_heads(x: Tensor, linear: nn.Linear) -> tuple[Tensor, Tensor]:
    """As Qwen3-Next does."""
    q, gate = linear(x).view(*x.shape[:-1], -1, 2 * SIZE).chunk(2, dim=-1)
    return q.flatten(2), gate.flatten(2)


def of_features(x: Tensor, linear: nn.Linear) -> tuple[Tensor, Tensor]:
    gate, q = linear(x).split([WIDTH, WIDTH], -1)
    return q, gate


def used_again(x: Tensor, linear: nn.Linear) -> tuple[Tensor, Tensor]:
    y = linear(x)
    q, gate = y.split([WIDTH, WIDTH], -1)
    return q, gate + y.mean(-1, keepdim=True)


def of_heads_themselves(x: Tensor, linear: nn.Linear) -> tuple[Tensor, Tensor]:
    q, gate = linear(x).view(*x.shape[:-1], 2 * HEADS, SIZE).chunk(2, dim=-2)
    return q.flatten(2), gate.flatten(2)


def batch() -> dict[str, Tensor]:
    return {"ids": torch.arange(22).reshape(2, 11) % 16}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("project", [of_heads, of_features])
def test_gates_have_a_projection_of_their_own(project: Project, bias: bool) -> None:
    model = Model(project, bias)
    program = traced(model, batch())
    assert SplitProjections()(program).modified
    found = ops_of(program.forward.graph)
    assert found.count("linear") == 2 * (2 + 1)
    assert not {"chunk", "split", "split_with_sizes"} & set(found)
    assert values_are_right(program.forward.graph)
    assert_same(program, model, batch())
    assert not SplitProjections()(program).modified


@pytest.mark.parametrize("project", [used_again, of_heads_themselves])
def test_other_splits_stay(project: Project) -> None:
    assert not SplitProjections()(traced(Model(project), batch())).modified


def test_what_all_goes_into_attention_stays() -> None:
    assert not SplitProjections()(traced(Model(of_heads, both=True), batch())).modified


def test_no_gate_is_there_while_attention_runs() -> None:
    """What follows attention takes the block's input and attention's result, and makes its gates itself."""
    model = tiny.build("qwen3_next")
    passes = pipeline.MODEL_PASSES[: pipeline.MODEL_PASSES.index(SplitProjections()) + 2]
    program = pipeline.run_passes(capture(model, Batch.bind(model, (), tokens(2, 24))), passes, verify=True)
    first, attention, last = program.blocks[4].worksets
    assert [w.chunk for w in (first, attention, last)] == ["tokens", "rows", "tokens"]
    inside = {*first.nodes, *attention.nodes}
    assert [n for n in last.inputs if n in inside] == attention.outputs
    assert all(set(n.users) <= set(attention.nodes) for n in first.outputs)
