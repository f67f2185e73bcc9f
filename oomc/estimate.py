"""Planning without a GPU and without weights: will a model fit, and how fast will its step be?

    estimate = oomc.plan("Qwen3-30B-A3B", oomc.Budget("24GiB", "420GiB"), batch=16, seq=4096, machine="H200")
    print(estimate)                       # what lives where, and what limits the step
    estimate.step_s, estimate.device_peak

The model is built on the meta device, captured on fake tensors, and taken through the same passes, planner and
projection as by `oomc.compile`; host bytes are counted by the same code, and the scheduled step is simulated with the
machine's rates. Only a few layers are traced where layers repeat (oomc.repeat).

What differs from a compilation on the machine itself:

- Fake tensors are the CPU's also where the plan is for a GPU, since a torch without CUDA cannot trace those of a GPU.
  Kernels are chosen as on the GPU (oomc.target), and its allocator's and libraries' memory counts as there. A model
  whose own code asks for the device's type is planned as its code is for a CPU.
- The CUDA context is taken to be CUDA_CONTEXT bytes, where a compilation looks.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from oomc import machine as machines
from oomc import meta, pipeline, private, regenerate, repeat, target
from oomc.capture import Batch, LossFn, capture
from oomc.compiler import Compiler, Options, Scheduled
from oomc.cost import Costs
from oomc.errors import CaptureError, UnsupportedError
from oomc.explain import Explanation
from oomc.machine import Machine
from oomc.optimizers import StateWidth, groups_of, rule_of
from oomc.pipeline import Observer
from oomc.plan import Budget, Plan
from oomc.planner import Planner
from oomc.program import Program
from oomc.report import Report, describe_model, device_rows, device_tier, host_rows, host_tier, size_table
from oomc.report_figures import Rates, figures
from oomc.simulate import Projection
from oomc.state import State
from oomc.timeline import Timeline, simulate

CUDA_CONTEXT = 688 << 20
"""Device bytes of a CUDA context with torch's kernels."""
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


@dataclass(frozen=True)
class Estimate:
    """A plan that fits, and what is expected of it.

    Attributes:
        model: its name, or that of its class.
        machine: what it was planned for.
        budget: device and host bytes that were allowed.
        sizes: batch and sequence of a step.
        plan: all decisions.
        summary: the model's parameters, blocks and forms in words.
        device, host: rows of name, note and bytes; those of the device at the step's peak.
        device_peak: projected device bytes of the process.
        host_bytes: of the step.
        timeline: the steady step.
    """

    model: str
    machine: Machine
    budget: Budget
    sizes: tuple[int, int]
    plan: Plan
    summary: str
    device: tuple[tuple[str, str, int], ...]
    host: tuple[tuple[str, str, int], ...]
    device_peak: int
    host_bytes: int
    timeline: Timeline = field(repr=False)
    _explain: Callable[[], Explanation] | None = field(repr=False)
    _made: tuple[Program, Projection, dict[str, int]] = field(repr=False)

    @cached_property
    def why(self) -> Explanation | None:
        """Why the plan is as it is, where the planner made it."""
        return self._explain() if self._explain is not None else None

    @property
    def fits(self) -> bool:
        """Whether both tiers are within the budget."""
        assert self.budget.device is not None and self.budget.host is not None
        return self.device_peak <= self.budget.device and self.host_bytes <= self.budget.host

    @property
    def step_s(self) -> float:
        """Seconds of a steady step."""
        return self.timeline.step_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens of a step over its time."""
        return self.sizes[0] * self.sizes[1] / self.step_s

    def report(self) -> Report:
        """A report that can be saved as .txt, .json, .html or .trace.json."""
        program, projection, host = self._made
        rows = device_rows(program, projection)
        tiers = {
            "device": device_tier(rows, projection.peak, self.device_peak, self.budget.device),
            "host": host_tier(host, list(self.host), self.plan.host_value_bytes, self.budget.host),
        }
        title = f"{self.model} on {self.machine.name}"
        data = {"text": str(self), "title": title, "plan": self.plan.describe(), "figures": self.as_dict()}
        return Report(str(self), data | figures(program, projection, Rates(self.machine, self.timeline), tiers,
                                                    why=self.why))  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON: bytes and seconds."""
        line = self.timeline
        return {
            "fits": self.fits,
            "model": self.model,
            "machine": self.machine.name,
            "rates": self.machine.source,
            "batch": self.sizes[0],
            "seq": self.sizes[1],
            "budget": {"device": self.budget.device, "host": self.budget.host},
            "plan": self.plan.describe(),
            "resident": list(self.plan.resident),
            "device": {name: count for name, _, count in self.device} | {"projected": self.device_peak},
            "host": {name: count for name, _, count in self.host},
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "bound": line.bound,
            "limits": line.limits,
            "busy": line.busy,
            "exposed": line.exposed,
            "moved": line.moved,
        }

    def __str__(self) -> str:
        assert self.budget.device is not None and self.budget.host is not None
        device = [*self.device, ("projected peak", "", self.device_peak), ("allowed", "", self.budget.device)]
        tokens = f"{self.sizes[0]} x {self.sizes[1]} tokens a step, {self.tokens_per_s:,.0f} tokens/s"
        again = regenerate.describe(self._made[0], self.timeline)
        sections = {
            f"{self.model} on {self.machine.name}": f"{self.summary}\nrates: {self.machine.source}",
            "plan": "\n".join(filter(None, (self.plan.describe(), str(self.why or ""), again))),
            "device memory": size_table(device),
            "host memory": size_table([*self.host, ("allowed", "", self.budget.host)]),
            "time": f"{tokens}\n{self.timeline.describe()}",
        }
        return "\n\n".join(f"{title}\n{'-' * len(title)}\n{body}" for title, body in sections.items())


