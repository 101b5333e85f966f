"""The device's time on another card: counted work over datasheet rates, times efficiencies learned where measured.

A step's device time is the sum of its parts. The two kinds of matrix products, dense and routed, take the larger of
their arithmetic and their weights' traffic, a little more where both take about as long; what tokens, token-expert
pairs and logits move beside weights takes its traffic; attention blocks of decoding sequences and launches take a fixed
time each, and so do exchanges between cards, beside their bytes over the link. Fourteen numbers scale these parts. They
are learned from measured grids, and from a layer's experts timed alone where they were, by robust least squares in the
logarithm of the time, each held near what is physically likely, so that a number the measurements say nothing about
stays there: first from grids of one card, then, of what passes between cards, from the others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simmoe.profiles.estimating.cards import Card
from simmoe.profiles.estimating.step_work import (
    ALIKE,
    ALIKE_WITH_SHARED,
    ONE_CARD,
    FloatArray,
    Parallelism,
    StepWork,
    step_work,
)
from simmoe.profiles.models import ModelShape


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """What a card reaches of its datasheet, and what the datasheet does not say."""

    dense_compute: float = 0.65
    """Share of the arithmetic peak that dense matrix products reach."""
    expert_compute: float = 0.55
    """The same of routed experts, padding counted as work."""
    dense_memory: float = 0.75
    """Share of the memory's peak that reading dense weights reaches."""
    expert_memory: float = 0.75
    """The same of experts' weights."""
    token_traffic: float = 0.5
    """Share of what operators read and write of tokens, routed experts left out, that is seen in the time."""
    pair_traffic: float = 2.0
    """Times what a token-expert pair must move is moved."""
    logit_traffic: float = 12.0
    """Times the sampled tokens' logits are moved by the sampler."""
    decode_block_s: float = 3e-6
    """Seconds an attention block of a decoding sequence occupies a multiprocessor, its KV left out."""
    layer_s: float = 4e-5
    """Seconds a layer takes whatever its size, routed experts left out: launches and dependences between kernels."""
    experts_s: float = 1.5e-5
    """The same of a layer's routed experts."""
    alike: float = ALIKE
    """How alike tokens of one prompt are routed by models without shared experts (see step_work)."""
    alike_with_shared: float = ALIKE_WITH_SHARED
    """The same of models with shared experts."""
    link: float = 0.6
    """Share of the link's peak that exchanges between cards reach."""
    exchange_s: float = 1e-5
    """Seconds an exchange takes whatever its size."""

    def alike_of(self, model: ModelShape) -> float:
        """Return how alike tokens of one prompt are routed."""
        return self.alike_with_shared if model.shared_width else self.alike


#: Standard deviation of the logarithm of each efficiency around its default before anything is learned.
_BELIEF = Efficiencies(0.2, 0.4, 0.15, 0.25, 0.7, 0.7, 0.7, 1.0, 1.0, 0.3, 0.03, 0.1, 0.4, 0.7)

#: Those that shares of a peak are, and those that only grids of several cards tell.
_SHARES = ("dense_compute", "expert_compute", "dense_memory", "expert_memory", "link")
_ALIKE = ("alike", "alike_with_shared")
_BETWEEN_CARDS = ("link", "exchange_s")

#: Work is counted at these and interpolated between.
_ALIKE_COUNTED = (0.0, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97)

#: A product takes the OVERLAP-norm of its arithmetic and its traffic: 19% more than either where they are equal, since
#: blocks that wait for weights and blocks that multiply do not quite fill each other's time.
OVERLAP = 4

#: Standard deviation of the logarithm of a cell's time around a perfect model, and how many independent cells a grid
#: counts as: neighbours err alike.
_CELL_SPREAD, _CELLS = 0.1, 50


class DeviceParts(NamedTuple):
    """Seconds of the parts of a step's device time, one value a step: [num_steps] each."""

    dense_s: FloatArray
    """Dense products, what tokens move beside them, and what a layer takes whatever its size."""
    experts_s: FloatArray
    """Routed experts."""
    attention_s: FloatArray
    """Attention blocks of decoding sequences, their KV left out."""
    head_s: FloatArray
    """The language-model head and the sampler."""
    exchanges_s: FloatArray
    """What passes between cards."""

    @property
    def device_s(self) -> FloatArray:
        """All of it."""
        return self.dense_s + self.experts_s + self.attention_s + self.head_s + self.exchanges_s


