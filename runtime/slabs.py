"""Slabs: a block's weights with their exact masters and optimizer state, on the host or on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from oomc.runtime.kernels import Array, join_master, split_master
from oomc.runtime.layout import Place, SlabLayout, StateArray
from oomc.runtime.memory import HostMemory, Preparation
from oomc.runtime.pool import Copying, Countdown

_PIECE = 1 << 20  # elements converted at a time when weights are loaded, so that temporaries stay small

Part = tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, ...]]
"""Of some elements: weights (int16 `hi` or fp32), `lo` (or None beside fp32), and each of the optimizer's arrays."""

PartBits = tuple[Array, Array | None, tuple[Array, ...]]
"""The same on the host, as numpy arrays over the same memory; bf16 as int16."""


def bits(tensor: torch.Tensor) -> Array:
    """A host tensor as numpy array over the same memory; bf16 as int16."""
    array: Array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def gradient_bits(tensor: torch.Tensor) -> Array:
    """A host gradient as int16 or int32 bits, as the kernels take it."""
    array: Array = tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32).numpy()
    return array


def bits_of(part: Part) -> PartBits:
    """A part on the host as numpy arrays."""
    weights, lo, state = part
    return bits(weights), None if lo is None else bits(lo), tuple(bits(array) for array in state)


class KeptGradients:
    """One gradient for every trained parameter of a slab, in state order, kept until it is applied.

    Attributes:
        wide: fp32 throughout; else each gradient is of its parameter's dtype.
        names: parameters that have a gradient in it.
    """

    def __init__(self, layout: SlabLayout, wide: bool, memory: torch.Tensor) -> None:
        narrow = memory.numel() - 4 * layout.fp32.elements
        self.wide, self.memory = wide, memory
        self.names: set[str] = set()
        self._split = layout.bf16.elements
        self._bf16 = memory[:narrow].view(torch.float32 if wide else torch.bfloat16)
        self._fp32 = memory[narrow:].view(torch.float32)

    def tensor(self, start: int, stop: int) -> torch.Tensor:
        """State elements `[start, stop)`, which belong to one parameter."""
        if start < self._split:
            return self._bf16[start:stop]
        return self._fp32[start - self._split : stop - self._split]


