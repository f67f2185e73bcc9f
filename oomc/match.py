"""What passes need to recognise a part of a graph by what it computes: small real runs of it, and slices.

How a mask or an index is written differs from model to model; what it is does not. `Concrete` runs the nodes in
question on small real tensors, so that a pass can compare their values with what it would put in their place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils import _pytree as pytree

from oomc import fxutil, meta, private

aten = torch.ops.aten

# One input, and every element of the output is an element of it: no arithmetic.
MOVEMENT = frozenset(
    {"view", "reshape", "_unsafe_view", "expand", "expand_as", "unsqueeze", "squeeze", "transpose", "permute", "t",
     "mT", "clone", "contiguous", "alias", "flatten", "unflatten", "repeat", "repeat_interleave", "detach", "swapaxes",
     "movedim", "adjoint", "numpy_T"}
)  # fmt: skip


class Unknown(Exception):  # noqa: N818 - an answer, not a fault
    """A node's value cannot be had from what is given."""


def op_name(node: fx.Node) -> str:
    """`add` for `aten.add.Tensor`, `getitem` for operator.getitem, '' for what is neither."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._opname if target.namespace == "aten" else f"{target.namespace}.{target._opname}"
    return "getitem" if target is operator.getitem else ""


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """An argument of `node`, given by place or by name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for every batch and sequence."""
    return bool(guard_or_false(a == b))


def user_name(module: str) -> str:
    """A module's name as the user's model has it; capture wraps the model."""
    return module.removeprefix("_model").removeprefix(".") or "the model"


def ancestors(roots: Iterable[fx.Node], stop: Callable[[fx.Node], bool] = lambda _: False) -> set[fx.Node]:
    """`roots` and all that they are computed from; nodes for which `stop` holds are in it, what lies above is not."""
    seen: set[fx.Node] = set()
    work = list(roots)
    while work:
        node = work.pop()
        if node in seen:
            continue
        seen.add(node)
        if not stop(node):
            work.extend(node.all_input_nodes)
    return seen


def descendants(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """`roots` and all that is computed from them."""
    seen: set[fx.Node] = set()
    work = list(roots)
    while work:
        node = work.pop()
        if node not in seen:
            seen.add(node)
            work.extend(node.users)
    return seen


def movement_chain(node: fx.Node) -> Iterator[fx.Node]:
    """`node` and what it was made from by moving elements only, nearest first."""
    yield node
    while op_name(node) in MOVEMENT and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        yield node


def int_literals(nodes: Iterable[fx.Node]) -> set[int]:
    """The integers written in the arguments of `nodes`."""
    found: set[int] = set()
    for node in nodes:
        for leaf in pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(leaf, int) and not isinstance(leaf, bool):
                found.add(leaf)
    return found


def wide(dtype: torch.dtype) -> torch.dtype:
    """fp32 for half precision: values are compared as exactly as fp32 goes."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def writes(node: fx.Node) -> bool:
    """Whether the node changes values in memory; detach_ only changes what autograd knows of them."""
    return fxutil.is_mutating(node) and op_name(node) != "detach_"


def erase_dead_writes(graph: fx.Graph) -> None:
    """Erase what nothing uses, in-place ops on memory that nothing else sees included."""
    fxutil.erase_dead(graph)
    while True:
        dead = [n for n in graph.nodes if writes(n) and not n.users and _sees_alone(n)]
        if not dead:
            return
        for node in dead:
            graph.erase_node(node)
        fxutil.erase_dead(graph)


def _sees_alone(node: fx.Node) -> bool:
    """Whether the memory that `node` writes to was made for it: by a chain of views with one user each."""
    source = node.all_input_nodes[0]
    while len(source.users) == 1 and op_name(source) in MOVEMENT:
        source = source.all_input_nodes[0]
    op = source.target
    fresh = isinstance(op, torch._ops.OpOverload) and all(r.alias_info is None for r in op._schema.returns)
    return len(source.users) == 1 and fresh


def functional(node: fx.Node) -> Any:
    """The op of `node`, or for an in-place op whose memory nothing else reads, its form that writes to none.

    Raises:
        Unknown: others read the memory, or there is no such form.
    """
    op: Any = node.target
    if not writes(node):
        return op
    packet = getattr(aten, op._opname.removesuffix("_"), None)
    if packet is None or op._overloadname not in packet.overloads() or not _sees_alone(node):
        raise Unknown(f"{node} writes to what others read")
    return getattr(packet, op._overloadname)


