"""The time of a step at the grain of blocks, compiled: oomc.timeline and oomc.contention on plain arrays.

The same lanes, rates and rules as there, with one node a block and phase instead of one a workset; some 50 microseconds
for eight blocks, so that a search can afford to ask thousands of times. Words of oomc.quick.Instance name the arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from oomc.contention import EPSILON, HOST_BYTES, LEAST

# kinds of gradients: taken by updates from where they lie, kept for the norm, summed, none
UPDATE, KEEP, SUM, FROZEN = 0, 1, 2, 3
HOST, BOTH, DEVICE = 0, 1, 2
STEPS = 3
"""Steps in sequence; the last one counts (as in oomc.timeline)."""
_KEEP_BYTES, _SUM_BYTES = HOST_BYTES["keep"], HOST_BYTES["sum"]

# columns of the table of copies
_LEFT, _BYTES, _READY, _WAITS, _ISSUED, _CLEARED, _START, _END, _KIND = range(9)
# columns of the table of jobs
_JPARAMS, _JLEFT, _JGRAD, _JORDER, _JRES, _JURGENT, _JAFTER, _JSTART, _JREAD, _JEND = range(10)
# places in the vector of the machine's rates
(
    _H2D, _D2H, _H2D_BOTH, _D2H_BOTH, _TRAFFIC, _HOST, _UPDATE_RATE, _UPDATE_BYTES, _STREAMED, _BOTH_RATE, _BANDWIDTH,
    _LATENCY, _RING, _MOVED, _GRAD,
) = range(15)  # fmt: skip


@njit(cache=True)
def _rates(m: Any, where: int, fetch: bool, out: int, host: bool, device: bool, rates: Any) -> None:
    """oomc.contention.Rates: h2d, d2h, host, device and in place, into `rates`. `out`: -1 nothing, else its kind."""
    moved, grad = m[_MOVED], m[_GRAD]
    touched = grad + 2 * moved
    alone = m[_UPDATE_RATE] * m[_UPDATE_BYTES] / touched
    flow = min(1.0, grad * alone / m[_D2H_BOTH]) if host else 0.0
    busy_in = 1.0 if fetch or device else 0.0
    busy_out = 1.0 if out >= 0 or device else flow
    link_in = m[_H2D] - (m[_H2D] - m[_H2D_BOTH]) * busy_out
    link_out = m[_D2H] - (m[_D2H] - m[_D2H_BOTH]) * busy_in
    by_device = 0.0
    if device:
        share_in = link_in / 2 if fetch else link_in
        share_out = link_out / 2 if out >= 0 else link_out
        by_device = min(m[_STREAMED] * 12.0 / moved, share_in / moved, share_out / moved)
    into = link_in - moved * by_device if fetch else 0.0
    leave = max(link_out - moved * by_device - flow * m[_D2H_BOTH], LEAST * m[_D2H]) if out >= 0 else 0.0
    behind = _KEEP_BYTES if out == KEEP else _SUM_BYTES if out == SUM else 0.0
    traffic = (into + 2 * moved * by_device) * m[_TRAFFIC] + leave * (m[_TRAFFIC] + behind)
    if traffic > m[_HOST]:
        slower = m[_HOST] / traffic
        into, leave, by_device = slower * into, slower * leave, slower * by_device
        traffic = m[_HOST]
    by_host = 0.0
    if host:
        left = (m[_HOST] - traffic) / (touched + grad * m[_TRAFFIC])
        by_host = max(min(alone, left), LEAST * alone)
        both = m[_BOTH_RATE] * m[_UPDATE_BYTES] / touched
        if device and by_host + by_device > both:
            slower = both / (by_host + by_device)
            by_host, by_device = slower * by_host, slower * by_device
    rates[0], rates[1], rates[2], rates[3], rates[4] = into, leave, by_host, by_device, m[_BANDWIDTH] / touched


@njit(cache=True)
def _head(lane: int, m: Any, now: float, copies: Any, queue: Any, ends: Any, jobs: Any, pending: Any) -> int:
    """The lane's copy that is at work now, or -1; items without bytes end at once."""
    while ends[lane, 0] < ends[lane, 1]:
        item = queue[lane, ends[lane, 0]]
        c = copies[item]
        if c[_START] < 0:
            if c[_WAITS] >= 0:
                slab = int(c[_WAITS])
                latest = -1.0
                for k in range(pending[slab, 0]):
                    end = jobs[pending[slab, 1 + k], _JEND]
                    if end < 0:
                        return -1
                    latest = max(latest, end)
                c[_CLEARED] = latest
                pending[slab, 0] = 0
                c[_WAITS] = -1
            if c[_ISSUED] < 0:
                c[_ISSUED] = now
            if c[_READY] > now + EPSILON:
                return -1
            c[_START] = now
            if c[_BYTES] > 0:
                c[_LEFT] += m[_LATENCY] * (m[_H2D] if lane == 0 else m[_D2H])
        if c[_BYTES] > 0:
            return int(item)
        c[_END] = now
        ends[lane, 0] += 1
    return -1


