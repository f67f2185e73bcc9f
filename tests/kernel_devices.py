"""Where the tests of CUDA kernels run: on a GPU, or in Triton's interpreter if it is installed and asked for."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = [
    pytest.param("cuda", marks=[pytest.mark.cuda, CUDA]),
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter"), id="interpreted"
    ),
]


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of loops that are computed: Triton's interpreter has them as arrays, which numpy no longer takes."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter  # type: ignore[import-not-found, import-untyped, unused-ignore]

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
