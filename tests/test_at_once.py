"""Gradients of experts' weights of all chunks at once: which forms have them, what they are, and what they take."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from oomc import at_once, meta, ops, pipeline, steps
from oomc.capture import Batch, capture
from oomc.cost import Costs
from oomc.faults import Faults
from oomc.machine import default
from oomc.models import tiny
from oomc.passes.choose_residency import Candidate, ChooseResidency
from oomc.program import Program
from oomc.runtime.compute import run_chunks
from oomc.simulate import Profiler
from oomc.verify import verify_form
from oomc.worksets import AtOnce, Form
from tests import programs
from tests.helpers import compiled, masters, relative, tokens

SIZES = (3, 24)
CHUNKS = [(1, 24), (2, 24), (1, 7), (2, 5), (3, 23), (3, 1)]


@cache
def bare(name: str, dtype: torch.dtype = torch.float32) -> Program:
    model = tiny.build(name, dtype)
    return pipeline.run_passes(capture(model, Batch.bind(model, (), tokens(2, 24))), pipeline.MODEL_PASSES)


def forms(program: Program) -> list[Form]:
    """Those whose experts' gradients can be made at once."""
    return [form for form in program.forms.values() if form.at_once is not None]


def arguments(program: Program, form: Form, experts: int, sizes: tuple[int, int] = SIZES) -> list[Any]:
    """Random ones of the backward; chosen experts differ from each other, and none is the last."""
    generator, profiler = torch.Generator().manual_seed(0), Profiler(program)

    def real(node: fx.Node) -> Any:
        val = meta.value(node)
        if not isinstance(val, torch.Tensor):
            return profiler.number(val, sizes)
        shape = [profiler.number(n, sizes) for n in val.shape]
        if val.is_floating_point():
            return torch.randn(shape, generator=generator, dtype=torch.float32).to(val.dtype)
        scores = torch.rand((*shape[:-1], experts - 1), generator=generator)
        return scores.topk(shape[-1]).indices.to(val.dtype)

    assert form.backward is not None
    carried = len(form.carried("backward"))
    placeholders = form.backward.graph.find_nodes(op="placeholder")
    return [real(node) for node in placeholders[: len(placeholders) - carried]]


def run(form: Form, chunk: tuple[int, int], args: list[Any]) -> list[Tensor | None]:
    return list(run_chunks(form, "backward", lambda name: getattr(form, name), chunk, args))[: len(form.gradients)]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AtOnce, "pays", lambda *_: True)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_in_chunks_they_are_those_of_the_whole(name: str, chunk: tuple[int, int]) -> None:
    """The products' rows are the same up to the rounding of products of other sizes, and so are the gradients; experts
    without tokens have none. What is not made at once is as without."""
    program = bare(name)
    for form in forms(program):
        assert form.at_once is not None and form.backward is not None
        experts = int(
            meta.value(form.backward.graph.find_nodes(op="output")[0].args[0][form.at_once.results[0]]).shape[0]
        )
        args = arguments(program, form, experts)
        wanted = form.backward(*args)
        found, without = run(form, chunk, args), run(replace(form, at_once=None), chunk, args)
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            if one is None:
                assert other is None
                continue
            if index in form.at_once.results:
                assert one.shape == other.shape and one.stride() == other.stride()
                assert relative(one, other) < 1e-6
                assert not one[-1].any()
            else:
                same = without[index]
                assert same is not None and torch.equal(one, same)


