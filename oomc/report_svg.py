"""The drawings of a report's page: lanes over time, and memory over time, as SVG with nothing outside of it.

Time runs from 0 to WIDTH in units of the drawing, which the page stretches to its own width and zooms into; heights are
pixels. What a shape is stands in its `data-t`, which the page shows beside the pointer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from oomc.plan import format_bytes
from oomc.report_trace import tracks

WIDTH = 10000
"""Units of a drawing's width."""
ROW = 22
"""Pixels of a lane that does one thing at a time."""
THIN = 8
"""Pixels of each of the things that a lane does at once."""
LEAST = 3
"""Units that the shortest event is wide."""
CURVE = 120
"""Pixels of a memory curve."""


def seconds(value: float) -> str:
    """`1.234 s`, `5.67 ms`, `89.0 us`."""
    for unit, size, digits in (("s", 1.0, 3), ("ms", 1e-3, 2)):
        if abs(value) >= size:
            return f"{value / size:.{digits}f} {unit}"
    return f"{value * 1e6:.1f} us" if value else "0 s"


def span_of(*lines: Iterable[list[Any]], least: float) -> float:
    """Seconds that a drawing must show: the step, and the updates that end after it."""
    return max([least, *(event[5] for events in lines for event in events)]) or 1.0


def lanes(events: Sequence[list[Any]], span: float, step_s: float) -> str:
    """The lanes of one step, with a line where it ends; events that began before it are cut."""
    shapes, labels, top = [], [], 0
    for lane, own in tracks([e for e in events if e[5] >= 0]):
        thick = ROW if len(own) == 1 else max(THIN, ROW // len(own))
        for number, track in enumerate(own):
            shapes += [_shape(event, span, top + number * thick, thick) for event in track]
        labels.append(f'<span style="height:{thick * len(own)}px">{escape(lane)}</span>')
        top += thick * len(own)
    at = round(step_s / span * WIDTH)
    shapes.append(f'<path class="end" d="M{at} 0V{top}" data-t="the step ends at {seconds(step_s)}"/>')
    return framed("".join(labels), shapes, max(ROW, top), span, "lanes")


def _shape(event: list[Any], span: float, top: int, thick: int) -> str:
    lane, kind, name, block, start, end, nbytes = event
    left = max(0, round(start / span * WIDTH))
    width = max(LEAST, round(end / span * WIDTH) - left)
    text = f"{lane}: {name}{f' of {block}' if block else ''}, {seconds(end - start)} from {seconds(start)}"
    text += f", {format_bytes(nbytes)}" if nbytes else ""
    gap = 2 if thick == ROW else 1
    return (
        f'<rect class="k {kind}" x="{left}" y="{top + gap}" width="{width}" height="{thick - 2 * gap}" '
        f'data-t="{escape(text)}"/>'
    )


def memory(
    points: Sequence[tuple[float, int]], span: float, tier: str, lines: Sequence[tuple[str, int]], name: str
) -> str:
    """The bytes of a tier over time as an area, under horizontal lines such as its budget (name and bytes).

    Args:
        points: from each moment on, so many bytes.
        span: seconds that the drawing shows.
        tier: `device` or `host`.
        lines: names and bytes; two of them are labelled.
        name: what the area is.
    """
    most = max([1, *(nbytes for _, nbytes in points), *(nbytes for _, nbytes in lines)]) * 1.06

    def y(nbytes: int) -> float:
        return round(CURVE * (1 - nbytes / most), 1)

    path, last = [f"M0 {CURVE}"], 0
    for at, nbytes in _steps(points, span):
        path.append(f"V{y(nbytes)}H{at}" if at > last else f"V{y(nbytes)}")
        last = at
    path.append(f"V{CURVE}Z")
    texts = "|".join(f"{at}:{nbytes}" for at, nbytes in _moments(points, span))
    shapes = [f'<path class="area" d="{"".join(path)}" data-name="{escape(name)}" data-curve="{texts}"/>']
    for label, nbytes in lines:
        text = f"{label}: {format_bytes(nbytes)}"
        shapes.append(f'<path class="line {label.split()[0]}" d="M0 {y(nbytes)}H{WIDTH}" data-t="{escape(text)}"/>')
    labels = f'<span class="tier">{tier}<br><small>{format_bytes(most / 1.06)}</small></span>'
    return framed(labels, shapes, CURVE, span, "memory")


def _moments(points: Sequence[tuple[float, int]], span: float) -> list[tuple[int, int]]:
    """Points in units of the drawing; of those at one place, the largest."""
    found: dict[int, int] = {}
    for at, nbytes in points:
        place = min(WIDTH, round(at / span * WIDTH))
        found[place] = max(found.get(place, 0), nbytes)
    return list(found.items())


def _steps(points: Sequence[tuple[float, int]], span: float) -> list[tuple[int, int]]:
    """Until where each height holds."""
    moments = _moments(points, span)
    ends = [at for at, _ in moments[1:]] + [WIDTH]
    return [(end, nbytes) for end, (_, nbytes) in zip(ends, moments, strict=True)]


def framed(labels: str, shapes: Sequence[str], height: int, span: float, kind: str) -> str:
    """A drawing with labels at its left and an axis below."""
    return (
        f'<div class="chart {kind}" data-span="{span:.9g}"><div class="labels">{labels}</div><div class="plot">'
        f'<svg viewBox="0 0 {WIDTH} {height}" height="{height}" preserveAspectRatio="none" role="img" '
        f'aria-label="{kind} over {seconds(span)}">{"".join(shapes)}</svg>'
        f'<div class="axis">{axis(span)}</div></div></div>'
    )


def axis(span: float) -> str:
    """Five moments."""
    return "".join(f"<span>{seconds(span * i / 4)}</span>" for i in range(5))
