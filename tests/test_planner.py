"""The planner: against all plans, over budgets, against the fixed policy; the quick model against the exact ones."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from oomc import allocator, machine, pipeline, planner, quick_lanes, quick_step, replay, timeline
from oomc import instance as instances_of
from oomc.cost import Costs
from oomc.errors import BudgetError
from oomc.instance import Source
from oomc.passes.choose_residency import Candidate, ChooseResidency
from oomc.plan import Budget, Plan, Updates
from oomc.planner import Checked, Planner, Request, scheduled, to_plan
from oomc.quick import WHERE, Decisions, Instance, Outcome
from oomc.search import Found, Search, frugal
from oomc.simulate import project
from tests import programs
from tests.instances import ahead, all_plans, random_budgets, random_instance

H200 = replace(machine.default("h200"), launch=4e-6, launch_busy=4e-6)
"""Whose launches take less than real ones, beside which the memory of programs this small makes no difference."""
UPDATES = Updates(where="both", chunk_bytes=1 << 10)


@pytest.fixture(autouse=True)
def small_values_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances_of, "OFFLOAD_FROM", 100)


def source(kind: str) -> Source:
    bare, profiler = programs.bare(kind), programs.profiler(kind)
    return Source(bare, profiler, Costs(bare, H200))


def request(kind: str, device: int | None = None, host: int | None = None) -> Request:
    names = frozenset(slab.name for slab in programs.bare(kind).slabs)
    return Request(programs.SIZES, device, host, Budget(device, host), UPDATES, names)


def random_decisions(instance: Instance, rng: random.Random) -> Decisions:
    levels = [[level for level, ok in enumerate(row) if ok] for row in instance.allowed]
    return Decisions(
        tuple(map(rng.choice, levels)), tuple(bool(size and rng.random() < 0.4) for size in instance.bound),
        tuple(rng.random() < 0.3 for _ in instance.weight), rng.randint(0, 3),
        rng.choice([0, 1, 2, 3, instance.blocks]), rng.choice(instance.wheres),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["plain", "topk", "tied", "mlp"])
@pytest.mark.parametrize("how", ["", "keep", "accumulate"])
def test_the_quick_model_is_near_the_exact_ones(kind: str, how: str) -> None:
    """Time within 10%, the device within 1% (with tied weights 15%), the host's bytes never too low."""
    near = 0.15 if kind == "tied" else 0.01
    own, rng = source(kind), random.Random(kind + how)
    asked = replace(request(kind), accumulate=how == "accumulate", updates=replace(UPDATES, keep=how == "keep"))
    for tokens in (1 << 20, 8):
        chunks = ChooseResidency(programs.SIZES, candidate=Candidate(tokens, 1, 1)).chunks(own.program)
        made = own.instance(programs.SIZES, chunks, asked.updates, asked.movable, asked.accumulate)
        for _ in range(5):
            d = random_decisions(made, rng)
            outcome = made.evaluate(d)
            program = scheduled(own.program, to_plan(own, d, chunks, asked), asked)
            exact = project(program, own.profiler).peak
            seconds = timeline.simulate(program, own.costs, asked.updates, record=False).step_s
            assert outcome.seconds == pytest.approx(seconds, rel=0.1), d
            assert outcome.device == pytest.approx(exact, rel=near), d
            assert program.plan is not None
            values = outcome.host - made.host_bytes(replace(d, level=(0,) * made.blocks, away=(False,) * made.blocks))
            assert values >= program.plan.host_value_bytes, d


@pytest.mark.parametrize("seed", range(10))
def test_against_all_plans(seed: int) -> None:
    instance = random_instance(seed, blocks=4)
    device, host = random_budgets(instance, seed)
    search = Search([instance], device, host, prefetches=ahead(instance), holds=ahead(instance))
    found = search.best()
    fit = [
        instance.evaluate(d).seconds
        for d in all_plans(instance, ahead(instance), ahead(instance))
        if search.fits(instance, d)
    ]
    if not found:
        assert not fit
        return
    assert found[0].outcome.device <= device and (host is None or found[0].outcome.host <= host)
    assert found[0].outcome.seconds <= 1.05 * min(fit)


