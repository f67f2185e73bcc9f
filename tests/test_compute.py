"""Chunk loops: what a tile takes of each argument, and how results are put together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from oomc.dims import Layout
from oomc.runtime import compute
from oomc.runtime.compute import Tile, Total, arguments_of, closed, narrow, opened, run_chunks, tiles
from oomc.runtime.meter import Meter
from oomc.worksets import Carry, Form, FormInput

B, S = 3, 7
CHUNKS = [(1, 1), (1, 3), (2, 7), (2, 4), (3, 5), (3, 7), (9, 9)]


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_tiles_cover_every_token_once(chunk: tuple[int, int]) -> None:
    seen = torch.zeros(B, S)
    for tile in tiles(B, S, chunk):
        seen[tile.rows, tile.columns] += 1
        assert (tile.batch, tile.sequence) == (B, S)
    assert (seen == 1).all()


LAYOUTS: dict[str, tuple[Layout, tuple[int, ...]]] = {
    "rows and positions": ((("B",), ("S",), (4,)), (B, S, 4)),
    "heads": ((("B",), (2,), ("S",), (4,)), (B, 2, S, 4)),
    "positions first": ((("S",), ("B",)), (S, B)),
    "flat": ((("B", "S"), (4,)), (B * S, 4)),
    "flat with heads": ((("B", "S", 4), (2,)), (B * S * 4, 2)),
    "heads with positions": ((("B",), (2, "S"), (3,)), (B, 2 * S, 3)),
    "positions of features": ((("B",), ("S", 4)), (B, S * 4)),
    "rows only": ((("B",), (4,)), (B, 4)),
    "broadcast rows": (((), ("S",), (4,)), (1, S, 4)),
    "positions only": ((("S",),), (S,)),
    "no tokens": (((4,),), (4,)),
    "plain product": (((2, 3), ("S",)), (6, S)),
}


def expected(name: str, x: Tensor, tile: Tile) -> Tensor:
    """The tile of a value by plain views and slices."""
    b, s = tile.rows, tile.columns
    return {
        "rows and positions": lambda: x[b, s],
        "heads": lambda: x[b, :, s],
        "positions first": lambda: x[s, b],
        "flat": lambda: x.view(B, S, 4)[b, s].flatten(0, 1),
        "flat with heads": lambda: x.view(B, S, 4, 2)[b, s].flatten(0, 2),
        "heads with positions": lambda: x.view(B, 2, S, 3)[b, :, s].flatten(1, 2),
        "positions of features": lambda: x.view(B, S, 4)[b, s].flatten(1, 2),
        "rows only": lambda: x[b],
        "broadcast rows": lambda: x[:, s],
        "positions only": lambda: x[s],
        "no tokens": lambda: x,
        "plain product": lambda: x[:, s],
    }[name]()


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tile_of_a_value(name: str, chunk: tuple[int, int]) -> None:
    layout, shape = LAYOUTS[name]
    x = values(*shape)
    for tile in tiles(B, S, chunk):
        assert torch.equal(narrow(x, layout, tile), expected(name, x, tile))


@pytest.mark.parametrize("chunk", [(1, S), (1, 2), (1, 1)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tile_of_one_row_is_a_range(name: str, chunk: tuple[int, int]) -> None:
    """Unless something else changes more slowly than positions do."""
    layout, shape = LAYOUTS[name]
    x = opened(values(*shape), layout, (B, S))[0]
    where = opened(values(*shape), layout, (B, S))[1]
    one = closed(x.narrow(where["B"], 0, 1) if "B" in where else x, layout)
    for tile in tiles(1, S, chunk):
        slow = closed(compute._opened_part(one, layout, tile), layout)
        part = compute._range(one, layout, tile)
        assert (part is None) == (name == "heads with positions" and chunk != (1, S))
        assert torch.equal(narrow(one, layout, tile), slow)
        assert part is None or part.untyped_storage().data_ptr() == one.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", LAYOUTS)
def test_opened_values_are_views_and_close_again(name: str) -> None:
    layout, shape = LAYOUTS[name]
    x = values(*shape)
    view, where = opened(x, layout, (B, S))
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert {token: view.shape[dim] for token, dim in where.items()} == {
        token: size for token, size in (("B", B), ("S", S)) if any(token in dim for dim in layout)
    }
    assert torch.equal(closed(view, layout), x)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("adds", [False, True])
def test_tiles_put_together_are_the_whole(name: str, chunk: tuple[int, int], adds: bool) -> None:
    """What several tiles give for one place is the same, or is added up."""
    layout, shape = LAYOUTS[name]
    x = values(*shape)
    total, cover = Total(layout, adds), tiles(B, S, chunk)
    for tile in cover:
        total.add(narrow(x, layout, tile), tile)
    whole = total.take()
    assert whole is not None
    tokens = {a for dim in layout for a in dim if isinstance(a, str)}
    times = 1
    for token, size in (("B", -(-B // chunk[0])), ("S", -(-S // chunk[1]))):
        times *= size if adds and token not in tokens else 1
    torch.testing.assert_close(whole, x * times, rtol=1e-6, atol=0)
    assert total.take() is None  # nothing is held


def test_what_is_put_together_lies_as_the_tiles_do() -> None:
    x = values(B, 4, S).transpose(1, 2)
    layout: Layout = (("B",), ("S",), (4,))
    for piece in (x, x.contiguous(), values(S, B, 4).transpose(0, 1)):
        total = Total(layout, adds=False)
        for tile in tiles(B, S, (2, 3)):
            part = piece[tile.rows, tile.columns]
            order = sorted(range(3), key=lambda d: piece.stride(d), reverse=True)
            total.add(part.permute(order).contiguous().permute(sorted(range(3), key=order.__getitem__)), tile)
        whole = total.take()
        assert whole is not None and torch.equal(whole, piece)
        assert whole.stride() == piece.stride()


def test_the_first_tile_is_not_kept() -> None:
    """A result that no tile cuts is a copy: the graph's own tensor may be an argument."""
    x, total = values(4), Total(((4,),), adds=True)
    for tile in tiles(B, S, (1, 7)):
        total.add(x, tile)
    whole = total.take()
    assert whole is not None and torch.equal(x, values(4))
    torch.testing.assert_close(whole, 3 * x)


