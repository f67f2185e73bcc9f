"""Functions compiled by numba and kept on disk, and compiled anew when a file has changed that is part of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba


def jit(function: Callable[..., Any], *others: str, **options: Any) -> Callable[..., Any]:
    """Compile `function` at its first call, and keep what was compiled where a cache folder is writable.

    Args:
        function: its file is the first that it is made of.
        others: files whose constants and functions are compiled into it too.
        options: numba.njit's.
    """
    try:
        compiled = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba found no folder that it could write its cache to
        return numba.njit(**options)(function)
    if others and hasattr(compiled, "stats"):  # with NUMBA_DISABLE_JIT it is the function itself
        _forget_stale(compiled.stats.cache_path, Path(inspect.getfile(function)).stem, *others)
    return compiled


@cache
def _forget_stale(folder: str, own: str, *others: str) -> None:
    """Drop what was compiled of file `own` with others than there are now: numba looks at a function's own file only.

    What they were is noted beside it. That is early enough, since numba reads the compiled functions at the first call.
    """
    stats = [(file, Path(file).stat()) for file in others if Path(file).exists()]
    now = "\n".join(f"{file} {stat.st_mtime_ns} {stat.st_size}" for file, stat in stats)
    note = Path(folder) / f"{own}.others"
    with suppress(OSError):  # another process may be doing the same
        if note.exists() and note.read_text() == now:
            return
        for index in Path(folder).glob(f"{own}.*.nbi"):
            index.unlink(missing_ok=True)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(now)
