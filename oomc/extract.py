"""Take runs of nodes out of a graph as graphs of their own, and name them by their structure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from oomc import meta, private
from oomc.dims import Analysis
from oomc.fxutil import add_copy
from oomc.worksets import Form, FormInput, Workset, dtype_name


def external_inputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Nodes outside `nodes` that they use, in order of first use."""
    inside = set(nodes)
    found: dict[fx.Node, None] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in inside:
                found.setdefault(source)
    return list(found)


def extract(
    workset: Workset, parameters: set[fx.Node], analysis: Analysis, text_of: Callable[[Any], str] | None = None
) -> Form:
    """Make the workset's form, and fill in what the workset passes to it.

    Args:
        workset: of a graph.
        parameters: of the graph.
        analysis: of the graph.
        text_of: `describe`, where it is known of many values already.
    """
    symbols = analysis.symbols
    sizes: dict[Any, fx.Node] = {}
    mapping: dict[fx.Node, Any] = {}
    inputs: list[FormInput] = []
    graph = fx.Graph()
    workset.inputs = []
    for size in symbols.sizes:
        expr = private.expression(size)
        sizes[expr] = graph.placeholder(f"size_{len(sizes)}")
        meta.set_value(sizes[expr], size)
        inputs.append(FormInput("size", formula=symbols.formula(expr)))
        workset.inputs.append(expr)
    nodes = [n for n in workset.nodes if not meta.is_size(n)]
    for source in external_inputs(nodes):
        val = meta.value(source)
        if meta.is_size(source):
            expr = private.expression(val)
            symbolic = isinstance(val, torch.SymInt | torch.SymFloat)
            if symbolic and expr not in sizes:
                sizes[expr] = graph.placeholder(f"size_{len(sizes)}")
                meta.set_value(sizes[expr], val)
                inputs.append(FormInput("size", formula=symbols.formula(expr)))
                workset.inputs.append(expr)
            mapping[source] = sizes[expr] if symbolic else val
            continue
        role = "parameter" if source in parameters else "value"
        mapping[source] = graph.placeholder(f"{'w' if role == 'parameter' else 'x'}_{len(inputs)}")
        meta.set_value(mapping[source], val)
        layout = analysis.layout(source) if workset.chunk and role == "value" else ()
        inputs.append(FormInput(role, layout=layout))  # type: ignore[arg-type]
        workset.inputs.append(source)
    for node in nodes:
        mapping[node] = add_copy(graph, node, mapping.__getitem__)
    graph.output(tuple(mapping[n] for n in workset.outputs))
    form = Form("", private.lazy_module(graph, "Form"), tuple(inputs), chunk=workset.chunk)
    if workset.chunk:
        form.output_layouts = tuple(analysis.layout(n) for n in workset.outputs)
        form.reduced = tuple(analysis.flows[n].sums for n in workset.outputs)
    form.key = workset.form = structure_key(form, text_of)
    return form


def structure_key(form: Form, text_of: Callable[[Any], str] | None = None) -> str:
    """A short name that two forms share if and only if their graphs, dtypes, shapes and constants are the same."""
    digest = hashlib.sha256(structure_text(form, text_of).encode()).hexdigest()
    return f"form_{digest[:8]}"


def structure_text(form: Form, text_of: Callable[[Any], str] | None = None) -> str:
    """The graph as text, with nodes numbered in order and everything that computation depends on."""
    text_of = text_of or describe
    numbers: dict[fx.Node, str] = {}
    lines = [f"chunk={form.chunk} {form.output_layouts} {form.reduced}"]
    inputs = iter(form.inputs)
    for node in form.traced.graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        if node.op == "placeholder":
            info = next(inputs)
            lines.append(f"{numbers[node]} = {info} {text_of(meta.value(node))}")
        elif node.op == "output":
            lines.append(f"return {_args(node.args, numbers)}")
        else:
            text = f"{node.target}({_args(node.args, numbers)}, {_args(node.kwargs, numbers)})"
            lines.append(f"{numbers[node]} = {text} -> {text_of(meta.value(node))}")
    return "\n".join(lines)


def describe(val: Any) -> str:
    """`bf16[B, S, 64]` with strides where they are not contiguous."""
    if isinstance(val, torch.Tensor):
        sizes = ", ".join(str(private.expression(s)) for s in val.shape)
        strides = "" if val.is_contiguous() else f" strides {tuple(private.expression(s) for s in val.stride())}"
        return f"{dtype_name(val.dtype)}[{sizes}]{strides}"
    if isinstance(val, tuple | list):
        return "(" + ", ".join(describe(v) for v in val) + ")"
    return str(private.expression(val))


def _args(args: Any, numbers: dict[fx.Node, str]) -> str:
    if isinstance(args, fx.Node):
        return numbers[args]
    if isinstance(args, tuple | list):
        return "[" + ", ".join(_args(a, numbers) for a in args) + "]"
    if isinstance(args, dict):
        return "{" + ", ".join(f"{k}: {_args(v, numbers)}" for k, v in sorted(args.items())) + "}"
    return repr(args)
