"""The pipeline: passes that lie are found, plans do not touch the bare graph, and budgets that are too small say so."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from oomc import pipeline, steps
from oomc.errors import BudgetError
from oomc.passes.choose_residency import CANDIDATES, ChooseResidency
from oomc.plan import Budget
from oomc.printer import print_program
from oomc.program import PassResult, Program
from oomc.simulate import project
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
        "canonicalize", "rewrite_attention", "rewrite_convolutions", "rewrite_experts", "split_projections",
        "partition_worksets", "differentiate", "assemble",
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
