"""Budgets, and the plan: the frozen record of all decisions about one step."""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tabulate import tabulate

from oomc.errors import UnsupportedError
from oomc.runtime.layout import StateArray
from oomc.runtime.update_workers import STAGES, Staging
from oomc.runtime.updates import Where
from oomc.worksets import Slab

Residency = Literal["keep", "recompute", "offload"]
UNITS = {"": 1, "b": 1} | {
    f"{letter}{kind}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for kind, base in (("ib", 1024), ("b", 1000))
}


def parse_bytes(size: int | float | str | None) -> int | None:
    """Bytes of `24GiB`, `24GB`, `512 MiB` or a plain number; None stays None.

    Raises:
        ValueError: the text is no size, or not positive.
    """
    if size is None:
        return None
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
        if match is None or match[2].lower() not in UNITS:
            raise ValueError(f"{size!r} is no size; write bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB")
        count = int(float(match[1]) * UNITS[match[2].lower()])
    elif hasattr(size, "__index__"):
        count = operator.index(size)
    elif not math.isfinite(size):
        raise ValueError(f"{size!r} is no size; None is for all that there is")
    elif (count := int(size)) != size or count < 1024:
        raise ValueError(f"a budget of {size} would be in bytes; write '{size}GiB' for GiB")
    if count <= 0:
        raise ValueError(f"a budget of {size!r} holds nothing")
    return count


def format_bytes(count: float) -> str:
    """`1.50 GiB`, `3.2 MiB`, ..."""
    for unit, size, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1)):
        if abs(count) >= size:
            return f"{count / size:,.{digits}f} {unit}"
    return f"{int(count)} B"


def bytes_table(rows: Sequence[tuple[str, int]]) -> str:
    """A table of names and bytes."""
    cells = [(name, format_bytes(count)) for name, count in rows]
    return tabulate(cells, colalign=("left", "right"), tablefmt="plain")


@dataclass(frozen=True)
class Budget:
    """How much memory a step may take.

    Sizes are given as `"24GiB"`, `"24GB"`, bytes, or None for all that the machine or its container has, and are
    bytes as attributes.

    Attributes:
        device: everything that the process holds on the device.
        host: everything that the step holds on the host: slabs, gradients in flight, pinned buffers.

    Raises:
        ValueError: a text that is no size.
        UnsupportedError: a `disk` budget, of which there is none yet.
    """

    device: int | None = None
    host: int | None = None

    def __init__(
        self, device: int | float | str | None = None, host: int | float | str | None = None, disk: Any = None
    ) -> None:
        if disk is not None:
            raise UnsupportedError(
                f"a disk budget (disk={disk!r}) is not supported: state lives in device and host memory. Leave it out, "
                "and give budgets for device and host"
            )
        object.__setattr__(self, "device", parse_bytes(device))
        object.__setattr__(self, "host", parse_bytes(host))


