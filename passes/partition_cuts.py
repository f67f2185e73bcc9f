"""Cut a block into worksets by following what keeps tokens apart (partition_worksets uses it).

Nodes come in levels: even ones hold what keeps tokens apart, odd ones what mixes them (attention, positions, anything
without a rule). A node's level is the least that its inputs allow. Then, between every two even levels, nodes move to
the later one so that the bytes that cross are least: a minimum cut, the latest where there are several, so that what is
large stays inside of one workset (the logits with their loss, say). What is in the order of experts moves as one.
What costs next to nothing to compute from the block's own inputs (a norm) does not cross: each level has a copy.

What needs positions in order only, with a small state (convolutions that look back, the gated delta rule), lies in even
levels: such a workset's chunks run in order. Where that workset cannot be in chunks of tokens after all, it lies in odd
levels, as what mixes positions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow
from torch import fx

from oomc import meta, ops
from oomc.dims import TOKENS, Analysis, Token, can_be_cut, is_pointwise, slots_of, tokens_of
from oomc.fxutil import is_mutating, rough_bytes
from oomc.match import op_name
from oomc.worksets import Chunk

VIEWS = frozenset({"view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "expand", "flatten", "unflatten",
                   "t", "mT", "detach", "alias", "_unsafe_view", "select", "slice"})  # fmt: skip
CHEAP = VIEWS | {
    "mean",
    "sum",
    "amax",
    "rms_norm",
    "layer_norm",
    "to",
    "type_as",
    "_to_copy",
    "clone",
    "contiguous",
    "cat",
}
"""Operations that pass once over memory, beside those that are pointwise."""
MOST = 2**18
"""The capacity of the largest value; there are fewer than 2**12 values in a block."""
ALWAYS = 2**30
"""A capacity that no cut goes through."""


@dataclass
class Part:
    """Nodes that are to be one workset.

    Attributes:
        nodes: in the order of the graph.
        chunk: how it may be run in tiles.
        fences: what mixes tokens in it, as text.
    """

    nodes: list[fx.Node]
    chunk: Chunk = ""
    fences: tuple[str, ...] = ()


def cut(
    nodes: list[fx.Node], analysis: Analysis, parameters: set[fx.Node], whole: bool = False,
    bytes_of: Callable[[Any], int] = rough_bytes,
) -> list[Part]:  # fmt: skip
    """The worksets of a block, in order of execution. Views that several worksets use are copied in the graph.

    With `whole`, a block that can run in chunks of rows, or of tokens, is one workset. `bytes_of` is `rough_bytes`,
    where it is known of many values already.
    """
    parts = _parts(_Cut(nodes, analysis, parameters, bytes_of), whole)
    if all(part.chunk == "tokens" or not any(analysis.flows[n].ordered for n in part.nodes) for part in parts):
        return parts
    left = {n for part in parts for n in part.nodes}
    nodes = [n for n in nodes[0].graph.nodes if n in left]
    return _parts(_Cut(nodes, analysis, parameters, bytes_of, in_order=False), whole)


def _parts(cutter: _Cut, whole: bool) -> list[Part]:
    if whole and (one := cutter.one()).chunk:
        return [one]
    return cutter.parts()


@dataclass
class _Cut:
    nodes: list[fx.Node]
    analysis: Analysis
    parameters: set[fx.Node]
    bytes_of: Callable[[Any], int]
    in_order: bool = True
    level: dict[fx.Node, int] = field(default_factory=dict)
    group: dict[fx.Node, str] = field(default_factory=dict)
    fenced: set[str] = field(default_factory=set)
    cheap: set[fx.Node] = field(default_factory=set)

    def one(self) -> Part:
        """All nodes in one; a sum over all rows that is used again here cannot be in chunks."""
        self._find_groups()
        self.level = dict.fromkeys(self.nodes, 0)
        part = self._part(self.nodes)
        if any(self.analysis.flows[n].sums and any(u in self.nodes for u in n.users) for n in self.nodes):
            part.chunk = ""
        return part

    def parts(self) -> list[Part]:
        self._find_groups()
        self._find_cheap()
        self._assign()
        if not any(is_mutating(n) for n in self.nodes):
            self._sink()
            self._own_copies()
        levels: dict[int, list[fx.Node]] = defaultdict(list)
        for node in self.nodes:
            levels[self.level[node]].append(node)
        return [self._part(levels[i]) for i in sorted(levels)]

    # -- what is known of nodes ---------------------------------------------------------------------------------------

    def _mixes(self, node: fx.Node) -> bool:
        return self.group.get(node) in self.fenced or bool(self._mixed(node))

    def _mixed(self, node: fx.Node) -> frozenset[Token]:
        """The tokens that a node mixes; its positions too if it has them in order and chunks do not come so."""
        flow = self.analysis.flows[node]
        return flow.mixes if self.in_order or not flow.ordered else flow.mixes | {"S"}

    def _carries(self, node: fx.Node) -> bool:
        """Whether there are tokens in what a node gives."""
        return any(tokens_of(layout) for layout in self.analysis.flows[node].layouts)

    def _is_plain(self, node: fx.Node) -> bool:
        """Whether there are tokens in nothing that a node takes or gives: it may be in any level."""
        return not any(self._carries(n) for n in [node, *node.all_input_nodes] if n in self.analysis.flows)

    def _is_part(self, node: fx.Node) -> bool:
        """Whether the node only names one of the results of a node of this block."""
        return op_name(node) == "getitem" and node.args[0] in self.level

    def _slots(self, node: fx.Node) -> set[str]:
        return {s.route for layout in self.analysis.flows[node].layouts for s in slots_of(layout)}

    def _around(self, node: fx.Node) -> set[str]:
        """The expert orders of what a node takes and gives."""
        return {r for n in [node, *node.all_input_nodes] if n in self.analysis.flows for r in self._slots(n)}

    def _find_groups(self) -> None:
        """Nodes that must share a level, since what passes between them is in the order of experts."""
        for node in self.nodes:
            for route in self._around(node):
                self.group[node] = route
        owned: dict[str, set[fx.Node]] = defaultdict(set)
        for node, route in self.group.items():
            owned[route].add(node)
        for route, members in owned.items():
            whole = all(u in members for n in members if self._slots(n) for u in n.users)
            several = any(len(self._around(n)) > 1 for n in members)
            if not whole or several or any(self._mixed(n) for n in members):
                self.fenced.add(route)

    def _find_cheap(self) -> None:
        """Nodes that may be computed again in every level that uses them."""
        inside = set(self.nodes)
        for node in self.nodes:
            plain = op_name(node) in CHEAP or is_pointwise(node)
            if plain and not is_mutating(node) and not self.analysis.flows[node].sums and not self._mixes(node):
                if node not in self.group and all(n in self.cheap for n in node.all_input_nodes if n in inside):
                    self.cheap.add(node)

    # -- levels -------------------------------------------------------------------------------------------------------

    def _assign(self) -> None:
        floors: dict[str, int] = {}
        while True:
            self.level.clear()
            barrier = 0
            for node in self.nodes:
                base = max((self._after(n) for n in node.all_input_nodes if n in self.level), default=0)
                base = max(base, barrier, floors.get(self.group.get(node, ""), 0))
                if is_mutating(node):  # readers of what it writes to must not run before it, nor earlier ones after it
                    base = max(base, *self.level.values()) if self.level else base
                if self._is_part(node):
                    self.level[node] = self.level[node.args[0]]  # type: ignore[index]
                elif self._is_plain(node) and not self._mixes(node) and not is_mutating(node):
                    self.level[node] = base
                else:
                    self.level[node] = base + (base % 2 != self._mixes(node))
                if is_mutating(node):
                    barrier = self.level[node]
            raised = dict(floors)
            for node, route in self.group.items():
                raised[route] = max(raised.get(route, 0), self.level[node])
            if all(self.level[n] == raised[route] for n, route in self.group.items()):
                return
            assert raised != floors, "levels of experts do not settle"
            floors = raised

    def _after(self, node: fx.Node) -> int:
        """The first level at which a node's result may be used: a sum over all tokens is known once all have run."""
        return self.level[node] + self.analysis.flows[node].sums

    def _sink(self) -> None:
        for level in range(0, max(self.level.values(), default=0), 2):
            nodes = [n for n in self.nodes if self.level[n] == level]
            for node in self._later(nodes, level):
                self.level[node] = level + 2

    def _later(self, nodes: list[fx.Node], level: int) -> list[fx.Node]:
        """Which nodes of an even level had better be in the next one.

        Ford and Fulkerson's minimum cut of a network with two vertices for each node: the node, on the source's side
        if it stays, and its value, which costs its bytes if the node stays and a user does not.
        """
        index = {n: i for i, n in enumerate(nodes)}
        costs = {n: 0 if n in self.cheap else self.bytes_of(meta.value(n)) for n in nodes}
        largest = max([MOST, *costs.values()])  # so that capacities fit 32 bits
        source, sink = 2 * len(nodes), 2 * len(nodes) + 1
        edges: dict[tuple[int, int], int] = {}
        for node, i in index.items():
            value = len(nodes) + i
            edges[i, value] = 0 if self._is_part(node) else -(-costs[node] * MOST // largest)
            moves = self.analysis.flows[node].sums or node.users.keys() - self.level.keys()
            if moves or any(self.level[u] == level + 1 for u in node.users if u in self.level):
                edges[source, i] = ALWAYS
            for user in node.users:
                if user in index:
                    edges[value, index[user]] = edges[index[user], i] = ALWAYS
                    if self._is_part(user):
                        edges[i, index[user]] = ALWAYS
                elif user in self.level and self.level[user] > level:
                    edges[value, sink] = ALWAYS
        members: dict[str, int] = {}
        for node, i in index.items():
            if node in self.group:
                first = members.setdefault(self.group[node], i)
                edges[i, first] = edges[first, i] = ALWAYS
        rows, columns = zip(*edges, strict=True) if edges else ((), ())
        size = sink + 1
        capacity = csr_array((np.array(list(edges.values()), dtype=np.int32), (rows, columns)), shape=(size, size))
        left = capacity - maximum_flow(csr_array(capacity), source, sink).flow
        stays = set(breadth_first_order(left > 0, source, return_predecessors=False).tolist())
        return [n for n, i in index.items() if i not in stays]

    def _own_copies(self) -> None:
        """Give each level that uses a view a copy of its own: what is viewed crosses, and no memory counts twice.

        And each that may run in chunks and uses what is cheap.
        """
        result: list[fx.Node] = []
        for node in reversed(self.nodes):
            levels = {self.level[u] for u in node.users if u in self.level}
            is_view = op_name(node) in VIEWS and node not in self.group and not self.analysis.flows[node].mixes
            if is_view or node in self.cheap:
                for level in sorted(each for each in levels - {self.level[node]} if is_view or each % 2 == 0):
                    with node.graph.inserting_after(node):
                        twin = node.graph.node_copy(node)
                    for user in [u for u in node.users if self.level.get(u) == level]:
                        user.replace_input_with(node, twin)
                    self.analysis.flows[twin] = self.analysis.flows[node]
                    self.level[twin] = level
                    result.append(twin)
                if not node.users:
                    node.graph.erase_node(node)
                    del self.level[node]
                    continue
            result.append(node)
        self.nodes = result[::-1]

    # -- parts --------------------------------------------------------------------------------------------------------

    def _part(self, nodes: list[fx.Node]) -> Part:
        inside, flows = set(nodes), self.analysis.flows
        entering = [n for c in nodes for n in c.all_input_nodes if n not in inside and n in flows]
        leaving = [n for n in nodes if any(u not in inside and not meta.is_size(u) for u in n.users)]
        crossing = [n for n in (*entering, *leaving) if n not in self.parameters]
        tokens = self.analysis.symbols.tokens
        mixed = {t for n in nodes for t in (tokens if self.group.get(n) in self.fenced else self._mixed(n))}
        fences = tuple(dict.fromkeys(self._fence(n) for n in nodes if self._mixes(n) and not self._is_part(n)))
        along: list[Token] = [t for t in TOKENS if t in tokens - mixed]
        for some in (along, along[:1]):
            if "B" in some and self._can_run_in_tiles(nodes, crossing, some):
                return Part(nodes, "tokens" if set(some) == tokens else "rows", fences)
        return Part(nodes, "", fences)

    def _can_run_in_tiles(self, nodes: list[fx.Node], crossing: Iterable[fx.Node], along: Sequence[Token]) -> bool:
        flows = self.analysis.flows
        if not any(set(along) & tokens_of(layout) for n in nodes for layout in flows[n].layouts):
            return False
        if not all(can_be_cut(layout, along) for n in crossing for layout in flows[n].layouts):
            return False
        # their results are handed from the forward to the backward, cut as their sizes say
        chosen = [n for n in nodes if n.target in ops.NEVER_RECOMPUTE]
        chosen += [n.args[0] for n in nodes if n.target is ops.route]  # type: ignore[misc]
        return all(flows[n].layouts == self.analysis.by_size(n) for n in chosen)

    def _fence(self, node: fx.Node) -> str:
        name = op_name(node) or str(node.target)
        if self.group.get(node) in self.fenced:
            return f"{name}: the order of experts is used outside of the experts"
        flow = self.analysis.flows[node]
        if not flow.known:
            return f"{name}: no rule says what it does to tokens"
        return (
            f"{name}: mixes {' and '.join({'B': 'batch rows', 'S': 'positions'}[t] for t in sorted(self._mixed(node)))}"
        )
