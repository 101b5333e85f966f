"""Random weights of the scale trained ones have, as a vLLM load format."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

LOAD_FORMAT = "simmoe-dummy"


@register_model_loader(LOAD_FORMAT)
class ScaledDummyLoader(DummyModelLoader):  # type: ignore[misc]
    """vLLM's dummy weights, then norms of 1 and matrices with a standard deviation of fan_in ** -0.5.

    vLLM's lie within 1e-3 of zero, norms included: activations vanish, router logits tie, and ties route every token to
    the same few experts, which no trained model does.
    """

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fill every parameter; the same in every process."""
        super().load_weights(model, model_config)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.fill_(1.0)
            elif parameter.dim() >= 2 and parameter.is_floating_point():
                deviation = parameter.data.flatten()[: 1 << 20].float().std()
                parameter.data.mul_(float(parameter.shape[-1] ** -0.5 / deviation))
