"""Which values keep tokens apart: the rules by which a run of nodes may be computed in chunks of tokens.

A dimension carries the batch (B), the sequence (S) or both flattened, as its symbolic size says. A node is
independent if every slice of its output along those dimensions depends on the same slice of its inputs only. An op
without a rule here is a fence: correct, but never chunked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from oomc import meta, private

Axes = tuple[int | None, int | None]

VIEWS = frozenset({"view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "expand", "flatten", "unflatten",
                   "t", "contiguous", "detach", "alias", "_unsafe_view", "clone"})  # fmt: skip
ROWWISE_LAST = frozenset({"layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm", "glu"})
OVER_DIM = frozenset({"softmax", "log_softmax", "_softmax", "_log_softmax"})
REDUCE_DIM = frozenset({"sum", "mean", "amax", "amin", "var", "std", "logsumexp", "linalg_vector_norm", "norm"})
CONTRACT = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "embedding"})
TOKEN_LOSSES = frozenset({"cross_entropy_loss", "nll_loss_nd"})
SUM_REDUCTION = 2


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

    def of(self, size: Any) -> tuple[str, ...]:
        """Which of `B`, `S` a dimension of this size carries."""
        expr = private.expression(size)
        if self.batch is not None and expr == self.batch:
            return ("B",)
        if self.sequence is not None and expr == self.sequence:
            return ("S",)
        if self.batch is not None and self.sequence is not None and expr == self.batch * self.sequence:
            return ("B", "S")
        return ()

    def formula(self, expr: Any) -> str:
        """The expression as text in `B` and `S`."""
        names = {symbol: sympy.Symbol(name) for symbol, name in ((self.batch, "B"), (self.sequence, "S")) if symbol}
        return str(expr if isinstance(expr, int) else expr.subs(names))

    def atoms(self, val: Any) -> list[tuple[str, ...]]:
        """What each dimension of a tensor carries."""
        return [self.of(size) for size in val.shape] if isinstance(val, torch.Tensor) else []

    def axes(self, val: Any) -> Axes:
        """The dimensions along the batch and along the sequence, where each has a dimension of its own."""
        atoms = self.atoms(val)
        batch = atoms.index(("B",)) if ("B",) in atoms else None
        sequence = atoms.index(("S",)) if ("S",) in atoms else None
        return batch, sequence

    def order(self, val: Any) -> list[str]:
        """The symbols that the dimensions carry, in order."""
        return [a for dim in self.atoms(val) for a in dim]

    def mixed(self, val: Any) -> bool:
        """Whether some size mentions the symbols in a way that chunks cannot follow (B*S flat is fine inside)."""
        if not isinstance(val, torch.Tensor):
            return False
        symbols = {self.batch, self.sequence} - {None}
        for size in val.shape:
            expr = private.expression(size)
            if not self.of(size) and not isinstance(expr, int) and expr.free_symbols & symbols:
                return True
        return False


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


def is_independent(node: fx.Node, symbols: TokenSymbols) -> bool:
    """Whether the node keeps tokens apart (see the module's docstring)."""
    op = node.target
    if node.op != "call_function" or not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable:
        return False
    out = meta.value(node)
    if not isinstance(out, torch.Tensor) or any(symbols.mixed(meta.value(n)) for n in [node, *node.all_input_nodes]):
        return False
    if any(meta.is_size(n) for n in node.all_input_nodes) and op._opname not in VIEWS:
        return False  # a size used as data would take the chunk's value
    name = op._opname
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    atoms = symbols.atoms(meta.value(source)) if source is not None else []
    if torch.Tag.pointwise in op.tags or name in ("to", "_to_copy"):
        return _aligned(node, symbols)
    if name in VIEWS:
        return symbols.order(out) == [a for dim in atoms for a in dim]
    if name in ROWWISE_LAST:
        return not atoms[-1]
    if name in OVER_DIM:
        dim = node.args[1]
        return isinstance(dim, int) and not atoms[dim]
    if name in REDUCE_DIM:
        dims = node.args[1] if len(node.args) > 1 else None
        dims = [dims] if isinstance(dims, int) else dims
        return isinstance(dims, list | tuple) and bool(dims) and not any(atoms[d] for d in dims if isinstance(d, int))
    if name in CONTRACT:
        return _contracts_features(node, symbols)
    if name == "slice":
        return not atoms[node.args[1] if len(node.args) > 1 and isinstance(node.args[1], int) else 0]
    return False


def is_token_sum(node: fx.Node, symbols: TokenSymbols) -> bool:
    """Whether the node sums over all tokens something that each token has of its own."""
    op = node.target
    if node.op != "call_function" or not isinstance(op, torch._ops.OpOverload) or not node.args:
        return False
    source = node.args[0]
    if not isinstance(source, fx.Node) or not any(symbols.atoms(meta.value(source))):
        return False
    if op._opname in TOKEN_LOSSES:
        reduction = node.args[3] if len(node.args) > 3 else node.kwargs.get("reduction", 1)
        weight = node.args[2] if len(node.args) > 2 else node.kwargs.get("weight")
        return bool(reduction == SUM_REDUCTION and weight is None)
    val = meta.tensor(source)
    return str(op) == "aten.sum.default" and val is not None and val.is_floating_point()


def _aligned(node: fx.Node, symbols: TokenSymbols) -> bool:
    """Whether broadcasting lines the token dimensions of all inputs up."""
    out = symbols.atoms(meta.value(node))
    for source in node.all_input_nodes:
        val = meta.value(source)
        if not isinstance(val, torch.Tensor):
            continue
        own = symbols.atoms(val)
        if any(a and a != o for a, o in zip(reversed(own), reversed(out), strict=False)):
            return False
    return True


def _contracts_features(node: fx.Node, symbols: TokenSymbols) -> bool:
    """Whether a product sums over features only and its right side is no function of the tokens."""
    name = node.target._opname  # type: ignore[union-attr]
    operands = [symbols.atoms(meta.value(a)) for a in node.args if isinstance(a, fx.Node)]
    if name == "embedding":
        return not any(operands[0])
    if name == "addmm":
        return not any(operands[0]) and not operands[1][-1] and not any(operands[2])
    if name == "bmm":
        return False
    left, *others = operands
    return not left[-1] and not any(any(o) for o in others)
