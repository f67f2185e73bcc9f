"""Small plain-PyTorch models, their programs at each stage, and an interpreter that runs a step graph word by word."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from oomc import meta, pipeline, steps
from oomc.capture import Batch, capture
from oomc.fxutil import copy_graph
from oomc.offloadable import kept_values, why_not
from oomc.passes.choose_residency import Candidate, ChooseResidency
from oomc.plan import Budget, Residency
from oomc.program import Program
from oomc.runtime.compute import run_chunks
from oomc.simulate import Profiler

VOCAB, SIZES = 24, (2, 12)
RNG = torch.tensor([7, 3])
TRACES_AS_GOLDEN = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 13)
"""Whether torch decomposes and names as when the golden texts of its own graphs were written."""


class Layer(nn.Module):
    """Attention (without projections of its own), dropout, and top-k experts."""

    def __init__(self, size: int, experts: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(size), nn.Linear(size, 3 * size)
        self.dropout = dropout
        self.router = nn.Linear(size, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, size, size) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x))[:, None].chunk(3, -1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        x = x + F.dropout(a, self.dropout, self.training)
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for expert, up in enumerate(self.up.unbind()):
            y = y + (weights * (chosen == expert)).sum(-1, keepdim=True) * torch.tanh(x @ up)
        return x + y


class TopK(nn.Module):
    """Embedding, layers, norm, head and mean loss."""

    def __init__(self, layers: int = 2, size: int = 8, dropout: float = 0.25, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, size)
        self.layers = nn.ModuleList(Layer(size, 3, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Residual(nn.Module):
    """x + relu(W x)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu()


class Mlp(nn.Module):
    """The smallest model with layers: two residual layers between embedding and head."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, size)
        self.layers = nn.ModuleList(Residual(size) for _ in range(2))
        self.head = nn.Linear(size, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model(kind: str) -> nn.Module:
    """`topk`, `plain` (topk without dropout), `tied` or `mlp`, with fixed random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        if kind == "mlp":
            return Mlp()
        return TopK(dropout=0.25 if kind == "topk" else 0.0, tied=kind == "tied")


def batch(sizes: tuple[int, int] = SIZES) -> dict[str, Tensor]:
    """Token ids and labels, some of which do not count."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCAB, sizes, generator=generator)
    labels = torch.randint(0, VOCAB, sizes, generator=generator)
    labels[:, ::5] = -100
    return {"input_ids": ids, "labels": labels}


def captured(own: nn.Module) -> Program:
    """The forward graph as captured."""
    return capture(own, Batch.bind(own, (), batch()))


@cache
def _captured(kind: str) -> Program:
    return captured(model(kind))


def before_passes(kind: str) -> Program:
    """The program as captured; the graph is a copy, with forms of its own, the symbols in it are shared."""
    program = _captured(kind)
    graph = copy_graph(program.forward.graph)
    forward = fx.GraphModule(program.forward, graph)
    inputs, notes = list(program.inputs), dict(program.notes)
    return replace(program, forward=forward, inputs=inputs, notes=notes, differentiated={})


def after(kind: str, name: str) -> Program:
    """The program after the pass `name` of those that every plan shares, each verified."""
    names = [p.name for p in pipeline.MODEL_PASSES]
    return pipeline.run_passes(before_passes(kind), pipeline.MODEL_PASSES[: names.index(name) + 1], verify=True)


@cache
def _bare(kind: str) -> Program:
    return after(kind, "assemble")


def bare(kind: str) -> Program:
    """The program with its bare step graph; the graph is a copy."""
    return with_own_step(_bare(kind))


@cache
def profiler(kind: str) -> Profiler:
    """The profiler of all copies of a kind's program."""
    return Profiler(_bare(kind))


def up_to(kind: str, name: str, candidate: Candidate | None = None, accumulate: bool = False) -> Program:
    """The program after the pass `name` of those that are run for each plan; the step graph is a copy."""
    return with_own_step(_up_to(kind, name, candidate, accumulate))