@dataclass(frozen=True)
class Updates:
    """What a plan must know of the optimizer.

    Attributes:
        arrays: its state.
        chunk_bytes: gradient bytes of a chunk of an update.
        keep: the norm of the whole gradient must be known before anything is updated.
        where: who may update slabs on the host.
        accumulates: gradients are summed in fp32 over micro-batches.
        ring_bytes: of the host memory through which gradients pass.
        process_bytes: of host memory that the process takes whatever the plan.
    """

    arrays: tuple[StateArray, ...] = (StateArray("m"), StateArray("v"))
    chunk_bytes: int = 8 << 20
    keep: bool = False
    where: Where = "host"
    accumulates: bool = False
    ring_bytes: int = 0
    process_bytes: int = 0

    @property
    def host_fixed(self) -> int:
        """Host bytes that no decision changes."""
        return self.ring_bytes + self.process_bytes

    def kept_bytes(self, slab: Slab) -> int:
        """Host bytes of a slab's gradients that wait there until all have come."""
        wide = len(slab.users) > 1 or self.accumulates
        return slab.layout.gradient_bytes(wide) if wide or self.keep else 0

    def host_bytes(self, slab: Slab) -> int:
        """Host bytes of a slab that lives there: weights, state, and gradients that are kept."""
        return slab.layout.weight_bytes + slab.layout.state_bytes(self.arrays) + self.kept_bytes(slab)

    def staging_bytes(self, where: Where) -> int:
        """Device bytes that pass state through the device."""
        return 0 if where == "host" else STAGES * Staging.nbytes(self.arrays, self.chunk_bytes)

    def resident_bytes(self, slab: Slab, accumulate: bool) -> int:
        """Device bytes of a slab that lives there with its state, each piece rounded up as the allocator does.

        Sums of gradients that an accumulating step has made stay for the next one.
        """
        layout = slab.layout
        pieces = [layout.weight_bytes, 2 * layout.bf16.elements]
        pieces += [a.dtype.itemsize * a.elements(layout.state_elements) for a in self.arrays]
        if accumulate or self.accumulates or len(slab.users) > 1:
            pieces.append(layout.gradient_bytes(wide=True))
        return sum(-(-piece // 512) * 512 for piece in pieces)


@dataclass(frozen=True)
class Plan:
    """All decisions; choosers write it, inserters and the runtime read it.

    Attributes:
        sizes: the batch and sequence size it is made for.
        residency: for each value that the backward needs: keep it on the device, recompute it, or offload it to the
            host until then. A value between blocks that is recomputed is regenerated from an earlier one.
        chunks: for each chunked workset, its (batch, sequence) rectangle.
        prefetch: how many slabs are fetched ahead of the one in use, and how many blocks ahead of the one that computes
            values come back from the host; so many blocks do they have to leave.
        hold: how many blocks' gradients may be on the device beside those of the block that computes; those of the
            last ones stay until their updates have read them, under the next step's forward.
        accumulate: gradients are summed and not applied (a micro-batch of a larger step).
        keep: all gradients are kept until their norm is known, and then applied.
        resident: slabs that live on the device with their state.
        where: who updates the others.
        update_bytes: device bytes of resident slabs and of what updates on the device need.
        slots: bytes of each device slot for weights, from schedule.
        host_slots: bytes of each host slot for values, from schedule.
        regenerated: how many of the recomputed values are between blocks, from schedule.
        groups: of a layer's experts, whose weights are moved by themselves; 1 if they are moved with their layer.
        budget: what the plan was made for.
    """

    sizes: tuple[int, int]
    residency: dict[str, Residency] = field(default_factory=dict)
    chunks: dict[str, tuple[int, int]] = field(default_factory=dict)
    prefetch: int = 1
    hold: int = 1
    accumulate: bool = False
    keep: bool = False
    resident: tuple[str, ...] = ()
    where: Where = "host"
    update_bytes: int = 0
    slots: tuple[int, ...] = ()
    host_slots: tuple[int, ...] = ()
    regenerated: int = 0
    groups: int = 1
    budget: Budget = Budget()

    @property
    def host_value_bytes(self) -> int:
        """Host bytes of values that wait there for the backward."""
        return sum(self.host_slots)

    def describe(self) -> str:
        """One line for reports."""
        shapes = Counter(chunk for chunk in self.chunks.values() if chunk != self.sizes)
        chunks = ", ".join(f"{n} workset{'s' * (n != 1)} in {b}x{s}" for (b, s), n in shapes.items()) or "none"
        recomputed, offloaded = (sum(r == kind for r in self.residency.values()) for kind in ("recompute", "offload"))
        where = {"host": "host", "device": "device", "both": "host and device"}[self.where]
        again = f" ({self.regenerated} of them between blocks)" if self.regenerated else ""
        count = len(self.resident)
        state = f"state of {count} slab{'s' * (count != 1)} on device, of the rest" if self.resident else "state"
        return (
            f"batch {self.sizes[0]} x {self.sizes[1]}; {state} on host, updated by {where}"
            f"{' once the norm is known' if self.keep else ''}; {recomputed} values recomputed{again}, "
            f"{len(self.residency) - recomputed - offloaded} kept{f', {offloaded} on the host' if offloaded else ''}; "
            f"chunks: {chunks}; {f'experts in {self.groups} groups; ' if self.groups > 1 else ''}"
            f"prefetch {self.prefetch}; gradients of "
            f"{self.hold} block{'s' * (self.hold != 1)} held"
        )
