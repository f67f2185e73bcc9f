"""overwrite_values: the backward of attention writes dq, dk and dv over q, k and v where these die in it.

Every backward run whose form can do so does, unless what it would overwrite is still needed (in_place.why_not says what
for). It computes the same bits.

Before:

    %q, %k, %v = run('form_a', 'forward', %w, %h)
    %out, %lse = run('form_b', 'forward', %q, %k, %v)
    ...
    %d_q, %d_k, %d_v = run('form_b', 'backward', %q, %k, %v, %out, %lse, %d_out)

After, where %d_q, %d_k and %d_v are in the memory of %q, %k and %v:

    %d_q, %d_k, %d_v = run('form_b', 'backward_in_place', %q, %k, %v, %out, %lse, %d_out)
"""

from __future__ import annotations

from dataclasses import dataclass

from oomc import in_place, steps
from oomc.program import PassResult, Program


@dataclass(frozen=True)
class OverwriteValues:
    """See the module's docstring."""

    name: str = "overwrite_values"

    def __call__(self, program: Program) -> PassResult:
        assert program.step is not None
        changed = False
        for node in program.step.graph.nodes:
            if node.target in steps.COMPUTE and node.args[2] == "backward" and not in_place.why_not(program, node):
                node.args = (*node.args[:2], steps.IN_PLACE, *node.args[3:])
                changed = True
        return PassResult(program, changed)
