"""Complex-gate checkpoints in vLLM 0.32: the stock model of the family with its routers replaced.

:func:`register` is called from the plug-in's entry point in every process; it names the models and their
configurations, and vLLM imports the model classes only when a CG checkpoint is loaded. The budget is ``router.top_k``,
as for stock routers, so whatever sets a step's k there selects the kappa vector here.
"""

from __future__ import annotations

from simmoe.live.refactor.families import FAMILIES


def register() -> None:
    """Make vLLM know CG checkpoints; safe to call more than once."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        ModelArchConfigConvertorBase,
    )

    from simmoe.live.refactor.complex_gate_configs import CONFIGS

    class LatentAttention(ModelArchConfigConvertorBase):
        """vLLM knows latent attention by a list of model types, which ours are not on."""

        def is_deepseek_mla(self) -> bool:
            return getattr(self.hf_text_config, "kv_lora_rank", None) is not None

    for config in CONFIGS:
        AutoConfig.register(config.model_type, config, exist_ok=True)
        MODEL_ARCH_CONFIG_CONVERTORS[config.model_type] = LatentAttention
    for family in FAMILIES.values():
        name = family.complex_gate_architecture
        ModelRegistry.register_model(name, f"simmoe.live.refactor.vllm_complex_gate_models:{name}")
