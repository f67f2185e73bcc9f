"""The compute lane's work: run a form's graph whole, or in chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from oomc.steps import calc

if TYPE_CHECKING:
    from oomc.worksets import Form

Axes = tuple[int | None, int | None]
Tile = tuple[int, int, int, int]
Graph = Callable[..., tuple[Any, ...]]


def tiles(batch: int, sequence: int, chunk: tuple[int, int]) -> list[Tile]:
    """The rectangles (batch start, stop, sequence start, stop) that cover a batch; the last ones may be smaller."""
    rows, columns = max(1, chunk[0]), max(1, chunk[1])
    return [
        (b, min(b + rows, batch), s, min(s + columns, sequence))
        for b in range(0, batch, rows)
        for s in range(0, sequence, columns)
    ]


def narrow(x: torch.Tensor, axes: Axes, tile: Tile) -> torch.Tensor:
    """The tile's part of a tensor, as a view."""
    for dim, start, stop in ((axes[0], tile[0], tile[1]), (axes[1], tile[2], tile[3])):
        if dim is not None and x.shape[dim] != 1:
            x = x.narrow(dim, start, stop - start)
    return x


class Total:
    """A result that is put together from tiles: written in place where it has token axes, else summed.

    Sums of low-precision tensors are kept in fp32 and rounded once.
    """

    def __init__(self, axes: Axes, batch: int, sequence: int) -> None:
        self.axes, self.batch, self.sequence = axes, batch, sequence
        self.value: torch.Tensor | None = None
        self.dtype = torch.float32

    def add(self, part: torch.Tensor, tile: Tile) -> None:
        """Take in one tile's part."""
        if self.axes == (None, None):
            if self.value is None:
                self.dtype = part.dtype
                wide = torch.float32 if part.dtype in (torch.bfloat16, torch.float16) else part.dtype
                self.value = part.to(wide, copy=True)
            else:
                self.value.add_(part)
            return
        if self.value is None:
            shape = list(part.shape)
            for dim, size in zip(self.axes, (self.batch, self.sequence), strict=True):
                if dim is not None:
                    shape[dim] = size
            self.dtype = part.dtype
            self.value = part.new_empty(shape)
        narrow(self.value, self.axes, tile).copy_(part)

    def take(self) -> torch.Tensor | None:
        """The whole result; the total is empty then."""
        value, self.value = self.value, None
        return None if value is None else value.to(self.dtype)


def run_chunks(
    form: Form, variant: str, graph: Graph, chunk: tuple[int, int], args: Sequence[Any], most: int | None = None
) -> tuple[torch.Tensor | None, ...]:
    """Run a chunkable form tile by tile.

    Args:
        form: says what each argument and result is.
        variant: `forward` or `backward`.
        graph: the variant's graph.
        chunk: (batch, sequence) size of a tile.
        args: as for a whole run; its sizes are those of the whole batch.
        most: stop after so many tiles (for projections: all tiles take the same memory).
    """
    forward = variant == "forward"
    if forward:
        kinds: list[tuple[str, Any]] = [(i.role, i) for i in form.inputs]
        results: list[Axes] = list(form.output_axes)
    else:
        kinds = [(form.inputs[i].role, form.inputs[i]) for _, i in form.backward_takes]
        kinds += [("tangent", form.output_axes[i]) for i in form.tangents]
        results = [form.inputs[i].axes for i in form.gradients]
    batch, sequence = whole_sizes(kinds, args)
    cover = tiles(batch, sequence, chunk)
    if len(cover) == 1:
        return tuple(graph(*args))
    totals = [Total(axes, batch, sequence) for axes in results]
    for tile in cover[:most]:
        part_args = [_part(kind, info, arg, tile) for (kind, info), arg in zip(kinds, args, strict=True)]
        parts = list(graph(*part_args))
        del part_args
        for index, total in enumerate(totals):
            part, parts[index] = parts[index], None
            if part is not None:
                total.add(part, tile)
        del parts, part
    return tuple(total.take() for total in totals)


def whole_sizes(kinds: Sequence[tuple[str, Any]], args: Sequence[Any]) -> tuple[int, int]:
    """The whole batch's (batch, sequence) sizes, read off the arguments."""
    sizes = {"B": 1, "S": 1}
    for (kind, info), arg in zip(kinds, args, strict=True):
        if kind == "size" and info.formula in sizes:
            sizes[info.formula] = arg
        axes = info.axes if kind == "value" else info if kind == "tangent" else (None, None)
        for name, dim in zip(("B", "S"), axes, strict=True):
            if dim is not None:
                sizes[name] = max(sizes[name], arg.shape[dim])
    return sizes["B"], sizes["S"]


def _part(kind: str, info: Any, arg: Any, tile: Tile) -> Any:
    if kind == "size":
        return calc(info.formula, tile[1] - tile[0], tile[3] - tile[2])
    if kind == "value":
        return narrow(arg, info.axes, tile)
    if kind == "tangent":
        return narrow(arg, info, tile)
    return arg
