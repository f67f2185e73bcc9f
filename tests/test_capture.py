"""Capture: how calls are bound, where the loss is found, and that one trace serves every shape."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oomc
from oomc.capture import Batch, capture, find_loss
from oomc.passes.canonicalize import Canonicalize
from tests.cases_models import Stack
from tests.helpers import accumulate, compiled, relative, tokens, worst
from tests.programs import VOCAB, tensors_of
from tests.reference import Reference

BATCH = tokens(2, 12, vocab=VOCAB)


class Takes(nn.Module):
    """Takes a container and keywords."""

    def forward(self, x: Tensor, images: list[Tensor], scale: float = 1.0, **others: Tensor) -> Tensor:
        return x.sum() * scale + sum(i.sum() for i in images) + sum(o.sum() for o in others.values())


class Stars(nn.Module):
    """Takes any positional arguments."""

    def forward(self, *xs: Tensor) -> Tensor:
        return xs[0].sum()


def test_calls_are_bound_as_python_binds_them() -> None:
    x, y, z = torch.ones(1), torch.ones(2), torch.ones(3)
    batch = Batch.bind(Takes(), (x,), {"images": [y, z], "scale": 2.0, "extra": z})
    assert list(batch.tensors) == ["x", "images.0", "images.1", "extra"]
    assert batch.static == {"scale": 2.0}
    rebuilt = batch.rebuild(batch.tensors)
    assert rebuilt["images"][1] is z and rebuilt["scale"] == 2.0 and rebuilt["extra"] is z
    assert all(t.device.type == "meta" for t in batch.shapes_only().tensors.values())
    with pytest.raises(TypeError):
        Batch.bind(Takes(), (), {})
    with pytest.raises(oomc.UnsupportedError, match=r"takes \*xs; call the step with keyword arguments"):
        Batch.bind(Stars(), (x,), {})


def test_keys_hold_no_sizes() -> None:
    def key(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[Any, ...]:
        return Batch.bind(Takes(), (torch.ones(*shape, dtype=dtype), []), {"scale": scale}).key()

    assert key(2, 3) == key(4, 5)
    assert len({key(2, 3), key(2), key(2, 3, dtype=torch.int64), key(2, 3, scale=2.0)}) == 4


LOSS = torch.tensor(1.5)


@pytest.mark.parametrize(
    "output", [LOSS, SimpleNamespace(loss=LOSS), {"loss": LOSS, "other": 1}, (LOSS, torch.ones(3)), [LOSS]]
)
def test_the_loss_is_found(output: Any) -> None:
    assert find_loss(output) is LOSS


@pytest.mark.parametrize("output", [torch.ones(2), SimpleNamespace(loss=None), {}, (), (torch.ones(3),), None, 1.5])
def test_no_loss_is_found(output: Any) -> None:
    assert find_loss(output) is None


def test_the_model_is_as_it_was_after_capture() -> None:
    model = Stack(2)
    ids = {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]}
    program = capture(model, Batch.bind(model, (), BATCH))
    assert {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]} == ids
    kinds = {s.target: s.kind for s in program.inputs}
    assert kinds["input_ids"] == "input" and kinds["layers.0.bias"] == "buffer" and kinds["head.weight"] == "parameter"
    with torch.device("meta"):
        empty = Stack(2)
    assert len(capture(empty, Batch.bind(empty, (), BATCH)).inputs) == len(program.inputs)


def shifted(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def reshaped(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].reshape(-1, VOCAB), batch["labels"][..., 1:].reshape(-1))


def transposed(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"], label_smoothing=0.1)


def counted(logits: Tensor, batch: Any) -> Tensor:
    total = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return total / (batch["labels"] != -100).sum()


def averaged(logits: Tensor, batch: Any) -> Tensor:
    """Over a number of tokens that the code has as a float."""
    return logits.square().sum() / (0.0 + 2 * logits.shape[0] * logits.shape[1])


def gathered(logits: Tensor, batch: Any) -> Tensor:
    return -F.log_softmax(logits, -1).gather(-1, batch["labels"].clamp_min(0)[..., None]).mean()


def check_loss_fn(loss_fn: Any, batches: list[dict[str, Any]]) -> None:
    """Loss and gradients over batches of several shapes."""
    torch.manual_seed(0)
    model = Stack(2, wrap=lambda _, logits: logits)
    eager = copy.deepcopy(model)
    step = compiled(model, batches[0], loss_fn=loss_fn)

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = eager

        def forward(self, **batch: Tensor) -> Tensor:
            return loss_fn(self.model(**batch), batch)

    reference = Reference(WithLoss())
    for batch in batches:
        assert relative(*accumulate(step, reference, batch)) <= 1e-6
        for name, gradient in step.gradients().items():
            assert relative(gradient, reference._sums[f"model.{name}"]) <= 1e-5, name


@pytest.mark.parametrize("loss_fn", [shifted, reshaped, transposed, counted, averaged, gathered])
def test_loss_functions(loss_fn: Any) -> None:
    check_loss_fn(loss_fn, [tokens(2, 12, VOCAB, masked=True), tokens(3, 20, VOCAB, seed=1), tokens(1, 7, VOCAB)])


def summed(logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """A sum over tokens that weigh 0.25 each, and what they weigh."""
    losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return 0.25 * losses.sum(), 0.25 * (batch["labels"] != -100).sum()


@pytest.mark.parametrize("valid", [24, 1, 0])
def test_a_sum_and_its_count(valid: int) -> None:
    torch.manual_seed(0)
    model = Stack(2, wrap=lambda _, logits: logits)
    batch = tokens(2, 12, VOCAB)
    batch["labels"].flatten()[valid:] = -100
    program = Canonicalize()(capture(model, Batch.bind(model, (), batch), loss_fn=summed)).program
    assert program.count is not None
    known = tensors_of(program, model) | batch
    loss, count = program.forward(*(known[s.target] for s in program.inputs))
    total, expected = summed(model(**batch), batch)
    assert count == expected == 0.25 * valid
    assert relative(loss, total / expected if valid else torch.zeros(())) <= 1e-6


def count_as_an_int(logits: Tensor, batch: Any) -> Any:
    return logits.sum(), batch["labels"].numel()


def count_as_a_bool(logits: Tensor, batch: Any) -> Any:
    return logits.sum(), (batch["labels"] != -100).any()


@pytest.mark.parametrize("loss_fn", [count_as_an_int, count_as_a_bool])
def test_a_count_that_is_no_tensor_of_a_number_is_refused(loss_fn: Any) -> None:
    model = Stack(2, wrap=lambda _, logits: logits)
    with pytest.raises(oomc.CaptureError, match=r"count by tensor operations, as in \(labels != -100\)\.sum\(\)"):
        capture(model, Batch.bind(model, (), BATCH), loss_fn=loss_fn)


def test_a_loss_function_may_return_the_loss_first() -> None:
    model = Stack(2, wrap=lambda _, logits: logits)
    program = capture(model, Batch.bind(model, (), BATCH), loss_fn=lambda x, batch: (shifted(x, batch), x))
    assert program.count is None


class Rows(nn.Module):
    """A perceptron of rows of features: no sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), y)


