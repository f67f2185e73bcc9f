"""The optimizer's state dict is the slabs' state, in torch's own words, both ways."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import oomc
from oomc.optimizer_state import expose_state
from oomc.optimizers import rule_of
from oomc.runtime.layout import StateArray
from tests.checkpoint_cases import Run, Small, rule_with, same
from tests.helpers import masters, tiny_step, tokens


def exposed(**options: Any) -> tuple[Run, list[str]]:
    """A run whose optimizer shows its state, and a list of what was waited for."""
    run, waits = Run(**options), list[str]()
    params = dict(run.model.named_parameters())
    expose_state(run.optimizer, run.rule, lambda: run.slabs, params, lambda: waits.append("waited"))
    return run, waits


def trained_names(run: Run) -> list[str]:
    names = {id(p): n for n, p in run.model.named_parameters()}
    return [names[id(p)] for group in run.optimizer.param_groups for p in group["params"]]


def test_a_state_dict_is_torchs_and_views_the_slabs() -> None:
    run, waits = exposed()
    assert run.optimizer.state_dict()["state"] == {}, "nothing before the first update, as in torch"
    run.fill(1)
    saved = run.optimizer.state_dict()
    assert len(waits) == 2
    tensors = run.tensors()
    names = trained_names(run)
    assert [names[index] for index in saved["state"]] == [n for s in run.slabs for n in s.steps]
    for index, state in saved["state"].items():
        name = names[index]
        parameter = run.model.get_parameter(name)
        assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
        assert state["exp_avg"].shape == parameter.shape and state["exp_avg"].dtype == torch.float32
        assert state["exp_avg"].data_ptr() == tensors[f"{name}/m"].data_ptr()
        assert torch.equal(state["exp_avg_sq"].view(-1), tensors[f"{name}/v"])
        assert float(state["step"]) == next(s.steps[name] for s in run.slabs if name in s.steps)
    assert not run.optimizer.state, "nothing is left that would be held twice or go stale"
    rule_of(run.optimizer)


def test_a_state_dict_goes_into_another_run_bit_for_bit() -> None:
    run, _ = exposed()
    run.fill(1)
    saved = copy.deepcopy(run.optimizer.state_dict())
    other, waits = exposed(blocks=(), state=False)
    replaced = other.optimizer.step
    other.optimizer.load_state_dict(saved)
    assert waits and not other.optimizer.state and other.optimizer.step == replaced
    mine, others = run.snapshot(), other.snapshot()
    moments = [key for key in mine if key.endswith(("/m", "/v"))] + ["steps", "groups"]
    assert same({k: others[k] for k in moments}, {k: mine[k] for k in moments})


def test_an_entry_that_is_missing_is_a_parameter_without_an_update() -> None:
    run, _ = exposed()
    run.fill(1)
    saved = copy.deepcopy(run.optimizer.state_dict())
    name = trained_names(run)[0]
    del saved["state"][0]
    run.optimizer.load_state_dict(saved)
    slab = next(s for s in run.slabs if name in s.steps)
    assert slab.steps[name] == 0
    assert not run.tensors()[f"{name}/m"].any() and not run.tensors()[f"{name}/v"].any()


def test_eager_torch_goes_on_with_it_and_hands_it_back() -> None:
    """Two steps here, one in eager torch, one here again are four steps here."""
    step, eager = tiny_step("plain_moe")
    params = dict(step.model.named_parameters())
    expose_state(step.optimizer, step._rule, lambda: step._state.slabs, params, step.synchronize)
    for seed in range(2):
        step(**tokens(2, 24, seed=seed))
    eager.load_state_dict(step.model.state_dict())
    optimizer = torch.optim.AdamW(eager.parameters())
    optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))
    for seed in range(2, 4):
        optimizer.zero_grad()
        output = eager(**tokens(2, 24, seed=seed))
        (output if isinstance(output, torch.Tensor) else output.loss).backward()
        optimizer.step()
    back, _ = tiny_step("plain_moe")
    params = dict(back.model.named_parameters())
    expose_state(back.optimizer, back._rule, lambda: back._state.slabs, params, back.synchronize)
    back.optimizer.load_state_dict(optimizer.state_dict())
    for slab in back._state.slabs:
        for name in slab.steps:
            slab.load(name, eager.get_parameter(name))
    back(**tokens(2, 24, seed=9))
    for seed in (2, 3, 9):
        step(**tokens(2, 24, seed=seed))
    mine, others = masters(step), masters(back)
    assert all((mine[n] - others[n]).norm() <= 1e-4 * mine[n].norm() for n in mine)
    assert all(count == 5 for slab in back._state.slabs for count in slab.steps.values())


def test_wrong_states_are_refused_and_change_nothing() -> None:
    run, _ = exposed()
    run.fill(1)
    name = trained_names(run)[0]
    good = copy.deepcopy(run.optimizer.state_dict())
    before = run.snapshot()

    def refused(saved: dict[str, Any], error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            run.optimizer.load_state_dict(saved)
        assert same(run.snapshot(), before)

    bad = copy.deepcopy(good)
    bad["state"][0]["exp_avg"] = torch.zeros(3)
    refused(bad, oomc.CheckpointError, rf"exp_avg of {name} has shape \(3,\) in the state dict, not \(\)")
    bad = copy.deepcopy(good)
    bad["state"][0]["max_exp_avg_sq"] = torch.zeros(())
    refused(bad, oomc.CheckpointError, f"max_exp_avg_sq, step for {name}; this optimizer has exp_avg, exp_avg_sq")
    bad = copy.deepcopy(good)
    del bad["state"][2]["exp_avg"]
    refused(bad, oomc.CheckpointError, "the state dict has exp_avg_sq, step for")
    bad = copy.deepcopy(good)
    bad["param_groups"][0]["params"].pop()
    refused(bad, ValueError, "parameter group")
    run.optimizer.load_state_dict(good)
    assert same(run.snapshot(), before)
    unused = next(i for i, n in enumerate(trained_names(run)) if n == "unused")
    bad = copy.deepcopy(good)
    bad["state"][unused] = bad["state"][0]
    refused(bad, oomc.CheckpointError, "optimizer state for unused, which the step does not train")


def test_state_of_other_kinds_keeps_what_cannot_have_torchs_shape() -> None:
    rule = rule_with(
        StateArray("momentum_buffer", torch.bfloat16), StateArray("code", torch.uint8), StateArray("s", block=64)
    )
    run, _ = exposed(rule=rule)
    run.fill(1)
    saved = copy.deepcopy(run.optimizer.state_dict())
    index = trained_names(run).index("embed.weight")
    shapes = {key: (value.dtype, tuple(value.shape)) for key, value in saved["state"][index].items()}
    assert shapes == {
        "step": (torch.float32, ()),
        "momentum_buffer": (torch.bfloat16, (20, 8)),
        "code": (torch.uint8, (160,)),
        "s": (torch.float32, (3,)),
    }
    before = run.snapshot()
    other, _ = exposed(rule=rule, model=Small())
    other.optimizer.load_state_dict(saved)
    after = other.snapshot()
    keys = [key for key in before if "/" in key and not key.endswith("/lo")] + ["steps"]
    assert same({k: after[k] for k in keys}, {k: before[k] for k in keys})
