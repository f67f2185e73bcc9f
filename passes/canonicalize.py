"""canonicalize: one plain form for what traces say in many ways.

Higher-order ops (autocast and grad-mode regions) are inlined, asserts and dead code dropped, in-place ops made
functional where nothing else sees the memory, mean losses split into sum and count, dropout made counter-based. The
count of valid labels becomes an output of the graph: gradients of several micro-batches are weighed by it.

Before:

    %labels_ok = aten._assert_tensor_metadata(%x)
    %y = aten.add_(%x, 1)
    %d = aten.dropout(%y, 0.1, True)
    %loss = aten.cross_entropy_loss(%logits, %labels)
    return (%loss,)

After:

    %y = aten.add(%x, 1)
    %d = oomc.dropout(%y, 0.1, %rng, 0, 0)
    %total = aten.cross_entropy_loss(%logits, %labels, None, 2)
    %valid = aten.ne(%labels, -100)
    %count = aten.sum(%valid)
    %loss = aten.div(%total, aten.clamp_min(%count, 1))
    return (%loss, %count)
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from oomc import meta, ops, private
from oomc.errors import CaptureError, UnsupportedError
from oomc.functionalize import functionalize
from oomc.fxutil import append_placeholder, erase_dead, insert_call
from oomc.loss import note_loss
from oomc.match import argument, repropagate
from oomc.program import InputSpec, PassResult, Program

aten = torch.ops.aten
DROPPED = frozenset(
    {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range",
     "sym_constrain_range_for_size", "_functional_assert_async"}
)  # fmt: skip
MEAN, SUM = 1, 2


def op_name(node: fx.Node) -> str:
    """`add` for `aten.add.Tensor`; '' for what is no ATen op."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        return target._opname
    return ""


@dataclass(frozen=True)
class Canonicalize:
    """See the module's docstring.

    Raises (on call):
        CaptureError: a value's size depends on the data.
        UnsupportedError: the graph draws random numbers other than by dropout, enters autocast, or asks for sparse
            gradients.
    """

    name: str = "canonicalize"

    def __call__(self, program: Program) -> PassResult:
        module = program.forward
        changed = False
        while inline_regions(module):
            changed = True
        steps: tuple[Callable[[Program], bool], ...] = (
            drop_asserts, drop_no_ops, spell_out_repeats, functionalize, count_by_comparison, split_mean_losses,
            note_loss, count_dropout,
        )  # fmt: skip
        for step in steps:
            changed |= step(program)
        refuse_random(module.graph)
        refuse_sparse_gradients(module.graph)
        refuse_data_dependent_sizes(module.graph)
        changed |= erase_dead(module.graph)
        if changed:
            module.recompile()
        return PassResult(program, changed)


def inline_regions(module: fx.GraphModule) -> bool:
    """Inline the bodies of `wrap_with_set_grad_enabled` and `wrap_with_autocast`, one level deep."""
    graph, changed = module.graph, False
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        kind = str(node.target)
        if "set_grad_enabled" in kind:
            enabled, body, args = node.args[0], node.args[1], node.args[2:]
            detach = enabled is False
        elif "autocast" in kind:
            if node.args[2] is not False:
                raise UnsupportedError(
                    f"the forward enters torch.autocast at {meta.source(node) or 'its top'}; "
                    "cast the model instead (model.to(torch.bfloat16)), or disable autocast there"
                )
            body, args, detach = node.args[4], node.args[5:], False
        else:
            raise UnsupportedError(f"the graph holds the higher-order op {kind} at {meta.source(node)}")
        assert isinstance(body, fx.Node)
        inner = getattr(module, str(body.target))
        with graph.inserting_before(node):
            mapping = dict(zip(inner.graph.find_nodes(op="placeholder"), args, strict=True))
            outputs = graph.graph_copy(inner.graph, mapping)
            outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
            if detach:
                outputs = [_detached(graph, out) for out in outputs]
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        if not body.users:
            graph.erase_node(body)
        changed = True
    return changed