def test_rows_of_features_have_no_sequence() -> None:
    torch.manual_seed(0)
    model = Rows()
    reference = Reference(model)
    step = compiled(model, {"x": torch.randn(8, 6), "y": torch.randn(8, 3)})
    for rows in (8, 5, 1):
        batch: dict[str, Any] = {"x": torch.randn(rows, 6), "y": torch.randn(rows, 3)}
        assert relative(*accumulate(step, reference, batch)) <= 1e-6
        assert all(relative(g, reference._sums[n]) <= 1e-5 for n, g in step.gradients().items())


def scaled(h: Tensor, t: Tensor) -> Tensor:
    t *= 0.5
    return h + F.relu_(t)


def sliced(h: Tensor, t: Tensor) -> Tensor:
    t[:, :1] = h[:, :1]
    return h + t


def moved(h: Tensor, t: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:, 1:] = t[:, :-1]
    return h + out


def selected(h: Tensor, t: Tensor) -> Tensor:
    t[:, 0] = 1.0
    return h + t.mul_(0.5)


def masked(h: Tensor, t: Tensor) -> Tensor:
    t[t > 0] = 0.3
    return h + t


class Writing(nn.Module):
    """Layers that write in place, `h = write(h, W h)`."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.write = write

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        shifted = input_ids.new_zeros(input_ids.shape)  # as encoder-decoder models shift their labels
        shifted[:, 1:] = input_ids[:, :-1].clone()
        shifted[:, 0] = 2
        h = self.embed(shifted)
        for layer in self.layers:
            h = self.write(h, layer(h))
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("write", [scaled, sliced, moved, selected, masked])
def test_writes_in_place(write: Any) -> None:
    """Also those through views: they are right, in whatever block the view was taken."""
    torch.manual_seed(0)
    model = Writing(write)
    reference = Reference(model)
    step = compiled(model, BATCH)
    for batch in (BATCH, tokens(3, 20, vocab=VOCAB)):
        assert relative(*accumulate(step, reference, batch)) <= 1e-6
        error, name = worst(step.gradients(), reference._sums)
        assert error <= 1e-5, name
