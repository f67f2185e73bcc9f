"""The verifier passes what the passes make, and names the fault of each graph that is broken by hand."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from oomc import meta, ops, pipeline, steps
from oomc.errors import VerifyError
from oomc.fxutil import insert_call
from oomc.passes.choose_residency import CANDIDATES, Candidate, ChooseResidency
from oomc.plan import Updates
from oomc.program import Program
from oomc.simulate import project
from oomc.verify import verify_program
from oomc.worksets import Chunk, Workset
from tests import programs

aten = torch.ops.aten
Break = Callable[[Program], None]


@pytest.fixture
def step() -> Program:
    """Two top-k layers with dropout, scheduled with prefetch."""
    return programs.up_to("topk", "schedule")


@pytest.fixture
def tied() -> Program:
    """The same with tied embeddings and no dropout."""
    return programs.up_to("tied", "schedule")


def calls(program: Program, word: Any, *args: Any) -> list[fx.Node]:
    """The nodes of a word whose arguments after the runtime begin with `args`."""
    return [n for n in program.graph.nodes if n.target is word and n.args[1 : 1 + len(args)] == args]


def call(program: Program, word: Any, *args: Any) -> fx.Node:
    """The first of `calls`."""
    return calls(program, word, *args)[0]


def runs(program: Program, workset: str, variant: str) -> fx.Node:
    """The run of a workset's variant."""
    return next(
        n for n in program.graph.nodes if n.target in steps.COMPUTE and n.args[2] == variant
        and meta.note(n).workset == workset
    )  # fmt: skip


def set_arg(node: fx.Node, index: int, value: Any) -> None:
    """Replace one argument."""
    node.args = (*node.args[:index], value, *node.args[index + 1 :])


def clone_after(node: fx.Node, near: fx.Node) -> fx.Node:
    """A second such node behind `near`."""
    with node.graph.inserting_after(near):
        return node.graph.node_copy(node)


def last_use(wait: fx.Node) -> fx.Node:
    """The last node that uses the weights of a wait."""
    order = {n: i for i, n in enumerate(wait.graph.nodes)}
    return max((u for part in wait.users for u in part.users), key=lambda n: order[n])


def saved_args(run: fx.Node) -> list[int]:
    """Where a run is given values that the forward saved."""
    return [i for i, a in enumerate(run.args) if isinstance(a, fx.Node) and ":saved." in meta.note(a).source]


def broken(program: Program, *expected: str, after: str = "schedule") -> str:
    """The program is refused and the message says all that is expected."""
    with pytest.raises(VerifyError) as error:
        verify_program(program, after)
    for text in expected:
        assert text in str(error.value), str(error.value)
    return str(error.value)


# --- what the passes make is sound


@pytest.mark.parametrize("kind", ["topk", "tied", "mlp"])
def test_every_stage_is_sound(kind: str) -> None:
    bare = programs.bare(kind)
    for candidate in (CANDIDATES[0][0], CANDIDATES[0][-1], CANDIDATES[-1][-1]):
        for accumulate in (False, True):
            choose = ChooseResidency(programs.SIZES, candidate=candidate, accumulate=accumulate)
            pipeline.with_plan(bare, choose, verify=True)


def test_the_listing_shows_the_line_its_fault_and_the_users_line(step: Program) -> None:
    node = runs(step, "layers.1/3", "forward")
    set_arg(node, 1, "form_of_nothing")
    text = broken(step)
    assert text.startswith("after schedule: 1 fault\n")
    marked = [line for line in text.splitlines() if line.startswith(">")]
    assert len(marked) == 1
    assert f"%{node.name} = run_chunks('form_of_nothing'" in marked[0]
    assert "  ^ there is no form 'form_of_nothing' with variant 'forward'\n" in text
    assert "    in the model: return x + y\n" in text


def test_all_faults_are_shown_at_once(step: Program) -> None:
    for slab in ("layers.0", "layers.1"):
        step.graph.erase_node(call(step, steps.update, slab))
    text = broken(step, "layers.0 is updated 0 times, not 1", "layers.1 is updated 0 times, not 1")
    assert "2 faults" in text


# --- weights


def test_missing_wait(step: Program) -> None:
    wait = call(step, steps.wait)
    wait.replace_all_uses_with(wait.args[1])  # type: ignore[arg-type]
    wait.graph.erase_node(wait)
    broken(step, "before any wait for it", "waited for 0 times, not once")


def test_wait_after_use(step: Program) -> None:
    wait = call(step, steps.wait)
    last_use(wait).append(wait)
    broken(step, f"%{wait.name} is used before it is made")


def test_wait_after_release(step: Program) -> None:
    wait = call(step, steps.wait)
    last_use(wait).append(release := call(step, steps.release, wait.args[1]))
    wait.prepend(release)
    broken(step, "comes after its release", "after their release")


