"""The reference: a model trained eagerly by plain PyTorch, with an fp32 master behind each bf16 parameter.

Forward and backward run in the model's own dtypes; gradients are widened to fp32; `torch.optim.AdamW` (or the optimizer
given) updates the fp32 masters; the working weight is the master rounded to the nearest bf16, ties away from zero.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def round_bf16(master: torch.Tensor) -> torch.Tensor:
    """fp32 -> bf16, to nearest, ties away from zero: `(bits + 0x8000) >> 16`. NaN stays NaN."""
    bits = master.contiguous().view(torch.int32)
    hi = ((bits.to(torch.int64) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(master.isnan(), torch.full_like(hi, torch.nan), hi)


class Reference:
    """Trains a copy of `model`; `model` itself is left alone.

    Args:
        model: called with a batch's keywords; returns a 0-dim loss, or something with a `loss`.
        groups: parameter groups as an optimizer takes them, with parameter NAMES under "params"; None for one group.
        optimizer: makes the optimizer from groups of masters.
        options: defaults of all groups (lr, betas, eps, weight_decay).

    Attributes:
        model: the copy; its parameters are the working weights.
        optimizer: over the masters; its param_groups may be changed between steps, by a scheduler for example.
        gradients: those of the last update by parameter name, in the parameter's dtype (fp32 after several batches);
            a parameter that was not used has none.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        groups: Sequence[Mapping[str, Any]] | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        **options: Any,
    ) -> None:
        self.model = copy.deepcopy(model)
        self._parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self._masters = {n: torch.nn.Parameter(p.detach().float().clone()) for n, p in self._parameters.items()}
        named = [{"params": list(self._masters)}] if groups is None else groups
        of_masters = [{**group, "params": [self._masters[name] for name in group["params"]]} for group in named]
        self.optimizer = optimizer(of_masters, **options)
        self.gradients: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}

    def accumulate(self, scale: float = 1.0, **batch: Any) -> torch.Tensor:
        """Forward and backward of one micro-batch; its gradients, times `scale`, are added up in fp32."""
        self.model.zero_grad(set_to_none=True)
        output = self.model(**batch)
        loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            if name in self._sums:
                self._sums[name] = self._sums[name].float() + scale * parameter.grad.float()
            else:
                self._sums[name] = parameter.grad.clone() if scale == 1.0 else scale * parameter.grad.float()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()

    def update(self) -> None:
        """Update the masters with what was accumulated, and the working weights from them."""
        self.gradients, self._sums = self._sums, {}
        for name, master in self._masters.items():
            master.grad = self.gradients[name].float() if name in self.gradients else None
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                value = self._masters[name].detach()
                parameter.copy_(round_bf16(value) if parameter.dtype == torch.bfloat16 else value)

    def step(self, **batch: Any) -> torch.Tensor:
        """One training step; returns the 0-dim loss."""
        loss = self.accumulate(**batch)
        self.update()
        return loss

    def masters(self) -> dict[str, torch.Tensor]:
        """The fp32 master of each trainable parameter, by name (a tied parameter once, under its first name)."""
        return {name: master.detach() for name, master in self._masters.items()}