class Slab(ABC):
    """A block's weights and, for those that are trained, the exact master and the optimizer's state.

    A bf16 parameter's master is `(hi << 16) + lo`: `hi` are the weights themselves, `lo` is kept beside them. An fp32
    parameter is its own master.

    Attributes:
        layout: where what lies.
        weights: uint8 [weight_bytes].
        lo: int16 [layout.bf16.elements].
        state: the optimizer's arrays by name, from `add_state`; element `e // block` belongs to state element `e`.
        steps: for each trainable parameter, how many updates it has had (as torch's per-parameter `step`).
        kept: gradients that wait for their update, from `keep_gradients`.
        on_device: where all of it is.
    """

    on_device: bool
    weights: torch.Tensor
    lo: torch.Tensor

    def __init__(self, layout: SlabLayout) -> None:
        self.layout = layout
        self.state: dict[str, torch.Tensor] = {}
        self.kept: KeptGradients | None = None
        self.steps = dict.fromkeys(layout.gradient_ranges, 0)
        self._pending: list[tuple[frozenset[str], Countdown]] = []
        self._parts: dict[tuple[int, int], Part] = {}
        self._whole: dict[str, Array] = {}

    @abstractmethod
    def _allocate(self, name: str, dtype: torch.dtype, elements: int) -> torch.Tensor:
        """Zeroed memory; it replaces what was allocated under this name before."""

    @abstractmethod
    def _free(self, name: str) -> None:
        """Give the memory of this name back."""

    @abstractmethod
    def param(self, name: str) -> torch.Tensor:
        """Parameter `name` over the slab's weights, of its shape and dtype, with a storage of its own."""

    @abstractmethod
    def _split(self, values: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor) -> None:
        """Split fp32 `values` into `hi` and `lo`."""

    @abstractmethod
    def _join(self, hi: torch.Tensor, lo: torch.Tensor, values: torch.Tensor) -> None:
        """The inverse of `_split`, exact."""

    @property
    def name(self) -> str:
        """The layout's name."""
        return self.layout.name

    def add_state(self, arrays: Sequence[StateArray]) -> None:
        """Allocate the optimizer's state arrays that are not there yet, zeroed."""
        for array in arrays:
            if array.name not in self.state:
                self._forget_views()
                elements = array.elements(self.layout.state_elements)
                self.state[array.name] = self._allocate(array.name, array.dtype, elements)

    def copy_weights(self, target: torch.Tensor) -> None:
        """Copy the weights to `target` (uint8), where they lie as the layout says."""
        target.copy_(self.weights, non_blocking=True)

    def owner(self, name: str) -> tuple[str, int]:
        """The parameter that `name` of the layout is, or is some rows of, and which of its elements is the first."""
        return name, 0

    def count_update(self, name: str) -> int:
        """Count an update of parameter `name`; how many there have been."""
        self.steps[name] += 1
        return self.steps[name]

    def set_steps(self, name: str, steps: int) -> None:
        """Say how many updates parameter `name` has had."""
        self.steps[name] = steps

    def kept_gradient(self, name: str) -> torch.Tensor | None:
        """The gradient that is kept for parameter `name`, of its shape, fp32 on the host; None if there is none."""
        if self.kept is None or name not in self.kept.names:
            return None
        gradient = self.kept.tensor(*self.layout.gradient_ranges[name])
        return gradient.view(self.layout.place(name).spec.shape).to("cpu", torch.float32, copy=True)

    def keep_gradients(self, wide: bool) -> KeptGradients:
        """Allocate memory for a gradient of every trained parameter: fp32 if `wide`, else of the parameter's dtype.

        Narrow memory that is there and empty makes room for wide memory; wide memory serves both.
        """
        if self.kept is None or (wide and not self.kept.wide):
            self.drop_gradients()
            memory = self._allocate("gradients", torch.uint8, self.layout.gradient_bytes(wide))
            self.kept = KeptGradients(self.layout, wide, memory)
        return self.kept

    def drop_gradients(self) -> None:
        """Give the memory for gradients back; there must be none in it."""
        if self.kept is not None:
            assert not self.kept.names, f"slab {self.name}: gradients that wait for an update would be lost"
            self.kept = None
            self._free("gradients")

    def part(self, arrays: Sequence[StateArray], start: int, stop: int) -> Part:
        """State elements `[start, stop)`, which belong to one parameter, as views; those with state are remembered.

        A slab has one optimizer, so that `arrays` are the same each time.
        """
        if not arrays:
            return self._part(arrays, start, stop)
        if (start, stop) not in self._parts:
            self._parts[start, stop] = self._part(arrays, start, stop)
        return self._parts[start, stop]

    def part_bits(self, arrays: Sequence[StateArray], start: int, stop: int) -> PartBits:
        """The same on the host, by numpy alone.

        Each call into torch gives up Python's lock and takes it again, and where the thread that issues the compute
        wants it too, that takes longer than the call.
        """
        if not self._whole:
            state_bits = {f"state.{name}": bits(array) for name, array in self.state.items()}
            self._whole = state_bits | {"": self.weights.numpy(), "lo": self.lo.numpy()}  # at once: workers share it
        whole, lay = self._whole, self.layout
        state = tuple(whole[f"state.{array.name}"][array.span(start, stop)] for array in arrays)
        if start < lay.bf16.elements:
            return whole[""][2 * start : 2 * stop].view(np.int16), whole["lo"][start:stop], state
        first = lay.fp32.start + 4 * (start - lay.bf16.elements)
        return whole[""][first : first + 4 * (stop - start)].view(np.float32), None, state

    def _forget_views(self) -> None:
        """Hold no memory that is to be given back."""
        self._parts, self._whole = {}, {}

    def _part(self, arrays: Sequence[StateArray], start: int, stop: int) -> Part:
        lay = self.layout
        state = tuple(self.state[array.name][array.span(start, stop)] for array in arrays)
        if start < lay.bf16.elements:
            return self.weights[2 * start : 2 * stop].view(torch.int16), self.lo[start:stop], state
        first = lay.fp32.start + 4 * (start - lay.bf16.elements)
        return self.weights[first : first + 4 * (stop - start)].view(torch.float32), None, state

    def load(self, name: str, value: torch.Tensor) -> None:
        """Set parameter `name` and its master; optimizer state is left as it is.

        Args:
            name: a parameter of the slab.
            value: any device and floating dtype, of the parameter's shape. An fp32 value of a trainable bf16 parameter
                becomes its exact master; a frozen parameter is converted as torch does.

        Raises:
            ValueError: the shape is another.
        """
        place = self.layout.place(name)
        if tuple(value.shape) != place.spec.shape:
            raise ValueError(f"parameter {name} has shape {place.spec.shape}, the value {tuple(value.shape)}")
        self.wait_updated()
        target, source = self.param(name).view(-1), value.detach().reshape(-1)
        for start in range(0, source.numel(), _PIECE):
            piece = source[start : start + _PIECE]
            if place.state_start < 0 or place.spec.dtype == torch.float32:
                target[start : start + _PIECE].copy_(piece)
            else:
                weights, lo, _ = self.part((), *_span(place, start, piece.numel()))
                assert lo is not None
                self._split(piece.to(lo.device, torch.float32), weights, lo)

    def master(self, name: str) -> torch.Tensor:
        """The exact fp32 master of trainable parameter `name`, a new tensor of its shape, where the slab is."""
        place = self.layout.place(name)
        assert place.state_start >= 0, f"parameter {name} is frozen and has no master"
        self.wait_updated()
        if place.spec.dtype == torch.float32 or not place.spec.numel:
            return self.param(name).float().clone()
        master = torch.empty(place.spec.shape, dtype=torch.float32, device=self.lo.device)
        weights, lo, _ = self.part((), *_span(place, 0, place.spec.numel))
        assert lo is not None
        self._join(weights, lo, master.view(-1))
        return master

    def copy_from(self, other: Slab) -> None:
        """Take over all that another slab of the same layout holds."""
        other.wait_updated()
        self.weights.copy_(other.weights)
        self.lo.copy_(other.lo)
        for name, array in other.state.items():
            self.state[name].copy_(array)
        self.steps.update(other.steps)
        if other.kept is not None and other.kept.names:
            kept = self.keep_gradients(other.kept.wide)
            kept.memory.copy_(other.kept.memory)
            kept.names.update(other.kept.names)
            other.kept.names.clear()

    def add_pending(self, names: Iterable[str], countdown: Countdown) -> None:
        """Note that updates (or accumulations) of `names` are under way until `countdown` is done."""
        self._pending = [(n, c) for n, c in self._pending if not c.succeeded()]
        self._pending.append((frozenset(names), countdown))

    def pending(self, names: Iterable[str] | None = None, to_read: bool = False) -> list[Countdown]:
        """What is under way for any of `names` (None: for any parameter), in order of submission.

        With `to_read`, only what writes: who wants to read need not wait for others who read.
        """
        wanted = None if names is None else frozenset(names)
        found = [c for n, c in self._pending if not c.succeeded() and (wanted is None or n & wanted)]
        return [c for c in found if not (to_read and isinstance(c, Copying))]

    def forget_pending(self) -> None:
        """Forget what failed, after the whole state has been loaded anew."""
        self._pending.clear()

    def abandon(self) -> None:
        """Forget what was noted as under way and never begun; the lanes must have done all that they were given."""
        for _, countdown in self._pending:
            countdown.abandon()

    def wait_updated(self, to_read: bool = False) -> None:
        """Block until nothing is under way (`to_read`: nothing that writes); RuntimeError if an update failed."""
        for countdown in self.pending(to_read=to_read):
            countdown.wait()

    def close(self) -> None:
        """Give the memory back: state at once, the weights when no parameter aliases them any more; once is enough."""
        self._forget_views()
        for name in (*self.state, *(["gradients"] if self.kept is not None else []), "lo"):
            self._free(name)
        self.state.clear()
        self.kept = None
        device = self.weights.device
        self.weights = torch.empty(0, dtype=torch.uint8, device=device)
        self.lo = torch.empty(0, dtype=torch.int16, device=device)


