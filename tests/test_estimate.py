"""Plans without a GPU and without weights are the compiler's own, and say what is missing."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oomc
from oomc import attention_kernels, planner
from oomc import machine as machines
from oomc.compiler import CUDA_WORKSPACE
from oomc.errors import UnsupportedError
from oomc.estimate import CUDA_CONTEXT, Estimator, _Compiler, build
from oomc.models import published, tiny
from oomc.plan import Budget, Updates
from oomc.program import Program
from oomc.simulate import project
from tests.helpers import ADAMW, compiled, tokens

pytest.importorskip("transformers")
SIZES: dict[str, Any] = {"batch": 2, "seq": 64}
H200 = machines.default("H200")


LARGE: dict[str, Any] = {"hidden_size": 1024, "num_experts": 128, "moe_intermediate_size": 2048,
                         "num_hidden_layers": 3, "dtype": "bfloat16"}  # fmt: skip
"""A layer of 1.5 GiB, which takes no memory to plan."""
MODEL = tiny.build("qwen3_moe", torch.bfloat16, num_hidden_layers=5)
TRACED: list[Program] = []


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """MODEL is traced once for all tests: its program depends on nothing but the model."""
    trace = _Compiler.capture

    def capture(self: _Compiler, *args: Any) -> Program:
        if self.model is not MODEL:
            return trace(self, *args)
        if not TRACED:
            TRACED.append(trace(self, *args))
        return TRACED[0]

    monkeypatch.setattr(_Compiler, "capture", capture)


def estimator(machine: str = "H200", **options: Any) -> Estimator:
    return Estimator(MODEL, machine=machine, **options)


def smallest(made: Estimator, batch: int = 2, seq: int = 64, **budget: str) -> oomc.BudgetError:
    with pytest.raises(oomc.BudgetError) as caught:
        made.estimate(Budget(**budget), batch, seq)
    return caught.value


@pytest.mark.parametrize("device", [pytest.param("4MiB", marks=pytest.mark.slow), "1800KiB"])
def test_a_plan_for_the_stand_in_is_that_of_compile(device: str) -> None:
    model = tiny.build("qwen3_moe", num_hidden_layers=5)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    estimate = oomc.plan(
        model, Budget(device, "1GiB"), batch=2, seq=24, machine=machines.current("cpu"), optimizer=optimizer
    )
    step = compiled(model, tokens(2, 24), like=("estimate",), device=device, host="1GiB", prepare=False)
    scheduled = step.prepare(**tokens(2, 24))
    assert scheduled.program.plan is not None
    mine, its = (replace(p, residency={}) for p in (estimate.plan, scheduled.program.plan))
    assert mine == its
    assert sorted(estimate.plan.residency.values()) == sorted(scheduled.program.plan.residency.values())
    assert estimate.device_peak == scheduled.projection.peak
    assert estimate.host_bytes == sum(step._state.host_needed(scheduled.program, its.resident).values())
    assert estimate.fits and estimate.step_s > 0


def test_a_gpu_takes_more_than_the_step_itself() -> None:
    estimate = estimator().estimate(Budget("24GiB"), **SIZES)
    own = sum(count for name, _, count in estimate.device if "CUDA" not in name)
    projection = estimate._made[1]
    assert estimate.device_peak == projection.reserved + CUDA_CONTEXT + CUDA_WORKSPACE
    assert own == projection.peak < projection.reserved <= (24 << 30) - CUDA_CONTEXT - CUDA_WORKSPACE
    assert estimate.budget == Budget(24 << 30, H200.host_memory)
    assert oomc.plan(estimator().model, machine="H200", **SIZES).budget.device == H200.device_memory


@pytest.mark.parametrize(("machine", "kernel"), [("H200", "cudnn"), ("RTX 4090", "flash"), ("cpu", "tiled")])
def test_kernels_are_those_of_the_machine(machine: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: set[str] = set()
    choose = attention_kernels.choose

    def watched(*args: Any) -> attention_kernels.Kernel:
        chosen.add(choose(*args))
        return choose(*args)

    monkeypatch.setattr(attention_kernels, "choose", watched)
    estimator(machine).estimate(None, **SIZES)
    assert chosen == {kernel}


@pytest.mark.slow
def test_the_smallest_device_budget_works_and_less_does_not() -> None:
    error = smallest(estimator(), device="1MiB")
    assert error.smallest_device is not None and error.smallest_host is None
    assert "needed" in str(error) and "weights in flight" in str(error)
    estimate = estimator().estimate(Budget(error.smallest_device), **SIZES)
    assert estimate.fits and estimate.device_peak <= error.smallest_device
    smallest(estimator(), device=str(int(0.98 * error.smallest_device)))


@pytest.fixture
def unpaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated counts: a page of the allocator would hold the state of a model as small as this."""
    monkeypatch.setattr(planner, "project_reserved", project)


@pytest.mark.usefixtures("unpaged")
def test_the_smallest_host_budget_works() -> None:
    device = smallest(estimator(), device="1MiB").smallest_device  # nothing lives there
    error = smallest(estimator(), device=str(device), host="1MiB")
    assert error.smallest_host is not None and error.smallest_device is None
    assert "optimizer state and exact masters" in str(error)
    assert estimator().estimate(Budget(device, error.smallest_host), **SIZES).host_bytes == error.smallest_host


def host_bytes(**options: Any) -> dict[str, int]:
    made = estimator(**options)
    device = smallest(made, device="1MiB").smallest_device
    return {name: count for name, _, count in made.estimate(Budget(device), **SIZES).host}


