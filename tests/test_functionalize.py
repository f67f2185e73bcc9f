"""Writes in place become functional: numbers and gradients stay eager's, also through views of views."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from oomc import meta, private
from oomc.capture import Batch, capture
from oomc.errors import UnsupportedError
from oomc.functionalize import functionalize
from oomc.fxutil import insert_call, is_mutating
from oomc.passes.canonicalize import Canonicalize
from oomc.program import InputSpec, Program
from tests.traced import ops_of, run, traced, values_are_right

aten = torch.ops.aten
VIEWS: dict[str, Callable[[Any, int], tuple[Any, tuple[Any, ...]]]] = {
    "transpose": lambda n, d: (aten.transpose.int, (0, -1)),
    "permute": lambda n, d: (aten.permute.default, ([*range(1, n.dim()), 0],)),
    "movedim": lambda n, d: (aten.movedim.int, (0, -1)),
    "select": lambda n, d: (aten.select.int, (d, -1)),
    "slice": lambda n, d: (aten.slice.Tensor, (d, 1, -1)),
    "strided": lambda n, d: (aten.slice.Tensor, (d, 0, 9, 2)),
    "narrow": lambda n, d: (aten.narrow.default, (d, 0, 1)),
    "unsqueeze": lambda n, d: (aten.unsqueeze.default, (d,)),
    "squeeze": lambda n, d: (aten.squeeze.dim, (d,)),
    "reshape": lambda n, d: (aten.reshape.default, ([*n.shape[1:], n.shape[0]],)),
    "flatten": lambda n, d: (aten.flatten.using_ints, ()),
    "unflatten": lambda n, d: (aten.unflatten.int, (d, [1, -1])),
    "diagonal": lambda n, d: (aten.diagonal.default, (0, 0, 1)),
    "detach": lambda n, d: (aten.detach.default, ()),
    "expand": lambda n, d: (aten.expand.default, ([2, *n.shape],)),
}
WRITES = ("mul_", "add_", "copy_", "copy_scalar", "fill_", "masked_fill_", "zero_")
STEP = st.tuples(st.sampled_from([*VIEWS, *WRITES, "add", "split", "unbind"]), st.integers(0, 9), st.integers(0, 9))
READ_ONLY = ("detach", "expand")


def built(chain: list[tuple[str, int, int]], with_parts: bool) -> Program:
    """A graph of in-place ops, functional ops and views, that puts out a number that depends on every value."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    with private.fake_mode(symbolic=False):
        meta.set_value(x, torch.empty(4, 6))
    nodes = [insert_call(graph, aten.mul.Tensor, (x, 1.5))]
    fixed: set[fx.Node] = set()

    def add(op: Any, *args: Any, of: fx.Node | None = None) -> None:
        nodes.append(insert_call(graph, op, args))
        if of in fixed:
            fixed.add(nodes[-1])

    for name, pick, other in chain:
        node = nodes[pick % len(nodes)]
        val, source = meta.value(node), nodes[other % len(nodes)]
        if name in VIEWS:
            if val.dim() < (2 if name == "diagonal" else 1) or val.numel() == 0:
                continue
            op, args = VIEWS[name](val, other % val.dim())
            add(op, node, *args, of=node)
            if name in READ_ONLY:
                fixed.add(nodes[-1])
        elif name in ("split", "unbind"):
            if with_parts and val.dim() and val.shape[-1] > 1:
                op, args = (
                    (aten.unbind.int, (-1,)) if name == "unbind" else (aten.split.Tensor, (val.shape[-1] - 1, -1))
                )
                parts = insert_call(graph, op, (node, *args))
                add(operator.getitem, parts, 1, of=node)
        elif name == "add":
            add(aten.add.Tensor, node, 0.25)
        elif node in fixed or val.numel() == 0:
            continue
        elif name in ("add_", "copy_scalar"):
            number = insert_call(graph, aten.sum.default, (source,))
            add(aten.add_.Tensor if name == "add_" else aten.copy_.default, node, number)
        elif name == "copy_":
            same = [n for n in nodes if meta.value(n).shape == val.shape]
            add(aten.copy_.default, node, insert_call(graph, aten.mul.Tensor, (same[other % len(same)], 0.5)))
        elif name == "masked_fill_":
            add(aten.masked_fill_.Scalar, node, insert_call(graph, aten.lt.Scalar, (node, 0.3)), -0.5)
        elif name == "zero_":
            add(aten.zero_.default, node)
        else:
            add(*{"mul_": (aten.mul_.Tensor, node, -0.5), "fill_": (aten.fill_.Scalar, node, 0.75)}[name])
    total = insert_call(graph, aten.sum.default, (x,))
    for index, node in enumerate(nodes):
        squares = insert_call(graph, aten.sum.default, (insert_call(graph, aten.mul.Tensor, (node, node)),))
        total = insert_call(graph, aten.add.Tensor, (total, insert_call(graph, aten.mul.Tensor, (squares, index + 1))))
    graph.output((total,))
    return Program(fx.GraphModule(nn.Module(), graph), [InputSpec("input", "x")], torch.device("cpu"))


