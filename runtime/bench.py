"""Rates of the host optimizer beside torch's fused CPU AdamW, and of the kernels' order of work.

    python -m oomc.runtime.bench [--params N] [--chunk N,N] [--threads N,N] [--repeat N]

Each row is the median of `repeat` interleaved rounds, in 10^9 parameters a second: bf16 split master with bf16
gradients, fp32 with fp32 gradients, and torch's kernel on fp32 with all of torch's threads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from oomc.runtime.adamw import AdamW
from oomc.runtime.optim import Array, compile_rule
from oomc.runtime.pool import Countdown, Pool, physical_cores


def _random(count: int, dtype: torch.dtype, bits: torch.dtype) -> Array:
    array: Array = torch.randn(count).to(dtype).view(bits).numpy()
    return array


def _torch_fused(count: int) -> Callable[[], None]:
    p, g, m, v = torch.randn(count), torch.randn(count), torch.zeros(count), torch.zeros(count)
    step = torch.tensor(1.0)
    return lambda: torch._fused_adamw_(
        [p], [g], [m], [v], [], [step],
        lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def _ours(count: int, chunk: int, pool: Pool, split: bool) -> Callable[[], None]:
    rule = AdamW()
    dtype, bits = (torch.bfloat16, torch.int16) if split else (torch.float32, torch.int32)
    gradient = _random(count, dtype, bits)
    weights = _random(count, dtype, bits if split else torch.float32)
    lo = np.zeros(count, np.int16)
    m, v = np.zeros(count, np.float32), np.zeros(count, np.float32)
    hyper = rule.hyper({"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1})
    constants = rule.constants(hyper, 2, 0)

    def task(start: int) -> None:
        span = slice(start, start + chunk)
        rule.update(
            weights[span], lo[span] if split else None, (m[span], v[span]), gradient[span], 1.0, constants, start
        )

    def update() -> None:
        starts = range(0, count, chunk)
        countdown = Countdown(len(starts))
        for start in starts:
            pool.submit(partial(task, start), countdown)
        countdown.wait()

    return update


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=256 << 20)
    parser.add_argument("--chunk", default=str(4 << 20), help="elements a task, several with commas")
    parser.add_argument("--threads", default=str(physical_cores()), help="worker threads, several with commas")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args(arguments)
    compile_rule(AdamW())
    pools = {n: Pool(n) for n in map(int, options.threads.split(","))}
    rows: dict[str, Callable[[], None]] = {"torch fused fp32": _torch_fused(options.params)}
    for threads, pool in pools.items():
        for chunk in map(int, options.chunk.split(",")):
            for split in (True, False):
                kind = "split bf16" if split else "fp32"
                rows[f"{kind}, {threads} threads, chunk {chunk}"] = _ours(options.params, chunk, pool, split)
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for round_ in range(options.repeat + 1):
        for name, row in rows.items():
            start = time.perf_counter()
            row()
            if round_ > 0:  # the first round touches the memory
                seconds[name].append(time.perf_counter() - start)
    for pool in pools.values():
        pool.close()
    for name, values in seconds.items():
        print(f"{name:45} {options.params / statistics.median(values) / 1e9:7.2f} G parameters/s")


if __name__ == "__main__":
    main()
