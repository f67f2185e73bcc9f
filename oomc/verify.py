"""The verifier: what must hold of a program after each pass.

`verify_program` finds all faults and shows each inside the printed graph. The step graph has its own module,
verify_step; here are the forward graph, its blocks and worksets, and the graphs of the forms.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from oomc import at_once, in_place, meta, ops, private, steps
from oomc.dim_rules import analyse
from oomc.dims import Analysis, TokenSymbols, can_be_cut
from oomc.extract import describe, structure_key
from oomc.faults import Faults
from oomc.fxutil import is_mutating
from oomc.program import Program
from oomc.simulate import Projection
from oomc.verify_step import verify_projection, verify_step
from oomc.worksets import Form, Workset

ASSERTS = ("_assert", "assert_async", "sym_constrain_range")
CASTS = frozenset({"to", "type_as", "alias", "lift_fresh_copy"})


def verify_program(
    program: Program, after: str, projection: Projection | None = None, allowed: int | None = None
) -> None:
    """Check every invariant that holds once the pass named `after` has run.

    Args:
        program: the program after the pass.
        after: the pass's name; a name that is not known is taken for a pass on the finished graph of its stage.
        projection: the projected memory of the step graph, if it is known.
        allowed: bytes that it must be within at every node.

    Raises:
        VerifyError: some do not hold; the message shows them all.
    """
    faults = Faults(program, after)
    verify_order(program.graph, faults)
    if not faults.found:
        verify_forward(program, after, faults)
    if program.blocks and not faults.found:
        verify_worksets(program, faults)
        verify_slabs(program, faults)
        for form in program.forms.values():
            verify_form(form, program.notes["symbols"], faults)
    if program.step is not None and not faults.found:
        verify_step(program, after, faults)
        if after in ("schedule", "lower") and not faults.found:
            verify_code(program.step, faults)
        if projection is not None and allowed is not None:
            verify_projection(program, projection, allowed, faults)
    faults.raise_any()


def verify_order(graph: fx.Graph, faults: Faults, title: str = "") -> None:
    """Every value is made before it is used, in this graph, and the graph passes torch's own lint."""
    seen: set[fx.Node] = set()
    sound = True
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                faults.add(f"%{source.name} is used before it is made, or is of another graph", node, graph, title)
                sound = False
        seen.add(node)
    if not graph.find_nodes(op="output"):
        faults.add("the graph has no output", None, graph, title)
    elif sound:
        try:
            graph.lint()
        except (RuntimeError, ValueError, TypeError) as error:
            faults.add(f"lint: {error}", None, graph, title)


def verify_code(module: fx.GraphModule, faults: Faults, title: str = "") -> None:
    """What runs is what is verified: the module's code is that of its graph."""
    if module.code != module.graph.python_code("self").src:
        faults.add("the module's code is not that of its graph: recompile() is missing", None, module.graph, title)


def verify_forward(program: Program, after: str, faults: Faults) -> None:
    """The forward graph: functional ops on values known by symbol, nothing random, nothing that asserts."""
    graph = program.forward.graph
    placeholders = graph.find_nodes(op="placeholder")
    if len(placeholders) != len(program.inputs):
        faults.add(f"{len(placeholders)} placeholders, but the program has {len(program.inputs)} inputs", None, graph)
        return
    for node, spec in zip(placeholders, program.inputs, strict=True):
        if spec.kind == "input" and meta.tensor(node) is not None:
            for dim, size in enumerate(meta.value(node).shape):
                if isinstance(size, torch.SymInt) and not _free(size):
                    faults.add(f"size {dim} of input {spec.target} was a symbol and is now {size}", node, graph)
    symbols = {s for n in placeholders for size in _sizes(meta.value(n)) for s in _free(size)}
    for node in graph.nodes:
        if node.op == "output":
            _verify_loss(node, faults, graph)
            continue
        if meta.value(node) is None and not (node.op == "placeholder" or is_mutating(node)):
            faults.add("the node has no value", node, graph)
        unknown = {str(s) for size in _sizes(meta.value(node)) for s in _free(size)} - {str(s) for s in symbols}
        if unknown:
            faults.add(f"its size depends on data: {', '.join(sorted(unknown))} is no size of an input", node, graph)
        if node.op not in ("placeholder", "get_attr"):
            _verify_call(node, after, faults, graph)