def test_early_release(step: Program) -> None:
    wait = calls(step, steps.wait)[-1]
    last_use(wait).prepend(call(step, steps.release, wait.args[1]))
    broken(step, "it uses weights of layers.0 after their release")


def test_double_release(step: Program) -> None:
    release = call(step, steps.release)
    clone_after(release, release)
    broken(step, "is released 2 times, not once")


def test_missing_release(step: Program) -> None:
    step.graph.erase_node(call(step, steps.release))
    broken(step, "is released 0 times, not once", "still holds prologue, which is not released")


def test_fetch_into_a_held_slot(step: Program) -> None:
    first, second, *_ = calls(step, steps.fetch)
    set_arg(second, 2, first.args[2])
    broken(step, "slot 0 still holds prologue, which is not released")


def test_fetch_before_the_release_of_the_slots_last_holder(step: Program) -> None:
    release = call(step, steps.release)
    after = next(f for f in calls(step, steps.fetch) if f.args[2] == 0 and f is not release.args[1])
    release.prepend(after)
    broken(step, "still holds")


def test_slot_that_is_too_small_or_unknown(step: Program) -> None:
    assert step.plan is not None
    step.plan = replace(step.plan, slots=(256, *step.plan.slots[1:]))
    set_arg(calls(step, steps.fetch)[1], 2, 9)
    broken(step, "slot 0 has 256 bytes and", "there is no slot 9")


def test_weights_of_another_layer(step: Program) -> None:
    set_arg(call(step, steps.fetch, "layers.0"), 1, "layers.1")
    broken(step, "must be given parameter layers.0.", "is given parameter layers.1.")


def test_weights_in_another_order(step: Program) -> None:
    node = runs(step, "layers.0/0", "forward")
    norm = [i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and meta.tensor(a) is not None][-4:-2]
    first, second = (node.args[i] for i in norm)
    set_arg(node, norm[0], second)
    set_arg(node, norm[1], first)
    broken(step, "must be given parameter layers.0.norm.weight, and is given parameter layers.0.norm.bias")


def test_bare_words_that_are_left(step: Program) -> None:
    wait = call(step, steps.wait)
    with step.graph.inserting_before(wait):
        holder = step.graph.call_function(steps.weights, (wait.args[0], "prologue"))
    wait.replace_all_uses_with(holder)
    broken(step, "weights is left in the graph")


# --- updates


def test_double_update(step: Program) -> None:
    update = call(step, steps.update, "layers.1")
    clone_after(update, update)
    broken(step, "layers.1 is updated 2 times, not 1")


def test_missing_update(step: Program) -> None:
    step.graph.erase_node(call(step, steps.update, "prologue"))
    broken(step, "prologue is updated 0 times, not 1")


def test_update_before_the_last_offload(tied: Program) -> None:
    update = next(n for n in calls(tied, steps.update) if len(n.args[2]) == 2)  # type: ignore[arg-type]
    slab = str(update.args[1])
    first, last = calls(tied, steps.offload, slab)
    set_arg(update, 2, (first,))
    last.prepend(update)
    broken(tied, f"{slab} is updated before the last offload", "not made from all 2 offloads")


def test_update_of_only_one_contribution(tied: Program) -> None:
    update = next(n for n in calls(tied, steps.update) if len(n.args[2]) == 2)  # type: ignore[arg-type]
    set_arg(update, 2, update.args[2][1:])  # type: ignore[index]
    broken(tied, "not made from all 2 offloads")


@pytest.mark.parametrize("word", [steps.offload, steps.update])
def test_wrong_mode(tied: Program, word: Any) -> None:
    node = next(n for n in calls(tied, word) if n.args[-1] == "sum")
    set_arg(node, len(node.args) - 1, "update")
    broken(tied, "with 2 contributions")


def test_a_sum_where_there_is_one_contribution(step: Program) -> None:
    set_arg(call(step, steps.offload, "layers.0"), 4, "sum")
    broken(step, "the mode is sum for layers.0, with 1 contribution; it must be update")


def clipped(resident: tuple[str, ...] = ()) -> Program:
    """A step whose gradients are kept until their norm is known."""
    return programs.with_own_step(
        pipeline.with_plan(
            programs.bare("mlp"),
            ChooseResidency(
                programs.SIZES, candidate=Candidate(8, 1, 1, resident=resident), updates=Updates(keep=True)
            ),
            verify=True,
        )
    )  # fmt: skip


def test_kept_gradients_are_applied_once() -> None:
    program = clipped()
    program.graph.erase_node(call(program, steps.apply))
    broken(program, "kept gradients are applied 0 times, not once")


