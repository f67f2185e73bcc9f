"""The gradient ring: groups, padding, accumulation, unused parameters, errors, packing."""

from __future__ import annotations

import queue

import pytest
import torch

from oomc.runtime.adamw import AdamW
from oomc.runtime.executor import Runtime
from oomc.runtime.gradients import Clipping, ring_buffers
from oomc.runtime.optim import Array
from oomc.runtime.slabs import HostSlab
from oomc.runtime.update_workers import Ring
from oomc.runtime.updates import plan_chunks
from tests.slab_cases import CPU, GROUP_OF, GROUPS, HYPERS, gradients, make_slab


def reference_step(
    slab: HostSlab, grads: dict[str, torch.Tensor], state: dict[str, tuple[Array, Array]], step: int
) -> None:
    """AdamW by the same kernel, a parameter at a time, from copies: what any chunking must give."""
    rule = AdamW()
    for name, grad in grads.items():
        constants = rule.constants(HYPERS[GROUP_OF[name]], step, 0)
        bits = grad.reshape(-1).view(torch.int16 if grad.dtype == torch.bfloat16 else torch.int32).numpy()
        start, stop = slab.layout.gradient_ranges[name]
        weights, lo, _ = slab.part((), start, stop)
        rule.update(
            weights.numpy(), None if lo is None else lo.numpy(), state[name], bits, 1.0, constants, 0
        )  # fmt: skip


def make_runtime(slab: HostSlab) -> Runtime:
    return Runtime(CPU, [slab], [], AdamW(), GROUP_OF, workers=2, buffers=3, chunk_elems=256)


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
        counts = []
        for i in range(4):
            runtime.begin_step(HYPERS, weighted=True)
            grads = gradients(window, i)
            runtime.offload(slab.name, list(grads), list(grads.values()), "sum").wait()
            counts.append(runtime.end_step())
            for name, grad in grads.items():
                total[name] = total[name] + grad.float() if i else grad.float()
        slab.wait_updated()
        assert slab.kept is not None
        for name, (start, stop) in slab.layout.gradient_ranges.items():
            assert torch.equal(slab.kept.tensor(start, stop), total[name].view(-1))
        runtime.begin_step(HYPERS)
        runtime.apply_kept(Clipping(window=tuple(counts)))
    runtime.synchronize()
    runtime.begin_step(HYPERS)
    runtime.apply_kept(Clipping())
    runtime.update_sum(slab.name)
    runtime.synchronize()
    assert slab.steps["w"] == 2, "nothing was accumulated, nothing is updated"
    runtime.close()
    again = Runtime(CPU, [other], [], AdamW(), GROUP_OF, synchronous=True)
    for window in range(2):
        sums = {name: sum(gradients(window, i)[name].float() for i in range(4)) for name in total}
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
        runtime.offload(slab.name, ["w", "experts"], [grads["w"], grads["experts"]], "sum").wait()
        runtime.offload(slab.name, ["w"], [gradients(1)["w"]], "sum").wait()
        runtime.update_sum(slab.name)
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
    runtime = Runtime(CPU, [slab], [slab.layout.weight_bytes], AdamW(), GROUP_OF, buffers=3, chunk_elems=256)
    monkeypatch.setattr(AdamW, "update", fail)
    grads = gradients(0)
    runtime.begin_step(HYPERS)
    runtime.offload(slab.name, list(grads), list(grads.values())).wait()
    runtime.await_update(slab.name)
    with pytest.raises(RuntimeError, match="lane h2d") as caught:
        runtime.wait(runtime.fetch(slab.name, 0))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert isinstance(caught.value.__cause__.__cause__, ZeroDivisionError)
    with pytest.raises(RuntimeError, match="worker threads"):
        runtime.synchronize()
    runtime.close()
    runtime.close()


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


def test_beside_a_device_that_updates_fewer_buffers_of_the_ring_are_in_use() -> None:
    assert (ring_buffers(16), ring_buffers(16, "both"), ring_buffers(1, "both")) == (20, 12, 3)
    ring = Ring(ring_buffers(16), 1024, pin=False)
    for count, most in ((12, 12), (20, 20), (3, 3), (1, 3), (99, 20)):
        ring.use(count)
        taken = [ring.take() for _ in range(most)]
        assert len(set(taken)) == most
        with pytest.raises(queue.Empty):
            ring._free.get_nowait()
        for index in taken:
            ring.give(index, None)
    taken = [ring.take() for _ in range(20)]
    ring.use(4)
    for index in taken:
        ring.give(index, None)  # all but four rest
    assert ring._free.qsize() == 4
    ring.use(20)
    assert ring._free.qsize() == 20
