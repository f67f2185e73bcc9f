"""Slab layouts: order, alignment, state indices, byte counts."""

from __future__ import annotations

import pytest
import torch

from oomc.errors import UnsupportedError
from oomc.runtime.adamw import AdamW
from oomc.runtime.layout import ALIGN, ParamSpec, SlabLayout

SPECS = [
    ParamSpec("frozen", (3, 5), torch.int64, False),
    ParamSpec("norm", (7,), torch.float32, True),
    ParamSpec("w", (129,), torch.bfloat16, True),
    ParamSpec("scalar", (), torch.float32, True),
    ParamSpec("half", (2,), torch.float16, False),
    ParamSpec("u", (4, 64), torch.bfloat16, True),
    ParamSpec("empty", (0, 3), torch.bfloat16, True),
    ParamSpec("mask", (9,), torch.bool, False),
]


def test_order_alignment_and_state() -> None:
    layout = SlabLayout.build("s", SPECS)
    assert [place.spec.name for place in layout.places] == [spec.name for spec in SPECS]
    offsets = {place.spec.name: place.offset for place in layout.places}
    assert all(offset % ALIGN == 0 for offset in offsets.values())
    order = ["w", "u", "empty", "norm", "scalar", "frozen", "half", "mask"]
    assert sorted(offsets, key=lambda name: (offsets[name], order.index(name))) == order
    assert layout.bf16.elements == 256 + 256
    assert layout.fp32.elements == 64 + 64
    assert layout.state_elements == 640
    assert layout.gradient_ranges == {
        "norm": (512, 519), "w": (0, 129), "scalar": (576, 577), "u": (256, 512), "empty": (512, 512),
    }  # fmt: skip
    assert layout.weight_bytes == 512 + 512 + 256 + 256 + 256 + 256 + 256
    assert layout.state_bytes(AdamW().arrays) == 2 * 512 + 8 * 640
    assert layout.trainable_elements == 7 + 129 + 1 + 256
    assert layout.place("frozen").state_start == -1


def test_views_alias_the_buffer() -> None:
    layout = SlabLayout.build("s", SPECS)
    buffer = torch.zeros(layout.weight_bytes, dtype=torch.uint8)
    views = layout.views(buffer)
    assert [(v.shape, v.dtype) for v in views] == [(torch.Size(s.shape), s.dtype) for s in SPECS]
    for i, view in enumerate(views):
        view.fill_(i % 2)
    assert [bool((v == i % 2).all()) for i, v in enumerate(views)] == [True] * len(SPECS)


def test_twelve_bytes_a_parameter() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        layout = SlabLayout.build("s", [ParamSpec("w", (1024, 1024), dtype, True)])
        assert layout.weight_bytes + layout.state_bytes(AdamW().arrays) == 12 << 20


def test_what_cannot_be_trained_is_refused() -> None:
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(UnsupportedError, match=r"layer\.w is torch\.float.*bfloat16"):
            SlabLayout.build("s", [ParamSpec("layer.w", (2,), dtype, True)])
    with pytest.raises(AssertionError, match="twice"):
        SlabLayout.build("s", [SPECS[0], SPECS[0]])


def test_an_empty_slab() -> None:
    layout = SlabLayout.build("s", [])
    assert (layout.weight_bytes, layout.state_elements, layout.views(torch.empty(0, dtype=torch.uint8))) == (0, 0, ())