def test_an_update_before_the_norm() -> None:
    program = clipped()
    offload = call(program, steps.offload)
    with program.graph.inserting_after(offload):
        program.graph.call_function(steps.update, (offload.args[0], offload.args[1], (offload,), "update"))
    broken(program, "is updated before the norm of all gradients is known")


def test_kept_gradients_that_are_applied_too_soon() -> None:
    program = clipped()
    apply, last = call(program, steps.apply), calls(program, steps.offload)[-1]
    set_arg(apply, 1, tuple(c for c in apply.args[1] if c is not last))  # type: ignore[union-attr]
    last.prepend(apply)
    broken(program, "it is not made from all")


def test_gradients_kept_on_the_device_stay() -> None:
    program = clipped(resident=("layers.0",))
    carried = call(program, steps.retire_carried, "layers.0")
    offload = call(program, steps.offload, "layers.0")
    program.graph.erase_node(carried)
    with program.graph.inserting_after(offload):
        program.graph.call_function(steps.retire, (offload.args[0], offload))
    broken(program, "the gradients of layers.0 are kept on the device, and retired before they are applied")


def test_gradients_are_retired_here_or_in_the_next_step(step: Program) -> None:
    carried = calls(step, steps.retire_carried)[-1]
    offload = call(step, steps.offload, carried.args[1])
    with step.graph.inserting_after(offload):
        step.graph.call_function(steps.retire, (offload.args[0], offload))
    broken(step, f"the offload of {carried.args[1]} is retired 2 times, not once")


def test_gradients_that_nobody_retires(step: Program) -> None:
    carried = calls(step, steps.retire_carried)[-1]
    step.graph.erase_node(carried)
    broken(step, f"the offload of {carried.args[1]} is retired 0 times, not once")


def test_carried_gradients_make_room_before_new_ones_come(step: Program) -> None:
    carried = calls(step, steps.retire_carried)[-1]
    call(step, steps.offload, carried.args[1]).append(carried)
    broken(step, "are retired after new ones are offloaded")


def test_weights_on_the_device_are_not_used_after_their_update() -> None:
    program = programs.with_own_step(
        pipeline.with_plan(
            programs.bare("mlp"),
            ChooseResidency(programs.SIZES, candidate=Candidate(8, 1, 1, resident=("layers.1",))), verify=True,
        )
    )  # fmt: skip
    held = [n for n in calls(program, steps.device_weights) if n.args[1] == "layers.1"][-1]
    user = [user for part in held.users for user in part.users][-1]
    offload = call(program, steps.offload, "layers.1")
    grads = offload.args[3]
    with program.graph.inserting_after(offload):
        again = program.graph.node_copy(user)
    meta.set_note(again, meta.note(user))
    assert grads
    broken(program, "it uses weights of layers.1 after")


def test_update_of_a_micro_batch() -> None:
    program = programs.up_to("mlp", "schedule", accumulate=True)
    offload = call(program, steps.offload)
    with program.graph.inserting_after(offload):
        program.graph.call_function(steps.update, (offload.args[0], offload.args[1], (offload,), "sum"))
    broken(program, "is updated 1 times, not 0")


def test_fetch_before_await_update(step: Program) -> None:
    fetch = call(step, steps.fetch, "layers.1")
    fetch.append(call(step, steps.await_update, "layers.1"))
    broken(step, "layers.1 is fetched before await_update of it")


def test_missing_await_update(step: Program) -> None:
    step.graph.erase_node(call(step, steps.await_update, "prologue"))
    broken(step, "prologue is fetched before await_update of it")


def test_fetch_after_update(step: Program) -> None:
    update = call(step, steps.update, "layers.1")
    fetch = call(step, steps.fetch, "layers.0")
    last = list(step.graph.nodes)[-2]
    with step.graph.inserting_after(last):
        new = step.graph.call_function(steps.fetch, (update.args[0], "layers.1", fetch.args[2]))
        wait = step.graph.call_function(steps.wait, (update.args[0], new))
        release = step.graph.call_function(steps.release, (update.args[0], new))
    for after, node in ((last, new), (new, wait), (wait, release)):
        after.append(node)
    broken(step, "layers.1 is fetched after its update")


def test_copy_that_may_run_into_the_update(step: Program) -> None:
    wait = next(w for w in reversed(calls(step, steps.wait)) if w.args[1].args[1] == "layers.1")  # type: ignore[union-attr]
    end = call(step, steps.update, "layers.1")
    with step.graph.inserting_after(end):
        again = step.graph.call_function(steps.wait, wait.args)
    parts = list(wait.users)
    for part in parts:
        part.replace_input_with(wait, again)
    step.graph.erase_node(wait)
    for part in parts:
        again.append(part)
    broken(step, "is used before it is made")
    for part in parts:  # nothing uses the weights: only the copy itself is late
        part.replace_all_uses_with(step.graph.find_nodes(op="placeholder")[1])
    broken(step, "the copy of layers.1 may still run when")


