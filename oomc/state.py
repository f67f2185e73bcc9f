"""The state of a training run: slabs on host and device, what they need, and how they move between the two."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from oomc.errors import BudgetError, UnsupportedError
from oomc.limits import host_memory
from oomc.load import materialize, weights_of
from oomc.plan import Updates, bytes_table, format_bytes
from oomc.program import Program
from oomc.runtime.gradients import BUFFER_ELEMENTS, CHUNK_ELEMENTS, ring_buffers
from oomc.runtime.groups import GroupedSlab
from oomc.runtime.layout import ParamSpec, SlabLayout, StateArray
from oomc.runtime.memory import Preparation
from oomc.runtime.pool import physical_cores
from oomc.runtime.slabs import DeviceSlab, HostSlab, Slab
from oomc.runtime.updates import Where, chunk_bytes_of
from oomc.worksets import Slab as PlannedSlab

CUDA_PROCESS = 1_310_000_000
"""Host bytes that a process takes beyond imports and CUDA's start: libraries that CUDA loads when they are first
called, kernels that are compiled, and the trace. 1.16 to 1.31 GB were measured (docs/RESULTS.md)."""


class State:
    """All slabs of a model.

    Args:
        model: its parameters come to alias the slabs.
        device: where the compute is.
        host_budget: bytes, or None for all that there is.
        arrays: of the update rule.
        where: who updates slabs on the host.
        keep: gradients are kept until their norm is known.

    Attributes:
        slabs: in the order of the program, those of a layer's groups of experts as one; empty until `take`.
        chunk_elements, buffer_elements: of updates; known from `size_updates` on.
        workers: threads that update on the host.
    """

    def __init__(
        self, model: torch.nn.Module, device: torch.device, host_budget: int | None, arrays: Sequence[StateArray],
        where: Where, keep: bool,
    ) -> None:  # fmt: skip
        self.model, self.device, self.host_budget = model, device, host_budget
        self.arrays, self.where, self.keep = tuple(arrays), where, keep
        self.slabs: list[Slab] = []
        self.accumulates = False
        self.chunk_elements, self.buffer_elements = CHUNK_ELEMENTS, BUFFER_ELEMENTS
        self.workers = physical_cores()

    def size_updates(self, program: Program) -> Updates:
        """Choose the size of chunks and of the gradient ring by the model's largest slab."""
        layouts = [s.layout for s in program.slabs]
        largest = max((lay.state_elements for lay in layouts), default=0)
        self.chunk_elements = min(CHUNK_ELEMENTS, max(4096, largest // 8))
        self.buffer_elements = min(BUFFER_ELEMENTS, max(1024, self.chunk_elements // 2))
        return self.updates

    @property
    def updates(self) -> Updates:
        """What a plan must know of them."""
        return Updates(
            self.arrays,
            chunk_bytes_of(self.chunk_elements),
            self.keep,
            self.where,
            self.accumulates,
            self.ring_bytes,
            self.process_bytes,
        )

    @property
    def ring_bytes(self) -> int:
        """Host bytes through which gradients pass."""
        return ring_buffers(self.workers) * chunk_bytes_of(self.buffer_elements)

    @property
    def process_bytes(self) -> int:
        """Host bytes of what training loads and compiles beside its state: none are counted on the stand-in."""
        return CUDA_PROCESS if self.device.type == "cuda" else 0

    @property
    def moved(self) -> list[Slab]:
        """What is moved and updated as one: the slabs, those of experts in groups by their parts."""
        return [part for slab in self.slabs for part in (slab.parts if isinstance(slab, GroupedSlab) else (slab,))]

    @property
    def resident(self) -> frozenset[str]:
        """Names of the slabs on the device."""
        return frozenset(slab.name for slab in self.slabs if slab.on_device)

    def host_needed(self, program: Program, resident: Collection[str]) -> dict[str, int]:
        """Host bytes by purpose."""
        host = [s for s in program.slabs if s.name not in resident]
        updates = self.updates
        return {
            "working weights": sum(s.layout.weight_bytes for s in host),
            "optimizer state and exact masters": sum(s.layout.state_bytes(self.arrays) for s in host),
            f"gradients kept{', summed in fp32' if self.accumulates else ''}": sum(map(updates.kept_bytes, host)),
            "values between forward and backward": 0 if program.plan is None else program.plan.host_value_bytes,
            "gradients in flight": self.ring_bytes,
            "libraries of CUDA, compiled kernels": self.process_bytes,
        }

    def check_host(self, program: Program, resident: Collection[str]) -> None:
        """Refuse a host budget that cannot work."""
        needed = self.host_needed(program, resident)
        allowed = self.host_budget or host_memory()
        total = sum(needed.values())
        if total > allowed:
            rows = [*needed.items(), ("needed", total), ("allowed", allowed)]
            raise BudgetError(
                f"the model does not fit the host budget:\n{bytes_table(rows)}\n"
                f"The smallest host budget that works is {total} bytes ({format_bytes(total)})",
                smallest_host=total,
            )

    def take(self, program: Program, resident: Collection[str]) -> None:
        """Move the model's weights into slabs, block by block, those of `resident` on the device.

        Parameters without memory, of a model from `oomc.load`, are read from where their values are.
        """
        self.check_host(program, resident)
        params = dict(self.model.named_parameters())
        source = weights_of(self.model)
        names = [place.spec.name for layout, _ in layouts(program.slabs) for place in layout.places]
        empty = [n for n in names if params[n].is_meta]
        if empty and source is None:
            raise UnsupportedError(
                f"{len(empty)} parameters are on the meta device and have no values ({empty[0]}, ...); load the "
                "weights before compiling (from_pretrained, or to_empty and initialise), or build the model with "
                "oomc.load"
            )
        if source is not None:
            source.check(self.model)
        total = sum(s.layout.weight_bytes + s.layout.state_bytes(self.arrays) for s in program.slabs)
        with Preparation(total, self.workers) as preparation:
            # those that an earlier, failed attempt has taken stay where they are
            for layout, parts in layouts(program.slabs)[len(self.slabs) :]:
                slab = self._make(layout, layout.name in resident, preparation, parts)
                names = [place.spec.name for place in layout.places]
                absent = [n for n in names if params[n].is_meta]
                for name in names:
                    if name not in absent:
                        slab.load(name, params[name])
                for name, value in source.read(absent) if source is not None else ():
                    slab.load(name, value)
                    del value  # or the next one would come beside it
                # only now, when the slab has all of them: what fails before leaves the parameters alone
                self.slabs.append(slab)
                self._bind(slab, params)
        if self.resident != frozenset(resident):
            self.move(program, resident)

    def bind(self) -> None:
        """Let every parameter alias its slab, also where an interrupt has come between the two."""
        params = dict(self.model.named_parameters())
        for slab in self.slabs:
            self._bind(slab, params)

    def holds(self, values: torch.Tensor) -> bool:
        """Whether these lie in a slab's weights."""
        address = values.data_ptr()
        return any(
            slab.weights.data_ptr() <= address < slab.weights.data_ptr() + slab.weights.nbytes for slab in self.slabs
        )

    @staticmethod
    def _bind(slab: Slab, params: Mapping[str, torch.nn.Parameter]) -> None:
        for place in slab.layout.places:
            name = place.spec.name
            if params[name].is_meta:
                materialize(params[name], slab.param(name))
            else:
                params[name].data = slab.param(name)

    def move(self, program: Program, resident: Collection[str]) -> bool:
        """Move slabs between host and device until those of `resident` are there; whether any moved."""
        if self.resident == frozenset(resident):
            return False
        self.check_host(program, resident)
        params = dict(self.model.named_parameters())
        moved = [i for i, slab in enumerate(self.slabs) if slab.on_device != (slab.name in resident)]
        for index in sorted(moved, key=lambda i: not self.slabs[i].on_device):  # first those that make room
            old = self.slabs[index]
            new = self._make(old.layout, not old.on_device)
            new.copy_from(old)
            self._bind(new, params)
            self.slabs[index] = new
            old.close()
        return True

    def _make(
        self, layout: SlabLayout, on_device: bool, preparation: Preparation | None = None,
        parts: Sequence[SlabLayout] = (),
    ) -> Slab:  # fmt: skip
        if on_device:
            slab = DeviceSlab(layout, self.device)
            slab.add_state(self.arrays if layout.state_elements else ())
            return slab
        cuda = self.device.type == "cuda"
        pin_state = cuda and self.where != "host"
        if parts:
            return GroupedSlab(layout, parts, cuda, pin_state, self.arrays, preparation)
        return HostSlab(layout, cuda, pin_state, self.arrays, preparation)


def layouts(slabs: Sequence[PlannedSlab]) -> list[tuple[SlabLayout, tuple[SlabLayout, ...]]]:
    """How the slabs of a program lie in memory: each one's layout, and those of the parts that it is moved in.

    Groups of a layer's experts are parts of one slab, in which every parameter is whole.
    """
    result: dict[str, tuple[SlabLayout, tuple[SlabLayout, ...]]] = {}
    for slab in slabs:
        if not slab.whole:
            result[slab.name] = slab.layout, ()
        elif slab.whole not in result:
            parts = tuple(s.layout for s in slabs if s.whole == slab.whole)
            specs: dict[str, ParamSpec] = {}
            for spec in (place.spec for part in parts for place in part.places):
                assert spec.rows is not None
                shape = (spec.rows.of, *spec.shape[1:])
                specs.setdefault(spec.rows.param, ParamSpec(spec.rows.param, shape, spec.dtype, spec.trainable))
            result[slab.whole] = SlabLayout.build(slab.whole, list(specs.values())), parts
    return list(result.values())
