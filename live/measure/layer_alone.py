"""The routed experts of a layer timed without an engine, of one card of any layout: tensors of the shapes it holds.

An engine takes minutes to start, and of a layout of several cards as many cards; its experts alone are seconds of
kernels that want no more than their weights. What is timed is what a worker times of its model
(:func:`~simmoe.live.measure.moe_layer.time_layers`): the same kernels on as much of every layer as vLLM gives the first
card, with random weights.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from simmoe.errors import UsageError
from simmoe.live.measure import card
from simmoe.live.measure.header import versions
from simmoe.live.measure.measuring import MeasuredModel
from simmoe.live.measure.models import shape_of
from simmoe.live.measure.moe_layer import MAX_LAYERS, SIZES, HeldExperts, time_layers, timed_ks
from simmoe.profiles.layer_times import LayerTime, LayerTimes
from simmoe.profiles.models import Config, ModelShape, model_shape

#: Where it is timed: the first card this process may use.
DEVICE = "cuda"


def time_layer_alone(
    model: MeasuredModel, ks: Sequence[int], *, num_cards: int = 1, expert_parallel: bool = False
) -> LayerTimes:
    """Return the times of one layer's experts as the first of ``num_cards`` holds them, on this process's first card.

    Args:
        model: split as it is to be timed.
        ks: budgets to choose from, see :func:`~simmoe.live.measure.moe_layer.timed_ks`.
        num_cards: of the layout.
        expert_parallel: whole experts on each.
    Raises:
        UsageError: as of :func:`held_shape`.
    """
    import torch
    from vllm.config import VllmConfig

    shape = model_shape(model.config)
    number = min(MAX_LAYERS, shape.num_moe_layers)
    layers = [
        held_experts(model.config, num_cards, expert_parallel, DEVICE, torch.bfloat16, seed) for seed in range(number)
    ]
    answer = time_layers(VllmConfig(), layers, SIZES, timed_ks(ks, shape.top_k))
    return LayerTimes(
        model=model.name,
        model_config=shape_of(model.config),
        dtype="bfloat16",
        card=card.query("name")[0][0],
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        versions=versions(),
        kernel="TritonExperts",
        **answer["ceilings"],
        rows=tuple(LayerTime(*row) for row in answer["rows"]),
        num_cards=num_cards,
        expert_parallel=expert_parallel,
        num_layers=answer["num_layers"],
        in_engine=False,
    )


def held_shape(shape: ModelShape, num_cards: int, expert_parallel: bool) -> tuple[int, int]:
    """Return how many of a layer's experts the first card holds, and how much of their width.

    Raises:
        UsageError: fewer experts than cards, or a width that their number does not divide.
    """
    if expert_parallel:
        if shape.num_experts < num_cards:
            raise UsageError(f"cannot spread {shape.num_experts} experts over {num_cards} cards")
        # of experts that do not come out even, the first cards have one more
        return -(-shape.num_experts // num_cards), shape.expert_width
    if shape.expert_width % num_cards:
        raise UsageError(f"cannot share experts of width {shape.expert_width} out over {num_cards} cards evenly")
    return shape.num_experts, shape.expert_width // num_cards


def held_experts(
    config: Config, num_cards: int, expert_parallel: bool, device: str, dtype: Any, seed: int = 0
) -> HeldExperts:
    """Return what the first card holds of a layer's experts, the weights drawn as the dummy ones are.

    Args:
        config: of the model.
        num_cards: of the layout.
        expert_parallel: whole experts on each; otherwise each has a share of every expert's width.
        device: of the tensors.
        dtype: of the weights.
        seed: of the weights.
    Raises:
        UsageError: as of :func:`held_shape`.
    """
    import torch

    shape = model_shape(config)
    number, width = held_shape(shape, num_cards, expert_parallel)
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(fan_in: int, *size: int) -> Any:
        return torch.empty(size, dtype=dtype, device=device).normal_(0.0, fan_in**-0.5, generator=generator)

    expert_map = None
    if expert_parallel and num_cards > 1:
        expert_map = torch.full((shape.num_experts,), -1, dtype=torch.int32, device=device)
        expert_map[:number] = torch.arange(number, dtype=torch.int32, device=device)
    return HeldExperts(
        drawn(shape.hidden_size, number, 2 * width, shape.hidden_size),
        drawn(shape.expert_width, number, shape.hidden_size, width),
        shape.num_experts,
        expert_map,
    )
