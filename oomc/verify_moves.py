"""The verifier of movement in a step graph: fetches and their slots, releases, gradients that leave, updates.

The order of the nodes is the order in which the lanes are told what to do: a release says that the compute told so far
is the last user of a slot, a retire that the gradients have left, an update starts as soon as its copies arrive.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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
    _verify_offloads(program, nodes, offloads, position, reached, faults)
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
    reached: frozenset[str], faults: Faults,
) -> None:  # fmt: skip
    """Each copy of gradients is retired once, after it; until then, nothing else uses them, and after it neither."""
    retires: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    carried: dict[str, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if node.target is steps.retire:
            retires[node.args[1]].append(node)  # type: ignore[index]
        elif node.target is steps.retire_carried:
            carried[str(node.args[1])].append(node)
    for slab, copies in offloads.items():
        for copy in copies:
            times = len(retires[copy]) + len(carried[slab])
            if times != 1:
                faults.add(f"the offload of {slab} is retired {times} times, not once", copy)
            for grad in copy.args[3]:  # type: ignore[union-attr]
                for user in grad.users:  # type: ignore[union-attr]
                    if position[user] > position[copy]:
                        faults.add(f"it uses the gradient %{grad} after its offload", user)
            _verify_mode(program, copy, copies, faults)
        for node in carried[slab]:
            _verify_carried(slab, node, copies, position, faults)
    for slab in carried:
        if slab not in offloads:
            faults.add(f"gradients of {slab} are carried into the next step, and none are offloaded", carried[slab][0])
    if "schedule" in reached:
        _verify_kept(program, offloads, retires, faults)


def _contributions(copies: list[fx.Node]) -> int:
    """The most contributions to one parameter that offloads of a slab bring."""
    return max(Counter(name for copy in copies for name in copy.args[2]).values(), default=0)  # type: ignore[union-attr]


def _verify_mode(program: Program, copy: fx.Node, copies: list[fx.Node], faults: Faults) -> None:
    plan = program.plan
    many = plan is not None and plan.accumulate
    most = _contributions(copies)
    wanted = "sum" if many or most > 1 else "keep" if plan is not None and plan.keep else "update"
    if copy.args[4] != wanted:
        why = "a micro-batch" if many else f"{most} contribution{'s' * (most > 1)}"
        faults.add(f"the mode is {copy.args[4]} for {copy.args[1]}, with {why}; it must be {wanted}", copy)


def _verify_carried(
    slab: str, node: fx.Node, copies: list[fx.Node], position: dict[fx.Node, int], faults: Faults
) -> None:
    """What is carried has been read when the slab is updated, so before its weights are used, and new ones come."""
    for copy in copies:
        if copy.args[4] == "sum":
            faults.add(f"the sum of {slab} is not carried into the next step", node)
        if position[node] > position[copy]:
            faults.add(f"the gradients of {slab} of the step before are retired after new ones are offloaded", node)


def _verify_kept(
    program: Program, offloads: dict[str, list[fx.Node]], retires: dict[fx.Node, list[fx.Node]], faults: Faults
) -> None:
    """Gradients that are kept on the device are read after the step's last node: no retire in this step frees them."""
    assert program.plan is not None
    for slab in program.plan.resident:
        for copy in offloads.get(slab, ()):
            if copy.args[4] == "keep" and retires[copy]:
                faults.add(f"the gradients of {slab} are kept on the device, and retired before they are applied", copy)


def _verify_updates(
    program: Program, nodes: list[fx.Node], offloads: dict[str, list[fx.Node]], position: dict[fx.Node, int],
    faults: Faults,
) -> None:  # fmt: skip
    """Each slab is updated once, from all of its gradient, after all of it has left."""
    assert program.plan is not None
    if program.plan.keep:
        _verify_apply(nodes, offloads, position, faults)
        return
    updates: dict[str, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if node.target is steps.update:
            updates[str(node.args[1])].append(node)
        elif node.target is steps.apply:
            faults.add("nothing is kept that could be applied", node)
    wanted = 0 if program.plan.accumulate else 1
    for slab in sorted({*offloads, *updates}):
        copies = offloads.get(slab, [])
        if len(updates[slab]) != (wanted if copies else 0):
            last = updates[slab][-1] if updates[slab] else copies[-1]
            faults.add(f"{slab} is updated {len(updates[slab])} times, not {wanted if copies else 0}", last)
        for update in updates[slab]:
            _, _, given, mode = update.args
            if set(given) != set(copies) or len(given) != len(copies):  # type: ignore[arg-type]
                faults.add(f"the update of {slab} is not made from all {len(copies)} offloads of it", update)
            if any(position[c] > position[update] for c in copies):
                faults.add(f"{slab} is updated before the last offload of its gradient", update)
            if mode != ("sum" if _contributions(copies) > 1 else "update"):
                faults.add(f"the mode is {mode} for {slab}, with {_contributions(copies)} contributions", update)


def _verify_apply(
    nodes: list[fx.Node], offloads: dict[str, list[fx.Node]], position: dict[fx.Node, int], faults: Faults
) -> None:
    """What is kept is applied once, all of it, at the end."""
    applies = [node for node in nodes if node.target is steps.apply]
    copies = {copy for each in offloads.values() for copy in each}
    if len(applies) != (1 if copies else 0):
        faults.add(f"kept gradients are applied {len(applies)} times, not once")
    for node in nodes:
        if node.target is steps.update:
            faults.add(f"{node.args[1]} is updated before the norm of all gradients is known", node)
    for apply in applies:
        if set(apply.args[1]) != copies:  # type: ignore[arg-type]
            faults.add(f"it is not made from all {len(copies)} offloads", apply)
        if any(position[copy] > position[apply] for copy in copies):
            faults.add("gradients are applied before the last of them is offloaded", apply)


def _verify_fresh(
    copies: dict[fx.Node, _Copy], offloads: dict[str, list[fx.Node]], nodes: list[fx.Node],
    position: dict[fx.Node, int], faults: Faults,
) -> None:  # fmt: skip
    """Weights are used after the last step's update and before this step's may begin."""
    awaited: set[str] = set()
    updated: set[str] = set()
    for node in nodes:
        if node.target is steps.await_update:
            awaited.add(str(node.args[1]))
        elif node.target is steps.update:
            updated.add(str(node.args[1]))
        elif node.target is steps.apply:
            updated.update(offloads)
        elif node.target is steps.device_weights:
            _verify_device_weights(node, offloads.get(str(node.args[1]), []), position, faults)
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


def _verify_device_weights(node: fx.Node, copies: list[fx.Node], position: dict[fx.Node, int], faults: Faults) -> None:
    """The update of a slab on the device overwrites its weights: all use of them comes before."""
    if not copies:
        return
    for user in [user for part in node.users for user in part.users]:
        if position[user] > position[copies[-1]]:
            faults.add(f"it uses weights of {node.args[1]} after %{copies[-1]}, which may overwrite them", user)
