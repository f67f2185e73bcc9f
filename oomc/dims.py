"""Which dimensions of a value carry tokens, and which operations keep tokens apart.

A dimension is a product of atoms: the batch "B", the sequence "S", plain ints, the rows of an expert order (Slots),
or a size that mentions B and S in another way (Mixed). `[B * S, 4 * 16]` has the layout `(("B", "S"), (64,))`. Every
operation has a rule (dim_rules.py) that says how the layouts of its inputs become those of its outputs, and which of B
and S it mixes. What mixes none may be computed tile by tile: each tile of its outputs depends on the same tile of its
inputs only. What is in order needs beside it a small state, which the tile of the positions before it leaves
(oomc.ops.CARRIES). An operation without a rule mixes both: it is correct, and never computed in tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import sympy
import torch
from torch import fx

from oomc import meta, private
from oomc.fxutil import OfValues, is_mutating
from oomc.match import op_name

Token = Literal["B", "S"]
TOKENS: tuple[Token, ...] = ("B", "S")


@dataclass(frozen=True)
class Slots:
    """The rows of one expert order: which rows there are depends on all the tokens that were sorted together."""

    route: str
    size: Any


@dataclass(frozen=True)
class Mixed:
    """A size that mentions B or S and is no product of them."""

    size: Any
    tokens: frozenset[Token]


Atom = int | str | Slots | Mixed
Dim = tuple[Atom, ...]
Layout = tuple[Dim, ...]
NONE: frozenset[Token] = frozenset()


class NoRule(Exception):  # noqa: N818 - an answer, not a fault
    """No rule says what an operation does to tokens."""


@dataclass(frozen=True)
class Flow:
    """What is known of a node.

    Attributes:
        layouts: of its tensors: one, or one for each entry of its tuple (None: no tensor).
        mixes: the tokens that it mixes.
        sums: its tensor is a sum over all tokens of what each token has of its own.
        ordered: it mixes no tokens if tiles of positions come in order, each with the state that the last one left.
        known: whether there was a rule for it.
    """

    layouts: tuple[Layout | None, ...]
    mixes: frozenset[Token] = NONE
    sums: bool = False
    ordered: bool = False
    known: bool = True

    @property
    def layout(self) -> Layout:
        """Of the only tensor."""
        if len(self.layouts) != 1 or self.layouts[0] is None:
            raise NoRule
        return self.layouts[0]


def tokens_of(layout: Layout | None) -> frozenset[Token]:
    """The tokens that a layout carries in any way."""
    found: set[Token] = set()
    for atom in (a for dim in layout or () for a in dim):
        if isinstance(atom, str):
            found.add(atom)  # type: ignore[arg-type]
        elif isinstance(atom, Mixed):
            found |= atom.tokens
        elif isinstance(atom, Slots):
            found |= {"B", "S"}
    return frozenset(found)


def slots_of(layout: Layout | None) -> frozenset[Slots]:
    """The expert orders that a layout's rows are in."""
    return frozenset(a for dim in layout or () for a in dim if isinstance(a, Slots))


def can_be_cut(layout: Layout | None, along: Iterable[Token]) -> bool:
    """Whether a tile of a value can be taken as a slice: each token has one atom of its own at most."""
    atoms = [a for dim in layout or () for a in dim]
    return not any(isinstance(a, Slots) for a in atoms) and all(
        atoms.count(t) <= 1 and not any(isinstance(a, Mixed) and t in a.tokens for a in atoms) for t in along
    )


@dataclass(frozen=True)
class TokenSymbols:
    """The symbols of batch and sequence; None where the trace has no such dimension.

    Attributes:
        batch, sequence: sympy symbols.
        sizes: the same as torch.SymInt, for those that there are.
    """

    batch: Any
    sequence: Any
    sizes: tuple[Any, ...] = ()

    @property
    def tokens(self) -> frozenset[Token]:
        """Which of them there are."""
        pairs: tuple[tuple[Token, Any], ...] = (("B", self.batch), ("S", self.sequence))
        return frozenset(name for name, symbol in pairs if symbol is not None)

    def formula(self, expr: Any) -> str:
        """The expression as text in `B` and `S`."""
        names = {symbol: sympy.Symbol(name) for symbol, name in ((self.batch, "B"), (self.sequence, "S")) if symbol}
        return str(expr if isinstance(expr, int) else expr.subs(names))

    def size(self, atom: Atom) -> Any:
        """The expression of an atom."""
        if isinstance(atom, str):
            return self.batch if atom == "B" else self.sequence
        return atom if isinstance(atom, int) else atom.size

    def dim(self, size: Any) -> Dim:
        """The atoms of a dimension of this size, the batch before the sequence before the rest."""
        expr = private.expression(size)
        if isinstance(expr, int):
            return () if expr == 1 else (expr,)
        symbols: list[tuple[Token, Any]] = [("B", self.batch), ("S", self.sequence)]
        present: list[Token] = [t for t, s in symbols if s is not None and s in expr.free_symbols]
        rest = expr
        for token in present:
            rest = rest / self.size(token)
        if rest.is_Integer and rest > 0:
            return (*present, int(rest)) if rest != 1 else tuple(present)
        tokens = frozenset(present) if not expr.free_symbols - {self.batch, self.sequence} else self.tokens
        return (Mixed(expr, tokens),)

    def layout(self, val: Any) -> Layout | None:
        """The layout that a value's sizes say; None for what is no tensor."""
        return tuple(self.dim(size) for size in val.shape) if isinstance(val, torch.Tensor) else None

    def axes(self, val: Any) -> tuple[int | None, int | None]:
        """The dimensions of size B and of size S, where there are such."""
        layout = self.layout(val) or ()
        found = [layout.index((t,)) if (t,) in layout else None for t in ("B", "S")]
        return found[0], found[1]


