"""Graphs that are timed on the device before the first plan: which, on what, kept how, and what a plan makes of it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import oomc
import oomc.compiler
from oomc import steps, timing
from oomc.calibrate import Bench
from oomc.cost import Costs
from oomc.machine import cache_path, current
from oomc.models import tiny
from oomc.simulate import Profiler
from oomc.step import Step
from oomc.timing import Factors, KnownSeconds, Timing
from tests import programs
from tests.helpers import compiled, masters, smallest_device, tiny_step, tokens, worst

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own; the file that timings are kept in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Bench, "SHARES", 9000)
    return cache_path(CPU).with_suffix(".worksets.json")


def timing_of(kind: str, path: Path, allowed: int = 1 << 30) -> Timing:
    bare = programs.bare(kind)
    costs = Costs(bare, current("cpu"))
    return Timing(bare, Profiler(bare), costs, CPU, "eager", allowed, KnownSeconds(path))


def graphs(found: Timing) -> set[tuple[str, str]]:
    return {(key, phase) for key, form in found.program.forms.items() for phase in timing._phases(form)}


@pytest.mark.parametrize("kind", ["mlp", "plain", "topk"])
def test_every_graph_is_timed_once_and_kept(kind: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = timing_of(kind, cache)
    factors = first.factors((2, 12))
    assert factors.keys() == graphs(first) and not first.left_out
    assert all(factor > 0 for factor in factors.values())
    low, high = min(factors.values()), max(factors.values())
    assert low <= first.overall(factors, (2, 12)) <= high

    def again(*_: Any) -> float:
        raise AssertionError("what is known is not timed again")

    monkeypatch.setattr(Bench, "time", again)
    assert timing_of(kind, cache).factors((2, 12)) == factors
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


@pytest.mark.parametrize("name", [
    "qwen3_moe", "qwen3_next", *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v3", "gpt_oss")),
])  # fmt: skip
def test_models(name: str, cache: Path) -> None:
    """Graphs of real models run on what is made up for them; the user's random numbers stay as they were."""
    step, _ = tiny_step(name, prepare=False)
    trace = step._compiler.trace(oomc.capture.Batch.bind(step.model, (), tokens(2, 24)))
    costs = Costs(trace.bare, current("cpu"))
    found = Timing(trace.bare, trace.profiler, costs, CPU, "eager", 1 << 30, KnownSeconds(cache))
    before = torch.get_rng_state()
    factors = found.factors((2, 24))
    assert torch.equal(torch.get_rng_state(), before)
    assert set(found.left_out.values()) <= {"it hands a state from chunk to chunk"}
    assert len(found.left_out) == (name == "qwen3_next"), found.left_out
    assert factors.keys() == {key for key in graphs(found) if key[0] not in found.left_out}


