"""Attention in the two forms that models write it: one SDPA call, or matmul, softmax, matmul.

%kt = aten.transpose.int(%k, -2, -1)
%s = aten.matmul(%q, %kt)
%s2 = aten.mul.Tensor(%s, 0.125)
%s3 = aten.masked_fill.Scalar(%s2, %hide, -inf)   =>   Attention(%q, %k, %v, masks=(hidden by %hide,), scale=0.125)
%p = aten.softmax.int(%s3, -1)
%o = aten.matmul(%p, %v)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from oomc import meta
from oomc.match import Concrete, Unknown, argument, movement_chain, op_name, same_size, symbols
from oomc.passes.match_mask import HIDES, Term

SOFTMAXES = ("softmax", "_softmax", "_safe_softmax")
CASTS = ("to", "_to_copy", "clone", "contiguous", "alias", "type_as", "expand")


@dataclass(frozen=True)
class Operand:
    """A factor of an attention: a node, and whether its last two dimensions stand the other way round."""

    node: fx.Node
    transposed: bool = False

    @property
    def shape(self) -> list[Any]:
        """The shape as [..., tokens, size]."""
        val = meta.tensor(self.node)
        assert val is not None
        shape = list(val.shape)
        return [*shape[:-2], shape[-1], shape[-2]] if self.transposed else shape


@dataclass(frozen=True)
class Attention:
    """What is computed at `output`: softmax(softcap(scale * q.k) + masks, with sinks) . v."""

    output: fx.Node
    q: Operand
    k: Operand
    v: Operand
    masks: tuple[Term, ...] = ()
    scale: float = 1.0
    softcap: float = 0.0
    sinks: fx.Node | None = None
    causal: bool = False


def anchors(graph: fx.Graph) -> list[fx.Node]:
    """The nodes at which an attention may be found."""
    return [n for n in graph.nodes if op_name(n) in ("scaled_dot_product_attention", *SOFTMAXES)]


def match(anchor: fx.Node) -> Attention | None:
    """The attention around an anchor, its masks not yet looked at."""
    found = _unfused(anchor) if op_name(anchor) in SOFTMAXES else _sdpa(anchor)
    return found if found is not None and _shapes_fit(found) else None


def _shapes_fit(found: Attention) -> bool:
    """Whether it is self-attention of [B, H, S, D] or [N, S, D] operands."""
    q, k, v = found.q.shape, found.k.shape, found.v.shape
    tensors = [meta.tensor(x.node) for x in (found.q, found.k, found.v)]
    if {len(q), len(k), len(v)} not in ({3}, {4}) or len({t.dtype for t in tensors if t is not None}) > 1:
        return False
    return same_size(q[-2], k[-2]) and same_size(k[-2], v[-2]) and same_size(q[0], k[0]) and same_size(k[0], v[0])


def _sdpa(node: fx.Node) -> Attention | None:
    q, k, v = node.args[:3]
    mask, drop = argument(node, 3, "attn_mask"), argument(node, 4, "dropout_p", 0.0)
    assert isinstance(q, fx.Node)
    assert isinstance(k, fx.Node)
    assert isinstance(v, fx.Node)
    size = meta.value(q).shape[-1]
    if drop != 0.0 or not isinstance(size, int):
        return None
    scale = argument(node, 6, "scale")
    masks = () if mask is None else (Term(mask),)
    return Attention(
        node, Operand(q), Operand(k), Operand(v), masks,
        scale=size**-0.5 if scale is None else scale, causal=bool(argument(node, 5, "is_causal", False)),
    )  # fmt: skip


def _unfused(softmax: Any) -> Attention | None:
    val = meta.tensor(softmax)
    if val is None or val.dim() < 3 or argument(softmax, 1, "dim") not in (-1, val.dim() - 1):
        return None
    weights, cut = softmax, False
    while True:
        if len(weights.users) != 1:
            return None
        user = next(iter(weights.users))
        if op_name(user) in CASTS and user.args[0] is weights and _same_rank(user, weights):
            weights = user
        elif op_name(user) == "slice" and not cut and _drops_last(user):
            weights, cut = user, True
        else:
            break
    product = _product(user)
    if product is None or product[0] != Operand(weights):
        return None
    scores = _scores(softmax.args[0], cut)
    return None if scores is None else replace(scores, output=user, v=product[1])


def _same_rank(a: fx.Node, b: fx.Node) -> bool:
    x, y = meta.tensor(a), meta.tensor(b)
    return x is not None and y is not None and len(x.shape) == len(y.shape) and all(map(same_size, x.shape, y.shape))


def _drops_last(node: Any) -> bool:
    """Whether `node` is x[..., :-1], as written or with the end spelled out."""
    x, y = meta.tensor(node.args[0]), meta.tensor(node)
    if x is None or y is None or argument(node, 1, "dim", 0) not in (-1, x.dim() - 1):
        return False
    starts = argument(node, 2, "start") in (None, 0) and argument(node, 4, "step", 1) == 1
    return starts and same_size(y.shape[-1], x.shape[-1] - 1)


def _scores(scores: Any, with_sink: bool) -> Attention | None:
    """Walk from the softmax's input up to q.k, collecting masks and scales; `output` and `v` are yet to be set."""
    masks: list[Term] = []
    scale, softcap, sinks = 1.0, 0.0, None
    node: Any = scores
    while isinstance(node, fx.Node):
        args: Any = node.args
        name = op_name(node)
        if name in CASTS and name != "expand":
            node = args[0]
        elif name == "sub" and _is_own_maximum(args[1], args[0]):
            node = args[0]  # softmax does not see a shift
        elif name == "cat" and with_sink and sinks is None and len(args[0]) == 2:
            if argument(node, 1, "dim", 0) not in (-1, meta.value(node).dim() - 1):
                return None
            (node, last) = args[0]
            sinks = _per_head(last, node)
            if sinks is None:
                return None
        elif name == "add" and len(node.kwargs) == 0 and all(isinstance(a, fx.Node) for a in args):
            a, b = args
            inner = a if _leads_to_product(a) else b
            masks.append(Term(b if inner is a else a))
            node = inner
        elif name == "masked_fill" and _hides(args[2]):
            masks.append(Term(args[1], inverted=True))
            node = args[0]
        elif name == "where" and len(args) == 3:
            keep = _hides(args[2])
            if not keep and not _hides(args[1]):
                return None
            masks.append(Term(args[0], inverted=not keep))
            node = args[1] if keep else args[2]
        elif name in ("mul", "div"):
            factor = _number(args[1])
            inner = args[0]
            if factor is None and name == "mul":
                factor, inner = _number(args[0]), args[1]
            if factor is None or factor <= 0:
                return None
            capped = name == "mul" and isinstance(inner, fx.Node) and op_name(inner) == "tanh"
            if capped and not softcap and scale == 1.0:
                softcap, scale, node = factor, factor, inner.args[0]
            else:
                scale, node = scale * (factor if name == "mul" else 1 / factor), inner
        else:
            break
    if not isinstance(node, fx.Node) or (with_sink and sinks is None):
        return None
    product = _product(node)
    if product is None:
        return None
    q, k = product
    k = Operand(k.node, not k.transposed)
    source = k.node.args[0] if k.transposed and _swaps_last(k.node) else None
    if isinstance(source, fx.Node):
        k = Operand(source)
    return Attention(node, q, k, k, tuple(masks), scale, softcap, sinks)


