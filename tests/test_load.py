"""Loading without memory: what `from_pretrained` loads, bit for bit, with a block in memory at a time."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip("transformers")

import transformers

import oomc
from oomc.errors import CheckpointError, UnsupportedError
from oomc.load import WeightSource, materialize, weights_of
from oomc.models import tiny
from oomc.runtime.layout import ParamSpec, SlabLayout
from oomc.runtime.meter import Meter, host_bytes
from oomc.runtime.slabs import HostSlab
from oomc.shards import Shards

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "llama", "qwen3_next"]
HUB, FUSED = True, False
Saved = Callable[..., Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A saved tiny model in several files, with the hub's keys (an expert a tensor) or the model's own (fused)."""
    made: dict[Any, Path] = {}

    def save(name: str, style: bool = HUB, dtype: torch.dtype = torch.bfloat16, shard: str = "100KB") -> Path:
        key = (name, style, dtype, shard)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(name)
            model: Any = tiny.build(name, dtype)
            model.save_pretrained(made[key], save_original_format=style, max_shard_size=shard)
        return made[key]

    return save


def pretrained(path: Path, dtype: Any = "auto") -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def source_of(model: nn.Module) -> WeightSource:
    source = weights_of(model)
    assert source is not None
    return source


def fill(model: nn.Module) -> None:
    """Give all parameters memory of their own."""
    params = dict(model.named_parameters())
    for name, value in source_of(model).read(list(params)):
        materialize(params[name], value.to(params[name].dtype))


def fill_slabs(model: nn.Module) -> list[HostSlab]:
    """Give all parameters memory in a slab for each layer, as a step does."""
    slabs = []
    params = dict(model.named_parameters())
    for layer, group in groupby(params, key=lambda name: name.split(".")[:3] if "layers" in name else [name]):
        names = list(group)
        specs = [ParamSpec(n, tuple(params[n].shape), params[n].dtype, params[n].requires_grad) for n in names]
        slab = HostSlab(SlabLayout.build(".".join(layer), specs))
        for name, value in source_of(model).read(names):
            slab.load(name, value)
            del value
            materialize(params[name], slab.param(name))
        slabs.append(slab)
    return slabs


def same_tensors(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert value.dtype == want[name].dtype, name
        assert torch.equal(value, want[name]), name


@pytest.mark.parametrize("style", [HUB, FUSED])
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_from_pretrained(name: str, style: bool, saved: Saved, tmp_path: Path) -> None:
    path = saved(name, style)
    assert len(list(path.glob("*.safetensors"))) > 1
    want, got = pretrained(path), oomc.load(path)
    assert type(got) is type(want)
    assert all(p.is_meta for p in got.parameters())
    assert got.training
    same_tensors(dict(got.named_buffers()), dict(want.named_buffers()))
    fill(got)
    same_tensors(got.state_dict(), want.state_dict())
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(got.eval()(input_ids=ids).logits, want(input_ids=ids).logits)
    model: Any = got
    model.save_pretrained(tmp_path)
    assert Shards.of(tmp_path).entries.keys() == Shards.of(path).entries.keys()


@pytest.mark.parametrize("name", ["qwen3_moe", "llama"])
def test_slabs_hold_what_from_pretrained_loads(name: str, saved: Saved) -> None:
    path = saved(name, shard="1GB")
    want, got = pretrained(path), oomc.load(path)
    optimizer = torch.optim.AdamW(got.parameters())
    held = list(got.parameters())
    slabs = fill_slabs(got)
    same_tensors(got.state_dict(), want.state_dict())
    assert len(slabs) > 3
    assert all(a is b for a, b in zip(got.parameters(), held, strict=True))
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], held, strict=True))
    slabs[1].weights.fill_(0)
    assert not any(p.any() for n, p in got.named_parameters() if "layers.0." in n), "the parameters alias the slab"


