"""The lanes but compute in simulated time, compiled: oomc.contention on plain arrays (see oomc.quick_step)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from oomc import contention
from oomc.contention import EPSILON, HOST_BYTES, LARGE_SHARE, LEAST
from oomc.jit import jit

_FILES = (contention.__file__, *(str(Path(__file__).with_name(f"quick_{x}.py")) for x in ("lanes", "memory", "step")))


def njit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of the quick model: of this file, oomc.quick_memory or oomc.quick_step."""
    return jit(function, *_FILES)


# kinds of gradients: taken by updates from where they lie, kept for the norm, summed, none
UPDATE, KEEP, SUM, FROZEN = 0, 1, 2, 3
HOST, BOTH, DEVICE = 0, 1, 2
STEPS = 3
"""Most steps in sequence; the last one counts (as in oomc.timeline)."""
SAME = 1e-9
"""The relative difference up to which two steps are taken to have left the same under way."""
KEEP_BYTES, SUM_BYTES = HOST_BYTES["keep"], HOST_BYTES["sum"]

# columns of the table of copies
LEFT, BYTES, READY, WAITS, ISSUED, CLEARED, START, END, KIND = range(9)
# columns of the table of jobs
JPARAMS, JLEFT, JGRAD, JORDER, JRES, JURGENT, JAFTER, JSTART, JREAD, JEND = range(10)
# places in the vector of the machine's rates
(
    H2D, D2H, H2D_BOTH, D2H_BOTH, TRAFFIC, HOST_RATE, UPDATE_RATE, UPDATE_BYTES, STREAMED, BOTH_RATE, BANDWIDTH,
    LATENCY, RING, RING_BOTH, MOVED, GRAD, MIXED_RATE,
) = range(17)  # fmt: skip


@njit
def _rates(m: Any, where: int, fetch: bool, out: int, host: bool, device: bool, rates: Any) -> None:
    """oomc.contention.Rates: h2d, d2h, host, device and in place, into `rates`. `out`: -1 nothing, else its kind."""
    moved, grad = m[MOVED], m[GRAD]
    touched = grad + 2 * moved
    alone = m[UPDATE_RATE] * m[UPDATE_BYTES] / touched
    flow = min(1.0, grad * alone / m[D2H_BOTH]) if host else 0.0
    busy_in = 1.0 if fetch or device else 0.0
    busy_out = 1.0 if out >= 0 or device else flow
    link_in = m[H2D] - (m[H2D] - m[H2D_BOTH]) * busy_out
    link_out = m[D2H] - (m[D2H] - m[D2H_BOTH]) * busy_in
    by_device = 0.0
    if device:
        share_in = (1 - LARGE_SHARE) * link_in if fetch else link_in
        share_out = (1 - LARGE_SHARE) * link_out if out >= 0 else link_out
        by_device = min(m[STREAMED] * 12.0 / moved, share_in / moved, share_out / moved)
    into = link_in - moved * by_device if fetch else 0.0
    leave = max(link_out - moved * by_device - flow * m[D2H_BOTH], LEAST * m[D2H]) if out >= 0 else 0.0
    behind = KEEP_BYTES if out == KEEP else SUM_BYTES if out == SUM else 0.0
    traffic = (into + 2 * moved * by_device) * m[TRAFFIC] + leave * (m[TRAFFIC] + behind)
    bandwidth = m[MIXED_RATE] if host and device else m[HOST_RATE]
    if traffic > bandwidth:
        slower = bandwidth / traffic
        into, leave, by_device = slower * into, slower * leave, slower * by_device
        traffic = bandwidth
    by_host = 0.0
    if host:
        left = (bandwidth - traffic) / (touched + grad * m[TRAFFIC])
        by_host = max(min(alone, left), LEAST * alone)
        both = m[BOTH_RATE] * m[UPDATE_BYTES] / touched
        if device and by_host + by_device > both:
            slower = both / (by_host + by_device)
            by_host, by_device = slower * by_host, slower * by_device
    rates[0], rates[1], rates[2], rates[3], rates[4] = into, leave, by_host, by_device, m[BANDWIDTH] / touched


