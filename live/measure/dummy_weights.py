"""Random weights under which the tokens of a prompt are routed independently and evenly, as a vLLM load format."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from simmoe.profiles.weights import LOAD_FORMAT

ATTENTION_SCALE = 0.1
"""Standard deviation of attention's output projection, over that of other matrices.

Under random queries and keys attention is close to a mean over the context, nearly the same for all tokens of a prompt;
at full scale its sum over the layers becomes most of every token. A trained model's attention picks.
"""


@register_model_loader(LOAD_FORMAT)
class ScaledDummyLoader(DummyModelLoader):  # type: ignore[misc]
    """Norms of 1, embeddings of standard deviation 1, matrices of fan_in ** -0.5; no two are copies.

    vLLM's dummy weights lie within 1e-3 of zero, norms included: activations vanish, router logits tie, and ties route
    every token to the same few experts. It draws all from one seed, too, so that layers are copies of each other and
    the language-model head is one of the embeddings.
    """

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fill every parameter, each time with the same values.

        Of several cards each draws its own share; what several hold, the routers among it, is the same on them.
        """
        super().load_weights(model, model_config)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.fill_(1.0)
            elif parameter.dim() < 2:
                parameter.data.zero_()  # biases
            elif parameter.is_floating_point():
                module = model.get_submodule(name.rpartition(".")[0])
                deviation = _deviation(name, module, parameter)
                for number, (piece, share) in enumerate(_pieces(module, parameter.data)):
                    seed = zlib.crc32(f"{name} {number} {share}".encode())
                    piece.normal_(0.0, deviation, generator=torch.Generator(piece.device).manual_seed(seed))


def _deviation(name: str, module: Any, matrix: torch.Tensor) -> float:
    """Return a matrix's standard deviation; what cards add up is as large as on one."""
    if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
        return 1.0
    fan_in = matrix.shape[-1]
    if isinstance(module, RowParallelLinear):
        fan_in *= module.tp_size
    elif isinstance(module, RoutedExperts) and matrix is module.w2_weight:  # the width of an expert comes last
        fan_in *= module.moe_config.tp_size
    return float(fan_in**-0.5) * (ATTENTION_SCALE if ".o_proj." in name else 1.0)


def _pieces(module: Any, matrix: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the parts of a matrix, each with which share of the whole model's it is: 0 of what no card shares out."""
    if isinstance(module, RoutedExperts):
        yield matrix, module.moe_config.ep_rank or module.moe_config.tp_rank
    elif isinstance(module, QKVParallelLinear):
        heads, kv_heads = module.num_heads, module.num_kv_heads
        rows = (heads * module.head_size, kv_heads * module.head_size, kv_heads * module.v_head_size)
        kv_share = module.tp_rank // module.num_kv_head_replicas  # of fewer KV heads than cards, several hold the same
        yield from zip(matrix.split(rows), (module.tp_rank, kv_share, kv_share), strict=True)
    elif isinstance(module, ReplicatedLinear) or not isinstance(module, LinearBase | VocabParallelEmbedding):
        yield matrix, 0
    else:
        yield matrix, module.tp_rank