@pytest.mark.usefixtures("always")
def test_a_choice_that_leaves_a_chunk_without_some_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of a chunk chooses the same two experts."""
    program = bare("qwen3_moe")
    (form,) = forms(program)
    args = arguments(program, form, 8)
    index = next(i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and not x.is_floating_point())
    rows = torch.arange(args[index].numel() // 2).div(24, rounding_mode="floor")  # of a batch row
    args[index] = torch.stack([rows, rows + 3], -1).reshape(args[index].shape).to(args[index].dtype)
    assert form.backward is not None and form.at_once is not None
    wanted = form.backward(*args)
    found = run(form, (1, 24), args)
    for place in form.at_once.results:
        one = found[place]
        assert one is not None and relative(one, wanted[place]) < 1e-6
        assert [bool(x.any()) for x in one] == [True] * 6 + [False] * (len(one) - 6)


def test_it_pays_where_operands_are_smaller_than_sums() -> None:
    for itemsize, several in ((2, 4), (4, 4), (8, 8)):
        kind = AtOnce((0,), (), (), "10*B*S", 100, itemsize)
        assert not kind.pays((1, 1), 1)
        for tiles, limit in ((2, 10 * itemsize), (3, 10 * several)):
            assert kind.pays((1, limit), tiles) and kind.pays((limit, 1), tiles)
            assert not kind.pays((1, limit + 1), tiles)


def test_what_is_counted_is_what_is_kept_and_read() -> None:
    """Of a token and its two experts: the token itself, and per choice it, what the gate gives, and both gradients."""
    (form,) = forms(bare("qwen3_moe", torch.bfloat16))
    config = tiny.config("qwen3_moe")
    d, f, k = config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok
    assert form.at_once is not None
    assert steps.calc(form.at_once.formula, 5, 7) == 35 * 2 * (d + k * (d + 2 * f + f + d))
    assert form.at_once.numbers == config.num_experts * 3 * d * f and form.at_once.itemsize == 2


@pytest.mark.parametrize("sequence", [16, 4096])
def test_memory_is_no_more_than_with_sums(sequence: int) -> None:
    """Where it pays it takes less; where it does not, it is not done."""
    program = bare("qwen3_moe", torch.bfloat16)
    (form,) = forms(program)
    sizes, chunk = (4, sequence), (1, sequence)
    without = replace(program, forms={**program.forms, form.key: replace(form, at_once=None)})
    peaks = [Profiler(each).profile(form.key, "backward", sizes, chunk).peak for each in (program, without)]
    assert form.at_once is not None and form.at_once.pays(sizes, 4) == (sequence == 16)
    assert (peaks[0] < peaks[1]) if sequence == 16 else peaks[0] == peaks[1]


def test_what_it_costs() -> None:
    """Fewer bytes than the sums, and the same products."""
    program = bare("qwen3_moe", torch.bfloat16)
    (form,) = forms(program)
    costs = Costs(program, default("H200"))
    flops = {part: costs.of(form.key, part).flops for part in (*steps.PARTS, "backward")}
    at = {name: float(x.subs(dict.fromkeys(x.free_symbols, 8))) for name, x in flops.items()}
    assert at["backward_rows"] + at["backward_products"] == pytest.approx(at["backward"])
    assert at["backward_orders"] == 0
    without = replace(program, forms={**program.forms, form.key: replace(form, at_once=None)})
    sizes, chunk = (4, 16), (1, 16)
    assert costs.seconds(form.key, "backward", sizes, chunk) != Costs(without, default("H200")).seconds(
        form.key, "backward", sizes, chunk
    )
    long = (4, 4096)
    assert costs.seconds(form.key, "backward", long, (1, 4096)) == Costs(without, default("H200")).seconds(
        form.key, "backward", long, (1, 4096)
    )


@pytest.mark.parametrize("chunk_tokens", [8, 16, 24])
def test_a_step_is_the_same_with_and_without(chunk_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters after two steps; in fp32 they differ by the order of sums, in what is not made at once by nothing."""
    results, inner = [], AtOnce.pays
    calls: list[bool] = []
    for off in (False, True):

        def pays(*args: Any, off: bool = off) -> bool:
            calls.append(not off and inner(*args))
            return calls[-1]

        monkeypatch.setattr(AtOnce, "pays", pays)
        one = compiled(tiny.build("qwen3_moe"), tokens(2, 24), like=("at_once", off), chunk_tokens=chunk_tokens)
        for i in range(2):
            one(**tokens(2, 24, seed=i))
        results.append({name: m.clone() for name, m in masters(one).items()})
        one.close()
    assert set(calls) == {False, True}
    assert max(relative(results[0][name], results[1][name]) for name in results[1]) < 1e-5


