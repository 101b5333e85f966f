"""Raw samples to a step-cost table.

What a step costs from one to the next is the truth. It is the larger of what the device and what the host needed, and
the host is not always equally fast, so a step may have taken longer than its device needed, never less:

1. Steps clearly longer than the host clock's share were bound by the device. They give what attention adds.
2. What is left of every step bounds the device's time at its (size, k) from above, and so at every smaller size and k;
   so do device-clock times below the host's share, which no step can show. Rows within TRUST of the least such bound
   give the grid; those above it were held up by the host. Where noise turned the grid round, it is projected back.
3. What decoding sequences add to a step with prompt tokens, and then the host's share by launch path, are what best
   explains the steps (least absolute error).

Without step-clock samples, the device clock's take their place. Samples marked ``held_out`` take no part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from simmoe.errors import ProfileError
from simmoe.profiles.monotone import FloatGrid as FloatArray
from simmoe.profiles.monotone import monotone_grid
from simmoe.profiles.regression import fit_cells
from simmoe.profiles.residuals import Predictor, Residual, residuals
from simmoe.profiles.samples import Sample, SampleHeader
from simmoe.profiles.table import PATHS, Attention, Cell, GridTable, HostShare, StepTable

Run = tuple[SampleHeader, Sequence[Sample]]
CellKey = tuple[int, int]
"""(size that runs, k)"""

#: A step this much longer than the host clock's share was bound by the device.
DEVICE_BOUND = 1.3

#: A step at most this much longer than the least bound on its device time was not held up by the host: one surely bound
#: by the device, or any other. While the host launches a step it sees the output of the one before late, so that one
#: seems longer and this one shorter: of two steps of one shape, even the longer may be right.
TRUST_SURE, TRUST = 1.35, 1.1

#: Mixed steps must have been measured at contexts this many times apart to tell KV tokens from sequences.
CONTEXTS_APART = 4.0

#: Terms and grid are fitted in turn, so often.
ROUNDS = 8

#: Header fields in which runs fitted together must agree: they decide what a step computes and how.
_SHARED = (
    "model",
    "model_config",
    "dtype",
    "k_max",
    "k_granularity",
    "card",
    "num_cards",
    "captured_sizes",
    "block_size",
)


class _Evidence(NamedTuple):
    """What was measured of one kind of step."""

    kind: str
    steps: list[Sample]
    """Under the step clock."""
    hidden: list[Sample]
    """Under the device clock, shorter than the host's share: the step clock cannot show them."""
    sure: list[Sample]
    """Steps surely bound by the device."""


class _Device(NamedTuple):
    """What was learned of one kind of step's device time."""

    grid: GridTable
    values: list[float]
    """Coefficients of the terms beside the grid."""
    trusted: int
    """Steps the grid rests on."""
    moved: float
    """Largest relative change the monotone projection made."""


