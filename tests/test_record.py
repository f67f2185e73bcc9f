"""A recorded step is the same step, everything that it did is there in order, and nothing stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oomc import steps
from oomc.report_trace import measured_curve
from oomc.runtime.record import GAP, METHODS, SHOWN, Recorded, merged
from oomc.step import Step
from tests.helpers import masters, tiny_step, tokens
from tests.reports import TIGHT, recorded


def events(step: Step) -> tuple[Recorded, ...]:
    assert step._recorded is not None
    return step._recorded[1].events


def copies(step: Step, word: Any) -> list[str]:
    return [node.name for node in step.graph.graph.nodes if node.target is word]


def test_every_computation_and_copy_is_recorded_once_and_in_order() -> None:
    step, _ = recorded()
    found, graph = events(step), step.graph.graph
    computed = [node.name for node in graph.nodes if node.target in steps.COMPUTE]
    seen = [event.name for event in found if event.lane == "compute"]
    assert [name for name in seen if name in set(computed)] == computed
    assert sorted(e.name for e in found if e.lane == "h2d") == sorted(copies(step, steps.fetch)) != []
    assert sum(e.bytes for e in found if e.lane == "h2d") == step.metrics["h2d_bytes"]
    assert {e.name for e in found if e.lane in ("host", "device")} == {f"update {s.name}" for s in step._state.slabs}
    assert step._recorded is not None and all(e.start <= e.end for e in found)
    last = max(e.end for e in found if e.lane == "compute")
    assert 0 < last <= step._recorded[1].step_s


def test_memory_is_recorded_during_each_word_and_stays_below_its_projection() -> None:
    step, _ = recorded()
    assert step._recorded is not None and step._current is not None
    memory, projection = step._recorded[1].memory, step._current.projection
    shown = [node.name for node in step.graph.graph.nodes if node.target in SHOWN]
    assert [name for name, _ in memory] == shown
    assert all(0 < nbytes <= projection.peak for _, nbytes in memory)
    computed = {node.name for node in step.graph.graph.nodes if node.target in steps.COMPUTE}
    assert all(nbytes <= projection.during[name] for name, nbytes in memory if name in computed)
    assert max(nbytes for _, nbytes in memory) >= 0.9 * step.metrics["device_peak"]
    assert step.metrics["device_peak"] <= step.projected
    data = step.report().data
    assert data["measured"]["memory"] == [list(each) for each in memory]
    assert len(measured_curve(data)) == len(memory) + 1
    assert {row[0] for row in data["why"]["blocks"]} == {block["block"] for block in data["decisions"]}


def test_values_that_wait_on_the_host_are_recorded_with_their_bytes() -> None:
    batch = tokens(4, 96)
    step, _ = tiny_step("plain_moe", device="1550KiB", prepare=False)
    step.record()
    step(**batch)
    stored, restored = copies(step, steps.store), copies(step, steps.restore)
    assert stored and restored, "the budget is too small to keep all values"
    found = {e.name: e for e in events(step)}
    assert all(found[name].lane == "d2h" for name in stored)
    assert all(found[name].lane == "h2d" for name in restored)
    assert sum(found[name].bytes for name in stored) == sum(found[name].bytes for name in restored) > 0
    data = step.report().data
    assert max(data["memory"]["host_values"]) > 0 and data["memory"]["host_values"][-1] == 0
    assert {row[1] for row in data["measured"]["events"]} >= {"values", "wait", "update"}


def test_a_recorded_step_trains_as_any_other_and_leaves_nothing_behind() -> None:
    plain, _ = tiny_step("qwen3_moe", torch.bfloat16, device=TIGHT)
    watched, _ = tiny_step("qwen3_moe", torch.bfloat16, device=TIGHT)
    for seed in range(3):
        if seed == 1:
            watched.record()
        losses = [float(step(**tokens(2, 24, seed=seed))) for step in (plain, watched)]
        assert losses[0] == losses[1]
    first, second = masters(plain), masters(watched)
    assert all(torch.equal(first[name], second[name]) for name in first)
    runtime = watched._runtime
    assert runtime is not None and runtime._sink is not None
    for thing in (runtime, runtime._h2d, runtime._d2h, runtime._sink._host, runtime._sink._device):
        assert not {"submit", "issue", "_apply", *METHODS.values()} & vars(thing).keys()
    before = events(watched)
    watched(**tokens(2, 24))
    assert events(watched) is before, "only the step that was asked for is recorded"


def test_a_step_that_fails_is_not_recorded_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    step, _ = tiny_step("qwen3_moe", torch.bfloat16, device=TIGHT)
    runtime = step._runtime
    assert runtime is not None

    def fail(*_: Any) -> Any:
        raise RuntimeError("no")

    step.record()
    with monkeypatch.context() as patch:
        patch.setattr(type(runtime), "run", fail)
        with pytest.raises(RuntimeError, match="no"):
            step(**tokens(2, 24))
    assert step._recorded is None and not set(METHODS.values()) & vars(runtime).keys()
    step(**tokens(2, 24))
    assert step._recorded is not None, "the next one is"


def test_micro_batches_with_kept_gradients_are_recorded() -> None:
    step, _ = tiny_step("qwen3_moe", torch.bfloat16, max_grad_norm=1.0)
    step.record()
    step.forward_backward(**tokens(2, 24))
    step.update()
    assert {e.lane for e in events(step)} >= {"compute", "d2h"}
    step(**tokens(2, 24))
    step.record()
    step(**tokens(2, 24))
    assert {e.lane for e in events(step)} >= {"compute", "h2d", "d2h", "host"}


def test_pieces_of_an_update_become_one_event() -> None:
    def piece(name: str, start: float, end: float) -> Recorded:
        return Recorded("host", name, 0, start, end, 10)

    pieces = [piece("update a", 0.0, 1.0), piece("update b", 0.2, 0.4), piece("update a", 0.5, 1.5),
              piece("update a", 1.5 + GAP / 2, 2.0), piece("update a", 3.0, 4.0), piece("fetch", 5.0, 6.0),
              piece("fetch", 6.0, 7.0)]  # fmt: skip
    spans = [(e.name, e.start, e.end, e.bytes) for e in merged(pieces, GAP)]
    assert spans == [("update a", 0.0, 2.0, 30), ("update b", 0.2, 0.4, 10), ("update a", 3.0, 4.0, 10),
                     ("fetch", 5.0, 6.0, 10), ("fetch", 6.0, 7.0, 10)]  # fmt: skip
