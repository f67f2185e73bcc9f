"""Faults that were found by misuse: interrupts, failures half-way, steps that are closed, dropped or compiled again."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import BaseTorchFunctionMode

import oomc
from oomc import private
from oomc.attach import Attachment
from oomc.checkpoint_write import Files
from oomc.runtime.adamw import AdamW
from oomc.runtime.gradients import GradientSink
from oomc.runtime.lanes import Lane
from oomc.runtime.memory import HostMemory
from oomc.runtime.pool import Countdown
from oomc.runtime.update_workers import Ring
from oomc.state import State
from oomc.step import Step
from tests.helpers import ADAMW, compiled, masters, own_threads, state, tokens, worst
from tests.programs import TopK
from tests.reference import Reference

VOCAB = 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.head = nn.Linear(32, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.emb(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(seed: int = 0, size: int = 2) -> dict[str, Any]:
    return tokens(size, 8, VOCAB, seed)


def make(model: nn.Module | None = None, size: int = 2, **options: Any) -> Step:
    return compiled(Net() if model is None else model, batch(size=size), like=("regressions",), **options)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def interrupt_call(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, number: int) -> None:
    """Let Ctrl-C come as the main thread makes the `number`-th call (from 1) of this method."""
    method, calls = getattr(kind, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            calls[0] += 1
            if calls[0] == number:
                raise KeyboardInterrupt
        return method(*args, **kwargs)

    static = isinstance(inspect.getattr_static(kind, name), staticmethod)
    monkeypatch.setattr(kind, name, staticmethod(call) if static else call)


@pytest.fixture
def in_seconds() -> Any:
    """What hangs fails."""

    def late(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# -- interrupts -----------------------------------------------------------------------------------------------------


def once(step: Step, seed: int, accumulates: bool) -> None:
    if not accumulates:
        step(**batch(seed))
        return
    step.forward_backward(**batch(seed))
    step.forward_backward(**batch(seed + 50))
    step.update()


@pytest.mark.usefixtures("in_seconds")
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("norm", [None, 0.1])
def test_an_interrupt_at_any_submission_leaves_a_whole_state_or_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, norm: float | None, accumulates: bool
) -> None:
    """What was noted as under way and not handed to a lane yet would be waited for for ever."""
    step, submit = make(max_grad_norm=norm), Lane.submit
    once(step, 1, accumulates)
    step.save(tmp_path / "saved")
    before = state(step)
    once(step, 2, accumulates)
    after = state(step)
    once(step, 3, accumulates)
    last, seen, number = state(step), set(), 1
    while True:
        step.load(tmp_path / "saved")
        interrupt_call(monkeypatch, Lane, "submit", number)
        try:
            once(step, 2, accumulates)
        except KeyboardInterrupt:
            monkeypatch.setattr(Lane, "submit", submit)
        else:
            break
        if step._broken:
            with pytest.raises(oomc.OomcError, match=r"step\.load"):
                step(**batch())
            seen.add("broken")
        elif step._window:  # the first micro-batch is there, and the second has come to nothing
            assert same(state(step), before)
            seen.add("window")
        else:
            assert same(state(step), before)
            once(step, 2, accumulates)
            once(step, 3, accumulates)
            assert same(state(step), last) and step.metrics["steps"] == 3
            seen.add("before")
        number += 7
    monkeypatch.setattr(Lane, "submit", submit)
    assert same(state(step), after) and "before" in seen


@pytest.mark.usefixtures("in_seconds")
def test_an_interrupted_update_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step = make()
    step(**batch())
    step.save(tmp_path / "saved")
    before = state(step)
    step.forward_backward(**batch(1))
    apply, interrupted = GradientSink._kept_job, [0]

    def kept_job(*args: Any) -> Any:
        interrupted[0] += 1
        if interrupted[0] == 3:
            raise KeyboardInterrupt
        return apply(*args)

    monkeypatch.setattr(GradientSink, "_kept_job", kept_job)
    with pytest.raises(KeyboardInterrupt):
        step.update()
    with pytest.raises(oomc.OomcError, match=r"step\.load"):
        step(**batch(1))
    step.load(tmp_path / "saved")
    assert same(state(step), before)


@pytest.mark.usefixtures("in_seconds")
def test_an_interrupted_save_does_not_hold_updates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step = make()

    def start(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("oomc.checkpoint_write.Save.start", start)
    with pytest.raises(KeyboardInterrupt):
        step.save(tmp_path / "saved", asynchronous=True)
    step(**batch())
    step.synchronize()
    assert list(tmp_path.iterdir()) == []


# -- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("notice", [None, "synchronize", "state_dict"])
def test_one_load_is_enough_after_an_update_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, notice: str | None
) -> None:
    step = make()
    step(**batch())
    step.save(tmp_path / "saved")
    before = state(step)

    def update(*_: Any) -> int:
        raise ValueError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(AdamW, "update", update)
        step(**batch(1))
        if notice is not None:
            with pytest.raises(RuntimeError):
                step.synchronize() if notice == "synchronize" else step.model.state_dict()
            with pytest.raises(oomc.OomcError, match=r"step\.load"):
                step(**batch(1))
        step._runtime._d2h.drain()  # type: ignore[union-attr]
        time.sleep(0.05)
    step.load(tmp_path / "saved")
    assert same(state(step), before)


def test_close_gives_back_what_there_is_after_an_update_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before = own_threads()
    step = make()
    monkeypatch.setattr(AdamW, "update", lambda *_: 1 // 0)
    step(**batch())
    with pytest.raises(RuntimeError):
        step.close()
    assert own_threads() == before
    step.close()


def fail_once(monkeypatch: pytest.MonkeyPatch, number: int) -> Callable[[], None]:
    """Let the `number`-th slab find no memory."""
    make_slab, calls = State._make, [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            raise MemoryError
        return make_slab(*args, **kwargs)

    monkeypatch.setattr(State, "_make", call)
    return lambda: monkeypatch.setattr(State, "_make", make_slab)


def test_compiling_can_be_tried_again_when_memory_has_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Reference(Net(), **ADAMW)
    step = make(prepare=False)
    fail_once(monkeypatch, 3)
    with pytest.raises(MemoryError):
        step(**batch())
    step(**batch())
    reference.step(**batch())
    assert worst(masters(step), reference.masters())[0] <= 1e-4


def small_device(size: int) -> int:
    with pytest.raises(oomc.BudgetError) as caught:
        make(size=size, device="1KiB")
    assert caught.value.smallest_device is not None
    return caught.value.smallest_device


def test_training_goes_on_when_memory_has_run_out_between_host_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = small_device(256)
    steps = [make(size=1, device=budget) for _ in range(2)]
    resident = len(steps[0]._state.resident)
    for step in steps:
        step(**batch(1, size=1))
    restore = fail_once(monkeypatch, 2)
    with pytest.raises(MemoryError):
        steps[1](**batch(2, size=256))
    assert 0 < len(steps[1]._state.resident) < resident
    restore()
    for seed, size in (3, 1), (4, 256):
        for step in steps:
            step(**batch(seed, size=size))
        assert same(state(steps[0]), state(steps[1]))


def test_an_interrupted_move_is_noticed_and_load_repairs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step = make(size=1, device=small_device(256))
    step(**batch(1, size=1))
    step.save(tmp_path / "saved")
    before = state(step)
    interrupt_call(monkeypatch, State, "_bind", 2)
    with pytest.raises(KeyboardInterrupt):
        step(**batch(2, size=256))
    with pytest.raises(oomc.OomcError, match=r"step\.load"):
        step(**batch(2, size=1))
    step.load(tmp_path / "saved")
    assert same(state(step), before)
    weights = dict(step.model.named_parameters())
    assert all(torch.equal(weights[name], master) for name, master in masters(step).items())


# -- closed, dropped, compiled again --------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_seconds")
def test_a_closed_step_says_so() -> None:
    step = make()
    step(**batch())
    step.close()
    for use in (
        lambda: step(**batch()), lambda: step.forward_backward(**batch()), step.update, lambda: step.save("nowhere"),
        lambda: step.load("nowhere"), lambda: step.prepare(**batch()), step.optimizer.state_dict,
    ):  # fmt: skip
        with pytest.raises(oomc.OomcError, match="closed"):
            use()


def test_a_dropped_step_is_freed_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        before = own_threads()
        step = make()
        step(**batch())
        gone = weakref.ref(step)
        del step
        assert gone() is None and own_threads() <= before
    finally:
        gc.enable()


def test_a_step_may_be_collected_in_its_own_thread() -> None:
    gc.collect()
    before = own_threads()
    holder: dict[str, Any] = {"step": make()}
    holder["holder"] = holder
    holder["step"](**batch())
    pool, gone, go, done = holder["step"]._runtime._pool, weakref.ref(holder["step"]), threading.Event(), Countdown(1)
    pool.submit(lambda: (go.wait(), gc.collect())[0], done)
    gc.disable()
    try:
        del holder, pool
        go.set()
        done.wait()
    finally:
        gc.enable()
    deadline = time.monotonic() + 10
    while own_threads() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone() is None and own_threads() == before


def test_a_dropped_step_finishes_its_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step, write = make(), Files.write_tensors
    step(**batch())
    before = state(step)

    def slowly(*args: Any) -> None:
        time.sleep(0.05)
        write(*args)

    monkeypatch.setattr(Files, "write_tensors", slowly)
    save = step.save(tmp_path / "saved", asynchronous=True)
    del step
    save.wait()
    other = make()
    other.load(tmp_path / "saved")
    assert same(state(other), before)


def test_load_state_dict_waits_for_a_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step, write = make(), Files.write_tensors
    step(**batch())
    before = state(step)

    def slowly(*args: Any) -> None:
        time.sleep(0.05)
        write(*args)

    monkeypatch.setattr(Files, "write_tensors", slowly)
    save = step.save(tmp_path / "saved", asynchronous=True)
    step.model.load_state_dict({name: torch.zeros_like(w) for name, w in step.model.state_dict().items()})
    save.wait()
    step.load(tmp_path / "saved")
    assert same(state(step), before)


def test_the_same_optimizer_serves_a_model_that_is_compiled_again() -> None:
    model, reference = Net(), Reference(Net(), **ADAMW)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    step = make(model, optimizer=optimizer)
    for seed in range(3):
        step(**batch(seed))
        reference.step(**batch(seed))
    saved = copy.deepcopy(optimizer.state_dict())
    step.close()
    step = make(model, optimizer=optimizer)
    optimizer.load_state_dict(saved)
    for seed in range(3, 6):
        step(**batch(seed))
        reference.step(**batch(seed))
    assert worst(masters(step), reference.masters())[0] <= 1e-4


@pytest.mark.parametrize("by", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_of_a_model_wait_for_its_own_parameters(by: Callable[[nn.Module], nn.Module]) -> None:
    """Those of the module that is copied, not of its parts alone."""

    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(VOCAB))

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids, labels) * self.scale.mean()

    Scaled.__qualname__, globals()["Scaled"] = "Scaled", Scaled  # so that it can be pickled
    model = Scaled()
    step = compiled(model, batch(), like=("regressions", "scaled"), max_grad_norm=1.0, chaos=0)
    for seed in range(5):
        for part in (model, model.head):
            step(**batch(seed))
            copied = by(part)
            step.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), part.parameters(), strict=True))


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"), [("maximize", True), ("amsgrad", True), ("decoupled_weight_decay", False)]
)
def test_options_that_come_later_are_refused_too(option: str, value: bool) -> None:
    step = make()
    step(**batch())
    before = state(step)
    step.optimizer.param_groups[0][option] = value
    with pytest.raises(oomc.UnsupportedError, match=f"{option}={value}"):
        step(**batch())
    assert same(state(step), before)
    step.optimizer.param_groups[0][option] = not value
    step(**batch())


def test_a_parameter_group_that_comes_later_is_refused() -> None:
    model = Net()
    model.head.bias.requires_grad_(False)
    step = compiled(model, batch(), optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    step.optimizer.add_param_group({"params": [model.head.bias]})
    with pytest.raises(oomc.OomcError, match="compile again"):
        step(**batch())


def test_autocast_is_refused() -> None:
    step = make()
    step(**batch())
    before = state(step)
    with pytest.raises(oomc.UnsupportedError, match="autocast"), torch.autocast("cpu", dtype=torch.bfloat16):
        step(**batch())
    assert same(state(step), before)


def test_a_place_that_cannot_be_written_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(oomc.CheckpointError, match="could not be written"):
        make().save(tmp_path / "file" / "saved")


@pytest.mark.parametrize("training", [False, True])
def test_another_mode_than_when_it_was_compiled_is_said(training: bool) -> None:
    torch.manual_seed(0)
    model = TopK(dropout=0.3).train(training)
    batch = tokens(2, 6, vocab=8)
    step = compiled(model, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(**batch)
    model.train(not training)
    with pytest.warns(UserWarning, match=f"goes on {'with' if training else 'without'} dropout"):
        step(**batch)


def test_metrics_of_a_micro_batch_wait_for_no_norm() -> None:
    """Whatever plan is the current one by then: a micro-batch decides nothing."""
    step = compiled(Net(), batch(), max_grad_norm=0.05)
    step.forward_backward(**batch())
    step.prepare(**batch())
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.append(step.metrics), daemon=True)
    reader.start()
    reader.join(30)
    assert found and found[0]["grad_norm"] is None
    step.update()
    assert step.metrics["grad_norm"] > 0


def test_what_was_written_to_parameters_survives_when_slabs_move() -> None:
    model = Net()
    step = compiled(model, batch(), device="1GiB")
    step(**batch())
    step.synchronize()
    assert step.plan.resident
    step.use_plan(replace(step.plan, resident=()), **batch())
    weight = model.head.weight
    weight.data = torch.ones_like(weight)
    step.prepare(**batch())
    assert not step.plan.resident
    assert torch.equal(model.head.weight, torch.ones_like(weight))
    assert torch.equal(masters(step)["head.weight"], torch.ones_like(weight))


def test_a_model_whose_step_was_closed_half_way_can_be_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    step = compiled(model, batch())
    step(**batch())

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(GradientSink, "close", interrupted)
        step.close()
    float(compiled(model, batch())(**batch()))


@pytest.mark.parametrize("at", [Lane, Ring, HostMemory, GradientSink, Attachment])
def test_a_second_close_gives_back_what_an_interrupted_one_has_not(at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = own_threads()
    step = make()
    step(**batch())
    name = "remove" if at is Attachment else "close"
    close, calls = getattr(at, name), 0

    def interrupted(self: Any) -> None:
        nonlocal calls
        calls += 1
        close(self)
        if calls == 2 or at in (Ring, GradientSink, Attachment):  # there is one of these
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(at, name, interrupted)
        step.close()
    with pytest.raises(oomc.OomcError, match="closed"):
        step(**batch())
    for _ in range(2):
        step.close()
    assert own_threads() == before
    assert step._runtime is not None
    assert all(not slab.state and not slab.weights.numel() for slab in step._runtime.slabs.values())
    make(step.model).close()  # it belongs to no step


@pytest.mark.parametrize("mode", [lambda: private.fake_mode(symbolic=False), lambda: torch.device("meta")])
def test_a_step_is_closed_under_a_mode_too(mode: Callable[[], Any]) -> None:
    model, before = Net(), own_threads()
    step = make(model)
    step(**batch())
    step.synchronize()
    weights = model.head.weight.detach().clone()
    with mode():
        step.close()
    assert own_threads() == before and torch.equal(model.head.weight, weights)


def test_a_step_that_is_collected_while_something_traces_is_closed_all_the_same() -> None:
    """The collector runs where it likes: under a mode, what closing makes would be traced."""
    before = own_threads()
    for mode in (private.fake_mode(symbolic=False), BaseTorchFunctionMode()):
        model = Net()
        step = make(model)
        step(**batch())
        step.synchronize()
        weights = model.head.weight.detach().clone()
        with mode, warnings.catch_warnings():
            warnings.simplefilter("error")
            del step
            gc.collect()
        assert own_threads() == before
        assert torch.equal(model.head.weight, weights)


def test_a_parameter_in_the_place_of_another_is_trained_saved_and_in_the_optimizer(tmp_path: Path) -> None:
    """In eager, the optimizer would go on with the old one, unseen; here the step trains what the model holds."""
    model, other = Net(), Net()
    step, twin = make(model), make(other)
    for each in (step, twin):
        each(**batch())
        each.synchronize()
    model.head.weight = nn.Parameter(torch.full_like(model.head.weight, 0.5))
    with torch.no_grad():
        other.head.weight.fill_(0.5)
    for seed in (1, 2):
        assert torch.equal(step(**batch(seed)), twin(**batch(seed)))
    assert same(state(step), state(twin))
    held = [p for group in step.optimizer.param_groups for p in group["params"]]
    assert any(p is model.head.weight for p in held) and len(held) == len(list(model.parameters()))
    step.save(tmp_path / "a")
    for mine, its in zip(*(each.optimizer.state_dict()["state"].values() for each in (step, twin)), strict=True):
        assert all(torch.equal(mine[key], its[key]) for key in mine)
    step.optimizer.load_state_dict(twin.optimizer.state_dict())
    loaded = make()
    loaded.load(tmp_path / "a")
    assert same(state(loaded), state(twin)) and same(state(step), state(twin))
    with pytest.raises(oomc.UnsupportedError, match="belongs to another step"):
        compiled(model, batch())


@pytest.mark.parametrize("whole", [True, False])
def test_two_parameters_that_are_swapped_are_both_there(whole: bool) -> None:
    """Each lies in the other's memory, which is about to be written to."""
    model = Net()
    step = make(model)
    step(**batch())
    step.synchronize()
    one, other = model.layers[0][0], model.layers[1][0]  # type: ignore[index]
    wanted = other.weight.detach().clone(), one.weight.detach().clone()
    if whole:
        one.weight, other.weight = other.weight, one.weight
    else:
        one.weight.data, other.weight.data = other.weight.data, one.weight.data
    step.prepare(**batch())
    assert torch.equal(one.weight, wanted[0]) and torch.equal(other.weight, wanted[1])
    step(**batch(1))
    step.synchronize()
    for each in (one, other):
        each.weight = nn.Parameter(torch.zeros_like(each.weight))
    step.prepare(**batch())
    assert not one.weight.any() and not other.weight.any()
    held = {id(p) for group in step.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}


