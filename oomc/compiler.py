"""From a model and a batch to a scheduled step: traces of the model, and plans for batch shapes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from oomc import meta, pipeline, private
from oomc.capture import Batch, LossFn, capture
from oomc.errors import UnsupportedError
from oomc.explain import Explanation
from oomc.limits import device_memory, host_memory
from oomc.machine import current
from oomc.optimizers import StateWidth
from oomc.pipeline import Observer
from oomc.plan import Budget, Updates
from oomc.planner import Cut, Planner, Request
from oomc.program import Program
from oomc.runtime.meter import cuda_usage
from oomc.runtime.updates import Where
from oomc.simulate import Profiler, Projection

CUDA_WORKSPACE = 192 << 20
"""Bytes that the process comes to hold outside of torch's allocator during a step: kernels that are loaded when they
are first used, libraries' own. 80 to 170 MiB were measured."""


@dataclass(frozen=True)
class Options:
    """How a step is compiled and run; see `oomc.compile`."""

    budget: Budget
    device: torch.device
    backend: str
    loss_fn: LossFn | None = None
    max_grad_norm: float | None = None
    on_nonfinite: str | None = None
    state: StateWidth = "fp32"
    where: Where = "both"
    seed: int = 0
    verify: bool = False
    chaos: int | None = None
    chunk_tokens: int | None = None
    synchronous: bool = False

    @property
    def keep(self) -> bool:
        """Whether all gradients are kept until their norm is known."""
        return self.max_grad_norm is not None or self.on_nonfinite is not None


@dataclass
class Scheduled:
    """A plan for one batch shape, with what runs it.

    Attributes:
        bare: what it was made from.
        program: with the step graph and its plan.
        projection: of its device memory.
        carried: slabs whose gradients of the step before the step graph retires.
        explain: makes the planner's explanation; None where it did not plan.
    """

    bare: Program
    program: Program
    projection: Projection
    carried: frozenset[str]
    explain: Callable[[], Explanation] | None = None


@dataclass
class Trace:
    """One trace of the model: its bare step graph, and the plans made from it.

    Attributes:
        training: whether the model was in training mode.
    """

    bare: Program
    batch: Batch
    profiler: Profiler
    planner: Planner
    training: bool = True
    plans: dict[tuple[Any, ...], Scheduled] = field(default_factory=dict)
    _whole: tuple[Program, Profiler] | None = None
    _asked: bool = False

    def in_whole_blocks(self, verify: bool) -> tuple[Program, Profiler] | None:
        """The program whose blocks run whole in chunks of batch rows, if there are such; made when asked for first."""
        if not self._asked:
            self._asked, whole = True, pipeline.in_whole_blocks(self.bare, verify)
            if whole is not None:
                whole.compiled = self.bare.compiled
                self._whole = whole, Profiler(whole)
        return self._whole

    def fresh(self) -> Trace:
        """The same trace without plans."""
        return replace(self, plans={}, planner=self.planner.fresh())

    def cuts(self, sizes: tuple[int, int], verify: bool) -> list[Cut]:
        """The programs that a plan may be made of."""
        found: list[Cut] = [lambda: (self.bare, self.profiler)]
        if sizes[0] > 1:
            found.append(lambda: self.in_whole_blocks(verify))
        return found

    @property
    def drops(self) -> bool:
        """Whether there is dropout in it."""
        return any(spec.kind == "rng" for spec in self.bare.inputs)


