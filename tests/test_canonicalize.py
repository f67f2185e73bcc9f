"""canonicalize: golden text, the numbers stay, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from oomc import meta, ops, private
from oomc.capture import Batch, capture
from oomc.errors import UnsupportedError
from oomc.fxutil import insert_call
from oomc.passes.canonicalize import Canonicalize
from oomc.printer import print_program
from oomc.program import InputSpec, Program
from oomc.verify import verify_program
from tests import programs
from tests.conftest import Golden

aten = torch.ops.aten


class Wordy(nn.Module):
    """Says in many ways what has one plain form."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 6), dropout

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().mean() + 1
        y = self.linear(x.to(torch.float32).contiguous() / scale)
        y = y.add_(1)
        y = F.dropout(y[:, :, :], self.dropout, self.training)
        counts = torch.bincount(labels.flatten().clamp(min=0), minlength=6)
        return F.cross_entropy(y.flatten(0, 1), labels.flatten()) + 0 * counts.sum()


def wordy(dropout: float = 0.0) -> tuple[Wordy, dict[str, Tensor]]:
    torch.manual_seed(0)
    labels = torch.tensor([[0, 5, -100], [2, -100, 3]])
    return Wordy(dropout), {"x": torch.randn(2, 3, 4), "labels": labels}


def captured(model: nn.Module, inputs: dict[str, Tensor]) -> Program:
    return capture(model, Batch.bind(model, (), inputs))


