"""Calibration on the CPU stand-in: everything is measured, kept, found again, and printed by the command line."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from oomc import calibrate as module
from oomc import cli
from oomc.calibrate import Bench, Pump, calibrate, describe, measure, updating
from oomc.machine import Machine, cache_path, current, default

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def measured() -> tuple[Machine, float]:
    start = time.perf_counter()
    machine = measure(CPU, seconds=3.0)
    return machine, time.perf_counter() - start


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache_path(CPU)


def test_every_rate_is_measured_in_its_time(measured: tuple[Machine, float]) -> None:
    machine, seconds = measured
    assert seconds < 60
    for name in (f.name for f in fields(Machine)):
        assert getattr(machine, name), name
    assert (machine.name, machine.on_host) == ("cpu", True)
    assert machine.h2d_both <= machine.h2d
    assert machine.d2h_both <= machine.d2h
    assert machine.both_rate >= machine.update_rate
    assert machine.host_bandwidth >= machine.update_rate * machine.update_bytes
    assert [dtype for dtype, _ in machine.gemm] == ["bf16", "f32"]
    assert "measured with torch" in machine.source


def test_rates_are_plausible(measured: tuple[Machine, float]) -> None:
    machine, _ = measured
    assert 1e8 < machine.h2d < 1e12
    assert 1e6 < machine.update_rate < 1e11
    assert 1e8 < max(machine.gemm[1][1].rates) < 1e14
    assert 1e-8 < machine.launch < 1e-3


def test_the_result_is_kept_and_found(
    measured: tuple[Machine, float], cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[float] = []

    def instead(device: torch.device, seconds: float) -> Machine:
        rounds.append(seconds)
        return replace(measured[0], launch=1e-6 * len(rounds))

    monkeypatch.setattr(module, "measure", instead)
    assert calibrate("cpu")[1] == cached
    assert current("cpu").launch == 1e-6
    assert calibrate("cpu")[0].launch == 1e-6
    assert len(rounds) == 1, "what is known is not measured again"
    assert calibrate("cpu", force=True)[0].launch == 2e-6
    assert current("cpu").launch == 2e-6


def test_the_host_is_measured_anew_and_nothing_else(cached: Path) -> None:
    slow = replace(default("cpu"), update_rate=1.0, both_rate=1.0, h2d=1.0, host_bandwidth=1.0, bandwidth=123.0)
    slow.save(cached)
    machine, path = module.calibrate_host("cpu", seconds=1.0)
    assert (path, machine.bandwidth, machine.gemm) == (cached, 123.0, slow.gemm)
    assert min(machine.update_rate, machine.both_rate, machine.h2d, machine.host_bandwidth) > 1e6
    assert Machine.load(cached) == machine


def test_the_command_line_prints_a_table_and_where_it_is_kept(
    cached: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "measure", lambda device, seconds: default("h200"))
    assert cli.main(["calibrate", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "55.0 GB/s" in printed
    assert str(cached) in printed
    cached.write_text("broken")
    assert cli.main(["calibrate", "--device", "cpu"]) == 2
    assert "oomc calibrate" in capsys.readouterr().err
    assert cli.main(["calibrate", "--device", "cpu", "--force"]) == 0


def test_the_table_has_every_kind_of_rate() -> None:
    text = describe(default("h200"))
    for part in ("H200", "host memory", "update on both", "product, bf16", "grouped product", "attention's backward"):
        assert part in text


def test_a_pump_copies_and_counts() -> None:
    with Pump(Bench(CPU, 1.0), to_device=True) as pump:
        while len(pump.times) < 2:
            time.sleep(0.01)
    assert pump.rate > 0
    count = len(pump.times)
    time.sleep(0.05)
    assert len(pump.times) == count, "it stops at its end"


def test_an_update_is_the_runtimes_own() -> None:
    with updating(Bench(CPU, 1.0), 1 << 12, 2) as update:
        for where in ("host", "device", "both", "host"):
            update(where)


def test_timings_leave_the_first_round_out() -> None:
    calls: list[float] = []

    def slow_at_first() -> None:
        time.sleep(0.0 if calls else 0.2)
        calls.append(1.0)

    assert Bench(CPU, 1.0).time(slow_at_first) < 0.1
    assert len(calls) >= 2
