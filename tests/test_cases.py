"""Behaviours that users of such systems were bitten by, one test each: the loss, the gradients and the state."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oomc
from oomc import limits
from oomc.models import tiny
from oomc.runtime.memory import HostMemory
from tests.cases_models import ROWS, Drop, Loop, Residual, Stack
from tests.helpers import (
    ADAMW,
    assert_same_gradients,
    assert_trains_as_eager,
    compiled,
    masters,
    relative,
    state,
    tiny_step,
    tokens,
    worst,
)
from tests.programs import VOCAB, TopK
from tests.reference import Reference


def small(batch: int = 2, sequence: int = 12, **options: Any) -> dict[str, Any]:
    return tokens(batch, sequence, vocab=VOCAB, **options)


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **{**ADAMW, **options})


@pytest.mark.parametrize("tight", [False, True])
def test_case_01_the_mask_of_dropout_is_that_of_its_gradient(tight: bool) -> None:
    """Every token has its own row of ones in the embedding, whose gradient is then its mask, whatever the plan."""
    batch = {"ids": torch.arange(ROWS).view(2, -1)}
    budget = None
    if tight:
        probe = compiled(Drop(), batch, like=("Drop",), device="1KiB", prepare=False)
        with pytest.raises(oomc.BudgetError) as caught:
            probe.prepare(**batch)
        budget = caught.value.smallest_device
    step = compiled(Drop(), batch, like=("Drop",), device=budget)
    loss = step.forward_backward(**batch)
    mask = step.gradients()["embed.weight"]
    kept = mask != 0
    assert torch.allclose(mask[kept], torch.tensor(1 / (1 - Drop.P) ** 2)), "two sites, each scaled"
    assert float(loss) == pytest.approx(float(mask.sum()), rel=1e-5), "the forward's mask is another"
    assert float(kept.float().mean()) == pytest.approx((1 - Drop.P) ** 2, abs=0.1)
    step.forward_backward(**batch)
    assert not torch.equal(step.gradients()["embed.weight"], 2 * mask), "the next step has the same mask"


def test_case_02_plans_agree_over_thirty_steps_with_dropout() -> None:
    torch.manual_seed(0)
    model = TopK(dropout=0.3)
    batches = [small(2, 6, seed=i % 4) for i in range(30)]
    like = ("TopK", 0.3)
    probe = compiled(copy.deepcopy(model), batches[0], like=like, device="1KiB", prepare=False)
    with pytest.raises(oomc.BudgetError) as caught:
        probe.prepare(**batches[0])
    roomy = compiled(copy.deepcopy(model), batches[0], like=like)
    tight = compiled(copy.deepcopy(model), batches[0], like=like, device=caught.value.smallest_device)
    assert roomy.plan.describe() != tight.plan.describe()
    losses = [(roomy(**b), tight(**b)) for b in batches]
    assert all(relative(a, b) <= 1e-5 for a, b in losses)
    other = compiled(copy.deepcopy(model), batches[0], like=like, seed=1)
    assert not torch.equal(other(**batches[0]), losses[0][0]), "the seed does nothing"


def test_case_03_equal_logits_choose_the_same_experts_again() -> None:
    torch.manual_seed(0)
    model = TopK(dropout=0.0)
    with torch.no_grad():
        for layer in model.layers:
            layer.router.weight.zero_()  # type: ignore[union-attr, operator]
    batch = small()
    batch["input_ids"] = torch.full_like(batch["input_ids"], 5)
    eager = copy.deepcopy(model)
    step = compiled(model, batch)
    assert_same_gradients(step, eager, [batch, batch])


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_case_03_equal_logits_of_real_routers(name: str) -> None:
    model = tiny.build(name)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "router" in parameter_name or parameter_name.endswith("mlp.gate.weight"):
                parameter.zero_()
    eager = copy.deepcopy(model)
    step = compiled(model, tokens(2, 24), like=(name, torch.float32))
    batch = tokens(2, 24)
    batch["input_ids"] = batch["input_ids"][:, :4].repeat_interleave(6, 1)
    assert_same_gradients(step, eager, [batch])


def test_case_05_a_batch_without_valid_labels_adds_nothing() -> None:
    step, _ = tiny_step("llama")
    step.forward_backward(**tokens(2, 24))
    before = step.gradients()
    empty = tokens(2, 24)
    empty["labels"] = torch.full_like(empty["labels"], -100)
    assert not step.forward_backward(**empty).isnan()
    assert all(torch.equal(g, before[n]) for n, g in step.gradients().items())


def test_case_07_the_same_batch_twice_is_twice_the_gradient() -> None:
    step, _ = tiny_step("plain_moe")
    batch = tokens(2, 24)
    step.forward_backward(**batch)
    once = step.gradients()
    step.forward_backward(**batch)
    assert all(torch.equal(twice, 2 * once[name]) for name, twice in step.gradients().items())


def test_case_08_every_gradient_over_three_batches() -> None:
    step, eager = tiny_step("qwen2_moe")
    assert_same_gradients(step, eager, [tokens(2, 24, seed=i, masked=True) for i in range(3)])
    assert set(step.gradients()) == {n for n, _ in step.model.named_parameters()}


def test_case_11_rotary_frequencies_stay_fp32() -> None:
    step, eager = tiny_step("qwen3_moe", torch.bfloat16)
    step(**tokens(2, 24))
    buffers = dict(step.model.named_buffers())
    for name, before in eager.named_buffers():
        assert buffers[name].dtype == before.dtype and torch.equal(buffers[name], before), name
    assert any(b.dtype == torch.float32 for n, b in buffers.items() if "inv_freq" in n)
    runtime = step._runtime
    assert runtime is not None
    assert all(runtime.resident(n).dtype == torch.float32 for n in runtime._residents if "inv_freq" in n)


@pytest.mark.parametrize("differ", ["buffer", "flag", "constant", "nothing"])
def test_case_13_layers_that_differ_are_not_taken_for_one_another(differ: str) -> None:
    torch.manual_seed(0)
    model = Stack(3)
    middle = model.layers[1]
    assert isinstance(middle, Residual)
    if differ == "buffer":
        middle.bias.fill_(0.5)
    elif differ == "flag":
        middle.gated = True
    elif differ == "constant":
        middle.factor = 0.25
    eager = copy.deepcopy(model)
    step = compiled(model, small())
    assert_same_gradients(step, eager, [small(), small(3, 20)])
    forms = [tuple(w.form for w in b.worksets) for b in step._current.program.blocks[1:4]]  # type: ignore[union-attr]
    assert forms[0] == forms[2]
    assert (forms[0] == forms[1]) == (differ in ("nothing", "buffer")), "a buffer's value is an input, not a form"


def test_case_13_sliding_and_full_attention() -> None:
    step, eager = tiny_step("gpt_oss")
    assert_same_gradients(step, eager, [tokens(1, 60)])
    blocks = step._current.program.blocks  # type: ignore[union-attr]
    forms = {tuple(w.form for w in b.worksets) for b in blocks if "layers" in b.name}
    assert len(forms) == 2


def test_case_14_small_learning_rates_and_decay_are_not_lost_in_bf16() -> None:
    torch.manual_seed(0)
    model = Stack(2).bfloat16()
    eager = copy.deepcopy(model)
    step = compiled(model, small(), optimizer=adamw(model, lr=1e-5, weight_decay=0.01))
    reference = Reference(eager, lr=1e-5, eps=1e-6, weight_decay=0.01)
    batches = [small(2, 4, seed=i) for i in range(3)]
    for i in range(100):
        step(**batches[i % 3])
        reference.step(**batches[i % 3])
    error, name = worst(masters(step), reference.masters())
    assert error <= 1e-4, name


def test_case_15_an_expert_without_tokens_goes_on_as_in_eager() -> None:
    torch.manual_seed(0)
    model = TopK(dropout=0.0)
    with torch.no_grad():  # equal logits: the first experts get every token of the first step, the others none
        for layer in model.layers:
            layer.router.weight.zero_()  # type: ignore[union-attr, operator]
    eager = copy.deepcopy(model)
    step = compiled(model, small())
    reference = Reference(eager, **ADAMW)
    start = {name: master.clone() for name, master in masters(step).items()}
    for i in range(4):
        step(**small(seed=i))
        reference.step(**small(seed=i))
        if i == 0:
            idle = {
                n: [e for e in range(len(g)) if not g[e].any()] for n, g in reference.gradients.items() if g.dim() == 3
            }
            moved = masters(step)
    assert any(idle.values()), "every expert had tokens"
    for name, experts in idle.items():
        for expert in experts:
            assert not torch.equal(moved[name][expert], start[name][expert]), "an idle expert still decays"
    error, name = worst(masters(step), reference.masters())
    assert error <= 1e-4, name


def test_case_18_a_tied_embedding_is_one_storage_with_one_gradient(tmp_path: Path) -> None:
    import transformers

    step, eager = tiny_step("llama")
    model: Any = step.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same_gradients(step, eager, [tokens(2, 24)])
    step.update()
    step.synchronize()
    names = [n for s in step._state.slabs for n in s.steps]
    assert len(names) == len(set(names)) == len(list(model.parameters()))
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


def test_case_20_frozen_parameters_stay_and_cost_nothing() -> None:
    torch.manual_seed(0)
    model = Stack(3)
    model.layers[1].requires_grad_(False)
    model.embed.requires_grad_(False)
    eager = copy.deepcopy(model)
    step = compiled(model, small())
    assert_trains_as_eager(step, eager, [small(seed=i) for i in range(3)])
    for name, parameter in eager.named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(model.get_parameter(name), parameter), name
            assert not model.get_parameter(name).requires_grad
    frozen = {n for n, p in eager.named_parameters() if not p.requires_grad}
    assert not frozen & set(masters(step))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(s.layout.state_elements for s in step._state.slabs) <= trained + 64 * len(step._state.slabs)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_case_21_the_routers_auxiliary_loss(name: str) -> None:
    """Its gradient reaches the router whatever the plan, and the report says that it is on."""
    batch, like = tokens(2, 24, masked=True), (name, "auxiliary loss")
    model = tiny.build(name, aux_loss=True, router_aux_loss_coef=1.0)
    probe = compiled(copy.deepcopy(model), batch, like=like, device="1KiB", prepare=False)
    with pytest.raises(oomc.BudgetError) as caught:
        probe.prepare(**batch)
    gradients = []
    for device in (None, caught.value.smallest_device):
        step = compiled(copy.deepcopy(model), batch, like=like, device=device)
        assert_same_gradients(step, model, [batch])
        gradients.append(step.gradients())
        report = str(step.report())
        assert "auxiliary loss: on, beside the labels' there is `loss += self.router_aux_loss_coef * aux_loss" in report
        assert "micro-batches weigh by their valid labels" in report
    off = compiled(tiny.build(name), batch, like=(name, torch.float32))
    off.forward_backward(**batch)
    assert "auxiliary loss: off" in str(off.report())
    routers = [n for n in gradients[0] if n.endswith("mlp.gate.weight")]
    assert routers, list(gradients[0])
    for router in routers:
        assert relative(off.gradients()[router], gradients[0][router]) > 1e-2, "it makes no difference"


def test_case_22_an_unused_parameter_is_left_alone() -> None:
    torch.manual_seed(0)
    model = Stack(2)
    model.unused = nn.Linear(8, 8)
    model.layers[1].unused = nn.Parameter(torch.ones(3))
    eager = copy.deepcopy(model)
    step = compiled(model, small(), optimizer=adamw(model, weight_decay=0.1))
    reference = Reference(eager, **ADAMW, weight_decay=0.1)
    for i in range(2):
        step(**small(seed=i))
        reference.step(**small(seed=i))
    step.synchronize()
    for name, master in reference.masters().items():
        assert relative(model.get_parameter(name), master) <= 1e-5, name
    assert torch.equal(model.unused.weight, eager.unused.weight)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("chunk_tokens", [None, 16])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_case_16_packed_documents_do_not_see_each_other(name: str, chunk_tokens: int | None) -> None:
    """Loss and gradients of each of two documents in one row are what they are alone; windows and chunks too."""
    model = tiny.build(name)
    eager = copy.deepcopy(model)
    ids = tokens(1, 38, seed=3)["input_ids"]
    positions = torch.cat([torch.arange(15), torch.arange(23)])[None]
    step = compiled(model, {"input_ids": ids, "labels": ids, "position_ids": positions}, chunk_tokens=chunk_tokens)
    for document in (slice(0, 15), slice(15, 38)):
        labels = torch.full_like(ids, -100)
        labels[:, document] = ids[:, document]
        labels[:, document.start] = -100  # the last token of the other document does not predict it
        loss = step.forward_backward(input_ids=ids, labels=labels, position_ids=positions)
        alone = eager(input_ids=ids[:, document], labels=ids[:, document], use_cache=False).loss
        assert relative(loss, alone) <= 1e-5
        (alone * (document.stop - document.start - 1)).backward()
        error, where = worst(step.gradients(), {n: p.grad for n, p in eager.named_parameters() if p.grad is not None})
        assert error <= 1e-5, where


@pytest.mark.parametrize(("name", "why"), [("gpt_oss", "without looking at position_ids"), ("qwen3_next", "linear")])
def test_case_16_what_would_mix_packed_documents_is_refused(name: str, why: str) -> None:
    batch = tokens(1, 38) | {"position_ids": torch.cat([torch.arange(15), torch.arange(23)])[None]}
    with pytest.raises(oomc.UnsupportedError, match=why):
        compiled(tiny.build(name), batch)


def test_case_26_sequence_lengths_in_turn() -> None:
    torch.manual_seed(0)
    model = Stack(2)
    eager = copy.deepcopy(model)
    step = compiled(model, small())
    assert_trains_as_eager(step, eager, [small(2, s, seed=s) for s in (24, 32, 40, 48, 24)])
    assert step.metrics["traces"] == 1
    assert step.metrics["plans"] <= 5
    compilations = step.metrics["compilations"]
    step(**small(2, 56))
    assert step.metrics["compilations"] == compilations


def test_case_27_no_square_of_the_sequence_in_the_plan() -> None:
    """Twice the sequence is at most somewhat more than twice the memory beside the weights."""
    step, eager = tiny_step("llama", prepare=False)
    peaks = []
    for length in (1024, 2048):
        step.prepare(**tokens(1, length))
        current = step._current
        assert current is not None
        peaks.append(current.projection.peak - current.projection.fixed)
    assert peaks[1] <= 2.1 * peaks[0]
    padded = tokens(2, 24)
    padded["attention_mask"] = torch.ones_like(padded["input_ids"])
    padded["attention_mask"][0, 15:] = 0
    padded["labels"] = padded["labels"].masked_fill(padded["attention_mask"] == 0, -100)
    other = compiled(copy.deepcopy(eager), padded)
    assert_same_gradients(other, eager, [padded])


def test_case_29_a_budget_that_cannot_work_fails_before_anything_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither slabs nor anything of the model's weights; and the budget that is named works."""

    def refused(what: str, **budgets: int | None) -> oomc.BudgetError:
        model = tiny.build("qwen3_moe")
        places = {name: p.data_ptr() for name, p in model.named_parameters()}
        with pytest.raises(oomc.BudgetError, match=f"does not fit the {what} budget") as caught:
            compiled(model, tokens(2, 24), like=("qwen3_moe", torch.float32), **budgets)  # type: ignore[arg-type]
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == places, "a parameter has moved"
        assert "needed" in str(caught.value)
        assert "allowed" in str(caught.value)
        return caught.value

    with monkeypatch.context() as patch:
        patch.setattr(HostMemory, "__init__", lambda *_, **__: pytest.fail("memory was taken"))
        device = refused("device", device=64 << 10).smallest_device
        host = refused("host", host=64 << 10).smallest_host
        # a container's limit is one, without any budget
        (tmp_path / "memory.max").write_text("65536")
        patch.setattr(limits.host_memory, "__defaults__", (tmp_path, tmp_path / "none"))
        assert limits.host_memory() == 65536
        assert (refused("host", device=device).smallest_host or 0) > 65536
    named: list[dict[str, Any]] = [{"device": device}, {"host": host}]
    for budgets in named:
        step = compiled(tiny.build("qwen3_moe"), tokens(2, 24), like=("qwen3_moe", torch.float32), **budgets)
        step(**tokens(2, 24))
        step.close()