@cache
def _up_to(kind: str, name: str, candidate: Candidate | None, accumulate: bool) -> Program:
    program = bare(kind)
    chosen = ChooseResidency(SIZES, Budget(), candidate or Candidate(8, 1, 1), accumulate)
    passes = pipeline.step_passes(chosen)
    names = [p.name for p in passes]
    return pipeline.run_passes(program, passes[: names.index(name) + 1], verify=True)


@cache
def movable(kind: str) -> tuple[str, ...]:
    """The values that the backward needs and that may leave."""
    program = up_to(kind, "choose_residency")
    assert program.plan is not None
    found = {meta.note(n).source: n for n in program.graph.nodes if meta.note(n).source in program.plan.residency
             and meta.note(n).phase == "forward"}  # fmt: skip
    return tuple(name for name in program.plan.residency if not why_not(program, found[name]))


def offloaded(
    kind: str, names: Collection[str] | None = None, prefetch: int = 1, until: str = "schedule", recompute: bool = False
) -> Program:
    """A program in which the named values (None: all that may) are on the host; the others are kept, or as planned."""
    base = ChooseResidency(SIZES, candidate=Candidate(8, prefetch, 1))(bare(kind)).program.plan
    assert base is not None
    choice: dict[str, Residency] = dict(base.residency)
    if not recompute:
        choice = dict.fromkeys(base.residency, "keep")
    choice |= dict.fromkeys(movable(kind) if names is None else names, "offload")
    passes = pipeline.step_passes(pipeline.chosen(replace(base, residency=choice)))
    end = [p.name for p in passes].index(until)
    return pipeline.run_passes(bare(kind), passes[: end + 1], verify=until == "schedule")


@cache
def boundaries(kind: str) -> tuple[str, ...]:
    """What blocks hand to later ones and the backward needs, but for what the last block is given."""
    program = bare(kind)
    found = [(meta.note(node), inside) for node, inside in kept_values(program)]
    return tuple(note.source for note, inside in found if not inside and note.block < len(program.blocks) - 2)


def regenerated(
    kind: str, names: Collection[str], prefetch: int = 1, until: str = "schedule", offload: Collection[str] = (),
    verify: bool = True,
) -> Program:  # fmt: skip
    """A program in which the named boundaries are regenerated; the other values are as the fixed policy plans."""
    base = ChooseResidency(SIZES, candidate=Candidate(8, prefetch, 1))(bare(kind)).program.plan
    assert base is not None
    choice = base.residency | dict.fromkeys(offload, "offload") | dict.fromkeys(names, "recompute")
    passes = pipeline.step_passes(pipeline.chosen(replace(base, residency=choice)))
    end = [p.name for p in passes].index(until)
    return pipeline.run_passes(bare(kind), passes[: end + 1], verify=verify)


def with_own_step(program: Program) -> Program:
    """A copy of the program whose step graph may be changed."""
    assert program.step is not None
    return replace(program, step=fx.GraphModule(nn.Module(), copy_graph(program.step.graph), class_name="Step"))


WHOLE = (2**31, 2**31)
IGNORED = (
    steps.release, steps.retire, steps.retire_carried, steps.update, steps.apply, steps.await_update, steps.discard,
)  # fmt: skip


class _Interpreter(fx.Interpreter):
    """Runs a step graph of any stage: copies are the parameters themselves, gradients are summed by name."""

    def __init__(self, program: Program, tensors: Mapping[str, Tensor]) -> None:
        assert program.step is not None
        super().__init__(program.step)
        self.program, self.tensors = program, tensors
        self.params = {s.name: s.params for s in program.slabs}
        self.grads: dict[str, Tensor] = {}
        self.count: float | None = None

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (steps.weights, steps.wait, steps.device_weights):
            return tuple(self.tensors[n] for n in self.params[args[1]])
        if target is steps.fetch:
            return args[1]
        if target is steps.resident:
            return self.tensors[args[1]]
        if target is steps.rng:
            return RNG
        if target is steps.run:
            return getattr(self.program.forms[args[1]], args[2])(*args[3:])
        if target is steps.run_chunks:
            form, chunk = self.program.forms[args[1]], args[3] if args[3][0] else WHOLE
            return run_chunks(form, args[2], lambda name: getattr(form, name), chunk, args[4:])
        if target is steps.count:
            self.count = float(args[1])
            return None
        if target in (steps.gradients, steps.offload):
            for name, grad in zip(args[2], args[3], strict=True):
                self.grads[name] = self.grads[name] + grad if name in self.grads else grad
            return None
        if target is steps.store:
            return args[2].clone()
        if target in (steps.restore, steps.restored):
            return args[1]
        if target in IGNORED:
            return None
        return super().call_function(target, args, kwargs)


