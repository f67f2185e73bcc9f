"""Behaviours that users of such systems were bitten by, one test each: the state, its life, and what it costs."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import oomc
from oomc import checkpoint_write
from oomc.models import tiny
from oomc.runtime import memory
from oomc.runtime.memory import HostMemory
from oomc.runtime.pool import physical_cores
from oomc.step import Step
from tests.cases_models import Stack
from tests.checkpoint_cases import Peak, same
from tests.helpers import ADAMW, Batch, Blind, compiled, masters, relative, state, tiny_step, tokens, worst
from tests.programs import VOCAB, TopK
from tests.reference import Reference, round_bf16
from tests.test_memory_taking import Driver

ROOT = Path(__file__).parents[1]
CLIP = 0.05
"""Below the norm of these models' gradients."""
IGNORED = -100


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So small a model is slower on more, and very slow where others want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Poisoned(Stack):
    """A stack with one parameter element whose gradient is what the buffer says, beside its own."""

    def __init__(self) -> None:
        super().__init__(2)
        self.poison: Tensor
        self.register_buffer("poison", torch.zeros(()))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return super().forward(input_ids, labels) + self.poison * self.head.bias[0]


class Dropped(Stack):
    """A stack with dropout behind it."""

    def __init__(self) -> None:
        super().__init__(2)
        self.layers.append(nn.Dropout(0.25))


def half_frozen() -> nn.Module:
    """A tied embedding and head, a frozen layer, and a layer with a frozen norm."""
    model = TopK(dropout=0.0, tied=True)
    model.layers[0].requires_grad_(False)
    model.layers[1].norm.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "stack": lambda: Stack(2),
    "bf16": lambda: Stack(2).bfloat16(),
    "plain": lambda: TopK(dropout=0.0, tied=True),
    "dropout": lambda: Dropped().bfloat16(),
    "frozen": half_frozen,
    "poisoned": Poisoned,
}


def small(batch: int = 2, sequence: int = 12, **options: Any) -> Batch:
    return tokens(batch, sequence, vocab=VOCAB, **options)


def without_labels(**options: Any) -> Batch:
    batch = small(**options)
    return {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}


def make(kind: str = "stack", sgd: bool = False, **options: Any) -> Step:
    """A step of one of MODELS, always with the same weights, whose memory nobody looks at."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    if sgd:
        trained = [p for p in model.parameters() if p.requires_grad]
        options["optimizer"] = torch.optim.SGD(trained, lr=0.1, momentum=0.9, nesterov=True)
    step = compiled(model, small(), like=("state cases", kind), **options)
    step._meter = Blind()
    return step


def snapshot(step: Step) -> dict[str, Any]:
    """All that a step may change: masters, moments, counts of updates, working weights, learning rates."""
    result: dict[str, Any] = state(step)
    result |= {f"updates of {name}": count for slab in step._state.slabs for name, count in slab.steps.items()}
    result |= {f"weight {name}": p.detach().clone() for name, p in step.model.named_parameters()}
    return result | {f"lr {i}": float(group["lr"]) for i, group in enumerate(step.optimizer.param_groups)}


def clipped_update(reference: Reference, max_norm: float) -> float:
    """The reference's update after torch's own clipping of what was accumulated; the norm before it."""
    holders = []
    for name, gradient in reference._sums.items():
        holders.append(nn.Parameter(torch.zeros_like(gradient)))
        holders[-1].grad = reference._sums[name] = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(holders, max_norm)
    reference.update()
    return float(norm)


def assert_follows(step: Step, reference: Reference, tolerance: float = 1e-4) -> None:
    error, name = worst(masters(step), reference.masters())
    assert error <= tolerance, f"{name} differs by {error:.2e}"


# -- accumulation, labels, clipping -----------------------------------------------------------------------------------


def with_valid(count: int, batch: int, sequence: int, seed: int) -> Batch:
    """A batch with so many labels that count. A causal model's next-token shift is not in these models."""
    made = small(batch, sequence, seed=seed)
    flat = torch.full((batch * sequence,), IGNORED)
    chosen = torch.randperm(batch * sequence, generator=torch.Generator().manual_seed(seed))[:count]
    flat[chosen] = made["labels"].view(-1)[chosen]
    return {**made, "labels": flat.view(batch, sequence)}


def joined(batches: Sequence[Batch], length: int) -> Batch:
    """One batch of all rows, padded on the right by tokens without labels."""

    def padded(key: str, value: int) -> Tensor:
        return torch.cat([nn.functional.pad(b[key], (0, length - b[key].shape[1]), value=value) for b in batches])

    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", IGNORED)}


