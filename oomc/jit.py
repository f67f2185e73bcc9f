"""Functions compiled by numba and kept on disk, and compiled anew when a file has changed that is part of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
    own = inspect.getfile(function)
    _forget_stale(own, *others)
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba found no folder that it could write its cache to
        return numba.njit(**options)(function)


@cache
def _forget_stale(own: str, *others: str) -> None:
    """Drop what was compiled before one of the others changed: numba looks at the date of a function's own file only.

    That holds for the cache beside the file, which is where numba keeps it if it can. Where it cannot, the files belong
    to someone else, who replaces them all at once.
    """
    newest = max((Path(file).stat().st_mtime for file in others if Path(file).exists()), default=0.0)
    for index in (Path(own).parent / "__pycache__").glob(f"{Path(own).stem}.*.nbi"):
        if index.stat().st_mtime < newest:
            index.unlink(missing_ok=True)
