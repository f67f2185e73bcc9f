"""insert_offload: golden text, and which gradients are summed on the host."""

from __future__ import annotations

from oomc import steps
from oomc.passes.insert_offload import InsertOffload
from oomc.printer import print_program
from oomc.program import Program
from tests import programs
from tests.conftest import Golden


def sinks(program: Program) -> str:
    """The printed lines in which gradients go."""
    words = ("gradients(", "offload(", "retire(")
    return "\n".join(line[5:].partition("  #")[0] for line in print_program(program).splitlines()
                     if any(f" {w}" in line for w in words))  # fmt: skip


def test_golden(golden: Golden) -> None:
    before, after = (programs.up_to("tied", name) for name in ("insert_recompute", "insert_offload"))
    golden("insert_offload", programs.stable(f"before:\n{sinks(before)}\n\nafter:\n{sinks(after)}"))
    for program in (before, after):
        programs.assert_runs(program, programs.model("tied"))


def test_nothing_to_do_the_second_time() -> None:
    program = programs.up_to("mlp", "insert_offload")
    text = print_program(program)
    assert not InsertOffload()(program).modified
    assert print_program(program) == text


def modes(program: Program) -> dict[str, str]:
    return {n.args[1]: n.args[4] for n in program.graph.nodes if n.target is steps.offload}


def test_slabs_of_several_blocks_are_summed() -> None:
    found = modes(programs.up_to("tied", "insert_offload"))
    assert [slab for slab, mode in found.items() if mode == "sum"] == ["shared.0"]
    assert set(found.values()) == {"sum", "update"}


def test_all_of_a_micro_batch_is_summed() -> None:
    assert set(modes(programs.up_to("mlp", "insert_offload", accumulate=True)).values()) == {"sum"}
