"""The gradient ring with the weight buffers: adversarial order, packing, accumulation, groups, errors."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from oomc.runtime.adamw import AdamW
from oomc.runtime.chaos import Adversary
from oomc.runtime.executor import Runtime
from oomc.runtime.gradients import plan_chunks
from oomc.runtime.layout import ParamSpec, SlabLayout
from oomc.runtime.optim import Array
from oomc.runtime.slabs import HostSlab

CPU = torch.device("cpu")
GROUPS = [
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


def make_slab(name: str = "block", seed: int = 0) -> HostSlab:
    slab = HostSlab(SlabLayout.build(name, SPECS))
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
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b))


def train(adversary: Adversary | None = None, synchronous: bool = False, chunk_elems: int = 512) -> list[torch.Tensor]:
    """Three slabs through two slots; gradients depend on the fetched weights; some accumulate; one is unused."""
    slabs = [make_slab(f"block{i}", i) for i in range(3)]
    size = slabs[0].layout.weight_bytes
    runtime = Runtime(
        CPU, slabs, [size, size], AdamW(), GROUP_OF, ring_bytes=1, chunk_elems=chunk_elems, workers=3,
        adversary=adversary, synchronous=synchronous,
    )  # fmt: skip
    try:
        for step in range(4):
            runtime.begin_step(HYPERS)
            fetch = runtime.fetch("block0", 0)
            for i in range(3):
                following = runtime.fetch(f"block{i + 1}", (i + 1) % 2) if i < 2 else None
                runtime.wait(fetch)
                values = dict(zip([s.name for s in SPECS], runtime.weights(fetch)))
                noise = gradients(step, i)
                names = list(noise)
                grads = [noise[name] + values[name].sin() for name in names]
                used = [None if name == "norm" and step == 1 else g for name, g in zip(names, grads)]
                runtime.release(fetch)
                if i == 1:
                    tickets = [runtime.offload("block1", names, used, "accumulate") for _ in range(2)]
                    runtime.update_accumulated("block1", 0.5)
                else:
                    tickets = [runtime.offload(f"block{i}", names, used, "update")]
                for ticket in tickets:
                    runtime.wait_gradients(ticket)
                if following is not None:
                    fetch = following
            runtime.end_step()
        runtime.synchronize()
        return [tensor for slab in slabs for tensor in snapshot(slab)]
    finally:
        runtime.close()


def test_adversarial_order_gives_the_synchronous_bits() -> None:
    expected = train(synchronous=True)
    assert all(torch.isfinite(t).all() for t in expected if t.dtype == torch.float32)
    for seed in range(8):
        assert same(train(Adversary(seed)), expected)
    assert same(train(chunk_elems=1 << 20), expected), "the size of chunks changes the result"
