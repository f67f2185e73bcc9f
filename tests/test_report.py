"""Reports say what was planned and measured, and are saved and read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import oomc
from oomc.models import tiny
from oomc.report import Report
from tests.helpers import compiled, smallest_device, tiny_step, tokens


def test_a_report_before_and_after_a_step() -> None:
    step, _ = tiny_step("qwen3_moe", device="20MiB", host="100MiB")
    before = str(step.report())
    assert "no step has run yet" in before
    loss = step(**tokens(2, 24))
    text = str(step.report())
    for part in ("model", "plan", "device memory", "host memory", "lanes", "last step", "allowed", "20.0 MiB",
                 "100.0 MiB", "measured peak", "1 compiled form;", f"loss {float(loss):.4f}"):  # fmt: skip
        assert part in text, part
    assert " 0x" not in text, "a report has no addresses"


def test_reports_are_saved_and_read_again(tmp_path: Path) -> None:
    step, _ = tiny_step("qwen3_moe")
    step(**tokens(2, 24))
    report = step.report()
    assert report.save(tmp_path / "deep" / "report.txt").read_text() == f"{report}\n"
    saved = report.save(tmp_path / "report.json")
    assert json.loads(saved.read_text())["text"] == str(report)
    assert str(Report.load(saved)) == str(report)
    for ending in (".html", ".trace.json"):
        again = Report.load(saved).save(tmp_path / f"again{ending}")
        assert again.read_text() == report.save(tmp_path / f"report{ending}").read_text()
    with pytest.raises(ValueError, match=r"saved as \.txt, \.json, \.html or \.trace\.json, not \.pdf"):
        report.save(tmp_path / "report.pdf")


def test_the_report_says_how_long_a_step_is_and_simulates_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step, _ = tiny_step("qwen3_moe", device="20MiB")
    text, rates = str(step.report()), step._rates
    assert rates is not None
    assert rates[1].line.describe() in text and "busy: compute" in text and rates[1].machine.name in text
    monkeypatch.setattr("oomc.step.simulate", None)
    assert str(step.report()) == text, "what is known is not simulated again, nor is anything in a step"
    step(**tokens(2, 24))
    assert rates[1].line.describe() in str(step.report())


@pytest.mark.parametrize("stage", ["capture", "partition_worksets", "schedule", "lower"])
def test_stages_print_the_same_text_twice(stage: str) -> None:
    step, _ = tiny_step("plain_moe")
    first = str(step.report(stage=stage))
    assert len(first.splitlines()) > 10 and " 0x" not in first
    assert first == str(step.report(stage=stage))


def test_an_unknown_stage_lists_those_there_are() -> None:
    step, _ = tiny_step("plain_moe")
    with pytest.raises(ValueError, match="no stage is called 'optimise'; there are capture, canonicalize, "):
        step.report(stage="optimise")


def test_nothing_compiled_nothing_to_report() -> None:
    step = compiled(tiny.build("plain_moe"), {}, prepare=False)
    with pytest.raises(oomc.errors.OomcError, match="nothing is compiled yet"):
        step.report()


def test_the_table_of_a_shortage_adds_up() -> None:
    step, _ = tiny_step("plain_moe", device="1KiB", prepare=False)
    with pytest.raises(oomc.BudgetError) as caught:
        step.prepare(**tokens(2, 24))
    text = str(caught.value)
    for part in ("weights in flight", "buffers, constants, inputs", "values and temporaries at", "needed", "allowed",
                 "batch 2 x 24", str(smallest_device("plain_moe", 2, 24))):  # fmt: skip
        assert part in text, part
