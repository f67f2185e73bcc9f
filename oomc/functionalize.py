"""Writes in place become functional ops, so that a value is the same wherever it is used.

A tensor and the views taken of it are a family: they share memory. A write to one of them computes its new value out
of place, and carries it up to the family's base by the inverse of each view; what is used later is taken from there.

Before:

    %v = aten.slice(%x, 1, 1)
    %w = aten.copy_(%v, %y)
    %z = aten.mul(%x, %v)

After:

    %v = aten.slice(%x, 1, 1)
    %x2 = aten.slice_scatter(%x, %y, 1, 1)
    %z = aten.mul(%x2, %y)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from oomc import meta, private
from oomc.errors import UnsupportedError
from oomc.fxutil import insert_call, is_mutating
from oomc.match import argument, op_name
from oomc.program import InputSpec, Program

aten = torch.ops.aten
Call = Callable[..., fx.Node]
SCATTERS: dict[str, Any] = {"slice": aten.slice_scatter.default, "select": aten.select_scatter.default,
            "diagonal": aten.diagonal_scatter.default}  # fmt: skip
SELF_INVERSE = frozenset({"transpose", "swapaxes", "swapdims", "t", "numpy_T", "mT"})
SAME_ELEMENTS = frozenset(
    {"view", "_unsafe_view", "reshape", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "view_as",
     "reshape_as"}
)  # fmt: skip
SURE_VIEWS = {*SCATTERS, *SELF_INVERSE, *SAME_ELEMENTS, "narrow", "permute", "movedim", "split", "split_with_sizes",
              "chunk", "unbind", "detach"}  # fmt: skip
SIZES = frozenset({"sym_size", "sym_stride", "sym_numel", "sym_storage_offset"})


def functionalize(program: Program) -> bool:
    """Make every in-place op on a value of the graph functional. Ops that draw random numbers stay: they are refused.

    Raises:
        UnsupportedError: the graph writes to its inputs, or in a way that has no functional form.
    """
    graph = program.forward.graph
    changed = replace_changed_views(graph)
    if not any(_writes(n) for n in graph.nodes):
        return changed
    inputs = dict(zip(graph.find_nodes(op="placeholder"), program.inputs, strict=True))
    Families(graph, inputs).rewrite()
    return True


def replace_changed_views(graph: fx.Graph) -> bool:
    """Replace ops that change what a tensor shows of its memory (`unsqueeze_`, `detach_`) by the view they amount to.

    A trace takes constants by `detach_`: that stays.
    """
    changed = False
    for node in list(graph.nodes):
        if not is_mutating(node) or torch.Tag.inplace_view not in _op(node).tags:
            continue
        target: Any = node.args[0]
        if target.op == "placeholder" and op_name(node) == "detach_":
            continue
        functional = _functional_form(node.target)
        if functional is None or functional._schema.returns[0].alias_info is None:
            raise UnsupportedError(f"the forward changes a tensor's memory by {node.target} at {meta.source(node)}")
        order = {n: i for i, n in enumerate(graph.nodes)}
        later = [u for u in target.users if order[u] > order[node]]
        with graph.inserting_before(node):
            new = insert_call(graph, functional, node.args, node.kwargs, like=node)
        for user in later:
            user.replace_input_with(target, new)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        changed = True
    return changed


class Families:
    """The graph's tensors by the memory that they share, as it was traced, and what stands for each by now.

    Attributes:
        same: the tensor that a write in place gives back.
        parent: what a view was taken of.
        latest: what stands for a tensor, and the number of writes before it was taken.
        written: the number of writes when a base was last written to.
        lost: bases that have been written to through a view that has no inverse.
        tangled: memories of which it is unknown how their tensors share them.
    """

    def __init__(self, graph: fx.Graph, inputs: dict[fx.Node, InputSpec]) -> None:
        self.graph, self.inputs, self.writes = graph, inputs, 0
        self.same: dict[fx.Node, fx.Node] = {}
        self.parent: dict[fx.Node, fx.Node] = {}
        self.latest: dict[fx.Node, tuple[int, fx.Node]] = {}
        self.written: dict[fx.Node, int] = {}
        self.lost: dict[fx.Node, str] = {}
        self.tangled: set[int] = set()
        self.memories = {n: _memories(n) for n in graph.nodes}
        owners: dict[int, fx.Node] = {}
        for node in graph.nodes:
            source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
            if source is not None and is_mutating(node):
                self.same[node] = self.same.get(source, source)
            elif source is not None and node.op == "call_function" and self._is_view(node, source):
                self.parent[node] = self.same.get(source, source)
            if isinstance(meta.value(node), tuple | list) and node not in self.parent:
                self.memories[node] = set()  # fresh results (topk's, say): each part has memory of its own
            base = self.base(node)
            for memory in self.memories[node]:
                if owners.setdefault(memory, base) is not base:
                    self.tangled.add(memory)

    def _is_view(self, node: fx.Node, source: fx.Node) -> bool:
        # a constant's fresh copy has been dropped from the graph: its memory in the trace is not its views'
        return bool(self.memories[node] & self.memories[source]) or (
            self._is_literal(source) and op_name(node) in SURE_VIEWS
        )

    def base(self, node: fx.Node) -> fx.Node:
        """The tensor that a family's views were taken of."""
        node = self.same.get(node, node)
        while node in self.parent:
            node = self.parent[node]
        return node

    def rewrite(self) -> None:
        """Make all writes functional."""
        done: list[fx.Node] = []
        for node in list(self.graph.nodes):
            if _writes(node):
                self.write(node)
                done.append(node)
            elif op_name(node) in SIZES:  # no write changes a size
                node.args = _mapped(node.args, lambda n: self.same.get(n, n))
            elif self.written and any(self.base(n) in self.written for n in node.all_input_nodes):
                self.update(node)
        for node in reversed(done):
            self.graph.erase_node(node)

    def update(self, node: fx.Node) -> None:
        """Let a node use what its inputs are by now."""
        node.args, node.kwargs = self._arguments(node)
        if node in self.parent:
            node.target = _for_any_strides(node)
            self.latest[node] = (self.written.get(self.base(node), 0), node)

    def _arguments(self, node: fx.Node) -> Any:
        return _mapped((node.args, node.kwargs), lambda n: self.current(n, node))

    def current(self, node: fx.Node, user: fx.Node) -> fx.Node:
        """What stands for a tensor when `user` runs."""
        node = self.same.get(node, node)
        base = self.base(node)
        taken, value = self.latest.get(node, (0, node))
        if taken >= self.written.get(base, 0):
            return value
        if base in self.lost:
            raise UnsupportedError(f"{self.lost[base]}, and uses that memory at {_where(user)}: copy it with clone()")
        source = self.current(self.parent[node], user)
        with self.graph.inserting_before(user):
            args = (source, *node.args[1:])
            value = insert_call(self.graph, _for_any_strides(node), args, node.kwargs, like=user)
        self.latest[node] = (self.written[base], value)
        return value

    def write(self, node: fx.Node) -> None:
        """Compute what a write writes, and carry it to the base."""
        target = node.args[0] if node.args else None
        if not isinstance(target, fx.Node) or _written_arguments(node) != [0]:
            raise UnsupportedError(f"the forward writes in place by {node.target} at {_where(node)}")
        if self.memories[target] & self.tangled:
            raise UnsupportedError(f"the forward writes at {_where(node)} to memory that others share unseen")
        target = self.same.get(target, target)
        base = self.base(target)
        if base.op != "call_function" and not self._is_literal(base):
            name = self.inputs[base].target if base in self.inputs else base.name
            raise UnsupportedError(
                f"the forward writes to its input {name} at {_where(node)}; "
                "a step that is recomputed would write twice: write to a clone() of it"
            )

        def call(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
            return insert_call(self.graph, op, args, kwargs, like=node)

        args, kwargs = self._arguments(node)
        self.writes += 1
        with self.graph.inserting_before(node):
            value = self._take(call, target, out_of_place(call, node, args, kwargs))
            while target in self.parent:
                up = self.parent[target]
                if target.target is operator.getitem and up in self.parent:
                    up = self.parent[up]
                inverse = undo_view(call, target, self.current(up, node), value)
                if inverse is None:  # its memory is its own from here on
                    self.lost[base] = f"the forward writes at {_where(node)} through {target.target}"
                    self.written[base] = self.writes
                    del self.parent[target]
                    break
                target, value = up, self._take(call, up, inverse)
        self.written[target] = self.writes

    def _take(self, call: Call, target: fx.Node, value: fx.Node) -> fx.Node:
        """Let `value` stand for `target`; what was contiguous stays so, since later views may need it."""
        if meta.value(target).is_contiguous() and not meta.value(value).is_contiguous():
            value = call(aten.contiguous.default, value)
        self.latest[target] = (self.writes, value)
        return value

    def _is_literal(self, node: fx.Node) -> bool:
        """Whether a constant was written in the code (`torch.tensor(2.0)`): each step has a fresh copy of it."""
        spec = self.inputs.get(node)
        return spec is not None and spec.kind == "constant" and "lifted_tensor_" in spec.target


def out_of_place(call: Call, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """The value that a write gives the tensor that it writes to, `args[0]`."""
    old, name = args[0], op_name(node)
    before, new = meta.value(old), old
    if name == "copy_":  # not aten.copy, which has no derivative
        new = args[1]
        if meta.value(new).device != before.device:
            new = call(aten.to.device, new, before.device, before.dtype)
    elif name != "dropout_" or (args[2] and args[1]):
        functional = _functional_form(node.target)
        if functional is None:
            raise UnsupportedError(f"{node.target} at {_where(node)} has no form that does not write in place")
        new = call(functional, *args, **kwargs)
    after = meta.value(new)
    if after.dtype != before.dtype:
        new = call(aten.to.dtype, new, before.dtype)
    if [private.expression(s) for s in after.shape] != [private.expression(s) for s in before.shape]:
        new = call(aten.expand.default, new, _sizes(call, old))
    assert isinstance(new, fx.Node)
    return new


def undo_view(call: Call, view: fx.Node, base: fx.Node, new: fx.Node) -> fx.Node | None:
    """`base`, of which `view` was taken, with `new` in the view's place; None if there is no rule for it."""
    name, rest = op_name(view), view.args[1:]
    if name == "getitem":
        return _undo_part(call, view, base, new)
    if meta.value(new).dtype != meta.value(base).dtype:
        return None
    if name in SCATTERS:
        return call(SCATTERS[name], base, new, *rest, **view.kwargs)
    if name in SELF_INVERSE:
        return call(_op(view), new, *rest, **view.kwargs)
    if name in SAME_ELEMENTS:
        return call(aten.reshape.default, new, _sizes(call, base))
    if name == "movedim":
        return call(_op(view), new, argument(view, 2, "destination"), argument(view, 1, "source"))
    if name == "permute":
        dims = [d % len(meta.value(base).shape) for d in argument(view, 1, "dims")]
        return call(aten.permute.default, new, [dims.index(d) for d in range(len(dims))])
    if name == "narrow":
        dim, start, length = (argument(view, i + 1, n) for i, n in enumerate(("dim", "start", "length")))
        if isinstance(start, int) and isinstance(length, int) and start >= 0:
            return call(aten.slice_scatter.default, base, new, dim, start, start + length)
    return None


def _undo_part(call: Call, part: fx.Node, base: fx.Node, new: fx.Node) -> fx.Node | None:
    """Like `undo_view`, for one of the parts that a tensor was split into."""
    parts: Any = part.args[0]
    index: Any = part.args[1]
    if op_name(parts) == "unbind":
        return call(aten.select_scatter.default, base, new, argument(parts, 1, "dim", 0), index)
    if op_name(parts) in ("split", "split_with_sizes", "chunk"):
        dim = argument(parts, 2, "dim", 0)
        widths = [val.shape[dim] for val in meta.value(parts)[: index + 1]]
        if all(isinstance(w, int) for w in widths):
            return call(aten.slice_scatter.default, base, new, dim, sum(widths[:-1]), sum(widths))
    return None


def _op(node: fx.Node) -> Any:
    return node.target


def _writes(node: fx.Node) -> bool:
    """Whether the node changes values in place, other than at random."""
    if not is_mutating(node) or torch.Tag.inplace_view in _op(node).tags:
        return False
    return op_name(node) == "dropout_" or torch.Tag.nondeterministic_seeded not in _op(node).tags


def _written_arguments(node: fx.Node) -> list[int]:
    infos = [a.alias_info for a in _op(node)._schema.arguments]
    return [i for i, info in enumerate(infos) if info is not None and info.is_write]


def _functional_form(op: Any) -> Any:
    """`aten.add.Tensor` for `aten.add_.Tensor`, `aten.__or__.Tensor` for `aten.__ior__.Tensor`; None without one."""
    name = op._opname
    functional = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")
    packet = getattr(aten, functional, None) if op.namespace == "aten" and functional != name else None
    forms = [getattr(packet, overload) for overload in packet.overloads()] if packet else []
    return next((f for f in forms if _signature(f) == _signature(op)), None)


def _signature(op: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in op._schema.arguments]


def _for_any_strides(view: fx.Node) -> Any:
    """The op that takes a view again: a written base may lie in memory in another order than the traced one."""
    if op_name(view) == "as_strided":
        raise UnsupportedError(f"the forward takes as_strided of what it writes to, at {_where(view)}")
    return aten.reshape.default if view.target in (aten.view.default, aten._unsafe_view.default) else view.target


def _memories(node: fx.Node) -> set[int]:
    """The memories of a node's tensors in the trace."""
    val = meta.value(node)
    vals = val if isinstance(val, tuple | list) else (val,)
    return {v.untyped_storage()._cdata for v in vals if isinstance(v, torch.Tensor)}


def _sizes(call: Call, node: fx.Node) -> list[Any]:
    shape = meta.value(node).shape
    return [s if isinstance(s, int) else call(aten.sym_size.int, node, d) for d, s in enumerate(shape)]


def _mapped(arguments: Any, change: Callable[[fx.Node], fx.Node]) -> Any:
    return fx.node.map_arg(arguments, change)


def _where(node: fx.Node) -> str:
    return meta.source(node) or node.name