class HostSlab(Slab):
    """A slab in host memory.

    Args:
        layout: where what lies.
        pin: register the weights and kept gradients with CUDA: what copies of whole slabs use.
        pin_state: register `lo` and the state too: for updates on the device with the state streamed through.
        arrays: of the optimizer's state, to be taken along.
        preparation: touches and registers the memory with many cores; None: this thread does as far as it must.
    """

    on_device = False

    def __init__(
        self, layout: SlabLayout, pin: bool = False, pin_state: bool = False, arrays: Sequence[StateArray] = (),
        preparation: Preparation | None = None,
    ) -> None:  # fmt: skip
        super().__init__(layout)
        self._pin, self._pin_state, self._now = pin, pin_state, preparation is None
        self._memory: dict[str, HostMemory] = {}
        self.weights = self._allocate("weights", torch.uint8, layout.weight_bytes)
        self.lo = self._allocate("lo", torch.int16, layout.bf16.elements)
        self.add_state(arrays if layout.state_elements else ())
        if preparation is not None:
            preparation.prepare(list(self._memory.values()))
        self._now = True

    @property
    def pinned(self) -> bool:
        """Whether the weights are registered with CUDA."""
        return self._memory["weights"].pinned

    @property
    def host_bytes(self) -> int:
        """Bytes taken now: weights, `lo`, state, kept gradients."""
        return sum(memory.nbytes for memory in self._memory.values())

    def param(self, name: str) -> torch.Tensor:
        """Parameter `name` over the slab's weights, of its shape and dtype, with a storage of its own."""
        place = self.layout.place(name)
        return self._memory["weights"].tensor(place.spec.dtype, place.spec.shape, place.offset)

    def _allocate(self, name: str, dtype: torch.dtype, elements: int) -> torch.Tensor:
        pin = self._pin if name in ("weights", "gradients") else self._pin_state
        self._memory[name] = HostMemory(dtype.itemsize * elements, pin, self._now)
        return self._memory[name].tensor(dtype, (elements,))

    def _free(self, name: str) -> None:
        if name in self._memory:
            self._memory[name].close()
            del self._memory[name]

    def _split(self, values: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor) -> None:
        split_master(values.numpy(), hi.numpy(), lo.numpy())

    def _join(self, hi: torch.Tensor, lo: torch.Tensor, values: torch.Tensor) -> None:
        join_master(hi.numpy(), lo.numpy(), values.numpy())

    def close(self) -> None:
        """Give the memory back: state at once, the weights when no parameter aliases them any more."""
        super().close()
        self._free("weights")