def test_sums_of_low_precision_are_rounded_once() -> None:
    tile = tiles(1000, 1, (1, 1))
    for layout, shape in (((), ()), (((), ("S",)), (1, 1))):
        total = Total(layout, adds=True)
        for each in tile:
            total.add(torch.ones(shape, dtype=torch.bfloat16), each)  # 256 + 1 is 256 in bf16
        whole = total.take()
        assert whole is not None and whole.dtype == torch.bfloat16
        assert float(whole) == 1000


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_of_few_tiles_is_rounded_once_too(dtype: torch.dtype, count: int) -> None:
    """Whether or not the tiles are counted, with the bits of an fp32 sum, laid out as the parts are."""
    parts = [values(30, 20).mul(k + 0.3).to(dtype).t() for k in range(count)]
    kept = [part.clone() for part in parts]
    wanted = torch.zeros(20, 30)
    for part in parts:
        wanted += part
    cover = tiles(count, 1, (1, 1))
    for known in (0, count):
        total = Total(((20,), (30,)), adds=True, count=known)
        for part, tile in zip(parts, cover, strict=True):
            total.add(part, tile, own=bool(known) and tile is cover[-1])
        whole = total.take()
        assert whole is not None and torch.equal(whole, wanted.to(dtype)) and whole.stride() == parts[0].stride()
        assert all(torch.equal(part, one) for part, one in zip(parts[:-1], kept, strict=False))
        assert torch.equal(parts[-1], kept[-1]) or known  # the last one is kept, in memory of its own


def test_only_memory_of_its_own_is_kept() -> None:
    given, whole = values(4), values(2, 4)
    results = [given, values(4), whole[0], whole[1], given.view(2, 2), values(2, 4)[:1], None, values(3).t()]
    assert compute._own_memory(results, [given, 3]) == [False, True, False, False, False, False, False, True]
    repeated = values(4)[:1].expand(4)  # as many bytes as its memory has, but one number only
    assert compute._own_memory([repeated, values(2, 3).t()], []) == [False, True]


def test_two_tiles_need_no_fp32_sum() -> None:
    count = 1 << 20
    peaks = {}
    for number in (2, 3):
        cover, total = tiles(number, 1, (1, 1)), Total(((count,),), adds=True, count=number)
        with Meter(granule=512) as meter:
            for tile in cover:
                total.add(torch.ones(count, dtype=torch.bfloat16), tile, own=tile is cover[-1])
            total.take()
        peaks[number] = meter.peak / count
    assert peaks == {2: 4.0, 3: 6.0}  # both parts; the fp32 sum and a part


# --- whole forms

COMPLETE: Layout = (("B",), ("S",), (4,))
TABLE: Layout = ((), ("S",), (4,))
ROW: Layout = (("B",), (4,))


