"""Measure the machine that oomc runs on, once, in less than a minute; `oomc.machine.current` finds the result.

Copies are pumped by a thread for each direction, alone, together, and while the optimizer runs; updates go through the
runtime's own queue, ring and kernels; products and attention are the operators that the worksets use, and their FLOPs
those that oomc.flops counts. On a GPU updates and launches are measured beside each other, as a step has them: the GPU
computes while the cores update, and Python hands its lock from the thread that issues to those that update and back. On
the CPU stand-in the same is measured on the CPU, one thing at a time.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch._ops import OpOverload

from oomc import ops
from oomc.flops import calls
from oomc.limits import device_memory, host_memory
from oomc.machine import Machine, Table, cache_path, device_name
from oomc.plan import format_bytes
from oomc.runtime.adamw import AdamW
from oomc.runtime.executor import Runtime
from oomc.runtime.layout import ParamSpec, SlabLayout
from oomc.runtime.memory import HostMemory
from oomc.runtime.pool import physical_cores
from oomc.runtime.slabs import HostSlab
from oomc.runtime.updates import Where
from oomc.worksets import dtype_name

SECONDS = 45.0
"""For all measurements together; compiling the optimizer's kernels and pinning memory come on top."""
HOST_SECONDS = 20.0
"""Likewise for those of the host alone."""
TURNS = 3
"""Times that updates are measured by each of WHERES."""
WHERES: tuple[Where, ...] = ("host", "device", "both")
HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
Figures = dict[str, Any]
"""Some of Machine's fields."""


def calibrate(device: torch.device | str, *, force: bool = False, seconds: float = SECONDS) -> tuple[Machine, Path]:
    """The machine's measured rates and their file; measured anew if there is none, or with `force`."""
    device = torch.device(device)
    path = cache_path(device)
    if path.exists() and not force:
        return Machine.load(path), path
    machine = measure(device, seconds)
    return machine, machine.save(path)


def calibrate_host(device: torch.device | str, *, seconds: float = HOST_SECONDS) -> tuple[Machine, Path]:
    """As `calibrate`, with the link, host memory and updates measured anew: what other work on the machine moves."""
    device = torch.device(device)
    path = cache_path(device)
    if not path.exists():
        return calibrate(device)
    bench = Bench(device, seconds)
    machine = replace(Machine.load(path), **measure_link(bench), **measure_updates(bench))
    return machine, machine.save(path)


def measure(device: torch.device, seconds: float = SECONDS) -> Machine:
    """Measure everything in about `seconds`."""
    bench = Bench(device, seconds)
    known: Figures = {
        "name": device_name(device),
        "device_memory": device_memory(device),
        "host_memory": host_memory(),
        "cores": physical_cores(),
        "copy_traffic": 1.0 if bench.cuda else 2.0,
        "source": f"measured with torch {torch.__version__}",
    }
    if bench.cuda:
        known["capability"] = torch.cuda.get_device_capability(device)
    for measurement in MEASUREMENTS:
        known |= measurement(bench)
    known.setdefault("launch_busy", known["launch"])  # on the stand-in what updates is what computes
    return Machine(**known)


def describe(machine: Machine) -> str:
    """The rates as a table."""
    rows = [
        ("host to device", f"{machine.h2d / 1e9:.1f} GB/s", f"{machine.h2d_both / 1e9:.1f} with both directions busy"),
        ("device to host", f"{machine.d2h / 1e9:.1f} GB/s", f"{machine.d2h_both / 1e9:.1f} with both directions busy"),
        ("host memory", f"{machine.host_bandwidth / 1e9:.1f} GB/s", "shared by copies and cores"),
        (
            "device memory",
            f"{machine.bandwidth / 1e9:.0f} GB/s",
            f"{machine.launch * 1e6:.1f} us a kernel, {machine.launch_busy * 1e6:.1f} while cores update",
        ),
        ("update on the host", f"{machine.update_rate / 1e9:.2f} G/s", "parameters of AdamW, alone"),
        ("update on the device", f"{machine.streamed_rate / 1e9:.2f} G/s", "with state streamed through"),
        ("update on both", f"{machine.both_rate / 1e9:.2f} G/s", ""),
    ]
    tables = [(f"product, {dtype}", table, "FLOPs") for dtype, table in machine.gemm]
    tables += [(f"grouped product, {dtype}", table, "rows a group") for dtype, table in machine.grouped]
    tables += [("attention", machine.attention_forward, "positions")]
    tables += [("attention's backward", machine.attention_backward, "positions")]
    for name, table, unit in tables:
        cells = ", ".join(f"{r / 1e12:.3g} at {s:.3g}" for s, r in zip(table.sizes, table.rates, strict=True))
        rows.append((name, f"{max(table.rates) / 1e12:.3g} TFLOP/s", f"{cells} {unit}"))
    title = (
        f"{machine.name}, {format_bytes(machine.device_memory)}; host of {machine.cores} cores, "
        f"{format_bytes(machine.host_memory)}; {machine.source}"
    )
    return f"{title}\n{tabulate(rows, tablefmt='plain', colalign=('left', 'right', 'left'))}"


