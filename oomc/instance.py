"""From a bare program to instances: its blocks' seconds and bytes at every level of keeping values.

Only the first of equal blocks are looked at: a model of 48 equal layers costs as one of three. For each tiling and each
level, the bare step graph gets its chunks and its recomputation, and is walked once under the same rules that project
whole steps (oomc.simulate.Walk).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from torch import fx

from oomc import meta, quick_lanes, steps
from oomc.cost import Costs
from oomc.fxutil import copy_graph
from oomc.offloadable import is_fence_result, kept_values, value_bytes, why_not
from oomc.passes.assemble import Assemble
from oomc.passes.choose_residency import OFFLOAD_FROM
from oomc.passes.insert_chunks import InsertChunks
from oomc.passes.insert_recompute import InsertRecompute
from oomc.passes.overwrite_values import OverwriteValues
from oomc.plan import Plan, Residency, Updates
from oomc.program import Program
from oomc.quick import Array, Instance, rates_of
from oomc.simulate import GRANULE, Profiler, Walk
from oomc.timeline import bytes_of_a_parameter
from oomc.worksets import Workset

Chunks = dict[str, tuple[int, int]]
LEVELS: tuple[str, ...] = (
    "recomputes all", "keeps attention", "attention on the host", "keeps all", "keeps all, attention on the host",
    "all on the host",
)  # fmt: skip
"""What a block's backward may find; attention stands for everything that mixes tokens."""
_FENCE: tuple[Residency, ...] = ("recompute", "keep", "offload", "keep", "offload", "offload")
_REST: tuple[Residency, ...] = ("recompute", "recompute", "recompute", "keep", "keep", "offload")
_WALKED = (0, 1, 1, 3, 3, 3)
"""The level whose computation is the same."""
PERIODS = 2
"""How many periods of equal blocks are looked at."""
LONGEST = 72
"""Blocks of the longest period that is looked for: a layer with its experts in many groups."""


@dataclass(frozen=True)
class Value:
    """A value that the backward needs.

    Attributes:
        block: that makes it.
        kind: `saved` (of the last block), `bound` (for other blocks), `fence`, `rest`, or `beside` (may not be made
            again, as the choice of experts or attention's lse, and is on the host when fences are).
        leaves: its bytes, if it may wait on the host, else 0.
    """

    name: str
    block: int
    kind: str
    leaves: int