def _leads_to_product(node: Any) -> bool:
    """Whether the scores, and not a mask, are computed at `node`."""
    while isinstance(node, fx.Node):
        if _product(node) is not None:
            return True
        if op_name(node) not in (*CASTS, "mul", "div", "add", "masked_fill", "tanh", "where"):
            return False
        if op_name(node) == "add" and _leads_to_product(node.args[1]):
            return True
        node = node.args[1] if op_name(node) == "where" else node.args[0]
    return False


def _product(node: Any) -> tuple[Operand, Operand] | None:
    """The factors (a, b) of a batched a @ b."""
    name = op_name(node)
    if name in ("matmul", "bmm"):
        a, b = node.args
        if isinstance(a, fx.Node) and isinstance(b, fx.Node) and meta.value(a).dim() == meta.value(b).dim() >= 3:
            return Operand(a), Operand(b)
    if name == "einsum" and len(node.args[1]) == 2:
        return _einsum(node.args[0].replace(" ", ""), *node.args[1])
    return None


def _einsum(equation: str, a: fx.Node, b: fx.Node) -> tuple[Operand, Operand] | None:
    if "->" not in equation or "," not in equation:
        return None
    (left, right), out = equation.split("->")[0].split(","), equation.split("->")[1]
    lead = out[:-2]
    if not (3 <= len(out) == len(left) == len(right) and left[:-2] == right[:-2] == lead and left[-2] == out[-2]):
        return None
    summed = left[-1]
    if right[-2:] == summed + out[-1]:
        return Operand(a), Operand(b)
    return (Operand(a), Operand(b, transposed=True)) if right[-2:] == out[-1] + summed else None


def _swaps_last(node: Any) -> bool:
    val = meta.tensor(node)
    if val is None:
        return False
    n, name = val.dim(), op_name(node)
    if name == "permute":
        return [d % n for d in node.args[1]] == [*range(n - 2), n - 1, n - 2]
    if name in ("transpose", "swapaxes"):
        return {d % n for d in node.args[1:]} == {n - 2, n - 1}
    return name in ("mT", "adjoint")


def _number(arg: Any) -> float | None:
    """A number, or the value of a 0-dim tensor that the graph computes from numbers."""
    if isinstance(arg, int | float):
        return float(arg)
    val = meta.tensor(arg) if isinstance(arg, fx.Node) else None
    if val is None or val.dim() != 0:
        return None
    try:
        return float(Concrete({}, {})(arg))
    except Unknown:
        return None


def _hides(arg: Any) -> bool:
    number = _number(arg)
    return number is not None and not math.isnan(number) and number <= HIDES


def _is_own_maximum(node: Any, of: Any) -> bool:
    """Whether `node` is the maximum of `of` along its last dimension."""
    if not isinstance(node, fx.Node):
        return False
    source: Any = node.args[0] if op_name(node) == "getitem" and node.args[1] == 0 else node
    if op_name(source) == "detach":
        return _is_own_maximum(source.args[0], of)
    return op_name(source) in ("max", "amax") and source.args[0] is of


def _per_head(node: Any, scores: Any) -> fx.Node | None:
    """The [H] vector that `node` [B, H, S, 1] repeats."""
    val = meta.tensor(scores) if isinstance(scores, fx.Node) else None
    if not isinstance(node, fx.Node) or val is None or val.dim() != 4:
        return None
    heads = val.shape[1]
    for source in movement_chain(node):
        vector = meta.tensor(source)
        if vector is None or vector.dim() != 1 or not same_size(vector.shape[0], heads):
            continue
        probe = torch.arange(float(heads))
        try:
            run = Concrete(dict.fromkeys(symbols([node]), 3), {source: probe})
            repeated = run(node)
        except Unknown:
            return None
        return source if torch.equal(repeated, probe[None, :, None, None].expand(repeated.shape)) else None
    return None