def test_case_35_the_loss_never_holds_all_logits() -> None:
    """150,000 words and 4,096 tokens: all logits are 2.3 GiB in fp32, and there is not even a seventh of it."""
    model = tiny.build("llama", vocab_size=150_000, hidden_size=16, num_hidden_layers=1, tie_word_embeddings=False)
    batch = tokens(1, 4096, vocab=150_000)
    step = compiled(model, batch, device="500MiB", updates="host")
    rows, columns = step.plan.chunks["epilogue/1"]
    assert rows * columns < 4096
    step(**batch)
    assert step.metrics["device_peak"] <= step.projected <= 500 << 20
    assert step.projected < 4096 * 150_000 * 4 // 4


def test_case_36_a_loop_over_hit_experts_is_refused_by_name() -> None:
    with pytest.raises(oomc.CaptureError, match=r"layers\.0\.experts") as caught:
        compiled(Loop(), small())
    text = str(caught.value)
    assert "depends on data" in text and "for e in range(num_experts)" in text


STYLES = {
    "output": lambda loss, logits: SimpleNamespace(loss=loss, logits=logits),
    "dict": lambda loss, logits: {"loss": loss, "logits": logits},
    "tuple": lambda loss, logits: (loss, logits),
    "tensor": lambda loss, logits: loss,
    "loss_fn": lambda loss, logits: logits,
}