def test_a_parameter_that_is_refused_is_not_the_optimizers() -> None:
    model = Net()
    step = make(model)
    step(**batch())
    step.synchronize()
    before = model.head.weight
    model.head.weight = nn.Parameter(before.detach().to(torch.bfloat16))
    with pytest.raises(oomc.OomcError, match=r"head\.weight now has dtype"):
        step(**batch())
    assert any(p is before for group in step.optimizer.param_groups for p in group["params"])
    model.head.weight = before
    step(**batch())


@pytest.mark.parametrize("use", [
    lambda step, path: step.save(path), lambda step, _: step(**batch()), lambda step, _: step.synchronize(),
])  # fmt: skip
@pytest.mark.parametrize("whole", [True, False])
def test_a_write_that_is_refused_does_not_seem_to_be_there(
    use: Callable[[Step, Path], Any], whole: bool, tmp_path: Path
) -> None:
    """It came while an update was under way: another parameter, or storage, is put back to the step's memory."""
    model = Net()
    step = make(model)
    step(**batch())
    written = torch.full(model.head.weight.shape, 0.5)
    if whole:
        model.head.weight = nn.Parameter(written)
    else:
        model.head.weight.data = written
    with pytest.raises(oomc.OomcError, match="written to while the last step's update"):
        use(step, tmp_path / "a")
    step.save(tmp_path / "a")
    step(**batch(1))
    step.synchronize()
    assert torch.equal(model.head.weight, masters(step)["head.weight"])
    assert model.head.weight.ne(0.5).all()


