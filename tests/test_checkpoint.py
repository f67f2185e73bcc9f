"""Checkpoints: bit for bit, readable by others, in little memory, and consistent while training goes on."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import oomc
from oomc import checkpoint_write
from oomc.checkpoint import Checkpoints
from oomc.models import tiny
from oomc.runtime.pool import Countdown
from tests import saving_memory
from tests.checkpoint_cases import BLOCKWISE, Run, draws, load, rule_with, same
from tests.helpers import masters, smallest_device, state, tiny_step, tokens, worst

ROOT = Path(__file__).parent.parent
ONE_BLOCK: tuple[str, ...] = ()
MANY = ("embed", "layers.0.linear", "layers.0.norm.w", "layers.0", "layers.1", "layers.2.linear.bias", "layers", "s")


@pytest.mark.parametrize("blocks", [ONE_BLOCK, MANY])
@pytest.mark.parametrize("state_there", [False, True])
@pytest.mark.parametrize(("from_device", "to_device"), [(False, False), (False, True), (True, False)])
def test_everything_comes_back_in_slabs_of_any_partition(
    blocks: tuple[str, ...], state_there: bool, from_device: bool, to_device: bool, tmp_path: Path
) -> None:
    run = Run(on_device=from_device)
    run.fill(1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.1, 10)
    expected = run.snapshot()
    extra = {"scheduler": scheduler.state_dict(), "loader": [1, (2, torch.arange(3))]}
    run.checkpoints.save(tmp_path / "a", {"steps": 7}, extra)
    drawn = draws()
    other = Run(blocks=blocks, state=state_there, on_device=to_device)
    other.fill(2)
    other.model.get_buffer("scratch").fill_(3)
    loaded = load(other, tmp_path / "a")
    assert draws() == drawn
    assert same(other.snapshot(), expected)
    assert other.model.get_buffer("scratch").eq(3).all(), "it is not persistent"
    assert loaded.progress == {"steps": 7}
    assert loaded.extra["loader"][1][1].tolist() == [0, 1, 2]
    again = torch.optim.lr_scheduler.OneCycleLR(other.optimizer, 0.3, 20)
    again.load_state_dict(loaded.extra["scheduler"])
    assert again.state_dict() == scheduler.state_dict()
    for slab in other.slabs:
        assert not slab.steps or not _padding(slab).any()


def _padding(slab: Any) -> torch.Tensor:
    inside = torch.zeros(slab.layout.state_elements, dtype=torch.bool)
    for start, stop in slab.layout.gradient_ranges.values():
        inside[start:stop] = True
    return slab.state["m"][~inside]


def test_state_of_other_dtypes_and_blocks(tmp_path: Path) -> None:
    run = Run(rule=rule_with(*BLOCKWISE))
    run.fill(1)
    expected = run.snapshot()
    run.checkpoints.save(tmp_path / "a", {})
    other = Run(blocks=ONE_BLOCK, rule=rule_with(*BLOCKWISE))
    other.fill(2)
    load(other, tmp_path / "a")
    assert same(other.snapshot(), expected)


def test_a_state_from_before_the_first_update_is_zero(tmp_path: Path) -> None:
    run = Run(state=False)
    run.checkpoints.save(tmp_path / "a", {})
    other = Run()
    other.fill(1)
    load(other, tmp_path / "a")
    assert all(not slab.state["m"].any() and not any(slab.steps.values()) for slab in other.slabs)


def test_hyperparameters_of_every_group_and_kind(tmp_path: Path) -> None:
    def grouped(lr: Any) -> Run:
        model = tiny.build("plain_moe")
        first, *others = model.parameters()
        groups: list[dict[str, Any]] = [{"params": others, "name": "most"}, {"params": [first], "lr": lr}]
        return Run(model, blocks=ONE_BLOCK, groups=groups)

    run = grouped(torch.tensor(0.25))
    run.optimizer.param_groups[0] |= {"betas": (0.8, 0.9), "initial_lr": 0.1}
    run.checkpoints.save(tmp_path / "a", {})
    other = grouped(torch.tensor(0.5))
    tensor = other.optimizer.param_groups[1]["lr"]
    load(other, tmp_path / "a")
    assert other.optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert other.optimizer.param_groups[0]["initial_lr"] == 0.1
    assert other.optimizer.param_groups[1]["lr"] is tensor and float(tensor) == 0.25
    run.optimizer.param_groups[0]["odd"] = object()
    with pytest.raises(oomc.CheckpointError, match=r"param_groups\[0\] of the optimizer has 'odd' of type object"):
        run.checkpoints.save(tmp_path / "a", {})


def test_training_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Six steps are three, a checkpoint, another step object of the same plan, and three more."""

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

    def train(step: Any, scheduler: Any, seeds: range) -> None:
        for seed in seeds:
            step(**tokens(2, 24, seed=seed))
            scheduler.step()

    step, _ = tiny_step("plain_moe", torch.bfloat16)
    scheduler = schedule(step.optimizer)
    train(step, scheduler, range(3))
    step.save(tmp_path / "a", scheduler.state_dict())
    train(step, scheduler, range(3, 6))
    other, _ = tiny_step("plain_moe", torch.bfloat16)
    with torch.no_grad():
        next(other.model.parameters()).fill_(1)
    resumed = schedule(other.optimizer)
    resumed.load_state_dict(other.load(tmp_path / "a"))
    train(other, resumed, range(3, 6))
    assert same(state(other), state(step))


