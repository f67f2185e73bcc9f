"""The compute lane's work: run a form's graph whole, or in chunks of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from oomc.steps import IN_PLACE, calc, phase_of

if TYPE_CHECKING:
    from oomc.dims import Layout
    from oomc.worksets import Form

Graph = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class Tile:
    """A rectangle of a batch, and the sizes of the whole."""

    rows: slice
    columns: slice
    batch: int
    sequence: int

    def part(self, token: str) -> slice:
        """What the tile takes of `B` or `S`."""
        return self.rows if token == "B" else self.columns

    def cuts(self, token: str) -> bool:
        """Whether there are several tiles along a token."""
        part = self.part(token)
        return part.stop - part.start < (self.batch if token == "B" else self.sequence)


def tiles(batch: int, sequence: int, chunk: tuple[int, int]) -> list[Tile]:
    """The rectangles that cover a batch; the last ones may be smaller."""
    rows, columns = max(1, chunk[0]), max(1, chunk[1])
    return [
        Tile(slice(b, min(b + rows, batch)), slice(s, min(s + columns, sequence)), batch, sequence)
        for b in range(0, batch, rows)
        for s in range(0, sequence, columns)
    ]


def atoms_of(layout: Layout) -> list[Any]:
    """All atoms of a layout, in order."""
    return [a for dim in layout for a in dim]


def opened(x: torch.Tensor, layout: Layout, sizes: tuple[int, int]) -> tuple[torch.Tensor, dict[str, int]]:
    """A view of `x` in which each token has a dimension of its own, and these dimensions.

    Args:
        x: any tensor.
        layout: of `x`, with as many dimensions.
        sizes: of batch and sequence in `x`.
    """
    known = {"B": sizes[0], "S": sizes[1]}
    where: dict[str, int] = {}
    at = 0
    for dim in layout:
        tokens = [a for a in dim if isinstance(a, str)]
        if tokens and len(dim) > 1:
            x = x.unflatten(at, [known[a] if isinstance(a, str) else a for a in dim])
        for atom in dim if tokens else (None,):
            if isinstance(atom, str):
                where[atom] = at
            at += 1
    return x, where


def closed(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The inverse of `opened`; a copy where it cannot be a view."""
    for at, dim in enumerate(layout):
        if len(dim) > 1 and any(isinstance(a, str) for a in dim):
            x = x.flatten(at, at + len(dim) - 1)
    return x


def narrow(x: torch.Tensor, layout: Layout, tile: Tile) -> torch.Tensor:
    """The tile's part of a tensor, as a view where there can be one."""
    return closed(_opened_part(x, layout, tile), layout)


def _opened_part(x: torch.Tensor, layout: Layout, tile: Tile) -> torch.Tensor:
    x, where = opened(x, layout, (tile.batch, tile.sequence))
    for token, dim in where.items():
        part = tile.part(token)
        x = x.narrow(dim, part.start, part.stop - part.start)
    return x


