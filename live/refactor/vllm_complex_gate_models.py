"""vLLM model classes of complex-gate checkpoints; imported by vLLM's registry when one is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM
from vllm.model_executor.models.olmoe import OlmoeForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from simmoe.live.refactor.families import GATE_NEURON_TENSOR
from simmoe.live.refactor.modeling_complex_gate import GateNeurons, proxy_scores, select_sub_experts


class ComplexGateRouter(BaseRouter):
    """Wraps the stock router, which keeps ranking the original experts with the family's own normalisation and scaling.

    Args:
        stock: the router vLLM built for this layer.
        neurons: the layer's gate neurons.
        record: config.json's ``simmoe_refactor``.
    """

    def __init__(self, stock: Any, neurons: GateNeurons, record: dict[str, Any]) -> None:
        super().__init__(top_k=stock.top_k, global_num_experts=stock.global_num_experts, eplb_state=stock.eplb_state)
        self._stock, self._neurons = stock, neurons
        self._splits, self._r, self._kappa = record["splits"], record["gate_neurons"], record["kappa"]
        stock.top_k = record["original"]["top_k"]

    @property
    def routing_method_type(self) -> Any:
        return self._stock.routing_method_type

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        original = router_logits[:, :: self._splits].contiguous()
        weights, experts = self._stock._compute_routing(hidden_states, original, indices_type, input_ids=input_ids)
        w_gate, w_up = self._neurons.gate_proj.weight, self._neurons.up_proj.weight
        scores = proxy_scores(hidden_states, w_gate, w_up, self._splits, self._r)
        topk_weights, topk_ids = select_sub_experts(scores, weights, experts, self._kappa[self.top_k - 1])
        return topk_weights.float().contiguous(), topk_ids.to(experts.dtype).contiguous()


class _ComplexGateMixin(nn.Module):
    """Installs the routers after the stock model is built and loads their tensors."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        record = config.simmoe_refactor
        dtype = vllm_config.model_config.dtype
        for layer in self.model.layers:
            runner = getattr(getattr(layer, "mlp", None), "experts", None)
            if runner is not None and hasattr(runner, "router"):
                count = record["original"]["num_experts"] * record["splits"] * record["gate_neurons"]
                layer.mlp.gate_neurons = GateNeurons(config.hidden_size, count).to(dtype).requires_grad_(False)
                runner.router = ComplexGateRouter(runner.router, layer.mlp.gate_neurons, record)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """The stock model's tensors by its own loader, gate neurons by name."""
        parameters = dict(self.named_parameters())
        own: set[str] = set()

        def stock_weights() -> Iterable[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if GATE_NEURON_TENSOR.match(name):
                    parameters[name].data.copy_(tensor)
                    own.add(name)
                else:
                    yield name, tensor

        loaded = super().load_weights(stock_weights())
        return own | (loaded or set())


class ComplexGateOlmoeForCausalLM(_ComplexGateMixin, OlmoeForCausalLM):
    pass


class ComplexGateQwen3MoeForCausalLM(_ComplexGateMixin, Qwen3MoeForCausalLM):
    pass


class ComplexGateDeepseekV2ForCausalLM(_ComplexGateMixin, DeepseekV2ForCausalLM):
    pass
