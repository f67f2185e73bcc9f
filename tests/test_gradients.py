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


def reference_step(
    slab: HostSlab, grads: dict[str, torch.Tensor], state: dict[str, tuple[Array, Array]], step: int
) -> None:
    """AdamW by the same kernel, a parameter at a time, from copies: what any chunking must give."""
    rule = AdamW()
    for name, grad in grads.items():
        constants = rule.constants(HYPERS[GROUP_OF[name]], step)
        bits = grad.reshape(-1).view(torch.int16 if grad.dtype == torch.bfloat16 else torch.int32).numpy()
        start, stop = slab.layout.gradient_ranges[name]
        split = slab.layout.bf16.elements
        if slab.layout.place(name).spec.dtype == torch.bfloat16:
            weights, lo = slab.hi_array[start:stop], slab.lo_array[start:stop]
        else:
            weights, lo = slab.fp32_array[start - split : stop - split], None
        rule.update(weights, lo, state[name], bits, 1.0, constants)


def make_runtime(slab: HostSlab) -> Runtime:
    return Runtime(CPU, [slab], [], AdamW(), GROUP_OF, workers=2, ring_bytes=1, chunk_elems=256)


def test_each_group_frozen_parameters_and_padding() -> None:
    slab, expected = make_slab(), make_slab()
    frozen = slab.param("frozen").clone()
    state = {
        name: (torch.zeros(stop - start).numpy(), torch.zeros(stop - start).numpy())
        for name, (start, stop) in slab.layout.gradient_ranges.items()
    }
    runtime = make_runtime(slab)
    for step in range(1, 4):
        grads = gradients(step)
        runtime.begin_step(HYPERS)
        runtime.wait_gradients(runtime.offload(slab.name, list(grads), list(grads.values())))
        reference_step(expected, grads, state, step)
    runtime.synchronize()
    assert torch.equal(slab.weights, expected.weights)
    assert torch.equal(slab.lo, expected.lo)
    assert torch.equal(slab.param("frozen"), frozen)
    used = torch.zeros(slab.layout.state_elements, dtype=torch.bool)
    for name, (start, stop) in slab.layout.gradient_ranges.items():
        assert torch.equal(slab.state["m"][start:stop], torch.from_numpy(state[name][0]))
        used[start:stop] = True
    assert not slab.state["m"][~used].any()
    assert not slab.state["v"][~used].any()
    assert not slab.lo[~used[: slab.lo.numel()]].any()
    runtime.close()


def test_an_unused_parameter_keeps_weights_state_and_step() -> None:
    slab = make_slab()
    runtime = make_runtime(slab)
    grads: dict[str, torch.Tensor | None] = dict(gradients(0))
    runtime.begin_step(HYPERS)
    runtime.offload(slab.name, list(grads), list(grads.values())).wait()
    runtime.synchronize()
    before, start = slab.master("norm"), slab.layout.gradient_ranges["norm"][0]
    moment, other = slab.state["m"][start : start + 5].clone(), slab.master("w")
    grads["norm"] = None
    runtime.begin_step(HYPERS)
    runtime.offload(slab.name, list(grads), list(grads.values())).wait()
    runtime.offload(slab.name, ["norm"], [None]).wait()
    runtime.synchronize()
    assert torch.equal(slab.master("norm"), before)
    assert torch.equal(slab.state["m"][start : start + 5], moment)
    assert not torch.equal(slab.master("w"), other)
    assert (slab.steps["norm"], slab.steps["w"]) == (1, 2)
    runtime.close()


def test_accumulation_is_a_sum_in_fp32() -> None:
    slab, other = make_slab(), make_slab()
    runtime = make_runtime(slab)
    total = {name: torch.zeros(g.shape) for name, g in gradients(0).items()}
    for window in range(2):
        runtime.begin_step(HYPERS)
        for i in range(3):
            grads = gradients(window, i)
            runtime.offload(slab.name, list(grads), list(grads.values()), "accumulate").wait()
            for name, grad in grads.items():
                total[name] = total[name] + grad.float() if i else grad.float()
        slab.wait_updated()
        assert slab.accumulator is not None
        for name, (start, stop) in slab.layout.gradient_ranges.items():
            assert torch.equal(slab.accumulator[start:stop], total[name].view(-1))
        runtime.update_accumulated(slab.name, 0.25)
    runtime.synchronize()
    runtime.update_accumulated(slab.name)
    runtime.synchronize()
    assert slab.steps["w"] == 2, "nothing was accumulated, nothing is updated"
    runtime.close()
    again = Runtime(CPU, [other], [], AdamW(), GROUP_OF, synchronous=True)
    for window in range(2):
        sums = {name: sum(gradients(window, i)[name].float() for i in range(3)) for name in total}
        again.begin_step(HYPERS)
        again.offload(other.name, list(sums), [torch.as_tensor(0.25 * s) for s in sums.values()]).wait()
    assert other.steps["w"] == 2
    again.close()


