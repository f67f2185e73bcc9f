"""What `oomc.compile` accepts, and what its refusals say; after a refusal the model is as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import oomc
from tests.cases_models import Stack
from tests.helpers import tokens
from tests.programs import VOCAB

BATCH = tokens(2, 12, vocab=VOCAB)


def test_defaults_train() -> None:
    torch.manual_seed(0)
    step = oomc.compile(Stack(2), device="cpu")
    assert isinstance(step.optimizer, torch.optim.AdamW)
    losses = [float(step(**BATCH)) for _ in range(20)]
    assert losses[-1] < losses[0]
    assert step.metrics["steps"] == 20


def test_example_compiles_at_once() -> None:
    step = oomc.compile(Stack(2), oomc.Budget("1GiB"), example=BATCH, device="cpu")
    assert step.metrics["traces"] == 1 and step.metrics["steps"] == 0
    assert step.plan.sizes == (2, 12) and "def forward" in step.graph.code


def test_parameters_keep_their_identity_and_are_always_current() -> None:
    torch.manual_seed(0)
    model = Stack(2)
    ids = {n: id(p) for n, p in model.named_parameters()}
    before = copy.deepcopy(model.state_dict())
    step = oomc.compile(model, example=BATCH, device="cpu")
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    step(**BATCH)
    after = model.state_dict()
    assert {n: id(p) for n, p in model.named_parameters()} == ids
    assert all(not torch.equal(after[n], before[n]) for n, p in model.named_parameters())
    storages = [p.untyped_storage().data_ptr() for p in model.parameters()]
    assert len(storages) == len(set(storages))
    assert all(p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("device", ["mps", "meta", "xpu"])
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(oomc.UnsupportedError, match=f"device {device} is not supported"):
        oomc.compile(Stack(2), device=device)


def test_meta_parameters_are_refused_with_the_way_out() -> None:
    with torch.device("meta"):
        model = Stack(2)
    with pytest.raises(oomc.UnsupportedError, match=r"on the meta device.*load the weights before compiling"):
        oomc.compile(model, example=BATCH, device="cpu")


class Writes(Stack):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__(2)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        self.calls += 1
        return super().forward(input_ids, labels)


class Normalised(Stack):
    """Batch norm in training mode, whose running statistics are buffers."""

    def __init__(self) -> None:
        super().__init__(2)
        self.layers.append(nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(8), nn.Unflatten(0, (-1, 12))))


class Random(Stack):
    """Adds noise that is not dropout."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return super().forward(input_ids, labels) + torch.randn(())


class Branches(Stack):
    """Looks at a value."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        loss = super().forward(input_ids, labels)
        return loss * 2 if loss > 3 else loss


class Detached(Stack):
    """Its loss depends on no parameter."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return super().forward(input_ids, labels).detach()


class Logits(Stack):
    """Returns no loss."""

    def __init__(self) -> None:
        super().__init__(2, wrap=lambda _, logits: logits)


REFUSED = {
    "a buffer is written": (Writes, oomc.UnsupportedError, r"writes to .*calls"),
    "batch norm's statistics": (Normalised, oomc.UnsupportedError, r"writes to .*num_batches_tracked"),
    "random numbers": (Random, oomc.UnsupportedError, r"draws random numbers by aten\.randn"),
    "a branch on a value": (Branches, oomc.CaptureError, r"test_compile\.py:\d+: return loss \* 2 if loss > 3"),
    "no gradient": (Detached, oomc.CaptureError, "loss does not depend on any trainable parameter"),
    "no loss": (Logits, oomc.CaptureError, r"found no scalar loss in the model's output.*loss_fn\(output, batch\)"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_models_that_cannot_be_compiled(what: str) -> None:
    kind, error, message = REFUSED[what]
    model = kind() if kind in (Writes, Logits, Normalised) else kind(2)
    before = copy.deepcopy(dict(model.state_dict()))
    pointers = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(error, match=message):
        oomc.compile(model, example=BATCH, device="cpu")
    assert [p.data_ptr() for p in model.parameters()] == pointers
    after = dict(model.state_dict())
    assert after.keys() == before.keys() and all(torch.equal(after[n], before[n]) for n in before)


def test_nothing_to_train_is_refused() -> None:
    model = Stack(2).requires_grad_(False)
    with pytest.raises((oomc.CaptureError, oomc.UnsupportedError, ValueError)):
        oomc.compile(model, example=BATCH, device="cpu")


def test_a_loss_fn_without_a_scalar_is_refused() -> None:
    with pytest.raises(oomc.CaptureError, match="found no scalar loss in what loss_fn returned"):
        oomc.compile(Logits(), example=BATCH, device="cpu", loss_fn=lambda output, _: output)


def test_a_refused_model_still_trains_eagerly() -> None:
    model: nn.Module = Branches(2)
    with pytest.raises(oomc.CaptureError):
        oomc.compile(model, example=BATCH, device="cpu")
    model(**BATCH).backward()
    assert all(p.grad is not None for p in model.parameters())