@pytest.mark.parametrize("short", [False, True], ids=["padded", "as long as it is"])
@pytest.mark.parametrize("options", [{}, {"device": "1GiB"}], ids=["host", "device"])
def test_case_04_micro_batches_of_5_and_50_labels_are_one_of_55(options: dict[str, Any], short: bool) -> None:
    step = make("plain", **options)
    reference = Reference(copy.deepcopy(step.model), **ADAMW)
    for seed in range(3):
        few, many = with_valid(5, 2, 5, seed), with_valid(50, 5, 12, seed + 10)
        counts = []
        for batch in (few if short else joined([few], 12), many):
            step.forward_backward(**batch)
            counts.append(step.metrics["valid_tokens"])
        assert counts == [5, 50]
        step.update()
        reference.step(**joined([few, many], 12))
    assert_follows(step, reference)


EMPTY_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"max_grad_norm": CLIP},
    "skip": {"on_nonfinite": "skip"},
    "raise": {"on_nonfinite": "raise"},
    "device": {"device": "1GiB"},
    "sgd": {"sgd": True},
    "8bit": {"state": "8bit"},
}


@pytest.mark.parametrize("name", EMPTY_OPTIONS)
def test_case_05_a_whole_step_or_window_without_valid_labels_changes_nothing(name: str) -> None:
    step, twin = make(**EMPTY_OPTIONS[name]), make(**EMPTY_OPTIONS[name])
    for each in (step, twin):
        each(**small(seed=1))
    before = snapshot(step)
    assert step(**without_labels()) == 0
    step.synchronize()
    assert step.metrics["skipped"] == 1 and step.metrics["valid_tokens"] == 0 and step.metrics["nonfinite"] == 0
    assert same(snapshot(step), before)
    for seed in range(2):
        assert step.forward_backward(**without_labels(seed=seed)) == 0
    step.update()
    assert step.metrics["skipped"] == 2
    assert same(snapshot(step), before)
    for each in (step, twin):
        assert each(**small(seed=2)).isfinite()
        each.forward_backward(**small(seed=3))
        if each is step:
            each.forward_backward(**without_labels())
        each.update()
    assert same(snapshot(step), snapshot(twin)), "a micro-batch without labels has added something"


@pytest.mark.parametrize(
    ("options", "max_norm", "window"),
    [
        ({}, CLIP, 1), ({}, CLIP, 3), ({}, 1e3, 1), ({"updates": "device"}, CLIP, 1), ({"device": "1GiB"}, CLIP, 1),
        ({"device": "1GiB"}, CLIP, 3), ({"device": "1GiB"}, 1e3, 3),
    ],
)  # fmt: skip
def test_case_06_clipping_is_torchs(options: dict[str, Any], max_norm: float, window: int) -> None:
    """With a tied embedding, whose gradient has two parts, a frozen layer, and a frozen norm."""
    step = make("frozen", max_grad_norm=max_norm, **options)
    reference = Reference(copy.deepcopy(step.model), **ADAMW)
    assert bool(step.plan.resident) == ("device" in options)
    for number in range(2):
        batches = [with_valid(7 + 5 * i, 2, 12, seed=10 * number + i) for i in range(window)]
        total = sum(int((b["labels"] != IGNORED).sum()) for b in batches)
        for batch in batches:
            if window > 1:
                step.forward_backward(**batch)
            else:
                step(**batch)
            reference.accumulate(scale=int((batch["labels"] != IGNORED).sum()) / total, **batch)
        if window > 1:
            step.update()
        norm = clipped_update(reference, max_norm)
        assert norm > CLIP and step.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert_follows(step, reference)


# -- order, resuming --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, CLIP])
def test_case_09_delays_and_poisoned_buffers_change_no_bit(clip: float | None) -> None:
    """With dropout and accumulation; tests/test_updates.py has every plan."""
    runs = []
    for options in ({"synchronous": True}, {"chaos": 5}, {"chaos": 6, "updates": "device"}, {"chaos": 7}):
        step = make("dropout", max_grad_norm=clip, **options)
        losses = []
        for seed in range(3):
            losses.append(step(**small(seed=seed)))
            losses += [step.forward_backward(**small(seed=seed + more)) for more in range(2)]
            step.update()
        runs.append({**snapshot(step), **{f"loss {i}": loss for i, loss in enumerate(losses)}})
    assert all(loss.isfinite() for name, loss in runs[0].items() if name.startswith("loss"))
    assert all(same(run, runs[0]) for run in runs[1:])


