"""What the worksets of a program cost: FLOPs and bytes of every form's graphs, and their time on a machine.

    costs = Costs(program, machine)
    costs.of("form_b", "forward").flops                  # a sympy expression in B and S
    costs.seconds("form_b", "backward", (4, 4096))       # roofline of each kernel, and their sum

A kernel takes the longer of its FLOPs at the machine's rate for its size and its bytes at the device's bandwidth, and a
launch (the roofline model: Williams, Waterman and Patterson 2009). With `backend="eager"` every operator is a kernel,
and those bound by memory reach EAGER of the bandwidth.
With `backend="inductor"` pointwise operators, reductions and copies that touch each other are one: only what comes from
outside of it, and what others or the graph's caller use, passes through memory.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from oomc import meta, ops, private, steps
from oomc.dims import TokenSymbols
from oomc.flops import GATHERS, Call, calls, is_view, nbytes
from oomc.fxutil import values
from oomc.machine import Machine
from oomc.program import Program
from oomc.rms_norm import PLAIN

B, S = sympy.symbols("B S", integer=True, positive=True)
"""The batch and the sequence in all expressions."""

EAGER = 0.75
"""Share of the bandwidth that single operators reach: many of them broadcast, cast or read transposed. Fitted to one
eager layer of Qwen3-30B-A3B on an H200 (36.9 ms forward and backward of 16K tokens, with flash attention)."""
OWN_ATTENTION = (0.55, 0.35)
"""The rates of oomc.triton_attention by those of cuDNN, forward and backward: 0.47 to 0.61 and 0.27 to 0.5 on an H200
(docs/RESULTS.md)."""
CHUNK_LAUNCHES = 2
"""Kernels that put the results of a chunk into the whole."""
VIEW, PART, RESULT = 0.5, 1.0, 3.0
"""In kernels to issue: a view in a graph, a chunk's part of an argument, and putting one of its results into the whole.
From a step of eight layers in chunks of 1K tokens on an H200 that nothing but issuing bound (docs/RESULTS.md)."""

FUSED = frozenset({
    "_to_copy", "clone", "cat", "stack", "sum", "mean", "amax", "amin", "any", "all", "var_mean", "_softmax",
    "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm", "logsumexp",
    "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward", "nll_loss_forward", "cumsum",
    "nll_loss_backward", "slice_backward", "select_backward", "slice_scatter", "select_scatter", "constant_pad_nd",
    "arange", "full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "new_zeros", "new_ones", "new_full",
    "scalar_tensor", "embedding", "gather", "index_select", "index", "tril", "triu", "masked_fill",
})  # fmt: skip
"""Operators that Inductor fuses, beside the pointwise ones."""

PARTS = frozenset({"slice", "select", "narrow", "split", "split_with_sizes", "chunk", "unbind"})
"""Views of a part."""


@dataclass
class FormCost:
    """The cost of one graph of a form, in `B` and `S`.

    Attributes:
        calls: its kernels.
        in_place: bytes of results that a loop over chunks writes into the whole.
        summed: elements of results that it adds up over chunks, with their bytes.
        views: operators that launch nothing, but are issued.
        arguments: tensors among its arguments.
        results: tensors among its results.
    """

    calls: list[Call]
    in_place: Any = 0
    summed: tuple[Any, Any] = (0, 0)
    views: int = 0
    arguments: int = 0
    results: int = 0
    _numbers: Callable[[int, int], list[float]] | None = field(default=None, repr=False)

    @property
    def flops(self) -> Any:
        """All FLOPs."""
        return sympy.sympify(sum(call.flops for call in self.calls))

    @property
    def bytes(self) -> Any:
        """All bytes read and written."""
        return sympy.sympify(sum(call.bytes for call in self.calls))

    def numbers(self, batch: int, sequence: int) -> list[float]:
        """FLOPs, bytes, size and launches of each call, then in_place and both of `summed`, as one list."""
        if self._numbers is None:
            flat = [x for c in self.calls for x in (c.flops, c.bytes, c.size, c.launches)]
            self._numbers = function([*flat, self.in_place, *self.summed])
        return self._numbers(batch, sequence)

    def launches(self, batch: int, sequence: int) -> float:
        """Kernels of running the graph once."""
        return sum(self.numbers(batch, sequence)[3 : 4 * len(self.calls) : 4])

    def issued(self, batch: int, sequence: int, chunks: int) -> float:
        """What the thread that issues one of so many chunks has to do, in kernels."""
        issued = self.launches(batch, sequence) + VIEW * self.views
        return issued if chunks == 1 else issued + PART * self.arguments + RESULT * self.results

    def seconds(self, batch: int, sequence: int, machine: Machine, share: float = 1.0) -> float:
        """Time of running the graph once, where kernels bound by memory reach `share` of the bandwidth."""
        numbers = self.numbers(batch, sequence)
        total = 0.0
        for index, call in enumerate(self.calls):
            flops, moved, size, launches = numbers[4 * index : 4 * index + 4]
            work = moved / machine.bandwidth
            if flops:
                products = flops / _rate(machine, call, size, flops)
                work = products + work if _tiled(machine, call) else max(products, work)
            else:
                work /= share
            total += work + launches * machine.launch
        return total

    def chunk_seconds(self, batch: int, sequence: int, machine: Machine, chunks: int) -> float:
        """Time of putting the results of one of so many chunks into the whole (oomc.runtime.tiles.Total)."""
        in_place, elements, count = self.numbers(batch, sequence)[-3:]
        added = 3 * count if chunks == 2 else (chunks + 1) * count + 8 * (chunks - 1) * elements
        return (2 * in_place + added / chunks) / machine.bandwidth + CHUNK_LAUNCHES * machine.launch


def tile_shapes(sizes: tuple[int, int], chunk: tuple[int, int]) -> list[tuple[tuple[int, int], int]]:
    """The sizes of the tiles that a batch is run in (oomc.runtime.tiles), and how many there are of each."""
    sides = []
    for size, part in zip(sizes, chunk, strict=True):
        part = min(max(1, part), size)
        sides.append([(s, n) for s, n in ((part, size // part), (size % part, 1)) if s and n])
    return [((b, s), m * n) for b, m in sides[0] for s, n in sides[1]]


def function(expressions: Sequence[Any]) -> Callable[[int, int], list[float]]:
    """Sympy expressions in `B` and `S` as one fast function."""
    made: Callable[[int, int], list[float]] = sympy.lambdify(
        (B, S), list(expressions), modules=[steps.FUNCTIONS, "math"], cse=True
    )
    return made


def _tiled(machine: Machine, call: Call) -> bool:
    """Whether it is attention in tiles on a GPU. On a CPU all attention is, and measured as such."""
    return call.kind == "tiled" and not machine.on_host


def _rate(machine: Machine, call: Call, size: float, flops: float) -> float:
    if call.kind == "gemm":
        return machine.gemm_rate(call.dtype, size)
    if call.kind == "grouped":
        return machine.grouped_rate(call.dtype, size, flops)
    if _tiled(machine, call):
        return machine.gemm_rate("f32", flops)
    backward = call.kind.endswith("_backward")
    table = machine.attention_backward if backward else machine.attention_forward
    return table.at(size) * (OWN_ATTENTION[backward] if call.kind.startswith("triton") and not machine.on_host else 1.0)


@dataclass
class Factors:
    """By how much longer than estimated graphs take: those that were timed (oomc.timing), and all others."""

    timed: dict[tuple[str, str], float] = field(default_factory=dict)
    other: float = 1.0

    def of(self, form: str, phase: str) -> float:
        """Of one form's graph."""
        return self.timed.get((form, phase), self.other)

    def describe(self) -> str:
        """In a line; empty if nothing was timed."""
        if not self.timed:
            return ""
        found = self.timed.values()
        return (
            f"{len(found)} graphs of worksets were timed here: {min(found):.2f} to {max(found):.2f} times as long as "
            f"estimated, {self.other:.2f} in all"
        )