def _detached(graph: fx.Graph, node: Any) -> Any:
    val = meta.tensor(node) if isinstance(node, fx.Node) else None
    return insert_call(graph, aten.detach.default, (node,), like=node) if val is not None else node


def drop_asserts(program: Program) -> bool:
    """Erase runtime asserts; what they ask of the batch's sizes is kept in the notes, to be checked at each call."""
    changed = False
    conditions = program.notes.setdefault("conditions", [])
    for node in list(program.forward.graph.nodes):
        if op_name(node) in DROPPED and not node.users:
            if op_name(node) == "_assert_scalar" and isinstance(node.args[0], fx.Node):
                conditions.append(private.expression(meta.value(node.args[0])))
            program.forward.graph.erase_node(node)
            changed = True
    return changed


def spell_out_repeats(program: Program) -> bool:
    """Write `repeat_interleave` by a number as the movement that it is: unsqueeze, expand and reshape."""
    graph, changed = program.forward.graph, False
    for node in graph.find_nodes(op="call_function", target=aten.repeat_interleave.self_int):
        source, times, dim = node.args[0], node.args[1], argument(node, 2, "dim")
        if not isinstance(times, int) or dim is None or node.kwargs.get("output_size") is not None:
            continue
        shape = list(meta.value(source).shape)
        dim %= len(shape)
        with graph.inserting_before(node):
            new = insert_call(graph, aten.unsqueeze.default, (source, dim + 1), like=node)
            sizes = [-1] * (len(shape) + 1)
            sizes[dim + 1] = times
            new = insert_call(graph, aten.expand.default, (new, sizes), like=node)
            new = insert_call(graph, aten.clone.default, (new,), {"memory_format": torch.contiguous_format}, like=node)
            new = insert_call(graph, aten.flatten.using_ints, (new, dim, dim + 1), like=node)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        changed = True
    return changed


def drop_no_ops(program: Program) -> bool:
    """Erase casts to the dtype and device a value already has, aliases, whole slices, and dropout that is off."""
    changed = False
    for node in list(program.forward.graph.nodes):
        name = op_name(node)
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None or name not in ("to", "_to_copy", "alias", "lift_fresh_copy", "lift_fresh", "dropout",
                                          "contiguous", "type_as", "slice"):  # fmt: skip
            continue
        before, after = meta.tensor(source), meta.tensor(node)
        if before is None or after is None:
            continue
        same = before.dtype == after.dtype and before.device == after.device
        if name == "slice":
            bounds = [*node.args[1:], *(0, 0, sys.maxsize, 1)[len(node.args[1:]) :]]
            idle = bounds[1] in (0, None) and bounds[2] in (sys.maxsize, None) and bounds[3] == 1
        elif name == "contiguous":
            idle = before.is_contiguous() and same
        elif name in ("to", "type_as"):
            copies = len(node.args) > 3 and node.args[-1] is True and node.kwargs.get("copy", True)
            idle = same and not copies and node.kwargs.get("memory_format") is None
        elif name == "dropout":
            idle = node.args[2] is False or node.args[1] == 0.0
        elif name in ("alias", "lift_fresh", "lift_fresh_copy"):
            idle = True
        else:
            continue
        if idle:
            node.replace_all_uses_with(source)
            program.forward.graph.erase_node(node)
            changed = True
    return changed


def count_by_comparison(program: Program) -> bool:
    """Replace `bincount(x, minlength=E)` of values below E, whose size is data-dependent, by a comparison."""
    graph = program.forward.graph
    counts: set[fx.Node] = set()
    for node in graph.find_nodes(op="call_function", target=aten.bincount.default):
        minlength = node.kwargs.get("minlength", node.args[2] if len(node.args) > 2 else 0)
        if not minlength or (len(node.args) > 1 and node.args[1] is not None):
            continue
        with graph.inserting_before(node):
            x = node.args[0]
            device = program.device
            bins = insert_call(graph, aten.arange.default, (minlength,), {"device": device}, like=node)
            column = insert_call(graph, aten.unsqueeze.default, (x, -1), like=node)
            hits = insert_call(graph, aten.eq.Tensor, (column, bins), like=node)
            new = insert_call(graph, aten.sum.dim_IntList, (hits, [0]), like=node)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        counts.add(new)
    if counts:
        repropagate(graph, counts)
    return bool(counts)


