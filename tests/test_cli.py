"""The command line: its own work with a stand-in for the compiler, and once end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import oomc
from oomc import cli, cli_plan, machine
from oomc.data import ByteTokenizer
from oomc.errors import BudgetError

TRAIN = ["train", "qwen3-moe-tiny", "--data", __file__, "--batch", "1", "--seq", "16"]


class StubReport:
    def __str__(self) -> str:
        return "the report"

    def save(self, path: str) -> None:
        Path(path).write_text(json.dumps({"text": str(self), "device": {"allowed": 10}}))


class StubStep:
    """Stands in for a compiled step: remembers what it was given."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model, self.options = model, options
        self.optimizer = options["optimizer"]
        self.calls: list[str] = []
        self.saved: list[tuple[str, Any, bool]] = []
        self.extra: Any = None
        self.batches: list[dict[str, torch.Tensor]] = []
        self.metrics = {"tokens_per_s": 1.0}
        self.stages: list[str | None] = []

    def __call__(self, **batch: torch.Tensor) -> torch.Tensor:
        self.calls.append("step")
        self.batches.append(batch)
        return torch.tensor(5.0 - len(self.batches))

    def forward_backward(self, **batch: torch.Tensor) -> torch.Tensor:
        loss = self(**batch)
        self.calls[-1] = "forward_backward"
        return loss

    def update(self) -> None:
        self.calls.append("update")

    def save(self, directory: str, extra: Any, *, asynchronous: bool) -> None:
        self.calls.append("save")
        self.saved.append((directory, extra, asynchronous))

    def load(self, directory: str) -> Any:
        return self.extra

    def record(self) -> None:
        self.calls.append("record")

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
    paths = ["--report", str(tmp_path / "report.json")]
    assert cli.main(["train", "qwen3-moe-tiny", "--data", text, *options, *paths, "--print-after", "assemble"]) == 0
    [step] = steps
    assert step.stages[0] == "assemble"
    assert step.options["budget"] == {"device": "8MiB", "host": None}
    assert type(step.optimizer) is torch.optim.AdamW
    assert {name: step.optimizer.param_groups[0][name] for name in ("lr", "weight_decay")} == {
        "lr": 0.5,
        "weight_decay": 0.01,
    }
    assert step.options["device"] == "cpu"
    assert (step.options["max_grad_norm"], step.options["state"]) == (None, "fp32")
    assert step.options["example"]["input_ids"].shape == (2, 16)
    assert step.calls == ["step", "step", "record", "step"]
    assert step.model.dtype == torch.float32
    assert next(step.model.parameters()).is_meta, "the step draws the weights, block by block"
    out = capsys.readouterr().out
    assert "the report" in out
    assert "3 steps, loss 4.0000 -> 2.0000" in out
    assert cli.main(["report", str(tmp_path / "report.json")]) == 0


def test_a_model_directory_is_loaded_without_memory(steps: list[StubStep], text: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from oomc.models import tiny

    saved: Any = tiny.build("qwen3_moe")
    saved.save_pretrained(tmp_path / "model")
    options = "--steps 1 --batch 1 --seq 16 --dtype bfloat16".split()
    assert cli.main(["train", str(tmp_path / "model"), "--data", text, *options]) == 0
    [step] = steps
    assert step.model.dtype == torch.bfloat16
    assert next(step.model.parameters()).is_meta


def test_options_of_the_optimizer_and_of_windows(steps: list[StubStep], text: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    options = "--steps 5 --batch 1 --seq 16 --optimizer sgd --momentum 0.9 --clip 2 --accumulate 2".split()
    paths = ["--checkpoint", str(tmp_path / "ck"), "--save-every", "2"]
    assert cli.main(["train", "qwen3-moe-tiny", "--data", text, *options, *paths]) == 0
    [step] = steps
    assert type(step.optimizer) is torch.optim.SGD
    group = step.optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (1e-4, 0.9, 0)
    assert step.options["max_grad_norm"] == 2
    window = ["forward_backward", "forward_backward", "update"]
    assert step.calls == [*window, *window, "save", *window, *window, "save", *window, "save"]
    assert [(extra["steps"], extra["batches"], later) for _, extra, later in step.saved] == [
        (2, 4, False),
        (4, 8, True),
        (5, 10, False),
    ]


@pytest.fixture
def resumed(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[dict[str, int]], Any], list[str]], tuple[int, StubStep]]:
    """A run of two steps, and one that resumes it with what `change` makes of its position."""
    made: list[StubStep] = []
    extras: list[Any] = []

    def stub_compile(model: Any, **options: Any) -> StubStep:
        made.append(StubStep(model, **options))
        made[-1].extra = extras[-1] if extras else None
        return made[-1]

    monkeypatch.setattr(oomc, "compile", stub_compile)
    monkeypatch.setattr(cli, "locate", lambda path: path)
    train = ["train", "qwen3-moe-tiny", "--data", text, "--batch", "1", "--seq", "16"]

    def run(change: Callable[[dict[str, int]], Any], options: list[str]) -> tuple[int, StubStep]:
        assert cli.main([*train, "--steps", "2", "--checkpoint", str(tmp_path / "ck")]) == 0
        extras.append(change(made[-1].saved[-1][1]))
        return cli.main([*train, "--resume", str(tmp_path / "ck"), *options]), made[-1]

    return run


