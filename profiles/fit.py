"""Raw samples to a step-cost table.

The device's time is fitted first, to samples under the device clock, each weighted by its own size so that errors are
relative: one free value a (size, k) of the grid, plus the attention terms, none of them negative. Noise that turned the
grid round is projected away. The host's share comes from the host clock, and the gap between steps from what the step
clock shows beyond the device where the device is the slower of the two. Samples marked ``held_out`` take no part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simmoe.errors import ProfileError
from simmoe.profiles.monotone import monotone_grid, monotone_line
from simmoe.profiles.residuals import Predictor, residuals
from simmoe.profiles.samples import Sample, SampleHeader
from simmoe.profiles.table import PATHS, Attention, Cell, GridTable, HostShare, StepTable

Run = tuple[SampleHeader, Sequence[Sample]]
FloatArray = npt.NDArray[np.float64]

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


class _Terms(NamedTuple):
    """Coefficients beside the grid, in seconds, and the grid's cells by (size that runs, k)."""

    cells: dict[tuple[int, int], float]
    values: FloatArray


def fit_table(runs: Sequence[Run], name: str, status: str, summary: str) -> StepTable:
    """Fit one table to the samples of one engine.

    Args:
        runs: headers with their samples; several when the engine was measured in several settings or sittings.
        name: of the profile.
        status: one of table.STATUSES.
        summary: one line on model, card and execution mode.
    Raises:
        ProfileError: runs of different engines, or points missing without which a term cannot be told from another.
    """
    header = _shared_header(runs)
    captured = tuple(header.captured_sizes)
    used = [sample for _, samples in runs for sample in samples if not sample.held_out]
    device = [sample for sample in used if sample.clock == "device"]
    moved: dict[str, float] = {}

    decode = [sample for sample in device if sample.kind == "decode"]
    decode_sizes = sorted({sample.num_decode_seqs for sample in decode})
    decode_terms = _fit_terms(
        decode, captured, len(decode_sizes), lambda s: _one_hot(decode_sizes, s.num_decode_seqs, s.decode_kv_tokens)
    )
    slopes, moved["decode_kv"] = monotone_line(decode_terms.values)

    prefill = [sample for sample in device if sample.kind != "decode"]
    prefill_terms = _fit_terms(
        prefill,
        captured,
        4,
        lambda s: [s.prefill_kv_pairs, s.num_prefill_seqs, s.num_decode_seqs, s.decode_kv_tokens],
    )
    pair_s, prompt_s, seq_s, kv_s = (float(value) for value in prefill_terms.values)
    attention = Attention(pair_s, prompt_s, seq_s, max(kv_s, float(slopes[-1])))

    prefill_grid, moved["prefill"] = _grid(prefill_terms.cells, prefill, captured)
    decode_grid, moved["decode"] = _grid(decode_terms.cells, decode, captured)
    paths = PATHS if captured else PATHS[-1:]
    table = StepTable(
        name=name,
        status=status,
        summary=summary,
        k_max=header.k_max,
        k_granularity=header.k_granularity,
        block_size=header.block_size,
        num_gpu_blocks=header.num_gpu_blocks,
        ingress_s=header.front_end.get("ingress_s", 0.0),
        egress_s=header.front_end.get("egress_s", 0.0),
        captured_sizes=captured,
        captured_ks=tuple(header.captured_ks),
        prefill=prefill_grid,
        decode=decode_grid,
        decode_kv=tuple(zip(decode_sizes, (float(s) for s in slopes), strict=True)),
        attention=attention,
        host={path: HostShare(0.0, 0.0, 0.0) for path in paths},
        provenance={},
    )
    table = replace(table, host=_host(table, runs, paths))
    fit = {
        "isotonic_moved_at_most": moved,
        "residuals": [row._asdict() for row in residuals(table, runs)],
    }
    return replace(table, provenance={"runs": [asdict(head) for head, _ in runs], "fit": fit})


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


def _runs_at(captured: Sequence[int], size: int) -> int:
    return next((c for c in captured if c >= size), size)


def _one_hot(sizes: Sequence[int], size: int, value: float) -> list[float]:
    return [value if s == size else 0.0 for s in sizes]


