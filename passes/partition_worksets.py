"""partition_worksets: find blocks, cut each into worksets, and give equal worksets one form.

Blocks are the entries of the model's outermost module lists (its layers), or its top-level modules where it has no
such list; what comes before and after them is the prologue (embedding) and the epilogue (final norm, head, loss).
A block is cut at its fences (attention and the like, which mix tokens), and the loss is cut out of the epilogue with
everything before it that keeps tokens apart, to run in token chunks.

Before, a forward graph:

    %h = aten.embedding(%w, %ids)           # model.embed_tokens
    %q = aten.linear(%h, %wq)               # model.layers.0
    %a = oomc.attention(%q, ...)            # model.layers.0
    %y = aten.linear(%a, %wo)               # model.layers.0
    %loss = ...

After, the same graph, and beside it:

    prologue/0          [embedding]
    model.layers.0/0    [linear]
    model.layers.0/1    [attention]
    model.layers.0/2    [linear]
    epilogue/0 (chunks) [...]
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from torch import fx

from oomc import meta, ops
from oomc.dims import VIEWS, TokenSymbols, is_independent, is_token_sum, token_symbols
from oomc.errors import UnsupportedError
from oomc.extract import extract
from oomc.fxutil import is_mutating
from oomc.program import PassResult, Program
from oomc.runtime.layout import ParamSpec, SlabLayout
from oomc.worksets import Block, Slab, Workset

PROLOGUE, EPILOGUE = "prologue", "epilogue"
INDEXED = re.compile(r"^(?P<list>.*?\.?)(?P<index>\d+)(@\w+)?$")


@dataclass(frozen=True)
class PartitionWorksets:
    """See the module's docstring."""

    name: str = "partition_worksets"

    def __call__(self, program: Program) -> PassResult:
        graph = program.forward.graph
        placeholders = graph.find_nodes(op="placeholder")
        symbols = token_symbols(n for n, s in zip(placeholders, program.inputs, strict=True) if s.kind == "input")
        parameters = {n for n, s in zip(placeholders, program.inputs, strict=True) if s.kind == "parameter"}
        program.notes["symbols"] = symbols
        blocks = []
        for index, (name, nodes) in enumerate(find_blocks(graph)):
            parts = cut_loss(nodes, symbols) if name == EPILOGUE else [(part, False) for part in cut_fences(nodes)]
            worksets = [Workset(f"{name}/{i}", index, part, chunk=chunk) for i, (part, chunk) in enumerate(parts)]
            number_dropout(nodes)
            blocks.append(Block(name, worksets))
        program.blocks = blocks
        program.forms = {}
        everything = [w for b in blocks for w in b.worksets]
        set_outputs(graph, everything)
        for workset in everything:
            form = extract(workset, parameters, symbols)
            program.forms.setdefault(form.key, form)
        specs = {
            n: ParamSpec(s.target, tuple(meta.value(n).shape), meta.value(n).dtype, s.trainable)
            for n, s in zip(placeholders, program.inputs, strict=True)
            if s.kind == "parameter"
        }
        program.slabs = make_slabs(blocks, specs)
        for block in blocks:
            block.slabs = tuple(s.name for s in program.slabs if blocks.index(block) in s.users)
        program.forward.recompile()
        return PassResult(program, True)


def find_blocks(graph: fx.Graph) -> list[tuple[str, list[fx.Node]]]:
    """Assign every computing node to a block; blocks in order, each with its nodes in graph order."""
    nodes = [n for n in graph.nodes if n.op == "call_function" and not meta.is_size(n)]
    layer_of = find_layers(nodes)
    order = {name: i for i, name in enumerate(dict.fromkeys(layer_of.values()))}
    last = len(order)
    level: dict[fx.Node, int] = {n: order[name] for n, name in layer_of.items()}

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
    names = {-1: PROLOGUE, last: EPILOGUE} | {i: name for name, i in order.items()}
    return [(names[i], groups[i]) for i in sorted(groups)]


def find_layers(nodes: list[fx.Node]) -> dict[fx.Node, str]:
    """The layer that each node was traced in: an entry of an outermost module list, else a top-level module."""
    stacks = {n: meta.module_calls(n) for n in nodes}
    entries: dict[str, set[str]] = defaultdict(set)
    for stack in stacks.values():
        for name in stack:
            if match := INDEXED.match(name):
                entries[match["list"]].add(match["index"])
    layers: dict[fx.Node, str] = {}
    for node, stack in stacks.items():
        for name in stack:
            match = INDEXED.match(name)
            if match and len(entries[match["list"]]) > 1:
                layers[node] = name
                break
    if layers:
        return layers
    return {n: named[0] for n, stack in stacks.items() if (named := [name for name in stack if name])}


