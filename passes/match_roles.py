"""Which values of a mixture-of-experts layer are what: found by running small parts of it with values we choose.

A *slot* is a pair (token t, j-th choice of t), number t * k + j. With the chosen experts, their weights, the tokens and
the GEMMs' results set to random numbers, every other value says by itself what it is:

    the layer's output   sum over j of weight[t, j] * result[slot t * k + j]  (plus something added to it)
    the GEMMs' rows      tokens[slot // k], perhaps times weight[slot]
    values in between    the same for every row, or one a slot (a weight), or one an expert (a bias)

so that it does not matter whether the model sorts, gathers, scatters, masks or loops. What fits none is refused.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from oomc import meta
from oomc.match import Concrete, Unknown, ancestors, argument, op_name
from oomc.passes.match_combine import combinations
from oomc.passes.match_experts import Layer, is_choice, routing_source, scores_of, slice_of
from oomc.passes.match_probe import NotCanonical, Probe, close, known
from oomc.program import Program

# Ops that may do nothing but hide rows of experts that a token did not choose.
MASKS = ("masked_fill", "where", "mul")
# Ops that make places or counts of slots, and that compare them with a limit.
PLACES = ("cumsum", "argsort", "histc", "bincount", "searchsorted")
GATHERS = ("index", "index_select", "gather", "take")
LIMITS = ("lt", "le", "gt", "ge", "clamp", "clamp_max", "clamp_min", "minimum", "maximum", "min", "max")


@dataclass
class Roles:
    """What the parts of a layer are.

    Attributes:
        index, weights: chosen experts and their weights, [..., k] (or [...] if `single`).
        tokens: the layer's input, [..., D].
        result: what is combined; for a loop, the first expert's.
        output: the layer's output.
        base: what the output adds to the combined results, or None.
        weighted: whether the output weights the results; else weights were applied before, or in between.
        single: whether index and weights lack the dimension k, which is 1.
        leaves: for nodes that are computed from no GEMM: tokens, weighted tokens, weights, or shared by all rows.
        same: nodes that change nothing on the rows of chosen experts (masks of others), and what they are equal to.
        per_expert: for nodes that hold one value an expert (a bias): where they are from, [E, ...] or one node each.
    """

    index: fx.Node
    weights: fx.Node
    tokens: fx.Node
    result: fx.Node
    output: fx.Node
    base: fx.Node | None
    weighted: bool
    single: bool
    leaves: dict[fx.Node, str] = field(default_factory=dict)
    same: dict[fx.Node, fx.Node] = field(default_factory=dict)
    per_expert: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)


def find_roles(layer: Layer, program: Program) -> Roles:
    """The roles in a candidate layer.

    Raises:
        NotCanonical: it is none, or none that the canonical form can express.
    """
    failure = NotCanonical("no choice of experts was found", routed=False)
    for choice in _choices(layer, program.forward.graph):
        try:
            return _Assignment(Probe(layer, program, choice)).roles()
        except NotCanonical as reason:
            failure = reason if reason.routed or not failure.routed else failure
        except Unknown as reason:
            failure = NotCanonical(str(reason), routed=not layer.looped)
    raise failure


def _choices(layer: Layer, graph: fx.Graph) -> list[fx.Node]:
    """The choices of experts that may be this layer's, the likeliest first."""
    if not layer.looped:
        source = routing_source(layer.last.units[0].experts)
        return [] if source is None else [source]
    order = {n: i for i, n in enumerate(graph.nodes)}
    end = order[layer.last.units[-1].out]
    fits = [n for n in graph.nodes if is_choice(n) and _size(scores_of(n)) == layer.last.num_experts]
    before = [n for n in fits if order[n] < end]
    return [*before[::-1][:1], *[n for n in fits if order[n] > end][:1]]


def _size(node: fx.Node | None) -> Any:
    return None if node is None else meta.value(node).shape[-1]


