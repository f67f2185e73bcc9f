"""The verifier of values on the host names the fault of each graph that is broken by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import fx

from oomc import meta, steps
from oomc.program import Program
from oomc.verify import verify_program
from tests import programs
from tests.test_verify import broken, call, calls, clone_after, set_arg


@pytest.fixture(scope="module")
def made() -> Program:
    """All that may leave does, of two top-k layers, scheduled with prefetch."""
    return programs.offloaded("topk")


@pytest.fixture
def step(made: Program) -> Program:
    return programs.with_own_step(made)


def way(program: Program, name: str) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
    """Store, discard, restore and restored of a value."""
    store = call(program, steps.store, name)
    discard, restore = call(program, steps.discard, store), call(program, steps.restore, store)
    return store, discard, restore, call(program, steps.restored, restore)


def test_all_is_sound(step: Program) -> None:
    verify_program(step, "schedule")


def test_missing_discard(step: Program) -> None:
    _, discard, _, _ = way(step, "embedding")
    step.graph.erase_node(discard)
    broken(step, "%embedding is discarded 0 times, not once")


def test_double_discard(step: Program) -> None:
    _, discard, _, _ = way(step, "embedding")
    clone_after(discard, discard)
    broken(step, "%embedding is discarded 2 times, not once")


def test_discard_before_the_last_use(step: Program) -> None:
    store, discard, _, _ = way(step, "embedding")
    store.append(discard)
    broken(step, "it uses %embedding after its discard")


def test_use_after_the_discard(step: Program) -> None:
    _, _, _, back = way(step, "embedding")
    user = next(iter(back.users))
    user.replace_input_with(back, call(step, steps.store, "embedding").args[2])  # type: ignore[arg-type]
    broken(step, "it uses %embedding after its discard", "of the forward, which is planned to be on the host")


def test_restore_before_the_discard(step: Program) -> None:
    store, discard, restore, _ = way(step, "embedding")
    discard.prepend(restore)
    broken(step, "%embedding is restored before it is discarded")
    store.prepend(restore)
    broken(step, f"%{store.name} is used before it is made")


def test_a_value_that_does_not_come_back(step: Program) -> None:
    store, _, restore, back = way(step, "embedding")
    back.replace_all_uses_with(store.args[2])  # type: ignore[arg-type]
    step.graph.erase_node(back)
    broken(step, "the way back of %embedding is waited for 0 times, not once")
    step.graph.erase_node(restore)
    broken(step, "%embedding is restored 0 times, not once")


def test_a_value_that_comes_back_twice(step: Program) -> None:
    _, _, restore, back = way(step, "embedding")
    again = clone_after(restore, restore)
    broken(step, "%embedding is restored 2 times, not once", "is waited for 0 times, not once")
    step.graph.erase_node(again)
    clone_after(back, back)
    broken(step, "is waited for 2 times, not once")


def test_use_before_it_is_waited_for(step: Program) -> None:
    _, _, restore, back = way(step, "embedding")
    user = next(u for u in back.users if u.target in steps.COMPUTE)
    user.append(back)
    broken(step, f"%{back.name} is used before it is made")
    back.replace_all_uses_with(restore)
    broken(step, "it must be given value embedding, and is given restore")


def test_another_value_comes_back(step: Program) -> None:
    (*_, first), (*_, second) = way(step, "embedding"), way(step, "add_4")
    user = next(u for u in first.users if u.target in steps.COMPUTE)
    user.replace_input_with(first, second)
    broken(step, "it must be given value embedding, and is given")


def test_a_slot_that_is_held(step: Program) -> None:
    first, second = calls(step, steps.store)[:2]
    set_arg(second, 3, first.args[3])
    broken(step, f"host slot 0 still holds {first.args[1]}, which is not restored")


def test_a_slot_that_is_too_small_or_unknown(step: Program) -> None:
    assert step.plan is not None
    step.plan = replace(step.plan, host_slots=(8, *step.plan.host_slots[1:]))
    set_arg(calls(step, steps.store)[1], 3, 99)
    broken(step, "host slot 0 has 8 bytes and embedding needs 768", "there is no host slot 99")


def test_values_that_are_not_planned_to_leave(step: Program) -> None:
    assert step.plan is not None
    step.plan = replace(step.plan, residency=step.plan.residency | {"embedding": "keep"})
    broken(step, "%embedding is stored, and is planned to keep")


def test_a_value_under_another_name_or_twice(step: Program) -> None:
    store, *_ = way(step, "embedding")
    again = clone_after(store, store)
    broken(step, "%embedding is stored twice", "is discarded 0 times")
    step.graph.erase_node(again)
    set_arg(store, 1, "add_4")
    broken(step, "%embedding is stored as add_4, which it is not")


def leave(program: Program, node: fx.Node) -> None:
    """Let a value leave by hand, and never come back."""
    rt = program.graph.find_nodes(op="placeholder")[0]
    with program.graph.inserting_after(node):
        program.graph.call_function(steps.store, (rt, meta.note(node).source, node, 0))


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("gradient", "it is no result of a forward workset"),
        ("weight", "it is no result of a forward workset"),
        ("input", "it is no result of a forward workset"),
        ("loss", "the step returns it"),
    ],
)
def test_what_may_not_leave(what: str, reason: str) -> None:
    program = programs.up_to("topk", "schedule")
    nodes = list(program.graph.nodes)
    (output,) = program.graph.find_nodes(op="output")
    found: dict[str, Any] = {
        "gradient": next(n for n in nodes if n.name.startswith("d_add")),
        "weight": next(iter(call(program, steps.wait).users)),
        "input": next(n for n in nodes if n.name == "input_ids"),
        "loss": output.args[0],
    }
    leave(program, found[what])
    broken(program, f"%{found[what]} may not be offloaded: {reason}")


def test_a_discard_of_what_is_no_store(step: Program) -> None:
    _, discard, restore, _ = way(step, "embedding")
    with step.graph.inserting_after(restore):
        step.graph.call_function(steps.discard, (discard.args[0], restore))
    broken(step, f"discard is given {restore.name}, which is no store")