@njit
def _head(lane: int, m: Any, now: float, copies: Any, queue: Any, ends: Any, jobs: Any, pending: Any) -> int:
    """The lane's copy that is at work now, or -1; items without bytes end at once."""
    while ends[lane, 0] < ends[lane, 1]:
        item = queue[lane, ends[lane, 0]]
        c = copies[item]
        if c[START] < 0:
            if c[WAITS] >= 0:
                slab = int(c[WAITS])
                latest = -1.0
                for k in range(pending[slab, 0]):
                    end = jobs[pending[slab, 1 + k], JEND]
                    if end < 0:
                        return -1
                    latest = max(latest, end)
                c[CLEARED] = latest
                pending[slab, 0] = 0
                c[WAITS] = -1
            if c[ISSUED] < 0:
                c[ISSUED] = now
            if c[READY] > now + EPSILON:
                return -1
            c[START] = now
            if c[BYTES] > 0:
                c[LEFT] += m[LATENCY] * (m[H2D] if lane == 0 else m[D2H])
        if c[BYTES] > 0:
            return int(item)
        c[END] = now
        ends[lane, 0] += 1
    return -1


@njit
def advance(
    m: Any, where: int, clock: Any, copies: Any, queue: Any, ends: Any, jobs: Any, active: Any, pending: Any, rates: Any
) -> bool:
    """Go on to the next event. clock: now, number of active jobs, busy h2d, d2h, host, device. False: a deadlock."""
    now = clock[0]
    queued = ends[0, 0] + ends[1, 0]
    coming = _head(0, m, now, copies, queue, ends, jobs, pending)
    going = _head(1, m, now, copies, queue, ends, jobs, pending)
    count = int(clock[1])
    in_place = front = -1
    for k in range(count):
        j = active[k]
        after = int(jobs[j, JAFTER])
        if after >= 0 and copies[after, END] < 0:
            continue
        best = in_place if jobs[j, JRES] > 0 else front
        if best >= 0:
            a = (1 - jobs[j, JURGENT]) * 1e6 + jobs[j, JORDER]
            b = (1 - jobs[best, JURGENT]) * 1e6 + jobs[best, JORDER]
            if a >= b:
                continue
        if jobs[j, JRES] > 0:
            in_place = j
        else:
            front = j
    host = front >= 0 and where != DEVICE
    device = front >= 0 and where != HOST and in_place < 0
    if not host and not device:
        front = -1
    _rates(m, where, coming >= 0, int(copies[going, KIND]) if going >= 0 else -1, host, device, rates)
    updating = rates[2] + rates[3]
    span = 1e30
    for lane in range(2):
        head = coming if lane == 0 else going
        if head >= 0:
            span = min(span, copies[head, LEFT] / rates[lane])
        elif ends[lane, 0] < ends[lane, 1]:
            first = queue[lane, ends[lane, 0]]
            if copies[first, WAITS] < 0:
                span = min(span, copies[first, READY] - now)
    if in_place >= 0:
        span = min(span, jobs[in_place, JLEFT] / rates[4])
    if front >= 0:
        span = min(span, jobs[front, JLEFT] / updating)
    if span > 1e29:
        return bool(ends[0, 0] + ends[1, 0] > queued)
    span = max(span, 0.0)
    if front >= 0:
        # which jobs have all of their gradient in the ring: by priority, the front first
        ring = 0.0 if where == DEVICE else m[RING_BOTH] if where == BOTH else m[RING]
        ahead = 0.0
        last = -1.0
        while True:
            best, least = -1, 1e30
            for k in range(count):
                j = active[k]
                after = int(jobs[j, JAFTER])
                if jobs[j, JRES] > 0 or (after >= 0 and copies[after, END] < 0):
                    continue
                key = (1 - jobs[j, JURGENT]) * 1e6 + jobs[j, JORDER] + 1e-4 * k
                if last < key < least:
                    best, least = j, key
            if best < 0:
                break
            last = least
            ahead += jobs[best, JLEFT]
            if jobs[best, JREAD] >= 0:
                continue
            if jobs[best, JSTART] < 0:
                jobs[best, JSTART] = now
            if ahead > ring * (1 + 1e-9):
                span = min(span, (ahead - ring) / updating)
                break
            arrived = jobs[best, JSTART] + jobs[best, JGRAD] / m[D2H_BOTH]
            if arrived > now + EPSILON:
                span = min(span, arrived - now)
                break
            jobs[best, JREAD] = now
    now += span
    clock[0] = now
    for lane in range(2):
        head = coming if lane == 0 else going
        if head >= 0:
            clock[2 + lane] += span
            copies[head, LEFT] -= rates[lane] * span
            if copies[head, LEFT] <= 1e-9 * copies[head, BYTES]:
                copies[head, END] = now
                ends[lane, 0] += 1
    for side in range(2):
        j = in_place if side == 0 else front
        if j < 0:
            continue
        rate = rates[4] if side == 0 else updating
        if side == 0 or rates[3] > 0:
            clock[5] += span
        if side == 1 and rates[2] > 0:
            clock[4] += span
        if jobs[j, JSTART] < 0:
            jobs[j, JSTART] = now - EPSILON
        jobs[j, JLEFT] -= rate * span
        if jobs[j, JLEFT] <= 1e-9 * jobs[j, JPARAMS]:
            jobs[j, JLEFT], jobs[j, JEND] = 0.0, now
            if jobs[j, JREAD] < 0:
                jobs[j, JREAD] = now
    kept = 0
    for k in range(count):
        if jobs[active[k], JEND] < 0:
            active[kept] = active[k]
            kept += 1
    clock[1] = kept
    return True


