"""The runtime as the step graph's words see it: the executor's lanes with the compute lane beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from oomc.runtime.compute import run_chunks
from oomc.runtime.executor import Runtime
from oomc.runtime.weights import WeightBuffers

if TYPE_CHECKING:
    from oomc.runtime.gradients import GradientTicket
    from oomc.runtime.weights import Fetch
    from oomc.worksets import Form

GOLDEN = 0x9E3779B97F4A7C15
"""Odd constant of the golden ratio, which spreads block numbers over the seed's 64 bits (Knuth, TAOCP 3, 6.4)."""


class StepRuntime(Runtime):
    """What a scheduled module calls as `rt`.

    Args (beside Runtime's):
        forms: by key.
        compiled: callables by (form, variant).
        residents: buffers and constants by name, wherever the user keeps them.
        seed: of dropout.
    """

    def __init__(
        self,
        *args: Any,
        forms: Mapping[str, Form],
        compiled: Mapping[tuple[str, str], Callable[..., Any]],
        residents: Mapping[str, torch.Tensor],
        seed: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._adversary = kwargs.get("adversary")
        self._forms, self._compiled, self._seed = forms, compiled, seed
        self._sources = dict(residents)
        self._residents = {name: t.detach().to(self.device) for name, t in residents.items()}
        self._versions = {name: t._version for name, t in residents.items()}
        self.steps = 0

    @property
    def residents(self) -> tuple[torch.Tensor, ...]:
        """All buffers and constants on the device."""
        return tuple(self._residents.values())

    def begin_step(self, hypers: Sequence[Any] = ()) -> None:
        """Start a step; buffers that the user has written to since the last one are copied again."""
        super().begin_step(hypers)
        self.steps += 1
        for name, source in self._sources.items():
            if source._version != self._versions[name]:
                self._versions[name] = source._version
                self._residents[name] = source.detach().to(self.device)

    def abort(self, accumulate: bool) -> bool:
        """Give up the step under way: wait for the lanes, and free the slots.

        Returns:
            Whether the state is neither that before the step nor that after it: parameters have been updated, or
            gradients been added to the sums of earlier micro-batches, or a lane has failed.
        """
        try:
            self._h2d.drain()
            self._d2h.drain()
            self.synchronize()
        except RuntimeError:
            return True
        self._buffers.reset()
        if accumulate:
            return self._counts.d2h_bytes > 0
        for slab in self.slabs.values():
            slab.accumulated.clear()
        return self._counts.updates > 0

    def set_slots(self, sizes: Sequence[int]) -> None:
        """Take other device slots for weights where a plan wants other sizes than the ones there are."""
        if [slot.nbytes for slot in self._buffers.slots] != list(sizes):
            self._buffers.close()
            self._buffers = WeightBuffers(sizes, self.device, self._h2d, self._adversary)

    def resident(self, name: str) -> torch.Tensor:
        """A buffer or constant on the device."""
        return self._residents[name]

    def rng(self, block: int) -> torch.Tensor:
        """int64 [2]: the block's seed, and the number of the step."""
        seed = (self._seed + (block + 1) * GOLDEN) % 2**64
        return torch.tensor([seed - 2**64 if seed >= 2**63 else seed, self.steps], device=self.device)

    def run(self, form: str, variant: str, args: Sequence[Any]) -> tuple[Any, ...]:
        """Compute a form's graph."""
        return self._compiled[form, variant](*args)

    def run_chunks(self, form: str, variant: str, chunk: tuple[int, int], args: Sequence[Any]) -> tuple[Any, ...]:
        """Compute a form's graph tile by tile."""
        return run_chunks(self._forms[form], variant, self._compiled[form, variant], chunk, args)

    def wait_weights(self, fetch: Fetch) -> tuple[torch.Tensor, ...]:
        """Wait for a fetch; the slab's parameters."""
        self.wait(fetch)
        return self.weights(fetch)

    def update(self, slab: str, copies: Sequence[GradientTicket], accumulated: bool) -> None:
        """Update a slab: with gradients as they arrive, which `offload` has begun already, or with their sum."""
        if accumulated:
            self.update_accumulated(slab)