class Shuffled:
    """Endless batches of 2 of 6 sequences, in a new order each epoch; its state is where it is."""

    def __init__(self) -> None:
        self.data = [small(1, 12, seed=100 + i) for i in range(6)]
        self.generator = torch.Generator().manual_seed(0)
        self.left: list[int] = []

    def next(self) -> Batch:
        if not self.left:
            self.left = torch.randperm(6, generator=self.generator).tolist()
        picked = [self.data[self.left.pop()] for _ in range(2)]
        return {key: torch.cat([each[key] for each in picked]) for key in picked[0]}


def train_on(directory: str, resume: bool) -> dict[str, Any]:
    """Six steps with a checkpoint after three of them, or the last three from the checkpoint; all that there is then.

    Run in a process of its own to resume.
    """
    torch.manual_seed(1 if resume else 0)
    model = MODELS["dropout"]()
    optimizer = torch.optim.AdamW(model.parameters(), **{**ADAMW, "lr": 0.5 if resume else 1e-2})
    step = compiled(model, small(), like=("state cases", "dropout"), optimizer=optimizer, max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(step.optimizer, 1e-2, total_steps=8)
    loader, losses = Shuffled(), []
    if resume:
        extra = step.load(directory)
        scheduler.load_state_dict(extra["scheduler"])
        loader.left = extra["left"]
        loader.generator.set_state(extra["generator"])
    for number in range(3 if resume else 0, 6):
        losses.append(step(**loader.next()))
        scheduler.step()
        if number == 2:
            where = {"left": list(loader.left), "generator": loader.generator.get_state()}
            step.save(directory, {"scheduler": scheduler.state_dict(), **where})
    drawn = {"drawn": torch.rand(3)}
    return {**snapshot(step), "steps": step.metrics["steps"], "losses": torch.stack(losses[-3:]), **drawn}


def test_case_10_three_steps_and_three_in_a_new_process_are_six(tmp_path: Path) -> None:
    expected = train_on(str(tmp_path / "a"), resume=False)
    code = (
        "import sys, torch; from tests.test_state_cases import train_on; "
        "torch.save(train_on(sys.argv[1], resume=True), sys.argv[2])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a", tmp_path / "result.pt"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    resumed = torch.load(tmp_path / "result.pt")
    assert resumed["steps"] == 6
    different = [name for name in expected if not same({name: resumed[name]}, {name: expected[name]})]
    assert not different and resumed.keys() == expected.keys()


# -- loading, precision, nothing finite -------------------------------------------------------------------------------


def test_case_12_buffers_of_a_model_without_memory(tmp_path: Path) -> None:
    """`oomc.load` computes what no checkpoint holds; after `to_empty` it is missing, which is an error."""
    model: Any = tiny.build("llama")
    model.save_pretrained(tmp_path)
    batch = tokens(2, 24)
    expected = model(**batch).loss
    loaded = oomc.load(tmp_path, dtype=torch.float32)
    assert all(p.is_meta for p in loaded.parameters())
    step = compiled(loaded, batch, like=("llama", torch.float32))
    assert relative(step(**batch), expected) <= 1e-6
    for name, buffer in model.named_buffers():
        assert torch.equal(loaded.get_buffer(name), buffer), name

    def empty() -> Any:
        with torch.device("meta"):
            return type(model)(model.config)

    for garbage in (0.0, torch.nan):
        late = empty().to_empty(device="cpu")
        late.load_state_dict(model.state_dict())
        late.model.rotary_emb.inv_freq.fill_(garbage)  # memory that was not used yet is zero, used memory is anything
        with pytest.raises(oomc.UnsupportedError, match=r"buffer model\.rotary_emb\.inv_freq holds what memory holds"):
            compiled(late, batch, like=("llama", torch.float32))
    for name, buffer in model.named_buffers():
        late.get_buffer(name).copy_(buffer)
    assert relative(compiled(late, batch, like=("llama", torch.float32))(**batch), expected) <= 1e-6
    with pytest.raises(oomc.UnsupportedError, match=r"on the meta device"):
        compiled(empty(), batch)


def test_case_14_working_weights_are_rounded_masters_and_decay_is_not_lost() -> None:
    """Rows of the embedding that no batch has get no gradient: decay alone moves them, by less than bf16 can tell."""
    torch.manual_seed(0)
    model = Stack(2).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, eps=1e-6, weight_decay=0.1)
    step = compiled(model, small(), like=("state cases", "bf16"), optimizer=optimizer)
    step._meter = Blind()
    start = masters(step)
    for i in range(100):
        step(**small(2, 4, seed=i % 3))
    moved = masters(step)
    for name, master in moved.items():
        weight = step.model.get_parameter(name)
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, round_bf16(master)), name
        assert not torch.equal(master, start[name]), name
    unseen = slice(0, 3)  # token ids begin with 3
    change = moved["embed.weight"][unseen] / start["embed.weight"][unseen] - 1
    expected = (1 - 1e-6) ** 100 - 1
    assert float(change.mean()) == pytest.approx(expected, rel=0.05)
    assert ((change - expected).abs() <= 200 * 2.0**-24).all()


