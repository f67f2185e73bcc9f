"""Whole steps with values on the host: the same bits in any order, memory as planned, interrupts, budgets."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

import oomc
from oomc import meta, pipeline, steps
from oomc.explain import Explanation
from oomc.offloadable import why_not
from oomc.passes.choose_residency import CANDIDATES, Candidate, ChooseResidency
from oomc.plan import Residency
from oomc.planner import Cut, Planned, Planner, Request
from oomc.program import Program
from oomc.runtime.memory import HostMemory
from oomc.runtime.meter import Meter
from oomc.step import Step
from tests.helpers import Blind, state, tiny_step, tokens

SHAPE = (2, 24)
Run = list[dict[str, torch.Tensor]]
Plans = Callable[[Residency], None]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    """`plans("offload")`: from now on plans have on the host all that may be there; `plans("keep")`: nothing."""
    plain = ChooseResidency._residency

    def use(kind: Residency) -> None:
        def residency(self: ChooseResidency, program: Program) -> dict[str, Residency]:
            result = plain(self, program)
            for node in program.graph.nodes:
                note = meta.note(node)
                if node.target is operator.getitem and note.phase == "forward" and note.source in result:
                    if kind == "keep" or not why_not(program, node):
                        result[note.source] = kind
            return result

        monkeypatch.setattr(ChooseResidency, "_residency", residency)

    return use


def stores(step: Step) -> list[torch.fx.Node]:
    return [n for n in step.graph.graph.nodes if n.target is steps.store]


def train(name: str, dtype: torch.dtype, kind: str, **options: Any) -> Run:
    """Loss and the whole state after each of three steps, of which one is of another shape."""
    step, _ = tiny_step(name, dtype, **options)
    step._meter = Blind()
    result = []
    for seed, shape in enumerate((SHAPE, (1, 17), SHAPE)):
        if kind == "accumulate":
            step.forward_backward(**tokens(*shape, seed=seed))
            loss = step.forward_backward(**tokens(*SHAPE, seed=seed + 10))
            gradients = {f"gradient of {n}": g for n, g in step.gradients().items()}
            step.update()
        else:
            loss, gradients = step(**tokens(*shape, seed=seed)), {}
        result.append({"loss": loss, **gradients, **state(step)})
    assert bool(stores(step)) == bool(step.plan.host_slots)
    step.close()
    return result


def assert_equal(run: Run, expected: Run) -> None:
    for number, (mine, others) in enumerate(zip(run, expected, strict=True)):
        for name, tensor in others.items():
            assert torch.equal(mine[name], tensor), f"{name} after step {number}"


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [
        ("plain_moe", torch.float32, "step"),
        ("plain_moe", torch.bfloat16, "accumulate"),
        ("llama", torch.bfloat16, "step"),
        ("qwen3_next", torch.float32, "step"),
        ("gpt_oss", torch.float32, "accumulate"),
    ],
)
def test_no_bit_differs_from_what_is_kept(name: str, dtype: torch.dtype, kind: str, plans: Plans) -> None:
    plans("keep")
    expected = train(name, dtype, kind, synchronous=True)
    assert all(each["loss"].isfinite() for each in expected)
    plans("offload")
    for seed in range(2):
        assert_equal(train(name, dtype, kind, chaos=seed), expected)


def test_many_steps_that_are_not_awaited_change_no_bit(plans: Plans) -> None:
    def last(**options: Any) -> dict[str, torch.Tensor]:
        step, _ = tiny_step("plain_moe", **options)
        step._meter = Blind()
        for seed in range(12):
            loss = step(**tokens(*SHAPE, seed=seed))
        return {"loss": loss, **state(step)}

    plans("keep")
    expected = last(synchronous=True)
    plans("offload")
    for seed in range(4):
        assert_equal([last(chaos=seed)], [expected])
    assert_equal([last()], [expected])


@pytest.mark.parametrize("word", ["discard", "restored"])
def test_a_missing_wait_would_show(word: str, plans: Plans) -> None:
    plans("offload")
    expected = train("llama", torch.float32, "step", synchronous=True)[0]
    wrong = 0
    for seed in range(4):
        step, _ = tiny_step("llama", chaos=seed)
        step._meter = Blind()
        assert step._runtime is not None
        values = step._runtime._values
        wait = getattr(values, word)

        def at_once(copy: Any, wait: Any = wait) -> Any:
            ticket = copy.out if word == "discard" else copy.back
            ticket.wait_on = ticket.wait_host = lambda: None
            return wait(copy)

        setattr(values, word, at_once)
        try:
            result = {"loss": step(**tokens(*SHAPE, seed=0)), **state(step)}
        except RuntimeError:  # a lane came to a value that was not there any more
            wrong += 1
        else:
            wrong += any(not torch.equal(tensor, expected[name]) for name, tensor in result.items())
    assert wrong >= 2


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("name", ["plain_moe", "qwen3_moe"])
def test_memory_is_as_projected(name: str, prefetch: int, plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured <= projected <= allowed, with a budget of just what is projected; host bytes are the plan's."""
    try_only(monkeypatch, [[Candidate(4096, prefetch, prefetch, stage=False)]])
    plans("offload")
    step, _ = tiny_step(name)
    step = tiny_step(name, device=step.projected)[0] if prefetch else step
    for seed in range(3):
        step(**tokens(*SHAPE, seed=seed))
        figures = step.metrics
        assert figures["device_peak"] <= figures["device_projected"] <= (step._options.budget.device or 1 << 40)
        assert figures["device_peak"] > 0.5 * figures["device_projected"]
    assert step._runtime is not None and step._current is not None
    host = figures["host_value_bytes"]
    assert host == sum(step._runtime._values.sizes) == step.plan.host_value_bytes > 0
    planned = step._state.host_needed(step._current.program, step.plan.resident)
    assert planned["values between forward and backward"] == host
    assert step._runtime.host_bytes == pytest.approx(sum(planned.values()), rel=0.02)
    fetched = sum(s.layout.weight_bytes for n in step.graph.graph.nodes if n.target is steps.fetch
                  for s in step._current.program.slabs if s.name == n.args[1])  # fmt: skip
    assert figures["h2d_bytes"] == fetched + host
    assert "values between forward and backward" in str(step.report())
    assert "of values to the host and back" in str(step.report())
    step.close()
    assert step._runtime._values.sizes == ()


