"""A model outside of its step: lent to the device module by module, waited for, evaluated, and as before afterwards."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomc.attach import Attachment, blocks_of, evaluate
from oomc.capture import Batch, capture
from oomc.errors import OomcError
from oomc.models import tiny
from tests.helpers import tokens

CPU = torch.device("cpu")


class Lending(Attachment):
    """Lends copies on the CPU, as if the device were another, and counts how often it waits for updates."""

    def __init__(self, model: nn.Module) -> None:
        self.settled = 0
        super().__init__(model, CPU, self.count)
        self._lends = True

    def count(self) -> None:
        self.settled += 1

    def _is_away(self, tensor: Tensor) -> bool:
        return True


class Part(nn.Module):
    """A linear map without bias that calls `look` when it runs."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self.weight, self.look = nn.Parameter(torch.randn(4, 4)), look

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        return x @ self.weight


class Block(nn.Module):
    """Calls one part, and reads the weight of another that it does not call."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self.called, self.read = Part(look), Part(look)
        self.scale: Tensor
        self.register_buffer("scale", torch.full((), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.called(x) + x @ self.read.weight * self.scale


class Model(nn.Module):
    """Two blocks between a map and the same map, transposed."""

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Part(look)
        self.layers = nn.ModuleList(Block(look) for _ in range(2))
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.drop(self.last(x))


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def addresses(model: nn.Module) -> dict[str, int]:
    return {n: t.data_ptr() for n, t in [*model.named_parameters(), *model.named_buffers()]}


def versions(model: nn.Module) -> dict[str, int]:
    return {n: t._version for n, t in [*model.named_parameters(), *model.named_buffers()]}


def test_each_module_is_lent_while_it_runs_and_each_block_as_a_whole() -> None:
    lent: list[set[str]] = []
    model = Model(lambda: lent.append({n for n, a in addresses(model).items() if a != home[n]}))
    home, before = addresses(model), versions(model)
    expected = evaluate(model, (X,))
    lent.clear()
    attached = Lending(model)
    with torch.no_grad():
        assert torch.equal(model.eval()(X), expected)
    blocks = [{f"layers.{i}.{n}" for n in ("called.weight", "read.weight", "scale")} for i in range(2)]
    assert lent == [{"first.weight"}, *blocks]
    assert addresses(model) == home and versions(model) == before and not attached._loans
    assert attached.settled == 1


def test_blocks_are_the_entries_of_the_outermost_lists() -> None:
    model = nn.ModuleDict({"one": nn.ModuleList([Model()]), "two": nn.ModuleList([Model(), Model()])})
    assert blocks_of(model) == [*model["one"][0].layers, *model["two"]]  # type: ignore[index, misc]


@pytest.mark.parametrize("where", ["called", "first", "hook"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_errors_bring_everything_home(where: str, error: type[BaseException]) -> None:
    model = Model()
    attached, home, expected = Lending(model), addresses(model), evaluate(model, (X,))

    def fail(*_: Any) -> None:
        raise error

    part: Any = model.first if where == "first" else model.layers[1].called
    handle = part.register_forward_pre_hook(fail, prepend=True) if where == "hook" else None
    part.look = fail if where != "hook" else part.look
    with pytest.raises(error), torch.no_grad():
        model(X)
    if error is KeyboardInterrupt:  # torch runs no hooks then
        assert addresses(model) != home
        attached.bring_home()
    assert addresses(model) == home and not attached._running and not attached._loans
    part.look = lambda: None
    if handle is not None:
        handle.remove()
    assert torch.equal(evaluate(model, (X,)), expected)


def test_a_call_after_an_interrupt_begins_anew() -> None:
    model = Model()
    attached, expected = Lending(model), evaluate(model, (X,))
    part: Any = model.layers[0].called

    def interrupt() -> None:
        raise KeyboardInterrupt

    part.look = interrupt
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(X)
    part.look = lambda: None
    settled = attached.settled
    assert torch.equal(evaluate(model, (X,)), expected)
    assert attached.settled == settled + 1 and not attached._loans


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, depth: int) -> Tensor:
        below = self(x, depth - 1) if depth else x
        return below * self.weight


def test_modules_may_call_themselves() -> None:
    model = nn.ModuleDict({"inner": Recursive()})
    attached, home = Lending(model), addresses(model)
    with torch.no_grad():
        assert float(model["inner"](torch.ones(()), 3)) == 16.0
    assert addresses(model) == home and not attached._loans


def test_gradients_outside_of_the_step_are_refused() -> None:
    model = Model()
    attached, home = Lending(model), addresses(model)
    for module in (model, model.layers[0]):
        with pytest.raises(OomcError, match=r"call step\(\.\.\.\).*step\.evaluate\(\.\.\.\).*torch\.no_grad\(\)"):
            module(X)
    assert addresses(model) == home and not attached._running
    with torch.inference_mode():
        model(X)
    assert addresses(model) == home and not any(p.is_inference() for p in model.parameters())


def test_a_block_that_does_not_fit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    attached, home = Lending(model), addresses(model)

    move = torch.Tensor.to

    def full(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("copy"):
            raise torch.OutOfMemoryError("no room")
        return move(tensor, *args, **kwargs)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.Tensor, "to", full)
        with pytest.raises(OomcError, match=r"with all experts of a layer.*no room"):
            model(X)
    assert addresses(model) == home and not attached._loans and not attached._running
    evaluate(model, (X,))


def test_on_the_stand_in_a_model_computes_as_always() -> None:
    model = Model()
    calls: list[int] = []
    Attachment(model, CPU, lambda: calls.append(1))
    model(X).sum().backward()
    assert calls == [1]
    assert all(p.grad is not None for p in model.parameters())


def test_what_a_forward_writes_is_kept() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    plain = copy.deepcopy(model)
    Lending(model)
    with torch.no_grad():
        assert torch.equal(model(X), plain(X))
    assert all(torch.equal(b, c) for b, c in zip(model.buffers(), plain.buffers(), strict=True))
    assert float(model[0].running_mean.norm()) > 0  # type: ignore[operator]


def test_evaluation_puts_training_flags_back() -> None:
    model = Model()
    model.layers[0].eval()
    flags = [m.training for m in model.modules()]
    out = evaluate(model, (), {"x": X})
    assert [m.training for m in model.modules()] == flags and not out.requires_grad
    assert torch.equal(out, evaluate(model, (X,))), "dropout is on"
    with pytest.raises(RuntimeError):
        evaluate(model, (X[:, :3],))
    assert [m.training for m in model.modules()] == flags


def test_readers_and_writers_of_the_state_wait_for_updates() -> None:
    model = Model()
    attached = Lending(model)
    counts = []
    acts: list[Callable[[], object]] = [
        model.state_dict, model.first.state_dict, lambda: evaluate(model, (X,)), lambda: copy.deepcopy(model),
        lambda: model.load_state_dict(Model().state_dict()),
        lambda: model.first.load_state_dict(Model().first.state_dict()),
    ]  # fmt: skip
    for act in acts:
        before = attached.settled
        act()
        counts.append(attached.settled - before)
    assert all(counts)
    attached.remove()
    model.state_dict()
    model(X).sum().backward()
    assert attached.settled == sum(counts)


def test_copies_and_pickles_of_the_model_are_not_attached() -> None:
    model = tiny.build("llama")
    attached = Lending(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    others = copy.deepcopy(model), torch.load(file, weights_only=False)
    settled = attached.settled
    for other in others:
        other(**tokens(1, 8)).loss.backward()
        assert next(other.parameters()).grad is not None
    assert attached.settled == settled > 0


def test_capture_passes_by() -> None:
    model = tiny.build("plain_moe")
    attached = Lending(model)
    with torch.enable_grad():
        program = capture(model, Batch.bind(model, (), tokens(2, 12)))
    assert attached.settled == 0 and not attached._running
    assert len(program.inputs) > 5


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
def test_generate(name: str) -> None:
    model: Any = tiny.build(name).eval()
    ids, mask = tokens(2, 6)["input_ids"], torch.ones(2, 6, dtype=torch.int64)

    def generate() -> Tensor:
        return model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)

    expected, home = generate(), addresses(model)
    attached = Lending(model)
    assert torch.equal(generate(), expected)
    assert attached.settled >= 4 and addresses(model) == home


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "plain_moe"])
def test_a_model_of_the_host_computes_on_the_gpu(name: str) -> None:
    model: Any = tiny.build(name).eval()
    batch, home = tokens(2, 12), addresses(model)
    expected = evaluate(model, (), batch)
    Attachment(model, torch.device("cuda", 0), lambda: None)
    evaluate(model, (), batch)  # libraries take their workspaces
    taken = torch.cuda.memory_allocated()
    out = evaluate(model, (), batch)
    loss = out if name == "plain_moe" else out.loss
    reference = expected if name == "plain_moe" else expected.loss
    assert loss.device.type == "cuda"
    torch.testing.assert_close(loss.cpu(), reference, rtol=1e-4, atol=1e-5)
    del out, loss
    assert addresses(model) == home and torch.cuda.memory_allocated() <= taken + 512
    with pytest.raises(OomcError, match="gradients enabled"):
        model(**batch)


@pytest.mark.cuda
def test_generate_on_the_gpu() -> None:
    model: Any = tiny.build("qwen3_moe").eval()
    ids, mask = tokens(2, 6)["input_ids"], torch.ones(2, 6, dtype=torch.int64)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    Attachment(model, torch.device("cuda", 0), lambda: None)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert torch.equal(out.cpu(), expected)


@pytest.mark.cuda
def test_what_is_on_the_gpu_stays_there() -> None:
    model = Model()
    device = torch.device("cuda", 0)
    for block in model.layers:
        block.to(device)
    before, expected = addresses(model), None
    expected = evaluate(Model(), (X,))
    Attachment(model, device, lambda: None)
    out = evaluate(model, (X,))
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)
    assert addresses(model) == before


@pytest.mark.cuda
def test_weights_may_be_written_right_after_an_evaluation() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))
    for parameter in model.parameters():
        parameter.data = parameter.data.pin_memory()
    x = torch.randn(4096, 2048)
    Attachment(model, torch.device("cuda", 0), lambda: None)
    expected = evaluate(model, (x,)).cpu()
    out = evaluate(model, (x,))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(out.cpu(), expected)
    assert not F.relu(evaluate(model, (x,))).any()