def test_dtypes(saved: Saved) -> None:
    """Case 12: what is stored in fp32 is the exact master of a bf16 model; rotary buffers stay fp32."""
    path = saved("qwen3_moe", dtype=torch.float32)
    assert next(oomc.load(path).parameters()).dtype == torch.float32
    stored = pretrained(path).state_dict()
    model = oomc.load(path, dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    same_tensors(dict(model.named_buffers()), dict(pretrained(path, torch.bfloat16).named_buffers()))
    for slab in fill_slabs(model):
        for place in slab.layout.places:
            assert torch.equal(slab.master(place.spec.name), stored[place.spec.name]), place.spec.name
    narrow = saved("qwen3_moe")
    wide = oomc.load(narrow, dtype=torch.float32)
    fill(wide)
    same_tensors(wide.state_dict(), pretrained(narrow, torch.float32).state_dict())
    with pytest.raises(ValueError, match="'bfloat17' is no dtype"):
        oomc.load(narrow, dtype="bfloat17")


def test_parts_that_stay_fp32() -> None:
    config: Any = tiny.build("deepseek_v3").config
    model: Any = oomc.load(config, dtype=torch.bfloat16)
    want = transformers.AutoModelForCausalLM.from_config(config)
    kept = [n for n, t in want.state_dict().items() if "e_score_correction_bias" in n]
    assert kept
    assert all(model.state_dict()[n].dtype == torch.float32 for n in kept)
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_names_in_any_order_and_of_any_number(saved: Saved) -> None:
    model = oomc.load(saved("llama"))
    source = source_of(model)
    assert dict(source.read([])) == {}
    both = ["lm_head.weight", "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"]
    values = list(source.read(both))
    assert [name for name, _ in values] == both
    assert torch.equal(values[0][1], values[2][1])
    assert source.shape("lm_head.weight") == (tiny.VOCAB, 64)
    assert source.shape("lm_head.bias") is None
    with pytest.raises(KeyError):
        next(source.read(["lm_head.bias"]))


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight", "both", "different"])
def test_tied_weights_under_any_name(kept: str, saved: Saved, tmp_path: Path) -> None:
    shutil.copytree(saved("llama", shard="1GB"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    names = ["model.embed_tokens.weight", "lm_head.weight"] if kept in ("both", "different") else [kept]
    tensors |= {name: embedding.clone() for name in names}
    if kept == "different":
        tensors["lm_head.weight"][7, 7] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if kept == "different":
        with pytest.raises(CheckpointError, match=r"different values .* set tie_word_embeddings to false"):
            oomc.load(tmp_path)
        return
    model: Any = oomc.load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    fill_slabs(model)
    assert torch.equal(model.lm_head.weight, embedding)
    same_tensors(model.state_dict(), pretrained(tmp_path).state_dict())


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


EXPERT = "model.layers.0.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks model\.norm\.weight of Qwen3MoeForCausalLM"),
        (lambda t: t.pop(EXPERT), r"number 5 is missing"),
        (lambda t: [t.pop(k) for k in list(t) if ".experts.7." in k], r"not those of .* is 7x64x64 there and 8x64x64"),
        (lambda t: [t.pop(k) for k in list(t) if "0.mlp.experts" in k], r"lacks .*gate_up_proj.* of Qwen3Moe"),
        (lambda t: t.update({EXPERT: torch.zeros(3, 3)}), "cannot be made of"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(65)}), r"model\.norm\.weight is 65 there and 64 in"),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), r"has model\.extra, for which Qwen3Moe.* has no place"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_read(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, saved: Saved, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    shutil.copytree(saved("qwen3_moe", shard="1GB"), tmp_path, dirs_exist_ok=True)
    edit(tmp_path, change)

    def unread(*_: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Shards, "read_into", unread)
    with pytest.raises(CheckpointError, match=message):
        oomc.load(tmp_path)


def test_unexpected_tensors_can_be_left_out(saved: Saved, tmp_path: Path) -> None:
    shutil.copytree(saved("qwen3_moe", shard="1GB"), tmp_path, dirs_exist_ok=True)
    edit(tmp_path, lambda t: t.update({"model.extra": torch.zeros(1), "a.rotary_emb.inv_freq": torch.zeros(1)}))
    with pytest.warns(UserWarning, match=r"has model\.extra, for which"):
        model = oomc.load(tmp_path, allow_unexpected=True)
    fill(model)


def test_a_damaged_file_is_named(saved: Saved, tmp_path: Path) -> None:
    shutil.copytree(saved("mixtral"), tmp_path, dirs_exist_ok=True)
    file = sorted(tmp_path.glob("*.safetensors"))[2]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{file.name} has .* cut short"):
        oomc.load(tmp_path)


def test_what_is_no_directory_of_weights(saved: Saved, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="hf download Qwen/Qwen3-30B-A3B"):
        oomc.load("Qwen/Qwen3-30B-A3B")
    shutil.copy(saved("llama") / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="has no weights"):
        oomc.load(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedError, match="oomc reads safetensors"):
        oomc.load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UnsupportedError, match="is quantized"):
        oomc.load(tmp_path)


def test_a_changed_model_is_checked_again(saved: Saved) -> None:
    model: Any = oomc.load(saved("llama"))
    source_of(model).check(model)
    with torch.device("meta"):
        model.model.norm.weight = nn.Parameter(torch.ones(65))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is 64 there and 65 in the model"):
        source_of(model).check(model)
    with torch.device("meta"):
        model.model.norm.bias = nn.Parameter(torch.ones(64))
    with pytest.raises(CheckpointError, match=r"lacks model\.norm\.bias"):
        source_of(model).check(model)


def test_the_source_goes_with_the_model(saved: Saved) -> None:
    model = oomc.load(saved("llama"))
    source, gone = weakref.ref(source_of(model)), weakref.ref(model)
    held = source_of(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(ReferenceError, match="is gone"):
        _ = held._model
    del held
    assert source() is None
    assert weights_of(nn.Linear(1, 1)) is None


WIDE: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 32, "num_hidden_layers": 6}


