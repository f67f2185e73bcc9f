"""Published models by name: their configurations, written down as their authors have them on the Hugging Face hub.

    config = published.config("Qwen/Qwen3-235B-A22B-Instruct")

What only tokenizers and generation need is left out, and so is quantization: weights are bf16, as they are trained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """One model.

    Attributes:
        kind: its config class in transformers.
        parameters: their number in billions, as published.
        fields: of the config.
    """

    kind: str
    parameters: float
    fields: Mapping[str, Any]


def _rope(theta: float, **others: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta} | others


_QWEN3_MOE: dict[str, Any] = {
    "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_parameters": _rope(1e6), "router_aux_loss_coef": 0.001,
}  # fmt: skip
_MIXTRAL: dict[str, Any] = {
    "vocab_size": 32000, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5, "rope_parameters": _rope(1e6), "sliding_window": None,
}  # fmt: skip
_GPT_OSS: dict[str, Any] = {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128,
    "max_position_embeddings": 131072, "attention_bias": True, "rms_norm_eps": 1e-5, "router_aux_loss_coef": 0.9,
    "rope_parameters": _rope(150000.0, rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                             original_max_position_embeddings=4096),
}  # fmt: skip

MODELS: dict[str, Published] = {
    # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json; 30.5 B: its model card
    "Qwen3-30B-A3B": Published("Qwen3MoeConfig", 30.5, _QWEN3_MOE | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
        "moe_intermediate_size": 768,
    }),
    # https://huggingface.co/Qwen/Qwen3-235B-A22B/blob/main/config.json; 235 B: its model card
    "Qwen3-235B-A22B": Published("Qwen3MoeConfig", 235.0, _QWEN3_MOE | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64,
        "moe_intermediate_size": 1536,
    }),
    # https://huggingface.co/mistralai/Mixtral-8x7B-v0.1/blob/main/config.json; 46.7 B: arXiv:2401.04088 has 47 B
    "Mixtral-8x7B": Published("MixtralConfig", 46.7, _MIXTRAL | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "max_position_embeddings": 32768, "router_aux_loss_coef": 0.02,
    }),
    # https://huggingface.co/mistralai/Mixtral-8x22B-v0.1/blob/main/config.json; 140.6 B: size of its safetensors
    "Mixtral-8x22B": Published("MixtralConfig", 140.6, _MIXTRAL | {
        "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56, "num_attention_heads": 48,
        "max_position_embeddings": 65536, "router_aux_loss_coef": 0.001,
    }),
    # https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json, without its multi-token prediction module,
    # which transformers has not; 671 B: arXiv:2412.19437
    "DeepSeek-V3": Published("DeepseekV3Config", 671.0, {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "first_k_dense_replace": 3, "num_attention_heads": 128, "num_key_value_heads": 128,
        "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _rope(10000.0, rope_type="yarn", factor=40.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
                                 mscale_all_dim=1.0, original_max_position_embeddings=4096),
    }),
    # https://huggingface.co/openai/gpt-oss-20b/blob/main/config.json; 20.9 B: arXiv:2508.10925, table 1
    "gpt-oss-20b": Published("GptOssConfig", 20.9, _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32}),
    # https://huggingface.co/openai/gpt-oss-120b/blob/main/config.json; 116.8 B: arXiv:2508.10925, table 1
    "gpt-oss-120b": Published("GptOssConfig", 116.8, _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}),
    # https://huggingface.co/allenai/OLMoE-1B-7B-0924/blob/main/config.json; 6.9 B: arXiv:2409.02060
    "OLMoE-1B-7B": Published("OlmoeConfig", 6.9, {
        "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
        "norm_topk_prob": False, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_parameters": _rope(10000.0), "router_aux_loss_coef": 0.01,
    }),
    # https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct/blob/main/config.json, without multi-token prediction;
    # "80 B" on its model card, 79.7 B in transformers' model
    "Qwen3-Next-80B-A3B": Published("Qwen3NextConfig", 79.7, {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
        "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144,
        "layer_types": 12 * [*3 * ["linear_attention"], "full_attention"], "rms_norm_eps": 1e-6,
        "rope_parameters": _rope(1e7, partial_rotary_factor=0.25), "router_aux_loss_coef": 0.001,
    }),
    # https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json; 8.03 B: size of its safetensors
    "Llama-3-8B": Published("LlamaConfig", 8.03, {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_parameters": _rope(500000.0),
    }),
}  # fmt: skip

_COMMON = {"dtype": "bfloat16", "tie_word_embeddings": False, "use_cache": False, "output_router_logits": False}
_VARIANT = re.compile(r"-(instruct|base|chat|thinking|hf|v\d+\.\d+|\d{4})$")
"""What the names of models with the same sizes differ in: their training, version or date."""


def find(name: str) -> str | None:
    """The key in MODELS that a name means, or None.

    Case, an organisation before a slash, and suffixes such as `-Instruct`, `-Base`, `-v0.1` or `-2507` do not matter.
    """
    known = {key.lower(): key for key in MODELS}
    text = name.lower().rpartition("/")[2].removeprefix("meta-")
    while text not in known:
        shorter = _VARIANT.sub("", text)
        if shorter == text:
            return None
        text = shorter
    return known[text]


def config(name: str) -> Any:
    """A transformers config of a published model.

    Args:
        name: as in MODELS, or as on the hub; see `find`.

    Raises:
        ValueError: no such model is known; the message lists those that are.
        ImportError: transformers is not installed.
    """
    key = find(name)
    if key is None:
        raise ValueError(f"no published model is known as {name!r}; there are {', '.join(MODELS)}")
    import transformers

    model = MODELS[key]
    made = getattr(transformers, model.kind)(**_COMMON | dict(model.fields))
    made.name_or_path = key
    return made
