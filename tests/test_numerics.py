"""Whole steps against eager PyTorch: losses, every gradient, parameters after five steps, in fp32 and in bf16."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from oomc.models import tiny
from tests.helpers import (
    ADAMW,
    Batch,
    assert_same_gradients,
    assert_trains_as_eager,
    masters,
    relative,
    tiny_step,
    tokens,
)
from tests.reference import Reference, round_bf16

SHAPES = ((2, 24), (3, 37), (1, 50))
"""The shape that is traced, one that never was, and a batch of one."""


@pytest.mark.parametrize("name", tiny.NAMES)
def test_fp32(name: str) -> None:
    step, eager = tiny_step(name, verify=True)
    step._options = replace(step._options, verify=False)  # one verified plan a model is enough
    batches = [tokens(b, s, seed=b, masked=b == 3) for b, s in SHAPES]
    assert_same_gradients(step, eager, batches)
    names = set(step.gradients())
    for parameter, tensor in step.model.named_parameters():
        assert parameter in names or not used(eager, parameter, batches), f"{parameter} has no gradient"
        assert tensor.requires_grad


def used(eager: nn.Module, name: str, batches: list[Batch]) -> bool:
    """Whether eager's backward reaches a parameter."""
    reference = Reference(eager)
    for batch in batches:
        reference.accumulate(**batch)
    return name in reference._sums


@pytest.mark.parametrize("name", tiny.NAMES)
def test_fp32_five_steps(name: str) -> None:
    step, eager = tiny_step(name)
    assert_trains_as_eager(step, eager, [tokens(*SHAPES[i % 3], seed=i) for i in range(5)])
    for parameter, master in masters(step).items():
        assert torch.equal(step.model.get_parameter(parameter), master), f"{parameter} is not its master"


@pytest.mark.parametrize("name", tiny.NAMES)
def test_bf16(name: str) -> None:
    """The error against fp64 is at most 1.5 times that of eager bf16, and the weights are the rounded masters."""
    step, eager = tiny_step(name, torch.bfloat16)
    double: Any = copy.deepcopy(eager).double()
    if hasattr(double, "set_experts_implementation"):
        double.set_experts_implementation("eager")  # grouped_mm knows no fp64
    exact, plain = Reference(double), Reference(eager)
    ours, eagers = Errors(), Errors()
    rows = decided(double, 2048, 16)
    for batch in rows[:192].split([18, 1, 5] * 8):  # enough that a tensor of a few numbers is not a matter of luck
        call: Batch = {"input_ids": batch, "labels": batch}
        loss = step.forward_backward(**call)
        valid = step.metrics["valid_tokens"]  # what sums of gradients are weighed by
        truth = exact.accumulate(scale=valid, **call)
        ours.add("loss", loss, truth)
        eagers.add("loss", plain.accumulate(scale=valid, **call), truth)
        ours.add_sums(step.gradients(), exact._sums)
        eagers.add_sums(plain._sums, exact._sums)
    for quantity, error in ours.squares.items():
        ratio = (error / eagers.squares[quantity]) ** 0.5
        assert ratio <= 1.5, f"{quantity}: {ratio:.2f} times eager's error, {(error / 24) ** 0.5:.1e}"
    step.update()
    for parameter, master in masters(step).items():
        weight = step.model.get_parameter(parameter)
        assert torch.equal(weight, round_bf16(master) if weight.dtype == torch.bfloat16 else master), parameter


class Errors:
    """Sums over batches of squared relative errors; a gradient that is held as a sum is compared batch by batch."""

    def __init__(self) -> None:
        self.squares: dict[str, float] = {}
        self._last: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, name: str, value: torch.Tensor, truth: torch.Tensor) -> None:
        self.squares[name] = self.squares.get(name, 0.0) + relative(value, truth) ** 2

    def add_sums(self, sums: dict[str, torch.Tensor], truths: dict[str, torch.Tensor]) -> None:
        for name, truth in truths.items():
            before, truth_before = self._last.get(name, (torch.zeros(()), torch.zeros(())))
            self.add(name, sums[name].double() - before, truth - truth_before)
            self._last[name] = (sums[name].double(), truth.clone())


class Margins(TorchDispatchMode):
    """For each row of tokens, how far every top-k was from choosing otherwise, in deviations of what it chose from."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.least = torch.full((rows,), torch.inf, dtype=torch.float64)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.topk.default and args[1] < args[0].shape[-1]:
            best = args[0].sort(-1, descending=True).values
            margin = (best[..., args[1] - 1] - best[..., args[1]]) / args[0].std()
            self.least = torch.minimum(self.least, margin.reshape(len(self.least), -1).amin(1).double())
        return func(*args, **kwargs or {})


def decided(model: nn.Module, rows: int, length: int) -> torch.Tensor:
    """Random rows of tokens, those first whose choice of experts hangs least on rounding.

    One token that goes to another expert makes an error far above that of any arithmetic, for eager and for us, and
    whom it meets is luck.
    """
    ids = tokens(rows, length, seed=5)["input_ids"]
    with torch.no_grad(), Margins(rows) as margins:
        model(input_ids=ids)
    return ids[margins.least.argsort(descending=True)]


@pytest.mark.parametrize("name", tiny.NAMES)
def test_bf16_five_steps(name: str) -> None:
    step, eager = tiny_step(name, torch.bfloat16)
    reference = Reference(eager, **ADAMW)
    for i in range(5):
        batch = tokens(*SHAPES[i % 3], seed=i)
        assert relative(step(**batch), reference.step(**batch)) <= 5e-3
