"""Shared by the tests of whole steps: tiny models, steps that share their traces, eager peaks, distances."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import oomc
from oomc.compiler import Trace
from oomc.models import tiny
from oomc.runtime.meter import Meter
from oomc.step import Step
from tests.reference import Reference

Batch = dict[str, Any]
ADAMW: dict[str, Any] = {"lr": 1e-3, "eps": 1e-6}
_TRACES: dict[tuple[Any, ...], dict[tuple[Any, ...], Trace]] = {}


class Blind(Meter):
    """A meter that sees nothing: for tests that do not look at memory, since metering takes most of the time."""

    def __enter__(self) -> Blind:
        return self

    def __exit__(self, *_: object) -> None:
        return


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference, in fp64."""
    value, reference = value.detach().double(), reference.detach().double()
    scale = float(reference.norm())
    return float((value - reference).norm()) / scale if scale else float(value.norm())


def worst(values: Mapping[str, torch.Tensor], references: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative distance of tensors of the same name, and the name."""
    assert set(values) == set(references), set(values) ^ set(references)
    return max((relative(values[n], references[n]), n) for n in references)


def tokens(batch: int, sequence: int, vocab: int = tiny.VOCAB, seed: int = 0, masked: bool = False) -> Batch:
    """Random input_ids, and labels that are the same or, with `masked`, half of them -100."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (batch, sequence), generator=generator)
    labels = ids.clone()
    if masked:
        labels[torch.rand(labels.shape, generator=generator) < 0.5] = -100
    return {"input_ids": ids, "labels": labels}


def compiled(
    model: nn.Module,
    example: Batch,
    *,
    like: tuple[Any, ...] | None = None,
    device: int | str | None = None,
    host: int | str | None = None,
    prepare: bool = True,
    optimizer: torch.optim.Optimizer | None = None,
    on: str = "cpu",
    **options: Any,
) -> Step:
    """A step of `model`, on the CPU stand-in if not said otherwise.

    Args:
        model: its parameters are taken over.
        example: a batch.
        like: models with the same key are equal but for their weights: the first trace serves all of them.
        device: device budget.
        host: host budget.
        prepare: whether to plan for `example` and take the memory now.
        optimizer: AdamW with ADAMW over what requires a gradient if None.
        on: the device.
        options: of `oomc.compile`.
    """
    if optimizer is None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
    step = oomc.compile(model, oomc.Budget(device, host), optimizer=optimizer, device=on, **options)
    if like is not None:
        # the same mapping, which also gets what is traced when the step is first called
        known = _TRACES.setdefault(like, step._compiler.traces)
        step._compiler.traces.update({k: t.fresh() for k, t in known.items()})
    if prepare:
        step.prepare(**example)
    return step


def tiny_step(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Step, nn.Module]:
    """A step of a tiny model, and an eager copy of the model as it was before."""
    model = tiny.build(name, dtype=dtype)
    eager = copy.deepcopy(model)
    return compiled(model, tokens(2, 24), like=(name, dtype), **options), eager


def own_threads() -> set[threading.Thread]:
    """This package's threads; other libraries start some of their own (tqdm's monitor, with its first bar)."""
    return {thread for thread in threading.enumerate() if "oomc" in thread.name}


def state(step: Step) -> dict[str, torch.Tensor]:
    """Every master and every moment of a step, as copies."""
    step.synchronize()
    result: dict[str, torch.Tensor] = {}
    for slab in step._state.slabs:
        result |= {name: slab.master(name) for name in slab.steps}
        result |= {f"{slab.name}.{name}": moment.clone() for name, moment in slab.state.items()}
    return result


def masters(step: Step) -> dict[str, torch.Tensor]:
    """The exact fp32 master of each trained parameter."""
    step.synchronize()
    return {name: slab.master(name) for slab in step._state.slabs for name in slab.steps}


def accumulate(step: Step, reference: Reference, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """One micro-batch by both; the losses. Gradients are summed times the number of valid labels if that is known."""
    loss = step.forward_backward(**batch)
    valid = step.metrics["valid_tokens"]
    return loss, reference.accumulate(scale=1.0 if valid is None else valid, **batch)


def assert_same_gradients(step: Step, eager: nn.Module, batches: Sequence[Batch], tolerance: float = 1e-5) -> None:
    """Loss and sums of gradients over `batches` equal eager's; nothing is updated."""
    reference = Reference(eager, **ADAMW)
    for batch in batches:
        loss, expected = accumulate(step, reference, batch)
        assert relative(loss, expected) <= 1e-6, (float(loss), float(expected))
        error, name = worst(step.gradients(), reference._sums)
        assert error <= tolerance, f"{name} differs by {error:.2e} after a batch of {tuple(batch['input_ids'].shape)}"


def assert_trains_as_eager(step: Step, eager: nn.Module, batches: Sequence[Batch], tolerance: float = 1e-4) -> None:
    """Losses and masters equal the reference's over one step for each batch."""
    reference = Reference(eager, **ADAMW)
    for batch in batches:
        loss, expected = step(**batch), reference.step(**batch)
        assert relative(loss, expected) <= 1e-5, (float(loss), float(expected))
    trained = {n: m for n, m in reference.masters().items() if n in masters(step)}
    error, name = worst(masters(step), trained)
    assert error <= tolerance, f"{name} differs by {error:.2e} after {len(batches)} steps"


def eager_peak(model: nn.Module, batch: Batch, loss_of: Callable[[Any], torch.Tensor] | None = None) -> int:
    """Most bytes that eager training takes: parameters, buffers, gradients, AdamW's state, activations, the batch."""
    model = copy.deepcopy(model)
    meter = Meter()
    meter.track(*model.parameters(), *model.buffers(), *batch.values())
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    with meter:
        for _ in range(2):
            output = model(**batch)
            loss = loss_of(output) if loss_of else output if isinstance(output, torch.Tensor) else output.loss
            loss.backward()
            del output, loss
            optimizer.step()
            optimizer.zero_grad()
    return meter.peak


@cache
def smallest_device(name: str, batch: int, sequence: int) -> int:
    """The smallest device budget that a BudgetError names for a tiny fp32 model."""
    step, _ = tiny_step(name, device="1KiB", prepare=False)
    with pytest.raises(oomc.BudgetError) as caught:
        step.prepare(**tokens(batch, sequence))
    assert caught.value.smallest_device is not None
    return caught.value.smallest_device
