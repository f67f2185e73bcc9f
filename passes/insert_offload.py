"""insert_offload: gradients leave the device for the host.

Each part of a slab's gradients that is complete becomes a node on the d2h lane, and a point at which the compute lane
waits until they have left and the device memory is free again. They update the slab, or are kept until the norm of all
is known; a slab with several contributions to one parameter in a step (tied weights), and every slab of a micro-batch
that is only accumulated, is summed.

Before:

    gradients('layers.0', ('layers.0.w',), (%d_w,))

After:

    %copy = offload('layers.0', ('layers.0.w',), (%d_w,), 'update')
    retire(%copy)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from oomc import meta, steps
from oomc.fxutil import add_call
from oomc.program import PassResult, Program


@dataclass(frozen=True)
class InsertOffload:
    """See the module's docstring."""

    name: str = "insert_offload"

    def __call__(self, program: Program) -> PassResult:
        assert program.step is not None and program.plan is not None
        graph = program.step.graph
        sinks = graph.find_nodes(op="call_function", target=steps.gradients)
        contributions = Counter(name for n in sinks for name in n.args[2])
        summed = {n.args[1] for n in sinks if any(contributions[name] > 1 for name in n.args[2])}
        for node in sinks:
            rt, slab, names, grads = node.args
            many = program.plan.accumulate or slab in summed
            mode = "sum" if many else "keep" if program.plan.keep else "update"
            with graph.inserting_before(node):
                copy = add_call(graph, steps.offload, (rt, slab, names, grads, mode))
                retire = add_call(graph, steps.retire, (rt, copy))
            for new in (copy, retire):
                meta.set_note(new, meta.note(node))
            graph.erase_node(node)
        return PassResult(program, bool(sinks))
