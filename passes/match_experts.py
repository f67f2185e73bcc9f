"""The expert GEMMs of a graph, and which of them make one mixture-of-experts layer.

A *unit* is one GEMM with the weights of one expert or of all; a *family* is the units that between them use all E
experts' weights of one projection. Units are found in three forms:

    grouped    aten._grouped_mm(%rows, %weight, offs=%offsets)                       rows sorted by expert
    gathered   aten.bmm(%weight[%expert_of_row], %rows.unsqueeze(-1)).squeeze(-1)    rows in any order
    loop       aten.linear(%tokens, %weight[0]), aten.linear(%tokens, %weight[1]) ...; or a parameter each

Families whose results flow into each other, expert by expert, make a layer (up and gate projections, then down).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from oomc import meta
from oomc.match import argument, op_name
from oomc.program import Program

GROUPED = ("_grouped_mm", "grouped_mm", "transformers.grouped_mm_fallback")
TURNS = ("transpose", "t", "permute", "mT", "swapaxes", "adjoint", "numpy_T")


@dataclass(frozen=True)
class Unit:
    """One GEMM: `out` [rows, F] from `rows` [rows, D].

    Attributes:
        experts: which expert each row is for: ends of the groups ("grouped"), an id a row ("gathered"), or the number
            of the one expert ("loop").
        bias: the one expert's bias, where the GEMM adds it.
    """

    form: str
    rows: fx.Node
    out: fx.Node
    experts: fx.Node | int
    bias: fx.Node | None = None


@dataclass(frozen=True)
class Family:
    """The units of one projection, by expert; one unit where it serves all experts.

    Attributes:
        weights: [E, ...] in one node, or a 2-D parameter for each expert.
        turned: whether a weight is laid out as [F, D], as nn.Linear has it.
    """

    units: tuple[Unit, ...]
    weights: tuple[fx.Node, ...]
    turned: bool
    num_experts: int

    @property
    def form(self) -> str:
        """The form of all its units."""
        return self.units[0].form


@dataclass
class Layer:
    """Families that flow into each other; the last one's results are what is combined."""

    families: list[Family]
    last: Family
    unit_of: dict[fx.Node, tuple[Family, Unit]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.unit_of = {u.out: (f, u) for f in self.families for u in f.units}

    @property
    def looped(self) -> bool:
        """Whether each expert has GEMMs of its own, on all tokens."""
        return self.last.form == "loop"


def find_layers(program: Program) -> list[Layer]:
    """All candidates for mixture-of-experts layers, in graph order."""
    graph = program.forward.graph
    families = [*_grouped(graph), *_gathered(graph), *_looped(program)]
    owner = {u.out: f for f in families for u in f.units}
    starts = {f.units[0].out: _first_reached(f.units[0], owner) for f in families}
    into: dict[int, set[int]] = {}
    number = {id(f): i for i, f in enumerate(families)}
    for i, family in enumerate(families):
        into[i] = set()
        reached = defaultdict(set)
        for out in starts[family.units[0].out]:
            reached[number[id(owner[out])]].add(out)
        for j, outs in reached.items():
            other = families[j]
            same = other.form == family.form and other.num_experts == family.num_experts
            if same and j != i and outs == {other.units[0].out} and _same_routing(family, other):
                into[i].add(j)
    layers = []
    for i, family in enumerate(families):
        if into[i]:
            continue
        members, work = {i}, [i]
        while work:
            j = work.pop()
            before = {n for n, nexts in into.items() if j in nexts} - members
            members |= before
            work.extend(before)
        layers.append(Layer([families[n] for n in sorted(members)], family))
    return layers


def _same_routing(a: Family, b: Family) -> bool:
    """Whether rows are for the same experts in both; loops are told apart by being reached expert by expert."""
    if a.form == "loop":
        return True
    return routing_source(a.units[0].experts) is routing_source(b.units[0].experts)


def _first_reached(unit: Unit, owner: dict[fx.Node, Family]) -> set[fx.Node]:
    """Results of the first units on every way down from `unit`."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    work = list(unit.out.users)
    while work:
        node = work.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in owner:
            found.add(node)
        else:
            work.extend(node.users)
    return found


def routing_source(node: Any) -> fx.Node | None:
    """The choice of experts that integers like `node` are computed from: by top-k, sort or argmax of float scores."""
    seen: set[fx.Node] = set()
    work = [node] if isinstance(node, fx.Node) else []
    while work:
        top = work.pop()
        if top in seen or meta.is_size(top):
            continue
        seen.add(top)
        if is_choice(top):
            return top
        work.extend(top.all_input_nodes)
    return None


def is_choice(node: fx.Node) -> bool:
    """Whether `node` holds indices of the largest of float scores."""
    if op_name(node) == "getitem" and node.args[1] == 1:
        call = node.args[0]
        picks = isinstance(call, fx.Node) and op_name(call) in ("topk", "sort", "max")
    else:
        call, picks = node, op_name(node) in ("argmax", "argsort")
    scores = scores_of(node) if picks else None
    return scores is not None and meta.value(scores).is_floating_point()


def scores_of(choice: fx.Node) -> fx.Node | None:
    """What was chosen from, [..., E]."""
    call = choice.args[0] if op_name(choice) == "getitem" else choice
    scores = call.args[0] if isinstance(call, fx.Node) else None
    return scores if isinstance(scores, fx.Node) and meta.tensor(scores) is not None else None


def _grouped(graph: fx.Graph) -> Iterable[Family]:
    for node in graph.nodes:
        if op_name(node) not in GROUPED:
            continue
        rows, weight, ends = node.args[0], node.args[1], argument(node, 2, "offs")
        if isinstance(ends, fx.Node) and meta.value(rows).dim() == 2 and meta.value(weight).dim() == 3:
            unit = Unit("grouped", rows, node, ends)
            yield Family((unit,), (weight,), False, meta.value(weight).shape[0])


def _gathered(graph: fx.Graph) -> Iterable[Family]:
    for node in graph.nodes:
        if op_name(node) not in ("bmm", "matmul") or meta.value(node).dim() != 3 or len(node.users) != 1:
            continue
        (out,) = node.users
        for side in (0, 1):
            turned, weights = _turns(node.args[side])
            rows = node.args[1 - side]
            name = op_name(weights)
            if name == "index" and len(weights.args[1]) == 1:
                source, ids = weights.args[0], weights.args[1][0]
            elif name == "index_select" and weights.args[1] == 0:
                source, ids = weights.args[0], weights.args[2]
            else:
                continue
            # weight @ column, or row @ weight: the singleton dimension goes again right after.
            inner = 2 - side if side == 0 else 1
            squeezed = op_name(out) == "squeeze" and argument(out, 1, "dim") in (inner, inner - 3)
            fits = op_name(rows) == "unsqueeze" and rows.args[1] in (inner, inner - 3) and meta.value(rows).dim() == 3
            if squeezed and fits and meta.value(source).dim() == 3 and meta.value(ids).dim() == 1:
                unit = Unit("gathered", rows.args[0], out, ids)
                yield Family((unit,), (source,), turned != (side == 0), meta.value(source).shape[0])


def _turns(node: Any) -> tuple[bool, Any]:
    """Whether the last two dimensions stand the other way round, and what they are dimensions of."""
    turned = False
    while isinstance(node, fx.Node) and op_name(node) in TURNS:
        dims = [d for d in node.args[1:] if isinstance(d, int)]
        rank = meta.value(node).dim()
        if op_name(node) == "permute" and [d % rank for d in node.args[1]] != [*range(rank - 2), rank - 1, rank - 2]:  # type: ignore[union-attr]
            break
        if dims and {d % rank for d in dims} != {rank - 2, rank - 1}:
            break
        turned, node = not turned, node.args[0]
    return turned, node


def _looped(program: Program) -> Iterable[Family]:
    """Families of one unit an expert, whose weights are slices of one parameter or parameters numbered by name."""
    graph = program.forward.graph
    targets = {n: s for n, s in zip(graph.find_nodes(op="placeholder"), program.inputs) if s.kind == "parameter"}
    found: dict[tuple[Any, ...], dict[int, list[tuple[Unit, fx.Node]]]] = defaultdict(lambda: defaultdict(list))
    for node in graph.nodes:
        gemm = _gemm(node)
        if gemm is None:
            continue
        rows, weight, bias, turned = gemm
        extra, weight = _turns(weight)
        turned ^= extra
        sliced = slice_of(weight)
        if sliced is not None:
            key: tuple[Any, ...] = (sliced[0], turned, "")
            expert = sliced[1]
            found[key][expert].append((Unit("loop", rows, node, expert, bias), sliced[0]))
        elif weight in targets and meta.value(weight).dim() == 2:
            name = targets[weight].target
            for place in re.finditer(r"(?<![^.])\d+(?![^.])", name):
                key = (None, turned, f"{name[: place.start()]}*{name[place.end() :]}")
                unit = Unit("loop", rows, node, int(place[0]), bias)
                found[key][int(place[0])].append((unit, weight))
    for (source, turned, _), by_expert in found.items():
        count = meta.value(source).shape[0] if source is not None else len(by_expert)
        if count < 2 or sorted(by_expert) != list(range(count)) or any(len(u) != 1 for u in by_expert.values()):
            continue
        pairs = [by_expert[e][0] for e in range(count)]
        units = tuple(u for u, _ in pairs)
        weights = (source,) if source is not None else tuple(w for _, w in pairs)
        if source is not None or _independent(units, weights):
            yield Family(units, weights, turned, count)


def _independent(units: tuple[Unit, ...], weights: tuple[fx.Node, ...]) -> bool:
    """Whether units with numbered parameters are experts, and not the same projection of layers in a row."""
    if len({str(meta.value(w).shape) for w in weights}) != 1:
        return False
    first, below, work = units[0].out, set[fx.Node](), [units[1].rows]
    order = {n: i for i, n in enumerate(first.graph.nodes)}
    while work:
        node = work.pop()
        if node is first:
            return False
        if node not in below and order[node] > order[first]:
            below.add(node)
            work.extend(node.all_input_nodes)
    return True


def slice_of(node: Any) -> tuple[fx.Node, int] | None:
    """(P, e) where `node` is P[e] of a placeholder P, by select or unbind."""
    if not isinstance(node, fx.Node):
        return None
    source: Any = None
    if op_name(node) == "select" and node.args[1] == 0 and isinstance(node.args[2], int):
        source, expert = node.args[0], node.args[2]
    elif op_name(node) == "getitem" and isinstance(node.args[0], fx.Node) and op_name(node.args[0]) == "unbind":
        if argument(node.args[0], 1, "dim", 0) == 0:
            source, expert = node.args[0].args[0], node.args[1]  # type: ignore[assignment]
    if not isinstance(source, fx.Node) or source.op != "placeholder":
        return None
    count = meta.value(source).shape[0]
    return source, expert % count


def _gemm(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, bool] | None:
    """(rows, weight, bias, whether the weight is [F, D]) of a GEMM with a 2-D weight."""
    args: Any = node.args
    name = op_name(node)
    if name == "linear":
        return args[0], args[1], argument(node, 2, "bias"), True
    if name in ("mm", "matmul") and isinstance(args[1], fx.Node) and meta.value(args[1]).dim() == 2:
        return args[0], args[1], None, False
    if name == "addmm" and not node.kwargs:
        return args[1], args[2], args[0], False
    return None