# --- gradients


def test_missing_retire(step: Program) -> None:
    step.graph.erase_node(call(step, steps.retire))
    broken(step, "is retired 0 times, not once")


def test_double_retire(step: Program) -> None:
    retire = call(step, steps.retire)
    clone_after(retire, retire)
    broken(step, "is retired 2 times, not once")


def test_retire_before_its_offload(step: Program) -> None:
    retire = call(step, steps.retire)
    retire.args[1].prepend(retire)  # type: ignore[union-attr]
    broken(step, "is used before it is made")


def test_gradient_used_after_its_offload(step: Program) -> None:
    offload = call(step, steps.offload, "layers.1")
    grad = offload.args[3][0]  # type: ignore[index]
    last = list(step.graph.nodes)[-2]
    with step.graph.inserting_after(last):
        step.graph.call_function(steps.add, (grad, grad))
    broken(step, f"it uses the gradient %{grad} after its offload")


def test_two_offloads_of_one_gradient(step: Program) -> None:
    offload = call(step, steps.offload, "layers.0")
    again = clone_after(offload, offload)
    with step.graph.inserting_after(again):
        step.graph.call_function(steps.retire, (offload.args[0], again))
    broken(step, "the gradient of layers.0.router.weight is offloaded a second time")


def test_missing_offload(step: Program) -> None:
    offload = call(step, steps.offload, "layers.0")
    for node in (call(step, steps.update, "layers.0"), call(step, steps.retire, offload), offload):
        step.graph.erase_node(node)
    broken(step, "the gradient of layers.0.up from layers.0/3 is never offloaded")


def test_gradient_left_out_of_an_offload(step: Program) -> None:
    offload = call(step, steps.offload, "layers.0")
    set_arg(offload, 2, offload.args[2][1:])  # type: ignore[index]
    set_arg(offload, 3, offload.args[3][1:])  # type: ignore[index]
    broken(step, "the gradient of layers.0.router.weight from layers.0/3 is never offloaded")


def test_gradients_under_each_others_names(step: Program) -> None:
    offload = call(step, steps.offload, "layers.0")
    grads: Any = offload.args[3]
    set_arg(offload, 3, (grads[1], grads[0], *grads[2:]))
    broken(step, "the gradient of layers.0.router.weight has the contribution of layers.0/3 by mistake")


def test_missing_add(step: Program) -> None:
    add = call(step, steps.add)
    add.replace_all_uses_with(add.args[0])  # type: ignore[arg-type]
    step.graph.erase_node(add)
    broken(step, "lacks the contribution of layers.1/0")


def test_gradient_counted_twice(step: Program) -> None:
    add = call(step, steps.add)
    add.args = (add.args[0], add.args[0])
    broken(step, "has the contribution of layers.1/3 twice")


def test_backward_from_what_is_not_the_loss(step: Program) -> None:
    start = call(step, steps.ones_like)
    start.args = (start.args[0].args[0].args[3],)  # type: ignore[union-attr]
    broken(step, "it starts the backward from what is not the loss")


# --- the count of valid labels


def test_labels_that_are_not_counted_or_twice(step: Program) -> None:
    count = call(step, steps.count)
    clone_after(count, count)
    broken(step, "the valid labels are counted 2 times, not 1")
    for node in calls(step, steps.count):
        step.graph.erase_node(node)
    broken(step, "the valid labels are counted 0 times, not 1")


def test_another_value_as_the_count(step: Program) -> None:
    count = call(step, steps.count)
    loss = call(step, steps.ones_like).args[0]
    set_arg(count, 1, loss)
    loss.append(count)  # type: ignore[union-attr]
    broken(step, f"%{loss} is not the number of valid labels")


def test_a_count_where_the_loss_has_none(step: Program) -> None:
    (output,) = step.forward.graph.find_nodes(op="output")
    before = output.args
    output.args = ((step.loss,),)
    try:
        broken(step, "the valid labels are counted 1 times, not 0", "is not the number of valid labels")
    finally:
        output.args = before  # the forward graph is shared


def test_labels_that_are_counted_late(step: Program) -> None:
    calls(step, steps.offload)[0].append(call(step, steps.count))
    broken(step, "the valid labels are counted after gradients have left")


def test_labels_that_are_counted_again(step: Program) -> None:
    count = call(step, steps.count)
    part: Any = count.args[1]
    with step.graph.inserting_before(count):
        again = step.graph.call_function(part.args[0].target, part.args[0].args)
        copy_of_part = step.graph.call_function(operator.getitem, (again, part.args[1]))
    for new, old in ((again, part.args[0]), (copy_of_part, part)):
        meta.set_value(new, meta.value(old))
        meta.set_note(new, replace(meta.note(old), phase="recompute"))
    set_arg(again, 2, "recompute")
    set_arg(count, 1, copy_of_part)
    broken(step, "is computed again: the count comes from the forward")