@njit
def wait(
    item: int, m: Any, where: int, clock: Any, copies: Any, queue: Any, ends: Any, jobs: Any, active: Any,
    pending: Any, rates: Any, compute: float, issue: float,
) -> Any:  # fmt: skip
    """The compute waits for a copy; when it may go on, and when more may be issued."""
    while copies[item, END] < 0:
        if not advance(m, where, clock, copies, queue, ends, jobs, active, pending, rates):
            return 1e30, 1e30
    return max(compute, issue, copies[item, END]), max(issue, copies[item, ISSUED])


@njit
def retire(
    b: int, k: int, which: int, leaving: Any, leaving_kind: Any, m: Any, where: int, clock: Any, copies: Any,
    queue: Any, ends: Any, jobs: Any, active: Any, pending: Any, rates: Any, compute: float, issue: float,
    carried: bool = False,
) -> Any:  # fmt: skip
    """The compute waits until gradients have left; what is kept on the device only when it is `carried`."""
    item = leaving[which, b, k]
    if item < 0 or (leaving_kind[which, b, k] == 2 and not carried):
        return compute, issue
    leaving[which, b, k] = -1
    if leaving_kind[which, b, k] == 1:
        return wait(item, m, where, clock, copies, queue, ends, jobs, active, pending, rates, compute, issue)
    jobs[item, JURGENT] = 1.0
    while jobs[item, JREAD] < 0:
        if not advance(m, where, clock, copies, queue, ends, jobs, active, pending, rates):
            return 1e30, 1e30
    read = jobs[item, JREAD]
    return max(compute, issue, read), max(issue, read)


@njit
def retire_carried(
    slab: int, which: int, leaving: Any, leaving_kind: Any, parts: Any, given: Any, m: Any, where: int, clock: Any,
    copies: Any, queue: Any, ends: Any, jobs: Any, active: Any, pending: Any, rates: Any, compute: float, issue: float,
) -> Any:  # fmt: skip
    """The gradients of the step before of a slab must have left; `parts` of blocks' gradients are its."""
    for i in range(given[slab]):
        compute, issue = retire(
            parts[slab, i, 0], parts[slab, i, 1], which, leaving, leaving_kind, m, where, clock, copies, queue, ends,
            jobs, active, pending, rates, compute, issue, True,
        )  # fmt: skip
    return compute, issue


@njit
def under_way(
    compute: float, clock: Any, copies: Any, queue: Any, ends: Any, jobs: Any, active: Any, left: Any
) -> None:  # fmt: skip
    """What is under way when a step's compute is done, as six sums in `left` that tell one state from another.

    What a job waits for, a copy's kind and when a job began follow from these: each step gives the same ones, in order.
    """
    left[0] = 1.0 + compute - clock[0]
    left[1] = 1.0 + clock[1]
    left[2:] = 1.0
    for k in range(int(clock[1])):
        j = jobs[active[k]]
        left[2] += (k + 1) * j[JLEFT]
        flags = 1 + j[JURGENT] + 2 * j[JRES] + 4 * (j[JREAD] >= 0) + 8 * (j[JSTART] >= 0)
        left[3] += (k + 1) * (1 + j[JORDER]) * flags
    for lane in range(2):
        for i in range(ends[lane, 0], ends[lane, 1]):
            c = copies[queue[lane, i]]
            place = i - ends[lane, 0] + 1 + 1000 * lane
            left[4] += place * (1 + c[LEFT])
            left[5] += place * (1 + compute - c[READY])
