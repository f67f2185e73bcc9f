"""Small models in which one thing is special."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs import VOCAB


class Residual(nn.Module):
    """x + W x, with a buffer, a flag and a constant in which layers may differ."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(size))
        self.gated, self.factor = False, 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x + self.bias) * self.factor
        return x + (y.sigmoid() * y if self.gated else y.tanh())


class Stack(nn.Module):
    """Embedding, layers, head and mean loss, which is returned as `wrap(loss, logits)`."""

    def __init__(
        self, layers: int, size: int = 8, wrap: Callable[[Tensor, Tensor], Any] = lambda loss, _: loss
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, size)
        self.layers = nn.ModuleList(Residual(size) for _ in range(layers))
        self.head = nn.Linear(size, VOCAB)
        self.wrap = wrap

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return self.wrap(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


ROWS = 64


class Drop(nn.Module):
    """Dropout in two layers of an embedding that is all ones; the loss is the sum of what is left."""

    P = 0.3

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, 8)
        nn.init.ones_(self.embed.weight)
        self.layers = nn.ModuleList(nn.Dropout(self.P) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class HitExperts(nn.Module):
    """Loops over the experts that some token chose."""

    def __init__(self, size: int, experts: int) -> None:
        super().__init__()
        self.router, self.up = nn.Linear(size, experts), nn.Parameter(torch.randn(experts, size, size))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        y = torch.zeros_like(x)
        for expert in chosen.unique():
            rows = torch.where(chosen == expert)
            y[rows] = x[rows] @ self.up[expert]
        return y


class LoopLayer(nn.Module):
    """A layer whose experts are a data-dependent loop."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.experts = HitExperts(size, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(x)


class Loop(Stack):
    """A stack of such layers."""

    def __init__(self) -> None:
        super().__init__(2)
        self.layers = nn.ModuleList(LoopLayer(8) for _ in range(2))
