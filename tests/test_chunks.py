"""Chunks: whatever keeps tokens apart runs in tiles of any size, and losses and gradients are those of the whole."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import fx

from oomc import meta, ops, pipeline, private
from oomc.match import op_name
from oomc.models import tiny
from oomc.passes.choose_residency import Candidate, ChooseResidency
from oomc.program import Program
from oomc.runtime.tiles import tiles
from oomc.simulate import Projection
from oomc.worksets import Workset
from tests import programs
from tests.helpers import Blind, assert_same_gradients, compiled, relative, tokens, worst
from tests.reference import Reference
from tests.rounding import assert_rounds_as_eager

pytestmark = pytest.mark.usefixtures("cut_lookups")

CASES = [
    *(((1, 21), chunk, count) for chunk, count in ((21, 1), (11, 2), (7, 3), (6, 4), (5, 5), (4, 6), (3, 7))),
    *(((3, 24), chunk, count) for chunk, count in ((9, 9), (30, 3), (48, 2))),
]
"""Batch sizes, tokens that are to be in a chunk, and how many chunks that makes: parts of rows, one row, two rows."""


@pytest.fixture
def unbudgeted(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no budget, and memory is not looked at: projections would only take time."""
    monkeypatch.setattr(pipeline, "project", lambda *_: Projection(0, "", 0, {}, {}))


def worksets(program: Program) -> list[Workset]:
    return [w for b in program.blocks for w in b.worksets]


def assert_chunks_are_the_whole(name: str, sizes: tuple[int, int], chunk: int, count: int, aux: bool) -> None:
    """A step in chunks has eager's loss and gradients."""
    model = tiny.build(name, aux_loss=True if aux else None)
    eager = copy.deepcopy(model)
    step = compiled(model, tokens(*sizes), like=("chunks", name, aux), chunk_tokens=chunk)
    step._meter = Blind()
    assert step.plan is not None and step._current is not None
    for workset in worksets(step._current.program):
        assert (workset.name in step.plan.chunks) == bool(workset.chunk)
        if workset.chunk == "tokens":
            assert len(tiles(*sizes, step.plan.chunks[workset.name])) == count
    assert_same_gradients(step, eager, [tokens(*sizes, seed=chunk, masked=True)])
    step.close()


@pytest.mark.usefixtures("unbudgeted")
@pytest.mark.parametrize(("sizes", "chunk", "count"), CASES)
@pytest.mark.parametrize("name", tiny.NAMES)
def test_models(name: str, sizes: tuple[int, int], chunk: int, count: int) -> None:
    assert_chunks_are_the_whole(name, sizes, chunk, count, aux=False)


@pytest.mark.usefixtures("unbudgeted")
@pytest.mark.parametrize(("sizes", "chunk", "count"), [CASES[4], CASES[-2]])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_models_with_an_auxiliary_loss(name: str, sizes: tuple[int, int], chunk: int, count: int) -> None:
    """The load-balancing loss is made of sums over all tokens of all layers."""
    assert_chunks_are_the_whole(name, sizes, chunk, count, aux=True)


@pytest.mark.usefixtures("unbudgeted")
@pytest.mark.parametrize(
    ("name", "chunk", "rounds"),
    [("qwen3_moe", 40, 4), ("gpt_oss", 9, 4), pytest.param("qwen3_next", 7, 8, marks=pytest.mark.slow)],
)
def test_models_in_bf16(name: str, chunk: int, rounds: int) -> None:
    model = tiny.build(name, dtype=torch.bfloat16)
    eager = copy.deepcopy(model)
    step = compiled(model, tokens(2, 16), like=("chunks", name, "bf16"), chunk_tokens=chunk)
    step._meter = Blind()
    assert_rounds_as_eager(step, eager, rounds)
    step.close()


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next"])
def test_blocks_that_run_whole_in_chunks_of_rows(name: str) -> None:
    bare = pipeline.in_whole_blocks(partitioned(name))
    assert bare is not None
    assert {b.worksets[0].chunk for b in bare.blocks[1:-1]} == {"rows", *(["tokens"] if name == "qwen3_next" else [])}
    assert all(len(b.worksets) == 1 for b in bare.blocks[1:-1])
    own, batch = tiny.build(name), tokens(3, 24, seed=5, masked=True)
    reference = Reference(own)
    loss = reference.accumulate(**batch)
    for chunk in (24, 48, 72):
        program = pipeline.with_plan(bare, ChooseResidency((3, 24), candidate=Candidate(chunk, 0, 0, keep=True)))
        got, gradients = programs.run_step(program, own, batch)
        assert relative(got, loss) <= 1e-6
        error, parameter = worst(gradients, reference._sums)
        assert error <= 1e-5, (chunk, parameter, error)


