"""Updates give the same bits wherever they run and however they are ordered: host, device, streamed, resident."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import oomc
from oomc.step import Step
from tests.helpers import ADAMW, Blind, compiled, state, tokens
from tests.programs import VOCAB, TopK

STEPS = 20
BATCHES = [tokens(2, 6, vocab=VOCAB, seed=i) for i in range(STEPS)]
CLIP = 0.05
"""Below the norm of most of these gradients."""
Run = list[dict[str, torch.Tensor]]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices decay, the rest does not and learns faster."""
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() <= 1], "lr": 3e-3, "weight_decay": 0.0},
    ]


@cache
def smallest(keep: bool) -> int:
    with pytest.raises(oomc.BudgetError) as caught:
        compiled(TopK(tied=True), BATCHES[0], like=("TopK32", True), device=1, max_grad_norm=CLIP if keep else None)
    assert caught.value.smallest_device is not None
    return caught.value.smallest_device


def make(sgd: bool = False, tied: bool = True, **options: Any) -> Step:
    torch.manual_seed(0)
    model = TopK(tied=tied)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups(model), **ADAMW)
    if sgd:
        optimizer = torch.optim.SGD(groups(model), lr=1e-2, momentum=0.9, nesterov=True)
    step = compiled(model, BATCHES[0], like=("TopK32", tied), optimizer=optimizer, **options)
    step._meter = Blind()
    return step


def train(steps: int = STEPS, **options: Any) -> Run:
    """Loss, masters and state after each step, under a scheduler."""
    step = make(**options)
    schedule = torch.optim.lr_scheduler.OneCycleLR(step.optimizer, max_lr=[1e-2, 2e-2], total_steps=STEPS)
    result: Run = []
    for batch in BATCHES[:steps]:
        loss = step(**batch)
        schedule.step()
        result.append({"loss": loss, **state(step)})
    step.close()
    return result


def assert_equal(run: Run, expected: Run, plan: str = "") -> None:
    for number, (mine, others) in enumerate(zip(run, expected, strict=True)):
        for name, tensor in others.items():
            assert torch.equal(mine[name], tensor), f"{plan}: {name} after step {number}"


PLANS: dict[str, dict[str, Any]] = {
    "host": {"updates": "host"},
    "device": {"updates": "device"},
    "both": {},
    "device, one after the other": {"updates": "device", "synchronous": True},
    "all resident": {"device": "1GiB"},
    "host, adversarial": {"updates": "host", "chaos": 1},
    "device, adversarial": {"updates": "device", "chaos": 2},
    "both, adversarial": {"chaos": 3},
    "all resident, adversarial": {"device": "1GiB", "chaos": 4},
}


@pytest.mark.parametrize("sgd", [False, True], ids=["adamw", "sgd"])
@pytest.mark.parametrize("clip", [None, CLIP], ids=["", "clip"])
def test_every_plan_gives_the_same_bits(clip: float | None, sgd: bool) -> None:
    reference: dict[str, Any] = {"updates": "host", "synchronous": True, "max_grad_norm": clip, "sgd": sgd}
    expected = train(**reference)
    assert all(each["loss"].isfinite() for each in expected)
    for name, options in PLANS.items():
        steps = 6 if "chaos" in options else STEPS
        assert_equal(train(steps, max_grad_norm=clip, sgd=sgd, **options), expected[:steps], name)


@pytest.mark.parametrize("clip", [None, CLIP], ids=["", "clip"])
def test_some_slabs_on_the_device(clip: float | None) -> None:
    """Budgets between that of the smallest plan and that of all slabs on the device."""
    expected = train(6, updates="host", synchronous=True, max_grad_norm=clip)
    sizes = set()
    for share in (1.3, 1.7, 2.2, 3.0):
        options: dict[str, Any] = {"device": int(share * smallest(clip is not None)), "max_grad_norm": clip}
        step = make(**options)
        sizes.add(len(step.plan.resident))
        step.close()
        assert_equal(train(6, **options), expected)
    assert len(sizes) > 2, sizes


def test_who_updates_changes_with_the_batch() -> None:
    """A larger batch leaves no room to pass state through the device; a smaller one does again."""
    model = TopK(tied=True)
    sizes = [(2, 6), (16, 48), (2, 6)]
    batches = [tokens(*size, vocab=VOCAB, seed=i) for i, size in enumerate(sizes)]
    probe = compiled(TopK(tied=True), batches[1], like=("TopK32", True), device=1, prepare=False, updates="device")
    with pytest.raises(oomc.BudgetError) as caught:
        probe.prepare(**batches[1])
    assert caught.value.smallest_device is not None
    budget = int(1.05 * caught.value.smallest_device)
    step = compiled(model, batches[0], like=("TopK32", True), device=budget, updates="device")
    found = []
    for batch in batches:
        step(**batch)
        found.append((step.plan.where, len(step.plan.resident)))
        assert step.metrics["device_peak"] <= step.metrics["device_projected"] <= budget
    assert [where for where, _ in found] == ["device", "host", "device"], found
    step.close()
