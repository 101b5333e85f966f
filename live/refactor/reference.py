"""The paper's formulas in plain torch, float64, for one MoE layer: the oracle of the transformation and the engines.

Slow and short on purpose. Nothing here is shared with the code it checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ReferenceLayer:
    """One MoE layer of the original model."""

    gate: torch.Tensor
    """[E, hidden]."""
    w_gate: torch.Tensor
    """[E, C, hidden]."""
    w_up: torch.Tensor
    """[E, C, hidden]."""
    w_down: torch.Tensor
    """[E, hidden, C]."""
    top_k: int
    """m."""
    normalise: bool
    """Whether the selected weights are divided by their sum."""
    scaling: float = 1.0
    """The model's routed scaling factor."""


def original_layer(x: torch.Tensor, layer: ReferenceLayer, k: int) -> torch.Tensor:
    """The unsplit layer at k whole experts: [hidden] -> [hidden]."""
    weights, chosen = _route(x, layer.gate, k, layer.normalise, layer.scaling)
    out = torch.zeros_like(x)
    for w, e in zip(weights, chosen, strict=True):
        out += w * layer.w_down[e] @ _activation(x, layer, e)
    return out


def linear_gate_layer(
    x: torch.Tensor, layer: ReferenceLayer, groups: torch.Tensor, rows: torch.Tensor, k: int
) -> torch.Tensor:
    """The split layer under LG: softmax over all sub-experts, layer-wide top k, output scaled by N.

    Args:
        x: [hidden].
        groups: [E, N, C / N] neurons of each sub-expert.
        rows: [E * N, hidden] gate rows of the sub-experts.
        k: sub-experts a token.
    """
    splits = groups.shape[1]
    weights, chosen = _route(x, rows, k, layer.normalise, layer.scaling)
    out = torch.zeros_like(x)
    for w, sub in zip(weights, chosen, strict=True):
        e, n = divmod(int(sub), splits)
        out += splits * w * _sub_expert(x, layer, e, groups[e, n])
    return out


def complex_gate_layer(
    x: torch.Tensor, layer: ReferenceLayer, groups: torch.Tensor, neurons: torch.Tensor, kappa: Sequence[int]
) -> torch.Tensor:
    """The split layer under CG: the original top m experts, kappa_j sub-experts of each by proxy score.

    Args:
        x: [hidden].
        groups: [E, N, C / N]; neurons: [E, N, r] gate neurons.
        kappa: [m] sub-experts by rank of the router weight.
    """
    weights, chosen = _route(x, layer.gate, layer.top_k, layer.normalise, layer.scaling)
    out = torch.zeros_like(x)
    for rank in range(layer.top_k):
        e = int(chosen[rank])
        activation = _activation(x, layer, e)
        score = activation[neurons[e]].abs().mean(dim=1)
        for n in score.argsort(descending=True, stable=True)[: kappa[rank]]:
            out += weights[rank] * _sub_expert(x, layer, e, groups[e, n])
    return out


def _route(
    x: torch.Tensor, gate: torch.Tensor, k: int, normalise: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    probability = torch.softmax(gate @ x, dim=0)
    chosen = probability.argsort(descending=True, stable=True)[:k]
    weights = probability[chosen]
    return scaling * (weights / weights.sum() if normalise else weights), chosen


def _activation(x: torch.Tensor, layer: ReferenceLayer, e: int) -> torch.Tensor:
    z = layer.w_gate[e] @ x
    return z / (1 + torch.exp(-z)) * (layer.w_up[e] @ x)


def _sub_expert(x: torch.Tensor, layer: ReferenceLayer, e: int, group: torch.Tensor) -> torch.Tensor:
    return layer.w_down[e][:, group] @ _activation(x, layer, e)[group]
