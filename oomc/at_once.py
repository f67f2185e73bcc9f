"""Gradients of experts' weights of all chunks at once: at the end of a backward in chunks, one grouped product each.

Otherwise each chunk gives gradients of the size of the weights, and all are added up in fp32: of a layer of
Qwen3-30B-A3B some 7 GB to move for each chunk, however few tokens it has. What the products read is smaller where a
batch is short: rows of activations and of gradients in expert order. A form whose backward has such products has three
more graphs:

    backward_orders    what the backward takes, of the whole batch -> `inverse` of each route
    backward_rows      as backward, of a chunk -> its gradients without these, then operands, and `order` of each route
    backward_products  what the backward takes, of the whole batch, and the operands -> these gradients

The loop (oomc.runtime.compute) puts operands together in the expert order of the whole batch, so that the products are
those of a backward without chunks. An operand that is dispatched is kept as tokens, and dispatched again. Of a group of
experts, rows of others' slots come last in both orders, and no product reads them.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from torch import fx

from oomc import meta, ops
from oomc.dims import Layout, TokenSymbols
from oomc.flops import nbytes
from oomc.fxutil import closure, subgraph
from oomc.match import op_name
from oomc.worksets import AtOnce, Form, Operand

SAME_ORDER = ("view", "reshape", "_to_copy", "clone")
"""Operators between a choice of experts and its route that leave pairs of token and expert in their order."""
Routes = dict[Any, Layout]
"""Routes, each with how the pairs that it sorts [T * k] carry tokens."""


def added(form: Form, symbols: TokenSymbols) -> Form:
    """The form with the graphs that make gradients at once; without them if it has no such gradients."""
    form = replace(form, backward_orders=None, backward_rows=None, backward_products=None, at_once=None)
    if not form.chunk or form.backward is None:
        return form
    graph = form.backward.graph
    results: list[Any] = list(graph.find_nodes(op="output")[0].args[0])
    products: dict[int, list[fx.Node]] = {}
    routes: Routes = {}
    for index in range(len(form.gradients)):
        found = _products(graph, results[index])
        own = {_route(product): _pairs(form, _route(product), symbols) for product in found}
        if found and all(own.values()):
            products[index], routes = found, routes | own
    if not products:
        return form
    made = [product for found in products.values() for product in found]
    read: dict[Any, Any] = {x: _route(product) for product in made for x in product.args[:2]}
    operands = dict(_operand(x, route, routes, symbols) for x, route in read.items())
    placeholders = graph.find_nodes(op="placeholder")
    taken, count = placeholders[: len(placeholders) - len(form.carried("backward"))], len(form.gradients)
    others = [None if i in products else result for i, result in enumerate(results[:count])]
    orders = [_part(route, 0) for route in routes]
    return replace(
        form,
        backward_orders=subgraph(form.backward, taken, [_part(route, 1) for route in routes]),
        backward_rows=subgraph(form.backward, placeholders, [*others, *operands, *orders, *results[count:]]),
        backward_products=subgraph(form.backward, [*taken, *operands], [results[i] for i in products]),
        at_once=AtOnce(
            results=tuple(products),
            operands=tuple(operands.values()),
            pairs=tuple(routes.values()),
            formula=symbols.formula(sum(nbytes(meta.value(x)) for x in {*operands, *read})),
            numbers=sum(meta.value(results[i]).numel() for i in products),
            itemsize=min(meta.value(results[i]).element_size() for i in products),
        ),
    )


def _products(graph: fx.Graph, result: Any) -> list[fx.Node]:
    """The grouped products that a gradient is made of; none if anything else is part of it."""
    every = graph.find_nodes(op="call_function", target=ops.grouped_mm_weight)
    behind = closure([result], set(every))
    alone = all(meta.is_size(node) for node in behind if node.op == "placeholder")
    return [product for product in every if product in behind] if alone else []


def _route(product: fx.Node) -> fx.Node | None:
    """What has made a product's offsets."""
    offsets: Any = product.args[2]
    known = offsets.target is operator.getitem and offsets.args[0].target is ops.route and offsets.args[1] == 2
    return offsets.args[0] if known else None


def _pairs(form: Form, route: fx.Node | None, symbols: TokenSymbols) -> Layout:
    """How the pairs that a route sorts carry tokens, as the choice of experts does of which it is made.

    Empty if that is not known, or if several tiles share a pair: each of them gives it a part of its gradient.
    """
    node: Any = route and route.args[0]
    while node is not None and op_name(node) in SAME_ORDER:
        node = node.args[0]
    if route is None or node.op != "placeholder" or not {_index(user) for user in route.users} >= {0, 1}:
        return ()
    assert form.backward is not None
    place = form.backward.graph.find_nodes(op="placeholder").index(node)
    layouts = {"input": [i.layout for i in form.inputs], "saved": form.saved_layouts, "output": form.output_layouts}
    taken = [layouts[kind][index] for kind, index in form.backward_takes[place : place + 1]]
    atoms = tuple(atom for layout in taken for dim in layout for atom in dim)
    cut = symbols.tokens if form.chunk == "tokens" else symbols.tokens & {"B"}
    return (atoms,) if all(isinstance(atom, int | str) for atom in atoms) and cut <= set(atoms) else ()


def _index(part: fx.Node) -> Any:
    return part.args[1] if part.target is operator.getitem else None


def _part(route: fx.Node, index: int) -> fx.Node:
    """One of a route's results."""
    return next(user for user in route.users if _index(user) == index)


def _operand(node: Any, route: fx.Node, routes: Routes, symbols: TokenSymbols) -> tuple[fx.Node, Operand]:
    """What is kept of an operand, and how."""
    if node.target is ops.dispatch and node.args[1] is _part(route, 0):
        tokens = node.args[0]
        layout, (pairs,) = symbols.layout(meta.value(tokens)) or ((),), routes[route]
        ints = all(isinstance(atom, int) for dim in layout[1:] for atom in dim)
        if ints and layout[0] == tuple(atom for atom in pairs if isinstance(atom, str)):
            return tokens, Operand(layout)
    return node, Operand(route=list(routes).index(route))
