"""Experts whose groups are moved by themselves: numbers, order, memory, and state that is read and written by name."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oomc
from oomc import compiler, machine
from oomc.cost import Costs
from oomc.models import tiny
from oomc.regenerate import boundaries, with_regenerated
from oomc.runtime.groups import GroupedSlab
from oomc.runtime.layout import ParamSpec, Rows, SlabLayout
from oomc.runtime.pool import Countdown
from oomc.step import Step
from tests.helpers import (
    ADAMW,
    Blind,
    assert_same_gradients,
    assert_trains_as_eager,
    compiled,
    masters,
    relative,
    state,
    tokens,
    worst,
)
from tests.programs import VOCAB, TopK
from tests.reference import Reference
from tests.rounding import assert_rounds_as_eager

NAMES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
GROUPS = (2, 3)
"""Of 8 experts: even, and of 2, 3 and 3."""
SLOW = pytest.mark.slow
CASES = [("qwen3_moe", 2), ("qwen3_moe", 3), ("mixtral", 3), ("deepseek_v3", 3), ("gpt_oss", 3)]
REST = [pytest.param(n, g, marks=SLOW) for n in NAMES for g in GROUPS if (n, g) not in CASES]
FEW = [("deepseek_v3", 3), ("gpt_oss", 2)]
MORE = [pytest.param(n, g, marks=SLOW) for n in NAMES for g in GROUPS if (n, g) not in FEW]
SHAPES = ((2, 24), (3, 37), (1, 50))
DROPOUT_BATCHES = [tokens(2, 6, vocab=VOCAB, seed=i) for i in range(3)]
BATCHES = [tokens(*SHAPES[i % 3], seed=i) for i in range(4)]


def grouped(name: str, groups: int, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Step, nn.Module]:
    """A step of a tiny model whose experts are in groups, and an eager copy."""
    model = tiny.build(name, dtype=dtype)
    eager = copy.deepcopy(model)
    like = ("groups", name, dtype, groups, options.get("state"))
    return compiled(model, tokens(2, 24), like=like, expert_groups=groups, **options), eager


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "groups"), [*CASES, *REST])
def test_fp32(name: str, groups: int) -> None:
    step, eager = grouped(name, groups, verify=True)
    assert step.plan.groups == groups and f"experts in {groups} groups" in str(step.report())
    layers = {b.name for b in step._current.bare.blocks if ".experts." in b.name}  # type: ignore[union-attr]
    assert len(layers) == 2 * groups
    step._options = replace(step._options, verify=False)  # one verified plan a model is enough
    assert_same_gradients(step, eager, [tokens(b, s, seed=b, masked=b == 3) for b, s in SHAPES])


@pytest.mark.parametrize("name", ["plain_moe", "qwen3_next", "qwen2_moe", "olmoe"])
def test_other_models(name: str) -> None:
    """Models whose layers have something beside: shared experts, linear attention, separate projections."""
    step, eager = grouped(name, 3)
    assert step.plan.groups == 3
    assert_same_gradients(step, eager, [tokens(2, 24, seed=1), tokens(1, 50, seed=2)])


@pytest.mark.parametrize(("name", "groups"), [*FEW, *MORE])
def test_fp32_steps(name: str, groups: int) -> None:
    step, eager = grouped(name, groups)
    assert_trains_as_eager(step, eager, BATCHES)
    for parameter, master in masters(step).items():
        assert torch.equal(step.model.get_parameter(parameter), master), f"{parameter} is not its master"


@pytest.mark.parametrize(("name", "groups"), [*FEW, *MORE])
def test_bf16(name: str, groups: int) -> None:
    assert_rounds_as_eager(*grouped(name, groups, torch.bfloat16))


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_chunks(name: str) -> None:
    """In each chunk of tokens a group has other slots, and sometimes none."""
    model = tiny.build(name)
    eager = copy.deepcopy(model)
    step = compiled(model, tokens(2, 24), like=("groups", name, torch.float32, 3, None), expert_groups=3,
                    chunk_tokens=4)  # fmt: skip
    assert any(chunk == (1, 4) for w, chunk in step.plan.chunks.items() if ".experts." in w)
    assert_same_gradients(step, eager, [tokens(2, 24, seed=1), tokens(3, 37, seed=2)])


def test_dropout_is_that_of_one_group() -> None:
    """Masks depend on the layer and not on how many blocks it is."""
    losses = []
    for groups in (1, 2, 3):
        torch.manual_seed(0)
        step = compiled(TopK(tied=True), DROPOUT_BATCHES[0], expert_groups=groups)
        assert step.plan.groups == groups
        losses.append(torch.stack([step(**batch) for batch in DROPOUT_BATCHES]))
    assert relative(losses[1], losses[0]) <= 1e-6 and relative(losses[2], losses[0]) <= 1e-6


# -- order ------------------------------------------------------------------------------------------------------------


def train(step: Step, accumulate: bool = False) -> dict[str, torch.Tensor]:
    """Masters and moments after a few steps whose updates run into the next ones."""
    step._meter = Blind()
    for seed in range(3):
        if accumulate:
            step.forward_backward(**tokens(2, 24, seed=seed + 10))
            step.forward_backward(**tokens(2, 24, seed=seed))
            step.update()
        else:
            step(**tokens(2, 24, seed=seed))
    return state(step)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.05}, {"accumulate": True}, {"state": "8bit"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adversarial_orders_change_no_bit(dtype: torch.dtype, options: dict[str, Any]) -> None:
    options = dict(options)
    accumulate = options.pop("accumulate", False)
    expected = train(grouped("qwen3_moe", 3, dtype, synchronous=True, **options)[0], accumulate)
    for seed in range(3):
        found = train(grouped("qwen3_moe", 3, dtype, chaos=seed, **options)[0], accumulate)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_what_groups_share_may_be_regenerated(name: str) -> None:
    """The tokens, choices and weights that a layer hands to its groups are made again: no bit changes."""
    expected = train(grouped(name, 3)[0])
    step, _ = grouped(name, 3, verify=True)
    bare = step._current.bare  # type: ignore[union-attr]
    costs = Costs(bare, machine.current("cpu"), "eager")
    names = [b.value for b in boundaries(bare, step.plan, costs) if ".experts." not in bare.blocks[b.block].name]
    assert len(names) >= 2
    step.use_plan(with_regenerated(step.plan, names), **tokens(2, 24))
    assert all(map(torch.equal, train(step).values(), expected.values()))
    assert step.plan.regenerated >= 2


def test_clipping_is_that_of_one_group() -> None:
    steps = [grouped("qwen3_moe", groups, max_grad_norm=0.05)[0] for groups in (1, 3)]
    for seed in range(3):
        for step in steps:
            step(**tokens(2, 24, seed=seed))
        one, three = (step.metrics["grad_norm"] for step in steps)
        assert one > 0.05 and three == pytest.approx(one, rel=1e-5)
    error, name = worst(masters(steps[1]), masters(steps[0]))
    assert error <= 1e-5, name


# -- memory -----------------------------------------------------------------------------------------------------------

WIDE: dict[str, Any] = {"num_experts": 16, "moe_intermediate_size": 256}
"""A layer of 3.2 MB, nearly all of it experts."""


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups may be as small as those of tiny models."""
    monkeypatch.setattr(compiler, "LEAST_GROUP", 400 << 10)


