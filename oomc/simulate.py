"""Project the device memory of a step graph: run its forms on fake tensors, and follow what lives through the step.

Each form's graph runs once for each batch shape under the same meter that measures real steps, on fake tensors of
the real sizes, so that every temporary is counted and nothing is allocated. The step is then walked node by node.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import fx

from oomc import meta, private, steps
from oomc.program import Program
from oomc.runtime.compute import run_chunks
from oomc.runtime.meter import Meter
from oomc.worksets import Form

GRANULE = 512
"""Bytes to which the CUDA allocator rounds, and an upper bound of the CPU's rounding."""


class Spec(NamedTuple):  # hashed for each argument of each run
    """Size and layout of a tensor on the device. Strides matter: a kernel copies what it cannot read as it lies."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Spec:
        """The spec of a tensor with concrete sizes."""
        return Spec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


@dataclass(frozen=True)
class Output:
    """One result of a form: memory of its own (`storage` numbers it), or that of an argument."""

    spec: Spec
    nbytes: int
    storage: int = -1
    argument: int = -1


@dataclass(frozen=True)
class Profile:
    """What running a form takes: most bytes at once beyond its arguments, and its results (None: no tensor).

    The log is a meter's (oomc.runtime.meter); `numbers` says which of its storages the outputs' storages are.
    """

    peak: int
    outputs: tuple[Output | None, ...]
    log: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    numbers: tuple[int, ...] = ()


@dataclass
class Profiler:
    """Profiles forms for concrete sizes, each once."""

    program: Program
    known: dict[tuple[Any, ...], Profile] = field(default_factory=dict)

    def of(self, program: Program) -> Profiler:
        """The same for another program of the same trace: what is known of forms that both have stays known."""
        return Profiler(program, self.known)

    def profile(
        self,
        form: str,
        variant: str,
        sizes: tuple[int, int],
        chunk: tuple[int, int] | None,
        given: tuple[Spec | None, ...] = (),
    ) -> Profile:
        """The profile of a form's graph for a batch of `sizes`, run in `chunk`s if there are any.

        Arguments lie as `given` says where it says so, the others as in the trace.
        """
        key = (form, variant, sizes, chunk, given)
        if key not in self.known:
            self.known[key] = self._run(self.program.forms[form], variant, sizes, chunk, given)
        return self.known[key]

    def _run(
        self,
        form: Form,
        variant: str,
        sizes: tuple[int, int],
        chunk: tuple[int, int] | None,
        given: tuple[Spec | None, ...],
    ) -> Profile:
        graph: fx.GraphModule = getattr(form, variant)
        mode = private.fake_mode(symbolic=False)
        placeholders = graph.graph.find_nodes(op="placeholder")
        placeholders = placeholders[: len(placeholders) - len(form.carried(variant))]
        with mode:
            args = [
                self.concrete(meta.value(n), sizes, spec)
                for n, spec in zip(placeholders, given or (None,) * len(placeholders), strict=True)
            ]
        owner = {a.untyped_storage()._cdata: i for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
        log: list[tuple[int, int]] = []
        with mode, Meter(granule=GRANULE, log=log) as meter, torch.no_grad():
            if chunk is None:
                results: Sequence[Any] = graph(*args)
            else:
                results = run_chunks(form, variant, lambda name: getattr(form, name), chunk, args, most=2)
            peak = meter.peak
        events = tuple(log)  # before the results die
        outputs: list[Output | None] = []
        numbers: dict[int, int] = {}
        for result in results:
            if not isinstance(result, torch.Tensor):
                outputs.append(None)
                continue
            storage = result.untyped_storage()
            if storage._cdata in owner:
                outputs.append(Output(Spec.of(result), 0, argument=owner[storage._cdata]))
            else:
                number = numbers.setdefault(storage._cdata, len(numbers))
                outputs.append(Output(Spec.of(result), storage.nbytes(), storage=number))
        born = {r.untyped_storage()._cdata: r.untyped_storage() for r in results if isinstance(r, torch.Tensor)}
        return Profile(peak, tuple(outputs), events, tuple(meter.number(born[key]) for key in numbers))

    def concrete(self, val: Any, sizes: tuple[int, int], spec: Spec | None = None) -> Any:
        """A value's fake tensor with symbolic sizes replaced by numbers (call under a fake mode), laid out as given."""
        if isinstance(val, torch.Tensor):
            shape = spec.shape if spec else [self.number(s, sizes) for s in val.shape]
            stride = spec.stride if spec else [self.number(s, sizes) for s in val.stride()]
            return torch.empty_strided(shape, stride, dtype=val.dtype, device=val.device)
        return self.number(val, sizes)

    def number(self, size: Any, sizes: tuple[int, int]) -> Any:
        """A symbolic number's value for a batch of `sizes`."""
        expr = private.expression(size)
        if isinstance(expr, int | float | bool):
            return expr
        symbols = self.program.notes["symbols"]
        return _number(expr, symbols.batch, symbols.sequence, sizes)


