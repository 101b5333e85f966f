"""Tiny models for real engines: two layers, 16 experts, top-8; heads of 32, the least vLLM's CPU attention takes."""

from __future__ import annotations

from typing import Any

TINY_OLMOE: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "torch_dtype": "float32",
}

TINY_QWEN3_MOE: dict[str, Any] = {
    **{key: value for key, value in TINY_OLMOE.items() if key != "intermediate_size"},
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

#: vLLM's CPU kernel of latent attention is compiled for one size: 512 latent, 64 rotary dimensions. Positions by YaRN,
#: as in the published models: with plain rotary positions vLLM's own eager and compiled runs differ, on a CPU.
TINY_DEEPSEEK_V2: dict[str, Any] = {
    **{key: value for key, value in TINY_OLMOE.items() if not key.startswith(("num_experts", "rope"))},
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
    "attention_bias": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}


def split(config: dict[str, Any], splits: int = 4) -> dict[str, Any]:
    """Return the configuration of a model whose experts are split: more of them, narrower, more a token."""
    width = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    counts = ("num_experts", "n_routed_experts", "num_experts_per_tok", "n_shared_experts")
    return {
        **config,
        width: config[width] // splits,
        **{name: config[name] * splits for name in counts if name in config},
    }
