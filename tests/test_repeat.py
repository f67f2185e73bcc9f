"""A program of few layers, repeated to all, is the program of all."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from oomc import meta, pipeline, repeat
from oomc.capture import Batch, capture
from oomc.models import tiny
from oomc.plan import Budget
from oomc.printer import print_program
from oomc.program import Program
from oomc.simulate import Profiler

FORWARD, REST = pipeline.MODEL_PASSES[: pipeline.CUT], pipeline.MODEL_PASSES[pipeline.CUT :]


def forward(model: nn.Module) -> Program:
    ids = torch.empty(2, 24, dtype=torch.int64, device="meta")
    return pipeline.run_passes(capture(model, Batch.bind(model, (), {"input_ids": ids, "labels": ids})), FORWARD)


def repeated(model: nn.Module) -> tuple[Program, bool]:
    layers = repeat.find(model)
    assert layers is not None
    with repeat.shortened(model, layers):
        program = forward(model)
    return program, repeat.repeat(program, layers)


def blocks(program: Program) -> list[Any]:
    return [(b.name, [(w.name, w.form, w.chunk) for w in b.worksets], b.slabs) for b in program.blocks]


def renamed(program: Program) -> str:
    """The step graph's text, with values called by their number: the names of a trace count its nodes."""
    graph = program.graph
    sources = dict.fromkeys(meta.note(n).source.split(":")[0] for n in graph.nodes if meta.note(n).source)
    names = dict.fromkeys([n.name for n in graph.nodes] + list(sources))
    numbers = {name: f"v{i}" for i, name in enumerate(names) if name}
    return "".join(numbers.get(word, word) for word in re.split(r"(\W+)", print_program(program)))


@pytest.mark.parametrize(
    ("name", "layers", "kinds", "traced"),
    [
        ("qwen3_moe", 6, (0, 0, 0, 0, 0, 0), 3),
        ("gpt_oss", 8, (0, 1, 0, 1, 0, 1, 0, 1), 4),
        ("deepseek_v3", 6, (0, 1, 1, 1, 1, 1), 3),
        pytest.param("qwen3_next", 8, (0, 0, 0, 1, 0, 0, 0, 1), 4, marks=pytest.mark.slow),
    ],
)
def test_the_program_is_that_of_all_layers(name: str, layers: int, kinds: tuple[int, ...], traced: int) -> None:
    pytest.importorskip("transformers")
    model = tiny.build(name, torch.bfloat16, num_hidden_layers=layers)
    assert repeat.find(model) == repeat.Layers("model.layers", kinds, traced)
    program, done = repeated(model)
    assert done and len(model.model.layers) == layers  # type: ignore[arg-type, union-attr]
    full = forward(model)
    assert program.inputs == full.inputs
    for each in (program, full):
        each.forward.graph.lint()
        pipeline.run_passes(each, REST)
    assert blocks(program) == blocks(full)
    assert program.slabs == full.slabs
    assert list(program.forms) == list(full.forms)
    planned = [pipeline.plan_step(each, Profiler(each), (2, 64), None, Budget()) for each in (program, full)]
    (a, of_a), (b, of_b) = planned
    assert renamed(a) == renamed(b)
    assert (of_a.peak, of_a.at, list(of_a.during.values())) == (of_b.peak, of_b.at, list(of_b.during.values()))


def test_a_repeated_program_is_verified() -> None:
    pytest.importorskip("transformers")
    program, done = repeated(tiny.build("gpt_oss", num_hidden_layers=6))
    assert done
    pipeline.run_passes(program, REST, verify=True)


def test_a_loss_over_all_routers_is_not_repeated() -> None:
    pytest.importorskip("transformers")
    program, done = repeated(tiny.build("qwen3_moe", num_hidden_layers=5, aux_loss=True))
    assert not done
    program.forward.graph.lint()


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Scaled(Layer):
    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) / (self.index + 1)


class Skipping(Layer):
    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return x + self.linear(first)


class Model(nn.Module):
    def __init__(self, kind: type[Layer], count: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([kind(i) for i in range(count)])
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, first)
            if layer.index == 0:
                first = x
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_plain_modules_repeat() -> None:
    program, done = repeated(Model(Layer))
    assert done
    assert blocks(pipeline.run_passes(program, REST)) == blocks(pipeline.run_passes(forward(Model(Layer)), REST))


@pytest.mark.parametrize("kind", [Scaled, Skipping])
def test_layers_that_are_not_alike_or_not_a_chain_are_not_repeated(kind: type[Layer]) -> None:
    program, done = repeated(Model(kind))
    assert not done
    assert blocks(pipeline.run_passes(program, REST))[-1][0] == "epilogue", "it is as it was"


def test_what_is_not_worth_it_or_not_one_list_is_left_alone() -> None:
    assert repeat.find(Model(Layer, count=4)) is None
    assert repeat.find(nn.Sequential(nn.Linear(2, 2))) is None
    model = Model(Layer)
    model.more = nn.ModuleList([Layer(i) for i in range(6)])
    assert repeat.find(model) is None


def test_the_model_is_whole_again_after_an_error() -> None:
    model = Model(Layer)
    layers = repeat.find(model)
    assert layers is not None
    with pytest.raises(RuntimeError), repeat.shortened(model, layers):
        assert len(model.layers) == layers.traced == 3
        raise RuntimeError
    assert len(model.layers) == 6
