"""Keeps a step within its device budget: the allocator's limit, and new plans where one took too much."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import suppress

import torch

from oomc.compiler import Compiler, Scheduled
from oomc.limits import device_memory
from oomc.replay import BLAS, OTHERS
from oomc.runtime.meter import others
from oomc.simulate import Projection

REPLANS = 3
"""How often plans are made anew after one took more of the device than was projected."""
RETREAT = 0.03
"""The share of the device budget that the next plan then leaves free."""


class DeviceGuard:
    """Watches the device memory of one step's plans.

    torch's limit is of the process, not of a step: with several steps alive, the last plan's holds.

    Attributes:
        replans: how often plans were made anew.
    """

    def __init__(self, compiler: Compiler) -> None:
        self._compiler, self._device = compiler, compiler.options.device
        self._budget = compiler.options.budget.device
        self._last: Scheduled | None = None
        self.replans = 0

    def look(self, own: Iterable[torch.Tensor]) -> None:
        """Before anything is planned: what torch's allocator has given to others than `own` is in no plan's budget.

        Args:
            own: what becomes the step's, where it is on the device already: parameters and buffers.
        """
        if self._device.type == "cuda":
            _ = self._compiler.outside  # it has cuBLAS' workspace allocated, which plans count as their own
            self._compiler.others = max(0, others(self._device, own) - BLAS)

    def make_room(self, projection: Projection) -> None:
        """Give back what the allocator keeps of others where it would not fit the budget, and set its limit.

        Where a step needs more than `take` has reserved, the allocator compares more with its limit than it then maps,
        so that a limit of just the budget would make it unmap and map memory in every step: it is what the plan needs
        in that comparison, and may be above the budget by one large allocation.
        """
        if self._device.type != "cuda":
            return
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        allowed = self._compiler.device_allowed() + self._compiler.spare  # what is left free is for what comes on top
        if kept + projection.held > allowed:
            torch.cuda.empty_cache()
        if self._budget is not None:
            limit = max(allowed, projection.limit) + self._compiler.others
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / device_memory(self._device)), self._device)

    def take(self, projection: Projection) -> None:
        """Have the allocator reserve now what the plan is projected to need, but for others' pools.

        No step then waits for memory to be mapped, or comes to the limit on its way, and no other process takes what
        the plan counts on. The headroom is reserved too: with all else mapped, the first allocation for which the
        allocator had to grow would be compared with the limit on top of it all, and it would unmap what is free. Where
        there is too little memory, the first step finds out, and is planned anew.
        """
        if self._device.type != "cuda":
            return
        needed = projection.reserved - OTHERS + self._compiler.others
        if torch.cuda.memory_reserved(self._device) < needed:
            torch.cuda.empty_cache()  # or the piece would come out of what is free, and nothing would be mapped
            missing = needed - torch.cuda.memory_reserved(self._device)
            with suppress(torch.OutOfMemoryError):
                torch.empty(missing, dtype=torch.uint8, device=self._device)

    @property
    def flushes(self) -> int:
        """How often the allocator has had to give unused memory back before it could serve a request."""
        return int(torch.cuda.memory_stats(self._device)["num_alloc_retries"]) if self._device.type == "cuda" else 0

    def retreat(self, scheduled: Scheduled | None) -> bool:
        """Leave a plan that took too much: the next call runs by another one, with less. False where there is none."""
        if scheduled is None or scheduled.given:
            return False
        if self._compiler.drop_rival(scheduled):
            return True
        if self.replans >= REPLANS:
            return False
        self.replans += 1
        self._compiler.retreat(int(RETREAT * (self._budget or self._compiler.device_memory())))
        return True

    def give_up(self) -> bool:
        """Go back to what was planned first, since there is no plan with less; False where it was never left."""
        if not self._compiler.spare:
            return False
        self.replans = REPLANS
        self._compiler.retreat(-self._compiler.spare)
        return True

    def watch(self, scheduled: Scheduled, peak: int, flushes: int) -> None:
        """After a step: where one of a plan's first two came to the end of its memory, leave the plan before it dies.

        In the first one the allocator may also flush what another plan has left.
        """
        again, self._last = scheduled is self._last, scheduled
        scheduled.steps += 1
        if scheduled.steps > 2:
            return
        flushed = again and self.flushes > flushes
        over = self._budget is not None and peak > self._budget
        if (flushed or over) and self.retreat(scheduled):
            warnings.warn(
                "a step came to the end of the device budget, more than was projected; the next ones are planned with "
                "less (metrics['replans'] counts this)",
                stacklevel=5,
            )


def lift_limit(device: torch.device) -> None:
    """Lift the limit that a budget has put on the allocator."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, device)
