"""insert_updates: each slab is updated once, after all of its gradient has arrived, and fetched only after that.

The update follows the slab's last offload on the host lane and nothing waits for it in this step; the slab's first
fetch of the next step does. Where the norm of the whole gradient is needed first, one `apply` at the end of the step
updates every slab.

Before:

    %fetch = fetch('layers.0', 0)
    ...
    %copy = offload('layers.0', ..., 'update')

After:

    await_update('layers.0')
    %fetch = fetch('layers.0', 0)
    ...
    %copy = offload('layers.0', ..., 'update')
    update('layers.0', [%copy], 'update')
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import fx

from oomc import meta, steps
from oomc.fxutil import add_call
from oomc.program import PassResult, Program


@dataclass(frozen=True)
class InsertUpdates:
    """See the module's docstring."""

    name: str = "insert_updates"

    def __call__(self, program: Program) -> PassResult:
        assert program.step is not None and program.plan is not None
        graph = program.step.graph
        copies: dict[str, list[fx.Node]] = defaultdict(list)
        for node in graph.find_nodes(op="call_function", target=steps.offload):
            copies[str(node.args[1])].append(node)
        if program.plan.keep and copies:
            every = [copy for nodes in copies.values() for copy in nodes]
            (output,) = graph.find_nodes(op="output")
            with graph.inserting_before(output):
                apply = add_call(graph, steps.apply, (every[0].args[0], tuple(every)))
            meta.set_note(apply, meta.note(every[-1]))
        elif not program.plan.accumulate:
            for slab, nodes in copies.items():
                with graph.inserting_after(nodes[-1]):
                    update = add_call(graph, steps.update, (nodes[0].args[0], slab, tuple(nodes), nodes[0].args[4]))
                meta.set_note(update, meta.note(nodes[-1]))
        awaited: set[str] = set()
        for node in graph.find_nodes(op="call_function", target=steps.fetch):
            slab = str(node.args[1])
            if slab in copies and slab not in awaited:
                awaited.add(slab)
                with graph.inserting_before(node):
                    wait = add_call(graph, steps.await_update, (node.args[0], slab))
                meta.set_note(wait, meta.note(node))
        return PassResult(program, bool(copies))
