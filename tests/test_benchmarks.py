"""The benchmarks give every engine the same model and tokens, and the baseline computes what eager does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.common import batches, build_model

pytest.importorskip("transformers")
ROOT = Path(__file__).parent.parent


def test_every_dtype_starts_from_the_same_values() -> None:
    one = build_model(2, seed=3, dtype=torch.float32, tiny=True)
    two = build_model(2, seed=3, dtype=torch.bfloat16, tiny=True)
    for (name, x), (other, y) in zip(one.named_parameters(), two.named_parameters()):
        assert name == other
        assert y.dtype == torch.bfloat16
        assert torch.equal(x, y.float()), name
    assert two.model.rotary_emb.inv_freq.dtype == torch.float32
    assert one.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert not torch.equal(one.lm_head.weight, build_model(2, seed=4, tiny=True).lm_head.weight)


def test_batches_repeat() -> None:
    first, again = next(batches(1, 2, 8, 100)), next(batches(1, 2, 8, 100))
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert int(first["input_ids"].max()) < 100


def test_fsdp2_computes_what_eager_does(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = tmp_path / "gradients.safetensors"
    command = [sys.executable, "benchmarks/fsdp2.py", "--device", "cpu", "--tiny", "--layers", "2", "--batch", "2"]
    command += ["--seq", "24", "--chunk", "20", "--dtype", "float32", "--warmup", "0", "--steps", "1", "--split", "1"]
    done = subprocess.run([*command, "--save-grads", path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])

    model = build_model(2, seed=0, tiny=True)
    loss = model(**next(batches(1, 2, 24, model.config.vocab_size))).loss
    loss.backward()
    assert result["losses"] == [pytest.approx(loss.item(), rel=1e-6)]
    gradients = load_file(path)
    assert gradients.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert (gradients[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name


@pytest.mark.slow
def test_long_contexts_with_regenerated_boundaries_have_the_prefix_gradients() -> None:
    command = [sys.executable, "benchmarks/long_context.py", "--device", "cpu", "--tiny", "--hybrid", "--layers", "4"]
    command += [
        "--seq",
        "1024",
        "--prefix",
        "256",
        "--dtype",
        "float32",
        "--device-budget",
        "1GiB",
        "--regenerate",
        "3",
    ]
    command += ["--attention-on-host"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["regenerated"], result["attention_on_host"]) == (3, 1)
    assert result["gradient_error"] <= 1e-5
    assert result["device_measured"] <= result["device_projected"] <= 1 << 30
