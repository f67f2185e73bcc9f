"""How much memory the machine, or the container that the process runs in, has."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

CGROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def host_memory(cgroups: tuple[Path, ...] = CGROUPS) -> int:
    """Bytes of host memory that the process may have: the machine's, or its cgroup's limit where that is smaller."""
    total = int(psutil.virtual_memory().total)
    for path in cgroups:
        if path.exists() and (text := path.read_text().strip()).isdigit():
            total = min(total, int(text))
    return total


def device_memory(device: torch.device) -> int:
    """Bytes of the device; the CPU stand-in has what the host has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory()
