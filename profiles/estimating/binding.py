"""The binding roofline of a table's steps: what its card cannot go below, and so how much of the card a step uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from simmoe.errors import DataError
from simmoe.profiles.estimating.cards import CARDS, Card
from simmoe.profiles.estimating.step_work import BF16, ONE_CARD, ROUTE_ALIKE, Parallelism, alike_of, step_work
from simmoe.profiles.models import ModelShape, model_shape, published_models, read_model, split_config
from simmoe.profiles.shape import StepShape
from simmoe.profiles.table import StepTable


class Roofline(NamedTuple):
    """A model and the peak rates of each card it runs on."""

    model: ModelShape
    flop_s: float
    byte_s: float
    source: str
    """Where the rates are from."""
    k_granularity: int = 1
    """Units of a step's k one of the model's experts is worth."""
    parallel: Parallelism = ONE_CARD
    routed_alike: bool = True
    """Whether the tokens of one prompt touch as few experts as random weights make them."""

    def work(self, shape: StepShape) -> tuple[float, float]:
        """Return the operations and the bytes one card cannot do a step without.

        Token-expert pairs are not padded, the experts that are routed to are read once (prompts may touch fewer: see
        step_work), and nothing but weights and KV moves. What several cards each compute or keep counts on each.
        """
        k, cards = shape.k_exec / self.k_granularity, self.parallel.num_cards
        decode, alike = not shape.num_prefill_tokens, alike_of(self.model) if self.routed_alike else 0.0
        done = step_work(self.model, shape.num_tokens, k, decode=decode, parallel=self.parallel, alike=alike)
        pairs = shape.num_tokens * k * self.model.num_moe_layers
        flop = float(done.dense_flop + done.head_flop) + 2 * pairs * self.model.expert_weights / cards
        flop += shape.prefill_kv_pairs * self.model.pair_flops * self.model.num_layers / cards
        moved = float(done.dense_bytes + done.head_bytes + done.expert_bytes)
        kv_elements = self.model.kv_elements * self.parallel.kv_share(self.model)
        moved += BF16 * shape.decode_kv_tokens * kv_elements * self.model.num_layers
        return flop, moved

    def bound_s(self, shape: StepShape) -> float:
        """Return the least seconds of a step: all its arithmetic or all its bytes at the full rate."""
        flop, moved = self.work(shape)
        return max(flop / self.flop_s, moved / self.byte_s)


def roofline_of(table: StepTable, ceilings: tuple[float, float] | None = None) -> Roofline | None:
    """Return the roofline of a table's model and card, or cards; None where the table does not say which.

    Args:
        table: its provenance names model and card.
        ceilings: (FLOP/s, byte/s) measured on one such card, to be taken instead of its datasheet's.
    """
    of, card = _source(table), table_card(table)
    named = measured_model(of) if of else None
    if of is None or named is None or card is None:
        return None
    parallel = parallelism(of)
    flop_s, byte_s = ceilings or (card.bf16_flop_s, card.memory_byte_s)
    source = "measured ceilings" if ceilings else "datasheet rates"
    source = f"{source} of {parallel.num_cards} cards" if parallel.num_cards > 1 else source
    return Roofline(named[1], flop_s, byte_s, source, table.k_granularity, parallel, routed_alike(of))


def table_card(table: StepTable) -> Card | None:
    """Return the card a table was measured on or estimated for; None where its datasheet is not known."""
    of = _source(table)
    if of is None:
        return None
    driver_name = of["card"]["driver_name"] if table.provenance.get("estimate") else of["card"]
    return next((card for card in CARDS.values() if card.driver_name == driver_name), None)


def _source(table: StepTable) -> dict[str, Any] | None:
    """Return what a table says of its model and card: its estimate, or its first run."""
    runs: list[dict[str, Any]] = table.provenance.get("runs", [])
    estimate: dict[str, Any] | None = table.provenance.get("estimate")
    return estimate or (runs[0] if runs else None)


def routed_alike(run: Mapping[str, Any]) -> bool:
    """Return whether tokens of one prompt were routed alike in a run, or are in an estimate."""
    return run.get("weights") in ROUTE_ALIKE


def parallelism(run: Mapping[str, Any]) -> Parallelism:
    """Return how the engine of a sample file's header, or of an estimate, spread its model over cards."""
    flags = run.get("engine_flags", {})
    return Parallelism(run.get("num_cards", 1), bool(flags.get("enable_expert_parallel", False)))


def measured_model(run: dict[str, Any]) -> tuple[str, ModelShape] | None:
    """Return the published model a run measured, and the shape that ran; None where neither can be told.

    Headers written before configurations were kept whole name a shipped model and its split.
    """
    published, _, splits = str(run["model"]).partition(" split by ")
    try:
        return published, model_shape(run["model_config"])
    except DataError:
        pass
    for name in published_models():
        model = read_model(name)
        if model.published_as == published and (splits or "1").isdecimal():
            return published, model_shape(split_config(model.config, int(splits or 1)))
    return None