@pytest.mark.parametrize(
    ("options", "value"), [({}, torch.inf), ({"device": "1GiB"}, torch.nan)], ids=["host", "device"]
)
@pytest.mark.parametrize("clip", [None, CLIP], ids=["", "clip"])
@pytest.mark.parametrize("handling", [None, "skip", "raise"])
def test_case_17_a_gradient_that_is_not_finite(
    handling: Any, clip: float | None, options: dict[str, Any], value: float
) -> None:
    """One bad element of one parameter: all is left out, or, where nothing asks for the norm, all is as in eager."""
    options = {"on_nonfinite": handling, "max_grad_norm": clip, **options}
    step, twin = make("poisoned", **options), make("poisoned", **options)
    eager = Reference(copy.deepcopy(step.model), **ADAMW)
    left_out = handling is not None or clip is not None
    poisons: list[Any] = [step.model.poison, eager.model.poison]

    def bad(call: Callable[[], Any]) -> None:
        """The step whose gradient is bad, and a look at its figures."""
        before = snapshot(step)
        if handling == "raise":
            with pytest.raises(oomc.OomcError, match="the gradient is not finite; nothing was updated"):
                call()
        else:
            call()
            with pytest.warns(UserWarning, match="not finite"):
                step.synchronize()
            figures = step.metrics
            assert figures["nonfinite"] == (0 if left_out else 1)
        if left_out:
            assert same(snapshot(step), before)

    for each in (step, twin):
        each(**small(seed=0))
    eager.step(**small(seed=0))
    for poison in poisons:
        poison.fill_(value)
    bad(lambda: step(**small(seed=1)))
    assert step.metrics["skipped"] == left_out
    if not left_out:
        eager.step(**small(seed=1))
        mine, others = masters(step), eager.masters()
        assert int(mine["head.bias"].isnan().sum()) == 1
        error, name = worst(
            {n: m.nan_to_num(7.0) for n, m in mine.items()}, {n: m.nan_to_num(7.0) for n, m in others.items()}
        )
        assert error <= 1e-4, name
        return
    for poison in poisons:
        poison.zero_()
    step.forward_backward(**small(seed=2))
    poisons[0].fill_(value)
    step.forward_backward(**small(seed=3))
    bad(step.update)
    poisons[0].zero_()
    assert step.metrics["skipped"] == 2
    for each in (step, twin):
        each(**small(seed=4))
        each.forward_backward(**small(seed=5))
        each.update()
    assert same(snapshot(step), snapshot(twin))


# -- looking, hyperparameters -----------------------------------------------------------------------------------------


