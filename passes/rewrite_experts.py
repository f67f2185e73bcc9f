"""rewrite_experts: however a mixture-of-experts layer is written, it becomes route, dispatch, grouped GEMMs, combine.

Before (two experts in a loop over all; sorted and grouped, or gathered weights and batched GEMMs, are found as well):

    %index = getitem(%topk, 1)
    %up_0 = aten.linear.default(%x, %w_up[0])                   %up_1 = aten.linear.default(%x, %w_up[1])
    %h_0 = aten.relu.default(%up_0)                             %h_1 = aten.relu.default(%up_1)
    %y_0 = aten.linear.default(%h_0, %w_down[0])                %y_1 = aten.linear.default(%h_1, %w_down[1])
    %out = %y_0 * (weight of the tokens that chose 0) + %y_1 * (weight of the tokens that chose 1)

After:

    %route = oomc.route.default(%index, 2)                      # order, inverse, offsets
    %slots = oomc.dispatch.default(%x, %order, %inverse, 1)
    %up = oomc.grouped_mm.default(%slots, %w_up.transpose(1, 2), %offsets)
    %h = aten.relu.default(%up)
    %y = oomc.grouped_mm.default(%h, %w_down.transpose(1, 2), %offsets)
    %out = oomc.combine.default(%y, %weights, %order, %inverse)

match_experts.py finds the GEMMs; match_roles.py finds, by running small parts of the graph, whose the rows of which
values are; what lies between the GEMMs is the model's own gate and is copied node by node. A layer that is not
understood stays as it is, and `program.notes["experts"]` says which.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from oomc import experts, meta
from oomc.fxutil import insert_call
from oomc.match import Unknown, erase_dead_writes, functional, op_name, repropagate, user_name
from oomc.passes.match_experts import Family, Layer, find_layers
from oomc.passes.match_probe import NotCanonical
from oomc.passes.match_roles import Roles, find_roles
from oomc.program import PassResult, Program

aten = torch.ops.aten
# Names of modules, or of their types, that hold experts; not of whole models ("Qwen3MoeAttention").
EXPERTS = r"expert|moe(_?(mlp|block|layer|ffn))?\b|mixture"
# What torch says when a trace depends on the values of tensors.
BY_DATA = r"data.dependent|unbacked|nonzero|dynamic.?output.?shape|tolist|\.item\(|_local_scalar_dense"


@dataclass(frozen=True)
class RewriteExperts:
    """See the module's docstring."""

    name: str = "rewrite_experts"

    def __call__(self, program: Program) -> PassResult:
        graph = program.forward.graph
        notes: list[str] = []
        new: set[fx.Node] = set()
        for layer in find_layers(program):
            where = _module_of(layer)
            try:
                roles = find_roles(layer, program)
                new.add(_Builder(graph, layer, roles).build())
            except NotCanonical as reason:
                # Many plain projections look like one expert of many: only what is routed is worth a word.
                if reason.routed:
                    notes.append(f"{where}: left as it is, {reason}")
                continue
            if len(layer.last.weights) > 1:
                notes.append(
                    f"{where}: the experts' {len(layer.last.weights)} separate weights are stacked at each use"
                )
        if notes:
            program.notes["experts"] = notes
        if not new:
            return PassResult(program, False)
        repropagate(graph, new)
        erase_dead_writes(graph)
        program.forward.recompile()
        return PassResult(program, True)


def _module_of(layer: Layer) -> str:
    """The module that holds all of the layer's GEMMs."""
    paths = [meta.modules(u.out) for f in layer.families for u in f.units]
    common = ""
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        common = names[0]
    return user_name(common)


