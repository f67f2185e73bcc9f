"""Small tools for editing fx graphs that keep their metadata right."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from oomc import meta, private

T = TypeVar("T")


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


class OfValues(Generic[T]):
    """A function of what stands for nodes' values, computed once for each: copies of a layer share them."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function
        self._known: dict[int, tuple[Any, T]] = {}

    def __call__(self, val: Any) -> T:
        if id(val) not in self._known:
            self._known[id(val)] = val, self._function(val)  # it is held, or its id might become another's
        return self._known[id(val)][1]


class Results:
    """What stands for results of calls, computed once for each operator and values that it is given."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def of(self, graph: fx.Graph, op: Any, args: Any, kwargs: Any) -> Any:
        """What stands for the result of `op` on what stands for values of the graph."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = op, spec, *((type(x), x) if isinstance(x, int | float) else id(x) for x in leaves)
        if key not in self._known:
            with private.enable_python_dispatcher(), fake_mode_of(graph):
                self._known[key] = leaves, op(*args, **kwargs)  # the leaves are held for their ids
        return self._known[key][1]


def add_call(graph: fx.Graph, op: Any, args: tuple[Any, ...], name: str | None = None) -> fx.Node:
    """Add a call at the graph's insertion point.

    As fx.Graph.call_function, without its looking for symbolic sizes among the arguments, which takes as long as all
    else.
    """
    node = graph.create_node("call_function", op, name=name)
    node.args = args
    return node


def add_copy(graph: fx.Graph, node: fx.Node, copies: Callable[[fx.Node], Any]) -> fx.Node:
    """Add a copy of another graph's node, whose arguments `copies` gives; as fx.Graph.node_copy, but as `add_call`."""
    made = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    made.args = fx.map_arg(node.args, copies)
    if node.kwargs:
        made.kwargs = fx.map_arg(node.kwargs, copies)
    made.meta.update(node.meta)
    return made


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph, with each node's own dict of metadata."""
    new, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copies[node] = add_copy(new, node, copies.__getitem__)
    return new


def insert_call(
    graph: fx.Graph, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, like: fx.Node | None = None,
    results: Results | None = None,
) -> fx.Node:  # fmt: skip
    """Insert `op(*args, **kwargs)` at the graph's insertion point, with its fake value and the origin of `like`."""
    kwargs = kwargs or {}
    node = graph.call_function(op, args, kwargs)
    meta.set_value(node, (results or Results()).of(graph, op, values(args), values(kwargs)))
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


def closure(ends: Iterable[Any], stops: set[fx.Node]) -> set[fx.Node]:
    """All nodes that `ends` depend on, not looking behind `stops`."""
    seen: set[fx.Node] = set()
    frontier = [n for n in ends if isinstance(n, fx.Node)]
    while frontier:
        node = frontier.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in stops:
            frontier.extend(node.all_input_nodes)
    return seen


def subgraph(module: fx.GraphModule, inputs: list[fx.Node], outputs: list[Any]) -> fx.GraphModule:
    """The part of the graph that computes `outputs` from `inputs`, as a module of its own."""
    needed = closure(outputs, set(inputs))
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(inputs):
        mapping[node] = graph.placeholder(f"arg{index}_{node.name}")
        mapping[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        if node in needed and node not in mapping:
            assert node.op != "placeholder", f"{node} is no input of the subgraph"
            mapping[node] = graph.node_copy(node, lambda n: mapping[n])
    graph.output(tuple(mapping[n] if isinstance(n, fx.Node) else n for n in outputs))
    constants = {str(n.target): getattr(module, str(n.target)) for n in graph.find_nodes(op="get_attr")}
    return fx.GraphModule(constants or torch.nn.Module(), graph)