def test_case_19_whoever_evaluates_right_after_a_step_sees_its_updates() -> None:
    """Updates are delayed at random; nobody waits for them."""
    batch, ids = tokens(2, 24), tokens(2, 6)["input_ids"]
    options: dict[str, Any] = {"device": None, "max_grad_norm": 1.0}
    step, twin = tiny_step("llama", chaos=1, **options)[0], tiny_step("llama", synchronous=True, **options)[0]

    def through_model(each: Step) -> Tensor:
        with torch.no_grad():
            logits: Tensor = each.model(**batch).logits
        return logits

    def generated(each: Step) -> Tensor:
        model: Any = each.model
        new: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        return new

    looks: list[Callable[[Step], Tensor]] = [
        lambda each: each.evaluate(**batch).logits, through_model, generated,
        lambda each: torch.cat([v.flatten() for v in each.model.state_dict().values()]),
    ]  # fmt: skip
    last = None
    for number, look in enumerate(looks * 2):
        for each in (step, twin):
            each.optimizer.param_groups[0]["lr"] = 1e-2
            each(**tokens(2, 24, seed=number))
        twin.synchronize()
        expected = look(twin)
        assert torch.equal(look(step), expected)
        assert last is None or number < len(looks) or not torch.equal(expected, last) or look is generated
        last = expected


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Names of two groups that differ in everything."""
    decay = [n for n, p in model.named_parameters() if p.dim() > 1]
    rest = [n for n, p in model.named_parameters() if p.dim() <= 1]
    return [
        {"params": decay, "weight_decay": 0.3, "betas": (0.8, 0.9), "eps": 1e-5},
        {"params": rest, "weight_decay": 0.0, "lr": 3e-3},
    ]


def grouped_step(**options: Any) -> tuple[Step, Reference]:
    torch.manual_seed(0)
    model = Stack(2)
    named = grouped(model)
    reference = Reference(model, named, **ADAMW)
    groups = [{**g, "params": [model.get_parameter(n) for n in g["params"]]} for g in named]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    step = compiled(model, small(), like=("state cases", "stack"), optimizer=optimizer, **options)
    step._meter = Blind()
    return step, reference


@pytest.mark.parametrize("how", ["", "clip", "accumulate"])
def test_case_23_groups_and_what_changes_them_after_the_step_has_returned(how: str) -> None:
    """Each change is made while updates are delayed; it must reach into the next step only."""
    clip = {"max_grad_norm": 1e6} if how == "clip" else {}
    step, reference = grouped_step(chaos=1, **clip)
    twin, _ = grouped_step(synchronous=True, **clip)
    changes: list[dict[str, Any]] = [
        {"lr": 1e-2},
        {"weight_decay": 0.9},
        {"betas": (0.5, 0.6)},
        {"eps": 1e-3},
        {"lr": 0.0},
        {"lr": 1e-2},
    ]
    for number, change in enumerate(changes):
        for each in (step, twin):
            if how == "accumulate":
                each.forward_backward(**small(seed=number))
                each.update()
            else:
                each(**small(seed=number))
            if each is twin:
                each.synchronize()
            each.optimizer.param_groups[number % 2].update(change)
        reference.step(**small(seed=number))
        reference.optimizer.param_groups[number % 2].update(change)
    reference.step(**small(seed=9))
    for each in (step, twin):
        group = each.optimizer.param_groups[0]
        group["lr"] = torch.tensor(group["lr"])
        each(**small(seed=9))
        group["lr"].fill_(100.0)  # in place, under the update
    assert same(state(step), state(twin))
    assert_follows(step, reference)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[1e-2, 2e-2], total_steps=8),
    "get_scheduler": lambda o: _get_scheduler(o),
}


def _get_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    import transformers

    return transformers.get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=8)


@pytest.mark.parametrize("early", [False, True], ids=["after compile", "before compile"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_case_24_schedulers_accept_the_optimizer(name: str, early: bool) -> None:
    torch.manual_seed(0)
    model = Stack(2)
    reference = Reference(model, grouped(model), **ADAMW)
    groups = [{**g, "params": [model.get_parameter(n) for n in g["params"]]} for g in grouped(model)]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a scheduler whose optimizer was not stepped
        scheduler = SCHEDULERS[name](optimizer) if early else None
        step = compiled(model, small(), like=("state cases", "stack"), optimizer=optimizer)
        step._meter = Blind()
        scheduler = scheduler or SCHEDULERS[name](step.optimizer)
        other = SCHEDULERS[name](reference.optimizer)
        rates = []
        for seed in range(6):
            step(**small(seed=seed))
            reference.step(**small(seed=seed))
            scheduler.step()
            other.step()
            assert scheduler.get_last_lr() == other.get_last_lr()
            rates.append(scheduler.get_last_lr()[0])
    assert len(set(rates)) > 4
    assert_follows(step, reference)


# -- frozen parts, memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, CLIP], ids=["", "clip"])
def test_case_25_half_frozen_and_a_frozen_norm_in_a_recomputed_layer(clip: float | None) -> None:
    with pytest.raises(oomc.BudgetError) as caught:
        make("frozen", device="1KiB", max_grad_norm=clip)
    step = make("frozen", device=caught.value.smallest_device, max_grad_norm=clip)
    assert "recompute" in step.plan.residency.values()
    eager = copy.deepcopy(step.model)
    reference = Reference(eager, **ADAMW)
    for seed in range(3):
        step(**small(seed=seed))
        reference.accumulate(**small(seed=seed))
        norm = clipped_update(reference, 1e9 if clip is None else clip)
        if clip is not None:
            assert step.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert_follows(step, reference)
    frozen = [n for n, p in eager.named_parameters() if not p.requires_grad]
    assert len(frozen) == 8
    for name in frozen:
        assert torch.equal(step.model.get_parameter(name), eager.get_parameter(name)), name


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Bytes of all host memory taken since the test began and not given back."""
    taken: list[HostMemory] = []
    begin = HostMemory.__init__

    def noted(self: HostMemory, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        taken.append(self)

    monkeypatch.setattr(HostMemory, "__init__", noted)
    return lambda: sum(each.nbytes for each in taken if each._map is not None)


HOST_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "updates on the device": {"updates": "device"},
    "clip": {"max_grad_norm": CLIP},
    "bf16 state": {"state": "bf16"},
    "8bit state": {"state": "8bit"},
    "sgd": {"sgd": True},
}


