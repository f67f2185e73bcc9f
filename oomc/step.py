"""The compiled training step that the user calls."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx

from oomc import pipeline, private
from oomc.capture import Batch
from oomc.compiler import Compiler, Options, Scheduled
from oomc.errors import OomcError
from oomc.limits import device_memory
from oomc.optimizers import groups_of, rule_of
from oomc.plan import Plan
from oomc.program import Program
from oomc.report import Report
from oomc.runtime.chaos import Adversary
from oomc.runtime.gradients import BUFFERS_PER_WORKER, Clipping
from oomc.runtime.meter import Meter, cuda_usage, host_bytes
from oomc.runtime.step import StepRuntime
from oomc.runtime.updates import StepCounts
from oomc.state import State


class Step:
    """One training step of a model under a budget: forward, backward and update. Made by `oomc.compile`.

    Attributes:
        model: the user's model; its parameters alias the step's memory and are always current after `synchronize()`
            (which `state_dict`, `evaluate` and friends call through a hook on the model).
        optimizer: the user's optimizer. Its param_groups are read at each update.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, options: Options) -> None:
        self.model = model
        self.optimizer = optimizer
        self._options = options
        self._rule = rule_of(optimizer, options.state)
        self._groups = groups_of(optimizer, model)
        private.replace_step(optimizer, _refuse_optimizer_step)
        self._compiler = Compiler(model, self._groups, options)
        self._state = State(
            model, options.device, options.budget.host, self._rule.arrays, options.where, options.keep
        )  # fmt: skip
        self._runtime: StepRuntime | None = None
        self._current: Scheduled | None = None
        self._meter = Meter() if options.device.type == "cpu" else None
        self._host_start = host_bytes()
        self._last: dict[str, Any] = {}
        self._loss: torch.Tensor | None = None
        self._window: list[StepCounts] = []
        self._unchecked: list[StepCounts] = []
        self._steps = 0
        self._skipped = 0
        self._broken = False

    # -- compiling ------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> Scheduled:
        """Trace, plan and compile for a batch like this one, and take the memory; a call does this when it must."""
        batch = Batch.bind(self.model, args, kwargs)
        return self._prepare(batch, accumulate=False)

    def _prepare(self, batch: Batch, accumulate: bool) -> Scheduled:
        bare = self._compiler.trace(batch).bare
        state, taken = self._state, self._runtime is not None
        updates = state.size_updates(bare)
        first = accumulate and not state.accumulates
        state.accumulates |= accumulate
        allowed = state.resident if taken else self._may_be_resident(bare)
        try:
            scheduled = self._compiler.plan(batch, updates, allowed, taken, accumulate)
            assert scheduled.program.plan is not None
            if first:
                state.check_host(bare, scheduled.program.plan.resident)
            self._take_memory(scheduled.program)
        except BaseException:
            state.accumulates &= not first
            raise
        self._current = scheduled
        return scheduled

    def _may_be_resident(self, bare: Program) -> frozenset[str]:
        """Slabs that may live on the device: all, but for a stand-in whose memory is the host's, without a budget."""
        if self._options.device.type == "cpu" and self._options.budget.device is None:
            return frozenset()
        return frozenset(slab.name for slab in bare.slabs)

    # -- memory ---------------------------------------------------------------------------------------------------

    def _take_memory(self, program: Program) -> None:
        """Move the weights into slabs at the first plan; later ones may want fewer of them on the device."""
        assert program.plan is not None
        context: AbstractContextManager[Any] = self._meter or nullcontext()
        with context:
            if self._runtime is None:
                self._state.take(program, program.plan.resident)
                self._runtime = self._make_runtime(program)
                weakref.finalize(self, StepRuntime.close, self._runtime)
            elif self._state.resident != frozenset(program.plan.resident):
                self._runtime.drain()
                self._runtime.retire_all()
                self._state.move(program, program.plan.resident)
                self._runtime.replace_slabs(self._state.slabs)

    def _make_runtime(self, program: Program) -> StepRuntime:
        options, plan = self._options, program.plan
        assert plan is not None
        self._limit_device()
        buffers = dict(self.model.named_buffers())
        residents = {s.target: buffers[s.target] for s in program.inputs if s.kind == "buffer"} | program.constants
        runtime = StepRuntime(
            options.device, self._state.slabs, plan.slots, self._rule, self._groups,
            chunk_elems=self._state.chunk_elements, buffer_elems=self._state.buffer_elements,
            buffers=BUFFERS_PER_WORKER * max(2, self._state.workers), workers=self._state.workers, where=plan.where,
            adversary=None if options.chaos is None else Adversary(options.chaos), synchronous=options.synchronous,
            forms=program.forms, compiled=program.compiled, residents=residents, seed=options.seed,
        )  # fmt: skip
        if self._meter is not None:
            self._meter.track(*runtime.residents)
        self._hook_model()
        return runtime

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
            OomcError: with `on_nonfinite="raise"`, the gradient is not finite; nothing was updated.
        """
        return self._run(args, kwargs, accumulate=False)

    def forward_backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Add a micro-batch's gradients to those kept in fp32; `update()` applies them. Returns its loss."""
        return self._run(args, kwargs, accumulate=True)

    def update(self) -> None:
        """Update with the accumulated gradients: their mean over the valid labels of all micro-batches.

        Where the loss shows no count of valid labels, micro-batches weigh equally (`report()` says which).

        Raises:
            OomcError: nothing was accumulated; or with `on_nonfinite="raise"`, the gradient is not finite, and nothing
                was updated.
        """
        self._refuse_broken()
        if self._runtime is None or not self._window:
            raise OomcError("update() without forward_backward(): there are no gradients to apply")
        window, self._window = tuple(self._window), []
        self._runtime.begin_step(self._hypers())
        self._runtime.apply_kept(Clipping(self._options.max_grad_norm, window))
        counts = self._runtime.end_step()
        self._last["update"] = counts
        self._finish(counts, kept=True)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], accumulate: bool) -> torch.Tensor:
        self._refuse_broken()
        self._check_counts()
        batch = Batch.bind(self.model, args, kwargs)
        begun = time.perf_counter()
        scheduled = self._prepare(batch, accumulate)
        if not accumulate and self._window:
            raise OomcError("a step while accumulated gradients wait; call update() first")
        runtime, program = self._runtime, scheduled.program
        assert runtime is not None and program.step is not None and program.plan is not None
        device = self._options.device
        inputs = [t.to(device, non_blocking=True) for t in batch.tensors.values()]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        meter: AbstractContextManager[Any] = self._meter or nullcontext()
        if self._meter is not None:
            self._meter.track(*inputs)
            self._meter.reset_peak()
        with torch.no_grad(), meter:
            try:
                runtime.begin(program.plan, self._hypers(), self._options.max_grad_norm, scheduled.carried)
                loss = program.step(runtime, *inputs)
            except BaseException:
                self._broken = runtime.abort(earlier=bool(self._window))
                raise
            counts = runtime.end_step()
        self._loss = loss
        tokens = program.plan.sizes[0] * program.plan.sizes[1]
        self._last = {"tokens": tokens, "step_s": time.perf_counter() - begun, "counts": counts,
                      "device_peak": self._device_peak()}  # fmt: skip
        loss.backward = _already_done
        if accumulate:
            self._window.append(counts)
        else:
            self._finish(counts, kept=program.plan.keep)
        return loss

    def _hypers(self) -> list[Any]:
        return [self._rule.hyper(group) for group in self.optimizer.param_groups]

    def _finish(self, counts: StepCounts, kept: bool) -> None:
        """Count a step whose updates are under way."""
        self._steps += 1
        private.mark_stepped(self.optimizer)
        self._unchecked.append(counts)
        if kept and self._options.on_nonfinite == "raise":
            counts.decided.wait()
            if "not finite" in counts.skipped:
                self._unchecked.remove(counts)
                self._skipped += 1
                raise OomcError(
                    f"step {self._steps}: {counts.skipped}; nothing was updated, and the next step works as usual"
                )

    def _check_counts(self) -> None:
        """Warn of gradients that were not finite; a step is looked at until the one after the next begins."""
        left = []
        for index, counts in enumerate(self._unchecked):
            if counts.skipped:
                self._skipped += 1
            if "not finite" in counts.skipped:
                warnings.warn(f"{counts.skipped}: nothing was updated in this step", stacklevel=4)
            elif counts.nonfinite:
                warnings.warn(
                    f"{counts.nonfinite} elements of a gradient were not finite, and were applied as in eager PyTorch; "
                    'oomc.compile(on_nonfinite="skip") leaves such steps out',
                    stacklevel=4,
                )
            elif not counts.skipped and index == len(self._unchecked) - 1:
                left.append(counts)
        self._unchecked = left

    def _refuse_broken(self) -> None:
        if self._broken:
            raise OomcError(
                "an earlier step failed after it had updated some of the parameters and not others; go back to a "
                "checkpoint with step.load(directory)"
            )

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients accumulated since the last update, as fp32 copies by parameter name.

        Each micro-batch's gradient is multiplied by its number of valid labels, where the loss shows it: this is the
        gradient of the summed loss of the window.
        """
        self.synchronize()
        return {
            name: slab.kept.tensor(start, stop).view(slab.layout.place(name).spec.shape).float().clone()
            for slab in self._state.slabs
            if slab.kept is not None
            for name, (start, stop) in slab.layout.gradient_ranges.items()
            if name in slab.kept.names
        }

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
            if not self._broken:
                self.synchronize()
            self._runtime.close()
            if self._options.device.type == "cuda":
                torch.cuda.set_per_process_memory_fraction(1.0, self._options.device)

    # -- looking --------------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> dict[str, Any]:
        """Figures of the last step.

        loss, tokens, valid_tokens (labels that count; None if unknown), tokens_per_s, step_s (host seconds of the call,
        updates excluded), grad_norm (before clipping; None where it was not asked for), skipped (steps that updated
        nothing), stall_s (host seconds blocked by weights that were not updated yet, and by gradients that had not
        left, as a dict), device_peak and device_projected (bytes), host_peak (bytes beyond what the process held before
        compiling), h2d_bytes and d2h_bytes (weights and gradients), state_bytes (moved by updates on the device),
        nonfinite (gradient elements), steps, traces, plans, compilations. Reading them waits for the gradient norm.
        """
        traces = self._compiler.traces
        if self._current is None or not self._last:
            return {"steps": 0, "traces": len(traces)}
        counts, seconds = self._last["counts"], self._last["step_s"]
        updated: StepCounts = self._last.get("update", counts)
        if updated is not counts or self.plan.keep:
            updated.decided.wait()
        self._check_counts()
        return {
            "loss": float(self._loss) if self._loss is not None else float("nan"),
            "tokens": self._last["tokens"],
            "valid_tokens": counts.valid,
            "tokens_per_s": self._last["tokens"] / seconds,
            "step_s": seconds,
            "grad_norm": updated.grad_norm,
            "skipped": self._skipped,
            "stall_s": dict(counts.stalls),
            "device_peak": self._last["device_peak"],
            "device_projected": self.projected,
            "host_peak": max(0, host_bytes() - self._host_start),
            "h2d_bytes": counts.h2d_bytes,
            "d2h_bytes": counts.d2h_bytes,
            "state_bytes": updated.state_bytes,
            "nonfinite": updated.nonfinite,
            "steps": self._steps,
            "traces": len(traces),
            "plans": sum(len(t.plans) for t in traces.values()),
            "compilations": sum(len(t.bare.compiled) for t in traces.values()),
        }

    @property
    def projected(self) -> int:
        """The projected device peak of the current plan, in bytes."""
        assert self._current is not None, "nothing is compiled yet"
        return self._compiler.projected(self._current.projection)

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
        needed = self._state.host_needed(self._current.program, self.plan.resident)
        return Report.of_step(self._current.program, self._current.projection, needed, self.metrics, self._options)

    def _print_stage(self, stage: str) -> str:
        from oomc.printer import print_program

        choose = pipeline.chosen(self.plan)
        names = ["capture", *(p.name for p in (*pipeline.MODEL_PASSES, *pipeline.step_passes(choose))), "lower"]
        if stage not in names:
            raise ValueError(f"no stage is called {stage!r}; there are {', '.join(names)}")
        texts: dict[str, str] = {}

        def observe(name: str, program: Program) -> None:
            if name == stage:
                texts[name] = print_program(program)

        (trace,) = self._compiler.traces.values()
        self.synchronize()
        if stage in {p.name for p in pipeline.step_passes(choose)}:
            pipeline.with_plan(trace.bare, choose, observe)
        elif stage == "lower":
            texts[stage] = self.graph.code
        else:
            self._compiler.capture(trace.batch, observe)
        return texts[stage]


def _refuse_optimizer_step(*_: Any, **__: Any) -> None:
    raise OomcError(
        "the compiled step updates the parameters itself: call step(**batch), or step.forward_backward(**batch) and "
        "step.update(); optimizer.step() would make a second, unknown update"
    )


def _already_done(*_: Any, **__: Any) -> None:
    raise OomcError("the step has run backward and update already; loss.backward() has nothing left to do")
