"""Boundaries that are regenerated: values between blocks that the backward makes again from earlier ones.

A boundary is what one block hands to later ones. Where the plan says `recompute` of one, insert_recompute runs the
forward of its block again, right before the backward of the block that needs it first. Here is what a step graph does
of that.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from oomc import meta
from oomc.program import Program


@dataclass(frozen=True)
class Regenerated:
    """A boundary that a step graph regenerates.

    Attributes:
        value: its name in the forward graph.
        block: index of the block that makes it.
        place: index of the block before whose backward it is made again.
    """

    value: str
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
                found.append(Regenerated(note.source, block_of[note.workset], note.block))
    return found