# --- what does not run in chunks of tokens is attention and its like, and positions

DENSE = ("llama",)
PRODUCTS = frozenset({"linear", "mm", "bmm", "matmul", "addmm", "baddbmm", "einsum", "conv1d", "oomc.grouped_mm"})
MIXERS = frozenset({"conv1d", "oomc.attention", "oomc.attention_backward"})
SIZES = (8, 256)


@cache
def partitioned(name: str) -> Program:
    """A tiny model's worksets, differentiated: those of the steps above."""
    step = compiled(tiny.build(name), tokens(1, 21), like=("chunks", name, False), chunk_tokens=21)
    assert step._current is not None
    program = step._current.bare
    step.close()
    return program


def mixes(workset: Workset) -> bool:
    """Whether there is attention or its like in a workset."""
    return any(op_name(n) in MIXERS for n in workset.nodes)


def number(program: Program, size: object) -> int:
    """A size for a batch of SIZES."""
    expr, symbols = private.expression(size), program.notes["symbols"]
    return expr if isinstance(expr, int) else int(expr.subs({symbols.batch: SIZES[0], symbols.sequence: SIZES[1]}))


def elements(program: Program, node: fx.Node) -> int:
    """Of a node's tensor."""
    val = meta.tensor(node)
    count = 1
    for size in val.shape if val is not None else (0,):
        count *= number(program, size)
    return count


def work(program: Program, node: fx.Node) -> int:
    """Multiplications of a product: each element of the result is a sum over one dimension of the first factor."""
    first = meta.tensor(node.args[0])  # type: ignore[arg-type]
    assert first is not None
    return elements(program, node) * number(program, first.shape[-1])


@pytest.mark.parametrize("name", tiny.NAMES)
def test_all_products_run_in_chunks_of_tokens(name: str) -> None:
    program = partitioned(name)
    found: dict[str, int] = {}
    for workset in worksets(program):
        for node in workset.nodes:
            if op_name(node) in PRODUCTS and op_name(node) not in MIXERS:
                found[workset.chunk] = found.get(workset.chunk, 0) + work(program, node)
    assert set(found) == {"tokens"}
    tokens_ = SIZES[0] * SIZES[1]
    assert found["tokens"] >= tokens_ * 64 * tiny.VOCAB  # the head at least: they have not just been missed


@pytest.mark.parametrize("name", tiny.NAMES)
def test_what_mixes_tokens_is_attention_or_positions(name: str) -> None:
    allowed = {"oomc.attention", "slice", "pad", "arange"}
    for workset in worksets(partitioned(name)):
        fences = {fence.split(":")[0] for fence in workset.fences}
        assert fences <= allowed, workset.fences
        if fences & (allowed - {"arange"}):
            assert workset.chunk == "rows"
        if not fences:
            assert workset.chunk == "tokens" or workset.name.startswith("epilogue")  # sum / count of tokens


@pytest.mark.parametrize("name", tiny.NAMES)
def test_nothing_larger_than_a_block_boundary_crosses(name: str) -> None:
    """But for what goes into and comes out of attention and its like: q, k, v, gates, results."""
    program = partitioned(name)
    attends = {n for w in worksets(program) if mixes(w) for n in (*w.inputs, *w.outputs) if isinstance(n, fx.Node)}
    boundary = SIZES[0] * SIZES[1] * 64
    for workset in worksets(program):
        for node in workset.outputs:
            if node not in attends:
                assert elements(program, node) <= boundary, (workset.name, node)
        form = program.forms[workset.form]
        assert form.forward is not None
        (output,) = form.forward.graph.find_nodes(op="output")
        for saved in output.args[0][len(workset.outputs) :] if not mixes(workset) else ():
            assert elements(program, saved) < boundary, (workset.name, saved)


@pytest.mark.parametrize("name", [name for name in tiny.NAMES if name not in DENSE])
def test_weights_of_experts_can_be_made_of_all_chunks_at_once(name: str) -> None:
    """All that are products of rows, and nothing else is: biases are sums. What is dispatched is kept as tokens."""
    program, weight = partitioned(name), ops.grouped_mm_weight
    forms = [f for f in program.forms.values() if f.backward is not None and f.backward.graph.find_nodes(
        op="call_function", target=weight)]  # fmt: skip
    assert forms
    for form in forms:
        assert form.at_once is not None and form.backward_rows is not None
        assert {form.inputs[form.gradients[i]].role for i in form.at_once.results} == {"parameter"}
        assert len(form.at_once.results) == 2
        assert not form.backward_rows.graph.find_nodes(op="call_function", target=weight)
        assert sorted(str(operand.route) for operand in form.at_once.operands) == ["0", "0", "0", "None"]
