"""Configuration classes of complex-gate checkpoints for hosts that bring their own model classes, such as vLLM.

Light to import, and importable by name in every process. The checkpoint's modelling code has twins, because it
must stand alone.
"""

from __future__ import annotations

from transformers import DeepseekV2Config, OlmoeConfig, Qwen3MoeConfig


class ComplexGateOlmoeConfig(OlmoeConfig):
    model_type = "simmoe_cg_olmoe"


class ComplexGateQwen3MoeConfig(Qwen3MoeConfig):
    model_type = "simmoe_cg_qwen3_moe"


class ComplexGateDeepseekV2Config(DeepseekV2Config):
    model_type = "simmoe_cg_deepseek_v2"


CONFIGS = (ComplexGateOlmoeConfig, ComplexGateQwen3MoeConfig, ComplexGateDeepseekV2Config)
