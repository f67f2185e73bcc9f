"""The backward of attention in place: dq, dk and dv in the memory of q, k and v.

Attention is what runs on a whole row of tokens at once, so that at long contexts a step's memory peaks where q, k, v,
out, dout, dq, dk and dv all live. Where q, k and v die in the backward, their gradients need no memory. A form whose
backward can do that has a second graph, which is equal to the first but for the operator; which run of the step may use
it is decided (passes/overwrite_values.py) and verified (verify_step.py) by `why_not`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from oomc import meta, ops, private, steps
from oomc.fxutil import memory_of
from oomc.offloadable import results_of, why_not_own
from oomc.program import Program
from oomc.worksets import Form

_WRITTEN = (1, 2, 3)
"""Where q, k and v are among the arguments of attention's backward; their gradients are its first three results."""


def backward_of(form: Form) -> tuple[fx.GraphModule | None, tuple[tuple[int, int], ...]]:
    """The form's backward with attention's gradients in the memory of its arguments, if it can be.

    q, k and v must each lie in an argument of its own that nothing reads afterwards, in the layout that their gradients
    have elsewhere, and these must come out as the gradients of the same arguments.

    Returns:
        The graph, and pairs of an argument and of the result that is in its memory.
    """
    assert form.backward is not None
    graph = form.backward.graph
    sites = graph.find_nodes(op="call_function", target=ops.attention_backward)
    if len(sites) != 1:
        return None, ()
    (site,) = sites
    overwritten = _overwritten(form, graph, site)
    if not overwritten:
        return None, ()
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = new.graph_copy(graph, copies)
    new.output(output)
    for old, copy in copies.items():
        copy.meta = dict(old.meta)
    _write_in_place(new, copies[site])
    return fx.GraphModule(form.backward, new), overwritten


def _overwritten(form: Form, graph: fx.Graph, site: fx.Node) -> tuple[tuple[int, int], ...]:
    """Pairs of an argument and of the result that could be in its memory, for q, k and v; empty if not for all."""
    placeholders = graph.find_nodes(op="placeholder")
    position = {n: i for i, n in enumerate(graph.nodes)}
    memories = {node: memory_of(node) for node in graph.nodes}
    (output,) = graph.find_nodes(op="output")
    results: list[Any] = list(output.args[0])
    written = [memories[site.args[i]] for i in _WRITTEN]
    read = [memories[n] for i, n in enumerate(site.args) if isinstance(n, fx.Node) and i not in _WRITTEN]
    if len({*written, *read}) != len(written) + len(set(read)):
        return ()
    if any(memories[n] in written and position[u] > position[site] for n in graph.nodes for u in n.users):
        return ()
    pairs = []
    for index, (node, memory) in enumerate(zip((site.args[i] for i in _WRITTEN), written, strict=True)):
        gradients = [i for i, r in enumerate(results) if isinstance(r, fx.Node) and _is_part(memories[r], site, index)]
        if memory is None or memory not in placeholders or len(gradients) != 1:
            return ()
        argument, (result,) = placeholders.index(memory), gradients
        source = form.backward_takes[argument : argument + 1]
        if source != (("input", form.gradients[result]),):
            return ()
        if form.chunk and form.inputs[form.gradients[result]].layout[:1] != (("B",),):
            return ()
        if not _lies_as(meta.value(node), meta.value(site)[index]):  # type: ignore[arg-type]
            return ()
        if not _lies_as(meta.value(memory), meta.value(results[result])):
            return ()
        pairs.append((argument, result))
    return tuple(pairs)


def _is_part(node: fx.Node | None, site: fx.Node, index: int) -> bool:
    return node is not None and node.target is operator.getitem and node.args == (site, index)


def _lies_as(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, symbolic or not, have the same sizes and strides."""
    sides = [[private.expression(n) for n in (*x.shape, *x.stride(), x.storage_offset())] for x in (one, other)]
    return bool(sides[0] == sides[1])


def _write_in_place(graph: fx.Graph, site: fx.Node) -> None:
    """Replace attention's backward and its results."""
    with graph.inserting_before(site):
        new = graph.call_function(ops.attention_backward_in_place, site.args)
    meta.copy_origin(new, site)
    meta.set_value(new, meta.value(site)[3])
    for part in list(site.users):
        index: Any = part.args[1]
        part.replace_all_uses_with(site.args[_WRITTEN[index]] if index < len(_WRITTEN) else new)  # type: ignore[arg-type]
        graph.erase_node(part)
    graph.erase_node(site)


def why_not(program: Program, run: fx.Node) -> str:
    """Why a backward run of the step graph may not overwrite its arguments; empty if it may.

    What it overwrites must be a tensor that fills memory of its own, that only the compute lane uses, and that neither
    it nor anything in its memory is used afterwards.
    """
    form = program.forms[str(run.args[1])]
    if form.backward_in_place is None:
        return f"{form.key} has no backward in place"
    args = arguments(run)
    for index, _ in form.overwritten:
        value: Any = args[index]
        if args.count(value) > 1:
            return f"%{value} is two of its arguments"
        reason = _why_not_own(program, value)
        if reason:
            return f"it overwrites %{value}: {reason}"
        for user in value.users:
            if steps.LANES.get(user.target) != "compute":
                return f"it overwrites %{value}, which %{user} uses beside the compute"
            if user is not run and private.comes_before(run, user):
                return f"it overwrites %{value}, which %{user} uses afterwards"
            if user is not run and user.target in steps.COMPUTE and _hands_on(program, user, value):
                return f"it overwrites %{value}, in whose memory %{user} has put a result"
    return ""


def arguments(run: fx.Node) -> list[Any]:
    """What a run hands to its form's graph."""
    return list(run.args[4 if run.target is steps.run_chunks else 3 :])


def _why_not_own(program: Program, value: Any) -> str:
    if isinstance(value, fx.Node) and value.target is steps.restored:
        return ""  # new memory, whose copy has arrived
    run = value.args[0] if isinstance(value, fx.Node) and value.target is operator.getitem else None
    if not isinstance(run, fx.Node) or run.target not in steps.COMPUTE:
        return "it is no result of a workset"
    return why_not_own(program, value)


def _hands_on(program: Program, user: fx.Node, value: fx.Node) -> bool:
    """Whether a result of a run may lie in the memory of one of its arguments."""
    graph: fx.GraphModule = getattr(program.forms[str(user.args[1])], str(user.args[2]))
    taken = graph.graph.find_nodes(op="placeholder")
    given = {taken[i] for i, arg in enumerate(arguments(user)) if arg is value}
    return any(memory_of(result) in given for result in results_of(program, user))
