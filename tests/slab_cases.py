"""A small slab of every kind of parameter, with gradients, for the tests of the runtime."""

from __future__ import annotations

from typing import Any

import torch

from oomc.runtime.adamw import AdamW
from oomc.runtime.layout import ParamSpec, SlabLayout
from oomc.runtime.slabs import HostSlab

CPU = torch.device("cpu")
GROUPS: list[dict[str, Any]] = [
    {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1},
    {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.0},
]
HYPERS = [AdamW().hyper(group) for group in GROUPS]
SPECS = [
    ParamSpec("w", (33, 17), torch.bfloat16, True),
    ParamSpec("norm", (5,), torch.float32, True),
    ParamSpec("frozen", (7, 3), torch.float16, False),
    ParamSpec("b", (3,), torch.bfloat16, True),
    ParamSpec("scalar", (), torch.float32, True),
    ParamSpec("experts", (4, 40, 20), torch.bfloat16, True),
]
GROUP_OF = {"w": 0, "norm": 1, "b": 1, "scalar": 0, "experts": 0}


def make_slab(name: str = "block", seed: int = 0, pin: bool = False) -> HostSlab:
    slab = HostSlab(SlabLayout.build(name, SPECS), pin)
    generator = torch.Generator().manual_seed(seed)
    for spec in SPECS:
        slab.load(spec.name, torch.randn(spec.shape, generator=generator))
    return slab


def gradients(step: int, salt: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + salt)
    return {s.name: torch.randn(s.shape, generator=generator).to(s.dtype) for s in SPECS if s.trainable}


def snapshot(slab: HostSlab) -> list[torch.Tensor]:
    return [slab.weights.clone(), slab.lo.clone(), slab.state["m"].clone(), slab.state["v"].clone()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)) for x, y in zip(a, b))
