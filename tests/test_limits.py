"""What the machine has, and what a container leaves of it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from oomc.limits import cpu_quota, device_memory, host_memory

MACHINE = int(psutil.virtual_memory().total)


@pytest.mark.parametrize(
    ("files", "own", "expected"),
    [
        ({}, "0::/", None),
        ({"memory.max": "max"}, "0::/", None),
        ({"memory.max": "1073741824\n"}, "0::/", 2**30),
        ({"memory.max": "max", "memory/memory.limit_in_bytes": "2147483648"}, "", 2**31),
        ({"memory.max": "9" * 19}, "0::/", None),
        # a job of a batch system: its own group has no limit, one above it has
        ({"slurm/job_7/memory.max": "1073741824", "slurm/job_7/step_0/memory.max": "max"}, "0::/slurm/job_7/step_0",
         2**30),
        ({"slurm/job_7/memory.max": "1073741824", "slurm/job_8/memory.max": "1048576"}, "0::/slurm/job_7", 2**30),
        ({"memory/docker/x/memory.limit_in_bytes": "3221225472"}, "4:cpu,memory:/docker/x\n3:cpuset:/y", 3 * 2**30),
        ({"docker/x/memory.max": "1073741824"}, "4:cpu:/docker/x\nodd:cpuset:/y", None),
    ],
)  # fmt: skip
def test_the_smallest_limit_counts(files: dict[str, str], own: str, expected: int | None, tmp_path: Path) -> None:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own").write_text(own + "\n")
    assert host_memory(tmp_path / "cgroup", tmp_path / "own") == min(MACHINE, expected or MACHINE)


@pytest.mark.parametrize(
    ("files", "own", "expected"),
    [
        ({}, "0::/", None),
        ({"cpu.max": "max 100000"}, "0::/", None),
        ({"cpu.max": "150000 100000\n"}, "0::/", 1.5),
        ({"cpu.max": "800000 100000", "slurm/job/cpu.max": "200000 100000", "slurm/other/cpu.max": "1 1"},
         "0::/slurm/job", 2.0),
    ],
)  # fmt: skip
def test_the_smallest_share_of_cpus_counts(
    files: dict[str, str], own: str, expected: float | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own").write_text(own + "\n")
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "own") == expected


def test_without_cgroups_the_machine_counts(tmp_path: Path) -> None:
    assert host_memory(tmp_path / "none", tmp_path / "none") == MACHINE


def test_the_stand_in_has_what_the_host_has() -> None:
    assert device_memory(torch.device("cpu")) == host_memory()
