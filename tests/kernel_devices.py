"""Where the tests of CUDA kernels run: on a GPU, or in Triton's interpreter if it is installed and asked for."""

from __future__ import annotations

import importlib.util
import os

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
