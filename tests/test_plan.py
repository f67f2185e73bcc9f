"""Budgets are read as they are written, and refused where they are no size."""

from __future__ import annotations

import dataclasses

import pytest

from oomc.plan import Budget, Plan, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * 2**30), ("24GB", 24 * 10**9), ("24 gib", 24 * 2**30), ("1.5KiB", 1536), ("512 MiB", 2**29),
    ],
)  # fmt: skip
def test_sizes(text: str | float | None, count: int | None) -> None:
    assert parse_bytes(text) == count
    assert Budget(text, text) == Budget(count, count)


@pytest.mark.parametrize("text", ["", "GiB", "24 GG", "-1GiB", "24GiB host", "1,5GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size; write bytes, or a number with KiB, MiB, GiB"):
        Budget(text)


@pytest.mark.parametrize("size", [0, -5, "0", "0.2B"])
def test_what_holds_nothing(size: int | str) -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        Budget(host=size)


def test_sizes_are_printed_as_they_are_read() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 * 2**20, 1.5 * 2**30)] == [
        "0 B", "1023 B", "1.5 KiB", "3.0 MiB", "1.50 GiB",
    ]  # fmt: skip
    assert format_bytes(2000 * 2**30) == "2,000.00 GiB"


def test_a_plan_is_frozen_and_says_what_it_is() -> None:
    plan = Plan((2, 128), residency={"a": "keep", "b": "recompute"}, chunks={"epilogue/1": (1, 64)})
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.prefetch = 2  # type: ignore[misc]
    text = plan.describe()
    assert "on the host;" not in text
    assert "1 kept, 1 on the host" in Plan((1, 1), {"a": "keep", "b": "offload"}).describe()
    again = Plan((1, 1), {"a": "recompute", "b": "recompute"}, regenerated=1).describe()
    assert "2 values recomputed (1 of them between blocks), 0 kept" in again
    assert Plan((1, 1), host_slots=(3, 5)).host_value_bytes == 8
    assert "batch 2 x 128" in text and "1 values recomputed, 1 kept" in text and "1 workset in 1x64" in text