class Costs:
    """Costs of a program's forms on a machine whose cores do not update meanwhile, each computed once and kept.

    Attributes:
        factors: how much longer than estimated graphs take on this device, where that was measured.
        idle: of what `while_updating` has made, the costs that it was made from.
    """

    idle: Costs | None = None

    def __init__(
        self, program: Program, machine: Machine, backend: str = "eager", factors: Factors | None = None
    ) -> None:
        self.program, self.machine, self.backend = program, machine, backend
        self.factors = Factors() if factors is None else factors
        symbols: TokenSymbols = program.notes["symbols"]
        self._names = {s: n for s, n in ((symbols.batch, B), (symbols.sequence, S)) if s is not None}
        self._forms: dict[tuple[str, str], FormCost] = {}
        self._bytes: dict[tuple[Any, ...], Callable[[int, int], list[float]]] = {}
        self._seconds: dict[tuple[str, str, tuple[int, int], tuple[int, int] | None], float] = {}

    @cached_property
    def while_updating(self) -> Costs:
        """The same while the host's cores update: a graph takes as long as the thread that issues it needs, at least.

        That thread then waits for cores, longer than a small kernel takes; behind large kernels it stays ahead.
        """
        busy = Costs(self.program, self.machine, self.backend, self.factors)
        busy.idle, busy._forms, busy._bytes = self, self._forms, self._bytes
        return busy

    def of_step(self, program: Program) -> Costs:
        """Those of a step whose plan is made: whether cores update depends on where the state lives."""
        plan, costs = program.plan, self.idle or self
        assert plan is not None
        trained = (slab.name for slab in program.slabs if slab.layout.gradient_bytes(wide=False))
        if plan.where == "device" or all(name in plan.resident for name in trained):
            return costs
        return costs.while_updating

    def of(self, form: str, variant: str) -> FormCost:
        """The cost of one of a form's graphs (oomc.steps.GRAPHS)."""
        key = form, "backward" if variant == steps.IN_PLACE else variant  # in place or not takes as long
        if key not in self._forms:
            module = getattr(self.program.forms[form], key[1])
            assert module is not None, f"{form} has no {variant}"
            self._forms[key] = self._cost(module.graph)
        return self._forms[key]

    def seconds(self, form: str, variant: str, sizes: tuple[int, int], chunk: tuple[int, int] | None = None) -> float:
        """Time of a form's graph on a batch of `sizes` = (batch, sequence), run in `chunk`s if there are any."""
        key = form, variant, sizes, chunk
        if key not in self._seconds:
            shapes = tile_shapes(sizes, chunk or sizes)
            chunks = sum(count for _, count in shapes)
            seconds = 0.0
            if self.program.forms[form].made_at_once(variant, sizes, chunks):
                seconds = sum(self._chunk_seconds(form, part, sizes, 1) for part in (steps.ORDERS, steps.PRODUCTS))
                variant = steps.ROWS
            seconds += sum(count * self._chunk_seconds(form, variant, shape, chunks) for shape, count in shapes)
            self._seconds[key] = seconds
        return self._seconds[key]

    def _chunk_seconds(self, form: str, variant: str, shape: tuple[int, int], chunks: int) -> float:
        """Of one of so many tiles."""
        cost = self.of(form, variant)
        seconds = self.factors.of(form, steps.phase_of(variant)) * self.tile_seconds(form, variant, shape)
        if chunks > 1:
            seconds += cost.chunk_seconds(*shape, self.machine, chunks)
        return max(seconds, cost.issued(*shape, chunks) * self.machine.launch_busy) if self.idle else seconds

    def tile_seconds(self, form: str, variant: str, shape: tuple[int, int]) -> float:
        """The estimate for a form's graph on one tile, whatever was measured."""
        return self.of(form, variant).seconds(*shape, self.machine, EAGER if self.backend == "eager" else 1.0)

    def nbytes(self, val: Any, sizes: tuple[int, int]) -> int:
        """Bytes of the tensors of a (tree of) fake values for a batch of `sizes`."""
        expr = self.expression(nbytes(val))
        if isinstance(expr, int):
            return expr
        key = (expr,)
        if key not in self._bytes:
            self._bytes[key] = function([expr])
        return int(self._bytes[key](*sizes)[0])

    def expression(self, expr: Any) -> Any:
        """An expression of the trace in `B` and `S`."""
        if not isinstance(expr, sympy.Basic):
            return expr
        named = expr.xreplace(self._names)
        assert named.free_symbols <= {B, S}, f"{expr} depends on more than batch and sequence"
        return named

    def _cost(self, graph: fx.Graph) -> FormCost:
        found = _fused(graph) if self.backend == "inductor" else _each(graph)
        merged = _merge(Call(c.kind, c.dtype, *map(self.expression, (c.flops, c.bytes, c.size, c.launches)))
                        for c in found)  # fmt: skip
        (output,) = graph.find_nodes(op="output")
        given = [n for n in graph.find_nodes(op="placeholder") if meta.tensor(n) is not None]
        cost = FormCost(merged, arguments=len(given))
        if self.backend == "eager":
            cost.views = sum(is_view(node.target) for node in graph.nodes)
        elements: Any = 0
        count: Any = 0
        for result in output.args[0]:
            val = meta.tensor(result) if isinstance(result, fx.Node) else None
            if val is None:
                continue
            cost.results += 1
            size = self.expression(nbytes(val))
            if isinstance(size, sympy.Basic) and size.free_symbols:
                cost.in_place = cost.in_place + size
            else:
                elements, count = elements + size // val.element_size(), count + size
        cost.summed = (elements, count)
        return cost


