"""split_projections: of a linear layer that gives what attention takes and what goes round it, each is one of its own.

Gated attention (Qwen3-Next) makes queries and gates by one product. The gates, as large as the queries, would be there
for the whole sequence while attention runs. By a product of their own they are made where they are used, from the norm
of the block's input. Nothing is multiplied twice; the parameter stays one.

Before (2 heads of 4 + 4 features):

    %y = aten.linear(%x, %w)
    %v = aten.view(%y, [%B, %S, 2, 8])
    %c = aten.chunk(%v, 2, -1)
    %q = getitem(%c, 0)                       # goes into attention
    %g = getitem(%c, 1)                       # does not

After, and the same for %g:

    %u = aten.unflatten(%w, 0, [2, 8])
    %s = aten.slice(%u, 1, 0, 4)
    %f = aten.reshape(%s, [8, 8])
    %z = aten.linear(%x, %f)
    %q = aten.reshape(%z, [%B, %S, 2, 4])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from oomc import meta
from oomc.dim_rules import analyse
from oomc.dims import Analysis, token_symbols, tokens_of
from oomc.fxutil import erase_dead, insert_call
from oomc.match import argument, op_name, repropagate
from oomc.passes.partition_worksets import find_blocks
from oomc.program import PassResult, Program

aten = torch.ops.aten
SPLITS = frozenset({"chunk", "split", "split_with_sizes", "tensor_split"})


@dataclass(frozen=True)
class SplitProjections:
    """See the module's docstring."""

    name: str = "split_projections"

    def __call__(self, program: Program) -> PassResult:
        graph = program.forward.graph
        placeholders = graph.find_nodes(op="placeholder")
        symbols = token_symbols(n for n, s in zip(placeholders, program.inputs, strict=True) if s.kind == "input")
        analysis = analyse(graph, symbols)
        new: set[fx.Node] = set()
        for block in find_blocks(graph):
            mixed = _leads_to_mixing(block.nodes, analysis)
            for split in [n for n in block.nodes if op_name(n) in SPLITS]:
                parts = [u for u in split.users if op_name(u) == "getitem"]
                if len({part in mixed for part in parts}) == 2 and (linear := _linear(split, analysis)) is not None:
                    new |= {_own(graph, linear, part) for part in parts}
        if not new:
            return PassResult(program, False)
        repropagate(graph, new)
        erase_dead(graph)
        program.forward.recompile()
        return PassResult(program, True)


def _leads_to_mixing(nodes: list[fx.Node], analysis: Analysis) -> set[fx.Node]:
    """The nodes of a block from which something that mixes tokens is computed in it."""
    inside, found = set(nodes), set[fx.Node]()
    for node in reversed(nodes):
        if any(u in found or (u in inside and analysis.flows[u].mixes) for u in node.users):
            found.add(node)
    return found


def _linear(split: fx.Node, analysis: Analysis) -> fx.Node | None:
    """The linear layer of tokens whose features, or whose heads' features, a node splits; nobody else uses it."""
    source, heads = _heads(split)
    val = meta.tensor(split.args[0])  # type: ignore[arg-type]
    if val is None or argument(split, 2, "dim", 0) not in (-1, val.dim() - 1) or op_name(source) != "linear":
        return None
    if len(source.users) != 1 or meta.value(source).shape[-1] != heads * val.shape[-1]:
        return None
    return source if tokens_of(analysis.flows[source].layouts[0]) else None


def _heads(split: fx.Node) -> tuple[fx.Node, int]:
    """What is split, and of how many heads: 1 if its features are not viewed as those of heads."""
    node: Any = split.args[0]
    val = meta.tensor(node)
    if op_name(node) not in ("view", "reshape") or len(node.users) != 1 or val is None:
        return node, 1
    source = meta.tensor(node.args[0])
    heads = val.shape[-2] if source is not None and val.dim() == source.dim() + 1 else None
    return (node.args[0], heads) if isinstance(heads, int) else (node, 1)


def _own(graph: fx.Graph, linear: fx.Node, part: fx.Node) -> fx.Node:
    """Put a linear layer in the place of one part of another; gives the node that holds the part now."""
    split: Any = part.args[0]
    index: Any = part.args[1]
    sizes = [val.shape[-1] for val in meta.value(split)]
    _, heads = _heads(split)
    rows = heads, sum(sizes), sum(sizes[:index]), sizes[index]
    x, weight, bias = linear.args[0], linear.args[1], argument(linear, 2, "bias")
    with graph.inserting_before(split):
        own = [_rows(graph, each, *rows, like=linear) for each in (weight, bias) if each is not None]
        new = insert_call(graph, aten.linear.default, (x, *own), like=linear)
        if split.args[0] is not linear:
            shape = [*split.args[0].args[1][:-1], sizes[index]]
            new = insert_call(graph, aten.reshape.default, (new, shape), like=split)
    part.replace_all_uses_with(new)
    return new


def _rows(graph: fx.Graph, node: Any, heads: int, width: int, start: int, size: int, like: fx.Node) -> fx.Node:
    """Of each head's `width` rows of a weight or bias those from `start` on."""
    node = insert_call(graph, aten.unflatten.int, (node, 0, [heads, width]), like=like)
    node = insert_call(graph, aten.slice.Tensor, (node, 1, start, start + size), like=like)
    rest = list(meta.value(node).shape[2:])
    return insert_call(graph, aten.reshape.default, (node, [heads * size, *rest]), like=like)
