"""How long a trace's graphs take on the device at hand: each form's are run alone, before the first plan is made.

    found = Timing(program, profiler, costs, device, "eager", allowed, known).factors((4, 4096))

An estimate knows the rates of products and attention and the bandwidth; what layouts, small operators and launches add
differs between graphs. A graph runs on one tile: of at most TOKENS tokens where it may run in chunks, else on the
batch, or on as much of it as takes LONGEST seconds and fits. What counts is by how much longer that took than was
estimated: it holds for other tiles too. Seconds are kept in the user's cache, so that the same model is planned the
same way again.

Values are random, and whole numbers that come from the batch are zeros: valid as tokens, labels and positions. A form
that takes other whole numbers, such as choices of experts, or hands a state from chunk to chunk, is left as estimated.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

import oomc
from oomc import meta
from oomc.calibrate import Bench
from oomc.cost import Costs
from oomc.passes.lower import lowered
from oomc.program import InputSpec, Program
from oomc.runtime.memory import empty_cache
from oomc.simulate import Profiler, nbytes
from oomc.worksets import Form, Workset

KERNELS = 3
"""Part of what timings are remembered under: another number where operators compute otherwise, and so faster or
slower."""
TOKENS = 8192
"""Most tokens of a tile of a form that may run in chunks."""
LONGEST = 0.25
"""Most seconds that a graph may be estimated to take on its tile."""
LEAST = 256
"""Fewest positions of a tile."""
SECONDS = 20.0
"""For everything, however many traces there are."""
SHARE = 0.9
"""Of the memory that is allowed, since an allocator reserves more than is asked for."""

Factors = dict[tuple[str, str], float]


class NotTimedError(Exception):
    """A form cannot be run by itself, or takes too much memory or time; the message says what."""


class KnownSeconds(dict[str, float]):
    """Seconds of graphs that were timed on this machine, by a text that names graph, tile and backend; in a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        with suppress(
            OSError, ValueError, TypeError, AttributeError
        ):  # none yet, or a damaged one: everything is timed anew
            self.update({str(key): float(seconds) for key, seconds in json.loads(path.read_text()).items()})

    def save(self) -> None:
        """Write the file, whole or not at all; without a folder to write to, the next compile times again."""
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft = self.path.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(self, indent=0))
            draft.replace(self.path)


