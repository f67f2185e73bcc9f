"""One way to define an operator of the `oomc` namespace.

An operator is a schema, a body in plain torch, a fake (shapes, dtypes and strides of the outputs) and, where it has a
derivative, a backward written as an operator of its own: autograd is off inside a body, and a graph that holds the
backward as one node can be planned like any other node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload

from oomc.private import FakeTensor

NAMESPACE = "oomc"
Item = TypeVar("Item")


@dataclass(frozen=True)
class Body:
    """What an operator computes, callable with the operator's own arguments.

    Attributes:
        function: the plain torch function behind the operator.
        traceable: whether control flow depends on shapes only. Such a body can be run under a fake tensor mode to count
            its temporaries, and traced by make_fx into plain ATen. Any other body allocates nothing but its outputs on
            the CPU.
    """

    function: Callable[..., Any]
    traceable: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body."""
        return self.function(*args, **kwargs)


BODIES: dict[OpOverload, Body] = {}


def define(
    name: str,
    schema: str,
    body: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    traceable: bool,
    mutates: tuple[str, ...] = (),
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> OpOverload:
    """Register `oomc::name` and return its overload.

    Args:
        name: name without namespace.
        schema: the schema after the name, as in "(Tensor x, int k) -> Tensor". No output may share memory with an
            input or another output.
        body: computes the outputs, on every device.
        fake: returns empty outputs of the same shapes, dtypes, devices and strides as `body`.
        traceable: see `Body`.
        mutates: names of the arguments that are written to, which the schema marks too. Only graphs that are made from
            functional ones at the end hold such an operator (in_place.py).
        setup_context: called as `setup_context(ctx=, inputs=, output=)`, as torch.library wants it.
        backward: `backward(ctx, *grads)`, one gradient (or None) for each argument of the schema.
    """
    op = torch.library.custom_op(f"{NAMESPACE}::{name}", body, mutates_args=mutates, schema=schema)
    op.register_fake(fake)
    if backward is not None:
        op.register_autograd(backward, setup_context=setup_context)
    overload: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    BODIES[overload] = Body(body, traceable)
    return overload


def largest(items: Iterable[Item], size: Callable[[Item], int], of: torch.Tensor) -> list[Item]:
    """All items of a body's loop; where `of` is fake, so that only memory matters, the three largest.

    Three, because an iteration's temporaries live into the next one. A loop over a long sequence is then projected in
    the time of a few iterations.
    """
    every = list(items)
    if len(every) <= 3 or not isinstance(of, FakeTensor):
        return every
    return sorted(every, key=size, reverse=True)[:3]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
