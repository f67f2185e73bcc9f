"""The words of the step graph: what one training step is made of, at the grain of worksets, copies and updates.

Each word is a function that the scheduled module calls with the runtime `rt` first; LANES says where it works.
`weights` and `gradients` stand only in the bare step graph that assemble makes; passes replace them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

import torch

FUNCTIONS = {
    "Mod": operator.mod, "PythonMod": operator.mod, "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv,
    "Max": max, "Min": min, "floor": math.floor, "ceiling": math.ceil,
}  # fmt: skip
"""What sympy prints of size arithmetic beside operators."""


def size(x: torch.Tensor, dim: int) -> int:
    """A size of an input."""
    return x.shape[dim]


@lru_cache(maxsize=1024)
def _compiled(formula: str) -> CodeType:
    return compile(formula, formula, "eval")


def calc(formula: str, batch: int, sequence: int) -> int:
    """A number computed from the batch's sizes, `B` and `S` in the formula (a sympy expression printed as text)."""
    return int(eval(_compiled(formula), {"__builtins__": {}}, FUNCTIONS | {"B": batch, "S": sequence}))


def resident(rt: Any, name: str) -> torch.Tensor:
    """A buffer or constant of the model, held on the device."""
    return rt.resident(name)


def rng(rt: Any, block: int) -> torch.Tensor:
    """int64 [2]: the block's dropout seed, and the step number."""
    return rt.rng(block)


def weights(rt: Any, slab: str) -> tuple[torch.Tensor, ...]:
    """Bare graph only: the working weights of a slab, wherever they are."""
    raise AssertionError(f"insert_prefetch has not placed the weights of {slab}")


def gradients(rt: Any, slab: str, names: Sequence[str], grads: Sequence[torch.Tensor]) -> None:
    """Bare graph only: one contribution to the gradients of a slab."""
    raise AssertionError(f"insert_offload has not placed the gradients of {slab}")


def await_update(rt: Any, slab: str) -> None:
    """The h2d lane goes on only when the slab's pending update is done."""
    rt.await_update(slab)


def fetch(rt: Any, slab: str, slot: int) -> Any:
    """Begin to copy a slab's working weights into a device slot; the token names the copy."""
    return rt.fetch(slab, slot)


def wait(rt: Any, copy: Any) -> tuple[torch.Tensor, ...]:
    """The compute lane waits for a fetch; the slab's parameters on the device, in slab order."""
    return rt.wait_weights(copy)


def release(rt: Any, copy: Any) -> None:
    """The compute lane is done with a fetched slab: its slot may be overwritten."""
    rt.release(copy)


def run(rt: Any, form: str, variant: str, *args: Any) -> tuple[Any, ...]:
    """Compute a form's graph (`forward`, `recompute` or `backward`)."""
    return rt.run(form, variant, args)


def run_chunks(rt: Any, form: str, variant: str, chunk: tuple[int, int], *args: Any) -> tuple[Any, ...]:
    """Compute a chunkable form in rectangles of `chunk` = (batch, sequence) sizes."""
    return rt.run_chunks(form, variant, chunk, args)


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sum of two gradients of one value."""
    return a + b


def ones_like(x: torch.Tensor) -> torch.Tensor:
    """The gradient of the loss with respect to itself."""
    return torch.ones_like(x)


def zeros_like(x: torch.Tensor) -> torch.Tensor:
    """The gradient of an output that nothing differentiable uses."""
    return torch.zeros_like(x)


def offload(rt: Any, slab: str, names: Sequence[str], grads: Sequence[torch.Tensor], accumulate: bool) -> Any:
    """Begin to copy gradients of a slab to the host; with `accumulate` they are added to the host's sum."""
    return rt.offload(slab, names, grads, "accumulate" if accumulate else "update")


def update(rt: Any, slab: str, copies: Sequence[Any], accumulated: bool) -> None:
    """Update the slab's parameters on the host, chunk by chunk as the copies arrive; nothing waits here.

    With `accumulated` the update is made from the host's sum, once all `copies` are part of it.
    """
    rt.update(slab, copies, accumulated)


def retire(rt: Any, copy: Any) -> None:
    """The compute lane waits until offloaded gradients have left the device, whose memory is then free."""
    rt.wait_gradients(copy)


LANES = {
    size: "none", calc: "none", resident: "none", rng: "compute", weights: "none", gradients: "none",
    await_update: "h2d", fetch: "h2d", wait: "compute", release: "compute", run: "compute", run_chunks: "compute",
    add: "compute", ones_like: "compute", zeros_like: "compute", offload: "d2h", update: "host", retire: "compute",
}  # fmt: skip
COMPUTE = frozenset({run, run_chunks})
EFFECTS = frozenset({gradients, await_update, release, update, retire, offload, fetch})
"""Words that are kept although nothing uses their value."""
