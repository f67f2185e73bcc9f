"""A report as one page that needs nothing beside it: no network, no fonts, no scripts but its own few lines.

Made from the report's data (oomc.report_figures); the page of a report without a timeline, as that of a stage, is its
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from string import Template
from typing import Any

from oomc.plan import format_bytes
from oomc.report_figures import KINDS, LANES
from oomc.report_page import PAGE, SCRIPT, STYLE
from oomc.report_svg import lanes, memory, seconds, span_of
from oomc.report_trace import curve, measured_curve


def page(data: dict[str, Any]) -> str:
    """The page of a report's data."""
    sections = _sections(data) if "timeline" in data else []
    sections.append(_section("Report", _folded("as text", data["text"], opened=not sections)))
    if "graph" in data:
        nodes = data["graph"].count("\n") + 1
        sections.append(_section("Step graph", _folded(f"{nodes:,} nodes: lane, bytes, tier, lifetime", data["graph"])))
    title = data.get("title") or f"oomc: {data.get('stage', 'one training step')}"
    return Template(PAGE).substitute(
        title=escape(title), style=STYLE, script=SCRIPT, summary=_summary(data), body="\n".join(sections)
    )


def _sections(data: dict[str, Any]) -> list[str]:
    line = data["timeline"]
    measured = data.get("measured")
    span = span_of(line["events"], least=line["step_s"])
    charts = [f"<h3>projected: {seconds(line['step_s'])} on {escape(line['machine'])}</h3>",
              lanes(line["events"], span, line["step_s"])]  # fmt: skip
    if measured:
        own = span_of(measured["events"], least=measured["step_s"])
        charts += [f"<h3>measured: {seconds(measured['step_s'])}</h3>",
                   lanes(measured["events"], own, measured["step_s"])]  # fmt: skip
    legend = "".join(f'<span><i class="k {kind}"></i>{kind}</span>' for kind in KINDS)
    hint = (
        "<p class=hint>Updates run on host and device, beside the compute; those that end after the step run under the "
        "next one. Drag across a drawing to zoom in, double-click to zoom out.</p>"
    )
    return [
        _section("Lanes", f'<div class="legend">{legend}</div>{"".join(charts)}{hint}'),
        _section("Memory", "".join(_memory(data, tier, span) for tier in ("device", "host"))),
        _section("What limits the step", _limits(data)),
        _section("Where every byte lives", "".join(_tier(data, tier) for tier in ("device", "host"))),
        _section("Decisions", _decisions(data) + _why(data)),
    ]


