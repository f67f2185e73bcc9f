"""The step that the user calls: calls in other shapes and orders, its metrics, and what its errors say."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch

import oomc
from oomc.errors import OomcError
from tests.cases_models import Stack
from tests.helpers import ADAMW, compiled, masters, own_threads, relative, state, tokens, worst
from tests.programs import VOCAB
from tests.reference import Reference

BATCH = tokens(2, 12, vocab=VOCAB)


def make(**options: object) -> oomc.Step:
    torch.manual_seed(0)
    return compiled(Stack(2), BATCH, like=("Stack", 2), **options)  # type: ignore[arg-type]


def test_positional_arguments_are_those_of_forward() -> None:
    step, twin = make(), make()
    assert torch.equal(step(BATCH["input_ids"], BATCH["labels"]), twin(**BATCH))
    assert torch.equal(step(BATCH["input_ids"], labels=BATCH["labels"]), twin(**BATCH))
    with pytest.raises(TypeError):
        step(BATCH["input_ids"], nonsense=1)


def test_other_inputs_than_compiled_for_are_refused() -> None:
    step = make()
    before = state(step)
    with pytest.raises(oomc.UnsupportedError, match="not like the one that the step was compiled for"):
        step(BATCH["input_ids"].int(), BATCH["labels"])
    with pytest.raises(oomc.UnsupportedError, match="not like the one that the step was compiled for"):
        step(BATCH["input_ids"][0], BATCH["labels"][0])
    assert all(torch.equal(t, before[n]) for n, t in state(step).items())


def test_inputs_of_unequal_sizes_are_refused() -> None:
    step = make()
    with pytest.raises((oomc.UnsupportedError, ValueError)):
        step(BATCH["input_ids"], BATCH["labels"][:, :6])


def test_backward_on_the_loss_says_that_it_is_done() -> None:
    loss = make()(**BATCH)
    assert not loss.requires_grad and loss.dim() == 0
    with pytest.raises(OomcError, match="has run backward and update already"):
        loss.backward()


def test_accumulation_is_the_mean_of_its_batches() -> None:
    step = make()
    reference = Reference(copy.deepcopy(step.model), **ADAMW)
    for _ in range(2):
        for seed in range(3):
            batch = tokens(2, 12, vocab=VOCAB, seed=seed)
            step.forward_backward(**batch)
            reference.accumulate(scale=1 / 3, **batch)
        every = step.gradients()
        assert all(torch.equal(step.gradients(name)[name], gradient) for name, gradient in every.items())
        assert step.gradients(list(every)[:2]).keys() == set(list(every)[:2])
        with pytest.raises(OomcError, match="no parameter of the name 'embed', 'norm'"):
            step.gradients(["embed", "norm"])
        step.update()
        reference.update()
    assert worst(masters(step), reference.masters())[0] <= 1e-5
    assert step.metrics["steps"] == 2
    assert step.gradients() == {}


def test_update_needs_gradients_and_a_step_needs_none() -> None:
    step = make()
    with pytest.raises(OomcError, match=r"update\(\) without forward_backward\(\)"):
        step.update()
    step.forward_backward(**BATCH)
    with pytest.raises(OomcError, match=r"call update\(\) first"):
        step(**BATCH)
    step.update()
    step(**BATCH)


def test_groups_and_schedules_are_read_at_each_step() -> None:
    torch.manual_seed(0)
    model = Stack(2)
    decay = [n for n, p in model.named_parameters() if p.dim() > 1]
    rest = [n for n, p in model.named_parameters() if p.dim() <= 1]
    named = [{"params": decay, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}]
    groups = [{**g, "params": [model.get_parameter(n) for n in g["params"]]} for g in named]  # type: ignore[attr-defined]
    reference = Reference(copy.deepcopy(model), named, **ADAMW)
    step = compiled(model, BATCH, like=("Stack", 2), optimizer=torch.optim.AdamW(groups, **ADAMW))
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)) for o in (step.optimizer, reference.optimizer)
    ]
    for _ in range(4):
        step(**BATCH)
        reference.step(**BATCH)
        for schedule in schedules:
            schedule.step()
    assert worst(masters(step), reference.masters())[0] <= 1e-5


def test_parameters_outside_the_optimizer_are_not_trained() -> None:
    torch.manual_seed(0)
    model = Stack(2)
    before = copy.deepcopy(model)
    step = compiled(model, BATCH, optimizer=torch.optim.AdamW(model.layers.parameters(), **ADAMW))
    step(**BATCH)
    step.synchronize()
    for name, parameter in before.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)) != name.startswith("layers"), name


def test_the_model_itself_sees_current_weights() -> None:
    step = make()
    reference = Reference(copy.deepcopy(step.model), **ADAMW)
    for _ in range(2):
        step(**BATCH)
        reference.step(**BATCH)
        with torch.no_grad():
            assert relative(step.model(**BATCH), reference.model(**BATCH)) <= 1e-6


def test_losses_are_tensors_of_their_own() -> None:
    step = make()
    losses = [step(**BATCH) for _ in range(3)]
    values = [float(loss) for loss in losses]
    assert values[0] > values[1] > values[2]


def test_metrics() -> None:
    step = make()
    assert step.metrics == {"steps": 0, "traces": 1}
    loss = step(**BATCH)
    figures = step.metrics
    assert figures["loss"] == float(loss) and figures["tokens"] == 24 and figures["steps"] == 1
    assert figures["device_peak"] <= figures["device_projected"]
    parameters = sum(p.numel() for p in step.model.parameters())
    assert figures["d2h_bytes"] == 4 * parameters
    assert figures["h2d_bytes"] >= 4 * parameters
    assert figures["nonfinite"] == 0 and figures["tokens_per_s"] > 0 and figures["host_peak"] >= 0
    step(**tokens(1, 30, vocab=VOCAB))
    assert step.metrics["tokens"] == 30 and step.metrics["traces"] == 1 and step.metrics["plans"] == 2


def test_what_the_budget_leaves_over_holds_state_on_the_device() -> None:
    roomy, tight = make(device="10MiB"), make()
    assert {s.name for s in roomy._state.slabs} == set(roomy.plan.resident) and not tight.plan.resident
    for _ in range(3):
        assert torch.equal(roomy(**BATCH), tight(**BATCH))
    figures = roomy.metrics
    assert figures["device_peak"] <= figures["device_projected"] <= 10 << 20
    assert figures["d2h_bytes"] == figures["h2d_bytes"] == 0
    mine, others = masters(roomy), masters(tight)
    assert all(torch.equal(mine[n], others[n]) for n in others)


def test_buffers_that_the_user_changes_are_seen() -> None:
    step, eager = make(), None
    eager = copy.deepcopy(step.model)
    for model in (step.model, eager):
        for layer in model.layers:  # type: ignore[union-attr]
            layer.bias.fill_(0.3)
    expected = Reference(eager).accumulate(**BATCH)
    assert relative(step(**BATCH), expected) <= 1e-6


def test_close_ends_the_threads_and_leaves_the_weights() -> None:
    gc.collect()
    before = own_threads()
    step = make()
    step(**BATCH)
    step.synchronize()
    weights = copy.deepcopy(step.model.state_dict())
    step.close()
    step.close()
    assert own_threads() == before
    assert all(torch.equal(v, weights[n]) for n, v in step.model.state_dict().items())


def test_a_step_that_is_dropped_is_closed() -> None:
    gc.collect()
    before = own_threads()
    step = make()
    step(**BATCH)
    model, gone = step.model, weakref.ref(step)
    del step
    gc.collect()
    assert gone() is None and own_threads() == before
    model(**BATCH).backward()


def test_in_place_edits_of_weights_are_not_lost() -> None:
    """The next step starts from what the user wrote, or says that it will not."""
    step = make()
    step(**BATCH)
    step.synchronize()
    with torch.no_grad():
        step.model.head.weight.mul_(0.5)  # type: ignore[union-attr, operator]
    edited = copy.deepcopy(step.model)
    expected = Reference(edited).accumulate(**BATCH)
    assert relative(step(**BATCH), expected) <= 1e-6


def test_the_optimizers_own_step_is_refused() -> None:
    step = compiled(Stack(2), BATCH, like=("Stack", 2))
    with pytest.raises(oomc.OomcError, match="compiled step updates the parameters itself"):
        step.optimizer.step()


def test_other_arguments_are_named() -> None:
    step = compiled(Stack(2), BATCH, like=("Stack", 2))
    with pytest.raises((oomc.UnsupportedError, TypeError), match="attention_mask"):
        step(**BATCH, attention_mask=torch.ones(1, 1))


def test_a_model_belongs_to_one_step() -> None:
    model = Stack(2)
    first = compiled(model, BATCH, like=("Stack", 2))
    first(**BATCH)
    with pytest.raises(oomc.UnsupportedError, match=r"belongs to another step, which is not closed: call close\(\)"):
        compiled(model, BATCH, like=("Stack", 2))
    before = first(**BATCH)
    first.close()
    second = compiled(model, BATCH, like=("Stack", 2))
    assert second(**BATCH) < before
    del second
    gc.collect()
    compiled(model, BATCH, like=("Stack", 2))(**BATCH)  # one that is gone needs no close()


def test_a_call_by_a_second_thread_is_refused_and_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step, twin = make(), make()
    inside, go_on = threading.Event(), threading.Event()
    run = step._run_once

    def slow(*args: object, **kwargs: object) -> torch.Tensor:
        inside.set()
        assert go_on.wait(30)
        return run(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(step, "_run_once", slow)
    losses: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: losses.append(step(**BATCH)))
    thread.start()
    assert inside.wait(30)
    for call in (lambda: step(**BATCH), lambda: step.forward_backward(**BATCH), step.update):
        with pytest.raises(OomcError, match="run by another thread"):
            call()
    go_on.set()
    thread.join()
    assert torch.equal(losses[0], twin(**BATCH))
    assert torch.equal(step(**BATCH), twin(**BATCH))


def test_hooks_that_come_after_compiling_are_warned_of_once() -> None:
    step = make()
    step(**BATCH)
    handle = step.model.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="1 hooks were registered"):
        step(**BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(**BATCH)
        handle.remove()
        step(**BATCH)


def test_the_last_steps_gradients_are_warned_of_too() -> None:
    step = make()
    step(**BATCH)
    step.synchronize()
    with torch.no_grad():
        next(iter(step.model.parameters())).fill_(float("inf"))
    step(**BATCH)
    with pytest.warns(UserWarning, match="not finite"):
        step.synchronize()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"tune": "x"}, "tune='x' is no whole number"), ({"seed": 1.5}, "seed=1.5"), ({"backend": "foo"}, "backend='foo'"),
     ({"example": torch.ones(2, 3)}, "example is a Tensor; it must be the keyword arguments")],
)  # fmt: skip
def test_options_that_there_are_not(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        oomc.compile(Stack(2), device="cpu", **options)  # type: ignore[arg-type]


def test_a_budget_in_fractions_of_bytes_is_a_mistake() -> None:
    for size in (24.5, 24.0):
        with pytest.raises(ValueError, match=f"write '{size}GiB'"):
            oomc.Budget(size)
    assert oomc.Budget(24e9).device == 24_000_000_000


def test_what_would_end_a_step_from_within_is_refused(tmp_path: Path) -> None:
    """A signal handler that closes the step, say: it is told, and the step goes on or ends by an exception."""
    step, twin = make(), make()
    step(**BATCH)
    twin(**BATCH)
    step.save(tmp_path / "a")
    assert step._runtime is not None
    offload, told = step._runtime.offload, []

    def from_within(*args: object, **kwargs: object) -> object:
        for call in (step.close, lambda: step.load(tmp_path / "a"), lambda: step.save(tmp_path / "b"),
                     lambda: step.evaluate(**BATCH), lambda: step.prepare(**BATCH), lambda: step(**BATCH)):  # fmt: skip
            with pytest.raises(OomcError, match="from within a call of the step"):
                call()
            told.append(call)
        return offload(*args, **kwargs)  # type: ignore[arg-type]

    step._runtime.offload = from_within  # type: ignore[assignment]
    assert torch.equal(step(**BATCH), twin(**BATCH))
    del step._runtime.offload
    assert len(told) >= 6
    assert torch.equal(step(**BATCH), twin(**BATCH))
    assert worst(state(step), state(twin))[0] == 0


def test_a_parameter_belongs_to_one_step_whatever_holds_it() -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.inner(input_ids=input_ids, labels=labels)
            return loss

    model = Stack(2)
    step = compiled(model, BATCH, like=("Stack", 2))
    with pytest.raises(oomc.UnsupportedError, match="belongs to another step"):
        compiled(Wrapped(model), BATCH)
    step(**BATCH)


def test_a_step_that_could_not_be_made_owns_nothing() -> None:
    model = Stack(2)
    model.register_buffer("table", torch.full((4,), float("nan")), persistent=False)
    with pytest.raises(oomc.UnsupportedError) as caught:
        compiled(model, BATCH)
    assert caught.value.__traceback__ is not None  # which holds the step
    model.get_buffer("table").zero_()
    compiled(model, BATCH)(**BATCH)


def test_a_warning_that_is_an_error_comes_once() -> None:
    step = make(on_nonfinite="skip")
    step(**BATCH)
    step.synchronize()
    with torch.no_grad():
        next(iter(step.model.parameters())).fill_(float("inf"))
    step(**BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="not finite"):
            step.synchronize()
        step.synchronize()
    assert step.metrics["skipped"] == 1
    step.close()
