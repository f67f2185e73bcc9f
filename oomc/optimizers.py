"""The user's torch optimizer: which are supported, and what an update reads of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from oomc.errors import UnsupportedError
from oomc.runtime.adamw import AdamW
from oomc.runtime.low_bit import LowBitAdamW
from oomc.runtime.optim import UpdateRule
from oomc.runtime.sgd import SGD

StateWidth = Literal["fp32", "bf16", "8bit"]

RULES: dict[type[torch.optim.Optimizer], Callable[[], UpdateRule]] = {torch.optim.AdamW: AdamW, torch.optim.SGD: SGD}
"""Update rules by the torch optimizer that they do the work of; another one is a file like runtime/sgd.py."""

STATES: dict[type[torch.optim.Optimizer], tuple[StateWidth, ...]] = {torch.optim.AdamW: ("fp32", "bf16", "8bit")}
"""In what widths an optimizer can keep its state, where not in fp32 alone."""

UNSUPPORTED_FLAGS = {"amsgrad": True, "maximize": True, "differentiable": True, "capturable": True,
                     "decoupled_weight_decay": False}  # fmt: skip
"""Options of parameter groups by the value that is not supported."""


def rule_of(optimizer: torch.optim.Optimizer, state: StateWidth = "fp32") -> UpdateRule:
    """The update rule that computes what `optimizer` would, with state of that width.

    Raises:
        UnsupportedError: there is none, not with such state, the optimizer has a flag that is not supported, or it has
            state already.
    """
    make = RULES.get(type(optimizer))
    if make is None:
        names = ", ".join(f"torch.optim.{kind.__name__}" for kind in RULES)
        raise UnsupportedError(f"optimizer {type(optimizer).__name__} is not supported; use one of {names}")
    states = STATES.get(type(optimizer), ("fp32",))
    if state not in states:
        name, known = type(optimizer).__name__, ", ".join(map(repr, states))
        raise UnsupportedError(f"state={state!r} is not supported for torch.optim.{name}; it has {known}")
    check_groups(optimizer)
    if optimizer.state:
        raise UnsupportedError(
            "the optimizer has state already (it was stepped before); give compile a fresh one, made from the model. "
            "Its moments are then taken over by step.optimizer.load_state_dict(old.state_dict())"
        )
    if make is SGD:
        return SGD(momentum=any(float(group["momentum"]) != 0.0 for group in optimizer.param_groups))
    return make() if state == "fp32" else LowBitAdamW(state)


def check_groups(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """How many parameters each group holds.

    Raises:
        UnsupportedError: a group has an option that is not supported.
    """
    for index, group in enumerate(optimizer.param_groups):
        for flag, value in UNSUPPORTED_FLAGS.items():
            if bool(group.get(flag, not value)) is value:
                raise UnsupportedError(
                    f"param_groups[{index}] of the optimizer sets {flag}={value}, which is not supported"
                )
    return tuple(len(group["params"]) for group in optimizer.param_groups)


def groups_of(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, int]:
    """The parameter group of each of the model's parameters that the optimizer holds, by name.

    Raises:
        UnsupportedError: the optimizer holds a parameter that is not the model's.
    """
    names = {id(p): n for n, p in model.named_parameters()}
    groups: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise UnsupportedError(
                    f"param_groups[{index}] of the optimizer holds a parameter of shape {tuple(param.shape)} that is "
                    "not the model's; make the optimizer from model.parameters() of the very model that you compile"
                )
            groups[names[id(param)]] = index
    return groups
