"""How long a scheduled step takes: its lanes simulated on a machine, without running anything.

    line = simulate(program, Costs(program, machine))
    line.step_s, line.bound, line.limits["host memory"], line.exposed["update"]

The compute lane's nodes run in order, each as long as its cost says; fetches run on the h2d lane in order, gradients
leave and updates run beside them (oomc.contention), and waits, releases and retires join the lanes as the runtime does:
a wait for weights or gradients stops the compute, and those that the runtime answers on the host also stop it from
issuing more. A few steps are simulated in sequence, since updates run under the next step's forward; the last one is
reported. Other words (values that wait on the host) count by their lane: their bytes are copied once the compute has
come to them, and a compute word waits for what it is given from other lanes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from tabulate import tabulate
from torch import fx

from oomc import meta, steps
from oomc.contention import Copy, Job, Kind, World
from oomc.cost import Costs
from oomc.plan import Updates
from oomc.program import Program
from oomc.worksets import Slab

ENOUGH = 0.75
"""The share of the step from which on its largest limit is said to bound it."""


@dataclass(frozen=True)
class Event:
    """Something that ran: from `start` to `end` in seconds since the step began, `bytes` moved."""

    lane: str
    name: str
    block: int
    start: float
    end: float
    bytes: int


@dataclass(frozen=True)
class Timeline:
    """One steady step.

    Attributes:
        step_s: seconds from the end of the step before to its end.
        events: of all lanes, by start; updates may end after the step.
        busy: seconds that each lane works.
        exposed: seconds that the compute waits, by reason: `weights` (their copy), `update` (of weights, before their
            copy or use), `gradients` (that must leave), `values` (that leave or come back).
        limits: seconds that the step cannot be faster than, were each resource the only one.
        bound: the resource with the largest limit, or `dependency` where even that is well below the step.
        moved: bytes that each direction of the link moves.
    """

    step_s: float
    events: tuple[Event, ...]
    busy: dict[str, float]
    exposed: dict[str, float]
    limits: dict[str, float]
    bound: str
    moved: dict[str, int]

    def describe(self) -> str:
        """A few lines for reports."""
        rows = [(name, f"{s:.3f} s", f"{100 * s / self.step_s:.0f}%") for name, s in self.limits.items()]
        waits = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.exposed.items() if seconds > 1e-4)
        header = ("limit", "seconds", "of the step")
        table = tabulate(rows, header, colalign=("left", "right", "right"), tablefmt="plain")
        return f"step {self.step_s:.3f} s, bound by {self.bound}; compute waits for {waits or 'nothing'}\n{table}"


def simulate(
    program: Program, costs: Costs, updates: Updates | None = None, *, repeat: int = 3, record: bool = True
) -> Timeline:
    """The timeline of a scheduled program's steady step.

    Args:
        program: with plan and scheduled step graph.
        costs: of its forms, on the machine in question.
        updates: the optimizer's state; AdamW's in fp32 if None.
        repeat: steps in sequence, the last of which is reported.
        record: whether events are kept.
    """
    return _Simulation(StepArrays.of(program, costs), costs, updates or Updates()).run(repeat, record)


@dataclass
class StepArrays:
    """A scheduled step graph as a list of plain tuples: (word, name, block, ...)."""

    program: Program
    ops: list[tuple[Any, ...]] = field(default_factory=list)
    order: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(program: Program, costs: Costs) -> StepArrays:
        """Read the graph once."""
        assert program.step is not None and program.plan is not None
        return _Reader(program, costs).read()


class _Reader:
    def __init__(self, program: Program, costs: Costs) -> None:
        assert program.plan is not None
        self.program, self.costs, self.sizes = program, costs, program.plan.sizes
        self.slabs = {slab.name: slab for slab in program.slabs}
        self.arrays = StepArrays(program)
        self.tokens: dict[fx.Node, int] = {}
        self.copied: dict[fx.Node, int] = {}
        self.gradients: dict[str, dict[str, tuple[int, int]]] = {}

    def read(self) -> StepArrays:
        assert self.program.step is not None
        for node in self.program.step.graph.nodes:
            lane = steps.LANES.get(node.target, "none") if node.op == "call_function" else "none"
            if lane == "none":
                continue
            rest = self._rest(node, lane)
            self.arrays.ops.append((node.target, node.name, meta.note(node).block, *rest))
            if lane in ("h2d", "d2h") and node.target not in (steps.await_update, steps.count):
                self.tokens[node] = len(self.arrays.ops) - 1
        return self.arrays

    def _rest(self, node: fx.Node, lane: str) -> tuple[Any, ...]:
        """What the simulation needs to know of a node besides its word, name and block."""
        target, args = node.target, node.args
        if target is steps.run:
            return ("run", self.costs.seconds(args[1], args[2], self.sizes))  # type: ignore[arg-type]
        if target is steps.run_chunks:
            return ("run", self.costs.seconds(args[1], args[2], self.sizes, tuple(args[3])))  # type: ignore[arg-type]
        if target in (steps.add, steps.ones_like, steps.zeros_like, steps.rng):
            passes = 3 if target is steps.add else 1
            machine = self.costs.machine
            return ("run", passes * self._nbytes(node) / machine.bandwidth + machine.launch)
        if target in (steps.fetch, steps.await_update, steps.device_weights, steps.retire_carried):
            slab = str(args[1])
            if target in (steps.fetch, steps.device_weights):
                self.arrays.order.setdefault(slab, len(self.arrays.order))
            if target is steps.fetch:
                return (slab, args[2], self.slabs[slab].layout.weight_bytes)
            return (slab,)
        if target in (steps.wait, steps.retire):
            return (self.tokens[args[1]],)  # type: ignore[index]
        if target is steps.release:
            return (args[1].args[2],)  # type: ignore[union-attr]
        if target is steps.offload:
            return (str(args[1]), args[4], *self._gradient(str(args[1]), args[2]))
        if target is steps.update:
            return (str(args[1]), args[3], tuple(self.tokens[c] for c in args[2]))  # type: ignore[union-attr, index]
        if target in (steps.apply, steps.count):
            return ()
        return ("other", lane, self._nbytes_of_copy(node), self._sources(node))

    def _nbytes(self, node: fx.Node) -> int:
        return self.costs.nbytes(meta.value(node), self.sizes)

    def _nbytes_of_copy(self, node: fx.Node) -> int:
        """Bytes that another word's copy moves: of its own value, else of what it is given, else of a copy before."""
        if node not in self.copied:
            given = [n for n in node.all_input_nodes if n.op != "placeholder"]
            tensors = [meta.value(n) for n in given if isinstance(meta.value(n), torch.Tensor)]
            own = self._nbytes(node) or self.costs.nbytes(tensors, self.sizes)
            self.copied[node] = own or sum(self.copied.get(n, 0) for n in given)
        return self.copied[node]

    def _sources(self, node: fx.Node) -> tuple[int, ...]:
        """Tokens of other lanes among a node's arguments."""
        return tuple(self.tokens[n] for n in node.all_input_nodes if n in self.tokens)

    def _gradient(self, slab: str, names: Any) -> tuple[int, int]:
        """Parameters that gradients of these names update, and their bytes."""
        if slab not in self.gradients:
            places = self.slabs[slab].layout.places
            self.gradients[slab] = {p.spec.name: (p.spec.numel, p.spec.nbytes) for p in places}
        known = [self.gradients[slab][name] for name in names]
        return sum(n for n, _ in known), sum(b for _, b in known)


