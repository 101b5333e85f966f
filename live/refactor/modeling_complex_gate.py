"""Modelling code of a complex-gate (CG) checkpoint; travels inside it and depends on torch and transformers alone.

The stock model of the family, with each MoE layer's router replaced by :class:`ComplexGate`: the original router ranks
the original experts, and each ranked expert contributes its ``kappa`` sub-experts with the most active gate neurons.
``config.json`` brings, under ``simmoe_refactor``, the number of splits N, the original router's ``top_k`` m, and one
vector kappa for each budget k = 1..m * N. ``num_experts_per_tok`` is the budget a model starts with; ``set_budget``
changes it.

Weights: ``mlp.gate.weight`` [E * N, hidden] holds each original router row N times, as the stock architecture's shape
wants; ``mlp.gate_neurons.{gate,up}_proj.weight`` [E * N * r, hidden] are the gate neurons' input weights, sub-expert
after sub-expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)


def select_sub_experts(
    scores: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, kappa: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sub-experts a token runs at one budget.

    Args:
        scores: [num_tokens, E, N] proxy scores of every sub-expert.
        weights: [num_tokens, m] router weights of the selected original experts, in any order.
        experts: [num_tokens, m] their ids.
        kappa: [m] sub-experts by rank of the weight; sums to k.
    Returns:
        (topk_weights [num_tokens, k], topk_ids [num_tokens, k]): weights inherited, ids expert * N + sub-expert.
    """
    splits = scores.shape[-1]
    by_weight = weights.float().argsort(dim=-1, descending=True, stable=True)
    weights, experts = weights.gather(1, by_weight), experts.long().gather(1, by_weight)
    chosen = scores.gather(1, experts[:, :, None].expand(-1, -1, splits))
    best = chosen.argsort(dim=-1, descending=True, stable=True)
    ranks = [rank for rank, count in enumerate(kappa) for _ in range(count)]
    slots = [slot for count in kappa for slot in range(count)]
    return weights[:, ranks], experts[:, ranks] * splits + best[:, ranks, slots]


def proxy_scores(hidden: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, splits: int, r: int) -> torch.Tensor:
    """[num_tokens, E, N] mean absolute activation of each sub-expert's r gate neurons.

    Args:
        hidden: [num_tokens, hidden_size]; w_gate, w_up: [E * N * r, hidden_size].
    """
    activation = F.silu(F.linear(hidden, w_gate)) * F.linear(hidden, w_up)
    return activation.float().abs().view(hidden.shape[0], -1, splits, r).mean(dim=-1)


class GateNeurons(nn.Module):
    """Input weights of the gate neurons of one MoE layer."""

    def __init__(self, hidden_size: int, count: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, count, bias=False)
        self.up_proj = nn.Linear(hidden_size, count, bias=False)


class ComplexGate(nn.Module):
    """The router of one MoE layer: the family's own router over the original experts, then the proxy inside each."""

    def __init__(self, stock: nn.Module, neurons: GateNeurons, record: dict[str, Any]) -> None:
        super().__init__()
        self.splits, self.r = record["splits"], record["gate_neurons"]
        self.kappa = record["kappa"]
        self.num_experts = stock.num_experts
        self.top_k = stock.top_k
        self.max_budget = len(self.kappa)
        self.weight = stock.weight
        stock.num_experts = stock.num_experts // self.splits
        stock.top_k = record["original"]["top_k"]
        # in tuples, so that their parameters are registered once, here and as mlp.gate_neurons
        self._stock, self._neurons = (stock,), (neurons,)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(router logits over original experts, topk_weights, topk_ids) at the budget ``top_k``."""
        original_rows = {"weight": self.weight[:: self.splits]}
        logits, weights, experts = torch.func.functional_call(self._stock[0], original_rows, (hidden_states,))
        neurons = self._neurons[0]
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores = proxy_scores(flat, neurons.gate_proj.weight, neurons.up_proj.weight, self.splits, self.r)
        return logits, *select_sub_experts(scores, weights, experts, self.kappa[self.top_k - 1])


class _ComplexGateMixin(nn.Module):
    """Over a stock causal language model: installs the gates and keeps their budget."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        record = config.simmoe_refactor
        for layer in self.model.layers:
            block = layer.mlp
            if hasattr(block, "experts") and hasattr(block, "gate"):
                count = block.gate.num_experts * record["gate_neurons"]
                block.gate_neurons = GateNeurons(config.hidden_size, count)
                block.gate = ComplexGate(block.gate, block.gate_neurons, record)
        self.post_init()

    def set_budget(self, k: int) -> None:
        """Run ``k`` sub-experts a token, 1..m * N, from now on."""
        ceiling = len(self.config.simmoe_refactor["kappa"])
        if not 1 <= k <= ceiling:
            raise ValueError(f"budget k={k} is outside 1..{ceiling}")
        for layer in self.model.layers:
            if isinstance(getattr(layer.mlp, "gate", None), ComplexGate):
                layer.mlp.gate.top_k = k


class ComplexGateOlmoeConfig(OlmoeConfig):
    model_type = "simmoe_cg_olmoe"


class ComplexGateQwen3MoeConfig(Qwen3MoeConfig):
    model_type = "simmoe_cg_qwen3_moe"


class ComplexGateDeepseekV2Config(DeepseekV2Config):
    model_type = "simmoe_cg_deepseek_v2"


class ComplexGateOlmoeForCausalLM(_ComplexGateMixin, OlmoeForCausalLM):
    config_class = ComplexGateOlmoeConfig


class ComplexGateQwen3MoeForCausalLM(_ComplexGateMixin, Qwen3MoeForCausalLM):
    config_class = ComplexGateQwen3MoeConfig


class ComplexGateDeepseekV2ForCausalLM(_ComplexGateMixin, DeepseekV2ForCausalLM):
    config_class = ComplexGateDeepseekV2Config


CONFIGS = (ComplexGateOlmoeConfig, ComplexGateQwen3MoeConfig, ComplexGateDeepseekV2Config)

# checkpoints store experts one by one; transformers fuses them on loading by model_type
for _config in CONFIGS:
    _stock_type = _config.model_type.removeprefix("simmoe_cg_")
    register_checkpoint_conversion_mapping(
        _config.model_type, get_checkpoint_conversion_mapping(_stock_type) or
        get_checkpoint_conversion_mapping("qwen2_moe"), overwrite=True,
    )  # fmt: skip
