"""Nothing damaged or foreign is loaded, and a refusal changes nothing."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import oomc
from oomc import manifest
from oomc.runtime.layout import StateArray
from tests.checkpoint_cases import BLOCKWISE, Run, Small, draws, rule_with, same


def refused(run: Run, directory: Path, match: str) -> None:
    """Loading raises, and changes neither state nor random generators."""
    before, generator = run.snapshot(), torch.get_rng_state()
    with pytest.raises(oomc.CheckpointError, match=match):
        run.checkpoints.open(directory)
    assert same(run.snapshot(), before)
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = Run()
    run.fill(1)
    directory = tmp_path_factory.mktemp("saved") / "a"
    run.checkpoints.save(directory, {"steps": 3}, {"note": "x" * 100})
    return directory


FILES = [
    "model-00001-of-00006.safetensors", "model-00006-of-00006.safetensors", "model.safetensors.index.json",
    "oomc/state-00002-of-00006.safetensors", "oomc/random.pt", "oomc/extra.pt", "oomc/manifest.json",
]  # fmt: skip
DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda content: None,
    "empty": lambda content: b"",
    "one byte less": lambda content: content[:-1],
    "half": lambda content: content[: len(content) // 2],
    "one byte more": lambda content: content + b"\0",
    "zeros at the end": lambda content: content[:-64] + bytes(64),
    "a bit": lambda content: content[:-40] + bytes([content[-40] ^ 4]) + content[-39:],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named(name: str, damage: str, saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "a"
    shutil.copytree(saved, copy)
    content = DAMAGES[damage]((copy / name).read_bytes())
    if content is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(content)
    refused(Run(), copy, re.escape(name))


def test_no_flipped_bit_is_loaded(saved: Path, tmp_path: Path) -> None:
    """What a flip leaves as it was (the padding of a header, the spaces of the manifest) may be loaded, and rightly."""
    copy = tmp_path / "a"
    shutil.copytree(saved, copy)
    files = [f for f in sorted(copy.rglob("*")) if f.is_file() and f.name not in manifest.EDITABLE]
    expected = Run()
    with expected.checkpoints.open(saved) as opened:
        opened.restore()
    drawn = draws()
    numbers, run, harmless = random.Random(0), Run(), 0
    run.fill(5)
    for _ in range(400):
        file = numbers.choice(files)
        content = bytearray(file.read_bytes())
        # half of them in the headers, where a flip moves or renames tensors
        content[numbers.randrange(len(content) if numbers.random() < 0.5 else min(300, len(content)))] ^= (
            1 << numbers.randrange(8)
        )
        original = file.read_bytes()
        file.write_bytes(content)
        before = run.snapshot()
        try:
            with run.checkpoints.open(copy) as opened:
                opened.restore()
        except oomc.CheckpointError:
            assert same(run.snapshot(), before), f"{file} was refused, but something was loaded"
        else:
            harmless += 1
            assert same(run.snapshot(), expected.snapshot()), f"{file} was loaded with other numbers"
            assert draws() == drawn
            run.fill(5)
        file.write_bytes(original)
    assert harmless < 40


def test_a_shard_of_another_checkpoint_is_noticed(saved: Path, tmp_path: Path) -> None:
    other = Run()
    other.fill(2)
    other.checkpoints.save(tmp_path / "b", {})
    shutil.copytree(saved, tmp_path / "a")
    name = "oomc/state-00002-of-00006.safetensors"
    shutil.copy(tmp_path / "b" / name, tmp_path / "a" / name)
    refused(other, tmp_path / "a", "state-00002.* has other content than was written in layers.0")
    tensors = load_file(saved / name)
    first = next(iter(tensors))
    tensors[first[:-1] + "?"] = tensors.pop(first)
    save_file(tensors, tmp_path / "a" / name, {"format": "pt"})
    refused(other, tmp_path / "a", "state-00002")


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    refused(Run(), tmp_path / "a", "there is no checkpoint of oomc at .*/a")
    (tmp_path / "a").mkdir()
    refused(Run(), tmp_path / "a", r"has no oomc/manifest\.json")
    (tmp_path / "file").write_text("")
    refused(Run(), tmp_path / "file", r"has no oomc/manifest\.json")


def test_another_version_is_named(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "VERSION", 2)
        Run().checkpoints.save(tmp_path / "a", {})
    refused(Run(), tmp_path / "a", "is oomc checkpoint 2; this version of oomc reads oomc checkpoint 1")
    body = json.loads((saved / manifest.MANIFEST).read_text())
    assert (body["format"], body["version"]) == ("oomc checkpoint", 1)


def wider() -> nn.Module:
    model = Small()
    model.unused = nn.Parameter(torch.zeros(5))
    return model


def whole() -> nn.Module:
    model = Small()
    model.scale = nn.Parameter(torch.zeros(()))
    return model


def without_a_layer() -> nn.Module:
    return Small(layers=2)


def untied() -> nn.Module:
    model = Small()
    model.head.weight = nn.Parameter(torch.zeros(20, 8, dtype=torch.bfloat16))
    return model


def frozen() -> nn.Module:
    model = Small()
    model.scale.requires_grad_(False)
    return model


def other_buffer() -> nn.Module:
    model = Small()
    model.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    return model


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (wider, r"parameter unused is float32 of shape \(4,\) in the checkpoint .*, and float32 of shape \(5,\) here"),
        (
            whole,
            r"parameter scale is bfloat16 of shape \(\) in the checkpoint .*, and float32 of shape \(\) here",
        ),
        (without_a_layer, "has other parameters: it has also layers.2.linear.bias, .* and 1 more, and lacks none"),
        (untied, "has other parameters: it has also none, and lacks head.weight"),
        (frozen, "parameter scale is trained in the checkpoint .*, and is not here"),
        (other_buffer, r"persistent buffer count is int64 of shape \(\)"),
    ],
)
def test_another_model(model: Callable[[], nn.Module], match: str, saved: Path) -> None:
    refused(Run(model()), saved, match)


def test_another_optimizer(saved: Path) -> None:
    run = Run()
    params = [p for p in run.model.parameters() if p.requires_grad]
    run.checkpoints._optimizer = torch.optim.SGD(params, lr=0.1)
    refused(run, saved, "is of the optimizer AdamW, the step of SGD")
    run.checkpoints._optimizer = torch.optim.AdamW([{"params": params[1:]}, {"params": params[:1]}])
    refused(run, saved, "has 1 parameter groups, the step's 2")
    run.checkpoints._optimizer = torch.optim.AdamW(params[1:])
    refused(run, saved, "has other parameters in group 0")
    refused(
        Run(rule=rule_with(*BLOCKWISE)),
        saved,
        r"m \(float32\), v \(float32\), the step m \(uint8\), m_scale .*64 elements\)",
    )

    narrow = rule_with(StateArray("m", torch.bfloat16), StateArray("v", torch.bfloat16))
    refused(Run(rule=narrow), saved, r"the step m \(bfloat16\), v \(bfloat16\)")


def test_loading_waits_for_what_is_under_way(saved: Path, tmp_path: Path) -> None:
    run = Run()
    run.fill(3)
    expected = run.snapshot()
    run.checkpoints.save(tmp_path / "b", {}, asynchronous=True)
    with run.checkpoints.open(saved) as opened:
        opened.restore()
    with run.checkpoints.open(tmp_path / "b") as opened:
        opened.restore()
    assert same(run.snapshot(), expected)


def test_a_checkpoint_that_is_replaced_while_open_is_still_the_one_that_was_opened(tmp_path: Path) -> None:
    run = Run()
    run.fill(1)
    expected = run.snapshot()
    run.checkpoints.save(tmp_path / "a", {})
    with run.checkpoints.open(tmp_path / "a") as opened:
        run.fill(2)
        run.checkpoints.save(tmp_path / "a", {})
        opened.restore()
    assert same(run.snapshot(), expected)


def test_numbers_are_restored_into_the_users_own_parameters(saved: Path) -> None:
    run = Run()
    parameters: dict[str, Any] = dict(run.model.named_parameters())
    addresses = {name: p.data_ptr() for name, p in parameters.items()}
    with run.checkpoints.open(saved) as opened:
        opened.restore()
    assert {name: p.data_ptr() for name, p in run.model.named_parameters()} == addresses
    assert all(run.model.get_parameter(name) is p for name, p in parameters.items())