def token_symbols(placeholders: Iterable[fx.Node]) -> TokenSymbols:
    """The first symbols at dimension 0 and at dimension 1 of the graph's tensor inputs."""
    found: dict[int, tuple[Any, Any]] = {}
    for node in placeholders:
        val = meta.tensor(node)
        for dim, size in enumerate(val.shape[:2] if val is not None else ()):
            expr = private.expression(size)
            if not isinstance(expr, int) and expr.is_Symbol and expr not in [e for e, _ in found.values()]:
                found.setdefault(dim, (expr, size))
    exprs = [found[d][0] if d in found else None for d in (0, 1)]
    return TokenSymbols(exprs[0], exprs[1], tuple(size for _, (_, size) in sorted(found.items())))


def regroup(layout: Layout, shape: Sequence[Any], symbols: TokenSymbols) -> Layout:
    """The layout of the same elements in the same order under another shape.

    Raises:
        NoRule: a dimension of the shape cuts an atom that cannot be cut.
    """
    rest = [a for dim in layout for a in dim]
    result: list[Dim] = []
    for size in shape:
        want = sympy.sympify(private.expression(size))
        dim: list[Atom] = []
        while want != 1:
            if not rest:
                raise NoRule
            atom = rest.pop(0)
            if isinstance(atom, int):
                whole = int(want.as_coeff_Mul()[0])
                part = atom if whole % atom == 0 else whole if whole > 1 and atom % whole == 0 else 0
                if part == 0:
                    raise NoRule
                if part < atom:
                    rest.insert(0, atom // part)
                atom = part
            want = want / symbols.size(atom)
            if sympy.denom(want) != 1:
                raise NoRule
            if isinstance(atom, int) and dim and isinstance(dim[-1], int):
                dim[-1] *= atom
            else:
                dim.append(atom)
        result.append(tuple(dim))
    if rest:
        raise NoRule
    return tuple(result)


Rule = Callable[[fx.Node, "Analysis"], Flow]


class Analysis:
    """The flows of a graph's nodes, in the order of the graph.

    Args:
        graph: of ATen and oomc operations, with fake tensors of symbolic sizes.
        symbols: of batch and sequence.
        rules: by operator name, `oomc.` before ours.
        given: layouts of placeholders; by their sizes if not given.
    """

    def __init__(
        self,
        graph: fx.Graph,
        symbols: TokenSymbols,
        rules: Mapping[str, Rule],
        given: Mapping[fx.Node, Layout] | None = None,
    ) -> None:
        self.symbols = symbols
        self.flows: dict[fx.Node, Flow] = {}
        self._layout_of = OfValues(symbols.layout)
        for node in graph.nodes:
            if meta.is_size(node) or node.op == "output":
                continue
            if node.op != "call_function":
                known = (given or {}).get(node)
                self.flows[node] = Flow((known if known is not None else self._layout_of(meta.value(node)),))
            else:
                self.flows[node] = self._flow(node, rules)

    def layout(self, node: Any) -> Layout:
        """The layout of a node's only tensor."""
        if not isinstance(node, fx.Node) or node not in self.flows:
            raise NoRule
        return self.flows[node].layout

    def by_size(self, node: fx.Node) -> tuple[Layout | None, ...]:
        """The layouts that a node's values say."""
        val = meta.value(node)
        return tuple(self._layout_of(v) for v in (val if isinstance(val, tuple | list) else [val]))

    def _flow(self, node: fx.Node, rules: Mapping[str, Rule]) -> Flow:
        inputs = [n for n in node.all_input_nodes if n in self.flows]
        sizes = any(meta.is_size(n) for n in node.all_input_nodes)
        outputs = self.by_size(node)
        carried = [layout for n in inputs for layout in self.flows[n].layouts]
        if not sizes and not any(tokens_of(x) for x in (*carried, *outputs)) and not is_mutating(node):
            return Flow(outputs)
        try:
            if is_mutating(node) or (sizes and takes_size_as_data(node)):
                raise NoRule
            flow = rules[op_name(node)](node, self)
        except (NoRule, KeyError):
            return Flow(outputs, self.symbols.tokens, known=False)
        if op_name(node) == "getitem":
            return flow
        unclear = {
            t
            for layout in (*carried, *flow.layouts)
            for dim in layout or ()
            for a in dim
            if isinstance(a, Mixed)
            for t in a.tokens
        }
        return replace(flow, mixes=flow.mixes | unclear)


SHAPES = {
    "view": 1, "reshape": 1, "_unsafe_view": 1, "unflatten": 2, "expand": 1, "broadcast_to": 1, "zeros": 0, "ones": 0,
    "empty": 0, "full": 0, "new_zeros": 1, "new_ones": 1, "new_empty": 1, "new_full": 1,
}  # fmt: skip
"""Which argument is the shape of the result: the only place where a size is no data."""
POSITIONS = frozenset({"arange", "slice"})
"""Their rules look at sizes themselves."""


def takes_size_as_data(node: fx.Node) -> bool:
    """Whether the result depends on a size in another way than by its shape: a tile would take the tile's own size."""
    name = op_name(node)
    data = [*node.args[: SHAPES[name]], *node.args[SHAPES[name] + 1 :]] if name in SHAPES else list(node.args)
    found: list[fx.Node] = []
    fx.map_arg([*data, *(v for k, v in node.kwargs.items() if k not in ("size", "shape", "sizes"))], found.append)
    return name not in POSITIONS and any(meta.is_size(n) for n in found)


def is_pointwise(node: fx.Node) -> bool:
    """Whether torch says that the operation is one for each element."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
