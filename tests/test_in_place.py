"""Attention's gradients over q, k and v: which forms can, which runs may, and what the verifier says of the others."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx

from oomc import in_place, meta, ops, pipeline, steps
from oomc.capture import Batch, capture
from oomc.fxutil import copy_graph
from oomc.models import tiny
from oomc.offloadable import results_of
from oomc.passes.choose_residency import Candidate, ChooseResidency
from oomc.passes.overwrite_values import OverwriteValues
from oomc.plan import Residency
from oomc.program import PassResult, Program
from oomc.runtime.compute import run_chunks
from oomc.simulate import Profiler, Walk, project
from oomc.verify import verify_program
from tests import programs
from tests.helpers import compiled, masters, tokens
from tests.test_verify import broken

KEEP = Candidate(1024, 1, 1, keep=True)


@cache
def bare(name: str) -> Program:
    model = tiny.build(name)
    return pipeline.run_passes(capture(model, Batch.bind(model, (), tokens(2, 24))), pipeline.MODEL_PASSES)


def scheduled(name: str = "qwen3_moe", sizes: tuple[int, int] = (2, 24), candidate: Candidate = KEEP) -> Program:
    return pipeline.with_plan(bare(name), ChooseResidency(sizes, candidate=candidate))


def runs_in_place(program: Program) -> list[fx.Node]:
    return [n for n in program.graph.nodes if n.target in steps.COMPUTE and n.args[2] == steps.IN_PLACE]


def leave(_: OverwriteValues, program: Program) -> PassResult:
    """The pass, turned off."""
    return PassResult(program, False)


@pytest.fixture
def step() -> Program:
    return scheduled()


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mixtral"])
def test_every_attention_of_a_model_is_in_place(name: str) -> None:
    program = scheduled(name)
    found = runs_in_place(program)
    assert len(found) == sum("attention" in str(w.fences) for b in program.blocks for w in b.worksets) > 0
    verify_program(program, "schedule")


@pytest.mark.parametrize("name", ["plain_moe", "gpt_oss"])
def test_also_where_a_model_makes_q_k_and_v_in_one_tensor_or_in_another_layout(name: str) -> None:
    assert any(form.backward_in_place is not None for form in bare(name).forms.values())
    assert runs_in_place(scheduled(name))


def test_the_pass_tells_whether_it_changed_anything(step: Program) -> None:
    assert not OverwriteValues()(step).modified
    assert not OverwriteValues()(programs.up_to("mlp", "insert_value_offload")).modified


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_form_in_place_gives_the_same_bits(batch: int, rows: int) -> None:
    """In one tile and in several, whole and ragged; nothing but q, k and v is written to."""
    program, sizes = bare("qwen3_moe"), (batch, 24)
    form = next(f for f in program.forms.values() if f.backward_in_place is not None)
    profiler = Profiler(program)

    def real(node: fx.Node, index: int) -> Any:
        val = meta.value(node)
        if not isinstance(val, torch.Tensor):
            return profiler.number(val, sizes)
        shape, stride = ([profiler.number(n, sizes) for n in each] for each in (val.shape, val.stride()))
        generator = torch.Generator().manual_seed(index)
        filled = torch.empty_strided(shape, stride, dtype=val.dtype)
        return filled.copy_(torch.randn(shape, generator=generator))

    assert form.backward is not None and form.backward_in_place is not None
    args, again = (
        [real(n, i) for i, n in enumerate(form.backward.graph.find_nodes(op="placeholder"))] for _ in range(2)
    )
    wanted = run_chunks(form, "backward", lambda name: getattr(form, name), (rows, 24), args)
    found = run_chunks(form, steps.IN_PLACE, lambda name: getattr(form, name), (rows, 24), again)
    for got, want in zip(found, wanted, strict=True):
        assert got is not None and want is not None
        assert torch.equal(got, want) and got.stride() == want.stride()
    pairs = dict(form.overwritten)
    for index, (one, other) in enumerate(zip(args, again, strict=True)):
        if index in pairs:
            result = found[pairs[index]]
            assert result is not None and result.data_ptr() == other.data_ptr()
        elif isinstance(one, torch.Tensor):
            assert torch.equal(one, other)


@pytest.mark.parametrize("options", [{}, {"chunk_tokens": 16}, {"chunk_tokens": 64}])
def test_a_step_gives_the_same_bits(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and masters after two steps, with and without the pass."""
    results = []
    for off in (False, True):
        if off:
            monkeypatch.setattr(OverwriteValues, "__call__", leave)
        one = compiled(tiny.build("qwen3_moe"), tokens(2, 64), like=("qwen3_moe", torch.float32), **options)
        losses = [one(**tokens(2, 64, seed=i)) for i in range(2)]
        assert one._current is not None
        assert bool(runs_in_place(one._current.program)) != off
        results.append((losses, {name: m.clone() for name, m in masters(one).items()}))
        one.close()
    (losses, found), (other, wanted) = results
    assert all(map(torch.equal, losses, other))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_projection_falls_by_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long row, where attention's backward is the peak, by the bytes of dq, dk and dv."""
    sizes, candidate = (1, 4096), replace(KEEP, tokens=16)
    program = scheduled(sizes=sizes, candidate=candidate)
    profiler = Profiler(program)
    (run, *_) = runs_in_place(program)
    during = project(program, profiler).during[run.name]
    walk = Walk(program, profiler)
    walk.run()
    form = program.forms[str(run.args[1])]
    args = in_place.arguments(run)
    spared = sum(walk.bytes[s] for i, _ in form.overwritten for s in walk.storages[args[i]])
    assert spared == 4096 * 4 * sum(program_heads(program, args[i]) for i, _ in form.overwritten)
    monkeypatch.setattr(OverwriteValues, "__call__", leave)
    before = project(scheduled(sizes=sizes, candidate=candidate), profiler)
    assert before.during[run.name] - during == spared


