"""Captured transformers models: oomc's operators in the graph, and eager's numbers at shapes the trace never saw."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

pytest.importorskip("transformers")

from oomc.errors import UnsupportedError
from oomc.models.huggingface import find_eager_expert_loops, hooks
from oomc.models.tiny import NAMES, build

HF = [name for name in NAMES if name != "plain_moe"]


class _Loss(nn.Module):
    """The model's loss from keyword tensors."""

    def __init__(self, model: nn.Module, keys: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.keys = keys

    def forward(self, *tensors: Tensor) -> Tensor:
        out = self.model(**dict(zip(self.keys, tensors, strict=True)))
        return out if isinstance(out, Tensor) else out.loss


def _ids(batch: int, rows: int) -> Tensor:
    return torch.randint(0, 512, (batch, rows), generator=torch.Generator().manual_seed(batch * rows))


def _export(model: nn.Module, example: dict[str, Tensor]) -> torch.export.ExportedProgram:
    shape = {0: Dim("B", min=1, max=64), 1: Dim("S", min=2, max=4096)}
    wrapper = _Loss(model, tuple(example))
    with hooks(model):
        return torch.export.export(
            wrapper, tuple(example.values()), dynamic_shapes=((shape,) * len(example),), strict=False
        )


def _eager(model: nn.Module, **inputs: Any) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of the model's own eager code."""
    if hasattr(model, "config"):
        config: Any = model.config
        config._attn_implementation, config._experts_implementation = "eager", "eager"
        inputs["use_cache"] = False  # with a cache transformers overlooks packed rows
    loss = _Loss(model, tuple(inputs))(*inputs.values())
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))


def _compare(exported: torch.export.ExportedProgram, model: nn.Module, inputs: dict[str, Tensor]) -> None:
    module = exported.module()
    loss = module(*inputs.values())
    named = dict(module.named_parameters())
    parameters = [named[f"model.{name}"] for name, _ in model.named_parameters()]
    grads = torch.autograd.grad(loss, parameters, materialize_grads=True)
    want, want_grads = _eager(model, **inputs)
    assert abs(loss - want) <= 1e-6 * abs(want)
    for (name, _), a, b in zip(model.named_parameters(), grads, want_grads, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-12, name


@pytest.mark.parametrize("name", HF)
def test_equals_eager_at_another_shape(name: str) -> None:
    model = build(name, aux_loss=None if name in ("llama", "deepseek_v3") else True).train()
    ids = _ids(2, 48)
    exported = _export(model, {"input_ids": ids, "labels": ids})
    ops = {str(n.target) for n in exported.graph.nodes if n.op == "call_function"}
    assert "oomc.attention.default" in ops
    assert name == "llama" or {"oomc.route.default", "oomc.grouped_mm.default", "oomc.combine.default"} <= ops
    assert name != "qwen3_next" or "oomc.gated_delta_rule.default" in ops
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dim() >= 2:
            symbolic = [str(size) for size in value.shape if not str(size).isdigit()]
            assert len(symbolic) == len(set(symbolic)), f"{node} is quadratic: {value.shape}"
    other = _ids(3, 70)
    _compare(exported, model, {"input_ids": other, "labels": other})


def test_plain_model_is_left_alone() -> None:
    model = build("plain_moe")
    ids = _ids(2, 16)
    exported = _export(model, {"input_ids": ids, "labels": ids})
    assert not any("oomc" in str(node.target) for node in exported.graph.nodes)
    other = _ids(3, 30)
    _compare(exported, model, {"input_ids": other, "labels": other})


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding(name: str, side: str) -> None:
    model = build(name)
    ids, rows = _ids(3, 40), torch.arange(40)
    length = torch.tensor([[40], [25], [11]])
    real = rows < length if side == "right" else rows >= 40 - length
    inputs = {"input_ids": ids, "labels": ids.masked_fill(~real, -100), "attention_mask": real.long()}
    if side == "left":
        # The first real token's predecessor is padding, whose prediction is counted in eager and means nothing.
        inputs["labels"][torch.arange(3), 40 - length[:, 0]] = -100
    exported = _export(model, {key: value[:2, :20].clone() for key, value in inputs.items()})
    _compare(exported, model, inputs)


def test_packed_rows() -> None:
    model = build("qwen3_moe", aux_loss=False)
    ids = _ids(2, 40)
    positions = torch.cat([torch.arange(15), torch.arange(25)]).expand(2, -1)
    labels = ids.clone()
    labels[:, 15] = -100
    inputs = {"input_ids": ids, "labels": labels, "position_ids": positions}
    _compare(_export(model, {key: value[:, :30].clone() for key, value in inputs.items()}), model, inputs)
    alone = [_eager(model, input_ids=part, labels=part)[0] for part in (ids[:, :15], ids[:, 15:])]
    packed = _eager(model, **inputs)[0]
    torch.testing.assert_close(packed, (alone[0] * 14 + alone[1] * 24) / 38, rtol=1e-5, atol=0)


def test_packed_rows_are_refused_by_linear_attention() -> None:
    ids = _ids(1, 16)
    with pytest.raises(UnsupportedError, match="linear attention"):
        _export(build("qwen3_next"), {"input_ids": ids, "position_ids": torch.arange(16)[None]})


def test_everything_is_put_back() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.models.qwen3_next import modeling_qwen3_next

    model = build("qwen3_next")
    config: Any = model.config
    before, rule = dict(vars(config)), modeling_qwen3_next.torch_chunk_gated_delta_rule
    with pytest.raises(RuntimeError, match="on purpose"), hooks(model):
        assert config._attn_implementation == "oomc" and not config.use_cache
        raise RuntimeError("on purpose")
    assert vars(config) == before
    assert modeling_qwen3_next.torch_chunk_gated_delta_rule is rule
    assert "oomc" not in ALL_MASK_ATTENTION_FUNCTIONS
    assert not model._forward_pre_hooks


def test_chunked_masks_are_refused() -> None:
    from transformers.masking_utils import chunked_causal_mask_function

    from oomc.models.huggingface import _Call, _make_mask

    with pytest.raises(UnsupportedError, match="chunked_overlay"):
        _make_mask(_Call(), chunked_causal_mask_function(4, torch.zeros(1)), None)


def test_attention_dropout_is_refused() -> None:
    ids = _ids(1, 16)
    with pytest.raises(UnsupportedError, match="dropout"):
        _export(build("qwen3_moe", attention_dropout=0.1).train(), {"input_ids": ids, "labels": ids})


def test_models_on_fake_tensors() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        model = build("qwen3_moe")
        ids = torch.zeros(2, 32, dtype=torch.int64)
        exported = _export(model, {"input_ids": ids, "labels": ids})
    assert any("oomc.attention" in str(n.target) for n in exported.graph.nodes)


class _LoopedExperts(nn.Module):
    def forward(self, x: Tensor, hit: Tensor) -> Tensor:
        for expert in hit.nonzero():
            x = x + expert
        return x


def test_expert_loops_are_found() -> None:
    assert find_eager_expert_loops(nn.Sequential(nn.Linear(1, 1), _LoopedExperts())) == ["1"]
    for name in NAMES:
        assert find_eager_expert_loops(build(name)) == []