@pytest.mark.usefixtures("unpaged")
def test_the_optimizer_decides_the_host_bytes() -> None:
    plain, low, sgd = host_bytes(), host_bytes(state="8bit"), host_bytes(optimizer="sgd")
    state = "optimizer state and exact masters"
    assert plain["working weights"] == low["working weights"] == sgd["working weights"]
    assert plain[state] == 5 * plain["working weights"]  # lo, m and v
    assert sgd[state] == plain["working weights"] < low[state] < plain[state] / 2
    clipped = host_bytes(max_grad_norm=1.0)
    assert clipped["gradients kept"] == plain["working weights"] and "gradients kept" not in plain


def test_text_and_figures() -> None:
    estimate = estimator().estimate(Budget("1GiB", "2GiB"), **SIZES)
    text = str(estimate)
    for words in (
        "Qwen3MoeForCausalLM on H200",
        "projected peak",
        "gradients in flight",
        "tokens/s",
        "bound by",
        "limit",
    ):
        assert words in text
    figures = json.loads(json.dumps(estimate.as_dict()))
    assert figures["fits"] is True
    assert figures["step_s"] == pytest.approx(estimate.step_s)
    assert figures["tokens_per_s"] == pytest.approx(128 / estimate.step_s)
    assert figures["budget"] == {"device": 1 << 30, "host": 2 << 30}
    assert figures["device"]["projected"] <= 1 << 30
    assert figures["host"]["in all"] == estimate.host_bytes
    assert set(figures["limits"]) == {"compute", "h2d", "d2h", "host memory"}


@pytest.mark.usefixtures("unpaged")
def test_a_slower_link_is_slower() -> None:
    device = smallest(estimator(), device="1MiB").smallest_device
    slow = replace(H200, h2d=1e8, h2d_both=1e8)
    times = [Estimator(MODEL, machine=m).estimate(Budget(device), **SIZES).step_s for m in (H200, slow)]
    assert times[0] < times[1]


def test_configs_paths_and_names(tmp_path: Path) -> None:
    model: Any = tiny.build("gpt_oss", num_hidden_layers=2)
    config = model.config
    config.save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    data["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(data))
    for given, name in (
        (config, type(model).__name__),
        (tmp_path, str(tmp_path)),
        (str(tmp_path / "config.json"),) * 2,
    ):
        built, called = build(given, "bfloat16")
        assert called == name
        assert {n: p.shape for n, p in built.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
        assert all(p.is_meta and p.dtype == torch.bfloat16 for p in built.parameters())


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"neither a config\.json, .* there are Qwen3-30B-A3B"):
        oomc.plan("Qwen3-31B", **SIZES)
    with pytest.raises(ValueError, match="no machine is known as 'H2000'"):
        oomc.plan(estimator().model, machine="H2000", **SIZES)
    with pytest.raises(UnsupportedError, match="optimizer 'adam' is not known; there are adamw, sgd"):
        oomc.plan(estimator().model, machine="H200", optimizer="adam", **SIZES)
    with pytest.raises(UnsupportedError, match=r"for torch\.optim\.SGD"):
        oomc.plan(estimator().model, machine="H200", optimizer="sgd", state="8bit", **SIZES)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])
        self.layers[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_any_module_with_an_example_and_a_loss() -> None:
    estimate = oomc.plan(
        Regression(),
        machine="H200",
        example={"x": torch.empty(2, 4, 8)},
        loss_fn=lambda output, batch: (output - batch["x"]).pow(2).mean(),
        **SIZES,
    )
    assert estimate.sizes == (2, 64)
    assert "360 parameters, 288 trained" in estimate.summary


def test_a_saved_machine(tmp_path: Path) -> None:
    path = replace(H200, name="mine", device_memory=7 << 30, capability=(8, 0)).save(tmp_path / "mine.json")
    made = Estimator(MODEL, machine=str(path))
    assert made.machine.name == "mine" and made.machine.capability == (8, 0)
    assert made.estimate(None, **SIZES).budget.device == 7 << 30


def test_updates_are_what_a_step_would_have() -> None:
    assert estimator()._rule.arrays == Updates().arrays


@pytest.mark.slow
def test_a_layer_larger_than_the_device_is_planned_in_groups() -> None:
    made = Estimator(tiny.config("qwen3_moe", **LARGE), machine="H200")
    with pytest.raises(oomc.BudgetError) as caught:
        Estimator(tiny.config("qwen3_moe", **LARGE), machine="H200", expert_groups=1).estimate(
            Budget("1500MiB"), **SIZES
        )
    assert caught.value.smallest_device is not None and caught.value.smallest_device > 3 << 30
    estimate = made.estimate(Budget("1500MiB"), **SIZES)
    assert estimate.plan.groups in (8, 16) and estimate.device_peak <= 1500 << 20
    assert f"experts in {estimate.plan.groups} groups" in str(estimate)
    assert "model.layers.0.experts.0 to model.layers.2.experts.0: streamed" in str(estimate)
    roomy = made.estimate(Budget("60GiB"), **SIZES)
    assert roomy.plan.groups == 1 and "groups" not in roomy.plan.describe()


@pytest.mark.parametrize(
    "name",
    [name if name == "OLMoE-1B-7B" else pytest.param(name, marks=pytest.mark.slow) for name in published.MODELS],
)
def test_published_models_are_planned_in_a_minute(name: str) -> None:
    began = time.perf_counter()
    machine = replace(H200, host_memory=16 << 40)
    estimate = oomc.plan(name, batch=4, seq=4096, machine=machine)
    seconds = time.perf_counter() - began
    count = published.MODELS[name].parameters * 1e9
    assert estimate.fits and estimate.model == name
    resident = estimate.host_bytes / count
    assert resident < 12.5, f"{resident:.2f} bytes a parameter on the host"
    assert estimate.step_s > 6 * count * 0.01 * 16384 / 1e15
    assert seconds < 60 * 2, f"{seconds:.0f} s"  # twice, for machines that do other things