# --- what is computed from what


def test_recomputed_top_k(step: Program) -> None:
    backward = runs(step, "layers.0/3", "backward")
    forward = runs(step, "layers.0/3", "forward")
    position = saved_args(backward)[0]
    saved = backward.args[position]
    with step.graph.inserting_before(backward):
        again = step.graph.call_function(steps.run_chunks, forward.args)
        part = step.graph.call_function(operator.getitem, (again, saved.args[1]))  # type: ignore[union-attr]
    meta.set_note(again, replace(meta.note(forward), phase="forward"))
    for new, old in ((again, forward), (part, saved)):
        meta.set_value(new, meta.value(old))  # type: ignore[arg-type]
    backward.replace_input_with(saved, part)  # type: ignore[arg-type]
    broken(step, "layers.0/3 runs forward 2 times, not 1")


def test_saved_value_from_a_recompute(step: Program) -> None:
    """The recompute has no such result: what is never recomputed is an input of it."""
    backward = runs(step, "layers.1/3", "backward")
    rerun = runs(step, "layers.1/1", "recompute")
    position = saved_args(backward)[0]
    with step.graph.inserting_after(rerun):
        part = step.graph.call_function(operator.getitem, (rerun, 0))
    meta.set_note(part, meta.note(rerun))
    set_arg(backward, position, part)
    broken(step, "must be given saved value 0 of layers.1/3", "what is never recomputed comes from the first forward")


def test_saved_values_of_another_layer(step: Program) -> None:
    backward, other = runs(step, "layers.0/3", "backward"), runs(step, "layers.1/3", "backward")
    for position in saved_args(backward):
        set_arg(backward, position, other.args[position])
    broken(step, "must be given saved value 0 of layers.0/3, and is given saved value 0 of layers.1/3")


def test_saved_values_in_another_order(step: Program) -> None:
    backward = runs(step, "layers.0/3", "backward")
    first, second, *_ = saved_args(backward)
    a, b = backward.args[first], backward.args[second]
    set_arg(backward, first, b)
    set_arg(backward, second, a)
    broken(step, "must be given saved value 0 of layers.0/3, and is given saved value 1 of layers.0/3")


def test_dropout_state_of_another_block(step: Program) -> None:
    backward = runs(step, "layers.0/2", "backward")
    first, second = calls(step, steps.rng)
    backward.replace_input_with(first, second)
    broken(step, "must be given dropout state of block 1, and is given dropout state of block 2")


def test_dropout_state_drawn_again(step: Program) -> None:
    backward = runs(step, "layers.0/2", "backward")
    first = call(step, steps.rng)
    with step.graph.inserting_before(backward):
        again = step.graph.node_copy(first)
    backward.replace_input_with(first, again)
    broken(step, "the dropout state of block 1 is drawn a second time")


def test_value_that_was_to_be_recomputed(step: Program) -> None:
    backward = runs(step, "layers.0/1", steps.IN_PLACE)
    rerun = next(a for a in backward.args if isinstance(a, fx.Node) and meta.note(a).phase == "recompute")
    kept = next(n for n in step.graph.nodes if meta.note(n) == replace(meta.note(rerun), phase="forward"))
    backward.replace_input_with(rerun, kept)
    broken(step, "of the forward, which is planned to be recomputed")


# --- regenerated boundaries


@pytest.fixture
def regenerated() -> Program:
    """The embedding and what the first layer makes of it are regenerated for the backward of the second."""
    return programs.regenerated("topk", programs.boundaries("topk"))


def regenerating(program: Program, workset: str) -> fx.Node:
    """The run that regenerates what a workset made."""
    return next(n for n in program.graph.nodes if n.target in steps.COMPUTE and meta.note(n).workset == workset
                and meta.note(n).phase == "regenerate")  # fmt: skip


def fetch_for(run: fx.Node) -> fx.Node:
    """The fetch of the weights that a run takes."""
    holders = [a.args[0] for a in run.all_input_nodes if a.target is operator.getitem]
    (wait,) = {h for h in holders if isinstance(h, fx.Node) and h.target is steps.wait}
    assert isinstance(wait.args[1], fx.Node)
    return wait.args[1]


def test_boundary_that_was_to_be_regenerated(regenerated: Program) -> None:
    """It would be on the device all the time."""
    backward = runs(regenerated, "layers.1/3", "backward")
    copy_of = next(a for a in backward.all_input_nodes if meta.note(a).phase == "regenerate")
    kept = next(n for n in regenerated.graph.nodes if meta.note(n).source == meta.note(copy_of).source
                and meta.note(n).phase == "forward")  # fmt: skip
    backward.replace_input_with(copy_of, kept)
    broken(regenerated, "of the forward, which is planned to be recomputed")


