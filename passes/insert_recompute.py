"""insert_recompute: run forward worksets again where the plan says that their results are not kept.

Only reads the plan: every value whose residency is `recompute` and that the backward uses is computed again right
before its first use there, from what is kept; results that may not be computed twice are handed in as saved.

A value of an earlier block (a boundary) is regenerated before the first backward run of the block that needs it first,
and stays until its last use; if it is made from a boundary that is regenerated too, so is that one then. What else its
block computes for it goes at once: that block's own backward computes it again if it needs it.

Before:

    %q, %k = run('form_b', 'forward', %w, %h0)
    %h1, = run('form_c', 'forward', %q, %k)
    ...
    %d_h1, = run('form_d', 'backward', %h1, %d_h2)
    %d_q, %d_k, = run('form_c', 'backward', %q, %k, %d_h1)

After, with all three recomputed:

    %q, %k = run('form_b', 'forward', %w, %h0)
    %h1, = run('form_c', 'forward', %q, %k)
    ...
    %q_1, %k_1 = run('form_b', 'recompute', %w, %h0)
    %h1_1, = run('form_c', 'recompute', %q_1, %k_1)
    %d_h1, = run('form_d', 'backward', %h1_1, %d_h2)
    %q_2, %k_2 = run('form_b', 'recompute', %w, %h0)
    %d_q, %d_k, = run('form_c', 'backward', %q_2, %k_2, %d_h1)
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from oomc import meta, steps
from oomc.fxutil import add_call
from oomc.program import PassResult, Program


@dataclass(frozen=True)
class InsertRecompute:
    """See the module's docstring."""

    name: str = "insert_recompute"

    def __call__(self, program: Program) -> PassResult:
        assert program.step is not None and program.plan is not None
        again = {name for name, where in program.plan.residency.items() if where == "recompute"}
        nodes: dict[int, list[fx.Node]] = defaultdict(list)
        for node in program.step.graph.nodes:
            nodes[meta.note(node).block].append(node)
        changed = False
        boundaries: dict[fx.Node, fx.Node] = {}
        for block in reversed(range(len(program.blocks))):  # in the order of the backward
            changed |= _Recompute(program, block, nodes[block], again, boundaries).insert()
        return PassResult(program, changed)


class _Recompute:
    """One block's backward: what it needs again, of its own block and of those before it."""

    def __init__(
        self, program: Program, block: int, mine: list[fx.Node], again: set[str], boundaries: dict[fx.Node, fx.Node]
    ) -> None:
        assert program.step is not None
        self.program, self.block, self.again = program, block, again
        self.graph = program.step.graph
        self.backward = [n for n in mine if n.target in steps.COMPUTE and meta.note(n).phase == "backward"]
        self.weights = {
            (str(n.args[1]), block): n for n in mine if n.target is steps.weights and meta.note(n).phase == "backward"
        }
        self.copies: dict[fx.Node, fx.Node] = {}
        self.boundaries = boundaries

    def insert(self) -> bool:
        """Recompute what this block's backward needs; whether there was anything."""
        needed = {a for n in self.backward for a in n.all_input_nodes if self._is_recomputed(a)}
        if not needed:
            return False
        first = self.backward[0]
        for holder in self.weights.values():
            first.prepend(holder)
            for part in list(holder.users):
                first.prepend(part)
        for node in self.backward:
            with self.graph.inserting_before(node):
                for value in [a for a in node.all_input_nodes if a in needed]:
                    node.replace_input_with(value, self._again(value, self.block))
        return True

    def _is_recomputed(self, node: fx.Node) -> bool:
        note = meta.note(node)
        return note.phase == "forward" and note.source in self.again and node.target is operator.getitem

    def _again(self, value: fx.Node, within: int) -> fx.Node:
        """The value computed again, for a run of the block `within`.

        One of that block itself is for this block's backward only. One of an earlier block is a boundary.
        """
        if value in self.boundaries:
            return self.boundaries[value]
        block = meta.note(value).block
        if block == within:
            return self._computed(value)
        # the earliest first, so that a chain over many layers does not recurse over all of them
        with self.graph.inserting_before(self.backward[0]):
            for each in [*self._boundaries_for(value), value]:
                self.boundaries[each] = self._computed(each)
        return self.boundaries[value]

    def _boundaries_for(self, value: fx.Node) -> list[fx.Node]:
        """The boundaries that a value is computed from and that must be computed again too, the earliest first."""
        found: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set()
        frontier = [value]
        while frontier:
            run: Any = frontier.pop().args[0]
            if run in seen:
                continue
            seen.add(run)
            for each in run.all_input_nodes:
                if self._is_recomputed(each) and each not in self.boundaries:
                    frontier.append(each)
                    if meta.note(each).block != meta.note(run).block:
                        found[each] = None
        return sorted(found, key=lambda node: meta.note(node).block)

    def _computed(self, value: fx.Node) -> fx.Node:
        run, index = value.args
        assert isinstance(run, fx.Node) and isinstance(index, int)
        if run not in self.copies:
            self.copies[run] = self._rerun(run)
        return self._part(self.copies[run], index, value)

    def _rerun(self, run: fx.Node) -> fx.Node:
        rt, form, _, *args = run.args
        chunk, args = (args[:1], args[1:]) if run.target is steps.run_chunks else ([], args)
        note = meta.note(run)
        phase = "recompute" if note.block == self.block else "regenerate"
        saved = [n for n in run.users if meta.note(n).source.startswith(f"{note.workset}:saved.")]
        saved.sort(key=lambda n: n.args[1])  # type: ignore[arg-type, return-value]
        new_args = tuple(self._argument(a, note.block) if isinstance(a, fx.Node) else a for a in args)
        new = (rt, form, "recompute", *chunk, *new_args, *saved)
        node = add_call(self.graph, run.target, new, run.name.replace("_forward", f"_{phase}"))
        meta.set_value(node, meta.value(run)[: len(meta.value(run)) - len(saved)])
        meta.set_note(node, replace(note, phase=phase, block=self.block))
        return node

    def _argument(self, node: fx.Node, within: int) -> fx.Node:
        if self._is_recomputed(node):
            return self._again(node, within)
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and source.target is steps.weights:
            return self._part(self._weights(source, within), node.args[1], node)  # type: ignore[arg-type]
        return node

    def _weights(self, like: fx.Node, within: int) -> fx.Node:
        """The weights of a slab for a run of the block `within`."""
        key = str(like.args[1]), within
        if key not in self.weights:
            self.weights[key] = add_call(self.graph, steps.weights, like.args, like.name)
            phase = "backward" if within == self.block else "regenerate"
            meta.set_note(self.weights[key], replace(meta.note(like), phase=phase, block=self.block))
        return self.weights[key]

    def _part(self, holder: fx.Node, index: int, like: fx.Node) -> fx.Node:
        for known in holder.users:
            if known.args == (holder, index):
                return known
        part = add_call(self.graph, operator.getitem, (holder, index))
        meta.set_value(part, meta.value(like))
        meta.set_note(part, replace(meta.note(like), phase=meta.note(holder).phase, block=self.block))
        return part
