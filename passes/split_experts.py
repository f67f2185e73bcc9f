"""split_experts: a layer's experts are computed in groups, each with weights that are streamed by themselves.

Every group of consecutive experts is a layer in canonical form of its own: it routes among its experts, computes the
slots that fall to them, and adds its share of every token to the sum of those before it, in fp32. A parameter of all
experts becomes a placeholder for each group, with its rows. The groups are marked, and become blocks of their own in
partition_worksets; what they share (router, tokens, routing weights) stays with the layer.

Before:

    %route = oomc.route.default(%index, 8)
    %slots = oomc.dispatch.default(%x, %order, %inverse, 2)
    %h = oomc.grouped_mm.default(%slots, %w, %offsets)                   # w: [8, D, D]
    %out = oomc.combine.default(%h, %weights, %order, %inverse)

After, in two groups:

    %route = oomc.route.default(%index, 4, 0)
    %slots = oomc.dispatch.default(%x, %order, %inverse, 2, %offsets)
    %h = oomc.grouped_mm.default(%slots, %w_0, %offsets)                 # w[0:4]
    %sum = oomc.combine.default(%h, %weights, %order, %inverse, %offsets)

    %route_1 = oomc.route.default(%index, 4, 4)
    %slots_1 = oomc.dispatch.default(%x, %order_1, %inverse_1, 2, %offsets_1)
    %h_1 = oomc.grouped_mm.default(%slots_1, %w_1, %offsets_1)           # w[4:8]
    %sum_1 = oomc.combine.default(%h_1, %weights, %order_1, %inverse_1, %offsets_1)
    %out = aten.add.Tensor(%sum, %sum_1)

Slots of other experts are computed too, since how many there are of which is not known beforehand; products skip them,
and nothing that comes of them is used. A layer in which something else would read them stays whole, and
`program.notes["whole experts"]` says why.
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from oomc import experts, meta, private
from oomc.fxutil import Results, erase_dead, fake_mode_of, insert_call
from oomc.match import argument, op_name
from oomc.passes.partition_worksets import find_layers
from oomc.program import InputSpec, PassResult, Program
from oomc.runtime.layout import Rows

aten = torch.ops.aten
PRODUCTS = frozenset({experts.grouped_mm, experts.grouped_bias})
"""What takes weights of all experts, and leaves out what lies past the last offset in the gradients of these."""
ELEMENTWISE = frozenset({"clone", "contiguous", "to", "type_as", "_to_copy", "alias", "detach"})
"""What may lie between a parameter of all experts and a product, beside what turns the dimensions of each expert."""


class NotSplitError(Exception):
    """Why a layer's experts stay together."""


@dataclass(frozen=True)
class SplitExperts:
    """See the module's docstring.

    Attributes:
        groups: of a layer's experts; fewer where it has fewer experts.
        align: the elements of a group's rows are a multiple of it, in every parameter.
    """

    groups: int
    align: int = 1
    name: str = "split_experts"

    def __call__(self, program: Program) -> PassResult:
        graph = program.forward.graph
        nodes = [n for n in graph.nodes if n.op == "call_function" and not meta.is_size(n)]
        layer_of = find_layers(nodes)
        specs = dict(zip(graph.find_nodes(op="placeholder"), program.inputs, strict=True))
        made: dict[str, int] = {}
        notes: list[str] = []
        most, results = 1, Results()
        for route in [n for n in nodes if n.target is experts.route and len(n.args) == 2]:
            name = layer_of.get(route)
            try:
                if name is None:
                    raise NotSplitError("it is in no layer of the model")
                layer = _Layer(graph, route, specs, results)
                starts = layer.starts(self.groups, self.align)
            except NotSplitError as reason:
                notes.append(f"{(meta.modules(route) or ('',))[-1]}: its experts stay together, {reason}")
                continue
            if len(starts) > 2:
                layer.split(starts, made.get(name, 0))
                made[name] = made.get(name, 0) + len(starts) - 1
                most = max(most, len(starts) - 1)
        if notes:
            program.notes["whole experts"] = notes
        if not made:
            return PassResult(program, bool(notes))
        program.notes["expert groups"] = most  # Program.groups
        erase_dead(graph)
        split = {spec.target for spec in specs.values() if spec.rows is not None}
        for node in [n for n, spec in specs.items() if spec.rows is None and spec.target in split]:
            graph.erase_node(node)
        program.inputs = [specs[n] for n in graph.find_nodes(op="placeholder")]
        program.forward.recompile()
        return PassResult(program, True)


