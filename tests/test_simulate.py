"""Projected memory of step graphs that are built by hand, whose peaks can be counted by hand."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from oomc import meta, private, steps
from oomc.dims import Layout, TokenSymbols
from oomc.fxutil import insert_call
from oomc.plan import Plan
from oomc.program import InputSpec, Program
from oomc.simulate import GRANULE, Profiler, nbytes, project
from oomc.worksets import Form, FormInput
from tests import programs

aten = torch.ops.aten
N = 1024  # bytes of every tensor here: 256 fp32
MODE = private.fake_mode(symbolic=False)


def form(name: str, build: Callable[[fx.Graph, fx.Node], tuple[fx.Node, ...]], chunk: bool = False) -> Form:
    """A form with one input of N bytes, [4, 8, 8], and, if it runs in chunks, the sizes of the whole."""
    graph = fx.Graph()
    sizes = [graph.placeholder(name) for name in "BS"] if chunk else []
    for node, size in zip(sizes, (4, 8), strict=False):
        meta.set_value(node, size)
    x = graph.placeholder("x")
    with MODE:
        meta.set_value(x, torch.empty(4, 8, 8))
    results = build(graph, x)
    graph.output(results)
    module = fx.GraphModule(nn.Module(), graph)
    layout: Layout = (("B",), ("S",), (8,)) if chunk else ()
    inputs = (*(FormInput("size", formula=n.name) for n in sizes), FormInput("value", layout=layout))
    count = len(results)
    return Form(
        name, module, inputs, "tokens" if chunk else "", (False,) * count, (layout,) * count, forward=module
    )  # fmt: skip


def double(graph: fx.Graph, x: fx.Node) -> tuple[fx.Node, ...]:
    """One result and no temporary."""
    return (insert_call(graph, aten.mul.Tensor, (x, 2)),)


def deep(graph: fx.Graph, x: fx.Node) -> tuple[fx.Node, ...]:
    """One result; while it is made, one temporary lives."""
    y = insert_call(graph, aten.mul.Tensor, (x, 2))
    z = insert_call(graph, aten.sin.default, (y,))
    return (insert_call(graph, aten.cos.default, (z,)),)


def wide(graph: fx.Graph, x: fx.Node) -> tuple[fx.Node, ...]:
    """Two results, of which one is the input itself."""
    return insert_call(graph, aten.mul.Tensor, (x, 2)), insert_call(graph, aten.view.default, (x, [-1]))


def twins(graph: fx.Graph, x: fx.Node) -> tuple[fx.Node, ...]:
    """Two results that share their memory."""
    y = insert_call(graph, aten.mul.Tensor, (x, 2))
    return y, insert_call(graph, aten.view.default, (y, [-1]))


class Hand:
    """Builds a step graph word by word."""

    def __init__(self, *forms: Form, slots: tuple[int, ...] = ()) -> None:
        self.graph = fx.Graph()
        self.rt, self.x = self.graph.placeholder("rt"), self.graph.placeholder("x")
        with MODE:
            val = torch.empty(4, 8, 8)
        meta.set_value(self.x, val)
        forward = fx.Graph()
        meta.set_value(forward.placeholder("x"), val)
        forward.output(())
        program = Program(fx.GraphModule(nn.Module(), forward), [InputSpec("input", "x")], torch.device("cpu"))
        program.forms = {f.key: f for f in forms}
        program.notes["symbols"] = TokenSymbols(None, None)
        program.plan = Plan((4, 8), slots=slots)
        self.program = program

    def run(self, name: str, x: fx.Node, parts: int = 1, chunk: tuple[int, int] | None = None) -> Any:
        """Run a form; its results."""
        word = steps.run if chunk is None else steps.run_chunks
        args = (name, "forward", x) if chunk is None else (name, "forward", chunk, 4, 8, x)
        run = self.graph.call_function(word, (self.rt, *args))
        results = [self.graph.call_function(operator.getitem, (run, i)) for i in range(parts)]
        for part in results:
            meta.set_value(part, meta.value(self.x))
        return results[0] if parts == 1 else results

    def call(self, word: Callable[..., Any], *args: Any) -> fx.Node:
        """Any other word."""
        node = self.graph.call_function(word, args)
        meta.set_value(node, meta.value(self.x))
        return node

    def peak(self, output: fx.Node) -> tuple[int, str]:
        """Peak above slots and inputs, and the node where it is."""
        self.graph.output(output)
        self.program.step = fx.GraphModule(nn.Module(), self.graph)
        self.projection = project(self.program, Profiler(self.program))
        return self.projection.peak - self.projection.fixed, self.projection.at


def test_a_chain_holds_two_values_at_once() -> None:
    hand = Hand(form("double", double))
    x = hand.x
    for _ in range(5):
        x = hand.run("double", x)
    peak, _ = hand.peak(x)
    assert peak == 2 * N  # argument and result; the first argument is the input


def test_temporaries_count_while_the_form_runs() -> None:
    hand = Hand(form("deep", deep))
    peak, at = hand.peak(hand.run("deep", hand.x))
    assert (peak, at) == (2 * N, "run")
    assert hand.projection.live["getitem"] == N


def test_a_value_lives_until_its_last_use() -> None:
    hand = Hand(form("double", double))
    kept = hand.run("double", hand.x)
    x = kept
    for _ in range(3):
        x = hand.run("double", x)
    total = hand.call(steps.add, kept, x)
    peak, at = hand.peak(total)
    assert (peak, at) == (3 * N, "run_2")  # kept, argument and result; as for add
    assert hand.projection.live[total.name] == N or hand.projection.live[total.name] == 0


def test_results_that_are_the_input_take_nothing() -> None:
    hand = Hand(form("wide", wide))
    first, second = hand.run("wide", hand.x, parts=2)
    assert hand.peak(first)[0] == N
    assert second.users == {}


def test_results_that_share_memory_count_once() -> None:
    hand = Hand(form("twins", twins), form("double", double))
    _, second = hand.run("twins", hand.x, parts=2)
    again = hand.run("double", second)
    assert hand.peak(again)[0] == 2 * N
    assert hand.projection.live["run"] == N


def test_an_unused_result_dies_at_once() -> None:
    hand = Hand(form("double", double))
    hand.run("double", hand.x)
    last = hand.run("double", hand.x)
    assert hand.peak(last)[0] == N


def test_gradients_live_until_their_copy_is_retired() -> None:
    def build(late: bool) -> int:
        hand = Hand(form("double", double), form("deep", deep))
        grad = hand.run("double", hand.x)
        copy = hand.call(steps.offload, hand.rt, "slab", ("w",), (grad,), False)
        if not late:
            hand.call(steps.retire, hand.rt, copy)
        y = hand.run("deep", hand.x)
        if late:
            hand.call(steps.retire, hand.rt, copy)
        return hand.peak(y)[0]

    assert build(late=False) == 2 * N
    assert build(late=True) == 3 * N


@pytest.mark.parametrize(("early", "peak"), [(False, 3 * N), (True, 4 * N)])
def test_a_value_on_the_host_counts_until_its_discard_and_from_its_restore(early: bool, peak: int) -> None:
    hand = Hand(form("double", double), form("deep", deep))
    value = hand.run("double", hand.x)
    store = hand.call(steps.store, hand.rt, "value", value, 0)
    hand.call(steps.discard, hand.rt, store)
    x = hand.run("double", hand.x)
    restore = hand.call(steps.restore, hand.rt, store) if early else None
    x = hand.run("deep", x)  # its argument, a temporary and the result
    back = hand.call(steps.restored, hand.rt, restore or hand.call(steps.restore, hand.rt, store))
    total = hand.call(steps.add, back, x)
    assert hand.peak(total)[0] == peak
    live = hand.projection.live
    assert (live["store"], live["discard"], live["getitem_1"]) == (N, 0, N)
    assert live[back.name] == 2 * N, "token and value are one"


@pytest.mark.parametrize(
    ("chunk", "temporary"), [((4, 8), 2 * N), ((1, 8), N + 2 * GRANULE), ((1, 2), N + 2 * GRANULE)]
)
def test_chunks_need_their_result_and_the_temporaries_of_one_chunk(chunk: tuple[int, int], temporary: int) -> None:
    hand = Hand(form("deep", deep, chunk=True))
    assert hand.peak(hand.run("deep", hand.x, chunk=chunk))[0] == temporary


def test_slots_and_inputs_are_there_throughout() -> None:
    hand = Hand(form("double", double), slots=(4096, 512))
    hand.peak(hand.run("double", hand.x))
    assert hand.projection.fixed == 4096 + 512 + N
    assert all(count >= hand.projection.fixed for count in hand.projection.during.values())


def test_sizes_are_rounded_up_to_the_allocators_granule() -> None:
    hand = Hand(form("double", double))
    with MODE:
        meta.set_value(hand.x, torch.empty(3))
    one = hand.call(steps.ones_like, hand.x)
    with MODE:
        meta.set_value(one, torch.empty(3))
    assert hand.peak(one)[0] == GRANULE


def test_bytes() -> None:
    assert nbytes(torch.empty(3, 5, dtype=torch.bfloat16)) == 30
    assert nbytes(7) == 0


def test_a_form_is_profiled_once_for_each_size_and_chunk() -> None:
    profiler = Profiler(programs.bare("mlp"))
    program = programs.up_to("mlp", "schedule")
    first = project(program, profiler)
    count = len(profiler.known)
    assert project(program, profiler) == first
    assert len(profiler.known) == count
    assert count < sum(n.target in steps.COMPUTE for n in program.graph.nodes)
