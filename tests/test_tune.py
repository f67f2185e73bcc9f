"""Plans tried on real steps, plans of the user's, and plans made anew after a step that took too much memory."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import oomc
from oomc import tune
from oomc.models import tiny
from oomc.runtime.step import StepRuntime
from tests.helpers import compiled, state, tokens

BATCH = tokens(2, 24, seed=0)


def make(budget: Any = None, **options: Any) -> oomc.Step:
    """A step of the tiny Qwen3-MoE that streams most of its state."""
    model = tiny.build("qwen3_moe", dtype=torch.float32)
    return compiled(model, BATCH, like=("qwen3_moe", torch.float32), device=budget, **options)


@pytest.fixture(scope="module")
def smallest() -> int:
    """The smallest device budget."""
    with pytest.raises(oomc.BudgetError) as caught:
        make(4096)
    assert caught.value.smallest_device is not None
    return caught.value.smallest_device


def numbers(step: oomc.Step) -> dict[str, torch.Tensor]:
    """The state after the steps so far."""
    return {name: t.clone() for name, t in state(step).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two states are the same bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)


def test_plans_take_turns_and_the_fastest_stays(smallest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make(2 * smallest, tune=4)
    (trace,) = step._compiler.traces.values()
    assert trace.tuning is None
    step.prepare(**BATCH)  # the shape comes again
    tuning = trace.tuning[1] if trace.tuning else tune.Tuning([])
    plans = [each.program.plan for each in tuning.plans]
    assert 2 <= len(plans) <= 4
    assert all(plans[i] != plans[j] for i in range(len(plans)) for j in range(i))
    assert len({tuple(plan.chunks.items()) for plan in plans if plan}) == 1
    seen = []
    # the times are made up: the second plan is the fastest
    took = tune.Tuning.took
    monkeypatch.setattr(
        tune.Tuning, "took", lambda self, plan, _: took(self, plan, 1.0 if plan is tuning.plans[1] else 2.0)
    )
    for index in range(len(plans) * (tune.WARM + tune.TIMED)):
        step(**tokens(2, 24, seed=index))
        seen.append(step.plan)
        assert step.metrics["device_peak"] <= step.projected <= 2 * smallest
    assert seen == [plan for plan in plans for _ in range(tune.WARM + tune.TIMED)]
    for index in range(3):
        step(**tokens(2, 24, seed=100 + index))
        assert step.plan == plans[1]
    assert trace.tuning is None
    text = str(step.report())
    assert "tried on real steps" in text
    assert text.count("2.000 s") == len(plans) - 1
    step.close()


def test_trying_plans_changes_no_bit(smallest: int) -> None:
    states = []
    for count in (0, 3):
        step = make(2 * smallest, tune=count)
        losses = [step(**tokens(2, 24, seed=i)).clone() for i in range(14)]
        states.append(numbers(step) | {"losses": torch.stack(losses)})
        assert step._current is not None
        assert (step._current.tried is not None and len(step._current.tried.plans) > 1) == bool(count)
        step.close()
    assert same(*states)


def test_a_batch_of_another_shape_ends_the_tries(smallest: int) -> None:
    step = make(2 * smallest, tune=3)
    (trace,) = step._compiler.traces.values()
    step(**BATCH)
    tuning = trace.tuning[1] if trace.tuning else tune.Tuning([])
    assert len(tuning.plans) > 1
    first = step._current
    assert first is tuning.plans[0]
    step(**tokens(2, 16, seed=1))
    assert trace.tuning is None
    assert first is not None
    assert first.tried is tuning  # and it is what was fastest so far: nothing else was tried
    step(**BATCH)
    assert step.plan.sizes == (2, 24)
    assert trace.tuning is None
    step.close()


def test_nothing_is_tried_with_tune_0_or_by_the_stand_in_itself(smallest: int) -> None:
    choices: tuple[dict[str, int], ...] = ({"tune": 0}, {"tune": 1}, {})
    for options in choices:
        step = make(2 * smallest, **options)
        (trace,) = step._compiler.traces.values()
        assert trace.tuning is None
        step.close()
    with pytest.raises(ValueError, match="tune=-1"):
        make(tune=-1)


def test_a_plan_of_the_users_is_used_and_changes_no_bit(smallest: int) -> None:
    step = make(2 * smallest)
    planned = step.plan
    for _ in range(2):
        step(**BATCH)
    expected = numbers(step)
    step.close()
    everything: dict[str, Any] = {
        name: "recompute" if where == "recompute" else "keep" for name, where in planned.residency.items()
    }
    for plan in (
        planned,
        replace(planned, prefetch=2 - planned.prefetch, hold=1 - min(planned.hold, 1), resident=()),
        replace(planned, residency=everything, where="host"),
    ):
        step = make(4 * smallest)
        step.use_plan(plan, **BATCH)
        for _ in range(2):
            step(**BATCH)
        assert (step.plan.prefetch, step.plan.hold, step.plan.resident) == (plan.prefetch, plan.hold, plan.resident)
        assert step.plan.residency == plan.residency
        assert step.metrics["device_peak"] <= step.projected
        assert same(numbers(step), expected)
        step.close()


def test_a_plan_that_does_not_suit_is_refused_before_anything_changes(
    smallest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make(2 * smallest)
    plan = step.plan
    before = numbers(step)
    with pytest.raises(ValueError, match="for a batch of"):
        step.use_plan(plan, **tokens(1, 16))
    values = dict(list(plan.residency.items())[1:])
    everything: dict[str, Any] = dict.fromkeys(plan.residency, "recompute")
    workset = next(iter(plan.chunks))
    for change, reason in (
        ({"residency": values}, "it says nothing of 1 values"),
        ({"residency": plan.residency | {"nothing": "keep"}}, "names 1 that there are not"),
        ({"residency": everything}, "cannot be computed again"),
        ({"resident": ("nothing",)}, "no slab nothing"),
        ({"chunks": {"nothing": (1, 1)}}, "workset nothing does not run in chunks"),
        ({"chunks": {workset: (0, 1)}}, "does not run in chunks of"),
        ({"prefetch": -1}, "below nothing"),
        ({"residency": dict.fromkeys(plan.residency, "banana")}, "is 'banana'"),
        ({"where": "device"}, "not compiled for updates by device"),
        ({"where": "nowhere"}, "who updates is 'nowhere'"),
    ):
        with pytest.raises(ValueError, match=reason):
            step.use_plan(replace(plan, **change), **BATCH)
    greedy = replace(plan, resident=tuple(slab.name for slab in step._state.slabs), hold=9)
    with pytest.raises(oomc.BudgetError, match="does not fit the device budget") as caught:
        step.use_plan(greedy, **BATCH)
    assert caught.value.smallest_device is not None
    assert caught.value.smallest_device > 2 * smallest
    monkeypatch.setattr(step._state, "check_host", refuse_host)
    with pytest.raises(oomc.BudgetError, match="no room"):
        step.use_plan(replace(plan, prefetch=2 - plan.prefetch), **BATCH)
    monkeypatch.undo()
    assert same(before, numbers(step))
    step(**BATCH)
    assert step.plan == plan
    step.close()


def refuse_host(*_: Any) -> None:
    raise oomc.BudgetError("there is no room on the host")


def test_a_given_plan_ends_the_tries_and_is_not_left(smallest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make(2 * smallest, tune=3)
    plan = replace(step.plan, prefetch=2 - min(2, step.plan.prefetch))
    step.prepare(**BATCH)
    tunes = [step._compiler.tunes]
    step.use_plan(plan, **BATCH)
    assert [*tunes, step._compiler.tunes] == [True, False]
    monkeypatch.setattr(type(step), "_device_peak", lambda self: 2 * smallest + 1)
    for _ in range(2):
        step(**BATCH)
        assert step.plan.prefetch == plan.prefetch
    assert step.metrics["replans"] == 0
    step.close()


def test_a_rival_that_takes_too_much_is_dropped_alone(smallest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make(2 * smallest, tune=3)
    step.prepare(**BATCH)
    (trace,) = step._compiler.traces.values()
    tuning = trace.tuning[1] if trace.tuning else tune.Tuning([])
    plans = list(tuning.plans)
    assert len(plans) > 1
    peak = type(step)._device_peak
    greedy = lambda self: 2 * smallest + 1 if self._current is plans[1] else peak(self)  # noqa: E731
    monkeypatch.setattr(type(step), "_device_peak", greedy)
    for _ in range(tune.WARM + tune.TIMED):
        step(**BATCH)
    with pytest.warns(UserWarning, match="end of the device budget"):
        step(**BATCH)
    assert plans[1] not in tuning.plans
    assert step.metrics["replans"] == 0
    step.close()


def test_where_no_plan_takes_less_the_first_one_stays(smallest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make(smallest)
    plan = step.plan
    with monkeypatch.context() as patch:
        patch.setattr(type(step), "_device_peak", lambda self: smallest + 1)
        with pytest.warns(UserWarning, match="end of the device budget"):
            step(**BATCH)
    for _ in range(2):
        step(**BATCH)
        assert step.plan.describe() == plan.describe()
    step.close()


@pytest.mark.parametrize("variant", ["forward", "backward"])
def test_a_step_that_runs_out_of_memory_is_planned_again(
    variant: str, smallest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make(2 * smallest)
    plain(**BATCH)
    expected = numbers(plain)
    plain.close()
    step = make(2 * smallest)
    planned = step.projected
    failures = [1]
    run = StepRuntime.run

    def failing(self: Any, form: str, which: str, args: Any) -> Any:
        if which == variant and failures:
            failures.pop()
            raise torch.OutOfMemoryError("out of memory")
        return run(self, form, which, args)

    monkeypatch.setattr(StepRuntime, "run", failing)
    monkeypatch.setattr(StepRuntime, "run_chunks", lambda self, f, w, _, args: failing(self, f, w, args))
    with pytest.warns(UserWarning, match="planned again with less"):
        step(**BATCH)
    assert not failures
    assert step.metrics["replans"] == 1
    assert step._current is not None
    assert step._current.projection.peak <= 2 * smallest * 0.971
    assert step.projected <= planned + 1
    got = numbers(step)
    assert got.keys() == expected.keys()
    for name, tensor in got.items():  # the new plan may run in other chunks: their sums round differently
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
    step.close()


def test_memory_that_never_does_is_an_error_and_no_state_is_lost(
    smallest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make(2 * smallest)
    before = numbers(step)

    def failing(*_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(StepRuntime, "run", failing)
        patch.setattr(StepRuntime, "run_chunks", failing)
        with warnings.catch_warnings(), pytest.raises(torch.OutOfMemoryError):
            warnings.simplefilter("ignore")
            step(**BATCH)
    assert same(before, numbers(step))
    step(**BATCH)
    step.close()


def test_a_first_step_that_takes_more_than_the_budget_is_planned_again(
    smallest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make(2 * smallest)
    first = step.plan
    monkeypatch.setattr(type(step), "_device_peak", lambda self: 2 * smallest + 1)
    with pytest.warns(UserWarning, match="end of the device budget"):
        step(**BATCH)
    assert step.metrics["replans"] == 1
    monkeypatch.undo()
    step(**BATCH)
    assert step._current is not None
    assert step._current.projection.peak <= 2 * smallest * 0.971
    assert step.plan.budget == first.budget
    step(**BATCH)
    assert step.metrics["replans"] == 1
    step.close()


def test_a_disk_budget_is_refused() -> None:
    with pytest.raises(oomc.UnsupportedError, match="disk budget"):
        oomc.Budget("1GiB", "1GiB", disk="1TiB")
    assert copy.copy(oomc.Budget("1GiB")) == oomc.Budget(1 << 30)


def test_an_optimizer_that_is_compiled_again_warns_of_its_state() -> None:
    model = tiny.build("qwen3_moe", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = compiled(model, BATCH, like=("qwen3_moe", torch.float32), optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(model, BATCH, like=("qwen3_moe", torch.float32), optimizer=optimizer, prepare=False)
    step(**BATCH)
    step.close()
    with pytest.warns(UserWarning, match="was compiled and stepped before"):
        compiled(model, BATCH, like=("qwen3_moe", torch.float32), optimizer=optimizer, prepare=False)