def test_the_state_is_the_same_under_another_plan(tmp_path: Path) -> None:
    tight, _ = tiny_step("plain_moe", device=smallest_device("plain_moe", 2, 24))
    for seed in range(2):
        tight(**tokens(2, 24, seed=seed))
    tight.save(tmp_path / "a")
    budgets: list[dict[str, Any]] = [{}, {"device": "64MiB"}]
    for options in budgets:
        other, _ = tiny_step("plain_moe", **options)
        assert other.plan.describe() != tight.plan.describe()
        other.load(tmp_path / "a")
        assert same(state(other), state(tight))
        other(**tokens(2, 24, seed=9))
    tight(**tokens(2, 24, seed=9))
    error, name = worst(masters(other), masters(tight))
    assert error <= 1e-5, name


READER = """
import hashlib, json, sys
sys.modules["oomc"] = None  # importing it is an error
import torch, transformers
from pathlib import Path
for path in sorted(Path(sys.argv[1]).iterdir()):
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.double().contiguous().reshape(-1).view(torch.uint8).numpy())
    dtypes = sorted((name, str(p.dtype)) for name, p in model.named_parameters())
    ids = torch.arange(3, 40)[None]
    model.eval()
    print("RESULT", json.dumps([path.name, tied, digest.hexdigest(), float(model(ids, labels=ids).loss), dtypes]))
"""


def test_case_32_transformers_loads_them_without_this_package(tmp_path: Path) -> None:
    names = [name for name in tiny.NAMES if name != "plain_moe"]
    expected = []
    for name in sorted(names):
        model = tiny.build(name, torch.bfloat16 if name != "gpt_oss" else torch.float32)
        run = Run(model, blocks=("model.layers.0", "model.layers.1", "model.embed"))
        run.checkpoints.save(tmp_path / name, {})
        digest = hashlib.sha256()
        for key, tensor in sorted(model.state_dict().items()):
            digest.update(f"{key} {tuple(tensor.shape)}".encode())
            digest.update(tensor.double().contiguous().reshape(-1).view(torch.uint8).numpy())
        dtypes = sorted([key, str(p.dtype)] for key, p in model.named_parameters())
        ids = torch.arange(3, 40)[None]
        with torch.no_grad():
            loss = float(model.eval()(ids, labels=ids).loss)
        expected.append([name, model.config.tie_word_embeddings, digest.hexdigest(), loss, dtypes])  # type: ignore[union-attr]
    done = subprocess.run(
        [sys.executable, "-c", READER, tmp_path], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    results = [json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if "RESULT" in line]
    assert results == expected, done.stderr


def test_plain_torch_loads_them_by_the_models_own_names(tmp_path: Path) -> None:
    run = Run()
    run.fill(1)
    run.checkpoints.save(tmp_path / "a", {})
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {file: load_file(tmp_path / "a" / file) for file in set(index.values())}
    assert len(shards) == len(run.slabs) + 1, "a shard for each slab, and one for what is in none"
    assert {name: file for file, tensors in shards.items() for name in tensors} == index
    assert "embed.weight" in index and "head.weight" not in index, "tied weights are saved once"
    plain = copy.deepcopy(run.model)
    for tensor in plain.state_dict().values():
        tensor.zero_()
    missing = plain.load_state_dict({n: shards[index[n]][n] for n in index}, strict=False)
    assert missing.missing_keys == ["head.weight"] and not missing.unexpected_keys
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(plain.state_dict()[name], tensor), name


def test_case_31_saving_takes_one_block_and_loading_none(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.saving_memory", tmp_path / "a"], capture_output=True, text=True, cwd=ROOT,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    block, at_once, behind, loading = map(int, done.stdout.split())
    assert block == 12 * saving_memory.SIZE**2
    for extra in (at_once, behind):
        assert 0.5 * block < extra < block + (4 << 20)
    assert loading < 4 << 20


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.05) -> None:
    """Let each file of tensors take some time."""
    write = checkpoint_write.Files.write_tensors

    def slowly(*args: Any) -> None:
        time.sleep(seconds)
        write(*args)

    monkeypatch.setattr(checkpoint_write.Files, "write_tensors", slowly)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}, {"chaos": 3}])
