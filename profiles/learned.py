"""What measured tables say of cards that are not at hand.

Learned are the device's efficiencies (:mod:`simmoe.profiles.roofline`), attention's, and the host's share, which is
taken to be the same beside any card and to grow with the layers, all from measured tables of single cards with captured
graphs. Tables of several cards tell what passes between cards, and the host's share of such engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simmoe.errors import ProfileError
from simmoe.profiles.binding import measured_model, parallelism
from simmoe.profiles.cards import CARDS, Card
from simmoe.profiles.layer_times import LayerTimes
from simmoe.profiles.models import ModelShape
from simmoe.profiles.roofline import Efficiencies, GridPoints, LayerPoints, learn
from simmoe.profiles.step_work import BF16, ONE_CARD, Parallelism
from simmoe.profiles.table import NO_SHARE, PATHS, HostShare, RealShare, StepTable

_CARDS = {card.driver_name: card for card in CARDS.values()}

#: How a sample header says that graphs were captured at the k that ran; others freeze the k of their capture.
_FOLLOW_K = ("banks", "engine")

#: Share of the card's memory an engine takes, vLLM's gpu_memory_utilization.
UTILISATION = 0.9


class MeasuredModel(NamedTuple):
    """A measured table and what it is of."""

    table: StepTable
    base: str
    """The model as published, the same for each way it was split."""
    shape: ModelShape
    card: Card
    parallel: Parallelism = ONE_CARD
    layer_times: LayerTimes | None = None
    """Of its routed experts alone, where they were taken."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What measured tables say of any card."""

    tables: tuple[str, ...]
    """Names of the tables learned from."""
    device: Efficiencies
    pair_compute: float
    """Share of the arithmetic peak that attention between prompt tokens reaches."""
    kv_memory: float
    """Share of the memory's peak that reading KV reaches in a decode step."""
    prompt_s: float
    """Seconds a prompt adds to a step."""
    mixed_seq_s: float
    """Seconds a decoding sequence adds to a step with prompt tokens."""
    mixed_step_s: float
    """Seconds a step takes more for having both prompt tokens and decoding sequences."""
    real_share: RealShare
    host: dict[str, tuple[HostShare, HostShare]]
    """By launch path, (whatever the layers, a layer)."""
    host_of_several: dict[str, tuple[HostShare, HostShare]]
    """The same of engines of several cards; that of one where none was measured."""
    update: HostShare
    """Of the host's share, what comes after the device is done; 0 where none was recorded."""
    reserve_bytes: float
    """Memory of a card an engine keeps beside weights and KV: activations and graphs."""
    ingress_s: float
    egress_s: float


def measured_models(tables: Iterable[tuple[StepTable, LayerTimes | None]]) -> list[MeasuredModel]:
    """Return the tables that are learned from: those :func:`left_out` has nothing against.

    Args:
        tables: each with the times of one layer's experts alone, where they were taken.
    """
    found = []
    for table, layer_times in tables:
        if left_out(table) is None:
            run = table.provenance["runs"][0]
            named = measured_model(run)
            assert named is not None
            found.append(MeasuredModel(table, *named, _CARDS[run["card"]], parallelism(run), layer_times))
    return found


def left_out(table: StepTable) -> str | None:
    """Return why a table is not learned from; None of one that is."""
    runs = table.provenance.get("runs", [])
    if table.status != "measured" or not runs:
        return f"{table.status}, not measured" if table.status != "measured" else "it does not say what was measured"
    if not table.captured_sizes or runs[0]["graphs"] not in _FOLLOW_K:
        return "no graphs that follow k"
    if runs[0]["card"] not in _CARDS:
        return f"no datasheet of '{runs[0]['card']}'"
    return None if measured_model(runs[0]) else f"the shape of '{runs[0]['model']}' is not known"


def learn_from(measured: Sequence[MeasuredModel], budgets: set[int] | None = None) -> Learned:
    """Learn from measured tables.

    Args:
        measured: at least one, of one card.
        budgets: the tables' k that device grids are learned at; all without.
    """
    of_one = [one for one in measured if one.parallel.num_cards == 1]
    if not of_one:
        raise ProfileError("no measured table of one card with a known datasheet to learn efficiencies from")
    grids = [_points(one, decode, budgets) for one in measured for decode in (False, True)]
    layers = [_layer_points(one, budgets) for one in of_one]
    attention = [one.table.attention for one in of_one]
    pair = [
        one.shape.pair_flops * one.shape.num_layers / (one.card.bf16_flop_s * one.table.attention.prefill_pair_s)
        for one in of_one
        if one.table.attention.prefill_pair_s > 0
    ]
    kv = [
        kv_bytes(one.shape) / (one.card.memory_byte_s * one.table.decode_kv[-1][1])
        for one in of_one
        if one.table.decode_kv[-1][1] > 0
    ]
    of_several = [one for one in measured if one.parallel.num_cards > 1] or of_one
    return Learned(
        tables=tuple(one.table.name for one in measured),
        device=learn([grid for grid in grids if len(grid.k)], [layer for layer in layers if len(layer.k)]),
        pair_compute=min(_middle(pair), 1.0),
        kv_memory=min(_middle(kv), 1.0),
        prompt_s=float(np.mean([terms.prefill_seq_s for terms in attention])),
        mixed_seq_s=float(np.mean([terms.mixed_seq_s for terms in attention])),
        mixed_step_s=float(np.mean([terms.mixed_step_s for terms in attention])),
        real_share=RealShare(
            *(_mean_share(knots) for knots in zip(*(one.table.real_share for one in of_one), strict=True))
        ),
        host={path: _host_by_layers(of_one, path) for path in PATHS},
        host_of_several={path: _host_by_layers(of_several, path) for path in PATHS},
        update=_mean_update([one.table.update for one in of_one]),
        reserve_bytes=max(0.0, float(np.mean([_reserve_bytes(one) for one in of_one]))),
        ingress_s=float(np.mean([one.table.ingress_s for one in of_one])),
        egress_s=float(np.mean([one.table.egress_s for one in of_one])),
    )


