"""What a form in chunks of tokens hands from each chunk to the next: the states of its operators that are in order.

As captured, such an operator begins with no state. Here each gets a placeholder for the state before its first
position, and its state after the last becomes an output:

    %gated_delta_rule = oomc.gated_delta_rule(%q, %k, %v, %g, %beta, None, 64, True)
    return (%y)

becomes

    %gated_delta_rule = oomc.gated_delta_rule(%q, %k, %v, %g, %beta, %carry_0, 64, True)
    %getitem_1 = getitem(%gated_delta_rule, 2)
    return (%y, %getitem_1)
"""

from __future__ import annotations

import operator

from torch import fx

from oomc import meta, ops
from oomc.dims import TokenSymbols
from oomc.fxutil import insert_call
from oomc.worksets import Carry, Form


def open_carries(form: Form, symbols: TokenSymbols) -> tuple[fx.GraphModule, tuple[Carry, ...]]:
    """The form's captured graph with its states as last placeholders and last outputs, and what they are.

    A form that is not in chunks of tokens, or has no such operator, stays as it is.
    """
    if form.chunk != "tokens" or not any(n.target in ops.CARRIES for n in form.traced.graph.nodes):
        return form.traced, ()
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(form.traced.graph, mapping)
    for old, new in mapping.items():
        new.meta = dict(old.meta)
    last, states, carries = graph.find_nodes(op="placeholder")[-1], list[fx.Node](), list[Carry]()
    for node in [n for n in graph.nodes if n.target in ops.CARRIES]:
        before, after = ops.CARRIES[node.target]
        with graph.inserting_after(node):
            state = insert_call(graph, operator.getitem, (node, after), like=node)
        val = meta.value(state)
        with graph.inserting_after(last):
            last = graph.placeholder(f"carry_{len(states)}")
        meta.set_value(last, val)
        node.args = (*node.args[:before], last, *node.args[before + 1 :])
        states.append(state)
        carries.append(Carry(symbols.layout(val) or (), val.dtype))
    graph.output((*results, *states))  # type: ignore[misc]
    return fx.GraphModule(form.traced, graph), tuple(carries)
