"""Small tools for editing fx graphs that keep their metadata right."""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from oomc import meta, private


def is_mutating(node: fx.Node) -> bool:
    """Whether the node's op writes to one of its inputs."""
    return (
        node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    )


def memory_of(node: Any) -> fx.Node | None:
    """The node whose memory a node's value may lie in: itself, or what it is a view of."""
    while isinstance(node, fx.Node):
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            if not _is_view(node.args[0]):
                return node
        elif not _is_view(node):
            return node
        node = node.args[0]
    return None


def _is_view(node: fx.Node) -> bool:
    """Whether a result may lie in the memory of the first argument, as the operator's schema says."""
    op = node.target
    return isinstance(op, torch._ops.OpOverload) and any(r.alias_info is not None for r in op._schema.returns)


def fake_mode_of(graph: fx.Graph) -> private.FakeTensorMode:
    """The fake mode that the graph's values belong to."""
    for node in graph.nodes:
        val = meta.tensor(node)
        if isinstance(val, private.FakeTensor):
            return private.mode_of(val)
    raise AssertionError("the graph holds no fake tensor")


def values(tree: Any) -> Any:
    """`tree` with every node replaced by what stands for its value."""
    return pytree.tree_map_only(fx.Node, meta.value, tree)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph, with each node's own dict of metadata.

    As fx.Graph.graph_copy, without its looking for symbolic sizes among the arguments of every node, which takes longer
    than the copy.
    """
    new, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        made = new.create_node(node.op, node.target, name=node.name, type_expr=node.type)
        made.args = fx.map_arg(node.args, copies.__getitem__)
        made.kwargs = fx.map_arg(node.kwargs, copies.__getitem__)
        made.meta = copy.copy(node.meta)
        copies[node] = made
    return new


def insert_call(
    graph: fx.Graph, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, like: fx.Node | None = None
) -> fx.Node:
    """Insert `op(*args, **kwargs)` at the graph's insertion point, with its fake value and the origin of `like`."""
    kwargs = kwargs or {}
    node = graph.call_function(op, args, kwargs)
    with private.enable_python_dispatcher(), fake_mode_of(graph):
        meta.set_value(node, op(*values(args), **values(kwargs)))
    if like is not None:
        meta.copy_origin(node, like)
    return node


def append_placeholder(module: fx.GraphModule, name: str, val: torch.Tensor) -> fx.Node:
    """Add a placeholder after the last one."""
    last = module.graph.find_nodes(op="placeholder")[-1]
    with module.graph.inserting_after(last):
        node = module.graph.placeholder(name)
    meta.set_value(node, val)
    return node


def erase_dead(graph: fx.Graph) -> bool:
    """Erase what nothing uses; ops that write to memory stay, since a view of it may be used, as do placeholders."""
    changed = False
    for node in reversed(list(graph.nodes)):
        if node.op in ("placeholder", "output") or node.users or is_mutating(node):
            continue
        graph.erase_node(node)
        changed = True
    return changed


def rough_bytes(val: Any, size: int = 16) -> int:
    """Bytes of what stands for a tensor or a tuple of them, where every symbol is `size`: to compare, not to plan."""
    total = 0
    for tensor in val if isinstance(val, tuple | list) else [val]:
        if isinstance(tensor, torch.Tensor):
            count = tensor.element_size()
            for each in tensor.shape:
                expr = private.expression(each)
                count *= expr if isinstance(expr, int) else int(expr.subs(dict.fromkeys(expr.free_symbols, size)))
            total += count
    return total
