"""The pieces by which masks are recognised; whole masks are in test_rewrite_attention.py."""

from __future__ import annotations

import pytest
import torch

from oomc.passes.match_mask import agree, band, everything, explains, padding, shape_of


def test_shapes_of_masks() -> None:
    assert shape_of(torch.ones(5, 5, dtype=torch.bool)) == (False, None)
    assert shape_of(band(5, 5)) == (True, None)
    assert shape_of(band(5, 2)) == (True, 2)
    assert shape_of(~band(5, 5)) is None
    assert shape_of(band(5, 5).T) is None


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([(5, True, None), (9, True, None)], (True, None)),
        ([(5, True, None), (9, True, 7)], (True, 7)),
        ([(5, True, 4), (9, True, 7)], None),
        ([(5, True, 4), (9, True, None)], None),
        ([(5, False, None), (9, True, None)], None),
        ([], None),
    ],
)
def test_looks_agree(looks: list[tuple[int, bool, int | None]], expected: tuple[bool, int | None] | None) -> None:
    assert agree(looks) == expected


def test_segments_explain() -> None:
    value = torch.tensor([[1, 1, 2, 2, 2]])
    same = value[:, :, None] == value[:, None, :]
    assert explains(value, band(5, 5) & same, True, None)
    assert not explains(value, band(5, 5)[None], True, None)
    # What padding sees is of no account, as long as nothing sees padding.
    keep = torch.tensor([[1, 1, 1, 0, 0]])
    assert explains(keep, band(5, 5) & keep[:, None].bool(), True, None)
    assert not explains(1 - keep, band(5, 5) & keep[:, None].bool(), True, None)
    assert not explains(keep, band(5, 5)[None], True, None)


def test_samples_hold_every_literal() -> None:
    samples = torch.stack(list(everything([11], 8)))
    assert (samples == 11).any()
    assert set(torch.stack(list(padding([11], 8))).unique().tolist()) == {0, 1}