@dataclass
class Source:
    """A bare program with what its instances are made from.

    Attributes:
        program: the bare one.
        reduced: the same with fewer of its equal blocks.
        places: for each of its blocks, the one of `reduced` that is like it.
    """

    program: Program
    profiler: Profiler
    costs: Costs
    reduced: Program = field(init=False)
    places: list[int] = field(init=False)
    _walks: dict[Any, Any] = field(default_factory=dict)
    _values: dict[tuple[int, int], list[Value]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reduced, self.places = reduce(self.program)

    def values(self, sizes: tuple[int, int]) -> list[Value]:
        """The program's values that the backward needs, in order."""
        if sizes not in self._values:
            self._values[sizes] = self.values_of(self.program, sizes)
        return self._values[sizes]

    @staticmethod
    def values_of(program: Program, sizes: tuple[int, int]) -> list[Value]:
        """The same of any program."""
        last = len(program.blocks) - 1
        found = []
        for node, inside in kept_values(program):
            note = meta.note(node)
            kind = "rest" if inside else "bound"
            if note.block == last:
                kind = "saved"
            elif ":saved." in note.source:
                kind = "beside"
            elif kind == "rest" and is_fence_result(program, node):
                kind = "fence"
            size = value_bytes(program, node, sizes)
            leaves = kind != "saved" and size >= OFFLOAD_FROM and not why_not(program, node)
            found.append(Value(note.source, note.block, kind, -(-size // GRANULE) * GRANULE if leaves else 0))
        return found

    def instance(self, sizes: tuple[int, int], chunks: Chunks, updates: Updates, movable: frozenset[str],
                 accumulate: bool) -> Instance:  # fmt: skip
        """The instance of one tiling."""
        small = _Extraction(self, sizes, chunks, updates, accumulate)
        return small.instance(movable)


def residency(values: list[Value], level: tuple[int, ...], away: tuple[bool, ...]) -> dict[str, Residency]:
    """Where each value is until the backward."""
    result: dict[str, Residency] = {}
    for value in values:
        own = level[value.block]
        where: Residency = {"saved": "keep", "bound": "offload" if away[value.block] else "keep",
                            "fence": _FENCE[own], "rest": _REST[own],
                            "beside": "offload" if _FENCE[own] == "offload" else "keep"}[value.kind]  # fmt: skip
        result[value.name] = "keep" if where == "offload" and not value.leaves else where
    return result


def reduce(program: Program) -> tuple[Program, list[int]]:
    """The program with PERIODS of each long run of repeated blocks, and which of its blocks stands for each."""
    blocks = program.blocks
    slabs = {slab.name: slab for slab in program.slabs}

    def key(index: int) -> Any:
        block = blocks[index]
        own = [(slabs[n].layout.weight_bytes, slabs[n].layout.state_elements, len(slabs[n].users)) for n in block.slabs]
        return tuple(w.form for w in block.worksets), tuple(own)

    keys = [key(i) for i in range(len(blocks))]
    start, period, count = _repeated(keys)
    drop = range(start + PERIODS * period, start + count * period) if count > PERIODS + 1 else range(0)
    if not drop:
        return program, list(range(len(blocks)))
    outputs: dict[Any, Any] = {}
    for index in drop:
        like = blocks[start + (PERIODS - 1) * period + (index - start) % period]
        for own, other in zip(blocks[index].worksets, like.worksets, strict=True):
            outputs.update(zip(own.outputs, other.outputs, strict=True))
    kept = [i for i in range(len(blocks)) if i not in drop]
    new_index = {old: new for new, old in enumerate(kept)}
    chosen = []
    for index in kept:
        worksets = [
            Workset(w.name, new_index[index], w.nodes, [outputs.get(s, s) if isinstance(s, fx.Node) else s for s in
                    w.inputs], w.outputs, w.form, w.chunk, w.fences) for w in blocks[index].worksets
        ]  # fmt: skip
        chosen.append(replace(blocks[index], worksets=worksets))
    gone = {name for i in drop for name in blocks[i].slabs}
    left = [replace(s, users=tuple(new_index[u] for u in s.users if u in new_index)) for s in program.slabs
            if s.name not in gone or any(u in new_index for u in s.users)]  # fmt: skip
    small = replace(program, blocks=chosen, slabs=left, step=None, plan=None)
    small = Assemble()(small).program
    places = [new_index[i] if i in new_index else new_index[start + PERIODS * period - period + (i - start) % period]
              for i in range(len(blocks))]  # fmt: skip
    return small, places


def _repeated(keys: list[Any]) -> tuple[int, int, int]:
    """Start, period and count of the longest run of repeats."""
    best = (0, 1, 1)
    for period in range(1, min(LONGEST, len(keys)) + 1):
        start = 0
        while start + period <= len(keys):
            count = 1
            while keys[start + count * period : start + (count + 1) * period] == keys[start : start + period]:
                count += 1
            if count > 1 and count * period > best[1] * best[2]:
                best = (start, period, count)
            start += max(1, (count - 1) * period)
    return best


@dataclass
class _Walked:
    """One level of a reduced program; `late` is of each level that computes the same."""

    forward: Array
    backward: Array
    uses: list[set[str]]
    uses_back: list[set[str]]
    made: Array
    other: Array
    fwd_need: Array
    bwd_need: Array
    bwd_first: Array
    bwd_rest: Array
    grads: Array
    parts: list[dict[str, list[str]]]
    fixed: int
    late: dict[int, tuple[Array, Array, Array]]


class _Extraction:
    def __init__(
        self, source: Source, sizes: tuple[int, int], chunks: Chunks, updates: Updates, accumulate: bool
    ) -> None:
        self.source, self.sizes, self.chunks = source, sizes, chunks
        self.updates, self.accumulate = updates, accumulate
        self.program = source.reduced
        self.values = source.values_of(self.program, sizes)

    def walked(self, level: int) -> _Walked:
        key = self.sizes, tuple(self.chunks.items()), level
        if key not in self.source._walks:
            self.source._walks[key] = self._walk(level)
        walked: _Walked = self.source._walks[key]
        return walked

    def _walk(self, level: int) -> _Walked:
        count = len(self.program.blocks)
        plan = Plan(self.sizes, residency(self.values, (level,) * count, (False,) * count), self.chunks)
        assert self.program.step is not None
        graph = copy_graph(self.program.step.graph)
        # only read, never run: it needs no module
        program = replace(self.program, step=cast(Any, SimpleNamespace(graph=graph)), plan=plan)
        program = OverwriteValues()(InsertRecompute()(InsertChunks()(program).program).program).program
        return _look(program, self.source.profiler, self.source.costs, self._away(level))

    def _away(self, walked: int) -> dict[int, dict[str, int]]:
        """For each level that computes as `walked` does, the values that are on the host, and their bytes."""
        found = {}
        for level in (level for level, same in enumerate(_WALKED) if same == walked):
            kinds = {"fence": _FENCE[level], "beside": _FENCE[level], "rest": _REST[level]}
            found[level] = {v.name: v.leaves for v in self.values if kinds.get(v.kind) == "offload" and v.leaves}
        return found

    def instance(self, movable: frozenset[str]) -> Instance:
        """See `Source.instance`."""
        program, places = self.source.program, self.source.places
        n, levels = len(program.blocks), len(LEVELS)
        walks = [self.walked(level) for level in _WALKED]
        count = len(self.program.blocks)
        fence, rest, bound = (np.zeros(count) for _ in range(3))
        more = np.zeros((count, 2), np.bool_)  # whether there are fences, and others
        for value in self.values:
            if value.kind in ("fence", "rest"):
                more[value.block, int(value.kind == "rest")] = True
            if value.kind != "saved":
                {"fence": fence, "beside": fence, "rest": rest, "bound": bound}[value.kind][value.block] += value.leaves
        gone = [0 * fence, 0 * fence, fence, 0 * fence, fence, fence + rest]
        made = np.stack([w.made for w in walks], 1)
        allowed = np.ones((count, levels), np.bool_)
        allowed[:, 1] = more[:, 0]
        allowed[:, 3] = more[:, 1]
        allowed[:, 2] = allowed[:, 4] = fence > 0
        allowed[:, 4] &= more[:, 1]
        allowed[:, 5] = rest > 0
        at = np.array(places)
        slabs = [slab.name for slab in program.slabs]
        names = [dict(zip(self.program.blocks[p].slabs, program.blocks[i].slabs, strict=True))
                 for i, p in enumerate(places)]  # fmt: skip
        width = max(1, max(len(b.slabs) for b in program.blocks))
        uses = np.full((n, width), -1, np.int64)
        back = np.full((n, levels, width), -1, np.int64)
        part_slab = np.full((n, width), -1, np.int64)
        part_params, part_bytes = np.zeros((n, width)), np.zeros((n, width))
        for i, p in enumerate(places):
            _put(uses[i], [slabs.index(names[i][s]) for s in self.program.blocks[p].slabs if s in walks[0].uses[p]])
            for level, walk in enumerate(walks):
                own = [slabs.index(names[i][s]) for s in self.program.blocks[p].slabs if s in walk.uses_back[p]]
                _put(back[i, level], own)
            for k, (slab, params) in enumerate(walks[0].parts[p].items()):
                layout = next(s.layout for s in self.program.slabs if s.name == slab)
                specs = [place.spec for place in layout.places if place.spec.name in params]
                part_slab[i, k] = slabs.index(names[i][slab])
                part_params[i, k], part_bytes[i, k] = sum(s.numel for s in specs), sum(s.nbytes for s in specs)
        order = np.full(len(slabs), 0, np.float64)
        seen: dict[int, int] = {}
        for row in uses:
            for slab in row:
                if slab >= 0:
                    seen.setdefault(int(slab), len(seen))
        for place, position in seen.items():
            order[place] = position
        gives: defaultdict[int, int] = defaultdict(int)
        for row in part_slab:
            for slab in row[row >= 0]:
                gives[int(slab)] += 1
        kinds = [
            quick_lanes.FROZEN if not gives[i] else quick_lanes.SUM if gives[i] > 1
            else quick_lanes.KEEP if self.updates.keep else quick_lanes.UPDATE for i in range(len(slabs))
        ]  # fmt: skip
        moved, grad = bytes_of_a_parameter(program.slabs, self.updates)
        updates = self.updates
        base = made - np.stack(gone, 1)
        per_level = {
            name: np.stack([getattr(w, name) for w in walks], 1)[at]
            for name in ("backward", "fwd_need", "bwd_need", "bwd_first", "bwd_rest")
        }
        return Instance(
            levels=LEVELS, allowed=allowed[at], forward=walks[0].forward[at], uses=uses, uses_back=back,
            weight=np.array([s.layout.weight_bytes for s in program.slabs], np.float64),
            home=np.array([updates.resident_bytes(s, self.accumulate) for s in program.slabs], np.float64),
            host=np.array([updates.host_bytes(s) for s in program.slabs], np.float64), order=order,
            kind=np.array(kinds, np.int64), movable=np.array([name in movable for name in slabs]),
            part_slab=part_slab, part_params=part_params, part_bytes=part_bytes, own_grad=walks[0].grads[at],
            device=(base - bound[:, None])[at], inner=np.stack(gone, 1)[at], bound=bound[at], other=walks[0].other[at],
            fixed=float(walks[0].fixed + GRANULE * (n - count)), staging=float(updates.staging_bytes("both")),
            host_fixed=float(updates.host_fixed), rates=rates_of(self.source.costs.machine, moved, grad),
            accumulate=self.accumulate, wheres=("host", "both") if updates.where == "both" else (updates.where,),
            late=tuple(np.stack([w.late[level][i] for level, w in enumerate(walks)], 1)[at] for i in range(3)),
            **per_level,
        )  # fmt: skip


def _put(row: Array, items: list[int]) -> None:
    row[: len(items)] = items


def _look(program: Program, profiler: Profiler, costs: Costs, away: dict[int, dict[str, int]]) -> _Walked:
    """Walk a step graph whose gradients leave at once and whose weights need no memory.

    `away` are, for each level that this is the walk of, bytes of values that come back right before their first use.
    """
    assert program.step is not None and program.plan is not None
    graph, sizes, n = program.step.graph, program.plan.sizes, len(program.blocks)
    walk = Walk(program, profiler)
    projection = walk.follow({})
    zeros = [np.zeros(n) for _ in range(9)]
    forward, backward, made, other, fwd_need, bwd_need, bwd_first, bwd_rest, grads = zeros
    uses: list[set[str]] = [set() for _ in range(n)]
    uses_back: list[set[str]] = [set() for _ in range(n)]
    parts: list[dict[str, list[str]]] = [{} for _ in range(n)]
    made[:] = _made(walk, graph, n)
    ends: list[int] = [0] * n  # bytes alive when each block's forward ends
    for node in graph.nodes:
        note = meta.note(node)
        if note.phase == "forward" and node.op == "call_function":
            ends[note.block] = projection.live[node.name]
        if node.target is steps.weights:
            phases = uses if note.phase == "forward" else uses_back
            if any(part.users for part in node.users):
                phases[note.block].add(str(node.args[1]))
    before = np.concatenate(([0.0], np.cumsum(made)[:-1]))
    for b in range(n):
        other[b] = max(0.0, (ends[b - 1] if b else 0) - before[b])
    sunk = np.zeros(n)
    late = {level: (np.zeros(n), np.zeros(n), np.zeros(n)) for level in away}
    returns = {level: _returns(graph, n, values) for level, values in away.items()}
    for position, node in enumerate(graph.nodes):
        if node.op != "call_function":
            continue
        note = meta.note(node)
        b = note.block
        during = projection.during[node.name] - projection.fixed
        seconds = _seconds(node, costs, sizes)
        if note.phase == "forward":
            forward[b] += seconds
            fwd_need[b] = max(fwd_need[b], during - before[b] - other[b])
            continue
        backward[b] += seconds
        need = during - before[b]
        held = sunk[b]
        if node.target is steps.gradients:
            sunk[b] += sum(walk.bytes[s] for g in node.args[3] for s in walk.storages.get(g, ()))
            parts[b].setdefault(str(node.args[1]), []).extend(node.args[2])
            grads[b] = sunk[b]
            held = 0.0
        needs = [((bwd_need, bwd_first, bwd_rest), need)]
        for level, arrays in late.items():
            needs.append((arrays, need - sum(size for at, size in returns[level][b] if at > position)))
        for (whole, first, then), own in needs:
            whole[b] = max(whole[b], own)
            (then if sunk[b] else first)[b] = max((then if sunk[b] else first)[b], own + held)
    return _Walked(forward, backward, uses, uses_back, made, other, fwd_need, bwd_need, bwd_first, bwd_rest, grads,
                   parts, projection.fixed, late)  # fmt: skip


def _returns(graph: fx.Graph, n: int, values: dict[str, int]) -> list[list[tuple[int, int]]]:
    """For each block, the places of its values' first uses in the backward, with their bytes."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        note = meta.note(node)
        if note.phase == "forward" and note.source in values and node.target is operator.getitem:
            uses = [order[user] for user in node.users if meta.note(user).phase != "forward" and user.op != "output"]
            if uses:
                found[note.block].append((min(uses), values[note.source]))
    return found


def _made(walk: Walk, graph: fx.Graph, n: int) -> Array:
    """Bytes that each block's forward makes and the backward still finds."""
    made = np.zeros(n)
    maker: dict[Any, int] = {}
    counted: set[Any] = set()
    for node in graph.nodes:
        for storage in walk.storages.get(node, ()):
            note = meta.note(node)
            if note.phase != "forward":
                continue
            maker.setdefault(storage, note.block)
            if storage not in counted and any(u.op != "output" and meta.note(u).phase != "forward" for u in node.users):
                counted.add(storage)
                made[maker[storage]] += walk.bytes[storage]
    return made


def _seconds(node: fx.Node, costs: Costs, sizes: tuple[int, int]) -> float:
    """Seconds of a node on the compute lane, as oomc.timeline reads them."""
    if node.target is steps.run:
        return costs.seconds(node.args[1], node.args[2], sizes)  # type: ignore[arg-type]
    if node.target is steps.run_chunks:
        return costs.seconds(node.args[1], node.args[2], sizes, tuple(node.args[3]))  # type: ignore[arg-type]
    if node.target in (steps.add, steps.ones_like, steps.zeros_like, steps.rng):
        passes = 3 if node.target is steps.add else 1
        return passes * costs.nbytes(meta.value(node), sizes) / costs.machine.bandwidth + costs.machine.launch
    return 0.0
