"""The command line: its own work with a stand-in for the compiler, and once end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import oomc
from oomc import cli
from oomc.data import ByteTokenizer
from oomc.errors import BudgetError


class StubReport:
    def __str__(self) -> str:
        return "the report"

    def save(self, path: str) -> None:
        Path(path).write_text(json.dumps({"text": str(self), "device": {"allowed": 10}}))


class StubStep:
    """Stands in for a compiled step: remembers what it was given."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model, self.options = model, options
        self.batches: list[dict[str, torch.Tensor]] = []
        self.metrics = {"tokens_per_s": 1.0}
        self.stages: list[str | None] = []

    def __call__(self, **batch: torch.Tensor) -> torch.Tensor:
        self.batches.append(batch)
        return torch.tensor(5.0 - len(self.batches))

    def report(self, stage: str | None = None) -> StubReport:
        self.stages.append(stage)
        return StubReport()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[StubStep]:
    made: list[StubStep] = []

    def stub_compile(model: Any, **options: Any) -> StubStep:
        made.append(StubStep(model, **options))
        return made[-1]

    monkeypatch.setattr(oomc, "compile", stub_compile, raising=False)
    monkeypatch.setattr(oomc, "Budget", lambda **sizes: sizes, raising=False)
    return made


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 40)
    return str(path)


def test_train_a_preset(steps: list[StubStep], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    options = "--steps 3 --batch 2 --seq 16 --lr 0.5 --device cpu --device-budget 8MiB".split()
    paths = ["--save", str(tmp_path / "model"), "--report", str(tmp_path / "report.json")]
    assert cli.main(["train", "qwen3-moe-tiny", "--data", text, *options, *paths, "--print-after", "assemble"]) == 0
    [step] = steps
    assert step.stages[0] == "assemble"
    assert step.options["budget"] == {"device": "8MiB", "host": None}
    assert step.options["optimizer"].param_groups[0]["lr"] == 0.5
    assert step.options["device"] == "cpu"
    assert step.options["example"]["input_ids"].shape == (2, 16)
    assert len(step.batches) == 3
    assert step.model.dtype == torch.float32
    out = capsys.readouterr().out
    assert "the report" in out
    assert "3 steps, loss 4.0000 -> 2.0000" in out
    assert (tmp_path / "model" / "model.safetensors").exists()

    # what was saved is a model directory
    assert cli.main(["train", str(tmp_path / "model"), "--data", text, *options, "--dtype", "bfloat16"]) == 0
    assert steps[1].model.dtype == torch.bfloat16
    assert cli.main(["report", str(tmp_path / "report.json")]) == 0


def test_bytes_where_the_model_has_no_tokenizer(tmp_path: Path) -> None:
    assert isinstance(cli.load_tokenizer(tmp_path), ByteTokenizer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nonsense", "--data", "x"], "'nonsense' is neither a model directory nor a preset"),
        (["train", "qwen3-moe-tiny", "--data", "absent.txt"], "no such file or folder: absent.txt"),
        (["report", "absent.json"], "absent.json"),
    ],
)
def test_mistakes_are_messages(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_budget_error_is_a_message(
    steps: list[StubStep], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(model: Any, **options: Any) -> None:
        raise BudgetError("needs 9 MiB", smallest_device=9 << 20)

    monkeypatch.setattr(oomc, "compile", refuse)
    assert cli.main(["train", "qwen3-moe-tiny", "--data", text, "--batch", "1", "--seq", "16"]) == 2
    assert capsys.readouterr().err.endswith("oomc: BudgetError: needs 9 MiB\n")


def test_steps_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", "qwen3-moe-tiny", "--data", "x", "--steps", "0"])
    assert "0 is not at least 1" in capsys.readouterr().err


def test_report_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"text": "model\n-----\nsmall", "device": {"allowed": 10}}))
    assert cli.main(["report", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == ["model", "-----", "small"]
    path.write_text("not json")
    assert cli.main(["report", str(path)]) == 2
    (tmp_path / "report.txt").write_text("plain\n")
    assert cli.main(["report", str(tmp_path / "report.txt")]) == 0


def test_presets_have_the_sizes_they_say() -> None:
    transformers = pytest.importorskip("transformers")
    counts = {}
    for name, sizes in cli.PRESETS.items():
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**sizes))
        counts[name] = sum(parameter.numel() for parameter in model.parameters())
    assert {name: f"{count / 1e6:.3g}" for name, count in counts.items()} == {
        "qwen3-moe-tiny": "0.873",
        "qwen3-moe-small": "26.9",
        "qwen3-moe-30b-a3b": "3.05e+04",
    }


@pytest.mark.skipif(not hasattr(oomc, "compile"), reason="oomc.compile does not exist yet")
def test_end_to_end(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    options = "--steps 6 --batch 2 --seq 32 --lr 3e-3 --device cpu".split()
    paths = ["--save", str(tmp_path / "model"), "--report", str(tmp_path / "report.json")]
    assert cli.main(["train", "qwen3-moe-tiny", "--data", text, *options, *paths]) == 0
    words = capsys.readouterr().out.split("6 steps, loss ")[1].split()
    assert float(words[2]) < float(words[0])
    assert cli.main(["report", str(tmp_path / "report.json")]) == 0
    assert (tmp_path / "model" / "model.safetensors").exists()