def test_an_interrupt_while_a_save_starts_leaves_the_save_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come while `Thread.start` waits for the thread, which writes by then."""
    step = make()
    write, wait = Files.write_tensors, threading.Event.wait

    def slowly(self: Files, *args: Any) -> None:
        time.sleep(0.2)
        write(self, *args)

    monkeypatch.setattr(Files, "write_tensors", slowly)

    def interrupted(self: Any, timeout: float | None = None) -> bool:
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        if caller is not None and caller.f_code.co_name == "start" and "checkpoint" in caller.f_locals["self"].name:
            raise KeyboardInterrupt
        return wait(self, timeout)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Event, "wait", interrupted)
        step.save(tmp_path / "saved", asynchronous=True)
    with open(__file__) as other:  # takes the next number of a file
        step.synchronize()
        step.save(tmp_path / "next")  # waits for the first
        assert other.read(1)
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "next"}
    make().load(tmp_path / "saved")


def test_a_plan_of_the_steps_own_is_accepted_where_the_device_could_not_update() -> None:
    with pytest.raises(oomc.BudgetError) as error:
        compiled(Net(), batch(), device="1KiB", updates="device")
    assert error.value.smallest_device is not None
    step = compiled(Net(), batch(), device=int(1.3 * error.value.smallest_device), updates="device")
    assert step.plan.where == "host"
    step.use_plan(step.plan, **batch())
    step(**batch())
    with pytest.raises(ValueError, match="'nowhere'"):
        step.use_plan(replace(step.plan, where="nowhere"), **batch())  # type: ignore[arg-type]


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_step_is_not_copied(way: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"step\.save"):
        way(make())


def test_batches_that_the_user_keeps_are_not_on_the_device() -> None:
    step = make()
    kept = [batch() for _ in range(6)]
    peaks = []
    for each in kept:
        step(**each)
        peaks.append(step.metrics["device_peak"])
    assert max(peaks) <= step.projected and peaks[-1] == peaks[2]


def test_inductor_is_refused_on_the_stand_in() -> None:
    with pytest.raises(oomc.UnsupportedError, match="stand-in"):
        compiled(Net(), batch(), backend="inductor")
