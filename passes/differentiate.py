"""differentiate: give each form its forward, recompute and backward graphs.

A form's joint graph (outputs and gradients from inputs and tangents) is traced once, with `torch.autograd.grad`
inside, and cut by plain subgraph extraction. The backward recomputes what it needs from the form's inputs. What must
not be computed twice (top-k, sort, a choice of experts) is saved by the first forward and handed to the recompute and
the backward; results of fences (attention) are taken from the forward's outputs. States that pass from chunk to chunk
are inputs and outputs of their own (oomc.carries), and so are their gradients.

Before, a form as captured:

    %h = aten.linear(%x, %w)
    %y = aten.relu(%h)
    return (%y)

After:

    forward    (%w, %x)     : aten.t, aten.mm, aten.relu       -> (%y)
    backward   (%w, %x, %dy): aten.mm, aten.relu, ..., aten.mm -> (%dw, %dx)

The backward of attention has a second form, whose gradients are written into its arguments (in_place.py); that of
experts in chunks has one that makes their weights' gradients at its end (at_once.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from oomc import at_once, in_place, meta, ops, private
from oomc.carries import open_carries
from oomc.dims import TokenSymbols
from oomc.errors import CaptureError
from oomc.fxutil import closure, fake_mode_of, insert_call, rough_bytes, subgraph
from oomc.match import op_name
from oomc.program import PassResult, Program
from oomc.worksets import Form, FormInput

aten = torch.ops.aten
Source = tuple[Literal["input", "output", "saved"], int]


@dataclass(frozen=True)
class Differentiate:
    """See the module's docstring."""

    name: str = "differentiate"

    def __call__(self, program: Program) -> PassResult:
        placeholders = program.forward.graph.find_nodes(op="placeholder")
        wanted = {n for n, spec in zip(placeholders, program.inputs, strict=True) if spec.trainable}
        symbols: TokenSymbols = program.notes["symbols"]
        known = program.differentiated
        forms: dict[tuple[str, tuple[bool, ...]], Form] = {}
        for workset in (w for b in program.blocks for w in b.worksets):
            flags = tuple(source in wanted for source in workset.inputs)
            key = (workset.form, flags)
            if key not in known:
                twins = sum(form == workset.form for form, _ in known)
                name = workset.form if not twins else f"{workset.form}.{twins}"
                known[key] = differentiate(program.forms[workset.form], flags, name, symbols)
            form = forms[key] = known[key]
            workset.form = form.key
            wanted |= {n for n, d in zip(workset.outputs, form.differentiable, strict=True) if d}
        if program.loss not in wanted:
            raise CaptureError(
                "the loss does not depend on any trainable parameter: check requires_grad, and that forward is not "
                "run under torch.no_grad()"
            )
        program.forms = {form.key: form for form in forms.values()}
        fixed = [s for s in program.notes["symbols"].sizes if isinstance(private.expression(s), int)]
        assert not fixed, f"tracing the forms has fixed a size of the batch: {fixed}"
        return PassResult(program, True)


def differentiate(form: Form, flags: tuple[bool, ...], key: str, symbols: TokenSymbols) -> Form:
    """The form with its graphs, for inputs of which those flagged require a gradient."""
    opened, carries = open_carries(form, symbols)
    graph = opened.graph
    mode = fake_mode_of(graph)
    with mode:
        args = _apart([meta.value(n) for n in graph.find_nodes(op="placeholder")])
    count, without = len(args), (*flags, *[False] * len(carries))

    def run(inputs: list[Any], flags: tuple[bool, ...]) -> tuple[list[Any], list[Any]]:
        with torch.enable_grad():
            leaves = [
                x.detach().requires_grad_(flag) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                for x, flag in zip(inputs, flags, strict=True)
            ]
            outputs = list(fx.Interpreter(opened).run(*leaves))
        return leaves, outputs

    def forward(*inputs: Any) -> list[Any]:
        return [o.detach() for o in run(list(inputs), without)[1]]

    def joint(*flat: Any) -> list[Any]:
        leaves, outputs = run(list(flat[:count]), wanted)
        ends = [o for o, d in zip(outputs, differentiable, strict=True) if d]
        starts = [x for x, flag in zip(leaves, wanted, strict=True) if flag]
        with torch.enable_grad():
            gradients = torch.autograd.grad(ends, starts, list(flat[count:]), allow_unused=True)
        return [*(o.detach() for o in outputs), *gradients]

    with mode, private.enable_python_dispatcher():
        outputs = run(args, without)[1]
        differentiable = [o.requires_grad for o in outputs]
        # a state's gradient goes back through all chunks if anything in a chunk adds to it
        carries = tuple(
            replace(carry, requires_grad=o.requires_grad)
            for carry, o in zip(carries, outputs[len(outputs) - len(carries) :], strict=True)
        )
        wanted = (*flags, *(carry.requires_grad for carry in carries))
        tangents = [
            torch.empty_like(o, memory_format=torch.contiguous_format, requires_grad=False)
            for o, d in zip(outputs, differentiable, strict=True)
            if d
        ]
    traced = private.trace(joint, args + tangents, mode) if tangents else private.trace(forward, args, mode)
    simplify(traced.graph)
    if tangents:
        own_memory(traced.graph, len(differentiable), [i for i, f in zip(form.inputs, flags, strict=True) if f])
    own = len(outputs) - len(carries)
    return _cut(replace(form, carries=carries), traced, flags, tuple(differentiable[:own]), key, symbols)