def fit_table(runs: Sequence[Run], name: str, status: str, summary: str, recorded: Sequence[Sample] = ()) -> StepTable:
    """Fit one table to the samples of one engine; its budgets are in sub-expert units.

    Args:
        runs: headers with their samples; several when the engine was measured in several settings or sittings.
        name: of the profile.
        status: one of table.STATUSES.
        summary: one line on model, card and execution mode.
        recorded: steps of real runs of the same engine, asynchronously scheduled; the table is checked on them.
    Raises:
        ProfileError: runs of different engines, or no points of a kind that is needed.
    """
    header = _shared_header(runs)
    runs = [(head, [replace(s, k=s.k * head.k_granularity) for s in samples]) for head, samples in runs]
    recorded = [replace(s, k=s.k * header.k_granularity) for s in recorded]
    captured = tuple(header.captured_sizes)
    used = [(head, sample) for head, samples in runs for sample in samples if not sample.held_out]
    clocked = [sample for head, sample in used if sample.clock == "host" and head.async_scheduling]
    if not clocked:
        raise ProfileError("no samples under the host clock: steps bound by the host cannot be told from others")
    clock = _host_clock(clocked, captured)
    device = [sample for head, sample in used if sample.clock == "device" and head.async_scheduling]
    steps = [sample for head, sample in used if sample.clock == "step" and head.async_scheduling] or device

    def of(kind: str) -> _Evidence:
        mine = [s for s in steps if s.kind == kind]
        hidden = [s for s in device if s.kind == kind and s.median_s < _host_s(clock, s, captured)]
        sure = [s for s in mine if s.median_s > DEVICE_BOUND * _host_s(clock, s, captured)]
        return _Evidence(kind, mine, hidden, sure)

    decodes, prefills = of("decode"), of("prefill")
    knots = _knots(decodes.sure)
    decode = _fit_device(decodes, captured, lambda s: _ramps(knots, s.num_decode_seqs, s.decode_kv_tokens))
    slopes = np.cumsum(decode.values).tolist()
    # The same tokens decoding do the same and sample more, so a step of prompt tokens takes no longer.
    prefill = _fit_device(prefills, captured, lambda s: [s.prefill_kv_pairs, s.num_prefill_seqs], decode.grid)
    pair_s, prompt_s = prefill.values

    paths = PATHS if captured else PATHS[-1:]
    table = StepTable(
        name=name,
        status=status,
        summary=summary,
        k_max=header.k_max * header.k_granularity,
        k_granularity=header.k_granularity,
        block_size=header.block_size,
        num_gpu_blocks=header.num_gpu_blocks,
        ingress_s=header.front_end.get("ingress_s", 0.0),
        egress_s=header.front_end.get("egress_s", 0.0),
        captured_sizes=captured,
        captured_ks=tuple(k * header.k_granularity for k in header.captured_ks),
        prefill=prefill.grid,
        decode=decode.grid,
        decode_kv=tuple(zip(knots, slopes, strict=True)),
        attention=Attention(pair_s, prompt_s, 0.0, 0.0),
        host={path: HostShare(0.0, 0.0) for path in paths},
        provenance={},
    )
    table = replace(table, attention=_mixed_terms(table, _not_held_up(of("mixed"))))
    table = replace(table, host=_host_shares(table, steps, clock))
    facts = {
        "steps": len(steps),
        "steps_the_grids_rest_on": prefill.trusted + decode.trusted,
        "monotone_projection_moved_at_most": {"prefill": prefill.moved, "decode": decode.moved},
        "residuals": [row._asdict() for row in _checks(table, runs, recorded)],
    }
    return replace(table, provenance={"runs": [asdict(head) for head, _ in runs], "fit": facts})


def _checks(table: StepTable, runs: Sequence[Run], recorded: Sequence[Sample]) -> list[Residual]:
    rows: list[Residual] = []
    for header, samples in runs:
        scheduling = header.async_scheduling
        note = "" if scheduling else ", synchronous"
        fitted = [sample for sample in samples if not sample.held_out]
        held_out = [sample for sample in samples if sample.held_out]
        rows += residuals(table, fitted, async_scheduling=scheduling, source=f"fitted{note}")
        rows += residuals(table, held_out, async_scheduling=scheduling, source=f"held out{note}")
    return rows + residuals(table, recorded, async_scheduling=True, source="recorded")


def _shared_header(runs: Sequence[Run]) -> SampleHeader:
    if not runs:
        raise ProfileError("no sample files given; a table is fitted to at least one")
    first = runs[0][0]
    for header, _ in runs[1:]:
        for name in _SHARED:
            if getattr(header, name) != getattr(first, name):
                raise ProfileError(
                    f"sample files disagree on {name}: {getattr(first, name)} and {getattr(header, name)}; "
                    f"fit one engine at a time"
                )
    return first


