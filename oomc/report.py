"""Reports: what was planned, and what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate
from torch import fx

from oomc import attention_kernels, meta, ops, report_html, report_trace, steps
from oomc.explain import Explanation
from oomc.offloadable import value_bytes
from oomc.plan import format_bytes
from oomc.program import Program
from oomc.regenerate import describe
from oomc.report_figures import LANES, Rates, Row, Tier, figures
from oomc.runtime.record import Recording
from oomc.simulate import Profiler, Projection, nbytes
from oomc.tune import Tuning
from oomc.worksets import Workset

if TYPE_CHECKING:
    from oomc.compiler import Options

ENDINGS = (".txt", ".json", ".html", ".trace.json")
"""Of the files that a report is saved as: text, all figures, a page, and a trace for ui.perfetto.dev."""


def check_ending(path: str | Path) -> str:
    """The ending of a report's file.

    Raises:
        ValueError: it is none of ENDINGS.
    """
    name = Path(path).name
    found = [ending for ending in ENDINGS if name.endswith(ending)]
    if not found:
        least, last = ", ".join(ENDINGS[:-1]), ENDINGS[-1]
        raise ValueError(f"a report is saved as {least} or {last}, not {Path(path).suffix or 'without an ending'}")
    return max(found, key=len)


def check_endings(paths: Mapping[str, str | None]) -> None:
    """Refuse files that are wanted and do not end as they should.

    Raises:
        ValueError: there is one; paths are by ending, or None.
    """
    for ending, path in paths.items():
        if path is not None and not path.endswith(ending):
            raise ValueError(f"{path} does not end with {ending}")


@dataclass(frozen=True)
class Report:
    """A report: `str()` for the text, `save` for a file, `data` for the figures."""

    text: str
    data: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text

    def save(self, path: str | Path) -> Path:
        """Write the report as .txt, .json, .html or .trace.json, by the path's ending.

        A .json can be read again, and holds what the others are made of (`oomc report FILE.json --html ...`). A
        .trace.json opens in ui.perfetto.dev and chrome://tracing.

        Raises:
            ValueError: another ending; or a trace of what is no step.
        """
        path, ending = Path(path), check_ending(path)
        if ending == ".txt":
            text = self.text + "\n"
        elif ending == ".html":
            text = report_html.page(self.data)
        elif ending == ".trace.json":
            text = json.dumps(report_trace.trace(self.data)) + "\n"
        else:
            text = _json(self.data)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    @staticmethod
    def load(path: str | Path) -> Report:
        """Read a report that was saved as .json.

        Raises:
            ValueError: the file holds no report.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            return Report(data["text"], data)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a report saved as .json: {error}") from error

    @staticmethod
    def of_stage(text: str, stage: str) -> Report:
        """The printed graph of a stage."""
        return Report(text, {"stage": stage, "text": text})

    @staticmethod
    def of_step(
        program: Program, projection: Projection, host: dict[str, int], metrics: dict[str, Any], options: Options,
        rates: Rates, recording: Recording | None = None, why: Explanation | None = None, tried: Tuning | None = None,
    ) -> Report:  # fmt: skip
        """The plan of a step with the figures of the last one.

        Args:
            program: with plan and scheduled step graph.
            projection: of its device memory.
            host: bytes by purpose.
            metrics: of the last step.
            options: of the step.
            rates: the machine, and the simulated step.
            recording: a step that was recorded.
            why: the plan is as it is, where the planner made it.
            tried: the plans that real steps have tried, this one the fastest of them.
        """
        assert program.plan is not None
        sections = {
            "model": describe_model(program),
            "loss": _loss(program),
            "plan": "\n".join(
                [
                    program.plan.describe(),
                    *([str(why)] if why else []),
                    *([again] if (again := describe(program, rates.line)) else []),
                    *([f"tried on real steps:\n{tried}"] if tried else []),
                ]
            ),
            "worksets": _worksets(program),
            "device memory": _device(program, projection, metrics, options),
            "host memory": _host(host, program, options),
            "lanes": _lanes(program),
            "time": _time(rates, recording),
            "last step": _last(metrics),
        }
        if program.notes.get("experts"):
            sections["experts"] = "\n".join(str(n) for n in _listed(program.notes["experts"]))
        text = "\n\n".join(f"{title}\n{'-' * len(title)}\n{body}" for title, body in sections.items())
        data = {
            "text": text,
            "sizes": list(program.plan.sizes),
            "blocks": [b.name for b in program.blocks],
            "forms": list(program.forms),
            "plan": program.plan.describe(),
            "device": {
                "projected": projection.peak,
                "at": projection.at,
                "fixed": projection.fixed,
                "slots": list(program.plan.slots),
                "allowed": options.budget.device,
                "measured": metrics.get("device_peak"),
            },
            "host": host | {"allowed": options.budget.host},
            "metrics": metrics,
        }
        tiers = {
            "device": _device_tier(program, projection, metrics, options),
            "host": _host_tier(host, program, options),
        }
        return Report(text, data | figures(program, projection, rates, tiers, recording, why))


