"""The verifier of values that wait on the host: what may leave, and the way of each out and back.

As in verify_moves, the order of the nodes is the order in which the lanes are told what to do. A discard says that
the compute waits for the copy out; only after it may the copy back begin, and a restored value frees its host slot.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import fx

from oomc import meta, steps
from oomc.faults import Faults
from oomc.offloadable import value_bytes, why_not
from oomc.program import Program


def verify_values(program: Program, reached: frozenset[str], faults: Faults) -> None:
    """Check each value's way to the host and back, as far as the stage has it."""
    nodes = list(program.graph.nodes)
    position = {n: i for i, n in enumerate(nodes)}
    given: dict[tuple[Any, Any], list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if node.target in (steps.discard, steps.restore, steps.restored):
            given[node.target, node.args[1]].append(node)
    for node in nodes:
        if node.target is steps.store:
            _verify_stored(program, node, faults)
            _verify_way(node, given, position, faults)
    if "schedule" in reached:
        _verify_host_slots(program, nodes, faults)


def _verify_stored(program: Program, store: fx.Node, faults: Faults) -> None:
    """What is stored is planned to be, and may be."""
    _, name, value, _ = store.args
    if not isinstance(value, fx.Node) or meta.note(value).source != name:
        faults.add(f"%{value} is stored as {name}, which it is not", store)
        return
    reason = why_not(program, value)
    if reason:
        faults.add(f"%{value} may not be offloaded: {reason}", store)
    planned = program.plan.residency.get(str(name)) if program.plan is not None else None
    if planned != "offload":
        faults.add(f"%{value} is stored, and is planned to {planned or 'stay'}", store)
    if sum(user.target is steps.store for user in value.users) > 1:
        faults.add(f"%{value} is stored twice", store)


def _verify_way(
    store: fx.Node, given: dict[tuple[Any, Any], list[fx.Node]], position: dict[fx.Node, int], faults: Faults
) -> None:
    """A store is discarded once and then restored once; the value is used before the discard, or once it is back."""
    value: Any = store.args[2]
    discards, restores = given[steps.discard, store], given[steps.restore, store]
    if len(discards) != 1:
        faults.add(f"%{value} is discarded {len(discards)} times, not once", store)
    if len(restores) != 1:
        faults.add(f"%{value} is restored {len(restores)} times, not once", store)
    for discard in discards:
        for user in value.users:
            if position[user] > position[discard]:
                faults.add(f"it uses %{value} after its discard", user)
    for restore in restores:
        if any(position[restore] < position[discard] for discard in discards):
            faults.add(f"%{value} is restored before it is discarded", restore)
        waits = given[steps.restored, restore]
        if len(waits) != 1:
            faults.add(f"the way back of %{value} is waited for {len(waits)} times, not once", restore)


def _verify_host_slots(program: Program, nodes: list[fx.Node], faults: Faults) -> None:
    """A host slot is filled only when the value before is back, and is large enough."""
    assert program.plan is not None
    slots = program.plan.host_slots
    held: dict[int, str] = {}
    for node in nodes:
        if node.target is steps.store:
            _, name, value, slot = node.args
            if not isinstance(slot, int) or not 0 <= slot < len(slots):
                faults.add(f"there is no host slot {slot}: the plan has {len(slots)}", node)
                continue
            if slot in held:
                faults.add(f"host slot {slot} still holds {held[slot]}, which is not restored", node)
            need = value_bytes(program, value, program.plan.sizes)  # type: ignore[arg-type]
            if need > slots[slot]:
                faults.add(f"host slot {slot} has {slots[slot]:,} bytes and {name} needs {need:,}", node)
            held[slot] = str(name)
        elif node.target is steps.restored:
            held.pop(node.args[1].args[1].args[3], None)  # type: ignore[union-attr, arg-type]
