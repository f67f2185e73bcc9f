"""Trace a few layers of a model, and repeat them in the graph to all that it has.

    layers = find(model)                        # kinds of layers, and how many show each
    with shortened(model, layers):
        program = capture(model, ...)           # and the passes up to partition_worksets
    repeat(program, layers)                     # False: these layers do not repeat; trace them all

Layers are of one kind if nothing that their code could read tells them apart: classes, shapes, plain attributes, and
what the model's config lists for each layer. What was traced is then looked at: layers of a kind must have come to the
same graph, and each must take one value from the layer before and be used by the next one only. Where a model breaks
that (a loss over the routers of all layers, values that skip a layer) nothing is repeated.

Before, with layers 0 to 2 traced:

    %h2 = ...(%h1, layers.2.w)                  # model.layers.2
    %loss = ...(%h2)

After:

    %h2 = ...(%h1, layers.2.w)                  # model.layers.2
    %h3 = ...(%h2, layers.3.w)                  # model.layers.3
    ...
    %loss = ...(%h47)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from oomc import meta, private
from oomc.extract import describe
from oomc.passes.partition_worksets import find_layers
from oomc.program import Program

PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class Layers:
    """A model's layers.

    Attributes:
        path: name of the module list that holds them.
        kinds: for each layer the number of its kind.
        traced: how many of the first ones show every kind that follows, one of these twice. The very first does not
            count: it takes something else than its successors do.
    """

    path: str
    kinds: tuple[int, ...]
    traced: int


def find(model: nn.Module) -> Layers | None:
    """The layers of a model; None where there is not one list of them, or tracing them all is as good."""
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    outer = [(n, m) for n, m in lists if not any(n.startswith(f"{other}.") for other, _ in lists)]
    if len(outer) != 1:
        return None
    path, modules = outer[0]
    indices = _index_attributes(modules)
    listed = _listed(model, len(modules))
    numbers: dict[Any, int] = {}
    keys = [(_signature(m, indices), *(values[i] for values in listed)) for i, m in enumerate(modules)]
    kinds = tuple(numbers.setdefault(key, len(numbers)) for key in keys)
    for traced in range(3, len(kinds) - 1):
        seen, wanted = Counter(kinds[1:traced]), Counter(kinds[traced:])
        if set(wanted) <= set(seen) and any(seen[kind] > 1 for kind in wanted):
            return Layers(path, kinds, traced)
    return None


def _index_attributes(modules: nn.ModuleList) -> set[tuple[str, str]]:
    """Attributes (module in the layer, name) that hold the layer's own index, wherever there are any."""
    own: set[tuple[str, str]] = set()
    other: set[tuple[str, str]] = set()
    for index, layer in enumerate(modules):
        for name, module in layer.named_modules():
            for key, value in vars(module).items():
                (own if type(value) is int and value == index else other).add((name, key))
    return own - other


def _signature(layer: nn.Module, indices: set[tuple[str, str]]) -> Any:
    """All of a layer that its code could read, but for the values of tensors and its own index."""
    parts: list[Any] = []
    for name, module in layer.named_modules():
        plain = {k: repr(v) for k, v in vars(module).items() if _is_plain(v) and (name, k) not in indices}
        tensors = {
            k: None if t is None else (tuple(t.shape), t.dtype, t.requires_grad)
            for k, t in [*module._parameters.items(), *module._buffers.items()]
        }
        parts.append((name, type(module), tuple(sorted(plain.items())), tuple(tensors.items())))
    return tuple(parts)


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple | list) and all(isinstance(v, PLAIN) for v in value))


