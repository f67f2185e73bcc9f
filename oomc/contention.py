"""Copies and updates that share the link and the host's memory, as fluids whose rates change with who is at work.

Between two events everything that is at work goes on at a constant rate, which the Machine's figures give:

- each direction of the link has its rate, lower while the other direction is busy; where a fetch and state that is
  streamed through the device share a direction, the fetch, which is one large copy, gets most of it;
- host memory has one bandwidth, a lower one while both the cores and the device update. Copies win: the cores' update
  gets what they leave (measured on an H200: 4.1 G parameters/s alone, 2.3 to 2.7 with both directions busy);
- the h2d and d2h lanes take one copy at a time, in order; updates are taken by priority, by host and device at once
  (oomc.runtime.updates). An update has read its gradient when all but what fits the ring is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

from oomc.machine import Machine
from oomc.runtime.gradients import BUFFER_ELEMENTS, ring_buffers
from oomc.runtime.updates import Where

Kind = Literal["copy", "keep", "sum"]
HOST_BYTES: dict[Kind, float] = {"copy": 0.0, "keep": 1.0, "sum": 5.0}
"""Host memory bytes that the cores move for each byte of a gradient that arrives: kept ones are read for the norm,
summed ones are read and added to an fp32 sum."""
LARGE_SHARE = 0.85
"""What a large copy gets of a direction of the link that it shares with state on its way through the device: 0.60 to
0.86 in ten fetches of two recorded steps, 0.85 to 0.96 in seventeen of two on another machine (docs/RESULTS.md)."""
LEAST = 0.05
"""The share of its rate that the cores' update keeps, however busy the copies are."""
EPSILON = 1e-12


class Copy:
    """One item of the h2d or d2h lane.

    Attributes:
        nbytes: 0 for an item that only keeps the lane's order.
        ready: it does not begin before.
        waits: jobs that it waits for, and the lane with it.
        issued: when the lane had come to it and its jobs were done; `cleared` is when these were.
        behind: the item that waits for the update of what this one copies, if there is one.
        start, end: of the copy itself; -1 while it has not.
    """

    __slots__ = (
        "behind", "block", "cleared", "end", "issued", "kind", "lane", "left", "name", "nbytes", "ready", "start",
        "waits",
    )  # fmt: skip

    def __init__(
        self, lane: str, name: str, block: int, nbytes: float, ready: float, waits: tuple[Job, ...] = (),
        kind: Kind = "copy", behind: Copy | None = None,
    ) -> None:  # fmt: skip
        self.behind = behind
        self.lane, self.name, self.block, self.nbytes, self.ready = lane, name, block, nbytes, ready
        self.waits, self.kind, self.left = waits, kind, nbytes
        self.issued = self.cleared = self.start = self.end = -1.0


class Job:
    """One slab's update.

    Attributes:
        params: that it updates.
        grad_bytes: of its gradient, where that still lies on the device.
        order: the smaller, the sooner the slab is used next.
        resident: its state lives on the device and is updated in place.
        after: copies that must be done before it begins.
        start, read, end: when it began, had read its gradient, was done; -1 while it has not.
        by_host, by_device: how many parameters each has updated.
    """

    __slots__ = (
        "after", "block", "by_device", "by_host", "end", "grad_bytes", "left", "name", "order", "params", "read",
        "resident", "start", "urgent",
    )  # fmt: skip

    def __init__(
        self, name: str, block: int, params: float, grad_bytes: float, order: int, resident: bool,
        after: tuple[Copy, ...] = (),
    ) -> None:  # fmt: skip
        self.name, self.block, self.params, self.grad_bytes, self.order = name, block, params, grad_bytes, order
        self.resident, self.after, self.left, self.urgent = resident, after, params, False
        self.start = self.read = self.end = -1.0
        self.by_host = self.by_device = 0.0