def test_resume_goes_on_where_it_was(resumed: Any, text: str) -> None:
    pytest.importorskip("transformers")
    code, step = resumed(dict, ["--steps", "4", "--lr", "0.25"])
    assert code == 0
    assert len(step.batches) == 2
    assert step.optimizer.param_groups[0]["lr"] == 0.25
    _, first = resumed(dict, ["--steps", "3"])
    assert torch.equal(first.batches[0]["input_ids"], step.batches[0]["input_ids"])


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (dict, ["--steps", "2"], "has 2 steps behind it; --steps 2 asks for no more"),
        (dict, ["--seq", "8"], "was trained with another --seq (16)"),
        (lambda extra: extra | {"--data": 0}, [], "was trained with another --data (other text, or another tokenizer)"),
        (lambda extra: None, [], "was not saved by `oomc train`"),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    resumed: Any, change: Any, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    code, step = resumed(change, options)
    assert code == 2
    assert not step.batches
    assert message in capsys.readouterr().err


def test_bytes_where_the_model_has_no_tokenizer(tmp_path: Path) -> None:
    assert isinstance(cli.load_tokenizer(tmp_path), ByteTokenizer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nonsense", "--data", "x"], "'nonsense' is neither a model directory nor a preset"),
        (["train", "qwen3-moe-tiny", "--data", "absent.txt"], "no such file or folder: absent.txt"),
        (["report", "absent.json"], "absent.json"),
        ([*TRAIN, "--save-every", "2"], "--save-every needs --checkpoint DIR"),
        ([*TRAIN, "--resume", "absent"], "there is no checkpoint of oomc at"),
        ([*TRAIN, "--checkpoint", "tests"], "is not empty and no checkpoint of oomc"),
        ([*TRAIN, "--checkpoint", "new", "--save", "./new"], "--save and --checkpoint are one directory"),
        ([*TRAIN, "--report", "report.pdf"], "a report is saved as .txt, .json, .html or .trace.json, not .pdf"),
        ([*TRAIN, "--momentum", "0.9"], "--momentum is an option of --optimizer sgd"),
        ([*TRAIN, "--optimizer", "sgd", "--state", "8bit"], "is not supported for torch.optim.SGD"),
        ([*TRAIN, "--clip", "0"], "is no norm to clip to"),
    ],
)
def test_mistakes_are_messages(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
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


def test_a_report_becomes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, target = tmp_path / "report.json", tmp_path / "report.html"
    path.write_text(json.dumps({"text": "small", "stage": "capture"}))
    assert cli.main(["report", str(path), "--html", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n" and "small" in target.read_text()
    for arguments, message in (
        (["--html", str(tmp_path / "report.pdf")], "does not end with .html"),
        (["--trace", str(tmp_path / "report.json")], "does not end with .trace.json"),
        (["--trace", str(tmp_path / "report.trace.json")], "no timeline"),
    ):
        assert cli.main(["report", str(path), *arguments]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "report.txt"), "--html", str(target)]) == 2
    assert "saved as .json" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"text": "small"}))
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "oomc", "report", str(path)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=Path(cli.__file__).parents[1])
    os.close(writer)
    assert (done.returncode, done.stderr) == (cli.BROKEN_PIPE, b"")


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


