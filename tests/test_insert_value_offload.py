"""insert_value_offload: golden text, numbers with any value on the host, and that the plan alone decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oomc import meta, steps
from oomc.offloadable import value_bytes
from oomc.passes.insert_value_offload import InsertValueOffload
from oomc.printer import print_program
from oomc.program import Program
from oomc.simulate import project
from tests import programs
from tests.conftest import Golden


def nodes(program: Program, word: object) -> list[torch.fx.Node]:
    return [n for n in program.graph.nodes if n.target is word]


def moves(program: Program) -> str:
    """The printed lines of computations, and of the values that leave and come back."""
    words = ("run(", "run_chunks(", "store(", "discard(", "restore(", "restored(")
    lines = (line[5:].partition("  #") for line in print_program(program).splitlines())
    return "\n".join(f"{text}  # {notes.strip()}" for text, _, notes in lines
                     if any(f" {w}" in f" {text}" for w in words))  # fmt: skip


def test_golden(golden: Golden) -> None:
    stages = ("insert_recompute", "insert_value_offload", "schedule")
    texts = [f"after {stage}:\n{moves(programs.offloaded('mlp', ('embedding',), until=stage))}" for stage in stages]
    plan = programs.offloaded("mlp", ("embedding",)).plan
    assert plan is not None
    golden("insert_value_offload", programs.stable("\n\n".join([*texts, f"host slots {plan.host_slots}"])))


@pytest.mark.parametrize(
    ("kind", "prefetch", "recompute"),
    [("topk", 0, False), ("topk", 1, True), ("topk", 2, False), ("tied", 1, True), ("mlp", 1, False)],
)
def test_the_same_bits_with_all_on_the_host(kind: str, prefetch: int, recompute: bool) -> None:
    own = programs.model(kind)
    kept = programs.run_step(programs.offloaded(kind, (), prefetch, recompute=recompute), own)
    program = programs.offloaded(kind, None, prefetch, recompute=recompute)
    assert len(nodes(program, steps.store)) == len(programs.movable(kind)) > 0
    moved = programs.run_step(program, own)
    assert torch.equal(kept[0], moved[0])
    assert all(torch.equal(kept[1][name], moved[1][name]) for name in kept[1])


@pytest.mark.parametrize("name", ["embedding", "getitem_16", "add_4", "layers.0/3:saved.1"])
def test_a_single_value_can_leave(name: str) -> None:
    """A boundary, a result of attention, the layers' boundary, a choice of experts; the rest is recomputed or kept."""
    program = programs.offloaded("topk", (name,), recompute=True)
    assert [n.args[1] for n in nodes(program, steps.store)] == [name]
    programs.assert_runs(program, programs.model("topk"))


def test_what_is_recomputed_uses_the_restored_value() -> None:
    program = programs.offloaded("topk", ("add_4",), recompute=True)
    (back,) = nodes(program, steps.restored)
    assert {meta.note(u).phase for u in back.users} == {"recompute", "backward"}
    (store,) = nodes(program, steps.store)
    assert {meta.note(u).phase for u in store.args[2].users} == {"forward"}  # type: ignore[union-attr]


def test_nothing_to_do() -> None:
    program = programs.up_to("topk", "insert_recompute")
    before = print_program(program)
    assert not InsertValueOffload()(program).modified
    assert print_program(program) == before


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_copies_have_so_many_blocks_of_time(prefetch: int) -> None:
    program = programs.offloaded("topk", None, prefetch)
    order = {n: i for i, n in enumerate(program.graph.nodes)}
    runs = [n for n in program.graph.nodes if n.target in steps.COMPUTE]
    last = len(program.blocks) - 1

    def first(block: int, backward: bool) -> torch.fx.Node:
        phases = ("recompute", "backward") if backward else ("forward",)
        return next(n for n in runs if meta.note(n).block == block and meta.note(n).phase in phases)

    def run_before(node: torch.fx.Node) -> torch.fx.Node:
        return [n for n in runs if order[n] < order[node]][-1]

    def run_after(node: torch.fx.Node) -> torch.fx.Node:
        return next(n for n in runs if order[n] > order[node])

    for discard, back in zip(nodes(program, steps.discard), nodes(program, steps.restored), strict=True):
        value: Any = discard.args[1].args[2]  # type: ignore[union-attr]
        used = max((n for n in value.users if n in runs), key=lambda n: order[n], default=run_before(value))
        further = first(min(meta.note(value).block + prefetch, last), backward=False)
        if prefetch and order[further] > order[used]:
            assert run_after(discard) is further
        else:
            assert run_before(discard) is used
        restore: Any = back.args[1]
        use = run_after(back)
        if prefetch:
            ahead = first(min(meta.note(use).block + prefetch, last), backward=True)
            assert run_after(restore) is (ahead if order[ahead] < order[use] else use)
        else:
            assert run_after(restore) is use


def test_host_slots_are_of_exact_size_and_reused() -> None:
    program = programs.offloaded("topk")
    assert program.plan is not None
    stores = nodes(program, steps.store)
    sizes = [value_bytes(program, n.args[2], programs.SIZES) for n in stores]  # type: ignore[arg-type]
    assert sorted(sizes) == sorted(program.plan.host_slots), "all are there at once"
    assert program.plan.host_value_bytes == sum(sizes)


def test_the_projection_has_less_on_the_device() -> None:
    kept, moved = (programs.offloaded("topk", names, prefetch=0) for names in ((), None))
    profiler = programs.profiler("topk")
    before, after = project(kept, profiler), project(moved, profiler)
    start = next(n.name for n in moved.graph.nodes if n.target is steps.ones_like)
    assert moved.plan is not None
    rounded = [-(-size // 512) * 512 for size in moved.plan.host_slots]
    assert before.live[start] - after.live[start] == sum(rounded)
    assert after.peak <= before.peak
