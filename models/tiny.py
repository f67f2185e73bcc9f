"""Tiny models of the architectures that oomc is tested on: real code, random weights, seconds to run.

    model = build("qwen3_moe")
    loss = model(input_ids=ids, labels=ids).loss

Hidden size 64, 2 to 4 layers, 8 experts of which each token takes 2, a vocabulary of 512.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from oomc.models.plain_moe import PlainMoe, PlainMoeConfig

VOCAB = 512
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# Name: transformers' config class, causal-LM class, and what differs from _COMMON.
_HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_MOE, "head_dim": 16, "norm_topk_prob": True}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 8, "sliding_window": 24}),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {"num_experts": 8, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**_MOE, "shared_expert_intermediate_size": 48}),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 24},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 32,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **_MOE,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
}

NAMES = (*_HUGGING_FACE, "plain_moe")


def build(
    name: str, dtype: torch.dtype = torch.float32, seed: int = 0, *, aux_loss: bool | None = None, **changes: Any
) -> nn.Module:
    """A tiny model with random weights.

    Args:
        name: one of NAMES.
        dtype: dtype of the parameters (buffers of rotary embeddings stay fp32, as in from_pretrained).
        seed: of the weights. The global random state is left as it was.
        aux_loss: whether the router's load-balancing loss is part of the loss; None leaves the config's default.
        changes: config fields that differ from the tiny ones.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "plain_moe":
            return PlainMoe(PlainMoeConfig(vocab_size=VOCAB, **changes)).to(dtype)
        import transformers

        _, model_name, _ = _HUGGING_FACE[name]
        if aux_loss is not None:
            changes["output_router_logits"] = aux_loss
        made = config(name, **changes)
        # As from_pretrained does: parameters in dtype, computed buffers as the model makes them.
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model: nn.Module = getattr(transformers, model_name)(made)
        finally:
            torch.set_default_dtype(default)
        _spread(model)
        return model


def config(name: str, **changes: Any) -> Any:
    """The config of a tiny Hugging Face model, with fields that differ from the tiny ones."""
    import transformers

    kind, _, own = _HUGGING_FACE[name]
    return getattr(transformers, kind)(**{**_COMMON, **own, **changes})


def _spread(model: nn.Module) -> None:
    """Move weights off values at which they have no effect, so that tests see it.

    Norms, biases and sinks start as constants. The decay of linear attention (A_log) starts so strong that a state
    hardly outlives one token, and its gradient is then rounding noise.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(4.0)
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
