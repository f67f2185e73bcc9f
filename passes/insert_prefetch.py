"""insert_prefetch: weights come from the host where they are used, and go when they are not.

Every stretch of use of a slab gets a fetch, a wait and a release. Two stretches are one where no other slab comes
into use between them; and what regenerates a boundary shares the weights with its block's own backward, if that is so
near that they would be fetched ahead anyway. The fetch stands right before its wait: schedule moves it ahead. A slab
that lives on the device needs no copy: its weights are there.

Before:

    %w = weights('layers.0')
    %h1, = run('form_b', 'forward', %w[0], %h0)

After:

    %fetch = fetch('layers.0', -1)
    %w = wait(%fetch)
    %h1, = run('form_b', 'forward', %w[0], %h0)
    release(%fetch)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from torch import fx

from oomc import meta, steps
from oomc.fxutil import add_call
from oomc.program import PassResult, Program


@dataclass
class Stretch:
    """A run of the step graph in which a slab is on the device: its `weights` nodes and the first and last use."""

    slab: str
    holders: list[fx.Node]
    start: int
    end: int


@dataclass(frozen=True)
class InsertPrefetch:
    """See the module's docstring."""

    name: str = "insert_prefetch"

    def __call__(self, program: Program) -> PassResult:
        assert program.step is not None and program.plan is not None
        graph = program.step.graph
        holders = graph.find_nodes(op="call_function", target=steps.weights)
        for node in holders:
            if node.args[1] in program.plan.resident:
                node.target = steps.device_weights
        found = stretches(graph, program.plan.prefetch)
        nodes = list(graph.nodes)
        for stretch in found:
            first, last, holder = nodes[stretch.start], nodes[stretch.end], stretch.holders[0]
            rt = holder.args[0]
            with graph.inserting_before(first):
                fetch = add_call(graph, steps.fetch, (rt, stretch.slab, -1))
                wait = add_call(graph, steps.wait, (rt, fetch), holder.name)
            with graph.inserting_after(last):
                release = add_call(graph, steps.release, (rt, fetch))
            for new, near in ((fetch, first), (wait, first), (release, last)):
                meta.set_note(new, meta.note(near))
            parts: dict[object, fx.Node] = {}
            for old in stretch.holders:
                for part in list(old.users):
                    if part.args[1] in parts:
                        part.replace_all_uses_with(parts[part.args[1]])
                        graph.erase_node(part)
                        continue
                    parts[part.args[1]] = part
                    part.replace_input_with(old, wait)
                    first.prepend(part)
                graph.erase_node(old)
        return PassResult(program, bool(holders))


def stretches(graph: fx.Graph, prefetch: int) -> list[Stretch]:
    """The stretches of use of all slabs, ordered by their beginning."""
    position = {n: i for i, n in enumerate(graph.nodes)}
    found: list[Stretch] = []
    for holder in graph.find_nodes(op="call_function", target=steps.weights):
        uses = [position[u] for part in holder.users for u in part.users]
        found.append(Stretch(str(holder.args[1]), [holder], min(uses), max(uses)))
    found.sort(key=lambda s: s.start)
    starts = [s.start for s in found]
    merged: list[Stretch] = []
    latest: dict[str, Stretch] = {}  # of each slab
    for stretch in found:
        before = latest.get(stretch.slab)
        if before is not None:
            between = found[bisect_right(starts, before.end) : bisect_left(starts, stretch.start)]
            if all(s.slab == stretch.slab for s in between) or _is_near(before, stretch, prefetch):
                before.holders += stretch.holders
                before.end = max(before.end, stretch.end)
                continue
        latest[stretch.slab] = stretch
        merged.append(stretch)
    return merged


def _is_near(before: Stretch, stretch: Stretch, prefetch: int) -> bool:
    """Whether a slab that regenerates a boundary is used again within the blocks that are fetched ahead."""
    note, then = meta.note(before.holders[-1]), meta.note(stretch.holders[0])
    return note.phase == "regenerate" and note.block - then.block <= prefetch
