"""Costs of forms: against torch's counter on whole programs, by hand, over backends, chunks and sizes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import sympy
import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from oomc import meta
from oomc.cost import PART, RESULT, VIEW, B, Costs, Factors, S, tile_shapes
from oomc.machine import default
from oomc.program import Program
from oomc.simulate import Profiler
from tests import programs

H200 = default("h200")
aten = torch.ops.aten


def variants(program: Program) -> list[tuple[str, str]]:
    names = ("forward", "recompute", "backward")
    return [(key, v) for key, form in program.forms.items() for v in names if getattr(form, v) is not None]


def counted(program: Program, form: str, variant: str, sizes: tuple[int, int]) -> int:
    """FLOPs of a form's graph by torch's counter, which knows nothing of our own operators."""
    graph: fx.GraphModule = getattr(program.forms[form], variant)
    profiler = Profiler(program)
    args = []
    for node in graph.graph.find_nodes(op="placeholder"):
        val = profiler.concrete(meta.value(node), sizes)
        args.append(torch.zeros_like(val, device="cpu") if isinstance(val, torch.Tensor) else val)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        graph(*args)
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", ["mlp", "plain"])
@pytest.mark.parametrize("sizes", [(2, 12), (3, 20)])
def test_flops_are_those_of_torchs_counter(kind: str, sizes: tuple[int, int]) -> None:
    program = programs.bare(kind)
    costs = Costs(program, H200)
    for form, variant in variants(program):
        cost = costs.of(form, variant)
        dense = sum(c.flops for c in cost.calls if c.kind == "gemm")
        assert sympy.sympify(dense).subs({B: sizes[0], S: sizes[1]}) == counted(program, form, variant, sizes)


def test_expressions_are_in_batch_and_sequence_only() -> None:
    program = programs.bare("topk")
    for backend in ("eager", "inductor"):
        costs = Costs(program, H200, backend)
        for form, variant in variants(program):
            cost = costs.of(form, variant)
            assert cost.flops.free_symbols | cost.bytes.free_symbols <= {B, S}


def test_attention_grows_with_the_square_of_the_sequence() -> None:
    program = programs.bare("plain")
    costs = Costs(program, H200)
    (form,) = {f for f, v in variants(program) if any(c.kind == "attention" for c in costs.of(f, v).calls)}
    flops = next(c.flops for c in costs.of(form, "forward").calls if c.kind == "attention")
    assert sympy.degree(flops, S) == 2
    assert sympy.degree(flops, B) == 1


def test_fused_operators_move_less() -> None:
    program = programs.bare("plain")
    eager, fused = Costs(program, H200), Costs(program, H200, "inductor")
    for form, variant in variants(program):
        a, b = eager.of(form, variant), fused.of(form, variant)
        assert sympy.expand(a.flops - b.flops) == 0
        at = {B: 2, S: 4096}
        assert b.bytes.subs(at) <= a.bytes.subs(at)


def test_a_fused_kernel_moves_its_inputs_and_what_leaves_it() -> None:
    program = programs.bare("mlp")
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    y = graph.call_function(aten.relu.default, (x,))
    z = graph.call_function(aten.add.Tensor, (y, 1.0))
    flat = graph.call_function(aten.reshape.default, (z, [8, 4]))
    m = graph.call_function(aten.mm.default, (flat, w))
    out = graph.call_function(aten.tanh.default, (m,))
    graph.output((out,))
    for node, shape in ((x, (2, 4, 4)), (w, (4, 5)), (y, (2, 4, 4)), (z, (2, 4, 4)), (flat, (8, 4)), (m, (8, 5)),
                        (out, (8, 5))):  # fmt: skip
        meta.set_value(node, torch.empty(shape))
    eager = Costs(program, H200)._cost(graph)
    fused = Costs(program, H200, "inductor")._cost(graph)
    mm = 4 * (32 + 20 + 40)
    assert eager.bytes == mm + 4 * (64 + 64 + 80)
    assert fused.bytes == mm + 4 * (64 + 80)
    assert (eager.calls[-1].launches, fused.calls[-1].launches) == (3, 2)


def test_the_time_of_a_kernel_is_the_roofline() -> None:
    program = programs.bare("mlp")
    costs = Costs(program, H200)
    form = next(f for f, v in variants(program) if costs.of(f, v).flops != 0)
    cost = costs.of(form, "forward")
    small, large = cost.seconds(1, 1, H200), cost.seconds(64, 65536, H200)
    launches = sum(c.launches for c in cost.calls)
    assert small == pytest.approx(launches * H200.launch, rel=0.05)
    moved = float(cost.bytes.subs({B: 64, S: 65536}))
    assert large == pytest.approx(moved / H200.bandwidth + launches * H200.launch, rel=0.05)


def test_chunks_cost_their_launches_and_their_sums() -> None:
    program = programs.bare("plain")
    costs = Costs(program, H200)
    form = next(key for key, f in program.forms.items() if f.chunk and f.backward is not None)
    whole = costs.seconds(form, "backward", (4, 4096))
    assert costs.seconds(form, "backward", (4, 4096), (4, 4096)) == pytest.approx(whole)
    times = [costs.seconds(form, "backward", (4, 4096), (1, n)) for n in (4096, 1024, 256)]
    assert whole < times[0] < times[1] < times[2]


def test_while_cores_update_a_graph_takes_as_long_as_it_is_issued() -> None:
    program = programs.bare("mlp")
    costs = Costs(program, replace(H200, launch=7e-6, launch_busy=20e-6))
    form = next(f for f, v in variants(program) if costs.of(f, v).flops != 0)
    cost, module = costs.of(form, "forward"), program.forms[form].forward
    assert module is not None
    graph = module.graph
    busy, launches = costs.while_updating, cost.launches(1, 1)
    tensors = [n for n in graph.nodes if n.op == "placeholder" and meta.tensor(n) is not None]
    views = [n for n in graph.nodes if n.target in (aten.t.default, aten.view.default, aten.reshape.default)]
    assert (cost.views, cost.arguments, cost.results) == (len(views), len(tensors), 1) and views
    assert costs.seconds(form, "forward", (1, 1)) == pytest.approx(7e-6 * launches, rel=0.05)
    alone = launches + VIEW * len(views)
    assert busy.seconds(form, "forward", (1, 1)) == pytest.approx(20e-6 * alone)
    chunked = 4 * (alone + PART * len(tensors) + RESULT)
    assert busy.seconds(form, "forward", (4, 1), (1, 1)) == pytest.approx(20e-6 * chunked)
    large = (64, 65536)
    assert busy.seconds(form, "forward", large) == costs.seconds(form, "forward", large) > 20e-6 * alone


@pytest.mark.parametrize(("sizes", "chunk", "wanted"), [
    ((4, 10), (4, 10), {(4, 10): 1}),
    ((4, 10), (9, 99), {(4, 10): 1}),
    ((4, 10), (0, 4), {(1, 4): 8, (1, 2): 4}),
    ((5, 10), (2, 4), {(2, 4): 4, (2, 2): 2, (1, 4): 2, (1, 2): 1}),
])  # fmt: skip
def test_tiles_by_their_shapes(
    sizes: tuple[int, int], chunk: tuple[int, int], wanted: dict[tuple[int, int], int]
) -> None:
    assert dict(tile_shapes(sizes, chunk)) == wanted
    assert sum(b * s * n for (b, s), n in wanted.items()) == sizes[0] * sizes[1]


def test_what_was_measured_is_taken() -> None:
    program = programs.bare("mlp")
    plain = Costs(program, H200)
    (form, variant), *others = variants(program)
    costs = Costs(program, H200, factors=Factors({(form, variant): 3.0}, other=2.0))
    sizes, chunk = (2, 12), (1, 4)
    assert costs.seconds(form, variant, sizes) == pytest.approx(3 * plain.seconds(form, variant, sizes))
    for other in others:
        assert costs.seconds(*other, sizes) == pytest.approx(2 * plain.seconds(*other, sizes))
    # what a loop over chunks adds beside its graphs was not timed
    apart = plain.of(form, variant).chunk_seconds(*chunk, H200, 6)
    in_chunks = [each.seconds(form, variant, sizes, chunk) / 6 - apart for each in (costs, plain)]
    assert in_chunks[0] == pytest.approx(3 * in_chunks[1])


def test_thousands_of_evaluations_are_fast() -> None:
    program = programs.bare("plain")
    costs = Costs(program, H200)
    keys = variants(program)
    for key in keys:
        costs.seconds(*key, (1, 8))
    start = time.perf_counter()
    for sequence in range(1, 201):
        for key in keys:
            costs.seconds(*key, (2, sequence))
    assert (time.perf_counter() - start) / (200 * len(keys)) < 1e-3
