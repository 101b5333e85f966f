"""The routed experts of one MoE layer alone, and the card's ceilings, by CUDA events around replayed graphs.

A graph runs the experts of several MoE layers once, one after the other, each on its own weights and its own random
routing, so weights come from memory as they do in a step; a layer's time is the graph's divided by their number. Of
several cards each times what it holds: its share of every expert, or its experts, to which a part of the routing goes.
What runs is what an engine calls, ``TritonExperts``: vLLM's function ``fused_experts`` launches the same kernels while
a card holds all experts, but else writes zeros for the pairs that went elsewhere, and adds them up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

#: Layers in a graph, at most: enough that no cache holds the weights of one until it comes again.
MAX_LAYERS = 8

#: Replays a point, of which the median counts.
REPLAYS = 7

#: Tokens and budgets (as shares of the largest) the layer is timed at.
SIZES = tuple(1 << i for i in range(14))
SHARES = (1 / 32, 4 / 32, 8 / 32, 16 / 32, 24 / 32, 1.0)


class HeldExperts(NamedTuple):
    """What one card holds of a layer's routed experts, as vLLM keeps it; tensors."""

    w13: Any
    """[experts held, 2 * width held, hidden_size]: gate and up projections."""
    w2: Any
    """[experts held, hidden_size, width held]: down projections."""
    num_experts: int
    """Of the layer, on all cards."""
    expert_map: Any = None
    """[num_experts], int32: which of those held each is, -1 for the others; None where all are held."""


def timed_ks(ks: Sequence[int], k_max: int) -> list[int]:
    """Return the budgets the layer is timed at, ascending: those nearest to SHARES of ``k_max`` among ``ks``."""
    return sorted({min(ks, key=lambda k: abs(k - share * k_max)) for share in SHARES})


def engine_layers(vllm_config: Any) -> list[HeldExperts]:
    """Return the experts of the model in this process, of the first MAX_LAYERS layers that have them."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    context = vllm_config.compilation_config.static_forward_context
    experts = [layer.routed_experts for layer in context.values() if isinstance(layer, MoERunner)][:MAX_LAYERS]
    return [HeldExperts(e.w13_weight, e.w2_weight, e.global_num_experts, e.expert_map) for e in experts]


def time_layers(
    vllm_config: Any, layers: Sequence[HeldExperts], sizes: Sequence[int], ks: Sequence[int]
) -> dict[str, Any]:
    """Time experts on this process's card, which is idle.

    Args:
        vllm_config: of the engine they belong to, or any.
        layers: run one after the other.
        sizes: tokens.
        ks: budgets.
    Returns:
        ``ceilings``: ``matmul_flop_s`` of a large bf16 product and ``copy_byte_s``, reading and writing counted, of a
        large copy; ``rows``: [num_tokens, k, seconds a layer, distinct experts a layer].
    """
    import torch
    from vllm.config import set_current_vllm_config

    rows = []
    with torch.inference_mode(), set_current_vllm_config(vllm_config):
        ceilings = {"matmul_flop_s": _matmul_flop_s(), "copy_byte_s": _copy_byte_s()}
        for num_tokens, k in itertools.product(sizes, ks):
            rows.append([num_tokens, k, *_time_point(layers, num_tokens, k)])
            torch.cuda.empty_cache()  # the graph's pool: an engine leaves little besides its own
    return {"ceilings": ceilings, "num_layers": len(layers), "rows": rows}


def _time_point(layers: Sequence[HeldExperts], num_tokens: int, k: int) -> tuple[float, float]:
    """Return the seconds a layer, and the mean number of distinct experts its tokens were routed to."""
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    first, num_experts = layers[0].w13, layers[0].num_experts
    hidden = torch.randn(num_tokens, first.shape[2], dtype=first.dtype, device=first.device)
    weights = torch.full((num_tokens, k), 1 / k, dtype=torch.float32, device=first.device)
    # ids[layer] is [num_tokens, k] distinct experts of each token
    ids = [
        torch.rand(num_tokens, num_experts, device=first.device).topk(k).indices.to(torch.int32).contiguous()
        for _ in layers
    ]

    kernel, activation = _kernel(layers[0], k), MoEActivation.SILU
    problem = (*first.shape[1:], k, num_experts, first.shape[0])
    # workspaces and output, the same for all layers as in an engine
    spaces = [
        torch.empty(shape, dtype=first.dtype, device=first.device)
        for shape in kernel.workspace_shapes(num_tokens, *problem, None, activation)
    ]

    def run() -> None:
        for held, chosen in zip(layers, ids, strict=True):
            kernel.apply(
                spaces[2],
                hidden,
                held.w13,
                held.w2,
                weights,
                chosen,
                activation,
                num_experts,
                held.expert_map,
                a1q_scale=None,
                a2_scale=None,
                workspace13=spaces[0],
                workspace2=spaces[1],
                expert_tokens_meta=None,
                apply_router_weight_on_input=False,
            )

    distinct = sum(_held_here(chosen.unique(), held.expert_map) for held, chosen in zip(layers, ids, strict=True))
    return _graph_s(run) / len(layers), distinct / len(layers)


def _kernel(held: HeldExperts, k: int) -> Any:
    """Return vLLM's experts kernel as an engine makes it for what a card holds of a layer."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FUSED_MOE_UNQUANTIZED_CONFIG,
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    num_held, hidden_size, width = held.w2.shape
    config = FusedMoEConfig(
        num_experts=held.num_experts,
        experts_per_token=k,
        hidden_dim=hidden_size,
        intermediate_size=width,
        num_local_experts=num_held,
        num_logical_experts=held.num_experts,
        activation=MoEActivation.SILU,
        device=held.w13.device,
        routing_method=RoutingMethodType.Unspecified,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),  # the expert map tells what is held
        in_dtype=held.w13.dtype,
    )
    return TritonExperts(config, FUSED_MOE_UNQUANTIZED_CONFIG)


def _held_here(experts: Any, expert_map: Any) -> int:
    """Return how many experts of these this card holds: ``expert_map`` has -1 for others, and is None on one card."""
    return int(experts.numel() if expert_map is None else (expert_map[experts.long()] >= 0).sum())


def _graph_s(run: Callable[[], None]) -> float:
    """Return the median seconds of what ``run`` launches, captured and replayed."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    for _ in range(2):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    seconds = sorted(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks))
    return float(seconds[REPLAYS // 2])


def _matmul_flop_s() -> float:
    import torch

    n = 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)

    def run() -> None:
        for _ in range(8):
            torch.mm(a, b, out=out)

    return 8 * 2 * n**3 / _graph_s(run)


def _copy_byte_s() -> float:
    """By a kernel: a graph's own copies reached 2.6 TB/s where expert kernels reach 3.7."""
    import torch

    source = torch.ones(1 << 28, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)

    def run() -> None:
        for _ in range(4):
            torch.bitwise_not(source, out=target)

    return float(4 * 2 * source.nbytes / _graph_s(run))
