"""assemble: the bare step graph of forward worksets, loss, backward worksets and gradients.

Everything stays where it is computed; nothing is copied, released or recomputed yet.

After, for one block between prologue and epilogue:

    %w0 = weights('prologue');   %h0, = run('form_a', 'forward', %B, %S, %w0[0], %input_ids)
    %w1 = weights('layers.0');   %h1, = run('form_b', 'forward', %B, %S, %w1[0], %h0)
    %loss, %count = run('form_c', 'forward', %B, %S, %h1);   count(%count)
    %d_loss = ones_like(%loss)
    %d_h1, = run('form_c', 'backward', %h1, %d_loss)
    %d_w, %d_h0 = run('form_b', 'backward', %w1[0], %h0, %d_h1)
    gradients('layers.0', ('layers.0.w',), (%d_w,))
    ...
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from oomc import meta, private, steps
from oomc.dims import TokenSymbols
from oomc.fxutil import add_call
from oomc.meta import StepNote
from oomc.program import PassResult, Program
from oomc.worksets import Form, Workset


@dataclass(frozen=True)
class Assemble:
    """See the module's docstring."""

    name: str = "assemble"

    def __call__(self, program: Program) -> PassResult:
        program.step = None
        program.step = _Assembler(program).build()
        return PassResult(program, True)


