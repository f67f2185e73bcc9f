"""differentiate: golden text; forward, recompute and backward agree with each other and with autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oomc import meta, ops, pipeline, private
from oomc.capture import Batch, capture
from oomc.dims import TokenSymbols
from oomc.errors import CaptureError
from oomc.faults import Faults
from oomc.passes.differentiate import differentiate
from oomc.printer import print_graph
from oomc.verify import verify_form
from oomc.worksets import Form, FormInput
from tests import programs
from tests.conftest import Golden

aten = torch.ops.aten
NO_TOKENS = TokenSymbols(None, None)


def form_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Form:
    """A form that computes `function`, of fp32 inputs of these shapes."""
    mode = private.fake_mode(symbolic=False)
    with mode:
        args = [torch.empty(shape) for shape in shapes]
    module = torch.fx.experimental.proxy_tensor.make_fx(
        lambda *xs: tuple(function(*xs)), tracing_mode="real", pre_dispatch=True
    )(*args)
    for node in module.graph.find_nodes(op="placeholder"):
        assert meta.tensor(node) is not None
    return Form("form_x", module, tuple(FormInput("value") for _ in shapes))


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def check(form: Form, function: Callable[..., Any], flags: tuple[bool, ...], inputs: list[Tensor]) -> None:
    """Outputs, recomputed outputs and gradients are those of autograd."""
    count = len(form.differentiable)
    assert form.forward is not None
    assert form.recompute is not None
    results = form.forward(*inputs)
    outputs, saved = results[:count], results[count:]
    leaves = [x.clone().requires_grad_() if f else x for x, f in zip(inputs, flags, strict=True)]
    expected = tuple(function(*leaves))
    for again in (expected, form.recompute(*inputs, *saved)):
        assert all(torch.equal(a, b) for a, b in zip(outputs, again, strict=True))
    ends = [e for e, d in zip(expected, form.differentiable, strict=True) if d]
    tangents = [torch.cos(e.detach()) for e in ends]
    starts = [x for x, f in zip(leaves, flags, strict=True) if f]
    wanted = torch.autograd.grad(ends, starts, tangents, allow_unused=True)
    assert form.backward is not None
    pools = {"input": inputs, "output": outputs, "saved": saved}
    grads = form.backward(*(pools[kind][i] for kind, i in form.backward_takes), *tangents)
    for got, want in zip(grads, wanted, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_inputs_that_share_what_stands_for_them_stay_apart() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (x.sin() * y,)

    form = form_of(function, (3, 4), (3, 4))
    first, second = form.traced.graph.find_nodes(op="placeholder")
    meta.set_value(second, meta.value(first))
    made = differentiate(form, (True, True), "form_x", NO_TOKENS)
    check(made, function, (True, True), tensors((3, 4), (3, 4)))


def layer(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (x + F.linear(x, w).relu(),)


def routed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    weights, chosen = F.linear(x, w).softmax(-1).topk(2, -1)
    return (weights * x[:, :2] + torch.gather(x, 1, chosen), chosen.float())


def text_of(form: Form) -> str:
    lines = []
    for variant in ("traced", "forward", "recompute", "backward"):
        lines += [f"{variant}:", print_graph(getattr(form, variant).graph), ""]
    return "\n".join([*lines, f"backward takes {form.backward_takes}"])


@pytest.mark.parametrize(
    ("name", "function", "shapes"),
    [("layer", layer, ((3, 4), (4, 4))), ("routed", routed, ((3, 4), (5, 4)))],
)
def test_golden_and_numbers(
    golden: Golden, name: str, function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]
) -> None:
    form = differentiate(form_of(function, *shapes), (True, True), "form_x", NO_TOKENS)
    if programs.TRACES_AS_GOLDEN:
        golden(f"differentiate_{name}", text_of(form))
    check(form, function, (True, True), tensors(*shapes))


def test_top_k_is_saved_and_never_computed_again() -> None:
    form = differentiate(form_of(routed, (3, 4), (5, 4)), (True, True), "form_x", NO_TOKENS)
    assert form.saved == 2
    for variant, count in (("forward", 1), ("recompute", 0), ("backward", 0)):
        nodes = getattr(form, variant).graph.nodes
        assert sum(n.target in ops.NEVER_RECOMPUTE for n in nodes) == count
    assert form.differentiable == (True, False)


def test_gradients_only_of_what_wants_one() -> None:
    form = differentiate(form_of(layer, (3, 4), (4, 4)), (False, True), "form_x", NO_TOKENS)
    assert form.gradients == (1,)
    check(form, layer, (False, True), tensors((3, 4), (4, 4)))


def test_an_input_that_the_output_does_not_follow_has_no_gradient() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (x.sin(), (y > 0).float())

    form = differentiate(form_of(function, (3,), (3,)), (True, True), "form_x", NO_TOKENS)
    check(form, function, (True, True), tensors((3,), (3,)))


def test_nothing_to_differentiate() -> None:
    form = differentiate(form_of(layer, (3, 4), (4, 4)), (False, False), "form_x", NO_TOKENS)
    assert form.backward is None
    assert form.differentiable == (False,)


def test_forms_whose_inputs_differ_in_gradients_are_two() -> None:
    own: Any = programs.model("mlp")
    own.layers[0].linear.weight.requires_grad_(False)
    program = pipeline.run_passes(programs.captured(own), pipeline.MODEL_PASSES, verify=True)
    first, second = (b.worksets[0].form for b in program.blocks[1:3])
    assert {second} == {f"{first}.1"}
    programs.assert_runs(program, own)


def test_a_loss_that_nothing_trains_is_refused() -> None:
    own = programs.model("mlp").requires_grad_(False)
    program = capture(own, Batch.bind(own, (), programs.batch()))
    with pytest.raises(CaptureError, match="does not depend on any trainable parameter"):
        pipeline.run_passes(program, pipeline.MODEL_PASSES)


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin, "silu": F.silu, "softmax": lambda x: x.softmax(-1), "norm": lambda x: F.layer_norm(x, (4,)),
    "transpose": lambda x: x.transpose(0, 1), "sort": lambda x: x.sort(-1).values, "clone": torch.clone,
}  # fmt: skip
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "mul": torch.mul, "matmul": torch.matmul, "sub": lambda a, b: a - 0.5 * b,
}  # fmt: skip
STEP = st.tuples(st.sampled_from([*UNARY, *BINARY]), st.integers(0, 9), st.integers(0, 9))


@settings(max_examples=15, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=6), st.tuples(st.booleans(), st.booleans()))
def test_random_forms(chain: list[tuple[str, int, int]], flags: tuple[bool, bool]) -> None:
    """Whatever a form computes, its three graphs agree with autograd and pass the verifier."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        values = [x.sin(), y * 2]
        for name, first, second in chain:
            a, b = values[first % len(values)], values[second % len(values)]
            values.append(UNARY[name](a) if name in UNARY else BINARY[name](a, b))
        return values[-1], values[-2]

    shapes = ((4, 4), (4, 4))
    form = form_of(function, *shapes)
    new = differentiate(form, flags, "form_x", NO_TOKENS)
    if any(flags) and any(new.differentiable):
        check(new, function, flags, tensors(*shapes))
    program = programs.bare("mlp")
    faults = Faults(program, "differentiate")
    verify_form(new, NO_TOKENS, faults)
    assert [f.message for f in faults.found] == ["the key does not follow from the structure"]