class DeviceSlab(Slab):
    """A slab in device memory, 12 bytes a parameter there and none on the host; it is never fetched."""

    on_device = True

    def __init__(self, layout: SlabLayout, device: torch.device) -> None:
        super().__init__(layout)
        self._device = device
        self.weights = self._allocate("weights", torch.uint8, layout.weight_bytes)
        self.lo = self._allocate("lo", torch.int16, layout.bf16.elements)

    def param(self, name: str) -> torch.Tensor:
        """Parameter `name` over the slab's weights, of its shape and dtype, with a storage of its own."""
        place = self.layout.place(name)
        view = self.weights[place.offset : place.offset + place.spec.nbytes].view(place.spec.dtype)
        # a view would share the slab's storage, and whoever looks at storages would take all parameters for tied
        return from_dlpack(view).view(place.spec.shape) if place.spec.numel else view.view(place.spec.shape)

    def _allocate(self, name: str, dtype: torch.dtype, elements: int) -> torch.Tensor:
        return torch.zeros(elements, dtype=dtype, device=self._device)

    def _free(self, name: str) -> None:
        """Nothing but the tensor holds the memory."""

    def _split(self, values: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor) -> None:
        bits = values.view(torch.int32)
        rounded = ((bits.to(torch.int64) + 0x8000) >> 16).to(torch.int16)
        nan = values.isnan()
        hi.copy_(torch.where(nan, 0x7FC0, rounded))
        lo.copy_(torch.where(nan, 0, bits.to(torch.int16)))

    def _join(self, hi: torch.Tensor, lo: torch.Tensor, values: torch.Tensor) -> None:
        values.view(torch.int32).copy_((hi.to(torch.int32) << 16) + lo.to(torch.int32))


def _span(place: Place, start: int, count: int) -> tuple[int, int]:
    return place.state_start + start, place.state_start + start + count
