"""The compiled training step that the user calls."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from oomc import meta, pipeline, private
from oomc.capture import Batch, LossFn, capture
from oomc.errors import BudgetError, OomcError, UnsupportedError
from oomc.limits import device_memory, host_memory
from oomc.optimizers import groups_of, rule_of
from oomc.pipeline import Observer
from oomc.plan import Budget, Plan, bytes_table, format_bytes
from oomc.program import Program
from oomc.report import Report
from oomc.runtime.chaos import Adversary
from oomc.runtime.meter import Meter, cuda_usage, host_bytes
from oomc.runtime.slabs import HostSlab
from oomc.runtime.step import StepRuntime
from oomc.simulate import Profiler, Projection

RING_LIMIT = 3 << 30
CHUNK_ELEMENTS = 4 << 20
CUDA_WORKSPACE = 192 << 20
"""Bytes outside the step's own tensors that CUDA libraries (cuBLAS, cuDNN) may take during a step."""
FRAGMENTATION = 0.12
"""What the CUDA allocator reserves beyond what is allocated, as a share; 0.09 was measured (docs/RESULTS.md)."""


@dataclass(frozen=True)
class Options:
    """How a step is compiled and run; see `oomc.compile`."""

    budget: Budget
    device: torch.device
    backend: str
    loss_fn: LossFn | None = None
    seed: int = 0
    verify: bool = False
    chaos: int | None = None
    synchronous: bool = False


@dataclass
class Scheduled:
    """A plan for one batch shape, with what runs it."""

    program: Program
    projection: Projection


@dataclass
class Trace:
    """One trace of the model: its bare step graph, and the plans made from it."""

    bare: Program
    batch: Batch
    profiler: Profiler
    plans: dict[tuple[tuple[int, int], bool], Scheduled] = field(default_factory=dict)


