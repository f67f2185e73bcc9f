"""What the machine has, and what a container leaves of it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from oomc.limits import device_memory, host_memory


@pytest.mark.parametrize(
    ("texts", "expected"),
    [([], None), (["max"], None), (["1073741824\n"], 2**30), (["max", "2147483648"], 2**31), (["9" * 19], None)],
)
def test_the_smallest_limit_counts(texts: list[str], expected: int | None, tmp_path: Path) -> None:
    paths = []
    for index, text in enumerate(texts):
        paths.append(tmp_path / f"{index}")
        paths[-1].write_text(text)
    machine = int(psutil.virtual_memory().total)
    assert host_memory((*paths, tmp_path / "none")) == min(machine, expected or machine)


def test_the_stand_in_has_what_the_host_has() -> None:
    assert device_memory(torch.device("cpu")) == host_memory()
