"""Tiles: their part of a value, and how results are put together from them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oomc.dims import Layout
from oomc.runtime.meter import Meter
from oomc.runtime.tiles import Tile, Total, _opened_part, _range, closed, narrow, opened, tiles

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
        slow = closed(_opened_part(one, layout, tile), layout)
        part = _range(one, layout, tile)
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