def _apart(vals: list[Any]) -> list[Any]:
    """The values, no tensor twice: a trace tells inputs apart by the object, and groups of experts share theirs."""
    apart, seen = list[Any](), set[int]()
    for val in vals:
        again = isinstance(val, torch.Tensor) and id(val) in seen
        apart.append(torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device) if again else val)
        seen.add(id(val))
    return apart


def _cut(
    form: Form, traced: fx.GraphModule, flags: tuple[bool, ...], differentiable: tuple[bool, ...], key: str,
    symbols: TokenSymbols,
) -> Form:  # fmt: skip
    (output,) = traced.graph.find_nodes(op="output")
    count = len(form.carries)
    primals, before, tangents = _split(traced.graph.find_nodes(op="placeholder"), len(flags), count)
    outputs, after, gradients = _split(list(output.args[0]), len(differentiable), count)

    routed = {n.args[0] for n in traced.graph.nodes if n.target is ops.route and not _follows_a_choice(n.args[0])}

    def keep(node: fx.Node) -> bool:
        return (is_never_recomputed(node) or node in routed) and isinstance(meta.value(node), torch.Tensor)

    given = {n for n in outputs if isinstance(n, fx.Node) and _is_fence_result(n)}
    small = {n for n in traced.graph.nodes if _is_small_result(n) and not (count and _is_in_order(n))} - given
    saved = [n for n in traced.graph.nodes if (keep(n) or n in small) and n not in given]
    reached = closure([g for g in gradients if g is not None], {*saved, *given}) | closure(outputs, set(saved))
    saved = [n for n in saved if n in reached]
    inputs = tuple(replace(i, requires_grad=f) for i, f in zip(form.inputs, flags, strict=True))
    new = replace(form, key=key, inputs=inputs, differentiable=differentiable, saved=len(saved) + count)
    new.forward = subgraph(traced, [*primals, *before], [*outputs, *saved, *after])
    new.recompute = subgraph(traced, [*primals, *saved, *before], outputs)
    if form.chunk:
        new.saved_layouts = tuple(symbols.layout(meta.value(n)) or () for n in saved)
    if not tangents:
        return new
    available: dict[fx.Node, Source] = {n: ("input", i) for i, n in enumerate(primals)}
    available |= {n: ("saved", i) for i, n in enumerate([*saved, *before])}
    available |= {n: ("output", i) for i, n in enumerate(outputs) if n in given}
    needed = closure([g for g in gradients if g is not None], set(available) | set(tangents))
    if form.chunk:  # tiles are cut by the whole sizes
        needed |= {n for n, i in zip(primals, inputs, strict=True) if i.role == "size" and i.formula in ("B", "S")}
    takes = [n for n in available if n in needed]
    new.backward = subgraph(traced, [*takes, *tangents], gradients)
    new.backward_takes = tuple(available[n] for n in takes)
    new.tangents = tuple(i for i, d in enumerate(differentiable) if d)
    new.gradients = tuple(i for i, f in enumerate(flags) if f)
    new.backward_in_place, new.overwritten = in_place.backward_of(new)
    return at_once.added(new, symbols)


def _split(nodes: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    return nodes[:first], nodes[first : first + second], nodes[first + second :]


def own_memory(graph: fx.Graph, first: int, wanted: list[FormInput]) -> None:
    """Let parameters' gradients come out contiguous, as they are copied off the device; `first` is where they begin."""
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    for index, info in enumerate(wanted, start=first):
        node = results[index]
        if info.role == "parameter" and isinstance(node, fx.Node) and not meta.value(node).is_contiguous():
            with graph.inserting_before(output):
                results[index] = insert_call(
                    graph, aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
                )
    output.args = (results,)


def is_never_recomputed(node: fx.Node) -> bool:
    """Whether the node's value is the result of an op that may not run twice (or one part of it)."""
    if node.target in ops.NEVER_RECOMPUTE:
        return True
    source = node.args[0] if node.args else None
    return "getitem" in str(node.target) and isinstance(source, fx.Node) and source.target in ops.NEVER_RECOMPUTE


def _follows_a_choice(node: fx.Node) -> bool:
    """Whether a choice of experts is what a top-k gave, in another shape or integer type."""
    while op_name(node) in ("view", "reshape", "_to_copy", "expand", "clone", "slice", "unsqueeze", "squeeze"):
        node = node.args[0]  # type: ignore[assignment]
    return is_never_recomputed(node)


def _is_small_result(node: fx.Node) -> bool:
    """Whether this is a result of attention or its like that is smaller than the first: saved, so that the backward
    need not compute them all again."""
    if op_name(node) != "getitem" or node.args[1] == 0:
        return False
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    first = meta.value(source)[0]
    return source.target in ops.MIXERS and rough_bytes(meta.value(node)) <= rough_bytes(first)


def _is_in_order(result: fx.Node) -> bool:
    """Whether a result is one of an operator whose states are carried: those within a chunk are large, not saved."""
    source: fx.Node = result.args[0]  # type: ignore[assignment]
    return source.target in ops.CARRIES


def _is_fence_result(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    return node.target in ops.FENCES or (
        "getitem" in str(node.target) and isinstance(source, fx.Node) and source.target in ops.FENCES
    )


def simplify(graph: fx.Graph) -> None:
    """Drop aliases; let views of values whose strides differ at run time copy instead of fail."""
    dropped = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default}
    reshaped = {aten.view.default, aten._unsafe_view.default}
    for node in list(graph.nodes):
        if node.target in dropped:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in reshaped:
            node.target = aten.reshape.default
    graph.eliminate_dead_code()