class Compiler:
    """Traces a model once, and plans for each batch shape.

    Args:
        model: to be traced.
        trained: names of its parameters that the optimizer holds.
        options: of the step.
    """

    def __init__(self, model: torch.nn.Module, trained: Collection[str], options: Options) -> None:
        self.model, self.options = model, options
        self.trained = frozenset(trained)
        self.traces: dict[tuple[Any, ...], Trace] = {}

    def trace(self, batch: Batch) -> Trace:
        key = batch.key()
        if key not in self.traces:
            if self.traces:
                raise UnsupportedError(_difference(next(iter(self.traces)), key))
            bare = self.capture(batch)
            self.traces[key] = Trace(
                bare, batch.shapes_only(), Profiler(bare), self.planner(), self.model.training
            )  # fmt: skip
        return self.traces[key]

    def capture(self, batch: Batch, observe: Observer | None = None) -> Program:
        options = self.options
        program = capture(self.model, batch, loss_fn=options.loss_fn, device=options.device)
        self.train_only(program)
        if observe is not None:
            observe("capture", program)
        return pipeline.run_passes(program, pipeline.MODEL_PASSES, observe, options.verify)

    def train_only(self, program: Program) -> None:
        """Let no parameter be trained that the optimizer does not hold."""
        program.inputs = [
            replace(s, trainable=s.trainable and s.target in self.trained) if s.kind == "parameter" else s
            for s in program.inputs
        ]

    @staticmethod
    def sizes(program: Program, batch: Batch) -> tuple[int, int]:
        """The batch and sequence size of a batch."""
        symbols = program.notes["symbols"]
        sizes: dict[Any, int] = {}
        tensors = [n for n, s in zip(program.forward.graph.find_nodes(op="placeholder"), program.inputs, strict=True)
                   if s.kind == "input"]  # fmt: skip
        for node, real in zip(tensors, batch.tensors.values(), strict=True):
            val = meta.tensor(node)
            assert val is not None
            for size, actual in zip(val.shape, real.shape, strict=True):
                expr = private.expression(size)
                if expr in (symbols.batch, symbols.sequence):
                    if sizes.setdefault(expr, actual) != actual:
                        raise UnsupportedError(
                            f"input {node.name} has a dimension of {actual} where another input has {sizes[expr]}; "
                            "they are one size, the batch's or the sequence's, in the trace"
                        )
                elif isinstance(expr, int) and expr != actual:
                    raise UnsupportedError(
                        f"input {node.name} has a dimension of {actual} where the step was compiled for {expr}; only "
                        "the batch and the sequence size may change between calls"
                    )
        for symbol, what, (least, most) in zip(
            (symbols.batch, symbols.sequence), ("batch", "sequence"), program.notes["bounds"], strict=True
        ):
            size = sizes.get(symbol, least)
            if size < least or (most is not None and size > most):
                raise UnsupportedError(
                    f"a {what} of {size} is outside of what the model's code allows: {least} to {most or 'any size'}"
                )
        for condition in program.notes["conditions"]:
            if hasattr(condition, "subs") and condition.subs(sizes) == False:  # noqa: E712  sympy's own false
                names = {symbols.batch: "batch", symbols.sequence: "sequence"}
                raise UnsupportedError(f"the model's code needs {condition.subs(names)}, which {sizes} breaks")
        return sizes[symbols.batch], sizes.get(symbols.sequence, 1)

    def plan(
        self, batch: Batch, updates: Updates, resident: frozenset[str], fixed: bool, accumulate: bool
    ) -> Scheduled:
        """The plan for a batch, and what runs it.

        Args:
            batch: of any size.
            updates: of the optimizer.
            resident: slabs that may live on the device.
            fixed: they do already, and leave it only where the batch does not fit otherwise.
            accumulate: gradients are summed and not applied.
        """
        trace, options = self.trace(batch), self.options
        sizes = self.sizes(trace.bare, batch)
        known = trace.plans.get((sizes, accumulate, resident)) if fixed else None
        if known is None:
            bare, program, projection, explain = self._choose(trace, sizes, updates, resident, fixed, accumulate)
            trace.bare.compiled = program.compiled = trace.bare.compiled
            program = pipeline.lower(program, options.backend)
            assert program.plan is not None
            known = Scheduled(bare, program, projection, pipeline.carried(program), explain)
            trace.plans[sizes, accumulate, frozenset(program.plan.resident)] = known
        return known

    def _choose(
        self, trace: Trace, sizes: tuple[int, int], updates: Updates, resident: frozenset[str], fixed: bool,
        accumulate: bool,
    ) -> tuple[Program, Program, Projection, Callable[[], Explanation] | None]:  # fmt: skip
        """The bare program that the plan is for, the scheduled one, its projection and its explanation."""
        options = self.options
        allowed = self.device_allowed()
        if options.device.type == "cpu" and options.budget.device is None:
            # its memory is the host's: nothing is gained by a plan for it, and everything is streamed as on a GPU
            made = pipeline.plan_step(
                trace.bare, trace.profiler, sizes, allowed, options.budget, accumulate=accumulate, updates=updates,
                resident=resident, verify=options.verify, chunk_tokens=options.chunk_tokens,
            )  # fmt: skip
            return trace.bare, *made, None
        request = Request(
            sizes, allowed, options.budget.host or self.host_memory(), options.budget, updates, resident, fixed,
            accumulate, options.chunk_tokens, options.verify, self.in_all, options.device.type == "cuda",
        )  # fmt: skip
        planned = trace.planner.plan(trace.cuts(sizes, options.verify), request)
        return planned.bare, planned.program, planned.projection, planned.explain

    def planner(self) -> Planner:
        """A planner for the machine that the step runs on."""
        return Planner(current(self.options.device), self.options.backend)

    def host_memory(self) -> int:
        """Bytes of the host."""
        return host_memory()

    def may_be_resident(self, program: Program) -> frozenset[str]:
        """Slabs that may live on the device: all, but for a stand-in whose memory is the host's, without a budget."""
        if self.options.device.type == "cpu" and self.options.budget.device is None:
            return frozenset()
        return frozenset(slab.name for slab in program.slabs)

    def in_all(self, held: int) -> int:
        """The device bytes that the process holds with so many of the step's own (`Projection.held`)."""
        return held + (self.outside + CUDA_WORKSPACE if self.options.device.type == "cuda" else 0)

    def device_allowed(self) -> int:
        """Device bytes that the step's own may be."""
        return (self.options.budget.device or self.device_memory()) - self.in_all(0)

    def device_memory(self) -> int:
        """Bytes of the device."""
        return device_memory(self.options.device)

    @cached_property
    def outside(self) -> int:
        """Bytes that the process holds on a GPU outside of torch's allocator before the first step: its context."""
        private.use_expandable_segments()
        # the first product lets torch allocate cuBLAS' workspace, which stays: now, and not amid a step's temporaries
        one = torch.ones(8, 8, device=self.options.device)
        _ = one @ one
        return cuda_usage(self.options.device).outside


def _difference(known: tuple[Any, ...], key: tuple[Any, ...]) -> str:
    """What a batch has that the compiled one has not, and the other way round."""

    def texts(of: tuple[Any, ...]) -> set[str]:
        tensors = {f"{name}: {str(dtype).removeprefix('torch.')} of {dims} dimensions" for name, dtype, dims in of[0]}
        return tensors | {f"{name}={value}" for name, value in of[1]}

    more, less = sorted(texts(key) - texts(known)), sorted(texts(known) - texts(key))
    return (
        "the batch is not like the one that the step was compiled for: "
        f"it has {', '.join(more) or 'nothing more'}, and lacks {', '.join(less) or 'nothing'}. Always pass the same "
        "arguments, or compile the step with an example that has them"
    )
