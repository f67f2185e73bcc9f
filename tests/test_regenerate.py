"""Whole steps with regenerated boundaries: the same bits as with kept ones, and memory as projected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from oomc import meta, steps
from oomc.plan import Plan, Residency
from oomc.step import Step
from tests.helpers import Blind, state, tiny_step, tokens

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


@pytest.mark.parametrize("columns", [None, 12, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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


def test_a_chain_is_regenerated_once_and_held() -> None:
    """All layers but the last are linear: what they made is regenerated for the last one, each from the one before."""
    step, _ = tiny_step("qwen3_next", device="64MiB", tune=0, verify=True)
    use(step, planned(step, boundaries(step)))
    assert regenerated(step) == [(4, f"model.layers.{i}/0") for i in range(3)]
    assert "3 values recomputed (3 of them between blocks)" in step.plan.describe()
    step.close()


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_memory_is_as_projected_and_less_than_if_kept(prefetch: int) -> None:
    """A boundary is 256 KiB, and chunks are so short that boundaries are most of what lives."""
    peaks: list[tuple[int, int]] = []
    for count in (0, 1):
        step, _ = tiny_step("qwen3_next", device="1GiB", tune=0, prepare=False)
        step.prepare(**tokens(4, 256))
        plan = planned(step, boundaries(step)[:count], prefetch, columns=32)
        use(step, plan)
        budget = step.projected
        step.close()
        step, _ = tiny_step("qwen3_next", device=budget, tune=0, prepare=False)
        step.use_plan(plan, **tokens(4, 256))
        for seed in range(2):
            step(**tokens(4, 256, seed=seed))
            figures = step.metrics
            assert figures["device_peak"] <= figures["device_projected"] <= budget
        assert step.plan.regenerated == count
        peaks.append((figures["device_peak"], figures["device_projected"]))
        step.close()
    assert all(less < more for less, more in zip(peaks[1], peaks[0], strict=True)), peaks
