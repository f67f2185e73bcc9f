"""How much memory the machine, or the container that the process runs in, has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def host_memory(cgroups: Path = CGROUPS, own: Path = OWN) -> int:
    """Bytes of host memory that the process may have: the machine's, or the least that a cgroup of it leaves.

    Limits of all groups above its own count too: a container sees its own as the root, a batch system's job is a group
    deep below it.

    Args:
        cgroups: where cgroups (version 1 or 2) are mounted.
        own: the file that names the process's own groups.
    """
    total = int(psutil.virtual_memory().total)
    for file in _limits(cgroups, own):
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            total = min(total, int(text))
    return total


def _limits(cgroups: Path, own: Path) -> Iterator[Path]:
    """Files that may hold a limit; of version 2 and of version 1."""
    yield cgroups / "memory.max"
    yield cgroups / "memory" / "memory.limit_in_bytes"
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        path = Path(name.lstrip("/"))
        for group in (path, *path.parents):
            if not controllers:
                yield cgroups / group / "memory.max"
            elif "memory" in controllers.split(","):
                yield cgroups / "memory" / group / "memory.limit_in_bytes"


def device_memory(device: torch.device) -> int:
    """Bytes of the device; the CPU stand-in has what the host has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory()