def _merge(found: Iterable[Call]) -> list[Call]:
    """All that only memory bounds as one call; the others as they are."""
    moved: Any = 0
    launches: Any = 0
    others: list[Call] = []
    for call in found:
        if call.kind == "memory":
            moved, launches = moved + call.bytes, launches + call.launches
        else:
            others.append(call)
    return [*others, Call("memory", "", 0, moved, launches=launches)]


def _each(graph: fx.Graph) -> list[Call]:
    """Every operator's own calls."""
    found: list[Call] = []
    for node in graph.nodes:
        if isinstance(node.target, OpOverload):
            found += calls(node.target, values(node.args), values(node.kwargs), meta.value(node))
    return found


def _is_fused(node: fx.Node) -> bool:
    op = node.target
    if not isinstance(op, OpOverload) or ops.is_oomc(op):
        return op in PLAIN
    return torch.Tag.pointwise in op.tags or op._opname in FUSED


def _base(node: fx.Node) -> fx.Node:
    """The node whose memory a view or an entry of a tuple is."""
    while node.args and isinstance(node.args[0], fx.Node) and (node.target is operator.getitem or is_view(node.target)):
        node = node.args[0]
    return node


def _takes_part(node: fx.Node) -> bool:
    """Whether a view is of a part of its base."""
    while _base(node) is not node:
        if node.target is operator.getitem or getattr(node.target, "_opname", "") in PARTS:
            return True
        node = node.args[0]  # type: ignore[assignment]
    return False