def _verify_call(node: fx.Node, after: str, faults: Faults, graph: fx.Graph) -> None:
    op = node.target
    if node.op != "call_function":
        faults.add(f"a {node.op} is left in the graph", node, graph)
    elif isinstance(op, torch._ops.HigherOrderOperator):
        faults.add(f"the higher-order op {op} is left in the graph", node, graph)
    elif not isinstance(op, torch._ops.OpOverload):
        if op is not operator.getitem and not meta.is_size(node):
            faults.add(f"{op} is no operator", node, graph)
    elif any(name in op._opname for name in ASSERTS):
        faults.add("an assert is left in the graph", node, graph)
    elif is_random(node):
        faults.add("it draws random numbers that no other plan would draw again", node, graph)
    elif after == "canonicalize" and is_idle_cast(node):
        faults.add("it casts to the dtype and device that the value already has", node, graph)


def _verify_loss(output: fx.Node, faults: Faults, graph: fx.Graph) -> None:
    results: Any = output.args[0]
    if not isinstance(results, tuple | list) or len(results) not in (1, 2):
        faults.add("the output is not the tuple of the loss, or of the loss and its count", output, graph)
        return
    val, *counts = (meta.tensor(n) for n in results)
    if val is None or val.dim() != 0 or not val.is_floating_point():
        faults.add("the first output is no scalar loss", output, graph)
    if any(c is None or c.dim() != 0 or c.dtype == torch.bool for c in counts):
        faults.add("the second output is no count of labels", output, graph)


def is_random(node: fx.Node) -> bool:
    """Whether the op draws from a generator (`oomc.dropout` counts instead)."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return isinstance(op, torch._ops.OpOverload) and _argument(node, "dropout_p", 0.0) != 0.0
    return bool(_argument(node, "dropout_p", 1.0) != 0.0)


def is_idle_cast(node: fx.Node) -> bool:
    """Whether a cast changes neither dtype, device nor layout, and does not have to copy."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op._opname not in CASTS or not node.all_input_nodes:
        return False
    before, after = meta.tensor(node.all_input_nodes[0]), meta.tensor(node)
    if before is None or after is None or before.dtype != after.dtype or before.device != after.device:
        return False
    return not _argument(node, "copy", False) and _argument(node, "memory_format", None) is None


def _argument(node: fx.Node, name: str, default: Any) -> Any:
    """The argument that the op's schema calls `name`, or `default`."""
    for index, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            return node.args[index] if index < len(node.args) else node.kwargs.get(name, argument.default_value)
    return default


def _sizes(val: Any) -> list[Any]:
    if isinstance(val, torch.Tensor):
        return list(val.shape)
    if isinstance(val, tuple | list):
        return [size for v in val for size in _sizes(v)]
    return [val] if isinstance(val, torch.SymInt) else []


def _free(size: Any) -> set[Any]:
    return set(getattr(private.expression(size), "free_symbols", ()))


def verify_worksets(program: Program, faults: Faults) -> None:
    """Every computing node is in one workset; worksets come in topological order; each fits its form."""
    graph = program.forward.graph
    analysis = analyse(graph, program.notes["symbols"])
    worksets = [w for b in program.blocks for w in b.worksets]
    owner: dict[fx.Node, Workset] = {}
    for index, block in enumerate(program.blocks):
        for workset in block.worksets:
            if workset.block != index:
                faults.add(f"{workset.name} is in block {index} and says {workset.block}", None, graph)
            for node in workset.nodes:
                if node in owner:
                    faults.add(f"it is in two worksets, {owner[node].name} and {workset.name}", node, graph)
                owner[node] = workset
    for node in graph.nodes:
        if node.op == "call_function" and not meta.is_size(node) and node not in owner:
            faults.add("it is in no workset", node, graph)
    done: set[fx.Node] = set()
    for workset in worksets:
        for node in workset.nodes:
            late = [n for n in node.all_input_nodes if n in owner and n not in done]
            for source in late:
                faults.add(f"{workset.name} uses %{source.name} of {owner[source].name}, which runs later", node, graph)
            done.add(node)
        for node in workset.nodes:
            leaves = any(owner.get(u) is not workset for u in node.users if not meta.is_size(u))
            if leaves and node not in workset.outputs:
                faults.add(f"it is used outside {workset.name} and is none of its outputs", node, graph)
        _verify_use_of_form(program, workset, analysis, faults)


