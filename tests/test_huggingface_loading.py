"""What loading uses of transformers' private parts, and that merging in place is what transformers' conversion does."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers
from transformers import conversion_mapping, core_model_loading, initialization
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

from oomc.errors import CheckpointError, UnsupportedError
from oomc.models import huggingface_loading as hf
from oomc.models.tiny import build


def meta_model(name: str = "qwen3_moe", **changes: Any) -> Any:
    config = build(name, **changes).config
    return hf.build(config, torch.float32, transformers.AutoModelForCausalLM, False)


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_private_api_is_as_expected() -> None:
    names = ["source_key", "weight_renamings", "weight_converters", "base_model_prefix", "meta_state_dict"]
    assert parameters(core_model_loading.rename_source_key)[:5] == names
    assert parameters(conversion_mapping.get_model_conversion_mapping)[0] == "model"
    assert parameters(WeightConverter.add_tensor) == ["self", "target_key", "source_key", "source_pattern", "future"]
    assert parameters(WeightConverter.convert)[:4] == ["self", "layer_name", "model", "config"]
    keys = [f"layers.{i}.w" for i in (10, 9, 1)]
    assert sorted(keys, key=core_model_loading.dot_natural_key) == keys[::-1]
    rule = WeightConverter(["e.*.g.weight", "e.*.u.weight"], "e.gu", [MergeModulelist(dim=0), Concatenate(dim=1)])
    assert rule.source_patterns == ["e.*.g.weight", "e.*.u.weight"]
    assert [(type(o), o.dim) for o in rule.operations] == [(MergeModulelist, 0), (Concatenate, 1)]
    assert not rule.was_used()
    assert core_model_loading.rename_source_key("l.e.3.u.weight", [], [rule], "", {}) == ("l.e.gu", "e.*.u.weight")
    assert rule.was_used()
    fresh = copy.deepcopy(rule)
    for i, key in enumerate(["e.0.g.weight", "e.1.g.weight", "e.0.u.weight", "e.1.u.weight"]):
        fresh.add_tensor("e.gu", key, rule.source_patterns[i // 2], lambda i=i: torch.full((1, 2), float(i)))
    made = fresh.convert("e.gu", model=None, config=None)["e.gu"]
    assert made.tolist() == [[[0, 0], [2, 2]], [[1, 1], [3, 3]]]


def test_flagged_tensors_and_modules_are_left_alone_by_initialisation() -> None:
    model: Any = build("qwen3_moe")
    before = {n: p.clone() for n, p in model.named_parameters()}
    norm = "model.layers.0.input_layernorm.weight"
    hf._initialise(model, {norm, "model.norm.weight"}, {"model.layers.0.input_layernorm"})
    changed = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    assert changed == [norm]
    assert model.get_parameter(norm).eq(1).all()


def stored(sizes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {key: torch.empty(shape, dtype=dtype, device="meta") for key, shape in sizes.items()}


def experts(names: tuple[str, ...], count: int, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    return {f"e.{i}.{name}.weight": shape for name in names for i in range(count)}


def recipes_of(rules: list[Any], names: dict[str, Any], sizes: dict[str, tuple[int, ...]]) -> list[hf.Recipe]:
    """The recipes of a made-up model with these parameters and rules."""
    model: Any = SimpleNamespace(state_dict=lambda: names, base_model_prefix="", config=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda _: rules)
        recipes, unused = hf.plan_recipes(model, stored(sizes))
    assert not unused
    return recipes


NO_MODEL: Any = SimpleNamespace(config=None)
STACK, JOIN = MergeModulelist(dim=0), Concatenate(dim=1)


@pytest.mark.parametrize(
    ("rule", "names", "merged"),
    [
        (WeightConverter(["e.*.g.weight", "e.*.u.weight"], "e.gu", [STACK, JOIN]), ("g", "u"), True),
        (WeightConverter(["e.*.u.weight", "e.*.g.weight"], "e.gu", [STACK, JOIN]), ("g", "u"), True),
        (WeightConverter("e.*.d.weight", "e.d", [STACK]), ("d",), True),
        (WeightConverter(["e.*.g.weight", "e.*.u.weight"], "e.gu", [STACK, Concatenate(dim=2)]), ("g", "u"), False),
        (WeightConverter("e.*.d.weight", "e.d", [MergeModulelist(dim=1)]), ("d",), False),
        (WeightConverter("e.*.d.weight", "e.d", [STACK, Transpose(1, 2)]), ("d",), False),
    ],
)
def test_merging_in_place_is_transformers_conversion(rule: Any, names: tuple[str, ...], merged: bool) -> None:
    sizes = experts(names, 12, (3, 5))
    generator = torch.Generator().manual_seed(0)
    values = {key: torch.randn(size, generator=generator) for key, size in sizes.items()}
    (recipe,) = recipes_of([rule], {rule.target_patterns[0]: 0}, sizes)
    (want,) = recipe.convert(NO_MODEL, values.__getitem__).values()
    assert set(recipe.keys) == set(sizes)
    assert list(recipe.shapes.values()) == [want.shape]
    assert (recipe.merge is not None) == merged
    if recipe.merge is not None:
        out, parts = hf.place_merge(recipe.merge, {key: value.numel() for key, value in values.items()})
        for key, part in parts:
            assert part.is_contiguous()
            part.copy_(values[key].view(-1))
        assert torch.equal(out, want)


def test_one_stored_tensor_of_which_several_parameters_are_made() -> None:
    rule = WeightConverter("qkv", ["q", "k"], [Chunk(dim=0)])
    (recipe,) = recipes_of([rule], {"a.q": 0, "a.k": 0}, {"a.qkv": (4, 3)})
    assert recipe.keys == ("a.qkv",)
    assert recipe.shapes == {"a.q": (2, 3), "a.k": (2, 3)}
    whole = torch.arange(12.0).view(4, 3)
    made = recipe.convert(NO_MODEL, {"a.qkv": whole}.__getitem__)
    assert torch.equal(torch.cat([made["a.q"], made["a.k"]]), whole)


@pytest.mark.parametrize("dropped", [["e.3.g.weight", "e.3.u.weight"], ["e.0.g.weight", "e.0.u.weight"]])
def test_a_gap_between_experts_is_not_closed(dropped: list[str]) -> None:
    rule = WeightConverter(["e.*.g.weight", "e.*.u.weight"], "e.gu", [STACK, JOIN])
    sizes = experts(("g", "u"), 9, (3, 5))
    for key in dropped:
        del sizes[key]
    with pytest.raises(CheckpointError, match=rf"number {dropped[0].split('.')[1]} is missing"):
        recipes_of([rule], {"e.gu": 0}, sizes)


def test_stacks_that_do_not_fit_are_named() -> None:
    rule = WeightConverter(["e.*.g.weight", "e.*.u.weight"], "e.gu", [STACK, JOIN])
    sizes = experts(("g", "u"), 4, (3, 5))
    del sizes["e.3.u.weight"]
    with pytest.raises(CheckpointError, match=r"e\.gu cannot be made of e\.0\.g\.weight and 6 more"):
        recipes_of([rule], {"e.gu": 0}, sizes)


def test_renamed_and_unknown_keys() -> None:
    model = meta_model()
    sizes: dict[str, tuple[int, ...]] = {
        "norm.weight": (64,),
        "model.layers.0.input_layernorm.weight": (64,),
        "nonsense": (1,),
    }
    recipes, unused = hf.plan_recipes(model, stored(sizes))
    assert {name: recipe.keys for recipe in recipes for name in recipe.shapes} == {
        "model.norm.weight": ("norm.weight",),
        "model.layers.0.input_layernorm.weight": ("model.layers.0.input_layernorm.weight",),
    }
    assert unused == ["nonsense"]
    assert hf.ignored_keys(model, ["a.rotary_emb.inv_freq", "nonsense"]) == {"a.rotary_emb.inv_freq"}
    legacy = [WeightRenaming("LayerNorm.gamma", "LayerNorm.weight")]
    (recipe,) = recipes_of(legacy, {"a.LayerNorm.weight": 0}, {"a.LayerNorm.gamma": (3,)})
    assert recipe.keys == ("a.LayerNorm.gamma",)


def test_buffers_are_computed_in_fp32_whatever_the_model_is() -> None:
    want = dict(build("gpt_oss").named_buffers())
    config: Any = build("gpt_oss").config
    model = hf.build(config, torch.bfloat16, transformers.AutoModelForCausalLM, False)
    assert all(b.is_meta for b in model.buffers())
    hf.compute_buffers(model, [n for n, _ in model.named_buffers()])
    got = dict(model.named_buffers())
    assert got.keys() == want.keys()
    for name, buffer in got.items():
        assert buffer.dtype == torch.float32, name
        assert torch.equal(buffer, want[name]), name
    assert all(p.is_meta for p in model.parameters())


def test_a_buffer_that_only_the_constructor_computes_is_an_error() -> None:
    model = meta_model()
    with torch.device("meta"):
        model.model.register_buffer("scale", torch.ones(3), persistent=False)
    with pytest.raises(UnsupportedError, match=r"computes model\.scale when it is built"):
        hf.compute_buffers(model, [n for n, _ in model.named_buffers()])
    model = meta_model()
    model.model.table = torch.ones(3, device="meta")
    with pytest.raises(UnsupportedError, match=r"computes model\.table when it is built"):
        hf.compute_buffers(model, [n for n, _ in model.named_buffers()])


def test_a_draw_is_of_one_module_and_leaves_the_model_and_the_random_state_as_they_were() -> None:
    model = meta_model()
    kept = dict(model.named_parameters())
    state = torch.get_rng_state()
    drawn = hf.draw(model, "model.layers.1.mlp.experts", 5)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(param is kept[name] and param.is_meta for name, param in model.named_parameters())
    assert {n: v.shape for n, v in drawn.items()} == {n: p.shape for n, p in kept.items() if "1.mlp.experts." in n}
    hf.draw(model, "model.layers.0.mlp.experts", 5)
    again = hf.draw(model, "model.layers.1.mlp.experts", 5)
    other = hf.draw(model, "model.layers.1.mlp.experts", 6)
    for name, value in drawn.items():
        assert torch.equal(value, again[name])
        assert not torch.equal(value, other[name])


def test_what_the_model_leaves_to_torch_is_drawn_by_torch_and_what_nobody_draws_is_an_error() -> None:
    model = meta_model()
    with torch.device("meta"):
        model.model.extra = nn.PReLU(3)
        model.model.layers[0].free = nn.Parameter(torch.empty(2))
    assert hf.draw(model, "model.extra", 0)["model.extra.weight"].eq(0.25).all()
    with pytest.raises(UnsupportedError, match=r"no initialisation for parameter model\.layers\.0\.free"):
        hf.draw(model, "model.layers.0", 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_normal_numbers_do_not_depend_on_the_number_of_cores(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "_DRAWN", 1000)
    config: Any = build("qwen3_moe", initializer_range=0.5).config
    model = hf.build(config, dtype, transformers.AutoModelForCausalLM, False)
    drawn = []
    for cores in (1, 5):
        monkeypatch.setattr(hf, "physical_cores", lambda cores=cores: cores)
        drawn.append(hf.draw(model, "model.layers.0.mlp.experts", 0)["model.layers.0.mlp.experts.gate_up_proj"])
    assert torch.equal(*drawn)
    assert drawn[0].dtype == dtype
    parts = drawn[0].float().flatten().split(1000)
    assert len(parts) == 33
    assert len({float(part[0]) for part in parts}) == len(parts), "no two parts alike"
    assert all(0.44 < float(part.std()) < 0.56 and abs(float(part.mean())) < 0.08 for part in parts[:-1])
    assert initialization.TORCH_INIT_FUNCTIONS["normal_"] is nn.init.normal_