@dataclass
class Bench:
    """Times things on a device, in a share of the time for everything.

    Attributes:
        seconds: for everything; one timing gets 1/SHARES of it at most, and at least two rounds.
    """

    device: torch.device
    seconds: float
    cuda: bool = field(init=False)

    SHARES = 90

    def __post_init__(self) -> None:
        self.cuda = self.device.type == "cuda"

    @property
    def share(self) -> float:
        """Seconds for one timing."""
        return self.seconds / self.SHARES

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def time(self, function: Callable[[], Any], inner: int = 1) -> float:
        """Seconds of a call, of `inner` issued in a row: the median of the faster half of up to 30 rounds.

        The slower half is left out since other work on the machine only ever adds.
        """
        times = sorted(self.rounds(function, inner))
        return statistics.median(times[: (len(times) + 2) // 2])

    def rounds(self, function: Callable[[], Any], inner: int = 1, least: int = 1) -> list[float]:
        """Seconds of a call in each of `least` to 30 rounds, as far as the time goes; the one that warms up is left
        out."""
        times: list[float] = []
        deadline = time.perf_counter() + self.share
        while len(times) <= least or (len(times) < 30 and time.perf_counter() < deadline):
            self.synchronize()
            start = time.perf_counter()
            for _ in range(inner):
                function()
            self.synchronize()
            times.append((time.perf_counter() - start) / inner)
        return times[1:]

    def rate(self, op: OpOverload, args: Sequence[Any]) -> tuple[float, float]:
        """FLOPs of a call of an operator, and its FLOP/s."""
        with torch.no_grad():
            out = op(*args)
            flops = float(sum(call.flops for call in calls(op, args, {}, out)))
            return flops, flops / self.time(lambda: op(*args), 4 if self.cuda else 1)


class Pump:
    """Copies in one direction, again and again, on a thread (and stream) of its own; counts them."""

    def __init__(self, bench: Bench, to_device: bool) -> None:
        nbytes = (128 if bench.cuda else 64) << 20
        self._memory = HostMemory(nbytes, pin=bench.cuda)
        host = self._memory.tensor(torch.uint8, (nbytes,))
        host.zero_()
        there = torch.zeros(nbytes, dtype=torch.uint8, device=bench.device)
        self._target, self._source = (there, host) if to_device else (host, there)
        self._bench, self._nbytes = bench, nbytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.times: list[float] = []

    def _work(self) -> None:
        stream = torch.cuda.Stream(self._bench.device) if self._bench.cuda else None
        while not self._stop.is_set():
            start = time.perf_counter()
            if stream is None:
                self._target.copy_(self._source)
            else:
                with torch.cuda.stream(stream):
                    self._target.copy_(self._source, non_blocking=True)
                stream.synchronize()
            self.times.append(time.perf_counter() - start)

    @property
    def rate(self) -> float:
        """Bytes/s of a copy, in the median over all but the first."""
        return self._nbytes / statistics.median(self.times[1:] or self.times)

    def __enter__(self) -> Pump:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        del self._target, self._source
        self._memory.close()


@contextmanager
def repeating(work: Callable[[], None]) -> Iterator[None]:
    """`work` again and again, on a thread of its own."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.is_set():
            work()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def computing(bench: Bench) -> AbstractContextManager[None]:
    """A GPU that computes, and a thread that issues it; nothing on the stand-in, whose cores could not update then."""
    if not bench.cuda:
        return nullcontext()
    matrix = torch.zeros(2048, 2048, dtype=torch.bfloat16, device=bench.device)
    out, small = torch.empty_like(matrix), torch.zeros(1, device=bench.device)

    def issue() -> None:
        for _ in range(50):
            small.add_(1.0)  # first: it gives the thread a context, for want of which cuBLAS would warn
            torch.mm(matrix, matrix, out=out)
        torch.cuda.current_stream(bench.device).synchronize()

    return repeating(issue)


@contextmanager
def pumping(bench: Bench, *to_device: bool) -> Iterator[list[Pump]]:
    """Pumps in these directions at once."""
    with ExitStack() as stack:
        yield [stack.enter_context(Pump(bench, direction)) for direction in to_device]


def measure_link(bench: Bench) -> Figures:
    """Copies in each direction alone and together, and what a small one takes."""
    found: list[float] = []
    for directions in ((True,), (False,), (True, False)):
        with pumping(bench, *directions) as pumps:
            time.sleep(2 * bench.share)
        found += [pump.rate for pump in pumps]
    h2d, d2h, h2d_both, d2h_both = found
    small = HostMemory(4096, pin=bench.cuda)
    source, target = small.tensor(torch.uint8, (4096,)), torch.empty(4096, dtype=torch.uint8, device=bench.device)
    latency = bench.time(lambda: target.copy_(source, non_blocking=True), 200)
    small.close()
    return {
        "h2d": h2d, "d2h": d2h, "h2d_both": min(h2d, h2d_both), "d2h_both": min(d2h, d2h_both), "copy_latency": latency,
    }  # fmt: skip


def measure_updates(bench: Bench) -> Figures:
    """AdamW's update on the host alone, beside copies both ways, on the device, and on both; launches beside the last.

    Medians of all rounds: how fast an update is depends on how cores and copies happen to meet, and a step gets no
    choice. They take turns, since what else the machine does comes and goes within seconds. What the cores and the
    copies move together is the bandwidth of host memory that they share. What a kernel that only streams reaches is no
    measure of it: on an H200's host 250 to 320 GB/s against about 150.
    """
    count, pieces, rounds = (64 << 20, 12, 4) if bench.cuda else (8 << 20, 6, 1)
    touched, grad, traffic = 26.0, 2.0, 1.0 if bench.cuda else 2.0
    times: dict[str, list[float]] = defaultdict(list)
    copies: list[float] = []
    figures: Figures = {}
    with updating(bench, count, pieces) as update:
        for _ in range(TURNS):
            with computing(bench):
                for where in WHERES:
                    times[where] += bench.rounds(partial(update, where), least=rounds)
                with pumping(bench, True, False) as pumps:
                    times["busy"] += bench.rounds(partial(update, "host"), least=rounds)
                    copies.append(sum(pump.rate for pump in pumps))
        if bench.cuda:
            figures["launch_busy"] = launching(bench, partial(update, "both"))
    rates = {what: count * pieces / statistics.median(found) for what, found in times.items()}
    own = touched + grad * traffic
    together = (
        rates["busy"] * own + statistics.median(copies) * traffic, rates["host"] * own, rates["device"] * 24.0,
    )  # fmt: skip
    return figures | {
        "update_rate": rates["host"], "streamed_rate": rates["device"],
        "both_rate": max(rates[where] for where in WHERES), "update_bytes": touched, "host_bandwidth": max(together),
    }  # fmt: skip


def launching(bench: Bench, update: Callable[[], None]) -> float:
    """Seconds that a small kernel takes on a GPU, issued while host and device update."""
    one = torch.zeros(1, device=bench.device)

    def issue() -> float:
        start = time.perf_counter()
        for _ in range(500):
            one.add_(1.0)
        torch.cuda.current_stream(bench.device).synchronize()  # the others' streams go on
        return (time.perf_counter() - start) / 500

    with repeating(update):
        return statistics.median([issue() for _ in range(10)][1:])


@contextmanager
def updating(bench: Bench, count: int, pieces: int) -> Iterator[Callable[[Where], None]]:
    """A function that makes `pieces` updates of slabs of `count` bf16 parameters, from gradients on the device.

    A third as many slabs take them in turn, so that little of the time is that of the first copies and last kernels.
    """
    slabs = []
    for index in range(max(1, pieces // 3)):
        layout = SlabLayout.build(f"slab{index}", [ParamSpec("w", (count,), torch.bfloat16, True)])
        slabs.append(HostSlab(layout, pin=bench.cuda, pin_state=bench.cuda))
        slabs[-1].param("w").zero_()
    rule = AdamW()
    hyper = rule.hyper(HYPER)
    runtime = Runtime(bench.device, slabs, [], rule, {"w": 0}, where="both")
    gradient = torch.full((count,), 1e-3, dtype=torch.bfloat16, device=bench.device)

    def update(where: Where) -> None:
        runtime.set_where(where)
        runtime.begin_step([hyper])
        turns = itertools.islice(itertools.cycle(slabs), pieces)
        tickets = [runtime.offload(slab.name, ["w"], [gradient], "update") for slab in turns]
        for ticket in tickets:
            runtime.wait_gradients(ticket)
        runtime.synchronize()

    try:
        yield update
    finally:
        runtime.close()


def measure_products(bench: Bench) -> Figures:
    """Dense products over the FLOPs of one, by dtype."""
    size, rows = (4096, (256, 2048, 16384)) if bench.cuda else (512, (8, 128, 1024))
    tables = []
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.randn(size, size, device=bench.device).to(dtype)
        found = [bench.rate(torch.ops.aten.mm.default, (weight.new_ones(n, size), weight)) for n in rows]
        tables.append((dtype_name(dtype), _table(found)))
    return {"gemm": tuple(tables)}


def measure_grouped(bench: Bench) -> Figures:
    """Grouped products over the rows of a group: of bf16 on CUDA, of fp32 on the CPU."""
    groups, size, rows = (32, 2048, (64, 512, 4096)) if bench.cuda else (8, 256, (8, 64, 512))
    dtype = torch.bfloat16 if bench.cuda else torch.float32
    weight = torch.randn(groups, size, size, device=bench.device).to(dtype)
    found = []
    for n in rows:
        offsets = torch.arange(1, groups + 1, device=bench.device, dtype=torch.int32) * n
        _, rate = bench.rate(ops.grouped_mm, (weight.new_ones(groups * n, size), weight, offsets))
        found.append((float(n), rate))
    return {"grouped": ((dtype_name(dtype), _table(found)),)}


def measure_attention(bench: Bench) -> Figures:
    """Causal oomc::attention and its backward over lengths, with 4 query heads to a key's."""
    heads, size, lengths = (16, 128, (1024, 4096, 16384)) if bench.cuda else (4, 64, (128, 512))
    dtype = torch.bfloat16 if bench.cuda else torch.float32
    forward, backward = [], []
    for length in lengths:
        q = torch.randn(1, heads, length, size, device=bench.device).to(dtype)
        k = torch.randn(1, heads // 4, length, size, device=bench.device).to(dtype)
        options = (None, None, size**-0.5, True, None, 0.0)
        forward.append((float(length), bench.rate(ops.attention, (q, k, k, *options))[1]))
        out, lse = ops.attention(q, k, k, *options)
        args = (torch.ones_like(out), q, k, k, out, lse, *options)
        backward.append((float(length), bench.rate(ops.attention_backward, args)[1]))
    return {"attention_forward": _table(forward), "attention_backward": _table(backward)}


def measure_device_memory(bench: Bench) -> Figures:
    """A pointwise operator on much memory, and on next to none."""
    large = torch.zeros((256 if bench.cuda else 128) << 18, device=bench.device)
    out, one = torch.empty_like(large), torch.zeros(1, device=bench.device)
    seconds = bench.time(lambda: torch.add(large, 1.0, out=out))
    return {"bandwidth": 2 * large.nbytes / seconds, "launch": bench.time(lambda: one.add_(1.0), 500)}


def _table(found: Sequence[tuple[float, float]]) -> Table:
    return Table(tuple(size for size, _ in found), tuple(rate for _, rate in found))


MEASUREMENTS: tuple[Callable[[Bench], Figures], ...] = (
    measure_link,
    measure_updates,
    measure_products,
    measure_grouped,
    measure_attention,
    measure_device_memory,
)
"""Each fills some of Machine's fields. One of collectives, where torch.distributed has several ranks, would stand
here."""
