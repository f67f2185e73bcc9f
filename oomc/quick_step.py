"""The time of a step at the grain of blocks, compiled: oomc.timeline on plain arrays.

The same lanes, rates and rules as there and in oomc.contention, with one node a block and phase instead of one a
workset; some 50 microseconds for eight blocks, so that a search can afford to ask thousands of times. Words of
oomc.quick.Instance name the arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from oomc.quick_lanes import (
    BYTES,
    END,
    ISSUED,
    JAFTER,
    JEND,
    JGRAD,
    JLEFT,
    JORDER,
    JPARAMS,
    JRES,
    JURGENT,
    KEEP,
    KIND,
    LEFT,
    READY,
    SAME,
    STEPS,
    SUM,
    UPDATE,
    WAITS,
    advance,
    njit,
    retire,
    retire_carried,
    under_way,
    wait,
)
from oomc.quick_memory import assign_slots, stretches


@njit
def step_seconds(
    m: Any, n: int, fwd: Any, bwd: Any, uses: Any, uses_back: Any, weight: Any, order: Any, kind: Any,
    part_slab: Any, part_params: Any, part_bytes: Any, inner: Any, bound: Any,
    level: Any, bound_off: Any, resident: Any, prefetch: int, hold: int, where: int, accumulate: bool, out: Any,
) -> None:  # fmt: skip
    """The steady step's seconds, and those that compute, h2d, d2h, host and device work, into `out`.

    Beside what oomc.quick.Instance and Decisions say:

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
    given = np.zeros(slabs, np.int64)  # how many parts of gradients are each slab's
    most_given = 0
    for b in range(n):
        for k in range(width):
            if part_slab[b, k] >= 0:
                given[part_slab[b, k]] += 1
                most_given = max(most_given, given[part_slab[b, k]])
    parts = np.empty((slabs, most_given, 2), np.int64)  # which ones, in order
    given[:] = 0
    for b in range(n):
        for k in range(width):
            slab = part_slab[b, k]
            if slab >= 0:
                parts[slab, given[slab], 0], parts[slab, given[slab], 1] = b, k
                given[slab] += 1
    pending = np.zeros((slabs, 2 + STEPS * (most_given + 1)), np.int64)
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
    holder = np.empty(slots, np.int64)  # the stretch that uses each slot, or used it last
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
    left, left_before = np.full(6, -1.0), np.empty(6)
    for step in range(STEPS):
        began = compute
        work = 0.0
        busy[:] = clock
        current, before = step % 2, 1 - step % 2
        leaving[current, :, :] = -1
        first[:] = True
        nkept = 0
        issued_fetch = 0
        begun = 0
        holder[:] = -1
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
                            if jobs[pending[slab, 1 + k], JEND] < 0:
                                pending[slab, 1 + alive] = pending[slab, 1 + k]
                                alive += 1
                        pending[slab, 0] = alive
                        c = copies[ncopies]
                        c[:] = -1.0
                        c[BYTES] = c[LEFT] = 0.0
                        c[READY] = issue
                        if alive:
                            c[WAITS] = slab
                        behind[issued_fetch] = ncopies
                        queue[0, ends[0, 1]] = ncopies
                        ends[0, 1] += 1
                        ncopies += 1
                    c = copies[ncopies]
                    c[:] = -1.0
                    c[BYTES] = c[LEFT] = weight[slab]
                    c[READY] = max(issue, slot_free[slot_of[issued_fetch]])
                    c[KIND] = UPDATE
                    fetched[issued_fetch] = ncopies
                    queue[0, ends[0, 1]] = ncopies
                    ends[0, 1] += 1
                    ncopies += 1
                    issued_fetch += 1
                slab = found[begun, 0]
                if ahead:
                    compute, issue = retire_carried(
                        slab, before, leaving, leaving_kind, parts, given, m, where, clock, copies, queue, ends, jobs,
                        active, pending, rates, compute, issue,
                    )  # fmt: skip
                item = fetched[begun]
                while copies[item, END] < 0:
                    if not advance(m, where, clock, copies, queue, ends, jobs, active, pending, rates):
                        out[0] = 1e30
                        return
                compute = max(compute, issue, copies[item, END])
                issue = max(issue, copies[item, ISSUED])
                holder[slot_of[begun]] = begun
                begun += 1
            # slabs on the device wait for their update
            for k in range(uses.shape[1]):
                slab = uses[b, k] if ahead else uses_back[b, level[b], k]
                if slab < 0 or not resident[slab]:
                    continue
                if ahead:
                    compute, issue = retire_carried(
                        slab, before, leaving, leaving_kind, parts, given, m, where, clock, copies, queue, ends, jobs,
                        active, pending, rates, compute, issue,
                    )  # fmt: skip
                latest = 0.0
                for i in range(pending[slab, 0]):
                    j = pending[slab, 1 + i]
                    while jobs[j, JEND] < 0:
                        if not advance(m, where, clock, copies, queue, ends, jobs, active, pending, rates):
                            out[0] = 1e30
                            return
                    latest = max(latest, jobs[j, JEND])
                pending[slab, 0] = 0
                compute = max(compute, issue, latest)
                issue = max(issue, latest)
            # values: those that must have left, those that begin to come back, those that are needed now
            for kind_of in range(2):
                # values leave and come back within so many blocks of their own; at the last block too, whose turn is
                # that of all which would be later
                near = max(prefetch, 1 + kind_of) if ahead else prefetch + kind_of
                for j in range(max(0, b - near), b + 1):
                    if stored[kind_of, j] < 0 and back[kind_of, j] < 0:
                        continue
                    if ahead:
                        goes = min(j + max(prefetch, 1 + kind_of), n - 1)
                        if goes == b and j < b and back[kind_of, j] == -1:
                            item = stored[kind_of, j]
                            if kind_of == 0 or prefetch >= 2:
                                compute, issue = wait(
                                    item, m, where, clock, copies, queue, ends, jobs, active, pending, rates, compute,
                                    issue,
                                )  # fmt: skip
                                back[kind_of, j] = -2
                    elif min(j + kind_of + prefetch, n - 1) == b and stored[kind_of, j] >= 0:
                        item = stored[kind_of, j]
                        while copies[item, END] < 0:
                            if not advance(m, where, clock, copies, queue, ends, jobs, active, pending, rates):
                                out[0] = 1e30
                                return
                        c = copies[ncopies]
                        c[:] = -1.0
                        c[BYTES] = c[LEFT] = bound[j] if kind_of else inner[j, level[j]]
                        c[READY] = max(compute, issue, copies[item, END])
                        c[KIND] = UPDATE
                        back[kind_of, j] = ncopies
                        stored[kind_of, j] = -1
                        queue[0, ends[0, 1]] = ncopies
                        ends[0, 1] += 1
                        ncopies += 1
            if not ahead:
                for kind_of in range(2):
                    j = b - kind_of
                    if j >= 0 and back[kind_of, j] >= 0:
                        compute, issue = wait(
                            back[kind_of, j], m, where, clock, copies, queue, ends, jobs, active, pending, rates,
                            compute, issue,
                        )  # fmt: skip
                        back[kind_of, j] = -1
            # the block computes
            seconds = fwd[b] if ahead else bwd[b, level[b]]
            compute = max(compute, issue) + seconds
            work += seconds
            for slot in range(slots):
                if holder[slot] >= 0 and found[holder[slot], 2] == position:
                    slot_free[slot] = max(compute, issue)
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
                    c[BYTES] = c[LEFT] = size
                    c[READY] = max(compute, issue)
                    c[KIND] = UPDATE
                    stored[kind_of, b] = ncopies
                    back[kind_of, b] = -1
                    queue[1, ends[1, 1]] = ncopies
                    ends[1, 1] += 1
                    ncopies += 1
                for kind_of in range(2):  # what goes right after its last use
                    j = b - kind_of
                    if j >= 0 and stored[kind_of, j] >= 0 and back[kind_of, j] == -1:
                        if prefetch == 0 or (kind_of == 1 and prefetch == 1) or j >= n - 1 - kind_of:
                            compute, issue = wait(
                                stored[kind_of, j], m, where, clock, copies, queue, ends, jobs, active, pending, rates,
                                compute, issue,
                            )  # fmt: skip
                            back[kind_of, j] = -2
                continue
            # gradients: older ones must have gone, then this block's go
            if place[b] >= 0 and hold > 0 and place[b] - hold >= 0:
                old = givers[place[b] - hold]
                for k in range(width):
                    compute, issue = retire(
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
                c[BYTES] = c[LEFT] = 0.0
                c[READY] = ready
                c[KIND] = mode
                if mode == UPDATE or (mode == KEEP and resident[slab]):
                    j = jobs[njobs]
                    j[:] = -1.0
                    j[JPARAMS] = j[JLEFT] = part_params[b, k]
                    j[JGRAD] = 0.0 if resident[slab] else part_bytes[b, k]
                    j[JORDER], j[JRES], j[JURGENT] = order[slab], 1.0 if resident[slab] else 0.0, 0.0
                    j[JAFTER] = ncopies
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
                        c[BYTES] = c[LEFT] = part_bytes[b, k]
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
                            j[JPARAMS] = j[JLEFT] = part_params[b, k]
                            j[JGRAD] = 0.0
                            j[JORDER], j[JRES], j[JURGENT] = order[slab], 1.0 if resident[slab] else 0.0, 0.0
                            j[JAFTER] = ncopies - 1
                            active[int(clock[1])] = njobs
                            clock[1] += 1
                            pending[slab, 1 + pending[slab, 0]] = njobs
                            pending[slab, 0] += 1
                            njobs += 1
                if hold == 0:
                    compute, issue = retire(
                        b, k, current, leaving, leaving_kind, m, where, clock, copies, queue, ends, jobs, active,
                        pending, rates, compute, issue,
                    )  # fmt: skip
        # what may not be carried into the next step
        for b in range(n - 1, -1, -1):
            for k in range(width):
                if leaving[current, b, k] >= 0 and leaving_kind[current, b, k] == 1:
                    compute, issue = retire(
                        b, k, current, leaving, leaving_kind, m, where, clock, copies, queue, ends, jobs, active,
                        pending, rates, compute, issue,
                    )  # fmt: skip
        norm = False
        for slab in range(slabs):
            norm = norm or (kind[slab] == KEEP and not accumulate)
        if norm:
            c = copies[ncopies]
            c[:] = -1.0
            c[BYTES] = c[LEFT] = 0.0
            c[READY] = max(compute, issue)
            c[KIND] = KEEP
            queue[1, ends[1, 1]] = ncopies
            ends[1, 1] += 1
            for k in range(nkept):
                jobs[kept[k], JAFTER] = ncopies
                active[int(clock[1])] = kept[k]
                clock[1] += 1
            for slab in range(slabs):
                if sum_params[slab] > 0 and kind[slab] == KEEP:
                    j = jobs[njobs]
                    j[:] = -1.0
                    j[JPARAMS] = j[JLEFT] = sum_params[slab]
                    j[JGRAD] = 0.0
                    j[JORDER], j[JRES], j[JURGENT] = order[slab], 1.0 if resident[slab] else 0.0, 0.0
                    j[JAFTER] = ncopies
                    active[int(clock[1])] = njobs
                    clock[1] += 1
                    pending[slab, 1 + pending[slab, 0]] = njobs
                    pending[slab, 0] += 1
                    njobs += 1
            ncopies += 1
        compute = issue = max(compute, issue)
        left_before[:] = left
        under_way(compute, clock, copies, queue, ends, jobs, active, left)
        if np.all(np.abs(left - left_before) <= SAME * np.abs(left)):
            break  # as the step before left it: every further step is like this one
    out[0] = compute - began
    out[1] = work
    for k in range(4):
        out[2 + k] = clock[2 + k] - busy[2 + k]