@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
@pytest.mark.parametrize("kind", ["plain", "dropout"])
@pytest.mark.parametrize("name", HOST_OPTIONS)
def test_case_28_host_bytes_are_those_planned(
    name: str, kind: str, accumulate: bool, allocated: Callable[[], int]
) -> None:
    step = make(kind, **HOST_OPTIONS[name])
    for seed in range(2):
        if accumulate:
            step.forward_backward(**small(seed=seed))
            step.update()
        step(**small(seed=seed))
    step.synchronize()
    program = step._current.program  # type: ignore[union-attr]
    planned = sum(step._state.host_needed(program, step.plan.resident).values())
    assert allocated() == pytest.approx(planned, rel=0.02)
    step.close()
    del program, step


def test_case_30_refused_pinning_is_a_warning_and_pageable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's stand-in refuses everything; on a machine without CUDA nothing else would ask it."""
    driver, begin = Driver(limit=-1), HostMemory.__init__
    monkeypatch.setattr(torch.cuda, "cudart", driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(memory, "_clear_last_error", lambda: None)
    monkeypatch.setattr(memory, "_pin_warning", threading.Event())

    def pinning(self: HostMemory, nbytes: int, pin: bool = False, now: bool = True) -> None:
        begin(self, nbytes, True, now)

    twin = make()
    monkeypatch.setattr(HostMemory, "__init__", pinning)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = make(max_grad_norm=1e9)
        for seed in range(2):
            step(**small(seed=seed))
        step.synchronize()
    assert sum("refused to register" in str(each.message) for each in caught) == 1
    assert driver.threads and not driver.live
    for seed in range(2):
        twin(**small(seed=seed))
    assert same(state(step), state(twin))


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_case_31_saving_a_step_takes_a_block_and_a_save_that_dies_leaves_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    batch = small()
    step = compiled(Stack(6, size=768), batch)
    step._meter = Blind()
    step(**batch)
    step.synchronize()
    block = 12 * (768 * 768 + 768)
    everything = sum(s.layout.weight_bytes + s.layout.state_bytes(step._rule.arrays) for s in step._state.slabs)
    assert everything > 6 * block
    with Peak() as peak:
        step.save(tmp_path / "a")
    assert peak.extra < block + (4 << 20)
    before = snapshot(step)
    step(**batch)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for asynchronous in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_write, "sync", full)
            with pytest.raises(oomc.CheckpointError, match="No space left"):
                step.save(tmp_path / "a", asynchronous=asynchronous).wait()
        step(**batch)
    assert os.listdir(tmp_path) == ["a"]
    step.load(tmp_path / "a")
    assert same(snapshot(step), before)


def test_case_32_a_steps_checkpoint_has_the_models_own_names(tmp_path: Path) -> None:
    """tests/test_checkpoint.py loads one of each family in a process that cannot import this package."""
    import transformers

    step, _ = tiny_step("llama")
    step(**tokens(2, 24))
    step.save(tmp_path / "a")
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())["weight_map"]
    own = step.model.state_dict()
    assert set(index) == set(own) - {"lm_head.weight"}, "tied weights are there once"
    for name, file in index.items():
        assert torch.equal(load_file(tmp_path / "a" / file)[name], own[name]), name
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert all(torch.equal(value, own[name]) for name, value in again.state_dict().items())


