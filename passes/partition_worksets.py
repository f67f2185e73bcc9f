"""partition_worksets: find blocks, cut each into worksets, and give equal worksets one form.

Blocks are the entries of the model's outermost module lists (its layers), or its top-level modules where it has no
such list; what comes before and after them is the prologue (embedding) and the epilogue (final norm, head, loss).
A block is cut where tokens are mixed (attention and the like): what lies between keeps them apart and may run in chunks
of tokens, forward and backward, as may attention in chunks of batch rows (partition_cuts.py).

Before, a forward graph:

    %h = aten.embedding(%w, %ids)           # model.embed_tokens
    %q = aten.linear(%h, %wq)               # model.layers.0
    %a = oomc.attention(%q, ...)            # model.layers.0
    %y = aten.linear(%a, %wo)               # model.layers.0
    %loss = ...

After, the same graph, and beside it:

    prologue/0          [embedding]     in chunks of tokens
    model.layers.0/0    [linear]        in chunks of tokens
    model.layers.0/1    [attention]     in chunks of rows
    model.layers.0/2    [linear]        in chunks of tokens
    epilogue/0          [...]           in chunks of tokens
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from torch import fx

from oomc import meta, ops
from oomc.dim_rules import analyse
from oomc.dims import token_symbols
from oomc.errors import UnsupportedError
from oomc.extract import describe, extract
from oomc.fxutil import OfValues, is_mutating, rough_bytes
from oomc.passes.partition_cuts import cut
from oomc.program import PassResult, Program
from oomc.runtime.layout import ParamSpec, SlabLayout
from oomc.worksets import Block, Slab, Workset

PROLOGUE, EPILOGUE = "prologue", "epilogue"
INDEXED = re.compile(r"^(?P<list>.*?\.?)(?P<index>\d+)(@\w+)?$")


@dataclass(frozen=True)
class PartitionWorksets:
    """See the module's docstring.

    Attributes:
        whole: leave a block that keeps batch rows apart in one workset, to be run in chunks of rows. Nothing inside of
            it then exists for more than a chunk, not even for attention, which is computed again in the backward.
    """

    whole: bool = False
    name: str = "partition_worksets"

    def __call__(self, program: Program) -> PassResult:
        graph = program.forward.graph
        placeholders = graph.find_nodes(op="placeholder")
        symbols = token_symbols(n for n, s in zip(placeholders, program.inputs, strict=True) if s.kind == "input")
        parameters = {n for n, s in zip(placeholders, program.inputs, strict=True) if s.kind == "parameter"}
        program.notes["symbols"] = symbols
        analysis = analyse(graph, symbols)
        bytes_of, text_of = OfValues(rough_bytes), OfValues(describe)
        blocks = []
        layers: dict[int, list[fx.Node]] = defaultdict(list)
        for index, found in enumerate(find_blocks(graph)):
            name = found.name
            whole = self.whole and name not in (PROLOGUE, EPILOGUE)
            parts = cut(found.nodes, analysis, parameters, whole, bytes_of)
            worksets = [
                Workset(f"{name}/{i}", index, part.nodes, chunk=part.chunk, fences=part.fences)
                for i, part in enumerate(parts)
            ]
            layers[found.layer] += [n for part in parts for n in part.nodes]
            blocks.append(Block(name, worksets, found.layer))
        for nodes in layers.values():
            number_dropout(nodes)
        program.blocks = blocks
        program.forms = {}
        everything = [w for b in blocks for w in b.worksets]
        set_outputs(graph, everything)
        for workset in everything:
            form = extract(workset, parameters, analysis, text_of)
            program.forms.setdefault(form.key, form)
        specs = {
            n: ParamSpec(s.name, tuple(meta.value(n).shape), meta.value(n).dtype, s.trainable, s.rows)
            for n, s in zip(placeholders, program.inputs, strict=True)
            if s.kind == "parameter"
        }
        program.slabs = make_slabs(blocks, specs)
        for index, block in enumerate(blocks):
            block.slabs = tuple(s.name for s in program.slabs if index in s.users)
        program.forward.recompile()
        return PassResult(program, True)


@dataclass(frozen=True)
class Found:
    """What is to be a block: its name, the number of its layer, and its nodes in the order of the graph."""

    name: str
    layer: int
    nodes: list[fx.Node]


def find_blocks(graph: fx.Graph) -> list[Found]:
    """Assign every computing node to a block; blocks in order. Groups of a layer's experts are blocks of their own."""
    nodes = [n for n in graph.nodes if n.op == "call_function" and not meta.is_size(n)]
    layer_of = find_layers(nodes)
    layers = {name: i for i, name in enumerate(dict.fromkeys(layer_of.values()))}
    parts = _parts_of_layers(nodes, layer_of)
    keys = sorted({(layers[name], parts[n]) for n, name in layer_of.items()})
    order = {key: i for i, key in enumerate(keys)}
    last = len(order)
    level: dict[fx.Node, int] = {n: order[layers[name], parts[n]] for n, name in layer_of.items()}

    feeds_layer: set[fx.Node] = set()
    for node in reversed(nodes):
        if any(u in layer_of or u in feeds_layer for u in node.users):
            feeds_layer.add(node)
    for node in nodes:
        before = max((level[n] for n in node.all_input_nodes if n in level), default=-1)
        if node in layer_of:
            level[node] = max(level[node], before)
        elif node in feeds_layer:
            level[node] = before
        else:
            level[node] = last
    for node in nodes:  # what is written in place stays with what it writes to
        if is_mutating(node) and node.args[0] in level and level[node.args[0]] != level[node]:
            raise UnsupportedError(f"the forward writes in place to another block's value at {meta.source(node)}")
    groups: dict[int, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        groups[level[node]].append(node)
    titles = list(layers)
    names = {-1: PROLOGUE, last: EPILOGUE}
    names |= {i: titles[layer] + (f".experts.{part - 1}" if part else "") for (layer, part), i in order.items()}
    numbers = {-1: -1, last: len(layers)} | {i: layer for (layer, _), i in order.items()}
    place = {number: i for i, number in enumerate(dict.fromkeys(numbers[i] for i in sorted(groups)))}
    return [Found(names[i], place[numbers[i]], groups[i]) for i in sorted(groups)]


def _parts_of_layers(nodes: list[fx.Node], layer_of: dict[fx.Node, str]) -> dict[fx.Node, int]:
    """The part of its layer that each node is in: 0, or for a group of experts, and what is computed from it, 1 and
    more."""
    parts: dict[fx.Node, int] = {}
    for node in nodes:
        if node in layer_of:
            group = meta.expert_group(node)
            before = [parts[n] for n in node.all_input_nodes if layer_of.get(n) == layer_of[node]]
            parts[node] = max([0 if group is None else 1 + group, *before])
    return parts


def find_layers(nodes: list[fx.Node]) -> dict[fx.Node, str]:
    """The layer that each node was traced in: an entry of an outermost module list, else a top-level module."""
    stacks = {n: meta.module_calls(n) for n in nodes}
    layers: dict[fx.Node, str] = {}
    for node, stack in stacks.items():
        for name in stack:
            if INDEXED.match(name):
                layers[node] = name
                break
    if layers:
        return layers
    return {n: named[0] for n, stack in stacks.items() if (named := [name for name in stack if name])}


def number_dropout(nodes: list[fx.Node]) -> None:
    """Number dropout sites within their block, so that equal blocks are equal; the block's rng tells them apart."""
    for site, node in enumerate(n for n in nodes if n.target is ops.dropout):
        node.args = (*node.args[:3], site, *node.args[4:])


def set_outputs(graph: fx.Graph, worksets: list[Workset]) -> None:
    """Each workset puts out what others, or the graph's output, use."""
    owner = {n: w for w in worksets for n in w.nodes}
    for workset in worksets:
        workset.outputs = [
            n for n in workset.nodes if any(owner.get(u) is not workset for u in n.users if not meta.is_size(u))
        ]


def make_slabs(blocks: list[Block], specs: dict[fx.Node, ParamSpec]) -> list[Slab]:
    """Group parameters by the set of blocks that use them."""
    users: dict[fx.Node, dict[int, None]] = {}
    for index, block in enumerate(blocks):
        for workset in block.worksets:
            for node in workset.inputs:
                if isinstance(node, fx.Node) and node in specs:
                    users.setdefault(node, {})[index] = None
    groups: dict[tuple[tuple[int, ...], bool], list[ParamSpec]] = {}
    for node, found in users.items():
        groups.setdefault((tuple(found), specs[node].rows is not None), []).append(specs[node])
    slabs, shared = [], 0
    for (indices, of_rows), params in groups.items():
        name, whole = blocks[indices[0]].name, ""
        if len(indices) > 1:
            name, shared = f"shared.{shared}", shared + 1
        elif of_rows:
            whole = name.rpartition(".")[0]
        elif ((indices, True)) in groups:  # what comes after the last group of a layer's experts
            name = f"{name}.rest"
        slabs.append(Slab(name, tuple(p.name for p in params), indices, SlabLayout.build(name, params), whole))
    return slabs
