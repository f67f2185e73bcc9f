"""The device memory of a step at the grain of blocks, compiled: oomc.simulate and oomc.passes.schedule on arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from oomc.quick_lanes import HOST, KEEP, SUM, UPDATE, njit


@njit
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


@njit
def assign_slots(count: int, found: Any, weight: Any, prefetch: int, slot_of: Any, sizes: Any) -> int:
    """Best fit of every stretch's slot in program order (oomc.passes.schedule); returns how many slots there are."""
    slots = 0
    holder = np.empty(count + 1, np.int64)  # the stretch that a slot was given to last
    free = np.zeros(count + 1, np.bool_)
    nearest = 0
    for target in range(count):
        # what ended before this stretch begins is released by now
        for s in range(slots):
            if holder[s] < target and found[holder[s], 2] < found[target, 1]:
                free[s] = True
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
            holder[best] = nearest
            slot_of[nearest] = best
            nearest += 1
    return slots


@njit
def device_bytes(
    n: int, fixed: float, staging: float, uses: Any, uses_back: Any, weight: Any, home: Any, kind: Any, part_slab: Any,
    own_grad: Any, device: Any, inner: Any, bound: Any, other: Any, fwd_need: Any, bwd_need: Any,
    bwd_first: Any, bwd_rest: Any, level: Any, bound_off: Any, resident: Any, prefetch: int, hold: int, where: int,
    accumulate: bool,
) -> float:  # fmt: skip
    """The projected device peak in bytes, as oomc.simulate walks the step graph.

    Beside what oomc.quick.Instance and Decisions say:

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
                gone = part_slab[givers[place - hold], 0]
                if not (kind[gone] == KEEP and resident[gone]):
                    held -= own_grad[givers[place - hold]]
            peak = max(peak, live + held + bwd_rest[b, level[b]])
        if part_slab[b, 0] >= 0:
            place += 1
            if kind[part_slab[b, 0]] == KEEP and resident[part_slab[b, 0]] and not accumulate:
                stays += own_grad[b]
    return always + peak
