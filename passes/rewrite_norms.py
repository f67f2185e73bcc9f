"""rewrite_norms: a root mean square norm of 16-bit values, which models compute in fp32, becomes one `oomc::rms_norm`.

The product of the result with a weight stays as it is, and so does a norm whose result is used in fp32.

Before (x in bf16):

    %x32 = aten.to.dtype(%x, float32)
    %square = aten.pow.Tensor_Scalar(%x32, 2)
    %mean = aten.mean.dim(%square, [-1], True)
    %sum = aten.add.Tensor(%mean, 1e-6)
    %scale = aten.rsqrt(%sum)
    %product = aten.mul.Tensor(%x32, %scale)
    %y = aten.to.dtype(%product, bfloat16)

After:

    %rms_norm = oomc.rms_norm(%x, 1e-6)
    %y = getitem(%rms_norm, 0)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from oomc import meta
from oomc.fxutil import erase_dead, insert_call
from oomc.match import argument, op_name, repropagate
from oomc.program import PassResult, Program
from oomc.rms_norm import rms_norm

CASTS = ("to", "_to_copy", "type_as")
NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Norm:
    """What is normalized, with what added to the mean, and the node that is the result."""

    x: fx.Node
    eps: float
    result: fx.Node


@dataclass(frozen=True)
class RewriteNorms:
    """See the module's docstring."""

    name: str = "rewrite_norms"

    def __call__(self, program: Program) -> PassResult:
        graph = program.forward.graph
        new: set[fx.Node] = set()
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.rsqrt.default):
            norm = _norm(node)
            if norm is None:
                continue
            with graph.inserting_before(norm.result):
                both = insert_call(graph, rms_norm, (norm.x, norm.eps), like=norm.result)
                out = insert_call(graph, operator.getitem, (both, 0), like=norm.result)
            norm.result.replace_all_uses_with(out)
            new.add(out)
        if not new:
            return PassResult(program, False)
        repropagate(graph, new)
        erase_dead(graph)
        program.forward.recompile()
        return PassResult(program, True)


def _norm(rsqrt: fx.Node) -> Norm | None:
    """The norm that a node is the scale of."""
    total: Any = rsqrt.args[0]
    if op_name(total) != "add" or argument(total, 2, "alpha", 1) != 1 or not isinstance(total.args[1], float):
        return None
    mean: Any = total.args[0]
    if op_name(mean) != "mean" or not argument(mean, 2, "keepdim", False) or mean.kwargs.get("dtype") is not None:
        return None
    wide = _squared(mean.args[0])
    if wide is None or list(argument(mean, 1, "dim") or ()) not in ([-1], [meta.value(wide).dim() - 1]):
        return None
    x: Any = wide.args[0] if op_name(wide) in CASTS else None
    narrow, values = (meta.tensor(n) if isinstance(n, fx.Node) else None for n in (x, wide))
    if narrow is None or values is None or narrow.dtype not in NARROW or values.dtype != torch.float32:
        return None
    if any(len(n.users) != 1 for n in (rsqrt, total, mean, mean.args[0])):
        return None
    (product,) = rsqrt.users
    # of what several others take, or of a result that is rounded twice, gradients are added up in fp32
    if len(product.users) != 1 or set(wide.users) != {mean.args[0], product}:
        return None
    (result,) = product.users
    if op_name(product) != "mul" or set(product.args) != {wide, rsqrt} or op_name(result) not in CASTS:
        return None
    return Norm(x, total.args[1], result) if meta.value(result).dtype == narrow.dtype else None


def _squared(node: Any) -> fx.Node | None:
    """What a node is the square of."""
    name = op_name(node)
    squares = name == "square" or (name == "pow" and node.args[1] == 2)
    squares = squares or (name == "mul" and node.args[0] is node.args[1])
    return node.args[0] if squares else None
