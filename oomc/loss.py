"""What the loss is made of: its terms, the count of valid labels that it is the mean over, and what stands beside it.

The loss is followed through sums, factors and casts. In

    loss = cross_entropy / clamp_min(count, 1) + 0.001 * balance

there are two terms, the cross-entropy with its count, and one without, which is called auxiliary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from oomc import meta
from oomc.match import ancestors, op_name
from oomc.program import Program

TOKEN_LOSSES = frozenset({"cross_entropy_loss", "nll_loss_nd"})
SAME_NUMBER = frozenset({"to", "_to_copy", "clone", "alias", "neg", "view", "reshape", "squeeze"})
SAME_COUNT = frozenset({"to", "_to_copy", "clone", "alias", "detach", "clamp_min", "clamp"})


@dataclass(frozen=True)
class Term:
    """One addend of the loss.

    Attributes:
        node: the value, without the numbers that it is multiplied by and the count that it is divided by.
        count: the number of labels that it is the mean over, or None.
        source: the user's line that adds it, or ''.
    """

    node: fx.Node
    count: fx.Node | None
    source: str


def note_loss(program: Program) -> bool:
    """Make the count an output of the forward graph, beside the loss, and note the auxiliary terms.

    A count that the loss function gave is one already. `program.notes["auxiliary"]` gets the user's lines that add
    terms without labels, or None where the loss has several terms and none of them is known to be that of the labels.

    Returns:
        Whether the graph has changed.
    """
    (output,) = program.forward.graph.find_nodes(op="output")
    loss = output.args[0][0]
    parameters = {
        n for n, s in zip(program.forward.graph.find_nodes(op="placeholder"), program.inputs, strict=True)
        if s.kind == "parameter"
    }  # fmt: skip
    terms = loss_terms(loss, parameters)
    program.notes["auxiliary"] = _auxiliary(terms)
    counts = {t.count for t in terms if t.count is not None}
    if len(output.args[0]) == 2 or len(counts) != 1:
        return False
    output.args = ((loss, counts.pop()),)
    return True


def loss_terms(loss: fx.Node, parameters: set[fx.Node]) -> list[Term]:
    """The addends of the loss that depend on a parameter, in order."""
    found: list[Term] = []
    frontier = [Term(loss, None, "")]
    while frontier:
        term = frontier.pop(0)
        node, name = term.node, op_name(term.node)
        inputs = [a for a in node.args if isinstance(a, fx.Node)]
        if name in ("add", "sub", "rsub"):
            frontier += [Term(n, term.count, meta.source(n)) for n in inputs]
        elif name in SAME_NUMBER or (name in ("mul", "div") and len(inputs) == 1):
            if name != "mul" or node.args[1] != 0:
                frontier.append(Term(inputs[0], term.count, term.source))
        elif name == "div" and term.count is None and (count := _count(inputs[1], parameters)) is not None:
            frontier.append(Term(inputs[0], count, term.source))
        elif name != "detach" and ancestors([node]) & parameters:
            found.append(term)
    return found


def _count(divisor: fx.Node, parameters: set[fx.Node]) -> fx.Node | None:
    """The count in a divisor: a sum of something that the batch alone decides, kept from being zero or not."""
    node = divisor
    while op_name(node) in SAME_COUNT and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    val = meta.tensor(node)
    if op_name(node) not in ("sum", "count_nonzero") or val is None or val.dim() != 0:
        return None
    return None if ancestors([node]) & parameters else node


def _auxiliary(terms: list[Term]) -> tuple[str, ...] | None:
    labelled = [t for t in terms if t.count is not None or any(op_name(n) in TOKEN_LOSSES for n in ancestors([t.node]))]
    if len(terms) > 1 and not labelled:
        return None
    return tuple(t.source for t in terms if t not in labelled and len(terms) > 1)