CORES = """
import json, os, threading, warnings
from tests.test_state_cases import make, small
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    step = make()
    step(**small())
    workers = sum(thread.name.startswith("oomc-host-") for thread in threading.enumerate())
    first = [str(w.message) for w in caught if "one thread" in str(w.message)]
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    for _ in range(2):
        make()(**small())
    second = [str(w.message) for w in caught if "one thread" in str(w.message)]
print("RESULT", json.dumps([workers, len(first), len(second)]))
"""


@pytest.mark.skipif(physical_cores() < 2, reason="needs two cores")
def test_case_33_omp_num_threads_leaves_all_workers_and_one_core_is_a_warning() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CORES], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    result = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert result, done.stderr
    assert json.loads(result[0].removeprefix("RESULT ")) == [physical_cores(), 0, 1]


@pytest.mark.parametrize("how", ["", "clip", "accumulate", "device"])
def test_case_34_memory_is_flat_from_the_second_step_on(how: str) -> None:
    torch.manual_seed(0)
    options: dict[str, dict[str, Any]] = {"clip": {"max_grad_norm": CLIP}, "device": {"device": "1GiB"}}
    step = compiled(MODELS["stack"](), small(), like=("state cases", "stack"), **options.get(how, {}))
    peaks, held = [], []
    for seed in range(50):
        batch = with_valid(3 + seed % 20, 2, 12, seed=seed)
        if how == "accumulate":
            step.forward_backward(**batch)
            peaks.append(step.metrics["device_peak"])
            if seed % 3 == 2:
                step.update()
        else:
            step(**batch)
            peaks.append(step.metrics["device_peak"])
        step.synchronize()
        del batch
        assert step._meter is not None
        held.append(step._meter.current)
    counts = 64  # bytes: a count of labels, or two, may still be on its way when the next step has begun
    assert max(peaks[2:]) <= max(peaks[:2]) + counts and max(peaks) <= step.projected
    assert max(held[2:]) <= max(held[:2])


# -- interrupts -------------------------------------------------------------------------------------------------------


class Interrupt:
    """Raises KeyboardInterrupt at the `at`-th line of the package's run time that this thread comes to.

    Signals arrive between any two lines, so that every line is a place where the user's Ctrl-C may come out.
    """

    FILES = (f"{ROOT}/oomc/runtime/", f"{ROOT}/oomc/step.py", f"{ROOT}/oomc/steps.py")

    def __init__(self, at: int) -> None:
        self.at, self.count, self.where = at, 0, ""

    def __enter__(self) -> Interrupt:
        self._old = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._old)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self.FILES) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self.at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt
        return self._line


def run_window(step: Step, batches: Sequence[Batch], accumulate: bool) -> None:
    """A step with the first batch, or an update with all of them, of which the first may be accumulated already."""
    if not accumulate:
        step(**batches[0])
        return
    for batch in batches[len(step._window) :]:
        step.forward_backward(**batch)
    step.update()


INTERRUPTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"max_grad_norm": CLIP},
    "device": {"device": "1GiB"},
    "accumulate": {},
    "accumulate on the device": {"device": "1GiB"},
}


@pytest.mark.parametrize("name", INTERRUPTED)
def test_case_38_an_interrupt_anywhere_leaves_the_step_as_it_was_or_says_that_it_does_not(
    name: str, tmp_path: Path
) -> None:
    step, accumulate = make("dropout", **INTERRUPTED[name]), name.startswith("accumulate")
    batches, more = [small(seed=1), small(3, 7, seed=2)], [small(seed=3), small(seed=4)]
    first = [small(seed=10), small(seed=11)]
    run_window(step, first, accumulate)
    step.save(tmp_path / "a")

    def go_back() -> None:
        """To the checkpoint, and a step further: its gradients may still be leaving, its updates be under way."""
        step.load(tmp_path / "a")
        run_window(step, first, accumulate)

    run_window(step, batches, accumulate)  # everything is planned from here on
    go_back()
    before = snapshot(step)
    with Interrupt(0) as counting:
        run_window(step, batches, accumulate)
    after = snapshot(step)
    run_window(step, more, accumulate)
    later = snapshot(step)
    lines = counting.count
    trials = int(os.environ.get("INTERRUPTS", "20"))
    outcomes = {"before": 0, "after": 0, "broken": 0}
    for at in sorted(random.Random(0).sample(range(1, lines), min(trials, lines - 1))):
        go_back()
        with Interrupt(at) as interrupt:
            try:
                run_window(step, batches, accumulate)
            except KeyboardInterrupt:
                pass
            else:
                continue  # it came to fewer lines than before
        if step._broken:
            with pytest.raises(oomc.OomcError, match=r"step\.load\(directory\)"):
                step(**batches[0])
            with pytest.raises(oomc.OomcError, match=r"step\.load\(directory\)"):
                step.save(tmp_path / "b")
            go_back()
            outcome = "broken"
        else:
            outcome = "after" if same(snapshot(step), after) else "before"
        if outcome != "after":
            assert same(snapshot(step), before), interrupt.where
            run_window(step, batches, accumulate)
        assert same(snapshot(step), after), (interrupt.where, outcome)
        run_window(step, more, accumulate)
        assert same(snapshot(step), later), (interrupt.where, outcome)
        outcomes[outcome] += 1
    assert outcomes["before"] and outcomes["broken"], outcomes


