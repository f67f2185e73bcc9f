"""The runtime's updates: host, device, streamed or resident, clipped or not, on the CPU and on CUDA: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oomc.runtime.adamw import AdamW
from oomc.runtime.chaos import Adversary
from oomc.runtime.executor import Runtime
from oomc.runtime.gradients import Clipping
from oomc.runtime.low_bit import LowBitAdamW
from oomc.runtime.optim import UpdateRule
from oomc.runtime.sgd import SGD
from oomc.runtime.slabs import DeviceSlab, Slab
from tests.slab_cases import CPU, GROUP_OF, GROUPS, SPECS, gradients, make_slab, same

STEPS = 20
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)
RULES: dict[str, UpdateRule] = {
    "adamw": AdamW(), "bf16": LowBitAdamW("bf16"), "8bit": LowBitAdamW("8bit"), "sgd": SGD(),
}  # fmt: skip


def bits(slabs: list[Slab]) -> list[torch.Tensor]:
    """Copies of all that the slabs hold."""
    return [t.cpu().clone() for s in slabs for t in (s.weights, s.lo, *s.state.values())]


def train(rule: UpdateRule, device: torch.device, resident: bool = False, clip: bool = False, **options: Any) -> Any:
    """The state after 20 steps of two slabs, and the norms; decay, two groups, a learning rate that changes."""
    slabs: list[Slab] = []
    for index in range(2):
        slab: Slab = make_slab(f"block{index}", index, pin=device.type == "cuda")
        if resident:
            host, slab = slab, DeviceSlab(slab.layout, device)
            slab.copy_from(host)
        slabs.append(slab)
    runtime = Runtime(device, slabs, [], rule, GROUP_OF, workers=2, buffers=3, chunk_elems=512, **options)
    norms = []
    try:
        for step in range(STEPS):
            momentum = {"momentum": 0.9, "dampening": 0.1, "nesterov": False}
            runtime.begin_step([rule.hyper(g | momentum | {"lr": g["lr"] * (1 + step % 3)}) for g in GROUPS])
            tickets = []
            for index in range(2):
                grads = {name: grad.to(device) for name, grad in gradients(step, index).items()}
                mode = "keep" if clip else "update"
                tickets.append(runtime.offload(f"block{index}", list(grads), list(grads.values()), mode))  # type: ignore[arg-type]
            if clip:
                runtime.apply_kept(Clipping(max_norm=10.0))
            for ticket in tickets:
                runtime.wait_gradients(ticket)
            runtime.synchronize()
            norms.append(runtime.end_step().grad_norm)
        return norms, bits(slabs)
    finally:
        runtime.close()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("name", ["cpu", CUDA])
def test_the_same_bits(name: str, clip: bool, rule: str) -> None:
    norms, expected = train(RULES[rule], CPU, clip=clip, synchronous=True)
    if clip:
        pairs = [[*gradients(s, 0).values(), *gradients(s, 1).values()] for s in range(STEPS)]
        every = [torch.cat([g.float().flatten() for g in grads]) for grads in pairs]
        assert norms == pytest.approx([float(g.double().norm()) for g in every], rel=1e-12)
        assert min(norms) > 10.0, "nothing is clipped"
    device = torch.device(name)
    for where in ("host", "device", "both"):
        assert same(train(RULES[rule], device, clip=clip, where=where)[1], expected), where
    assert same(train(RULES[rule], device, resident=True, clip=clip)[1], expected), "resident"
    for seed in range(2):
        adversary = Adversary(seed)
        assert same(train(RULES[rule], device, clip=clip, where="both", adversary=adversary)[1], expected)
        assert same(train(RULES[rule], device, clip=clip, resident=True, adversary=adversary)[1], expected)


def test_every_parameter_was_updated() -> None:
    _, state = train(RULES["adamw"], CPU, synchronous=True)
    before = make_slab("block0", 0)
    trained = [s.name for s in SPECS if s.trainable]
    assert all(not torch.equal(before.param(n), _of(before, state[0], n)) for n in trained if n != "scalar")


def _of(slab: Slab, weights: torch.Tensor, name: str) -> torch.Tensor:
    place = slab.layout.place(name)
    view = weights[place.offset : place.offset + place.spec.nbytes]
    return view.view(place.spec.dtype).view(place.spec.shape)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_steps_on_cuda(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole steps on the device: where updates run changes no bit; checkpoints resume; evaluation sees weights."""
    import copy
    from dataclasses import replace

    import oomc
    from oomc.allocator import LARGE_PAGE, SMALL_PAGE
    from oomc.compiler import CUDA_WORKSPACE, Compiler
    from oomc.models import tiny
    from oomc.runtime.meter import cuda_usage
    from tests.helpers import compiled, state, tokens

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        start = tiny.build("qwen3_moe", dtype=torch.bfloat16)
        batches = [tokens(2, 24, seed=i) for i in range(6)]

        def make(**options: Any) -> Any:
            return compiled(copy.deepcopy(start), batches[0], like=("steps on cuda",), on="cuda", **options)

        def run(step: Any, some: Any) -> dict[str, torch.Tensor]:
            losses = [step(**b) for b in some]
            return {"loss": losses[-1].cpu()} | {n: t.cpu() for n, t in state(step).items()}

        with pytest.raises(oomc.BudgetError) as caught:
            nothing = cuda_usage(torch.device("cuda")).outside + CUDA_WORKSPACE + 4096
            make(device=nothing, max_grad_norm=0.5)
        least = caught.value.smallest_device
        assert least is not None
        # for staging memory; and libraries that the first step loads are there when later ones are compiled
        least += LARGE_PAGE + SMALL_PAGE + CUDA_WORKSPACE
        for clip in (None, 0.5):
            runs = {}
            with monkeypatch.context() as context:  # or such a page would hold all of the state
                context.setattr(Compiler, "may_be_resident", lambda *_: frozenset())
                for where in ("host", "device", None):
                    step = make(updates=where, max_grad_norm=clip, device=least, tune=0)
                    if where is None:  # for a model this small the planner prefers the host alone
                        step.use_plan(replace(step.plan, where="both"), **batches[0])
                        step.prepare(**batches[0])
                    assert step.plan.where == (where or "both") and not step.plan.resident
                    runs[str(where)] = run(step, batches)
                    step.close()
            resident = make(max_grad_norm=clip)
            assert resident.plan.resident
            runs["resident"] = run(resident, batches[:3])
            resident.save(tmp_path / "a")
            runs["resident"] = run(resident, batches[3:])
            for name, result in runs.items():
                for key, value in runs["host"].items():
                    assert same([result[key]], [value]), (name, key)
            again = make(max_grad_norm=clip, updates="host", device=least)
            again.load(tmp_path / "a")
            resumed = run(again, batches[3:])
            for key, value in runs["host"].items():
                assert same([resumed[key]], [value]), key
            for step in (resident, again):
                logits = step.evaluate(**batches[0]).logits.float().cpu()
                with torch.no_grad():
                    plain = copy.deepcopy(step.model).cpu().eval()(**batches[0]).logits.float()
                assert torch.allclose(logits, plain, atol=0.1)
                step.close()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_who_updates_may_change_again_and_again(device: str) -> None:
    """torch hands out a GPU's few streams in turn: what took new ones for each change would come to share them."""

    def run(changes: bool) -> list[torch.Tensor]:
        rule = AdamW()
        slab = make_slab("block0", 0, pin=device == "cuda")
        runtime = Runtime(
            torch.device(device), [slab], [], rule, GROUP_OF, workers=8, chunk_elems=512, buffer_elems=256
        )
        sink = runtime._sink
        assert sink is not None and sink.ring.count == 10
        try:
            for step in range(24):
                if changes:
                    sink.set_where("host" if step % 2 else "both")
                runtime.begin_step([rule.hyper(group) for group in GROUPS])
                grads = {name: grad.to(device) for name, grad in gradients(step, 0).items()}
                mode: Any = "update" if step % 3 else "keep"
                ticket = runtime.offload("block0", list(grads), list(grads.values()), mode)
                if mode == "keep":
                    runtime.apply_kept(Clipping(max_norm=10.0))
                resting = len(sink.ring._resting)
                runtime.wait_gradients(ticket)
                runtime.synchronize()
                # while they come from the device, and the device updates too; not where all wait for the norm
                assert resting <= len(sink.ring._resting) == (4 if mode == "update" and sink.where == "both" else 0)
            return bits([slab])
        finally:
            runtime.close()

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))
