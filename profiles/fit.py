"""Raw samples to a step-cost table.

What a step costs from one to the next is the truth; the other clocks say what it is made of.

1. The host's share, by launch path, from the host clock.
2. Steps that took clearly longer than the host's share were bound by the device. They give one free value a (size, k)
   of the grid, and what attention adds.
3. The device clock says how much of that value is a gap between steps, and fills cells where every step was bound by
   the host.
4. Where noise turned the grid round, it is projected back.

Samples marked ``held_out`` take no part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from simmoe.errors import ProfileError
from simmoe.profiles.monotone import monotone_grid
from simmoe.profiles.regression import fit_cells
from simmoe.profiles.residuals import Residual, residuals
from simmoe.profiles.samples import Sample, SampleHeader
from simmoe.profiles.table import PATHS, Attention, Cell, GridTable, HostShare, StepTable

Run = tuple[SampleHeader, Sequence[Sample]]
CellKey = tuple[int, int]
"""(size that runs, k)"""

#: A step this much longer than the host's share was bound by the device.
DEVICE_BOUND = 1.1

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


class _Device(NamedTuple):
    """What was learned of one kind of step's device time."""

    grid: GridTable
    values: list[float]
    """Coefficients of the terms beside the grid."""
    gap_s: float
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
    steps = [sample for head, sample in used if sample.clock == "step" and head.async_scheduling]
    device = [sample for _, sample in used if sample.clock == "device"]
    hosts = _host_shares([sample for _, sample in used if sample.clock == "host"], captured)
    bound = [s for s in steps if s.median_s > DEVICE_BOUND * _host_s(hosts[_path(s, captured)], s)]

    knots = _knots([sample for sample in (*bound, *device) if sample.kind == "decode"])
    decode = _fit_device(
        "decode", bound, device, captured, lambda s: _ramps(knots, s.num_decode_seqs, s.decode_kv_tokens)
    )
    slopes = np.cumsum(decode.values).tolist()

    mixed = [sample for sample in (*bound, *device) if sample.kind == "mixed"]
    contexts = [sample.decode_kv_tokens / sample.num_decode_seqs for sample in mixed]
    kv_varies = bool(contexts) and max(contexts) > 1.5 * min(contexts)

    # A KV token costs a mixed step at least what it costs a decode-only step.
    def with_prompts(s: Sample) -> list[float]:
        return [s.prefill_kv_pairs, s.num_prefill_seqs, s.num_decode_seqs, s.decode_kv_tokens * kv_varies]

    prefill = _fit_device(
        "prefill", bound, device, captured, with_prompts, known=lambda s: slopes[-1] * s.decode_kv_tokens
    )
    pair_s, prompt_s, seq_s, more_kv_s = prefill.values

    paths = PATHS if captured else PATHS[-1:]
    gaps = {"full": decode.gap_s, "piecewise": max(decode.gap_s, prefill.gap_s)}
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
        attention=Attention(pair_s, prompt_s, seq_s, slopes[-1] + more_kv_s),
        host={path: hosts[path]._replace(gap_s=gaps.get(path, gaps["piecewise"])) for path in paths},
        provenance={},
    )
    facts = {
        "steps_bound_by_the_device": len(bound),
        "steps_bound_by_the_host": len(steps) - len(bound),
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
    kind: str,
    steps: Sequence[Sample],
    device: Sequence[Sample],
    captured: Sequence[int],
    terms: Callable[[Sample], list[float]],
    known: Callable[[Sample], float] = lambda _: 0.0,
) -> _Device:
    """Fit one kind's grid and terms; ``known`` is a part of the time that is given."""
    steps = [s for s in steps if (s.kind == "decode") == (kind == "decode")]
    device = [s for s in device if (s.kind == "decode") == (kind == "decode")]
    fitted = steps or device
    if not fitted:
        raise ProfileError(f"no {kind} points bound by the device, and none under the device clock: measure more sizes")

    def key(s: Sample) -> CellKey:
        return _runs_at(captured, s.shape.num_tokens), s.k

    fit = fit_cells([key(s) for s in fitted], [terms(s) for s in fitted], [s.median_s - known(s) for s in fitted])

    def left_for_cell(s: Sample) -> float:
        return s.median_s - known(s) - float(np.dot(terms(s), fit.values))

    cells, gap_s = dict(fit.cells), 0.0
    if steps:
        gaps = [cells[key(s)] - left_for_cell(s) for s in device if key(s) in cells]
        gap_s = min(max(0.0, float(np.median(gaps))) if gaps else 0.0, min(cells.values()) / 2)
        cells = {at: seconds - gap_s for at, seconds in cells.items()}
        fill: dict[CellKey, list[float]] = {}
        for s in device:
            if key(s) not in cells:
                fill.setdefault(key(s), []).append(left_for_cell(s))
        cells.update((at, float(np.median(values))) for at, values in fill.items())
    seen: dict[CellKey, list[Sample]] = {}
    for s in (*steps, *device):
        seen.setdefault(key(s), []).append(s)
    grid, moved = _full_grid(cells, seen)
    return _Device(grid, fit.values.tolist(), gap_s, moved)


def _full_grid(cells: dict[CellKey, float], seen: dict[CellKey, list[Sample]]) -> tuple[GridTable, float]:
    """Return the monotone grid, filled along k where a cell was not measured, and how far the projection moved it."""
    sizes, ks = sorted({size for size, _ in cells}), sorted({k for _, k in cells})
    values = np.array([[cells.get((size, k), np.nan) for k in ks] for size in sizes])
    for row in values:
        known = ~np.isnan(row)
        row[~known] = np.interp(np.array(ks)[~known], np.array(ks)[known], row[known])
    values, moved = monotone_grid(np.maximum(values, 1e-6))

    def cell(size: int, k: int, seconds: float) -> Cell:
        samples = seen.get((size, k), [])
        spread_s = max((s.p90_s - s.p10_s for s in samples), default=0.0)
        return Cell(seconds, spread_s, sum(s.repetitions for s in samples))

    rows = (
        tuple(cell(size, k, float(seconds)) for k, seconds in zip(ks, row, strict=True))
        for size, row in zip(sizes, values, strict=True)
    )
    return GridTable(tuple(sizes), tuple(ks), tuple(rows)), moved


def _host_shares(samples: Sequence[Sample], captured: Sequence[int]) -> dict[str, HostShare]:
    """Return each launch path's share; a path never measured has that of the path before."""
    shares: dict[str, HostShare] = {}
    base_s = per_seq_s = 0.0
    for path in PATHS:
        mine = [s for s in samples if _path(s, captured) == path]
        if mine:
            fit = fit_cells([0] * len(mine), [[_num_seqs(s)] for s in mine], [s.median_s for s in mine])
            base_s, per_seq_s = max(base_s, fit.cells[0]), max(per_seq_s, float(fit.values[0]))
        shares[path] = HostShare(base_s, per_seq_s, 0.0)
    return shares


def _host_s(share: HostShare, sample: Sample) -> float:
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