def test_frugal_decisions_take_the_least() -> None:
    for seed in range(6):
        instance = random_instance(seed, blocks=4)
        least = min(instance.device_bytes(d) for d in all_plans(instance, (0, 1), (0, 1)))
        assert frugal([instance])[0].outcome.device <= least


@pytest.mark.parametrize("seed", range(6))
def test_less_of_the_host_by_single_changes(seed: int) -> None:
    instance = random_instance(seed, blocks=4)
    device, _ = random_budgets(instance, seed)
    search = Search([instance], device)
    for start in search.grid()[:5]:
        less = search.with_less_host(start)
        assert less.outcome.host <= start.outcome.host and less.outcome.device <= device
        assert all(instance.host_bytes(d) >= less.outcome.host for d in search.changes(instance, less.decisions)
                   if instance.device_bytes(d) <= device)  # fmt: skip


def test_more_memory_never_makes_it_slower() -> None:
    bare, profiler = programs.bare("plain"), programs.profiler("plain")
    planner = Planner(H200)
    with pytest.raises(BudgetError) as error:
        planner.plan([lambda: (bare, profiler)], request("plain", 1000))
    least = error.value.smallest_device
    assert least is not None
    with pytest.raises(BudgetError, match=str(least)):
        planner.plan([lambda: (bare, profiler)], request("plain", int(0.98 * least)))
    last = float("inf")
    for step in range(20):
        device = least + step * least // 8
        planned = planner.plan([lambda: (bare, profiler)], request("plain", device))
        assert planned.projection.peak <= device
        assert planned.seconds <= last
        last = planned.seconds
    planned = planner.plan([lambda: (bare, profiler)], request("plain"))
    assert planned.seconds <= last
    programs.assert_runs(planned.program, programs.model("plain"))


def test_what_cudas_allocator_reserves_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest budget works and 2% less does not; no plan reserves more than its budget."""
    for name, size in (("SMALL", 512), ("SMALL_PAGE", 1024), ("LARGE_PAGE", 2048)):  # as small as the program is
        monkeypatch.setattr(allocator, name, size)
    monkeypatch.setattr(replay, "BLAS", 0)
    monkeypatch.setattr(replay, "OTHERS", 0)
    monkeypatch.setattr(replay, "UNSEEN", (512, 1024))
    cut = [lambda: (programs.bare("plain"), programs.profiler("plain"))]

    def asked(device: int) -> Request:
        return replace(request("plain", device), reserves=True, in_all=lambda held: held + 1000)

    with pytest.raises(BudgetError) as error:
        Planner(H200).plan(cut, asked(1000))
    assert error.value.smallest_device is not None
    least = error.value.smallest_device - 1000
    with pytest.raises(BudgetError):
        Planner(H200).plan(cut, asked(int(0.98 * least)))
    for step in range(8):
        device = least + step * least // 4
        projection = Planner(H200).plan(cut, asked(device)).projection
        assert projection.peak < projection.reserved == projection.held <= device
        assert projection.limit > projection.peak


@pytest.mark.parametrize("few", [3, 4])
def test_of_many_blocks_the_search_ends_close_to_the_best(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a plan that fits and is nearly as fast as one would be if an allocator needed nothing for itself."""
    each = random_instance(0, blocks=4)
    fit, over = 90, 200
    rounds = [
        ((1.0, over), (1.001, over)),
        ((1.012, over), (1.016, fit)),
        ((1.013, over), (1.014, fit)),
        ((1.01, fit),),
    ]
    known: list[Checked] = []
    asked = iter(rounds)

    def best(*_: object) -> list[Found]:
        now = next(asked, ())
        return [Found(0, each.uniform(0, hold=round(1000 * s)), Outcome(s, 0, 0, ())) for s, _ in now]

    def check(planner: Planner, cuts: object, wanted: Request, tiling: object, d: Decisions, *_: object) -> Checked:
        peaks = {round(1000 * s): peak for r in rounds for s, peak in r}
        known.append(Checked(0, Plan(programs.SIZES), peaks[d.hold], 0, d.hold / 1000))
        return known[-1]

    monkeypatch.setattr(planner, "FEW", few)
    monkeypatch.setattr(Search, "best", best)
    monkeypatch.setattr(Planner, "_check", check)
    monkeypatch.setattr(Planner, "_instance", lambda *_: each)
    Planner(H200)._seek([], replace(request("plain", 100), reserves=True), [(0, ())], known)
    enough = 1.0 * (1 + planner.CLOSE)
    looked_at = [s for r in rounds for s, _ in r]
    assert 1.014 < enough < 1.016
    assert [c.seconds for c in known] == looked_at[: looked_at.index(1.014) + 1 if few < 4 else None]