class _Compiler(Compiler):
    """The compiler of `oomc.compile` for a machine that is elsewhere."""

    def __init__(
        self, model: nn.Module, trained: Mapping[str, int], options: Options, machine: Machine, backend: str
    ) -> None:
        super().__init__(model, trained, options)
        self.machine, self.backend = machine, backend

    def planner(self) -> Planner:
        return Planner(self.machine, self.backend)

    def host_memory(self) -> int:
        return self.machine.host_memory

    def capture(self, batch: Batch, observe: Observer | None = None) -> Program:
        program = self._repeated(batch) or self._forward(batch)
        self.train_only(program)
        program.notes["buffers"] = dict(self.model.named_buffers())
        return pipeline.run_passes(program, pipeline.MODEL_PASSES[pipeline.CUT :], observe, self.options.verify)

    def _forward(self, batch: Batch) -> Program:
        program = capture(self.model, batch, loss_fn=self.options.loss_fn, device="cpu")
        return pipeline.run_passes(program, pipeline.MODEL_PASSES[: pipeline.CUT], verify=self.options.verify)

    def _repeated(self, batch: Batch) -> Program | None:
        """The program from a few layers, where they show all that the others are."""
        layers = repeat.find(self.model)
        if layers is None:
            return None
        try:
            with repeat.shortened(self.model, layers):
                program = self._forward(batch)
        except CaptureError:  # code that counts its layers; or a fault that tracing all of them will show as it is
            return None
        return program if repeat.repeat(program, layers) else None

    def device_memory(self) -> int:
        return self.machine.device_memory

    @cached_property
    def outside(self) -> int:
        return CUDA_CONTEXT


_COLLECTING = threading.Lock()
_THRESHOLDS: list[tuple[int, int, int]] = []
"""As each of those who estimate now found it."""


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    """Let Python look through all objects of the process for garbage a thirtieth as often.

    The graphs of a large model are a million objects that stay: looking through them took a sixth of the time. Where
    several threads estimate, the first one in sets the threshold and the last one out puts it back.
    """
    with _COLLECTING:
        _THRESHOLDS.append(gc.get_threshold())
        if len(_THRESHOLDS) == 1:
            gc.set_threshold(*_THRESHOLDS[0][:2], 30 * _THRESHOLDS[0][2])
    try:
        yield
    finally:
        with _COLLECTING:
            before = _THRESHOLDS[0] if len(_THRESHOLDS) == 1 else None
            _THRESHOLDS.pop()
            if before is not None:
                gc.set_threshold(*before)