def _verify_use_of_form(program: Program, workset: Workset, analysis: Analysis, faults: Faults) -> None:
    graph, form = program.forward.graph, program.forms.get(workset.form)
    if form is None:
        faults.add(f"{workset.name} has form {workset.form}, which there is not", None, graph)
        return
    traced = form.traced.graph
    (output,) = traced.find_nodes(op="output")
    takes = [describe(meta.value(n)) for n in traced.find_nodes(op="placeholder")]
    gives = [describe(meta.value(n)) for n in output.args[0]]
    given = [describe(meta.value(s)) if isinstance(s, fx.Node) else str(s) for s in workset.inputs]
    wanted = [describe(meta.value(n)) for n in workset.outputs]
    if given != takes or wanted != gives:
        faults.add(f"{workset.name} passes {given} and wants {wanted}: {form.key} takes {takes} and gives {gives}",
                   workset.nodes[0], graph)  # fmt: skip
    if workset.chunk != form.chunk:
        faults.add(f"{workset.name} runs in chunks or does not, and {form.key} says otherwise", workset.nodes[0], graph)
    if workset.chunk:
        _verify_tiles(workset, analysis, faults)


def _verify_tiles(workset: Workset, analysis: Analysis, faults: Faults) -> None:
    """What runs in tiles mixes no tokens that tiles keep apart, and only slices come in and go out."""
    graph, along = workset.nodes[0].graph, ("B", "S") if workset.chunk == "tokens" else ("B",)
    for node in workset.nodes:
        if analysis.flows[node].mixes & set(along):
            faults.add(f"{workset.name} runs in chunks of {workset.chunk}, and this mixes them", node, graph)
    crossing = [n for n in (*workset.inputs, *workset.outputs) if isinstance(n, fx.Node)]
    for node in crossing:
        if not all(can_be_cut(layout, along) for layout in analysis.flows[node].layouts):  # type: ignore[arg-type]
            faults.add(f"{workset.name} runs in chunks of {workset.chunk}, and this cannot be cut", node, graph)
    for node in workset.nodes:
        if analysis.flows[node].sums and any(u in workset.nodes for u in node.users):
            faults.add(f"{workset.name} uses the sum of all its chunks before they have run", node, graph)


def verify_slabs(program: Program, faults: Faults) -> None:
    """Every parameter that a workset uses is in one slab, whose users and layout are right."""
    graph = program.forward.graph
    placeholders = graph.find_nodes(op="placeholder")
    specs = {n: s for n, s in zip(placeholders, program.inputs, strict=True) if s.kind == "parameter"}
    homes = Counter(name for slab in program.slabs for name in slab.params)
    users: dict[str, set[int]] = {}
    for workset in (w for b in program.blocks for w in b.worksets):
        for node in workset.inputs:
            if isinstance(node, fx.Node) and node in specs:
                users.setdefault(specs[node].name, set()).add(workset.block)
    for node, spec in specs.items():
        if homes[spec.name] != (1 if spec.name in users else 0):
            faults.add(f"parameter {spec.name} is in {homes[spec.name]} slabs", node, graph)
    values = {s.name: (meta.tensor(n), s.trainable) for n, s in specs.items()}
    for slab in program.slabs:
        wanted = set().union(*(users.get(name, set()) for name in slab.params))
        if set(slab.users) != wanted:
            faults.add(f"slab {slab.name} is used by blocks {sorted(wanted)} and says {slab.users}", None, graph)
        if tuple(p.spec.name for p in slab.layout.places) != slab.params:
            faults.add(f"the layout of slab {slab.name} holds other parameters than the slab", None, graph)
        for place in slab.layout.places:
            val, trainable = values.get(place.spec.name, (None, False))
            if val is None or (place.spec.shape, place.spec.dtype) != (tuple(val.shape), val.dtype):
                faults.add(f"slab {slab.name} lays {place.spec.name} out as {place.spec}", None, graph)
            elif place.spec.trainable != trainable:
                faults.add(f"slab {slab.name} has it wrong whether {place.spec.name} is trained", None, graph)
    _verify_rows(program, faults)
    for index, block in enumerate(program.blocks):
        if set(block.slabs) != {s.name for s in program.slabs if index in s.users}:
            faults.add(f"block {block.name} says that it uses slabs {block.slabs}", None, graph)


def _verify_rows(program: Program, faults: Faults) -> None:
    """The groups of a parameter's rows are all of it, once, and lie in slabs that are parts of one."""
    graph = program.forward.graph
    rows: dict[str, list[tuple[int, int, int, str]]] = {}
    for slab in program.slabs:
        some = [place.spec.rows for place in slab.layout.places if place.spec.rows is not None]
        if bool(slab.whole) != bool(some) or len(some) not in (0, len(slab.params)):
            faults.add(f"slab {slab.name} is to be a part of {slab.whole or 'none'}, and is not", None, graph)
        for each in some:
            rows.setdefault(each.param, []).append((each.start, each.stop, each.of, slab.whole))
    for param, parts in rows.items():
        parts.sort()
        ends = [0, *(stop for _, stop, _, _ in parts)]
        if [start for start, _, _, _ in parts] != ends[:-1] or {of for _, _, of, _ in parts} != {ends[-1]}:
            faults.add(f"the groups of {param} are not all of its rows, each once: {parts}", None, graph)
        if len({whole for _, _, _, whole in parts}) != 1:
            faults.add(f"the groups of {param} are parts of several slabs: {parts}", None, graph)


