"""Where each parameter of a block lies in its slab, and where its optimizer state lies beside it.

    weight bytes:  | trainable bf16 | trainable fp32 | frozen, any dtype |      each parameter 256-byte aligned
    lo (int16):    | trainable bf16 |
    state (fp32):  | trainable bf16 | trainable fp32 |                          one array for each of m, v, ...

State is indexed by element and keeps the weights' padding, so that element `e` of a segment has its state at
`segment.state_start + e`. Padding stays zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oomc.errors import UnsupportedError

ALIGN = 256


BITS = {
    torch.float32: np.float32, torch.bfloat16: np.int16, torch.int16: np.int16, torch.int32: np.int32,
    torch.uint8: np.uint8, torch.int8: np.int8,
}  # fmt: skip
"""numpy's types for the same bits; numpy has no bf16."""


@dataclass(frozen=True)
class StateArray:
    """One array of an optimizer's state: its name, dtype, and how many weights share an element (a block's scale)."""

    name: str
    dtype: torch.dtype = torch.float32
    block: int = 1

    @property
    def bits(self) -> np.dtype[Any]:
        """The dtype of the same memory as a numpy array."""
        return np.dtype(BITS[self.dtype])

    def elements(self, weights: int) -> int:
        """Its elements for so many weights."""
        return -(-weights // self.block)

    def span(self, start: int, stop: int) -> slice:
        """Its part for weights `[start, stop)`; `start` is a multiple of `block`."""
        return slice(start // self.block, -(-stop // self.block))


@dataclass(frozen=True)
class Rows:
    """Rows `[start, stop)` of the `of` rows of a parameter: a group of a layer's experts."""

    param: str
    start: int
    stop: int
    of: int

    @property
    def name(self) -> str:
        """What the rows are called."""
        return f"{self.param}[{self.start}:{self.stop}]"


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of a slab: its fully qualified name, shape, dtype and whether it is trained.

    Some rows of a parameter (`rows`) are laid out as a parameter would be that has no others; `name` is then theirs.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    rows: Rows | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, without padding."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Segment:
    """The trainable parameters of one dtype: weight bytes `[start, stop)`, elements, and their first state element."""

    dtype: torch.dtype
    start: int
    stop: int
    state_start: int

    @property
    def elements(self) -> int:
        """Number of elements, padding included."""
        return (self.stop - self.start) // self.dtype.itemsize


@dataclass(frozen=True)
class Place:
    """Where a parameter lies: its first weight byte and, if it is trained, its first state element (else -1)."""

    spec: ParamSpec
    offset: int
    state_start: int


@dataclass(frozen=True)
class SlabLayout:
    """The layout of one slab.

    Attributes:
        name: the slab's name.
        places: one for each parameter, in the order in which they were given.
        bf16, fp32: the trainable segments, either possibly empty.
        weight_bytes: size of the weight bytes, padded to `ALIGN`.
    """

    name: str
    places: tuple[Place, ...]
    bf16: Segment
    fp32: Segment
    weight_bytes: int

    @staticmethod
    def build(name: str, specs: Sequence[ParamSpec]) -> SlabLayout:
        """Lay out `specs`.

        Raises:
            UnsupportedError: a trainable parameter is neither bf16 nor fp32.
            AssertionError: two parameters have one name.
        """
        assert len({spec.name for spec in specs}) == len(specs), f"slab {name}: a parameter is listed twice"
        for spec in specs:
            if spec.trainable and spec.dtype not in (torch.bfloat16, torch.float32):
                raise UnsupportedError(
                    f"parameter {spec.name} is {spec.dtype} and trainable; what is trained is bfloat16 or float32. "
                    "Convert the model, for example model.to(torch.bfloat16), or set requires_grad=False."
                )

        def rank(spec: ParamSpec) -> int:
            return 2 if not spec.trainable else int(spec.dtype == torch.float32)

        offsets: dict[str, int] = {}
        ends = [0, 0, 0]
        end = 0
        for kind in range(3):
            for spec in specs:
                if rank(spec) == kind:
                    offsets[spec.name] = end
                    end += -(-spec.nbytes // ALIGN) * ALIGN
            ends[kind] = end
        bf16 = Segment(torch.bfloat16, 0, ends[0], 0)
        fp32 = Segment(torch.float32, ends[0], ends[1], bf16.elements)

        def state_start(spec: ParamSpec) -> int:
            if not spec.trainable:
                return -1
            segment = bf16 if spec.dtype == torch.bfloat16 else fp32
            return segment.state_start + (offsets[spec.name] - segment.start) // spec.dtype.itemsize

        places = tuple(Place(spec, offsets[spec.name], state_start(spec)) for spec in specs)
        return SlabLayout(name, places, bf16, fp32, ends[2])

    @property
    def state_elements(self) -> int:
        """Elements of one state array: those of both trainable segments, padding included."""
        return self.bf16.elements + self.fp32.elements

    @property
    def trainable_elements(self) -> int:
        """Elements that are trained, without padding."""
        return sum(place.spec.numel for place in self.places if place.spec.trainable)

    def state_bytes(self, arrays: Sequence[StateArray]) -> int:
        """Bytes beside the weights: `lo` for bf16, and the optimizer's arrays for all that is trained."""
        return 2 * self.bf16.elements + sum(a.dtype.itemsize * a.elements(self.state_elements) for a in arrays)

    def gradient_bytes(self, wide: bool) -> int:
        """Bytes of one gradient of each trained parameter: fp32 if `wide`, else of the parameter's dtype."""
        return (4 if wide else 2) * self.bf16.elements + 4 * self.fp32.elements

    @property
    def gradient_ranges(self) -> dict[str, tuple[int, int]]:
        """State elements `[start, stop)` of each trainable parameter, by name, in the order given."""
        return {
            place.spec.name: (place.state_start, place.state_start + place.spec.numel)
            for place in self.places
            if place.spec.trainable
        }

    def place(self, name: str) -> Place:
        """The place of parameter `name`; KeyError if the slab has no such parameter."""
        for place in self.places:
            if place.spec.name == name:
                return place
        raise KeyError(f"slab {self.name} has no parameter {name}")

    def views(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parameters as views of `buffer` (uint8, at least `weight_bytes` long), in the order given."""
        return tuple(
            buffer[place.offset : place.offset + place.spec.nbytes].view(place.spec.dtype).view(place.spec.shape)
            for place in self.places
        )
