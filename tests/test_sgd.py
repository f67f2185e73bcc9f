"""The host SGD against torch's, each step from the same state."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import oomc
from oomc.runtime.optim import compile_rule
from oomc.runtime.sgd import SGD
from tests.test_adamw import join, split, ulps

GROUP: dict[str, Any] = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "nesterov-decay": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}


def update(rule: SGD, master: torch.Tensor, state: Any, gradient: torch.Tensor, constants: Any, narrow: bool) -> Any:
    """The new master and the count of non-finite elements; `state` changes in place."""
    bits = gradient.view(torch.int16 if gradient.dtype == torch.bfloat16 else torch.int32).numpy()
    arrays = tuple(t.numpy() for t in state)
    if not narrow:
        master = master.clone()
        return master, rule.update(master.numpy(), None, arrays, bits, 1.0, constants, 0)
    hi, lo = split(master)
    count = rule.update(hi.numpy(), lo.numpy(), arrays, bits, 1.0, constants, 0)
    return join(hi, lo), count


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_is_torch_bit_for_bit(kind: str, narrow: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    n = 10_007
    group = GROUP | KINDS[kind]
    rule = SGD(momentum=group["momentum"] != 0)
    scale = torch.exp2(torch.randint(-20, 4, (n,), generator=generator).float())
    master = torch.randn(n, generator=generator) * scale
    parameter = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.SGD([parameter], **group)
    state = [torch.zeros(n) for _ in rule.arrays]
    assert len(state) == (group["momentum"] != 0)
    for step in range(1, 31):
        group["lr"] = optimizer.param_groups[0]["lr"] = 0.1 * (1 + math.sin(step))
        gradient = torch.randn(n, generator=generator) * scale.flip(0)
        gradient[step::97] = 0.0
        gradient = gradient.bfloat16() if narrow else gradient
        parameter.grad = gradient.float()
        old = master
        optimizer.step()
        master, count = update(rule, master, state, gradient, rule.constants(rule.hyper(group), step, 0), narrow)
        assert count == 0
        expected = parameter.detach()
        assert ulps(master, expected, old, expected, expected - old).max() <= 2  # what is promised everywhere
        assert torch.equal(master, expected)  # what torch's vectorised CPU kernels give
        if state:
            assert torch.equal(state[0], optimizer.state[parameter]["momentum_buffer"])


def test_long_runs_equal_short_ones_and_nonfinite_elements_are_counted() -> None:
    n, rule = 20_000, SGD()
    constants = rule.constants(rule.hyper(GROUP | KINDS["nesterov-decay"]), 3, 0)
    gradient = torch.randn(n, generator=torch.Generator().manual_seed(1)).bfloat16()
    gradient[[5, 4096, 19_999]] = torch.tensor([math.nan, math.inf, -math.inf]).bfloat16()
    results = []
    for piece in (n, 1024):
        hi, lo = split(torch.randn(n, generator=torch.Generator().manual_seed(2)))
        buffer, count = torch.ones(n), 0
        for i in range(0, n, piece):
            views = [t[i : i + piece].numpy() for t in (hi, lo, buffer, gradient.view(torch.int16))]
            count += rule.update(views[0], views[1], (views[2],), views[3], 0.5, constants, i)
        assert count == 3
        results.append([t.view(torch.uint8).clone() for t in (hi, lo, buffer)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_a_group_without_momentum_beside_one_with() -> None:
    """The buffer is there for the other group; this one's is left alone, as in torch."""
    rule, buffer, master = SGD(), torch.full((100,), 7.0), torch.ones(100)
    constants = rule.constants(rule.hyper(GROUP), 1, 0)
    master, _ = update(rule, master, [buffer], torch.ones(100), constants, False)
    assert (buffer == 7.0).all()
    assert torch.equal(master, torch.full((100,), 1 - 0.1))


def test_momentum_that_begins_later_is_refused() -> None:
    with pytest.raises(oomc.UnsupportedError, match=r"momentum became 0\.5"):
        SGD(momentum=False).hyper(GROUP | {"momentum": 0.5})


def test_a_tensor_lr_is_read_at_the_snapshot() -> None:
    lr = torch.tensor(0.5)
    hyper = SGD().hyper(GROUP | {"lr": lr})
    lr.fill_(7.0)
    assert hyper.lr == 0.5


def test_all_variants_compile() -> None:
    for rule in (SGD(), SGD(momentum=False)):
        compile_rule(rule)
        weights = np.zeros(8, np.float32)
        constants = rule.constants(rule.hyper(GROUP), 1, 0)
        state = tuple(np.zeros(8, np.float32) for _ in rule.arrays)
        assert rule.update(weights, None, state, np.zeros(8, np.int16), 1.0, constants, 0) == 0
