"""rewrite_attention: attention as models write it becomes one `oomc::attention`.

Found are `scaled_dot_product_attention` and matmul-softmax-matmul. Masks that are causal, windowed or made of segments
become options (match_mask.py says how that is decided), key-value heads are no longer expanded, and with the masks
every tensor of size S x S leaves the graph. Anything else (a bias, an unknown mask, dropout of weights) stays.

q, k and v come to lie as [B, S, H, D], each in memory of its own, as their gradients will: so these can be written
there (oomc.in_place). That is a copy where a model concatenates by heads or projects all three at once, made where the
tensors are: in chunks of tokens.

Before (q of 4 heads, k and v of 2):

    %le = aten.le.Tensor(%key, %query)
    %k2 = aten.expand.default(%k1, [%B, 2, 2, %S, 8])
    %k4 = aten.reshape.default(%k2, [%B, 4, %S, 8])
    %v4 = ...
    %out = aten.scaled_dot_product_attention.default(%q, %k4, %v4, %le)

After:

    %attention = oomc.attention.default(%q, %k, %v, None, None, 0.3535533905932738, True, None, 0.0)
    %out = getitem(%attention, 0)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from oomc import meta, private
from oomc.attention import attention
from oomc.fxutil import erase_dead, insert_call, memory_of
from oomc.match import Concrete, Unknown, movement_chain, repropagate, same_size, symbols, user_name
from oomc.passes.match_attention import Attention, Operand, anchors, match
from oomc.passes.match_mask import Mask, Term, decide
from oomc.program import PassResult, Program

aten = torch.ops.aten


@dataclass(frozen=True)
class RewriteAttention:
    """See the module's docstring; `program.notes["attention"]` lists what was left as it was, and why."""

    name: str = "rewrite_attention"

    def __call__(self, program: Program) -> PassResult:
        graph = program.forward.graph
        left: list[str] = []
        masks: dict[tuple[Term, ...], Mask | None] = {}
        segments: dict[fx.Node, fx.Node] = {}
        new: set[fx.Node] = set()
        for anchor in anchors(graph):
            found = match(anchor)
            if found is None or (found.causal and found.masks):
                continue
            mask = Mask(causal=True)
            if not found.causal:
                if found.masks not in masks:
                    masks[found.masks] = decide(found.masks, found.q.node, program)
                known = masks[found.masks]
                if known is None or (known.segments is not None and len(found.q.shape) == 3):
                    where, line = user_name((meta.modules(found.output) or ("",))[-1]), meta.source(found.output)
                    left.append(f"{where}: its mask is not causal, windowed or made of segments ({line})")
                    continue
                mask = known
            new.add(_replace(graph, found, mask, segments))
        if left:
            program.notes["attention"] = left
        if new:
            repropagate(graph, new)
        copied = [_lay_out(graph, node) for node in graph.find_nodes(op="call_function", target=attention)]
        if not new and not any(copied):
            return PassResult(program, False)
        erase_dead(graph)
        program.forward.recompile()
        return PassResult(program, True)


def _replace(graph: fx.Graph, found: Attention, mask: Mask, segments: dict[fx.Node, fx.Node]) -> fx.Node:
    """Put `oomc::attention` in the place of `found.output`; gives the node that now holds the result."""
    old = found.output
    before = meta.tensor(old)
    assert before is not None
    if mask.segments is not None and mask.segments not in segments:
        segments[mask.segments] = _as_segments(graph, mask.segments, found.q.node)
    with graph.inserting_before(old):
        q = _operand(graph, found.q, old)
        k, v = (_operand(graph, x, old) for x in (found.k, found.v))
        few_k, few_v = _unexpanded(graph, k, q, old), _unexpanded(graph, v, q, old)
        if same_size(meta.value(few_k).shape[1], meta.value(few_v).shape[1]):
            k, v = few_k, few_v
        of = None if mask.segments is None else segments[mask.segments]
        args = (q, k, v, found.sinks, of, found.scale, mask.causal, mask.window, found.softcap)
        both = insert_call(graph, attention, args, like=old)
        out = insert_call(graph, operator.getitem, (both, 0), like=old)
        if before.dim() == 3:
            out = insert_call(graph, aten.squeeze.dim, (out, 1), like=old)
        if meta.value(out).dtype != before.dtype:
            out = insert_call(graph, aten.to.dtype, (out, before.dtype), like=old)
    old.replace_all_uses_with(out)
    graph.erase_node(old)
    return out