def run(program: Program, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    known = programs.tensors_of(program, model) | inputs | {"rng": programs.RNG}
    return program.forward(*(known[s.target] for s in program.inputs))[0]


def test_golden_and_numbers(golden: Golden) -> None:
    model, inputs = wordy()
    program = captured(model, inputs)
    before = print_program(program)
    assert torch.equal(run(program, model, inputs), model(**inputs))
    result = Canonicalize()(program)
    assert result.modified
    golden("canonicalize", programs.stable(f"before:\n{before}\n\nafter:\n{print_program(program)}"))
    torch.testing.assert_close(run(program, model, inputs), model(**inputs), rtol=1e-6, atol=0)


def test_nothing_to_do_the_second_time() -> None:
    program = Canonicalize()(captured(*wordy(0.5))).program
    before = print_program(program)
    assert not Canonicalize()(program).modified
    assert print_program(program) == before


def test_dropout_becomes_an_input_of_the_graph() -> None:
    model, inputs = wordy(0.5)
    program = Canonicalize()(captured(model, inputs)).program
    assert program.inputs[-1] == InputSpec("rng", "rng")
    assert [n.args[3] for n in program.forward.graph.nodes if n.target is ops.dropout] == [0]
    assert torch.equal(run(program, model, inputs), run(program, model, inputs))
    model.eval()
    quiet = Canonicalize()(captured(model, inputs)).program
    assert all(s.kind != "rng" for s in quiet.inputs)


def test_a_batch_without_labels_has_no_loss() -> None:
    model, inputs = wordy()
    program = Canonicalize()(captured(model, inputs)).program
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    assert run(program, model, inputs) == 0


def cross_entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def mean(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return cross_entropy(logits, labels)


def scaled(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return (2.0 * cross_entropy(logits, labels).double() / 3).to(torch.float32)


def own_division(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return cross_entropy(logits, labels, reduction="sum") / (labels != -100).sum().clamp(min=1)


def weighed(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return (cross_entropy(logits, labels, reduction="none") * weights.flatten()).sum() / weights.sum()


def without_gradient(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return cross_entropy(logits, labels) + logits.mean().detach() + 0 * logits.sum()


def with_noted_sum(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return cross_entropy(logits, labels, reduction="sum") / 100.0


def two_means(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return cross_entropy(logits, labels) + cross_entropy(logits[:, 1:], labels[:, :-1])


def by_class(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return cross_entropy(logits, labels, weight=torch.arange(6.0))


def of_the_model(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return logits.square().sum() / logits.abs().sum()


def two_penalties(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return logits.square().mean() + logits.abs().mean()


class Lossy(nn.Module):
    """A linear layer with a loss, and another that knows of no labels."""

    def __init__(self, loss: Any, auxiliary: bool) -> None:
        super().__init__()
        self.linear, self.loss, self.auxiliary = nn.Linear(4, 6), loss, auxiliary

    def forward(self, x: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        logits = self.linear(x)
        loss = self.loss(logits, labels, weights)
        if self.auxiliary:
            loss += 0.01 * logits.softmax(-1).mean((0, 1)).square().sum()
        return loss


AUXILIARY = ("loss += 0.01 * logits.softmax(-1).mean((0, 1)).square().sum()",)


@pytest.mark.parametrize(
    ("loss", "count", "auxiliary"),
    [
        (mean, 4.0, ()),
        (scaled, 4.0, ()),
        (mean, 4.0, AUXILIARY),
        (own_division, 4.0, ()),
        (weighed, 3.75, ()),
        (without_gradient, 4.0, ()),
        (with_noted_sum, None, ()),
        (two_means, None, ()),
        (by_class, None, ()),
        (of_the_model, None, ()),
        (two_penalties, None, None),
    ],
)
def test_the_count_of_labels_becomes_an_output(loss: Any, count: float | None, auxiliary: Any) -> None:
    """Where there is one, and only one; and the terms of the loss that have nothing to do with labels are noted."""
    torch.manual_seed(0)
    model = Lossy(loss, auxiliary=bool(auxiliary))
    inputs = wordy()[1] | {"weights": torch.tensor([[0.5, 1.0, 0.0], [2.0, 0.0, 0.25]])}
    program = Canonicalize()(captured(model, inputs)).program
    verify_program(program, "canonicalize")
    known = programs.tensors_of(program, model) | inputs
    outputs = program.forward(*(known[s.target] for s in program.inputs))
    torch.testing.assert_close(outputs[0], model(**inputs), rtol=1e-6, atol=0)
    assert [float(c) for c in outputs[1:]] == ([] if count is None else [count])
    assert program.notes["auxiliary"] == auxiliary


class Noise(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.kind == "rand":
            y = y + torch.rand_like(y)
        elif self.kind == "sparse":
            y = y + F.embedding(x[..., 0].long().clamp(0, 3), self.linear.weight, sparse=True)
        elif self.kind == "attention":
            y = F.scaled_dot_product_attention(y, y, y, dropout_p=0.5)
        else:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.linear(y)
        return y.float().sum()


@pytest.mark.parametrize(("kind", "text"), [("rand", "random"), ("autocast", "autocast"), ("sparse", "sparse=False")])
def test_refused(kind: str, text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        Canonicalize()(captured(Noise(kind), {"x": torch.randn(2, 3, 4)}))


def test_dropout_inside_attention_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="random"):
        Canonicalize()(captured(Noise("attention"), {"x": torch.randn(2, 3, 4)}))


STEPS = ["add_", "mul_", "relu_", "add", "relu", "view", "transpose"]
CHAIN = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9)), min_size=1, max_size=6)


def keeps_numbers(chain: list[tuple[str, int]]) -> None:
    """Build the program of in-place ops, functional ops and views, and compare it with its canonical form."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    with private.fake_mode(symbolic=False):
        meta.set_value(x, torch.empty(4, 4))
    nodes = [insert_call(graph, aten.mul.Tensor, (x, 1.5))]
    for name, pick in chain:
        source = nodes[pick % len(nodes)]
        if name in ("add_", "mul_", "add"):
            nodes.append(insert_call(graph, getattr(aten, name).Tensor, (source, 2.5)))
        elif name == "view":
            nodes.append(insert_call(graph, aten.reshape.default, (source, [4, 4])))
        elif name == "transpose":
            nodes.append(insert_call(graph, aten.transpose.int, (source, 0, 1)))
        else:
            nodes.append(insert_call(graph, getattr(aten, name).default, (source,)))
    total = insert_call(graph, aten.sum.default, (nodes[-1],))
    for index, node in enumerate(nodes):
        scaled = insert_call(graph, aten.mul.Tensor, (insert_call(graph, aten.sum.default, (node,)), index + 1))
        total = insert_call(graph, aten.add.Tensor, (total, scaled))
    graph.output((total,))
    module = fx.GraphModule(nn.Module(), graph)
    given_x = torch.linspace(-1, 1, 16).view(4, 4)
    expected = module(given_x.clone())[0]
    program = Canonicalize()(Program(module, [InputSpec("input", "x")], torch.device("cpu"))).program
    assert torch.equal(program.forward(given_x.clone())[0], expected)


@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate])
@given(CHAIN)
def test_in_place_programs_keep_their_numbers(chain: list[tuple[str, int]]) -> None:
    keeps_numbers(chain)


def test_a_view_of_a_written_value_sees_the_next_write() -> None:
    """y.add_(2.5); v = y.reshape(4, 4); y.mul_(2.5): v has been multiplied too."""
    keeps_numbers([("add_", 0), ("view", 1), ("mul_", 0)])


class Repeats(nn.Module):
    """Repeats heads, with the dimension from either end."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.weight = dim, nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        heads = x.repeat_interleave(3, dim=self.dim) * torch.arange(x.shape[self.dim] * 3, device=x.device).view(
            *(-1 if d == self.dim % 4 else 1 for d in range(4))
        )
        return F.cross_entropy((heads.sum(3) * self.weight.repeat(heads.shape[2] // 3)).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("dim", [2, 3, -2])
def test_repeats_by_a_number_are_movement(dim: int) -> None:
    model = Repeats(dim)
    batch = {"x": torch.randn(2, 5, 3, 4), "labels": torch.randint(0, 3, (2, 5))}
    program = capture(model, Batch.bind(model, (), batch))
    names = [n.target for n in program.forward.graph.nodes]
    assert aten.repeat_interleave.self_int in names
    made = Canonicalize()(program).program
    assert aten.repeat_interleave.self_int not in [n.target for n in made.forward.graph.nodes]
    verify_program(made, "canonicalize")
    inputs = {"parameter": model.weight, **batch}
    args = [inputs.get(s.target, inputs["parameter"]) for s in made.inputs]
    torch.testing.assert_close(made.forward(*args)[0], model(**batch))