def verify_form(form: Form, symbols: TokenSymbols, faults: Faults) -> None:
    """A form's key follows from its structure, and its graphs agree with each other as its docstring says."""
    title = f"form {form.key}"
    plain = replace(form, inputs=tuple(replace(i, requires_grad=False) for i in form.inputs))
    if form.key.partition(".")[0] != structure_key(plain):
        faults.add("the key does not follow from the structure", None, form.traced.graph, title)
    if form.forward is None:
        return
    inputs = _values(form.traced.graph, outputs=False)
    outputs = _values(form.traced.graph, outputs=True)
    saved = _values(form.forward.graph, outputs=True)[len(outputs) :]
    states = saved[len(saved) - len(form.carries) :]
    expected: dict[str, tuple[list[str], list[str]]] = {
        "forward": ([*inputs, *states], [*outputs, *saved]), "recompute": ([*inputs, *saved], outputs),
    }  # fmt: skip
    if len(saved) != form.saved:
        faults.add(f"it hands out {len(saved)} saved values, not {form.saved}", None, form.forward.graph, title)
        return
    if form.backward is not None:
        pools = {"input": inputs, "output": outputs, "saved": saved}
        if any(i >= len(pools[kind]) for kind, i in form.backward_takes):
            faults.add(f"the backward takes what there is not: {form.backward_takes}", None, form.backward.graph, title)
            return
        takes = [pools[kind][i] for kind, i in form.backward_takes]
        takes += [_contiguous(outputs[i]) for i in form.tangents]
        back = [state for state, carry in zip(states, form.carries, strict=True) if carry.requires_grad]
        expected["backward"] = ([*takes, *back], [*(inputs[i] for i in form.gradients), *back])
        if form.backward_in_place is not None:
            expected[steps.IN_PLACE] = expected["backward"]
            made, overwritten = in_place.backward_of(form)
            if made is None or (str(made.graph), overwritten) != (str(form.backward_in_place.graph), form.overwritten):
                faults.add("it is not the backward with attention in place", None, form.backward_in_place.graph, title)
    for variant, (args, results) in expected.items():
        _verify_variant(form, variant, args, results, faults, f"{title}, {variant}")
    if form.backward is not None and not faults.found:
        again = at_once.added(form, symbols)
        if again.at_once != form.at_once or any(_text(again, part) != _text(form, part) for part in steps.PARTS):
            faults.add(
                "what makes gradients at once does not follow from the backward", None, form.backward.graph, title
            )


def _verify_variant(
    form: Form, variant: str, args: list[str], results: list[str], faults: Faults, title: str
) -> None:  # fmt: skip
    module: fx.GraphModule | None = getattr(form, variant)
    if module is None:
        faults.add(f"it has no {variant} graph", None, form.traced.graph, title)
        return
    graph = module.graph
    verify_order(graph, faults, title)
    verify_code(module, faults, title)
    takes, gives = _values(graph, outputs=False), _values(graph, outputs=True)
    if [_contiguous(t) for t in takes] != [_contiguous(a) for a in args]:
        faults.add(f"it takes {takes}, not {args}", None, graph, title)
    given = [(g, r) for g, r in zip(gives, results, strict=False) if "backward" not in variant or g != "None"]
    if len(gives) != len(results) or any(_contiguous(g) != _contiguous(r) for g, r in given):
        faults.add(f"it gives {gives}, not {results}", None, graph, title)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if variant != "forward" and node.target in ops.NEVER_RECOMPUTE:
            faults.add("its result must be saved by the forward: it is never recomputed", node, graph, title)
        if is_mutating(node) and variant != steps.IN_PLACE:
            faults.add("it writes to one of its inputs", node, graph, title)
        if is_random(node):
            faults.add("it draws random numbers", node, graph, title)


def _values(graph: fx.Graph, *, outputs: bool) -> list[str]:
    nodes: Any = graph.find_nodes(op="output")[0].args[0] if outputs else graph.find_nodes(op="placeholder")
    return [describe(meta.value(n)) if isinstance(n, fx.Node) else repr(n) for n in nodes]


def _text(form: Form, variant: str) -> str:
    module = getattr(form, variant)
    return "" if module is None else str(module.graph)


def _contiguous(text: str) -> str:
    return text.partition(" strides")[0]
