"""Slabs of which a group of experts moves at a time: one on the host, a part of it for each group.

    GroupedSlab   all experts of a layer: what parameters alias, what is saved, loaded and read by name
    SlabGroup     some rows of each of its parameters: what is fetched, and what gradients arrive for and update

The parts have no memory of their own but for gradients that are kept; what is under way for one is noted with the
whole, so that who reads or writes the whole waits for all of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import torch

from oomc.runtime.layout import Place, Rows, SlabLayout, StateArray
from oomc.runtime.memory import HostMemory, Preparation
from oomc.runtime.pool import Countdown
from oomc.runtime.slabs import HostSlab, Part, PartBits, Slab


class GroupedSlab(HostSlab):
    """A host slab that is moved in parts.

    Args:
        layout: of all of it.
        parts: the layout of each part as it is on the device: rows of this slab's parameters.
        pin, pin_state, arrays, preparation: as for `HostSlab`.
    """

    def __init__(
        self, layout: SlabLayout, parts: Sequence[SlabLayout], pin: bool = False, pin_state: bool = False,
        arrays: Sequence[StateArray] = (), preparation: Preparation | None = None,
    ) -> None:  # fmt: skip
        super().__init__(layout, pin, pin_state, arrays, preparation)
        self.parts = tuple(SlabGroup(self, part, pin) for part in parts)

    @property
    def host_bytes(self) -> int:
        """Bytes taken now: weights, `lo`, state, gradients that are kept for any part."""
        return super().host_bytes + sum(part.kept_bytes for part in self.parts)

    def set_steps(self, name: str, steps: int) -> None:
        """Say how many updates parameter `name` has had."""
        super().set_steps(name, steps)
        for part in self.parts:
            for rows in part.rows.values():
                if rows.param == name:
                    part.steps[rows.name] = steps

    def kept_gradient(self, name: str) -> torch.Tensor | None:
        """The gradient that is kept for parameter `name`, of its shape, fp32 on the host; None if there is none."""
        of_parts = [part.kept_gradient(rows.name) for part in self.parts for rows in part.rows.values()
                    if rows.param == name]  # fmt: skip
        kept = [gradient for gradient in of_parts if gradient is not None]
        return torch.cat(kept) if kept else None


class SlabGroup(Slab):
    """A part of a grouped slab.

    Attributes:
        whole: what it is a part of.
        rows: by the names in the layout, which rows of which parameter they are.
    """

    on_device = False

    def __init__(self, whole: GroupedSlab, layout: SlabLayout, pin: bool) -> None:
        super().__init__(layout)
        self.whole, self._pin = whole, pin
        self._gradients: HostMemory | None = None
        self.rows: dict[str, Rows] = {}
        for place in layout.places:
            assert place.spec.rows is not None, f"{place.spec.name} is not some rows of a parameter"
            self.rows[place.spec.name] = place.spec.rows
        self._trained = sorted((p for p in layout.places if p.spec.trainable), key=lambda p: p.state_start)
        self._starts = [place.state_start for place in self._trained]

    @property
    def kept_bytes(self) -> int:
        """Bytes of memory for kept gradients."""
        return 0 if self._gradients is None else self._gradients.nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes taken now; the first part answers for the whole."""
        return self.whole.host_bytes if self is self.whole.parts[0] else 0

    def _first(self, place: Place) -> int:
        """The first element of a place, counted in its whole parameter."""
        rows = self.rows[place.spec.name]
        return rows.start * (place.spec.numel // (rows.stop - rows.start))

    def copy_weights(self, target: torch.Tensor) -> None:
        """Copy the weights to `target` (uint8), where they lie as the layout says."""
        for place in self.layout.places:
            home = self.whole.layout.place(self.rows[place.spec.name].param)
            start, size = home.offset + self._first(place) * place.spec.dtype.itemsize, place.spec.nbytes
            source = self.whole.weights[start : start + size]
            target[place.offset : place.offset + size].copy_(source, non_blocking=True)

    def part(self, arrays: Sequence[StateArray], start: int, stop: int) -> Part:
        """State elements `[start, stop)`, which belong to one parameter, as views."""
        shift = self._shift(start)
        return self.whole.part(arrays, start + shift, stop + shift)

    def part_bits(self, arrays: Sequence[StateArray], start: int, stop: int) -> PartBits:
        """The same on the host, by numpy alone."""
        shift = self._shift(start)
        return self.whole.part_bits(arrays, start + shift, stop + shift)

    def _shift(self, start: int) -> int:
        """From a state element of the part to that of the whole."""
        place = self._trained[bisect_right(self._starts, start) - 1]
        home = self.whole.layout.place(self.rows[place.spec.name].param)
        return home.state_start + self._first(place) - place.state_start

    def owner(self, name: str) -> tuple[str, int]:
        """The parameter that `name` is a part of, and the part's first element in it."""
        return self.rows[name].param, self._first(self.layout.place(name))

    def count_update(self, name: str) -> int:
        """Count an update of `name`; how many there have been."""
        steps = super().count_update(name)
        self.whole.steps[self.rows[name].param] = steps  # that of the other parts too, once they are through
        return steps

    def param(self, name: str) -> torch.Tensor:
        """The rows as a view of the whole parameter."""
        rows = self.rows[name]
        return self.whole.param(rows.param)[rows.start : rows.stop]

    def add_state(self, arrays: Sequence[StateArray]) -> None:
        """Allocate the whole's state arrays that are not there yet, zeroed."""
        self.whole.add_state(arrays)

    def add_pending(self, names: Iterable[str], countdown: Countdown) -> None:
        """Note with the whole that updates of `names` are under way until `countdown` is done."""
        self.whole.add_pending(names, countdown)

    def pending(self, names: Iterable[str] | None = None, to_read: bool = False) -> list[Countdown]:
        """What is under way for any of `names` (None: all of the part), or for the whole."""
        own = self.rows if names is None else {name: self.rows[name] for name in names}
        return self.whole.pending([*own, *(rows.param for rows in own.values())], to_read)

    def forget_pending(self) -> None:
        """Forget what failed, of all parts."""
        self.whole.forget_pending()

    def abandon(self) -> None:
        """Forget what was noted as under way and never begun, of all parts."""
        self.whole.abandon()

    def close(self) -> None:
        """Give the memory of the whole back."""
        if self.kept is not None:
            self._free("gradients")
            self.kept = None
        self.whole.close()

    def _allocate(self, name: str, dtype: torch.dtype, elements: int) -> torch.Tensor:
        assert name == "gradients", f"{name} belongs to the whole"
        self._gradients = HostMemory(dtype.itemsize * elements, self._pin)
        return self._gradients.tensor(dtype, (elements,))

    def _free(self, name: str) -> None:
        assert name == "gradients", f"{name} belongs to the whole"
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None

    def _split(self, values: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor) -> None:
        self.whole._split(values, hi, lo)

    def _join(self, hi: torch.Tensor, lo: torch.Tensor, values: torch.Tensor) -> None:
        self.whole._join(hi, lo, values)
