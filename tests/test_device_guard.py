"""The device memory of a plan on a GPU: reserved once, before its first step, beside what others have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oomc.allocator import LARGE_PAGE
from oomc.compiler import Compiler
from oomc.device_guard import RETREAT, DeviceGuard
from oomc.replay import BLAS, OTHERS
from oomc.runtime.meter import others
from oomc.simulate import Projection
from tests.cases_models import Stack
from tests.helpers import compiled, tokens
from tests.programs import VOCAB

STATS = "reserved_bytes.all.allocated"
"""What torch's allocator has mapped so far, whatever it has given back since."""
GIB = 1 << 30


class Driver:
    """What the guard asks of torch about a GPU, and tells it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allocated: int, reserved: int) -> None:
        self.allocated, self.reserved, self.fraction, self.flushes = allocated, reserved, 1.0, 0
        for name, function in {
            "memory_allocated": lambda *_: self.allocated,
            "memory_reserved": lambda *_: self.reserved,
            "empty_cache": self.flush,
            "set_per_process_memory_fraction": self.limit,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr("oomc.device_guard.device_memory", lambda *_: 100 * GIB)
        monkeypatch.setattr(Compiler, "outside", GIB)

    def flush(self) -> None:
        self.reserved, self.flushes = self.allocated, self.flushes + 1

    def limit(self, fraction: float, _: Any) -> None:
        self.fraction = fraction


def guard_of(budget: int) -> tuple[DeviceGuard, Compiler]:
    options: Any = SimpleNamespace(device=torch.device("cuda", 0), budget=SimpleNamespace(device=budget))
    compiler = Compiler(torch.nn.Identity(), (), options)
    return DeviceGuard(compiler), compiler


def projected(reserved: int, limit: int) -> Projection:
    return Projection(reserved, "", 0, {}, {}, reserved=reserved, limit=limit)


def test_what_others_hold_is_in_no_plan_and_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, allocated=BLAS + 3 * GIB, reserved=4 * GIB)
    guard, compiler = guard_of(24 * GIB)
    alone = compiler.device_allowed()
    guard.look([])
    assert compiler.others == 3 * GIB and compiler.device_allowed() == alone - 3 * GIB
    guard.make_room(projected(2 * GIB, 2 * GIB))
    assert driver.fraction * 100 * GIB == pytest.approx(alone)  # the process's limit is as it was


def test_what_becomes_the_steps_is_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, allocated=5000, reserved=GIB)
    own = torch.empty(1000, device="cpu")
    assert others(torch.device("cpu"), [own, own[:10], own.view(10, 100)]) == 1000


def test_a_plan_that_leaves_memory_free_may_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier plan took more than projected, the next one may take too: its limit stays the budget's."""
    driver = Driver(monkeypatch, allocated=BLAS, reserved=BLAS)
    guard, compiler = guard_of(24 * GIB)
    guard.look([])
    limits = []
    for spare in (0, int(RETREAT * 24 * GIB)):
        compiler.spare = spare
        guard.make_room(projected(compiler.device_allowed(), 0))
        limits.append(driver.fraction * 100 * GIB)
    assert limits[0] == pytest.approx(limits[1]) and compiler.device_allowed() < limits[1]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_step_maps_memory() -> None:
    kept = torch.empty(GIB // 8, dtype=torch.uint8, device="cuda")
    batch = tokens(2, 12, vocab=VOCAB)
    step = compiled(Stack(2), batch, on="cuda", tune=0)
    assert step._current is not None
    others = step._compiler.others
    assert kept.nbytes <= others
    needed = step._current.projection.reserved - OTHERS
    # what was free of the last page is part of the piece
    assert torch.cuda.memory_reserved() > needed + others - LARGE_PAGE
    float(step(**batch))  # pools of small allocations come with the streams that use them
    before = torch.cuda.memory_stats()[STATS]
    for _ in range(3):
        float(step(**batch))
    step.synchronize()
    assert torch.cuda.memory_stats()[STATS] - before <= OTHERS
    assert step.metrics["device_peak"] <= step.metrics["device_projected"] and step.metrics["replans"] == 0
    step.close()
