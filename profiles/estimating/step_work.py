"""What a step must compute and move, counted from the model's shape; no card and no efficiency yet.

Decoding sequences are taken to be routed independently and evenly, as random weights do. Tokens of one prompt are
routed alike: attention gives all of them much the same, layer after layer, so that a gate's logits are ``c s + sqrt(1 -
c^2) z`` with s the prompt's and z the token's own, and fewer experts are touched, by more tokens each. Experts run
through vLLM's Triton kernel, which pads each expert's tokens, and its matrices, to multiples of its tile.

Where several cards compute every step together, work is that of one card. As vLLM spreads a model, attention heads,
MLPs, shared experts and the vocabulary are split; KV heads as far as there are enough, so that latent attention keeps
its latents, and their projections, whole on each card; the router, norms and residuals are computed on each. Routed
experts are split in width, or else whole experts are dealt out.
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

#: How a sample header calls the weights under which tokens of one prompt are routed alike: every matrix is random with
#: a deviation of fan_in ** -0.5, embeddings among them, so that what attention adds to all tokens drowns the tokens.
ROUTE_ALIKE = ("dummy",)

#: How alike those route a prompt's tokens (c above), without and with shared experts, which keep tokens apart: the
#: square root of the correlation between the router's inputs of one prompt, over the layers of small models of the
#: three families' kinds.
ALIKE, ALIKE_WITH_SHARED = 0.93, 0.72

#: Popularities of experts in a prompt, standard normal, and their weights (Gauss-Hermite).
_POPULARITY, _POPULARITY_WEIGHT = np.polynomial.hermite_e.hermegauss(24)
_POPULARITY_WEIGHT = _POPULARITY_WEIGHT / _POPULARITY_WEIGHT.sum()

#: Families whose query and key norms span all heads: cards that hold some of them gather both first.
_NORMS_SPAN_HEADS = ("olmoe",)

#: vLLM 0.32's default bf16 tiles (``vllm/model_executor/layers/fused_moe/fused_moe.py``, ``get_default_config``): up to
#: so many tokens (BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K). It has tuned ones for some shapes on some cards.
_TILES = ((32, (16, 64, 128)), (64, (32, 64, 128)), (96, (32, 128, 64)), (512, (64, 128, 64)))
_LARGEST_TILE = (128, 128, 64)


class Tile(NamedTuple):
    """What one block of the experts' kernel multiplies at a time."""

    rows: int
    """BLOCK_SIZE_M: tokens."""
    columns: int
    """BLOCK_SIZE_N: outputs."""
    depth: int
    """BLOCK_SIZE_K: inputs."""


