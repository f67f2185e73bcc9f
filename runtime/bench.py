"""Rates of the update kernels over thread counts and chunk sizes, beside torch's fused CPU AdamW.

    python -m oomc.runtime.bench [--params N] [--threads N,N] [--chunk N,N] [--state fp32,bf16,8bit] [--repeat N]

All rows are interleaved, and each is the median of `repeat` rounds, in 10^9 parameters a second. On the host: the split
master with bf16 gradients and fp32 with fp32 gradients, and torch's kernel on fp32 with all of torch's threads. Where
there is a GPU also the same kernels there, with all that they touch on the device. `benchmarks/update_rate.py` measures
what a training step does with them: gradients on their way, and both together.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from tabulate import tabulate

from oomc.runtime.adamw import AdamW
from oomc.runtime.low_bit import LowBitAdamW
from oomc.runtime.optim import UpdateRule, compile_rule
from oomc.runtime.pool import Countdown, Pool, physical_cores

RULES: dict[str, UpdateRule] = {"fp32": AdamW(), "bf16": LowBitAdamW("bf16"), "8bit": LowBitAdamW("8bit")}
HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}

Rows = dict[tuple[str, int, int], Callable[[], None]]
"""One round of each row; a row is its name, threads and chunk (0 where there is none)."""


class Parameter:
    """A parameter of `count` elements with its gradient and state under one rule; `split` means bf16 with `lo`."""

    def __init__(self, rule: UpdateRule, count: int, split: bool, device: str = "cpu") -> None:
        self.rule, self.count = rule, count
        self.gradient = torch.randn(count, device=device).to(torch.bfloat16 if split else torch.float32)
        self.weights = self.gradient.view(torch.int16).clone() if split else self.gradient.clone()
        self.lo = torch.zeros(count, dtype=torch.int16, device=device) if split else None
        self.state = tuple(torch.zeros(a.elements(count), dtype=a.dtype, device=device) for a in rule.arrays)
        self.constants = rule.constants(rule.hyper(HYPER), 2, 0)
        self.nonfinite = torch.zeros(1, dtype=torch.int32, device=device)

    def on_pool(self, pool: Pool, chunk: int) -> None:
        """Update it on the host, in chunks."""
        words = torch.int16 if self.lo is not None else torch.int32
        weights, gradient = self.weights.numpy(), self.gradient.view(words).numpy()
        lo = None if self.lo is None else self.lo.numpy()
        state = [(t.view(torch.int16) if t.dtype == torch.bfloat16 else t).numpy() for t in self.state]

        def task(start: int) -> None:
            stop = min(start + chunk, self.count)
            parts = tuple(part[a.span(start, stop)] for a, part in zip(self.rule.arrays, state))
            low = None if lo is None else lo[start:stop]
            self.rule.update(weights[start:stop], low, parts, gradient[start:stop], 1.0, self.constants, start)

        starts = range(0, self.count, chunk)
        countdown = Countdown(len(starts))
        for start in starts:
            pool.submit(partial(task, start), countdown)
        countdown.wait()

    def on_device(self) -> None:
        """Update it on its device, whole."""
        self.rule.update_cuda(
            self.weights, self.lo, self.state, self.gradient, 1.0, self.constants, 0, self.nonfinite
        )  # fmt: skip
        torch.cuda.synchronize()


def torch_rows(count: int) -> Rows:
    """torch's fused kernel with all of torch's threads."""
    p, g, m, v = torch.randn(count), torch.randn(count), torch.zeros(count), torch.zeros(count)
    step = torch.tensor(1.0)

    def update() -> None:
        torch._fused_adamw_(
            [p], [g], [m], [v], [], [step],
            lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    return {("torch fused fp32", torch.get_num_threads(), 0): update}


def _kinds(count: int, states: Sequence[str], device: str) -> dict[str, Parameter]:
    return {
        f"{'split bf16' if split else 'fp32'}, {state} state": Parameter(RULES[state], count, split, device)
        for state in states
        for split in (True, False)
    }


def host_rows(count: int, states: Sequence[str], pools: Sequence[tuple[int, Pool]], chunks: Sequence[int]) -> Rows:
    """The numba kernels; rows of one kind share their memory."""
    return {
        (name, threads, chunk): partial(parameter.on_pool, pool, chunk)
        for name, parameter in _kinds(count, states, "cpu").items()
        for threads, pool in pools
        for chunk in chunks
    }


def device_rows(count: int, states: Sequence[str]) -> Rows:
    """The Triton kernels on memory of the device."""
    return {(f"CUDA, {name}", 0, 0): p.on_device for name, p in _kinds(count, states, "cuda").items()}


def median_seconds(rows: Rows, repeat: int) -> list[float]:
    """Median time of each row over `repeat` interleaved rounds, after one that touches the memory and compiles."""
    seconds: list[list[float]] = [[] for _ in rows]
    for round_ in range(repeat + 1):
        for row, times in zip(rows.values(), seconds):
            start = time.perf_counter()
            row()
            if round_ > 0:
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    cores = physical_cores()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=256 << 20)
    parser.add_argument("--chunk", default=f"{1 << 20},{4 << 20},{16 << 20}", help="elements a task, multiples of 128")
    parser.add_argument("--threads", default=",".join(str(n) for n in sorted({max(cores // 2, 1), cores})))
    parser.add_argument("--state", default="fp32", help="of fp32, bf16, 8bit; several with commas")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args(arguments)
    states = options.state.split(",")
    for state in states:
        compile_rule(RULES[state])
    pools = [(n, Pool(n)) for n in map(int, options.threads.split(","))]
    rows = torch_rows(options.params)
    rows |= host_rows(options.params, states, pools, [int(n) for n in options.chunk.split(",")])
    if torch.cuda.is_available():
        rows |= device_rows(options.params, states)
    rates = [options.params / seconds / 1e9 for seconds in median_seconds(rows, options.repeat)]
    for _, pool in pools:
        pool.close()
    beside = rates[0]
    table = [(*(x or "" for x in row), rate, rate / beside) for row, rate in zip(rows, rates)]
    print(tabulate(table, ("kernel", "threads", "chunk", "G parameters/s", "of torch's"), floatfmt=".2f"))


if __name__ == "__main__":
    main()
