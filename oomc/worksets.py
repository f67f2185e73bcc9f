"""What the forward graph is cut into: slabs, forms, worksets and blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from oomc.runtime.layout import SlabLayout

Role = Literal["size", "parameter", "value"]


@dataclass(frozen=True)
class Slab:
    """Parameters that are moved as one piece of memory: those used by the same blocks.

    Attributes:
        name: the block's name, or `shared.N` for parameters that several blocks use (tied weights).
        params: fully qualified names, in order of first use.
        users: indices of the blocks that use it.
        layout: where each parameter and its optimizer state lies.
    """

    name: str
    params: tuple[str, ...]
    users: tuple[int, ...]
    layout: SlabLayout


@dataclass(frozen=True)
class FormInput:
    """One placeholder of a form.

    Attributes:
        role: `size` (an int computed from the batch's sizes), `parameter`, or `value` (anything else).
        requires_grad: whether a gradient is to flow to it.
        formula: for a size, how it follows from the batch and sequence sizes `B` and `S`.
        axes: for a chunkable form, the dimension of this input along the batch and along the sequence, or None.
    """

    role: Role
    requires_grad: bool = False
    formula: str = ""
    axes: tuple[int | None, int | None] = (None, None)


@dataclass
class Form:
    """What structurally equal worksets share: graphs that compute them.

    All graphs are functional ATen and `oomc` ops below autograd. With I inputs, O outputs, K saved values:

        forward:   I -> O outputs, then K saved
        recompute: I, K -> O outputs (what may not be computed twice is taken from the K saved)
        backward:  those of I, O and K that it needs (`backward_takes`), tangents of the differentiable outputs
                   -> one gradient for each input that requires one, or None

    Attributes:
        key: short deterministic name, from the hash of the graph's text.
        traced: the workset as captured: inputs in order of first use.
        chunk: whether it runs as a loop over rectangles of (batch, sequence).
        reduced: for a chunkable form, which outputs are sums over all chunks (the others are written in place).
        saved: how many values the forward hands to the backward besides inputs and outputs.
        tangents: indices of the outputs that a gradient flows into.
        gradients: indices of the inputs that get one.
    """

    key: str
    traced: fx.GraphModule
    inputs: tuple[FormInput, ...]
    chunk: bool = False
    reduced: tuple[bool, ...] = ()
    output_axes: tuple[tuple[int | None, int | None], ...] = ()
    forward: fx.GraphModule | None = None
    recompute: fx.GraphModule | None = None
    backward: fx.GraphModule | None = None
    saved: int = 0
    backward_takes: tuple[tuple[Literal["input", "output", "saved"], int], ...] = ()
    tangents: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    differentiable: tuple[bool, ...] = ()


@dataclass
class Workset:
    """A part of a block that is computed as one.

    Attributes:
        name: `BLOCK/INDEX`.
        block: the block's index.
        nodes: its nodes in the forward graph, in order.
        inputs: for each input of the form, the forward graph's node, or a sympy expression or int for a size.
        outputs: the nodes that later worksets use.
        form: key of its form.
    """

    name: str
    block: int
    nodes: list[fx.Node]
    inputs: list[Any] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    form: str = ""
    chunk: bool = False


@dataclass
class Block:
    """A run of the forward graph that is streamed as one.

    Attributes:
        name: the module's name, or `prologue`, `epilogue`.
        worksets: in order of execution.
        slabs: names of the slabs whose weights it uses.
    """

    name: str
    worksets: list[Workset]
    slabs: tuple[str, ...] = ()


def dtype_name(dtype: torch.dtype) -> str:
    """`bf16`, `f32`, `i64`, ... for printing."""
    names = {
        torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64",
        torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.bool: "b8", torch.uint8: "u8",
    }  # fmt: skip
    return names.get(dtype, str(dtype).removeprefix("torch."))