def _lay_out(graph: fx.Graph, node: fx.Node) -> bool:
    """Let q, k and v lie as [B, S, H, D], each in memory of its own; whether one did not."""
    changed = False
    seen: set[fx.Node | None] = set()
    for index in range(3):
        operand = node.args[index]
        assert isinstance(operand, fx.Node)
        memory = memory_of(operand)
        if _lies_heads_inside(meta.value(operand)) and memory not in seen:
            seen.add(memory)
            continue
        with graph.inserting_before(node):
            inside = insert_call(graph, aten.transpose.int, (operand, 1, 2), like=operand)
            own = insert_call(
                graph, aten.clone.default, (inside,), like=operand, kwargs={"memory_format": torch.contiguous_format}
            )
            node.update_arg(index, insert_call(graph, aten.transpose.int, (own, 1, 2), like=operand))
        changed = True
    return changed


def _lies_heads_inside(x: torch.Tensor) -> bool:
    """Whether [B, H, S, D] fills memory as [B, S, H, D]."""
    b, h, s, d = map(private.expression, x.shape)
    strides = [private.expression(stride) for stride in x.stride()]
    expected = [h * s * d, d, h * d, 1]
    return all(size == 1 or own == wanted for size, own, wanted in zip((b, h, s, d), strides, expected, strict=True))


def _operand(graph: fx.Graph, operand: Operand, like: fx.Node) -> fx.Node:
    """The operand as [B, H, S, D]; without heads, every row of the batch is one head."""
    node = operand.node
    if operand.transposed:
        node = insert_call(graph, aten.transpose.int, (node, -2, -1), like=like)
    if meta.value(node).dim() == 3:
        node = insert_call(graph, aten.unsqueeze.default, (node, 1), like=like)
    return node


def _unexpanded(graph: fx.Graph, node: fx.Node, q: fx.Node, like: fx.Node) -> fx.Node:
    """Keys or values before their heads were repeated, if they were: as [B, fewer heads, S, D]."""
    shape = meta.value(node).shape
    heads, best = shape[1], node
    for source in movement_chain(node):
        val = meta.tensor(source)
        if val is None or val.dim() != 4 or not all(same_size(val.shape[d], shape[d]) for d in (0, 3)):
            continue
        for dim in (1, 2):
            few = val.shape[dim]
            fits = isinstance(few, int) and few < meta.value(best).shape[1] and heads % few == 0
            if not fits or not same_size(val.shape[3 - dim], shape[2]):
                continue
            if _repeats(node, source, dim, heads // few):
                best = source if dim == 1 else insert_call(graph, aten.transpose.int, (source, 1, 2), like=like)
    return best


def _repeats(node: fx.Node, source: fx.Node, dim: int, times: int) -> bool:
    """Whether `node` [B, H, S, D] is `source`, whose heads are dimension `dim`, with each head repeated in turn."""
    run = Concrete(dict.fromkeys(symbols([node, source]), 3), {})
    try:
        shape = run.shape(source)
        probe = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        run.given[source] = probe
        result = run(node)
    except Unknown:
        return False
    few = probe if dim == 1 else probe.transpose(1, 2)
    return torch.equal(result, few.repeat_interleave(times, 1))


def _as_segments(graph: fx.Graph, node: fx.Node, q: fx.Node) -> fx.Node:
    """The values of `node` [..., S] as int64 [B, S], placed right after it so that all layers can use them."""
    first = next(n for n in graph.nodes if n.op != "placeholder")
    batch = meta.value(q).shape[0]
    with graph.inserting_before(first if node.op == "placeholder" else node.next):
        shape = meta.value(node).shape
        keep = next((d for d in range(len(shape) - 1) if not same_size(shape[d], 1)), 0)
        new = node
        if len(shape) > 2:
            drop = [d for d in range(len(shape) - 1) if d != keep]
            new = insert_call(graph, aten.squeeze.dims, (new, drop), like=node)
        if not same_size(shape[keep], batch):
            holder = next(n for n in graph.find_nodes(op="placeholder") if _has_rows(n, batch))
            rows = insert_call(graph, aten.sym_size.int, (holder, 0), like=node)
            new = insert_call(graph, aten.expand.default, (new, [rows, -1]), like=node)
        if meta.value(new).dtype != torch.int64:
            new = insert_call(graph, aten.to.dtype, (new, torch.int64), like=node)
    return new


def _has_rows(node: fx.Node, batch: object) -> bool:
    val = meta.tensor(node)
    return val is not None and val.dim() > 0 and same_size(val.shape[0], batch)
