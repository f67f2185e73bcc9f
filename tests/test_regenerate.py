"""Regenerated boundaries: what may be, and whole steps with the same bits as with kept ones, in memory as projected."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import oomc
from oomc import machine, meta, pipeline, regenerate, steps
from oomc.cost import Costs
from oomc.passes.insert_recompute import _Recompute
from oomc.plan import Plan, Residency
from oomc.planner import Planner
from oomc.regenerate import Boundary, groups
from oomc.step import Step
from tests import programs
from tests.helpers import Blind, compiled, state, tiny_step, tokens

SLOW = pytest.mark.slow
SHAPE = (2, 24)
Run = list[dict[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def boundaries(step: Step) -> list[str]:
    """What the layers hand on, in order, but for what the last one does."""
    assert step._current is not None
    program = step._current.program
    return [b.worksets[-1].outputs[0].name for b in program.blocks[1:-2]]


def planned(step: Step, names: Sequence[str], prefetch: int = 1, columns: int | None = None) -> Plan:
    """The step's plan with these boundaries regenerated, all other values kept, and chunks of so many positions."""
    where: dict[str, Residency] = dict.fromkeys(step.plan.residency, "keep")
    chunks = step.plan.chunks
    if columns is not None:
        assert step._current is not None
        forms = step._current.program.forms
        kinds = {w.name: forms[w.form].chunk for b in step._current.program.blocks for w in b.worksets}
        chunks = {n: (1, columns) if kinds[n] == "tokens" else c for n, c in chunks.items()}
    return replace(
        step.plan, residency=where | dict.fromkeys(names, "recompute"), chunks=chunks, prefetch=prefetch, hold=1,
        resident=(),
    )  # fmt: skip


def use(step: Step, plan: Plan) -> None:
    """Run by a plan from now on."""
    step.use_plan(plan, **tokens(*plan.sizes))
    step.prepare(**tokens(*plan.sizes))


def regenerated(step: Step) -> list[tuple[int, str]]:
    """For which blocks which worksets run again, in order."""
    return [(meta.note(n).block, meta.note(n).workset) for n in step.graph.graph.nodes
            if n.target in steps.COMPUTE and meta.note(n).phase == "regenerate"]  # fmt: skip


def train(step: Step, count: int = 3) -> Run:
    """Loss and the whole state after each step."""
    result: Run = []
    for seed in range(count):
        loss = step(**tokens(*SHAPE, seed=seed))
        result.append({"loss": loss, **state(step)})
    return result


def assert_equal(run: Run, expected: Run) -> None:
    for number, (mine, others) in enumerate(zip(run, expected, strict=True)):
        assert mine["loss"].isfinite()
        for name, tensor in others.items():
            assert torch.equal(mine[name], tensor), f"{name} after step {number}"


@pytest.mark.parametrize(
    ("dtype", "columns"),
    [(torch.float32, None), (torch.bfloat16, 12), (torch.float32, 8),
     *(pytest.param(dtype, columns, marks=SLOW) for dtype, columns in
       ((torch.bfloat16, None), (torch.float32, 12), (torch.bfloat16, 8)))],
)  # fmt: skip
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_moe"])
def test_no_bit_differs_from_what_is_kept(name: str, dtype: torch.dtype, columns: int | None) -> None:
    """Chunks of a row are 1, 2 and 3; states pass from one to the next in delta rules and convolutions."""
    runs: list[Run] = []
    for chaos in (None, 0, 1):
        step, _ = tiny_step(name, dtype, device="64MiB", tune=0, chaos=chaos)
        step._meter = Blind()
        every = boundaries(step)
        names = every if chaos else every[:1]
        use(step, planned(step, names if chaos is not None else (), columns=columns))
        assert len({workset.rpartition("/")[0] for _, workset in regenerated(step)}) == (chaos is not None) * len(names)
        runs.append(train(step))
        step.close()
    for run in runs[1:]:
        assert_equal(run, runs[0])


