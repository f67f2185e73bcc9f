"""A word when the host optimizer has one core only."""

from __future__ import annotations

import os
import threading
import warnings

from oomc.runtime.pool import physical_cores

_warned = threading.Event()


def warn_if_single_threaded(workers: int | None = None) -> None:
    """Warn once if the host's work is left to one thread on a machine of more.

    Args:
        workers: threads that will work; None for one a physical core that this process may use.
    """
    count = physical_cores() if workers is None else workers
    machine = os.cpu_count() or 1
    if count > 1 or machine == 1 or _warned.is_set():
        return
    _warned.set()
    warnings.warn(
        f"the host optimizer has one thread on a machine of {machine} CPUs: this process's affinity (taskset, a batch "
        "system, OMP_PROC_BIND) or its container's quota leaves it one physical core. OMP_NUM_THREADS plays no part.",
        stacklevel=2,
    )
