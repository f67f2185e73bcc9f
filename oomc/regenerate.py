"""Boundaries that are regenerated: values between blocks that the backward makes again from earlier ones.

A boundary is what one block hands to later ones. Where the plan says `recompute` of one, insert_recompute runs the
forward of its block again, right before the backward of the block that needs it first. Here are which boundaries a plan
could regenerate and what that takes (for the planner), and what a step graph regenerates (for reports).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tabulate import tabulate
from torch import fx

from oomc import meta
from oomc.cost import Costs
from oomc.offloadable import kept_values, value_bytes
from oomc.plan import Plan, format_bytes
from oomc.program import Program
from oomc.timeline import Timeline
from oomc.worksets import Workset

CHAINS = (1, 2, 1 << 30)
"""How many boundaries in a row are tried to be made from one that is not: all of a row are there at once."""


@dataclass(frozen=True)
class Boundary:
    """A boundary that a plan could regenerate.

    Attributes:
        value: its name in the forward graph.
        block: index of the block that makes it.
        nbytes: of it.
        seconds: that it takes to make it again, with the copy of weights that are not there anyway.
        like: equal for boundaries between blocks of the same forms.
    """

    value: str
    block: int
    nbytes: int
    seconds: float
    like: tuple[Any, ...] = ()


def boundaries(program: Program, plan: Plan, costs: Costs) -> list[Boundary]:
    """What a plan could regenerate, in order, from a program with its bare step graph.

    Not what the last block is given: its backward begins when its forward is done.
    """
    found = []
    owners = {out: workset for block in program.blocks for workset in block.worksets for out in workset.outputs}
    named = {out.name: out for out in owners}
    last = len(program.blocks) - 1
    for node, inside in kept_values(program):
        note = meta.note(node)
        if inside or note.source not in named:
            continue
        users = [meta.note(u) for u in node.users]
        place = max(u.block for u in users if u.phase == "backward")
        if note.block == last or place == last:
            continue
        seconds = sum(
            costs.seconds(w.form, "recompute", plan.sizes, plan.chunks.get(w.name))
            for w in _again(named[note.source], owners, plan)
        )
        if place - note.block > plan.prefetch:  # its weights are not those that come next
            slabs = [s for s in program.slabs if s.name in program.blocks[note.block].slabs]
            copied = sum(s.layout.weight_bytes for s in slabs if s.name not in plan.resident)
            seconds += copied / costs.machine.h2d
        like = tuple(tuple(w.form for w in program.blocks[b].worksets) for b in (note.block, place))
        size = value_bytes(program, node, plan.sizes)
        found.append(Boundary(note.source, note.block, size, seconds, (like, node.args[1])))
    return found


def _again(value: fx.Node, owners: dict[fx.Node, Workset], plan: Plan) -> list[Workset]:
    """The worksets of a value's block that would run again for it: others have given what is kept."""
    found: dict[str, Workset] = {}
    frontier = [value]
    while frontier:
        workset = owners[frontier.pop()]
        if workset.name in found:
            continue
        found[workset.name] = workset
        for source in workset.inputs:
            if isinstance(source, fx.Node) and source in owners and owners[source].block == workset.block:
                if plan.residency.get(source.name) == "recompute":
                    frontier.append(source)
    return list(found.values())


def groups(known: Sequence[Boundary], most: int) -> list[list[Boundary]]:
    """Boundaries of like blocks, the cheapest for their bytes first; of at most so many blocks in a row."""
    rows: dict[int, int] = {}  # of each block, how many in a row come to an end with it
    found: dict[tuple[Any, ...], list[Boundary]] = {}
    for each in sorted(known, key=lambda b: b.block):
        row = rows.get(each.block - 1, 0) + 1
        if row <= most:
            rows[each.block] = row
            found.setdefault(each.like, []).append(each)
    return sorted(found.values(), key=lambda group: group[0].seconds / max(1, group[0].nbytes))


def with_regenerated(plan: Plan, names: Collection[str]) -> Plan:
    """The plan with these values regenerated."""
    return replace(plan, residency=plan.residency | dict.fromkeys(names, "recompute"))


@dataclass(frozen=True)
class Regenerated:
    """A boundary that a step graph regenerates.

    Attributes:
        part: its node.
        block: index of the block that makes it.
        place: index of the block before whose backward it is made again.
    """

    part: fx.Node
    block: int
    place: int


def regenerated(program: Program) -> list[Regenerated]:
    """The boundaries that a step graph regenerates, in order; known from insert_recompute on."""
    block_of = {w.name: w.block for block in program.blocks for w in block.worksets}
    found = []
    for node in program.graph.nodes:
        note = meta.note(node)
        if node.target is operator.getitem and note.phase == "regenerate" and note.workset in block_of:
            users = {block_of.get(meta.note(user).workset) for user in node.users}
            if users - {block_of[note.workset]}:
                found.append(Regenerated(node, block_of[note.workset], note.block))
    return found


def describe(program: Program, line: Timeline) -> str:
    """What a scheduled step regenerates, and what for: a table for reports, empty if it is nothing.

    Args:
        program: with plan and step graph.
        line: the simulated step, with its events.
    """
    assert program.plan is not None
    found = regenerated(program)
    if not found:
        return ""
    rows, total = [], 0
    for each in found:
        size = value_bytes(program, each.part, program.plan.sizes)
        total += size
        own, place = program.blocks[each.block].name, program.blocks[each.place].name
        rows.append((meta.note(each.part).source, own, place, format_bytes(size)))
    runs = {node.name for node in program.graph.nodes if meta.note(node).phase == "regenerate"}
    seconds = sum(event.end - event.start for event in line.events if event.name in runs)
    table = tabulate(rows, ("regenerated", "made by", "again before the backward of", "bytes"), tablefmt="plain")
    return (
        f"{table}\n{format_bytes(total)} less wait for the backward, on the host or on the device, for "
        f"{1000 * seconds:.2f} ms of compute"
    )
