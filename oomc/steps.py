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
    "Max": max, "Min": min, "floor": math.floor, "ceiling": math.ceil, "ToFloat": float,
    "IntTrueDiv": operator.truediv, "FloatTrueDiv": operator.truediv,
}  # fmt: skip
"""What sympy prints of size arithmetic beside operators."""
OF_FLOATS = ("ToFloat", "TrueDiv")
"""What tells that the number is a float; a size that is halved exactly is printed with `/` and is none."""

IN_PLACE = "backward_in_place"
VARIANTS = ("forward", "recompute", "backward", IN_PLACE)
"""What a run computes: the graphs of a form, by the names of their attributes."""
PARTS = ORDERS, ROWS, PRODUCTS = "backward_orders", "backward_rows", "backward_products"
"""The graphs that a backward in chunks may run instead (oomc.at_once)."""
GRAPHS = (*VARIANTS, *PARTS)
"""All graphs of a form."""


def phase_of(variant: Any) -> str:
    """The phase of a step that a variant is run in."""
    return str(variant).partition("_")[0]


def size(x: torch.Tensor, dim: int) -> int:
    """A size of an input."""
    return x.shape[dim]


@lru_cache(maxsize=1024)
def _compiled(formula: str) -> CodeType:
    return compile(formula, formula, "eval")


def calc(formula: str, batch: int, sequence: int) -> int | float:
    """A number computed from the batch's sizes, `B` and `S` in the formula (a sympy expression printed as text)."""
    number = eval(_compiled(formula), {"__builtins__": {}}, FUNCTIONS | {"B": batch, "S": sequence})
    return float(number) if any(word in formula for word in OF_FLOATS) else int(number)


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


def device_weights(rt: Any, slab: str) -> tuple[torch.Tensor, ...]:
    """The parameters of a slab that lives on the device with its state, in slab order, once its update is done."""
    return rt.device_weights(slab)


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
    """Compute a form's graph, one of VARIANTS."""
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


def count(rt: Any, value: torch.Tensor) -> None:
    """The number of valid labels leaves for the host: gradients of several micro-batches are weighed by it."""
    rt.count(value)


def offload(rt: Any, slab: str, names: Sequence[str], grads: Sequence[torch.Tensor], mode: str) -> Any:
    """Gradients of a slab leave: to `update` it, to be kept (`keep`) until `apply`, or to be added to its `sum`."""
    return rt.offload(slab, names, grads, mode)


def update(rt: Any, slab: str, copies: Sequence[Any], mode: str) -> None:
    """Update the slab's parameters, chunk by chunk as the copies arrive; nothing waits here.

    With mode `sum` the update is made from the sum, once all `copies` are part of it.
    """
    rt.update(slab, copies, mode)


def apply(rt: Any, copies: Sequence[Any]) -> None:
    """The norm of all that was kept, then the update of every slab with it; nothing waits here."""
    rt.apply(copies)


def retire(rt: Any, copy: Any) -> None:
    """The compute lane waits until offloaded gradients have left the device, whose memory is then free."""
    rt.wait_gradients(copy)


def retire_carried(rt: Any, slab: str) -> None:
    """`retire` for the slab's gradients of the step before, which stayed until its update had read them."""
    rt.retire_carried(slab)


def store(rt: Any, name: str, value: torch.Tensor, slot: int) -> Any:
    """Begin to copy a value of the forward into a host slot; the copy names it until it is `restored`."""
    return rt.store(name, value, slot)


def discard(rt: Any, copy: Any) -> None:
    """The compute lane waits until a stored value has left the device, whose memory is then free."""
    rt.discard(copy)


def restore(rt: Any, copy: Any) -> Any:
    """Begin to copy a stored value back, into new device memory."""
    return rt.restore(copy)


def restored(rt: Any, copy: Any) -> torch.Tensor:
    """The compute lane waits for a value that comes back; its host slot may be overwritten."""
    return rt.restored(copy)


LANES = {
    size: "none", calc: "none", resident: "none", rng: "compute", weights: "none", gradients: "none",
    await_update: "h2d", device_weights: "compute", fetch: "h2d", wait: "compute", release: "compute", run: "compute",
    run_chunks: "compute", add: "compute", ones_like: "compute", zeros_like: "compute", count: "d2h", offload: "d2h",
    update: "host", apply: "host", retire: "compute", retire_carried: "compute", store: "d2h", discard: "compute",
    restore: "h2d", restored: "compute",
}  # fmt: skip
COMPUTE = frozenset({run, run_chunks})
EFFECTS = frozenset(
    {
        gradients, await_update, release, update, apply, retire, retire_carried, count, offload, fetch, device_weights,
        store, discard, restore,
    }
)  # fmt: skip
"""Words that are kept although nothing uses their value."""