@pytest.mark.parametrize("seed", range(4))
def test_a_steady_step_ends_the_quick_evaluation(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the seconds of all three steps, as the same code run by Python gives them without that end."""
    each, rng, ended = random_instance(seed, blocks=4), random.Random(seed), 0
    whole = quick_step.step_seconds.py_func  # type: ignore[attr-defined]
    compiled = {d: each.evaluate(d).seconds for d in (random_decisions(each, rng) for _ in range(12))}
    for d, seconds in compiled.items():
        level, away, resident = each._arrays(d)
        given = [
            each.rates, each.blocks, each.forward, each.backward, each.uses, each.uses_back, each.weight, each.order,
            each.kind, each.part_slab, each.part_params, each.part_bytes, each.inner, each.bound, level, away, resident,
            d.prefetch, d.hold, WHERE.index(d.where), each.accumulate,
        ]  # fmt: skip
        found = []
        for same in (-1.0, quick_lanes.SAME):
            calls: list[int] = []

            def counted(*args: object, calls: list[int] = calls) -> None:
                calls.append(1)
                quick_lanes.under_way(*args)

            monkeypatch.setattr(quick_step, "under_way", counted)
            monkeypatch.setattr(quick_step, "SAME", same)
            out = np.empty(6)
            whole(*given, out)
            found.append((out, len(calls)))
        assert found[0][1] == quick_lanes.STEPS
        ended += found[1][1] < found[0][1]
        assert found[1][0] == pytest.approx(found[0][0], rel=1e-9, abs=1e-12)
        assert seconds == pytest.approx(found[0][0][0], rel=1e-9)
    assert ended > 0


def test_a_host_budget_moves_slabs_to_the_device() -> None:
    bare, profiler = programs.bare("mlp"), programs.profiler("mlp")
    whole = sum(UPDATES.host_bytes(slab) for slab in bare.slabs)
    planned = Planner(H200).plan([lambda: (bare, profiler)], request("mlp", None, whole // 2))
    plan = planned.program.plan
    assert plan is not None
    assert sum(UPDATES.host_bytes(slab) for slab in bare.slabs if slab.name not in plan.resident) <= whole // 2


@pytest.mark.parametrize("kind", ["plain", "topk", "tied"])
def test_never_slower_than_the_fixed_policy(kind: str) -> None:
    own = source(kind)
    cut = [lambda: (own.program, own.profiler)]
    most = Planner(H200).plan(cut, request(kind)).projection.peak
    for share in (0.3, 0.6, 0.9):
        asked = request(kind, int(share * most))
        try:
            made, _ = pipeline.plan_step(
                own.program, own.profiler, asked.sizes, asked.allowed, asked.budget, updates=asked.updates,
                resident=asked.movable,
            )  # fmt: skip
        except BudgetError:
            continue
        fixed = timeline.simulate(made, own.costs.of_step(made), asked.updates, record=False).step_s
        assert Planner(H200).plan(cut, asked).seconds <= 1.001 * fixed


def test_what_is_pinned_stays() -> None:
    bare, profiler = programs.bare("plain"), programs.profiler("plain")
    names = frozenset({bare.slabs[1].name})
    asked = replace(request("plain", 1 << 30), movable=names, fixed=True)
    planned = Planner(H200).plan([lambda: (bare, profiler)], asked)
    assert planned.program.plan is not None
    assert planned.program.plan.resident == tuple(names)


def test_it_says_why() -> None:
    bare, profiler = programs.bare("plain"), programs.profiler("plain")
    planner = Planner(H200)
    generous = planner.plan([lambda: (bare, profiler)], request("plain", 1 << 30)).explain()
    assert generous.left > 0 and "nothing that takes more memory makes the step faster" in generous.reason
    assert generous.device_gib == 0.0
    tight = planner.plan([lambda: (bare, profiler)], request("plain", 40_000)).explain()
    assert tight.device_gib > 0.0
    assert [name for name, _ in tight.blocks] == [block.name for block in bare.blocks]
    assert "one more GiB of device memory would save" in str(tight)


def link_slower(by: float) -> machine.Machine:
    """The H200 behind a slower link."""
    names = ("h2d", "d2h", "h2d_both", "d2h_both")
    return replace(H200, **{name: getattr(H200, name) / by for name in names})


def test_boundaries_are_regenerated_where_the_host_has_no_room_for_them() -> None:
    cut = [lambda: (programs.bare("mlp"), programs.profiler("mlp"))]
    with pytest.raises(BudgetError) as error:
        Planner(H200).plan(cut, request("mlp", 1000))
    assert error.value.smallest_device is not None
    device = int(1.2 * error.value.smallest_device)
    free = Planner(H200).plan(cut, request("mlp", device))
    plan = free.program.plan
    assert plan is not None and not plan.resident
    assert plan.regenerated == 0 and [plan.residency[name] for name in programs.boundaries("mlp")] == ["offload"] * 2
    host = sum(UPDATES.host_bytes(slab) for slab in free.program.slabs) + UPDATES.host_fixed + plan.host_value_bytes
    planner = Planner(H200)
    made = planner.plan(cut, request("mlp", device, host - 1))
    plan = made.program.plan
    assert plan is not None and plan.regenerated == 1
    assert made.projection.peak <= device and made.seconds >= free.seconds
    assert "its values for others regenerated in 0.0" in str(made.explain())
    programs.assert_runs(made.program, programs.model("mlp"))
    again = planner.plan(cut, request("mlp", device, host)).program.plan
    assert again is not None and again.residency == free.program.plan.residency, "just enough"  # type: ignore[union-attr]


def test_boundaries_are_regenerated_where_the_link_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boundaries of 8 KiB, weights of 256 B: behind a slow link a layer is computed again sooner than it is copied."""
    cut = [lambda: (programs.bare("mlp"), programs.profiler("mlp"))]
    asked = replace(request("mlp", 1000), sizes=(8, 64), chunk_tokens=64)
    with pytest.raises(BudgetError) as error:
        Planner(H200).plan(cut, asked)
    assert error.value.smallest_device is not None
    asked = replace(asked, allowed=error.value.smallest_device)
    quick, slow = (Planner(link_slower(by)).plan(cut, asked) for by in (1, 10_000))
    assert quick.program.plan is not None and slow.program.plan is not None
    assert quick.program.plan.regenerated == 0 < slow.program.plan.regenerated
    assert slow.projection.peak <= error.value.smallest_device
    monkeypatch.setattr(Planner, "_regenerating", lambda _self, _cuts, _request, best, _known: best)
    assert slow.seconds < Planner(link_slower(10_000)).plan(cut, asked).seconds