@lru_cache(maxsize=1 << 14)
def _number(expr: Any, batch: Any, sequence: Any, sizes: tuple[int, int]) -> int:
    """An expression's value; a program has few, and asks for them at every node."""
    return int(expr.subs({s: v for s, v in ((batch, sizes[0]), (sequence, sizes[1])) if s is not None}))


@dataclass
class Projection:
    """The projected device memory of one step.

    Attributes:
        peak: most bytes at once: slots, resident tensors, inputs, values and temporaries.
        at: name of the node at which the peak occurs.
        fixed: bytes of slots and resident tensors and inputs, in `peak` throughout.
        live: bytes of values alive after each node.
        during: most bytes (fixed included) during each node.
        reserved: bytes that CUDA's allocator reserves for all this, where it is simulated (oomc.replay), else 0.
        limit: the smallest limit of that allocator under which it unmaps nothing, or 0.
    """

    peak: int
    at: str
    fixed: int
    live: dict[str, int]
    during: dict[str, int]
    reserved: int = 0
    limit: int = 0

    @property
    def held(self) -> int:
        """What counts against a budget: what the allocator reserves, or what is allocated where none was simulated."""
        return max(self.peak, self.reserved)


def nbytes(val: Any, number: Any = int) -> int:
    """Bytes of a (fake) tensor's elements."""
    if not isinstance(val, torch.Tensor):
        return 0
    count = val.element_size()
    for size in val.shape:
        count *= number(size)
    return count


def project(program: Program, profiler: Profiler) -> Projection:
    """Walk the scheduled step graph and add up what lives on the device."""
    assert program.step is not None and program.plan is not None
    return Walk(program, profiler).run()


