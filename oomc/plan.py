"""Budgets, and the plan: the frozen record of all decisions about one step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tabulate import tabulate

Residency = Literal["keep", "recompute"]
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
    if isinstance(size, int | float):
        count = int(size)
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
        if match is None or match[2].lower() not in UNITS:
            raise ValueError(f"{size!r} is no size; write bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB")
        count = int(float(match[1]) * UNITS[match[2].lower()])
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
    """

    device: int | None = None
    host: int | None = None

    def __init__(self, device: int | float | str | None = None, host: int | float | str | None = None) -> None:
        object.__setattr__(self, "device", parse_bytes(device))
        object.__setattr__(self, "host", parse_bytes(host))


@dataclass(frozen=True)
class Plan:
    """All decisions; choosers write it, inserters and the runtime read it.

    Attributes:
        sizes: the batch and sequence size it is made for.
        residency: for each value that the backward needs: keep it on the device or recompute it.
        chunks: for each chunked workset, its (batch, sequence) rectangle.
        prefetch: how many slabs are fetched ahead of the one in use.
        retire_late: whether a block's gradients leave the device under the next block's backward, instead of before.
        accumulate: gradients are summed on the host and not applied (a micro-batch of a larger step).
        slots: bytes of each device slot for weights, from schedule.
        budget: what the plan was made for.
    """

    sizes: tuple[int, int]
    residency: dict[str, Residency] = field(default_factory=dict)
    chunks: dict[str, tuple[int, int]] = field(default_factory=dict)
    prefetch: int = 1
    retire_late: bool = True
    accumulate: bool = False
    slots: tuple[int, ...] = ()
    budget: Budget = Budget()

    def describe(self) -> str:
        """One line for reports."""
        chunks = ", ".join(f"{name} in {b}x{s}" for name, (b, s) in self.chunks.items()) or "none"
        recomputed = sum(r == "recompute" for r in self.residency.values())
        return (
            f"batch {self.sizes[0]} x {self.sizes[1]}; state on host; {recomputed} values recomputed, "
            f"{len(self.residency) - recomputed} kept; chunks: {chunks}; prefetch {self.prefetch}; gradients leave "
            f"{'under the next block' if self.retire_late else 'before the next block'}"
        )
