"""Values on the host: they come back bit for bit and as they lay, in slots that are reused, and misuse is caught."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from oomc.runtime.chaos import Adversary
from oomc.runtime.lanes import Lane, LaneError
from oomc.runtime.values import HostValues, StoredValue

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.cuda)]


@pytest.fixture
def lanes() -> Iterator[tuple[Lane, Lane]]:
    both = Lane("d2h", CPU), Lane("h2d", CPU)
    yield both
    for lane in both:
        lane.close()


def away_and_back(values: HostValues, value: torch.Tensor, slot: int = 0) -> torch.Tensor:
    copy = values.store("x", value, slot)
    values.discard(copy)
    return values.restored(values.restore(copy))


def is_held(copy: StoredValue) -> bool:
    """Whether the value's device memory is held."""
    return copy.value is not None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_value_comes_back_with_its_bits_and_strides(device: torch.device, dtype: torch.dtype) -> None:
    d2h, h2d = Lane("d2h", device, Adversary(1)), Lane("h2d", device, Adversary(2))
    values = HostValues([6000], device, d2h, h2d, Adversary(3))
    base = torch.randint(0, 2, (5, 7, 9), device=device).to(dtype)
    outer = torch.randint(0, 2, (9, 5, 7), device=device).to(dtype)
    for value in (base.clone(), base.clone().permute(2, 0, 1), outer.clone()[2:5], base[:1, :1, 0].clone()):
        shape, stride, expected = value.shape, value.stride(), value.clone()
        pointer = value.data_ptr()
        back = away_and_back(values, value)
        assert (back.shape, back.stride()) == (shape, stride) and torch.equal(back, expected)
        assert back.data_ptr() != pointer
    d2h.close()
    h2d.close()
    values.close()


def test_a_stored_value_is_freed_at_its_discard_and_its_memory_poisoned(lanes: tuple[Lane, Lane]) -> None:
    values = HostValues([4000], CPU, *lanes, Adversary(0))
    value = torch.randn(1000)
    alias = value.view(-1)
    copy = values.store("x", value, 0)
    assert is_held(copy)
    values.discard(copy)
    assert not is_held(copy)
    assert alias.isnan().all()
    expected = values.restored(values.restore(copy))
    assert expected.isfinite().all()
    assert not is_held(copy), "only who has it holds it"
    assert (values._slots[0] == 0xFF).all(), "a free slot is poisoned"
    values.close()


def test_slots_have_just_their_size_and_are_given_back(lanes: tuple[Lane, Lane]) -> None:
    values = HostValues([100, 4097], CPU, *lanes)
    assert list(values.sizes) == [100, 4097]
    away_and_back(values, torch.zeros(25), 0)
    values.close()
    assert list(values.sizes) == []
    values.close()
    assert HostValues([], CPU, *lanes).sizes == ()


def test_misuse_is_caught(lanes: tuple[Lane, Lane]) -> None:
    values = HostValues([400, 400], CPU, *lanes)
    copy = values.store("x", torch.zeros(100), 0)
    with pytest.raises(AssertionError, match="store of y: host slot 0 holds x"):
        values.store("y", torch.zeros(100), 0)
    with pytest.raises(AssertionError, match="404 bytes do not fit"):
        values.store("y", torch.zeros(101), 1)
    with pytest.raises(AssertionError, match="do not lie side by side"):
        values.store("y", torch.zeros(10, 4)[:, :2], 1)
    with pytest.raises(AssertionError, match="x is restored before it is discarded"):
        values.restore(copy)
    with pytest.raises(AssertionError, match="x is not being restored"):
        values.restored(copy)
    values.discard(copy)
    with pytest.raises(AssertionError, match="x is discarded twice"):
        values.discard(copy)
    values.restored(values.restore(copy))
    with pytest.raises(AssertionError, match="x is not in host slot 0 any more"):
        values.restore(copy)


def test_a_reset_frees_all_slots(lanes: tuple[Lane, Lane]) -> None:
    values = HostValues([400, 400], CPU, *lanes)
    first, second = values.store("x", torch.zeros(100), 0), values.store("y", torch.zeros(100), 1)
    values.discard(second)
    values.restore(second)
    for lane in lanes:
        lane.drain()
    values.reset()
    assert not is_held(first) and not is_held(second)
    for slot in (0, 1):
        away_and_back(values, torch.zeros(100), slot)


def test_a_copy_that_fails_says_so_to_who_waits(lanes: tuple[Lane, Lane]) -> None:
    values = HostValues([400], CPU, *lanes)
    copy = values.store("x", torch.zeros(100), 0)
    values.discard(copy)

    def fail(_: StoredValue) -> torch.Tensor:
        raise OSError("no way back")

    values._place = fail  # type: ignore[method-assign, assignment]
    back = values.restore(copy)
    with pytest.raises(LaneError):
        values.restored(back)


@pytest.mark.cuda
def test_slots_are_registered_with_cuda() -> None:
    device = torch.device("cuda")
    d2h, h2d = Lane("d2h", device), Lane("h2d", device)
    values = HostValues([1 << 20, 5000], device, d2h, h2d)
    assert all(memory.pinned for memory in values._memories)
    large = torch.randn(1 << 18, device=device)
    expected = large.clone()
    copies = [values.store("x", large, 0), values.store("y", torch.arange(1250, device=device, dtype=torch.int32), 1)]
    del large
    for copy in copies:
        values.discard(copy)
    noise = [torch.full((1 << 18,), float("nan"), device=device) for _ in range(4)]
    backs = [values.restore(copy) for copy in copies]
    assert torch.equal(values.restored(backs[0]), expected)
    assert torch.equal(values.restored(backs[1]).cpu(), torch.arange(1250, dtype=torch.int32))
    del noise
    d2h.close()
    h2d.close()
    values.close()
