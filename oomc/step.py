"""The compiled training step that the user calls."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import fx
from torch.utils.weak import WeakIdKeyDictionary

from oomc import machine, pipeline, private
from oomc.attach import Attachment, evaluate
from oomc.capture import Batch
from oomc.checkpoint import Checkpoints
from oomc.checkpoint_write import Save
from oomc.compiler import Compiler, Options, Scheduled
from oomc.cost import Costs
from oomc.device_guard import DeviceGuard, lift_limit
from oomc.edits import Edits, check_buffers
from oomc.errors import BudgetError, OomcError, UnsupportedError
from oomc.explain import Explanation
from oomc.optimizer_state import expose_state, warn_if_lost
from oomc.optimizers import check_groups, groups_of, rule_of
from oomc.plan import Plan
from oomc.program import Program
from oomc.report import Report
from oomc.report_figures import Rates
from oomc.runtime.chaos import Adversary
from oomc.runtime.cores import warn_if_single_threaded
from oomc.runtime.gradients import Clipping, ring_buffers
from oomc.runtime.memory import empty_cache, give_back_free
from oomc.runtime.meter import Meter, cuda_usage, host_bytes
from oomc.runtime.pool import is_worker
from oomc.runtime.record import Recorder, Recording
from oomc.runtime.step import StepRuntime
from oomc.runtime.updates import StepCounts
from oomc.state import State
from oomc.timeline import simulate

P = ParamSpec("P")
T = TypeVar("T")
_OWNERS = WeakIdKeyDictionary()
"""The step that holds each parameter."""


class _Call:
    """A call of a step that is under way."""


def _alone(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A method of a step that runs while no other call does."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            step: Any = args[0]
            with step._one_at_a_time(what):
                return method(*args, **kwargs)

        return call

    return decorate


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
        self._group_sizes = check_groups(optimizer)
        warn_if_lost(optimizer)
        private.replace_step(optimizer, _refuse_optimizer_step)
        self._compiler = Compiler(model, self._groups, options)
        self._state = State(
            model, options.device, options.budget.host, self._rule.arrays, options.where, options.keep
        )  # fmt: skip
        state = self._state  # and not self: a step that is dropped is freed at once, not by the garbage collector
        self._checkpoints = Checkpoints(model, optimizer, self._rule, lambda: state.slabs)
        self._runtime: StepRuntime | None = None
        self._ender: weakref.finalize[..., Any] | None = None
        self._attachment: Attachment | None = None
        self._edits: Edits | None = None
        self._params: dict[str, torch.nn.Parameter] = {}
        self._current: Scheduled | None = None
        self._meter = Meter() if options.device.type == "cpu" else None
        self._host_start = host_bytes()
        self._last: dict[str, Any] = {}
        self._loss: torch.Tensor | None = None
        self._window: list[StepCounts] = []
        self._unchecked: list[StepCounts] = []
        self._recorded: tuple[Scheduled, Recording] | None = None
        self._rates: tuple[Scheduled, Rates] | None = None
        self._explained: tuple[Scheduled, Explanation] | None = None
        self._hooks = 0
        self._steps = 0
        self._skipped = 0
        self._guard = DeviceGuard(self._compiler)
        self._alone = threading.RLock()
        self._call: Callable[[], _Call | None] = lambda: None
        self._broken = self._closed = self._ended = self._warned = self._recording = False

    # -- compiling ------------------------------------------------------------------------------------------------

    @_alone("prepare()")
    def prepare(self, *args: Any, **kwargs: Any) -> Scheduled:
        """Trace, plan and compile for a batch like this one, and take the memory; a call does this when it must."""
        self._refuse_broken()
        batch = Batch.bind(self.model, args, kwargs)
        self._take_edits()  # slabs may move, and parameters with them
        return self._prepare(batch, accumulate=False)

    def _prepare(self, batch: Batch, accumulate: bool) -> Scheduled:
        if torch.is_autocast_enabled(self._options.device.type):
            raise UnsupportedError(
                "the step is called under torch.autocast, which it cannot honour: it computes in the dtypes of the "
                "model. Leave autocast out; for bf16, convert the model (model.to(torch.bfloat16)), whose masters are "
                "fp32 nevertheless"
            )
        state, taken = self._state, self._runtime is not None
        if self._current is None:
            self._guard.look([*self.model.parameters(), *self.model.buffers()])
        first = accumulate and not state.accumulates
        state.accumulates |= accumulate

        def plan() -> Scheduled:
            bare = self._compiler.trace(batch).bare
            updates = state.size_updates(bare)
            allowed = state.resident if taken else self._compiler.may_be_resident(bare)
            return self._compiler.plan(batch, updates, allowed, taken, accumulate)

        try:
            try:
                scheduled = plan() if taken else self._compiler.fitting(batch, plan)
            except BudgetError:
                if not self._guard.give_up():
                    raise
                scheduled = plan()
            assert scheduled.program.plan is not None
            new = first or scheduled is not self._current
            if new:
                state.check_host(scheduled.program, scheduled.program.plan.resident)
                self._guard.make_room(scheduled.projection)
            self._take_memory(scheduled.program)
            if new:
                self._guard.take(scheduled.projection)
        except BaseException:
            state.accumulates &= not first
            raise
        self._current = scheduled
        return scheduled

    # -- memory ---------------------------------------------------------------------------------------------------

    def _take_memory(self, program: Program) -> None:
        """Move the weights into slabs at the first plan; later ones may want fewer of them on the device."""
        assert program.plan is not None
        context: AbstractContextManager[Any] = self._meter or nullcontext()
        with context:
            if self._runtime is None:
                self._refuse_shared()
                check_buffers(self.model)
                self._state.take(program, program.plan.resident)
                self._start(program)
            if self._edits is None:
                self._bind()
            elif self._state.resident != frozenset(program.plan.resident):
                self._move(program)

    def _move(self, program: Program) -> None:
        """Move slabs between host and device; should memory run out, those that have moved are where they are now."""
        assert self._runtime is not None and self._edits is not None and program.plan is not None
        self._runtime.drain()
        self._runtime.retire_all()
        self._runtime.release_slots()
        self._broken = True  # until it is through: an interrupt may come between a slab and its parameters
        try:
            self._state.move(program, program.plan.resident)
        except Exception:
            self._moved()
            raise
        self._moved()

    def _moved(self) -> None:
        assert self._runtime is not None and self._edits is not None
        self._runtime.replace_slabs(self._state.moved)
        self._edits.remember(under_way=False)
        self._broken = False

    def _start(self, program: Program) -> None:
        """Make lanes, workers and buffers over the slabs that there are."""
        options, plan = self._options, program.plan
        assert plan is not None
        warn_if_single_threaded(self._state.workers)
        buffers = dict(self.model.named_buffers())
        residents = {s.target: buffers[s.target] for s in program.inputs if s.kind == "buffer"} | program.constants
        self._runtime = StepRuntime(
            options.device, self._state.moved, plan.slots, self._rule, self._groups,
            chunk_elems=self._state.chunk_elements, buffer_elems=self._state.buffer_elements,
            buffers=ring_buffers(self._state.workers), workers=self._state.workers, where=plan.where,
            adversary=None if options.chaos is None else Adversary(options.chaos), synchronous=options.synchronous,
            residents=residents, seed=options.seed, host_slot_bytes=plan.host_slots,
        )  # fmt: skip
        self._ender = weakref.finalize(self, _close, self._runtime)
        if self._meter is not None:
            self._meter.track(*self._runtime.residents)

    def _bind(self) -> None:
        """Let whoever reads or writes the model's weights, or the optimizer's state, find what is current."""
        me = weakref.ref(self)

        def settle(to_write: bool = False) -> None:
            step = me()
            if step is None or step._closed:
                return
            if step._edits is not None and step._edits.under_way:
                step.synchronize()
            for slab in state.slabs if to_write else ():
                slab.wait_updated()  # for a checkpoint that is being written, too

        def settle_state() -> None:
            step = me()
            if step is None or step._closed:
                raise OomcError(
                    "the step that this optimizer belonged to is closed, and the optimizer's state went with it; take "
                    "its state_dict(), or step.save(directory), before"
                )
            settle()

        state = self._state
        self._attachment = Attachment(self.model, self._options.device, settle, lambda: settle(to_write=True))
        params = self._params = dict(self.model.named_parameters())
        expose_state(self.optimizer, self._rule, lambda: state.slabs, params, settle_state)
        self._edits = Edits(self.model, state.bind)
        self._hooks = _hooks_of(self.model)
        for parameter in params.values():
            _OWNERS[parameter] = me

    def _refuse_shared(self) -> None:
        """A parameter belongs to one step: two would each take it, and train it apart."""
        owners = [_OWNERS[parameter]() for parameter in self.model.parameters() if parameter in _OWNERS]
        if any(owner is not None and owner is not self for owner in owners):
            raise UnsupportedError(
                "the model belongs to another step, which is not closed: call close() of that one first (and save() "
                "before, if its optimizer's state shall live on)"
            )

    def _take_edits(self) -> None:
        """What the user has written to parameters becomes their masters."""
        if self._attachment is None or self._edits is None:
            return
        self._attachment.bring_home()
        written = set(self._edits.take())
        self._adopt()
        if not written:
            return
        params = dict(self.model.named_parameters())
        names = [(slab, place.spec.name) for slab in self._state.slabs for place in slab.layout.places]
        places = [(slab, name) for slab, name in names if name in written]
        for slab, name in places:
            # what is another parameter's memory, as after a swap, is about to be written to
            if self._state.holds(params[name].data) and params[name].data_ptr() != slab.param(name).data_ptr():
                params[name].data = params[name].data.clone()
        for slab, name in places:
            slab.load(name, params[name].data)
            params[name].data = slab.param(name)
        self._edits.remember(under_way=False)

    def _adopt(self) -> None:
        """Parameters that the user has put in the place of others are trained as those were, by the same optimizer."""
        current = dict(self.model.named_parameters())
        changed = {name: old for name, old in self._params.items() if current[name] is not old}
        if not changed:
            return
        new = {id(old): current[name] for name, old in changed.items()}
        for group in self.optimizer.param_groups:
            group["params"] = [new.get(id(parameter), parameter) for parameter in group["params"]]
        for old in changed.values():
            _OWNERS.pop(old, None)
        for name in changed:
            self._params[name] = current[name]
            _OWNERS[current[name]] = weakref.ref(self)

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

    @_alone("update()")
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
        self._take_edits()
        runtime, hypers, steps = self._runtime, self._hypers(), self._runtime.steps
        self._broken = True  # until it is through, wherever an interrupt comes
        try:
            runtime.begin_step(hypers)
            self._edits_under_way()
            runtime.apply_kept(Clipping(self._options.max_grad_norm, tuple(self._window)))
            counts = runtime.end_step()
            self._last["update"] = counts
            self._window = []
            self._finish(counts)
        except BaseException:
            self._broken = runtime.abort(earlier=True, steps=steps)
            raise
        self._broken = False
        self._raise_if_asked(counts, kept=True)

    @_alone("use_plan()")
    def use_plan(self, plan: Plan, *args: Any, **kwargs: Any) -> None:
        """Run batches like this one by a plan of the user's from the next call on; slabs move to where it has them.

        Args:
            plan: `step.plan` of another step or run of the same model, or one with some decisions replaced
                (`dataclasses.replace`).
            *args: of a call, as for `prepare`.
            **kwargs: likewise.

        Raises:
            ValueError: the plan is for another batch size, or does not decide about just what this model's step has.
            BudgetError: it does not fit the budget.
        """
        self._refuse_broken()
        batch = Batch.bind(self.model, args, kwargs)
        bare = self._compiler.trace(batch).bare
        updates = self._state.size_updates(bare)
        self._compiler.give(
            batch, plan, updates, lambda scheduled: self._state.check_host(scheduled.program, plan.resident)
        )  # fmt: skip

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], accumulate: bool) -> torch.Tensor:
        """Run a step; one that runs out of device memory before anything has changed is planned with less, and run."""
        while True:
            try:
                with self._one_at_a_time("a call"):
                    return self._run_once(args, kwargs, accumulate)
            except torch.OutOfMemoryError as error:
                if self._broken or self._closed or not self._guard.retreat(self._current):
                    raise
                warnings.warn(
                    f"the device ran out of memory although its budget was projected to do ({error}); nothing has "
                    "changed, and the step is planned again with less",
                    stacklevel=3,
                )
            empty_cache(self._options.device)

    def _run_once(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], accumulate: bool) -> torch.Tensor:
        self._refuse_broken()
        self._check_counts()
        hypers = self._hypers()
        batch = Batch.bind(self.model, args, kwargs)
        begun = time.perf_counter()
        if not accumulate and self._window:
            raise OomcError("a step while accumulated gradients wait; call update() first")
        self._take_edits()
        scheduled = self._prepare(batch, accumulate)
        self._check_mode()
        self._check_hooks()
        runtime, program = self._runtime, scheduled.program
        assert runtime is not None and program.step is not None and program.plan is not None
        device = self._options.device
        # on the stand-in too they are the step's own: what the user keeps is not on the device
        own = device.type == "cpu"
        inputs = [t.to(device, non_blocking=True, copy=own) for t in batch.tensors.values()]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        meter: AbstractContextManager[Any] = self._meter or nullcontext()
        if self._meter is not None:
            self._meter.track(*inputs)
            self._meter.reset_peak()
        tokens, steps = program.plan.sizes[0] * program.plan.sizes[1], runtime.steps
        self._broken = True  # until it is through, wherever an interrupt comes
        peaks: list[int] = []
        recorder = Recorder(program, partial(self._held, peaks)) if self._recording else None
        flushes, started = self._guard.flushes, time.perf_counter()
        with torch.no_grad(), meter, recorder or nullcontext():
            try:
                runtime.begin(program, hypers, self._options.max_grad_norm, scheduled.carried)
                if not accumulate:
                    self._edits_under_way()
                loss = (recorder or program.step)(runtime, *inputs)
                counts = runtime.end_step()
                last: dict[str, Any] = {"tokens": tokens, "step_s": time.perf_counter() - begun, "counts": counts,
                        "decides": program.plan.keep, "counts_labels": program.count is not None,
                        "device_peak": max([self._device_peak(), *peaks])}  # fmt: skip
                loss.backward = _already_done
                self._loss, self._last = loss, last
                if accumulate:
                    self._window.append(counts)
                else:
                    self._finish(counts)
            except BaseException:
                self._broken = runtime.abort(earlier=bool(self._window), steps=steps)
                raise
        self._broken = False
        if scheduled.steps == 0:
            give_back_free()
        if self._compiler.tunes:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            self._compiler.took(scheduled, time.perf_counter() - started)
        self._guard.watch(scheduled, self._last["device_peak"], flushes)
        if recorder is not None and recorder.recording is not None:
            self._recording, self._recorded = False, (scheduled, recorder.recording)
        if not accumulate:
            self._raise_if_asked(counts, kept=program.plan.keep)
        return loss

    @contextmanager
    def _one_at_a_time(self, what: str) -> Iterator[None]:
        """Refuse a call while another one runs: another thread's, or one that this comes from within.

        An interrupt between two lines of this may leave the lock to the thread that has it, which it does not hinder.
        """
        if not self._alone.acquire(blocking=False):
            raise OomcError(f"{what} while the step is being run by another thread; it runs one call at a time")
        try:
            if self._call() is not None:
                raise OomcError(
                    f"{what} from within a call of the step (in a hook or a signal handler, say); that call must end "
                    "first, if need be by an exception"
                )
            call = _Call()
            self._call = weakref.ref(call)
            try:
                yield
            finally:
                del call
        finally:
            self._alone.release()

    def _edits_under_way(self) -> None:
        assert self._edits is not None
        self._edits.remember(under_way=True)

    def _check_hooks(self) -> None:
        """Warn of hooks that have come since the model was compiled: its modules are not called."""
        before, self._hooks = self._hooks, _hooks_of(self.model)
        if self._hooks > before:
            warnings.warn(
                f"{self._hooks - before} hooks were registered on the model's modules since it was compiled; a step "
                "does not run them. Register them before oomc.compile",
                stacklevel=5,
            )

    def _check_mode(self) -> None:
        """Warn once if the model is in another mode than when it was traced, where that can make a difference."""
        (trace,) = self._compiler.traces.values()
        if self.model.training == trace.training or self._warned or not (trace.drops or self.model.training):
            return
        self._warned = True
        was, now = ("train()", "eval()") if trace.training else ("eval()", "train()")
        warnings.warn(
            f"the model was in {was} mode when the step was compiled, and is in {now} mode now: the step goes on "
            f"{'with' if trace.training else 'without'} dropout. Call model.{now} before oomc.compile for the other",
            stacklevel=4,
        )

    def _hypers(self) -> list[Any]:
        if check_groups(self.optimizer) != self._group_sizes:
            raise OomcError(
                "the optimizer's parameter groups hold other parameters than when it was given to oomc.compile; the "
                "step trains those of then. Make a new optimizer of all of them, and compile again"
            )
        return [self._rule.hyper(group) for group in self.optimizer.param_groups]

    def _finish(self, counts: StepCounts) -> None:
        """Count a step whose updates are under way."""
        private.mark_stepped(self.optimizer)
        self._unchecked.append(counts)
        self._steps += 1

    def _raise_if_asked(self, counts: StepCounts, kept: bool) -> None:
        if kept and self._options.on_nonfinite == "raise":
            counts.decided.wait()
            if "not finite" in counts.skipped:
                self._unchecked.remove(counts)
                self._skipped += 1
                raise OomcError(
                    f"step {self._steps}: {counts.skipped}; nothing was updated, and the next step works as usual"
                )

    def _check_counts(self, final: bool = False) -> None:
        """Warn of gradients that were not finite; a step is looked at until the one after the next begins.

        With `final`, all updates are done, and the last step's counts are what they will be.
        """
        left, messages = [], []
        for index, counts in enumerate(self._unchecked):
            if counts.skipped:
                self._skipped += 1
            if "not finite" in counts.skipped:
                messages.append(f"{counts.skipped}: nothing was updated in this step")
            elif counts.nonfinite:
                messages.append(
                    f"{counts.nonfinite} elements of a gradient were not finite, and were applied as in eager PyTorch; "
                    'oomc.compile(on_nonfinite="skip") leaves such steps out'
                )
            elif not final and not counts.skipped and index == len(self._unchecked) - 1:
                left.append(counts)
        self._unchecked = left  # before a warning that may be an error
        for message in messages:
            warnings.warn(message, stacklevel=5)

    def _refuse_broken(self) -> None:
        self._refuse_closed()
        if self._broken:
            raise OomcError(
                "an earlier step failed after it had updated some of the parameters and not others; go back to a "
                "checkpoint with step.load(directory)"
            )

    def _refuse_closed(self) -> None:
        if self._closed:
            raise OomcError("the step is closed, and its optimizer's state is gone; compile the model again")

    def gradients(self, names: str | Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """The gradients accumulated since the last update, as fp32 copies on the host by parameter name.

        With `names`, those of these parameters only: all of them take 4 bytes a parameter of the model.

        Each micro-batch's gradient is multiplied by its number of valid labels, where the loss shows it: this is the
        gradient of the summed loss of the window.

        Raises:
            OomcError: a name is not that of a parameter that is trained.
        """
        self.synchronize()
        places = {name: slab for slab in self._state.slabs for name in slab.steps}
        wanted = list(places if names is None else (names,) if isinstance(names, str) else names)
        unknown = [name for name in wanted if name not in places]
        if unknown:
            raise OomcError(f"the step trains no parameter of the name {', '.join(map(repr, unknown))}")
        kept = {name: places[name].kept_gradient(name) for name in wanted}
        return {name: gradient for name, gradient in kept.items() if gradient is not None}

    def _held(self, peaks: list[int]) -> int:
        """Most bytes of the step's own tensors since the last call; the whole peak until now is added to `peaks`."""
        peaks.append(self._device_peak())
        if self._meter is not None:
            self._meter.reset_peak()
            return peaks[-1]
        most = torch.cuda.max_memory_allocated(self._options.device)
        torch.cuda.reset_peak_memory_stats(self._options.device)
        return most

    def _device_peak(self) -> int:
        if self._meter is not None:
            return self._meter.peak
        return cuda_usage(self._options.device).measured

    def synchronize(self) -> None:
        """Block until all updates are done and the model's weights are current; from then on they may be written to.

        Raises:
            OomcError: a parameter was written to while updates may have been under way.
        """
        if self._closed:
            return
        if self._runtime is not None:
            try:
                self._runtime.synchronize()
                self._runtime.retire_all()
            except RuntimeError:
                self._broken = True  # an update has failed
                raise
        if self._edits is not None:
            self._edits.settle()
        self._check_counts(final=True)

    @_alone("evaluate()")
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own output for these arguments, in evaluation mode and without gradients.

        On CUDA the weights pass through the device block by block. `model(...)` and `model.generate(...)` do the same
        under `torch.no_grad()`, in the mode that the model is in.

        Raises:
            OomcError: nothing is compiled yet.
        """
        self._ready("evaluate")
        self._take_edits()
        return evaluate(self.model, args, kwargs)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @_alone("save()")
    def save(self, directory: str | os.PathLike[str], extra: Any = None, *, asynchronous: bool = False) -> Save:
        """Write a checkpoint: the weights as Hugging Face safetensors, and the exact state beside them.

        Host memory for one block is taken meanwhile. The directory appears whole or not at all; one that is there is
        replaced, and survives until then. `transformers` and `safetensors` load the weights without this package.

        Args:
            directory: where.
            extra: what else `load` shall give back (`scheduler.state_dict()`, a loader's position): tensors, numbers,
                strings, and dicts, lists and tuples of these.
            asynchronous: write while training goes on; a block's next update waits until the block is copied. Until
                `wait()` returns, write to parameters only through `load_state_dict`, which waits.

        Returns:
            A handle with `wait()` and `done`.

        Raises:
            CheckpointError: this save, or an earlier asynchronous one, failed.
            OomcError: nothing is compiled yet, or accumulated gradients wait for `update()`.
        """
        self._ready("save")
        if self._window:
            raise OomcError("save() while accumulated gradients wait, which no checkpoint holds; call update() first")
        self._take_edits()
        assert self._runtime is not None
        progress = {"steps": self._steps, "draws": self._runtime.steps, "seed": self._runtime.seed}
        return self._checkpoints.save(directory, progress, extra, asynchronous=asynchronous)

    @_alone("load()")
    def load(self, directory: str | os.PathLike[str]) -> Any:
        """Go back to a checkpoint: all of the state, hyperparameters and random generators, bit for bit.

        It may have been saved under another plan, budget or device. A step that a failure has broken works again.
        Accumulated gradients are dropped.

        Returns:
            What was handed to `save` as `extra`.

        Raises:
            CheckpointError: there is none, it is damaged, or of another model or optimizer; nothing has changed.
            OomcError: nothing is compiled yet.
        """
        self._refuse_closed()
        if self._runtime is None or self._current is None:
            raise OomcError("load() before anything is compiled; give oomc.compile an example")
        with self._checkpoints.open(directory) as checkpoint:
            broken, self._broken = self._broken, True
            if not broken:
                try:
                    self._runtime.drain()
                    self._runtime.retire_all()
                except RuntimeError:  # an update has failed, and nobody has asked for it yet
                    broken = True
            if broken:
                self._restart()
            assert self._runtime is not None and self._edits is not None
            self._runtime.drop_kept()
            self._window, self._unchecked = [], []
            loaded = checkpoint.restore()
            self._steps = loaded.progress["steps"]
            self._runtime.steps, self._runtime.seed = loaded.progress["draws"], loaded.progress["seed"]
            self._edits.remember(under_way=False)
            self._broken = False
        return loaded.extra

    def _restart(self) -> None:
        """New lanes and workers in place of those that a failure has stopped."""
        assert self._runtime is not None and self._current is not None and self._ender is not None
        self._ender.detach()
        self._runtime.close(with_slabs=False)
        for slab in self._state.slabs:
            slab.forget_pending()
        self._state.bind()
        context: AbstractContextManager[Any] = self._meter or nullcontext()
        with context:
            self._start(self._current.program)

    def _ready(self, what: str) -> None:
        self._refuse_broken()
        if self._runtime is None:
            raise OomcError(f"{what}() before anything is compiled; call the step, or give oomc.compile an example")

    @_alone("close()")
    def close(self) -> None:
        """Finish updates, and give the device memory, the threads and the optimizer state back.

        Once is enough; after an interrupt, a second call gives back what the first one has not.
        """
        closed, self._closed = self._closed, True
        if self._runtime is None or self._ended:
            return
        try:
            if not closed:
                self._checkpoints.settle()
                if not self._broken:
                    self._runtime.synchronize()
                    self._check_counts(final=True)
        finally:
            try:
                _close(self._runtime)
            finally:  # after an interrupt too, the model can be compiled again
                if self._attachment is not None:
                    self._attachment.remove()
                for parameter in self.model.parameters():
                    if parameter in _OWNERS and _OWNERS[parameter]() is self:
                        del _OWNERS[parameter]
                empty_cache(self._options.device)
        self._ended = True

    def __reduce__(self) -> Any:
        raise TypeError(
            "a step cannot be copied or pickled: it holds threads, pinned memory and the one copy of the optimizer's "
            "state; step.save(directory) writes that, and load() of another step of the same model reads it"
        )

    # -- looking --------------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> dict[str, Any]:
        """Figures of the last step.

        loss, tokens, valid_tokens (labels that count; None if unknown), tokens_per_s, step_s (host seconds of the call,
        updates excluded), grad_norm (before clipping; None where it was not asked for), skipped (steps that updated
        nothing), stall_s (host seconds blocked by weights that were not updated yet, by gradients that had not left,
        and by values on their way to the host or back, as a dict), device_peak and device_projected (bytes), host_peak
        (bytes beyond what the process held before compiling), host_value_bytes (planned for values on the host),
        h2d_bytes and d2h_bytes (weights, values and gradients), state_bytes (moved by updates on the device), nonfinite
        (gradient elements), steps, traces, replans (after a step took more of the device than was projected), plans,
        compilations. Reading them waits for the gradient norm.
        """
        traces = self._compiler.traces
        if self._current is None or not self._last:
            return {"steps": 0, "traces": len(traces)}
        counts, seconds = self._last["counts"], self._last["step_s"]
        updated: StepCounts = self._last.get("update", counts)
        if updated is not counts or self._last["decides"]:
            updated.decided.wait()
        if self._last["counts_labels"]:
            counts.counted.wait()
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
            "host_value_bytes": self.plan.host_value_bytes,
            "h2d_bytes": counts.h2d_bytes,
            "d2h_bytes": counts.d2h_bytes,
            "state_bytes": updated.state_bytes,
            "nonfinite": updated.nonfinite,
            "steps": self._steps,
            "traces": len(traces),
            "replans": self._guard.replans,
            "plans": sum(len(t.plans) for t in traces.values()),
            "compilations": sum(len(t.bare.compiled) for t in traces.values()),
        }

    @property
    def projected(self) -> int:
        """The projected device peak of the current plan, in bytes."""
        assert self._current is not None, "nothing is compiled yet"
        return self._compiler.in_all(self._current.projection.held) - self._compiler.spare

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

    def record(self) -> None:
        """Record when each copy, computation, wait and update of the next step runs, for the files of `report()`.

        Only that step (or micro-batch; `update()` is no part of it) is slowed down, and waits for its updates at its
        end. Best asked for once a few steps have run.
        """
        self._refuse_closed()
        self._recording = True

    def report(self, stage: str | None = None) -> Report:
        """What was planned and measured; with `stage`, the graph after that pass (or `capture`) as text.

        The plan's step is simulated on this machine for it, once. A stage is printed by tracing again on fake tensors,
        which takes as long as compiling did.
        """
        if self._current is None:
            raise OomcError("nothing is compiled yet: call the step, or give compile an example")
        if stage is not None:
            return Report.of_stage(self._print_stage(stage), stage)
        needed = self._state.host_needed(self._current.program, self.plan.resident)
        known = self._recorded
        return Report.of_step(
            self._current.program, self._current.projection, needed, self.metrics, self._options,
            self._projected_time(), known[1] if known is not None and known[0] is self._current else None,
            self._why(), self._current.tried,
        )  # fmt: skip

    def _why(self) -> Explanation | None:
        """Why the current plan is as it is, sought once."""
        scheduled = self._current
        assert scheduled is not None
        if scheduled.explain is None:
            return None
        if self._explained is None or self._explained[0] is not scheduled:
            self._explained = scheduled, scheduled.explain()
        return self._explained[1]

    def _projected_time(self) -> Rates:
        """The current plan's step, simulated on this machine."""
        scheduled, own = self._current, machine.current(self._options.device)
        assert scheduled is not None
        if self._rates is None or self._rates[0] is not scheduled or self._rates[1].machine != own:
            costs = Costs(scheduled.program, own, self._options.backend, self._compiler.factors)
            line = simulate(
                scheduled.program, costs.of_step(scheduled.program), self._state.size_updates(scheduled.bare)
            )
            self._rates = scheduled, Rates(own, line, self._compiler.factors.describe())
        return self._rates[1]

    def _print_stage(self, stage: str) -> str:
        from oomc.printer import print_program

        choose = pipeline.chosen(self.plan)
        names = ["capture", *(p.name for p in (*pipeline.MODEL_PASSES, *pipeline.step_passes(choose))), "lower"]
        if self.plan.groups > 1:
            names.insert(names.index("partition_worksets"), "split_experts")
        if stage not in names:
            raise ValueError(f"no stage is called {stage!r}; there are {', '.join(names)}")
        texts: dict[str, str] = {}

        def observe(name: str, program: Program) -> None:
            if name == stage:
                texts[name] = print_program(program)

        (trace,) = self._compiler.traces.values()
        self.synchronize()
        if stage in {p.name for p in pipeline.step_passes(choose)}:
            assert self._current is not None
            pipeline.with_plan(self._current.bare, choose, observe)
        elif stage == "lower":
            texts[stage] = self.graph.code
        else:
            bare = self._compiler.capture(trace.batch, observe)
            if self.plan.groups > 1:
                self._compiler.split(bare, self.plan.groups, observe)
        return texts[stage]


def _close(runtime: StepRuntime) -> None:
    """Close it, whatever thread the garbage collector happens to run in, and in the middle of what.

    The thread may be one that closing waits for, or one that is tracing: then the few tensors that closing makes would
    be traced, or fake.
    """
    lift_limit(runtime.device)
    if not is_worker() and not private.in_a_mode():
        runtime.close()
        return
    closing = threading.Thread(target=runtime.close, name="close-oomc")
    try:
        closing.start()
    except RuntimeError:  # Python is ending, and takes everything with it
        return
    if not is_worker():
        closing.join()


def _refuse_optimizer_step(*_: Any, **__: Any) -> None:
    raise OomcError(
        "the compiled step updates the parameters itself: call step(**batch), or step.forward_backward(**batch) and "
        "step.update(); optimizer.step() would make a second, unknown update"
    )


def _already_done(*_: Any, **__: Any) -> None:
    raise OomcError("the step has run backward and update already; loss.backward() has nothing left to do")


def _hooks_of(model: torch.nn.Module) -> int:
    """How many hooks of calls there are on a model's modules."""
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        + len(module._backward_pre_hooks) for module in model.modules()
    )  # fmt: skip
