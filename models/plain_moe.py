"""A small mixture-of-experts language model in plain PyTorch.

Nothing here knows of oomc: causal attention through scaled_dot_product_attention, and a top-k layer whose stacked
expert weights are applied one expert after another to all tokens, weighted by zero where a token did not choose the
expert. That is the form one writes first; finding the experts in it is the compiler's task.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class PlainMoeConfig:
    """Sizes of the model."""

    vocab_size: int = 512
    hidden_size: int = 64
    expert_size: int = 32
    num_layers: int = 2
    num_heads: int = 4
    num_experts: int = 8
    top_k: int = 2


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: PlainMoeConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        batch, rows, size = x.shape
        q, k, v = self.qkv(x).view(batch, rows, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, rows, size))
        return out


class Experts(nn.Module):
    """A router and experts, each a two-layer perceptron, in stacked weights."""

    def __init__(self, config: PlainMoeConfig) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(config.num_experts, config.expert_size, config.hidden_size) * 0.1)
        self.down = nn.Parameter(torch.randn(config.num_experts, config.hidden_size, config.expert_size) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] to [T, D]."""
        probabilities = F.softmax(self.router(x).float(), dim=-1)
        weights, chosen = torch.topk(probabilities, self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        y = torch.zeros_like(x)
        for expert in range(self.num_experts):
            share = (weights * (chosen == expert)).sum(-1, keepdim=True)
            y = y + share * (F.silu(x @ self.up[expert].t()) @ self.down[expert].t())
        return y


class Layer(nn.Module):
    """Attention and experts, each behind a norm and beside a residual."""

    def __init__(self, config: PlainMoeConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        x = x + self.attention(self.norm1(x))
        return x + self.experts(self.norm2(x).flatten(0, 1)).view(x.shape)


class PlainMoe(nn.Module):
    """Embedding, layers, norm and head."""

    def __init__(self, config: PlainMoeConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits [B, S, V] in fp32, or, with labels [B, S] (-100: not counted), the mean loss of the next token."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x)).float()
        if labels is None:
            return logits
        following = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), following.flatten(), ignore_index=-100)
