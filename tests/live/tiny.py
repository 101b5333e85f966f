"""A tiny OLMoE for real engines: two layers, 16 experts, top-8; heads of 32, the least vLLM's CPU attention takes."""

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