def test_boundary_that_was_to_be_kept(regenerated: Program) -> None:
    assert regenerated.plan is not None
    where = regenerated.plan.residency | {programs.boundaries("topk")[1]: "keep"}
    regenerated.plan = replace(regenerated.plan, residency=where)
    broken(regenerated, "which is computed again and is planned to keep")


def test_boundary_regenerated_too_early(regenerated: Program) -> None:
    """For the last block's backward, where nothing needs it yet."""
    run = regenerating(regenerated, "prologue/0")
    backward = runs(regenerated, "epilogue/0", "backward")
    for argument in run.all_input_nodes:
        if argument.target is operator.getitem:
            backward.prepend(argument.args[0].args[1])  # type: ignore[union-attr, arg-type]
            backward.prepend(argument.args[0])  # type: ignore[arg-type]
            backward.prepend(argument)
    backward.prepend(run)
    broken(regenerated, "it regenerates prologue/0 for block 2, and stands before %epilogue_0_backward")


def test_boundary_regenerated_for_a_block_that_does_not_need_it(regenerated: Program) -> None:
    for node in regenerated.graph.nodes:
        if meta.note(node).phase == "regenerate":
            meta.set_note(node, replace(meta.note(node), block=3))
    broken(regenerated, "nothing in block 3 uses what it regenerates: it can be made later")


def test_boundary_regenerated_twice(regenerated: Program) -> None:
    run = regenerating(regenerated, "prologue/0")
    backward = runs(regenerated, "layers.1/3", "backward")
    value = next(iter(run.users))
    with regenerated.graph.inserting_before(next(n for n in regenerated.graph.nodes if n is value).next):
        again = regenerated.graph.node_copy(run)
        part = regenerated.graph.node_copy(value)
    set_arg(part, 0, again)
    user = next(n for n in value.users if meta.note(n).phase == "recompute" or n is not backward)
    user.replace_input_with(value, part)
    broken(regenerated, "value embedding is regenerated a second time")


def test_boundary_regenerated_from_another_one(regenerated: Program) -> None:
    run = regenerating(regenerated, "layers.0/0")
    own = next(iter(regenerating(regenerated, "prologue/0").users))
    other = next(n for n in regenerated.graph.nodes if meta.note(n).source == programs.boundaries("topk")[1]
                 and meta.note(n).phase == "forward")  # fmt: skip
    run.replace_input_with(own, other)
    broken(regenerated, "must be given value embedding, and is given value")


def test_boundary_regenerated_with_another_choice_of_experts(regenerated: Program) -> None:
    run, other = regenerating(regenerated, "layers.0/3"), runs(regenerated, "layers.1/3", "backward")
    own = [a for a in run.all_input_nodes if ":saved." in meta.note(a).source]
    theirs = [a for a in other.all_input_nodes if ":saved." in meta.note(a).source]
    run.replace_input_with(own[0], theirs[0])
    broken(regenerated, "must be given saved value 0 of layers.0/3", "what is never recomputed comes from the first")


def test_boundary_regenerated_with_another_dropout_state(regenerated: Program) -> None:
    run = regenerating(regenerated, "layers.0/2")
    first, second = calls(regenerated, steps.rng)
    run.replace_input_with(first, second)
    broken(regenerated, "must be given dropout state of block 1, and is given dropout state of block 2")


def test_boundary_regenerated_in_other_chunks(regenerated: Program) -> None:
    set_arg(regenerating(regenerated, "layers.0/0"), 3, (1, 3))
    broken(regenerated, "it runs in chunks of (1, 3), planned is (1, 8)")


def test_weights_released_before_they_regenerate(regenerated: Program) -> None:
    run = regenerating(regenerated, "layers.0/3")
    (release,) = calls(regenerated, steps.release, fetch_for(run))
    run.prepend(release)
    broken(regenerated, "it uses weights of layers.0 after their release")


def test_weights_that_regenerate_in_a_slot_that_is_taken(regenerated: Program) -> None:
    own, other = fetch_for(regenerating(regenerated, "layers.0/3")), calls(regenerated, steps.fetch, "layers.1")[-1]
    set_arg(other, 2, own.args[2])
    broken(regenerated, "which is not released")


def test_value_of_another_layer(step: Program) -> None:
    first, second = runs(step, "layers.0/0", "recompute"), runs(step, "layers.1/0", "recompute")
    own, other = (next(a for a in n.all_input_nodes if meta.note(a).phase == "forward") for n in (first, second))
    second.replace_input_with(other, own)
    broken(step, "must be given value", "and is given value embedding")


def test_wrong_chunk(step: Program) -> None:
    node = calls(step, steps.run_chunks)[1]
    set_arg(node, 3, (1, 3))
    broken(step, "it runs in chunks of (1, 3), planned is (1, 8)")


