"""The compute lane's work: run a form's graph whole, or in chunks of tokens.

Where states are carried from chunk to chunk (oomc.carries), the chunks of a batch row run in order, the backward's from
last to first: each takes the states, or their gradients, that the one before it has left.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch

from oomc import experts, sums
from oomc.steps import IN_PLACE, ORDERS, PRODUCTS, ROWS, calc, phase_of

if TYPE_CHECKING:
    from oomc.dims import Layout
    from oomc.worksets import AtOnce, Carry, Form

Graph = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class Tile:
    """A rectangle of a batch, the sizes of the whole, and which of the rectangles of its rows it is."""

    rows: slice
    columns: slice
    batch: int
    sequence: int
    index: int = 0

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
        self.tokens = frozenset(_split_dims(layout)[1])
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
            part, _ = opened(part, self.layout, _sizes(tile))
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
    """One argument of a form's graph: a size with its formula, a tangent, a value that is cut, or one that is not.

    Or the states before each chunk of positions, of which a tile takes its own.
    """

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
        if self.kind == "states":
            return narrow(arg[tile.index], self.layout, tile)
        part = narrow(arg, self.layout, tile)
        if self.kind == "tangent" and not self.reduced:
            tokens = _split_dims(self.layout)[1]
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
    saved += [_Argument("states", carry.layout) for carry in form.carries]
    if variant == "forward":
        return inputs
    if variant == "recompute":
        return inputs + saved
    outputs = [_Argument("value", layout) for layout in form.output_layouts]
    source = {"input": inputs, "output": outputs, "saved": saved}
    return [source[kind][i] for kind, i in form.backward_takes] + [
        _Argument("tangent", form.output_layouts[i], reduced=form.reduced[i]) for i in form.tangents
    ]


def totals_of(form: Form, variant: str, count: int = 0) -> list[Total]:
    """What the results of a variant of a form are put together in, from so many tiles."""
    if phase_of(variant) == "backward":
        backwards = bool(form.carries)
        return [Total(form.inputs[i].layout, True, backwards, count) for i in form.gradients]
    results = zip(form.output_layouts, form.reduced, strict=True)
    totals = [Total(layout, adds=reduced, count=count) for layout, reduced in results]
    return totals + [Total(layout, adds=False) for layout in form.saved_layouts if variant == "forward"]


class Carried:
    """What passes from tile to tile along the positions: states, or in the backward their gradients.

    Args:
        form: says what is carried.
        variant: `forward`, `recompute` (in which every tile finds its states among its arguments) or `backward`.
        cover: all tiles, in the order in which they run.
        args: whose device is that of the states.
    """

    def __init__(self, form: Form, variant: str, cover: Sequence[Tile], args: Sequence[Any]) -> None:
        self.carries = form.carried(variant)
        self.device = next((a.device for a in args if isinstance(a, torch.Tensor)), None)
        self.now: list[torch.Tensor] = []
        self.last: Tile | None = None
        count = 1 + max(tile.index for tile in cover)
        self.states = [self._zeros(c, cover[0].batch, count) for c in self.carries if variant == "forward"]
        """Before each tile, [tiles of a row, ...]: the backward's."""

    def before(self, tile: Tile) -> list[torch.Tensor]:
        """What a tile takes. Nothing is carried to the first of a row, nor (in projections) where some are left out."""
        last, self.last = self.last, tile
        if last is None or last.rows != tile.rows or abs(last.index - tile.index) != 1:
            self.now = []
            self.now = [self._zeros(carry, _sizes(tile)[0]) for carry in self.carries]
        for carry, all_, state in zip(self.carries, self.states, self.now, strict=False):
            narrow(all_[tile.index], carry.layout, tile).copy_(state)
        return self.now

    def after(self, results: list[Any]) -> None:
        """Take what a tile leaves off its graph's results."""
        if self.carries:
            self.now = results[-len(self.carries) :]
            del results[-len(self.carries) :]

    def _zeros(self, carry: Carry, rows: int, *count: int) -> torch.Tensor:
        shape = [math.prod(rows if a == "B" else cast(int, a) for a in dim) for dim in carry.layout]
        return torch.zeros((*count, *shape), dtype=carry.dtype, device=self.device)