def _fit_device(
    evidence: _Evidence,
    captured: Sequence[int],
    terms: Callable[[Sample], list[float]],
    above: GridTable | None = None,
) -> _Device:
    """Fit one kind's grid and terms.

    Args:
        evidence: its samples.
        captured: sizes graphs were captured at, ascending.
        terms: what multiplies the values beside the grid.
        above: a grid that this one does not exceed at any point of both.
    """

    def key(s: Sample) -> CellKey:
        return _runs_at(captured, s.shape.num_tokens), s.k

    kind, steps, hidden, sure = evidence
    if not sure:
        what = "is clearly longer than the host's share" if steps else "was measured under the step clock"
        raise ProfileError(f"no {kind} step {what}: measure more sizes, up to the largest")
    rows = [*steps, *hidden]
    sizes, ks = sorted({key(s)[0] for s in rows}), sorted({s.k for s in rows})
    at = {(size, k): (i, j) for i, size in enumerate(sizes) for j, k in enumerate(ks)}
    ceiling = np.full((len(sizes), len(ks)), np.inf)
    if above is not None:
        for size, cells_above in zip(above.sizes, above.cells, strict=True):
            for k, cell_above in zip(above.ks, cells_above, strict=True):
                if (size, k) in at:
                    ceiling[at[size, k]] = cell_above.device_s

    surely = set(evidence.sure)
    for _ in range(ROUNDS):
        values = fit_cells([key(s) for s in sure], [terms(s) for s in sure], [s.median_s for s in sure]).values
        left = [max(s.median_s - float(np.dot(terms(s), values)), 1e-6) for s in rows]
        limits = ceiling.copy()
        for s, seconds in zip(rows, left, strict=True):
            limits[at[key(s)]] = min(limits[at[key(s)]], seconds)
        limits = np.minimum.accumulate(np.minimum.accumulate(limits[::-1, ::-1], axis=0), axis=1)[::-1, ::-1]
        trusted = [
            (s, t)
            for s, t in zip(rows, left, strict=True)
            if t <= (TRUST_SURE if s in surely else TRUST) * limits[at[key(s)]]
        ]
        kept = {s.key for s, _ in trusted}
        sure = [s for s in evidence.sure if s.key in kept]
    if not np.isfinite(limits).all():
        raise ProfileError(f"{kind} steps were not measured at the largest size {sizes[-1]} and the largest k {ks[-1]}")

    members: dict[CellKey, list[tuple[Sample, float]]] = {}
    for s, seconds in trusted:
        members.setdefault(key(s), []).append((s, seconds))
    cells = limits.copy()
    for where, found in members.items():
        weights = [s.median_s**-2.0 for s, _ in found]
        cells[at[where]] = np.average([seconds for _, seconds in found], weights=weights)
    measured = {key(s) for s in rows}
    for i, size in enumerate(sizes):
        known = np.array([(size, k) in measured for k in ks])
        between = np.interp(np.array(ks)[~known], np.array(ks)[known], cells[i, known])
        cells[i, ~known] = np.minimum(between, limits[i, ~known])
    cells, moved = monotone_grid(cells)

    def cell(size: int, k: int) -> Cell:
        found = members.get((size, k), [])
        spread_s = max((s.p90_s - s.p10_s for s, _ in found), default=0.0)
        return Cell(float(cells[at[size, k]]), spread_s, sum(s.repetitions for s, _ in found))

    grid = GridTable(tuple(sizes), tuple(ks), tuple(tuple(cell(size, k) for k in ks) for size in sizes))
    return _Device(grid, values.tolist(), len(trusted), moved)


def _not_held_up(evidence: _Evidence) -> list[Sample]:
    """Return the steps surely bound by the device, without those that took longer than one with more of everything."""
    shapes = np.array([s.shape for s in evidence.steps], dtype=np.float64)
    seconds = np.array([s.median_s for s in evidence.steps])

    def held_up(s: Sample) -> bool:
        more = (shapes >= np.array(s.shape)).all(axis=1)
        return bool((s.median_s > TRUST * seconds[more]).any())

    return [s for s in evidence.sure if not held_up(s)]


def _mixed_terms(table: StepTable, sure: Sequence[Sample]) -> Attention:
    """Return the attention terms with those of a mixed step, which explain its steps best (least absolute error).

    A KV token is read once whether or not prompt tokens are beside it: where the contexts measured are too alike to
    tell KV tokens from sequences, it costs what it costs a decode-only step.
    """
    if not sure:
        return table.attention._replace(mixed_kv_token_s=table.decode_kv[-1][1])
    hostless = Predictor(table, async_scheduling=True)
    seqs = np.array([s.num_decode_seqs for s in sure], dtype=np.float64)
    kv_tokens = np.array([s.decode_kv_tokens for s in sure], dtype=np.float64)
    all_prompt = [
        s.shape._replace(num_prefill_tokens=s.shape.num_tokens, num_decode_seqs=0, decode_kv_tokens=0) for s in sure
    ]
    rest = np.array([hostless.device_s(shape) for shape in all_prompt])
    decodes_alone = [s.shape._replace(num_prefill_tokens=0, num_prefill_seqs=0, prefill_kv_pairs=0) for s in sure]
    floor = np.array([hostless.device_s(shape) for shape in decodes_alone])
    measured = np.array([s.median_s for s in sure])

    decode_rate_s = table.decode_kv[-1][1]
    contexts = kv_tokens / seqs
    told_apart = contexts.max() >= CONTEXTS_APART * contexts.min()

    def predicted(values: FloatArray) -> FloatArray:
        rate_s = values[1] if told_apart else decode_rate_s
        steps: FloatArray = np.maximum(floor, rest + values[0] * seqs + rate_s * kv_tokens)
        return steps

    start = np.array([1e-5, decode_rate_s]) if told_apart else np.array([1e-5])
    values = _least_absolute(predicted, measured, start)
    rate_s = values[1] if told_apart else decode_rate_s
    return table.attention._replace(mixed_seq_s=float(values[0]), mixed_kv_token_s=float(rate_s))


