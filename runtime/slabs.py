"""The host slab: a block's weights with their exact masters and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from oomc.runtime.kernels import join_master, split_master
from oomc.runtime.layout import Place, SlabLayout, StateArray
from oomc.runtime.memory import Array, HostMemory
from oomc.runtime.pool import Countdown

_PIECE = 1 << 20  # elements converted at a time when weights are loaded, so that temporaries stay small


class HostSlab:
    """A block's weights on the host and, for those that are trained, the exact master and the optimizer's state.

    A bf16 parameter's master is `(hi << 16) + lo`: `hi` are the weights themselves, `lo` is kept beside them. An fp32
    parameter is its own master.

    Attributes:
        layout: where what lies.
        weights: uint8 [weight_bytes], registered with CUDA if `pin`; what a fetch copies.
        lo: int16 [layout.bf16.elements].
        state: the optimizer's arrays by name, from `add_state`; element `e // block` belongs to state element `e`.
        steps: for each trainable parameter, how many updates it has had (as torch's per-parameter `step`).
        accumulator: fp32 [layout.state_elements], from `add_accumulator`.
        accumulated: parameters that have a gradient in the accumulator.
    """

    def __init__(self, layout: SlabLayout, pin: bool = False) -> None:
        self.layout = layout
        self._weights = HostMemory(layout.weight_bytes, pin)
        self._beside: dict[str, HostMemory] = {"lo": HostMemory(2 * layout.bf16.elements)}
        self.weights = self._weights.tensor(torch.uint8, (layout.weight_bytes,))
        self.lo = self._beside["lo"].tensor(torch.int16, (layout.bf16.elements,))
        self.state: dict[str, torch.Tensor] = {}
        self.accumulator: torch.Tensor | None = None
        self.accumulated: set[str] = set()
        self.steps = dict.fromkeys(layout.gradient_ranges, 0)
        # the same memory for the kernels, which take numpy arrays
        self.hi_array = self._weights.array(np.dtype(np.int16), 0, layout.bf16.elements)
        self.fp32_array = self._weights.array(np.dtype(np.float32), layout.fp32.start, layout.fp32.elements)
        self.lo_array = self._beside["lo"].array(np.dtype(np.int16), 0, layout.bf16.elements)
        self.state_arrays: dict[str, Array] = {}
        self.accumulator_array = np.empty(0, np.float32)
        self._pending: list[tuple[frozenset[str], Countdown]] = []

    @property
    def name(self) -> str:
        """The layout's name."""
        return self.layout.name

    @property
    def pinned(self) -> bool:
        """Whether the weights are registered with CUDA."""
        return self._weights.pinned

    @property
    def host_bytes(self) -> int:
        """Bytes taken now: weights, `lo`, state, accumulator."""
        return self._weights.nbytes + sum(memory.nbytes for memory in self._beside.values())

    def add_state(self, arrays: Sequence[StateArray]) -> None:
        """Allocate the optimizer's state arrays that are not there yet, zeroed."""
        for array in arrays:
            if array.name not in self.state:
                elements = array.elements(self.layout.state_elements)
                memory = self._beside[array.name] = HostMemory(array.dtype.itemsize * elements)
                self.state[array.name] = memory.tensor(array.dtype, (elements,))
                self.state_arrays[array.name] = memory.array(array.bits, 0, elements)

    def add_accumulator(self) -> None:
        """Allocate the gradient accumulator if it is not there yet."""
        if self.accumulator is None:
            elements = self.layout.state_elements
            memory = self._beside["accumulator"] = HostMemory(4 * elements)
            self.accumulator = memory.tensor(torch.float32, (elements,))
            self.accumulator_array = memory.array(np.dtype(np.float32), 0, elements)

    def param(self, name: str) -> torch.Tensor:
        """Parameter `name` over the slab's weights, of its shape and dtype, with a storage of its own."""
        place = self.layout.place(name)
        return self._weights.tensor(place.spec.dtype, place.spec.shape, place.offset)

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
                master = piece.to("cpu", torch.float32).numpy()
                span = self._state_span(place, start, len(master))
                split_master(master, self.hi_array[span], self.lo_array[span])

    def master(self, name: str) -> torch.Tensor:
        """The exact fp32 master of trainable parameter `name`, a new tensor of its shape."""
        place = self.layout.place(name)
        assert place.state_start >= 0, f"parameter {name} is frozen and has no master"
        self.wait_updated()
        if place.spec.dtype == torch.float32:
            return self.param(name).clone()
        master = torch.empty(place.spec.shape, dtype=torch.float32)
        span = self._state_span(place, 0, place.spec.numel)
        join_master(self.hi_array[span], self.lo_array[span], master.view(-1).numpy())
        return master

    @staticmethod
    def _state_span(place: Place, start: int, count: int) -> slice:
        return slice(place.state_start + start, place.state_start + start + count)

    def add_pending(self, names: Iterable[str], countdown: Countdown) -> None:
        """Note that updates (or accumulations) of `names` are under way until `countdown` is done."""
        self._pending = [(n, c) for n, c in self._pending if not c.succeeded()]
        self._pending.append((frozenset(names), countdown))

    def pending(self, names: Iterable[str] | None = None) -> list[Countdown]:
        """What is under way for any of `names` (None: for any parameter), in order of submission."""
        wanted = None if names is None else frozenset(names)
        return [c for n, c in self._pending if not c.succeeded() and (wanted is None or n & wanted)]

    def wait_updated(self) -> None:
        """Block until nothing is under way; RuntimeError if an update failed."""
        for countdown in self.pending():
            countdown.wait()

    def close(self) -> None:
        """Give the memory back: state at once, the weights when no parameter aliases them any more."""
        self._weights.close()
        for memory in self._beside.values():
            memory.close()
        self._beside.clear()
        self.state.clear()
        self.state_arrays.clear()
        self.accumulator = None
        self.weights, self.lo = torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.int16)
        self.hi_array = self.lo_array = np.empty(0, np.int16)
        self.fp32_array = self.accumulator_array = np.empty(0, np.float32)
