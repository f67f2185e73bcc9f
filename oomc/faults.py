"""Faults of a graph, shown inside its printed listing."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from oomc import meta, printer, steps
from oomc.errors import VerifyError
from oomc.program import Program

CONTEXT = 2
"""Lines shown before and after an offending one."""


@dataclass(frozen=True)
class Fault:
    """One broken invariant.

    Attributes:
        message: what is wrong.
        title: which graph it is in.
        graph: that graph.
        node: the offending node, or None where a node is missing.
    """

    message: str
    title: str
    graph: fx.Graph
    node: fx.Node | None


@dataclass
class Faults:
    """Collects faults, so that all are shown at once."""

    program: Program
    after: str
    found: list[Fault] = field(default_factory=list)

    def add(self, message: str, node: fx.Node | None = None, graph: fx.Graph | None = None, title: str = "") -> None:
        """Note a fault; in the program's current graph unless another is given."""
        self.found.append(Fault(message, title, self.program.graph if graph is None else graph, node))

    def raise_any(self) -> None:
        """Raise a VerifyError that shows all faults, if there are any."""
        if self.found:
            raise VerifyError(self.text())

    def text(self) -> str:
        """All faults, each under its line of the graph that it is in."""
        count = len(self.found)
        lines = [f"after {self.after}: {count} fault{'s' if count > 1 else ''}"]
        for graph in dict.fromkeys(f.graph for f in self.found):
            lines += self._show(graph, [f for f in self.found if f.graph is graph])
        return "\n".join(lines)

    def _show(self, graph: fx.Graph, faults: list[Fault]) -> list[str]:
        listing = list_nodes(self.program, graph)
        order = {node: index for index, node in enumerate(graph.nodes)}
        at: dict[int, list[Fault]] = {}
        general = []
        for fault in faults:
            if fault.node in order:
                at.setdefault(order[fault.node], []).append(fault)
            else:
                general.append(fault)
        lines = [f"{faults[0].title}:"] if faults[0].title else []
        lines += [f"  ! {fault.message}" for fault in general]
        shown = {i for index in at for i in range(index - CONTEXT, index + CONTEXT + 1)} & set(range(len(listing)))
        previous = -1
        for index in sorted(shown):
            if index != previous + 1:
                lines.append("    ...")
            lines.append(f"{'>' if index in at else ' '}   {listing[index]}")
            for fault in at.get(index, ()):
                lines.append(f"  ^ {fault.message}")
                source = user_source(self.program, fault.node)
                lines += [f"    in the model: {source}"] if source else []
            previous = index
        if shown and previous != len(listing) - 1:
            lines.append("    ...")
        return lines


def list_nodes(program: Program, graph: fx.Graph) -> list[str]:
    """A line for each node, by the richest printer that the graph is sound enough for."""
    if program.step is not None and graph is program.step.graph:
        slabs = {s.name for s in program.slabs}
        holders = [n for n in graph.nodes if n.target in (steps.fetch, steps.weights)]
        if all(n.args[1:] and n.args[1] in slabs for n in holders):
            return printer.print_step(program).splitlines()
    elif graph is program.forward.graph and len(graph.find_nodes(op="placeholder")) == len(program.inputs):
        return printer.print_forward(program).splitlines()
    return printer.print_graph(graph).splitlines()


def user_source(program: Program, node: fx.Node | None) -> str:
    """The line of the user's model that a node of any graph comes from, or ''."""
    if node is None:
        return ""
    own = meta.source(node)
    note = meta.note(node)
    if own or not note.workset:
        return own
    workset = next((w for b in program.blocks for w in b.worksets if w.name == note.workset), None)
    nodes = [] if workset is None else workset.nodes
    named = [n for n in nodes if n.name == note.source]
    return next((line for n in [*named, *reversed(nodes)] if (line := meta.source(n))), "")
