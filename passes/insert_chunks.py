"""insert_chunks: chunked worksets run in the rectangles that the plan gives them.

Only reads the plan. Forward and backward of a workset run in the same chunks.

Before:

    %loss, = run_chunks('form_c', 'forward', (0, 0), %B, %S, %h)

After:

    %loss, = run_chunks('form_c', 'forward', (1, 1024), %B, %S, %h)
"""

from __future__ import annotations

from dataclasses import dataclass

from oomc import meta, steps
from oomc.program import PassResult, Program


@dataclass(frozen=True)
class InsertChunks:
    """See the module's docstring."""

    name: str = "insert_chunks"

    def __call__(self, program: Program) -> PassResult:
        assert program.step is not None and program.plan is not None
        nodes = program.step.graph.find_nodes(op="call_function", target=steps.run_chunks)
        changed = False
        for node in nodes:
            chunk = program.plan.chunks[meta.note(node).workset]
            changed |= node.args[3] != chunk
            node.args = (*node.args[:3], chunk, *node.args[4:])
        return PassResult(program, changed)
