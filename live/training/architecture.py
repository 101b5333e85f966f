"""The small model's shape, and a grouped matrix product for its experts.

OLMoE's architecture with every width divided by 16: 64 experts, top-8, no renormalisation of the top-k weights. 9.3
million parameters, 18.6 MB in bf16. Widths stay multiples of 32, heads of 32, so that vLLM's CPU and GPU kernels take
the model before and after its experts are split by 4.
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


def grouped_experts(
    hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """All experts of a layer in two grouped matrix products.

    Args:
        hidden: [num_tokens, H] bf16.
        chosen: [num_tokens, k] int64 experts of each token; weights: [num_tokens, k] bf16.
        gate_up: [E, 2 * I, H] bf16; down: [E, H, I] bf16.
    Returns:
        ([num_tokens, H] bf16 weighted sum of the experts' outputs, [E] int32 tokens routed to each expert).
    """
    num_tokens, k = chosen.shape
    # order[p] is the (token, choice) pair at place p once pairs are grouped by expert; back is its inverse
    ids, order = chosen.reshape(-1).to(torch.int16).sort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    every_expert = torch.arange(gate_up.shape[0], dtype=torch.int16, device=ids.device)
    ends = torch.searchsorted(ids, every_expert, right=True, out_int32=True)
    rows = _Permute.apply(hidden, order, back, k)
    gate, value = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    by_pair = _Permute.apply(weights.reshape(-1), order, back, 1)
    activation = F.silu(gate) * value * by_pair[:, None]
    out = F.grouped_mm(activation, down.transpose(1, 2), offs=ends)
    out = _Permute.apply(out, back, order, 1)
    return out.view(num_tokens, k, -1).sum(dim=1), ends.diff(prepend=ends.new_zeros(1))


def grouped_experts_forward(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """A stand-in for ``OlmoeExperts.forward`` on a GPU, equal to it within bf16 rounding: [num_tokens, H]."""
    half = torch.bfloat16
    out, _ = grouped_experts(
        hidden_states.to(half), top_k_index, top_k_weights.to(half), experts.gate_up_proj.to(half),
        experts.down_proj.to(half),
    )  # fmt: skip
    return out.to(hidden_states.dtype)
