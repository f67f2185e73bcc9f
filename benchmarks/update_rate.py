"""Rates of the optimizer's update: torch's fused CPU kernel, ours on the host, and host and device together.

    python benchmarks/update_rate.py --params 1.0e9 --threads 8,16 --chunk 2e6,4e6,8e6

Gradients lie on the device in bf16, as a backward leaves them; weights (bf16 with a 16-bit residual) and moments lie in
host memory. A round updates everything once, through the same queue, ring and kernels as a training step. Rows are
interleaved; printed are medians, in 10^9 parameters a second. torch's kernel has fp32 weights and gradients that are on
the host already, so it moves less.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from common import ADAMW
from tabulate import tabulate

from oomc.runtime.adamw import AdamW
from oomc.runtime.executor import Runtime
from oomc.runtime.layout import ParamSpec, SlabLayout
from oomc.runtime.pool import physical_cores
from oomc.runtime.slabs import HostSlab
from oomc.runtime.updates import Where

PIECE = 64 << 20  # parameters of one tensor


def torch_fused(count: int) -> Callable[[], None]:
    """torch's kernel, with all of torch's threads."""
    tensors = []
    for start in range(0, count, PIECE):
        n = min(PIECE, count - start)
        tensors.append([torch.full((n,), x) for x in (0.02, 1e-3, 0.0, 0.0)])
    steps = [torch.tensor(1.0) for _ in tensors]
    p, g, m, v = (list(each) for each in zip(*tensors))
    beta1, beta2 = ADAMW["betas"]
    return lambda: torch._fused_adamw_(
        p, g, m, v, [], steps, lr=ADAMW["lr"], beta1=beta1, beta2=beta2, weight_decay=ADAMW["weight_decay"],
        eps=ADAMW["eps"], amsgrad=False, maximize=False,
    )  # fmt: skip


class Engine:
    """The runtime over slabs of `count` parameters, on `threads` host workers.

    A chunk has `chunk` elements, and what a worker updates at a time has `buffer`.
    """

    def __init__(self, count: int, threads: int, chunk: int, buffer: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.slabs = []
        for index, start in enumerate(range(0, count, PIECE)):
            spec = ParamSpec("w", (min(PIECE, count - start),), torch.bfloat16, True)
            slab = HostSlab(SlabLayout.build(f"slab{index}", [spec]), pin=cuda, pin_state=cuda)
            slab.param("w").normal_(0.0, 0.02)
            self.slabs.append(slab)
        self.gradients = [torch.randn(s.layout.bf16.elements, device=device).bfloat16() for s in self.slabs]
        self.hyper = AdamW().hyper(ADAMW)
        self.runtime = Runtime(
            device, self.slabs, [], AdamW(), {"w": 0}, chunk_elems=chunk, buffer_elems=buffer, where="both",
            workers=threads,
        )  # fmt: skip

    def update(self, where: Where) -> None:
        """Update everything once."""
        sink = self.runtime._sink
        assert sink is not None
        sink._queue.where = where
        self.runtime.begin_step([self.hyper])
        tickets = [
            self.runtime.offload(s.name, ["w"], [g], "update") for s, g in zip(self.slabs, self.gradients)
        ]  # fmt: skip
        for ticket in tickets:
            self.runtime.wait_gradients(ticket)
        self.runtime.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=1e9)
    parser.add_argument("--chunk", default="8388608", help="elements, several with commas")
    parser.add_argument("--buffer", default="4194304", help="elements of a ring buffer, several with commas")
    parser.add_argument("--threads", default=str(physical_cores()), help="host workers, several with commas")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    args = parser.parse_args()
    count, device = int(args.params), torch.device(args.device)
    fused = torch_fused(count)
    lists = ([int(float(x)) for x in text.split(",")] for text in (args.threads, args.chunk, args.buffer))
    table: list[dict[str, object]] = []
    for number, chunk, buffer in itertools.product(*lists):
        engine = Engine(count, number, chunk, buffer, device)
        rows: dict[str, Callable[[], None]] = {"torch fused": fused}
        for where in ("host", "device", "both"):
            rows[where] = partial(engine.update, where)
        seconds: dict[str, list[float]] = {name: [] for name in rows}
        for round_ in range(args.repeat + 1):
            for name, row in rows.items():
                start = time.perf_counter()
                row()
                if round_ > 0:  # the first round touches memory and compiles
                    seconds[name].append(time.perf_counter() - start)
        engine.runtime.close()
        rates = {name: count / statistics.median(times) / 1e9 for name, times in seconds.items()}
        table.append({"threads": number, "chunk": chunk, "buffer": buffer, **rates})
        print(json.dumps(table[-1]), flush=True)
    print(tabulate(table, headers="keys", floatfmt=".2f"))


if __name__ == "__main__":
    main()
