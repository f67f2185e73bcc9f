"""What makes a missing wait show: random delays and poisoned buffers. And how an error is kept without its memory."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Callable

import torch


class Adversary:
    """Delays tasks by 0 to 2 ms and fills released buffers with 0xFF bytes, which are NaN in bf16, fp16 and fp32."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def delay(self) -> None:
        """Sleep for a random time; half of the calls return at once, so that orders really differ."""
        with self._lock:
            seconds = max(0.0, self._random.uniform(-0.002, 0.002))
        if seconds:
            time.sleep(seconds)

    def poison(self, buffer: torch.Tensor) -> None:
        """Fill `buffer` (uint8, any device) with 0xFF, on the current stream."""
        buffer.fill_(0xFF)


def attempt(task: Callable[[], None]) -> BaseException | None:
    """Run `task`; its error, if it fails, with a traceback that keeps no local variables (and so no tensors) alive."""
    try:
        task()
    except BaseException as error:  # noqa: BLE001 - whoever waits for the task raises it
        inner = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.clear_frames(inner)
        return error.with_traceback(inner)
    return None
