"""A step-cost table for a card that is not at hand: its datasheet rates times what was learned where measured.

Such tables have status 'estimated'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import numpy as np

from simmoe.errors import UsageError
from simmoe.profiles.estimating.cards import Card
from simmoe.profiles.estimating.learned import UTILISATION, Learned, kv_bytes, launches
from simmoe.profiles.estimating.roofline import device_s
from simmoe.profiles.estimating.step_work import BF16, ONE_CARD, ROUTE_ALIKE, Parallelism, card_weights
from simmoe.profiles.models import Model, ModelShape, deciding_values, model_shape, split_config
from simmoe.profiles.table import NO_SHARE, PATHS, Attention, Cell, GridTable, HostShare, StepTable

#: Budgets of an estimated grid: those below the model's largest, and that one.
BUDGETS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, *(2**power for power in range(6, 20)))


def estimated_table(
    learned: Learned,
    like: StepTable,
    card: Card,
    shape: ModelShape,
    *,
    name: str,
    summary: str,
    provenance: dict[str, Any],
    k_granularity: int = 1,
    parallel: Parallelism = ONE_CARD,
    weights: str = ROUTE_ALIKE[0],
) -> StepTable:
    """Return the estimated table of a model on a card or several, captured sizes and block size as in a measured one.

    Args:
        learned: of :func:`learn_from`.
        like: the measured table.
        card: whose datasheet is taken.
        shape: of the model.
        name: of the table.
        summary: one line.
        provenance: of the table.
        k_granularity: sub-expert units one of the model's experts is worth.
        parallel: the cards the model is spread over.
        weights: as a sample header calls them; decides how prompts are routed.
    Raises:
        UsageError: the weights do not fit, or cannot be spread so.
    """
    alike = weights in ROUTE_ALIKE
    _check_spread(shape, parallel)
    ks = sorted({k for k in BUDGETS if k < shape.top_k} | {shape.top_k})
    sizes = like.captured_sizes
    seqs = [size for size in sizes if size <= like.decode.sizes[-1]]
    kv_s = kv_bytes(shape, parallel) / (card.memory_byte_s * learned.kv_memory)
    kv_flops = shape.kv_token_flops * shape.num_layers / parallel.num_cards
    kv_s += kv_flops / (card.bf16_flop_s * learned.kv_compute)
    pair_s = shape.pair_flops * shape.num_layers / (card.bf16_flop_s * learned.pair_compute) / parallel.num_cards
    # workers of several cards launch in processes of their own, and the loop takes outputs in meanwhile
    meanwhile = learned.update if parallel.num_cards > 1 else NO_SHARE
    host = {
        path: HostShare(
            max(0.0, fixed.base_s + launch_s * launches(shape, path) - meanwhile.base_s),
            max(0.0, fixed.per_seq_s - meanwhile.per_seq_s),
        )
        for path, (fixed, launch_s) in learned.host.items()
    }

    def grid(sizes: Sequence[int], decode: bool) -> GridTable:
        at = np.array(list(product(sizes, ks)))
        seconds = device_s(
            shape, card, learned.device, at[:, 0], at[:, 1], decode=decode, parallel=parallel, routed_alike=alike
        )
        seconds = seconds.reshape(len(sizes), len(ks))
        seconds = np.maximum.accumulate(np.maximum.accumulate(seconds, axis=0), axis=1)
        units = tuple(k * k_granularity for k in ks)
        return GridTable(tuple(sizes), units, tuple(tuple(Cell(float(s), 0.0, 0) for s in row) for row in seconds))

    return StepTable(
        name=name,
        status="estimated",
        summary=summary,
        k_max=shape.top_k * k_granularity,
        k_granularity=k_granularity,
        block_size=like.block_size,
        num_gpu_blocks=_num_blocks(learned.reserve_bytes, card, shape, parallel, like.block_size),
        ingress_s=learned.ingress_s,
        egress_s=learned.egress_s,
        captured_sizes=sizes,
        captured_ks=tuple(k * k_granularity for k in ks),
        prefill=grid(sizes, decode=False),
        decode=grid(seqs, decode=True),
        decode_kv=((1, kv_s),),
        attention=Attention(
            pair_s, learned.prompt_s, learned.mixed_seq_s, kv_s, learned.mixed_step_s, learned.mixed_decode_share
        ),
        real_share=learned.real_share,
        update=learned.update,
        host=_no_path_faster_than_the_one_before(host),
        provenance=provenance,
    )


def check_layout(like: StepTable, card: Card, model: Model, splits: int, parallel: Parallelism = ONE_CARD) -> None:
    """Refuse, before anything is learned, a layout that no engine could have.

    Args:
        like, card, model, splits, parallel: as :func:`estimate` takes them.
    Raises:
        DataError: the configuration is not supported.
        UsageError: experts that cannot be split so, or weights that do not fit, or cannot be spread so.
    """
    shape = model_shape(split_config(model.config, splits))
    _check_spread(shape, parallel)
    _num_blocks(0.0, card, shape, parallel, like.block_size)


def estimate(
    learned: Learned,
    like: StepTable,
    card: Card,
    model: Model,
    splits: int,
    held_out: Sequence[Mapping[str, Any]],
    parallel: Parallelism = ONE_CARD,
    weights: str = ROUTE_ALIKE[0],
) -> StepTable:
    """Return the estimated table of a model on a card or several, with what it rests on in its provenance.

    Args:
        learned: of :func:`~simmoe.profiles.estimating.learned.learn_from`.
        like: a measured table; its captured sizes and block size are taken.
        card: whose datasheet is taken.
        model: as published.
        splits: sub-experts every routed expert is split into.
        held_out: the method's errors on measured tables it did not see.
        parallel: the cards the model is spread over.
        weights: as a sample header calls them; decides how prompts are routed.
    Raises:
        DataError: the configuration is not supported.
        UsageError: experts that cannot be split so, or weights that do not fit, or cannot be spread so.
    """
    config = split_config(model.config, splits)
    called = f"{model.published_as} split by {splits}" if splits > 1 else model.published_as
    num_cards, expert_parallel = parallel
    spread = f"-tp{num_cards}{'-ep' if expert_parallel else ''}" if num_cards > 1 else ""
    on = f"one {card.driver_name}"
    if num_cards > 1:
        on = (
            f"{num_cards} {card.driver_name}, tensor parallel{' with whole experts on each' if expert_parallel else ''}"
        )
    return estimated_table(
        learned,
        like,
        card,
        model_shape(config),
        name=f"{model.name}{f'-split{splits}' if splits > 1 else ''}{spread}-{card.name}",
        summary=f"{called} on {on}, estimated from its datasheet",
        provenance={
            "estimate": {
                "model": called,
                "model_config": deciding_values(config),
                "weights": weights,
                "card": asdict(card),
                "num_cards": num_cards,
                "engine_flags": {"enable_expert_parallel": expert_parallel},
                "learned": asdict(learned),
                "held_out": list(held_out),
            }
        },
        parallel=parallel,
        weights=weights,
    )


def _check_spread(shape: ModelShape, parallel: Parallelism) -> None:
    """Refuse what vLLM refuses: experts, or their width, that cards do not divide, and KV heads likewise."""
    cards, heads = parallel.num_cards, shape.kv_heads
    what, number = ("experts", shape.num_experts) if parallel.expert_parallel else ("expert width", shape.expert_width)
    if number % cards:
        raise UsageError(f"cannot spread the model over {cards} cards: they must divide its {what}, {number}")
    if heads % cards and cards % heads:
        raise UsageError(f"cannot spread the model over {cards} cards: they must divide its KV heads, {heads}")


def _no_path_faster_than_the_one_before(host: dict[str, HostShare]) -> dict[str, HostShare]:
    """Return the shares, none below that of the path before, as a table requires."""
    least, ordered = HostShare(0.0, 0.0), {}
    for path in PATHS:
        least = HostShare(*(max(value, before) for value, before in zip(host[path], least, strict=True)))
        ordered[path] = least
    return ordered


def _num_blocks(reserve_bytes: float, card: Card, shape: ModelShape, parallel: Parallelism, block_size: int) -> int:
    """Return the KV blocks that fit: what weights leave, less the reserve or half of it, whichever is less."""
    weights = BF16 * card_weights(shape, parallel)
    left = UTILISATION * card.memory_bytes - weights
    block = block_size * kv_bytes(shape, parallel)
    num_blocks = int((left - min(reserve_bytes, left / 2)) // block)
    if num_blocks < 2:
        each = "" if parallel.num_cards == 1 else f" on each of {parallel.num_cards} cards"
        raise UsageError(
            f"the model's weights take {weights / 1e9:.1f} GB in bf16{each}; of {card.driver_name}'s "
            f"{card.memory_bytes / 1e9:.1f} GB an engine may use {UTILISATION:.0%}, which leaves no room for KV"
        )
    return num_blocks