def try_only(monkeypatch: pytest.MonkeyPatch, candidates: Sequence[Sequence[Candidate]]) -> None:
    """Plans are made from these, by the fixed policy."""

    def plan(_: Planner, cuts: Sequence[Cut], r: Request) -> Planned:
        made = cuts[0]()
        assert made is not None
        program, projection = pipeline.plan_step(
            *made, r.sizes, r.allowed, r.budget, updates=r.updates, accumulate=r.accumulate, candidates=candidates
        )
        return Planned(made[0], program, projection, 0.0, lambda: Explanation(0, "", 0.0, 0.0, ()), lambda _: [])

    monkeypatch.setattr(Planner, "plan", plan)
    monkeypatch.setattr(pipeline, "plan_step", partial(pipeline.plan_step, candidates=candidates))


LARGE = (4, 96)
"""Values between blocks are 96 KiB."""
FEW = tuple(g for g in (tuple(c for c in group if c.tokens == 16) for group in CANDIDATES) if g)


def smallest(monkeypatch: pytest.MonkeyPatch, offload: bool) -> int:
    """The smallest device budget for a batch of LARGE, by the candidates that offload or those that do not."""
    try_only(monkeypatch, [group for group in FEW if group[0].offload == offload])
    step, _ = tiny_step("plain_moe", device="1KiB", prepare=False)
    with pytest.raises(oomc.BudgetError) as caught:
        step.prepare(**tokens(*LARGE))
    assert caught.value.smallest_device is not None
    return caught.value.smallest_device


def test_a_budget_in_which_only_values_on_the_host_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, moved = (smallest(monkeypatch, offload) for offload in (False, True))
    assert moved < kept
    try_only(monkeypatch, FEW)
    results = []
    for device in (kept, moved):
        step, _ = tiny_step("plain_moe", device=device, prepare=False)
        step.prepare(**tokens(*LARGE))
        assert bool(step.plan.host_slots) == (device == moved), "values leave where nothing else fits"
        for seed in range(2):
            loss = step(**tokens(*LARGE, seed=seed))
            assert step.metrics["device_peak"] <= step.metrics["device_projected"] <= device
        results.append({"loss": loss, **state(step)})
    # the plan that offloads keeps attention's results, and what is kept gives the bits of what is recomputed
    assert_equal([results[1]], [results[0]])


