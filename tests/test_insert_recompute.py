"""insert_recompute: golden text, numbers, and that the plan alone decides."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from oomc import meta, steps
from oomc.passes.insert_recompute import InsertRecompute
from oomc.printer import print_program
from oomc.program import Program
from oomc.verify import verify_program
from tests import programs
from tests.conftest import Golden

pytestmark = pytest.mark.usefixtures("cut_lookups")


def backward_part(program: Program) -> str:
    """The printed step from the last block's backward on."""
    lines = print_program(program).splitlines()
    return "\n".join(lines[next(i for i, line in enumerate(lines) if "layers_1_3_backward" in line) - 12 :])


def rerun(program: Program) -> list[str]:
    return [meta.note(n).workset for n in program.graph.nodes if meta.note(n).phase == "recompute"
            and n.target in steps.COMPUTE]  # fmt: skip


def test_golden(golden: Golden) -> None:
    before, after = (programs.up_to("topk", name) for name in ("insert_chunks", "insert_recompute"))
    text = f"before:\n{backward_part(before)}\n\nafter:\n{backward_part(after)}"
    if programs.TRACES_AS_GOLDEN:
        golden("insert_recompute", programs.stable(text))
    for program in (before, after):
        programs.assert_runs(program, programs.model("topk"))


@pytest.mark.parametrize("kind", ["topk", "plain", "tied"])
def test_recompute_gives_the_same_bits(kind: str) -> None:
    own = programs.model(kind)
    kept = programs.run_step(programs.up_to(kind, "insert_chunks"), own)
    again = programs.run_step(programs.up_to(kind, "insert_recompute"), own)
    assert torch.equal(kept[0], again[0])
    assert all(torch.equal(kept[1][name], again[1][name]) for name in kept[1])


def test_nothing_is_recomputed_where_all_is_kept() -> None:
    program = programs.up_to("topk", "insert_chunks")
    assert program.plan is not None
    program.plan = replace(program.plan, residency=dict.fromkeys(program.plan.residency, "keep"))
    assert not InsertRecompute()(program).modified
    assert rerun(program) == []
    assert not InsertRecompute()(programs.up_to("mlp", "insert_chunks")).modified  # has no inner values


def test_only_what_the_backward_needs_runs_again() -> None:
    program = programs.up_to("topk", "insert_recompute")
    assert rerun(program) == [f"layers.{layer}/{part}" for layer in (1, 0) for part in (0, 1, 2)]


@pytest.mark.parametrize("index", range(5))
def test_any_single_value_can_be_recomputed(index: int) -> None:
    """Each choice that differs from the fixed policy in one value is sound and gives the same numbers."""
    program = programs.up_to("topk", "insert_chunks")
    assert program.plan is not None
    inner = [n for n, where in program.plan.residency.items() if where == "recompute"]
    choice = dict(program.plan.residency) | dict.fromkeys(inner, "keep") | {inner[index]: "recompute"}
    program.plan = replace(program.plan, residency=choice)
    program = InsertRecompute()(program).program
    verify_program(program, "insert_recompute")
    programs.assert_runs(program, programs.model("topk"))


# -- boundaries -------------------------------------------------------------------------------------------------------


def test_golden_regenerated(golden: Golden) -> None:
    """The embedding is kept, what the first layer made of it is regenerated for the second one's backward."""
    names = programs.boundaries("mlp")[1:]
    before, after = (programs.regenerated("mlp", names, until=name) for name in ("insert_chunks", "insert_recompute"))
    golden("insert_recompute_regenerated", programs.stable(f"{print_program(before)}\n\n{print_program(after)}"))
    for program in (before, after):
        programs.assert_runs(program, programs.model("mlp"))


@pytest.mark.parametrize("kind", ["topk", "plain", "tied", "mlp"])
def test_regenerated_boundaries_have_the_same_bits(kind: str) -> None:
    """Dropout and the choice of experts are those of the first time."""
    own = programs.model(kind)
    kept = programs.run_step(programs.up_to(kind, "insert_chunks"), own)
    every = programs.boundaries(kind)
    assert len(every) == 2
    for names in itertools.chain(*(itertools.combinations(every, n) for n in (1, 2))):
        again = programs.run_step(programs.regenerated(kind, names), own)
        assert torch.equal(kept[0], again[0])
        assert all(torch.equal(kept[1][name], again[1][name]) for name in kept[1]), names


def test_a_boundary_is_regenerated_for_the_block_that_needs_it_first_and_once() -> None:
    program = programs.regenerated("topk", programs.boundaries("topk"), until="insert_recompute")
    found = [(meta.note(n).block, meta.note(n).workset) for n in program.graph.nodes
             if n.target in steps.COMPUTE and meta.note(n).phase == "regenerate"]  # fmt: skip
    assert found == [(2, "prologue/0"), *((2, f"layers.0/{i}") for i in range(4))], "the embedding is kept from then on"
    again = [(meta.note(n).block, meta.note(n).workset) for n in program.graph.nodes
             if n.target in steps.COMPUTE and meta.note(n).phase == "recompute"]  # fmt: skip
    assert again == [(block, f"layers.{block - 1}/{i}") for block in (2, 1) for i in range(3)]


def test_what_attention_gave_is_not_computed_again_if_it_is_kept() -> None:
    program = programs.bare("topk")
    fences = [w.outputs[0].name for b in program.blocks[1:3] for w in b.worksets[1:2]]
    program = programs.regenerated("topk", programs.boundaries("topk")[1:], until="insert_chunks")
    assert program.plan is not None
    program.plan = replace(program.plan, residency=program.plan.residency | dict.fromkeys(fences, "keep"))
    program = InsertRecompute()(program).program
    verify_program(program, "insert_recompute")
    ran = [meta.note(n).workset for n in program.graph.nodes if n.target in steps.COMPUTE
           and meta.note(n).phase == "regenerate"]  # fmt: skip
    assert ran == ["layers.0/2", "layers.0/3"]
    programs.assert_runs(program, programs.model("topk"))


@pytest.mark.parametrize("kind", ["topk", "tied"])
@pytest.mark.parametrize("seed", range(4))
def test_any_choice_for_all_values_has_the_same_bits(kind: str, seed: int) -> None:
    """Each value kept, recomputed or on the host as it comes."""
    own, rng = programs.model(kind), random.Random(f"{kind} {seed}")
    kept = programs.run_step(programs.up_to(kind, "insert_chunks"), own)
    program = programs.up_to(kind, "insert_chunks")
    assert program.plan is not None
    inner = [name for name, where in program.plan.residency.items() if where == "recompute"]
    again = [name for name in (*inner, *programs.boundaries(kind)) if rng.random() < 0.6]
    away = [name for name in programs.movable(kind) if name not in again and rng.random() < 0.5]
    program = programs.regenerated(kind, again, prefetch=seed % 3, offload=away)
    made = programs.run_step(program, own)
    assert torch.equal(kept[0], made[0])
    assert all(torch.equal(kept[1][name], made[1][name]) for name in kept[1]), (again, away)