class _Assembler:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = fx.Graph()
        placeholders = program.forward.graph.find_nodes(op="placeholder")
        self.spec_of = dict(zip(placeholders, program.inputs, strict=True))
        self.slab_of = {name: slab for slab in program.slabs for name in slab.params}
        self.place_of = {slab.name: place for place, slab in enumerate(program.slabs)}
        self.values: dict[fx.Node, fx.Node] = {}
        self.saved: dict[str, list[fx.Node]] = {}
        self.sizes: dict[str, Any] = {}
        self.weights: dict[tuple[str, str, int], fx.Node] = {}
        self.rngs: dict[int, fx.Node] = {}
        self.parts: dict[tuple[fx.Node, int], fx.Node] = {}
        self.note = StepNote()
        self.count = program.count

    def call(self, target: Callable[..., Any], *args: Any, name: str | None = None, val: Any = None) -> fx.Node:
        node = add_call(self.graph, target, args, name)
        meta.set_note(node, self.note)
        meta.set_value(node, val)
        return node

    def part(self, node: fx.Node, index: int, val: Any, name: str | None = None, source: str = "") -> fx.Node:
        """One entry of a node's tuple."""
        if (node, index) not in self.parts:
            part = self.call(operator.getitem, node, index, name=name, val=val)
            meta.set_note(part, replace(meta.note(node), source=source))
            self.parts[node, index] = part
        return self.parts[node, index]

    def build(self) -> fx.GraphModule:
        self.rt = self.graph.placeholder("rt")
        inputs = [(n, s) for n, s in self.spec_of.items() if s.kind == "input"]
        for node, spec in inputs:
            self.values[node] = self.graph.placeholder(_identifier(spec.target))
            meta.set_value(self.values[node], meta.value(node))
        self._bind_sizes([n for n, _ in inputs])
        worksets = [w for b in self.program.blocks for w in b.worksets]
        for workset in worksets:
            self._forward(workset)
        loss = self.program.loss
        self._backward(worksets, loss)
        self.graph.output(self.values[loss])
        return private.lazy_module(self.graph, "Step")

    def _bind_sizes(self, inputs: list[fx.Node]) -> None:
        symbols: TokenSymbols = self.program.notes["symbols"]
        for letter, symbol, dim in (("B", symbols.batch, 0), ("S", symbols.sequence, 1)):
            self.sizes[letter] = 1
            for node in inputs:
                val = meta.tensor(node)
                if symbol is not None and val is not None and val.dim() > dim and symbols.axes(val)[dim] == dim:
                    self.sizes[letter] = self.call(steps.size, self.values[node], dim, name=letter)
                    break

    def _size(self, expr: Any) -> Any:
        symbols: TokenSymbols = self.program.notes["symbols"]
        formula = symbols.formula(expr)
        if formula.isdigit():
            return int(formula)
        if formula not in self.sizes:
            node = self.call(steps.calc, formula, self.sizes["B"], self.sizes["S"])
            self.sizes[formula] = node
        return self.sizes[formula]

    def _input(self, source: Any, workset: Workset) -> Any:
        """What the step graph passes for one of a workset's inputs."""
        if not isinstance(source, fx.Node):
            return self._size(source)
        if source in self.values:
            return self.values[source]
        spec = self.spec_of[source]
        val = meta.value(source)
        if spec.kind == "parameter":
            slab = self.slab_of[spec.name]
            key = (slab.name, self.note.phase, workset.block)
            if key not in self.weights:
                name = _identifier(f"{slab.name}_w")
                self.weights[key] = self.call(steps.weights, self.rt, slab.name, name=name)
            return self.part(self.weights[key], slab.params.index(spec.name), val)
        if spec.kind == "rng":
            layer = self.program.blocks[workset.block].layer
            if layer not in self.rngs:
                self.rngs[layer] = self.call(steps.rng, self.rt, layer, val=val)
            return self.rngs[layer]
        self.values[source] = self.call(steps.resident, self.rt, spec.target, val=val)
        return self.values[source]

    def _run(self, workset: Workset, form: Form, variant: str, args: list[Any]) -> fx.Node:
        vals = [meta.value(n) if isinstance(n, fx.Node) else n for n in _results(getattr(form, variant))]
        name = _identifier(f"{workset.name}_{variant}")
        if form.chunk:
            return self.call(steps.run_chunks, self.rt, form.key, variant, (0, 0), *args, name=name, val=vals)
        return self.call(steps.run, self.rt, form.key, variant, *args, name=name, val=vals)

    def _forward(self, workset: Workset) -> None:
        form = self.program.forms[workset.form]
        self.note = StepNote("forward", workset.block, workset.name)
        node = self._run(workset, form, "forward", [self._input(s, workset) for s in workset.inputs])
        vals = meta.value(node)
        for index, out in enumerate(workset.outputs):
            self.values[out] = self.part(node, index, vals[index], _identifier(out.name), out.name)
            if out is self.count:
                self.call(steps.count, self.rt, self.values[out])
        base = len(workset.outputs)
        self.saved[workset.name] = [
            self.part(
                node, base + i, vals[base + i], _identifier(f"{workset.name}_saved{i}"), f"{workset.name}:saved.{i}"
            )
            for i in range(form.saved)
        ]

    def _backward(self, worksets: list[Workset], loss: fx.Node) -> None:
        self.note = StepNote("backward", worksets[-1].block, worksets[-1].name)
        tangents: dict[fx.Node, fx.Node] = {
            loss: self.call(steps.ones_like, self.values[loss], name="d_loss", val=meta.value(loss))
        }
        collected: dict[str, fx.Node] = {}
        for index, workset in reversed(list(enumerate(worksets))):
            form = self.program.forms[workset.form]
            if form.backward is not None and any(workset.outputs[i] in tangents for i in form.tangents):
                self.note = StepNote("backward", workset.block, workset.name)
                self._backward_of(workset, form, tangents, collected)
            before = [w for w in worksets[:index] if w.block == workset.block]
            later = {self._parameter(s) for w in before for s in w.inputs if isinstance(s, fx.Node)}
            self._emit_gradients(workset.block, {n: collected.pop(n) for n in list(collected) if n not in later})

    def _backward_of(
        self, workset: Workset, form: Form, tangents: dict[fx.Node, fx.Node], collected: dict[str, fx.Node]
    ) -> None:
        args: list[Any] = []
        for kind, i in form.backward_takes:
            if kind == "input":
                args.append(self._input(workset.inputs[i], workset))
            else:
                args.append(self.values[workset.outputs[i]] if kind == "output" else self.saved[workset.name][i])
        for i in form.tangents:
            out = workset.outputs[i]
            if out not in tangents:
                tangents[out] = self.call(steps.zeros_like, self.values[out], val=meta.value(out))
            args.append(tangents.pop(out))
        node = self._run(workset, form, "backward", args)
        results = _results(form.backward)
        for position, i in enumerate(form.gradients):
            if not isinstance(results[position], fx.Node):
                continue
            source = workset.inputs[i]
            spec = self._parameter(source)
            grad = self.part(
                node, position, meta.value(results[position]), f"d_{_identifier(source.name)}", source.name
            )
            store: dict[Any, fx.Node] = collected if spec else tangents
            key = spec or source
            store[key] = grad if key not in store else self.call(steps.add, store[key], grad, val=meta.value(grad))

    def _parameter(self, source: fx.Node) -> str:
        if source.op != "placeholder":
            return ""
        spec = self.spec_of[source]
        return spec.name if spec.kind == "parameter" else ""

    def _emit_gradients(self, block: int, collected: dict[str, fx.Node]) -> None:
        """Hand each slab that the block uses what is complete of its gradients."""
        self.note = StepNote("backward", block)
        used = {self.place_of[self.slab_of[name].name] for name in collected}
        for slab in (self.program.slabs[place] for place in sorted(used)):
            names = tuple(n for n in slab.params if n in collected)
            self.call(steps.gradients, self.rt, slab.name, names, tuple(collected[n] for n in names))


def _results(module: fx.GraphModule | None) -> list[Any]:
    assert module is not None
    (output,) = module.graph.find_nodes(op="output")
    return list(output.args[0])


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name).strip("_") or "x"