class _Assignment:
    """Roles of one layer, under one guess of where its choice of experts is made."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def roles(self) -> Roles:
        failure = NotCanonical("its results are not combined by weights of the chosen experts")
        for results, output, weights, base in combinations(self.probe):
            for candidate in [weights] if weights is not None else self.probe.weights_before(output):
                try:
                    found = self._with(results, output, candidate, weights is not None, base)
                except (NotCanonical, Unknown) as reason:
                    failure = NotCanonical(str(reason))
                    continue
                return found
        raise failure

    def _with(
        self, results: tuple[fx.Node, ...], output: fx.Node, weights: fx.Node, weighted: bool, base: fx.Node | None
    ) -> Roles:
        made_up = self.probe.made_up(weights)
        self.slot_weights = made_up.flatten().float()
        failure: Exception | None = None
        for tokens in self.probe.token_candidates():
            made = self.probe.made_up(tokens)
            self.token_values = made.reshape(self.probe.tokens_count, -1).float()
            self.values = self.probe.run({weights: made_up, tokens: made})
            roles = Roles(self.probe.index, weights, tokens, results[0], output, base, weighted, self.probe.single)
            self.parallel: dict[fx.Node, tuple[fx.Node, ...]] = {}
            try:
                if not self._places_rows():
                    continue
                self._visit(results, roles)
                self._refuse_capacity(roles)
            except (NotCanonical, Unknown) as reason:
                failure = failure or reason
                continue
            if weighted == any(r in ("weights", "weighted tokens") for r in roles.leaves.values()):
                raise NotCanonical("weights are applied twice, or not at all")
            return roles
        raise failure or NotCanonical("its GEMMs' rows are not the tokens of the chosen experts")

    def _places_rows(self) -> bool:
        """Find which slot each row is, from the tokens in the GEMMs' rows; False if they are no tokens of experts'."""
        first = next(f for f in self.probe.layer.families if f.units[0].rows not in self.probe.below)
        if self.probe.layer.looped:
            every = tuple(u.rows for u in first.units)
            self.places = known(self.probe.slots_of_rows(every))
            return all(
                self._is_tokens(self._rows_value(n), slot, row) or self._is_weighted(self._rows_value(n), slot, row)
                for n, (row, slot) in zip(every, self.places)
            )
        results = tuple(u.out for u in self.probe.layer.last.units)
        found = self.probe.slots_of_rows(results)
        if found is None:
            return False
        self.places = found
        ((row, slot),) = found
        value = self._rows_value(first.units[0].rows)
        return self._is_tokens(value, slot, row) or self._is_weighted(value, slot, row)

    def _rows_value(self, node: fx.Node) -> Tensor:
        """[rows, ...] of a value with a row a token or slot."""
        value = self.values(node)
        rows = self.probe.tokens_count if self.probe.layer.looped else self.probe.tokens_count * self.probe.k
        lead = list(itertools.accumulate(value.shape, lambda a, b: a * b))
        if rows not in lead:
            raise Unknown(f"{node} has no row a slot")
        return value.reshape(rows, -1).float()

    def _is_tokens(self, value: Tensor, slot: Tensor, row: Tensor) -> bool:
        return close(value[row], self.token_values[slot // self.probe.k])

    def _is_weighted(self, value: Tensor, slot: Tensor, row: Tensor) -> bool:
        return close(value[row], self.token_values[slot // self.probe.k] * self.slot_weights[slot, None])

    def _visit(self, nodes: tuple[fx.Node, ...], roles: Roles) -> None:
        """Assign roles to what `nodes`, each expert's in turn (or the one node for all), are computed from."""
        first = nodes[0]
        if first in self.parallel:
            if self.parallel[first] != nodes:
                raise NotCanonical("its experts differ in form")
            return
        self.parallel[first] = nodes
        if first in self.probe.layer.unit_of:
            family, unit = self.probe.layer.unit_of[first]
            if [self.probe.layer.unit_of.get(n) for n in nodes] != [(family, u) for u in family.units]:
                raise NotCanonical("its experts differ in form")
            self._visit(tuple(u.rows for u in family.units), roles)
            if unit.bias is not None:
                roles.per_expert[unit.bias] = self._each(tuple(known(u.bias) for u in family.units))
        elif first in self.probe.below:
            flat = [pytree.tree_flatten((n.args, n.kwargs)) for n in nodes]
            source = self._unchanged(nodes)
            if source is not None:
                roles.same[first] = source[0]
                self._visit(source, roles)
                return
            alike = all(n.target == first.target and f[1] == flat[0][1] for n, f in zip(nodes, flat))
            if not alike or first.op != "call_function":
                raise NotCanonical("its experts differ in form")
            for parts in zip(*(f[0] for f in flat)):
                if all(isinstance(p, fx.Node) for p in parts):
                    self._visit(parts, roles)
                elif any(p != parts[0] or isinstance(p, fx.Node) for p in parts):
                    raise NotCanonical("its experts differ in form")
            self._check_rowwise(first)
        else:
            self._leaf_role(nodes, roles)

    def _unchanged(self, nodes: tuple[fx.Node, ...]) -> tuple[fx.Node, ...] | None:
        """What `nodes` are equal to in every row of a chosen expert, where all they do is to mask others; else None."""
        if op_name(nodes[0]) not in MASKS:
            return None
        sources = []
        for node, (row, _) in zip(nodes, self.places):
            below = [n for n in node.all_input_nodes if n in self.probe.below]
            if len(below) != 1 or op_name(node) != op_name(nodes[0]):
                return None
            made = self.probe.made_up(below[0])
            result = self.probe.run({**self.values.given, below[0]: made})(node)
            rows = self.probe.tokens_count if self.probe.layer.looped else self.probe.tokens_count * self.probe.k
            if result.shape != made.shape or not torch.equal(result.view(rows, -1)[row], made.view(rows, -1)[row]):
                return None
            sources.append(below[0])
        return tuple(sources)

    def _refuse_capacity(self, roles: Roles) -> None:
        """Refuse layers that compare places or counts of slots with a limit: few tokens do not show what it drops."""
        known_parts = {roles.index, roles.weights, roles.tokens, roles.base}
        inside = ancestors([roles.output], stop=lambda n: n in known_parts)
        places: set[fx.Node] = set()
        for node in self.probe.nodes[: self.probe.order[roles.output]]:
            if node not in inside or node in known_parts or meta.is_size(node):
                continue
            name, val = op_name(node), meta.tensor(node)
            whole = val is None or not val.is_floating_point()
            counts = name == "sum" and whole and argument(node, 1, "dim") in (None, [0], 0)
            order = name == "getitem" and node.args[1] == 1 and whole
            read = node.args[:1] if name in GATHERS else node.all_input_nodes
            derived = any(n in places for n in read)
            if derived and name in LIMITS:
                raise NotCanonical("it limits how many slots an expert takes (capacity)")
            if counts or order or name in PLACES or (name == "arange" and node.all_input_nodes) or (derived and whole):
                places.add(node)

    def _each(self, nodes: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
        """Where one value an expert is from: one parameter [E, ...], or one node an expert."""
        slices = [slice_of(n) for n in nodes]
        if all(s is not None for s in slices):
            pairs = [known(s) for s in slices]
            if len({p for p, _ in pairs}) == 1 and [e for _, e in pairs] == list(range(self.probe.experts)):
                return (pairs[0][0],)
        elif all(n.op == "placeholder" for n in nodes) and len(set(nodes)) == self.probe.experts:
            return nodes
        raise NotCanonical("its experts share a part in a way that is not known")

    def _check_rowwise(self, node: fx.Node) -> None:
        """Refuse what mixes rows: what is copied must compute each row from that row alone."""
        val = meta.tensor(node)
        if val is None and op_name(node) not in ("chunk", "split", "split_with_sizes", "unbind", "tensor_split"):
            raise NotCanonical(f"{node.target} lies between its GEMMs")
        sources = [n for n in node.all_input_nodes if n in self.probe.below]
        given = {n: self._made_up_tree(n) for n in sources}
        run = self.probe.run({**self.values.given, **given})
        here = self._permuted(run(node), None)
        # The same rows the other way round, with all that belongs to them, and every second one another's: neither
        # its place nor its neighbours may matter to a row.
        flip = torch.arange(here[0].shape[0]).flip(0)
        others = [n for n in node.all_input_nodes if n not in self.probe.below and meta.tensor(n) is not None]
        moved: dict[fx.Node, Any] = {n: self._shuffled(given[n], flip, disturb=True) for n in sources}
        moved |= {n: self._shuffled(run(n), flip) for n in others if self._one_a_row(n)}
        there = self._permuted(self.probe.run({**self.values.given, **moved})(node), flip)
        kept = flip[1::2]
        if len(here) != len(there) or not all(close(a[kept], b[kept]) for a, b in zip(here, there)):
            raise NotCanonical(f"{node.target} between its GEMMs mixes rows")

    def _one_a_row(self, node: fx.Node) -> bool:
        val = meta.value(node)
        return val.dim() > 0 and not all(isinstance(n, int) for n in val.shape)

    def _made_up_tree(self, node: fx.Node) -> Any:
        val = meta.value(node)
        if isinstance(val, torch.Tensor):
            return self.probe.made_up(node)
        size = Concrete(self.probe.sizes, {}).size
        return type(val)(self.probe.noise((size(n) for n in v.shape), v.dtype) for v in val)

    def _shuffled(self, value: Any, flip: Tensor, disturb: bool = False) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(self._shuffled(v, flip, disturb) for v in value)
        rows = flip.numel()
        lead = list(itertools.accumulate(value.shape, lambda a, b: a * b))
        if rows not in lead:
            raise NotCanonical("a part between its GEMMs has no row a slot")
        moved = value.reshape(rows, -1)[flip]
        if disturb:
            moved[::2] *= 10
        return moved.reshape(value.shape)

    def _permuted(self, value: Any, flip: Tensor | None) -> list[Tensor]:
        rows = self.probe.tokens_count if self.probe.layer.looped else self.probe.tokens_count * self.probe.k
        found = []
        for part in value if isinstance(value, tuple | list) else [value]:
            if rows not in list(itertools.accumulate(part.shape, lambda a, b: a * b)):
                raise NotCanonical("a part between its GEMMs has no row a slot")
            flat = part.reshape(rows, -1)
            found.append(flat if flip is None else flat[flip])
        return found

    def _leaf_role(self, nodes: tuple[fx.Node, ...], roles: Roles) -> None:
        first = nodes[0]
        val = meta.tensor(first)
        same = all(n is first for n in nodes)
        if val is None:
            if not same or not meta.is_size(first) or self.probe.layer.looped:
                raise NotCanonical("a size is used between its GEMMs")
            roles.leaves[first] = "shared"
            return
        fixed = first not in self.probe.tainted and all(isinstance(n, int) for n in val.shape)
        if fixed or first.op == "placeholder":
            if same:
                roles.leaves[first] = "shared"
            else:
                roles.per_expert[first] = self._each(nodes)
            return
        values = [self._rows_value(n) for n in nodes]
        if all(self._is_tokens(v, s, r) for v, (r, s) in zip(values, self.places)):
            roles.leaves[first] = "tokens"
        elif all(self._is_weighted(v, s, r) for v, (r, s) in zip(values, self.places)):
            roles.leaves[first] = "weighted tokens"
        elif all(v.shape[1] == 1 and close(v[r, 0], self.slot_weights[s]) for v, (r, s) in zip(values, self.places)):
            roles.leaves[first] = "weights"
        else:
            roles.per_expert[first] = (self._table(first, values[0]),)

    def _table(self, node: fx.Node, value: Tensor) -> fx.Node:
        """The parameter [E, ...] that `node` holds a row of for each slot's expert."""
        if not self.probe.layer.looped:
            ((row, slot),) = self.places
            for source in sorted(ancestors([node]), key=self.probe.order.__getitem__, reverse=True):
                val = meta.tensor(source)
                if (
                    source.op == "placeholder"
                    and val is not None
                    and val.dim() == 2
                    and val.shape[0] == self.probe.experts
                ):
                    if source not in self.probe.tainted:
                        table = self.values(source).float()
                        if table.shape[1] == value.shape[1] and close(value[row], table[self.probe.picked[slot]]):
                            return source
        raise NotCanonical(f"what {node} holds between its GEMMs is not known")
