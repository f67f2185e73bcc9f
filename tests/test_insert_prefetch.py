"""insert_prefetch: golden text, numbers, and one fetch for each stretch of use."""

from __future__ import annotations

import pytest

from oomc import steps
from oomc.passes.insert_prefetch import InsertPrefetch, stretches
from oomc.printer import print_program
from oomc.verify import verify_program
from tests import programs
from tests.conftest import Golden


def test_golden(golden: Golden) -> None:
    before, after = (programs.up_to("mlp", name) for name in ("insert_offload", "insert_prefetch"))
    text = f"before:\n{print_program(before)}\n\nafter:\n{print_program(after)}"
    golden("insert_prefetch", programs.stable(text))
    for program in (before, after):
        programs.assert_runs(program, programs.model("mlp"))


def test_numbers_of_tied_weights() -> None:
    programs.assert_runs(programs.up_to("tied", "insert_prefetch"), programs.model("tied"))


def test_nothing_to_do_the_second_time() -> None:
    program = programs.up_to("mlp", "insert_prefetch")
    text = print_program(program)
    assert not InsertPrefetch()(program).modified
    assert print_program(program) == text


def test_forward_and_backward_of_the_last_block_are_one_stretch() -> None:
    program = programs.up_to("mlp", "insert_offload")
    found = [(s.slab, len(s.holders)) for s in stretches(program.graph, 1)]
    assert found == [
        ("prologue", 1), ("layers.0", 1), ("layers.1", 1), ("epilogue", 2), ("layers.1", 1), ("layers.0", 1)
    ]  # fmt: skip


def test_every_fetch_is_waited_for_and_released() -> None:
    program = programs.up_to("topk", "insert_prefetch")
    count = {word: sum(n.target is word for n in program.graph.nodes)
             for word in (steps.fetch, steps.wait, steps.release, steps.weights)}  # fmt: skip
    assert count[steps.fetch] == count[steps.wait] == count[steps.release] > 0
    assert count[steps.weights] == 0


@pytest.mark.parametrize(("prefetch", "held"), [(0, False), (1, True), (2, True)])
def test_weights_that_regenerate_are_held_if_they_are_needed_soon(prefetch: int, held: bool) -> None:
    """Both boundaries are made again for layers.1; the next block's backward is that of layers.0."""
    program = programs.regenerated("topk", programs.boundaries("topk"), prefetch, "insert_offload")
    found = [s.slab for s in stretches(program.graph, prefetch)]
    assert found[:4] == ["prologue", "layers.0", "layers.1", "epilogue"]
    assert found[4:] == ["prologue", "layers.0", "layers.1", *([] if held else ["layers.0"])]
    program = InsertPrefetch()(program).program
    verify_program(program, "insert_prefetch")
    programs.assert_runs(program, programs.model("topk"))