@dataclass
class Concrete:
    """Values of nodes at small sizes.

    Attributes:
        sizes: a number for each symbol, by name.
        given: values of nodes that are not to be computed.
        leaf: called for placeholders that are not given; may raise Unknown.
        literals: integers in the graph's text that are to be read as others.
    """

    sizes: Mapping[str, int]
    given: dict[fx.Node, Any]
    leaf: Callable[[fx.Node], torch.Tensor] | None = None
    literals: Mapping[int, int] = field(default_factory=dict)
    _done: dict[fx.Node, Any] = field(default_factory=dict)

    def size(self, size: Any) -> int:
        """A symbolic size as a number."""
        expression = private.expression(size)
        if isinstance(expression, int):
            return expression
        known = {s: sympy.Integer(self.sizes[s.name]) for s in expression.free_symbols if s.name in self.sizes}
        result = expression.xreplace(known)
        if not getattr(result, "is_Integer", False):
            raise Unknown(f"size {size}")
        return int(result)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape of a node's tensor, in numbers."""
        val = meta.tensor(node)
        if val is None:
            raise Unknown(f"{node} is no tensor")
        return tuple(self.size(s) for s in val.shape)

    def __call__(self, node: fx.Node) -> Any:
        """The value of `node`.

        Raises:
            Unknown: it depends on what is not given, or does not run at these sizes.
        """
        work = [node]
        while work:
            top = work[-1]
            if top in self._done or top in self.given:
                work.pop()
                continue
            if op_name(top) == "sym_size" or not top.all_input_nodes:
                self._done[work.pop()] = self._source(top)
                continue
            missing = [n for n in top.all_input_nodes if n not in self._done and n not in self.given]
            if missing:
                work.extend(missing)
            else:
                self._done[work.pop()] = self._run(top)
        return self.given[node] if node in self.given else self._done[node]

    def _source(self, node: fx.Node) -> Any:
        if op_name(node) == "sym_size":
            return self.size(meta.value(node))
        if node.op == "call_function":
            return self._run(node)
        if node.op != "placeholder" or self.leaf is None:
            raise Unknown(f"{node} is not given")
        return self.leaf(node)

    def _run(self, node: fx.Node) -> Any:
        target: Any = node.target
        if node.op != "call_function" or isinstance(target, torch._ops.HigherOrderOperator):
            raise Unknown(f"{node} cannot be run")
        if writes(node) and not _sees_alone(node):
            raise Unknown(f"{node} writes to what others read")

        def read(leaf: Any) -> Any:
            if isinstance(leaf, fx.Node):
                return self.given[leaf] if leaf in self.given else self._done[leaf]
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            if isinstance(leaf, torch.dtype):
                return wide(leaf)
            if isinstance(leaf, int) and not isinstance(leaf, bool):
                return self.literals.get(leaf, leaf)
            return leaf

        args, kwargs = pytree.tree_map(read, (node.args, node.kwargs), is_leaf=lambda x: isinstance(x, fx.Node))
        if writes(node):
            args = (args[0].clone(), *args[1:])
        if op_name(node) == "histc" and not args[0].is_floating_point():
            # Models call it on integers where they were traced for CUDA; the CPU has it for floats only.
            return target(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
        try:
            with torch.no_grad():
                return target(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
            raise Unknown(f"{node} does not run: {error}") from error


def symbols(nodes: Iterable[fx.Node]) -> set[str]:
    """Names of the size symbols that occur in the values of `nodes`."""
    found: set[str] = set()
    for node in nodes:
        for leaf in pytree.tree_leaves(meta.value(node)):
            sizes = leaf.shape if isinstance(leaf, torch.Tensor) else [leaf]
            for size in sizes:
                found |= {s.name for s in getattr(private.expression(size), "free_symbols", ())}
    return found


def repropagate(graph: fx.Graph, changed: set[fx.Node]) -> None:
    """Bring fake values up to date below `changed`, and turn views that no longer can be views into reshapes."""
    dirty = set(changed)
    mode = fxutil.fake_mode_of(graph)
    for node in graph.nodes:
        target: Any = node.target
        if node.op != "call_function" or not any(n in dirty for n in node.all_input_nodes):
            continue
        args, kwargs = fxutil.values(node.args), fxutil.values(node.kwargs)
        with private.enable_python_dispatcher(), mode:
            try:
                val = target(*args, **kwargs)
            except (RuntimeError, ValueError):
                if op_name(node) not in ("view", "_unsafe_view"):
                    raise
                node.target = aten.reshape.default
                val = aten.reshape.default(*args, **kwargs)
        if _layout(val) != _layout(meta.value(node)):
            dirty.add(node)
        meta.set_value(node, val)


def _layout(val: Any) -> list[str]:
    """What of a value matters to those that use it, comparable without adding guards."""
    leaves = pytree.tree_leaves(val)
    return [f"{v.dtype} {v.shape} {v.stride()}" if isinstance(v, torch.Tensor) else str(v) for v in leaves]