class _Simulation:
    """The thread that issues the compute, and the compute itself; everything else is the World's."""

    def __init__(self, arrays: StepArrays, costs: Costs, updates: Updates) -> None:
        program = arrays.program
        assert program.plan is not None
        self.arrays, self.machine, self.plan = arrays, costs.machine, program.plan
        self.slabs = {slab.name: slab for slab in program.slabs}
        self.resident = frozenset(program.plan.resident)
        self.moved, self.grad = bytes_of_a_parameter(program.slabs, updates)
        self.world = World(costs.machine, program.plan.where, self.moved, self.grad)
        self.compute = self.issue = 0.0  # when the compute so far is done, and when the host may issue more
        self.slots: dict[int, float] = defaultdict(float)
        self.pending: dict[str, list[Job]] = defaultdict(list)
        self.leaving: dict[str, list[Copy | Job]] = defaultdict(list)
        self.exposed: dict[str, float] = {}
        self.events: list[Event] = []
        self.items: list[Copy | Job] = []
        self.work = 0.0

    def run(self, repeat: int, record: bool) -> Timeline:
        began, busy, moved = 0.0, {}, {}
        for number in range(repeat):
            began, busy, moved = self.compute, dict(self.world.busy), dict(self.world.moved_bytes)
            self.exposed = {"weights": 0.0, "update": 0.0, "gradients": 0.0, "values": 0.0}
            self.work = 0.0
            self.events, self.items = [], [] if number < repeat - 1 else list(self._under_way())
            self._step()
        step_s = self.compute - began
        own = {lane: self.world.busy[lane] - busy[lane] for lane in busy}
        total = {lane: int(self.world.moved_bytes[lane] - moved[lane]) for lane in moved}
        if record:
            self.world.drain()
        limits = self._limits()
        most = max(limits, key=lambda name: limits[name])
        bound = most if limits[most] >= ENOUGH * step_s else "dependency"
        events = tuple(sorted(self._events(began), key=lambda e: e.start)) if record else ()
        return Timeline(step_s, events, {"compute": self.work, **own}, self.exposed, limits, bound, total)

    def _under_way(self) -> list[Copy | Job]:
        return [*self.world.lanes["h2d"], *self.world.lanes["d2h"], *self.world.jobs]

    # -- one step -------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self.tokens: dict[int, Copy | Job] = {}
        self.kept: list[Job] = []
        self.sums: dict[str, tuple[float, list[Copy]]] = {}
        self.awaited: dict[str, Copy] = {}
        self.totals = {"h2d": 0.0, "d2h": 0.0, "params": 0.0, "behind": 0.0}
        for index, (word, name, block, *rest) in enumerate(self.arrays.ops):
            if rest and rest[0] == "run":
                self._run(name, block, rest[1])
            elif word is steps.fetch:
                slab, slot, nbytes = rest
                self.totals["h2d"] += nbytes
                ready = max(self.issue, self.slots[slot])
                behind = self.awaited.pop(slab, None)
                self.tokens[index] = self._put(Copy("h2d", name, block, nbytes, ready, behind=behind))
            elif word is steps.await_update:
                jobs = tuple(job for job in self.pending[rest[0]] if job.end < 0)
                self.awaited[rest[0]] = self._put(Copy("h2d", name, block, 0, self.issue, jobs))
                self.pending[rest[0]] = list(jobs)
            elif word is steps.wait:
                self._wait_copy(self.tokens[rest[0]], "weights")  # type: ignore[arg-type]
            elif word is steps.release:
                self.slots[rest[0]] = max(self.compute, self.issue)
            elif word is steps.device_weights:
                jobs = tuple(self.pending.pop(rest[0], ()))
                self.world.until(jobs)
                self._join(max((job.end for job in jobs), default=0.0), "update", blocks=True)
            elif word is steps.offload:
                self.tokens[index] = self._offload(name, block, *rest)
            elif word is steps.retire:
                self._retire(self.tokens[rest[0]])
            elif word is steps.retire_carried:
                for item in self.leaving.pop(rest[0], ()):
                    self._retire(item)
            elif word is steps.update and rest[1] == "sum":
                self._update_sum(name, block, rest[0])
            elif word is steps.apply:
                self._apply(name, block)
            elif rest and rest[0] == "other":
                self._other(index, name, block, *rest[1:])
        # whoever reads the loss waits for the compute, so that the next step is issued only then
        self.compute = self.issue = max(self.compute, self.issue)

    def _run(self, name: str, block: int, seconds: float) -> None:
        start = max(self.compute, self.issue)
        self.compute = start + seconds
        self.work += seconds
        self.events.append(Event("compute", name, block, start, self.compute, 0))

    def _put(self, copy: Copy) -> Copy:
        self.items.append(copy)
        return self.world.put(copy)

    def _join(self, time: float, reason: str, blocks: bool = False) -> None:
        """Let the compute wait until `time`; with `blocks` the thread that issues it waits too."""
        at = max(self.compute, self.issue)
        if time > at:
            self.exposed[reason] += time - at
        self.compute = max(at, time)
        if blocks:
            self.issue = max(self.issue, time)

    def _wait_copy(self, copy: Copy, reason: str) -> None:
        self.world.until((copy,))
        if copy.behind is not None:
            self._join(min(copy.behind.cleared, copy.end), "update")
        self._join(copy.end, reason)
        self.issue = max(self.issue, copy.issued)

    def _offload(self, name: str, block: int, slab: str, mode: str, params: int, nbytes: int) -> Copy | Job:
        ready = max(self.compute, self.issue)
        resident = slab in self.resident
        order = self.arrays.order.get(slab, 0)
        if not resident:
            self.totals["d2h"] += nbytes
        if mode == "update" or (mode == "keep" and resident):
            job = Job(name, block, params, 0 if resident else nbytes, order, resident)
            if mode == "update":
                self._begin(slab, job, (self._put(Copy("d2h", name, block, 0, ready)),))
            else:
                self.kept.append(job)
                self.pending[slab].append(job)
            self.leaving[slab].append(job)
            return job
        kind: Kind = "keep" if mode == "keep" else "sum"
        copy = self._put(Copy("d2h", name, block, 0 if resident else nbytes, ready, kind=kind))
        known, copies = self.sums.get(slab, (0.0, []))
        whole = self.slabs[slab].layout.trainable_elements
        self.sums[slab] = (whole if mode == "sum" else known + params, [*copies, copy])
        self.leaving[slab].append(copy)
        return copy

    def _begin(self, slab: str, job: Job, after: tuple[Copy, ...]) -> None:
        job.after = after
        if not job.resident:
            self.totals["params"] += job.params
        self.pending[slab].append(job)
        self.items.append(job)
        self.world.begin(job)

    def _update_sum(self, name: str, block: int, slab: str) -> None:
        params, copies = self.sums.pop(slab)
        job = Job(name, block, params, 0, self.arrays.order.get(slab, 0), slab in self.resident)
        self._begin(slab, job, tuple(copies))

    def _apply(self, name: str, block: int) -> None:
        """All updates begin when the norm is known: when the lane has come to the last gradient."""
        last = self._put(Copy("d2h", name, block, 0, max(self.compute, self.issue)))
        for job in self.kept:
            job.after = (last,)
            self.items.append(job)
            self.world.begin(job)
        for slab in list(self.sums):
            self._update_sum(name, block, slab)
            self.items[-1].after = (last,)  # type: ignore[union-attr]

    def _retire(self, item: Copy | Job) -> None:
        for slab, items in self.leaving.items():
            if item in items:
                self.leaving[slab] = [each for each in items if each is not item]
        if isinstance(item, Copy):
            self._wait_copy(item, "gradients")
        else:
            self.world.until_read(item)
            self._join(item.read, "gradients", blocks=True)

    def _other(self, index: int, name: str, block: int, lane: str, nbytes: int, sources: tuple[int, ...]) -> None:
        given = [self.tokens[s] for s in sources if s in self.tokens]
        if lane in ("h2d", "d2h"):
            self.totals[lane] += nbytes
            self.world.until(given)
            # not before the compute has come here: what arrives needs memory that is in use until then
            ready = max([self.compute, self.issue, *(item.end for item in given)])
            self.tokens[index] = self._put(Copy(lane, name, block, nbytes, ready))
        elif lane == "compute":
            for item in given:
                assert isinstance(item, Copy)
                self._wait_copy(item, "values")

    # -- what came out --------------------------------------------------------------------------------------------

    def _limits(self) -> dict[str, float]:
        """Roofs of one step: FLOPs, each direction of the link with both busy, and the host's memory."""
        m, params, where = self.machine, self.totals["params"], self.plan.where
        streamed = self.moved * params if where == "device" else 0.0
        touched = self.grad + 2 * self.moved
        rate = {"host": m.update_rate, "both": m.both_rate, "device": m.streamed_rate}[where]
        traffic = (self.totals["h2d"] + self.totals["d2h"]) * m.copy_traffic + params * touched
        return {
            "compute": self.work,
            "h2d": (self.totals["h2d"] + streamed) / m.h2d_both,
            "d2h": (self.totals["d2h"] + streamed) / m.d2h_both,
            "host memory": max(params * touched / (m.update_bytes * rate), traffic / m.host_bandwidth),
        }

    def _events(self, began: float) -> list[Event]:
        found = list(self.events)
        for item in self.items:
            if isinstance(item, Copy):
                if item.nbytes:
                    found.append(Event(item.lane, item.name, item.block, item.start, item.end, int(item.nbytes)))
                continue
            for lane, params in (("host", item.by_host), ("device", item.by_device)):
                if params:
                    nbytes = int(params * (self.grad + 2 * self.moved))
                    found.append(Event(lane, item.name, item.block, item.start, item.end, nbytes))
            if item.grad_bytes and item.by_host:
                nbytes = int(item.grad_bytes * item.by_host / item.params)
                found.append(Event("d2h", item.name, item.block, item.start, item.read, nbytes))
        return [Event(e.lane, e.name, e.block, e.start - began, e.end - began, e.bytes) for e in found]


def bytes_of_a_parameter(slabs: list[Slab], updates: Updates) -> tuple[float, float]:
    """Bytes of weights and state, and of the gradient, of a trained parameter on average."""
    elements = sum(slab.layout.state_elements for slab in slabs)
    if not elements:
        return 12.0, 2.0
    weights = sum(2 * slab.layout.bf16.elements + 4 * slab.layout.fp32.elements for slab in slabs)
    state = sum(slab.layout.state_bytes(updates.arrays) for slab in slabs)
    grads = sum(slab.layout.gradient_bytes(wide=False) for slab in slabs)
    return (weights + state) / elements, grads / elements
