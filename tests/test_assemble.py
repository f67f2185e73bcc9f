"""assemble: golden text, and the bare step graph gives the loss and gradients of eager."""

from __future__ import annotations

import pytest

from oomc import meta, steps
from oomc.printer import print_program
from tests import programs
from tests.conftest import Golden


def test_golden(golden: Golden) -> None:
    golden("assemble", programs.stable(print_program(programs.bare("mlp"))))


@pytest.mark.parametrize("kind", ["mlp", "plain", "topk", "tied"])
def test_the_bare_step_is_a_training_step(kind: str) -> None:
    programs.assert_runs(programs.bare(kind), programs.model(kind))


def test_each_workset_runs_once_each_way() -> None:
    program = programs.bare("topk")
    runs = [n for n in program.graph.nodes if n.target in steps.COMPUTE]
    forward = [meta.note(n).workset for n in runs if n.args[2] == "forward"]
    backward = [meta.note(n).workset for n in runs if n.args[2] == "backward"]
    assert forward == [w.name for b in program.blocks for w in b.worksets]
    assert backward == [name for name in reversed(forward) if name != "epilogue/0"]  # which counts labels


def test_tied_weights_contribute_once_for_each_block() -> None:
    program = programs.bare("tied")
    contributions = [n for n in program.graph.nodes if n.target is steps.gradients and "embed.weight" in n.args[2]]
    assert [meta.note(n).block for n in contributions] == [len(program.blocks) - 1, 0]


def test_building_twice_gives_the_same_text() -> None:
    assert print_program(programs.after("mlp", "assemble")) == print_program(programs.bare("mlp"))
