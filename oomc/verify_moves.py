"""The verifier of movement in a step graph: fetches and their slots, releases, gradients that leave, updates.

The order of the nodes is the order in which the lanes are told what to do: a release says that the compute told so far
is the last user of a slot, a retire that the gradients have left, an update starts as soon as its copies arrive.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from torch import fx

from oomc import steps
from oomc.faults import Faults
from oomc.program import Program


@dataclass
class _Copy:
    """One fetch: where its wait and its release stand."""

    fetch: fx.Node
    slab: str
    waits: list[fx.Node] = field(default_factory=list)
    releases: list[fx.Node] = field(default_factory=list)


def verify_moves(program: Program, reached: frozenset[str], faults: Faults) -> None:
    """Check how weights come and gradients go, as far as the stage has them."""
    nodes = list(program.graph.nodes)
    position = {n: i for i, n in enumerate(nodes)}
    copies = {n: _Copy(n, str(n.args[1])) for n in nodes if n.target is steps.fetch}
    for node in nodes:
        if node.target is steps.wait:
            copies[node.args[1]].waits.append(node)
        elif node.target is steps.release:
            copies[node.args[1]].releases.append(node)
    offloads: dict[str, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if node.target is steps.offload:
            offloads[str(node.args[1])].append(node)
    for copy in copies.values():
        _verify_fetch(copy, position, faults)
    if "schedule" in reached:
        _verify_slots(program, nodes, faults)
    _verify_offloads(program, nodes, offloads, position, faults)
    if "insert_updates" in reached:
        _verify_updates(program, nodes, offloads, position, faults)
        _verify_fresh(copies, offloads, nodes, position, faults)


def _verify_fetch(copy: _Copy, position: dict[fx.Node, int], faults: Faults) -> None:
    """One wait, one release after it, and all use of the weights between them."""
    if len(copy.waits) != 1:
        faults.add(f"the fetch of {copy.slab} is waited for {len(copy.waits)} times, not once", copy.fetch)
    if len(copy.releases) != 1:
        faults.add(f"the fetch of {copy.slab} is released {len(copy.releases)} times, not once", copy.fetch)
    if not copy.releases:
        return
    end = position[copy.releases[0]]
    for wait in copy.waits:
        if position[wait] > end:
            faults.add(f"the wait for {copy.slab} comes after its release", wait)
        for user in [u for part in wait.users for u in part.users]:
            if position[user] > end:
                faults.add(f"it uses weights of {copy.slab} after their release", user)


def _verify_slots(program: Program, nodes: list[fx.Node], faults: Faults) -> None:
    """A slot is filled only when it is free, and is large enough."""
    assert program.plan is not None
    slots = program.plan.slots
    sizes = {s.name: s.layout.weight_bytes for s in program.slabs}
    held: dict[int, str] = {}
    for node in nodes:
        if node.target is steps.fetch:
            _, slab, slot = node.args
            if not isinstance(slot, int) or not 0 <= slot < len(slots):
                faults.add(f"there is no slot {slot}: the plan has {len(slots)}", node)
                continue
            if slot in held:
                faults.add(f"slot {slot} still holds {held[slot]}, which is not released", node)
            if sizes[str(slab)] > slots[slot]:
                faults.add(f"slot {slot} has {slots[slot]:,} bytes and {slab} needs {sizes[str(slab)]:,}", node)
            held[slot] = str(slab)
        elif node.target is steps.release:
            held.pop(node.args[1].args[2], None)  # type: ignore[union-attr, arg-type]


def _verify_offloads(
    program: Program, nodes: list[fx.Node], offloads: dict[str, list[fx.Node]], position: dict[fx.Node, int],
    faults: Faults,
) -> None:  # fmt: skip
    """Each copy of gradients is retired once, after it; until then, nothing else uses them, and after it neither."""
    retires: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if node.target is steps.retire:
            retires[node.args[1]].append(node)  # type: ignore[index]
    many = program.plan is not None and program.plan.accumulate
    for slab, copies in offloads.items():
        for copy in copies:
            if len(retires[copy]) != 1:
                faults.add(f"the offload of {slab} is retired {len(retires[copy])} times, not once", copy)
            for grad in copy.args[3]:  # type: ignore[union-attr]
                for user in grad.users:  # type: ignore[union-attr]
                    if position[user] > position[copy]:
                        faults.add(f"it uses the gradient %{grad} after its offload", user)
            if copy.args[4] is not (many or len(copies) > 1):
                why = "a micro-batch" if many else f"{len(copies)} contributions"
                faults.add(f"accumulate is {copy.args[4]} for {slab}, with {why}", copy)


def _verify_updates(
    program: Program, nodes: list[fx.Node], offloads: dict[str, list[fx.Node]], position: dict[fx.Node, int],
    faults: Faults,
) -> None:  # fmt: skip
    """Each slab is updated once, from all of its gradient, after all of it has left."""
    updates: dict[str, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if node.target is steps.update:
            updates[str(node.args[1])].append(node)
    assert program.plan is not None
    wanted = 0 if program.plan.accumulate else 1
    for slab in sorted({*offloads, *updates}):
        copies = offloads.get(slab, [])
        if len(updates[slab]) != (wanted if copies else 0):
            last = updates[slab][-1] if updates[slab] else copies[-1]
            faults.add(f"{slab} is updated {len(updates[slab])} times, not {wanted if copies else 0}", last)
        for update in updates[slab]:
            _, _, given, accumulated = update.args
            if set(given) != set(copies) or len(given) != len(copies):  # type: ignore[arg-type]
                faults.add(f"the update of {slab} is not made from all {len(copies)} offloads of it", update)
            if any(position[c] > position[update] for c in copies):
                faults.add(f"{slab} is updated before the last offload of its gradient", update)
            if accumulated is not (len(copies) > 1):
                faults.add(f"accumulated is {accumulated} for {slab}, with {len(copies)} contributions", update)


def _verify_fresh(
    copies: dict[fx.Node, _Copy], offloads: dict[str, list[fx.Node]], nodes: list[fx.Node],
    position: dict[fx.Node, int], faults: Faults,
) -> None:  # fmt: skip
    """Weights are fetched after the last step's update and are on the device before this step's may begin."""
    awaited: set[str] = set()
    updated: set[str] = set()
    for node in nodes:
        if node.target is steps.await_update:
            awaited.add(str(node.args[1]))
        elif node.target is steps.update:
            updated.add(str(node.args[1]))
        elif node in copies:
            copy = copies[node]
            if copy.slab in offloads and copy.slab not in awaited:
                faults.add(f"{copy.slab} is fetched before await_update of it", node)
            if copy.slab in updated:
                faults.add(f"{copy.slab} is fetched after its update: these are the next step's weights", node)
            elif copy.slab in offloads and copy.waits:
                last = offloads[copy.slab][-1]
                if position[copy.waits[0]] > position[last]:
                    faults.add(f"the copy of {copy.slab} may still run when %{last} starts its update", node)