class LayerPoints(NamedTuple):
    """Measured times of one layer's routed experts alone."""

    model: ModelShape
    card: Card
    num_tokens: FloatArray
    """[num_points]"""
    k: FloatArray
    """[num_points] in the model's own experts."""
    seconds: FloatArray
    """[num_points]"""


class GridPoints(NamedTuple):
    """Measured device times of one model, on one card or several, attention to KV left out."""

    model: ModelShape
    card: Card
    decode: bool
    num_tokens: FloatArray
    """[num_points]"""
    k: FloatArray
    """[num_points] in the model's own experts."""
    device_s: FloatArray
    """[num_points]"""
    parallel: Parallelism = ONE_CARD
    routed_alike: bool = True
    """Whether tokens of one prompt were routed alike; else independently."""


def device_s(
    model: ModelShape,
    card: Card,
    efficiencies: Efficiencies,
    num_tokens: npt.ArrayLike,
    k: npt.ArrayLike,
    *,
    decode: bool,
    parallel: Parallelism = ONE_CARD,
    routed_alike: bool = True,
) -> FloatArray:
    """Return the estimated device seconds of steps, attention to KV left out.

    Args:
        model: its shape.
        card: whose rates are taken.
        efficiencies: learned by :func:`learn`.
        num_tokens: [num_steps] tokens that run, padding included.
        k: [num_steps] experts a token activates, in the model's own experts.
        decode: whether the tokens are one of each sequence; else prompts.
        parallel: the cards the model is spread over.
        routed_alike: whether tokens of one prompt are routed alike; else independently.
    """
    parts = device_parts(
        model, card, efficiencies, num_tokens, k, decode=decode, parallel=parallel, routed_alike=routed_alike
    )
    return parts.device_s


def learn(grids: Sequence[GridPoints], layers: Sequence[LayerPoints] = ()) -> Efficiencies:
    """Return the efficiencies that explain what was measured best, each grid and layer counting the same.

    Args:
        grids: device times of whole steps; the defaults are returned of none.
        layers: times of one layer's experts alone on one card, where they were taken.
    """
    of_one = [grid for grid in grids if grid.parallel.num_cards == 1]
    of_several = [grid for grid in grids if grid.parallel.num_cards > 1]
    names = [field.name for field in fields(Efficiencies)]
    found = Efficiencies()
    if of_one:
        found = _fitted(found, [name for name in names if name not in _BETWEEN_CARDS], of_one, layers)
    return _fitted(found, _BETWEEN_CARDS, of_several, ()) if of_several else found


def _fitted(
    known: Efficiencies, free: Sequence[str], grids: Sequence[GridPoints], layers: Sequence[LayerPoints]
) -> Efficiencies:
    """Return ``known`` with the efficiencies named ``free`` fitted."""
    from scipy.optimize import least_squares

    of_grids = [_counted(grid) for grid in grids]
    of_layers = [step_work(layer.model, layer.num_tokens, layer.k, decode=False) for layer in layers]
    before = np.log([getattr(Efficiencies(), name) for name in free])
    belief = np.array([getattr(_BELIEF, name) for name in free])

    def at(logs: FloatArray) -> Efficiencies:
        return replace(known, **{name: float(value) for name, value in zip(free, np.exp(logs), strict=True)})

    def misfit(logs: FloatArray) -> FloatArray:
        by = at(logs)
        ratios = [
            _parts(grid.model, grid.card, by, _work_at(by.alike_of(grid.model), counted)).device_s / grid.device_s
            for grid, counted in zip(grids, of_grids, strict=True)
        ]
        ratios += [
            _experts_s(layer.model, layer.card, by, work) / layer.model.num_moe_layers / layer.seconds
            for layer, work in zip(layers, of_layers, strict=True)
        ]
        return np.concatenate([(logs - before) / belief, *map(_robust, ratios)])

    most = [0.0 if name in _SHARES else np.log(_ALIKE_COUNTED[-1]) if name in _ALIKE else np.inf for name in free]
    return at(least_squares(misfit, before, bounds=(np.full(len(before), -np.inf), most)).x)


