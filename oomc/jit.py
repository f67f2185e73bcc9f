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
    _forget_stale(compiled.stats.cache_path, Path(inspect.getfile(function)).stem, *others)
    return compiled


@cache
def _forget_stale(folder: str, own: str, *others: str) -> None:
    """Drop what was compiled of file `own` before one of the others changed: numba looks at a function's own file only.

    That is early enough, since numba reads it at the first call.
    """
    newest = max((Path(file).stat().st_mtime for file in others if Path(file).exists()), default=0.0)
    for index in Path(folder).glob(f"{own}.*.nbi"):
        with suppress(OSError):  # another process has dropped it
            if index.stat().st_mtime < newest:
                index.unlink()
