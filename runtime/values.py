"""Values on the host between forward and backward: host slots that are taken once, and the copies out and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oomc.runtime.chaos import Adversary
from oomc.runtime.lanes import Lane, Ticket, mark
from oomc.runtime.memory import take


class StoredValue:
    """One value on its way to the host and back, from `HostValues.store` until `HostValues.restored`.

    Attributes:
        name: of the value, for errors.
        slot: the host slot that it is in.
        nbytes: of its elements.
        value: the value while it is, or begins to be, on the device: until `discard`, and from `restore` on. The lanes'
            tasks hold this and not the tensor, which so is freed when it is let go of here.
    """

    def __init__(self, name: str, slot: int, value: torch.Tensor) -> None:
        self.name, self.slot, self.nbytes = name, slot, value.nbytes
        self.value: torch.Tensor | None = value
        self.shape, self.stride, self.dtype = value.shape, value.stride(), value.dtype
        self.out: Ticket | None = None
        self.back: Ticket | None = None

    def elements(self) -> torch.Tensor:
        """The elements of `value` as they lie in memory, flat."""
        assert self.value is not None
        return self.value.as_strided((self.value.numel(),), (1,), self.value.storage_offset())


class HostValues:
    """The slots, and the copies of values on both copy lanes.

    All calls come from the thread that issues the compute, and their order is the program's order. A value is copied
    as it lies in memory: it must fill one stretch of it, in any order of dimensions, and comes back with its strides.

    Args:
        sizes: bytes of each slot: host memory of just that size, registered with CUDA if that is where the values are.
        device: where the values are.
        d2h, h2d: the lanes of copies out and back.
        adversary: poisons slots at first and once they are free, values once they are discarded, and memory that a
            value is to come back into, if given.
    """

    def __init__(
        self, sizes: Sequence[int], device: torch.device, d2h: Lane, h2d: Lane, adversary: Adversary | None = None
    ) -> None:
        self._device, self._d2h, self._h2d, self._adversary = device, d2h, h2d, adversary
        self._memories = take(sizes, pin=device.type == "cuda") if sizes else []
        self._slots = [memory.tensor(torch.uint8, (memory.nbytes,)) for memory in self._memories]
        self._holder: list[StoredValue | None] = [None] * len(sizes)
        if adversary is not None:
            for slot in self._slots:
                adversary.poison(slot)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each slot."""
        return tuple(memory.nbytes for memory in self._memories)

    def store(self, name: str, value: torch.Tensor, slot: int) -> StoredValue:
        """Queue the copy of `value` into a free slot, after all that the compute has been told so far."""
        holder = self._holder[slot]
        assert holder is None, f"store of {name}: host slot {slot} holds {holder.name}"
        assert value.nbytes <= self._slots[slot].numel(), f"store of {name}: {value.nbytes} bytes do not fit"
        assert _is_dense(value), f"store of {name}: its elements do not lie side by side"
        copy = StoredValue(name, slot, value)

        def leave() -> None:
            self._place(copy).copy_(copy.elements(), non_blocking=True)

        copy.out = self._d2h.submit(leave, mark(self._device))
        self._holder[slot] = copy
        return copy

    def discard(self, copy: StoredValue) -> None:
        """Make the current stream wait until the value has left, and let go of it; LaneError if the copy failed."""
        assert copy.out is not None and copy.value is not None, f"{copy.name} is discarded twice"
        copy.out.wait_on()
        if self._adversary is not None:
            self._adversary.poison(copy.elements().view(torch.uint8))
        copy.value = None

    def restore(self, copy: StoredValue) -> StoredValue:
        """Queue the copy of a discarded value into new device memory."""
        assert self._holder[copy.slot] is copy, f"{copy.name} is not in host slot {copy.slot} any more"
        assert copy.value is None, f"{copy.name} is restored before it is discarded"
        copy.value = torch.empty_strided(copy.shape, copy.stride, dtype=copy.dtype, device=self._device)
        if self._adversary is not None:
            self._adversary.poison(copy.elements().view(torch.uint8))

        def come() -> None:
            copy.elements().copy_(self._place(copy), non_blocking=True)

        # after the mark the memory is free, and the copy out is done: the stream has waited for it at `discard`
        copy.back = self._h2d.submit(come, mark(self._device))
        return copy

    def restored(self, copy: StoredValue) -> torch.Tensor:
        """Make the current stream wait for the value; its slot is free then. LaneError if the copy failed."""
        assert copy.back is not None and copy.value is not None, f"{copy.name} is not being restored"
        copy.back.wait_on()
        if self._adversary is not None:
            copy.back.wait_host()
            self._adversary.poison(self._slots[copy.slot])
        self._holder[copy.slot] = None
        value, copy.value = copy.value, None
        return value

    def reset(self) -> None:
        """Take all slots back, whatever they hold; the lanes must be idle."""
        for index, copy in enumerate(self._holder):
            if copy is not None:
                copy.value = None
            self._holder[index] = None

    def close(self) -> None:
        """Give the slots back; the lanes must be idle."""
        self.reset()
        self._slots.clear()
        self._holder.clear()
        for memory in self._memories:
            memory.close()
        self._memories.clear()

    def _place(self, copy: StoredValue) -> torch.Tensor:
        """The value's place in its slot."""
        return self._slots[copy.slot][: copy.nbytes].view(copy.dtype)


def _is_dense(value: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(value.stride(), value.shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True