def program_heads(program: Program, node: fx.Node) -> int:
    """Elements for a token of a value of one row."""
    profiler, count = Profiler(program), 1
    for size in meta.value(node).shape:
        count *= profiler.number(size, (1, 4096))
    return count // 4096


def test_measured_memory_is_within_the_projection() -> None:
    one = compiled(tiny.build("qwen3_moe"), tokens(2, 512), chunk_tokens=128)
    one(**tokens(2, 512))
    assert one._current is not None and runs_in_place(one._current.program)
    projection = project(one._current.program, next(iter(one._compiler.traces.values())).profiler)
    assert one.metrics["device_peak"] <= projection.peak
    one.close()


# --- what is still needed is not overwritten, and the verifier refuses it


def first(program: Program) -> tuple[fx.Node, fx.Node]:
    """A backward in place, and the q that it overwrites."""
    run = runs_in_place(program)[0]
    return run, in_place.arguments(run)[program.forms[str(run.args[1])].overwritten[0][0]]


def refused(program: Program, run: fx.Node, reason: str) -> None:
    """The verifier refuses the run, and the pass would not have made it."""
    broken(program, reason)
    run.args = (*run.args[:2], "backward", *run.args[3:])
    OverwriteValues()(program)
    assert run.args[2] == "backward"


def test_used_afterwards(step: Program) -> None:
    run, value = first(step)
    (output,) = step.graph.find_nodes(op="output")
    with step.graph.inserting_before(output):
        late = step.graph.call_function(steps.zeros_like, (value,))
    meta.set_note(late, meta.note(run))
    meta.set_value(late, meta.value(value))
    step.step.recompile()  # type: ignore[union-attr]
    refused(step, run, f"it overwrites %{value}, which %{late} uses afterwards")


