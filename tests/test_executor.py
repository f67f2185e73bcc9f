"""The runtime as a whole: adversarial order, overlap, misuse, memory that is let go of, and the reference's numbers."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from oomc.runtime.adamw import AdamW
from oomc.runtime.chaos import Adversary
from oomc.runtime.executor import Runtime
from oomc.runtime.layout import ParamSpec, SlabLayout
from oomc.runtime.slabs import HostSlab
from oomc.runtime.weights import Fetch
from tests.reference import Reference
from tests.slab_cases import CPU, GROUP_OF, GROUPS, HYPERS, SPECS, gradients, make_slab, same, snapshot


def updated(runtime: Runtime, slab: str, slot: int) -> Fetch:
    """Fetch a slab after its updates under way, as a step graph does."""
    runtime.await_update(slab)
    return runtime.fetch(slab, slot)


def train(
    device: torch.device,
    adversary: Adversary | None = None,
    synchronous: bool = False,
    chunk_elems: int = 512,
    pin: bool = False,
) -> list[torch.Tensor]:
    """Three slabs through two slots; gradients depend on the fetched weights; some accumulate; one is unused."""
    slabs = [make_slab(f"block{i}", i, pin) for i in range(3)]
    size = slabs[0].layout.weight_bytes
    runtime = Runtime(
        device,
        slabs,
        [size, size],
        AdamW(),
        GROUP_OF,
        buffers=3,
        chunk_elems=chunk_elems,
        workers=3,
        adversary=adversary,
        synchronous=synchronous,
    )
    try:
        for step in range(4):
            runtime.begin_step(HYPERS)
            fetch = updated(runtime, "block0", 0)
            for i in range(3):
                following = updated(runtime, f"block{i + 1}", (i + 1) % 2) if i < 2 else None
                runtime.wait(fetch)
                values = dict(zip([s.name for s in SPECS], runtime.weights(fetch)))
                noise = {name: grad.to(device) for name, grad in gradients(step, i).items()}
                names = list(noise)
                grads = [noise[name] + values[name].sin() for name in names]
                used = [None if name == "norm" and step == 1 else g for name, g in zip(names, grads)]
                runtime.release(fetch)
                if i == 1:
                    tickets = [runtime.offload("block1", names, used, "sum") for _ in range(2)]
                    runtime.update_sum("block1")
                else:
                    tickets = [runtime.offload(f"block{i}", names, used, "update")]
                for ticket in tickets:
                    runtime.wait_gradients(ticket)
                # what was given away may now be written over
                for grad in grads:
                    grad.fill_(torch.nan)
                if following is not None:
                    fetch = following
            runtime.end_step()
        runtime.synchronize()
        return [tensor for slab in slabs for tensor in snapshot(slab)]
    finally:
        runtime.close()


CUDA = pytest.param(
    "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)


@pytest.mark.parametrize("name", ["cpu", CUDA])
def test_adversarial_order_gives_the_synchronous_bits(name: str) -> None:
    device, pin = torch.device(name), name == "cuda"
    expected = train(device, synchronous=True, pin=pin)
    assert all(torch.isfinite(t).all() for t in expected if t.dtype == torch.float32)
    for seed in range(8):
        assert same(train(device, Adversary(seed), pin=pin), expected)
    assert same(train(device, pin=pin), expected)
    assert same(train(device, chunk_elems=1 << 20, pin=pin), expected), "the size of chunks changes the result"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_large_copies_really_overlap_and_stay_right() -> None:
    """Slabs large enough that copies last; compute writes over released slots and gradients at once."""
    device, n = torch.device("cuda"), 48 << 20
    specs = [ParamSpec("w", (n,), torch.bfloat16, True)]
    results = []
    for synchronous in (True, False):
        slabs = [HostSlab(SlabLayout.build(f"s{i}", specs), pin=True) for i in range(4)]
        for i, slab in enumerate(slabs):
            slab.load("w", torch.linspace(-1, 1 + i, n))
        size = slabs[0].layout.weight_bytes
        runtime = Runtime(
            device, slabs, [size, size], AdamW(), {"w": 0}, chunk_elems=4 << 20, synchronous=synchronous,
            adversary=None if synchronous else Adversary(0),
        )  # fmt: skip
        for _ in range(2):
            runtime.begin_step(HYPERS)
            fetches = [updated(runtime, "s0", 0)]
            for i in range(4):
                if i < 3:
                    fetches.append(updated(runtime, f"s{i + 1}", (i + 1) % 2))
                runtime.wait(fetches[i])
                grad = runtime.weights(fetches[i])[0] * 0.5
                runtime.release(fetches[i])
                ticket = runtime.offload(f"s{i}", ["w"], [grad])
                runtime.wait_gradients(ticket)
                grad.fill_(torch.nan)
                del grad
        runtime.synchronize()
        results.append([slab.master("w") for slab in slabs])
        runtime.close()
    assert all(bool(torch.isfinite(t).all()) for t in results[0])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_misuse_of_slots_is_caught() -> None:
    slab = make_slab()
    runtime = Runtime(CPU, [slab], [slab.layout.weight_bytes, 10])
    runtime.begin_step()
    fetch = runtime.fetch(slab.name, 0)
    with pytest.raises(AssertionError, match="before the wait"):
        runtime.weights(fetch)
    with pytest.raises(AssertionError, match="before the wait"):
        runtime.release(fetch)
    with pytest.raises(AssertionError, match="slot 0 holds block"):
        runtime.fetch(slab.name, 0)
    with pytest.raises(AssertionError, match="do not fit slot 1"):
        runtime.fetch(slab.name, 1)
    runtime.wait(fetch)
    assert torch.equal(runtime.weights(fetch)[0], slab.param("w"))
    runtime.release(fetch)
    with pytest.raises(AssertionError, match="after their release"):
        runtime.weights(fetch)
    with pytest.raises(AssertionError, match="twice"):
        runtime.release(fetch)
    runtime.close()


def test_a_released_slot_is_poisoned_and_tickets_let_go() -> None:
    slab = make_slab()
    runtime = Runtime(CPU, [slab], [slab.layout.weight_bytes], AdamW(), GROUP_OF, adversary=Adversary(0))
    runtime.begin_step(HYPERS)
    fetch = runtime.fetch(slab.name, 0)
    runtime.wait(fetch)
    weights = runtime.weights(fetch)[0]
    runtime.release(fetch)
    assert weights.isnan().all()
    gradient = torch.ones(33, 17, dtype=torch.bfloat16)
    alive = weakref.ref(gradient.untyped_storage())
    ticket = runtime.offload(slab.name, ["w"], [gradient])
    del gradient
    assert alive() is not None
    runtime.wait_gradients(ticket)
    assert alive() is None, "the ticket, or a lane, still holds the gradient"
    runtime.close()
    buffer = weakref.ref(weights.untyped_storage())
    del weights, fetch, runtime
    gc.collect()
    assert buffer() is None, "device memory outlives the runtime"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_trained_through_the_sink_follows_the_reference(dtype: torch.dtype) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(8, 16, dtype=dtype), torch.nn.Linear(16, 4, dtype=dtype)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.b(torch.tanh(self.a(x))).float().square().mean()
            return loss

    torch.manual_seed(0)
    model = Model()
    names = [name for name, _ in model.named_parameters()]
    specs = [ParamSpec(name, tuple(p.shape), dtype, True) for name, p in model.named_parameters()]
    groups = [{**GROUPS[0], "params": names[::2]}, {**GROUPS[1], "params": names[1::2]}]
    reference = Reference(model, groups)
    slab = HostSlab(SlabLayout.build("model", specs))
    for name, parameter in model.named_parameters():
        slab.load(name, parameter.detach())
        parameter.data = slab.param(name)
    runtime = Runtime(CPU, [slab], [], AdamW(), {name: i % 2 for i, name in enumerate(names)}, workers=2)
    for _ in range(5):
        x = torch.randn(32, 8, dtype=dtype)
        expected = reference.step(x=x)
        loss = model(x=x)
        loss.backward()
        assert torch.equal(loss.detach(), expected)
        runtime.begin_step(HYPERS)
        grads = [parameter.grad for parameter in model.parameters()]
        assert all(grad is not None and torch.equal(grad, reference.gradients[n]) for n, grad in zip(names, grads))
        runtime.wait_gradients(runtime.offload("model", names, grads))
        runtime.synchronize()
        model.zero_grad()
        for name, master in reference.masters().items():
            torch.testing.assert_close(slab.master(name), master, rtol=1e-6, atol=1e-8)
            slab.load(name, master)  # so that the next losses are of the same weights, bit for bit
    runtime.close()
