"""Whether a bf16 step rounds no worse than eager bf16: both against the same model in fp64."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from oomc.step import Step
from tests.helpers import Batch, relative, tokens
from tests.reference import Reference


def assert_rounds_as_eager(step: Step, eager: nn.Module, rounds: int = 8) -> None:
    """Loss and gradients of micro-batches differ from fp64's at most 1.5 times as much as those of eager bf16.

    Args:
        step: of a bf16 model.
        eager: a copy of the model.
        rounds: of three micro-batches; enough that a tensor of a few numbers is not a matter of luck.
    """
    double: Any = copy.deepcopy(eager).double()
    if hasattr(double, "set_experts_implementation"):
        double.set_experts_implementation("eager")  # grouped_mm knows no fp64
    exact, plain = Reference(double), Reference(eager)
    ours, eagers = Errors(), Errors()
    rows = decided(double, 2048, 16)
    for batch in rows[: 24 * rounds].split([18, 1, 5] * rounds):
        call: Batch = {"input_ids": batch, "labels": batch}
        loss = step.forward_backward(**call)
        valid = step.metrics["valid_tokens"]  # what sums of gradients are weighed by
        truth = exact.accumulate(scale=valid, **call)
        ours.add("loss", loss, truth)
        eagers.add("loss", plain.accumulate(scale=valid, **call), truth)
        ours.add_sums(step.gradients(), exact._sums)
        eagers.add_sums(plain._sums, exact._sums)
    for quantity, error in ours.squares.items():
        ratio = (error / eagers.squares[quantity]) ** 0.5
        assert ratio <= 1.5, f"{quantity}: {ratio:.2f} times eager's error, {(error / (3 * rounds)) ** 0.5:.1e}"


class Errors:
    """Sums over batches of squared relative errors; a gradient that is held as a sum is compared batch by batch."""

    def __init__(self) -> None:
        self.squares: dict[str, float] = {}
        self._last: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, name: str, value: torch.Tensor, truth: torch.Tensor) -> None:
        self.squares[name] = self.squares.get(name, 0.0) + relative(value, truth) ** 2

    def add_sums(self, sums: dict[str, torch.Tensor], truths: dict[str, torch.Tensor]) -> None:
        for name, truth in truths.items():
            before, truth_before = self._last.get(name, (torch.zeros(()), torch.zeros(())))
            self.add(name, sums[name].double() - before, truth - truth_before)
            self._last[name] = (sums[name].double(), truth.clone())


class Margins(TorchDispatchMode):
    """For each row of tokens, how far every top-k was from choosing otherwise, in deviations of what it chose from."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.least = torch.full((rows,), torch.inf, dtype=torch.float64)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.topk.default and args[1] < args[0].shape[-1]:
            best = args[0].sort(-1, descending=True).values
            margin = (best[..., args[1] - 1] - best[..., args[1]]) / args[0].std()
            self.least = torch.minimum(self.least, margin.reshape(len(self.least), -1).amin(1).double())
        return func(*args, **kwargs or {})


def decided(model: nn.Module, rows: int, length: int) -> torch.Tensor:
    """Random rows of tokens, those first whose choice of experts hangs least on rounding.

    One token that goes to another expert makes an error far above that of any arithmetic, for eager and for us, and
    whom it meets is luck.
    """
    ids = tokens(rows, length, seed=5)["input_ids"]
    with torch.no_grad(), Margins(rows) as margins:
        model(input_ids=ids)
    return ids[margins.least.argsort(descending=True)]
