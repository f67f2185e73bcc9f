"""From a model and a batch to a scheduled step: traces of the model, and plans for batch shapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from oomc import meta, ops, pipeline, private
from oomc.capture import Batch, LossFn, capture
from oomc.cost import Costs, Factors
from oomc.errors import BudgetError, UnsupportedError
from oomc.explain import Explanation
from oomc.limits import device_memory, host_memory
from oomc.machine import cache_path, current
from oomc.optimizers import StateWidth
from oomc.pipeline import Observer
from oomc.plan import Budget, Plan, Updates
from oomc.planner import Cut, Planned, Planner, Request
from oomc.program import Program
from oomc.runtime import low_bit
from oomc.runtime.meter import cuda_usage
from oomc.runtime.updates import Where
from oomc.simulate import Profiler, Projection
from oomc.timing import SECONDS, KnownSeconds, Timing
from oomc.tune import Tuning

CUDA_WORKSPACE = 192 << 20
"""Bytes that the process comes to hold outside of torch's allocator during a step: kernels that are loaded when they
are first used, libraries' own. 80 to 170 MiB were measured."""


LEAST_GROUP = 64 << 20
"""Weight bytes of a layer in each group of its experts: smaller copies are slower, and products of fewer rows too."""
MOST_GROUPS = 64
"""Most groups that are tried: every one is a block that a plan decides about."""
WORTHWHILE = 0.98
"""The share of a step's time that it may take with twice as many groups to be worth them."""


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
    tune: int = 0
    expert_groups: int | None = None
    time_worksets: bool = False

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
        seconds: of a step, as simulated; 0 where the planner did not plan.
        explain: makes the planner's explanation; None where it did not plan.
        tried: the short executions of this plan and its rivals.
        given: by the user.
        steps: that it has run.
    """

    bare: Program
    program: Program
    projection: Projection
    carried: frozenset[str]
    seconds: float = 0.0
    explain: Callable[[], Explanation] | None = None
    tried: Tuning | None = None
    given: bool = False
    steps: int = 0


@dataclass
class Trace:
    """One trace of the model: its bare step graph, and the plans made from it.

    Attributes:
        grouped: the same with the experts of layers in so many groups, or None where none can be; made when asked for.
        training: whether the model was in training mode.
        tuning: the batch shape whose plans are tried on real steps at present, and how that stands.
        untried: the last plan that was made, whose rivals are made when its batch shape comes again.
        given: plans that the user has given, by sizes and whether they accumulate.
        timed: whether its worksets were timed on the device.
    """

    bare: Program
    batch: Batch
    profiler: Profiler
    planner: Planner
    training: bool = True
    plans: dict[tuple[Any, ...], Scheduled] = field(default_factory=dict)
    tuning: tuple[tuple[Any, ...], Tuning] | None = None
    untried: tuple[Scheduled, Planned] | None = None
    given: dict[tuple[Any, ...], Plan] = field(default_factory=dict)
    grouped: dict[int, Trace | None] = field(default_factory=dict)
    timed: bool = False
    _whole: tuple[Program, Profiler] | None = None
    _asked: bool = False

    def in_whole_blocks(self, verify: bool) -> tuple[Program, Profiler] | None:
        """The program whose blocks run whole in chunks of batch rows, if there are such; made when asked for first."""
        if not self._asked:
            self._asked, whole = True, pipeline.in_whole_blocks(self.bare, verify)
            if whole is not None:
                whole.compiled = self.bare.compiled
                self._whole = whole, self.profiler.of(whole)
        return self._whole

    def fresh(self) -> Trace:
        """The same trace without plans."""
        grouped = {groups: trace and trace.fresh() for groups, trace in self.grouped.items()}
        return replace(
            self, plans={}, given={}, tuning=None, untried=None, planner=self.planner.fresh(), grouped=grouped
        )  # fmt: skip

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
        self.factors = Factors()
        self._timing_seconds = SECONDS
        self.spare = 0  # device bytes that plans leave free, since an earlier one took more than was projected
        self.others = 0  # bytes that torch's allocator had given to others than the step on its device before it began

    def trace(self, batch: Batch) -> Trace:
        key = batch.key()
        if key not in self.traces:
            if self.traces:
                raise UnsupportedError(_difference(next(iter(self.traces)), key))
            bare = self.capture(batch)
            trace = Trace(
                bare, batch.shapes_only(), Profiler(bare), self.planner(), self.model.training
            )  # fmt: skip
            wanted = self.options.expert_groups or 1
            self.traces[key] = (wanted > 1 and self._in_groups(trace, wanted)) or trace
        return self.traces[key]

    def _in_groups(self, trace: Trace, groups: int) -> Trace | None:
        """The same trace with the experts of layers in so many groups, if they can be."""
        if groups not in trace.grouped:
            bare = self.split(trace.bare, groups)
            trace.grouped[groups] = None
            if bare is not None:
                bare.compiled = trace.bare.compiled
                trace.grouped[groups] = Trace(
                    bare, trace.batch, trace.profiler.of(bare), self.planner(), trace.training
                )
        return trace.grouped[groups]

    def split(self, bare: Program, groups: int, observe: Observer | None = None) -> Program | None:
        """The program with the experts of layers in so many groups, if they can be."""
        # elements that share a number of 8-bit state are updated together
        align = low_bit.ELEMENTS if self.options.state == "8bit" else 1
        return pipeline.in_groups(bare, groups, align, observe, self.options.verify)

    def fitting(self, batch: Batch, attempt: Callable[[], Scheduled]) -> Scheduled:
        """What `attempt` makes of the batch's trace, or of the same trace with experts in groups: in as few as fit the
        device, and in more where that makes the step faster. That trace is the batch's from then on.

        Raises:
            BudgetError: none fits; names the smallest device budget that works for any.
        """
        trace, key = self.trace(batch), batch.key()
        most = most_groups(trace.bare) if self.options.expert_groups is None else 1
        if most == 1:
            return attempt()
        found: tuple[Trace, Scheduled] | None = None
        refused: list[BudgetError] = []

        def tried(groups: int) -> Scheduled | None:
            """The plan in so many groups; None where that does not fit."""
            self.traces[key] = self._in_groups(trace, groups) or trace if groups > 1 else trace
            try:
                return attempt()
            except BudgetError as error:
                if error.smallest_device is None:
                    raise
                refused.append(error.with_traceback(None))  # whose frames would hold the step until it is collected
                return None

        def needed(last: int) -> int:
            """The device budget that was named so many refusals ago."""
            return refused[-last].smallest_device or 0

        # where a block's weights and gradients alone do not fit, nothing is to be found with its experts in one
        whole = _largest(trace.bare)
        first = groups = 1 if whole <= self.device_allowed() or self._in_groups(trace, 2) is None else 2
        try:
            while groups <= most and (groups == 1 or self._in_groups(trace, groups)):
                scheduled, enough = tried(groups), 2 * groups
                if scheduled is None:
                    if found is not None or (len(refused) > 1 and needed(1) > needed(2)):
                        break  # it is no longer the weights that are too large
                    # twice as many groups take half at best; the most are tried otherwise, to name what works
                    while enough < most and needed(1) * groups / enough > self.device_budget():
                        enough *= 2
                elif found is not None and scheduled.seconds > WORTHWHILE * found[1].seconds:
                    break
                else:
                    found = self.traces[key], scheduled
                    if _overlaps(scheduled):
                        break
                groups = enough
            if found is None and first > 1 and min(e.smallest_device or 0 for e in refused) > self.in_all(whole):
                tried(1)  # it does not fit, but might with less than what was named
        finally:
            self.traces[key] = trace if found is None else found[0]
        if found is None:
            raise min(refused, key=lambda error: error.smallest_device or 0)
        return found[1]

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
        trace = self.trace(batch)
        sizes = self.sizes(trace.bare, batch)
        shape = sizes, accumulate, updates.accumulates
        if shape[:2] in trace.given:
            return self._given(trace, batch, trace.given[shape[:2]], updates)
        tried = self._tried(trace, shape)
        if tried is not None:
            return tried
        known = trace.plans.get((*shape, resident)) if fixed else None
        if known is None:
            return self._choose(trace, sizes, updates, resident, fixed, accumulate)
        untried, trace.untried = trace.untried, None
        if untried is not None and untried[0] is known:  # the shape comes again, so that it pays to try others
            rivals = [self._lowered(trace, each) for each in untried[1].rivals(self.options.tune - 1)]
            if rivals:
                trace.tuning = shape, Tuning([known, *rivals])
        return known

    def _tried(self, trace: Trace, shape: tuple[Any, ...]) -> Scheduled | None:
        """The plan whose turn it is while a few are tried on batches of this shape; the best of them at the end."""
        if trace.tuning is None:
            return None
        tried_shape, tuning = trace.tuning
        current = tuning.current
        if tried_shape == shape and current is not None:
            return current
        trace.tuning, best = None, tuning.fastest  # also where batches of another shape come in between
        best.tried = tuning
        _remember(trace, tried_shape, best)
        return best if tried_shape == shape else None

    def took(self, scheduled: Scheduled, seconds: float) -> None:
        """Note how long a step has taken, where plans are tried."""
        for trace in self.traces.values():
            if trace.tuning is not None:
                trace.tuning[1].took(scheduled, seconds)

    @property
    def tunes(self) -> bool:
        """Whether plans are being tried, so that steps are timed."""
        return any(trace.tuning is not None for trace in self.traces.values())

    def retreat(self, nbytes: int) -> None:
        """Plan with so many device bytes less from now on; plans that the user has given stay."""
        self.spare += nbytes
        for trace in self.traces.values():
            trace.plans = {key: plan for key, plan in trace.plans.items() if plan.given}
            trace.tuning = trace.untried = None

    def drop_rival(self, scheduled: Scheduled) -> bool:
        """No longer try a plan; False if it is the one that was planned, or nothing is tried."""
        return any(trace.tuning is not None and trace.tuning[1].drop(scheduled) for trace in self.traces.values())

    def give(self, batch: Batch, plan: Plan, updates: Updates, check: Callable[[Scheduled], None]) -> None:
        """Let a plan that the user has made be that of batches like this one, if `check` does not raise.

        Raises:
            ValueError, BudgetError: as `Planner.given`.
        """
        trace = self.trace(batch)
        before = dict(trace.plans)
        for accumulates in (False, True):
            trace.plans.pop(("given", plan.sizes, plan.accumulate, accumulates), None)
        try:
            check(self._given(trace, batch, plan, updates))
        except BaseException:
            trace.plans = before
            raise
        trace.given[plan.sizes, plan.accumulate] = plan
        trace.tuning = trace.untried = None

    def _given(self, trace: Trace, batch: Batch, plan: Plan, updates: Updates) -> Scheduled:
        sizes = self.sizes(trace.bare, batch)
        if sizes != plan.sizes:
            raise ValueError(f"the plan is for a batch of {plan.sizes}, and this one is of {sizes}")
        key = "given", sizes, plan.accumulate, updates.accumulates
        if key not in trace.plans:
            allowed = self.device_allowed() + self.spare
            request = self._request(sizes, allowed, updates, frozenset(), False, plan.accumulate)
            planned = trace.planner.given(trace.cuts(sizes, self.options.verify), request, plan)
            trace.plans[key] = self._lowered(trace, planned)
            trace.plans[key].given = True
        return trace.plans[key]

    def _lowered(self, trace: Trace, planned: Planned) -> Scheduled:
        program = planned.program
        trace.bare.compiled = program.compiled = trace.bare.compiled
        program = pipeline.lower(program, self.options.backend)
        return Scheduled(
            planned.bare, program, planned.projection, pipeline.carried(program), planned.seconds, planned.explain
        )  # fmt: skip

    def _request(
        self, sizes: tuple[int, int], allowed: int, updates: Updates, resident: frozenset[str], fixed: bool,
        accumulate: bool,
    ) -> Request:  # fmt: skip
        options = self.options
        return Request(
            sizes, allowed, options.budget.host or self.host_memory(), options.budget, updates, resident, fixed,
            accumulate, options.chunk_tokens, options.verify, self.in_all, options.device.type == "cuda",
        )  # fmt: skip

    def _choose(
        self, trace: Trace, sizes: tuple[int, int], updates: Updates, resident: frozenset[str], fixed: bool,
        accumulate: bool,
    ) -> Scheduled:  # fmt: skip
        """The plan for a batch size, with what runs it."""
        options = self.options
        allowed = self.device_allowed()
        shape = sizes, accumulate, updates.accumulates
        if options.device.type == "cpu" and options.budget.device is None:
            # its memory is the host's: nothing is gained by a plan for it, and everything is streamed as on a GPU
            program, projection = pipeline.plan_step(
                trace.bare, trace.profiler, sizes, allowed, options.budget, accumulate=accumulate, updates=updates,
                resident=resident, verify=options.verify, chunk_tokens=options.chunk_tokens,
            )  # fmt: skip
            trace.bare.compiled = program.compiled = trace.bare.compiled
            program = pipeline.lower(program, options.backend)
            return _remember(trace, shape, Scheduled(trace.bare, program, projection, pipeline.carried(program)))
        if options.time_worksets and not trace.timed and not fixed:
            self._time_worksets(trace, sizes, allowed)
        request = self._request(sizes, allowed, updates, resident, fixed, accumulate)
        planned = trace.planner.plan(trace.cuts(sizes, options.verify), request)
        best = _remember(trace, shape, self._lowered(trace, planned))
        trace.untried = (best, planned) if options.tune > 1 else None
        return best

    def planner(self) -> Planner:
        """A planner for the machine that the step runs on."""
        return Planner(current(self.options.device), self.options.backend, self.factors)

    def _time_worksets(self, trace: Trace, sizes: tuple[int, int], allowed: int) -> None:
        """Learn how long the trace's graphs take here, before anything else is on the device."""
        device, backend = self.options.device, self.options.backend
        trace.timed = True
        costs = Costs(trace.bare, current(device), backend)
        known = KnownSeconds(cache_path(device).with_suffix(".worksets.json"))
        timing = Timing(trace.bare, trace.profiler, costs, device, backend, allowed, known)
        began = time.perf_counter()
        found = timing.factors(sizes, {key for key, _ in self.factors.timed}, self._timing_seconds)
        self._timing_seconds -= time.perf_counter() - began
        if not self.factors.timed:  # what was planned with it stays comparable when experts come in groups
            self.factors.other = timing.overall(found, sizes)
        self.factors.timed |= found

    def host_memory(self) -> int:
        """Bytes of the host."""
        return host_memory()

    def may_be_resident(self, program: Program) -> frozenset[str]:
        """Slabs that may live on the device.

        None on a stand-in whose memory is the host's, without a budget; elsewhere all but for groups of experts: their
        parameters are one piece of memory, which is on the host or the device.
        """
        if self.options.device.type == "cpu" and self.options.budget.device is None:
            return frozenset()
        return frozenset(slab.name for slab in program.slabs if not slab.whole)

    def in_all(self, held: int) -> int:
        """The device bytes that the process holds with so many of the step's own (`Projection.held`)."""
        beside = self.outside + self.others + CUDA_WORKSPACE if self.options.device.type == "cuda" else 0
        return held + self.spare + beside

    def device_allowed(self) -> int:
        """Device bytes that the step's own may be."""
        return self.device_budget() - self.in_all(0)

    def device_budget(self) -> int:
        """Device bytes that the process may hold."""
        return self.options.budget.device or self.device_memory()

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


