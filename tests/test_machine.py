"""Machines: tables, defaults by name, files, and what stands for the machine at hand."""

import json
from pathlib import Path

import pytest
import torch

from oomc import machine
from oomc.machine import DEFAULTS, Machine, Table, cache_path, current, default, nearest
from oomc.runtime.pool import physical_cores


def test_a_table_is_linear_in_the_logarithm_and_constant_beyond_its_ends() -> None:
    table = Table((10.0, 1000.0), (1.0, 3.0))
    assert [table.at(s) for s in (1, 10, 100, 1000, 1e9)] == pytest.approx([1, 1, 2, 3, 3])
    assert table.scaled(2).rates == (2.0, 6.0)


@pytest.mark.parametrize(("sizes", "rates"), [((), ()), ((2, 1), (1, 1)), ((1,), (1, 2)), ((0,), (1,)), ((1,), (0,))])
def test_a_table_refuses_what_is_none(sizes: tuple[float, ...], rates: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"table|positive"):
        Table(sizes, rates)


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_found_by_name_and_hold_together(name: str) -> None:
    found = default(name.upper())
    assert found is default(name)
    assert found.h2d_both <= found.h2d
    assert found.update_rate * found.update_bytes <= found.host_bandwidth
    assert found.both_rate >= found.update_rate
    assert "analytic" in found.source


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("NVIDIA H200", "H200"), ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("NVIDIA A100-SXM4-80GB", "A100")],
)
def test_names_of_devices_are_understood(name: str, wanted: str) -> None:
    assert default(name).name == wanted


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no machine is known as 'TPU'.*h200.*cpu"):
        default("TPU")


def test_an_unknown_gpu_is_the_one_of_its_size() -> None:
    assert nearest("Some GPU", 25 * 2**30).name == "RTX 4090"
    assert nearest("Some GPU", 150 * 10**9).name == "H200"


def test_rates_by_dtype() -> None:
    h200 = default("h200")
    assert h200.gemm_rate("bf16", 1e12) == 800e12
    assert h200.gemm_rate("f64", 1e12) == h200.gemm_rate("f32", 1e12) == 50e12
    assert h200.grouped_rate("bf16", 1024, 1e12) == 716e12
    assert h200.grouped_rate("f32", 1024, 1e12) == h200.gemm_rate("f32", 1e12)


def test_a_machine_is_saved_and_loaded_exactly(tmp_path: Path) -> None:
    path = default("5090").save(tmp_path / "deep" / "m.json")
    assert Machine.load(path) == default("5090")
    assert [p.name for p in path.parent.iterdir()] == ["m.json"]


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"format": 0, "machine": {}}', f'{{"format": {machine.FORMAT}, "machine": {{}}}}']
)
def test_a_file_that_is_no_machine_says_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="oomc calibrate"):
        Machine.load(path)


def test_the_current_machine_is_the_measured_one_or_says_that_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu = torch.device("cpu")
    path = cache_path(cpu)
    assert path.parent == tmp_path / "oomc" / "machines"
    before = current("cpu")
    assert "not measured yet" in before.source
    assert before.cores == physical_cores()
    default("h100").save(path)
    assert current("cpu").h2d == default("h100").h2d
    data = json.loads(path.read_text())
    data["machine"]["h2d"] = 1.0
    path.write_text(json.dumps(data))
    assert current("cpu").h2d == 1.0


def test_another_torch_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    before = cache_path(cpu)
    monkeypatch.setattr(machine, "FORMAT", machine.FORMAT + 1)
    assert cache_path(cpu) != before
