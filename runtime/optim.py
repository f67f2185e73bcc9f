"""The protocol of a host optimizer: what a file like `oomc.runtime.adamw` provides. It works element by element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]


class UpdateRule(Protocol):
    """An optimizer as the runtime sees it."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of its state arrays: fp32, one element for each trainable element of a slab, zero at first."""

    def hyper(self, group: Mapping[str, Any]) -> Any:
        """An immutable snapshot of one of the torch optimizer's `param_groups`."""

    def constants(self, hyper: Any, step: int) -> Any:
        """What `update` needs of a snapshot, for a parameter at its `step`-th update (from 1)."""

    def update(
        self, weights: Array, lo: Array | None, state: tuple[Array, ...], gradient: Array, factor: float, constants: Any
    ) -> int:
        """Update one run of elements in place, without the GIL; returns the number of non-finite gradient elements.

        Args:
            weights: int16 [n] (the `hi` bits of a split master) or float32 [n].
            lo: int16 [n] beside `hi`, None beside float32.
            state: float32 [n] for each of `state_names`.
            gradient: int16 [n] (bf16 bits) or int32 [n] (fp32 bits).
            factor: what the gradient is multiplied by first, in fp32.
            constants: as from `constants`.
        """


def compile_rule(rule: UpdateRule) -> None:
    """Compile (or load from numba's cache) all variants of a rule's kernels, so that no step does."""
    wide, narrow = np.zeros(8, np.int32), np.zeros(8, np.int16)
    for gradient in (narrow, wide):
        for split in (True, False):
            weights, lo = (np.zeros(8, np.int16), np.zeros(8, np.int16)) if split else (np.zeros(8, np.float32), None)
            state = tuple(np.zeros(8, np.float32) for _ in rule.state_names)
            rule.update(weights, lo, state, gradient, 1.0, constants=_first_constants(rule))


def _first_constants(rule: UpdateRule) -> Any:
    group = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1.0, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0}
    return rule.constants(rule.hyper(group | {"nesterov": False}), 1)