class _Builder:
    """Puts the canonical form in a layer's place."""

    def __init__(self, graph: fx.Graph, layer: Layer, roles: Roles) -> None:
        self.graph, self.layer, self.roles = graph, layer, roles
        self.k = 1 if roles.single else meta.value(roles.index).shape[-1]
        self.done: dict[fx.Node, fx.Node] = {}
        self.like = layer.families[0].units[0].out

    def build(self) -> fx.Node:
        """Build the slot-ordered layer and use it in the place of the layer's output.

        Raises:
            NotCanonical: a part between the GEMMs does not run on rows in slot order; the graph is as before.
        """
        old = self.roles.output
        first = old.prev
        with self.graph.inserting_before(old):
            try:
                new = self._build(old)
            except (RuntimeError, ValueError, TypeError, IndexError, Unknown) as error:
                while old.prev is not first:
                    self.graph.erase_node(old.prev)
                raise NotCanonical(f"its gate does not run slot by slot ({error})") from error
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)
        return new

    def call(self, op: Any, *args: Any, like: fx.Node | None = None) -> fx.Node:
        """Insert a call with the origin of `like`."""
        return insert_call(self.graph, op, args, like=like or self.like)

    def flat(self, node: fx.Node, dims: int) -> fx.Node:
        """[..., last `dims` dimensions] with all leading ones made one."""
        val = meta.value(node)
        keep = list(val.shape[val.dim() - dims :])
        if val.dim() == dims + 1:
            return node
        assert all(isinstance(n, int) for n in keep)
        return self.call(aten.reshape.default, node, [-1, *keep])

    def _build(self, old: fx.Node) -> fx.Node:
        roles = self.roles
        index = self.pairs(roles.index)
        if meta.value(index).dtype != torch.int64:
            index = self.call(aten.to.dtype, index, torch.int64)
        routed = self.call(experts.route, index, self.layer.last.num_experts, like=roles.index)
        self.order, self.inverse, self.offsets = (
            self.call(operator.getitem, routed, i, like=roles.index) for i in range(3)
        )
        y = self.slots(roles.result)
        weights = self.weights() if roles.weighted else self.call(aten.ones_like.default, self.weights())
        out = self.call(experts.combine, y, weights, self.order, self.inverse, like=old)
        val, before = meta.value(out), meta.value(old)
        if val.dtype != before.dtype:
            out = self.call(aten.to.dtype, out, before.dtype, like=old)
        if before.dim() != 2:
            sizes = [self.call(aten.sym_size.int, roles.index, d, like=old) for d in range(before.dim() - 1)]
            out = self.call(aten.reshape.default, out, [*sizes, before.shape[-1]], like=old)
        if roles.base is not None:
            out = self.call(aten.add.Tensor, roles.base, out, like=old)
        return out

    def weights(self) -> fx.Node:
        """The routing weights as [T, k]."""
        return self.pairs(self.roles.weights)

    def pairs(self, node: fx.Node) -> fx.Node:
        """A value for each token and choice as [T, k]."""
        if self.roles.single:
            node = self.call(aten.unsqueeze.default, node, -1, like=node)
        return self.flat(node, 1)

    def tokens(self) -> fx.Node:
        """The layer's input in slot order."""
        if self.roles.tokens not in self.done:
            x = self.flat(self.roles.tokens, 1)
            slots = self.call(experts.dispatch, x, self.order, self.inverse, self.k)
            self.done[self.roles.tokens] = slots
        return self.done[self.roles.tokens]

    def slot_weights(self) -> fx.Node:
        """Each slot's routing weight, [N]."""
        flat = self.call(aten.reshape.default, self.weights(), [-1])
        return self.call(aten.index_select.default, flat, 0, self.order)

    def slot_experts(self) -> fx.Node:
        """Each slot's expert, [N]."""
        flat = self.call(aten.reshape.default, self.roles.index, [-1])
        return self.call(aten.index_select.default, flat, 0, self.order)

    def slots(self, node: fx.Node) -> fx.Node:
        """The rows of `node`, in slot order."""
        if node not in self.done:
            self.done[node] = self._slots(node)
        return self.done[node]

    def _slots(self, node: fx.Node) -> fx.Node:
        if node in self.layer.unit_of:
            family, unit = self.layer.unit_of[node]
            rows = self.slots(unit.rows)
            weight = self.weight(family)
            if meta.value(rows).dtype != meta.value(weight).dtype:
                rows = self.call(aten.to.dtype, rows, meta.value(weight).dtype, like=node)
            out = self.call(experts.grouped_mm, rows, weight, self.offsets, like=node)
            if unit.bias is not None:
                bias = self.roles.per_expert[unit.bias]
                out = self.call(experts.grouped_bias, out, self.stacked(bias), self.offsets, like=node)
            return out
        role = self.roles.leaves.get(node)
        if role == "tokens":
            return self.tokens()
        if role in ("weighted tokens", "weights"):
            weights = self.slot_weights()
            last = meta.value(node).dim()
            if role == "weights":
                rank = 1 if last == 1 else 2
                return weights if rank == 1 else self.call(aten.unsqueeze.default, weights, -1, like=node)
            column = self.call(aten.unsqueeze.default, weights, -1, like=node)
            out = self.call(aten.mul.Tensor, self.tokens(), column, like=node)
            dtype = meta.value(node).dtype
            return out if meta.value(out).dtype == dtype else self.call(aten.to.dtype, out, dtype, like=node)
        if node in self.roles.per_expert:
            table = self.stacked(self.roles.per_expert[node])
            return self.call(aten.index_select.default, table, 0, self.slot_experts(), like=node)
        if role == "shared":
            return node
        if node in self.roles.same:
            return self.slots(self.roles.same[node])
        biased = self._biased(node)
        if biased is not None:
            return biased
        args, kwargs = pytree.tree_map_only(fx.Node, self.slots, (node.args, node.kwargs))
        return insert_call(self.graph, functional(node), args, kwargs, like=node)

    def _biased(self, node: fx.Node) -> fx.Node | None:
        """`rows + bias of each row's expert` in one op that needs no table of expert ids."""
        if op_name(node) not in ("add", "add_") or node.kwargs or len(node.args) != 2:
            return None
        for rows, bias in (node.args, node.args[::-1]):
            parts = self.roles.per_expert.get(bias) if isinstance(bias, fx.Node) else None
            if parts is not None and isinstance(rows, fx.Node) and rows not in self.roles.per_expert:
                table, x = self.stacked(parts), self.slots(rows)
                if meta.value(table).dtype == meta.value(x).dtype and meta.value(x).dim() == 2:
                    return self.call(experts.grouped_bias, x, table, self.offsets, like=node)
        return None

    def stacked(self, parts: tuple[fx.Node, ...]) -> fx.Node:
        """[E, ...] from one tensor, or from one for each expert."""
        return parts[0] if len(parts) == 1 else self.call(aten.stack.default, list(parts))

    def weight(self, family: Family) -> fx.Node:
        """A family's weights as [E, D, F]."""
        stacked = self.stacked(family.weights)
        return self.call(aten.transpose.int, stacked, 1, 2, like=family.units[0].out) if family.turned else stacked


