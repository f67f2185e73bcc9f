"""schedule: golden text, numbers, and slots that never hold two slabs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from oomc import meta, steps
from oomc.passes.choose_residency import Candidate
from oomc.passes.schedule import Schedule, assign_host_slots, assign_slots
from oomc.printer import print_program
from tests import programs
from tests.conftest import Golden


def test_golden(golden: Golden) -> None:
    program = programs.up_to("mlp", "schedule")
    assert program.plan is not None
    golden("schedule", programs.stable(f"{print_program(program)}\n\nslots {program.plan.slots}"))


@pytest.mark.parametrize("kind", ["mlp", "topk", "tied"])
@pytest.mark.parametrize("candidate", [Candidate(8, 0, 0), Candidate(24, 1, 1)])
def test_numbers(kind: str, candidate: Candidate) -> None:
    programs.assert_runs(programs.up_to(kind, "schedule", candidate), programs.model(kind))


@pytest.mark.parametrize(("prefetch", "slots"), [(0, 1), (1, 2), (2, 3)])
def test_prefetch_takes_a_slot_for_each_slab_ahead(prefetch: int, slots: int) -> None:
    program = programs.up_to("topk", "schedule", Candidate(8, prefetch, 1))
    assert program.plan is not None
    assert len(program.plan.slots) == slots


@pytest.mark.parametrize(("prefetch", "slots"), [(0, 1), (1, 2), (2, 3)])
def test_regenerating_takes_no_slot_of_its_own(prefetch: int, slots: int) -> None:
    """Weights are fetched as far ahead as without it; those held for their own backward were to come next anyway."""
    program = programs.regenerated("topk", programs.boundaries("topk")[1:], prefetch)
    assert program.plan is not None
    assert len(program.plan.slots) == slots
    nodes = list(program.graph.nodes)
    (run,) = (n for n in nodes if meta.note(n).workset == "layers.0/0" and meta.note(n).phase == "regenerate"
              and n.target in steps.COMPUTE)  # fmt: skip
    (wait,) = {a.args[0] for a in run.all_input_nodes if a.args and getattr(a.args[0], "target", None) is steps.wait}
    starts = [n for n in nodes if n.target is steps.wait][: 5 - prefetch]
    assert wait.args[1].args[1] == "layers.0"
    assert all(nodes.index(n) < nodes.index(wait.args[1]) for n in starts[:-1]), "not before its turn"
    if prefetch:
        assert nodes.index(wait.args[1]) < nodes.index(starts[-1])


def test_values_come_back_in_time_for_what_is_regenerated_from_them() -> None:
    """The embedding is needed for layers.1's backward, and then stays for that of layers.0."""
    embedding, add = programs.boundaries("topk")
    program = programs.regenerated("topk", [add], prefetch=1, offload=[embedding], verify=False)
    nodes = list(program.graph.nodes)
    (restore,) = (n for n in nodes if n.target is steps.restore)
    first = {b: next(n for n in nodes if n.target in steps.COMPUTE and meta.note(n).block == b
                     and meta.note(n).phase != "forward") for b in (2, 3)}  # fmt: skip
    assert nodes.index(first[3]) > nodes.index(restore), "one block before"
    (restored,) = (n for n in nodes if n.target is steps.restored)
    assert nodes.index(restored) < nodes.index(first[2])
    assert {meta.note(u).phase for u in restored.users} >= {"regenerate", "backward"}
    programs.assert_runs(program, programs.model("topk"))


def test_a_fetch_stands_before_the_wait_of_the_stretch_before() -> None:
    program = programs.up_to("topk", "schedule")
    nodes = list(program.graph.nodes)
    waits = [n for n in nodes if n.target is steps.wait]
    for before, wait in itertools.pairwise(waits):
        assert nodes.index(wait.args[1]) < nodes.index(before)
    awaits = [n for n in nodes if n.target is steps.await_update]
    assert all(n.next.target is steps.fetch and n.next.args[1] == n.args[1] for n in awaits)


@pytest.mark.parametrize("hold", [0, 1, 2, 9])
def test_gradients_of_so_many_blocks_are_held(hold: int) -> None:
    program = programs.up_to("topk", "schedule", Candidate(8, 1, hold))
    nodes = list(program.graph.nodes)
    offloads = [n for n in nodes if n.target is steps.offload]
    order = list(dict.fromkeys(meta.note(o).block for o in offloads))  # of blocks, each with an offload or more
    carried = {n.args[1]: n for n in nodes if n.target is steps.retire_carried}
    last = order[max(0, len(order) - hold) :] if hold else []
    assert set(carried) == {o.args[1] for o in offloads if meta.note(o).block in last}
    for slab, node in carried.items():
        assert node.next.target is steps.wait and node.next.args[1].args[1] == slab, "it ends where the slab is used"
    for offload in (o for o in offloads if o.args[1] not in carried):
        (retire,) = (n for n in nodes if n.target is steps.retire and n.args[1] is offload)
        between = nodes[nodes.index(offload) : nodes.index(retire)]
        later = {meta.note(n).block for n in between if n.target is steps.offload} - {meta.note(offload).block}
        assert len(later) == max(0, hold - 1)
        if not hold:
            assert not any(n.target in steps.COMPUTE for n in between)
            continue
        room = next(n for n in nodes[nodes.index(retire) :] if n.target is not steps.retire)  # for the next block's
        assert room is next(
            o for o in offloads if meta.note(o).block == order[order.index(meta.note(offload).block) + hold]
        )


def test_nothing_to_schedule() -> None:
    program = programs.up_to("mlp", "insert_recompute")  # no copies yet
    assert not Schedule()(program).modified


def test_a_host_slot_is_used_again_once_its_value_is_back() -> None:
    """Three values of which two are away at once, by hand."""
    program = programs.up_to("topk", "schedule")
    assert program.plan is not None
    graph = program.graph
    rt = graph.find_nodes(op="placeholder")[0]
    value = next(n for n in graph.nodes if n.name == "embedding")
    (output,) = graph.find_nodes(op="output")
    found = []
    with graph.inserting_before(output):
        for start, end in ((0, -1), (1, -1), (-1, 0), (2, -1), (-1, 1), (-1, 2)):
            if start >= 0:
                found.append(graph.call_function(steps.store, (rt, f"value{start}", value, -1)))
            else:
                restore = graph.call_function(steps.restore, (rt, found[end]))
                graph.call_function(steps.restored, (rt, restore))
    assert assign_host_slots(program) == (768, 768)
    assert [n.args[3] for n in found] == [0, 1, 0]


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
