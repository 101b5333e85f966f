"""The small model's shape, and a grouped matrix product for its experts.

OLMoE's architecture with every width divided by 16: 64 experts, top-8, no renormalisation of the top-k weights. 9.3 million
parameters, 18.6 MB in bf16. Widths stay multiples of 32, heads of 32, so that vLLM's CPU and GPU kernels take the model
before and after its experts are split by 4.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

VOCAB_SIZE = 4096
CONTEXT_TOKENS = 512
END_OF_TEXT = "<|endoftext|>"


def small_olmoe_config(**overrides: Any) -> Any:
    """``OlmoeConfig`` of the committed model; ``overrides`` make smaller ones for dry runs."""
    from transformers import OlmoeConfig

    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "router_aux_loss_coef": 0.01,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    return OlmoeConfig(**{**shape, **overrides})


def grouped_experts_forward(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """All experts of a layer in two grouped matrix products, computed in bf16 from float32 parameters.

    A stand-in for ``OlmoeExperts.forward`` under autocast, equal to it within bf16 rounding.

    Args:
        experts: module with gate_up_proj [E, 2 * I, H] and down_proj [E, H, I].
        hidden_states: [num_tokens, H].
        top_k_index: [num_tokens, k] int64; top_k_weights: [num_tokens, k].
    Returns:
        [num_tokens, H], in hidden_states' dtype.
    """
    num_tokens, k = top_k_index.shape
    order = top_k_index.reshape(-1).argsort(stable=True)
    counts = torch.zeros(experts.num_experts, dtype=torch.int32, device=order.device)
    counts.scatter_add_(0, top_k_index.reshape(-1), torch.ones_like(order, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    rows = hidden_states.to(torch.bfloat16)[order // k]
    up = F.grouped_mm(rows, experts.gate_up_proj.to(torch.bfloat16).transpose(1, 2), offs=ends)
    gate, value = up.chunk(2, dim=-1)
    out = F.grouped_mm(F.silu(gate) * value, experts.down_proj.to(torch.bfloat16).transpose(1, 2), offs=ends)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    out = out[back].view(num_tokens, k, -1)
    return torch.einsum("tkh,tk->th", out.float(), top_k_weights.float()).to(hidden_states.dtype)