def _json(data: dict[str, Any]) -> str:
    """JSON with a line for each of the figures at its top, whatever is in them."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items()) + "\n}\n"


def _listed(notes: Any) -> list[Any]:
    return list(notes) if isinstance(notes, list | tuple) else [notes]


def describe_model(program: Program) -> str:
    """How many parameters, blocks, worksets and forms there are."""
    trained = sum(s.layout.trainable_elements for s in program.slabs)
    total = sum(p.spec.numel for s in program.slabs for p in s.layout.places)
    layers = [b for b in program.blocks if b.name not in ("prologue", "epilogue")]
    shapes = len({tuple(w.form for w in b.worksets) for b in layers})
    return (
        f"{total:,} parameters, {trained:,} trained, in {len(program.slabs)} slabs\n"
        f"{len(program.blocks)} blocks, {sum(len(b.worksets) for b in program.blocks)} worksets; "
        f"the {len(layers)} layers have {shapes} compiled form{'s' * (shapes != 1)}; {len(program.forms)} forms in all"
    )


def _worksets(program: Program) -> str:
    """Each form: what it may run in chunks of, and in which; what mixes tokens in it, and the bytes that pass there."""
    assert program.plan is not None
    sizes, profiler = program.plan.sizes, Profiler(program)
    groups: dict[str, list[Workset]] = {}
    for workset in (w for b in program.blocks for w in b.worksets):
        groups.setdefault(workset.form, []).append(workset)
    rows, fences = [], []
    for worksets in groups.values():
        first = worksets[0]
        chunk = program.plan.chunks.get(first.name)
        pieces = "whole" if chunk in (None, sizes) else f"{chunk[0]} x {chunk[1]}"
        kind = first.chunk + (", in order" if program.forms[first.form].carries else "")
        rows.append((first.name, f"{len(worksets)} x", kind or "-", pieces))
        values = {n for n in (*first.inputs, *first.outputs) if isinstance(n, fx.Node) and n.op != "placeholder"}
        passing = sum(nbytes(meta.value(n), lambda size: profiler.number(size, sizes)) for n in values)
        for fence in first.fences:
            fences.append((first.name, f"{len(worksets)} x", fence + _kernel(first, fence), format_bytes(passing)))
    table = tabulate(rows, headers=["workset", "", "chunks of", "now"], tablefmt="plain")
    if not fences:
        return table
    mixing = tabulate(fences, headers=["tokens are mixed in", "", "by", "values there"], tablefmt="plain")
    return f"{table}\n\n{mixing}"


def _kernel(workset: Workset, fence: str) -> str:
    """Which kernel attention runs with."""
    node = next((n for n in workset.nodes if n.target is ops.attention), None)
    if node is None or not fence.startswith("oomc.attention"):
        return ""
    q, k, v, sinks, segments, _, causal, window, softcap = node.args
    of = [meta.value(n) for n in (q, k, v)]  # type: ignore[arg-type]
    special = sinks is not None or segments is not None
    kernel = attention_kernels.choose(of[0], of[1], of[2], special, causal, window, softcap)  # type: ignore[arg-type]
    return f" ({kernel} kernel)"


def _loss(program: Program) -> str:
    auxiliary = program.notes["auxiliary"]
    if auxiliary is None:
        router = "auxiliary loss: not known, the loss is a sum and none of its terms is a cross-entropy"
    elif auxiliary:
        router = f"auxiliary loss: on, beside the labels' there is {' and '.join(f'`{line}`' for line in auxiliary)}"
    else:
        router = "auxiliary loss: off, the loss has no term beside the labels'"
    weighting = "equally: no count of valid labels was found in the loss"
    if program.count is not None:
        weighting = "by their valid labels"
    return f"accumulation: micro-batches weigh {weighting}\n{router}"


def device_rows(program: Program, projection: Projection) -> list[tuple[str, str, int]]:
    """What the step's own tensors take on the device at the peak: name, note and bytes."""
    assert program.plan is not None
    return [
        ("weights in flight", f"{len(program.plan.slots)} slots", sum(program.plan.slots)),
        (
            "state and its staging", f"{len(program.plan.resident)} of {len(program.slabs)} slabs live here",
            program.plan.update_bytes,
        ),
        ("inputs, buffers, constants", "", projection.fixed - sum(program.plan.slots) - program.plan.update_bytes),
        ("values, gradients, temporaries", f"at {projection.at}", projection.peak - projection.fixed),
    ]  # fmt: skip