@pytest.mark.parametrize("style", STYLES)
def test_case_37_forward_styles(style: str) -> None:
    torch.manual_seed(0)
    model = Stack(2, wrap=STYLES[style])
    plain = Stack(2)
    plain.load_state_dict(model.state_dict())

    def loss_fn(logits: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    step = compiled(model, small(), loss_fn=loss_fn if style == "loss_fn" else None)
    assert_same_gradients(step, plain, [small()])
    step.update()
    assert step(**small()).dim() == 0


def test_case_38_an_error_in_between_leaves_the_step_usable() -> None:
    step, _ = tiny_step("plain_moe")
    twin, _ = tiny_step("plain_moe")
    step(**tokens(2, 24))
    twin(**tokens(2, 24))
    runtime = step._runtime
    assert runtime is not None
    run, calls = runtime.run_chunks, 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return run(*args)

    runtime.run_chunks = failing  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        step(**tokens(2, 24))
    runtime.run_chunks = run  # type: ignore[method-assign]
    for seed in (1, 2):
        assert torch.equal(step(**tokens(2, 24, seed=seed)), twin(**tokens(2, 24, seed=seed)))
    mine, others = state(step), state(twin)
    assert all(torch.equal(mine[n], others[n]) for n in others)


def test_case_39_other_optimizers_are_refused_with_a_list() -> None:
    model = Stack(2)
    known = r"Adagrad is not supported; use one of torch\.optim\.AdamW, torch\.optim\.SGD$"
    with pytest.raises(oomc.UnsupportedError, match=known):
        compiled(model, small(), optimizer=torch.optim.Adagrad(model.parameters(), lr=0.1))


def test_case_40_a_new_learning_rate_compiles_nothing() -> None:
    torch.manual_seed(0)
    model = Stack(2)
    eager = copy.deepcopy(model)
    step = compiled(model, small())
    reference = Reference(eager, **ADAMW)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (step.optimizer, reference.optimizer)]
    step(**small())
    reference.step(**small())
    compilations = step.metrics["compilations"]
    for _ in range(3):
        for schedule in schedules:
            schedule.step()
        step(**small())
        reference.step(**small())
    assert step.metrics["compilations"] == compilations
    assert worst(masters(step), reference.masters())[0] <= 1e-5
