"""Model configurations to measure: published shapes, and any of the supported families split into sub-experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from simmoe.errors import LiveError

#: Per family: the config keys of the number of routed experts, of one expert's width, and those that grow with both.
_FAMILIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "olmoe": ("num_experts", "intermediate_size", ("num_experts_per_tok",)),
    "qwen3_moe": ("num_experts", "moe_intermediate_size", ("num_experts_per_tok",)),
    # the shared experts' width is counted in routed widths
    "deepseek_v2": ("n_routed_experts", "moe_intermediate_size", ("num_experts_per_tok", "n_shared_experts")),
}

OLMOE_1B_7B: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 50279,
    "pad_token_id": 1,
    "torch_dtype": "bfloat16",
}
"""allenai/OLMoE-1B-7B-0924, as published."""


def split_config(config: dict[str, Any], splits: int) -> dict[str, Any]:
    """Return the config of the same model with every routed expert split into ``splits`` sub-experts.

    Args:
        config: a Hugging Face config of the OLMoE, Qwen3-MoE or DeepSeek-V2 family.
        splits: N; divides the expert width.
    Raises:
        LiveError: another family, or a width N does not divide.
    """
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise LiveError(f"model_type '{family}' cannot be split; known: {', '.join(sorted(_FAMILIES))}")
    num_experts, width, others = _FAMILIES[family]
    if splits < 1 or config[width] % splits:
        raise LiveError(f"cannot split experts of {width} {config[width]} into {splits}: it must divide the width")
    scaled = {key: config[key] * splits for key in (num_experts, *others) if config.get(key) is not None}
    return {**config, **scaled, width: config[width] // splits}


def write_model(config: dict[str, Any], folder: Path, max_model_len: int) -> Path:
    """Write a folder vLLM can load with dummy weights; positions are raised to ``max_model_len`` where below it."""
    folder.mkdir(parents=True, exist_ok=True)
    positions = max(config["max_position_embeddings"], max_model_len)
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}), encoding="utf-8")
    return folder


def shape_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config that decide a step's work."""
    num_experts, width, others = _FAMILIES[config["model_type"]]
    keys = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "kv_lora_rank", "first_k_dense_replace", num_experts, width, *others,
    )  # fmt: skip
    return {key: config[key] for key in keys if config.get(key) is not None}