def kv_bytes(shape: ModelShape, parallel: Parallelism = ONE_CARD) -> float:
    """Return the bytes of KV a token takes on one card, over all layers."""
    return BF16 * shape.kv_elements * shape.num_layers * parallel.kv_share(shape)


def _points(one: MeasuredModel, decode: bool, budgets: set[int] | None) -> GridPoints:
    """Return a grid's measured cells, without those that hold but a bound because the host hid the device.

    It hides none of one graph's replays, and none of a step that the device was held before.
    """
    table = one.table
    grid = table.decode if decode else table.prefill
    residuals = table.provenance.get("fit", {}).get("residuals", [])
    shown = decode or any((row["kind"], row["clock"]) == ("prefill", "held") for row in residuals)

    def host_s(size: int) -> float:
        return table.host["piecewise" if size <= table.captured_sizes[-1] else "eager"].base_s

    rows = [
        (size, k / table.k_granularity, cell.device_s)
        for size, row in zip(grid.sizes, grid.cells, strict=True)
        for k, cell in zip(grid.ks, row, strict=True)
        if cell.repetitions and (shown or cell.device_s > host_s(size)) and (budgets is None or k in budgets)
    ]
    columns: npt.NDArray[np.float64] = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    return GridPoints(one.shape, one.card, decode, columns[0], columns[1], columns[2], one.parallel)


def _layer_points(one: MeasuredModel, budgets: set[int] | None) -> LayerPoints:
    """Return the times of one layer's experts alone; none where they were not taken."""
    rows = [
        row[:3]
        for row in (one.layer_times.rows if one.layer_times else ())
        if budgets is None or row.k * one.table.k_granularity in budgets
    ]
    columns: npt.NDArray[np.float64] = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    return LayerPoints(one.shape, one.card, *columns)


def _host_by_layers(measured: Sequence[MeasuredModel], path: str) -> tuple[HostShare, HostShare]:
    """Return a launch path's share, as a part whatever the layers and a part a layer; both at least 0.

    Until models of different depths tell, a replay of one graph is taken to be the former and launches the latter.
    """
    from scipy.optimize import nnls

    layers = np.array([one.shape.num_layers for one in measured], dtype=np.float64)
    parts = []
    for shares in zip(*(one.table.host[path] for one in measured), strict=True):
        if len(set(layers)) > 1:
            fixed, layer = nnls(np.stack([np.ones_like(layers), layers], axis=1), np.array(shares))[0]
        elif path == "full":
            fixed, layer = np.mean(shares), 0.0
        else:
            fixed, layer = 0.0, np.mean(shares) / layers[0]
        parts.append((float(fixed), float(layer)))
    (base_fixed, base_layer), (seq_fixed, seq_layer) = parts
    return HostShare(base_fixed, seq_fixed), HostShare(base_layer, seq_layer)


def _mean_update(shares: Sequence[HostShare]) -> HostShare:
    """Return the mean of the shares that were recorded."""
    recorded = [share for share in shares if share != NO_SHARE] or [NO_SHARE]
    return HostShare(*(float(value) for value in np.mean(recorded, axis=0)))


def _mean_share(knots: Sequence[tuple[tuple[int, float], ...]]) -> tuple[tuple[int, float], ...]:
    """Return the mean of shares of real tokens, each linear between its sizes."""
    sizes = sorted({size for line in knots for size, _ in line})
    shares = [np.interp(sizes, [size for size, _ in line], [share for _, share in line]) for line in knots]
    return tuple(zip(sizes, (float(share) for share in np.mean(shares, axis=0)), strict=True))


def _reserve_bytes(one: MeasuredModel) -> float:
    kv = one.table.num_gpu_blocks * one.table.block_size * kv_bytes(one.shape)
    used = one.table.provenance["runs"][0]["engine_flags"].get("gpu_memory_utilization", UTILISATION)
    return float(used * one.card.memory_bytes - BF16 * one.shape.num_parameters - kv)


def _middle(values: Sequence[float]) -> float:
    """Return the geometric mean; 0.7 of none."""
    return float(np.exp(np.mean(np.log(values)))) if values else 0.7