def _listed(model: nn.Module, count: int) -> list[tuple[Any, ...]]:
    """What the configs of a model list for each of `count` layers."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    values = [v for c in configs.values() for v in getattr(c, "__dict__", {}).values()]
    return [tuple(v) for v in values if isinstance(v, tuple | list) and len(v) == count and _is_plain(v)]


@contextmanager
def shortened(model: nn.Module, layers: Layers) -> Iterator[None]:
    """The model has only its first `layers.traced` layers while the context lasts."""
    held = model.get_submodule(layers.path)
    modules = held._modules
    held._modules = dict(itertools.islice(modules.items(), layers.traced))
    try:
        yield
    finally:
        held._modules = modules


def repeat(program: Program, layers: Layers) -> bool:
    """Append the layers that were not traced to the forward graph, after the last that was.

    Args:
        program: of the shortened model, with a functional forward graph, before partition_worksets.
        layers: of the whole model.

    Returns:
        Whether it could be done; else the program is as before.
    """
    repeater = _Repeater(program, layers)
    if not repeater.is_chain():
        return False
    repeater.append()
    return True


class _Repeater:
    def __init__(self, program: Program, layers: Layers) -> None:
        self.program, self.layers = program, layers
        self.graph = program.forward.graph
        self.specs = dict(zip(self.graph.find_nodes(op="placeholder"), program.inputs, strict=True))
        self.position = {n: i for i, n in enumerate(self.graph.nodes)}
        names = {self._name(i): i for i in range(layers.traced)}
        nodes = [n for n in self.graph.nodes if n.op == "call_function" and not meta.is_size(n)]
        self.layer_of = {n: names.get(name, -1) for n, name in find_layers(nodes).items()}
        self.groups = [[n for n in nodes if self.layer_of.get(n) == i] for i in range(layers.traced)]
        self.own_inputs = [[n for n in self.specs if self._owner(n) == i] for i in range(layers.traced)]
        self.links: list[fx.Node] = []  # for each traced layer what the next one, or the epilogue, takes from it

    def _name(self, index: int) -> str:
        return f"{self.layers.path}.{index}"

    def _owner(self, node: fx.Node) -> int:
        """The layer that a placeholder belongs to, or -1."""
        spec = self.specs[node]
        if spec.kind == "constant":
            users = {self.layer_of.get(u, -1) for u in node.users if not meta.is_size(u)}
            return users.pop() if len(users) == 1 else -1
        found = [i for i in range(self.layers.traced) if spec.target.startswith(f"{self._name(i)}.")]
        return found[0] if found else -1

    # -- whether --------------------------------------------------------------------------------------------------

    def is_chain(self) -> bool:
        """Whether each layer takes one value from the one before, and layers of a kind are the same graph."""
        if -1 in self.layer_of.values() or not all(self.groups):
            return False
        for index, group in enumerate(self.groups):
            leaving = {n: {self.layer_of.get(u, self.layers.traced) for u in n.users if not meta.is_size(u)} - {index}
                       for n in group}  # fmt: skip
            used = [n for n, users in leaving.items() if users]
            if len(used) != 1 or leaving[used[0]] != {index + 1}:
                return False
            self.links.append(used[0])
        last = self.position[self.groups[-1][-1]]
        if any(self.position[u] < last for u in self._after()):
            return False
        behind = self._behind()
        return all(self._takes_one(i, behind) for i in range(self.layers.traced)) and self._kinds_agree()

    def _after(self) -> list[fx.Node]:
        """What uses the last layer's value outside of it."""
        return [u for u in self.links[-1].users if not meta.is_size(u) and u not in self.layer_of]

    def _behind(self) -> set[fx.Node]:
        """Nodes that are computed from what a layer has computed (sizes do not count: they are the batch's)."""
        found = set(self.layer_of)
        for node in self.graph.nodes:
            if not meta.is_size(node) and any(n in found for n in node.all_input_nodes):
                found.add(node)
        return found

    def _takes_one(self, index: int, behind: set[fx.Node]) -> bool:
        """Whether all that a layer takes is its own, everyone's, or the value of the layer before."""
        own = set(self.groups[index])
        for source in {n for node in own for n in node.all_input_nodes} - own:
            if source in self.specs:
                if self._owner(source) not in (-1, index):
                    return False
            elif source in behind and (index == 0 or source is not self.links[index - 1]):
                return False
        return True

    def _kinds_agree(self) -> bool:
        texts: dict[int, set[str]] = {}
        for index in range(1, self.layers.traced):
            texts.setdefault(self.layers.kinds[index], set()).add(self._text(index))
        return all(len(found) == 1 for found in texts.values())

    def _text(self, index: int) -> str:
        """A layer's graph as text, without its own names and its index."""
        names = {node: f"%{i}" for i, node in enumerate(self.groups[index])}
        names |= {node: f"own {i}" for i, node in enumerate(self.own_inputs[index])}
        names[self.links[index - 1]] = "link"

        def refer(node: fx.Node) -> str:
            if meta.is_size(node):
                return str(private.expression(meta.value(node)))
            return names.get(node, node.name)

        lines = [
            f"{node.target}{fx.map_arg((node.args, node.kwargs), refer)} -> {describe(meta.value(node))}"
            for node in self.groups[index]
        ]
        return "\n".join([*lines, names[self.links[index]]])

    # -- how ------------------------------------------------------------------------------------------------------

    def append(self) -> None:
        """Copy layers until there are as many as the model has."""
        kinds, traced = self.layers.kinds, self.layers.traced
        template = {kinds[i]: i for i in range(1, traced)}  # the last of each kind
        link, after = self.links[-1], self._after()
        at = self.groups[-1][-1].next
        places = {self.specs[node].kind: node for node in self.own_inputs[-1]}
        for index in range(traced, len(kinds)):
            source = template[kinds[index]]
            mapping = {self.links[source - 1]: link}
            for node in self.own_inputs[source]:
                kind = self.specs[node].kind
                places[kind] = mapping[node] = self._own_input(node, source, index, places.get(kind, node))
            with self.graph.inserting_before(at):
                for node in self.groups[source]:
                    new = self.graph.node_copy(node, lambda n, known=mapping: known.get(n, n))  # type: ignore[misc]
                    meta.move_modules(new, self._name(source), self._name(index))
                    mapping[node] = new
            link = mapping[self.links[source]]
        for user in after:
            user.replace_input_with(self.links[-1], link)
        self.program.inputs = [self.specs[n] for n in self.graph.find_nodes(op="placeholder")]
        self.program.forward.recompile()

    def _own_input(self, node: fx.Node, source: int, index: int, place: fx.Node) -> fx.Node:
        """A placeholder after `place` that is to layer `index` what `node` is to layer `source`."""
        spec = self.specs[node]
        name = spec.target.replace(f"{self._name(source)}.", f"{self._name(index)}.", 1)
        if spec.kind == "constant":
            name = f"{spec.target}.{index}"
            self.program.constants[name] = self.program.constants[spec.target]
        prefix = self._name(source).replace(".", "_")
        called = node.name.replace(f"{prefix}_", f"{self._name(index)}.".replace(".", "_"), 1)
        with self.graph.inserting_after(place):
            new = self.graph.placeholder(f"{node.name}_of_{index}" if called == node.name else called)
        meta.set_value(new, meta.value(node))
        self.specs[new] = replace(spec, target=name)
        return new
