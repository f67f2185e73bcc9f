"""The state of every random generator that a training loop may draw from, as torch.load takes it without pickles."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The states of torch's CPU generator, CUDA's if it is used, Python's `random` and numpy's global generator."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    numpy = _walk(np.random.get_state(legacy=False), np.ndarray, torch.from_numpy)
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(), "numpy": numpy}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set what `random_state` gave; GPUs that are not here are left out."""
    torch.set_rng_state(state["torch"])
    devices = torch.cuda.device_count() if state["cuda"] and torch.cuda.is_available() else 0
    for device, generator in zip(range(devices), state["cuda"]):
        torch.cuda.set_rng_state(generator, device)
    random.setstate(state["python"])
    np.random.set_state(_walk(state["numpy"], torch.Tensor, torch.Tensor.numpy))


def _walk(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _walk(v, kind, convert) for key, v in value.items()}
    return convert(value) if isinstance(value, kind) else value
