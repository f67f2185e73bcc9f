"""Chunk loops: what a tile takes of each argument, and what its results come to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from oomc.dims import Layout
from oomc.runtime import compute
from oomc.runtime.compute import arguments_of, run_chunks
from oomc.runtime.tiles import tiles
from oomc.worksets import Carry, Form, FormInput

B, S = 3, 7
CHUNKS = [(1, 1), (1, 3), (2, 7), (2, 4), (3, 5), (3, 7), (9, 9)]


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def test_only_memory_of_its_own_is_kept() -> None:
    given, whole = values(4), values(2, 4)
    results = [given, values(4), whole[0], whole[1], given.view(2, 2), values(2, 4)[:1], None, values(3).t()]
    assert compute._own_memory(results, [given, 3]) == [False, True, False, False, False, False, False, True]
    repeated = values(4)[:1].expand(4)  # as many bytes as its memory has, but one number only
    assert compute._own_memory([repeated, values(2, 3).t()], []) == [False, True]


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