def _folded(summary: str, text: str, opened: bool = False) -> str:
    """Text that is shown when asked for."""
    return f"<details{' open' * opened}><summary>{summary}</summary><pre>{escape(text)}</pre></details>"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table of cells that are HTML already; columns of `numbers` are aligned to the right."""

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}{' class=n' if i in numbers else ''}>{cell}</{tag}>" for i, cell in enumerate(row))

    head = f"<thead><tr>{cells(header, 'th')}</tr></thead>" if any(header) else ""
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def _summary(data: dict[str, Any]) -> str:
    """The few numbers that matter, and the plan in a line."""
    if "timeline" not in data:
        return ""
    line, tiles = data["timeline"], []
    tiles.append(("projected step", seconds(line["step_s"]), f"bound by {line['bound']}"))
    metrics = data.get("metrics") or {}
    if "measured" in data:
        tiles.append(("measured step", seconds(data["measured"]["step_s"]), "the recorded one"))
    elif "step_s" in metrics:
        tiles.append(("last step", seconds(metrics["step_s"]), f"{metrics['tokens_per_s']:,.0f} tokens/s"))
    for name, tier in data["tiers"].items():
        of = f"of {format_bytes(tier['allowed'])} allowed" if tier["allowed"] is not None else "no budget"
        seen = f", {format_bytes(tier['measured'])} measured" if tier["measured"] is not None else ""
        tiles.append((f"{name} peak", format_bytes(tier["projected"] or 0), of + seen))
    shown = "".join(
        f'<div class="tile"><b>{value}</b><span>{escape(name)}</span><small>{escape(note)}</small></div>'
        for name, value, note in tiles
    )
    return f'<div class="tiles">{shown}</div><p>{escape(data["plan"])}</p>'


def _memory(data: dict[str, Any], tier: str, span: float) -> str:
    figures = data["tiers"][tier]
    lines = [(name, figures[name]) for name in ("projected", "measured", "allowed") if figures[name] is not None]
    names = ", ".join(f'<i class="line {name}"></i>{name} {format_bytes(nbytes)}' for name, nbytes in lines)
    at = f"; the peak is at {escape(data['memory']['at'])}" if tier == "device" else ""
    what = "bytes during each node" if tier == "device" else "constant parts, and values that wait there"
    drawn = (
        f"<h3>{tier}: {what}</h3><p class=keys>{names}{at}</p>"
        f"{memory(curve(data, tier), span, tier, lines, f'{tier} memory')}"
    )
    points = measured_curve(data) if tier == "device" else []
    if points:
        own = span_of(data["measured"]["events"], least=data["measured"]["step_s"])
        drawn += f"<h3>{tier}: measured during each node</h3>{memory(points, own, tier, lines, 'measured memory')}"
    return drawn


def _limits(data: dict[str, Any]) -> str:
    line, measured = data["timeline"], data.get("measured")
    rows = [("<b>the step</b>", f"<b>{seconds(line['step_s'])}</b>", _bar(1.0))]
    rows += [(escape(n), seconds(s), _bar(s / line["step_s"])) for n, s in line["limits"].items()]
    roofs = table(("were this the only limit", "seconds", "of the step"), rows, (1,))
    lanes_ = [lane for lane in LANES if lane in line["busy"]]
    busy = [
        [lane, seconds(line["busy"][lane]), _share(line["busy"][lane], line["step_s"])]
        + ([seconds(measured["busy"].get(lane, 0.0)), _share(measured["busy"].get(lane, 0.0), measured["step_s"])]
           if measured else [])
        for lane in lanes_
    ]  # fmt: skip
    header = ["lane", "projected busy", "", *(["measured busy", ""] if measured else [])]
    waits = [("projected", name, seconds(s)) for name, s in line["exposed"].items() if s > 0]
    if measured:
        waits += [("measured", escape(name), seconds(s)) for name, s in measured["exposed"].items() if s > 0]
    exposed = (
        table(("", "the compute waits for", "seconds"), waits, (2,)) if waits else "<p>The compute never waits.</p>"
    )
    source = f"<p class=hint>bound by {escape(line['bound'])}; rates: {escape(line['rates'])}</p>"
    return f"{roofs}{source}{table(header, busy, (1, 2, 3, 4))}{exposed}"


def _bar(share: float) -> str:
    percent = 100 * share
    return f'<span class="bar"><i style="width:{min(100.0, percent):.1f}%"></i></span> {percent:.0f}%'


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else ""


def _tier(data: dict[str, Any], name: str) -> str:
    tier = data["tiers"][name]
    rows = [(escape(what), format_bytes(count), escape(note)) for what, note, count in tier["rows"]]
    rows += [(f"<b>{key}</b>", f"<b>{format_bytes(tier[key])}</b>", "") for key in ("projected", "measured", "allowed")
             if tier[key] is not None]  # fmt: skip
    return f"<h3>{name}</h3>{table(('', 'bytes', ''), rows, (1,))}"


def _decisions(data: dict[str, Any]) -> str:
    rows = []
    for block in data["decisions"]:
        values = block["values"]
        rows.append((
            escape(block["block"]), format_bytes(block["weights"]), block["state"], block["updated"],
            str(block["worksets"]), escape("; ".join(block["chunks"])) or "whole",
            *(_names(values[kind]) for kind in ("keep", "recompute", "offload")),
        ))  # fmt: skip
    header = (
        "block",
        "weights",
        "state on",
        "updated by",
        "worksets",
        "chunks",
        "values kept",
        "recomputed",
        "on the host",
    )
    return table(header, rows, (1, 4))


def _why(data: dict[str, Any]) -> str:
    """Each block's decision with what another one would cost, and what more memory would buy."""
    why = data.get("why")
    if why is None:
        return ""
    saved = f"{seconds(why['device_gib_saves_s'])} a step, of host memory {seconds(why['host_gib_saves_s'])}"
    more = f"by the quick estimate one more GiB of device memory would save {saved}"
    rows = [(escape(block), escape(text)) for block, text in why["blocks"]]
    return f"<h3>why</h3><p>{more}</p><p>{escape(why['reason'])}</p>{table(('block', 'because'), rows)}"


def _names(names: Sequence[str]) -> str:
    """How many, with the names beneath the pointer."""
    return f'<span data-t="{escape(", ".join(names))}">{len(names)}</span>' if names else "0"
