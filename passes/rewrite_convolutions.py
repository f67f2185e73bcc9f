"""rewrite_convolutions: a depthwise convolution that looks back only becomes one `oomc::causal_conv1d`.

Models write it as a convolution that is padded on both sides and cut to its first positions, or padded on the left
only. The operator says what a position needs of those before it, so that what holds it may run in chunks of tokens, in
order. Any other convolution stays.

Before (x [B, 8, S], a kernel of 4):

    %y = aten.conv1d(%x, %w, None, [1], [3], [1], 8)
    %z = aten.slice(%y, 2, None, %S)

After:

    %causal_conv1d = oomc.causal_conv1d(%x, %w, None, None)
    %z = getitem(%causal_conv1d, 0)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from oomc import meta
from oomc.causal_conv import causal_conv1d
from oomc.fxutil import erase_dead, insert_call
from oomc.match import argument, op_name, repropagate, same_size
from oomc.program import PassResult, Program


@dataclass(frozen=True)
class RewriteConvolutions:
    """See the module's docstring."""

    name: str = "rewrite_convolutions"

    def __call__(self, program: Program) -> PassResult:
        graph = program.forward.graph
        new: set[fx.Node] = set()
        for node in list(graph.nodes):
            x = _input(node) if op_name(node) == "conv1d" else None
            results = _results(node, x) if x is not None else []
            if not results:
                continue
            with graph.inserting_before(node):
                args = (x, node.args[1], argument(node, 2, "bias"), None)
                both = insert_call(graph, causal_conv1d, args, like=node)
                out = insert_call(graph, operator.getitem, (both, 0), like=node)
            for old in results:
                old.replace_all_uses_with(out)
            new.add(out)
        if not new:
            return PassResult(program, False)
        repropagate(graph, new)
        erase_dead(graph)
        program.forward.recompile()
        return PassResult(program, True)


def _input(node: fx.Node) -> fx.Node | None:
    """What a depthwise convolution with as many positions before each as its kernel looks back to is a convolution of.

    With padding, the convolution's own results are cut (see `_results`); without, its input is padded on the left.
    """
    x, weight = meta.tensor(node.args[0]), meta.tensor(node.args[1])  # type: ignore[arg-type]
    if x is None or weight is None or x.dim() != 3:
        return None
    channels, back = x.shape[1], weight.shape[2] - 1
    plain = (_one(node, 3, "stride", 1), _one(node, 5, "dilation", 1)) == (1, 1)
    if not plain or back < 1 or argument(node, 6, "groups", 1) != channels or weight.shape[0] != channels:
        return None
    padding, source = _one(node, 4, "padding", 0), node.args[0]
    if padding == back:
        return source  # type: ignore[return-value]
    return source.args[0] if padding == 0 and _pads_left(source, back) else None  # type: ignore[union-attr,return-value]


def _one(node: fx.Node, place: int, name: str, default: int) -> Any:
    """An option that is given as an int or as a list of one."""
    given = argument(node, place, name, default)
    return given[0] if isinstance(given, list | tuple) and len(given) == 1 else given


def _pads_left(node: Any, by: int) -> bool:
    """Whether a node is its first argument with so many zeros before the first position."""
    if op_name(node) not in ("pad", "constant_pad_nd") or list(node.args[1]) not in ([by, 0], [by, 0, 0, 0]):
        return False
    zeros = op_name(node) == "constant_pad_nd" or argument(node, 2, "mode", "constant") == "constant"
    place = 2 if op_name(node) == "constant_pad_nd" else 3
    return zeros and argument(node, place, "value", 0) in (None, 0, 0.0)


def _results(node: fx.Node, x: fx.Node) -> list[fx.Node]:
    """The nodes that hold one result for each position of x; none if more than these are used."""
    size = meta.value(x).shape[2]
    if same_size(meta.value(node).shape[2], size):
        return [node]
    return list(node.users) if all(_is_first(user, size) for user in node.users) else []


def _is_first(node: fx.Node, size: Any) -> bool:
    """Whether a node is the first `size` positions of its argument."""
    if op_name(node) != "slice" or argument(node, 1, "dim", 0) not in (2, -1):
        return False
    starts = argument(node, 2, "start") in (None, 0) and argument(node, 4, "step", 1) == 1
    return starts and same_size(meta.value(node).shape[2], size)
