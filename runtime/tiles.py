"""Rectangles of a batch: the part of a tensor that each is, and what is put together from them.

Which dimensions carry tokens is said by layouts (oomc.dims).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from oomc import sums

if TYPE_CHECKING:
    from oomc.dims import Layout


@dataclass(frozen=True)
class Tile:
    """A rectangle of a batch, the sizes of the whole, and which of the rectangles of its rows it is."""

    rows: slice
    columns: slice
    batch: int
    sequence: int
    index: int = 0

    @property
    def sizes(self) -> tuple[int, int]:
        """Batch rows and positions."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

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
        Tile(slice(b, min(b + rows, batch)), slice(s, min(s + columns, sequence)), batch, sequence, index)
        for b in range(0, batch, rows)
        for index, s in enumerate(range(0, sequence, columns))
    ]


def opened(x: torch.Tensor, layout: Layout, sizes: tuple[int, int]) -> tuple[torch.Tensor, dict[str, int]]:
    """A view of `x` in which each token has a dimension of its own, and these dimensions.

    Args:
        x: any tensor.
        layout: of `x`, with as many dimensions.
        sizes: of batch and sequence in `x`.
    """
    splits, where = _split_dims(layout)
    for at, dim in splits:
        x = x.unflatten(at, [sizes["BS".index(a)] if isinstance(a, str) else a for a in dim])
    return x, where


@lru_cache(maxsize=4096)
def _split_dims(layout: Layout) -> tuple[tuple[tuple[int, tuple[Any, ...]], ...], dict[str, int]]:
    """The dimensions that hold tokens and more, each with its place, and where the tokens are once these are split."""
    splits: list[tuple[int, tuple[Any, ...]]] = []
    where: dict[str, int] = {}
    at = 0
    for dim in layout:
        tokens = [a for a in dim if isinstance(a, str)]
        if tokens and len(dim) > 1:
            splits.append((at, tuple(dim)))
        for atom in dim if tokens else (None,):
            if isinstance(atom, str):
                where[atom] = at
            at += 1
    return tuple(splits), where


def tokens_in(layout: Layout) -> frozenset[str]:
    """The tokens that a layout carries."""
    return frozenset(_split_dims(layout)[1])


def closed(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The inverse of `opened`; a copy where it cannot be a view."""
    for at, dim in enumerate(layout) if _split_dims(layout)[0] else ():
        if len(dim) > 1 and any(isinstance(a, str) for a in dim):
            x = x.flatten(at, at + len(dim) - 1)
    return x


def narrow(x: torch.Tensor, layout: Layout, tile: Tile) -> torch.Tensor:
    """The tile's part of a tensor, as a view where there can be one."""
    part = _range(x, layout, tile)
    return closed(_opened_part(x, layout, tile), layout) if part is None else part


def _range(x: torch.Tensor, layout: Layout, tile: Tile) -> torch.Tensor | None:
    """The tile's part where it is a range of each dimension, as most are: one view, not four; else None."""
    leading, others = _leading(layout, tile.batch == 1)
    for token in ("B", "S"):
        if not tile.cuts(token):
            continue
        if token in others:
            return None
        if token in leading:
            dim, unit, whole = leading[token]
            unit *= tile.sequence if whole else 1
            part = tile.part(token)
            x = x.narrow(dim, part.start * unit, (part.stop - part.start) * unit)
    return x


@lru_cache(maxsize=4096)
def _leading(layout: Layout, one_row: bool) -> tuple[dict[str, tuple[int, int, bool]], frozenset[str]]:
    """Tokens whose parts are ranges of a dimension, and the others.

    A token's part is one if the token is what changes slowest in its dimension: as the batch is in `B * S * 8`, and the
    sequence where there is one row. A range is of so many elements a token, by the sequence's size if it is in there.
    """
    leading, others = dict[str, tuple[int, int, bool]](), set[str]()
    for at, dim in enumerate(layout):
        atoms = [a for a in dim if not (one_row and a == "B")]
        for place, atom in enumerate(atoms):
            if not isinstance(atom, str):
                continue
            after = atoms[place + 1 :]
            if place or not all(isinstance(a, int) or a == "S" for a in after):
                others.add(atom)
            else:
                leading[atom] = at, math.prod(a for a in after if isinstance(a, int)), "S" in after
    return leading, frozenset(others)


def _opened_part(x: torch.Tensor, layout: Layout, tile: Tile) -> torch.Tensor:
    x, where = opened(x, layout, (tile.batch, tile.sequence))
    for token, dim in where.items():
        if tile.cuts(token):
            part = tile.part(token)
            x = x.narrow(dim, part.start, part.stop - part.start)
    return x


class Total:
    """A result that is put together from tiles: written in place, or added up.

    Sums of low-precision tensors are kept in fp32 and rounded once; that of two is made at once, so that no fp32 tensor
    is needed.

    Args:
        layout: of the result.
        adds: whether what several tiles give for one place is added up (sums, gradients); else it is the same.
        backwards: whether the tiles of a row come from last to first.
        count: of tiles, where that is known.
    """

    def __init__(self, layout: Layout, adds: bool, backwards: bool = False, count: int = 0) -> None:
        self.layout, self.adds, self.backwards, self.count = layout, adds, backwards, count
        self.tokens = tokens_in(layout)
        self.value: torch.Tensor | None = None
        self.dtype = torch.float32

    def start(self, memory: torch.Tensor) -> None:
        """Put the result together in this tensor, each tile's part in its place; it may be there already."""
        self.value, self.dtype = memory, memory.dtype

    def add(self, part: torch.Tensor, tile: Tile, own: bool = False) -> None:
        """Take in one tile's part; of the last tile it may be kept and written to if it is in memory of its `own`."""
        missing = [t for t in ("B", "S") if t not in self.tokens and tile.cuts(t)]
        again = any(self._comes_later(tile, t) for t in missing)
        if again and not self.adds:
            return
        wide = part.dtype
        if missing and self.adds and wide in (torch.bfloat16, torch.float16):
            wide = torch.float32
        if self.value is None:
            self.dtype = part.dtype
            if not self.tokens:
                # the graph's own tensor may be an argument: `_sum` writes to fp32 sums and to memory of its own only
                self.value = part if self.count == 2 and wide != part.dtype else part.to(wide, copy=True)
                return
            self.value = self._empty(part, tile, wide)
        if not self.tokens and wide != self.dtype:
            self._sum(part, own)
            return
        target = _range(self.value, self.layout, tile)
        if target is None:
            target = _opened_part(self.value, self.layout, tile)
            part, _ = opened(part, self.layout, tile.sizes)
        if again:
            target.add_(part)
        else:
            target.copy_(part)  # nothing is copied onto itself

    def _sum(self, part: torch.Tensor, own: bool) -> None:
        """Add a low-precision part to the sum so far: fp32, or the other one of two parts."""
        assert self.value is not None
        if self.value.dtype == part.dtype:  # their sum is an fp32 one that is rounded
            self.value = part.add_(self.value) if own else torch.add(self.value, part)
        elif own:
            sums.add_to(part, self.value)
            self.value = part
        else:
            sums.add_(self.value, part)

    def _comes_later(self, tile: Tile, token: str) -> bool:
        """Whether a tile is not the first one along a token."""
        if token == "S" and self.backwards:
            return tile.columns.stop < tile.sequence
        return tile.part(token).start > 0

    def _empty(self, part: torch.Tensor, tile: Tile, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the whole result, laid out as the part is."""
        whole = {"B": tile.batch, "S": tile.sequence}
        own = tile.sizes
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
