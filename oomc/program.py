"""The program that the passes take and return: the graphs of one training step and what is known of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import fx

if TYPE_CHECKING:
    from oomc.plan import Plan
    from oomc.runtime.layout import Rows
    from oomc.worksets import Block, Form, Slab

InputKind = Literal["parameter", "buffer", "constant", "input", "rng"]


@dataclass(frozen=True)
class InputSpec:
    """What one placeholder of the forward graph stands for.

    Attributes:
        kind: parameter, buffer, constant (a tensor lifted out of the code), input (given at each call) or
            rng (int64 tensor of shape [2]: seed and step of the counter-based dropout).
        target: the parameter's or buffer's fully qualified name, the constant's name, or the input's keyword.
        trainable: whether a parameter has requires_grad.
        rows: of a parameter, if the placeholder stands for some of them only.
    """

    kind: InputKind
    target: str
    trainable: bool = False
    rows: Rows | None = None

    @property
    def name(self) -> str:
        """The target, with its rows if there are some of them only."""
        return self.target if self.rows is None else self.rows.name


@dataclass
class Program:
    """One training step on its way through the passes.

    Attributes:
        forward: the forward graph. One placeholder for each entry of `inputs`, in order; its output is the tuple
            `(loss,)` or `(loss, count)`. `node.meta["val"]` holds fake tensors whose batch and sequence sizes are
            symbols.
        inputs: what the placeholders stand for.
        constants: the tensors of `kind="constant"` inputs, by target.
        device: the device that the step computes on.
        blocks, slabs, forms: filled by partition_worksets and differentiate.
        differentiated: forms by the key of their text and by which of their inputs require a gradient, of this program
            and of all that are cut otherwise from the same trace: a form that is in several has one name in all.
        compiled: callables by (form, variant), from lower on.
        step: the step graph, from assemble on.
        plan: the decisions, from choose_residency on.
    """

    forward: fx.GraphModule
    inputs: list[InputSpec]
    device: torch.device
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    slabs: list[Slab] = field(default_factory=list)
    forms: dict[str, Form] = field(default_factory=dict)
    differentiated: dict[tuple[str, tuple[bool, ...]], Form] = field(default_factory=dict)
    compiled: dict[tuple[str, str], Callable[..., Any]] = field(default_factory=dict)
    step: fx.GraphModule | None = None
    plan: Plan | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        """The graph of the current stage: the step graph once there is one, else the forward graph."""
        return self.forward.graph if self.step is None else self.step.graph

    @property
    def groups(self) -> int:
        """In how many groups the experts of a layer are blocks of their own; 1 where they are part of their layer."""
        count: int = self.notes.get("expert groups", 1)
        return count

    @property
    def loss(self) -> fx.Node:
        """The forward graph's loss."""
        return self._outputs()[0]

    @property
    def count(self) -> fx.Node | None:
        """The forward graph's number of valid labels, an int or float of no dimensions: the loss is the mean over them.

        None where the loss has no such count, or several; micro-batches then weigh equally. Known from canonicalize on.
        """
        outputs = self._outputs()
        return outputs[1] if len(outputs) > 1 else None

    def _outputs(self) -> Sequence[fx.Node]:
        (output,) = self.forward.graph.find_nodes(op="output")
        outputs: Sequence[fx.Node] = output.args[0]
        return outputs


@dataclass(frozen=True)
class PassResult:
    """What a pass returns: the program, and whether it changed anything."""

    program: Program
    modified: bool


class Pass(Protocol):
    """A pass is a frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str:
        """The pass's name, as in DESIGN.md's pipeline."""

    def __call__(self, program: Program) -> PassResult:
        """Run on `program` and say whether anything changed."""