def function(x: Tensor, table: Tensor, row: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A value, one that lacks the rows, one that lacks the positions, and a sum."""
    y = torch.tanh(x * table * w) + row[:, None]
    return y, (table * w).sin(), row * w, y.square().sum()


class Forward:
    """The forward of `function`, which looks at what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, b: int, s: int, x: Tensor, table: Tensor, row: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        assert x.shape == (b, s, 4) and table.shape == (1, s, 4) and row.shape == (b, 4) and w.shape == (4,)
        self.calls.append((b, s))
        return function(x, table, row, w)


def backward(b: int, s: int, x: Tensor, table: Tensor, row: Tensor, w: Tensor, *tangents: Tensor) -> tuple[Any, ...]:
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, table, row, w)]
        return torch.autograd.grad(function(*leaves), leaves, tangents)


def form() -> Form:
    """The form of `function`; its graphs are the functions above."""
    inputs = (
        FormInput("size", formula="B"), FormInput("size", formula="S"), FormInput("value", True, layout=COMPLETE),
        FormInput("value", True, layout=TABLE), FormInput("value", True, layout=ROW), FormInput("parameter", True),
    )  # fmt: skip
    empty = fx.GraphModule(nn.Module(), fx.Graph())
    return Form(
        "form", empty, inputs, "tokens", (False, False, False, True), (COMPLETE, TABLE, ROW, ()),
        backward_takes=tuple(("input", i) for i in range(6)), tangents=(0, 1, 2, 3), gradients=(2, 3, 4, 5),
    )  # fmt: skip


def arguments() -> list[Any]:
    return [B, S, values(B, S, 4), values(1, S, 4), values(B, 4), values(4)]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_forward_in_chunks(chunk: tuple[int, int]) -> None:
    graph = Forward()
    results = run_chunks(form(), "forward", lambda _: graph, chunk, arguments())
    for got, want in zip(results, function(*arguments()[2:]), strict=True):
        assert got is not None
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert graph.calls == [(t.rows.stop - t.rows.start, t.columns.stop - t.columns.start) for t in tiles(B, S, chunk)]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_backward_in_chunks(chunk: tuple[int, int]) -> None:
    """Gradients of what lacks an axis are added up; tangents of it count once; the sum's counts in every tile."""
    args = [*arguments(), *(torch.cos(y) for y in function(*arguments()[2:]))]
    for got, want in zip(run_chunks(form(), "backward", lambda _: backward, chunk, args), backward(*args), strict=True):
        assert got is not None
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_tangents_of_what_every_tile_computes_go_to_the_first_tile_of_a_row_or_column() -> None:
    _, _, _, _, _, _, full, table, row, total = arguments_of(form(), "backward")
    for tile in tiles(B, S, (2, 4)):
        assert full.part(values(B, S, 4), tile).any()
        assert table.part(values(1, S, 4), tile).any() == (tile.rows.start == 0)
        assert row.part(values(B, 4), tile).any() == (tile.columns.start == 0)
        assert float(total.part(torch.ones(()), tile)) == 1


def test_one_tile_is_the_graph_itself() -> None:
    results = (values(2), None)
    assert run_chunks(form(), "forward", lambda _: lambda *_: results, (B, S), arguments()) == results


def test_results_that_are_none_stay_none() -> None:
    def some(*args: Any) -> tuple[Any, ...]:
        return (backward(*args)[0], None, None, backward(*args)[3])

    args = [*arguments(), *function(*arguments()[2:])]
    got = run_chunks(form(), "backward", lambda _: some, (1, 3), args)
    assert [g is None for g in got] == [False, True, True, False]


def test_no_more_tiles_than_are_asked_for() -> None:
    graph = Forward()
    run_chunks(form(), "forward", lambda _: graph, (1, 2), arguments(), most=3)
    assert graph.calls == [(1, 2)] * 3


def test_saved_values_are_cut_like_any_other() -> None:
    """What is chosen once is put together by the forward, and cut for the recompute."""
    new = form()
    new.saved, new.saved_layouts = 1, ((("B", "S"), (2,)),)

    def first(*args: Any) -> tuple[Tensor, ...]:
        return (*function(*args[2:]), args[2].topk(2, -1).indices.flatten(0, 1))

    def again(*args: Any) -> tuple[Tensor, ...]:
        assert torch.equal(args[-1], args[2].topk(2, -1).indices.flatten(0, 1))
        return function(*args[2:-1])

    *outputs, saved = run_chunks(new, "forward", lambda _: first, (2, 3), arguments())
    assert saved is not None and torch.equal(saved, first(*arguments())[-1])
    for got, want in zip(
        run_chunks(new, "recompute", lambda _: again, (2, 3), [*arguments(), saved]), outputs, strict=True
    ):
        assert got is not None and want is not None and torch.equal(got, want)


