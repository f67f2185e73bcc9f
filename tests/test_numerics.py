"""Whole steps against eager PyTorch: losses, every gradient, parameters after five steps, in fp32 and in bf16."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

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
from tests.rounding import assert_rounds_as_eager

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
    assert_rounds_as_eager(step, eager)
    step.update()
    for parameter, master in masters(step).items():
        weight = step.model.get_parameter(parameter)
        assert torch.equal(weight, round_bf16(master) if weight.dtype == torch.bfloat16 else master), parameter


@pytest.mark.parametrize("name", tiny.NAMES)
def test_bf16_five_steps(name: str) -> None:
    step, eager = tiny_step(name, torch.bfloat16)
    reference = Reference(eager, **ADAMW)
    for i in range(5):
        batch = tokens(*SHAPES[i % 3], seed=i)
        assert relative(step(**batch), reference.step(**batch)) <= 5e-3