class Estimator:
    """Plans of one model for one machine: traced once, for any budget, batch and sequence.

    Args: as for `oomc.plan`.

    Raises:
        ValueError, UnsupportedError, CaptureError: as `oomc.plan`.
    """

    def __init__(
        self,
        model_or_config: Any,
        *,
        machine: Machine | str | None = None,
        optimizer: torch.optim.Optimizer | str = "adamw",
        state: StateWidth = "fp32",
        max_grad_norm: float | None = None,
        updates: Literal["host", "device"] | None = None,
        backend: str = "eager",
        dtype: torch.dtype | str | None = None,
        example: Mapping[str, Any] | None = None,
        loss_fn: LossFn | None = None,
        expert_groups: int | None = None,
        verify: bool = False,
    ) -> None:
        self.model, self.name = build(model_or_config, dtype)
        self.machine = machine if isinstance(machine, Machine) else find_machine(machine)
        device = torch.device("cpu" if self.machine.on_host else "cuda")
        made = _optimizer(optimizer, self.model) if isinstance(optimizer, str) else optimizer
        self._rule = rule_of(made, state)
        self._options = Options(
            Budget(), device, loss_fn=loss_fn, max_grad_norm=max_grad_norm, state=state, where=updates or "both",
            backend="eager", verify=verify, expert_groups=expert_groups,
        )  # fmt: skip
        self._compiler = _Compiler(
            self.model, groups_of(made, self.model), self._options, self.machine, backend
        )  # fmt: skip
        self._target = None if self.machine.on_host else self.machine.capability
        ids = torch.empty((2, 16), dtype=torch.int64, device="meta")
        with target.planning_for(self._target), _seldom_collecting():
            batch = Batch.bind(self.model, (), example or {"input_ids": ids, "labels": ids})
            self._trace = self._compiler.trace(batch)
        self._backend = backend
        self._costs = {id(self._trace.bare): Costs(self._trace.bare, self.machine, backend)}

    def estimate(self, budget: Budget | None, batch: int, seq: int) -> Estimate:
        """The plan for a batch of `batch` sequences of `seq` tokens.

        Raises:
            BudgetError: there is none within the budget; names the smallest device or host budget that works.
            UnsupportedError: the model's code does not allow these sizes.
        """
        budget = budget or Budget()
        self._compiler.options = replace(self._options, budget=budget)
        allowed = Budget(budget.device or self.machine.device_memory, budget.host or self.machine.host_memory)
        state = State(
            self.model, self._options.device, allowed.host, self._rule.arrays, self._options.where, self._options.keep
        )
        state.workers = self.machine.cores
        wanted = self._batch(batch, seq)
        self._compiler.traces[wanted.key()] = self._trace

        def attempt() -> Scheduled:
            bare = self._compiler.trace(wanted).bare
            resident = self._compiler.may_be_resident(bare)
            return self._compiler.plan(wanted, state.size_updates(bare), resident, False, False)

        with target.planning_for(self._target), _seldom_collecting():
            scheduled = self._compiler.fitting(wanted, attempt)
            program, projection = scheduled.program, scheduled.projection
            plan = program.plan
            assert plan is not None
            state.check_host(program, plan.resident)
            cut = scheduled.bare
            costs = self._costs.setdefault(id(cut), Costs(cut, self.machine, self._backend))
            line = simulate(program, costs.of_step(program), state.size_updates(cut))
        host = state.host_needed(program, plan.resident)
        peak = self._compiler.in_all(projection.held)
        device = device_rows(program, projection)
        if peak > projection.peak:
            device.append(("CUDA's own, and what its allocator reserves", "", peak - projection.peak))
        return Estimate(
            self.name, self.machine, allowed, (batch, seq), plan, describe_model(program), tuple(device),
            tuple(host_rows(host, program)), peak, sum(host.values()), line, scheduled.explain,
            (program, projection, host),
        )  # fmt: skip

    def _batch(self, batch: int, seq: int) -> Batch:
        """A batch like the traced one, of other sizes."""
        symbols = self._trace.bare.notes["symbols"]
        sizes = {symbols.batch: batch, symbols.sequence: seq}
        specs = zip(self._trace.bare.forward.graph.find_nodes(op="placeholder"), self._trace.bare.inputs, strict=True)
        inputs = {s.target: meta.value(n) for n, s in specs if s.kind == "input"}
        tensors = {
            name: torch.empty([sizes.get(private.expression(s), s) for s in val.shape], dtype=val.dtype, device="meta")
            for name, val in inputs.items()
        }
        return replace(self._trace.batch, tensors=tensors)