def cut_fences(nodes: list[fx.Node]) -> list[list[fx.Node]]:
    """Cut a block before and after each fence; a node moves past a fence where fewer bytes cross for it."""
    stage: dict[fx.Node, int] = {}
    current = 0
    for node in nodes:
        if node.target in ops.FENCES:
            stage[node] = current + 1
            current += 2
        else:
            own = next((stage[n] for n in node.all_input_nodes if stage.get(n, 0) % 2 == 1 and is_part(node, n)), None)
            stage[node] = current if own is None else own
    for node in reversed(nodes):
        users = [stage[u] for u in node.users if u in stage]
        if stage[node] % 2 or not users or is_mutating(node) or any(is_mutating(u) for u in node.users):
            continue
        target = min(u - u % 2 for u in users)
        inside = [n for n in node.all_input_nodes if n in stage]
        if target > stage[node] and all(any(stage.get(u, 0) >= target for u in n.users) for n in inside):
            stage[node] = target
    parts: dict[int, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        parts[stage[node]].append(node)
    return [parts[i] for i in sorted(parts)]


def is_part(node: fx.Node, fence: fx.Node) -> bool:
    """Whether the node only names one of the fence's outputs."""
    return fence.target in ops.FENCES and "getitem" in str(node.target)


def cut_loss(nodes: list[fx.Node], symbols: TokenSymbols) -> list[tuple[list[fx.Node], bool]]:
    """Cut the epilogue into what comes before the token loss, the loss (to be chunked), and the rest."""
    sums = [n for n in nodes if is_token_sum(n, symbols) and _from_logits(n)]
    if symbols.batch is None or not sums:
        return [(part, False) for part in cut_fences(nodes)]
    inside, chunk = set(nodes), set(sums)
    frontier = list(sums)
    while frontier:
        for source in frontier.pop().all_input_nodes:
            if source in inside and source not in chunk and is_independent(source, symbols):
                chunk.add(source)
                frontier.append(source)
    nodes = own_views(nodes, chunk)
    after: set[fx.Node] = set()
    for node in nodes:
        if node not in chunk and any(n in chunk or n in after for n in node.all_input_nodes):
            after.add(node)
    crossing = [n for n in chunk if n not in sums and any(u not in chunk for u in n.users)]
    entering = [n for c in chunk for n in c.all_input_nodes if n not in chunk]
    if (
        any(n in after for n in entering)
        or any(n.target in ops.NEVER_RECOMPUTE for n in chunk)
        or not all(has_own_axes(n, symbols) for n in [*crossing, *entering])
    ):
        return [(part, False) for part in cut_fences(nodes)]
    parts = [
        ([n for n in nodes if n not in chunk and n not in after], False),
        ([n for n in nodes if n in chunk], True),
        ([n for n in nodes if n in after], False),
    ]
    return [(part, is_chunk) for part, is_chunk in parts if part]


def has_own_axes(node: fx.Node, symbols: TokenSymbols) -> bool:
    """Whether a value can be cut along batch and sequence: each has a dimension of its own, or none at all."""
    val = meta.value(node)
    return not symbols.mixed(val) and len(symbols.order(val)) == sum(a is not None for a in symbols.axes(val))


def own_views(nodes: list[fx.Node], chunk: set[fx.Node]) -> list[fx.Node]:
    """Give users outside `chunk` their own copies of the views (of labels, say) that it holds."""
    result: list[fx.Node] = []
    for node in nodes:
        result.append(node)
        outside = [u for u in node.users if u not in chunk]
        if node in chunk and outside and node.target._opname in VIEWS:  # type: ignore[union-attr]
            with node.graph.inserting_after(node):
                twin = node.graph.node_copy(node)
            for user in outside:
                user.replace_input_with(node, twin)
            result.append(twin)
    return result


def _from_logits(node: fx.Node) -> bool:
    return node.target._opname in ("cross_entropy_loss", "nll_loss_nd")  # type: ignore[union-attr]


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
    groups: dict[tuple[int, ...], list[ParamSpec]] = {}
    for node, found in users.items():
        groups.setdefault(tuple(found), []).append(specs[node])
    slabs, shared = [], 0
    for indices, params in groups.items():
        name = blocks[indices[0]].name
        if len(indices) > 1:
            name, shared = f"shared.{shared}", shared + 1
        slabs.append(Slab(name, tuple(p.name for p in params), indices, SlabLayout.build(name, params)))
    return slabs
