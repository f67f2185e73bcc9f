"""schedule: order the lanes. Copies begin as early as the plan's memory allows, and end as late as it allows.

Each fetch moves ahead by `plan.prefetch` stretches of use, into a slot that is free by then. The gradients of
`plan.hold` blocks stay on the device until their updates have read them: those of the last ones into the next step, up
to the first use of their slab there. A value that is offloaded goes from the device where the forward is
`plan.prefetch` blocks further, and begins to come back where the backward is so many blocks before its use. The sizes
of the slots go into the plan, and how many boundaries are regenerated.

Before (prefetch 1):

    %f0 = fetch('layers.0', -1);  %w0 = wait(%f0);  run(...);  release(%f0)
    %f1 = fetch('layers.1', -1);  %w1 = wait(%f1);  run(...);  release(%f1)

After:

    %f0 = fetch('layers.0', 0)
    %f1 = fetch('layers.1', 1)
    %w0 = wait(%f0);  run(...);  release(%f0)
    %f2 = fetch('layers.2', 0)
    %w1 = wait(%f1);  run(...);  release(%f1)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from oomc import meta, steps
from oomc.fxutil import add_call
from oomc.offloadable import value_bytes
from oomc.plan import Plan
from oomc.program import PassResult, Program
from oomc.regenerate import regenerated


@dataclass(frozen=True)
class Schedule:
    """See the module's docstring."""

    name: str = "schedule"

    def __call__(self, program: Program) -> PassResult:
        assert program.step is not None and program.plan is not None
        graph = program.step.graph
        before = [n.name for n in graph.nodes]
        prefetch_ahead(graph, program.plan.prefetch)
        hold_gradients(graph, program.plan)
        move_values(graph, program.plan.prefetch)
        slots = assign_slots(graph, {s.name: s.layout.weight_bytes for s in program.slabs})
        host_slots = assign_host_slots(program)
        again = len(regenerated(program))
        program.plan = replace(program.plan, slots=slots, host_slots=host_slots, regenerated=again)
        program.step.recompile()
        return PassResult(program, bool(slots or host_slots or again) or [n.name for n in graph.nodes] != before)


def prefetch_ahead(graph: fx.Graph, depth: int) -> None:
    """Move each fetch, with what it awaits, to where the stretch `depth` before its own begins."""
    waits = graph.find_nodes(op="call_function", target=steps.wait)
    order = {n: i for i, n in enumerate(graph.nodes)}
    # where weights that have regenerated a boundary are held for their own block's backward, that begins a stretch too
    begins = sorted([*waits, *(own for wait in waits if (own := _own_use(wait, order)))], key=lambda n: order[n])
    place = {n: i for i, n in enumerate(begins)}
    for wait in sorted(waits, key=lambda n: order[n]):
        fetch = wait.args[1]
        assert isinstance(fetch, fx.Node)
        target = begins[max(0, place[wait] - depth)]
        if target is wait:
            continue
        before = fetch.prev
        target.prepend(fetch)
        if before.target is steps.await_update and before.args[1] == fetch.args[1]:
            fetch.prepend(before)


def _own_use(wait: fx.Node, order: dict[fx.Node, int]) -> fx.Node | None:
    """The first use for its own block's backward of a slab that has regenerated a boundary for a later block's."""
    block = meta.note(wait).block
    if meta.note(wait).phase != "regenerate":
        return None
    users = [user for part in wait.users for user in part.users if meta.note(user).block != block]
    return min(users, key=lambda user: order[user], default=None)