def _fit_terms(
    samples: Sequence[Sample], captured: Sequence[int], num_terms: int, terms: Callable[[Sample], Sequence[float]]
) -> _Terms:
    """Solve seconds = cell + terms . values for cells and values, none negative, errors relative."""
    from scipy.optimize import nnls

    if not samples:
        raise ProfileError("no device-clock points of one kind; both prefill and decode points are needed")
    keys = sorted({(_runs_at(captured, s.shape.num_tokens), s.k) for s in samples})
    column = {key: index for index, key in enumerate(keys)}
    matrix = np.zeros((len(samples), len(keys) + num_terms))
    for row, sample in enumerate(samples):
        matrix[row, column[_runs_at(captured, sample.shape.num_tokens), sample.k]] = 1.0
        matrix[row, len(keys) :] = terms(sample)
    seconds = np.array([sample.median_s for sample in samples])
    weighted = matrix / seconds[:, None]
    scale = np.maximum(np.abs(weighted).max(axis=0), 1e-300)
    solution, _ = nnls(weighted / scale, np.ones(len(samples)))
    solution = solution / scale
    return _Terms(dict(zip(keys, solution[: len(keys)].tolist(), strict=True)), solution[len(keys) :])


def _grid(
    cells: dict[tuple[int, int], float], samples: Iterable[Sample], captured: Sequence[int]
) -> tuple[GridTable, float]:
    """Return the full monotone grid, filled where a cell was not measured, and how far the projection moved it."""
    spread: dict[tuple[int, int], tuple[float, int]] = {}
    for sample in samples:
        key = _runs_at(captured, sample.shape.num_tokens), sample.k
        widest, repetitions = spread.get(key, (0.0, 0))
        spread[key] = max(widest, sample.p90_s - sample.p10_s), repetitions + sample.repetitions
    sizes = sorted({size for size, _ in cells})
    ks = sorted({k for _, k in cells})
    values = np.array([[cells.get((size, k), np.nan) for k in ks] for size in sizes])
    for row in values:
        known = ~np.isnan(row)
        row[~known] = np.interp(np.array(ks)[~known], np.array(ks)[known], row[known])
    values, moved = monotone_grid(np.maximum(values, 1e-9))
    return GridTable(
        tuple(sizes),
        tuple(ks),
        tuple(
            tuple(Cell(float(value), *spread.get((size, k), (0.0, 0))) for k, value in zip(ks, row, strict=True))
            for size, row in zip(sizes, values, strict=True)
        ),
    ), moved


def _path(sample: Sample, largest_captured: int) -> str:
    if sample.mode == "eager" or sample.shape.num_tokens > largest_captured:
        return "eager"
    return "full" if sample.kind == "decode" else "piecewise"


def _host(table: StepTable, runs: Sequence[Run], paths: Sequence[str]) -> dict[str, HostShare]:
    """Return each path's host share and gap; a path never measured has that of the one before."""
    from scipy.optimize import nnls

    largest = table.captured_sizes[-1] if table.captured_sizes else 0
    shares: dict[str, HostShare] = {}
    before = HostShare(0.0, 0.0, 0.0)
    for path in paths:
        mine = [
            (header, sample)
            for header, samples in runs
            for sample in samples
            if not sample.held_out and _path(sample, largest) == path
        ]
        host = [sample for _, sample in mine if sample.clock == "host"]
        base_s, per_seq_s = before.base_s, before.per_seq_s
        if host:
            seconds = np.array([sample.median_s for sample in host])
            seqs = np.array([sample.num_prefill_seqs + sample.num_decode_seqs for sample in host], dtype=np.float64)
            matrix = np.stack([np.ones_like(seqs), seqs], axis=1) / seconds[:, None]
            scale = matrix.max(axis=0)
            solution = nnls(matrix / scale, np.ones(len(host)))[0] / scale
            base_s, per_seq_s = max(before.base_s, float(solution[0])), max(before.per_seq_s, float(solution[1]))
        share = HostShare(base_s, per_seq_s, 0.0)
        gap_s = _gap_s(table, mine, share)
        before = shares[path] = share._replace(gap_s=max(before.gap_s, gap_s))
    return shares


def _gap_s(table: StepTable, samples: Sequence[tuple[SampleHeader, Sample]], share: HostShare) -> float:
    """Return the median seconds by which asynchronous steps exceed a device that is the slower of the two."""
    predictor = Predictor(table, async_scheduling=True)
    beyond = []
    for header, sample in samples:
        if sample.clock == "step" and header.async_scheduling:
            device_s = predictor.device_s(sample)
            host_s = share.base_s + share.per_seq_s * (sample.num_prefill_seqs + sample.num_decode_seqs)
            if device_s > 1.1 * host_s:
                beyond.append(sample.median_s - device_s)
    return max(0.0, float(np.median(beyond))) if beyond else 0.0