def test_a_tile_is_no_more_than_fits_or_takes_long(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = timing_of("topk", cache)
    tiles = {key: roomy._tile(form, (4, 8192)) for key, form in roomy.program.forms.items()}
    assert all(b * s <= timing.TOKENS for key, (b, s) in tiles.items()
               if roomy.program.forms[key].chunk == "tokens")  # fmt: skip
    tight = timing_of("topk", cache, allowed=8 << 20)
    smaller = {key: tight._tile(form, (4, 8192)) for key, form in tight.program.forms.items()}
    for key, form in tight.program.forms.items():
        assert smaller[key][0] * smaller[key][1] <= tiles[key][0] * tiles[key][1]
        assert tight._bytes(form, smaller[key]) <= 0.9 * (8 << 20)
    assert smaller != tiles
    monkeypatch.setattr(timing, "LONGEST", 1e-12)
    never = timing_of("topk", cache)
    assert never.factors((2, 12)) == {} and never.overall({}, (2, 12)) == 1.0
    assert never.left_out.keys() == never.program.forms.keys()


def test_a_graph_that_fails_or_comes_too_late_is_left_as_estimated(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time, calls = Bench.time, 0

    def failing(self: Bench, *args: Any) -> float:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise torch.OutOfMemoryError("out of memory")
        return time(self, *args)

    monkeypatch.setattr(Bench, "time", failing)
    found = timing_of("topk", cache)
    factors = found.factors((2, 12))
    assert list(found.left_out.values()) == ["out of memory"]
    assert {key for key, _ in factors} == found.program.forms.keys() - found.left_out.keys()
    late = timing_of("mlp", cache.with_name("other"))
    assert late.factors((2, 12), seconds=0.0) == {} and set(late.left_out.values()) == {"the time is up"}


def test_what_is_frozen_has_timings_of_its_own(cache: Path) -> None:
    """Its forward is that of what is trained, and its backward is another."""
    for frozen in (False, True):
        model = tiny.build("llama")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (frozen and "mlp" in name))
        compiled(model, tokens(2, 24), device="64MiB", time_worksets=True).close()
        known = KnownSeconds(cache)
        if not frozen:
            before = len(known)
    assert len(known) > before


def test_groups_of_experts_are_timed_in_what_is_left_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[set[str], float]] = []
    own = Timing.factors

    def factors(self: Timing, sizes: tuple[int, int], done: Any, seconds: float) -> Factors:
        given.append((set(done), seconds))
        return own(self, sizes, done, seconds)

    monkeypatch.setattr(Timing, "factors", factors)
    monkeypatch.setattr(oomc.compiler, "LEAST_GROUP", 4096)
    step, _ = tiny_step("qwen3_moe", device=smallest_device("qwen3_moe", 2, 24), prepare=False, time_worksets=True)
    step.prepare(**tokens(2, 24))
    assert len(given) > 1 and given[0] == (set(), timing.SECONDS)
    for (before, left), (after, less) in pairwise(given):
        assert before < after and left > less


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": "b"}'])
def test_a_damaged_cache_is_timed_anew(text: str, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    assert not KnownSeconds(cache)
    assert timing_of("mlp", cache).factors((2, 12))
    assert json.loads(cache.read_text())


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path) -> None:
    cache.parent.parent.mkdir(parents=True)
    cache.parent.write_text("in the way")
    assert timing_of("mlp", cache).factors((2, 12))


# -- whole steps ------------------------------------------------------------------------------------------------------


def trained(step: Step) -> list[float]:
    return [float(step(**tokens(2, 24, seed=seed))) for seed in range(2)]


def test_a_step_is_planned_and_reported_with_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, _ = tiny_step("qwen3_moe", device="64MiB")
    timed = compiled(tiny.build("qwen3_moe"), tokens(2, 24), device="64MiB", time_worksets=True)
    assert timed._current is not None and kept._current is not None
    factors = timed._compiler.factors
    assert factors.timed and factors.other != 1.0
    assert timed._current.seconds != kept._current.seconds
    assert f"{len(factors.timed)} graphs of worksets were timed here" in str(timed.report())
    assert "graphs of worksets" not in str(kept.report())
    assert trained(timed) == trained(kept)
    error, name = worst(masters(timed), masters(kept))
    assert error <= 1e-5, f"{name} differs by {error:.2e}; chunks may differ"


def test_a_plan_counts_with_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every graph is found to take a hundred thousand times as long, a step is nothing but compute."""

    def factors(self: Timing, *_: Any) -> Factors:
        return dict.fromkeys(graphs(self), 1e5)

    monkeypatch.setattr(Timing, "factors", factors)
    plain, _ = tiny_step("llama", device="64MiB")
    slow = compiled(tiny.build("llama"), tokens(2, 24), device="64MiB", time_worksets=True)
    assert plain._current is not None and slow._current is not None
    assert slow._compiler.factors.other == pytest.approx(1e5)
    own = Costs(plain._current.program, current("cpu"))
    compute = sum(own.seconds(n.args[1], n.args[2], (2, 24)) for n in plain.graph.graph.nodes
                  if n.target is steps.run or n.target is steps.run_chunks)  # fmt: skip
    assert slow._current.seconds == pytest.approx(1e5 * compute, rel=0.01)
    assert "bound by compute" in str(slow.report())
