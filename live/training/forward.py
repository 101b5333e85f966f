"""The training step's forward pass over the parameters of an ``OlmoeForCausalLM``: bf16 products, float32 residuals.

transformers' own forward reads the router's probabilities, and the whole vocabulary's logits, several times over; a
small model spends most of its step on that. Here a layer is one function of tensors that ``torch.compile`` can fuse.
The loss is transformers' within bf16 rounding (tests/unit/test_refactor_training.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from simmoe.live.training.architecture import grouped_experts

Losses = Callable[[Any, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class LayerWeights(NamedTuple):
    """One decoder layer's parameters."""

    input_norm: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    o: torch.Tensor
    post_norm: torch.Tensor
    router: torch.Tensor
    """[E, hidden]."""
    gate_up: torch.Tensor
    """[E, 2 * I, hidden]."""
    down: torch.Tensor
    """[E, hidden, I]."""


def _weights(layer: Any) -> LayerWeights:
    attention, block = layer.self_attn, layer.mlp
    return LayerWeights(
        layer.input_layernorm.weight, attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight,
        attention.q_norm.weight, attention.k_norm.weight, attention.o_proj.weight,
        layer.post_attention_layernorm.weight, block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj,
    )  # fmt: skip


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def layer_forward(
    x: torch.Tensor, w: LayerWeights, cos: torch.Tensor, sin: torch.Tensor, heads: int, top_k: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One decoder layer.

    Args:
        x: [sequences, length, hidden] float32 residual stream.
        cos, sin: [length, head width] float32.
    Returns:
        (the stream after the layer, the layer's load-balancing loss: ``top_k`` at perfect balance).
    """
    sequences, length, hidden = x.shape
    half = torch.bfloat16

    def by_head(rows: torch.Tensor) -> torch.Tensor:
        return rows.view(sequences, length, heads, -1).transpose(1, 2)

    normed = F.rms_norm(x, (hidden,), w.input_norm, eps).to(half)
    q = F.rms_norm(F.linear(normed, w.q.to(half)).float(), (hidden,), w.q_norm, eps)
    k = F.rms_norm(F.linear(normed, w.k.to(half)).float(), (hidden,), w.k_norm, eps)
    v = F.linear(normed, w.v.to(half))
    q, k = (_rotate(by_head(rows), cos, sin).to(half) for rows in (q, k))
    mixed = F.scaled_dot_product_attention(q, k, by_head(v), is_causal=True)
    x = x + F.linear(mixed.transpose(1, 2).reshape(sequences, length, hidden), w.o.to(half)).float()

    normed = F.rms_norm(x, (hidden,), w.post_norm, eps).to(half).view(-1, hidden)
    probability = F.linear(normed, w.router.to(half)).float().softmax(dim=-1)
    weights, chosen = probability.topk(top_k, dim=-1)
    out, tokens_of = grouped_experts(normed, chosen, weights.to(half), w.gate_up.to(half), w.down.to(half))
    share = tokens_of.float() / normed.shape[0]
    balance = probability.shape[1] * (share * probability.mean(dim=0)).sum()
    return x + out.float().view_as(x), balance


def head_loss(
    x: torch.Tensor, norm: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, eps: float
) -> torch.Tensor:
    """Mean cross-entropy of the next token; ``targets`` [sequences * length] hold -100 where there is none."""
    normed = F.rms_norm(x, (x.shape[-1],), norm, eps).to(torch.bfloat16).flatten(0, 1)
    return F.cross_entropy(F.linear(normed, head.to(torch.bfloat16)).float(), targets)


def make_losses(*, compiled: bool) -> Losses:
    """``losses(model, batch)``: the language-model loss and the mean load-balancing loss of ``batch``.

    Args:
        compiled: fuse each layer and the head with ``torch.compile``; the first call then takes a minute or so.
    """
    one_layer: Any = torch.compile(layer_forward, dynamic=False) if compiled else layer_forward
    last: Any = torch.compile(head_loss, dynamic=False) if compiled else head_loss

    def losses(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        config, eps = model.config, model.config.rms_norm_eps
        x = model.model.embed_tokens(batch).float()
        positions = torch.arange(batch.shape[1], device=batch.device)[None]
        cos, sin = (part[0] for part in model.model.rotary_emb(x, positions))
        balances = []
        for layer in model.model.layers:
            x, balance = one_layer(
                x, _weights(layer), cos, sin, config.num_attention_heads, config.num_experts_per_tok, eps
            )
            balances.append(balance)
        targets = torch.full_like(batch, -100)
        targets[:, :-1] = batch[:, 1:]
        lm_loss = last(x, model.model.norm.weight, model.lm_head.weight, targets.flatten(), eps)
        return lm_loss, torch.stack(balances).mean()

    return losses
