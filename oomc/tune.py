"""Short real executions: a few plans run real training steps in turn, and the fastest stays.

Every such step is a valid one, whichever plan it runs by, so nothing is lost or repeated; and the plans that are tried
differ in movement and recomputation only (they run in the same chunks), so that which of them wins changes no number.
A step's time is that of the call, until the device has computed its loss: what the step before has left to update is
waited for in it, and what the user does between two calls is not part of it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tabulate import tabulate

if TYPE_CHECKING:
    from oomc.compiler import Scheduled

WARM = 1
"""Steps of each plan that are not timed: slabs have moved, memory is taken, and updates of another plan are left."""
TIMED = 3
"""Steps of each plan that are; their median counts."""


@dataclass
class Tuning:
    """A few plans for one batch shape and what their steps took.

    Attributes:
        plans: at least one, the first as planned.
        seconds: of each plan's steps so far.
    """

    plans: list[Scheduled]
    seconds: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.seconds = [[] for _ in self.plans]

    @property
    def current(self) -> Scheduled | None:
        """The plan that is tried now; None when all have been."""
        waits = (plan for plan, own in zip(self.plans, self.seconds, strict=True) if len(own) < WARM + TIMED)
        return next(waits, None)

    def took(self, plan: Scheduled, seconds: float) -> None:
        """Note the time of a step of a plan."""
        for each, own in zip(self.plans, self.seconds, strict=True):
            if each is plan:
                own.append(seconds)

    def drop(self, plan: Scheduled) -> bool:
        """No longer try one of the rivals; whether it was one."""
        for index, each in enumerate(self.plans):
            if index and each is plan:
                del self.plans[index], self.seconds[index]
                return True
        return False

    def median(self, index: int) -> float | None:
        """Seconds of a plan's timed steps; None where there are none yet."""
        timed = self.seconds[index][WARM:]
        return statistics.median(timed) if timed else None

    @property
    def fastest(self) -> Scheduled:
        """The plan with the least median; the first one where nothing is timed."""
        known = [(median, i) for i in range(len(self.plans)) if (median := self.median(i)) is not None]
        return self.plans[min(known)[1] if known else 0]

    def __str__(self) -> str:
        best, rows = self.fastest, []
        for index, plan in enumerate(self.plans):
            assert plan.program.plan is not None
            median = self.median(index)
            shown = "not yet" if median is None else f"{median:.3f} s"
            rows.append(("*" if plan is best else "", f"{plan.seconds:.3f} s", shown, plan.program.plan.describe()))
        return tabulate(rows, headers=("", "simulated", "measured", "plan"), tablefmt="plain", disable_numparse=True)
