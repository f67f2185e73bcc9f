"""The plan: the frozen record of all decisions about one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Residency = Literal["keep", "recompute"]


@dataclass(frozen=True)
class Budget:
    """How much memory the step may take, in bytes, or None for all that there is.

    Attributes:
        device: everything that the process holds on the device.
        host: everything that the step holds on the host: slabs, gradients in flight, pinned buffers.
    """

    device: int | None = None
    host: int | None = None


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
