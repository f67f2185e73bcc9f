"""Rates of one machine: what the cost of a workset and the timeline of a step are computed from.

`current(device)` is what `oomc calibrate` has measured here, or the analytic default nearest to the device.

Sources of the defaults. H200: measured (16 cores, PCIe 5 x16, torch 2.11: copies, optimizer rates, GEMM, grouped GEMM,
attention with cuDNN). The others are NVIDIA's data sheets, derated by what kernels of their kind are known to reach:
dense bf16 without sparsity and with fp32 accumulation at 80% (H100 989, A100 312, RTX 4090 165, RTX 5090 210 TFLOP/s),
fp32 without TF32 at 75%, device memory at 80% (H200 4.8, H100 3.35, A100 80GB 2.04, 4090 1.01, 5090 1.79 TB/s), PCIe
at 85% (4.0: 31.5, 5.0: 63 GB/s each way). Attention is cuDNN's on Hopper; on the others it is scaled from
FlashAttention-2's figures for the A100 (Dao 2023, https://arxiv.org/abs/2307.08691, causal, head size 128). Consumer
GPUs stand in a desktop with two channels of DDR5, the others in a server as the H200's.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from oomc.limits import device_memory, host_memory
from oomc.runtime.pool import physical_cores

FORMAT = 2
"""Of saved machines; a file of another format is measured anew."""


@dataclass(frozen=True)
class Table:
    """A rate over sizes: linear in the logarithm of the size between the points, constant beyond them.

    Attributes:
        sizes: ascending, positive.
        rates: a second, one for each size.
    """

    sizes: tuple[float, ...]
    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.sizes, self.sizes[1:]))
        if not self.sizes or len(self.sizes) != len(self.rates) or not ascending or min(self.sizes) <= 0:
            raise ValueError(f"a table needs ascending positive sizes with a rate each, not {self.sizes}, {self.rates}")
        if min(self.rates) <= 0:
            raise ValueError(f"rates are positive, not {self.rates}")

    def at(self, size: float) -> float:
        """The rate at a size."""
        if size <= self.sizes[0]:
            return self.rates[0]
        for index in range(1, len(self.sizes)):
            if size <= self.sizes[index]:
                low, high = self.sizes[index - 1], self.sizes[index]
                share = math.log(size / low) / math.log(high / low)
                return self.rates[index - 1] + share * (self.rates[index] - self.rates[index - 1])
        return self.rates[-1]

    def scaled(self, factor: float) -> Table:
        """The table with all rates times `factor`."""
        return Table(self.sizes, tuple(factor * rate for rate in self.rates))


MEMORY_BOUND = 0.8
"""Where host and device together update less than this share of what they do apart, they wait for memory."""
Tables = tuple[tuple[str, Table], ...]
"""Tables by dtype (`bf16`, `f32`, ...: see worksets.dtype_name)."""


@dataclass(frozen=True)
class Machine:
    """The rates of one machine. Rates are a second: bytes, FLOPs or parameters.

    Attributes:
        name: of the device.
        h2d, d2h: bytes/s of copies between pinned host memory and the device, one direction alone.
        h2d_both, d2h_both: the same with both directions busy.
        copy_latency: seconds that a copy takes beside its bytes.
        copy_traffic: host memory bytes for each byte copied (2 where the device's memory is the host's own).
        host_bandwidth: bytes/s of host memory, shared by copies and cores.
        update_rate: parameters/s of AdamW on the host alone, from gradients on the device. On a GPU all rates of
            updates are those beside compute.
        update_bytes: host memory bytes for each of these parameters (gradient copies not counted).
        streamed_rate: parameters/s updated on the device with state streamed through, alone.
        both_rate: parameters/s of host and device together.
        gemm: FLOP/s of dense products over the FLOPs of one call, by dtype.
        grouped: FLOP/s of grouped products over the rows of one group, by dtype.
        attention_forward, attention_backward: FLOP/s of oomc::attention over the length of the sequence; FLOPs are
            those of visible pairs only, 2 products forward and 5 backward.
        bandwidth: bytes/s of device memory, as pointwise kernels reach it.
        launch: seconds that each kernel takes beside its work.
        launch_busy: the same while the host's cores update, which the thread that issues waits for.
        device_memory, host_memory: bytes.
        cores: physical cores of the host.
        capability: CUDA's compute capability, which decides about kernels; of no meaning for the stand-in.
        source: where the rates are from, for reports.
    """

    name: str
    h2d: float
    d2h: float
    h2d_both: float
    d2h_both: float
    host_bandwidth: float
    update_rate: float
    streamed_rate: float
    both_rate: float
    gemm: Tables
    grouped: Tables
    attention_forward: Table
    attention_backward: Table
    bandwidth: float
    device_memory: int
    host_memory: int
    cores: int
    copy_latency: float = 5e-6
    copy_traffic: float = 1.0
    update_bytes: float = 26.0
    launch: float = 7e-6
    launch_busy: float = 20e-6
    capability: tuple[int, int] = (9, 0)
    source: str = "measured"

    @property
    def on_host(self) -> bool:
        """Whether the device is the host itself: its stand-in."""
        return self.copy_traffic > 1.0

    @property
    def mixed_bandwidth(self) -> float:
        """Bytes/s of host memory while both the cores and the device update: what such updates alone reach, if it is
        memory that bounds them and not the link.

        Cores and large copies reach more together, state in small pieces less. Beside a fetch the two moved 0.96 to
        1.01 of what they move without one (docs/RESULTS.md). The device moves 24 bytes for each parameter.
        """
        apart = self.update_rate + min(self.streamed_rate, self.h2d_both / 12, self.d2h_both / 12)
        if self.both_rate > MEMORY_BOUND * apart:
            return self.host_bandwidth
        moved = (self.update_bytes + 2.0 * self.copy_traffic, 24.0 * self.copy_traffic)
        return min(self.host_bandwidth, self.both_rate * sum(moved) / 2)

    def gemm_rate(self, dtype: str, flops: float) -> float:
        """FLOP/s of a dense product of `flops`; a dtype without a table counts as the widest that has one."""
        return _of(self.gemm, dtype).at(flops)

    def grouped_rate(self, dtype: str, rows: float, flops: float) -> float:
        """FLOP/s of a grouped product with `rows` rows a group, each of `flops`.

        A dtype without a table runs as one dense product a group.
        """
        table = dict(self.grouped).get(dtype)
        return self.gemm_rate(dtype, flops) if table is None else table.at(rows)

    def save(self, path: str | Path) -> Path:
        """Write it as JSON, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, "torch": torch.__version__, "machine": asdict(self)}, indent=1)
        new = path.with_name(f"{path.name}.{os.getpid()}.new")
        new.write_text(text + "\n", encoding="utf-8")
        new.replace(path)
        return path

    @staticmethod
    def load(path: str | Path) -> Machine:
        """Read one that was saved.

        Raises:
            ValueError: the file holds no machine, or one of another format.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']}, not {FORMAT}")
            values = data["machine"]
            tables = {
                "gemm": _tables(values["gemm"]),
                "grouped": _tables(values["grouped"]),
                "attention_forward": _table(values["attention_forward"]),
                "attention_backward": _table(values["attention_backward"]),
                "capability": tuple(values.get("capability", (9, 0))),
            }
            known = {field.name for field in fields(Machine)}
            return Machine(**{name: value for name, value in values.items() if name in known} | tables)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no machine that can be read ({error}); run `oomc calibrate`") from error


def _of(tables: Tables, dtype: str) -> Table:
    known = dict(tables)
    return known.get(dtype) or known.get("f32") or tables[0][1]


def _table(value: dict[str, Any]) -> Table:
    return Table(tuple(value["sizes"]), tuple(value["rates"]))


def _tables(value: list[Any]) -> Tables:
    return tuple((dtype, _table(table)) for dtype, table in value)


# --- analytic defaults ------------------------------------------------------------------------------------------------

_GIB = 1 << 30
_FLOPS = (1e9, 1e10, 1e11, 1e12)
_LENGTHS = (1024.0, 4096.0, 32768.0, 131072.0)
_H200 = Machine(
    name="H200",
    h2d=55e9, d2h=55e9, h2d_both=47e9, d2h_both=47e9,
    host_bandwidth=155e9, update_rate=4.1e9, streamed_rate=4.0e9, both_rate=5.4e9,
    gemm=(
        ("bf16", Table(_FLOPS, (100e12, 400e12, 680e12, 800e12))), ("f32", Table(_FLOPS, (15e12, 35e12, 48e12, 50e12))),
    ),
    grouped=(("bf16", Table((64, 256, 1024, 4096, 16384), (300e12, 594e12, 716e12, 705e12, 618e12))),),
    attention_forward=Table(_LENGTHS, (280e12, 448e12, 651e12, 551e12)),
    attention_backward=Table(_LENGTHS, (200e12, 352e12, 567e12, 537e12)),
    bandwidth=3.84e12, device_memory=141 * 10**9, host_memory=128 * _GIB, cores=16,
    source="analytic, from measurements on an H200",
)  # fmt: skip


def _server(name: str, capability: tuple[int, int], peak: float, fp32: float, attention: tuple[float, float],
            bandwidth: float, memory: int, link: tuple[float, float] = (55e9, 47e9)) -> Machine:  # fmt: skip
    """A GPU in a host like the H200's: dense and fp32 FLOP/s reached, attention relative to the H200's, link rates."""
    alone, both = link
    factor = peak / 800e12
    return replace(
        _H200, name=name, h2d=alone, d2h=alone, h2d_both=both, d2h_both=both,
        streamed_rate=min(4.0e9, both / 12), both_rate=min(5.4e9, 4.1e9 + both / 24),
        gemm=(("bf16", _H200.gemm[0][1].scaled(factor)), ("f32", _H200.gemm[1][1].scaled(fp32 / 50e12))),
        grouped=(("bf16", _H200.grouped[0][1].scaled(factor)),),
        attention_forward=_H200.attention_forward.scaled(attention[0]),
        attention_backward=_H200.attention_backward.scaled(attention[1]),
        bandwidth=bandwidth, device_memory=memory, capability=capability, source="analytic, from data sheets",
    )  # fmt: skip


def _desktop(machine: Machine, host_bandwidth: float = 70e9) -> Machine:
    """The same GPU in a desktop: its optimizer is bound by two channels of memory."""
    rate = 0.75 * host_bandwidth / 26
    return replace(
        machine, host_bandwidth=host_bandwidth, update_rate=rate, host_memory=128 * _GIB,
        streamed_rate=min(machine.streamed_rate, 0.8 * host_bandwidth / 24), both_rate=0.85 * host_bandwidth / 26,
    )  # fmt: skip


_CPU = replace(
    _H200, name="cpu", h2d=10e9, d2h=10e9, h2d_both=7e9, d2h_both=7e9, copy_traffic=2.0, copy_latency=1e-5,
    host_bandwidth=40e9, update_rate=1.2e9, streamed_rate=0.25e9, both_rate=1.2e9,
    gemm=(
        ("f32", Table((1e6, 1e8, 1e10), (20e9, 200e9, 400e9))), ("bf16", Table((1e6, 1e8, 1e10), (10e9, 100e9, 200e9))),
    ),
    grouped=(),
    attention_forward=Table((128, 1024), (60e9, 120e9)), attention_backward=Table((128, 1024), (60e9, 120e9)),
    bandwidth=20e9, launch=5e-6, launch_busy=5e-6, device_memory=32 * _GIB, host_memory=32 * _GIB, cores=8,
    source="analytic, a CPU of 8 cores",
)  # fmt: skip

_DEFAULTS: dict[str, Machine] = {
    "h200": _H200,
    "h100": _server("H100", (9, 0), 790e12, 50e12, (1.0, 1.0), 2.7e12, 80 * 10**9),
    "a100": _server("A100", (8, 0), 250e12, 15e12, (0.32, 0.31), 1.63e12, 80 * 10**9, (26e9, 22e9)),
    "4090": _desktop(_server("RTX 4090", (8, 9), 145e12, 55e12, (0.22, 0.2), 0.81e12, 24 * _GIB, (26e9, 22e9))),
    "5090": _desktop(_server("RTX 5090", (12, 0), 180e12, 75e12, (0.27, 0.24), 1.43e12, 32 * _GIB)),
    "cpu": _CPU,
}
DEFAULTS = tuple(_DEFAULTS)
"""Names of the analytic defaults."""


def default(name: str) -> Machine:
    """The analytic default of a name of DEFAULTS (`h200`, `RTX 4090`, ...), whatever its case.

    Raises:
        ValueError: there is none; the message lists those that there are.
    """
    text = name.lower()
    for known, machine in _DEFAULTS.items():
        if text == known or re.search(rf"(?<![a-z0-9]){known}(?![0-9])", text):
            return machine
    raise ValueError(f"no machine is known as {name!r}; there are {', '.join(DEFAULTS)}. Measure one: oomc calibrate")


# --- this machine -----------------------------------------------------------------------------------------------------


def device_name(device: torch.device) -> str:
    """The device's name: `NVIDIA H200`, `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def cache_path(device: torch.device) -> Path:
    """Where the measured rates of this machine are kept: a name for device, cores, memory, format and torch."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = (device_name(device), physical_cores(), device_memory(device), host_memory(), FORMAT, torch.__version__)
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:12]
    slug = re.sub(r"[^a-z0-9]+", "-", key[0].lower()).strip("-")
    return root / "oomc" / "machines" / f"{slug}-{key[1]}-cores-{digest}.json"


def current(device: torch.device | str) -> Machine:
    """This machine: as measured by `oomc calibrate`, else the default nearest to it, as `source` says.

    Memory sizes and cores are always this machine's own.
    """
    device = torch.device(device)
    return _current(device, cache_path(device))


@cache
def _read(path: Path, changed: int) -> Machine:
    return Machine.load(path)


def _current(device: torch.device, path: Path) -> Machine:
    own: dict[str, Any] = {
        "device_memory": device_memory(device),
        "host_memory": host_memory(),
        "cores": physical_cores(),
    }
    if device.type == "cuda":
        own["capability"] = torch.cuda.get_device_capability(device)
    if path.exists():
        return replace(_read(path, path.stat().st_mtime_ns), **own)
    name = device_name(device)
    machine = nearest(name, own["device_memory"])
    note = f"{machine.source}; {name} is not measured yet, `oomc calibrate` does it"
    return replace(machine, source=note, **own)


def nearest(name: str, memory: int) -> Machine:
    """The default for a device's name; for one that is not known the GPU whose memory is nearest in size."""
    try:
        return default(name)
    except ValueError:
        gpus = [machine for known, machine in _DEFAULTS.items() if known != "cpu"]
        return min(gpus, key=lambda machine: abs(math.log(machine.device_memory / memory)))
