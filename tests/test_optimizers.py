"""Which optimizers are taken, and what the refusals say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import oomc
from oomc.optimizers import groups_of, rule_of
from oomc.runtime.adamw import AdamW
from oomc.runtime.low_bit import LowBitAdamW
from oomc.runtime.sgd import SGD


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def test_adamw_is_taken_with_its_groups() -> None:
    own = model()
    groups: list[dict[str, Any]] = [{"params": [own[0].weight]}, {"params": [own[1].weight, own[1].bias], "lr": 0.5}]  # type: ignore[index]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    assert isinstance(rule_of(optimizer), AdamW)
    assert groups_of(optimizer, own) == {"0.weight": 0, "1.weight": 1, "1.bias": 1}


def test_sgd_has_a_buffer_if_any_group_has_momentum() -> None:
    own = model()
    groups: list[dict[str, Any]] = [{"params": [own[0].weight]}, {"params": [own[1].weight], "momentum": 0.5}]  # type: ignore[index]
    assert rule_of(torch.optim.SGD(groups, lr=0.1)) == SGD(momentum=True)
    assert rule_of(torch.optim.SGD(own.parameters(), lr=0.1)) == SGD(momentum=False)


def test_low_bit_state_is_adamws_only() -> None:
    adamw = torch.optim.AdamW(model().parameters())
    assert rule_of(adamw, state="bf16") == LowBitAdamW("bf16")
    assert rule_of(adamw, state="8bit") == LowBitAdamW("8bit")
    with pytest.raises(oomc.UnsupportedError, match=r"'4bit' is not supported for torch.optim.AdamW; .*'bf16', '8bit'"):
        rule_of(adamw, state="4bit")  # type: ignore[arg-type]
    with pytest.raises(
        oomc.UnsupportedError, match=r"state='8bit' is not supported for torch.optim.SGD; it has 'fp32'"
    ):
        rule_of(torch.optim.SGD(model().parameters(), lr=0.1), state="8bit")


@pytest.mark.parametrize("flag", ["maximize", "differentiable"])
def test_flags_of_sgd_are_refused_by_name(flag: str) -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1, **{flag: True})
    with pytest.raises(oomc.UnsupportedError, match=rf"param_groups\[0\] of the optimizer sets {flag}=True"):
        rule_of(optimizer)


def test_a_tied_parameter_is_known_by_its_first_name() -> None:
    own = model()
    own[1].weight = own[0].weight  # type: ignore[index]
    assert set(groups_of(torch.optim.AdamW(own.parameters()), own)) == {"0.weight", "0.bias", "1.bias"}


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adam, torch.optim.Adagrad])
def test_others_are_refused_with_a_list(kind: Any) -> None:
    with pytest.raises(
        oomc.UnsupportedError,
        match=rf"{kind.__name__} is not supported; use one of torch\.optim\.AdamW, torch\.optim\.SGD",
    ):
        rule_of(kind(model().parameters(), lr=0.1))


def test_a_subclass_may_compute_something_else() -> None:
    class Mine(torch.optim.AdamW):
        pass

    with pytest.raises(oomc.UnsupportedError, match="Mine is not supported"):
        rule_of(Mine(model().parameters()))


@pytest.mark.parametrize("flag", ["amsgrad", "maximize", "capturable", "differentiable"])
def test_flags_are_refused_by_name(flag: str) -> None:
    optimizer = torch.optim.AdamW(model().parameters())
    optimizer.param_groups[0][flag] = True
    with pytest.raises(oomc.UnsupportedError, match=rf"param_groups\[0\] of the optimizer sets {flag}=True"):
        rule_of(optimizer)


def test_state_is_refused() -> None:
    own = model()
    optimizer = torch.optim.AdamW(own.parameters())
    own(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(oomc.UnsupportedError, match="has state already"):
        rule_of(optimizer)


def test_a_foreign_parameter_is_refused_by_its_shape() -> None:
    foreign = nn.Parameter(torch.zeros(4, 5))
    with pytest.raises(oomc.UnsupportedError, match=r"parameter of shape \(4, 5\) that is not the model's"):
        groups_of(torch.optim.AdamW([foreign]), model())
