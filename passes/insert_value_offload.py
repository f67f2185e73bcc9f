"""insert_value_offload: values leave for the host between forward and backward where the plan says so.

Only reads the plan. A value whose residency is `offload` begins to leave as soon as it is made, goes from the device
after its last use in the forward, and comes back where the backward, or what it recomputes, uses it first. Schedule
gives both copies time, and each value its host slot.

Before:

    %h1, = run('form_b', 'forward', %w1, %h0)
    %h2, = run('form_b', 'forward', %w2, %h1)
    ...
    %d_h1, = run('form_b', 'backward', %w2, %h1, %d_h2)

After:

    %h1, = run('form_b', 'forward', %w1, %h0)
    %store = store('h1', %h1, -1)
    %h2, = run('form_b', 'forward', %w2, %h1)
    discard(%store)
    ...
    %restore = restore(%store)
    %h1_restored = restored(%restore)
    %d_h1, = run('form_b', 'backward', %w2, %h1_restored, %d_h2)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

from torch import fx

from oomc import meta, steps
from oomc.fxutil import add_call
from oomc.program import PassResult, Program


@dataclass(frozen=True)
class InsertValueOffload:
    """See the module's docstring."""

    name: str = "insert_value_offload"

    def __call__(self, program: Program) -> PassResult:
        assert program.step is not None and program.plan is not None
        graph, residency = program.step.graph, program.plan.residency
        order = {n: i for i, n in enumerate(graph.nodes)}
        changed = False
        for node in list(graph.nodes):
            note = meta.note(node)
            if node.target is not operator.getitem or note.phase != "forward":
                continue
            users = sorted(node.users, key=lambda n: order[n])
            later = [u for u in users if meta.note(u).phase != "forward"]
            if residency.get(note.source) == "offload" and later:
                _offload(node, [u for u in users if u not in later], later)
                changed = True
        return PassResult(program, changed)


def _offload(value: fx.Node, early: list[fx.Node], later: list[fx.Node]) -> None:
    """Let a value be on the host between the last of its early users and the first of the later ones."""
    graph, note = value.graph, meta.note(value)
    rt = value.args[0].args[0]  # type: ignore[union-attr]
    with graph.inserting_after(value):
        store = add_call(graph, steps.store, (rt, note.source, value, -1))
    with graph.inserting_after(early[-1] if early else store):
        discard = add_call(graph, steps.discard, (rt, store))
    with graph.inserting_before(later[0]):
        restore = add_call(graph, steps.restore, (rt, store))
        back = add_call(graph, steps.restored, (rt, restore), f"{value.name}_restored")
    for user in later:
        user.replace_input_with(value, back)
    first = meta.note(later[0])
    for node, origin in ((store, note), (discard, note), (restore, first), (back, first)):
        meta.set_note(node, replace(note, phase=origin.phase, block=origin.block))
    for node in (store, restore, back):
        meta.set_value(node, meta.value(value))
