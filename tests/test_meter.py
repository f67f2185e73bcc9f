"""The meter sees every temporary, forgets what has died, and agrees with itself on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from oomc import target
from oomc.runtime.layout import ParamSpec, SlabLayout
from oomc.runtime.meter import Meter, host_bytes
from oomc.runtime.slabs import HostSlab

KIB = 1024


def planned(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def unplanned(x: torch.Tensor) -> torch.Tensor:
    return (x.repeat(3) + 1)[: x.numel()] * 2


def measure(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int:
    meter = Meter({})
    with meter:
        result = function(x)
        assert meter.current == (0 if result.data_ptr() == x.data_ptr() else result.untyped_storage().nbytes())
    del result
    assert meter.current == 0
    return meter.peak


def test_an_unplanned_temporary_is_noticed() -> None:
    x = torch.zeros(KIB // 4)
    assert measure(planned, x) == KIB
    assert measure(unplanned, x) == 6 * KIB  # the repeat and the sum live at once
    assert measure(lambda t: t.view(-1).add_(1), x) == 0  # views and in-place updates of what was there


def test_what_dies_is_forgotten_and_peaks_start_anew() -> None:
    meter = Meter({})
    with meter:
        a = torch.zeros(KIB)
        view = a[:10]
        assert meter.current == 4 * KIB
        del a
        assert meter.current == 4 * KIB, "a view holds its storage"
        del view
        assert meter.current == 0
        assert meter.peak == 4 * KIB
        meter.reset_peak()
        assert meter.peak == 0
        constant = torch.tensor([1.0, 2.0])
        assert meter.current == 8
        kept = constant + 1
        assert meter.peak_op == "aten.add.Tensor"
    del constant, kept
    assert meter.current == 0


def test_backward_is_seen() -> None:
    weight = torch.zeros(16, 16, requires_grad=True)
    meter = Meter({})
    with meter:
        (weight @ weight).sum().backward()
    assert weight.grad is not None
    assert meter.current == weight.grad.nbytes
    assert meter.peak > 2 * weight.nbytes


def test_host_slabs_are_not_counted_and_tracked_tensors_are() -> None:
    slab = HostSlab(SlabLayout.build("s", [ParamSpec("w", (64,), torch.float32, True)]))
    meter = Meter({})
    slot = torch.empty(256, dtype=torch.uint8)
    meter.track(slot, slot[:10])
    with meter:
        slot.copy_(slab.weights)
        parameter = slab.param("w")
        parameter.view(8, 8).mul_(2)
        assert meter.current == 256
    del slot
    assert meter.current == 0


@dataclass
class Body:
    function: Callable[..., Any]
    traceable: bool

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


@torch.library.custom_op("oomc_test_meter::greedy", mutates_args=())
def greedy(x: torch.Tensor) -> torch.Tensor:
    return greedy_body(x)


@greedy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def greedy_body(x: torch.Tensor) -> torch.Tensor:
    return x.repeat(10).view(10, -1).sum(0)


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("traceable", [False, True])
def test_inside_of_custom_operations(fake: bool, traceable: bool) -> None:
    overload = torch.ops.oomc_test_meter.greedy.default
    meter = Meter({overload: Body(greedy_body, traceable)})
    mode = FakeTensorMode() if fake else torch.no_grad()
    with mode:
        x = torch.zeros(KIB // 4)
        with meter:
            result = torch.ops.oomc_test_meter.greedy(x)
    assert meter.peak == (KIB if fake and not traceable else 11 * KIB)
    assert meter.current == KIB
    del result
    assert meter.current == 0


def test_fake_tensors_give_the_same_peak() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    peaks = []
    for fake in (False, True):
        with FakeTensorMode() if fake else torch.no_grad():
            weights = {name: torch.empty(p.shape) for name, p in layer.named_parameters()}
            x = torch.empty(8, 32)
            meter = Meter({})
            with meter, torch.no_grad():
                torch.func.functional_call(layer, weights, (x,))
            peaks.append(meter.peak)
    assert peaks[0] == peaks[1] > 0


def test_host_bytes_sees_touched_memory() -> None:
    before = host_bytes()
    held = torch.ones(256 << 20, dtype=torch.uint8)  # far more than what the allocator may have kept
    assert host_bytes() - before > 200 << 20
    del held


@pytest.mark.parametrize(("count", "rows"), [(5000, 1000), (5000, 90000), (3000, 1000)])
def test_a_lookups_gradient_takes_a_workspace_on_cuda(count: int, rows: int) -> None:
    grad, ids = torch.empty(count, 40), torch.empty(count, dtype=torch.int64)
    peaks = []
    for capability in (None, (9, 0)):
        with target.planning_for(capability), FakeTensorMode() as mode:
            fakes = mode.from_tensor(grad), mode.from_tensor(ids)
            with Meter() as meter:
                result = torch.ops.aten.embedding_dense_backward(*fakes, rows, -1, False)
            assert meter.current == result.untyped_storage().nbytes()
            peaks.append(meter.peak - meter.current)
    partial = min(count, rows) + count // 10
    assert peaks == [0, 0 if count <= 3072 else 4 * 40 * partial + 8 * (6 * count + 2 * partial)]


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1000, 90000])
def test_cuda_workspace_of_a_lookups_gradient(rows: int) -> None:
    """What torch's kernel takes is what is projected, or a little less."""
    grad = torch.zeros(20000, 512, dtype=torch.bfloat16, device="cuda")
    ids = torch.randint(rows, (20000,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = torch.ops.aten.embedding_dense_backward(grad, ids, rows, -1, False)
    taken = torch.cuda.max_memory_allocated() - before - result.untyped_storage().nbytes()
    with FakeTensorMode() as mode, Meter() as meter:
        torch.ops.aten.embedding_dense_backward(mode.from_tensor(grad), mode.from_tensor(ids), rows, -1, False)
    projected = meter.peak - result.untyped_storage().nbytes()
    assert 0.9 * projected <= taken <= projected
