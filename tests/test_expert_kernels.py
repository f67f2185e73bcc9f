"""The CUDA kernels that move rows between tokens and experts, against the loops in plain torch.

Without a GPU they can run in Triton's interpreter, if Triton is installed and TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oomc import experts
from tests.kernel_devices import DEVICES

TOKENS, K, EXPERTS = 37, 3, 8


def case(device: str, dtype: torch.dtype, width: int, weights: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    index = torch.rand(TOKENS, EXPERTS - 1).topk(K).indices + 1  # expert 0 gets no token
    order, inverse, offsets = experts.route(index, EXPERTS)
    rows = {"y": torch.randn(TOKENS * K, width), "dout": torch.randn(TOKENS, width)}
    made = {name: x.to(dtype) for name, x in rows.items()} | {"weights": torch.rand(TOKENS, K).to(weights)}
    return {n: x.to(device) for n, x in (made | {"order": order, "inverse": inverse, "offsets": offsets}).items()}


def exact(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: x.cpu().double() if x.is_floating_point() else x.cpu() for n, x in given.items()}


def close(found: Tensor, wanted: Tensor) -> None:
    bound = 1e-6 if found.dtype == torch.float32 else 2**-8
    assert float((found.cpu().double() - wanted).norm() / wanted.norm()) < bound


@pytest.mark.parametrize("width", [8, 1000, 2048, 2056])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_moved_as_by_the_loops(device: str, dtype: torch.dtype, width: int) -> None:
    from oomc import expert_kernels as kernels

    for weights in {torch.float32, dtype}:
        g = case(device, dtype, width, weights)
        e = exact(g)
        close(kernels.combine(g["y"], g["weights"], g["inverse"]),
              experts._combine(e["y"], e["weights"], e["order"], e["inverse"]))  # fmt: skip
        found = kernels.combine_backward(g["dout"], g["y"], g["weights"], g["inverse"])
        wanted = experts._combine_backward(e["dout"], e["y"], e["weights"], e["order"], e["inverse"])
        for one, other in zip(found, wanted, strict=True):
            close(one, other)
        assert found[0].dtype == dtype and found[1].dtype == weights
        close(kernels.dispatch_backward(g["y"], g["inverse"], K), experts._dispatch_backward(e["y"], e["inverse"], K))


@pytest.mark.parametrize("first", [0, 3, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_a_group_are_moved_as_by_the_loops(device: str, dtype: torch.dtype, first: int) -> None:
    """Rows in others' slots may be anything, and are neither read nor written."""
    from oomc import expert_kernels as kernels

    g = case(device, dtype, 1000)
    index = torch.rand(TOKENS, EXPERTS).topk(K).indices
    order, inverse, own = (x.to(device) for x in experts.route(index, min(4, EXPERTS - first), first))
    g |= {"order": order, "inverse": inverse, "own": own}
    e = exact(g)
    g["y"][int(own[-1]) :] = torch.nan
    total = kernels.combine(g["y"], g["weights"], inverse, own)
    assert total.dtype == torch.float32
    close(total, experts._combine(e["y"], e["weights"], e["order"], e["inverse"], e["own"]))
    dy, dweights = kernels.combine_backward(g["dout"].float(), g["y"], g["weights"], inverse, own)
    wanted = experts._combine_backward(e["dout"], e["y"], e["weights"], e["order"], e["inverse"], e["own"])
    close(dy[: int(own[-1])], wanted[0][: int(own[-1])])
    close(dweights, wanted[1])
    close(kernels.dispatch_backward(g["y"], inverse, K, own),
          experts._dispatch_backward(e["y"], e["inverse"], K, e["own"]))  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_rows_may_lie_apart_and_be_none(device: str) -> None:
    from oomc import expert_kernels as kernels

    g = case(device, torch.bfloat16, 64)
    wide = {n: torch.randn(len(g[n]), 80, device=device).bfloat16() for n in ("y", "dout")}
    apart = {n: x[:, 8:72] for n, x in wide.items()}
    near = {n: x.contiguous() for n, x in apart.items()}
    for rows, args in (("y", (g["weights"], g["inverse"])),):
        assert torch.equal(kernels.combine(apart[rows], *args), kernels.combine(near[rows], *args))
    found = kernels.combine_backward(apart["dout"], apart["y"], g["weights"], g["inverse"])
    wanted = kernels.combine_backward(near["dout"], near["y"], g["weights"], g["inverse"])
    assert all(map(torch.equal, found, wanted))
    none = torch.empty(0, 64, device=device, dtype=torch.bfloat16)
    assert kernels.combine(none, g["weights"][:0], g["inverse"][:0]).shape == (0, 64)


@pytest.mark.parametrize("width", [8, 1000, 2056])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_placed_in_a_larger_order(device: str, dtype: torch.dtype, width: int) -> None:
    """Each where it belongs, and no other is written; also rows that lie apart."""
    from oomc import expert_kernels as kernels

    torch.manual_seed(0)
    slots = torch.randperm(50)[:20].to(device)
    for rows in (torch.randn(20, width), torch.randn(20, width + 8)[:, 4:-4], torch.empty(0, width)):
        whole = torch.full((50, width), 7.0, device=device, dtype=dtype)
        wanted, places = whole.clone(), slots[: len(rows)]
        given = rows.to(device, dtype)
        kernels.place(whole, places, given)
        wanted[places] = given
        assert torch.equal(whole, wanted)


@pytest.mark.parametrize("size", [(5, 7), (64, 128)])
@pytest.mark.parametrize("device", DEVICES)
def test_only_experts_without_slots_are_cleared(device: str, size: tuple[int, int]) -> None:
    from oomc import expert_kernels as kernels

    offsets = torch.tensor([0, 3, 3, 8, 8], dtype=torch.int32, device=device)
    out = torch.full((5, *size), float("nan"), device=device)
    kernels.clear_empty(out, offsets)
    assert [bool(torch.isnan(x).all()) for x in out] == [False, True, False, True, False]
    assert all(not x.any() for x in (out[0], out[2], out[4]))


def test_plans_for_a_gpu_count_no_temporaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under fakes, a plan for a GPU takes what the kernels take, and a plan for the CPU what the loops take."""
    from oomc import private, target
    from oomc.runtime.meter import Meter

    def peak(op: Any, *args: Tensor) -> int:
        mode = private.fake_mode(symbolic=False)
        with mode:
            fakes = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype) for a in args]
        with mode, Meter() as meter, torch.no_grad():
            op(*fakes)
        return meter.peak

    g = case("cpu", torch.bfloat16, 64)
    args = g["y"], g["weights"], g["order"], g["inverse"]
    loops = peak(experts.combine, *args)
    with target.planning_for((9, 0)):
        assert peak(experts.combine, *args) == TOKENS * 64 * 2 < loops
        assert peak(experts.combine_backward, g["dout"], *args) == g["y"].nbytes + g["weights"].nbytes