def test_a_host_budget_counts_values(plans: Plans) -> None:
    plans("offload")
    step, _ = tiny_step("plain_moe", torch.bfloat16)
    values = step.plan.host_value_bytes
    assert step._current is not None and values > 0
    needed = sum(step._state.host_needed(step._current.program, step.plan.resident).values())
    with pytest.raises(oomc.BudgetError, match="values between forward and backward") as caught:
        tiny_step("plain_moe", torch.bfloat16, host=needed - 1)
    assert caught.value.smallest_host == needed
    step, _ = tiny_step("plain_moe", torch.bfloat16, host=needed)
    step(**tokens(*SHAPE))
    before = state(step)
    with pytest.raises(oomc.BudgetError, match="values between forward and backward"):
        step(**tokens(4, 48))
    assert_equal([state(step)], [before])
    step(**tokens(*SHAPE))


def test_slots_change_with_the_plan_and_are_given_back(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[HostMemory] = []
    begin = HostMemory.__init__

    def noted(self: HostMemory, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        taken.append(self)

    plans("offload")
    monkeypatch.setattr(HostMemory, "__init__", noted)
    step, _ = tiny_step("plain_moe", chaos=0)
    assert step._runtime is not None
    for shape in (SHAPE, (1, 10), (3, 30), (3, 30), SHAPE):
        before, count = step._runtime._values, len(taken)
        step(**tokens(*shape))
        assert step._runtime._values.sizes == step.plan.host_slots
        assert (step._runtime._values is before) == (len(taken) == count), "taken for another plan only"
        held = sum(memory.nbytes for memory in taken if memory._map is not None)
        assert step._current is not None
        planned = step._state.host_needed(step._current.program, step.plan.resident)
        assert held == pytest.approx(sum(planned.values()), rel=0.02)
    step.close()
    assert all(memory._map is None for memory in taken[-len(step.plan.host_slots) :])


# -- interrupts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("word", ["store", "discard", "restore", "restored"])
def test_an_interrupt_at_any_of_the_words_leaves_the_step_whole(
    word: str, error: type[BaseException], plans: Plans
) -> None:
    """Gradients are kept until their norm is known, so that an interrupted step is as if it had not begun."""
    plans("offload")
    step, _ = tiny_step("plain_moe", max_grad_norm=1.0, chaos=1)
    twin, _ = tiny_step("plain_moe", max_grad_norm=1.0)
    for each in (step, twin):
        each._meter = Blind()
        each(**tokens(*SHAPE))
    runtime, calls, fail_at = step._runtime, 0, 0
    plain = getattr(runtime, word)

    def call(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        result = plain(*args) if calls != fail_at or word != "restored" else None
        if calls == fail_at:
            raise error(word)
        return result

    setattr(runtime, word, call)
    count = len(stores(step))
    for fail_at in sorted({1, count // 2, count}):
        before, calls = state(step), 0
        with pytest.raises(error):
            step(**tokens(*SHAPE, seed=fail_at))
        assert not step._broken
        assert_equal([state(step)], [before])
        fail, fail_at = fail_at, 0
        for each in (step, twin):
            each(**tokens(*SHAPE, seed=fail))
        assert_equal([state(step)], [state(twin)])
    step.close()


def test_a_copy_that_fails_breaks_the_step_and_a_load_mends_it(plans: Plans, tmp_path: Any) -> None:
    plans("offload")
    step, _ = tiny_step("plain_moe")
    step(**tokens(*SHAPE))
    step.save(tmp_path / "a")
    before = state(step)
    assert step._runtime is not None
    values = step._runtime._values

    def fail(_: Any) -> torch.Tensor:
        raise OSError("the copy fails")

    values._place = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError):
        step(**tokens(*SHAPE, seed=1))
    assert step._broken
    step.load(tmp_path / "a")
    assert_equal([state(step)], [before])
    assert step._runtime._values is not values and values.sizes == ()
    step(**tokens(*SHAPE, seed=1))
    step.close()


def test_a_dropped_or_closed_step_lets_go_of_its_values(plans: Plans) -> None:
    plans("offload")
    meter = Meter()
    step, _ = tiny_step("plain_moe", chaos=3)
    step._meter = meter
    step(**tokens(*SHAPE))
    step.synchronize()
    held = meter.current
    for seed in range(3):
        step(**tokens(*SHAPE, seed=seed))
        step.synchronize()
        assert meter.current <= held + 64  # bytes: a count of labels may still be on its way
    step.close()
    step.close()