def _device(program: Program, projection: Projection, metrics: dict[str, Any], options: Options) -> str:
    rows = device_rows(program, projection)
    rows.append(("projected peak", "", metrics.get("device_projected", projection.peak)))
    if "device_peak" in metrics:
        rows.append(("measured peak", "", metrics["device_peak"]))
    if options.budget.device is not None:
        rows.append(("allowed", "", options.budget.device))
    return size_table(rows)


def host_rows(host: dict[str, int], program: Program) -> list[tuple[str, str, int]]:
    """What the step takes on the host, and the sum: name, note and bytes."""
    trained = max(1, sum(s.layout.trainable_elements for s in program.slabs))
    total = sum(host.values())
    rows = [(name, "", count) for name, count in host.items() if count]
    return [*rows, ("in all", f"{total / trained:.2f} bytes a trained parameter", total)]


def device_tier(rows: list[Row], peak: int, projected: int, allowed: int | None, measured: int | None = None) -> Tier:
    """The device: what is there beside the step's own tensors, whose peak is `peak`, is there throughout."""
    others = projected - peak
    if others > 0:
        rows = [*rows, ("CUDA's own, and what its allocator reserves", "", others)]
    return Tier(rows, projected, measured, allowed, max(0, others))


def host_tier(host: dict[str, int], rows: list[Row], waiting: int, allowed: int | None) -> Tier:
    """The host: all of it is there throughout, but that the places for values fill and empty.

    Args:
        host: bytes by purpose.
        rows: the same, and their sum.
        waiting: bytes of places for values.
        allowed: by the budget.
    """
    total = sum(host.values())
    return Tier(rows, total, None, allowed, total - waiting)


def _device_tier(program: Program, projection: Projection, metrics: dict[str, Any], options: Options) -> Tier:
    projected = metrics.get("device_projected", projection.peak)
    rows, measured = device_rows(program, projection), metrics.get("device_peak")
    return device_tier(rows, projection.peak, projected, options.budget.device, measured)


def _host_tier(host: dict[str, int], program: Program, options: Options) -> Tier:
    assert program.plan is not None
    return host_tier(host, host_rows(host, program), program.plan.host_value_bytes, options.budget.host)


def _host(host: dict[str, int], program: Program, options: Options) -> str:
    rows = host_rows(host, program)
    if options.budget.host is not None:
        rows.append(("allowed", "", options.budget.host))
    return size_table(rows)


def size_table(rows: list[tuple[str, str, int]]) -> str:
    """A table of names, bytes and notes."""
    return tabulate([(n, format_bytes(b), w) for n, w, b in rows], colalign=("left", "right", "left"), tablefmt="plain")


def _lanes(program: Program) -> str:
    assert program.step is not None and program.plan is not None
    counts: dict[str, int] = {}
    copied = values = 0
    for node in program.step.graph.nodes:
        lane = steps.LANES.get(node.target, "none") if callable(node.target) else "none"
        if lane != "none":
            counts[lane] = counts.get(lane, 0) + 1
        if node.target is steps.fetch:
            copied += next(s.layout.weight_bytes for s in program.slabs if s.name == node.args[1])
        elif node.target is steps.store:
            values += value_bytes(program, node, program.plan.sizes)
    rows = [(lane, counts[lane]) for lane in ("compute", "h2d", "d2h", "host") if lane in counts]
    table = tabulate([(lane, f"{n} nodes") for lane, n in rows], tablefmt="plain")
    also = f", {format_bytes(values)} of values to the host and back" if values else ""
    return f"{table}\n{format_bytes(copied)} of weights copied to the device a step{also}"


def _time(rates: Rates, recording: Recording | None) -> str:
    """What the simulated step takes and waits for; and a recorded one, if there is one."""
    line, machine = rates.line, rates.machine
    busy = ", ".join(f"{lane} {line.busy[lane]:.3f} s" for lane in LANES if line.busy.get(lane, 0.0) > 0)
    timed = f"\n{rates.timed}" if rates.timed else ""
    text = f"projected on {machine.name} ({machine.source}):\n{line.describe()}\nbusy: {busy}{timed}"
    return text if recording is None else f"{text}\nrecorded: a step of {recording.step_s:.3f} s"


def _last(metrics: dict[str, Any]) -> str:
    if "loss" not in metrics:
        return "no step has run yet"
    return (
        f"loss {metrics['loss']:.4f}, {metrics['tokens']:,} tokens in {metrics['step_s']:.3f} s "
        f"({metrics['tokens_per_s']:,.0f} tokens/s); {format_bytes(metrics['h2d_bytes'])} to the device, "
        f"{format_bytes(metrics['d2h_bytes'])} back; step {metrics['steps']}, {metrics['traces']} trace(s), "
        f"{metrics['plans']} plan(s), {metrics['compilations']} compiled graphs"
    )
