"""insert_recompute: run forward worksets again where the plan says that their results are not kept.

Only reads the plan: every value whose residency is `recompute` and that the backward uses is computed again right
before its first use there, from what is kept; results that may not be computed twice are handed in as saved.

Before:

    %q, %k = run('form_b', 'forward', %w, %h0)
    ...
    %d_h0, = run('form_b', 'backward', %q, %k, %d_h1)

After:

    %q, %k = run('form_b', 'forward', %w, %h0)
    ...
    %q_1, %k_1 = run('form_b', 'recompute', %w, %h0)
    %d_h0, = run('form_b', 'backward', %q_1, %k_1, %d_h1)
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass, replace

from torch import fx

from oomc import meta, steps
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
        for block in range(len(program.blocks)):
            changed |= _Recompute(program, block, nodes[block], again).insert()
        return PassResult(program, changed)


class _Recompute:
    def __init__(self, program: Program, block: int, mine: list[fx.Node], again: set[str]) -> None:
        assert program.step is not None
        self.program, self.block, self.again = program, block, again
        self.graph = program.step.graph
        self.backward = [n for n in mine if n.target in steps.COMPUTE and meta.note(n).phase == "backward"]
        self.weights = {n.args[1]: n for n in mine if n.target is steps.weights and meta.note(n).phase == "backward"}
        self.copies: dict[fx.Node, fx.Node] = {}

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
                    node.replace_input_with(value, self._again(value))
        return True

    def _is_recomputed(self, node: fx.Node) -> bool:
        note = meta.note(node)
        return note.phase == "forward" and note.source in self.again and node.target is operator.getitem

    def _again(self, value: fx.Node) -> fx.Node:
        if value in self.copies:
            return self.copies[value]
        run, index = value.args
        assert isinstance(run, fx.Node) and isinstance(index, int)
        if run not in self.copies:
            self.copies[run] = self._rerun(run)
        self.copies[value] = self._part(self.copies[run], index, value)
        return self.copies[value]

    def _rerun(self, run: fx.Node) -> fx.Node:
        rt, form, _, *args = run.args
        chunk, args = (args[:1], args[1:]) if run.target is steps.run_chunks else ([], args)
        note = meta.note(run)
        saved = [n for n in run.users if meta.note(n).source.startswith(f"{note.workset}:saved.")]
        saved.sort(key=lambda n: n.args[1])  # type: ignore[arg-type, return-value]
        new_args = tuple(self._argument(a) if isinstance(a, fx.Node) else a for a in args)
        name = run.name.replace("_forward", "_recompute")
        new = (rt, form, "recompute", *chunk, *new_args, *saved)
        node = self.graph.create_node("call_function", run.target, new, name=name)
        meta.set_value(node, meta.value(run)[: len(meta.value(run)) - len(saved)])
        meta.set_note(node, replace(note, phase="recompute"))
        return node

    def _argument(self, node: fx.Node) -> fx.Node:
        if self._is_recomputed(node) and meta.note(node).block == self.block:
            return self._again(node)
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and source.target is steps.weights:
            slab = str(source.args[1])
            if slab not in self.weights:
                self.weights[slab] = self.graph.call_function(steps.weights, source.args)
                meta.set_note(self.weights[slab], replace(meta.note(source), phase="backward"))
            return self._part(self.weights[slab], node.args[1], node)  # type: ignore[arg-type]
        return node

    def _part(self, holder: fx.Node, index: int, like: fx.Node) -> fx.Node:
        for known in holder.users:
            if known.args == (holder, index):
                return known
        part = self.graph.call_function(operator.getitem, (holder, index))
        meta.set_value(part, meta.value(like))
        meta.set_note(part, replace(meta.note(like), phase=meta.note(holder).phase))
        return part
