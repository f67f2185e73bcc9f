"""Whatever the lanes' order, the result is the synchronous one, bit for bit: 200 runs with delays and poison."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from oomc.runtime.weights import Fetch
from oomc.step import Step
from tests.helpers import Blind, compiled, state, tokens
from tests.programs import VOCAB, TopK

SEEDS, STEPS = 25, 8
"""Of adversarial runs there are SEEDS * STEPS: delays go on differing from step to step."""
BATCHES = [tokens(2, 6, vocab=VOCAB, seed=i) for i in range(STEPS)]
Run = list[dict[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(**options: Any) -> Step:
    """A step of a small model with attention, experts, dropout and a tied head."""
    torch.manual_seed(0)
    step = compiled(TopK(tied=True), BATCHES[0], like=("TopK",), **options)
    step._meter = Blind()
    return step


def train(accumulate: bool = False, **options: Any) -> Run:
    """Loss, masters and moments after each step."""
    step = make(**options)
    result = []
    for batch in BATCHES:
        if accumulate:
            loss = step.forward_backward(**batch)
            step.forward_backward(**BATCHES[0])
            step.update()
        else:
            loss = step(**batch)
        result.append({"loss": loss, **state(step)})
    step.close()
    return result


def assert_equal(run: Run, expected: Run) -> None:
    for number, (mine, others) in enumerate(zip(run, expected, strict=True)):
        for name, tensor in others.items():
            assert torch.equal(mine[name], tensor), f"{name} after step {number}"


@pytest.mark.parametrize("accumulate", [False, True])
def test_adversarial_orders_change_no_bit(accumulate: bool) -> None:
    expected = train(accumulate, synchronous=True)
    assert all(each["loss"].isfinite() for each in expected)
    for seed in range(SEEDS // 8 if accumulate else SEEDS):
        assert_equal(train(accumulate, chaos=seed), expected)


def test_adversarial_steps_that_are_not_awaited_change_no_bit() -> None:
    """As above, but the state is looked at only in the end, so that updates run into the next step."""
    last = train(synchronous=True)[-1]
    for seed in range(3):
        step = make(chaos=100 + seed)
        for batch in BATCHES:
            loss = step(**batch)
        assert_equal([{"loss": loss, **state(step)}], [last])
        step.close()


def test_plain_overlap_changes_no_bit() -> None:
    assert_equal(train(), train(synchronous=True))


def test_a_missing_wait_would_show() -> None:
    """The adversary is worth its name: where no copy of weights is waited for, the result is wrong."""
    expected = train(synchronous=True)[0]["loss"]
    wrong = 0
    for seed in range(4):
        step = make(chaos=seed)
        assert step._runtime is not None

        def go_on(fetch: Fetch) -> None:
            fetch.waited = True

        step._runtime.wait = go_on  # type: ignore[method-assign]
        wrong += not torch.equal(step(**BATCHES[0]), expected)
        step.synchronize()
    assert wrong >= 2
