"""AdamW with low-bit state: what the codes hold, how they round, what they cost, and how training with them ends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from oomc.models.plain_moe import PlainMoe, PlainMoeConfig
from oomc.runtime.adamw import AdamW
from oomc.runtime.layout import ParamSpec, SlabLayout
from oomc.runtime.low_bit import ELEMENTS, LowBitAdamW, Width, _expand_8bit, _round_8bit, _round_bf16, key_of
from oomc.runtime.optim import UpdateRule, salt_of
from tests.test_adamw import split

WIDTHS = pytest.mark.parametrize("width", ["bf16", "8bit"])
GROUP: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def stored(width: Width, m: torch.Tensor, v: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What is read back of moments that were rounded at `step`."""
    n, key = m.numel(), np.int32(key_of(17, step))
    if width == "bf16":
        codes = torch.zeros(2, n, dtype=torch.int16)
        _round_bf16(m.numpy(), v.numpy(), codes[0].numpy(), codes[1].numpy(), key, 0)
        return codes[0].view(torch.bfloat16).float(), codes[1].view(torch.bfloat16).float()
    small, bases = np.zeros((2, n), np.int8), np.zeros((2, -(-n // ELEMENTS)), np.int16)
    _round_8bit(m.numpy(), v.numpy(), *small, *bases, key, 0)
    out = torch.empty(2, n)
    _expand_8bit(*small, *bases, out[0].numpy(), out[1].numpy())
    return out[0], out[1]


def moments(n: int = 6400 + 37) -> tuple[torch.Tensor, torch.Tensor]:
    """`m` over 12 binades a block, `v` over 24, blocks of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(-40, 20, (-(-n // ELEMENTS),), generator=generator).float())
    sizes = sizes.repeat_interleave(ELEMENTS)[:n]
    signs = torch.randint(2, (n,), generator=generator) * 2 - 1
    return signs * torch.exp2(-12 * torch.rand(n, generator=generator)) * sizes, torch.exp2(
        -24 * torch.rand(n, generator=generator)
    ) * sizes**2


@WIDTHS
def test_rounding_keeps_the_mean_and_never_goes_past_the_next_number(width: Width) -> None:
    m, v = moments()
    step = 2.0**-3 if width == "8bit" else 2.0**-7  # a unit of the mantissa, relative to the power of two below
    units, rounds = [torch.exp2(torch.floor(torch.log2(old.abs()))) * step for old in (m, v)], 400
    sums = torch.zeros(2, m.numel(), dtype=torch.float64)
    for i in range(rounds):
        for total, old, unit, new in zip(sums, (m, v), units, stored(width, m, v, i)):
            assert ((new - old).abs() < unit).all()
            total += new.double()
    for total, old, unit in zip(sums, (m, v), units):
        error = (total / rounds - old.double()) / unit
        assert error.abs().max() < 5.5 * 0.5 / math.sqrt(rounds)  # standard deviations of one element
        assert error.mean().abs() < 5.0 * 0.5 / math.sqrt(rounds * old.numel())  # of all: there is no bias


def test_v_never_becomes_zero_and_a_nan_stays_alone() -> None:
    """`v` far below the block's largest is held up at the smallest code: its update is smaller than it would be."""
    m, v = torch.full((128,), 1e-3), torch.full((128,), 1e-30)
    v[0], v[1], v[2], v[3] = 1.0, 1e-12, 0.0, 1e-44
    m[0], m[1], m[2] = 1.0, -(2.0**-17), -(2.0**-15)
    m[70], v[71] = math.nan, math.inf
    new_m, new_v = stored("8bit", m, v, 1)
    smallest = new_v[4]
    assert 2**-32 < smallest < 2**-31
    assert new_v[2] == 0.0
    assert new_v[1] == smallest and new_v[3] == smallest
    assert new_m[1] == 0.0 and -(2.0**-14) < new_m[2] <= -(2.0**-15)
    assert new_m.isnan().nonzero().tolist() == [[70]]
    assert new_v.isnan().nonzero().tolist() == [[71]], "infinity has no code of its own"
    assert ((new_v[73:] - 1e-30).abs() < 0.13e-30).all(), "the block's other elements are as they would be"
    assert ((new_m[73:] - 1e-3).abs() < 0.13e-3).all()


@WIDTHS
def test_zero_bytes_are_zero_moments_and_the_first_step_is_adamws(width: Width) -> None:
    n, rules = 1000, (AdamW(), LowBitAdamW(width))
    gradient = torch.randn(n, generator=torch.Generator().manual_seed(1)).view(torch.int32).numpy()
    results = []
    for rule in rules:
        weights = np.ones(n, np.float32)
        state = tuple(np.zeros(a.elements(n), a.bits) for a in rule.arrays)
        rule.update(weights, None, state, gradient, 1.0, rule.constants(rule.hyper(GROUP), 1, 0), 0)
        results.append(weights)
    assert np.array_equal(results[0], results[1])


@WIDTHS
def test_slow_averages_do_not_stall(width: Width) -> None:
    """One gradient, then none: `v` falls by 0.001 a step, far less than half a step of its code, and yet as it should.

    After 1000 steps the mean of `v` over the elements is within 3% of 0.999**1000. With rounding to nearest it would
    still be what it was.
    """
    n, rule = 64 * 256, LowBitAdamW(width)
    weights = np.zeros(n, np.float32)
    state = tuple(np.zeros(a.elements(n), a.bits) for a in rule.arrays)
    gradient = np.ones(n, np.float32).view(np.int32)
    for step in range(1, 1002):
        rule.update(weights, None, state, gradient, 1.0, rule.constants(rule.hyper(GROUP), step, 3), 0)
        gradient = np.zeros(n, np.int32)
    if width == "bf16":
        v = torch.from_numpy(state[1]).view(torch.bfloat16).float()
    else:
        read = np.empty((2, n), np.float32)
        _expand_8bit(*state, *read)
        v = torch.from_numpy(read[1])
    assert float(v.mean()) == pytest.approx(0.001 * 0.999**1000, rel=0.03)


@WIDTHS
def test_runs_equal_the_whole_and_nonfinite_elements_are_counted(width: Width) -> None:
    rule, n = LowBitAdamW(width), 20_011
    results = []
    for piece in (n, 128, 1024 * 7):
        hi, lo = split(torch.randn(n, generator=torch.Generator().manual_seed(2)))
        state = tuple(np.zeros(a.elements(n), a.bits) for a in rule.arrays)
        generator, counts = torch.Generator().manual_seed(3), []
        for step in range(1, 5):
            gradient = torch.randn(n, generator=generator).bfloat16()
            if step == 3:
                gradient[[5, 4096, n - 1]] = torch.tensor([math.nan, math.inf, -math.inf]).bfloat16()
            constants, count = rule.constants(rule.hyper(GROUP), step, salt_of("w")), 0
            for start in range(0, n, piece):
                stop = min(start + piece, n)
                count += rule.update(
                    hi[start:stop].numpy(), lo[start:stop].numpy(),
                    tuple(s[a.span(start, stop)] for a, s in zip(rule.arrays, state)),
                    gradient[start:stop].view(torch.int16).numpy(), 0.5, constants, start,
                )  # fmt: skip
            counts.append(count)
        assert counts == [0, 0, 3, 0]
        assert int(hi.view(torch.bfloat16).isnan().sum()) == 3
        results.append([hi.numpy().tobytes(), lo.numpy().tobytes(), *(s.tobytes() for s in state)])
    assert results[0] == results[1] == results[2]


def test_random_bits_differ_by_parameter_and_step() -> None:
    keys = {key_of(salt, step) for salt in (0, 1, salt_of("a"), salt_of("b"), (1 << 32) - 1) for step in range(1, 100)}
    assert len(keys) == 5 * 99
    assert all(-(1 << 31) <= key < 1 << 31 for key in keys)


@pytest.mark.parametrize(("rule", "most"), [(AdamW(), 12.0), (LowBitAdamW("bf16"), 8.0), (LowBitAdamW("8bit"), 6.2)])
def test_bytes_a_parameter(rule: UpdateRule, most: float) -> None:
    """Of `hi`, `lo` and the moments; alignment is in the slab's size, too."""
    n = 3 * 1_000_000
    layout = SlabLayout.build("s", [ParamSpec("w", (3, 1_000_000), torch.bfloat16, True)])
    assert layout.weight_bytes + layout.state_bytes(rule.arrays) <= most * n + 12 * 128


def tokens(seed: int) -> torch.Tensor:
    """[4, 32] of a fixed Markov chain over 64 tokens."""
    table = torch.randn(64, 64, generator=torch.Generator().manual_seed(123)).mul(3).softmax(1)
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(64, (4,), generator=generator)]
    for _ in range(31):
        ids.append(torch.multinomial(table[ids[-1]], 1, generator=generator)[:, 0])
    return torch.stack(ids, 1)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """So small a model is slower on more, and very slow where others want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def final_loss(rule: UpdateRule) -> tuple[float, float]:
    """First loss, and mean of the last 50 of 300 steps of a small MoE on `tokens`, split bf16 master and gradients."""
    torch.manual_seed(0)
    model = PlainMoe(PlainMoeConfig(vocab_size=64))
    names = [name for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    halves = [split(p.detach().view(-1)) for p in parameters]
    states = [tuple(np.zeros(a.elements(p.numel()), a.bits) for a in rule.arrays) for p in parameters]
    losses = []
    for step in range(1, 301):
        with torch.no_grad():
            for p, (hi, _) in zip(parameters, halves):
                p.copy_(hi.view(torch.bfloat16).view(p.shape))
        ids = tokens(step)
        loss = model(input_ids=ids, labels=ids)
        gradients = torch.autograd.grad(loss, parameters)
        for name, (hi, lo), state, gradient in zip(names, halves, states, gradients):
            narrow = gradient.bfloat16().view(-1).view(torch.int16).numpy()
            constants = rule.constants(rule.hyper(GROUP | {"lr": 3e-3}), step, salt_of(name))
            rule.update(hi.numpy(), lo.numpy(), state, narrow, 1.0, constants, 0)
        losses.append(float(loss.detach()))
    return losses[0], sum(losses[-50:]) / 50


@WIDTHS
@pytest.mark.usefixtures("one_thread")
def test_training_ends_where_fp32_state_does(width: Width) -> None:
    """A two-layer MoE of 8 experts, 300 steps, loss from 4.21 to 1.885 (mean of the last 50) with fp32 state.

    Measured: 0.0008 more with bf16, 0.0018 more with 8 bits (over three seeds and other random bits, in fp32, -0.0004
    to 0.0020 and 0.0001 to 0.0012; 8 bits rounded to nearest cost 0.010 to 0.012). The bound is 0.005 either way.
    """
    first, expected = final_loss(AdamW())
    _, mine = final_loss(LowBitAdamW(width))
    assert first > 4 and expected < 2
    assert abs(mine - expected) < 0.005
