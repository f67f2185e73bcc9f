"""Traces are valid, name their lanes, never overlap on a track, and add up to the timeline."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from oomc.report import Report
from oomc.report_trace import curve, trace, tracks
from tests.reports import recorded


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = recorded()[1].save(tmp_path_factory.mktemp("trace") / "step.trace.json")
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def spans(saved: dict[str, Any], pid: int) -> dict[str, list[dict[str, Any]]]:
    """Complete events by the name of their track."""
    own = [event for event in saved["traceEvents"] if event["pid"] == pid]
    named = {event["tid"]: event["args"]["name"] for event in own if event["name"] == "thread_name"}
    found = defaultdict(list)
    for event in own:
        if event["ph"] == "X":
            found[named[event["tid"]]].append(event)
    return found


def test_events_have_what_the_format_asks_for(saved: dict[str, Any]) -> None:
    assert saved["displayTimeUnit"] == "ms"
    for event in saved["traceEvents"]:
        assert {"ph", "pid", "tid", "name"} <= event.keys() and event["ph"] in "XMC"
        if event["ph"] == "X":
            assert event["dur"] >= 0 and {"block", "bytes"} == event["args"].keys()
        if event["ph"] == "C":
            assert event["ts"] >= 0 and event["args"]["bytes"] >= 0
    names = {e["pid"]: e["args"]["name"] for e in saved["traceEvents"] if e["name"] == "process_name"}
    assert names == {1: "projected on cpu", 2: "measured"}


@pytest.mark.parametrize("pid", [1, 2])
def test_lanes_are_tracks_on_which_nothing_overlaps(saved: dict[str, Any], pid: int) -> None:
    found = spans(saved, pid)
    assert {name.partition(" ")[0] for name in found} == {"compute", "h2d", "d2h", "host", "device"}
    for events in found.values():
        for before, after in pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.01


def test_durations_add_up_to_the_timeline(saved: dict[str, Any]) -> None:
    data = recorded()[1].data
    for pid, figures in ((1, data["timeline"]), (2, data["measured"])):
        found = spans(saved, pid)
        for name in ("compute", "h2d"):
            seconds = sum(e["dur"] for e in found[name] if e["cat"] != "wait") / 1e6
            assert seconds == pytest.approx(figures["busy"][name], rel=0.05), (pid, name)
        waited = sum(e["dur"] for e in found["compute"] if e["cat"] == "wait") / 1e6
        assert pid == 1 or waited == pytest.approx(sum(figures["exposed"].values()))
    busy = sum(e["dur"] for name, events in spans(saved, 1).items() for e in events if name.startswith("device")) / 1e6
    assert busy >= 0.9 * data["timeline"]["busy"]["device"], "updates have their length"


def test_memory_is_a_counter_that_reaches_the_peak(saved: dict[str, Any]) -> None:
    data = recorded()[1].data
    counted = [e for e in saved["traceEvents"] if e["ph"] == "C" and e["name"] == "device memory"]
    assert max(e["args"]["bytes"] for e in counted) == data["device"]["projected"]
    assert [e["ts"] for e in counted] == sorted(e["ts"] for e in counted)
    assert max(nbytes for _, nbytes in curve(data, "host")) <= data["tiers"]["host"]["projected"]


def test_what_overlaps_is_on_further_tracks() -> None:
    rows = [["host", "update", name, "", start, end, 0] for name, start, end in
            (("a", 0.0, 2.0), ("b", 1.0, 3.0), ("c", 2.0, 4.0), ("d", 2.5, 5.0))]  # fmt: skip
    assert [(lane, [[e[2] for e in track] for track in own]) for lane, own in tracks(rows)] == [
        ("host", [["a", "c"], ["b"], ["d"]])
    ]


def test_a_stage_has_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no timeline"):
        trace({"text": "", "stage": "capture"})
    with pytest.raises(ValueError, match="no timeline"):
        Report.of_stage("graph", "capture").save(tmp_path / "new" / "x.trace.json")
    assert not (tmp_path / "new").exists()
