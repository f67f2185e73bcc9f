"""The rules of dims.py: what each operation does to the dimensions that carry tokens.

A rule gives the layouts of the outputs and the tokens that are mixed, or raises NoRule. Pointwise operations are known
by torch's own tag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from oomc import meta
from oomc.dims import (
    NONE,
    Analysis,
    Dim,
    Flow,
    Layout,
    NoRule,
    Rule,
    Slots,
    Token,
    TokenSymbols,
    is_pointwise,
    regroup,
    slots_of,
    tokens_of,
)
from oomc.match import argument, op_name
from oomc.ops import CARRIES
from oomc.private import expression

SUM_REDUCTION = 2
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators of these names."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def analyse(graph: fx.Graph, symbols: TokenSymbols, given: dict[fx.Node, Layout] | None = None) -> Analysis:
    """The flows of a graph; see dims.py."""
    return Analysis(graph, symbols, _Table(), given)


class _Table(dict[str, Rule]):
    """RULES, and the rule of pointwise operations for all that torch calls pointwise."""

    def __init__(self) -> None:
        super().__init__(RULES)

    def __missing__(self, name: str) -> Rule:
        return _if_pointwise


def _if_pointwise(node: fx.Node, a: Analysis) -> Flow:
    if not is_pointwise(node):
        raise NoRule
    return aligned(node, a)


# --- helpers ---------------------------------------------------------------------------------------------------------


def dims_of(given: Any, count: int) -> list[int]:
    """Dimensions as non-negative ints; all of them if None is given."""
    if given is None:
        return list(range(count))
    given = [given] if isinstance(given, int) else list(given)
    if not all(isinstance(d, int) for d in given):
        raise NoRule
    return [d % count for d in given] if count else []


def join(layouts: Sequence[Layout], shape: Sequence[Any], symbols: TokenSymbols) -> Layout:
    """The layout of values that are broadcast to `shape`: their token dimensions must line up."""
    result: list[Dim] = []
    for place in range(1, len(shape) + 1):
        dims = {layout[-place] for layout in layouts if len(layout) >= place and tokens_of((layout[-place],))}
        if len(dims) > 1:
            raise NoRule
        result.append(dims.pop() if dims else symbols.dim(shape[-place]))
    return tuple(reversed(result))


def aligned(node: fx.Node, a: Analysis) -> Flow:
    """Elementwise, with broadcasting."""
    layouts = [a.layout(n) for n in node.all_input_nodes if n in a.flows]
    return Flow((join(layouts, meta.value(node).shape, a.symbols),))


def mixed_in(layout: Layout, dims: Iterable[int]) -> frozenset[Token]:
    """The tokens that these dimensions carry. Rows of experts may not be mixed at all."""
    part = tuple(layout[d] for d in dims)
    if slots_of(part):
        raise NoRule
    return tokens_of(part)


def tokens_in(node: fx.Node, symbols: TokenSymbols) -> frozenset[Any]:
    """The tokens whose sizes a node takes."""
    sizes = [meta.value(n) for n in node.all_input_nodes if meta.is_size(n)]
    return tokens_of(tuple(symbols.dim(size) for size in sizes))


def resized(layout: Layout, dims: Iterable[int], val: Any, symbols: TokenSymbols) -> Layout:
    """The layout with these dimensions as their new sizes say."""
    dims = set(dims)
    return tuple(symbols.dim(val.shape[d]) if d in dims else dim for d, dim in enumerate(layout))


def free_of_tokens(*layouts: Layout) -> None:
    """NoRule unless these carry no tokens."""
    if any(tokens_of(layout) for layout in layouts):
        raise NoRule


# --- views and copies ------------------------------------------------------------------------------------------------


@rule("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as", "reshape_as")
def _view(node: fx.Node, a: Analysis) -> Flow:
    return Flow((regroup(a.layout(node.args[0]), meta.value(node).shape, a.symbols),))


@rule("contiguous", "detach", "alias", "clone", "to", "_to_copy", "lift_fresh_copy", "zeros_like", "ones_like",
      "full_like", "empty_like", "positive", "type_as")  # fmt: skip
def _same(node: fx.Node, a: Analysis) -> Flow:
    return Flow((a.layout(node.args[0]),))


@rule("transpose", "permute", "t", "mT", "numpy_T", "swapaxes")
def _permute(node: fx.Node, a: Analysis) -> Flow:
    layout, name = a.layout(node.args[0]), op_name(node)
    order = list(range(len(layout)))
    if name in ("transpose", "swapaxes"):
        first, second = dims_of(node.args[1:3], len(layout))
        order[first], order[second] = second, first
    elif name == "permute":
        order = dims_of(node.args[1], len(layout))
    elif name == "mT":
        order[-2:] = reversed(order[-2:])
    else:
        order.reverse()
    return Flow((tuple(layout[d] for d in order),))


@rule("expand", "expand_as", "broadcast_to")
def _expand(node: fx.Node, a: Analysis) -> Flow:
    return Flow((join([a.layout(node.args[0])], meta.value(node).shape, a.symbols),))


@rule("select")
def _select(node: fx.Node, a: Analysis) -> Flow:
    layout = a.layout(node.args[0])
    (dim,) = dims_of(argument(node, 1, "dim", 0), len(layout))
    return Flow((layout[:dim] + layout[dim + 1 :],), mixed_in(layout, [dim]))


@rule("__and__", "__or__", "__xor__", "__lshift__", "__rshift__")
def _bits(node: fx.Node, a: Analysis) -> Flow:
    return aligned(node, a)


@rule("slice", "narrow", "pad", "constant_pad_nd", "roll", "flip", "slice_scatter", "select_scatter")
def _along(node: fx.Node, a: Analysis) -> Flow:
    """Moves elements along some dimensions only."""
    layout, name, val = a.layout(node.args[0]), op_name(node), meta.value(node)
    before = meta.value(node.args[0]).shape  # type: ignore[arg-type]
    if name in ("pad", "constant_pad_nd"):
        if argument(node, 2, "mode", "constant") != "constant" and name == "pad":
            raise NoRule
        dims = [d for d in range(len(layout)) if expression(val.shape[d]) != expression(before[d])]
    elif name in ("roll", "flip"):
        dims = dims_of(argument(node, 2 if name == "roll" else 1, "dims"), len(layout))
    elif name == "slice":
        dims = dims_of(argument(node, 1, "dim", 0), len(layout))
        step = argument(node, 4, "step", 1)
        if step == 1 and expression(val.shape[dims[0]]) == expression(before[dims[0]]):
            return Flow((layout,))
        return Flow((resized(layout, dims, val, a.symbols),), mixed_in(layout, dims) | tokens_in(node, a.symbols))
    else:
        dims = dims_of(argument(node, 2 if name.endswith("scatter") else 1, "dim", 0), len(layout))
        if name.endswith("scatter"):
            other = a.layout(node.args[1])
            rest = [d for i, d in enumerate(layout) if i not in dims]
            others = [d for i, d in enumerate(other) if name == "select_scatter" or i not in dims]
            if any(tokens_of((x,)) | tokens_of((y,)) and x != y for x, y in zip(rest, others, strict=True)):
                raise NoRule
            if tokens_of(tuple(layout[d] for d in dims)):
                raise NoRule
            return Flow((layout,))
    return Flow((resized(layout, dims, val, a.symbols),), mixed_in(layout, dims))


@rule("getitem")
def _getitem(node: fx.Node, a: Analysis) -> Flow:
    source, index = node.args
    layouts = a.flows[source].layouts  # type: ignore[index]
    return Flow((layouts[index],), a.flows[source].mixes)  # type: ignore[index]


@rule("chunk", "split", "split_with_sizes", "unbind", "tensor_split", "unsafe_chunk", "unsafe_split")
def _split(node: fx.Node, a: Analysis) -> Flow:
    layout, unbind = a.layout(node.args[0]), op_name(node) == "unbind"
    (dim,) = dims_of(argument(node, 1 if unbind else 2, "dim", 0), len(layout))
    if tokens_of((layout[dim],)):
        raise NoRule
    parts = meta.value(node)
    if unbind:
        return Flow(tuple(layout[:dim] + layout[dim + 1 :] for _ in parts))
    return Flow(tuple(resized(layout, [dim], part, a.symbols) for part in parts))


@rule("cat", "concat", "stack")
def _cat(node: fx.Node, a: Analysis) -> Flow:
    layouts = [a.layout(n) for n in node.args[0]]  # type: ignore[union-attr]
    val = meta.value(node)
    (dim,) = dims_of(argument(node, 1, "dim", 0), val.dim())
    if op_name(node) == "stack":
        layouts = [(*x[:dim], (), *x[dim:]) for x in layouts]
    else:
        for layout in layouts:
            if tokens_of((layout[dim],)):
                raise NoRule
    shape = list(val.shape)
    shape[dim] = 1
    out = join([(*x[:dim], (), *x[dim + 1 :]) for x in layouts], shape, a.symbols)
    return Flow(((*out[:dim], a.symbols.dim(val.shape[dim]), *out[dim + 1 :]),))


@rule("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor")
def _factory(node: fx.Node, a: Analysis) -> Flow:
    return Flow(a.by_size(node))


@rule("arange")
def _arange(node: fx.Node, a: Analysis) -> Flow:
    outs = a.by_size(node)
    return Flow(outs, tokens_of(outs[0]) | tokens_in(node, a.symbols))  # an element is its own position


# --- along one dimension ---------------------------------------------------------------------------------------------


@rule("layer_norm", "rms_norm", "_fused_rms_norm", "native_layer_norm")
def _norm(node: fx.Node, a: Analysis) -> Flow:
    layout = a.layout(node.args[0])
    last = len(node.args[1])  # type: ignore[arg-type]
    free_of_tokens(layout[len(layout) - last :])
    statistics = len(a.by_size(node)) - 1  # mean and inverse deviation, of native_layer_norm
    return Flow((layout, *[(*layout[: len(layout) - last], *[()] * last)] * statistics))


@rule("oomc.rms_norm")
def _rms_norm(node: fx.Node, a: Analysis) -> Flow:
    layout = a.layout(node.args[0])
    free_of_tokens(layout[-1:])
    return Flow((layout, (*layout[:-1], ())))


@rule("glu")
def _glu(node: fx.Node, a: Analysis) -> Flow:
    layout = a.layout(node.args[0])
    dims = dims_of(argument(node, 1, "dim", -1), len(layout))
    return Flow((resized(layout, dims, meta.value(node), a.symbols),), mixed_in(layout, dims))


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp")
def _over(node: fx.Node, a: Analysis) -> Flow:
    layout = a.layout(node.args[0])
    return Flow((layout,), mixed_in(layout, dims_of(argument(node, 1, "dim"), len(layout))))


@rule("topk", "sort", "argsort", "kthvalue", "max", "min", "argmax", "argmin", "median", "mode")
def _choose(node: fx.Node, a: Analysis) -> Flow:
    layout, name = a.layout(node.args[0]), op_name(node)
    place = {"topk": 2, "kthvalue": 2}.get(name, 1)
    default = None if name in ("max", "min", "argmax", "argmin", "median") else -1
    if name in ("sort", "argsort") and "stable" in str(node.target):
        place = 2
    dim = argument(node, place, "dim", default)
    if isinstance(dim, fx.Node) or dim is None:
        if isinstance(dim, fx.Node) and is_pointwise(node):  # max(x, y)
            return aligned(node, a)
        raise NoRule
    dims = dims_of(dim, len(layout))
    mixes = mixed_in(layout, dims)
    val = meta.value(node)
    outs = val if isinstance(val, tuple | list) else [val]
    kept = [v.dim() == len(layout) for v in outs]
    return Flow(
        tuple(
            resized(layout, dims, v, a.symbols) if k else tuple(d for i, d in enumerate(layout) if i not in dims)
            for v, k in zip(outs, kept, strict=True)
        ),
        mixes,
    )


@rule("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "linalg_vector_norm", "norm", "any", "all", "prod",
      "count_nonzero")  # fmt: skip
def _reduce(node: fx.Node, a: Analysis) -> Flow:
    layout, name = a.layout(node.args[0]), op_name(node)
    place = 2 if name in ("linalg_vector_norm", "norm") else 1
    given = argument(node, place, "dim")
    given = None if isinstance(given, bool) else given  # std(unbiased)
    if given is not None and not isinstance(given, int | list | tuple):
        raise NoRule
    dims = dims_of(given if given != [] else None, len(layout))
    keep = meta.value(node).dim() == len(layout)
    out = tuple(() if d in dims else x for d, x in enumerate(layout) if keep or d not in dims)
    if slots_of(layout) and any(slots_of((layout[d],)) for d in dims):
        raise NoRule
    mixed = mixed_in(layout, dims)
    if mixed and name in ("sum", "count_nonzero") and mixed == a.symbols.tokens:
        return Flow((out,), NONE, sums=True)
    return Flow((out,), mixed)


@rule("cross_entropy_loss", "nll_loss_nd", "nll_loss")
def _token_loss(node: fx.Node, a: Analysis) -> Flow:
    logits, labels = a.layout(node.args[0]), a.layout(node.args[1])
    if argument(node, 2, "weight") is not None or len(logits) != 2 or logits[0] != labels[0]:
        raise NoRule
    free_of_tokens((logits[1],))
    reduction = argument(node, 3, "reduction", 1)
    if reduction == 0:
        return Flow((labels,))
    if reduction == SUM_REDUCTION and tokens_of(labels) == a.symbols.tokens:
        return Flow(((),), NONE, sums=True)
    raise NoRule


@rule("histc")
def _histogram(node: fx.Node, a: Analysis) -> Flow:
    layout = a.layout(node.args[0])
    low, high = argument(node, 2, "min", 0), argument(node, 3, "max", 0)
    if low == high or slots_of(layout) or tokens_of(layout) != a.symbols.tokens:
        raise NoRule  # bins that follow the data
    return Flow(a.by_size(node), NONE, sums=True)


# --- products --------------------------------------------------------------------------------------------------------


@rule("linear")
def _linear(node: fx.Node, a: Analysis) -> Flow:
    x = a.layout(node.args[0])
    free_of_tokens((x[-1],), *(a.layout(n) for n in node.args[1:] if isinstance(n, fx.Node)))
    return Flow(((*x[:-1], a.symbols.dim(meta.value(node).shape[-1])),))


@rule("matmul", "mm", "bmm", "dot", "mv")
def _matmul(node: fx.Node, a: Analysis) -> Flow:
    left, right = a.layout(node.args[0]), a.layout(node.args[1])
    if len(left) < 2 or len(right) < 2:
        raise NoRule
    free_of_tokens((left[-1],), (right[-2],))
    shape = meta.value(node).shape
    rows, columns = left[-2], right[-1]
    batch = join([left[:-2], right[:-2]], shape[:-2], a.symbols)
    out = (*batch, rows or a.symbols.dim(shape[-2]), columns or a.symbols.dim(shape[-1]))
    atoms = [t for dim in out for t in dim if not isinstance(t, int)]
    if len(atoms) != len(set(atoms)) or slots_of(left) or slots_of(right):
        raise NoRule  # every token meets every other one
    return Flow((out,))


@rule("addmm", "baddbmm")
def _addmm(node: fx.Node, a: Analysis) -> Flow:
    bias, left, right = (a.layout(n) for n in node.args[:3])
    free_of_tokens(bias, right, (left[-1],))
    return Flow(((*left[:-1], a.symbols.dim(meta.value(node).shape[-1])),))


@rule("conv1d", "convolution", "conv2d", "conv3d")
def _convolution(node: fx.Node, a: Analysis) -> Flow:
    layout = a.layout(node.args[0])
    free_of_tokens(a.layout(node.args[1]), (layout[1],))
    spatial = range(2, len(layout))
    out = list(a.by_size(node)[0] or ())
    out[0] = layout[0]
    return Flow((tuple(out),), mixed_in(layout, spatial))


# --- by index --------------------------------------------------------------------------------------------------------


@rule("embedding")
def _embedding(node: fx.Node, a: Analysis) -> Flow:
    weight, index = a.layout(node.args[0]), a.layout(node.args[1])
    free_of_tokens(weight)
    if len(node.args) > 3 and node.args[3]:
        raise NoRule  # scale_grad_by_freq: a row's gradient is divided by how often the whole batch looks it up
    return Flow(((*index, weight[-1]),))


@rule("one_hot")
def _one_hot(node: fx.Node, a: Analysis) -> Flow:
    return Flow(((*a.layout(node.args[0]), a.symbols.dim(meta.value(node).shape[-1])),))


@rule("gather", "scatter", "scatter_add", "scatter_reduce")
def _gather(node: fx.Node, a: Analysis) -> Flow:
    x, index = a.layout(node.args[0]), a.layout(node.args[2])
    (dim,) = dims_of(node.args[1], len(x))
    src = node.args[3] if len(node.args) > 3 else None
    others = [index] + ([a.layout(src)] if isinstance(src, fx.Node) else [])
    for other in others:
        for d, (mine, its) in enumerate(zip(x, other, strict=True)):
            if tokens_of((mine,)) | tokens_of((its,)) and (d == dim or mine != its):
                raise NoRule
    return Flow((resized(index if op_name(node) == "gather" else x, [dim], meta.value(node), a.symbols),))


def index_is_mask(index: fx.Node) -> bool:
    """Whether an index says which elements by bools."""
    return meta.value(index).dtype in (torch.bool, torch.uint8)


@rule("index_select", "index")
def _index(node: fx.Node, a: Analysis) -> Flow:
    """Rows of a table that is no function of the tokens."""
    table = a.layout(node.args[0])
    if op_name(node) == "index_select":
        (dim,) = dims_of(node.args[1], len(table))
        index: Any = node.args[2]
    else:
        indices = list(node.args[1])  # type: ignore[arg-type]
        used = [i for i, x in enumerate(indices) if x is not None]
        if len(used) != 1:
            raise NoRule
        dim, index = used[0], indices[used[0]]
    rows = a.layout(index)
    if tokens_of((table[dim],)) or (tokens_of(table) and tokens_of(rows)) or index_is_mask(index):
        raise NoRule
    return Flow(((*table[:dim], *rows, *table[dim + 1 :]),))


# --- attention and its like: rows of the batch stay apart ------------------------------------------------------------


@rule("oomc.attention", "scaled_dot_product_attention")
def _attention(node: fx.Node, a: Analysis) -> Flow:
    for source in (n for n in node.all_input_nodes if n in a.flows):
        layout = a.layout(source)
        if slots_of(layout) or ("B" in tokens_of(layout) and layout[0] != ("B",)):
            raise NoRule
    return Flow(a.by_size(node), a.symbols.tokens - {"B"})


@rule("oomc.gated_delta_rule")
def _gated_delta_rule(node: fx.Node, a: Analysis) -> Flow:
    return _in_order(node, a, node.args[:5], 1)


@rule("oomc.causal_conv1d")
def _causal_conv1d(node: fx.Node, a: Analysis) -> Flow:
    free_of_tokens(*(a.layout(n) for n in node.args[1:3] if isinstance(n, fx.Node)))
    return _in_order(node, a, node.args[:1], 2)


def _in_order(node: fx.Node, a: Analysis, sources: Sequence[Any], place: int) -> Flow:
    """From [B, ...] with the positions in dimension `place` to the same; what it leaves has no positions."""
    outs, (before, after) = a.by_size(node), CARRIES[node.target]  # type: ignore[index]
    if node.args[before] is not None:
        return _attention(node, a)
    for layout in map(a.layout, sources):
        others = [dim for i, dim in enumerate(layout) if i not in (0, place)]
        if layout[0] not in ((), ("B",)) or layout[place] != ("S",) or any(tokens_of((dim,)) for dim in others):
            return _attention(node, a)
    return Flow(tuple(x if i in (0, after) else None for i, x in enumerate(outs)), ordered=True)


# --- experts ---------------------------------------------------------------------------------------------------------


@rule("oomc.route")
def _route(node: fx.Node, a: Analysis) -> Flow:
    index = a.layout(node.args[0])
    if len(index) != 2 or tokens_of((index[1],)) or slots_of(index):
        raise NoRule
    order = meta.value(node)[0]
    slots = Slots(node.name, expression(order.shape[0]))
    experts = Slots(
        node.name, expression(meta.value(node)[2].shape[0])
    )  # offsets: for each expert, but of these tokens
    return Flow((((slots,),), ((slots,),), ((experts,),)))


@rule("oomc.dispatch")
def _dispatch(node: fx.Node, a: Analysis) -> Flow:
    x, order = a.layout(node.args[0]), a.layout(node.args[1])
    if slots_of(x):
        raise NoRule
    return Flow(((order[0], x[1]),))


@rule("oomc.grouped_mm", "oomc.grouped_bias")
def _grouped(node: fx.Node, a: Analysis) -> Flow:
    x, weight, offsets = (a.layout(n) for n in node.args[:3])
    free_of_tokens(weight, (x[1],))
    rows, owner = x[0], offsets[0]
    if len(rows) != 1 or not isinstance(rows[0], Slots) or not isinstance(owner[0], Slots):
        raise NoRule
    if rows[0].route != owner[0].route:
        raise NoRule
    return Flow(((rows, a.symbols.dim(meta.value(node).shape[1])),))


@rule("oomc.combine")
def _combine(node: fx.Node, a: Analysis) -> Flow:
    y, weights, order = (a.layout(n) for n in node.args[:3])
    if y[0] != order[0] or slots_of(weights):
        raise NoRule
    return Flow(((weights[0], y[1]),))