def split_mean_losses(program: Program) -> bool:
    """Split mean cross-entropy into a sum over tokens, which chunks can share, and a count of valid labels.

    With no valid label the loss is 0, where eager's is NaN.
    """
    graph, changed = program.forward.graph, False
    for target, width in ((aten.cross_entropy_loss.default, 6), (aten.nll_loss_nd.default, 5)):
        names = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
        defaults = (None, None, None, MEAN, -100, 0.0)
        for node in graph.find_nodes(op="call_function", target=target):
            given = [*node.args, *defaults[len(node.args) :]][:width]
            given = [node.kwargs.get(n, g) for n, g in zip(names, given, strict=False)]
            labels = meta.tensor(given[1])
            if given[2] is not None or given[3] != MEAN or labels is None or labels.is_floating_point():
                continue
            with graph.inserting_before(node):
                total = insert_call(graph, target, (*given[:3], SUM, *given[4:]), like=node)
                valid = insert_call(graph, aten.ne.Scalar, (given[1], given[4]), like=node)
                count = insert_call(graph, aten.sum.default, (valid,), like=node)
                floor = insert_call(graph, aten.clamp_min.default, (count, 1), like=node)
                new = insert_call(graph, aten.div.Tensor, (total, floor), like=node)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            changed = True
    return changed


def count_dropout(program: Program) -> bool:
    """Replace dropout by the counter-based form, numbered in graph order; the rng becomes an input of the graph."""
    graph = program.forward.graph
    sites = graph.find_nodes(op="call_function", target=aten.dropout.default)
    if not sites:
        return False
    with private.mode_of(meta.value(next(iter(graph.nodes)))):
        rng = append_placeholder(program.forward, "rng", torch.empty(2, dtype=torch.int64, device=program.device))
    program.inputs.append(InputSpec("rng", "rng"))
    for site, node in enumerate(sites):
        with graph.inserting_before(node):
            args = (node.args[0], node.args[1], rng, site, 0)
            new = insert_call(graph, ops.dropout, args, like=node)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return True


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers when it runs."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return False
    for index, formal in enumerate(op._schema.arguments):
        if formal.name == "dropout_p":
            given = node.args[index] if index < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            return bool(given != 0.0)
    return torch.Tag.nondeterministic_seeded in op.tags


def refuse_random(graph: fx.Graph) -> None:
    """Refuse random draws that a recompute or another plan would draw differently."""
    for node in graph.nodes:
        if is_random(node):
            raise UnsupportedError(
                f"the forward draws random numbers by {node.target} at {meta.source(node) or meta.modules(node)}; "
                "dropout outside attention is supported, other noise must be passed to the step as an input"
            )


def refuse_sparse_gradients(graph: fx.Graph) -> None:
    """Refuse lookups whose gradient is sparse: an update takes dense ones."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default):
        if len(node.args) > 4 and node.args[4]:
            raise UnsupportedError(
                f"the embedding at {meta.source(node) or meta.modules(node)} has sparse=True; "
                "its gradient must be dense: build it with sparse=False"
            )


def refuse_data_dependent_sizes(graph: fx.Graph) -> None:
    """Refuse values whose size only the data tells, such as those of `nonzero` and `x[mask]`."""
    for node in graph.nodes:
        val = meta.tensor(node)
        for size in val.shape if val is not None else ():
            if private.is_data_dependent(size):
                where = (meta.modules(node) or ("",))[-1] or "the model"
                raise CaptureError(
                    f"{where} computes a value whose size depends on the data, by {node.target} at "
                    f"`{meta.source(node)}`; a fixed plan needs sizes that follow from the batch. Use masks or sorted "
                    "dispatch (for experts: torch's grouped GEMM over all tokens) instead of selecting"
                )
