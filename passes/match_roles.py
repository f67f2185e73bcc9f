"""Which values of a mixture-of-experts layer are what: found by running small parts of it with values we choose.

A *slot* is a pair (token t, j-th choice of t), number t * k + j. With the chosen experts, their weights, the tokens and
the GEMMs' results set to random numbers, every other value says by itself what it is:

    the layer's output   sum over j of weight[t, j] * result[slot t * k + j]  (plus something added to it)
    the GEMMs' rows      tokens[slot // k], perhaps times weight[slot]
    values in between    the same for every row, or one a slot (a weight), or one an expert (a bias)

so that it does not matter whether the model sorts, gathers, scatters, masks or loops. What fits none of these is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from oomc import meta
from oomc.match import Concrete, Unknown, ancestors, op_name, same_size, symbols
from oomc.passes.match_experts import Layer, is_choice, routing_source, scores_of, slice_of
from oomc.program import Program

ZEROS = ("zeros", "zeros_like", "new_zeros")
# Parameters larger than this are never made up to run a part of the graph; biases and norms are smaller.
LARGEST = 1 << 22
# How far below the last GEMM, counted in nodes after all its units, the layer's output may be.
REACH = 40


class NotCanonical(Exception):  # noqa: N818 - an answer, not a fault
    """The layer is not understood. `routed`: it is one of experts, and not just several GEMMs side by side."""

    def __init__(self, reason: str, routed: bool = True) -> None:
        super().__init__(reason)
        self.routed = routed


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
    per_expert: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)


def find_roles(layer: Layer, program: Program) -> Roles:
    """The roles in a candidate layer.

    Raises:
        NotCanonical: it is none, or none that the canonical form can express.
    """
    failure = NotCanonical("no choice of experts was found", routed=False)
    for choice in _choices(layer, program.forward.graph):
        try:
            return _Search(layer, program, choice).roles()
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


class _Search:
    def __init__(self, layer: Layer, program: Program, choice: fx.Node) -> None:
        self.layer, self.program = layer, program
        self.nodes = list(program.forward.graph.nodes)
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.experts = layer.last.num_experts
        self.index = self._index(choice)
        self.scores = _known(scores_of(choice))
        self.single = meta.value(self.index).dim() < meta.value(self.scores).dim()
        names = sorted(symbols([self.index, layer.last.units[0].out]))
        self.sizes = {name: 3 + 2 * i for i, name in enumerate(names)}
        self.random = torch.Generator().manual_seed(0)
        shape = Concrete(self.sizes, {}).shape(self.index)
        self.tokens_count = torch.Size(shape if self.single else shape[:-1]).numel()
        self.k = 1 if self.single else shape[-1]
        if self.k > self.experts:
            raise NotCanonical("more choices than experts", routed=False)
        picked = torch.rand(self.tokens_count, self.experts, generator=self.random).topk(self.k).indices
        self.picked = picked.flatten()  # by slot
        self.given: dict[fx.Node, Any] = {self.index: picked.reshape(shape).to(meta.value(self.index).dtype)}
        self.tainted = self._tainted()
        self.below = self._below()

    def _index(self, choice: fx.Node) -> fx.Node:
        """The [..., k] indices: the choice, or the slice of a full sort."""
        scores = _known(scores_of(choice))
        if meta.value(choice).dim() == meta.value(scores).dim() and _size(choice) == _size(scores):
            cuts = [u for u in choice.users if op_name(u) == "slice" and _size(u) != _size(scores)]
            if len(cuts) == 1:
                return cuts[0]
        return choice

    def _tainted(self) -> set[fx.Node]:
        """Nodes whose values cannot be made up: they come from inputs, or from large parameters."""
        found: set[fx.Node] = set()
        for node, spec in zip((n for n in self.nodes if n.op == "placeholder"), self.program.inputs):
            val = meta.tensor(node)
            large = val is None or not all(isinstance(n, int) for n in val.shape) or val.numel() > LARGEST
            if spec.kind == "input" or large:
                found.add(node)
        for node in self.nodes:
            if op_name(node) != "sym_size" and any(n in found for n in node.all_input_nodes):
                found.add(node)
        return found

    def _below(self) -> set[fx.Node]:
        """Nodes that are computed from one of the layer's GEMMs."""
        found = set(self.layer.unit_of)
        for node in self.nodes:
            if any(n in found for n in node.all_input_nodes):
                found.add(node)
        return found

    def _leaf(self, node: fx.Node) -> Tensor:
        if node in self.tainted:
            raise Unknown(f"{node} is not given")
        return self._noise(Concrete(self.sizes, {}).shape(node), meta.value(node).dtype)

    def _noise(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        if not dtype.is_floating_point:
            raise Unknown("integers cannot be made up")
        return (torch.rand(tuple(shape), generator=self.random) + 0.5).to(dtype)

    def _made_up(self, node: fx.Node) -> Tensor:
        """Random values in the shape of `node`."""
        return self._noise(Concrete(self.sizes, {}).shape(node), meta.value(node).dtype)

    def _run(self, given: dict[fx.Node, Any]) -> Concrete:
        return Concrete(self.sizes, {**self.given, **given}, self._leaf)

    # --- the steps ---

    def roles(self) -> Roles:
        failure = NotCanonical("its results are not combined by weights of the chosen experts")
        for results, output, weights, base in self._combinations():
            for candidate in [weights] if weights is not None else self._weights_before(output):
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
        made_up = self._made_up(weights)
        self.slot_weights = made_up.flatten().float()
        failure: Exception = NotCanonical("its GEMMs' rows are not the tokens of the chosen experts")
        for tokens in self._token_candidates(results):
            probe = self._made_up(tokens)
            self.probe = probe.reshape(self.tokens_count, -1).float()
            self.run = self._run({weights: made_up, tokens: probe})
            roles = Roles(self.index, weights, tokens, results[0], output, base, weighted, self.single)
            self.parallel: dict[fx.Node, tuple[fx.Node, ...]] = {}
            try:
                if not self._places_rows():
                    continue
                self._visit(results, roles)
            except (NotCanonical, Unknown) as reason:
                failure = reason
                continue
            if weighted == any(r in ("weights", "weighted tokens") for r in roles.leaves.values()):
                raise NotCanonical("weights are applied twice, or not at all")
            return roles
        raise failure

    def _combinations(self) -> Iterator[tuple[tuple[fx.Node, ...], fx.Node, fx.Node | None, fx.Node | None]]:
        """(results, output, weights or None, base) for which the output is the (weighted) sum over slots of results."""
        results: tuple[fx.Node, ...] | None = tuple(u.out for u in self.layer.last.units)
        while results is not None:
            rows = self._slots_of_rows(results)
            if rows is not None:
                for output in self._outputs(results):
                    if not self._owns(results, output):
                        continue
                    for weights in [*self._weights_before(output), None]:
                        base = self._explains(results, rows, output, weights)
                        if base is not False:
                            yield results, output, weights, base
            following = [next(iter(r.users)) if len(r.users) == 1 else None for r in results]
            ahead = [n for n in following if n is not None and _size_if_tensor(n) == _size_if_tensor(results[0])]
            results = tuple(ahead) if len(set(ahead)) == len(results) else None

    def _slots_of_rows(self, results: tuple[fx.Node, ...]) -> list[tuple[Tensor, Tensor]] | None:
        """For each result, which of its rows are for which slots: (rows, slots); None where it has other rows."""
        shape = Concrete(self.sizes, {}).shape(results[0])
        rows = torch.Size(shape[:-1]).numel()
        token = torch.arange(self.tokens_count * self.k) // self.k
        if self.layer.looped:
            if rows != self.tokens_count:
                return None
            slots = [(self.picked == e).nonzero()[:, 0] for e in range(self.experts)]
            return [(token[s], s) for s in slots]
        if rows != self.tokens_count * self.k:
            return None
        expert = self._expert_of_row()
        if expert is None:
            return None
        # Without the tokens it is not known which of an expert's rows is which; a stable sort is how we sort ourselves.
        if torch.equal(expert, self.picked):
            return [(torch.arange(rows), torch.arange(rows))]
        order = torch.sort(self.picked, stable=True).indices
        return [(torch.arange(rows), order)] if torch.equal(expert, self.picked[order]) else None

    def _expert_of_row(self) -> Tensor | None:
        """The expert of each row of grouped or gathered GEMMs; None if families differ."""
        found: Tensor | None = None
        for family in self.layer.families:
            (unit,) = family.units
            assert isinstance(unit.experts, fx.Node)
            values = self._run({})(unit.experts).to(torch.int64)
            if unit.form == "grouped":
                rows = torch.arange(self.tokens_count * self.k)
                if values.shape != (self.experts,) or int(values[-1]) != rows.numel():
                    return None
                values = torch.searchsorted(values, rows, right=True)
            if found is not None and not torch.equal(found, values):
                return None
            found = values
        return found

    def _outputs(self, results: tuple[fx.Node, ...]) -> list[fx.Node]:
        """Nodes below all results with one row a token, nearest first."""
        wanted = (1 << len(results)) - 1
        seen: dict[fx.Node, int] = {r: 1 << i for i, r in enumerate(results)}
        found, left = [], REACH
        for node in self.nodes[self.order[results[0]] :]:
            bits = seen.get(node, 0)
            for n in node.all_input_nodes:
                bits |= seen.get(n, 0)
            if not bits or node.op == "output":
                continue
            seen[node] = bits
            if bits != wanted or node in results:
                continue
            left -= 1
            if left < 0:
                break
            if self._has_token_rows(node, meta.value(results[0]).shape[-1]) and self._leads_like_tokens(node):
                found.append(node)
        return found

    def _leads_like_tokens(self, node: fx.Node) -> bool:
        """Whether the node is [T, D], or has the leading dimensions of the choice."""
        index, val = meta.value(self.index).shape, meta.value(node).shape
        lead = index if self.single else index[:-1]
        return len(val) == 2 or (len(val) - 1 == len(lead) and all(map(same_size, val, lead)))

    def _has_token_rows(self, node: fx.Node, width: Any) -> bool:
        val = meta.tensor(node)
        if val is None or not val.is_floating_point() or val.dim() < 2 or val.shape[-1] != width:
            return False
        try:
            return torch.Size(Concrete(self.sizes, {}).shape(node)[:-1]).numel() == self.tokens_count
        except Unknown:
            return False

    def _owns(self, results: tuple[fx.Node, ...], output: fx.Node) -> bool:
        """Whether nothing but the output is computed from the results."""
        work, seen = list(results), set(results)
        while work:
            for user in work.pop().users:
                if self.order[user] > self.order[output]:
                    return False
                if user is not output and user not in seen:
                    seen.add(user)
                    work.append(user)
        return True

    def _weights_before(self, output: fx.Node) -> list[fx.Node]:
        """Floats of the shape of the choice that may be its weights, in graph order: made from the scores, then scaled."""
        of = meta.value(self.index)
        near = ancestors([output], stop=lambda n: n is self.scores)
        fits = []
        for node in self.nodes[self.order[self.scores] : self.order[output]]:
            val = meta.tensor(node) if node in near and node in self.tainted else None
            alike = val is not None and val.dim() == of.dim() and (self.single or same_size(val.shape[-1], self.k))
            if val is not None and alike and val.is_floating_point() and str(val.shape) == str(of.shape):
                fits.append(node)
        return fits[:8]

    def _explains(
        self, results: tuple[fx.Node, ...], rows: list[tuple[Tensor, Tensor]], output: fx.Node, weights: fx.Node | None
    ) -> Any:
        """The base (or None) if `output` is base + sum over slots of weight * result; else False."""
        given: dict[fx.Node, Any] = {r: self._made_up(r) for r in results}
        scale = torch.ones(self.tokens_count * self.k)
        if weights is not None:
            given[weights] = self._made_up(weights)
            scale = given[weights].flatten().float()
        width = given[results[0]].shape[-1]
        expected = torch.zeros(self.tokens_count, width)
        for result, (row, slot) in zip(results, rows):
            value = given[result].reshape(-1, width).float()
            expected.index_add_(0, slot // self.k, value[row] * scale[slot, None])
        base: fx.Node | None = None
        for node in self._made_elsewhere(output, given):
            if op_name(node) in ZEROS:
                given[node] = torch.zeros(Concrete(self.sizes, {}).shape(node), dtype=meta.value(node).dtype)
            elif base is None and self._has_token_rows(node, width):
                base, given[node] = node, self._made_up(node)
                expected += given[node].reshape(-1, width).float()
            else:
                return False
        try:
            value = self._run(given)(output)
        except Unknown:
            return False
        return base if close(value.reshape(-1, width), expected) else False

    def _made_elsewhere(self, output: fx.Node, given: dict[fx.Node, Any]) -> list[fx.Node]:
        """Tensors that `output` is computed from whose values cannot be made up and are not given."""
        known = {**self.given, **given}
        inside = ancestors([output], stop=lambda n: n in known or op_name(n) == "sym_size" or op_name(n) in ZEROS)
        depends: set[fx.Node] = set()
        for node in self.nodes[: self.order[output] + 1]:
            if node in inside and (node in known or any(n in depends for n in node.all_input_nodes)):
                depends.add(node)
        edge = {n: None for d in depends - set(known) for n in d.all_input_nodes if n not in depends}
        return sorted((n for n in edge if n in self.tainted and meta.tensor(n) is not None), key=self.order.__getitem__)

    def _token_candidates(self, results: tuple[fx.Node, ...]) -> list[fx.Node]:
        """What the first GEMMs' rows may be taken from, nearest first; in a loop, something that all experts share."""
        first = next(f for f in self.layer.families if f.units[0].rows not in self.below)
        rows = first.units[0].rows
        seen, found, work = {rows}, [], [rows]
        while work and len(seen) < 60:
            node = work.pop(0)
            if self._has_token_rows(node, meta.value(rows).shape[-1]):
                found.append(node)
            for n in node.all_input_nodes:
                if n not in seen:
                    seen.add(n)
                    work.append(n)
        return found[:6]

    def _places_rows(self) -> bool:
        """Find which slot each row is, from the tokens in the GEMMs' rows; False if they are no tokens of experts'."""
        first = next(f for f in self.layer.families if f.units[0].rows not in self.below)
        if self.layer.looped:
            every = [u.rows for u in first.units]
            self.places = _known(self._slots_of_rows(every and tuple(every)))
            return all(
                self._is_tokens(self._rows_value(n), slot, row) or self._is_weighted(self._rows_value(n), slot, row)
                for n, (row, slot) in zip(every, self.places)
            )
        results = tuple(u.out for u in self.layer.last.units)
        found = self._slots_of_rows(results)
        if found is None:
            return False
        self.places = found
        ((row, slot),) = found
        value = self._rows_value(first.units[0].rows)
        return self._is_tokens(value, slot, row) or self._is_weighted(value, slot, row)

    def _rows_value(self, node: fx.Node) -> Tensor:
        """[rows, ...] of a value with a row a token or slot."""
        value = self.run(node)
        rows = self.tokens_count if self.layer.looped else self.tokens_count * self.k
        lead = list(itertools.accumulate(value.shape, lambda a, b: a * b))
        if rows not in lead:
            raise Unknown(f"{node} has no row a slot")
        return value.reshape(rows, -1).float()

    def _is_tokens(self, value: Tensor, slot: Tensor, row: Tensor) -> bool:
        return close(value[row], self.probe[slot // self.k])

    def _is_weighted(self, value: Tensor, slot: Tensor, row: Tensor) -> bool:
        return close(value[row], self.probe[slot // self.k] * self.slot_weights[slot, None])

    def _visit(self, nodes: tuple[fx.Node, ...], roles: Roles) -> None:
        """Assign roles to what `nodes`, each expert's in turn (or the one node for all), are computed from."""
        first = nodes[0]
        if first in self.parallel:
            if self.parallel[first] != nodes:
                raise NotCanonical("its experts differ in form")
            return
        self.parallel[first] = nodes
        if first in self.layer.unit_of:
            family, unit = self.layer.unit_of[first]
            if [self.layer.unit_of.get(n) for n in nodes] != [(family, u) for u in family.units]:
                raise NotCanonical("its experts differ in form")
            self._visit(tuple(u.rows for u in family.units), roles)
            if unit.bias is not None:
                roles.per_expert[unit.bias] = self._each(tuple(_known(u.bias) for u in family.units))
        elif first in self.below:
            flat = [pytree.tree_flatten((n.args, n.kwargs)) for n in nodes]
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

    def _each(self, nodes: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
        """Where one value an expert is from: one parameter [E, ...], or one node an expert."""
        slices = [slice_of(n) for n in nodes]
        if all(s is not None for s in slices):
            pairs = [_known(s) for s in slices]
            if len({p for p, _ in pairs}) == 1 and [e for _, e in pairs] == list(range(self.experts)):
                return (pairs[0][0],)
        elif all(n.op == "placeholder" for n in nodes) and len(set(nodes)) == self.experts:
            return nodes
        raise NotCanonical("its experts share a part in a way that is not known")

    def _check_rowwise(self, node: fx.Node) -> None:
        """Refuse what mixes rows: what is copied must compute each row from that row alone."""
        val = meta.tensor(node)
        if val is None and op_name(node) not in ("chunk", "split", "split_with_sizes", "unbind", "tensor_split"):
            raise NotCanonical(f"{node.target} lies between its GEMMs")
        sources = [n for n in node.all_input_nodes if n in self.below]
        given = {n: self._made_up_tree(n) for n in sources}
        run = self._run({**self.run.given, **given})
        here = self._permuted(run(node), None)
        # The same rows the other way round, with all that belongs to them, and every second one another's: neither
        # its place nor its neighbours may matter to a row.
        flip = torch.arange(here[0].shape[0]).flip(0)
        others = [n for n in node.all_input_nodes if n not in self.below and meta.tensor(n) is not None]
        moved: dict[fx.Node, Any] = {n: self._shuffled(given[n], flip, disturb=True) for n in sources}
        moved |= {n: self._shuffled(run(n), flip) for n in others if self._one_a_row(n)}
        there = self._permuted(self._run({**self.run.given, **moved})(node), flip)
        kept = flip[1::2]
        if len(here) != len(there) or not all(close(a[kept], b[kept]) for a, b in zip(here, there)):
            raise NotCanonical(f"{node.target} between its GEMMs mixes rows")

    def _one_a_row(self, node: fx.Node) -> bool:
        val = meta.value(node)
        return val.dim() > 0 and not all(isinstance(n, int) for n in val.shape)

    def _made_up_tree(self, node: fx.Node) -> Any:
        val = meta.value(node)
        if isinstance(val, torch.Tensor):
            return self._made_up(node)
        size = Concrete(self.sizes, {}).size
        return type(val)(self._noise((size(n) for n in v.shape), v.dtype) for v in val)

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
        rows = self.tokens_count if self.layer.looped else self.tokens_count * self.k
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
            if not same or not meta.is_size(first) or self.layer.looped:
                raise NotCanonical("a size is used between its GEMMs")
            roles.leaves[first] = "shared"
            return
        if first.op == "placeholder" or first not in self.tainted and all(isinstance(n, int) for n in val.shape):
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
        if not self.layer.looped:
            ((row, slot),) = self.places
            for source in sorted(ancestors([node]), key=self.order.__getitem__, reverse=True):
                val = meta.tensor(source)
                if source.op == "placeholder" and val is not None and val.dim() == 2 and val.shape[0] == self.experts:
                    if source not in self.tainted:
                        table = self.run(source).float()
                        if table.shape[1] == value.shape[1] and close(value[row], table[self.picked[slot]]):
                            return source
        raise NotCanonical(f"what {node} holds between its GEMMs is not known")


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two values are equal up to rounding in half precision; wrong rows are off by far more."""
    return a.shape == b.shape and bool((a.float() - b.float()).norm() <= 2e-2 * b.float().norm())


def _size_if_tensor(node: fx.Node) -> Any:
    val = meta.tensor(node)
    return None if val is None else str(val.shape)


def _known(value: Any) -> Any:
    assert value is not None
    return value
