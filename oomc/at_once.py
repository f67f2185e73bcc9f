"""Gradients of experts' weights of all chunks at once: at the end of a backward in chunks, one grouped product each.

Otherwise each chunk gives gradients of the size of the weights, and all are added up in fp32: of a layer of
Qwen3-30B-A3B some 7 GB to move for each chunk, however few tokens it has. What the products read is smaller where a
batch is short: rows of activations and of gradients in expert order. A form whose backward has such products has three
more graphs:

    backward_orders    what the backward takes, of the whole batch -> `inverse` of each route
    backward_rows      as backward, of a chunk -> its gradients without these, then operands, and `order` of each route
    backward_products  what the backward takes, of the whole batch, and the operands -> these gradients

The loop (oomc.runtime.compute) puts operands together in the expert order of the whole batch, so that the products are
those of a backward without chunks. An operand that is dispatched is kept as tokens, and dispatched again.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from torch import fx

from oomc import meta, ops
from oomc.dims import Layout, TokenSymbols, tokens_of
from oomc.flops import nbytes
from oomc.fxutil import closure, subgraph
from oomc.match import op_name
from oomc.worksets import AtOnce, Form, Operand

SAME_ROWS = ("view", "reshape", "_to_copy", "clone")
"""Operators between a choice of experts and its route that leave tokens in their order."""
Routes = dict[fx.Node, Layout]


def added(form: Form, symbols: TokenSymbols) -> Form:
    """The form with the graphs that make gradients at once, if it runs in tiles and has such gradients."""
    if not form.chunk or form.backward is None:
        return form
    graph = form.backward.graph
    results: list[Any] = list(graph.find_nodes(op="output")[0].args[0])
    routes: Routes = {}
    found = {i: _products(form, results[i], routes, symbols) for i in range(len(form.gradients))}
    chosen = [i for i, products in found.items() if products]
    if not chosen:
        return form
    inputs = dict.fromkeys(x for i in chosen for product in found[i] for x in _reads(product))
    operands = dict(_operand(*each, routes, symbols) for each in inputs)
    read = dict.fromkeys([*operands, *(node for node, _ in inputs)])
    placeholders = graph.find_nodes(op="placeholder")
    carried = len(form.carried("backward"))
    taken, kept = placeholders[: len(placeholders) - carried], len(form.gradients)
    others = [None if i in chosen else result for i, result in enumerate(results[:kept])]
    orders = [_part(route, 0) for route in routes]
    return replace(
        form,
        backward_orders=subgraph(form.backward, taken, [_part(route, 1) for route in routes]),
        backward_rows=subgraph(form.backward, placeholders, [*others, *operands, *orders, *results[kept:]]),
        backward_products=subgraph(form.backward, [*taken, *operands], [results[i] for i in chosen]),
        at_once=AtOnce(
            results=tuple(chosen),
            operands=tuple(operands.values()),
            pairs=tuple(routes.values()),
            formula=symbols.formula(sum(nbytes(meta.value(node)) for node in read)),
            numbers=sum(meta.value(results[i]).numel() for i in chosen),
            itemsize=min(meta.value(results[i]).element_size() for i in chosen),
        ),
    )


def _products(form: Form, result: Any, routes: Routes, symbols: TokenSymbols) -> list[fx.Node]:
    """The grouped products that alone make a parameter's gradient, whose routes are noted; none if others do too."""
    assert form.backward is not None
    if not isinstance(result, fx.Node):
        return []
    products = form.backward.graph.find_nodes(op="call_function", target=ops.grouped_mm_weight)
    behind = closure([result], set(products))
    found = [product for product in products if product in behind]
    if any(n.op == "placeholder" and not meta.is_size(n) for n in behind):
        return []
    own = {route: _pairs(route, symbols) for product in found if (route := _route(product)) is not None}
    if not all(own.values()) or any(_route(product) is None for product in found):
        return []
    routes.update(own)
    return found


def _route(product: fx.Node) -> fx.Node | None:
    """What has made a product's offsets."""
    offsets: Any = product.args[2]
    if offsets.target is operator.getitem and offsets.args[0].target is ops.route and offsets.args[1] == 2:
        route: fx.Node = offsets.args[0]
        return route
    return None


def _pairs(route: fx.Node, symbols: TokenSymbols) -> Layout:
    """How the pairs of a token and of an expert [T * k] that a route sorts carry tokens; empty if that is not known."""
    index: Any = route.args[0]
    node = index
    while op_name(node) in SAME_ROWS:
        node = node.args[0]
    layout = symbols.layout(meta.value(index)) or ()
    parts = {user.args[1] for user in route.users if user.target is operator.getitem}
    known = node.op == "placeholder" and len(layout) == 2 and tokens_of(layout[:1]) and not tokens_of(layout[1:])
    return ((*layout[0], *layout[1]),) if known and parts >= {0, 1} else ()


def _part(route: fx.Node, index: int) -> fx.Node:
    """One of a route's results."""
    return next(user for user in route.users if user.target is operator.getitem and user.args[1] == index)


def _reads(product: fx.Node) -> list[tuple[Any, fx.Node]]:
    """Both operands of a product, each with its route."""
    route = _route(product)
    assert route is not None
    return [(node, route) for node in product.args[:2]]


def _operand(node: fx.Node, route: fx.Node, routes: Routes, symbols: TokenSymbols) -> tuple[fx.Node, Operand]:
    """What is kept of an operand, and how."""
    if node.target is ops.dispatch and node.args[1] is _part(route, 0):
        tokens: Any = node.args[0]
        layout = symbols.layout(meta.value(tokens)) or ()
        if layout and tokens_of(layout[:1]) and not tokens_of(layout[1:]):
            return tokens, Operand(layout)
    return node, Operand(route=list(routes).index(route))