def _overlaps(scheduled: Scheduled) -> bool:
    """Whether weights come and gradients go while others compute: smaller groups of experts would change nothing."""
    plan = scheduled.program.plan
    assert plan is not None
    return plan.prefetch > 0 and plan.hold > 0


def most_groups(program: Program) -> int:
    """In how many groups a layer's experts may be: a power of 2 that leaves `LEAST_GROUP` weight bytes to each."""
    sizes = {slab.name: slab.layout.weight_bytes for slab in program.slabs}
    with_experts = [
        block for block in program.blocks if any(n.target is ops.route for w in block.worksets for n in w.nodes)
    ]
    largest = max((sum(sizes[name] for name in block.slabs) for block in with_experts), default=0)
    most = min(MOST_GROUPS, largest // LEAST_GROUP)
    return 1 << (most.bit_length() - 1) if most > 1 else 1


def _largest(program: Program) -> int:
    """Bytes of weights and gradients of the largest block: its backward needs both at once."""
    of = {slab.name: slab.layout.weight_bytes + slab.layout.gradient_bytes(wide=False) for slab in program.slabs}
    return max(sum(of[name] for name in block.slabs) for block in program.blocks)


def _remember(trace: Trace, shape: tuple[Any, ...], scheduled: Scheduled) -> Scheduled:
    """Use a plan for batches of a shape while the same slabs live on the device."""
    assert scheduled.program.plan is not None
    trace.plans[*shape, frozenset(scheduled.program.plan.resident)] = scheduled
    return scheduled


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
