"""Step graphs replayed on the simulated allocator: built by hand, with known positions, and whole ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from oomc import meta, steps
from oomc.allocator import LARGE_PAGE, SMALL_PAGE, Allocator
from oomc.fxutil import insert_call
from oomc.replay import BLAS, DISTURBED, HEADROOM, OTHERS, Replay, project_reserved
from oomc.simulate import Profiler, Walk, project
from tests import programs
from tests.test_simulate import MODE, Hand, N, aten, deep, double, form

MIB = 1 << 20


def replay_of(hand: Hand, output: fx.Node) -> Replay:
    hand.peak(output)
    walk = Walk(hand.program, Profiler(hand.program))
    walk.run()
    return Replay(walk)


def replayed(hand: Hand, output: fx.Node) -> Allocator:
    return replay_of(hand, output).run()


def test_everything_of_a_step_is_freed_but_what_is_there_throughout() -> None:
    hand = Hand(form("deep", deep), form("double", double), slots=(30 * MIB,))
    kept = hand.run("double", hand.x)
    allocator = replayed(hand, hand.call(steps.add, kept, hand.run("deep", kept)))
    assert allocator.large.free == [(BLAS + 30 * MIB, 18 * MIB)]
    assert allocator.small.free == [(N, SMALL_PAGE - N)]  # behind the input
    assert allocator.reserved == 80 * MIB + SMALL_PAGE


def test_carried_gradients_stay_until_the_next_step_retires_them() -> None:
    hand = Hand(form("double", double))
    hand.call(steps.retire_carried, hand.rt, "slab")
    grad = hand.run("double", hand.x)
    hand.call(steps.offload, hand.rt, "slab", ("w",), (grad,), "update")
    allocator = replayed(hand, hand.run("double", hand.x))
    assert allocator.small.free == [(2 * N, SMALL_PAGE - 2 * N)]


def test_a_value_amid_temporaries_leaves_a_hole_that_counts() -> None:
    """Of 30 MiB each: the result lies behind a temporary, whose hole is too small for what comes next."""

    def behind(graph: fx.Graph, x: fx.Node) -> tuple[fx.Node, ...]:
        y = insert_call(graph, aten.new_empty.default, (x, [30 * MIB]), {"dtype": torch.uint8})
        return (insert_call(graph, aten.mul.Tensor, (y, 2)),)

    def large(graph: fx.Graph, x: fx.Node) -> tuple[fx.Node, ...]:
        return (insert_call(graph, aten.new_empty.default, (x, [31 * MIB]), {"dtype": torch.uint8}),)

    hand = Hand(form("behind", behind), form("large", large))
    value, more = hand.run("behind", hand.x), hand.run("large", hand.x)
    for node, size in ((value, 30 * MIB), (more, 31 * MIB)):
        with MODE:
            meta.set_value(node, torch.empty(size, dtype=torch.uint8))
    total = hand.call(steps.add, value, more)
    allocator = replayed(hand, total)
    assert allocator.large.end == -(-(BLAS + 91 * MIB) // LARGE_PAGE) * LARGE_PAGE


def test_a_block_that_is_not_seen_shifts_what_comes_after() -> None:
    """What fits a hole exactly does not where a kernel has taken a little of it; where that lies is random."""

    def holed(graph: fx.Graph, x: fx.Node) -> tuple[fx.Node, ...]:
        y = insert_call(graph, aten.new_empty.default, (x, [64 * MIB]), {"dtype": torch.uint8})
        return (insert_call(graph, aten.mul.Tensor, (y, 2)),)

    def fits(graph: fx.Graph, x: fx.Node) -> tuple[fx.Node, ...]:
        return (insert_call(graph, aten.new_empty.default, (x, [64 * MIB]), {"dtype": torch.uint8}),)

    hand = Hand(form("holed", holed), form("fits", fits))
    value, again = hand.run("holed", hand.x), hand.run("fits", hand.x)
    for node in (value, again):
        with MODE:
            meta.set_value(node, torch.empty(64 * MIB, dtype=torch.uint8))
    replay = replay_of(hand, hand.call(steps.add, value, again))
    least = replay.run().reserved
    found = [replay.disturbed(seed).reserved for seed in range(16)]
    assert found == [replay.disturbed(seed).reserved for seed in range(16)]
    assert replay.run().reserved == least
    assert min(found) >= least and max(found) > least


def test_what_is_disturbed_counts() -> None:
    program, profiler = programs.up_to("qwen3_moe", "schedule"), Profiler(programs.bare("qwen3_moe"))
    walk = Walk(program, profiler)
    walk.run()
    replay = Replay(walk)
    found = [replay.run().reserved, *(replay.disturbed(seed).reserved for seed in range(DISTURBED))]
    assert max(found) > found[0]  # a tiny model, whose own allocations are all small
    wanted = max(found) + int(HEADROOM * max(found)) + OTHERS
    assert project_reserved(program, profiler).reserved == wanted


@pytest.mark.parametrize("name", ["mlp", "qwen3_moe"])
def test_more_is_reserved_than_allocated(name: str) -> None:
    program, profiler = programs.up_to(name, "schedule"), Profiler(programs.bare(name))
    plain, projection = project(program, profiler), project_reserved(program, profiler)
    assert (plain.reserved, plain.held) == (0, plain.peak)
    assert projection.held == projection.reserved >= plain.peak + BLAS + OTHERS
    assert projection.limit >= projection.reserved - LARGE_PAGE
    assert replace(projection, reserved=0, limit=0) == plain
    assert project_reserved(program, profiler) == projection