def test_tied_contributions_and_the_hyperparameters_of_the_call() -> None:
    outcomes = []
    for late in (False, True):
        slab = make_slab()
        runtime = make_runtime(slab)
        runtime.begin_step(HYPERS)
        grads = gradients(0)
        runtime.offload(slab.name, ["w", "experts"], [grads["w"], grads["experts"]], "accumulate").wait()
        runtime.offload(slab.name, ["w"], [gradients(1)["w"]], "accumulate").wait()
        runtime.update_accumulated(slab.name)
        if late:  # the next step's hyperparameters must not reach into this step's updates
            runtime.begin_step([AdamW().hyper(group | {"lr": 100.0}) for group in GROUPS])
        runtime.synchronize()
        outcomes.append([slab.master("w"), slab.master("experts")])
        runtime.close()
    assert all(torch.equal(a, b) for a, b in zip(*outcomes))
    assert not torch.equal(outcomes[0][0], make_slab().master("w"))


def test_non_finite_elements_are_counted() -> None:
    slab = make_slab()
    runtime = make_runtime(slab)
    grads = gradients(0)
    grads["w"][3, 4] = torch.inf
    grads["norm"][0] = torch.nan
    runtime.begin_step(HYPERS)
    runtime.offload(slab.name, list(grads), list(grads.values())).wait()
    counts = runtime.end_step()
    runtime.synchronize()
    assert counts.nonfinite == 2
    assert counts.d2h_bytes == sum(g.nbytes for g in grads.values())
    runtime.close()


def test_an_error_in_an_update_reaches_the_next_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> int:
        raise ZeroDivisionError("kernel")

    slab = make_slab()
    runtime = Runtime(CPU, [slab], [slab.layout.weight_bytes], AdamW(), GROUP_OF, ring_bytes=1, chunk_elems=256)
    monkeypatch.setattr(AdamW, "update", fail)
    grads = gradients(0)
    runtime.begin_step(HYPERS)
    runtime.offload(slab.name, list(grads), list(grads.values())).wait()
    with pytest.raises(RuntimeError, match="lane h2d") as caught:
        runtime.wait(runtime.fetch(slab.name, 0))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert isinstance(caught.value.__cause__.__cause__, ZeroDivisionError)
    with pytest.raises(RuntimeError, match="worker threads"):
        runtime.synchronize()
    runtime.close()
    runtime.close()


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


def test_gradients_of_other_dtypes_and_strides() -> None:
    outcomes = []
    for change in (torch.Tensor.clone, torch.Tensor.float, lambda g: g.t().contiguous().t()):
        slab = make_slab()
        runtime = make_runtime(slab)
        runtime.begin_step(HYPERS)
        runtime.offload(slab.name, ["w"], [change(gradients(0)["w"])]).wait()
        runtime.synchronize()
        outcomes.append(slab.master("w"))
        runtime.close()
    assert torch.equal(outcomes[0], outcomes[1])
    assert torch.equal(outcomes[0], outcomes[2])


def test_chunks_cover_everything_once_within_their_buffers() -> None:
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.bfloat16, torch.float32]
    for _ in range(100):
        count = int(torch.randint(1, 12, (), generator=generator))
        sizes = torch.randint(0, 700, (count,), generator=generator).tolist()
        kinds = [dtypes[i] for i in torch.randint(0, 2, (count,), generator=generator).tolist()]
        seen = [0] * count
        for chunk in plan_chunks(sizes, kinds, 512):
            end = 0
            assert len({kinds[run.index] for run in chunk}) == 1
            for run in chunk:
                assert run.start == seen[run.index]
                assert run.offset % 64 == 0
                assert run.offset >= end
                seen[run.index] = run.stop
                end = run.offset + (run.stop - run.start) * kinds[run.index].itemsize
            assert end <= 512
        assert seen == sizes
