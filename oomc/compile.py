"""`oomc.compile`: from a model, a budget and an optimizer to a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from oomc.capture import LossFn
from oomc.compiler import Options
from oomc.errors import UnsupportedError
from oomc.optimizers import StateWidth
from oomc.passes.lower import BACKENDS
from oomc.plan import Budget
from oomc.step import Step

TUNED = 3
"""How many plans are tried on a GPU if the user does not say."""


def compile(  # noqa: A001  the name is the API's, as in torch.compile
    model: torch.nn.Module,
    budget: Budget | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    example: Mapping[str, Any] | None = None,
    loss_fn: LossFn | None = None,
    max_grad_norm: float | None = None,
    on_nonfinite: Literal["skip", "raise"] | None = None,
    state: StateWidth = "fp32",
    updates: Literal["host", "device"] | None = None,
    device: torch.device | str | None = None,
    backend: str | None = None,
    chunk_tokens: int | None = None,
    expert_groups: int | None = None,
    tune: int | None = None,
    time_worksets: bool = False,
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
        optimizer: a `torch.optim.AdamW` or `SGD` made from the model's parameters (None: AdamW with torch's defaults).
            Parameters that it does not hold are not trained. Its `step` is never called; schedulers work on it as
            usual, and its state_dict is that of the state wherever it lies.
        example: keyword arguments of one call. With it everything is compiled, and every error raised, now; without
            it, at the first call.
        loss_fn: for models that do not return a loss: `loss_fn(output, batch) -> scalar loss`, or `-> (sum, count)`:
            a sum over tokens and their number, an int or float tensor of no dimensions. The loss is then sum / count
            (0 if there are none), and accumulated micro-batches weigh by their counts. They do so too where the loss
            itself shows its count: a mean cross-entropy, or a sum divided by a sum that the batch alone decides, as
            in `losses.sum() / (labels != -100).sum()`. Otherwise they weigh equally; the report says which.
        max_grad_norm: clip the norm of the whole gradient to this, as `torch.nn.utils.clip_grad_norm_` does. Updates
            then run under the next step's forward, and the host holds one gradient of each parameter.
        on_nonfinite: what to do about a gradient that is not finite: "skip" the step's update, with a warning, or
            "raise"; both must know the whole gradient before they update, as clipping does. None: where it is known
            anyway (clipping, `update()`) as "skip", else the update is made with it, as in eager, with a warning.
        state: of AdamW: "fp32"; "bf16" (moments rounded stochastically, 8 bytes a parameter instead of 12) or "8bit"
            (block-wise scaled moments, about 6.1 bytes), which change the numbers.
        updates: who updates parameters whose state lives on the host: the "host" alone, which needs no device memory
            for it, or the "device" alone, which leaves the host's cores to others; None: the host, or both, whichever
            is planned to be faster. Where the budget leaves no room to pass state through the device, the host does
            it all (`plan.where`).
        device: where to compute: "cuda", or "cpu" for the CPU stand-in; None for CUDA if there is one.
        backend: "eager" or "inductor" for the worksets; None for eager.
        chunk_tokens: tokens in a chunk of the worksets that run in chunks, for experiments (in lookups, 64K at least);
            None: as many as fit.
        expert_groups: in how many groups the experts of a layer are, each with weights that are streamed by themselves,
            so that a layer may be larger than the device; None: one with its layer, or as few as fit.
        tune: how many plans the first steps of a batch shape try; the fastest stays. All are valid steps in the same
            chunks, so that which one wins changes no number (but for rounding where `backend="inductor"` compiles a
            recomputation otherwise). 0: only the planned one; None: 3 on a GPU, 0 on the stand-in.
        time_worksets: run each of the step's graphs alone on the device before the first plan is made, and plan with
            what they take instead of with estimates. At most some 20 s, once: it is kept in the user's cache.
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
        ValueError: a budget that is no size, or an option that there is not.
    """
    if budget is not None and not isinstance(budget, Budget):
        raise ValueError(f"budget={budget!r} is no budget; write oomc.Budget(device={budget!r})")
    if optimizer is None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    chosen = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if chosen.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device {chosen} is not supported; there are cuda, and cpu as its stand-in")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("device cuda: torch finds no GPU here; device='cpu' computes on the CPU stand-in")
    if chosen == torch.device("cuda"):
        chosen = torch.device("cuda", torch.cuda.current_device())
    if example is not None and not isinstance(example, Mapping):
        raise ValueError(
            f"example is a {type(example).__name__}; it must be the keyword arguments of one call, as in "
            "example={'input_ids': ids, 'labels': ids}"
        )
    _check_choice("backend", backend, (None, *BACKENDS))
    _check_choice("on_nonfinite", on_nonfinite, (None, "skip", "raise"))
    _check_choice("state", state, ("fp32", "bf16", "8bit"))
    _check_choice("updates", updates, (None, "host", "device"))
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm={max_grad_norm} is no norm to clip to; it must be above 0, or None")
    for name, value in (("chunk_tokens", chunk_tokens), ("tune", tune), ("seed", seed)):
        if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__")):
            raise ValueError(f"{name}={value!r} is no whole number")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: a chunk holds at least one token")
    if expert_groups is not None and expert_groups < 1:
        raise ValueError(f"expert_groups={expert_groups}: the experts of a layer are at least one group")
    if tune is not None and tune < 0:
        raise ValueError(f"tune={tune}: it is a number of plans, or 0 for none but the planned one")
    if backend == "inductor" and chosen.type == "cpu":
        raise UnsupportedError(
            "backend='inductor' compiles for a GPU; the CPU stand-in meters each operator, and compiled worksets show "
            "none. Leave it out there"
        )
    if tune is None:
        tune = TUNED if chosen.type == "cuda" else 0
    options = Options(
        budget or Budget(), chosen, backend or "eager", loss_fn, max_grad_norm, on_nonfinite, state, updates or "both",
        seed, verify, chaos, chunk_tokens, synchronous, tune, expert_groups, time_worksets,
    )  # fmt: skip
    step = Step(model, optimizer, options)
    if example is not None:
        step.prepare(**example)
    return step


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not known; there are {', '.join(repr(c) for c in choices)}")
