"""What the user writes to a model between steps is found, or refused; buffers without values are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oomc.edits import Edits, check_buffers
from oomc.errors import OomcError, UnsupportedError
from oomc.models import tiny
from tests.cases_models import Stack

NAME = "layers.0.linear.weight"
Act = Callable[[Stack], Any]


def weight(model: Stack) -> nn.Parameter:
    return model.get_parameter(NAME)


def copied(model: Stack) -> None:
    with torch.no_grad():
        weight(model).copy_(torch.ones(8, 8))


def multiplied(model: Stack) -> None:
    with torch.no_grad():
        weight(model).mul_(2)


def through_detach(model: Stack) -> None:
    weight(model).detach()[0].zero_()


def other_storage(model: Stack) -> None:
    weight(model).data = torch.ones(8, 8)


def replaced(model: Stack) -> None:
    model.layers[0].linear.weight = nn.Parameter(torch.ones(8, 8))  # type: ignore[union-attr]


def initialised(model: Stack) -> None:
    nn.init.zeros_(weight(model))


@pytest.mark.parametrize("act", [copied, multiplied, through_detach, other_storage, replaced, initialised])
def test_writes_are_found(act: Act) -> None:
    model = Stack(2)
    edits = Edits(model)
    assert edits.take() == []
    act(model)
    assert edits.find() == edits.take() == [NAME]
    edits.remember(under_way=True)
    assert edits.take() == []


def test_loading_a_state_dict_is_a_write_to_all() -> None:
    for assign in (False, True):
        model = Stack(2)
        edits = Edits(model)
        model.load_state_dict(Stack(2).state_dict(), assign=assign)
        assert edits.take() == [n for n, _ in model.named_parameters()]


def test_the_steps_own_updates_are_no_writes_of_the_user() -> None:
    model = Stack(2)
    edits = Edits(model)
    weight(model).detach().numpy()[:] = 3.0
    weight(model).grad = torch.ones(8, 8)
    evaluated = model(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64))
    evaluated.backward()
    assert edits.take() == []


@pytest.mark.parametrize("act", [copied, other_storage, replaced])
@pytest.mark.parametrize("call", [Edits.take, Edits.settle])
def test_writes_under_an_update_are_refused_once(act: Act, call: Callable[[Edits], Any]) -> None:
    model = Stack(2)
    edits = Edits(model)
    edits.remember(under_way=True)
    act(model)
    with pytest.raises(OomcError, match=rf"{NAME} was written to while .* call step\.synchronize\(\) before"):
        call(edits)
    assert edits.take() == [] and not edits.under_way
    act(model)
    assert edits.take() == [NAME]


def test_writes_after_the_wait_are_the_new_weights() -> None:
    model = Stack(2)
    edits = Edits(model)
    edits.remember(under_way=True)
    assert edits.under_way
    edits.settle()
    model.load_state_dict(Stack(2).state_dict())
    edits.settle()
    assert len(edits.take()) == len(list(model.parameters()))


def halved(model: Stack) -> None:
    model.half()


def resized(model: Stack) -> None:
    model.layers[0].linear = nn.Linear(8, 9)


def frozen(model: Stack) -> None:
    weight(model).requires_grad_(False)


def to_meta(model: Stack) -> None:
    weight(model).data = weight(model).data  # the same memory is no change
    model.layers[0].linear.weight = nn.Parameter(torch.empty(8, 8, device="meta"))  # type: ignore[union-attr]


def more(model: Stack) -> None:
    model.layers[0].more = nn.Parameter(torch.zeros(1))


def fewer(model: Stack) -> None:
    del model.head.bias


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (halved, "now has dtype torch.float16; the step was compiled for torch.float32"),
        (resized, r"layers\.0\.linear\.weight now has shape \(9, 8\); the step was compiled for \(8, 8\)"),
        (frozen, "now has requires_grad False; the step was compiled for True"),
        (to_meta, "now has is_meta True"),
        (more, r"new are \['layers\.0\.more'\], missing are none"),
        (fewer, r"new are none, missing are \['head\.bias'\]"),
    ],
)
def test_another_model_is_refused(act: Act, text: str) -> None:
    model = Stack(2)
    edits = Edits(model)
    act(model)
    with pytest.raises(OomcError, match=text):
        edits.take()


@pytest.mark.cuda
def test_a_model_moved_to_the_gpu_is_a_write_to_all() -> None:
    model = Stack(2)
    edits = Edits(model)
    model.to("cuda")
    assert edits.take() == [n for n, _ in model.named_parameters()]


class Rotary(nn.Module):
    """Buffers as models have them."""

    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.inv_freq: Tensor
        self.mask: Tensor
        self.register_buffer("inv_freq", 10.0 ** -torch.arange(4.0), persistent=persistent)
        self.register_buffer("mask", torch.full((2,), -torch.inf), persistent=False)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64), persistent=False)


def test_buffers_with_values_pass(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Sequential(Rotary())
    model[0].inv_freq[2:] = 0  # type: ignore[operator]  # as some models pad theirs
    check_buffers(model)
    for name in ("llama", "deepseek_v3", "gpt_oss"):
        check_buffers(tiny.build(name, torch.bfloat16))
    assert not recwarn.list


def test_buffers_on_the_meta_device_are_refused_by_name() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Rotary())
    with pytest.raises(UnsupportedError, match=r"buffer 0\.inv_freq is on the meta device .* no checkpoint holds it"):
        check_buffers(model)
    with torch.device("meta"):
        model = nn.Sequential(Rotary(persistent=True))
    with pytest.raises(UnsupportedError, match=r"buffer 0\.inv_freq .* load the weights before compiling"):
        check_buffers(model)


@pytest.mark.parametrize("garbage", [0.0, -1.0, torch.nan, torch.inf])
def test_frequencies_of_unused_memory_are_refused(garbage: float) -> None:
    model = nn.Sequential(Rotary())
    model[0].inv_freq.fill_(garbage)  # type: ignore[operator]
    with pytest.raises(UnsupportedError, match=r"buffer 0\.inv_freq holds what memory holds after to_empty\(\)"):
        check_buffers(model)


def test_other_buffers_of_unused_memory_are_refused() -> None:
    model = nn.Sequential(Rotary())
    model[0].mask[1] = torch.nan  # type: ignore[operator]
    with pytest.raises(UnsupportedError, match=r"buffer 0\.mask .* NaN; no checkpoint holds it"):
        check_buffers(model)


def test_case_11_frequencies_in_bf16_get_a_warning() -> None:
    model = nn.Sequential(Rotary()).to(torch.bfloat16)
    with pytest.warns(UserWarning, match=r"buffer 0\.inv_freq has dtype torch\.bfloat16, in which distant positions"):
        check_buffers(model)