@pytest.mark.usefixtures("small_groups")
def test_a_block_larger_than_the_budget_streams() -> None:
    model = tiny.build("qwen3_moe", **WIDE)
    eager = copy.deepcopy(model)
    block = sum(p.nbytes for name, p in model.named_parameters() if ".layers.0." in name)
    allowed = int(0.95 * block)
    step = compiled(model, tokens(2, 24), device=allowed)
    assert step.plan.groups in (4, 8)
    reference = Reference(eager, **ADAMW)
    for seed in range(3):
        batch = tokens(2, 24, seed=seed)
        assert relative(step(**batch), reference.step(**batch)) <= 1e-5
        figures = step.metrics
        assert figures["device_peak"] <= figures["device_projected"] <= allowed, figures
    planned = step._state.host_needed(step._current.program, step.plan.resident)  # type: ignore[union-attr]
    assert step._runtime is not None and step._runtime.host_bytes == pytest.approx(sum(planned.values()), rel=0.02)
    error, name = worst(masters(step), reference.masters())
    assert error <= 1e-4, name
    runtime = step._runtime
    del step
    assert runtime._closed, "plans that were refused hold the step"


@SLOW
@pytest.mark.usefixtures("small_groups")
def test_the_smallest_budget_is_the_smallest_of_all_groups() -> None:
    def needed(device: int | str, **options: Any) -> int:
        with pytest.raises(oomc.BudgetError) as caught:
            compiled(tiny.build("qwen3_moe", **WIDE), tokens(2, 24), like=("wide", *options), device=device, **options)
        assert caught.value.smallest_device is not None
        return caught.value.smallest_device

    one = needed("1KiB", expert_groups=1)
    smallest = needed("1KiB")
    assert smallest < one / 2
    assert needed(int(0.98 * smallest)) == smallest
    step = compiled(tiny.build("qwen3_moe", **WIDE), tokens(2, 24), like=("wide",), device=smallest)
    step(**tokens(2, 24))
    assert step.metrics["device_peak"] <= smallest


