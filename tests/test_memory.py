"""Measured <= projected <= allowed on the stand-in, below half of what eager training takes; what cannot work fails."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import oomc
from oomc.models import tiny
from oomc.step import Step
from tests.helpers import ADAMW, compiled, eager_peak, masters, smallest_device, state, tiny_step, tokens

SHAPES = {"qwen3_next": (1, 32)}
SHAPE = (2, 24)


def shape_of(name: str) -> tuple[int, int]:
    return SHAPES.get(name, SHAPE)


def run_within(step: Step, shape: tuple[int, int], allowed: int) -> None:
    """Three steps and an accumulation, each measured <= projected <= allowed."""
    batches = [tokens(*shape, seed=i) for i in range(3)]
    for batch in batches:
        step(**batch)
        figures = step.metrics
        assert figures["device_peak"] <= figures["device_projected"] <= allowed, figures
        assert figures["device_peak"] > 0.5 * figures["device_projected"], "the projection is far too high"


@pytest.mark.parametrize("name", tiny.NAMES)
def test_half_of_eager(name: str) -> None:
    shape = shape_of(name)
    eager = eager_peak(tiny.build(name), tokens(*shape))
    needed = smallest_device(name, *shape)
    assert needed < eager / 2, f"needs {needed}, eager {eager}"
    step, _ = tiny_step(name, device=needed, prepare=False)
    step.prepare(**tokens(*shape))
    run_within(step, shape, needed)
    roomy, _ = tiny_step(name, device=eager // 2, prepare=False)
    roomy.prepare(**tokens(*shape))
    run_within(roomy, shape, eager // 2)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_too_small_a_budget_fails_before_anything_is_taken(name: str) -> None:
    shape = shape_of(name)
    needed = smallest_device(name, *shape)
    step, _ = tiny_step(name, device=int(0.98 * needed), prepare=False)
    before = {n: p.data_ptr() for n, p in step.model.named_parameters()}
    with pytest.raises(oomc.BudgetError, match=f"smallest device budget that works for this batch is {needed} bytes"):
        step.prepare(**tokens(*shape))
    assert step._runtime is None and not step._state.slabs
    assert {n: p.data_ptr() for n, p in step.model.named_parameters()} == before
    with pytest.raises(oomc.BudgetError):
        step(**tokens(*shape))


def test_compile_itself_refuses_a_budget() -> None:
    model = tiny.build("plain_moe")
    original = copy.deepcopy(model.state_dict())
    with pytest.raises(oomc.BudgetError) as caught:
        oomc.compile(model, oomc.Budget("1KiB"), example=tokens(2, 24), device="cpu")
    assert caught.value.smallest_device == smallest_device("plain_moe", 2, 24)
    assert caught.value.smallest_host is None
    assert "needed" in str(caught.value) and "allowed" in str(caught.value)
    assert all(torch.equal(v, original[n]) for n, v in model.state_dict().items())


def test_a_larger_batch_than_fits_is_refused_and_the_step_goes_on() -> None:
    needed = smallest_device("plain_moe", 2, 24)
    step, _ = tiny_step("plain_moe", device=needed)
    step(**tokens(2, 24))
    before = state(step)
    with pytest.raises(oomc.BudgetError, match="batch 8 x 96"):
        step(**tokens(8, 96))
    after = state(step)
    assert all(torch.equal(after[n], before[n]) for n in before), "a refused batch changed something"
    step(**tokens(2, 24))
    assert step.metrics["device_peak"] <= needed


@pytest.mark.parametrize("shapes", [((2, 24), (1, 10), (2, 24)), ((1, 10), (2, 24), (3, 30))])
def test_shapes_in_turn_stay_within_their_projections(shapes: tuple[tuple[int, int], ...]) -> None:
    step, _ = tiny_step("plain_moe", prepare=False)
    kept = [tokens(*shape) for shape in shapes]  # all alive at once, as a loader's are
    for batch in kept:
        step(**batch)
        assert step.metrics["device_peak"] <= step.metrics["device_projected"], batch["input_ids"].shape


def test_accumulation_stays_within_its_projection() -> None:
    step, _ = tiny_step("plain_moe")
    for seed in range(3):
        step.forward_backward(**tokens(2, 24, seed=seed))
        assert step.metrics["device_peak"] <= step.metrics["device_projected"]


def test_sums_that_stay_on_the_device_are_projected_for_plain_steps_too() -> None:
    step, _ = tiny_step("plain_moe", device="64MiB")
    assert step.plan.resident
    step(**tokens(2, 24))
    before = step.projected
    step.forward_backward(**tokens(2, 24, seed=1))
    step.update()
    step(**tokens(2, 24))
    assert step.metrics["device_peak"] <= step.projected
    assert step.projected > before


def test_an_unplanned_tensor_is_noticed() -> None:
    step, _ = tiny_step("plain_moe")
    batch = tokens(2, 24)
    step(**batch)
    measured = step.metrics["device_peak"]
    runtime = step._runtime
    assert runtime is not None
    run = runtime.run_chunks
    held = []

    def leaky(form: str, variant: str, chunk: tuple[int, int], args: Sequence[Any]) -> tuple[Any, ...]:
        held.append(torch.zeros(1024))
        return run(form, variant, chunk, args)

    runtime.run_chunks = leaky  # type: ignore[method-assign]
    step(**batch)
    assert step.metrics["device_peak"] >= measured + 4096 * len(held) // 2
    assert step.metrics["device_peak"] > step.metrics["device_projected"], "the meter did not see it"


@pytest.mark.parametrize("name", ["qwen3_moe", "llama", "plain_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulate", [False, True])
def test_host_bytes_are_as_planned(name: str, dtype: torch.dtype, accumulate: bool) -> None:
    step, _ = tiny_step(name, dtype)
    runtime = step._runtime
    assert runtime is not None
    batch = tokens(2, 24)
    if accumulate:
        step.forward_backward(**batch)
        step.update()
    else:
        step(**batch)
    step.synchronize()
    planned = step._state.host_needed(step._current.program, step.plan.resident)  # type: ignore[union-attr]
    assert runtime.host_bytes == pytest.approx(sum(planned.values()), rel=0.02)
    trained = sum(m.numel() for m in masters(step).values())
    state_bytes = sum(s.layout.weight_bytes + s.layout.state_bytes(step._rule.arrays) for s in step._state.slabs)
    assert state_bytes <= 12 * trained + 512 * len(list(step.model.parameters())), "12 bytes a parameter and padding"


def test_a_host_budget_that_cannot_work_names_the_smallest() -> None:
    model = tiny.build("plain_moe")
    pointers = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(oomc.BudgetError, match="host budget") as caught:
        compiled(model, tokens(2, 24), like=("plain_moe", torch.float32), host="1MiB")
    smallest = caught.value.smallest_host
    assert smallest is not None and caught.value.smallest_device is None
    assert [p.data_ptr() for p in model.parameters()] == pointers
    with pytest.raises(oomc.BudgetError):
        compiled(model, tokens(2, 24), like=("plain_moe", torch.float32), host=int(0.98 * smallest))
    step = compiled(model, tokens(2, 24), like=("plain_moe", torch.float32), host=smallest)
    step(**tokens(2, 24))
    assert step._runtime is not None and step._runtime.host_bytes <= smallest


def test_frozen_parameters_cost_their_weights_only() -> None:
    model = tiny.build("plain_moe")
    model.layers.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
    step = compiled(model, tokens(2, 24), optimizer=optimizer)
    step(**tokens(2, 24))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(m.numel() for m in masters(step).values()) == trained
    assert sum(s.layout.state_bytes(step._rule.arrays) for s in step._state.slabs) <= 8 * trained + 4096