def test_on_its_way_to_the_host(step: Program) -> None:
    run, value = first(step)
    with step.graph.inserting_after(value):
        store = step.graph.call_function(steps.store, (run.args[0], meta.note(value).source, value, -1))
    assert "beside the compute" in in_place.why_not(step, run)
    step.graph.erase_node(store)
    assert not in_place.why_not(step, run)


def test_given_twice(step: Program) -> None:
    run, value = first(step)
    other = in_place.arguments(run)[step.forms[str(run.args[1])].overwritten[1][0]]
    run.replace_input_with(other, value)
    assert in_place.why_not(step, run) == f"%{value} is two of its arguments"


@pytest.mark.parametrize("word", [steps.resident, steps.zeros_like])
def test_no_result_of_a_workset(step: Program, word: Any) -> None:
    run, value = first(step)
    with step.graph.inserting_before(run):
        other = step.graph.call_function(word, (run.args[0], "x") if word is steps.resident else (value,))
    run.replace_input_with(value, other)
    assert in_place.why_not(step, run) == f"it overwrites %{other}: it is no result of a workset"


def test_memory_of_another_result(step: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form that makes q hands out a view of it too."""
    run, value = first(step)
    maker: Any = value.args[0]
    results = results_of(step, maker)
    monkeypatch.setattr("oomc.offloadable.results_of", lambda *_: [*results, results[value.args[1]]])  # type: ignore[index]
    assert "it shares its memory with another result" in in_place.why_not(step, run)


def test_handed_on_by_another_run(step: Program) -> None:
    """Attention's forward puts out q itself beside its results."""
    assert step.plan is not None
    keep: dict[str, Residency] = dict.fromkeys(step.plan.residency, "keep")
    step = pipeline.with_plan(bare("qwen3_moe"), pipeline.chosen(replace(step.plan, residency=keep)))
    run, value = first(step)
    form = step.forms[str(run.args[1])]
    assert form.forward is not None and not in_place.why_not(step, run)
    graph = copy_graph(form.forward.graph)
    forward = next(u for u in value.users if u is not run)
    taken = graph.find_nodes(op="placeholder")[in_place.arguments(forward).index(value)]
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        view = graph.call_function(torch.ops.aten.transpose.int, (taken, 1, 2))
    output.args = ((*output.args[0], view),)
    step.forms = {**step.forms, form.key: replace(form, forward=fx.GraphModule(form.forward, graph))}
    assert in_place.why_not(step, run) == f"it overwrites %{value}, in whose memory %{forward} has put a result"


def test_values_that_come_back_from_the_host_are_overwritten() -> None:
    made = scheduled()
    run, _ = first(made)
    plan = made.plan
    assert plan is not None
    names = {meta.note(in_place.arguments(run)[i]).source for i in (2, 3, 4)}
    residency: dict[str, Residency] = {n: "offload" if n in names else where for n, where in plan.residency.items()}
    program = pipeline.with_plan(bare("qwen3_moe"), pipeline.chosen(replace(plan, residency=residency)), verify=True)
    found = [n for n in runs_in_place(program) if n.name == run.name]
    assert found
    gone = [a for a in in_place.arguments(found[0]) if isinstance(a, fx.Node) and a.target is steps.restored]
    assert {meta.note(a).source for a in gone} >= names


def test_a_form_that_is_not_what_its_backward_makes_is_refused(step: Program) -> None:
    form = next(f for f in step.forms.values() if f.backward_in_place is not None)
    step.forms[form.key] = replace(form, overwritten=form.overwritten[1:])
    broken(step, "it is not the backward with attention in place")
    assert form.backward_in_place is not None
    graph = copy_graph(form.backward_in_place.graph)
    (site,) = graph.find_nodes(op="call_function", target=ops.attention_backward_in_place)
    with graph.inserting_before(site):
        late = graph.call_function(torch.ops.aten.neg.default, (site.args[1],))
    site.append(late)
    step.forms[form.key] = replace(form, backward_in_place=fx.GraphModule(torch.nn.Module(), graph))
    broken(step, "it is not the backward with attention in place")
