"""The compute lane's work: run a form's graph whole, or in chunks of tokens.

Where states are carried from chunk to chunk (oomc.carries), the chunks of a batch row run in order, the backward's from
last to first: each takes the states, or their gradients, that the one before it has left. Gradients of experts' weights
may be made at the end, of what all chunks have left for them (oomc.at_once).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from oomc import experts, sums
from oomc.runtime.tiles import Tile, Total, narrow, tiles, tokens_in
from oomc.steps import IN_PLACE, ORDERS, PRODUCTS, ROWS, calc, phase_of

if TYPE_CHECKING:
    from oomc.dims import Layout
    from oomc.worksets import AtOnce, Carry, Form

Graph = Callable[..., tuple[Any, ...]]


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
            return calc(self.formula, *tile.sizes)
        if self.kind == "whole" or arg is None:
            return arg
        if self.kind == "states":
            return narrow(arg[tile.index], self.layout, tile)
        part = narrow(arg, self.layout, tile)
        if self.kind == "tangent" and not self.reduced:
            tokens = tokens_in(self.layout)
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
            self.now = [self._zeros(carry, tile.sizes[0]) for carry in self.carries]
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

    def take(self, parts: list[Any], tile: Tile) -> None:
        """Take in a tile's operands, and its `order` of each route behind them; `parts` is empty then."""
        places = [
            narrow(inverse, pairs, tile).index_select(0, order)
            for inverse, pairs, order in zip(self.inverses, self.at_once.pairs, parts[len(self.values) :], strict=True)
        ]
        for kind, value in zip(self.at_once.operands, self.values, strict=True):
            part = parts.pop(0)
            if kind.route is None:
                value.add(part, tile)
                continue
            if value.value is None:
                value.start(part.new_empty(self.inverses[kind.route].shape[0], *part.shape[1:]))
            experts.place_(cast(torch.Tensor, value.value), places[kind.route], part)
        parts.clear()


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
    at_once = form.made_at_once(variant, sizes, len(cover))
    graph = graphs(variant if at_once is None else ROWS)
    operands = None if at_once is None else Operands(at_once, graphs(ORDERS)(*args))
    totals = totals_of(form, variant, len(cover))
    if most is not None:
        cover = sorted(cover, key=lambda tile: math.prod(tile.sizes), reverse=True)[:most]
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
            rest = parts[len(totals) :]
            del parts[len(totals) :]
            operands.take(rest, tile)
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
