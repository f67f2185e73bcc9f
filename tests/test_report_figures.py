"""The figures of a report: JSON, of the plan's numbers, the same however often they are asked for."""

from __future__ import annotations

import json

from oomc.report import Report
from oomc.report_figures import COLUMNS, KINDS, LANES
from tests.reports import recorded


def test_figures_are_json_and_come_back_as_they_were() -> None:
    data = recorded()[1].data
    assert json.loads(json.dumps(data)) == json.loads(json.dumps(Report("", data).data))
    for events in (data["timeline"]["events"], data["measured"]["events"]):
        for row in events:
            assert len(row) == len(COLUMNS) and row[0] in LANES and row[1] in KINDS
            assert row[1] != "wait" or row[0] == "compute"


def test_memory_follows_the_projection() -> None:
    step, report = recorded()
    memory, projection = report.data["memory"], step._current.projection if step._current else None
    assert projection is not None
    assert memory["peak"] == max(memory["during"]) == projection.peak
    assert memory["nodes"][memory["during"].index(memory["peak"])] == projection.at
    assert len(memory["nodes"]) == len(memory["live"]) == len(memory["host_values"])
    assert sum(row[2] for row in report.data["tiers"]["device"]["rows"]) == report.data["tiers"]["device"]["projected"]


def test_what_is_measured_is_busy_and_waits_no_longer_than_the_step() -> None:
    measured = recorded()[1].data["measured"]
    assert 0 < measured["busy"]["compute"] + sum(measured["exposed"].values()) <= measured["step_s"]
    assert set(measured["exposed"]) == {"weights", "update", "gradients", "values"}