def test_end_to_end(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    options = "--steps 6 --batch 2 --seq 32 --lr 3e-3 --device cpu".split()
    paths = ["--save", str(tmp_path / "model"), "--report", str(tmp_path / "report.json")]
    assert cli.main(["train", "qwen3-moe-tiny", "--data", text, *options, *paths]) == 0
    words = capsys.readouterr().out.split("6 steps, loss ")[1].split()
    assert float(words[2]) < float(words[0])
    assert cli.main(["report", str(tmp_path / "report.json")]) == 0
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_resume_equals_an_uninterrupted_run(text: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from oomc.models import tiny

    model: Any = tiny.build("qwen3_moe", torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    train = ["train", str(tmp_path / "model"), "--data", text, *"--batch 2 --seq 32 --lr 3e-3 --device cpu".split()]
    train += "--clip 1 --accumulate 2 --state 8bit".split()
    checkpoint = str(tmp_path / "ck")

    assert cli.main([*train, "--steps", "5", "--save", str(tmp_path / "whole")]) == 0
    assert cli.main([*train, "--steps", "3", "--checkpoint", checkpoint, "--save-every", "1"]) == 0
    again = ["--resume", checkpoint, "--checkpoint", checkpoint, "--save", str(tmp_path / "resumed")]
    assert cli.main([*train, "--steps", "5", *again]) == 0
    whole, resumed = (tmp_path / name / "model.safetensors" for name in ("whole", "resumed"))
    assert whole.read_bytes() == resumed.read_bytes()


def test_checkpoints_have_the_tokenizer(steps: list[StubStep], text: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from oomc.models import tiny

    model: Any = tiny.build("qwen3_moe")
    model.save_pretrained(tmp_path / "model")
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"It": 0, "?": 1}, unk_token="?")), unk_token="?"
    )
    words.save_pretrained(tmp_path / "model")
    (tmp_path / "words.txt").write_text("It")
    options = ["--steps", "1", "--batch", "1", "--seq", "1", "--checkpoint", str(tmp_path / "ck")]
    assert cli.main(["train", str(tmp_path / "model"), "--data", str(tmp_path / "words.txt"), *options]) == 0
    assert not isinstance(cli.load_tokenizer(tmp_path / "ck"), ByteTokenizer)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The config.json of a tiny model, which is traced once for all tests."""
    pytest.importorskip("transformers")
    from oomc.estimate import _Compiler
    from oomc.models import tiny

    trace = _Compiler.capture

    def capture(self: _Compiler, *args: Any) -> Any:
        if not TRACED:
            TRACED.append(trace(self, *args))
        return TRACED[0]

    monkeypatch.setattr(_Compiler, "capture", capture)
    model: Any = tiny.build("llama", torch.bfloat16)
    model.config.save_pretrained(tmp_path)
    return str(tmp_path / "config.json")


TRACED: list[Any] = []


def test_plan_prints_and_writes_the_figures(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    options = "--machine H200 --device-budget 24GiB --host-budget 2GiB --batch 2 --seq 128 --clip 1".split()
    files = {"--html": tmp_path / "plan.html", "--trace": tmp_path / "plan.trace.json"}
    also = [part for option, file in files.items() for part in (option, str(file))]
    assert cli.main(["plan", config, *options, "--json", str(path), *also]) == 0
    out = capsys.readouterr().out
    assert f"{config} on H200" in out and "projected peak" in out and "bound by" in out
    figures = json.loads(path.read_text())
    assert figures["fits"] and figures["batch"] == 2 and figures["seq"] == 128
    assert f"step {figures['step_s']:.3f} s" in out
    assert figures["budget"] == {"device": 24 << 30, "host": 2 << 30}
    assert f"{config} on H200" in files["--html"].read_text()
    assert json.loads(files["--trace"].read_text())["otherData"]["step_s"] == figures["step_s"]


def test_plan_says_what_is_missing(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    plan = ["plan", config, *"--machine H200 --batch 2 --seq 128 --json".split(), str(path)]
    budget: list[str] = []
    for tier in ("device", "host"):  # a device that is just large enough leaves all state to the host
        assert cli.main([*plan, *budget, f"--{tier}-budget", "100KiB"]) == 2
        error = capsys.readouterr().err
        assert f"does not fit the {tier} budget" in error and "needed" in error
        figures = json.loads(path.read_text())
        assert figures["fits"] is False and figures["error"] in error
        budget += [f"--{tier}-budget", str(figures[f"smallest_{tier}"])]
    assert cli.main([*plan, *budget]) == 0


def test_plan_sweeps(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_plan, "CONTEXTS", (64, 16384))
    monkeypatch.setattr(cli_plan, "DEVICE_BUDGETS", ("1MiB", "2MiB", "24GiB", "200GiB"))
    path = tmp_path / "sweep.json"
    assert cli.main(["plan", config, "--machine", "H200", "--batch", "3", "--sweep", "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == "tokens 1.0 MiB 2.0 MiB 24.00 GiB 131.32 GiB".split()
    assert [line.split()[2] for line in lines[2:]] == ["64", "16384"]
    cells = json.loads(path.read_text())["cells"]
    assert [(c["context"], c["device_budget"] >> 20, c["fits"]) for c in cells[:4]] == [
        (64, 1, False), (64, 2, False), (64, 24 << 10, True), (64, 141 * 10**9 >> 20, True),
    ]  # fmt: skip
    assert cells[0]["smallest_device"] == cells[1]["smallest_device"] > 2 << 20
    assert lines[2].count("needs") == 2 and lines[2].count("/s") == 2

    small = replace(machine.default("H200"), device_memory=4 << 20).save(tmp_path / "small.json")
    monkeypatch.setattr(cli_plan, "CONTEXTS", (64,))
    assert cli.main(["plan", config, "--machine", str(small), "--sweep"]) == 2
    assert capsys.readouterr().out.splitlines()[2].count("needs") == 3
    assert str(cli_plan.Cell(64, 1, BudgetError("", smallest_host=3 << 30))) == "host needs 3.00 GiB"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Qwen3-31B"], "there are Qwen3-30B-A3B"),
        (["llama-3-8b", "--machine", "H2000"], "no machine is known as 'H2000'"),
        (["llama-3-8b", "--device-budget", "24 pounds"], "is no size"),
        (["llama-3-8b", "--sweep", "--device-budget", "24GiB"], "leave out --device-budget"),
        (["llama-3-8b", "--sweep", "--html", "x.html"], "leave out --sweep"),
        (["llama-3-8b", "--html", "x.pdf"], "x.pdf does not end with .html"),
        (["llama-3-8b", "--optimizer", "sgd", "--state", "8bit"], "is not supported for torch.optim.SGD"),
    ],
)
def test_mistakes_of_plan_are_messages(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert cli.main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err
