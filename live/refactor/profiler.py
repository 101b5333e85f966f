"""The Neuron Activation Profiler: signed activations of each expert's routed tokens, in bounded memory.

Hooks every MoE layer's experts, recomputes the intermediate activation of each routed token
(``silu(x W_gate) * (x W_up)``, Eq. 1) and keeps a uniform sample of at most ``tokens_per_expert`` tokens an expert:
each token draws a random key and the largest keys stay, which is reservoir sampling that a batch can do at once. With
each kept token goes the rank its expert had among the token's selected experts, and the router weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from simmoe.errors import RefactorError

#: Fewer kept tokens than this and an expert's partition is guesswork.
FEW_TOKENS = 64


@dataclass(frozen=True)
class LayerProfile:
    """What calibration saw of one MoE layer's experts.

    Rows beyond ``kept[e]`` are zero in ``activations`` and ``weights`` and -1 in ``ranks``.
    """

    layer: int
    """Index of the decoder layer."""
    activations: torch.Tensor
    """[num_experts, rows, width], signed, in the model's dtype."""
    ranks: torch.Tensor
    """[num_experts, rows] int64: 0 if the expert had the token's largest router weight, and so on."""
    weights: torch.Tensor
    """[num_experts, rows] float32 router weights."""
    kept: torch.Tensor
    """[num_experts] int64 rows that hold a token."""
    seen: torch.Tensor
    """[num_experts] int64 tokens routed to the expert during calibration."""


