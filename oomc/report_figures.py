"""What report files are drawn from: lanes over time, memory, where bytes live, decisions; plain data, ready for JSON.

figures(program, projection, Rates(machine, line), rows, recording)
{"timeline": {"step_s": ..., "events": [[lane, kind, name, block, start, end, bytes], ...], ...}, "measured": {...},
 "memory": {...}, "tiers": {...}, "decisions": [...], "graph": "..."}
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from oomc import meta, steps
from oomc.explain import Explanation
from oomc.machine import Machine
from oomc.offloadable import value_bytes
from oomc.printer import print_step
from oomc.program import Program
from oomc.runtime.record import Recording
from oomc.simulate import Projection
from oomc.timeline import Timeline

COLUMNS = ("lane", "kind", "name", "block", "start", "end", "bytes")
"""Of the rows that events are: seconds since the step began; `block` is a name, or empty."""
LANES = ("compute", "h2d", "d2h", "host", "device")
"""In the order in which they are drawn; `device` are updates on the device, beside the compute."""
KINDS = ("forward", "recompute", "backward", "weights", "gradients", "values", "update", "wait", "other")
"""What an event is about."""
OF_WORD = {
    steps.fetch: "weights", steps.offload: "gradients", steps.store: "values", steps.restore: "values",
}  # fmt: skip
REASONS = {
    steps.wait: "weights", steps.device_weights: "update", steps.retire: "gradients",
    steps.retire_carried: "gradients", steps.discard: "values", steps.restored: "values",
}  # fmt: skip
"""What the compute waits for, as in `Timeline.exposed`."""

Row = tuple[str, str, int]


@dataclass(frozen=True)
class Rates:
    """A machine, the projected step on it, and what was timed there for it."""

    machine: Machine
    line: Timeline
    timed: str = ""


@dataclass(frozen=True)
class Tier:
    """Bytes of one tier by purpose, and what they come to.

    Attributes:
        rows: name, note and bytes.
        projected, measured, allowed: bytes of the whole tier, as far as they are known.
        constant: bytes that are there throughout the step.
    """

    rows: list[Row] = field(default_factory=list)
    projected: int | None = None
    measured: int | None = None
    allowed: int | None = None
    constant: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "rows": [list(row) for row in self.rows], "projected": self.projected, "measured": self.measured,
            "allowed": self.allowed, "constant": self.constant,
        }  # fmt: skip


def figures(
    program: Program, projection: Projection, rates: Rates, tiers: dict[str, Tier], recording: Recording | None = None,
    why: Explanation | None = None,
) -> dict[str, Any]:  # fmt: skip
    """All that the files need.

    Args:
        program: with plan and scheduled step graph.
        projection: of its device memory.
        rates: the machine and the simulated step.
        tiers: what lives in `device` and in `host`.
        recording: a step that was measured.
        why: the plan is as it is, where the planner made it.
    """
    names = _Names(program)
    line, machine = rates.line, rates.machine
    found: dict[str, Any] = {
        "timeline": {
            "machine": machine.name, "rates": machine.source, "step_s": line.step_s, "bound": line.bound,
            "limits": line.limits, "busy": line.busy, "exposed": line.exposed, "moved": line.moved,
            "columns": list(COLUMNS),
            "events": [names.row(e.lane, e.name, e.block, e.start, e.end, e.bytes) for e in line.events],
        },
        "memory": _memory(program, projection),
        "tiers": {name: tier.as_dict() for name, tier in tiers.items()},
        "decisions": decisions(program),
        "graph": print_step(program),
    }  # fmt: skip
    if recording is not None:
        rows = [names.row(*event) for event in recording.events]
        found["measured"] = {
            "step_s": recording.step_s, "busy": _busy(rows), "exposed": names.waits(rows), "columns": list(COLUMNS),
            "events": rows, "memory": [list(each) for each in recording.memory],
        }  # fmt: skip
    if why is not None:
        found["why"] = {
            "blocks": [list(each) for each in why.blocks], "left": why.left, "reason": why.reason,
            "device_gib_saves_s": why.device_gib, "host_gib_saves_s": why.host_gib,
        }  # fmt: skip
    return found


class _Names:
    """Says of events what they are about, and in which block."""

    def __init__(self, program: Program) -> None:
        assert program.step is not None
        self.blocks = [block.name for block in program.blocks]
        self.nodes: dict[str, fx.Node] = {node.name: node for node in program.step.graph.nodes}

    def row(self, lane: str, name: str, block: int, start: float, end: float, nbytes: int) -> list[Any]:
        where = self.blocks[block] if 0 <= block < len(self.blocks) else ""
        return [lane, self._kind(lane, name), name, where, round(start, 9), round(end, 9), nbytes]

    def _kind(self, lane: str, name: str) -> str:
        if lane in ("host", "device"):
            return "update"
        node = self.nodes.get(name)
        if node is None:  # named for the update that it is for
            return "gradients" if lane == "d2h" else "other"
        if node.target in steps.COMPUTE:
            phase = meta.note(node).phase or "other"
            return "recompute" if phase == "regenerate" else phase
        target: Any = node.target
        return "wait" if target in REASONS else OF_WORD.get(target, "other")

    def waits(self, rows: Iterable[list[Any]]) -> dict[str, float]:
        """Seconds that the compute waits, by reason."""
        waits = dict.fromkeys(REASONS.values(), 0.0)
        for _, kind, name, _, start, end, _ in rows:
            if kind == "wait":
                target: Any = self.nodes[name].target
                waits[REASONS[target]] += end - start
        return waits


def _busy(rows: Iterable[list[Any]]) -> dict[str, float]:
    """Seconds that each lane works; updates of several slabs at once count once."""
    busy = dict.fromkeys(LANES, 0.0)
    until = dict.fromkeys(LANES, float("-inf"))
    for lane, kind, _, _, start, end, _ in sorted(rows, key=lambda row: row[4]):
        if kind != "wait":
            busy[lane] += max(0.0, end - max(start, until[lane]))
            until[lane] = max(until[lane], end)
    return busy


def _memory(program: Program, projection: Projection) -> dict[str, Any]:
    """Device bytes during each node, and host bytes of the values that wait there."""
    assert program.step is not None and program.plan is not None
    nodes, during, live, held = [], [], [], []
    waiting: dict[fx.Node, int] = {}
    for node in program.step.graph.nodes:
        if node.target is steps.store:
            waiting[node] = value_bytes(program, node, program.plan.sizes)
        elif node.target is steps.restored:
            waiting.pop(node.args[1].args[1], None)
        if node.name not in projection.during or _quiet(node):
            continue
        nodes.append(node.name)
        during.append(projection.during[node.name])
        live.append(projection.live[node.name])
        held.append(sum(waiting.values()))
    return {
        "nodes": nodes, "during": during, "live": live, "host_values": held, "fixed": projection.fixed,
        "peak": projection.peak, "at": projection.at,
    }  # fmt: skip


def _quiet(node: fx.Node) -> bool:
    """Whether a node only names what others have made, so that nothing changes there but by what is let go of."""
    target: Any = node.target
    return node.op != "call_function" or steps.LANES.get(target, "none") == "none"


def decisions(program: Program) -> list[dict[str, Any]]:
    """What the plan says of each block."""
    plan = program.plan
    assert plan is not None
    values = _values_by_block(program)
    bytes_of = {slab.name: slab.layout.weight_bytes for slab in program.slabs}
    where = {"host": "host", "device": "device", "both": "host and device"}[plan.where]
    found = []
    for index, block in enumerate(program.blocks):
        there = [name for name in block.slabs if name in plan.resident]
        state = "device" if block.slabs and len(there) == len(block.slabs) else "host" if not there else "both"
        chunks = [
            f"{w.name.rpartition('/')[2]}: {c[0]} x {c[1]}"
            for w in block.worksets
            if (c := plan.chunks.get(w.name)) is not None and c != plan.sizes
        ]
        found.append({
            "block": block.name,
            "weights": sum(bytes_of[name] for name in block.slabs),
            "state": state if block.slabs else "none",
            "updated": ("device" if state == "device" else where) if block.slabs else "none",
            "worksets": len(block.worksets),
            "chunks": chunks,
            "values": {kind: sorted(n for n, k in values.get(index, ()) if k == kind)
                       for kind in ("keep", "recompute", "offload")},
        })  # fmt: skip
    return found


def _values_by_block(program: Program) -> dict[int, list[tuple[str, str]]]:
    """For each block, the values that its forward makes for the backward, with where they stay until then."""
    assert program.plan is not None
    owner = {node.name: w.block for b in program.blocks for w in b.worksets for node in w.nodes}
    workset = {w.name: w.block for b in program.blocks for w in b.worksets}
    found: dict[int, list[tuple[str, str]]] = {}
    for name, kind in program.plan.residency.items():
        block = owner.get(name, workset.get(name.partition(":")[0], -1))
        found.setdefault(block, []).append((name, kind))
    return found