@dataclass
class Timing:
    """Times the forms of one program; see the module's docstring.

    Attributes:
        program: assembled; its `compiled` gets what is made.
        profiler, costs: its own.
        allowed: device bytes that may be taken.
        known: seconds from before; gets new ones.
        left_out: forms that were not timed, and why.
    """

    program: Program
    profiler: Profiler
    costs: Costs
    device: torch.device
    backend: str
    allowed: int
    known: KnownSeconds
    left_out: dict[str, str] = field(default_factory=dict)

    def factors(self, sizes: tuple[int, int], done: Collection[str] = (), seconds: float = SECONDS) -> Factors:
        """How many times as long as estimated each graph takes, by form and phase, for batches of about `sizes`.

        Forms that are `done` are left out; no more are begun after so many seconds.
        """
        worksets = [w for block in self.program.blocks for w in block.worksets]
        first = {w.form: w for w in reversed(worksets) if w.form not in done}
        weight = {key: sum(w.form == key for w in worksets) * self._estimate(self.program.forms[key], sizes)
                  for key in first}  # fmt: skip
        bench, deadline, before = Bench(self.device, SECONDS), time.perf_counter() + seconds, dict(self.known)
        found: Factors = {}
        for key in sorted(first, key=lambda key: -weight[key]):
            try:
                if time.perf_counter() > deadline:
                    raise NotTimedError("the time is up")
                found |= self._form(first[key], sizes, bench)
            except (NotTimedError, RuntimeError) as error:  # a kernel that fails here will say so in the step
                self.left_out[key] = str(error)
        empty_cache(self.device)
        if self.known != before:
            self.known.save()
        return found

    def overall(self, factors: Factors, sizes: tuple[int, int]) -> float:
        """The same of everything that was timed, taken together."""
        estimated = measured = 0.0
        for workset in (w for block in self.program.blocks for w in block.worksets):
            for (key, phase), factor in factors.items():
                if key == workset.form:
                    seconds = self.costs.tile_seconds(key, phase, sizes)
                    estimated, measured = estimated + seconds, measured + factor * seconds
        return measured / estimated if estimated else 1.0

    def _form(self, workset: Workset, sizes: tuple[int, int], bench: Bench) -> Factors:
        form = self.program.forms[workset.form]
        if form.carries:
            raise NotTimedError("it hands a state from chunk to chunk")
        tile = self._tile(form, sizes)
        # graphs follow from the form's text, which its key stands for, and from what gets a gradient
        flags = "".join(str(int(i.requires_grad)) for i in form.inputs)
        name = f"{oomc.__version__}.{KERNELS} {form.key.partition('.')[0]} {flags}"
        keys = {phase: f"{name} {phase} {tile[0]}x{tile[1]} {self.backend}" for phase in _phases(form)}
        if not all(key in self.known for key in keys.values()):
            for phase, seconds in self._run(form, workset, tile, bench).items():
                self.known[keys[phase]] = seconds
        return {
            (form.key, phase): self.known[key] / self.costs.tile_seconds(form.key, phase, tile)
            for phase, key in keys.items()
        }

    def _estimate(self, form: Form, sizes: tuple[int, int]) -> float:
        return max(self.costs.tile_seconds(form.key, phase, sizes) for phase in _phases(form))

    def _tile(self, form: Form, sizes: tuple[int, int]) -> tuple[int, int]:
        """As much of a batch as the form is timed on."""
        rows, columns = sizes
        most = int(SHARE * self.allowed)
        if form.chunk == "tokens":
            columns = min(columns, TOKENS)
            rows = min(rows, max(1, TOKENS // columns))
        while self._estimate(form, (rows, columns)) > LONGEST or self._bytes(form, (rows, columns)) > most:
            if rows > 1:
                rows //= 2
            elif columns >= 2 * LEAST:
                columns //= 2
            else:
                raise NotTimedError("the smallest part takes too much memory or time")
        return rows, columns

    def _bytes(self, form: Form, tile: tuple[int, int]) -> int:
        """Device bytes with a form's arguments, results and tangents all there."""
        given = sum(nbytes(meta.value(n), lambda s: self.profiler.number(s, tile)) for n in _arguments(form))
        peaks = [self.profiler.profile(form.key, phase, tile, None).peak for phase in _phases(form)]
        return int(given + 2 * peaks[0] + max(peaks))

    def _run(self, form: Form, workset: Workset, tile: tuple[int, int], bench: Bench) -> dict[str, float]:
        """Seconds of each phase."""
        draws = torch.Generator(self.device).manual_seed(0)  # and not the user's
        placeholders = self.program.forward.graph.find_nodes(op="placeholder")
        specs = dict(zip(placeholders, self.program.inputs, strict=True))
        seconds: dict[str, float] = {}
        with torch.no_grad():
            given = [
                self._value(meta.value(node), source, specs, tile, draws)
                for node, source in zip(_arguments(form), workset.inputs, strict=True)
            ]

            def timed(phase: str, args: Sequence[Any]) -> None:
                seconds[phase] = bench.time(lambda: self._callable(form, phase)(*args))

            results = list(self._callable(form, "forward")(*given))
            outputs, saved = results[: len(workset.outputs)], results[len(workset.outputs) :]
            timed("forward", given)
            if "recompute" in _phases(form):
                timed("recompute", [*given, *saved])
            if "backward" in _phases(form):
                source = {"input": given, "output": outputs, "saved": saved}
                takes = [source[kind][i] for kind, i in form.backward_takes]
                tangents = [torch.randn(outputs[i].shape, generator=draws, device=self.device, dtype=outputs[i].dtype)
                            for i in form.tangents]  # fmt: skip
                timed("backward", [*takes, *tangents])
        return seconds

    def _callable(self, form: Form, phase: str) -> Callable[..., Any]:
        if (form.key, phase) not in self.program.compiled:
            self.program.compiled[form.key, phase] = lowered(getattr(form, phase), phase, self.backend)
        return self.program.compiled[form.key, phase]

    def _value(
        self, val: Any, source: Any, specs: dict[fx.Node, InputSpec], tile: tuple[int, int], draws: torch.Generator
    ) -> Any:
        """What stands for an argument, which is `source` in the forward graph."""
        if not isinstance(val, torch.Tensor):
            return self.profiler.number(val, tile)
        shape, stride = ([self.profiler.number(s, tile) for s in each] for each in (val.shape, val.stride()))
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if all(shape) else 0
        memory = torch.zeros(extent, dtype=val.dtype, device=self.device)
        if val.is_floating_point():
            memory.normal_(0.0, 0.02 if source in specs else 1.0, generator=draws)
        elif not _is_of_batch(source, specs):
            raise NotTimedError("it takes whole numbers that are not the batch's")
        return memory.as_strided(shape, stride)


def _is_of_batch(source: fx.Node, specs: dict[fx.Node, InputSpec]) -> bool:
    """Whether a value follows from what a call is given alone, as shifted labels do."""
    frontier, seen = [source], {source}
    while frontier:
        node = frontier.pop()
        if node in specs and specs[node].kind not in ("input", "rng"):
            return False
        new = [n for n in node.all_input_nodes if n not in seen]
        seen.update(new)
        frontier += new
    return True


def _phases(form: Form) -> list[str]:
    return [phase for phase in ("forward", "recompute", "backward") if getattr(form, phase) is not None]


def _arguments(form: Form) -> list[fx.Node]:
    """The placeholders of a form's inputs."""
    assert form.forward is not None
    return list(form.forward.graph.find_nodes(op="placeholder"))[: len(form.inputs)]
