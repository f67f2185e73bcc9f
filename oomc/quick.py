"""An abstract instance of a step at the grain of blocks, and what a set of decisions about it comes to.

    instance = source.instance(...)        # once for a program, its sizes and one way to run in chunks
    decisions = instance.uniform(0)
    instance.evaluate(decisions).seconds   # some 50 microseconds for eight blocks

The same model as oomc.timeline (time) and oomc.simulate (memory), with one node a block and phase. An instance knows
one tiling; choices between tilings are choices between instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from oomc import quick_memory, quick_step
from oomc.machine import Machine
from oomc.runtime.gradients import BUFFER_ELEMENTS, ring_buffers
from oomc.runtime.updates import Where

Array = Any
WHERE: tuple[Where, ...] = ("host", "both", "device")
TIE = 0.002
"""Weight of the lanes' own work in a score: of two plans that take as long the one with less to do comes first."""


@dataclass(frozen=True)
class Decisions:
    """What is decided about an instance.

    Attributes:
        level: of each block, what its backward finds (an index of Instance.levels).
        away: of each block, whether its values for other blocks wait on the host.
        resident: of each slab, whether it lives on the device with its state.
        prefetch, hold, where: as in oomc.plan.Plan.
    """

    level: tuple[int, ...]
    away: tuple[bool, ...]
    resident: tuple[bool, ...]
    prefetch: int = 1
    hold: int = 1
    where: Where = "host"


@dataclass(frozen=True)
class Outcome:
    """What decisions come to.

    Attributes:
        seconds: of a steady step.
        device, host: bytes at the peak.
        work: seconds that compute, h2d, d2h, host and device are at work.
    """

    seconds: float
    device: int
    host: int
    work: tuple[float, ...]

    @property
    def score(self) -> float:
        """Seconds, and a little of the lanes' work."""
        return self.seconds + TIE * sum(self.work)