@pytest.mark.parametrize("shard", ["1GB", "5MB"])
def test_reading_holds_one_parameter_and_a_block_at_most(shard: str, tmp_path: Path) -> None:
    model: Any = tiny.build("qwen3_moe", torch.bfloat16, **WIDE)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    largest = max(p.nbytes for p in model.parameters())
    block = sum(p.nbytes for n, p in model.named_parameters() if ".layers.1." in n)
    assert block > 12 << 20
    names = [n for n, _ in model.named_parameters()]
    del model
    loaded = oomc.load(tmp_path)
    gc.collect()
    rss = host_bytes()
    most = 0
    with Meter() as meter:
        for _, value in source_of(loaded).read(names):
            most = max(most, host_bytes() - rss)
            del value
    assert meter.peak <= largest + 4096
    # what is freed below its threshold malloc keeps for the next; mapped files would count all six blocks
    assert most <= 2 * block + (4 << 20)
    with Meter() as meter:
        for _, value in source_of(loaded).read(names):
            assert not value.is_meta
    assert meter.peak <= block, "with the last value still held"


def test_a_conversion_of_transformers_holds_its_result_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from oomc.models import huggingface_loading

    model: Any = tiny.build("qwen3_moe", torch.bfloat16, **WIDE)
    model.save_pretrained(tmp_path)
    largest = max(p.nbytes for p in model.parameters())
    monkeypatch.setattr(huggingface_loading, "_is_merge", lambda *_: False)
    loaded = oomc.load(tmp_path)
    with Meter() as meter:
        for name, value in source_of(loaded).read([n for n, _ in model.named_parameters()]):
            assert torch.equal(value, model.get_parameter(name))
            del value
    assert largest < meter.peak <= 2 * largest + 4096


def spread(values: dict[str, torch.Tensor]) -> dict[str, tuple[float, float]]:
    return {n: (float(v.float().mean()), float(v.float().std())) for n, v in values.items() if v.numel() > 1}


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama", "qwen3_next"])
def test_random_weights_are_distributed_as_the_models_own(name: str) -> None:
    config: Any = tiny.build(name).config
    torch.manual_seed(0)
    eager = transformers.AutoModelForCausalLM.from_config(config)
    model = oomc.load(config)
    same_tensors(dict(model.named_buffers()), dict(eager.named_buffers()))
    fill(model)
    got, want = spread(model.state_dict()), spread(eager.state_dict())
    assert got.keys() == want.keys()
    for key, (mean, std) in want.items():
        count = model.state_dict()[key].numel()
        if std == 0:
            assert got[key] == (mean, 0), key
        elif count >= 32:
            assert abs(got[key][1] - std) <= 5 * std / count**0.5, key
            assert abs(got[key][0] - mean) <= 7 * std / count**0.5, key


def test_random_weights_depend_on_the_seed_and_the_name_only() -> None:
    config: Any = tiny.build("qwen3_moe").config
    state = torch.get_rng_state()
    one, two, other = oomc.load(config, seed=1), oomc.load(config, seed=1), oomc.load(config, seed=2)
    names = [n for n, _ in one.named_parameters()]
    values = dict(source_of(one).read(names))
    for name, value in source_of(two).read(names[::-1]):
        assert torch.equal(value, values[name]), name
    drawn = [n for n in names if values[n].float().std() > 0]
    assert len(drawn) > 10
    assert not any(torch.equal(values[n], v) for n, v in source_of(other).read(drawn))
    assert len({float(values[n].flatten()[0]) for n in drawn}) == len(drawn), "no two parameters alike"
    assert torch.equal(torch.get_rng_state(), state)
    assert source_of(one).shape("model.norm.weight") == (64,)
    source_of(one).check(one)


def test_random_weights_hold_one_module() -> None:
    config: Any = tiny.build("qwen3_moe", torch.bfloat16, **WIDE).config
    model = oomc.load(config, dtype=torch.bfloat16)
    block = sum(p.nbytes for n, p in model.named_parameters() if ".layers.1." in n)
    names = [n for n, _ in model.named_parameters()]
    with Meter() as meter:
        for _, value in source_of(model).read(names):
            del value
    assert meter.peak <= block


def test_materialize_keeps_the_parameter() -> None:
    layer, tied = nn.Linear(3, 2, device="meta"), nn.Linear(3, 2, device="meta")
    tied.weight = layer.weight
    weight = layer.get_parameter("weight")
    weight.requires_grad_(False)
    weight.label = "mine"  # type: ignore[attr-defined]
    data = torch.ones(2, 3)
    materialize(weight, data)
    assert layer.weight is weight is tied.weight
    assert not weight.requires_grad
    assert weight.label == "mine"  # type: ignore[attr-defined]
    assert isinstance(weight, nn.Parameter)
    data[0, 0] = 5
    assert weight[0, 0] == 5