class _Reservoir:
    """Uniform samples of the rows routed to each expert of one layer."""

    def __init__(self, layer: int, experts: Any, rows: int, generator: torch.Generator) -> None:
        self.layer, self._experts, self._rows, self._generator = layer, experts, rows, generator
        weight = experts.down_proj
        shape = (experts.num_experts, rows)
        # keys[e] are the random keys of the rows kept for expert e; empty rows have -1
        self._keys = torch.full(shape, -1.0)
        self._activations = torch.zeros((*shape, weight.shape[2]), dtype=weight.dtype, device=weight.device)
        self._ranks = torch.full(shape, -1, dtype=torch.int64)
        self._weights = torch.zeros(shape)
        self._seen = torch.zeros(experts.num_experts, dtype=torch.int64)

    def observe(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> None:
        """Offer every (token, expert) pair of one forward pass."""
        descending = top_k_weights.float().argsort(dim=-1, descending=True, stable=True)
        ids = top_k_index.gather(1, descending).cpu()
        weights = top_k_weights.float().gather(1, descending).cpu()
        keys = torch.rand(ids.shape, generator=self._generator)
        # pairs of one expert become neighbours; bounds[e]:bounds[e + 1] are expert e's
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=self._experts.num_experts)
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).tolist()
        self._seen += counts
        for expert, (begin, end) in enumerate(pairwise(bounds)):
            pairs = order[begin:end]
            pairs = pairs[keys.flatten()[pairs] > self._keys[expert].min()]
            if pairs.numel():
                self._keep(expert, pairs, keys, ids.shape[1], weights, hidden_states)

    def _keep(
        self, expert: int, pairs: torch.Tensor, keys: torch.Tensor, k: int, weights: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        own = self._keys[expert]
        merged = torch.cat([own, keys.flatten()[pairs]])
        best = merged.topk(self._rows).indices
        incoming = best[best >= self._rows] - self._rows
        if not incoming.numel():
            return
        stays = torch.zeros(self._rows, dtype=torch.bool)
        stays[best[best < self._rows]] = True
        slots = (~stays).nonzero().flatten()[: incoming.numel()]
        chosen = pairs[incoming]
        gate_up = self._experts.gate_up_proj[expert]
        rows = hidden[(chosen // k).to(hidden.device)].to(gate_up.dtype)
        gate, up = F.linear(rows, gate_up).chunk(2, dim=-1)
        self._activations[expert, slots.to(gate.device)] = F.silu(gate) * up
        self._ranks[expert, slots] = chosen % k
        self._weights[expert, slots] = weights.flatten()[chosen]
        own[slots] = keys.flatten()[chosen]

    def profile(self) -> LayerProfile:
        """Kept rows moved to the front, those that hold a token first."""
        kept = (self._keys >= 0).sum(dim=1)
        rows = max(1, int(kept.max()))
        order = (self._keys < 0).long().argsort(dim=1, stable=True)[:, :rows]
        device = self._activations.device
        index = order.to(device)[:, :, None].expand(-1, -1, self._activations.shape[2])
        return LayerProfile(
            self.layer, self._activations.gather(1, index), self._ranks.gather(1, order),
            self._weights.gather(1, order), kept, self._seen,
        )  # fmt: skip


def moe_layers(model: Any) -> list[tuple[int, Any]]:
    """(decoder layer index, MoE block) of every layer that routes."""
    blocks = []
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts") and hasattr(layer.mlp, "gate"):
            blocks.append((index, layer.mlp))
    return blocks


@contextmanager
def _hooked(reservoirs: list[_Reservoir], blocks: list[tuple[int, Any]]) -> Iterator[None]:
    def hook(reservoir: _Reservoir) -> Any:
        def observe(_module: Any, args: tuple[Any, ...]) -> None:
            reservoir.observe(*args[:3])

        return observe

    handles = [
        block.experts.register_forward_pre_hook(hook(reservoir))
        for reservoir, (_, block) in zip(reservoirs, blocks, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def profile_model(
    model: Any, batches: Iterable[torch.Tensor], *, tokens_per_expert: int, seed: int = 0
) -> list[LayerProfile]:
    """Run calibration batches through ``model`` and sample every expert's activations.

    Args:
        model: a transformers causal language model of a supported family, unsplit.
        batches: [sequences, tokens] int64 each.
        tokens_per_expert: rows kept an expert; memory is layers x experts x rows x width.
    Returns:
        One profile a MoE layer, in layer order.
    """
    blocks = moe_layers(model)
    reservoirs = [
        _Reservoir(layer, block.experts, tokens_per_expert, torch.Generator().manual_seed(seed * 100_003 + layer))
        for layer, block in blocks
    ]
    device = next(model.parameters()).device
    model.eval()
    with _hooked(reservoirs, blocks):
        for batch in batches:
            model.model(input_ids=batch.to(device), use_cache=False)
    return [reservoir.profile() for reservoir in reservoirs]


def calibration_batches(
    tokenizer: Any, content: str, *, max_tokens: int, context_tokens: int, batch_tokens: int = 8192
) -> list[torch.Tensor]:
    """Tokenise text into [sequences, context_tokens] batches.

    Args:
        max_tokens: stop after this many tokens.
        context_tokens: window length.
        batch_tokens: tokens a batch.
    Raises:
        RefactorError: the text is shorter than one window.
    """
    # eight characters a token is more than any tokeniser here needs
    ids = tokenizer(content[: 8 * max_tokens], return_tensors=None, verbose=False)["input_ids"][:max_tokens]
    windows = len(ids) // context_tokens
    if not windows:
        raise RefactorError(
            f"--calibration: {len(ids)} tokens are less than one window of {context_tokens}; "
            "give text of some 100,000 tokens or more"
        )
    rows = torch.tensor(ids[: windows * context_tokens], dtype=torch.int64).view(windows, context_tokens)
    return list(rows.split(max(1, batch_tokens // context_tokens)))


def starved(profiles: list[LayerProfile], few: int = FEW_TOKENS) -> list[tuple[int, int, int]]:
    """(layer, expert, kept tokens) of the experts that calibration hardly reached."""
    return [
        (profile.layer, expert, int(count))
        for profile in profiles
        for expert, count in enumerate(profile.kept.tolist())
        if count < few
    ]


def coverage_report(profiles: list[LayerProfile], few: int = FEW_TOKENS) -> str:
    """How many tokens the experts saw, and what to do about those that saw few; one paragraph."""
    seen = torch.cat([profile.seen for profile in profiles]).double()
    low = starved(profiles, few)
    text = (
        f"{seen.numel()} experts in {len(profiles)} layers saw {int(seen.min())} to {int(seen.max())} tokens "
        f"(median {int(seen.median())})."
    )
    if low:
        worst = ", ".join(f"layer {layer} expert {expert}: {count}" for layer, expert, count in low[:5])
        text += (
            f" {len(low)} kept fewer than {few} ({worst}{', ...' if len(low) > 5 else ''}): their partition is little "
            "better than the greedy start. Give more, or more varied, calibration text; an expert that no text reaches "
            "is split contiguously, which costs nothing where it is not used."
        )
    return text