def _counted(grid: GridPoints) -> list[StepWork]:
    """Return a grid's work at each of _ALIKE_COUNTED; decoding sequences are not routed alike."""
    alikes = _ALIKE_COUNTED if grid.routed_alike and not grid.decode else _ALIKE_COUNTED[:1]
    points = grid.num_tokens.tobytes(), grid.k.tobytes()
    return [_work(grid.model, *points, grid.decode, grid.parallel, alike) for alike in alikes]


@lru_cache(maxsize=1024)
def _work(
    model: ModelShape, num_tokens: bytes, k: bytes, decode: bool, parallel: Parallelism, alike: float
) -> StepWork:
    """Return the work of a grid, which every learning that it takes part in asks for."""
    n, ks = np.frombuffer(num_tokens), np.frombuffer(k)
    return step_work(model, n, ks, decode=decode, parallel=parallel, alike=alike)


def _work_at(alike: float, counted: Sequence[StepWork]) -> StepWork:
    """Return the work between what was counted."""
    if len(counted) == 1:
        return counted[0]
    at = min(bisect_right(_ALIKE_COUNTED, alike), len(counted) - 1)
    low, high = _ALIKE_COUNTED[at - 1 : at + 1]
    share = (alike - low) / (high - low)
    below, above = counted[at - 1], counted[at]
    return below._replace(
        expert_flop=below.expert_flop + share * (above.expert_flop - below.expert_flop),
        expert_bytes=below.expert_bytes + share * (above.expert_bytes - below.expert_bytes),
    )


def _robust(ratios: FloatArray) -> FloatArray:
    """Return residuals whose square grows with how far a ratio is off, not with its square: few cells do not decide."""
    off = np.log(ratios) / _CELL_SPREAD
    residuals: FloatArray = np.sqrt(2 * np.expm1(np.log1p(off**2) / 2)) * np.sign(off) * np.sqrt(_CELLS / len(off))
    return residuals


def device_parts(
    model: ModelShape,
    card: Card,
    efficiencies: Efficiencies,
    num_tokens: npt.ArrayLike,
    k: npt.ArrayLike,
    *,
    decode: bool,
    parallel: Parallelism = ONE_CARD,
    routed_alike: bool = True,
) -> DeviceParts:
    """Return the parts of the estimated device seconds of steps; arguments are those of :func:`device_s`."""
    alike = efficiencies.alike_of(model) if routed_alike else 0.0
    work = step_work(model, num_tokens, k, decode=decode, parallel=parallel, alike=alike)
    return _parts(model, card, efficiencies, work)


def _parts(model: ModelShape, card: Card, by: Efficiencies, work: StepWork) -> DeviceParts:
    return DeviceParts(
        dense_s=_product_s(card, work.dense_flop, work.dense_bytes, by.dense_compute, by.dense_memory)
        + work.token_bytes * by.token_traffic / card.memory_byte_s
        + model.num_layers * by.layer_s,
        experts_s=_experts_s(model, card, by, work),
        attention_s=work.decode_heads * by.decode_block_s / card.num_sms,
        head_s=_product_s(card, work.head_flop, work.head_bytes, by.dense_compute, by.dense_memory)
        + work.logit_bytes * by.logit_traffic / card.memory_byte_s,
        exchanges_s=work.link_bytes / (card.link_byte_s * by.link) + work.exchanges * by.exchange_s,
    )


def _experts_s(model: ModelShape, card: Card, by: Efficiencies, work: StepWork) -> FloatArray:
    """Return the seconds of all layers' routed experts."""
    seconds = _product_s(card, work.expert_flop, work.expert_bytes, by.expert_compute, by.expert_memory)
    return seconds + work.pair_bytes * by.pair_traffic / card.memory_byte_s + model.num_moe_layers * by.experts_s


def _product_s(card: Card, flop: FloatArray, moved: FloatArray, compute: float, memory: float) -> FloatArray:
    arithmetic_s, traffic_s = flop / (card.bf16_flop_s * compute), moved / (card.memory_byte_s * memory)
    seconds: FloatArray = (arithmetic_s**OVERLAP + traffic_s**OVERLAP) ** (1 / OVERLAP)
    return seconds