def test_training_goes_on_during_a_save_and_is_not_in_it(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, _ = tiny_step("plain_moe", torch.bfloat16, **options)
    saver = Checkpoints(step.model, step.optimizer, step._rule, lambda: step._state.slabs)
    step(**tokens(2, 24))
    slow(monkeypatch)
    for trial in range(3):
        step(**tokens(2, 24, seed=trial))
        save = saver.save(tmp_path / "a", {}, asynchronous=True)
        groups = copy.deepcopy(step.optimizer.param_groups[0]["lr"])
        step.optimizer.param_groups[0]["lr"] *= 0.9
        for seed in range(3):
            step(**tokens(2, 24, seed=seed))
        save.wait()
        assert save.done
        after = state(step)
        twin, _ = tiny_step("plain_moe", torch.bfloat16, **options)
        twin_saver = Checkpoints(twin.model, twin.optimizer, twin._rule, lambda twin=twin: twin._state.slabs)  # type: ignore[misc]
        with twin_saver.open(tmp_path / "a") as opened:
            opened.restore()
        assert twin.optimizer.param_groups[0]["lr"] == groups
        assert not same(state(twin), after)
        twin.optimizer.param_groups[0]["lr"] *= 0.9
        for seed in range(3):
            twin(**tokens(2, 24, seed=seed))
        assert same(state(twin), after), "what was saved is not the state at the call"


def test_a_save_waits_for_what_was_under_way_and_updates_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    run.fill(1)
    update = Countdown(1)
    run.slabs[2].add_pending(["layers.1.linear.weight"], update)
    slow(monkeypatch, 0.01)
    save = run.checkpoints.save(tmp_path / "a", {}, asynchronous=True)
    run.slabs[3].wait_updated()  # the last slab is the first to be copied, as its next update is the first to come
    time.sleep(0.2)
    assert not save.done and all(slab.pending() for slab in run.slabs[:3])
    run.model.get_parameter("layers.1.linear.weight").data.fill_(5)
    expected = run.snapshot()
    update.part_done()
    for slab in reversed(run.slabs):
        slab.wait_updated()
        for tensor in (slab.weights, slab.lo, *slab.state.values()):
            tensor.zero_()
        slab.steps.update(dict.fromkeys(slab.steps, 0))
    save.wait()
    assert not same(run.snapshot(), expected)
    load(run, tmp_path / "a")
    assert same(run.snapshot(), expected)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_says_so_and_leaves_the_last_one(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    run.fill(1)
    expected = run.snapshot()
    run.checkpoints.save(tmp_path / "a", {})
    run.fill(2)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_write, "sync", full)
        with pytest.raises(oomc.CheckpointError, match="No space left on device"):
            run.checkpoints.save(tmp_path / "a", {}, asynchronous=asynchronous).wait()
        patch.undo()
        run.checkpoints.settle()
        patch.setattr(checkpoint_write.Files, "write_index", full)
        if asynchronous:
            run.checkpoints.save(tmp_path / "a", {}, asynchronous=True)
            with pytest.raises(oomc.CheckpointError, match="still there"):
                run.checkpoints.save(tmp_path / "a", {})
        else:
            with pytest.raises(oomc.CheckpointError, match="still there"):
                run.checkpoints.save(tmp_path / "a", {})
    assert os.listdir(tmp_path) == ["a"]
    assert not any(slab.pending() for slab in run.slabs), "updates may go on"
    load(run, tmp_path / "a")
    assert same(run.snapshot(), expected)
    run.checkpoints.save(tmp_path / "a", {})


def test_an_interrupted_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    run = Run()
    monkeypatch.setattr(checkpoint_write.Files, "write_index", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.checkpoints.save(tmp_path / "a", {})
    assert not os.listdir(tmp_path)
    assert not any(slab.pending() for slab in run.slabs)


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    run = Run()
    with pytest.raises(oomc.CheckpointError, match="`extra` holds what cannot be loaded again"):
        run.checkpoints.save(tmp_path / "a", {}, {"path": Path("x"), "f": run.snapshot})
    model = Run().model
    model.register_parameter("unused", nn.Parameter(torch.zeros(3, device="meta")))
    with pytest.raises(oomc.CheckpointError, match="unused is on the meta device"):
        Run(model).checkpoints.save(tmp_path / "a", {})
    assert not os.listdir(tmp_path)
