"""assemble: golden text, and the bare step graph gives the loss and gradients of eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from oomc import meta, pipeline, steps
from oomc.capture import Batch, capture
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
    assert backward == forward[::-1]


def test_tied_weights_contribute_once_for_each_block() -> None:
    program = programs.bare("tied")
    contributions = [n for n in program.graph.nodes if n.target is steps.gradients and "embed.weight" in n.args[2]]
    assert [meta.note(n).block for n in contributions] == [len(program.blocks) - 1, 0]


@pytest.mark.parametrize("kind", ["mlp", "topk"])
def test_the_count_of_valid_labels_leaves_before_any_gradient(kind: str) -> None:
    program = programs.bare(kind)
    assert programs.count_of(program, programs.model(kind)) == int((programs.batch()["labels"] != -100).sum())
    nodes = list(program.graph.nodes)
    (count,) = (n for n in nodes if n.target is steps.count)
    assert nodes.index(count) < min(i for i, n in enumerate(nodes) if n.target is steps.gradients)
    loss = program.blocks[-1].worksets[-1].name  # which divides by the count
    assert not count.users
    assert all(u is count or meta.note(u).workset == loss for u in count.args[1].users)


def test_a_loss_without_a_count_counts_nothing() -> None:
    own = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    program = capture(own, Batch.bind(own, (), {"input": torch.randn(2, 3, 4)}), loss_fn=lambda y, _: y.square().mean())
    program = pipeline.run_passes(program, pipeline.MODEL_PASSES, verify=True)
    assert program.count is None and all(n.target is not steps.count for n in program.graph.nodes)


def test_building_twice_gives_the_same_text() -> None:
    assert print_program(programs.after("mlp", "assemble")) == print_program(programs.bare("mlp"))
