"""Typed access to what the graphs know of their nodes. Nothing else touches `node.meta` keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

VAL = "val"
MODULES = "nn_module_stack"
TRACE = "stack_trace"
GROUP = "oomc_expert_group"


def value(node: fx.Node) -> Any:
    """The fake tensor, symbolic or plain number (or tuple of these) that stands for the node's value."""
    return node.meta.get(VAL)


def set_value(node: fx.Node, val: Any) -> None:
    """Record what stands for the node's value."""
    node.meta[VAL] = val


def tensor(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor of a node with one tensor as its value, else None."""
    val = node.meta.get(VAL)
    return val if isinstance(val, torch.Tensor) else None


def is_size(node: fx.Node) -> bool:
    """Whether the node's value is a number (a size or what is computed from sizes), not a tensor."""
    return isinstance(node.meta.get(VAL), int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)


def modules(node: fx.Node) -> tuple[str, ...]:
    """Fully qualified names of the modules that the node was traced in, outermost first; '' is the model itself."""
    stack = node.meta.get(MODULES) or {}
    return tuple(_own(entry[0]) for entry in stack.values())


def _own(name: str) -> str:
    """A module's name in the user's model, which the capture wraps as `_model`."""
    return name.removeprefix("_model").removeprefix(".")


def module_calls(node: fx.Node) -> tuple[str, ...]:
    """Like `modules`, with a suffix that tells several calls of one module apart."""
    stack = node.meta.get(MODULES) or {}
    names = []
    for key, entry in stack.items():
        call = key.rpartition("@")[2] if "@" in key else ""
        names.append(_own(entry[0]) + ("@" + call if call else ""))
    return tuple(names)


def move_modules(node: fx.Node, old: str, new: str) -> None:
    """Say that the node was traced in module `new` where it says that it was in `old`, or in a part of it."""
    stack = {}
    for key, (name, *rest) in (node.meta.get(MODULES) or {}).items():
        own = _own(name)
        if own == old or own.startswith(f"{old}."):
            name = name[: len(name) - len(own)] + new + own[len(old) :]
        stack[key] = (name, *rest)
    node.meta[MODULES] = stack


def source(node: fx.Node) -> str:
    """The user's own source line that the node came from, or ''."""
    lines = (node.meta.get(TRACE) or "").strip().splitlines()
    return lines[-1].strip() if lines else ""


def copy_origin(new: fx.Node, old: fx.Node) -> None:
    """Say that `new` stands where `old` stood in the user's model."""
    for key in (MODULES, TRACE, "source_fn_stack", "torch_fn"):
        if key in old.meta:
            new.meta[key] = old.meta[key]


def expert_group(node: fx.Node) -> int | None:
    """Which of its layer's groups of experts the node computes, if the layer's experts are in groups."""
    return node.meta.get(GROUP)


def set_expert_group(node: fx.Node, group: int) -> None:
    """Record which of its layer's groups of experts the node computes."""
    node.meta[GROUP] = group


@dataclass(frozen=True)
class StepNote:
    """Where a node of the step graph comes from.

    Attributes:
        phase: `forward`, `recompute`, `regenerate` (what earlier blocks made, for this one's backward), `backward`, ''.
        block: index of the block whose forward or backward it is part of, or -1.
        workset: the workset's name, or ''.
        source: name of the forward graph's value that this one is (or whose gradient it is), or ''.
    """

    phase: str = ""
    block: int = -1
    workset: str = ""
    source: str = ""


def note(node: fx.Node) -> StepNote:
    """Where a node of the step graph comes from."""
    return node.meta.get("oomc", StepNote())


def set_note(node: fx.Node, step_note: StepNote) -> None:
    """Record where a node of the step graph comes from."""
    node.meta["oomc"] = step_note
