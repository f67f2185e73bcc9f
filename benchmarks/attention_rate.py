"""Time of attention's kernels, forward and backward, over cases of published models; a line of JSON a case.

    python benchmarks/attention_rate.py --seq 4096,16384

`plain` is causal attention of Qwen3-30B-A3B's heads, which all kernels take. The others are calls that torch's kernels
do not take, beside the tiles of plain torch: gpt-oss's sinks (with and without its window), documents packed into a
row, and Gemma-2's soft caps. Milliseconds are medians. TFLOP/s count what the mask leaves, twice and a half as much in
the backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from oomc import attention_kernels as kernels
from oomc.attention import attention, attention_backward

CASES: dict[str, dict[str, Any]] = {
    "plain": {"heads": (32, 4), "size": 128},
    "sinks": {"heads": (64, 8), "size": 64, "sinks": True},
    "sinks, window": {"heads": (64, 8), "size": 64, "sinks": True, "window": 128},
    "documents": {"heads": (32, 4), "size": 128, "documents": 8},
    "soft cap": {"heads": (16, 8), "size": 256, "softcap": 50.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", default="4096")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    for seq in map(int, args.seq.split(",")):
        for name, case in CASES.items():
            print(json.dumps({"seq": seq, "case": name, **run(seq, args.repeat, **case)}), flush=True)


def run(
    seq: int, repeat: int, heads: tuple[int, int], size: int, sinks: bool = False, window: int | None = None,
    documents: int = 1, softcap: float = 0.0,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Milliseconds and TFLOP/s of each kernel that takes the case."""
    torch.manual_seed(0)
    shapes = [(seq, n, size) for n in (heads[0], heads[0], heads[1], heads[1])]
    dout, q, k, v = (torch.randn(1, *s, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for s in shapes)
    sink = torch.randn(heads[0], device="cuda") if sinks else None
    segments = (torch.arange(seq, device="cuda") * documents // seq)[None] if documents > 1 else None
    scale, special = size**-0.5, sinks or documents > 1 or softcap > 0
    length = seq // documents
    seen = documents * (length * (length + 1) // 2 if window is None else length * min(window, length))
    flops = 4.0 * heads[0] * size * seen
    options: tuple[float, bool, int | None, float] = (scale, True, window, softcap)
    found: dict[str, dict[str, float]] = {}

    def add(name: str, forward: Callable[[], tuple[Tensor, Tensor]], backward: Callable[..., Any]) -> None:
        out, lse = forward()
        f, b = milliseconds(forward, repeat), milliseconds(lambda: backward(out, lse), repeat)
        found[name] = {"forward_ms": f, "backward_ms": b, "forward_tflops": flops / f / 1e9,
                       "backward_tflops": 2.5 * flops / b / 1e9}  # fmt: skip

    if not special:
        for each in ("cudnn", "flash"):
            forward = partial(kernels.forward, each, q, k, v, scale, True, window)
            add(each, forward, partial(library_backward, each, dout, q, k, v, scale, window))
    else:
        with patch.object(kernels, "WIDEST", 0):  # no head is narrow enough for our own kernel
            add("tiled", lambda: attention(q, k, v, sink, segments, *options),
                lambda out, lse: attention_backward(dout, q, k, v, out, lse, sink, segments, *options))  # fmt: skip
    add("own", lambda: kernels.own_forward(q, k, v, sink, segments, *options),
        lambda out, lse: kernels.own_backward(dout, q, k, v, out, lse, segments, *options, False, sinks))  # fmt: skip
    return found


def library_backward(
    kernel: kernels.Kernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None,
    out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    kernels.backward(kernel, dout, q, k, v, out, lse, scale, True, window)


def milliseconds(call: Callable[[], Any], repeat: int) -> float:
    call()
    times = []
    for _ in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


if __name__ == "__main__":
    main()