def stable(text: str) -> str:
    """Printed text without what torch's version decides: forms are numbered in order, symbols are B and S."""
    names: dict[str, str] = {}
    for found in re.findall(r"form_[0-9a-f]{8}", text):
        names.setdefault(found, f"form_{len(names) + 1}")
    symbols = list(dict.fromkeys(re.findall(r"\bs\d+\b", text)))
    names |= dict(zip(symbols, ("B", "S"), strict=False))
    return re.sub(r"form_[0-9a-f]{8}|\bs\d+\b", lambda m: names[m[0]], text)


def tensors_of(program: Program, own: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and constants by name."""
    named = {**dict(own.named_parameters()), **dict(own.named_buffers()), **program.constants}
    return {n: t.detach() for n, t in named.items()}


def run_step(
    program: Program, own: nn.Module, inputs: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by the step graph, of `batch()` if no inputs are given."""
    interpreter = _Interpreter(program, tensors_of(program, own))
    inputs = batch() if inputs is None else inputs
    with torch.no_grad():
        loss = interpreter.run(None, *(inputs[s.target] for s in program.inputs if s.kind == "input"))
    return loss, interpreter.grads


def count_of(program: Program, own: nn.Module) -> float | None:
    """The number of valid labels that the step graph hands out."""
    interpreter = _Interpreter(program, tensors_of(program, own))
    inputs = batch()
    with torch.no_grad():
        interpreter.run(None, *(inputs[s.target] for s in program.inputs if s.kind == "input"))
    return interpreter.count


def run_forward(program: Program, own: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by the forward graph under autograd."""
    known: dict[str, Tensor] = tensors_of(program, own) | batch() | {"rng": RNG}
    leaves = {n: known[n].clone().requires_grad_() for n, _ in own.named_parameters()}
    loss, *_ = fx.Interpreter(program.forward).run(*((known | leaves)[s.target] for s in program.inputs))
    loss.backward()
    return loss.detach(), {n: leaf.grad for n, leaf in leaves.items() if leaf.grad is not None}


@contextmanager
def sharing_results(program: Program, node: fx.Node) -> Iterator[None]:
    """Let the forward that gives a value give a view of it as its next result; what tests share is as before then."""
    run, index = node.args
    assert isinstance(run, fx.Node) and isinstance(index, int)
    forward = program.forms[str(run.args[1])].forward
    assert forward is not None
    (output,) = forward.graph.find_nodes(op="output")
    before = output.args
    results: list[Any] = list(output.args[0])
    with forward.graph.inserting_before(output):
        view = forward.graph.call_function(torch.ops.aten.transpose.int, (results[index], 0, 1))
    output.args = ((*results[: index + 1], view, *results[index + 2 :]),)
    try:
        yield
    finally:
        output.args = before
        forward.graph.erase_node(view)


def run_eager(own: nn.Module, inputs: Mapping[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by the model itself, of `batch()` if no inputs are given."""
    own.zero_grad()
    loss = own(**(batch() if inputs is None else inputs))
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in own.named_parameters() if p.grad is not None}


def assert_same(got: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Loss within 1e-6 (relative) and every gradient within 1e-5 (norm)."""
    assert abs(got[0] - want[0]) <= 1e-6 * abs(want[0])
    assert got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        assert (got[1][name] - grad).norm() <= 1e-5 * grad.norm(), name


def assert_runs(program: Program, own: nn.Module) -> None:
    """The step graph gives eager's loss and gradients, or, where there is dropout, those of the forward graph."""
    random = any(s.kind == "rng" for s in program.inputs)
    assert_same(run_step(program, own), run_forward(program, own) if random else run_eager(own))