def test_the_verifier_knows_when_the_graphs_are_others() -> None:
    program = bare("qwen3_moe")
    symbols = program.notes["symbols"]
    (form,) = forms(program)
    assert form.at_once is not None
    for new in (
        replace(form, backward_rows=form.backward),
        replace(form, backward_products=None),
        replace(form, at_once=replace(form.at_once, results=form.at_once.results[::-1])),
        replace(form, at_once=None),
    ):
        faults = Faults(program, "differentiate")
        verify_form(new, symbols, faults)
        assert any("at once" in fault.message for fault in faults.found)
    faults = Faults(program, "differentiate")
    verify_form(form, symbols, faults)
    assert not faults.found


def test_a_gradient_that_something_else_is_part_of_is_not_made_at_once() -> None:
    """A weight that is decayed inside of the model, say: its gradient is a product and more."""
    program = programs.bare("plain")
    (form,) = forms(program)
    assert form.backward is not None and form.at_once is not None
    graph = form.backward.graph
    copy = fx.GraphModule(form.backward, fx.Graph())
    nodes: dict[fx.Node, fx.Node] = {}
    copy.graph.output(copy.graph.graph_copy(graph, nodes))
    for old, new in nodes.items():
        new.meta = dict(old.meta)
    (output,) = copy.graph.find_nodes(op="output")
    results = list(output.args[0])
    (place,) = form.at_once.results
    weight = next(n for n in copy.graph.find_nodes(op="placeholder") if meta.tensor(n) is not None
                  and meta.value(n).shape == meta.value(results[place]).shape)  # fmt: skip
    with copy.graph.inserting_before(output):
        total = copy.graph.call_function(torch.ops.aten.add.Tensor, (results[place], weight))
    meta.set_value(total, meta.value(results[place]))
    results[place] = total
    output.args = (tuple(results),)
    assert at_once.added(replace(form, backward=copy), program.notes["symbols"]).at_once is None


class Pooled(nn.Module):
    """Experts of each batch row, or of each position: whoever chooses them is shared by the tiles of a row, or of a
    column."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dim = dim
        self.embed, self.linear = nn.Embedding(16, 8), nn.Linear(8, 8, bias=False)
        self.router, self.up = nn.Linear(8, 3, bias=False), nn.Parameter(torch.randn(3, 8, 8) * 0.2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        pooled = x.mean(self.dim)
        weights, chosen = self.router(pooled).softmax(-1).topk(2, -1)
        y = torch.zeros_like(pooled)
        for expert, up in enumerate(self.up.unbind()):
            y = y + (weights * (chosen == expert)).sum(-1, keepdim=True) * torch.tanh(pooled @ up)
        return self.linear(torch.nn.functional.silu(x * y.unsqueeze(self.dim))).square().mean()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dim", [0, 1])
def test_pairs_that_several_tiles_share_are_summed(dim: int) -> None:
    """Each tile has a part of their gradient."""
    model, batch = Pooled(dim), {"ids": torch.arange(44).reshape(4, 11) % 16}
    program = pipeline.run_passes(capture(model, Batch.bind(model, (), batch)), pipeline.MODEL_PASSES)
    assert any(
        form.backward is not None and form.chunk == "tokens"
        and form.backward.graph.find_nodes(op="call_function", target=ops.grouped_mm_weight)
        for form in program.forms.values()
    )  # fmt: skip
    step = pipeline.with_plan(program, ChooseResidency((4, 11), candidate=Candidate(4, 0, 0)))
    programs.assert_same(programs.run_step(step, model, batch), programs.run_eager(model, batch))