def hold_gradients(graph: fx.Graph, plan: Plan) -> None:
    """Move each wait for gradients to where `plan.hold` blocks have computed theirs since, or into the next step."""
    retires = graph.find_nodes(op="call_function", target=steps.retire)
    offloads = [node.args[1] for node in retires]
    blocks = list(dict.fromkeys(meta.note(node).block for node in retires))
    place = {block: i for i, block in enumerate(blocks)}
    first: dict[int, fx.Node] = {}
    for copy in offloads:
        first.setdefault(meta.note(copy).block, copy)
    uses = _first_uses(graph)
    (output,) = graph.find_nodes(op="output")

    def later(node: fx.Node) -> int:
        return place[meta.note(node).block] + plan.hold

    def is_carried(node: fx.Node, copy: fx.Node) -> bool:
        slab, mode = str(copy.args[1]), copy.args[4]
        # what is kept on the device is read after the norm is known, so after this step's last node
        stays = mode == "keep" and slab in plan.resident
        return (stays or (mode == "update" and plan.hold > 0 and later(node) >= len(blocks))) and slab in uses

    pairs = list(zip(retires, offloads, strict=True))
    here = {copy.args[1] for node, copy in pairs if not is_carried(node, copy)}
    carried: set[str] = set()
    for node, copy in pairs:
        slab = str(copy.args[1])
        if slab not in here:  # all that the slab's update reads is carried, or nothing
            if slab not in carried:
                with graph.inserting_before(uses[slab]):
                    new = add_call(graph, steps.retire_carried, (node.args[0], slab))
                meta.set_note(new, meta.note(uses[slab]))
                carried.add(slab)
            graph.erase_node(node)
        elif plan.hold:
            (first[blocks[later(node)]] if later(node) < len(blocks) else output).prepend(node)


def _first_uses(graph: fx.Graph) -> dict[str, fx.Node]:
    """Where each slab's weights are used first."""
    uses: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.target is steps.wait:
            uses.setdefault(str(node.args[1].args[1]), node)
        elif node.target is steps.device_weights:
            uses.setdefault(str(node.args[1]), node)
    return uses


def move_values(graph: fx.Graph, depth: int) -> None:
    """Give the copies of offloaded values the time that `depth` blocks take, those out and those back."""
    position = {n: i for i, n in enumerate(graph.nodes)}
    forward: dict[int, fx.Node] = {}
    backward: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if node.target in steps.COMPUTE:
            note = meta.note(node)
            (forward if note.phase == "forward" else backward).setdefault(note.block, node)
    last = max(forward, default=0)
    for node in graph.find_nodes(op="call_function", target=steps.discard) if depth else ():
        target = forward[min(meta.note(node).block + depth, last)]
        if position[target] > position[node]:
            target.prepend(node)
    for node in graph.find_nodes(op="call_function", target=steps.restore) if depth else ():
        wanted = meta.note(node).block + depth
        target = backward[min((b for b in backward if b >= wanted), default=max(backward))]
        if position[target] < position[node]:
            target.prepend(node)


class _Slots:
    """Best fit in program order: the smallest free slot that is large enough, else the largest free one grown, else a
    new one."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.free: set[int] = set()

    def take(self, need: int) -> int:
        """A slot that holds `need` bytes."""
        enough = [s for s in self.free if self.sizes[s] >= need]
        if enough:
            slot = min(enough, key=lambda s: (self.sizes[s], s))
        elif self.free:
            slot = max(self.free, key=lambda s: (self.sizes[s], -s))
            self.sizes[slot] = need
        else:
            slot = len(self.sizes)
            self.sizes.append(need)
        self.free.discard(slot)
        return slot


def assign_slots(graph: fx.Graph, bytes_of: dict[str, int]) -> tuple[int, ...]:
    """Give every fetch a slot that is free when it begins; returns the slots' sizes in bytes."""
    slots = _Slots()
    for node in graph.nodes:
        if node.target is steps.fetch:
            node.args = (*node.args[:2], slots.take(bytes_of[node.args[1]]))
        elif node.target is steps.release:
            slots.free.add(node.args[1].args[2])
    return tuple(slots.sizes)


def assign_host_slots(program: Program) -> tuple[int, ...]:
    """Give every value that is stored a host slot that is free until it is restored; returns the slots' bytes."""
    assert program.step is not None and program.plan is not None
    slots = _Slots()
    for node in program.step.graph.nodes:
        if node.target is steps.store:
            need = value_bytes(program, node.args[2], program.plan.sizes)
            node.args = (*node.args[:3], slots.take(need))
        elif node.target is steps.restored:
            slots.free.add(node.args[1].args[1].args[3])
    return tuple(slots.sizes)