class _Layer:
    """One layer's experts: what lies between its dispatch and its combine, in slot order.

    Raises:
        NotSplitError: something there, or elsewhere, needs all experts at once.
    """

    def __init__(
        self, graph: fx.Graph, route: fx.Node, specs: dict[fx.Node, InputSpec], results: Results
    ) -> None:  # fmt: skip
        self.graph, self.route, self.specs, self.results = graph, route, specs, results
        self.count: int = route.args[1]  # type: ignore[assignment]
        self.routing = {part: part.args[1] for part in route.users}
        users = {user for part in self.routing for user in part.users}
        ends = [n for n in users if n.target is experts.combine]
        if len(ends) != 1:
            raise NotSplitError(f"what they compute is combined {len(ends)} times")
        self.end = ends[0]
        self.entries = {n for n in users if n.target is experts.dispatch or op_name(n) == "index_select"}
        self.inside = self._inside()
        if not users <= {self.end, *self.inside}:
            raise NotSplitError("something else uses their order")
        self.parameters: dict[fx.Node, int] = {}  # with the elements of one expert
        self.rows: dict[tuple[fx.Node, int], fx.Node] = {}
        self.chains: set[fx.Node] = set()
        for node in self.inside:
            self._check(node)
        for node in [*self.parameters, *self.chains]:
            if not node.users.keys() <= self.chains | set(self.inside):
                raise NotSplitError(f"{self._name(node)} is used elsewhere too")

    def _inside(self) -> list[fx.Node]:
        found = set(self.entries)
        frontier = list(found)
        while frontier:
            new = frontier.pop().users.keys() - found - {self.end}
            found |= new
            frontier += new
        return private.in_order(found)

    def _check(self, node: fx.Node) -> None:
        """Whether a node within may be computed group by group, with other experts' slots holding anything."""
        if node in self.entries:
            val = meta.value(node.args[0])  # type: ignore[arg-type]
            if not val.is_floating_point() or val.dim() > 2:
                raise NotSplitError("something reads which expert each slot belongs to")
            return
        if node.target in PRODUCTS:
            self._check_table(node.args[1])  # type: ignore[arg-type]
            return
        for source in node.all_input_nodes:
            if source not in self.inside and not meta.is_size(source) and not self._is_fixed(source):
                raise NotSplitError(f"{op_name(node)} mixes slots with %{source}")

    def _is_fixed(self, node: fx.Node) -> bool:
        """Whether a value comes from buffers and constants alone: no gradient can gather what lies in others' slots."""
        if node.op == "placeholder":
            return self.specs[node].kind in ("buffer", "constant")
        return all(meta.is_size(n) or self._is_fixed(n) for n in node.all_input_nodes)

    def _check_table(self, node: fx.Node) -> None:
        """Whether a product's weights can be had for some experts: a parameter of all, or one for each."""
        while node.op == "call_function" and not self._is_stack(node):
            self.chains.add(node)
            if not _leaves_experts_alone(node):
                raise NotSplitError(f"{op_name(node)} makes a product's weights")
            node = node.args[0]  # type: ignore[assignment]
        if self._is_stack(node):
            self.chains.add(node)
            return
        spec, shape = self.specs.get(node), meta.value(node).shape
        if spec is None or spec.kind != "parameter" or spec.rows is not None or shape[0] != self.count:
            raise NotSplitError(f"{self._name(node)} is no parameter of all experts")
        self.parameters[node] = math.prod(shape[1:])

    def _is_stack(self, node: fx.Node) -> bool:
        return op_name(node) == "stack" and argument(node, 1, "dim", 0) == 0

    def _name(self, node: fx.Node) -> str:
        return self.specs[node].target if node in self.specs else f"%{node}"

    # -- how ------------------------------------------------------------------------------------------------------

    def starts(self, groups: int, align: int) -> list[int]:
        """The first expert of each group, and the number of experts; so many groups if there are enough experts."""
        unit = math.lcm(*(align // math.gcd(align, size) for size in self.parameters.values()))
        pieces = max(1, self.count // unit)
        groups = min(groups, pieces)
        return [unit * (i * pieces // groups) for i in range(groups)] + [self.count]

    def split(self, starts: list[int], first: int) -> None:
        """Put groups in the layer's place; the first has number `first` among those of its module."""
        total: fx.Node | None = None
        before = self.end.prev
        for number, (start, stop) in enumerate(itertools.pairwise(starts), start=first):
            with self.graph.inserting_before(self.end):
                share = self._group(start, stop)
                total = share if total is None else self._call(aten.add.Tensor, total, share)
            while before is not total:
                before = before.next
                meta.set_expert_group(before, number)
        assert total is not None
        dtype = meta.value(self.end).dtype
        if meta.value(total).dtype != dtype:
            with self.graph.inserting_before(self.end):
                total = self._call(aten.to.dtype, total, dtype)
        self.end.replace_all_uses_with(total)
        self.graph.erase_node(self.end)

    def _call(self, op: Any, *args: Any, like: fx.Node | None = None) -> fx.Node:
        return insert_call(self.graph, op, args, like=like or self.end, results=self.results)

    def _group(self, start: int, stop: int) -> fx.Node:
        """The share of experts `[start, stop)` in each token."""
        index = self.route.args[0]
        routed = self._call(experts.route, index, stop - start, start, like=self.route)
        parts = [self._call(operator.getitem, routed, i, like=self.route) for i in range(3)]
        new: dict[fx.Node, fx.Node] = {}
        for node in self.inside:
            new[node] = self._of_group(node, new, parts, start, stop)
        y, weights = self.end.args[:2]
        order, inverse, offsets = parts
        return self._call(experts.combine, new[y], weights, order, inverse, offsets)  # type: ignore[index]

    def _of_group(
        self, node: fx.Node, new: dict[fx.Node, fx.Node], parts: list[fx.Node], start: int, stop: int
    ) -> fx.Node:  # fmt: skip
        order, inverse, offsets = parts
        if node.target is experts.dispatch:
            x, _, _, k = node.args
            return self._call(experts.dispatch, x, order, inverse, k, offsets, like=node)
        if node in self.entries:  # a number for each pair of token and expert; its gradient must not see others' slots
            pairs: Any = node.args[0]
            flat = meta.value(pairs).dim() == 1
            column = self._call(aten.unsqueeze.default, pairs, 1, like=node) if flat else pairs
            slots = self._call(experts.dispatch, column, order, inverse, 1, offsets, like=node)
            return self._call(aten.squeeze.dim, slots, 1, like=node) if flat else slots
        if node.target in PRODUCTS:
            rows: Any = node.args[0]
            return self._call(node.target, new[rows], self._table(node.args[1], start, stop), offsets, like=node)
        return self.graph.node_copy(node, lambda n: new.get(n, n))

    def _table(self, node: Any, start: int, stop: int) -> fx.Node:
        """A product's weights for experts `[start, stop)`."""
        if node in self.parameters:
            return self._rows(node, start, stop)
        if self._is_stack(node):
            return self._call(node.target, list(node.args[0][start:stop]), like=node)
        source = self._table(node.args[0], start, stop)
        args = (source, *node.args[1:])
        return insert_call(self.graph, node.target, args, dict(node.kwargs), like=node, results=self.results)

    def _rows(self, node: fx.Node, start: int, stop: int) -> fx.Node:
        """The placeholder of some rows of a parameter."""
        if (node, start) not in self.rows:
            spec, val = self.specs[node], meta.value(node)
            with self.graph.inserting_before(node):
                part = self.graph.placeholder(f"{node.name}_rows_{start}")
            with fake_mode_of(self.graph):
                meta.set_value(part, torch.empty((stop - start, *val.shape[1:]), dtype=val.dtype, device=val.device))
            self.specs[part] = replace(spec, rows=Rows(spec.target, start, stop, self.count))
            self.rows[node, start] = part
        return self.rows[node, start]


def _leaves_experts_alone(node: fx.Node) -> bool:
    """Whether an operation on [experts, ...] does the same for each expert."""
    name, rank = op_name(node), meta.value(node).dim()
    if name in ("transpose", "swapaxes"):
        return 0 not in (node.args[1] % rank, node.args[2] % rank)
    if name == "permute":
        return node.args[1][0] % rank == 0  # type: ignore[index]
    if name == "slice":
        return argument(node, 1, "dim", 0) % rank != 0
    return name in ELEMENTWISE or (name in ("mT", "adjoint") and rank > 2)