def test_the_smallest_budget_is_named_where_a_head_and_not_the_experts_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In groups of experts a step takes a little more; that it cannot be in one group is no reason to name that."""
    monkeypatch.setattr(compiler, "LEAST_GROUP", 4096)
    named = []
    for groups in (None, 1):
        with pytest.raises(oomc.BudgetError) as caught:
            model = tiny.build("qwen3_moe", vocab_size=8192)
            compiled(model, tokens(2, 24), like=("large head", groups), device="1KiB", expert_groups=groups)
        named.append(caught.value.smallest_device)
    assert named[0] is not None and named[1] is not None and named[0] <= named[1]
    model = tiny.build("qwen3_moe", vocab_size=8192)
    compiled(model, tokens(2, 24), like=("large head", None), device=named[0]).close()


def test_groups_are_none_where_all_fits() -> None:
    step = compiled(tiny.build("qwen3_moe"), tokens(2, 24), like=("qwen3_moe", torch.float32), device="64MiB")
    assert step.plan.groups == 1 and not any(isinstance(slab, GroupedSlab) for slab in step._state.slabs)


def test_groups_do_not_live_on_the_device() -> None:
    """Their parameter is one tensor, on the host or the device; the rest of a layer may."""
    step, _ = grouped("qwen3_moe", 2, device="64MiB")
    assert step.plan.resident and not any(".experts." in name for name in step.plan.resident)
    step(**tokens(2, 24))
    wrong = replace(step.plan, resident=(*step.plan.resident, "model.layers.0.experts.0"))
    with pytest.raises(ValueError, match=r"no slab model\.layers\.0\.experts\.0 that may live on the device"):
        step.use_plan(wrong, **tokens(2, 24))
    with pytest.raises(ValueError, match="in 1 groups, and the step in 2"):
        step.use_plan(replace(step.plan, groups=1), **tokens(2, 24))


# -- state by name ----------------------------------------------------------------------------------------------------


def test_parameters_stay_whole() -> None:
    model = tiny.build("gpt_oss", torch.bfloat16)
    before = {name: (p, tuple(p.shape), p.clone()) for name, p in model.named_parameters()}
    step = compiled(model, tokens(2, 24), like=("groups", "gpt_oss", torch.bfloat16, 3, None), expert_groups=3)
    for name, p in model.named_parameters():
        parameter, shape, value = before[name]
        assert p is parameter and tuple(p.shape) == shape and torch.equal(p, value) and p.is_contiguous()
        assert p.untyped_storage().nbytes() == p.nbytes, "a storage of its own"
    assert set(masters(step)) == set(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("saved", "loaded"), [(3, 1), (1, 3), (2, 3)])
def test_checkpoints_know_nothing_of_groups(dtype: torch.dtype, saved: int, loaded: int, tmp_path: Path) -> None:
    step, _ = grouped("qwen3_moe", saved, dtype)
    for seed in range(2):
        step(**tokens(2, 24, seed=seed))
    step.save(tmp_path / "a")
    other, _ = grouped("qwen3_moe", loaded, dtype)
    other(**tokens(2, 24, seed=7))
    other.load(tmp_path / "a")
    one, two = masters(step), masters(other)
    assert all(torch.equal(one[name], two[name]) for name in one)
    mine, others = step.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
    assert mine.keys() == others.keys()
    for index, entry in mine.items():
        assert all(torch.equal(entry[key], others[index][key]) for key in entry), index
    batch = tokens(2, 24, seed=9)
    assert relative(other(**batch), step(**batch)) <= (1e-6 if dtype == torch.float32 else 5e-3)
    error, name = worst(masters(other), masters(step))
    assert error <= 1e-4, name


@pytest.mark.parametrize("asynchronous", [False, True])
def test_resume_is_bit_for_bit(asynchronous: bool, tmp_path: Path) -> None:
    step, _ = grouped("qwen3_moe", 3, torch.bfloat16, state="8bit")
    step(**tokens(2, 24))
    save = step.save(tmp_path / "a", asynchronous=asynchronous)
    step(**tokens(2, 24, seed=1))
    save.wait()
    other, _ = grouped("qwen3_moe", 3, torch.bfloat16, state="8bit")
    other.load(tmp_path / "a")
    other(**tokens(2, 24, seed=1))
    expected, found = state(step), state(other)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_optimizer_state_of_eager_is_taken() -> None:
    """An eager optimizer's state dict, loaded into groups, goes on as eager does."""
    step, eager = grouped("qwen3_moe", 3)
    optimizer = torch.optim.AdamW(eager.parameters(), **ADAMW)
    for seed in range(3):
        if seed == 1:
            step.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            step.model.load_state_dict(eager.state_dict())
        optimizer.zero_grad()
        eager(**tokens(2, 24, seed=seed)).loss.backward()
        optimizer.step()
        if seed:
            step(**tokens(2, 24, seed=seed))
    error, name = worst(masters(step), dict(eager.named_parameters()))
    assert error <= 1e-4, name