class Parallelism(NamedTuple):
    """How a model is spread over the cards that compute every step together."""

    num_cards: int = 1
    """vLLM's tensor parallel size."""
    expert_parallel: bool = False
    """Whole experts on each card, instead of a share of every expert."""

    def kv_share(self, model: ModelShape) -> float:
        """Return the share of a token's KV that one card keeps."""
        return max(1, model.kv_heads // self.num_cards) / model.kv_heads


ONE_CARD = Parallelism()


class StepWork(NamedTuple):
    """Operations (multiply and add are two) and bytes of one card's steps, one value a step: [num_steps] each."""

    dense_flop: FloatArray
    """Attention projections, routers, shared experts and dense MLPs."""
    dense_bytes: FloatArray
    head_flop: FloatArray
    """The language-model head, for the tokens that are sampled from."""
    head_bytes: FloatArray
    expert_flop: FloatArray
    """Routed experts, tokens and matrices padded to tiles."""
    expert_bytes: FloatArray
    """Weights of the distinct experts touched; on the card that has most, where whole experts are dealt out."""
    pair_bytes: FloatArray
    """What every token-expert pair reads and writes beside weights."""
    token_bytes: FloatArray
    """What a layer's operators read and write of every token, routed experts left out; much of it hides behind
    arithmetic or stays in caches."""
    logit_bytes: FloatArray
    """One read of the sampled tokens' logits in fp32; the sampler moves multiples."""
    decode_heads: FloatArray
    """Attention blocks of the decoding sequences, one a sequence, KV head and layer."""
    link_bytes: FloatArray
    """What each card sends the others, and receives: sums of hidden states after each layer's attention, after its MLP
    or experts and after the embedding; logits; and where norms span all heads, queries and keys. 0 on one card."""
    exchanges: FloatArray
    """How often cards wait for each other so."""


def step_work(
    model: ModelShape,
    num_tokens: npt.ArrayLike,
    k: npt.ArrayLike,
    *,
    decode: bool,
    parallel: Parallelism = ONE_CARD,
    alike: float = 0.0,
) -> StepWork:
    """Return the work of steps of prompt tokens alone, or of decoding sequences alone; attention to KV left out.

    Args:
        model: its shape.
        num_tokens: [num_steps] tokens that run, padding included.
        k: [num_steps] experts a token activates, in the model's own experts.
        decode: whether the tokens are one of each sequence; else prompts of PROMPT_TOKENS and a remainder.
        parallel: the cards the model is spread over; experts are dealt out evenly.
        alike: how alike the prompt tokens are routed, in [0, 1); 0 is independently.
    """
    n, k = (np.asarray(values, dtype=np.float64) for values in np.broadcast_arrays(num_tokens, k))
    ones = np.ones_like(n)
    sampled = n if decode else np.ceil(n / PROMPT_TOKENS)
    cards, kv_share = parallel.num_cards, parallel.kv_share(model)
    dense_weights, head_weights = dense_layer_weights(model, parallel), model.head_weights / cards
    # either way a card multiplies with its share of the weights, of every expert or of all of some
    expert_weights = model.expert_weights * model.num_moe_layers / cards
    pairs, width = (
        (n * k / cards, model.expert_width) if parallel.expert_parallel else (n * k, model.expert_width / cards)
    )
    padding = matrix_padding(round(width), n)
    alike = 0.0 if decode else alike
    distinct = distinct_experts(model.num_experts, n, k, alike)
    if parallel.expert_parallel:
        distinct = np.minimum(distinct + cards * _excess(model.num_experts, distinct, cards), model.num_experts)
    link_elements, exchanges = _exchanged(model, n, sampled, cards)
    return StepWork(
        dense_flop=2 * n * dense_weights,
        dense_bytes=BF16 * dense_weights * ones,
        head_flop=2 * sampled * head_weights,
        head_bytes=BF16 * head_weights * ones,
        expert_flop=2 * padded_rows(model.num_experts, n, k, alike) * padding * expert_weights,
        expert_bytes=BF16 * distinct * expert_weights,
        pair_bytes=BF16 * pairs * (2 * model.hidden_size + 4 * width) * model.num_moe_layers,
        token_bytes=BF16 * n * _token_elements(model, parallel),
        logit_bytes=4 * sampled * model.vocab_size,
        decode_heads=n * (kv_share * model.kv_heads * model.num_layers if decode else 0),
        link_bytes=BF16 * link_elements,
        exchanges=exchanges * ones,
    )


def _exchanged(model: ModelShape, n: FloatArray, sampled: FloatArray, cards: int) -> tuple[FloatArray, int]:
    """Return the elements each card sends and receives, and in how many exchanges.

    A sum takes 2 (cards - 1) / cards times its size, a gathering half of that.
    """
    if cards == 1:
        return np.zeros_like(n), 0
    summed, gathered, exchanges = (2 * model.num_layers + 1) * model.hidden_size * n, model.vocab_size * sampled, 0
    if model.family in _NORMS_SPAN_HEADS:
        queries, keys = model.pair_flops // 4, model.kv_width // 2
        gathered = gathered + model.num_layers * (queries + keys) * n
        exchanges = 2 * model.num_layers
    return (2 * summed + gathered) * (cards - 1) / cards, exchanges + 2 * model.num_layers + 2


def _excess(num_experts: int, distinct: FloatArray, cards: int) -> FloatArray:
    """Return how many more experts than on average the card has that has most of those touched.

    Each expert is touched or not almost independently, so a card's number is taken to be normal.
    """
    from scipy.integrate import quad
    from scipy.special import ndtr

    # the mean of the largest of so many standard normal values
    largest = quad(lambda at: 1 - ndtr(at) ** cards - ndtr(-at) ** cards, 0.0, 8.0)[0]
    share = distinct / num_experts
    excess: FloatArray = largest * np.sqrt(num_experts / cards * share * (1 - share))
    return excess


def _token_elements(model: ModelShape, parallel: Parallelism) -> float:
    """Return the elements of one token that a card's operators read and write, over all layers.

    Each layer's two norms with residuals, and projections, read and write hidden states; queries, keys, values and
    outputs are written by projections, rotated, cached, and read by attention; MLPs write gate and up, read both, and
    write and read their product.
    """
    heads, hidden, cards = model.pair_flops / 2, model.hidden_size, parallel.num_cards
    attention = 11 * hidden + (3 * heads + 4 * model.kv_width) / cards
    shared = 2 * hidden + 6 * model.shared_width / cards if model.shared_width else 0.0
    dense = 2 * hidden + 6 * model.dense_width / cards
    of_moe = model.num_moe_layers * (2 * model.num_experts + shared)
    return model.num_layers * attention + of_moe + (model.num_layers - model.num_moe_layers) * dense


def card_weights(model: ModelShape, parallel: Parallelism = ONE_CARD) -> float:
    """Return all weights one card holds, norms and biases left out, in elements."""
    experts = model.num_moe_layers * model.num_experts * model.expert_weights
    embeddings = model.head_weights * (1 if model.tied_embeddings else 2)
    return dense_layer_weights(model, parallel) + (experts + embeddings) / parallel.num_cards


def dense_layer_weights(model: ModelShape, parallel: Parallelism = ONE_CARD) -> float:
    """Return the elements every token multiplies with on one card, over all layers, the head left out.

    A low-rank projection of queries, which DeepSeek-V2-Lite does not have, is taken to be split.
    """
    kv = model.hidden_size * model.kv_elements
    router = model.num_moe_layers * model.num_experts * model.hidden_size
    split = model.dense_layer_weights - router - model.num_layers * kv
    return split / parallel.num_cards + router + model.num_layers * kv * parallel.kv_share(model)


def alike_of(model: ModelShape) -> float:
    """Return how alike a prompt's tokens are routed in a model with random weights."""
    return ALIKE_WITH_SHARED if model.shared_width else ALIKE


def distinct_experts(num_experts: int, num_tokens: FloatArray, k: FloatArray, alike: float = 0.0) -> FloatArray:
    """Return how many experts of a layer a step touches, on average."""
    weights, chosen = _choices(num_experts, k, alike)
    touched: FloatArray = num_experts * np.tensordot(weights, -np.expm1(num_tokens * np.log1p(-chosen)), axes=1)
    return touched


def padded_rows(num_experts: int, num_tokens: FloatArray, k: FloatArray, alike: float = 0.0) -> FloatArray:
    """Return a layer's token-expert pairs with each expert's padded to whole tiles, on average.

    An expert's tokens are binomial, and E[ceil(X / tile)] is the sum over j >= 0 of P(X > j tile): 1 as long as j tiles
    are six standard deviations below the mean, and 0 as far above it.
    """
    from scipy.special import bdtrc

    weights, chosen = _choices(num_experts, k, alike)
    tile = np.vectorize(lambda n: tile_of(int(n)).rows, otypes=[float])(num_tokens)
    reach = 6 * np.sqrt(num_tokens * chosen * (1 - chosen))
    certain = np.floor(np.maximum(num_tokens * chosen - reach, 0.0) / tile)
    tiles = certain.copy()
    for step in range(int((2 * reach / tile).max(initial=0.0)) + 2):
        start = (certain + step) * tile
        more = bdtrc(np.minimum(start, num_tokens - 1), num_tokens.astype(np.int64), chosen)
        tiles += np.where(start < num_tokens, more, 0.0)
    rows: FloatArray = num_experts * tile * np.tensordot(weights, tiles, axes=1)
    return rows


def _choices(num_experts: int, k: FloatArray, alike: float) -> tuple[FloatArray, FloatArray]:
    """Return weights of popularities, and by popularity the chance that a token picks an expert: [num, *k.shape]."""
    from scipy.special import ndtr, ndtri

    share = np.minimum(k / num_experts, 1 - 1e-12)
    if not alike:
        return np.ones(1), share[np.newaxis]
    popularity = _POPULARITY.reshape(-1, *[1] * k.ndim)
    chosen = ndtr((alike * popularity + ndtri(share)) / np.sqrt(1 - alike**2))
    return _POPULARITY_WEIGHT, np.minimum(chosen, 1 - 1e-12)


def matrix_padding(width: int, num_tokens: FloatArray) -> FloatArray:
    """Return by how much an expert's matrices grow when padded to whole tiles: gate and up by columns, down by depth.

    A width of 352 is no multiple of 64; a card that holds half of each expert's width has half-width matrices.
    """
    factors = np.empty_like(num_tokens)
    for at, n in enumerate(num_tokens.ravel()):
        tile = tile_of(int(n))
        gate_up, down = _multiple(2 * width, tile.columns), _multiple(width, tile.depth)
        factors.flat[at] = (gate_up + down) / (3 * width)
    return factors


def _multiple(size: int, of: int) -> int:
    """Return the least multiple that is no less than a size."""
    return -(-size // of) * of


def tile_of(num_tokens: int) -> Tile:
    """Return the tile at a number of tokens."""
    return Tile(*next((tile for most, tile in _TILES if num_tokens <= most), _LARGEST_TILE))