def test_wrong_variant_and_arity(step: Program) -> None:
    set_arg(runs(step, "layers.0/0", "recompute"), 2, "backward")
    broken(step, "arguments, but")


def test_swapped_sizes(step: Program) -> None:
    node = runs(step, "layers.0/0", "forward")
    set_arg(node, 4, node.args[5])
    broken(step, "must be given size B, and is given size S")


def test_wrong_size(step: Program) -> None:
    call_of = next(n for n in step.graph.nodes if n.target is steps.size)
    set_arg(call_of, 1, 1 - call_of.args[1])
    broken(step, "must be given size")


def test_other_output(step: Program) -> None:
    (output,) = step.graph.find_nodes(op="output")
    output.args = (call(step, steps.run_chunks).next,)
    broken(step, "the step does not return the loss")


def test_unknown_word_and_unknown_slab(step: Program) -> None:
    offload = call(step, steps.offload)
    set_arg(offload, 1, "layers.9")
    with step.graph.inserting_before(offload):
        step.graph.call_function(torch.add, (offload.args[3][0], 1))  # type: ignore[index]
    broken(step, "there is no slab 'layers.9'", "is no word of the step graph")


def test_projection_over_the_budget(step: Program) -> None:
    projection = project(step, programs.profiler("topk"))
    verify_program(step, "schedule", projection, projection.peak)
    with pytest.raises(VerifyError, match=f"allowed {projection.peak - 1:,}"):
        verify_program(step, "schedule", projection, projection.peak - 1)


def test_code_that_is_not_that_of_the_graph(step: Program) -> None:
    first, second = calls(step, steps.retire)[:2]
    second.append(first)  # sound as a graph; but the code still has the other order
    broken(step, "recompile() is missing")


# --- forward graph, worksets and forms


def graph_nodes(program: Program, name: str) -> list[fx.Node]:
    return [n for n in program.forward.graph.nodes if name in str(n.target)]


def idle_cast(program: Program) -> None:
    node = graph_nodes(program, "relu")[0]
    with node.graph.inserting_after(node):
        insert_call(node.graph, aten.to.dtype, (node, torch.float32))


def random_op(program: Program) -> None:
    node = graph_nodes(program, "relu")[0]
    with node.graph.inserting_after(node):
        insert_call(node.graph, aten.rand_like.default, (node,))


def attention_dropout(program: Program) -> None:
    node = graph_nodes(program, "relu")[0]
    with node.graph.inserting_after(node):
        insert_call(node.graph, aten.scaled_dot_product_attention.default, (node, node, node, None, 0.5))


def assertion(program: Program) -> None:
    node = graph_nodes(program, "relu")[0]
    with node.graph.inserting_after(node):
        node.graph.call_function(aten._assert_tensor_metadata.default, (node,))


def no_value(program: Program) -> None:
    meta.set_value(graph_nodes(program, "relu")[0], None)


def lost_input(program: Program) -> None:
    program.inputs.pop()


def not_the_loss(program: Program) -> None:
    (output,) = program.forward.graph.find_nodes(op="output")
    output.args = ((graph_nodes(program, "relu")[0],),)


def not_the_count(program: Program) -> None:
    (output,) = program.forward.graph.find_nodes(op="output")
    output.args = ((program.loss, graph_nodes(program, "relu")[0]),)


def three_outputs(program: Program) -> None:
    (output,) = program.forward.graph.find_nodes(op="output")
    output.args = ((program.loss, program.count, program.count),)


def out_of_order(program: Program) -> None:
    graph_nodes(program, "relu")[0].append(graph_nodes(program, "embedding")[0])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (idle_cast, "casts to the dtype and device that the value already has"),
        (random_op, "draws random numbers"),
        (attention_dropout, "draws random numbers"),
        (assertion, "an assert is left"),
        (no_value, "the node has no value"),
        (lost_input, "placeholders, but the program has"),
        (not_the_loss, "the first output is no scalar loss"),
        (not_the_count, "the second output is no count of labels"),
        (three_outputs, "the output is not the tuple of the loss, or of the loss and its count"),
        (out_of_order, "is used before it is made"),
    ],
)
def test_broken_forward_graph(change: Break, text: str) -> None:
    program = programs.after("mlp", "canonicalize")
    change(program)
    broken(program, text, after="canonicalize")


def test_symbol_that_was_lost() -> None:
    program = programs.captured(programs.model("mlp"))  # of its own, with its own symbols
    program = pipeline.run_passes(program, pipeline.MODEL_PASSES[:1])
    size = meta.value(program.forward.graph.find_nodes(op="placeholder")[-1]).shape[1]
    assert int(size) == 12  # taking the number fixes the symbol: what a careless pass does
    broken(program, "was a symbol and is now 12", after="canonicalize")