@dataclass(frozen=True)
class Instance:
    """Arrays over n blocks, L levels, s slabs and at most k slabs a block; seconds and bytes as float64.

    Attributes:
        levels: names of what a block's backward may find of its own values.
        allowed: bool [n, L].
        forward [n], backward [n, L]: seconds of compute, recompute included in the backward.
        uses [n, k], uses_back [n, L, k]: slabs whose weights a block takes, -1 for none.
        weight, home, host, order, kind, movable [s]: bytes of the weights; of weights and state on the device; of all
            that is on the host otherwise; order of first use; kind of gradient (quick_lanes); whether the slab may
            live on the device.
        part_slab, part_params, part_bytes [n, k]: gradients that a block's backward gives.
        own_grad [n]: their bytes on the device.
        device, inner [n, L]: bytes of own values that wait for the backward on the device and on the host.
        bound [n]: bytes of values for others that may leave; those that may not are among the own ones.
        other [n], fwd_need, bwd_need, bwd_first, bwd_rest [n, L]: see quick_memory.device_bytes.
        fixed, staging, host_fixed: bytes that are there in any case, for updates on the device, on the host.
        rates: of the machine, as the kernel takes them.
        accumulate: the step only sums gradients.
        wheres: who may update.
        late: bwd_need, bwd_first and bwd_rest where values come back from the host right before their first use, as
            they do without prefetching; None where that is no less.
    """

    levels: tuple[str, ...]
    allowed: Array
    forward: Array
    backward: Array
    uses: Array
    uses_back: Array
    weight: Array
    home: Array
    host: Array
    order: Array
    kind: Array
    movable: Array
    part_slab: Array
    part_params: Array
    part_bytes: Array
    own_grad: Array
    device: Array
    inner: Array
    bound: Array
    other: Array
    fwd_need: Array
    bwd_need: Array
    bwd_first: Array
    bwd_rest: Array
    fixed: float
    staging: float
    host_fixed: float
    rates: Array
    accumulate: bool = False
    wheres: tuple[Where, ...] = ("host",)
    late: tuple[Array, ...] | None = None
    known: dict[Decisions, Outcome] = field(default_factory=dict, repr=False, compare=False)

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return len(self.forward)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """A number for each block, the same for blocks that take the same time and memory."""
        rows = np.concatenate(
            [self.forward[:, None], self.backward, self.device, self.inner, self.bound[:, None],
             self.own_grad[:, None], self.fwd_need], 1,
        )  # fmt: skip
        seen: dict[bytes, int] = {}
        return tuple(seen.setdefault(row.tobytes(), len(seen)) for row in rows)

    def evaluate(self, d: Decisions) -> Outcome:
        """Time and memory of decisions."""
        if d not in self.known:
            level, away, resident = self._arrays(d)
            out = np.empty(6)
            quick_step.step_seconds(
                self.rates, self.blocks, self.forward, self.backward, self.uses, self.uses_back, self.weight,
                self.order, self.kind, self.part_slab, self.part_params, self.part_bytes, self.inner, self.bound,
                level, away, resident, d.prefetch, d.hold, WHERE.index(d.where), self.accumulate, out,
            )  # fmt: skip
            self.known[d] = Outcome(float(out[0]), self._device(d, level, away, resident), self.host_bytes(d),
                                    tuple(out[1:].tolist()))  # fmt: skip
        return self.known[d]

    def device_bytes(self, d: Decisions) -> int:
        """The projected device peak; a tenth of the time of `evaluate`."""
        return self._device(d, *self._arrays(d))

    def host_bytes(self, d: Decisions) -> int:
        """Bytes on the host."""
        level, away, resident = self._arrays(d)
        values = self.inner[np.arange(self.blocks), level].sum() + self.bound[away].sum()
        return int(self.host_fixed + self.host[~resident].sum() + values)

    @staticmethod
    def _arrays(d: Decisions) -> tuple[Array, Array, Array]:
        return np.array(d.level, np.int64), np.array(d.away, np.bool_), np.array(d.resident, np.bool_)

    def _device(self, d: Decisions, level: Array, away: Array, resident: Array) -> int:
        needs = (self.bwd_need, self.bwd_first, self.bwd_rest)
        if d.prefetch == 0 and self.late is not None:
            needs = self.late
        return int(
            quick_memory.device_bytes(
                self.blocks, self.fixed, self.staging, self.uses, self.uses_back, self.weight, self.home, self.kind,
                self.part_slab, self.own_grad, self.device, self.inner, self.bound, self.other, self.fwd_need,
                *needs, level, away, resident, d.prefetch, d.hold, WHERE.index(d.where), self.accumulate,
            )
        )  # fmt: skip

    def uniform(self, level: int, away: bool = False, **others: Any) -> Decisions:
        """All blocks that may at one level, the others at their first; nothing resident unless given."""
        levels = tuple(level if ok[level] else int(np.argmax(ok)) for ok in self.allowed)
        none = (False,) * len(self.weight)
        base = Decisions(levels, tuple(away and b > 0 for b in self.bound), none)
        return replace(base, **others)


def rates_of(machine: Machine, moved: float, grad: float) -> Array:
    """The machine's rates as the kernel takes them; `moved` and `grad` are bytes of a parameter (oomc.contention)."""
    m = machine
    ring, ring_both = (ring_buffers(m.cores, where) * BUFFER_ELEMENTS for where in ("host", "both"))
    return np.array([
        m.h2d, m.d2h, m.h2d_both, m.d2h_both, m.copy_traffic, m.host_bandwidth, m.update_rate, m.update_bytes,
        m.streamed_rate, m.both_rate, m.bandwidth, m.copy_latency, ring, ring_both, moved, grad, m.mixed_bandwidth,
    ], np.float64)  # fmt: skip


def best_of(outcomes: Sequence[tuple[Decisions, Outcome]]) -> tuple[Decisions, Outcome]:
    """The one with the least score; of equals the first."""
    return min(outcomes, key=lambda each: each[1].score)
