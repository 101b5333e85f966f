"""What measured tables say of cards that are not at hand.

Learned are the device's efficiencies (:mod:`simmoe.profiles.estimating.roofline`), attention's, and the host's share,
which is taken to be the same beside any card and to grow with its launches, all from measured tables of single cards
with captured graphs. Tables of several cards tell what passes between cards; their host, whose workers launch at once,
is taken to be as fast as with one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simmoe.errors import ProfileError
from simmoe.profiles.estimating.binding import measured_model, parallelism
from simmoe.profiles.estimating.cards import CARDS, Card
from simmoe.profiles.estimating.roofline import Efficiencies, GridPoints, LayerPoints, learn
from simmoe.profiles.estimating.step_work import BF16, ONE_CARD, ROUTE_ALIKE, Parallelism
from simmoe.profiles.layer_times import LayerTimes
from simmoe.profiles.models import ModelShape
from simmoe.profiles.table import NO_SHARE, PATHS, HostShare, RealShare, StepTable

_CARDS = {card.driver_name: card for card in CARDS.values()}

#: How a sample header says that graphs were captured at the k that ran; others freeze the k of their capture.
_FOLLOW_K = ("banks", "engine")

#: Share of the memory's peak that reading KV is taken to reach where no table tells.
_KV_MEMORY = 0.7

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

    @property
    def weights(self) -> str:
        """What its sample header calls them: how prompts are routed depends on it."""
        return str(self.table.provenance["runs"][0]["weights"])


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
    kv_compute: float
    """Share of the arithmetic peak that attention to KV reaches beside, where few heads share what is read."""
    prompt_s: float
    """Seconds a prompt adds to a step."""
    mixed_seq_s: float
    """Seconds a decoding sequence adds to a step with prompt tokens."""
    mixed_step_s: float
    """Seconds a step takes more for having both prompt tokens and decoding sequences."""
    mixed_decode_share: float
    """Share that decoding sequences add to such a step of what they take alone."""
    real_share: RealShare
    host: dict[str, tuple[HostShare, float]]
    """By launch path, (whatever the model, seconds a launch of :func:`launches`)."""
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
    kv_memory, kv_compute = _kv_efficiencies(of_one)
    return Learned(
        tables=tuple(one.table.name for one in measured),
        device=learn([grid for grid in grids if len(grid.k)], [layer for layer in layers if len(layer.k)]),
        pair_compute=min(_middle(pair), 1.0),
        kv_memory=kv_memory,
        kv_compute=kv_compute,
        prompt_s=float(np.mean([terms.prefill_seq_s for terms in attention])),
        mixed_seq_s=float(np.mean([terms.mixed_seq_s for terms in attention])),
        mixed_step_s=float(np.mean([terms.mixed_step_s for terms in attention])),
        mixed_decode_share=float(np.mean([terms.mixed_decode_share for terms in attention])),
        real_share=RealShare(
            *(_mean_share(knots) for knots in zip(*(one.table.real_share for one in of_one), strict=True))
        ),
        host={path: _host(of_one, path) for path in PATHS},
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
    alike = one.weights in ROUTE_ALIKE
    return GridPoints(one.shape, one.card, decode, columns[0], columns[1], columns[2], one.parallel, alike)


def _layer_points(one: MeasuredModel, budgets: set[int] | None) -> LayerPoints:
    """Return the times of one layer's experts alone; none where they were not taken, or are of one card of several."""
    rows = [
        row[:3]
        for row in (one.layer_times.rows if one.layer_times and one.layer_times.num_cards == 1 else ())
        if budgets is None or row.k * one.table.k_granularity in budgets
    ]
    columns: npt.NDArray[np.float64] = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    return LayerPoints(one.shape, one.card, *columns)


def launches(shape: ModelShape, path: str) -> int:
    """Return how often the host launches something for a step, in units of the path.

    One graph holds a decode-only step. With prompt tokens each layer takes a piece of graph, the cache's write and
    attention; latent attention also expands the latent, copies both parts of the keys and the output. Without graphs a
    layer's kernels are launched one by one; layers are counted.
    """
    if path == "piecewise":
        return shape.num_layers * (7 if shape.kv_width > shape.kv_elements else 3)
    return shape.num_layers if path == "eager" else 0


def _host(of_one: Sequence[MeasuredModel], path: str) -> tuple[HostShare, float]:
    """Return a launch path's share, as a part whatever the model and seconds a launch, both at least 0.

    Tables of one card tell: those of several have the launch alone. What a replay of one graph takes does not depend on
    the model; other paths take that much and their launches. Nor does what sequences add; where the device takes longer
    a table only bounds that from above, so the least is taken. Tables that have the path before's share for want of
    measurements tell nothing, and until models of different depths tell, launches are taken to be all there is beside a
    replay.
    """
    from scipy.optimize import nnls

    own = [one for one in of_one if path != "eager" or one.table.host[path] != one.table.host["piecewise"]]
    telling = own or of_one
    per_seq_s = min(one.table.host[path].per_seq_s for one in telling)
    replay_s = float(np.mean([one.table.host["full"].base_s for one in telling]))
    if path == "full":
        return HostShare(replay_s, per_seq_s), 0.0
    more_s = np.array([max(one.table.host[path].base_s - replay_s, 0.0) for one in telling])
    count = np.array([launches(one.shape, path) for one in telling], dtype=np.float64)
    if len(set(count)) == 1:
        return HostShare(replay_s, per_seq_s), float(more_s.mean() / count[0])
    fixed_s, each_s = nnls(np.stack([np.ones_like(count), count], axis=1), more_s)[0]
    return HostShare(replay_s + float(fixed_s), per_seq_s), float(each_s)


def _kv_efficiencies(measured: Sequence[MeasuredModel]) -> tuple[float, float]:
    """Return the shares of the memory's and the arithmetic's peak that attention to KV reaches, one after the other.

    Heads that share keys and values do more arithmetic a byte: 1 operation for OLMoE's, 8 for Qwen3's, 30 for the
    latents of DeepSeek-V2-Lite. Reading alone takes the time until models differ in that.
    """
    from scipy.optimize import nnls

    rows, seconds = [], []
    for one in measured:
        moved_s = kv_bytes(one.shape) / one.card.memory_byte_s
        flop_s = one.shape.kv_token_flops * one.shape.num_layers / one.card.bf16_flop_s
        if one.table.decode_kv[-1][1] > 0:
            rows.append([1.0, flop_s / moved_s])
            seconds.append(one.table.decode_kv[-1][1] / moved_s)
    if not rows:
        return _KV_MEMORY, 1.0
    if len({round(ratio, 6) for _, ratio in rows}) == 1:
        return min(1.0, 1 / float(np.mean(seconds))), 1.0
    per_byte, per_flop = nnls(np.array(rows), np.array(seconds))[0]
    return float(1 / max(per_byte, 1.0)), float(1 / max(per_flop, 1.0))


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
