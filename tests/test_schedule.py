"""schedule: golden text, numbers, and slots that never hold two slabs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from oomc import steps
from oomc.passes.choose_residency import Candidate
from oomc.passes.schedule import Schedule, assign_slots
from oomc.printer import print_program
from tests import programs
from tests.conftest import Golden


def test_golden(golden: Golden) -> None:
    program = programs.up_to("mlp", "schedule")
    assert program.plan is not None
    golden("schedule", programs.stable(f"{print_program(program)}\n\nslots {program.plan.slots}"))


@pytest.mark.parametrize("kind", ["mlp", "topk", "tied"])
@pytest.mark.parametrize("candidate", [Candidate(8, 0, False), Candidate(24, 1, True)])
def test_numbers(kind: str, candidate: Candidate) -> None:
    programs.assert_runs(programs.up_to(kind, "schedule", candidate), programs.model(kind))


@pytest.mark.parametrize(("prefetch", "slots"), [(0, 1), (1, 2), (2, 3)])
def test_prefetch_takes_a_slot_for_each_slab_ahead(prefetch: int, slots: int) -> None:
    program = programs.up_to("topk", "schedule", Candidate(8, prefetch, True))
    assert program.plan is not None
    assert len(program.plan.slots) == slots


def test_a_fetch_stands_before_the_wait_of_the_stretch_before() -> None:
    program = programs.up_to("topk", "schedule")
    nodes = list(program.graph.nodes)
    waits = [n for n in nodes if n.target is steps.wait]
    for before, wait in itertools.pairwise(waits):
        assert nodes.index(wait.args[1]) < nodes.index(before)
    awaits = [n for n in nodes if n.target is steps.await_update]
    assert all(n.next.target is steps.fetch and n.next.args[1] == n.args[1] for n in awaits)


@pytest.mark.parametrize("late", [False, True])
def test_gradients_leave_under_the_next_block_or_before_it(late: bool) -> None:
    program = programs.up_to("topk", "schedule", Candidate(8, 1, late))
    nodes = [n for n in program.graph.nodes if n.target in (steps.offload, steps.retire)]
    if late:  # each wait stands right before the next copy
        assert [n.target for n in nodes[1:-1]] == [steps.retire, steps.offload] * ((len(nodes) - 2) // 2)
    order = list(program.graph.nodes)
    for offload in (n for n in nodes if n.target is steps.offload):
        (retire,) = (n for n in nodes if n.target is steps.retire and n.args[1] is offload)
        between = order[order.index(offload) : order.index(retire)]
        is_last = offload is [n for n in nodes if n.target is steps.offload][-1]
        assert any(n.target in steps.COMPUTE for n in between) == (late and not is_last)


def test_nothing_to_schedule() -> None:
    program = programs.up_to("mlp", "insert_recompute")  # no copies yet
    assert not Schedule()(program).modified


EVENTS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=30)


@settings(max_examples=100, deadline=None)
@given(EVENTS)
def test_random_fetches_and_releases(events: list[tuple[int, int]]) -> None:
    """Whatever the order, a slot that is given is free, large enough, and none is made that is not needed."""
    graph = fx.Graph()
    rt = graph.placeholder("rt")
    live: list[fx.Node] = []
    most = 0
    for kind, size in events:
        if kind and live:
            graph.call_function(steps.release, (rt, live.pop(size % len(live))))
        else:
            live.append(graph.call_function(steps.fetch, (rt, f"slab{size}", -1)))
        most = max(most, len(live))
    sizes = {f"slab{size}": 256 * size for size in range(1, 6)}
    slots = assign_slots(graph, sizes)
    held: set[int] = set()
    for node in graph.nodes:
        if node.target is steps.fetch:
            assert node.args[2] not in held
            assert slots[node.args[2]] >= sizes[node.args[1]]
            held.add(node.args[2])
        elif node.target is steps.release:
            held.remove(node.args[1].args[2])
    assert len(slots) == most