class Walk:
    """A walk through a step graph that follows which storages are alive."""

    def __init__(self, program: Program, profiler: Profiler) -> None:
        assert program.step is not None and program.plan is not None
        self.program, self.profiler, self.plan = program, profiler, program.plan
        self.graph = program.step.graph
        self.sizes = self.plan.sizes
        self.bytes: dict[Any, int] = {}
        self.storages: dict[fx.Node, tuple[Any, ...]] = {}
        self.parts: dict[fx.Node, list[Any]] = {}
        self.specs: dict[fx.Node, Spec] = {}
        self.outputs: dict[fx.Node, tuple[Output | None, ...]] = {}
        self.profiles: dict[fx.Node, Profile] = {}
        self.carried = {str(n.args[1]) for n in self.graph.nodes if n.target is steps.retire_carried}
        self.transient = {node: self._execute(node) for node in self.graph.nodes}  # most bytes that each one takes

    def run(self) -> Projection:
        """The projection of a steady step."""
        carried: dict[str, int] = {}
        for node in self.graph.nodes:
            if node.target is steps.offload and node.args[1] in self.carried:
                storages = {s for grad in node.args[3] for s in self.storages.get(grad, ())}
                carried[node.args[1]] = carried.get(node.args[1], 0) + sum(self.bytes[s] for s in storages)
        # gradients that are carried into the next step are there when it begins
        return self.follow(carried)

    def follow(self, carried: dict[str, int]) -> Projection:
        """The projection with so many bytes of each slab's gradients there from the step before."""
        holders: dict[Any, int] = {}
        fixed = sum(self.pieces())
        last_use = self.last_use
        live_bytes = sum(carried.values())
        peak, at = fixed + live_bytes, "start"
        live: dict[str, int] = {}
        during: dict[str, int] = {}
        for node in self.graph.nodes:
            if node.target is steps.retire_carried:
                live_bytes -= carried.get(str(node.args[1]), 0)
            for storage in self.storages.get(node, ()):
                if holders.get(storage, 0) == 0:
                    live_bytes += self.bytes[storage]
                holders[storage] = holders.get(storage, 0) + 1
            before = live_bytes - sum(self.bytes[s] for s in self.storages.get(node, ()) if holders[s] == 1)
            during[node.name] = fixed + max(before + self.transient[node], live_bytes)
            if during[node.name] > peak:
                peak, at = during[node.name], node.name
            for dead in last_use.get(node, ()):
                for storage in self.storages.get(dead, ()):
                    holders[storage] -= 1
                    if holders[storage] == 0:
                        live_bytes -= self.bytes[storage]
            live[node.name] = live_bytes
        return Projection(peak, at, fixed, live, during)

    def pieces(self) -> list[int]:
        """Bytes of each thing that is there throughout; what updates need, and slabs on the device, as one."""
        inputs = zip(self.program.forward.graph.find_nodes(op="placeholder"), self.program.inputs, strict=True)
        held = [
            self._round(nbytes(meta.value(node), lambda s: self.profiler.number(s, self.sizes)))
            for node, spec in inputs if spec.kind != "parameter"
        ]  # fmt: skip
        return [self.plan.update_bytes, *self.plan.slots, *held, *[GRANULE] * len(self.program.blocks)]

    @staticmethod
    def _round(count: int) -> int:
        return -(-count // GRANULE) * GRANULE

    @cached_property
    def last_use(self) -> dict[fx.Node, list[fx.Node]]:
        """For each node, the values that die with it. What leaves lives until its copy is retired or discarded."""
        position = {n: i for i, n in enumerate(self.graph.nodes)}
        (output,) = self.graph.find_nodes(op="output")
        retired = {n.args[1]: n for n in self.graph.nodes if n.target in (steps.retire, steps.discard)}
        retired |= {n: output for n in self.graph.nodes if n.target is steps.offload and n.args[1] in self.carried}
        dead: dict[fx.Node, list[fx.Node]] = {}
        for node in self.graph.nodes:
            ends = [retired.get(u, u) for u in node.users]
            last = max(ends, key=lambda n: position[n]) if ends else node
            dead.setdefault(last, []).append(node)
        return dead

    def _execute(self, node: fx.Node) -> int:
        """Note the storages of the node's values; returns the most bytes it takes while it runs."""
        if node.target in steps.COMPUTE:
            return self._compute(node)
        if node.target in (steps.add, steps.ones_like, steps.zeros_like):
            size = self._round(nbytes(meta.value(node), lambda s: self.profiler.number(s, self.sizes)))
            self.bytes[node] = size
            self.storages[node] = (node,)
            if node.target is steps.add and node.args[0] in self.specs:
                self.specs[node] = self.specs[node.args[0]]  # type: ignore[index]
            return size
        if node.target is steps.restore:
            size = self._round(nbytes(meta.value(node), lambda s: self.profiler.number(s, self.sizes)))
            self.bytes[node] = size
            self.storages[node] = (node,)
            return size
        if node.target is steps.restored:
            restore: Any = node.args[1]
            self.storages[node] = self.storages[restore]
            self.specs[node] = self.specs[restore.args[1].args[2]]
            return 0
        source = node.args[0] if node.args else None
        if node.target is operator.getitem and source in self.parts:
            storage = self.parts[source][node.args[1]]  # type: ignore[index]
            self.storages[node] = () if storage is None else storage
            output = self.outputs[source][node.args[1]]  # type: ignore[index]
            if output is not None:
                self.specs[node] = output.spec
        return 0

    def _compute(self, node: fx.Node) -> int:
        chunked = node.target is steps.run_chunks
        form, variant = str(node.args[1]), str(node.args[2])
        chunk = node.args[3] if chunked else None
        args = node.args[4:] if chunked else node.args[3:]
        given = tuple(self.specs.get(a) if isinstance(a, fx.Node) else None for a in args)
        profile = self.profiler.profile(form, variant, self.sizes, chunk, given)  # type: ignore[arg-type]
        self.outputs[node], self.profiles[node] = profile.outputs, profile
        parts: list[Any] = []
        for out in profile.outputs:
            if out is None:
                parts.append(None)
            elif out.argument >= 0:
                source = args[out.argument]
                parts.append(self.storages.get(source, ()) if isinstance(source, fx.Node) else ())
            else:
                storage = (node, out.storage)
                self.bytes[storage] = self._round(out.nbytes)
                parts.append((storage,))
        self.parts[node] = parts
        self.storages[node] = tuple(s for p in parts if p for s in p)
        return self._round(profile.peak)
