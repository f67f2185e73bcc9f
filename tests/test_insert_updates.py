"""insert_updates: golden text, one update for each slab, none for a micro-batch."""

from __future__ import annotations

from typing import Any

from oomc import pipeline, steps
from oomc.passes.choose_residency import ChooseResidency
from oomc.passes.insert_updates import InsertUpdates
from oomc.printer import print_program
from oomc.program import Program
from tests import programs
from tests.conftest import Golden


def host_lines(program: Program) -> str:
    """The printed lines of fetches, gradients that leave, and updates."""
    words = ("fetch(", "offload(", "update(", "retire(")
    return "\n".join(line[5:].partition("  #")[0] for line in print_program(program).splitlines()
                     if any(w in line.partition("  #")[0] for w in words))  # fmt: skip


def test_golden(golden: Golden) -> None:
    before, after = (programs.up_to("tied", name) for name in ("insert_prefetch", "insert_updates"))
    golden("insert_updates", programs.stable(f"before:\n{host_lines(before)}\n\nafter:\n{host_lines(after)}"))
    for program in (before, after):
        programs.assert_runs(program, programs.model("tied"))


def test_each_slab_is_updated_once_and_awaited_once() -> None:
    program = programs.up_to("tied", "insert_updates")
    names = sorted(s.name for s in program.slabs)
    for word in (steps.update, steps.await_update):
        assert sorted(n.args[1] for n in program.graph.nodes if n.target is word) == names


def test_a_micro_batch_updates_nothing_but_awaits() -> None:
    program = programs.up_to("mlp", "insert_updates", accumulate=True)
    targets = [n.target for n in program.graph.nodes]
    assert steps.update not in targets
    assert targets.count(steps.await_update) == len(program.slabs)


def test_frozen_slabs_are_neither_updated_nor_awaited() -> None:
    own: Any = programs.model("mlp")
    own.layers[1].requires_grad_(False)
    program = pipeline.run_passes(programs.captured(own), pipeline.MODEL_PASSES)
    program = pipeline.with_plan(program, ChooseResidency(programs.SIZES), verify=True)
    for word in (steps.update, steps.await_update):
        assert "layers.1" not in [n.args[1] for n in program.graph.nodes if n.target is word]
    programs.assert_runs(program, own)


def test_nothing_to_do_without_gradients() -> None:
    program = programs.up_to("mlp", "insert_recompute")  # no offload yet
    assert not InsertUpdates()(program).modified
