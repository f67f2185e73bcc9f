"""The pipeline: passes that lie are found, plans do not touch the bare graph, and budgets that are too small say so."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from oomc import pipeline, steps
from oomc.errors import BudgetError
from oomc.passes.choose_residency import CANDIDATES, ChooseResidency
from oomc.plan import Budget
from oomc.printer import print_program
from oomc.program import PassResult, Program
from oomc.simulate import project
from oomc.worksets import Form
from tests import programs


@dataclass(frozen=True)
class Liar:
    """Erases an await and says that it did nothing."""

    name: str = "liar"

    def __call__(self, program: Program) -> PassResult:
        program.graph.erase_node(next(n for n in program.graph.nodes if n.target is steps.await_update))
        return PassResult(program, False)


def test_a_pass_that_lies_is_found() -> None:
    with pytest.raises(AssertionError, match="liar changed the graph and says that it did not"):
        pipeline.run_passes(programs.up_to("mlp", "schedule"), (Liar(),), verify=True)


def test_the_pipeline_is_what_the_design_says() -> None:
    names = [p.name for p in (*pipeline.MODEL_PASSES, *pipeline.step_passes(ChooseResidency((1, 1))))]
    assert names == [
        "canonicalize", "rewrite_attention", "rewrite_convolutions", "rewrite_experts", "rewrite_norms",
        "split_projections", "partition_worksets", "differentiate", "assemble",
        "choose_residency", "insert_chunks", "insert_recompute", "insert_value_offload",
        "overwrite_values", "insert_offload",
        "insert_prefetch", "insert_updates", "schedule",
    ]  # fmt: skip


def test_passes_are_observed_in_order() -> None:
    seen: list[str] = []
    pipeline.with_plan(programs.bare("mlp"), ChooseResidency(programs.SIZES), lambda name, _: seen.append(name))
    assert seen == [p.name for p in pipeline.step_passes(ChooseResidency(programs.SIZES))]


def test_a_plan_leaves_the_bare_graph_as_it_is() -> None:
    bare = programs.bare("tied")
    before = print_program(bare)
    first = print_program(pipeline.with_plan(bare, ChooseResidency(programs.SIZES)))
    second = print_program(pipeline.with_plan(bare, ChooseResidency(programs.SIZES)))
    assert print_program(bare) == before
    assert bare.plan is None
    assert first == second


def test_without_a_limit_the_first_candidate_is_taken() -> None:
    program, projection = pipeline.plan_step(
        programs.bare("mlp"), programs.profiler("mlp"), programs.SIZES, None, Budget()
    )
    assert program.plan is not None
    first = ChooseResidency(programs.SIZES, candidate=CANDIDATES[0][0])
    assert program.plan.prefetch == CANDIDATES[0][0].prefetch
    assert program.plan.chunks == first.chunks(program)
    assert set(program.plan.chunks.values()) == {programs.SIZES}
    assert projection == project(program, programs.profiler("mlp"))


def test_a_budget_that_is_too_small_names_the_smallest_that_works() -> None:
    bare, profiler = programs.bare("topk"), programs.profiler("topk")

    def plan(allowed: int) -> int:
        return pipeline.plan_step(bare, profiler, programs.SIZES, allowed, Budget(allowed))[1].peak

    with pytest.raises(BudgetError, match="a step of batch 2 x 12 does not fit the device budget") as error:
        plan(1000)
    smallest = error.value.smallest_device
    assert smallest is not None
    assert str(smallest) in str(error.value)
    assert "weights in flight (slots)" in str(error.value)
    assert plan(smallest) == smallest
    with pytest.raises(BudgetError):
        plan(smallest - 1)


def test_a_tighter_budget_gives_a_more_frugal_plan() -> None:
    bare, profiler = programs.bare("topk"), programs.profiler("topk")
    _, most = pipeline.plan_step(bare, profiler, programs.SIZES, None, Budget())
    program, less = pipeline.plan_step(bare, profiler, programs.SIZES, most.peak - 1, Budget(most.peak - 1))
    assert less.peak < most.peak
    programs.assert_runs(program, programs.model("topk"))


def test_a_form_is_the_same_in_every_program_of_a_trace() -> None:
    """They share profiles and compiled graphs by its name, so that it may not stand for two."""
    bare = programs.bare("topk")
    made = [pipeline.in_whole_blocks(bare), pipeline.in_groups(bare, 2), pipeline.in_groups(bare, 3)]
    found = [bare, *(program for program in made if program is not None)]
    assert len(found) > 2
    forms: dict[str, Form] = {}
    for program in found:
        for key, form in program.forms.items():
            assert forms.setdefault(key, form) is form
    assert len(forms) < sum(len(program.forms) for program in found)
    assert {form.key: form for form in bare.differentiated.values()} == forms


def test_twins_have_one_name_each_in_whatever_order_they_come() -> None:
    """Forms that differ in what gets a gradient alone."""
    bare = programs.bare("topk")
    frozen = next(s.target for s in bare.inputs if s.kind == "parameter" and "layers.1" in s.target)
    changed = replace(bare, inputs=[replace(s, trainable=s.trainable and s.target != frozen) for s in bare.inputs])
    other = pipeline.run_passes(pipeline._uncut(changed), pipeline.MODEL_PASSES[pipeline.CUT :])
    for key, form in other.forms.items():
        flags = tuple(i.requires_grad for i in form.inputs)
        assert form is bare.differentiated[key.partition(".")[0], flags]
        if key in bare.forms:
            assert tuple(i.requires_grad for i in bare.forms[key].inputs) == flags
    assert other.forms.keys() - bare.forms.keys()
