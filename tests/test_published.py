"""Published configurations: their sizes, and the names that they are found by."""

from __future__ import annotations

import pytest

from oomc.models import published

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", published.MODELS)
def test_parameters_are_as_published(name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(published.config(name))
    count = sum(p.numel() for p in model.parameters()) / 1e9
    expected = published.MODELS[name].parameters
    assert count == pytest.approx(expected, rel=0.003), f"{count:.2f} G parameters, {expected} published"
    assert model.dtype == torch.bfloat16 and not model.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("qwen3-30b-a3b", "Qwen3-30B-A3B"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "Qwen3-235B-A22B"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B"),
        ("deepseek-ai/DeepSeek-V3-Base", "DeepSeek-V3"),
        ("deepseek-v3", "DeepSeek-V3"),
        ("allenai/OLMoE-1B-7B-0924", "OLMoE-1B-7B"),
        ("Qwen3-Next-80B-A3B-Thinking", "Qwen3-Next-80B-A3B"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "Llama-3-8B"),
    ],
)
def test_names_as_on_the_hub(text: str, name: str) -> None:
    assert published.find(text) == name


@pytest.mark.parametrize("text", ["Qwen3-31B", "", "-instruct", "qwen3", "DeepSeek-V3.1"])
def test_unknown_names_are_refused_with_the_list(text: str) -> None:
    assert published.find(text) is None
    with pytest.raises(ValueError, match=r"no published model is known as .*; there are Qwen3-30B-A3B, .*Llama-3-8B"):
        published.config(text)


def test_kinds_of_layers() -> None:
    assert published.config("gpt-oss-20b").layer_types == 12 * ["sliding_attention", "full_attention"]
    assert published.config("Qwen3-Next-80B-A3B").layer_types.count("full_attention") == 12
    assert published.config("DeepSeek-V3").first_k_dense_replace == 3
