"""Made-up values for the parts of a candidate layer of experts, and whose the rows of its GEMMs then are.

The chosen experts are set to random ones. A *slot* is a pair (token t, j-th choice of t), number t * k + j.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from oomc import meta
from oomc.match import Concrete, Unknown, ancestors, op_name, same_size, symbols, wide
from oomc.passes.match_experts import Layer, scores_of
from oomc.program import Program

# Parameters larger than this are never made up to run a part of the graph; biases and norms are smaller.
LARGEST = 1 << 22


class NotCanonical(Exception):  # noqa: N818 - an answer, not a fault
    """The layer is not understood. `routed`: it is one of experts, and not just several GEMMs side by side."""

    def __init__(self, reason: str, routed: bool = True) -> None:
        super().__init__(reason)
        self.routed = routed


class Probe:
    """A candidate layer with made-up values: `index` holds the chosen experts, and by slot they are `picked`."""

    def __init__(self, layer: Layer, program: Program, choice: fx.Node) -> None:
        self.layer, self.program = layer, program
        self.nodes = list(program.forward.graph.nodes)
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.experts = layer.last.num_experts
        self.index = self._index(choice)
        self.scores = known(scores_of(choice))
        self.single = meta.value(self.index).dim() < meta.value(self.scores).dim()
        names = sorted(symbols([self.index, layer.last.units[0].out]))
        self.sizes = {name: 3 + 2 * i for i, name in enumerate(names)}
        if names:  # tokens enough for every expert to be chosen
            self.sizes[names[-1]] += self.experts // 3
        self.random = torch.Generator().manual_seed(0)
        shape = Concrete(self.sizes, {}).shape(self.index)
        self.tokens_count = torch.Size(shape if self.single else shape[:-1]).numel()
        self.k = 1 if self.single else shape[-1]
        if self.k > self.experts:
            raise NotCanonical("more choices than experts", routed=False)
        likings = torch.rand(self.tokens_count, self.experts, generator=self.random)
        for t in range(self.tokens_count):
            likings[t, t % self.experts] += 1
        picked = likings.topk(self.k).indices
        self.picked = picked.flatten()  # by slot
        self.given: dict[fx.Node, Any] = {self.index: picked.reshape(shape).to(meta.value(self.index).dtype)}
        self.tainted = self._find_tainted()
        self.below = self._find_below()
        self.by_tokens: Tensor | None = None

    def _index(self, choice: fx.Node) -> fx.Node:
        """The [..., k] indices: the choice, or the slice of a full sort."""
        scores = known(scores_of(choice))
        if meta.value(choice).dim() == meta.value(scores).dim() and _last(choice) == _last(scores):
            cuts = [u for u in choice.users if op_name(u) == "slice" and _last(u) != _last(scores)]
            if len(cuts) == 1:
                return cuts[0]
        return choice

    def _find_tainted(self) -> set[fx.Node]:
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

    def _find_below(self) -> set[fx.Node]:
        """Nodes that are computed from one of the layer's GEMMs."""
        found = set(self.layer.unit_of)
        for node in self.nodes:
            if any(n in found for n in node.all_input_nodes):
                found.add(node)
        return found

    def _leaf(self, node: fx.Node) -> Tensor:
        if node in self.tainted:
            raise Unknown(f"{node} is not given")
        return self.noise(Concrete(self.sizes, {}).shape(node), meta.value(node).dtype)

    def noise(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        if not dtype.is_floating_point:
            raise Unknown("integers cannot be made up")
        return (torch.rand(tuple(shape), generator=self.random) + 0.5).to(wide(dtype))

    def made_up(self, node: fx.Node) -> Tensor:
        """Random values in the shape of `node`."""
        return self.noise(Concrete(self.sizes, {}).shape(node), meta.value(node).dtype)

    def run(self, given: dict[fx.Node, Any]) -> Concrete:
        return Concrete(self.sizes, {**self.given, **given}, self._leaf)

    # --- the steps ---

    def slots_of_rows(self, results: tuple[fx.Node, ...]) -> list[tuple[Tensor, Tensor]] | None:
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
        by_row = self._slots_by_tokens()
        return None if by_row is None else [(torch.arange(rows), by_row)]

    def _slots_by_tokens(self) -> Tensor | None:
        """The slot of each row of grouped or gathered GEMMs: which token it looks like, and for which expert it is."""
        if self.by_tokens is None:
            expert = self._expert_of_row()
            (unit,) = next(f for f in self.layer.families if f.units[0].rows not in self.below).units
            weights = {n: self.made_up(n) for n in self.weights_before(unit.out)}
            for tokens in self.token_candidates() if expert is not None else []:
                probe = self.made_up(tokens)
                try:
                    value = self.run({**weights, tokens: probe})(unit.rows)
                except Unknown:
                    continue
                flat = [F.normalize(x.reshape(-1, x.shape[-1]).float(), dim=1) for x in (value, probe)]
                likeness, token = (flat[0] @ flat[1].T).max(1)
                choice = (self.picked.view(-1, self.k)[token] == known(expert)[:, None]).int().max(1)
                slots = token * self.k + choice.indices
                if likeness.min() > 0.999 and choice.values.all() and len(slots.unique()) == len(slots):
                    self.by_tokens = slots
                    break
        return self.by_tokens

    def _expert_of_row(self) -> Tensor | None:
        """The expert of each row of grouped or gathered GEMMs; None if families differ."""
        found: Tensor | None = None
        for family in self.layer.families:
            (unit,) = family.units
            assert isinstance(unit.experts, fx.Node)
            values = self.run({})(unit.experts).to(torch.int64)
            if unit.form == "grouped":
                rows = torch.arange(self.tokens_count * self.k)
                if values.shape != (self.experts,) or int(values[-1]) != rows.numel():
                    return None
                values = torch.searchsorted(values, rows, right=True)
            if found is not None and not torch.equal(found, values):
                return None
            found = values
        return found

    def leads_like_tokens(self, node: fx.Node) -> bool:
        """Whether the node is [T, D], or has the leading dimensions of the choice."""
        index, val = meta.value(self.index).shape, meta.value(node).shape
        lead = index if self.single else index[:-1]
        return len(val) == 2 or (len(val) - 1 == len(lead) and all(map(same_size, val, lead)))

    def has_token_rows(self, node: fx.Node, width: Any) -> bool:
        val = meta.tensor(node)
        if val is None or not val.is_floating_point() or val.dim() < 2 or val.shape[-1] != width:
            return False
        try:
            return torch.Size(Concrete(self.sizes, {}).shape(node)[:-1]).numel() == self.tokens_count
        except Unknown:
            return False

    def weights_before(self, output: fx.Node) -> list[fx.Node]:
        """Floats of the shape of the choice that may be its weights, in graph order."""
        of = meta.value(self.index)
        near = ancestors([output], stop=lambda n: n is self.scores)
        fits = []
        for node in self.nodes[self.order[self.scores] : self.order[output]]:
            val = meta.tensor(node) if node in near and node in self.tainted else None
            alike = val is not None and val.dim() == of.dim() and (self.single or same_size(val.shape[-1], self.k))
            if val is not None and alike and val.is_floating_point() and str(val.shape) == str(of.shape):
                fits.append(node)
        return fits[:8]

    def token_candidates(self) -> list[fx.Node]:
        """What the first GEMMs' rows may be taken from, nearest first; in a loop, something that all experts share."""
        first = next(f for f in self.layer.families if f.units[0].rows not in self.below)
        rows = first.units[0].rows
        seen, found, work = {rows}, [], [rows]
        while work and len(seen) < 60:
            node = work.pop(0)
            if self.has_token_rows(node, meta.value(rows).shape[-1]):
                found.append(node)
            for n in node.all_input_nodes:
                if n not in seen:
                    seen.add(n)
                    work.append(n)
        return found[:6]


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two values are equal up to the rounding of fp32."""
    return a.shape == b.shape and bool((a.float() - b.float()).norm() <= 1e-4 * b.float().norm())


def _last(node: fx.Node) -> Any:
    return meta.value(node).shape[-1]


def known(value: Any) -> Any:
    """`value`, which is not None."""
    assert value is not None
    return value