class Total:
    """A result that is put together from tiles: written in place, or added up.

    Sums of low-precision tensors are kept in fp32 and rounded once.

    Args:
        layout: of the result.
        adds: whether what several tiles give for one place is added up (sums, gradients); else it is the same.
    """

    def __init__(self, layout: Layout, adds: bool) -> None:
        self.layout, self.adds = layout, adds
        self.value: torch.Tensor | None = None
        self.dtype = torch.float32

    def start(self, memory: torch.Tensor) -> None:
        """Put the result together in this tensor, each tile's part in its place; it may be there already."""
        self.value, self.dtype = memory, memory.dtype

    def add(self, part: torch.Tensor, tile: Tile) -> None:
        """Take in one tile's part."""
        tokens = {a for a in atoms_of(self.layout) if isinstance(a, str)}
        missing = [t for t in ("B", "S") if t not in tokens and tile.cuts(t)]
        again = any(tile.part(t).start > 0 for t in missing)
        if again and not self.adds:
            return
        wide = part.dtype
        if missing and self.adds and wide in (torch.bfloat16, torch.float16):
            wide = torch.float32
        if self.value is None:
            self.dtype = part.dtype
            if not tokens:
                self.value = part.to(wide, copy=True)
                return
            self.value = self._empty(part, tile, wide)
        target = _opened_part(self.value, self.layout, tile)
        part, _ = opened(part, self.layout, _sizes(tile))
        if again:
            target.add_(part)
        else:
            target.copy_(part)  # nothing is copied onto itself

    def _empty(self, part: torch.Tensor, tile: Tile, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the whole result, laid out as the part is."""
        whole = {"B": tile.batch, "S": tile.sequence}
        own = _sizes(tile)
        here = {"B": own[0], "S": own[1]}
        shape = list(part.shape)
        for place, atoms in enumerate(self.layout):
            for atom in atoms:
                if isinstance(atom, str):
                    shape[place] = shape[place] // here[atom] * whole[atom]
        order = sorted(range(part.dim()), key=lambda d: part.stride(d), reverse=True)
        if len(set(part.stride())) < part.dim():  # a dimension of size 1, or an expanded one: any order will do
            order = list(range(part.dim()))
        strides, size = [0] * part.dim(), 1
        for dim in reversed(order):
            strides[dim], size = size, size * shape[dim]
        return torch.empty_strided(shape, strides, dtype=dtype, device=part.device)

    def take(self) -> torch.Tensor | None:
        """The whole result; the total is empty then."""
        value, self.value = self.value, None
        return None if value is None else value.to(self.dtype)


def _sizes(tile: Tile) -> tuple[int, int]:
    return tile.rows.stop - tile.rows.start, tile.columns.stop - tile.columns.start


@dataclass(frozen=True)
class _Argument:
    """One argument of a form's graph: a size with its formula, a tangent, a value that is cut, or one that is not."""

    kind: str
    layout: Layout = ()
    formula: str = ""
    reduced: bool = False

    def part(self, arg: Any, tile: Tile) -> Any:
        """What a tile takes of it."""
        if self.kind == "size":
            return calc(self.formula, *_sizes(tile))
        if self.kind == "whole" or arg is None:
            return arg
        part = narrow(arg, self.layout, tile)
        if self.kind == "tangent" and not self.reduced:
            tokens = atoms_of(self.layout)
            if any(t not in tokens and tile.part(t).start > 0 for t in ("B", "S")):
                return torch.zeros_like(part)  # every tile has computed the same output: the first takes its gradient
        return part


def arguments_of(form: Form, variant: str) -> list[_Argument]:
    """What the arguments of a variant of a form are."""
    inputs = [
        _Argument("size", formula=i.formula) if i.role == "size"
        else _Argument("value", i.layout) if i.role == "value" else _Argument("whole")
        for i in form.inputs
    ]  # fmt: skip
    saved = [_Argument("value", layout) for layout in form.saved_layouts]
    if variant == "forward":
        return inputs
    if variant == "recompute":
        return inputs + saved
    outputs = [_Argument("value", layout) for layout in form.output_layouts]
    source = {"input": inputs, "output": outputs, "saved": saved}
    return [source[kind][i] for kind, i in form.backward_takes] + [
        _Argument("tangent", form.output_layouts[i], reduced=form.reduced[i]) for i in form.tangents
    ]


def totals_of(form: Form, variant: str) -> list[Total]:
    """What the results of a variant of a form are put together in."""
    if phase_of(variant) == "backward":
        return [Total(form.inputs[i].layout, adds=True) for i in form.gradients]
    totals = [Total(layout, adds=reduced) for layout, reduced in zip(form.output_layouts, form.reduced, strict=True)]
    return totals + [Total(layout, adds=False) for layout in form.saved_layouts if variant == "forward"]


def run_chunks(
    form: Form, variant: str, graph: Graph, chunk: tuple[int, int], args: Sequence[Any], most: int | None = None
) -> tuple[torch.Tensor | None, ...]:
    """Run a chunkable form tile by tile.

    Args:
        form: says what each argument and result is.
        variant: `forward`, `recompute` or `backward`.
        graph: the variant's graph.
        chunk: (batch, sequence) size of a tile.
        args: as for a whole run; its sizes are those of the whole batch.
        most: run only so many tiles, the largest (for projections: from the second on, all take the same memory).
    """
    kinds = arguments_of(form, variant)
    cover = tiles(*whole_sizes(kinds, args), chunk)
    if len(cover) == 1:
        return tuple(graph(*args))
    if most is not None:
        cover = sorted(cover, key=lambda tile: math.prod(_sizes(tile)), reverse=True)[:most]
    totals = totals_of(form, variant)
    if variant == IN_PLACE:
        for argument, result in form.overwritten:
            totals[result].start(args[argument])
    for tile in cover:
        part_args = [kind.part(arg, tile) for kind, arg in zip(kinds, args, strict=True)]
        parts = list(graph(*part_args))
        del part_args
        for index, total in enumerate(totals):
            part, parts[index] = parts[index], None
            if part is not None:
                total.add(part, tile)
        del parts, part
    return tuple(total.take() for total in totals)


def whole_sizes(kinds: Sequence[_Argument], args: Sequence[Any]) -> tuple[int, int]:
    """The whole batch's (batch, sequence) sizes: every graph of a form in chunks takes them as arguments."""
    sizes = {"B": 1, "S": 1}
    for kind, arg in zip(kinds, args, strict=True):
        if kind.kind == "size" and kind.formula in sizes:
            sizes[kind.formula] = arg
    return sizes["B"], sizes["S"]
