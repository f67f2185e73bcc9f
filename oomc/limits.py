"""What the machine, or the container or job that the process runs in, has: memory, and a share of its cores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def host_memory(cgroups: Path = CGROUPS, own: Path = OWN) -> int:
    """Bytes of host memory that the process may have: the machine's, or the least that a cgroup of it leaves.

    Args:
        cgroups: where cgroups (version 1 or 2) are mounted.
        own: the file that names the process's own groups.
    """
    total = int(psutil.virtual_memory().total)
    for text in _settings("memory", "memory.max", "memory.limit_in_bytes", cgroups, own):
        if text.isdigit():
            total = min(total, int(text))
    return total


def cpu_quota(cgroups: Path = CGROUPS, own: Path = OWN) -> float | None:
    """How many CPUs' time the process may take; None where no cgroup (of version 2) limits it."""
    found: float | None = None
    for text in _settings("cpu", "cpu.max", "", cgroups, own):
        limit, _, period = text.partition(" ")
        if limit.isdigit() and period.isdigit():
            share = int(limit) / int(period)
            found = share if found is None else min(found, share)
    return found


def _settings(controller: str, name: str, old_name: str, cgroups: Path, own: Path) -> Iterator[str]:
    """What the process's groups and all above them say: files `name` of version 2 and `old_name` of version 1.

    A container sees its own group as the root; a batch system's job is a group deep below it.
    """
    files = [cgroups / name, *([cgroups / controller / old_name] if old_name else [])]
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        path = Path(group.lstrip("/"))
        for each in (path, *path.parents):
            if not controllers:
                files.append(cgroups / each / name)
            elif old_name and controller in controllers.split(","):
                files.append(cgroups / controller / each / old_name)
    for file in files:
        if file.is_file():
            yield file.read_text().strip()


def device_memory(device: torch.device) -> int:
    """Bytes of the device; the CPU stand-in has what the host has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory()
