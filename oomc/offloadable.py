"""Which values may leave the device between forward and backward, and how many bytes each is.

A value may leave if it is a tensor that a forward workset makes in memory of its own: then the memory is free once the
value is gone. What lies in an argument's memory, or in that of another result, would stay with it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from oomc import meta, ops, private, steps
from oomc.fxutil import memory_of
from oomc.program import Program
from oomc.simulate import Profiler, nbytes


def why_not(program: Program, node: fx.Node) -> str:
    """Why a node of the step graph may not be offloaded; empty if it may."""
    run = node.args[0] if node.target is operator.getitem else None
    if not isinstance(run, fx.Node) or run.target not in steps.COMPUTE or run.args[2] != "forward":
        return "it is no result of a forward workset"
    if meta.tensor(node) is None:
        return "it is no tensor"
    if is_carried(program, node):
        return "it holds the states before each chunk: as many as there are chunks"
    if any(user.op == "output" for user in node.users):
        return "the step returns it"
    if any(user.target is steps.count for user in node.users):
        return "its own copy, the count of valid labels, is on its way to the host"
    return why_not_own(program, node)


def why_not_own(program: Program, node: fx.Node) -> str:
    """Why a result of a run does not fill memory of its own; empty if it does."""
    run, index = node.args
    assert isinstance(run, fx.Node) and isinstance(index, int)
    results = results_of(program, run)
    own = memory_of(results[index])
    if own is None or own.op != "call_function":
        return "it lies in the memory of one of its workset's arguments"
    if sum(memory_of(other) is own for other in results) > 1:
        return "it shares its memory with another result of its workset"
    if not is_dense(meta.value(node)):
        return "its elements do not lie side by side"
    return ""


def kept_values(program: Program) -> Iterator[tuple[fx.Node, bool]]:
    """The forward's values that the backward needs, in order, and whether only their own block uses them."""
    assert program.step is not None
    for node in program.step.graph.nodes:
        note = meta.note(node)
        if node.target is not operator.getitem or note.phase != "forward" or not note.source:
            continue
        users = [meta.note(u) for u in node.users if u.target in steps.COMPUTE]
        if any(u.phase == "backward" for u in users):
            yield node, all(u.block == note.block for u in users)


def is_fence_result(program: Program, node: fx.Node) -> bool:
    """Whether a result of a forward run is one of attention's, or of another operator that mixes tokens."""
    run, index = node.args
    assert isinstance(run, fx.Node) and isinstance(index, int)
    if is_carried(program, node):
        return False
    result = results_of(program, run)[index]
    source = result.args[0] if result.target is operator.getitem else result
    return isinstance(source, fx.Node) and source.target in ops.FENCES


def is_carried(program: Program, node: fx.Node) -> bool:
    """Whether a result of a forward run is the states that were carried from chunk to chunk."""
    run, index = node.args
    assert isinstance(run, fx.Node) and isinstance(index, int)
    return index >= len(results_of(program, run)) - len(program.forms[str(run.args[1])].carries)


def results_of(program: Program, run: fx.Node) -> list[Any]:
    """What the graph of a run's form puts out."""
    graph: fx.GraphModule = getattr(program.forms[str(run.args[1])], str(run.args[2]))
    (output,) = graph.graph.find_nodes(op="output")
    return list(output.args[0])


def value_bytes(program: Program, node: fx.Node, sizes: tuple[int, int]) -> int:
    """Bytes of a value for a batch of `sizes`."""
    profiler = Profiler(program)
    return nbytes(meta.value(node), lambda size: profiler.number(size, sizes))


def is_dense(val: torch.Tensor) -> bool:
    """Whether the elements of a tensor, symbolic or not, fill one stretch of memory, in any order of dimensions."""
    left = [(private.expression(n), private.expression(step)) for n, step in zip(val.shape, val.stride(), strict=True)]
    left = [each for each in left if each[0] != 1]
    expected: Any = 1
    while left:
        found = next((each for each in left if each[1] == expected), None)
        if found is None:
            return False
        left.remove(found)
        expected = expected * found[0]
    return True
