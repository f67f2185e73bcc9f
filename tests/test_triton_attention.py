"""Our own attention kernels for CUDA, against the tiled form in fp64.

Without a GPU they can run in Triton's interpreter, if Triton is installed and TRITON_INTERPRET=1 is set; it cuts bf16
off instead of rounding, hence fp16 there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oomc import attention as module
from oomc.attention import attention, attention_backward
from oomc.attention_kernels import own_backward, own_forward
from tests.kernel_devices import DEVICES, loops

__all__ = ["loops"]
pytestmark = pytest.mark.usefixtures("loops")

Options = tuple[float, bool, int | None, float]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"causal": False},
    "window": {"window": 70},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "segments": {"segments": True},
    "all": {"window": 90, "softcap": 3.0, "sinks": True, "segments": True},
    "last queries of longer keys": {"keys": 230, "sinks": True},
    "a window of longer keys": {"keys": 230, "window": 33},
    "one row": {"rows": 1, "sinks": True},
    "a sink in every third place": {"sinks": "strided"},
    "one sink for all heads": {"sinks": "expanded"},
    "a few rows": {"rows": 5, "sinks": True, "segments": True},
    "MQA, narrow values": {"heads": (4, 1), "sizes": (40, 24), "segments": True},
}


def case(device: str, option: dict[str, Any]) -> tuple[list[Tensor], Tensor | None, Tensor | None, Options]:
    """dout, q, k and v, sinks, segments and the other options."""
    torch.manual_seed(0)
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    rows = option.get("rows", 150)
    keys, (hq, hkv), (size, v_size) = (
        option.get("keys", rows),
        option.get("heads", (4, 2)),
        option.get("sizes", (16, 16)),
    )
    shapes = (rows, hq, v_size), (rows, hq, size), (keys, hkv, size), (keys, hkv, v_size)
    tensors = [torch.randn(2, *shape).to(device, dtype).transpose(1, 2) for shape in shapes]
    sinks = torch.randn(3 * hq).to(device) if option.get("sinks") else None
    if sinks is not None:
        sinks = {"strided": sinks[::3], "expanded": sinks[:1].expand(hq)}.get(str(option["sinks"]), sinks[:hq])
    segments = torch.stack([torch.arange(keys) // n for n in (40, 67)]).to(device) if option.get("segments") else None
    return tensors, sinks, segments, (0.3, option.get("causal", True), option.get("window"), option.get("softcap", 0.0))


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_as_in_fp64(device: str, name: str) -> None:
    (dout, q, k, v), sinks, segments, options = case(device, CASES[name])
    wide = [x.double() for x in (q, k, v)]
    own_sinks = None if sinks is None else sinks.double()
    wanted, wanted_lse = attention(*wide, own_sinks, segments, *options)
    out, lse = own_forward(q, k, v, sinks, segments, *options)
    assert out.transpose(1, 2).is_contiguous() and lse.dtype == torch.float32
    bound = 1e-3 if q.dtype == torch.float16 else 8e-3
    assert distance(out, wanted) < bound and distance(lse, wanted_lse) < 1e-5
    gradients = attention_backward(dout.double(), *wide, wanted, wanted_lse, own_sinks, segments, *options)
    *found, delta = own_backward(dout, q, k, v, out, lse, segments, *options, False, sinks is not None)
    for one, other in zip(found, gradients[:3], strict=True):
        assert distance(one, other) < bound
    if sinks is not None:
        assert distance(module._sink_gradient(sinks, lse, delta), gradients[3]) < 2e-5


@pytest.mark.parametrize("name", ["all", "last queries of longer keys"])
@pytest.mark.parametrize("device", DEVICES)
def test_in_place_gives_the_same_bits(device: str, name: str) -> None:
    (dout, q, k, v), sinks, segments, options = case(device, CASES[name])
    out, lse = own_forward(q, k, v, sinks, segments, *options)
    wanted = own_backward(dout, q, k, v, out, lse, segments, *options, False, True)
    memory = [x.data_ptr() for x in (q, k, v)]
    found = own_backward(dout, q, k, v, out, lse, segments, *options, True, True)
    assert [x.data_ptr() for x in found[:3]] == memory
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    "sizes", [(64, 64), (128, 128), (192, 128), (256, 256), (64, 32), (32, 64), (128, 64), (96, 80)]
)
def test_cuda_sizes(sizes: tuple[int, int]) -> None:
    """All widths that models have, over several blocks."""
    (dout, q, k, v), sinks, segments, _ = case("cuda", {"rows": 700, "sizes": sizes, "sinks": True})
    options = (sizes[0] ** -0.5, True, None, 0.0)
    wide = [x.double() for x in (q, k, v)]
    assert sinks is not None
    wanted, wanted_lse = attention(*wide, sinks.double(), segments, *options)
    out, lse = own_forward(q, k, v, sinks, segments, *options)
    *found, _ = own_backward(dout, q, k, v, out, lse, segments, *options, False, True)
    gradients = attention_backward(dout.double(), *wide, wanted, wanted_lse, sinks.double(), segments, *options)
    for one, other in zip((out, *found), (wanted, *gradients[:3]), strict=True):
        assert distance(one, other) < 8e-3