class Rates:
    """Bytes/s of the copies and parameters/s of the updates while a given set is at work."""

    __slots__ = ("d2h", "device", "h2d", "host", "in_place")

    def __init__(
        self, m: Machine, fetch: bool, out: Kind | None, host: bool, device: bool, moved: float, grad: float
    ) -> None:
        """`moved` are bytes of weights and state of a parameter, `grad` of its gradient."""
        touched = grad + 2 * moved
        alone = m.update_rate * m.update_bytes / touched
        flow = min(1.0, grad * alone / m.d2h_both) if host else 0.0
        busy_in = 1.0 if fetch or device else 0.0
        busy_out = 1.0 if out or device else flow
        link_in = m.h2d - (m.h2d - m.h2d_both) * busy_out
        link_out = m.d2h - (m.d2h - m.d2h_both) * busy_in
        self.in_place = m.bandwidth / touched
        self.device = 0.0
        if device:
            share_in = (1 - LARGE_SHARE) * link_in if fetch else link_in
            share_out = (1 - LARGE_SHARE) * link_out if out else link_out
            self.device = min(m.streamed_rate * 12.0 / moved, share_in / moved, share_out / moved)
        self.h2d = link_in - moved * self.device if fetch else 0.0
        self.d2h = link_out - moved * self.device - flow * m.d2h_both if out else 0.0
        self.d2h = max(self.d2h, LEAST * m.d2h) if out else 0.0
        behind = HOST_BYTES[out] if out else 0.0
        traffic = (self.h2d + 2 * moved * self.device) * m.copy_traffic + self.d2h * (m.copy_traffic + behind)
        bandwidth = m.mixed_bandwidth if host and device else m.host_bandwidth
        if traffic > bandwidth:
            slower = bandwidth / traffic
            self.h2d, self.d2h, self.device = slower * self.h2d, slower * self.d2h, slower * self.device
            traffic = bandwidth
        self.host = 0.0
        if host:
            left = (bandwidth - traffic) / (touched + grad * m.copy_traffic)
            self.host = max(min(alone, left), LEAST * alone)
            both = m.both_rate * m.update_bytes / touched
            if device and self.host + self.device > both:
                slower = both / (self.host + self.device)
                self.host, self.device = slower * self.host, slower * self.device