class Step:
    """One training step of a model under a budget: forward, backward and update. Made by `oomc.compile`.

    Attributes:
        model: the user's model; its parameters alias the step's host memory and are always current after
            `synchronize()` (which `state_dict`, `evaluate` and friends call through a hook on the model).
        optimizer: the user's optimizer. Its param_groups are read at each update.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, options: Options) -> None:
        self.model = model
        self.optimizer = optimizer
        self._options = options
        self._rule = rule_of(optimizer)
        self._groups = groups_of(optimizer, model)
        private.replace_step(optimizer, _refuse_optimizer_step)
        self._traces: dict[tuple[Any, ...], Trace] = {}
        self._runtime: StepRuntime | None = None
        self._slabs: list[HostSlab] = []
        self._current: Scheduled | None = None
        self._meter = Meter() if options.device.type == "cpu" else None
        self._host_start = host_bytes()
        self._last: dict[str, Any] = {}
        self._loss: torch.Tensor | None = None
        self._pending_batches = 0
        self._steps = 0
        self._broken = False
        self._accumulates = False

    # -- compiling ------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> Scheduled:
        """Trace, plan and compile for a batch like this one, and take the memory; a call does this when it must."""
        batch = Batch.bind(self.model, args, kwargs)
        return self._prepare(batch, accumulate=False)

    def _prepare(self, batch: Batch, accumulate: bool) -> Scheduled:
        trace = self._trace(batch)
        sizes = self._sizes(trace.bare, batch)
        if accumulate and not self._accumulates:
            self._accumulates = True
            self._check_host(trace.bare)
        if (sizes, accumulate) not in trace.plans:
            trace.plans[sizes, accumulate] = self._plan(trace, sizes, accumulate)
        scheduled = trace.plans[sizes, accumulate]
        if self._runtime is None:
            self._take_memory(scheduled.program)
        self._current = scheduled
        return scheduled

    def _trace(self, batch: Batch) -> Trace:
        key = batch.key()
        if key not in self._traces:
            if self._traces:
                raise UnsupportedError(_difference(next(iter(self._traces)), key))
            bare = self._capture(batch)
            self._traces[key] = Trace(bare, batch.shapes_only(), Profiler(bare))
        return self._traces[key]

    def _capture(self, batch: Batch, observe: Observer | None = None) -> Program:
        options = self._options
        program = capture(self.model, batch, loss_fn=options.loss_fn, device=options.device)
        held = set(self._groups)
        program.inputs = [
            replace(s, trainable=s.trainable and s.target in held) if s.kind == "parameter" else s
            for s in program.inputs
        ]
        if observe is not None:
            observe("capture", program)
        return pipeline.run_passes(program, pipeline.MODEL_PASSES, observe, options.verify)

    @staticmethod
    def _sizes(program: Program, batch: Batch) -> tuple[int, int]:
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

    def _plan(self, trace: Trace, sizes: tuple[int, int], accumulate: bool) -> Scheduled:
        options = self._options
        program, projection = pipeline.plan_step(
            trace.bare, trace.profiler, sizes, self._device_allowed(), options.budget,
            accumulate=accumulate, verify=options.verify,
        )  # fmt: skip
        trace.bare.compiled = program.compiled = trace.bare.compiled
        program = pipeline.lower(program, options.backend)
        return Scheduled(program, projection)

    def _device_allowed(self) -> int:
        """Device bytes for the step's own tensors."""
        options = self._options
        budget = options.budget.device or device_memory(options.device)
        if options.device.type == "cuda":
            private.use_expandable_segments()
            torch.zeros(1, device=options.device)
            own = budget - cuda_usage(options.device).outside - CUDA_WORKSPACE
            return int(own / (1 + FRAGMENTATION))
        return budget

    # -- memory ---------------------------------------------------------------------------------------------------

    def _host_needed(self, program: Program) -> tuple[dict[str, int], int]:
        """Host bytes by purpose, and the size of the gradient ring."""
        layouts = [s.layout for s in program.slabs]
        largest = max((4 * lay.fp32.elements + 2 * lay.bf16.elements for lay in layouts), default=0)
        ring = min(max(2 * largest, 1 << 16), RING_LIMIT)
        summed = [s.layout for s in program.slabs if len(s.users) > 1 or self._accumulates]
        return {
            "working weights": sum(lay.weight_bytes for lay in layouts),
            "optimizer state and exact masters": sum(lay.state_bytes(self._rule.arrays) for lay in layouts),
            "gradient sums": sum(lay.accumulator_bytes for lay in summed),
            "gradients in flight": ring,
        }, ring

    def _check_host(self, program: Program) -> int:
        """Refuse a host budget that cannot work; the size of the gradient ring."""
        needed, ring = self._host_needed(program)
        allowed = self._options.budget.host or host_memory()
        total = sum(needed.values())
        if total > allowed:
            rows = [*needed.items(), ("needed", total), ("allowed", allowed)]
            raise BudgetError(
                f"the model does not fit the host budget:\n{bytes_table(rows)}\n"
                f"The smallest host budget that works is {total} bytes ({format_bytes(total)})",
                smallest_host=total,
            )
        return ring

    def _take_memory(self, program: Program) -> None:
        """Check the host budget, then move the model's weights into slabs, block by block."""
        options = self._options
        ring = self._check_host(program)
        params = dict(self.model.named_parameters())
        empty = [n for s in program.slabs for n in s.params if params[n].device.type == "meta"]
        if empty:
            raise UnsupportedError(
                f"{len(empty)} parameters are on the meta device and have no values ({empty[0]}, ...); load the "
                "weights before compiling (from_pretrained, or to_empty and initialise)"
            )
        for slab in program.slabs:
            host = HostSlab(slab.layout, pin=options.device.type == "cuda")
            for name in slab.params:
                host.load(name, params[name])
                params[name].data = host.param(name)
            self._slabs.append(host)
        self._limit_device()
        buffers = dict(self.model.named_buffers())
        residents = {s.target: buffers[s.target] for s in program.inputs if s.kind == "buffer"} | program.constants
        assert program.plan is not None
        context: AbstractContextManager[Any] = self._meter or nullcontext()
        with context:
            self._runtime = StepRuntime(
                options.device, self._slabs, program.plan.slots, self._rule, self._groups,
                ring_bytes=ring, chunk_elems=min(CHUNK_ELEMENTS, max(256, ring // 8)),
                adversary=None if options.chaos is None else Adversary(options.chaos),
                synchronous=options.synchronous,
                forms=program.forms, compiled=program.compiled, residents=residents, seed=options.seed,
            )  # fmt: skip
        if self._meter is not None:
            self._meter.track(*self._runtime.residents)
        weakref.finalize(self, StepRuntime.close, self._runtime)
        self._hook_model()

    def _limit_device(self) -> None:
        """Let the allocator fail rather than exceed the device budget."""
        device, budget = self._options.device, self._options.budget.device
        if device.type == "cuda" and budget is not None:
            share = (budget - cuda_usage(device).outside) / device_memory(device)
            torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)

    def _hook_model(self) -> None:
        """Let whoever reads the model's weights wait for updates under way."""
        me = weakref.ref(self)

        def settle(*_: Any, **__: Any) -> None:
            step = me()
            if step is not None:
                step.synchronize()

        self.model.register_state_dict_pre_hook(settle)
        self.model.register_forward_pre_hook(settle)

    # -- running --------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run one training step: forward, backward and update.

        Arguments are those of the model's forward.

        Returns:
            The loss: a 0-dim tensor, detached. Updates may still be under way when it is returned.

        Raises:
            BudgetError, CaptureError, UnsupportedError: at the first call for a batch shape, before anything changes.
        """
        return self._run(args, kwargs, accumulate=False)

    def forward_backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Add a micro-batch's gradients to those held on the host in fp32; `update()` applies them."""
        loss = self._run(args, kwargs, accumulate=True)
        self._pending_batches += 1
        return loss

    def update(self) -> None:
        """Update with the mean of the accumulated micro-batches' gradients.

        Raises:
            OomcError: nothing was accumulated.
        """
        if self._runtime is None or not self._pending_batches:
            raise OomcError("update() without forward_backward(): there are no gradients to apply")
        self._runtime.begin_step([self._rule.hyper(g) for g in self.optimizer.param_groups])
        for slab in self._slabs:
            if slab.accumulated:
                self._runtime.update_accumulated(slab.name, 1.0 / self._pending_batches)
        self._runtime.end_step()
        self._pending_batches = 0
        self._count_step()

    def _count_step(self) -> None:
        self._steps += 1
        private.mark_stepped(self.optimizer)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The sums of the micro-batches' gradients since the last update: fp32, by parameter name, as copies."""
        self.synchronize()
        return {
            name: slab.accumulator[start:stop].view(slab.layout.place(name).spec.shape).clone()
            for slab in self._slabs
            if slab.accumulator is not None
            for name, (start, stop) in slab.layout.gradient_ranges.items()
            if name in slab.accumulated
        }

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], accumulate: bool) -> torch.Tensor:
        if self._broken:
            raise OomcError(
                "an earlier step failed after it had updated some of the parameters and not others; load a checkpoint "
                "into the model and compile it again"
            )
        batch = Batch.bind(self.model, args, kwargs)
        begun = time.perf_counter()
        scheduled = self._prepare(batch, accumulate)
        if not accumulate and self._pending_batches:
            raise OomcError("a step while accumulated gradients wait; call update() first")
        runtime, program = self._runtime, scheduled.program
        assert runtime is not None and program.step is not None and program.plan is not None
        runtime.set_slots(program.plan.slots)
        device = self._options.device
        hypers = [self._rule.hyper(g) for g in self.optimizer.param_groups]
        inputs = [t.to(device, non_blocking=True) for t in batch.tensors.values()]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        meter: AbstractContextManager[Any] = self._meter or nullcontext()
        if self._meter is not None:
            self._meter.track(*inputs)
            self._meter.reset_peak()
        with torch.no_grad(), meter:
            runtime.begin_step(hypers)
            try:
                loss = program.step(runtime, *inputs)
            except BaseException:
                self._broken = runtime.abort(accumulate)
                raise
            counts = runtime.end_step()
        if not accumulate:
            self._count_step()
        self._loss = loss
        tokens = program.plan.sizes[0] * program.plan.sizes[1]
        self._last = {"tokens": tokens, "step_s": time.perf_counter() - begun, "counts": counts,
                      "device_peak": self._device_peak()}  # fmt: skip
        loss.backward = _already_done
        return loss

    def _device_peak(self) -> int:
        if self._meter is not None:
            return self._meter.peak
        return cuda_usage(self._options.device).measured

    def synchronize(self) -> None:
        """Block until all updates are done and the model's weights are current."""
        if self._runtime is not None:
            self._runtime.synchronize()

    def close(self) -> None:
        """Finish updates, and give the device memory, the threads and the optimizer state back."""
        if self._runtime is not None:
            self.synchronize()
            self._runtime.close()
            if self._options.device.type == "cuda":
                torch.cuda.set_per_process_memory_fraction(1.0, self._options.device)

    # -- looking --------------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> dict[str, Any]:
        """Figures of the last step.

        loss, tokens, tokens_per_s, step_s (host seconds of the call, updates excluded), device_peak and
        device_projected (bytes), host_peak (bytes beyond what the process held before compiling), h2d_bytes,
        d2h_bytes, nonfinite (gradient elements), steps, traces, plans, compilations.
        """
        if self._current is None or not self._last:
            return {"steps": 0, "traces": len(self._traces)}
        counts, seconds = self._last["counts"], self._last["step_s"]
        return {
            "loss": float(self._loss) if self._loss is not None else float("nan"),
            "tokens": self._last["tokens"],
            "tokens_per_s": self._last["tokens"] / seconds,
            "step_s": seconds,
            "device_peak": self._last["device_peak"],
            "device_projected": self.projected,
            "host_peak": max(0, host_bytes() - self._host_start),
            "h2d_bytes": counts.h2d_bytes,
            "d2h_bytes": counts.d2h_bytes,
            "nonfinite": counts.nonfinite,
            "steps": self._steps,
            "traces": len(self._traces),
            "plans": sum(len(t.plans) for t in self._traces.values()),
            "compilations": sum(len(t.bare.compiled) for t in self._traces.values()),
        }

    @property
    def projected(self) -> int:
        """The projected device peak of the current plan, in bytes."""
        assert self._current is not None, "nothing is compiled yet"
        if self._options.device.type != "cuda":
            return self._current.projection.peak
        outside = cuda_usage(self._options.device).outside
        return int(self._current.projection.peak * (1 + FRAGMENTATION)) + outside + CUDA_WORKSPACE

    @property
    def plan(self) -> Plan:
        """The current plan."""
        assert self._current is not None and self._current.program.plan is not None, "nothing is compiled yet"
        return self._current.program.plan

    @property
    def graph(self) -> fx.GraphModule:
        """The scheduled step as a module of readable Python (`print(step.graph.code)`)."""
        assert self._current is not None and self._current.program.step is not None, "nothing is compiled yet"
        return self._current.program.step

    def report(self, stage: str | None = None) -> Report:
        """What was planned and measured; with `stage`, the graph after that pass (or `capture`) as text.

        A stage is printed by tracing again on fake tensors, which takes as long as compiling did.
        """
        if self._current is None:
            raise OomcError("nothing is compiled yet: call the step, or give compile an example")
        if stage is not None:
            return Report.of_stage(self._print_stage(stage), stage)
        needed, _ = self._host_needed(self._current.program)
        return Report.of_step(self._current.program, self._current.projection, needed, self.metrics, self._options)

    def _print_stage(self, stage: str) -> str:
        from oomc.printer import print_program

        texts: dict[str, str] = {}

        def observe(name: str, program: Program) -> None:
            if name == stage:
                texts[name] = print_program(program)

        assert self._current is not None and self._current.program.plan is not None
        (trace,) = self._traces.values()
        self.synchronize()
        choose = pipeline.chosen(self._current.program.plan)
        if stage in {p.name for p in pipeline.step_passes(choose)}:
            pipeline.with_plan(trace.bare, choose, observe)
        elif stage == "lower":
            texts[stage] = self.graph.code
        else:
            self._capture(trace.batch, observe)
        if stage not in texts:
            names = ["capture", *(p.name for p in (*pipeline.MODEL_PASSES, *pipeline.step_passes(choose))), "lower"]
            raise ValueError(f"no stage is called {stage!r}; there are {', '.join(names)}")
        return texts[stage]


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


def _refuse_optimizer_step(*_: Any, **__: Any) -> None:
    raise OomcError(
        "the compiled step updates the parameters itself: call step(**batch), or step.forward_backward(**batch) and "
        "step.update(); optimizer.step() would make a second, unknown update"
    )


def _already_done(*_: Any, **__: Any) -> None:
    raise OomcError("the step has run backward and update already; loss.backward() has nothing left to do")
