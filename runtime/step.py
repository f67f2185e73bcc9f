"""The runtime as the step graph's words see it: the executor's lanes with the compute lane beside them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from oomc.runtime.compute import run_chunks
from oomc.runtime.executor import Runtime
from oomc.runtime.gradients import Clipping
from oomc.runtime.slabs import Slab
from oomc.runtime.values import HostValues
from oomc.runtime.weights import WeightBuffers

if TYPE_CHECKING:
    from oomc.program import Program
    from oomc.runtime.gradients import GradientTicket
    from oomc.runtime.weights import Fetch
    from oomc.worksets import Form

GOLDEN = 0x9E3779B97F4A7C15
"""Odd constant of the golden ratio, which spreads block numbers over the seed's 64 bits (Knuth, TAOCP 3, 6.4)."""


class StepRuntime(Runtime):
    """What a scheduled module calls as `rt`.

    Args (beside Runtime's):
        residents: buffers and constants by name, wherever the user keeps them.
        seed: of dropout.
    """

    def __init__(
        self,
        *args: Any,
        residents: Mapping[str, torch.Tensor],
        seed: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._adversary = kwargs.get("adversary")
        self.seed = seed
        self._forms: Mapping[str, Form] = {}
        self._compiled: Mapping[tuple[str, str], Callable[..., Any]] = {}
        self._sources = dict(residents)
        self._residents = {name: t.detach().to(self.device) for name, t in residents.items()}
        self._versions = {name: t._version for name, t in residents.items()}
        self.steps = 0
        self._max_norm: float | None = None

    @property
    def residents(self) -> tuple[torch.Tensor, ...]:
        """All buffers and constants on the device."""
        return tuple(self._residents.values())

    def begin(
        self, program: Program, hypers: Sequence[Any], max_norm: float | None, carried: Collection[str] = ()
    ) -> None:
        """Start a step of a program; buffers that the user has written to since the last one are copied again.

        Args:
            program: what is run next, with its plan, forms and compiled functions.
            hypers: snapshots of the parameter groups.
            max_norm: what the global norm is clipped to.
            carried: slabs whose gradients of the step before the module retires itself.
        """
        plan = program.plan
        assert plan is not None
        self._forms, self._compiled = program.forms, program.compiled
        self.begin_step(hypers, weighted=plan.accumulate, carried=carried)
        self._max_norm = max_norm
        self.steps += 1
        for name, source in self._sources.items():
            if source._version != self._versions[name]:
                version = source._version
                self._residents[name] = source.detach().to(self.device)
                self._versions[name] = version  # last: an interrupt must not leave the old values for the new
        self.set_where(plan.where)
        if [slot.nbytes for slot in self._buffers.slots] != list(plan.slots):
            self._buffers.close()
            self._buffers = WeightBuffers(plan.slots, self.device, self._h2d, self._adversary)
        if self._values.sizes != plan.host_slots:
            self._h2d.drain()  # the last step's copies may not have arrived yet
            self._d2h.drain()
            self._values.close()
            self._values = HostValues(plan.host_slots, self.device, self._d2h, self._h2d, self._adversary)

    def release_slots(self) -> None:
        """Free the weight slots; the next step takes those of its plan. Nothing may be under way."""
        self._buffers.close()
        self._buffers = WeightBuffers((), self.device, self._h2d, self._adversary)

    def replace_slabs(self, slabs: Sequence[Slab]) -> None:
        """Use other slabs of the same names: they have moved. Nothing may be under way."""
        self.slabs = {slab.name: slab for slab in slabs}

    def abort(self, earlier: bool, steps: int) -> bool:
        """Give up the step under way: wait for the lanes, free the slots, forget what was kept.

        Args:
            earlier: whether gradients of micro-batches before this one are kept.
            steps: what `steps` was before.

        Returns:
            Whether the state is neither that before the step nor that after it: parameters have been updated, or
            gradients been added to the sums of earlier micro-batches, or a lane has failed.
        """
        try:
            self._h2d.drain()
            self._d2h.drain()
            for slab in self.slabs.values():
                slab.abandon()
            self.synchronize()
        except RuntimeError:
            return True
        self._leaving.clear()
        self._buffers.reset()
        self._values.reset()
        counts = self._counts
        if counts.updates > 0 or counts.applying or (earlier and counts.offloads > 0):
            return True
        if not earlier:
            self.drop_kept()
        self.steps = steps
        return False

    def resident(self, name: str) -> torch.Tensor:
        """A buffer or constant on the device."""
        return self._residents[name]

    def rng(self, block: int) -> torch.Tensor:
        """int64 [2]: the block's seed, and the number of the step."""
        seed = (self.seed + (block + 1) * GOLDEN) % 2**64
        return torch.tensor([seed - 2**64 if seed >= 2**63 else seed, self.steps], device=self.device)

    def run(self, form: str, variant: str, args: Sequence[Any]) -> tuple[Any, ...]:
        """Compute a form's graph."""
        return self._compiled[form, variant](*args)

    def run_chunks(self, form: str, variant: str, chunk: tuple[int, int], args: Sequence[Any]) -> tuple[Any, ...]:
        """Compute a form's graph tile by tile."""
        return run_chunks(self._forms[form], variant, lambda name: self._compiled[form, name], chunk, args)

    def wait_weights(self, fetch: Fetch) -> tuple[torch.Tensor, ...]:
        """Wait for a fetch; the slab's parameters."""
        self.wait(fetch)
        return self.weights(fetch)

    def device_weights(self, slab: str) -> tuple[torch.Tensor, ...]:
        """The parameters of a slab on the device."""
        return self.held(slab)

    def update(self, slab: str, copies: Sequence[GradientTicket], mode: str) -> None:
        """Update a slab: with gradients as they arrive, which `offload` has begun already, or with their sum."""
        if mode == "sum":
            self.update_sum(slab)

    def apply(self, copies: Sequence[GradientTicket]) -> None:
        """Update all slabs with what was kept."""
        self.apply_kept(Clipping(self._max_norm))
