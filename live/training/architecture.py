"""The small model's shape, and a grouped matrix product for its experts.

OLMoE's architecture with every width divided by 16: 64 experts, top-8, no renormalisation of the top-k weights. 9.3
million parameters, 18.6 MB in bf16. Widths stay multiples of 32, heads of 32, so that vLLM's CPU and GPU kernels take
the model before and after its experts are split by 4.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class _Permute(torch.autograd.Function):
    """``rows[source]`` whose backward gathers through the inverse instead of scattering with atomics."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, source: torch.Tensor, inverse: torch.Tensor, copies: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return rows[source // copies] if copies > 1 else rows[source]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        back = grad[inverse]
        return (back.unflatten(0, (-1, ctx.copies)).sum(dim=1) if ctx.copies > 1 else back), None, None, None


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
    # order[p] is the (token, choice) pair at place p once pairs are grouped by expert; back is its inverse
    ids, order = top_k_index.reshape(-1).to(torch.int16).sort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    every_expert = torch.arange(experts.num_experts, dtype=torch.int16, device=ids.device)
    ends = torch.searchsorted(ids, every_expert, right=True, out_int32=True)
    rows = _Permute.apply(hidden_states.to(torch.bfloat16), order, back, k)
    up = F.grouped_mm(rows, experts.gate_up_proj.to(torch.bfloat16).transpose(1, 2), offs=ends)
    gate, value = up.chunk(2, dim=-1)
    weights = _Permute.apply(top_k_weights.to(torch.bfloat16).reshape(-1), order, back, 1)
    activation = F.silu(gate) * value * weights[:, None]
    out = F.grouped_mm(activation, experts.down_proj.to(torch.bfloat16).transpose(1, 2), offs=ends)
    out = _Permute.apply(out, back, order, 1)
    return out.view(num_tokens, k, -1).sum(dim=1).to(hidden_states.dtype)


def balance_loss(router_logits: Sequence[torch.Tensor], top_k: int) -> torch.Tensor:
    """OLMoE's load-balancing loss, layer by layer: ``E * sum of f_e * P_e``, ``top_k`` at perfect balance.

    transformers pools all layers before the product, so one layer's excess hides another's dearth and experts die.

    Args:
        router_logits: [num_tokens, E] of each layer.
    """
    losses = []
    for logits in router_logits:
        probability = logits.float().softmax(dim=-1)
        chosen = probability.detach().topk(top_k, dim=-1).indices
        share = torch.zeros_like(probability).scatter_(1, chosen, 1.0).mean(dim=0)
        losses.append(logits.shape[-1] * (share * probability.mean(dim=0)).sum())
    return torch.stack(losses).mean()
