"""A step as a trace that ui.perfetto.dev and chrome://tracing open (Google's Trace Event Format).

Process 1 is the projected step, process 2 the measured one where there is one; each lane is a track. Where a lane does
several things at once, as updates of two slabs, it has further tracks, so that what is on one track never overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oomc.report_figures import LANES

EPSILON = 2e-9
"""Seconds by which events may overlap because they were rounded."""


def trace(data: dict[str, Any]) -> dict[str, Any]:
    """The trace of a report's data.

    Raises:
        ValueError: the report is of no step, as that of a stage.
    """
    if "timeline" not in data:
        raise ValueError("this report has no timeline: a trace is made of a step's report, saved by this version")
    line = data["timeline"]
    found = _process(1, f"projected on {line['machine']}", line["events"])
    found += _counter(1, data)
    if "measured" in data:
        found += _process(2, "measured", data["measured"]["events"])
    other = {"step_s": line["step_s"], "bound": line["bound"], "rates": line["rates"]}
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": other}


def tracks(events: Sequence[list[Any]]) -> list[tuple[str, list[list[list[Any]]]]]:
    """Events by lane, and within it by track: as many as it does things at once."""
    found: list[tuple[str, list[list[list[Any]]]]] = []
    for lane in LANES:
        own: list[list[list[Any]]] = []
        for event in sorted((e for e in events if e[0] == lane), key=lambda e: (e[4], e[5])):
            free = next((track for track in own if track[-1][5] <= event[4] + EPSILON), None)
            if free is None:
                own.append(free := [])
            free.append(event)
        if own:
            found.append((lane, own))
    return found


def _process(pid: int, name: str, events: list[list[Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [_named(pid, 0, "process_name", {"name": name})]
    named = [
        (lane if number == 1 else f"{lane} ({number})", track)
        for lane, own in tracks(events)
        for number, track in enumerate(own, start=1)
    ]
    for tid, (label, track) in enumerate(named, start=1):
        found.append(_named(pid, tid, "thread_name", {"name": label}))
        found.append(_named(pid, tid, "thread_sort_index", {"sort_index": tid}))
        for _, kind, node, block, start, end, nbytes in track:
            found.append({
                "ph": "X", "pid": pid, "tid": tid, "name": node, "cat": kind, "ts": start * 1e6,
                "dur": (end - start) * 1e6, "args": {"block": block, "bytes": nbytes},
            })  # fmt: skip
    return found


def _named(pid: int, tid: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}


def _counter(pid: int, data: dict[str, Any]) -> list[dict[str, Any]]:
    """Projected bytes over the step, as a counter of each tier."""
    return [
        {"ph": "C", "pid": pid, "tid": 0, "name": f"{tier} memory", "ts": at * 1e6, "args": {"bytes": nbytes}}
        for tier in ("device", "host")
        for at, nbytes in curve(data, tier)
    ]


def measured_curve(data: dict[str, Any]) -> list[tuple[float, int]]:
    """Measured bytes of the device over the recorded step; empty where they were not counted."""
    measured = data.get("measured") or {"events": [], "memory": []}
    times = {name: start for lane, _, name, _, start, _, _ in measured["events"] if lane == "compute"}
    base, found = data["tiers"]["device"]["constant"], []
    for name, nbytes in measured["memory"]:
        if name in times:
            found.append((times[name], base + nbytes))
    if found:
        found.append((max(found[-1][0], measured["step_s"]), found[-1][1]))
    return found


def curve(data: dict[str, Any], tier: str) -> list[tuple[float, int]]:
    """Projected bytes of a tier over time: what holds from each moment on."""
    memory, line = data["memory"], data["timeline"]
    times = {name: (start, end) for lane, _, name, _, start, end, _ in line["events"] if lane == "compute"}
    column = memory["during"] if tier == "device" else memory["host_values"]
    base = data["tiers"][tier]["constant"]
    now, found = 0.0, []
    for name, nbytes in zip(memory["nodes"], column, strict=True):
        start, end = times.get(name, (now, now))
        found.append((max(now, start), base + nbytes))
        now = max(now, end)
    found.append((max(now, line["step_s"]), found[-1][1] if found else base))
    return found
