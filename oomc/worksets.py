"""What the forward graph is cut into: slabs, forms, worksets and blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from oomc.dims import Layout
from oomc.runtime.layout import SlabLayout
from oomc.steps import calc

Role = Literal["size", "parameter", "value"]
Chunk = Literal["", "rows", "tokens"]
"""What a workset may be run in tiles of: nothing, batch rows, or rectangles of batch rows and positions."""


@dataclass(frozen=True)
class Slab:
    """Parameters that are moved as one piece of memory: those used by the same blocks.

    Attributes:
        name: the block's name, or `shared.N` for parameters that several blocks use (tied weights).
        params: fully qualified names, in order of first use.
        users: indices of the blocks that use it.
        layout: where each parameter and its optimizer state lies.
        whole: of a group of experts, the name of the slab on the host of which it is some rows; else empty.
    """

    name: str
    params: tuple[str, ...]
    users: tuple[int, ...]
    layout: SlabLayout
    whole: str = ""


@dataclass(frozen=True)
class FormInput:
    """One placeholder of a form.

    Attributes:
        role: `size` (an int computed from the batch's sizes), `parameter`, or `value` (anything else).
        requires_grad: whether a gradient is to flow to it.
        formula: for a size, how it follows from the batch and sequence sizes `B` and `S`.
        layout: of a value of a form that may be chunked, which dimensions carry tokens (dims.py); else empty.
    """

    role: Role
    requires_grad: bool = False
    formula: str = ""
    layout: Layout = ()


@dataclass(frozen=True)
class Carry:
    """A state that a form hands from one chunk of positions to the next; the first chunk's is zero.

    Attributes:
        layout: of the state of a chunk of batch rows; it has no positions.
        dtype: of it.
        requires_grad: whether its gradient goes back from chunk to chunk.
    """

    layout: Layout
    dtype: torch.dtype
    requires_grad: bool = False


@dataclass(frozen=True)
class Operand:
    """A value of a backward in tiles of which gradients are made at once.

    Attributes:
        layout: of a value whose dimensions carry tokens; else empty.
        route: of rows in an expert order, the place of the route that gives this order; else None.
    """

    layout: Layout = ()
    route: int | None = None


@dataclass(frozen=True)
class AtOnce:
    """Which gradients of a backward in tiles can be made of all tiles at once, at its end (oomc.at_once).

    Attributes:
        results: their places among the backward's results.
        operands: what they are made of.
        pairs: of each route, how the pairs of a token and of an expert that it has chosen carry tokens: [T * k].
        formula: bytes of the operands and of all that the products read, in `B` and `S`.
        numbers: elements of these gradients.
        itemsize: bytes of one of them.
    """

    results: tuple[int, ...]
    operands: tuple[Operand, ...]
    pairs: tuple[Layout, ...]
    formula: str
    numbers: int
    itemsize: int

    def pays(self, sizes: tuple[int, int], tiles: int) -> bool:
        """Whether what is kept for a batch of `sizes` takes no more memory than sums of so many tiles' gradients would,
        but for the routes. Of two there is no fp32 sum.
        """
        kept = calc(self.formula, *sizes)
        return tiles > 1 and kept <= self.numbers * (self.itemsize if tiles == 2 else max(4, self.itemsize))


@dataclass
class Form:
    """What structurally equal worksets share: graphs that compute them.

    All graphs but one are functional ATen and `oomc` ops below autograd. With I inputs, O outputs, K saved values:

        forward:   I -> O outputs, then K saved
        recompute: I, K -> O outputs (what may not be computed twice is taken from the K saved)
        backward:  those of I, O and K that it needs (`backward_takes`), tangents of the differentiable outputs
                   -> one gradient for each input that requires one, or None
        backward_in_place: as backward, with some gradients in the memory of its arguments (`overwritten`), if it can

        backward_orders, backward_rows, backward_products: by which a backward in tiles makes gradients at once, if any
                   can be (`at_once`); see oomc.at_once

    Where C states are carried from chunk to chunk (`carries`), the last C of the K saved values are the states before
    each chunk, [chunks, ...]. A chunk's graphs take and give one chunk's, beside what is above:

        forward:   C states before it -> C states after it
        backward:  gradients of the states after it -> of those before it, of the carries that require one

    Attributes:
        key: short deterministic name, from the hash of the graph's text.
        traced: the workset as captured: inputs in order of first use.
        chunk: what it may run in tiles of, as a loop.
        reduced: of a form in tiles, which outputs are sums over all of them (the others are written in place).
        output_layouts, saved_layouts: of a form in tiles, as for its inputs.
        carries: the states that are handed from chunk to chunk.
        saved: how many values the forward hands to the backward besides inputs and outputs.
        overwritten: of the backward in place, pairs of an argument and of the result that is in its memory.
        tangents: indices of the outputs that a gradient flows into.
        gradients: indices of the inputs that get one.
    """

    key: str
    traced: fx.GraphModule
    inputs: tuple[FormInput, ...]
    chunk: Chunk = ""
    reduced: tuple[bool, ...] = ()
    output_layouts: tuple[Layout, ...] = ()
    saved_layouts: tuple[Layout, ...] = ()
    forward: fx.GraphModule | None = None
    recompute: fx.GraphModule | None = None
    backward: fx.GraphModule | None = None
    backward_in_place: fx.GraphModule | None = None
    backward_orders: fx.GraphModule | None = None
    backward_rows: fx.GraphModule | None = None
    backward_products: fx.GraphModule | None = None
    at_once: AtOnce | None = None
    carries: tuple[Carry, ...] = ()
    saved: int = 0
    backward_takes: tuple[tuple[Literal["input", "output", "saved"], int], ...] = ()
    overwritten: tuple[tuple[int, int], ...] = ()
    tangents: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    differentiable: tuple[bool, ...] = ()

    def made_at_once(self, variant: str, sizes: tuple[int, int], tiles: int) -> AtOnce | None:
        """What so many tiles of a batch make at once; None where each makes its own."""
        at_once = self.at_once if variant == "backward" else None
        return at_once if at_once is not None and at_once.pays(sizes, tiles) else None

    def carried(self, variant: str) -> list[Carry]:
        """What is handed on between chunks of a variant: its graph's last arguments and its last results."""
        if variant == "recompute":
            return []
        return [c for c in self.carries if variant == "forward" or c.requires_grad]


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
        chunk: what it may run in tiles of.
        fences: what mixes tokens in it, as text.
    """

    name: str
    block: int
    nodes: list[fx.Node]
    inputs: list[Any] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    form: str = ""
    chunk: Chunk = ""
    fences: tuple[str, ...] = ()


@dataclass
class Block:
    """A run of the forward graph that is streamed as one.

    Attributes:
        name: the module's name, or `prologue`, `epilogue`; with `.experts.N` for the Nth group of its experts.
        worksets: in order of execution.
        layer: number of the module among those with blocks: its own index, unless experts before it are in groups.
        slabs: names of the slabs whose weights it uses.
    """

    name: str
    worksets: list[Workset]
    layer: int
    slabs: tuple[str, ...] = ()


def dtype_name(dtype: torch.dtype) -> str:
    """`bf16`, `f32`, `i64`, ... for printing."""
    names = {
        torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64",
        torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.bool: "b8", torch.uint8: "u8",
    }  # fmt: skip
    return names.get(dtype, str(dtype).removeprefix("torch."))