class World:
    """All lanes but compute, in simulated time.

    Args:
        machine: its rates.
        where: who updates slabs on the host.
        moved: bytes of weights and state of a parameter.
        grad: bytes of its gradient.

    Attributes:
        busy: seconds that each lane has been at work.
        moved_bytes: by lane, state that is streamed included.
    """

    def __init__(self, machine: Machine, where: Where, moved: float, grad: float) -> None:
        self.machine, self.where, self._moved, self._grad = machine, where, moved, grad
        self.now = 0.0
        self.lanes: dict[str, deque[Copy]] = {"h2d": deque(), "d2h": deque()}
        self.jobs: list[Job] = []
        self.busy = {"h2d": 0.0, "d2h": 0.0, "host": 0.0, "device": 0.0}
        self.moved_bytes = {"h2d": 0.0, "d2h": 0.0}
        self._ring = float(ring_buffers(machine.cores, where) * BUFFER_ELEMENTS)
        self._known: dict[tuple[bool, Kind | None, bool, bool], Rates] = {}

    def put(self, copy: Copy) -> Copy:
        """Queue a copy on its lane."""
        self.lanes[copy.lane].append(copy)
        return copy

    def begin(self, job: Job) -> None:
        """Let an update begin once what it comes after is done."""
        self.jobs.append(job)

    def until(self, items: Iterable[Copy | Job]) -> None:
        """Go on until all items have ended."""
        for item in items:
            while item.end < 0:
                self._advance()

    def until_read(self, job: Job) -> None:
        """Go on until a job has read its gradient; someone waits for it."""
        job.urgent = True
        while job.read < 0:
            self._advance()

    def drain(self) -> None:
        """Go on until nothing is left."""
        self.until([*self.lanes["h2d"], *self.lanes["d2h"], *self.jobs])

    def _head(self, lane: str) -> Copy | None:
        """The lane's copy that is at work now, if any; items without bytes end at once."""
        items = self.lanes[lane]
        while items:
            item = items[0]
            if item.start < 0:
                if item.waits:
                    if any(job.end < 0 for job in item.waits):
                        return None
                    item.cleared = max(job.end for job in item.waits)
                    item.waits = ()
                if item.issued < 0:
                    item.issued = self.now
                if item.ready > self.now + EPSILON:
                    return None
                item.start = self.now
                if item.nbytes:
                    rate = self.machine.h2d if lane == "h2d" else self.machine.d2h
                    item.left += self.machine.copy_latency * rate
            if item.nbytes:
                return item
            item.end = self.now
            items.popleft()
        return None

    def _ready(self) -> list[Job]:
        """Jobs that may be taken, first those that are taken first."""
        found = [job for job in self.jobs if not job.after or all(copy.end >= 0 for copy in job.after)]
        if len(found) > 1:
            found.sort(key=lambda job: (not job.urgent, job.order))
        return found

    def _advance(self) -> None:
        """Go on to the next event."""
        queued = sum(map(len, self.lanes.values()))
        coming, going = self._head("h2d"), self._head("d2h")
        ended = queued - sum(map(len, self.lanes.values()))  # items without bytes
        ready = self._ready()
        in_place = next((job for job in ready if job.resident), None)
        streamed = [job for job in ready if not job.resident]
        front = streamed[0] if streamed else None
        host = front is not None and self.where != "device"
        device = front is not None and self.where != "host" and in_place is None
        if not host and not device:
            front = None
        rates = self._rates(coming is not None, going.kind if going else None, host, device)
        updating = rates.host + rates.device
        span = self._next(coming, going, in_place, front, rates, updating)
        if span is None:
            assert ended, "the lanes wait for each other"
            return
        span = self._read(streamed, updating, span)
        if in_place is not None and in_place.start < 0:
            in_place.start = self.now
        self.now += span
        self._move(coming, "h2d", rates.h2d * span, span)
        self._move(going, "d2h", rates.d2h * span, span)
        if in_place is not None:
            self.busy["device"] += span
            self._update(in_place, 0.0, rates.in_place * span)
        if front is not None:
            self._stream(front, rates, span)
        self.jobs = [job for job in self.jobs if job.end < 0]

    def _rates(self, fetch: bool, out: Kind | None, host: bool, device: bool) -> Rates:
        key = fetch, out, host, device
        if key not in self._known:
            self._known[key] = Rates(self.machine, *key, self._moved, self._grad)
        return self._known[key]

    def _next(
        self, coming: Copy | None, going: Copy | None, in_place: Job | None, front: Job | None, rates: Rates,
        updating: float,
    ) -> float | None:  # fmt: skip
        """Seconds until the first of what is at work ends, or something that waits for its time begins; None if there
        is neither."""
        spans = []
        for head, lane, rate in ((coming, "h2d", rates.h2d), (going, "d2h", rates.d2h)):
            if head is not None:
                spans.append(head.left / rate)
            elif self.lanes[lane] and not self.lanes[lane][0].waits:
                spans.append(self.lanes[lane][0].ready - self.now)
        if in_place is not None:
            spans.append(in_place.left / rates.in_place)
        if front is not None:
            spans.append(front.left / updating)
        return max(min(spans), 0.0) if spans else None

    def _read(self, streamed: list[Job], updating: float, span: float) -> float:
        """Note which jobs have all of their gradient in the ring, and shorten the span to when the next one has."""
        ahead = 0.0
        ring = self._ring if self.where != "device" else 0.0
        for job in streamed if updating else ():
            ahead += job.left
            if job.read >= 0:
                continue
            if job.start < 0:
                job.start = self.now
            if ahead > ring * (1 + 1e-9):
                return min(span, (ahead - ring) / updating)
            arrived = job.start + job.grad_bytes / self.machine.d2h_both
            if arrived > self.now + EPSILON:
                return min(span, arrived - self.now)
            job.read = self.now
        return span

    def _move(self, copy: Copy | None, lane: str, nbytes: float, span: float) -> None:
        if copy is None:
            return
        self.busy[lane] += span
        copy.left -= nbytes
        if copy.left <= 1e-9 * copy.nbytes:
            copy.end = self.now
            self.moved_bytes[lane] += copy.nbytes
            self.lanes[lane].popleft()

    def _stream(self, job: Job, rates: Rates, span: float) -> None:
        by_host, by_device = rates.host * span, rates.device * span
        if by_host:
            self.busy["host"] += span
        if by_device:
            self.busy["device"] += span
            for lane in ("h2d", "d2h"):
                self.moved_bytes[lane] += self._moved * by_device
        if job.grad_bytes:
            self.moved_bytes["d2h"] += self._grad * by_host
            self.busy["d2h"] += self._grad * by_host / self.machine.d2h_both
        self._update(job, by_host, by_device)

    def _update(self, job: Job, by_host: float, by_device: float) -> None:
        if job.start < 0:
            job.start = self.now
        job.by_host += by_host
        job.by_device += by_device
        job.left -= by_host + by_device
        if job.left <= 1e-9 * job.params:
            job.left, job.end = 0.0, self.now
            if job.read < 0:
                job.read = self.now
