"""The protocol of an optimizer: what a file like `oomc.runtime.adamw` provides. It works element by element."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from oomc.runtime.layout import StateArray

Array: TypeAlias = np.ndarray[Any, Any]


def salt_of(name: str) -> int:
    """A parameter's salt: 31 bits that its name alone decides."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


class UpdateRule(Protocol):
    """An optimizer as the runtime sees it. Both of its updates give the same bits for the same numbers."""

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """Its state arrays, zero at first."""

    def hyper(self, group: Mapping[str, Any]) -> Any:
        """An immutable snapshot of one of the torch optimizer's `param_groups`."""

    def constants(self, hyper: Any, step: int, salt: int) -> Any:
        """What an update needs of a snapshot, for a parameter at its `step`-th update (from 1).

        `salt` is a number of the parameter's own (32 bits), for rules that round at random.
        """

    def update(
        self, weights: Array, lo: Array | None, state: tuple[Array, ...], gradient: Array, factor: float,
        constants: Any, start: int,
    ) -> int:  # fmt: skip
        """Update one run of a parameter's elements in place on the host, without the GIL.

        Args:
            weights: int16 [n] (the `hi` bits of a split master) or float32 [n].
            lo: int16 [n] beside `hi`, None beside float32.
            state: for each of `arrays`, the part that belongs to these elements, as `StateArray.bits`.
            gradient: int16 [n] (bf16 bits) or int32 [n] (fp32 bits).
            factor: what the gradient is multiplied by first, in fp32.
            constants: as from `constants`.
            start: index in the parameter of the first element, a multiple of every array's `block`.

        Returns:
            The number of gradient elements that are not finite, after `factor`.
        """

    def update_cuda(
        self, weights: torch.Tensor, lo: torch.Tensor | None, state: tuple[torch.Tensor, ...], gradient: torch.Tensor,
        factor: float, constants: Any, start: int, nonfinite: torch.Tensor,
    ) -> None:  # fmt: skip
        """The same on the current stream of a CUDA device, with tensors there.

        Args:
            weights: int16 [n] or float32 [n].
            lo: int16 [n] or None.
            state: of the dtypes of `arrays`.
            gradient: bfloat16 [n] or float32 [n].
            factor: as for `update`.
            constants: as for `update`.
            start: as for `update`.
            nonfinite: int32 [1], to which the number of non-finite elements is added.
        """


def compile_rule(rule: UpdateRule) -> None:
    """Compile (or load from numba's cache) all variants of a rule's host kernels, so that no step does."""
    for bits in (np.int16, np.int32):
        for split in (True, False):
            weights, lo = (np.zeros(8, np.int16), np.zeros(8, np.int16)) if split else (np.zeros(8, np.float32), None)
            state = tuple(np.zeros(array.elements(8), array.bits) for array in rule.arrays)
            rule.update(weights, lo, state, np.zeros(8, bits), 1.0, _first_constants(rule), 0)


def _first_constants(rule: UpdateRule) -> Any:
    group = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1.0, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0}
    return rule.constants(rule.hyper(group | {"nesterov": False}), 1, 0)