class Operands:
    """What gradients at once are made of (oomc.at_once), put together from tiles.

    Args:
        at_once: says what they are.
        inverses: of each route over the whole batch: where in its order each pair of token and expert is.
    """

    def __init__(self, at_once: AtOnce, inverses: Sequence[torch.Tensor]) -> None:
        self.at_once, self.inverses = at_once, inverses
        self.values = [Total(each.layout, adds=False) for each in at_once.operands]

    def take(self, parts: list[Any], first: int, tile: Tile) -> None:
        """Take a tile's operands, and its orders behind them, out of its graph's results, of which they are `first`."""
        end = first + len(self.values)
        orders = parts[end : end + len(self.inverses)]
        operands = parts[first:end]
        del parts[first : end + len(orders)]
        places = [
            narrow(inverse, pairs, tile).index_select(0, order)
            for inverse, pairs, order in zip(self.inverses, self.at_once.pairs, orders, strict=True)
        ]
        for index, (kind, value) in enumerate(zip(self.at_once.operands, self.values, strict=True)):
            part, operands[index] = operands[index], None
            if kind.route < 0:
                value.add(part, tile)
                continue
            if value.value is None:
                value.start(part.new_empty(self.inverses[kind.route].shape[0], *part.shape[1:]))
            experts.place_(cast(torch.Tensor, value.value), places[kind.route], part)


def run_chunks(
    form: Form, variant: str, graphs: Callable[[str], Graph], chunk: tuple[int, int], args: Sequence[Any],
    most: int | None = None,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Run a chunkable form tile by tile.

    Args:
        form: says what each argument and result is.
        variant: `forward`, `recompute` or `backward`.
        graphs: the form's graphs by name (oomc.steps.GRAPHS).
        chunk: (batch, sequence) size of a tile.
        args: as for a whole run; its sizes are those of the whole batch.
        most: run only so many tiles, the largest (for projections: from the second on, all take the same memory).
    """
    kinds = arguments_of(form, variant)
    sizes = whole_sizes(kinds, args)
    cover = tiles(*sizes, chunk)
    if form.carries and variant == "backward":
        cover.sort(key=lambda tile: (tile.rows.start, -tile.index))
    carried = Carried(form, variant, cover, args)
    if len(cover) == 1:
        return _run_whole(kinds, graphs(variant), args, cover[0], carried)
    at_once = form.at_once if variant == "backward" else None
    if at_once is not None and not at_once.pays(sizes, len(cover)):
        at_once = None
    graph = graphs(variant if at_once is None else ROWS)
    operands = None if at_once is None else Operands(at_once, graphs(ORDERS)(*args))
    totals = totals_of(form, variant, len(cover))
    if most is not None:
        cover = sorted(cover, key=lambda tile: math.prod(_sizes(tile)), reverse=True)[:most]
    if variant == IN_PLACE:
        for argument, result in form.overwritten:
            totals[result].start(args[argument])
    for tile in cover:
        part_args = [kind.part(arg, tile) for kind, arg in zip(kinds, args, strict=True)]
        parts = list(graph(*part_args, *carried.before(tile)))
        del part_args
        own = _own_memory(parts, args) if tile is cover[-1] else [False] * len(parts)
        carried.after(parts)
        if operands is not None:
            operands.take(parts, len(totals), tile)
        part = None
        for index, total in enumerate(totals):
            part, parts[index] = parts[index], None
            if part is not None:
                total.add(part, tile, own[index])
        del parts, part
    results = [total.take() for total in totals]
    if operands is not None:
        made = graphs(PRODUCTS)(*args, *(value.take() for value in operands.values))
        for index, gradient in zip(operands.at_once.results, made, strict=True):
            results[index] = gradient
    return (*results, *carried.states)


def _own_memory(results: Sequence[Any], args: Sequence[Any]) -> list[bool]:
    """Which results are all that lies in their memory."""

    def memory(x: torch.Tensor) -> int:
        return x.untyped_storage()._cdata

    users = Counter(memory(x) for x in (*results, *args) if isinstance(x, torch.Tensor))
    return [
        isinstance(x, torch.Tensor)
        and users[memory(x)] == 1
        and x.untyped_storage().nbytes() == x.nbytes
        and sums.compact(x)
        for x in results
    ]


def _run_whole(
    kinds: Sequence[_Argument], graph: Graph, args: Sequence[Any], tile: Tile, carried: Carried
) -> tuple[torch.Tensor | None, ...]:
    """Run a form on its only tile."""
    part_args = [kind.part(arg, tile) if kind.kind == "states" else arg for kind, arg in zip(kinds, args, strict=True)]
    results = list(graph(*part_args, *carried.before(tile)))
    carried.after(results)
    return (*results, *carried.states)


def whole_sizes(kinds: Sequence[_Argument], args: Sequence[Any]) -> tuple[int, int]:
    """The whole batch's (batch, sequence) sizes: every graph of a form in chunks takes them as arguments."""
    sizes = {"B": 1, "S": 1}
    for kind, arg in zip(kinds, args, strict=True):
        if kind.kind == "size" and kind.formula in sizes:
            sizes[kind.formula] = arg
    return sizes["B"], sizes["S"]