def numbers(program: Program, gradient: bool) -> list[Tensor]:
    program.forward.recompile()
    x = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_(gradient)
    with torch.set_grad_enabled(gradient):
        (total,) = program.forward(x)
    return [total, *torch.autograd.grad(total, x)] if gradient else [total]


@pytest.mark.parametrize("gradient", [True, False])
def test_programs_of_writes_and_views(gradient: bool) -> None:
    """Eager refuses gradients through writes to parts of a split: without gradients these are tried too."""
    tried = 0

    @settings(max_examples=150, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(st.lists(STEP, min_size=3, max_size=12))
    def check(chain: list[tuple[str, int, int]]) -> None:
        nonlocal tried
        program = built(chain, with_parts=not gradient)
        expected = numbers(program, gradient)
        writes = any(is_mutating(n) for n in program.forward.graph.nodes)
        assert functionalize(program) == writes
        assert not any(is_mutating(n) for n in program.forward.graph.nodes)
        assert values_are_right(program.forward.graph)
        for value, reference in zip(numbers(program, gradient), expected, strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-4)
        assert not functionalize(program)
        tried += writes

    check()
    assert tried > 50


class Writes(nn.Module):
    """A linear layer around a function that writes."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 6, dtype=dtype), function
        self.plain = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.function(x, self.linear(x))
        total: Tensor = (y * y * torch.arange(6)).sum()
        return total


def canonical(model: nn.Module) -> Program:
    return Canonicalize()(capture(model, Batch.bind(model, (), {"x": torch.randn(2, 5, 4)}))).program


def literal(x: Tensor, y: Tensor) -> Tensor:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    weights[0] = 7.0
    weights.view(2, 3)[1] = y.mean()
    return y * weights


def flat(x: Tensor, y: Tensor) -> Tensor:
    rows = y.flatten(0, 1)
    rows[:, 2:] *= 2
    rows[..., 0] = rows.sum(-1)
    return y + x.sum()


def masks(x: Tensor, y: Tensor) -> Tensor:
    mask = y > 0
    mask |= y < -1
    mask[:, :1] = False
    return F.dropout(y, 0.5, False, inplace=True).masked_fill(mask, 0.0)


def parts(x: Tensor, y: Tensor) -> Tensor:
    scale = torch.ones_like(y)
    left, right = scale.chunk(2, -1)
    left.mul_(3)
    right[:, 0] = y[:, 0, :3].detach() * 2
    scale.unbind(-1)[1].add_(1)
    return y * scale * left.sum()


def other_dtype(x: Tensor, y: Tensor) -> Tensor:
    counts = torch.zeros(y.shape, dtype=torch.float64)
    counts[:, 1:] = y[:, :-1]
    counts[:, 0] += y[:, 0]
    half = y.to(torch.bfloat16)
    half *= y
    return counts.float() + half


def without_gradient(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        scale = y.abs().amax(-1, keepdim=True) + 1
    scale[:, 0] = 2.0
    return y / scale


def strides(x: Tensor, y: Tensor) -> Tensor:
    z = torch.empty_like(y)
    z.copy_(y.transpose(1, 2).clone().transpose(1, 2))
    return (z.view(-1) * 2 + 1).view(z.shape)


def gradients(loss: Tensor, model: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("function", [literal, flat, masks, parts, other_dtype, without_gradient, strides])
def test_models_that_write(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Writes(function)
    program = canonical(model)
    assert not any(is_mutating(n) and n.target is not aten.detach_.default for n in program.forward.graph.nodes)
    assert values_are_right(program.forward.graph)
    for shape in ((2, 5, 4), (3, 7, 4)):
        x = torch.randn(shape)
        expected, loss = model(x), run(program, model, {"x": x})
        torch.testing.assert_close(loss, expected)
        for own, reference in zip(gradients(loss, model), gradients(expected, model), strict=True):
            # eager rounds gradients through a write of a wider type to the narrow one
            tolerance = 5e-3 if function is other_dtype else 1e-5
            torch.testing.assert_close(own, reference, rtol=tolerance, atol=tolerance)


def test_changed_views() -> None:
    """A tensor that is transposed in place: its earlier views stay as they are, and see its writes."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    with private.fake_mode(symbolic=False):
        meta.set_value(x, torch.empty(4, 6))
    y = insert_call(graph, aten.mul.Tensor, (x, 1.5))
    row = insert_call(graph, aten.select.int, (y, 0, 0))
    insert_call(graph, aten.transpose_.default, (y, 0, 1))
    column = insert_call(graph, aten.select.int, (y, 1, 0))
    insert_call(graph, aten.mul_.Tensor, (column, 3.0))
    product = insert_call(graph, aten.mul.Tensor, (row, column))
    graph.output((insert_call(graph, aten.add.Tensor, (product, insert_call(graph, aten.sum.default, (y,)))),))
    program = Program(fx.GraphModule(nn.Module(), graph), [InputSpec("input", "x")], torch.device("cpu"))
    x_given = torch.linspace(-1, 1, 24).view(4, 6)
    (expected,) = program.forward(x_given)
    assert functionalize(program) and "transpose" in ops_of(graph) and "mul_" not in ops_of(graph)
    program.forward.recompile()
    torch.testing.assert_close(program.forward(x_given)[0], expected)


def test_a_lone_write_becomes_one_op() -> None:
    def scatter(x: Tensor, y: Tensor) -> Tensor:
        mask = torch.zeros_like(y)
        mask.scatter_(-1, y.topk(2).indices, 1.0)
        return y * mask

    ops = ops_of(canonical(Writes(scatter)).forward.graph)
    assert "scatter" in ops and not {"scatter_", "slice_scatter", "to", "reshape", "contiguous"} & set(ops)


def to_input(x: Tensor, y: Tensor) -> Tensor:
    x[:, 0].mul_(2.0)
    return y


class ToAttribute(Writes):
    """Writes to a tensor that outlives the call."""

    def forward(self, x: Tensor) -> Tensor:
        self.plain[0] = 1.0
        return F.linear(x, self.linear.weight, self.plain).sum()


def detached(x: Tensor, y: Tensor) -> Tensor:
    y = y * 2
    y.detach()[:, 0] = 1.0
    return y


def diagonal(x: Tensor, y: Tensor) -> Tensor:
    return y * torch.ones(6, 6).fill_diagonal_(3.0)[0]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Writes(to_input), r"writes to its input .* at y = self.function"),
        (ToAttribute(to_input), r"writes to its input .*plain at self.plain\[0\] = 1.0"),
        (Writes(detached), r"at y = self.function.* through aten.detach.default, and uses that memory"),
        (Writes(diagonal), "fill_diagonal_.default at .* has no form"),
    ],
)
def test_refused(model: nn.Module, text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        canonical(model)


def test_a_part_of_fresh_results_is_memory_of_its_own() -> None:
    """Normalising the values of a topk in place, as Mixtral's router does."""

    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            values, index = torch.topk(x, 2, dim=-1)
            values /= values.sum(dim=-1, keepdim=True)
            return (values * index).sum(-1)

    x = torch.randn(3, 5)
    program = traced(Router(), {"x": x})
    assert not any(is_mutating(n) for n in program.forward.graph.nodes)
    weight = 1.5 + torch.arange(3.0).cos()
    out = Router()(x)
    torch.testing.assert_close(program.forward(x)[0], (out * out * weight).sum() / 3)