@pytest.mark.parametrize("how", ["resident", "accumulate", "clip"])
def test_no_bit_differs_where_state_is_on_the_device_gradients_are_summed_or_clipped(how: str) -> None:
    """All boundaries are regenerated, the embedding too."""
    runs: list[Run] = []
    for again in (False, True):
        options: dict[str, Any] = {"max_grad_norm": 1.0} if how == "clip" else {}
        step, _ = tiny_step("qwen3_moe", torch.bfloat16, device="64MiB", tune=0, chaos=2 if again else None, **options)
        step._meter = Blind()
        assert step._current is not None
        program = step._current.program
        plan = planned(step, [b.worksets[-1].outputs[0].name for b in program.blocks[:-2]] if again else ())
        plan = replace(plan, resident=tuple(s.name for s in program.slabs[:2]) if how == "resident" else (), hold=0)
        use(step, plan)
        if how != "accumulate":
            runs.append(train(step))
        else:
            step.use_plan(replace(plan, accumulate=True), **tokens(*SHAPE))
            losses = [step.forward_backward(**tokens(*SHAPE, seed=seed)) for seed in range(2)]
            step.update()
            runs.append([{"loss": losses[1], **state(step)}])
        assert step.plan.accumulate == (how == "accumulate")
        assert step.plan.regenerated == (2 if again else 0)
        step.close()
    assert_equal(runs[1], runs[0])


def test_a_chain_is_regenerated_once_and_held() -> None:
    """All layers but the last are linear: what they made is regenerated for the last one, each from the one before."""
    step, _ = tiny_step("qwen3_next", device="64MiB", tune=0, verify=True)
    use(step, planned(step, boundaries(step)))
    assert regenerated(step) == [(4, f"model.layers.{i}/0") for i in range(3)]
    assert "3 values recomputed (3 of them between blocks)" in step.plan.describe()
    text = str(step.report())
    step.close()
    assert "192.0 KiB" not in text, "a batch of 2 x 24 has smaller ones"
    assert "36.0 KiB less wait for the backward, on the host or on the device, for" in text
    rows = [line.split() for line in text.splitlines() if line.endswith("12.0 KiB")]
    assert [row[1:3] for row in rows] == [[f"model.layers.{i}", "model.layers.3"] for i in range(3)]


def test_a_chain_over_many_layers_needs_no_deeper_a_stack() -> None:
    """A row of all 94 layers of Qwen3-235B-A22B would be deeper than Python's stack, if each waited for the next."""
    depths = []
    for layers in (2, 5):
        step = compiled(programs.TopK(layers, dropout=0.0), tokens(*SHAPE, programs.VOCAB), device="64MiB", tune=0)
        assert step._current is not None
        given, deepest = planned(step, boundaries(step)), 0

        def note(frame: Any, event: str, _: Any) -> None:
            nonlocal deepest
            if event == "call" and frame.f_code is _Recompute._rerun.__code__:
                depth = 0
                while frame is not None:
                    frame, depth = frame.f_back, depth + 1
                deepest = max(deepest, depth)

        sys.setprofile(note)
        try:
            pipeline.with_plan(step._current.bare, pipeline.chosen(given))
        finally:
            sys.setprofile(None)
        depths.append(deepest)
        step.close()
    assert depths[0] == depths[1] > 0


@SLOW
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_memory_is_as_projected_and_less_than_if_kept(prefetch: int) -> None:
    """A boundary is 64 KiB, and chunks are so short that boundaries are most of what lives."""
    peaks: list[tuple[int, int]] = []
    for count in (0, 1):
        step, _ = tiny_step("qwen3_next", device="1GiB", tune=0, prepare=False, chunk_tokens=16)
        step.prepare(**tokens(4, 64))
        plan = planned(step, boundaries(step)[:count], prefetch)
        use(step, plan)
        budget = step.projected
        step.close()
        step, _ = tiny_step("qwen3_next", device=budget, tune=0, prepare=False, chunk_tokens=16)
        step.use_plan(plan, **tokens(4, 64))
        step(**tokens(4, 64))
        figures = step.metrics
        assert figures["device_peak"] <= figures["device_projected"] <= budget
        assert step.plan.regenerated == count
        peaks.append((figures["device_peak"], figures["device_projected"]))
        step.close()
    assert all(less < more for less, more in zip(peaks[1], peaks[0], strict=True)), peaks