# --- chunks in order


def running(b: int, s: int, x: Tensor, w: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """y_t = w sum over u <= t of x_u, and the last sum."""
    assert x.shape == (b, s, 4) and before.shape == (b, 4)
    sums = before[:, None] + x.cumsum(1)
    return sums * w, sums[:, -1]


def running_form() -> Form:
    inputs = (
        FormInput("size", formula="B"), FormInput("size", formula="S"), FormInput("value", True, layout=COMPLETE),
        FormInput("parameter", True),
    )  # fmt: skip
    empty = fx.GraphModule(nn.Module(), fx.Graph())
    return Form(
        "form", empty, inputs, "tokens", (False,), (COMPLETE,), saved=1, carries=(Carry(ROW, torch.float32, True),),
        backward_takes=(*(("input", i) for i in range(4)), ("saved", 0)), tangents=(0,), gradients=(2, 3),
    )  # fmt: skip


def running_backward(b: int, s: int, *args: Tensor) -> tuple[Any, ...]:
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in args[:3]]
        return torch.autograd.grad(running(b, s, *leaves), leaves, args[3:])


@pytest.mark.parametrize("chunk", [*CHUNKS, (2, 1)])
def test_states_go_from_chunk_to_chunk_and_their_gradients_back(chunk: tuple[int, int]) -> None:
    given: list[Any] = [B, S, values(B, S, 4), values(4)]
    y, states = run_chunks(running_form(), "forward", lambda _: running, chunk, given)
    want, last = running(B, S, given[2], given[3], torch.zeros(B, 4))
    assert y is not None and states is not None
    torch.testing.assert_close(y, want)
    starts = range(0, S, chunk[1])
    assert states.shape == (len(starts), B, 4)  # those before each chunk
    for state, start in zip(states, starts, strict=True):
        torch.testing.assert_close(state, given[2][:, :start].sum(1))

    seen: list[Tensor] = []

    def again(*args: Any) -> tuple[Tensor]:
        seen.append(args[-1])
        return (running(*args)[0],)

    (same,) = run_chunks(running_form(), "recompute", lambda _: again, chunk, [*given, states])
    assert same is not None and torch.equal(same, y)
    assert len(seen) == len(tiles(B, S, chunk))
    dy = torch.cos(y)
    got = run_chunks(running_form(), "backward", lambda _: running_backward, chunk, [*given, states, dy])
    for a, b in zip(got, running_backward(*given, torch.zeros(B, 4), dy, torch.zeros_like(last)), strict=False):
        assert a is not None
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert len(got) == 2


def test_the_backward_goes_from_the_last_chunk_of_a_row_to_the_first() -> None:
    order: list[tuple[float, float]] = []

    def look(b: int, s: int, x: Tensor, w: Tensor, state: Tensor, dy: Tensor, after: Tensor) -> tuple[Tensor, ...]:
        order.append((float(x[0, 0, 0]), float(after[0, 0])))
        return x, w, state + 1

    x = torch.arange(2.0 * 3).view(2, 3, 1).expand(2, 3, 4)
    states = torch.arange(3.0)[:, None, None].expand(3, 2, 4)  # 0, 1, 2 before the chunks of a row
    run_chunks(running_form(), "backward", lambda _: look, (1, 1), [2, 3, x, values(4), states, x])
    assert order == [(2, 0), (1, 3), (0, 2), (5, 0), (4, 3), (3, 2)]


@pytest.mark.parametrize("variant", ["forward", "backward"])
def test_of_some_chunks_none_takes_what_another_row_left(variant: str) -> None:
    """Projections run two of all chunks, which need not follow each other; states are as many as there are chunks."""
    args = [B, S, values(B, S, 4), values(4)]
    graph: Any = running
    if variant == "backward":
        args, graph = [*args, torch.zeros(S, B, 4), values(B, S, 4)], running_backward
    for chunk in ((2, 7), (2, 4), (1, 1)):
        results = run_chunks(running_form(), variant, lambda _: graph, chunk, args, most=2)
        assert len(results) == 2
        if variant == "forward":
            assert results[1] is not None and results[1].shape == (-(-S // chunk[1]), B, 4)
