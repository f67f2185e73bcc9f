"""`oomc.compile`: from a model, a budget and an optimizer to a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from oomc.capture import LossFn
from oomc.errors import UnsupportedError
from oomc.plan import Budget
from oomc.step import Options, Step


def compile(  # noqa: A001  the name is the API's, as in torch.compile
    model: torch.nn.Module,
    budget: Budget | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    example: Mapping[str, Any] | None = None,
    loss_fn: LossFn | None = None,
    device: torch.device | str | None = None,
    backend: str | None = None,
    seed: int = 0,
    verify: bool = False,
    chaos: int | None = None,
    synchronous: bool = False,
) -> Step:
    """Compile a model's training step to run within a memory budget.

    Args:
        model: a Hugging Face or plain PyTorch model, bf16 or fp32 (or mixed), on the CPU or the device. Its
            parameters keep their identity and are moved into the step's host memory.
        budget: device and host memory that the step may take; None for all there is.
        optimizer: a `torch.optim.AdamW` made from the model's parameters (None: with torch's defaults). Parameters
            that it does not hold are not trained. Its `step` is never called; schedulers work on it as usual.
        example: keyword arguments of one call. With it everything is compiled, and every error raised, now; without
            it, at the first call.
        loss_fn: `loss_fn(output, batch) -> scalar loss`, for models that do not return a loss.
        device: where to compute: "cuda", or "cpu" for the CPU stand-in; None for CUDA if there is one.
        backend: "eager" or "inductor" for the worksets; None for eager.
        seed: of dropout, whose masks depend on seed, step and position only.
        verify: check every graph's invariants after every pass.
        chaos: seed of random delays and poisoned buffers: a check of the order of everything; slow.
        synchronous: no overlap at all; the reference for `chaos`.

    Returns:
        A `Step`, to be called as the model is called.

    Raises:
        BudgetError: the budget cannot work; names the smallest that does.
        CaptureError: the model cannot be traced.
        UnsupportedError: the optimizer, a dtype or an op is not supported.
        ValueError: a budget that is no size.
    """
    if optimizer is None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    chosen = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if chosen.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device {chosen} is not supported; there are cuda, and cpu as its stand-in")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("device cuda: torch finds no GPU here; device='cpu' computes on the CPU stand-in")
    if chosen == torch.device("cuda"):
        chosen = torch.device("cuda", torch.cuda.current_device())
    options = Options(budget or Budget(), chosen, backend or "eager", loss_fn, seed, verify, chaos, synchronous)
    step = Step(model, optimizer, options)
    if example is not None:
        step.prepare(**example)
    return step
