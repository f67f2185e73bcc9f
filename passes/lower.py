"""lower: unique forms become callables, and the step graph one readable Python module.

With `backend="eager"` a form's graph runs op by op, with exactly the memory that the plan projects; with
`backend="inductor"` it is compiled by torch.compile, once for all batch shapes, but for backwards in place.

Before, forms as graphs:

    form_b.forward: %y = aten.mm(%x, %w)

After, the same as callables, in `program.compiled`:

    compiled['form_b', 'forward'](x, w) -> (y,)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from oomc import private, steps
from oomc.errors import UnsupportedError
from oomc.opdef import BODIES
from oomc.program import PassResult, Program
from oomc.rms_norm import PLAIN

BACKENDS = ("eager", "inductor")


@dataclass(frozen=True)
class Lower:
    """See the module's docstring."""

    backend: str = "eager"
    name: str = "lower"

    def __call__(self, program: Program) -> PassResult:
        if self.backend not in BACKENDS:
            raise UnsupportedError(f"backend={self.backend!r} is not known; there are {', '.join(BACKENDS)}")
        assert program.step is not None
        used = {(n.args[1], n.args[2]) for n in program.step.graph.nodes if n.op == "call_function" and
                n.target.__name__ in ("run", "run_chunks")}  # fmt: skip
        used |= {(f, part) for f, v in used if v == "backward" and program.forms[f].at_once for part in steps.PARTS}
        new = sorted(key for key in used if key not in program.compiled)
        for form, variant in new:
            program.compiled[form, variant] = lowered(getattr(program.forms[form], variant), variant, self.backend)
        program.step.recompile()
        return PassResult(program, bool(new))


def lowered(graph: fx.GraphModule, variant: str, backend: str) -> Callable[..., Any]:
    """What runs a form's graph."""
    # there is nothing to fuse around what these do: attention in place, routes and products
    as_it_is = (steps.IN_PLACE, steps.ORDERS, steps.PRODUCTS)
    return direct(graph) if backend == "eager" or variant in as_it_is else compiled(graph)


def direct(graph: fx.GraphModule) -> Callable[..., Any]:
    """The graph op by op, with this package's operators as plain functions: dispatch to one in Python takes longer than
    the launches of its kernels, and in small chunks that is what a step waits for. Below autograd, as an operator's
    kernel is: forms hold no operator that needs it.
    """
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph.graph, {}))
    for node in copy.nodes:
        if node.target in BODIES:
            node.target = BODIES[node.target].function
    module = fx.GraphModule(graph, copy)

    def run(*args: Any) -> Any:
        with private.below_autograd():
            return module(*args)

    return run


def compiled(graph: fx.GraphModule) -> Callable[..., Any]:
    """The graph through Inductor, for all batch shapes; it fuses norms with what is around them."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph.graph, {}))
    for node in copy.nodes:
        node.target = PLAIN.get(node.target, node.target)
    function: Callable[..., Any] = torch.compile(fx.GraphModule(graph, copy), fullgraph=True, dynamic=True)
    return function
