"""How the results of a layer's GEMMs make its output: found by setting them to random numbers.

The output is looked for among the nodes below all results. It is one for which

    output[t] = base[t] + sum over j of weight[t, j] * result[slot t * k + j]

holds for random results, weights and base; or the same without weights, where they were applied before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from oomc import meta
from oomc.match import Concrete, Unknown, ancestors, op_name
from oomc.passes.match_probe import Probe, close

ZEROS = ("zeros", "zeros_like", "new_zeros")
# How far below the last GEMM, counted in nodes after all its units, the layer's output may be.
REACH = 40


def combinations(probe: Probe) -> Iterator[tuple[tuple[fx.Node, ...], fx.Node, fx.Node | None, fx.Node | None]]:
    """(results, output, weights or None, base) for which the output is the (weighted) sum over slots of results."""
    results: tuple[fx.Node, ...] | None = tuple(u.out for u in probe.layer.last.units)
    while results is not None:
        rows = probe.slots_of_rows(results)
        if rows is not None:
            for output in _outputs(probe, results):
                if not _owns(probe, results, output):
                    continue
                for weights in [*probe.weights_before(output), None]:
                    base = _explains(probe, results, rows, output, weights)
                    if base is not False:
                        yield results, output, weights, base
        following = [next(iter(r.users)) if len(r.users) == 1 else None for r in results]
        ahead = [n for n in following if n is not None and _size_if_tensor(n) == _size_if_tensor(results[0])]
        results = tuple(ahead) if len(set(ahead)) == len(results) else None


def _outputs(probe: Probe, results: tuple[fx.Node, ...]) -> list[fx.Node]:
    """Nodes below all results with one row a token, nearest first."""
    wanted = (1 << len(results)) - 1
    seen: dict[fx.Node, int] = {r: 1 << i for i, r in enumerate(results)}
    found, left = [], REACH
    for node in probe.nodes[probe.order[results[0]] :]:
        bits = seen.get(node, 0)
        for n in node.all_input_nodes:
            bits |= seen.get(n, 0)
        if not bits or node.op == "output":
            continue
        seen[node] = bits
        if bits != wanted or node in results:
            continue
        left -= 1
        if left < 0:
            break
        if probe.has_token_rows(node, meta.value(results[0]).shape[-1]) and probe.leads_like_tokens(node):
            found.append(node)
    return found


def _owns(probe: Probe, results: tuple[fx.Node, ...], output: fx.Node) -> bool:
    """Whether nothing but the output is computed from the results."""
    work, seen = list(results), set(results)
    while work:
        for user in work.pop().users:
            if probe.order[user] > probe.order[output]:
                return False
            if user is not output and user not in seen:
                seen.add(user)
                work.append(user)
    return True


def _explains(
    probe: Probe,
    results: tuple[fx.Node, ...],
    rows: list[tuple[Tensor, Tensor]],
    output: fx.Node,
    weights: fx.Node | None,
) -> Any:
    """The base (or None) if `output` is base + sum over slots of weight * result; else False."""
    given: dict[fx.Node, Any] = {r: probe.made_up(r) for r in results}
    scale = torch.ones(probe.tokens_count * probe.k)
    if weights is not None:
        given[weights] = probe.made_up(weights)
        scale = given[weights].flatten().float()
    width = given[results[0]].shape[-1]
    expected = torch.zeros(probe.tokens_count, width)
    for result, (row, slot) in zip(results, rows):
        value = given[result].reshape(-1, width).float()
        expected.index_add_(0, slot // probe.k, value[row] * scale[slot, None])
    base: fx.Node | None = None
    for node in _made_elsewhere(probe, output, given):
        if op_name(node) in ZEROS:
            given[node] = torch.zeros(Concrete(probe.sizes, {}).shape(node), dtype=meta.value(node).dtype)
        elif base is None and probe.has_token_rows(node, width):
            base, given[node] = node, probe.made_up(node)
            expected += given[node].reshape(-1, width).float()
        else:
            return False
    try:
        value = probe.run(given)(output)
    except Unknown:
        return False
    return base if close(value.reshape(-1, width), expected) else False


def _made_elsewhere(probe: Probe, output: fx.Node, given: dict[fx.Node, Any]) -> list[fx.Node]:
    """Tensors that `output` is computed from whose values cannot be made up and are not given."""
    known = {**probe.given, **given}
    inside = ancestors([output], stop=lambda n: n in known or op_name(n) == "sym_size" or op_name(n) in ZEROS)
    depends: set[fx.Node] = set()
    for node in probe.nodes[: probe.order[output] + 1]:
        if node in inside and (node in known or any(n in depends for n in node.all_input_nodes)):
            depends.add(node)
    edge = {n: None for d in depends - set(known) for n in d.all_input_nodes if n not in depends}
    return sorted((n for n in edge if n in probe.tainted and meta.tensor(n) is not None), key=probe.order.__getitem__)


def _size_if_tensor(node: fx.Node) -> Any:
    val = meta.tensor(node)
    return None if val is None else str(val.shape)