def test_a_write_between_steps_becomes_the_master() -> None:
    step, _ = grouped("qwen3_moe", 3)
    name = "model.layers.1.mlp.experts.down_proj"
    step(**tokens(2, 24))
    step.synchronize()
    with torch.no_grad():
        step.model.get_parameter(name)[4] = 0.25
    step.forward_backward(**tokens(2, 24, seed=1))
    assert masters(step)[name][4].eq(0.25).all()
    assert torch.equal(step.model.get_parameter(name), masters(step)[name])


def test_evaluation_sees_current_weights() -> None:
    step, eager = grouped("qwen3_moe", 3)
    batch = tokens(2, 24)
    step(**batch)
    found = step.evaluate(**batch).logits
    eager.load_state_dict(step.model.state_dict())
    assert torch.equal(found, eager.eval()(**batch).logits)


# -- slabs ------------------------------------------------------------------------------------------------------------


def in_two_parts() -> GroupedSlab:
    """A slab in two parts, of a bf16 and an fp32 parameter with five rows."""
    shapes = {"a": ((5, 3), torch.bfloat16), "b": ((5, 2, 4), torch.float32)}
    specs = [ParamSpec(name, shape, dtype, True) for name, (shape, dtype) in shapes.items()]
    parts = []
    for index, (start, stop) in enumerate(((0, 2), (2, 5))):
        rows = [
            ParamSpec(f"{s.name}[{start}:{stop}]", (stop - start, *s.shape[1:]), s.dtype, True,
                      Rows(s.name, start, stop, 5)) for s in specs
        ]  # fmt: skip
        parts.append(SlabLayout.build(f"part.{index}", rows))
    slab = GroupedSlab(SlabLayout.build("whole", specs), parts)
    for spec in specs:
        slab.load(spec.name, torch.arange(spec.numel, dtype=torch.float32).view(spec.shape) / 7)
    return slab


def test_parts_are_rows_of_the_whole() -> None:
    whole = in_two_parts()
    for part, rows in zip(whole.parts, (slice(0, 2), slice(2, 5)), strict=True):
        buffer = torch.full((part.layout.weight_bytes,), 0xFF, dtype=torch.uint8)
        part.copy_weights(buffer)
        for name, view in zip("ab", part.layout.views(buffer), strict=True):
            assert torch.equal(view, whole.param(name)[rows])
            owner, first = part.owner(f"{name}[{rows.start}:{rows.stop}]")
            assert owner == name and first == rows.start * whole.param(name)[0].numel()
        for name in ("a", "b"):
            start, stop = part.layout.gradient_ranges[f"{name}[{rows.start}:{rows.stop}]"]
            weights, lo, _ = part.part((), start + 1, stop)
            expected = whole.param(name)[rows].flatten()[1:]
            assert torch.equal(weights.view(expected.dtype), expected) and (lo is None) == (name == "b")
            same, _, _ = part.part_bits((), start + 1, stop)
            assert torch.equal(torch.from_numpy(same), weights)


def test_steps_of_the_whole_are_those_of_its_parts() -> None:
    whole = in_two_parts()
    for part in whole.parts:
        for name in part.steps:
            assert part.count_update(name) == 1
    assert whole.steps == {"a": 1, "b": 1}
    whole.set_steps("a", 7)
    assert [n for part in whole.parts for n in part.steps.values()] == [7, 1, 7, 1]


def test_who_waits_for_a_part_waits_for_the_whole_too() -> None:
    whole = in_two_parts()
    one, other, copying = Countdown(1), Countdown(1), Countdown(1)
    whole.parts[0].add_pending(["a[0:2]"], one)
    whole.parts[1].add_pending(["a[2:5]"], other)
    assert whole.parts[0].pending() == [one] and whole.parts[1].pending(["a[2:5]"]) == [other]
    assert whole.parts[1].pending(["b[2:5]"]) == []
    whole.add_pending(["a", "b"], copying)
    assert whole.parts[1].pending(["b[2:5]"]) == [copying]
    assert whole.pending() == [one, other, copying]
    for countdown in (one, other, copying):
        countdown.finish()
    assert whole.pending() == []


def test_closing_parts_closes_the_whole_once() -> None:
    whole = in_two_parts()
    whole.parts[0].keep_gradients(wide=True)
    assert whole.host_bytes == sum(part.host_bytes for part in whole.parts)
    for part in whole.parts:
        part.close()
    assert whole.host_bytes == 0