@njit(cache=True)
def _advance(
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
        after = int(jobs[j, _JAFTER])
        if after >= 0 and copies[after, _END] < 0:
            continue
        best = in_place if jobs[j, _JRES] > 0 else front
        if best >= 0:
            a = (1 - jobs[j, _JURGENT]) * 1e6 + jobs[j, _JORDER]
            b = (1 - jobs[best, _JURGENT]) * 1e6 + jobs[best, _JORDER]
            if a >= b:
                continue
        if jobs[j, _JRES] > 0:
            in_place = j
        else:
            front = j
    host = front >= 0 and where != DEVICE
    device = front >= 0 and where != HOST and in_place < 0
    if not host and not device:
        front = -1
    _rates(m, where, coming >= 0, int(copies[going, _KIND]) if going >= 0 else -1, host, device, rates)
    updating = rates[2] + rates[3]
    span = 1e30
    for lane in range(2):
        head = coming if lane == 0 else going
        if head >= 0:
            span = min(span, copies[head, _LEFT] / rates[lane])
        elif ends[lane, 0] < ends[lane, 1]:
            first = queue[lane, ends[lane, 0]]
            if copies[first, _WAITS] < 0:
                span = min(span, copies[first, _READY] - now)
    if in_place >= 0:
        span = min(span, jobs[in_place, _JLEFT] / rates[4])
    if front >= 0:
        span = min(span, jobs[front, _JLEFT] / updating)
    if span > 1e29:
        return bool(ends[0, 0] + ends[1, 0] > queued)
    span = max(span, 0.0)
    if front >= 0:
        # which jobs have all of their gradient in the ring: by priority, the front first
        ring = m[_RING] if where != DEVICE else 0.0
        ahead = 0.0
        last = -1.0
        while True:
            best, least = -1, 1e30
            for k in range(count):
                j = active[k]
                after = int(jobs[j, _JAFTER])
                if jobs[j, _JRES] > 0 or (after >= 0 and copies[after, _END] < 0):
                    continue
                key = (1 - jobs[j, _JURGENT]) * 1e6 + jobs[j, _JORDER] + 1e-4 * k
                if last < key < least:
                    best, least = j, key
            if best < 0:
                break
            last = least
            ahead += jobs[best, _JLEFT]
            if jobs[best, _JREAD] >= 0:
                continue
            if jobs[best, _JSTART] < 0:
                jobs[best, _JSTART] = now
            if ahead > ring * (1 + 1e-9):
                span = min(span, (ahead - ring) / updating)
                break
            arrived = jobs[best, _JSTART] + jobs[best, _JGRAD] / m[_D2H_BOTH]
            if arrived > now + EPSILON:
                span = min(span, arrived - now)
                break
            jobs[best, _JREAD] = now
    now += span
    clock[0] = now
    for lane in range(2):
        head = coming if lane == 0 else going
        if head >= 0:
            clock[2 + lane] += span
            copies[head, _LEFT] -= rates[lane] * span
            if copies[head, _LEFT] <= 1e-9 * copies[head, _BYTES]:
                copies[head, _END] = now
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
        if jobs[j, _JSTART] < 0:
            jobs[j, _JSTART] = now - EPSILON
        jobs[j, _JLEFT] -= rate * span
        if jobs[j, _JLEFT] <= 1e-9 * jobs[j, _JPARAMS]:
            jobs[j, _JLEFT], jobs[j, _JEND] = 0.0, now
            if jobs[j, _JREAD] < 0:
                jobs[j, _JREAD] = now
    kept = 0
    for k in range(count):
        if jobs[active[k], _JEND] < 0:
            active[kept] = active[k]
            kept += 1
    clock[1] = kept
    return True


@njit(cache=True)
def stretches(n: int, uses: Any, uses_back: Any, resident: Any, level: Any, found: Any) -> int:
    """Stretches of use of streamed slabs as rows (slab, first position, last position); positions count blocks there
    and back. Two are one where no other slab comes into use between."""
    count = 0
    width = uses.shape[1]
    for position in range(2 * n):
        block = position if position < n else 2 * n - 1 - position
        for k in range(width):
            slab = uses[block, k] if position < n else uses_back[block, level[block], k]
            if slab < 0 or resident[slab]:
                continue
            if count and found[count - 1, 0] == slab:
                found[count - 1, 2] = position
                continue
            found[count, 0], found[count, 1], found[count, 2] = slab, position, position
            count += 1
    return count


@njit(cache=True)
def assign_slots(count: int, found: Any, weight: Any, prefetch: int, slot_of: Any, sizes: Any) -> int:
    """Best fit of every stretch's slot in program order (oomc.passes.schedule); returns how many slots there are."""
    slots = 0
    free = np.zeros(count + 1, np.bool_)
    nearest = 0
    released = 0
    for target in range(count):
        # what ended before this stretch begins is released by now
        while released < target and found[released, 2] < found[target, 1]:
            free[slot_of[released]] = True
            released += 1
        until = min(count, target + prefetch + 1)
        while nearest < until:
            need = weight[found[nearest, 0]]
            best = -1
            largest = -1
            for s in range(slots):
                if free[s]:
                    if sizes[s] >= need and (best < 0 or sizes[s] < sizes[best]):
                        best = s
                    if largest < 0 or sizes[s] > sizes[largest]:
                        largest = s
            if best < 0:
                if largest >= 0:
                    best = largest
                    sizes[best] = need
                else:
                    best = slots
                    sizes[best] = need
                    slots += 1
            free[best] = False
            slot_of[nearest] = best
            nearest += 1
    return slots


@njit(cache=True)
def step_seconds(
    m: Any, n: int, fwd: Any, bwd: Any, uses: Any, uses_back: Any, weight: Any, order: Any, kind: Any,
    part_slab: Any, part_params: Any, part_bytes: Any, inner: Any, bound: Any,
    level: Any, bound_off: Any, resident: Any, prefetch: int, hold: int, where: int, accumulate: bool, out: Any,
) -> None:  # fmt: skip
    """The steady step's seconds, and those that compute, h2d, d2h, host and device work, into `out`.

    Args:
        m: rates of the machine.
        inner: bytes of a block's own values that go to the host, by level.
        bound: bytes of its values for others, which go there where `bound_off` says so.
        out: seconds of the step, of compute, of h2d, d2h, host and device.
    """
    slabs = weight.shape[0]
    width = part_slab.shape[1]
    most = STEPS * (2 * n * (2 * uses.shape[1] + width) + 6 * n + 4)
    copies = np.empty((most, 9))
    queue = np.empty((2, most), np.int64)
    ends = np.zeros((2, 2), np.int64)
    jobs = np.empty((STEPS * (n * width + slabs) + 1, 10))
    active = np.empty(jobs.shape[0], np.int64)
    pending = np.zeros((slabs, 2 + STEPS * n), np.int64)
    leaving = np.full((2, n, width), -1, np.int64)  # this step's and the step before's, by block: job, or copy - 2
    leaving_kind = np.zeros((2, n, width), np.int64)
    clock = np.zeros(6)
    rates = np.empty(5)
    found = np.empty((2 * n * uses.shape[1] + 1, 3), np.int64)
    many = stretches(n, uses, uses_back, resident, level, found)
    slot_of = np.zeros(many + 1, np.int64)
    sizes = np.zeros(many + 1)
    slots = assign_slots(many, found, weight, prefetch, slot_of, sizes)
    slot_free = np.zeros(slots + 1)
    fetched = np.empty(many + 1, np.int64)
    behind = np.empty(many + 1, np.int64)
    stored = np.full((2, n), -1, np.int64)  # inner, boundary
    back = np.full((2, n), -1, np.int64)
    kept = np.empty(n * width + slabs, np.int64)
    # blocks with gradients, in the order of the backward
    givers = np.empty(n, np.int64)
    place = np.full(n, -1, np.int64)
    giving = 0
    for b in range(n - 1, -1, -1):
        if part_slab[b, 0] >= 0:
            place[b] = giving
            givers[giving] = b
            giving += 1
    sum_left = np.zeros(slabs, np.int64)
    sum_params = np.zeros(slabs)
    compute = issue = began = 0.0
    ncopies = njobs = 0
    work = 0.0
    busy = np.zeros(6)
    first = np.empty(slabs, np.bool_)
    for step in range(STEPS):
        began = compute
        work = 0.0
        busy[:] = clock
        current, before = step % 2, 1 - step % 2
        leaving[current, :, :] = -1
        first[:] = True
        nkept = 0
        issued_fetch = 0
        begun = ended = 0
        sum_left[:] = 0
        sum_params[:] = 0.0
        for b in range(n):
            for k in range(width):
                if part_slab[b, k] >= 0 and (kind[part_slab[b, k]] == SUM or accumulate):
                    sum_left[part_slab[b, k]] += 1
        for position in range(2 * n):
            ahead = position < n
            b = position if ahead else 2 * n - 1 - position
            # stretches that begin here: fetches that are due, then the wait
            while begun < many and found[begun, 1] == position:
                until = min(many, begun + prefetch + 1)
                while issued_fetch < until:
                    slab = found[issued_fetch, 0]
                    behind[issued_fetch] = -1
                    if first[slab]:
                        first[slab] = False
                        alive = 0
                        for k in range(pending[slab, 0]):
                            if jobs[pending[slab, 1 + k], _JEND] < 0:
                                pending[slab, 1 + alive] = pending[slab, 1 + k]
                                alive += 1
                        pending[slab, 0] = alive
                        c = copies[ncopies]
                        c[:] = -1.0
                        c[_BYTES] = c[_LEFT] = 0.0
                        c[_READY] = issue
                        if alive:
                            c[_WAITS] = slab
                        behind[issued_fetch] = ncopies
                        queue[0, ends[0, 1]] = ncopies
                        ends[0, 1] += 1
                        ncopies += 1
                    c = copies[ncopies]
                    c[:] = -1.0
                    c[_BYTES] = c[_LEFT] = weight[slab]
                    c[_READY] = max(issue, slot_free[slot_of[issued_fetch]])
                    c[_KIND] = UPDATE
                    fetched[issued_fetch] = ncopies
                    queue[0, ends[0, 1]] = ncopies
                    ends[0, 1] += 1
                    ncopies += 1
                    issued_fetch += 1
                slab = found[begun, 0]
                if ahead:
                    compute, issue = _retire_carried(
                        slab, before, leaving, leaving_kind, part_slab, m, where, clock, copies, queue, ends, jobs,
                        active, pending, rates, compute, issue,
                    )  # fmt: skip
                item = fetched[begun]
                while copies[item, _END] < 0:
                    if not _advance(m, where, clock, copies, queue, ends, jobs, active, pending, rates):
                        out[0] = 1e30
                        return
                compute = max(compute, issue, copies[item, _END])
                issue = max(issue, copies[item, _ISSUED])
                begun += 1
            # slabs on the device wait for their update
            for k in range(uses.shape[1]):
                slab = uses[b, k] if ahead else uses_back[b, level[b], k]
                if slab < 0 or not resident[slab]:
                    continue
                if ahead:
                    compute, issue = _retire_carried(
                        slab, before, leaving, leaving_kind, part_slab, m, where, clock, copies, queue, ends, jobs,
                        active, pending, rates, compute, issue,
                    )  # fmt: skip
                latest = 0.0
                for i in range(pending[slab, 0]):
                    j = pending[slab, 1 + i]
                    while jobs[j, _JEND] < 0:
                        if not _advance(m, where, clock, copies, queue, ends, jobs, active, pending, rates):
                            out[0] = 1e30
                            return
                    latest = max(latest, jobs[j, _JEND])
                pending[slab, 0] = 0
                compute = max(compute, issue, latest)
                issue = max(issue, latest)
            # values: those that must have left, those that begin to come back, those that are needed now
            for kind_of in range(2):
                for j in range(n):
                    if stored[kind_of, j] < 0 and back[kind_of, j] < 0:
                        continue
                    if ahead:
                        goes = min(j + max(prefetch, 1 + kind_of), n - 1)
                        if goes == b and j < b and back[kind_of, j] == -1:
                            item = stored[kind_of, j]
                            if kind_of == 0 or prefetch >= 2:
                                compute, issue = _wait(
                                    item, m, where, clock, copies, queue, ends, jobs, active, pending, rates, compute,
                                    issue,
                                )  # fmt: skip
                                back[kind_of, j] = -2
                    elif min(j + kind_of + prefetch, n - 1) == b and stored[kind_of, j] >= 0:
                        item = stored[kind_of, j]
                        while copies[item, _END] < 0:
                            if not _advance(m, where, clock, copies, queue, ends, jobs, active, pending, rates):
                                out[0] = 1e30
                                return
                        c = copies[ncopies]
                        c[:] = -1.0
                        c[_BYTES] = c[_LEFT] = bound[j] if kind_of else inner[j, level[j]]
                        c[_READY] = max(compute, issue, copies[item, _END])
                        c[_KIND] = UPDATE
                        back[kind_of, j] = ncopies
                        stored[kind_of, j] = -1
                        queue[0, ends[0, 1]] = ncopies
                        ends[0, 1] += 1
                        ncopies += 1
            if not ahead:
                for kind_of in range(2):
                    j = b - kind_of
                    if j >= 0 and back[kind_of, j] >= 0:
                        compute, issue = _wait(
                            back[kind_of, j], m, where, clock, copies, queue, ends, jobs, active, pending, rates,
                            compute, issue,
                        )  # fmt: skip
                        back[kind_of, j] = -1
            # the block computes
            seconds = fwd[b] if ahead else bwd[b, level[b]]
            compute = max(compute, issue) + seconds
            work += seconds
            while ended < many and found[ended, 2] == position and ended < begun:
                slot_free[slot_of[ended]] = max(compute, issue)
                ended += 1
            if ahead:
                for kind_of in range(2):
                    size = 0.0
                    if kind_of == 0:
                        size = inner[b, level[b]]
                    if kind_of == 1 and bound_off[b]:
                        size = bound[b]
                    if size <= 0:
                        continue
                    c = copies[ncopies]
                    c[:] = -1.0
                    c[_BYTES] = c[_LEFT] = size
                    c[_READY] = max(compute, issue)
                    c[_KIND] = UPDATE
                    stored[kind_of, b] = ncopies
                    back[kind_of, b] = -1
                    queue[1, ends[1, 1]] = ncopies
                    ends[1, 1] += 1
                    ncopies += 1
                for kind_of in range(2):  # what goes right after its last use
                    j = b - kind_of
                    if j >= 0 and stored[kind_of, j] >= 0 and back[kind_of, j] == -1:
                        if prefetch == 0 or (kind_of == 1 and prefetch == 1) or j >= n - 1 - kind_of:
                            compute, issue = _wait(
                                stored[kind_of, j], m, where, clock, copies, queue, ends, jobs, active, pending, rates,
                                compute, issue,
                            )  # fmt: skip
                            back[kind_of, j] = -2
                continue
            # gradients: older ones must have gone, then this block's go
            if place[b] >= 0 and hold > 0 and place[b] - hold >= 0:
                old = givers[place[b] - hold]
                for k in range(width):
                    compute, issue = _retire(
                        old, k, current, leaving, leaving_kind, m, where, clock, copies, queue, ends, jobs, active,
                        pending, rates, compute, issue,
                    )  # fmt: skip
            for k in range(width):
                slab = part_slab[b, k]
                if slab < 0:
                    continue
                mode = SUM if accumulate else kind[slab]
                ready = max(compute, issue)
                c = copies[ncopies]
                c[:] = -1.0
                c[_BYTES] = c[_LEFT] = 0.0
                c[_READY] = ready
                c[_KIND] = mode
                if mode == UPDATE or (mode == KEEP and resident[slab]):
                    j = jobs[njobs]
                    j[:] = -1.0
                    j[_JPARAMS] = j[_JLEFT] = part_params[b, k]
                    j[_JGRAD] = 0.0 if resident[slab] else part_bytes[b, k]
                    j[_JORDER], j[_JRES], j[_JURGENT] = order[slab], 1.0 if resident[slab] else 0.0, 0.0
                    j[_JAFTER] = ncopies
                    if mode == UPDATE:
                        active[int(clock[1])] = njobs
                        clock[1] += 1
                        queue[1, ends[1, 1]] = ncopies
                        ends[1, 1] += 1
                        ncopies += 1
                    else:
                        kept[nkept] = njobs
                        nkept += 1
                    pending[slab, 1 + pending[slab, 0]] = njobs
                    pending[slab, 0] += 1
                    leaving[current, b, k] = njobs
                    leaving_kind[current, b, k] = 0 if mode == UPDATE else 2
                    njobs += 1
                else:
                    if not resident[slab]:
                        c[_BYTES] = c[_LEFT] = part_bytes[b, k]
                    queue[1, ends[1, 1]] = ncopies
                    ends[1, 1] += 1
                    leaving[current, b, k] = ncopies
                    leaving_kind[current, b, k] = 1
                    ncopies += 1
                    sum_params[slab] += part_params[b, k]
                    if mode == SUM:
                        sum_left[slab] -= 1
                        if sum_left[slab] == 0 and not accumulate and kind[slab] == SUM:
                            j = jobs[njobs]
                            j[:] = -1.0
                            j[_JPARAMS] = j[_JLEFT] = part_params[b, k]
                            j[_JGRAD] = 0.0
                            j[_JORDER], j[_JRES], j[_JURGENT] = order[slab], 1.0 if resident[slab] else 0.0, 0.0
                            j[_JAFTER] = ncopies - 1
                            active[int(clock[1])] = njobs
                            clock[1] += 1
                            pending[slab, 1 + pending[slab, 0]] = njobs
                            pending[slab, 0] += 1
                            njobs += 1
                if hold == 0:
                    compute, issue = _retire(
                        b, k, current, leaving, leaving_kind, m, where, clock, copies, queue, ends, jobs, active,
                        pending, rates, compute, issue,
                    )  # fmt: skip
        # what may not be carried into the next step
        for b in range(n - 1, -1, -1):
            for k in range(width):
                if leaving[current, b, k] >= 0 and leaving_kind[current, b, k] == 1:
                    compute, issue = _retire(
                        b, k, current, leaving, leaving_kind, m, where, clock, copies, queue, ends, jobs, active,
                        pending, rates, compute, issue,
                    )  # fmt: skip
        norm = False
        for slab in range(slabs):
            norm = norm or (kind[slab] == KEEP and not accumulate)
        if norm:
            c = copies[ncopies]
            c[:] = -1.0
            c[_BYTES] = c[_LEFT] = 0.0
            c[_READY] = max(compute, issue)
            c[_KIND] = KEEP
            queue[1, ends[1, 1]] = ncopies
            ends[1, 1] += 1
            for k in range(nkept):
                jobs[kept[k], _JAFTER] = ncopies
                active[int(clock[1])] = kept[k]
                clock[1] += 1
            for slab in range(slabs):
                if sum_params[slab] > 0 and kind[slab] == KEEP:
                    j = jobs[njobs]
                    j[:] = -1.0
                    j[_JPARAMS] = j[_JLEFT] = sum_params[slab]
                    j[_JGRAD] = 0.0
                    j[_JORDER], j[_JRES], j[_JURGENT] = order[slab], 1.0 if resident[slab] else 0.0, 0.0
                    j[_JAFTER] = ncopies
                    active[int(clock[1])] = njobs
                    clock[1] += 1
                    pending[slab, 1 + pending[slab, 0]] = njobs
                    pending[slab, 0] += 1
                    njobs += 1
            ncopies += 1
        compute = issue = max(compute, issue)
    out[0] = compute - began
    out[1] = work
    for k in range(4):
        out[2 + k] = clock[2 + k] - busy[2 + k]


@njit(cache=True)
def _wait(
    item: int, m: Any, where: int, clock: Any, copies: Any, queue: Any, ends: Any, jobs: Any, active: Any,
    pending: Any, rates: Any, compute: float, issue: float,
) -> Any:  # fmt: skip
    """The compute waits for a copy; when it may go on, and when more may be issued."""
    while copies[item, _END] < 0:
        if not _advance(m, where, clock, copies, queue, ends, jobs, active, pending, rates):
            return 1e30, 1e30
    return max(compute, issue, copies[item, _END]), max(issue, copies[item, _ISSUED])


@njit(cache=True)
def _retire(
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
        return _wait(item, m, where, clock, copies, queue, ends, jobs, active, pending, rates, compute, issue)
    jobs[item, _JURGENT] = 1.0
    while jobs[item, _JREAD] < 0:
        if not _advance(m, where, clock, copies, queue, ends, jobs, active, pending, rates):
            return 1e30, 1e30
    read = jobs[item, _JREAD]
    return max(compute, issue, read), max(issue, read)


@njit(cache=True)
def _retire_carried(
    slab: int, which: int, leaving: Any, leaving_kind: Any, part_slab: Any, m: Any, where: int, clock: Any,
    copies: Any, queue: Any, ends: Any, jobs: Any, active: Any, pending: Any, rates: Any, compute: float, issue: float,
) -> Any:  # fmt: skip
    """The gradients of the step before of a slab must have left."""
    for b in range(part_slab.shape[0]):
        for k in range(part_slab.shape[1]):
            if part_slab[b, k] == slab:
                compute, issue = _retire(
                    b, k, which, leaving, leaving_kind, m, where, clock, copies, queue, ends, jobs, active, pending,
                    rates, compute, issue, True,
                )  # fmt: skip
    return compute, issue


@njit(cache=True)
def device_bytes(
    n: int, fixed: float, staging: float, uses: Any, uses_back: Any, weight: Any, home: Any, kind: Any, part_slab: Any,
    own_grad: Any, device: Any, inner: Any, bound: Any, other: Any, fwd_need: Any, bwd_need: Any,
    bwd_first: Any, bwd_rest: Any, level: Any, bound_off: Any, resident: Any, prefetch: int, hold: int, where: int,
    accumulate: bool,
) -> float:  # fmt: skip
    """The projected device peak in bytes, as oomc.simulate walks the step graph.

    Args:
        fixed: buffers, constants and inputs.
        staging: what updates on the device need, unless the host makes them all.
        home: bytes of a slab with its state on the device.
        own_grad: bytes of a block's gradients.
        device, inner: bytes of a block's own values that wait on the device and on the host, by level.
        bound: bytes of its values for others, where these may leave.
        other: bytes beside all these when a block's forward begins.
        fwd_need, bwd_need: bytes that a block comes to beside what is there before, gradients leaving at once.
        bwd_first, bwd_rest: the same with its gradients held: until the first of them is there, and from then on.
    """
    found = np.empty((2 * n * uses.shape[1] + 1, 3), np.int64)
    many = stretches(n, uses, uses_back, resident, level, found)
    slot_of = np.zeros(many + 1, np.int64)
    sizes = np.zeros(many + 1)
    slots = assign_slots(many, found, weight, prefetch, slot_of, sizes)
    always = fixed
    for s in range(slots):
        always += sizes[s]
    for s in range(weight.shape[0]):
        if resident[s]:
            always += home[s]
    if where != HOST:
        always += staging
    last = n - 1
    givers = np.empty(n, np.int64)
    giving = 0
    for b in range(n - 1, -1, -1):
        if part_slab[b, 0] >= 0:
            givers[giving] = b
            giving += 1
    # gradients that are there when the step begins, by block
    carried = np.zeros(n)
    for i in range(giving):
        b = givers[i]
        slab = part_slab[b, 0]
        if accumulate or kind[slab] == SUM:
            continue
        if (kind[slab] == UPDATE and hold and i + hold >= giving) or (kind[slab] == KEEP and resident[slab]):
            carried[b] = own_grad[b]
    waiting = carried.sum()
    stays = 0.0  # gradients that stay until the norm is known
    peak = waiting
    before = 0.0  # values of earlier blocks on the device
    for b in range(n):
        waiting -= carried[b]
        live = before + other[b] + waiting
        for j in range(max(0, b - max(1, prefetch)), b):
            if inner[j, level[j]] > 0 and prefetch and b < min(j + prefetch, last):
                live += inner[j, level[j]]
            if bound_off[j] and (b == j + 1 or (prefetch >= 2 and b < min(j + prefetch, last))):
                live += bound[j]
        peak = max(peak, live + fwd_need[b, level[b]])
        before += device[b, level[b]] + (0.0 if bound_off[b] else bound[b])
    place = 0
    for b in range(n - 1, -1, -1):
        before -= device[b, level[b]] + (0.0 if bound_off[b] else bound[b])
        live = before + stays
        for j in range(max(0, b - prefetch - 1), b):
            if inner[j, level[j]] > 0 and min(j + prefetch, last) >= b:
                live += inner[j, level[j]]
            if bound_off[j] and (j == b - 1 or min(j + 1 + prefetch, last) >= b):
                live += bound[j]
        if hold == 0:
            peak = max(peak, live + bwd_need[b, level[b]])
        else:
            held = 0.0
            for i in range(max(0, place - hold), place):
                if not (kind[part_slab[givers[i], 0]] == KEEP and resident[part_slab[givers[i], 0]]):
                    held += own_grad[givers[i]]
            peak = max(peak, live + held + bwd_first[b, level[b]])
            if part_slab[b, 0] >= 0 and place >= hold:
                held -= own_grad[givers[place - hold]]
            peak = max(peak, live + held + bwd_rest[b, level[b]])
        if part_slab[b, 0] >= 0:
            place += 1
            if kind[part_slab[b, 0]] == KEEP and resident[part_slab[b, 0]] and not accumulate:
                stays += own_grad[b]
    return always + peak
