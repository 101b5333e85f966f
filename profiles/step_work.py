"""What a step must compute and move, counted from the model's shape; no card and no efficiency yet.

Routing is taken to be balanced: each token picks its k experts uniformly, as dummy weights do. Experts run through
vLLM's Triton kernel, which pads each expert's tokens to a multiple of its tile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simmoe.profiles.models import ModelShape
from simmoe.profiles.step_cost import PROMPT_TOKENS

FloatArray = npt.NDArray[np.float64]

#: Bytes of a bf16 element.
BF16 = 2

#: (largest number of tokens, BLOCK_SIZE_M): vLLM 0.32's default bf16 tiles
#: (``vllm/model_executor/layers/fused_moe/fused_moe.py``, ``get_default_config``).
_TILES = ((32, 16), (96, 32), (512, 64))
_LARGEST_TILE = 128


class StepWork(NamedTuple):
    """Operations (multiply and add are two) and bytes of steps, one value a step: [num_steps] each."""

    dense_flop: FloatArray
    """Attention projections, routers, shared experts and dense MLPs."""
    dense_bytes: FloatArray
    head_flop: FloatArray
    """The language-model head, for the tokens that are sampled from."""
    head_bytes: FloatArray
    expert_flop: FloatArray
    """Routed experts, padded to tiles."""
    expert_bytes: FloatArray
    """Weights of the distinct experts touched."""
    pair_bytes: FloatArray
    """What every token-expert pair reads and writes beside weights."""
    token_bytes: FloatArray
    """One read of every token's hidden state in every layer: norms, rotary embedding, residuals move multiples."""
    logit_bytes: FloatArray
    """One read of the sampled tokens' logits in fp32; the sampler moves multiples."""
    decode_heads: FloatArray
    """Attention blocks of the decoding sequences, one a sequence, KV head and layer."""


def step_work(model: ModelShape, num_tokens: npt.ArrayLike, k: npt.ArrayLike, *, decode: bool) -> StepWork:
    """Return the work of steps of prompt tokens alone, or of decoding sequences alone; attention to KV left out.

    Args:
        model: its shape.
        num_tokens: [num_steps] tokens that run, padding included.
        k: [num_steps] experts a token activates, in the model's own experts.
        decode: whether the tokens are one of each sequence; else prompts of PROMPT_TOKENS and a remainder.
    """
    n, k = (np.asarray(values, dtype=np.float64) for values in np.broadcast_arrays(num_tokens, k))
    ones = np.ones_like(n)
    sampled = n if decode else np.ceil(n / PROMPT_TOKENS)
    per_pair = 2 * model.hidden_size + 4 * model.expert_width
    heads = model.kv_heads * model.num_layers if decode else 0
    return StepWork(
        dense_flop=2 * n * model.dense_layer_weights,
        dense_bytes=BF16 * model.dense_layer_weights * ones,
        head_flop=2 * sampled * model.head_weights,
        head_bytes=BF16 * model.head_weights * ones,
        expert_flop=2 * padded_rows(model.num_experts, n, k) * model.expert_weights * model.num_moe_layers,
        expert_bytes=BF16 * distinct_experts(model.num_experts, n, k) * model.expert_weights * model.num_moe_layers,
        pair_bytes=BF16 * n * k * per_pair * model.num_moe_layers,
        token_bytes=BF16 * n * model.hidden_size * model.num_layers,
        logit_bytes=4 * sampled * model.vocab_size,
        decode_heads=n * heads,
    )


def distinct_experts(num_experts: int, num_tokens: FloatArray, k: FloatArray) -> FloatArray:
    """Return how many experts of a layer a step touches, on average."""
    touched: FloatArray = num_experts * -np.expm1(num_tokens * np.log1p(-np.minimum(k / num_experts, 1 - 1e-12)))
    return touched


def padded_rows(num_experts: int, num_tokens: FloatArray, k: FloatArray) -> FloatArray:
    """Return a layer's token-expert pairs with each expert's padded to whole tiles, on average.

    An expert's tokens are binomial, and E[ceil(X / tile)] is the sum over j >= 0 of P(X > j tile).
    """
    from scipy.special import bdtrc

    rows = np.empty_like(num_tokens)
    for at, (n, each) in enumerate(zip(num_tokens.ravel(), k.ravel(), strict=True)):
        tile = tile_rows(int(n))
        starts = np.arange(0, int(n), tile, dtype=np.float64)
        rows.flat[at] = num_experts * tile * bdtrc(starts, int(n), min(each / num_experts, 1.0)).sum()
    return rows


def tile_rows(num_tokens: int) -> int:
    """Return the tile's rows, BLOCK_SIZE_M, at a number of tokens."""
    return next((rows for most, rows in _TILES if num_tokens <= most), _LARGEST_TILE)