def test_a_small_host_budget_is_met_by_regenerating_and_no_bit_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is so small that boundaries wait on the host; where these do not fit there, they are made again."""
    shape = (4, 256)

    def make(device: int | str, host: int | None = None) -> Step:
        step, _ = tiny_step("qwen3_next", device=device, host=host, tune=0, prepare=False, chunk_tokens=64)
        step.prepare(**tokens(*shape))
        return step

    def train(step: Step) -> Run:
        found = []
        for seed in range(2):
            loss = step(**tokens(*shape, seed=seed))
            figures = step.metrics
            assert figures["device_peak"] <= figures["device_projected"] <= device
            found.append({"loss": loss, **state(step)})
        step.close()
        return found

    with pytest.raises(oomc.BudgetError) as caught:
        make("1KiB")
    assert caught.value.smallest_device is not None
    device = caught.value.smallest_device
    step = make(device)
    assert step._current is not None
    values, whole = step.plan.host_value_bytes, sum(step._state.host_needed(step._current.program, ()).values())
    assert step.plan.regenerated == 0 and values > 0
    expected = train(step)
    for host in (whole - 1, whole - values):
        step = make(device, host)
        assert step.plan.regenerated > 0
        assert step._current is not None
        assert sum(step._state.host_needed(step._current.program, ()).values()) <= host
        assert_equal(train(step), expected)
    with monkeypatch.context() as without:
        without.setattr(Planner, "_regenerating", lambda _self, _cuts, _request, best, _known: best)
        with pytest.raises(oomc.BudgetError, match="values between forward and backward") as caught:
            make(device, whole - values)
    assert caught.value.smallest_host is not None
    with pytest.raises(oomc.BudgetError) as less:
        make(device, whole - values - 1)
    assert less.value.smallest_host is not None and less.value.smallest_host < caught.value.smallest_host


# -- what could be regenerated ----------------------------------------------------------------------------------------


def could(kind: str, **changes: Any) -> list[Boundary]:
    """The boundaries that the fixed policy's plan could regenerate, with some decisions changed."""
    program = programs.up_to(kind, "choose_residency")
    assert program.plan is not None
    return regenerate.boundaries(program, replace(program.plan, **changes), Costs(program, machine.default("h200")))


@pytest.mark.parametrize("kind", ["mlp", "topk", "tied"])
def test_all_but_what_the_last_block_is_given_can_be_regenerated(kind: str) -> None:
    found = could(kind)
    assert tuple(b.value for b in found) == programs.boundaries(kind)
    assert [b.block for b in found] == [0, 1]
    assert all(b.nbytes == 4 * 24 * (4 if kind == "mlp" else 8) and b.seconds > 0 for b in found)


def test_what_attention_gave_costs_nothing_where_it_is_kept() -> None:
    program = programs.up_to("topk", "choose_residency")
    assert program.plan is not None
    fences = {w.outputs[0].name for b in program.blocks[1:3] for w in b.worksets[1:2]}
    kept: dict[str, Residency] = program.plan.residency | dict.fromkeys(fences, "keep")
    assert could("topk", residency=kept)[1].seconds < could("topk")[1].seconds


def test_weights_that_do_not_come_next_cost_a_copy() -> None:
    now, at_once = could("mlp", prefetch=1), could("mlp", prefetch=0)
    assert all(a.seconds < b.seconds for a, b in zip(now, at_once, strict=True))
    there = could("mlp", prefetch=0, resident=tuple(s.name for s in programs.bare("mlp").slabs))
    assert [b.seconds for b in there] == [b.seconds for b in now]


def test_groups_are_of_like_blocks_the_cheapest_first_and_in_short_rows() -> None:
    dear, cheap = ("dear",), ("cheap",)
    known = [Boundary(f"v{b}", b, 100, 3.0 if b % 4 == 3 else 1.0, dear if b % 4 == 3 else cheap) for b in range(8)]
    names = [[b.block for b in group] for group in groups(known, 1 << 30)]
    assert names == [[0, 1, 2, 4, 5, 6], [3, 7]]
    assert [[b.block for b in group] for group in groups(known, 1)] == [[0, 2, 4, 6]]
    assert [[b.block for b in group] for group in groups(known, 2)] == [[0, 1, 4, 6], [3, 7]]
