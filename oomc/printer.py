"""Deterministic text of a program at any stage: no addresses, times or set order."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from oomc import meta, steps
from oomc.dims import token_symbols
from oomc.extract import describe
from oomc.program import Program
from oomc.simulate import nbytes

TIERS = {
    steps.weights: "host", steps.device_weights: "device", steps.fetch: "device", steps.wait: "device",
    steps.offload: "host", steps.update: "host", steps.apply: "host", steps.store: "host",
}  # fmt: skip


def print_program(program: Program) -> str:
    """The graph of the current stage, with what the stage has added to it."""
    if program.step is not None:
        return print_step(program)
    text = print_forward(program)
    if program.blocks:
        text += "\n\n" + print_worksets(program)
    return name_symbols(program, text)


def name_symbols(program: Program, text: str) -> str:
    """Write `B` and `S` for the symbols of batch and sequence, whose own names differ between versions of torch."""
    placeholders = program.forward.graph.find_nodes(op="placeholder")
    symbols = token_symbols(n for n, s in zip(placeholders, program.inputs, strict=True) if s.kind == "input")
    for symbol, name in ((symbols.batch, "B"), (symbols.sequence, "S")):
        if symbol is not None:
            text = re.sub(rf"\b{symbol}\b", name, text)
    return text


def print_forward(program: Program) -> str:
    """The forward graph: each value with dtype, symbolic shape and the module it was traced in."""
    lines, inputs = [], iter(program.inputs)
    for node in program.forward.graph.nodes:
        if node.op == "placeholder":
            spec = next(inputs)
            lines.append(f"%{node.name} : {describe(meta.value(node))} = {spec.kind} {spec.name}")
        elif node.op == "output":
            lines.append(f"return {_args(node.args[0])}")
        else:
            where = (meta.modules(node) or ("",))[-1]
            comment = f"  # {where}" if where else ""
            lines.append(f"%{node.name} : {describe(meta.value(node))} = {_call(node)}{comment}")
    return "\n".join(lines)


def print_worksets(program: Program) -> str:
    """Blocks, worksets and forms."""
    lines = []
    for block in program.blocks:
        lines.append(f"block {block.name} slabs {', '.join(block.slabs) or 'none'}")
        for w in block.worksets:
            chunk = f" in chunks of {w.chunk}" if w.chunk else ""
            outs = ", ".join(n.name for n in w.outputs)
            lines.append(f"  {w.name}: {w.form}, {len(w.nodes)} nodes{chunk} -> {outs}")
    for key, form in program.forms.items():
        lines.append(f"form {key}: {len(form.inputs)} inputs, saved {form.saved}")
        for variant in steps.GRAPHS:
            graph = getattr(form, variant)
            if graph is not None:
                lines.append(f"  {variant}:")
                lines += [f"    {line}" for line in print_graph(graph.graph).splitlines()]
    return "\n".join(lines)


def print_graph(graph: fx.Graph) -> str:
    """A plain graph, a line each node."""
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {_args(node.args[0])}")
        elif node.op == "placeholder":
            lines.append(f"%{node.name} : {describe(meta.value(node))}")
        else:
            lines.append(f"%{node.name} : {describe(meta.value(node))} = {_call(node)}")
    return "\n".join(lines)


def print_step(program: Program) -> str:
    """The step graph: each node with lane, bytes, tier and lifetime (the index of its last use)."""
    assert program.step is not None
    graph = program.step.graph
    position = {n: i for i, n in enumerate(graph.nodes)}
    retired = {n.args[1]: n for n in graph.nodes if n.target in (steps.retire, steps.discard)}
    lines = []
    for node, index in position.items():
        if node.op == "output":
            lines.append(f"{index:4} return {_args(node.args[0])}")
            continue
        last = max((position[retired.get(u, u)] for u in node.users), default=index)
        size = _bytes(program, node)
        lane = steps.LANES.get(node.target, "none") if callable(node.target) else "none"
        notes = [lane if "getitem" not in str(node.target) and node.op != "placeholder" else "value"]
        if size:
            notes.append(f"{size:,} B" if isinstance(size, int) else f"{size} B")
            notes.append(TIERS.get(node.target, "device"))
        if last > index:
            notes.append(f"until {last}")
        name = f"%{node.name} = " if node.users or node.op == "placeholder" else ""
        text = f"{name}{_call(node) if node.op != 'placeholder' else 'input'}"
        lines.append(f"{index:4} {text}  # {', '.join(notes)}")
    return "\n".join(lines)


def _bytes(program: Program, node: fx.Node) -> Any:
    if node.target in (steps.fetch, steps.weights, steps.device_weights):
        return next(s.layout.weight_bytes for s in program.slabs if s.name == node.args[1])
    val = meta.value(node)
    symbols = program.notes["symbols"]
    if program.plan is None or not isinstance(val, torch.Tensor):
        count = nbytes(val, lambda s: getattr(getattr(s, "node", None), "expr", s))
        return count if isinstance(count, int) else symbols.formula(count)
    known = {s: v for s, v in zip((symbols.batch, symbols.sequence), program.plan.sizes, strict=True) if s is not None}
    return nbytes(val, lambda s: s if isinstance(s, int) else int(s.node.expr.subs(known)))


def _call(node: fx.Node) -> str:
    target = node.target
    if "getitem" in str(target):
        return f"{_args(node.args[0])}[{node.args[1]}]"
    name = str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    args = [a for a in node.args if not (isinstance(a, fx.Node) and a.name == "rt")]
    parts = [_args(a) for a in args] + [f"{k}={_args(v)}" for k, v in node.kwargs.items()]
    return f"{name}({', '.join(parts)})"


def _args(arg: Any) -> str:
    if isinstance(arg, fx.Node):
        return f"%{arg.name}"
    if isinstance(arg, tuple | list):
        return "[" + ", ".join(_args(a) for a in arg) + "]"
    return repr(arg)