def plan(model_or_config: Any, budget: Budget | None = None, *, batch: int, seq: int, **options: Any) -> Estimate:
    """What a model's training step would take on a machine: where everything lives, and how long a step is.

    Nothing is downloaded, and no weights are needed: the model may be on the meta device.

    Args:
        model_or_config: a module, a transformers config, the path of a config.json or of a directory with one, or the
            name of a published model (oomc.models.published).
        budget: device and host memory that the step may take; None for all that the machine has.
        batch: sequences in a step.
        seq: tokens of each.
        options: keywords of `Estimator`: machine (a `Machine`, a name such as "H200" or "RTX 4090", or a file that
            `Machine.save` wrote; None for this one), optimizer ("adamw", "sgd", or one of torch's made from the
            model's parameters), state, max_grad_norm, updates, loss_fn and expert_groups (as for `oomc.compile`),
            backend (whose kernels are timed), dtype (of a model that is built here; None for its config's), example
            (keyword arguments of one call, where these are not input_ids and labels), verify.

    Returns:
        An `Estimate`: `str()` for the tables, `step_s`, `as_dict()`, and `report()`, which is saved as a page or trace.

    Raises:
        BudgetError: no plan is within the budget; names the smallest device or host budget that works.
        CaptureError: the model cannot be traced.
        UnsupportedError: the optimizer, an option, an op or the sizes are not supported.
        ValueError: a machine or published model that is not known.
        ImportError: transformers is not installed, and a config is to be built.
    """
    return Estimator(model_or_config, **options).estimate(budget, batch, seq)


def find_machine(name: str | None) -> Machine:
    """A machine by name (oomc.machine.DEFAULTS) or by the path of one that was saved; None for this one.

    Raises:
        ValueError: there is none.
    """
    if name is None:
        return machines.current("cuda" if torch.cuda.is_available() else "cpu")
    return Machine.load(name) if name.endswith(".json") and Path(name).exists() else machines.default(name)


def build(model_or_config: Any, dtype: torch.dtype | str | None = None) -> tuple[nn.Module, str]:
    """A model that takes no memory, and its name; a module is taken as it is.

    A config's quantization is left out: what is trained is bf16 or fp32.

    Raises:
        ValueError: a text that is neither a path nor a published model's name.
        UnsupportedError: the model cannot be built without memory.
        ImportError: transformers is not installed.
    """
    if isinstance(model_or_config, nn.Module):
        return model_or_config, type(model_or_config).__name__
    from oomc.load import load

    config, name = model_or_config, ""
    if isinstance(model_or_config, str | Path):
        config, name = _config(model_or_config)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    model = load(config, dtype=dtype)
    return model, name or config.name_or_path or type(model).__name__


def _config(text: str | Path) -> tuple[Any, str]:
    path = Path(text)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        import transformers

        return transformers.AutoConfig.from_pretrained(file, local_files_only=True), str(text)
    from oomc.models import published

    if published.find(str(text)) is None:
        raise ValueError(
            f"{str(text)!r} is neither a config.json, a directory with one, nor a published model; there are "
            f"{', '.join(published.MODELS)}"
        )
    return published.config(str(text)), str(published.find(str(text)))


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name not in OPTIMIZERS:
        raise UnsupportedError(f"optimizer {name!r} is not known; there are {', '.join(OPTIMIZERS)}")
    made: torch.optim.Optimizer = OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])
    return made