def two_worksets(program: Program) -> None:
    first, second = program.blocks[1].worksets[0], program.blocks[2].worksets[0]
    second.nodes.insert(0, first.nodes[0])


def no_workset(program: Program) -> None:
    program.blocks[1].worksets[0].nodes.pop(0)


def worksets_out_of_order(program: Program) -> None:
    program.blocks[1].worksets, program.blocks[2].worksets = program.blocks[2].worksets, program.blocks[1].worksets


def lost_output(program: Program) -> None:
    program.blocks[0].worksets[0].outputs.pop()


def two_slabs(program: Program) -> None:
    program.slabs.append(replace(program.slabs[1], name="again"))


def no_slab(program: Program) -> None:
    program.slabs.pop()


def wrong_users(program: Program) -> None:
    program.slabs[1] = replace(program.slabs[1], users=(0,))


def other_form(program: Program) -> None:
    program.blocks[1].worksets[0].form = program.blocks[0].worksets[0].form


def own_key(program: Program) -> None:
    form = next(iter(program.forms.values()))
    form.key = "form_12345678"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (two_worksets, "it is in two worksets, layers.0/0 and layers.1/0"),
        (no_workset, "it is in no workset"),
        (worksets_out_of_order, "which runs later"),
        (lost_output, "is none of its outputs"),
        (two_slabs, "parameter layers.0.linear.weight is in 2 slabs"),
        (no_slab, "parameter head.weight is in 0 slabs"),
        (wrong_users, "is used by blocks [1] and says (0,)"),
        (other_form, "passes"),
        (own_key, "the key does not follow from the structure"),
    ],
)
def test_broken_worksets(change: Break, text: str) -> None:
    program = programs.after("mlp", "partition_worksets")
    change(program)
    broken(program, text, after="partition_worksets")


def in_tiles(program: Program, name: str, chunk: Chunk) -> Workset:
    """A workset that is said to run in chunks."""
    workset = next(w for b in program.blocks for w in b.worksets if w.name == name)
    workset.chunk = program.forms[workset.form].chunk = chunk
    return workset


def chunks_of_attention(program: Program) -> None:
    in_tiles(program, "layers.0/1", "tokens")


def chunks_of_an_unknown_op(program: Program) -> None:
    in_tiles(program, "layers.0/2", "rows")


def chunks_that_use_their_sum(program: Program) -> None:
    workset = in_tiles(program, "epilogue/0", "tokens")
    workset.nodes += program.blocks[-1].worksets.pop().nodes


def chunks_of_an_expert_order(program: Program) -> None:
    workset = in_tiles(program, "layers.0/3", "tokens")
    workset.outputs.append(next(n for n in workset.nodes if n.target is ops.dispatch))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (chunks_of_attention, "layers.0/1 runs in chunks of tokens, and this mixes them"),
        (chunks_of_an_unknown_op, "layers.0/2 runs in chunks of rows, and this mixes them"),
        (chunks_that_use_their_sum, "epilogue/0 uses the sum of all its chunks before they have run"),
        (chunks_of_an_expert_order, "layers.0/3 runs in chunks of tokens, and this cannot be cut"),
    ],
)
def test_chunks_that_would_compute_something_else(change: Break, text: str) -> None:
    program = programs.after("topk", "partition_worksets")
    change(program)
    broken(program, text, after="partition_worksets")


def test_broken_forms() -> None:
    program = programs.bare("topk")
    form = copy.copy(program.forms[program.blocks[1].worksets[-1].form])
    program.forms = program.forms | {form.key: form}
    assert form.backward is not None
    form.backward = copy.deepcopy(form.backward)
    form.backward_takes = form.backward_takes[1:]
    graph = form.backward.graph
    node = next(n for n in graph.nodes if n.op == "call_function")
    with graph.inserting_before(node):
        insert_call(graph, aten.topk.default, (node.all_input_nodes[0], 1))
        insert_call(graph, aten.relu_.default, (node.all_input_nodes[0],))
    text = broken(program, "it is never recomputed", "it writes to one of its inputs", after="assemble")
    assert f"form {form.key}, backward:" in text
    assert "it takes" in text


def test_gradients_of_another_shape() -> None:
    program = programs.after("mlp", "differentiate")
    form = program.forms[program.blocks[1].worksets[0].form]
    assert form.backward is not None
    (output,) = form.backward.graph.find_nodes(op="output")
    output.args = (tuple(reversed(output.args[0])),)
    broken(program, "it gives [", after="differentiate")


def test_dropout_is_no_random_op() -> None:
    program = programs.after("topk", "canonicalize")
    assert any(n.target is ops.dropout for n in program.forward.graph.nodes)
    verify_program(program, "canonicalize")