def _fused(graph: fx.Graph) -> list[Call]:
    """Calls with everything that touches and can be fused as one kernel."""
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr") and _base(n) is n]
    group = {n: n for n in nodes if _is_fused(n)}

    def root(node: fx.Node) -> fx.Node:
        while group[node] is not node:
            node = group[node]
        return node

    found: list[Call] = []
    written: set[fx.Node] = set()
    reads: dict[fx.Node, dict[Any, Any]] = defaultdict(dict)
    for node in nodes:
        sources = [_base(n) for n in node.all_input_nodes]
        if node in group:
            for source in sources:
                if source in group:
                    group[root(source)] = root(node)
            continue
        written.update(s for s in sources if s in group)
        if isinstance(node.target, OpOverload):
            found += calls(node.target, values(node.args), values(node.kwargs), meta.value(node))
    launches: dict[fx.Node, int] = defaultdict(lambda: 1)
    for node in group:
        whole = root(node)
        assert isinstance(node.target, OpOverload)
        for source in node.all_input_nodes:
            base = _base(source)
            if base in group or meta.is_size(base):
                continue
            part = node.target._opname in GATHERS and source is node.args[0]
            if _takes_part(source) and not part:  # of a product for q, k and v, say
                reads[whole][source, part] = nbytes(meta.value(source))
            else:
                reads[whole][base, part] = nbytes(meta.value(node if part else base))
        if _sums_tokens(node):  # a pass of its own over its input
            launches[whole] += 1
            reads[whole][node, False] = nbytes(values(node.args))
    for whole in dict.fromkeys(root(n) for n in group):
        moved = sum(reads[whole].values(), 0)
        moved = moved + sum((nbytes(meta.value(n)) for n in written if root(n) is whole), 0)
        found.append(Call("memory", "", 0, moved, launches=launches[whole]))
    return found


def _sums_tokens(node: fx.Node) -> bool:
    """Whether a reduction takes all tokens together, as the gradient of a norm's weight does."""
    out, source = meta.tensor(node), node.args[0] if node.args else None
    if out is None or not isinstance(source, fx.Node) or node.target._opname not in ("sum", "mean"):  # type: ignore[union-attr]
        return False
    own, given = (_symbolic(x) for x in (out, meta.tensor(source)))
    return given and not own


def _symbolic(x: torch.Tensor | None) -> bool:
    return x is not None and any(not isinstance(private.expression(size), int) for size in x.shape)