def explain(error: Exception, model: torch.nn.Module) -> tuple[str, str] | None:
    """The module and the fix, if `error` comes from tracing experts that loop over data (`for e in hits`).

    Looks for the innermost frame of the traceback that runs a module whose name or type says that it holds experts.
    """
    if not re.search(BY_DATA, f"{type(error).__name__} {error}", re.IGNORECASE):
        return None
    names = {id(m): n for n, m in model.named_modules()}
    frames = []
    step = error.__traceback__
    while step is not None:
        frames.append(step.tb_frame)
        step = step.tb_next
    for frame in reversed(frames):
        owner = frame.f_locals.get("self")
        if not isinstance(owner, torch.nn.Module) or id(owner) not in names:
            continue
        name = names[id(owner)]
        if not re.search(EXPERTS, f"{name.rpartition('.')[2]} {type(owner).__name__}", re.IGNORECASE):
            return None
        return (
            f"{name or 'the model'} ({type(owner).__name__})",
            "its experts are a Python loop over the experts that were hit, which depends on data. For a transformers "
            "model call model.set_experts_implementation('grouped_mm'); in your own code loop over all experts "
            "(`for e in range(num_experts)`) and weight each result, or sort the tokens by expert and call "
            "torch._grouped_mm",
        )
    return None
