"""Which values may leave: those that are alone in memory of their own."""

from __future__ import annotations

import operator

import pytest
import torch

from oomc import meta, steps
from oomc.offloadable import is_dense, is_fence_result, value_bytes, why_not
from oomc.program import Program
from tests import programs


def value(program: Program, source: str) -> torch.fx.Node:
    return next(
        n for n in program.graph.nodes if n.target is operator.getitem and meta.note(n).source == source
        and meta.note(n).phase == "forward"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("embedding", ""),
        ("getitem_16", ""),
        ("layers.0/3:saved.1", ""),
        ("clone_default", ""),
        ("clone_default_2", ""),
    ],
)
def test_values_of_the_forward(source: str, reason: str) -> None:
    program = programs.up_to("topk", "choose_residency")
    assert why_not(program, value(program, source)) == reason


def test_results_that_share_memory_stay() -> None:
    program = programs.up_to("topk", "choose_residency")
    with programs.sharing_results(program, value(program, "clone_default")):
        for source in ("clone_default", "clone_default_1"):
            reason = "it shares its memory with another result of its workset"
            assert why_not(program, value(program, source)) == reason
        assert why_not(program, value(program, "clone_default_2")) == ""


def test_what_is_no_value_of_the_forward_stays() -> None:
    program = programs.up_to("topk", "insert_recompute")
    nodes = list(program.graph.nodes)
    weight = next(n for n in nodes if n.target is operator.getitem and n.args[0].target is steps.weights)
    gradient = next(n for n in nodes if n.target is operator.getitem and meta.note(n).phase == "backward"
                    and n.args[0].target in steps.COMPUTE)  # fmt: skip
    again = next(n for n in nodes if n.target is operator.getitem and meta.note(n).phase == "recompute")
    given = next(n for n in nodes if n.name == "input_ids")
    for node in (weight, gradient, again, given):
        assert why_not(program, node) == "it is no result of a forward workset"
    (output,) = program.graph.find_nodes(op="output")
    assert why_not(program, output.args[0]) == "the step returns it"


def test_a_view_of_an_argument_stays() -> None:
    program = programs.up_to("topk", "choose_residency")
    node = value(program, "embedding")
    forward = program.forms[str(node.args[0].args[1])].forward  # type: ignore[union-attr]
    assert forward is not None
    (output,) = forward.graph.find_nodes(op="output")
    results = output.args
    argument = forward.graph.find_nodes(op="placeholder")[-1]
    with forward.graph.inserting_before(output):
        view = forward.graph.call_function(torch.ops.aten.transpose.int, (argument, 0, 1))
    try:
        output.args = ((view,),)
        assert why_not(program, node) == "it lies in the memory of one of its workset's arguments"
        output.args = ((argument,),)
        assert why_not(program, node) == "it lies in the memory of one of its workset's arguments"
    finally:  # the form is shared with other tests
        output.args = results
        forward.graph.erase_node(view)
    assert why_not(program, node) == ""


def test_results_of_fences_and_bytes() -> None:
    program = programs.up_to("topk", "choose_residency")
    assert is_fence_result(program, value(program, "getitem_16"))
    assert not is_fence_result(program, value(program, "embedding"))
    assert value_bytes(program, value(program, "embedding"), (3, 5)) == 3 * 5 * 8 * 4


def test_dense() -> None:
    x = torch.empty(3, 4, 5)
    assert all(map(is_dense, (x, x.permute(2, 0, 1), x[1:], x[:1, :1], torch.empty(()), x[:, None])))
    assert not any(map(is_dense, (x[:, :2], x[..., ::2], x[:1].expand(2, 4, 5), x[:, 0])))
