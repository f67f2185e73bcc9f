"""In chunks of one size, memory grows with the batch only by what is listed: values between blocks, attention's."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
from torch import fx

from oomc import meta, pipeline, steps
from oomc.capture import Batch, capture
from oomc.match import op_name
from oomc.models import tiny
from oomc.passes.choose_residency import Candidate, ChooseResidency
from oomc.program import Program
from oomc.simulate import Profiler, Projection, Walk
from oomc.worksets import Workset
from tests.helpers import compiled, tokens

MIXERS = frozenset({"oomc.attention", "oomc.attention_backward"})
HIDDEN = 64


class Alive(Walk):
    """A walk that notes what memory is held while each node runs."""

    def __init__(self, program: Program, profiler: Profiler) -> None:
        super().__init__(program, profiler)
        self.alive: dict[str, set[Any]] = {}
        holders: Counter[Any] = Counter()
        for node in self.graph.nodes:
            own = self.storages.get(node, ())
            self.alive[node.name] = {storage for storage, count in holders.items() if count > 0} | set(own)
            holders.update(own)
            for dead in self.last_use.get(node, ()):
                holders.subtract(self.storages.get(dead, ()))


def listed(program: Program) -> dict[str, str]:
    """Names of the forward values that may grow with the batch, and what each is.

    Values between blocks; what goes into attention and its like and what comes out; what goes round it (gates);
    labels, and the choices of experts. All others are to exist for a chunk only.
    """
    kinds: dict[str, str] = {}
    worksets = [w for b in program.blocks for w in b.worksets]
    owner = {n: w for w in worksets for n in w.nodes}
    mixers = {w.name for w in worksets if any(op_name(n) in MIXERS for n in w.nodes)}

    def between(first: Workset, second: Workset) -> set[str]:
        return {w.name for w in worksets[worksets.index(first) + 1 : worksets.index(second)]}

    for workset in worksets:
        attends = workset.name in mixers
        for node in workset.outputs:
            if attends:
                kinds[node.name] = "attention"
            elif any(u in owner and owner[u].block != workset.block for u in node.users):
                kinds.setdefault(node.name, "boundary")
            elif any(u in owner and between(workset, owner[u]) & mixers for u in node.users):
                kinds.setdefault(node.name, "gate")
        for index in range(program.forms[workset.form].saved):
            kinds[f"{workset.name}:saved.{index}"] = "attention" if attends else "choice of experts"
        if attends:
            kinds |= {n.name: "attention" for n in workset.inputs if isinstance(n, fx.Node) and n in owner}
    labels = [n for n in program.blocks[-1].worksets[0].outputs if meta.value(n).dim() == 2]
    return kinds | {n.name: "labels" for n in labels if not meta.value(n).is_floating_point()}


def storages_by_kind(walk: Alive) -> dict[Any, str]:
    """The memory of listed values and of their gradients."""
    kinds, storages = listed(walk.program), dict[Any, str]()
    for node in walk.graph.nodes:
        sources = [node, *node.all_input_nodes] if node.target is steps.add else [node]  # a sum of gradients
        for kind in (kinds[s] for s in (meta.note(n).source for n in sources) if s in kinds):
            for storage in walk.storages.get(node, ()):
                storages.setdefault(storage, kind)
    return storages


def held_by_kind(walk: Alive, at: str) -> dict[str, int]:
    """Bytes of listed values that are held while a node runs."""
    storages, found = storages_by_kind(walk), dict[str, int]()
    for storage in walk.alive[at] & storages.keys():
        found[storages[storage]] = found.get(storages[storage], 0) + walk.bytes[storage]
    return found


def rest_of(walk: Alive, projection: Projection) -> int:
    """The most that a step takes at any node beside listed values and its inputs."""
    storages = storages_by_kind(walk)
    inputs = 2 * 8 * walk.sizes[0] * walk.sizes[1]  # input_ids and labels
    return max(
        projection.during[name] - sum(walk.bytes[s] for s in alive & storages.keys()) - inputs
        for name, alive in walk.alive.items()
    )


@cache
def traced(name: str, layers: tuple[str, ...] | None = None) -> tuple[Program, Profiler]:
    changes: dict[str, Any] = {} if layers is None else {"layer_types": list(layers)}
    model = tiny.build(name, **changes)
    bare = pipeline.run_passes(capture(model, Batch.bind(model, (), tokens(2, 24))), pipeline.MODEL_PASSES)
    return bare, Profiler(bare)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_projected_memory_grows_by_what_is_listed(name: str) -> None:
    rest = []
    bare, profiler = traced(name)
    for sizes in ((4, 4096), (16, 4096)):
        choose = ChooseResidency(sizes, candidate=Candidate(1024, 1, 1, keep=True))
        walk = Alive(pipeline.with_plan(bare, choose), profiler)
        projection = walk.run()
        held, boundary = held_by_kind(walk, projection.at), sizes[0] * sizes[1] * HIDDEN * 4
        assert held["boundary"] >= boundary
        assert held["attention"] >= boundary
        assert all(held.get(kind, 0) <= boundary / 2 for kind in ("labels", "choice of experts"))
        assert held.get("gate", 0) <= 2 * boundary
        rest.append(rest_of(walk, projection))
    assert rest[1] <= 1.01 * rest[0], rest


def test_linear_attention_has_nothing_but_boundaries_that_are_as_long_as_a_row() -> None:
    """And the states before its chunks, which count among what is saved."""
    rest = []
    bare, profiler = traced("qwen3_next", ("linear_attention",) * 4)
    for sizes in ((1, 16384), (1, 65536)):
        choose = ChooseResidency(sizes, candidate=Candidate(1024, 1, 1, keep=True))
        walk = Alive(pipeline.with_plan(bare, choose), profiler)
        rest.append(rest_of(walk, walk.run()))
        for workset in (w for b in bare.blocks[1:-1] for w in b.worksets):
            assert not workset.fences
            long = {n for n in (*workset.inputs, *workset.outputs) if isinstance(n, fx.Node) and n in owned(bare)}
            assert all([str(s) for s in meta.value(n).shape[2:]] == [str(HIDDEN)] for n in long)
    assert rest[1] <= 1.01 * rest[0], rest


def owned(program: Program) -> set[fx.Node]:
    """What worksets compute."""
    return {n for b in program.blocks for w in b.worksets for n in w.nodes}


def test_measured_memory_grows_by_what_is_listed() -> None:
    """The same with a real step, an eighth as long."""
    rest = []
    for sizes in ((4, 512), (16, 512)):
        step = compiled(tiny.build("qwen3_moe"), tokens(*sizes), like=("chunk memory",), chunk_tokens=128)
        step(**tokens(*sizes))
        figures = step.metrics
        assert step._current is not None
        trace = next(iter(step._compiler.traces.values()))
        walk = Alive(step._current.program, trace.profiler)
        projection = walk.run()
        assert figures["device_peak"] <= projection.peak
        held = held_by_kind(walk, projection.at)
        rest.append(figures["device_peak"] - sum(held.values()) - 2 * 8 * sizes[0] * sizes[1])
        step.close()
    assert rest[1] <= 1.1 * rest[0], rest