def _host_shares(table: StepTable, steps: Sequence[Sample], clock: Mapping[str, HostShare]) -> dict[str, HostShare]:
    """Return each launch path's share; a path never measured has that of the path before."""
    hostless = Predictor(table, async_scheduling=True)
    shares: dict[str, HostShare] = {}
    before = HostShare(0.0, 0.0)
    for path in table.host:
        mine = [s for s in steps if _path(s, table.captured_sizes) == path]
        if mine:
            device = np.array([hostless.device_s(s.shape) for s in mine])
            seqs = np.array([_num_seqs(s) for s in mine], dtype=np.float64)
            measured = np.array([s.median_s for s in mine])

            def predicted(share: FloatArray, device: FloatArray = device, seqs: FloatArray = seqs) -> FloatArray:
                steps: FloatArray = np.maximum(device, share[0] + share[1] * seqs)
                return steps

            start = np.maximum(clock[path], 1e-6)
            base_s, per_seq_s = _least_absolute(predicted, measured, start).tolist()
            before = HostShare(max(base_s, before.base_s), max(per_seq_s, before.per_seq_s))
        shares[path] = before
    return shares


def _least_absolute(
    predicted: Callable[[FloatArray], FloatArray], measured: FloatArray, start: FloatArray
) -> FloatArray:
    """Return the non-negative values, near a positive start, that minimise the sum of |log(predicted / measured)|."""
    from scipy.optimize import minimize

    def misfit(scaled: FloatArray) -> float:
        return float(np.abs(np.log(predicted(np.abs(scaled) * start) / measured)).sum())

    corners = np.ones((len(start) + 1, len(start)))
    corners[1:] -= 0.5 * np.eye(len(start))
    best = minimize(
        misfit,
        corners[0],
        method="Nelder-Mead",
        options={"initial_simplex": corners, "maxiter": 2000, "xatol": 1e-7, "fatol": 1e-9},
    )
    return np.asarray(np.abs(best.x) * start, dtype=np.float64)


def _host_clock(samples: Sequence[Sample], captured: Sequence[int]) -> dict[str, HostShare]:
    """Return each launch path's share by the host clock; nothing where it was not measured."""
    shares: dict[str, HostShare] = {}
    for path in PATHS:
        mine = [s for s in samples if _path(s, captured) == path]
        share = HostShare(0.0, 0.0)
        if mine:
            fit = fit_cells([0] * len(mine), [[_num_seqs(s)] for s in mine], [s.median_s for s in mine])
            share = HostShare(fit.cells[0], float(fit.values[0]))
        shares[path] = share
    return shares


def _host_s(shares: Mapping[str, HostShare], sample: Sample, captured: Sequence[int]) -> float:
    share = shares[_path(sample, captured)]
    return share.base_s + share.per_seq_s * _num_seqs(sample)


def _num_seqs(sample: Sample) -> int:
    return sample.num_prefill_seqs + sample.num_decode_seqs


def _path(sample: Sample, captured: Sequence[int]) -> str:
    if sample.mode == "eager" or not captured or sample.shape.num_tokens > captured[-1]:
        return "eager"
    return "full" if sample.kind == "decode" else "piecewise"


def _runs_at(captured: Sequence[int], size: int) -> int:
    return next((c for c in captured if c >= size), size)


def _knots(samples: Sequence[Sample]) -> list[int]:
    """Return the batch sizes measured at contexts that differ enough to tell KV tokens from sequences."""
    contexts: dict[int, list[float]] = {}
    for s in samples:
        contexts.setdefault(s.num_decode_seqs, []).append(s.decode_kv_tokens / s.num_decode_seqs)
    knots = sorted(size for size, values in contexts.items() if max(values) > 1.5 * min(values))
    if not knots:
        raise ProfileError("no batch size was decoded at two contexts: KV tokens cannot be told from sequences")
    return knots


def _ramps(knots: Sequence[int], size: int, kv_tokens: int) -> list[float]:
    """Return what multiplies the slope's non-negative steps, so that it never falls as the batch grows.

    Step j belongs in full to batches of at least knots[j], and linearly in part from knots[j - 1] on.
    """
    shares = [1.0]
    for low, high in pairwise(knots):
        shares.append(min(max((size - low) / (high - low), 0.0), 1.0))
    return [kv_tokens * share for share in shares]
