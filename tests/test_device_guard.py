"""The device memory of a plan on a GPU: reserved once, before its first step."""

from __future__ import annotations

import pytest
import torch

from oomc.replay import HEADROOM, OTHERS, without_headroom
from tests.cases_models import Stack
from tests.helpers import compiled, tokens
from tests.programs import VOCAB

STATS = "reserved_bytes.all.allocated"
"""What torch's allocator has mapped so far, whatever it has given back since."""


def test_what_replays_reserve_is_what_is_projected_without_headroom() -> None:
    most = 7 << 30
    assert abs(without_headroom(most + int(HEADROOM * most) + OTHERS) - most) <= 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_step_maps_memory() -> None:
    batch = tokens(2, 12, vocab=VOCAB)
    step = compiled(Stack(2), batch, on="cuda", tune=0)
    assert step._current is not None
    needed = without_headroom(step._current.projection.reserved)
    assert torch.cuda.memory_reserved() >= needed
    float(step(**batch))  # pools of small allocations come with the streams that use them
    before = torch.cuda.memory_stats()[STATS]
    for _ in range(3):
        float(step(**batch))
    step.synchronize()
    assert torch.cuda.memory_stats()[STATS] - before <= OTHERS
    step.close()
