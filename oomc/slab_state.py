"""A slab's state, parameter by parameter, as tensors: what checkpoints and the optimizer's state dict know of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from oomc.manifest import LO
from oomc.runtime.layout import StateArray
from oomc.runtime.slabs import Slab


def weights_of(slab: Slab) -> Iterator[tuple[str, torch.Tensor]]:
    """The slab's parameters, trained or not, by name."""
    for place in slab.layout.places:
        yield place.spec.name, slab.param(place.spec.name)


def arrays_of(slab: Slab, arrays: Sequence[StateArray]) -> Iterator[tuple[str, StateArray, torch.Tensor]]:
    """What belongs to each trained parameter beside its weights: `lo` (if it is split) and those of `arrays` there are.

    Yields:
        The parameter's name, the array, and the parameter's elements of it: a flat view. What lies between the views
        is padding.
    """
    for place in slab.layout.places:
        if place.spec.trainable:
            start, stop = place.state_start, place.state_start + place.spec.numel
            if place.spec.dtype == torch.bfloat16:
                yield place.spec.name, StateArray(LO, torch.int16), slab.lo[start:stop]
            for array in arrays:
                if array.name in slab.state:
                    yield place.spec.name, array, slab.state[array.name][array.span(start, stop)]