WORDS = (
    "await_update", "fetch", "wait_weights", "run", "run_chunks", "release", "offload", "update", "wait_gradients",
    "apply", "count",
)  # fmt: skip


@pytest.mark.parametrize("clip", [None, CLIP], ids=["", "clip"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_case_38_an_error_at_any_node_of_the_step(
    error: type[BaseException], clip: float | None, tmp_path: Path
) -> None:
    step = make(max_grad_norm=clip)
    step(**small())
    step.save(tmp_path / "a")
    before, batch = snapshot(step), small(seed=1)
    calls, fail_at, failed = 0, 0, ""

    def watch() -> None:
        """Let call number `fail_at` of any word fail; a load makes a new run time where the old one was broken."""
        for word in WORDS:

            def call(*args: Any, word: str = word) -> Any:
                nonlocal calls, failed
                calls += 1
                if calls == fail_at:
                    failed = word
                    raise error(word)
                return getattr(type(step._runtime), word)(step._runtime, *args)

            setattr(step._runtime, word, call)

    watch()
    step(**batch)
    total, after = calls, snapshot(step)
    outcomes: dict[bool, set[str]] = {False: set(), True: set()}
    for number in range(1, total + 1):
        step.load(tmp_path / "a")
        watch()
        calls, fail_at = 0, number
        with pytest.raises(error):
            step(**batch)
        fail_at = 0
        outcomes[step._broken].add(failed)
        if step._broken:
            step.load(tmp_path / "a")
        assert same(snapshot(step), before), failed
        step(**batch)
        assert same(snapshot(step), after), failed
    assert outcomes[False] >= {"fetch", "run", "run_chunks", "offload"}, outcomes
    assert clip is not None or outcomes[True] >= {"fetch", "run_chunks", "offload"}, outcomes


def test_case_38_forwards_without_an_update() -> None:
    """A forward and backward that nobody applies is forgotten by a load, and applied by an update."""
    step, twin = make("plain"), make("plain")
    for seed in range(2):
        step.evaluate(**small(seed=seed))
        with torch.no_grad():
            step.model(**small(seed=seed))
    for each in (step, twin):
        each(**small())
    with pytest.raises(oomc.OomcError, match=r"without forward_backward"):
        step.update()
    for each in (step, twin):
        each.forward_backward(**small(seed=1))
        each.forward_backward(**small(seed=2))
    with pytest.raises(oomc.OomcError, match=r"call update\(\) first"):
        step(**small(seed=3))
    step.evaluate(**small(seed=3))
    for each in (step, twin):
        each.update()
        each(**small(seed=4))
    assert same(snapshot(step), snapshot(twin))


@pytest.mark.parametrize("options", [{"max_grad_norm": CLIP}, {"sgd": True}], ids=["clip", "sgd"])
def test_case_40_a_new_learning_rate_compiles_nothing(options: dict[str, Any]) -> None:
    step = make(**options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.9)
    reference = Reference(copy.deepcopy(step.model), optimizer=type(step.optimizer), **_hyper(step))
    other = torch.optim.lr_scheduler.ExponentialLR(reference.optimizer, 0.9)
    counts = []
    for seed in range(5):
        step(**small(seed=seed))
        reference.accumulate(**small(seed=seed))
        clipped_update(reference, options.get("max_grad_norm", 1e9))
        schedule.step()
        other.step()
        counts.append([step.metrics[key] for key in ("traces", "plans", "compilations")])
    assert counts[1:] == counts[:-1]
    assert_follows(step, reference)


def _hyper(step: Step) -> dict[str, Any]:
    group = step.optimizer.param_groups[0]
    keys = ("lr", "momentum", "nesterov") if "momentum" in group else ("lr", "eps")
    return {key: group[key] for key in keys}
