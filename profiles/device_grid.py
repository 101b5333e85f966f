"""The device's time on the (size, k) grid, from steps of which some were held up by the host."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simmoe.errors import ProfileError
from simmoe.profiles.evidence import TRUST_SURE, Evidence, runs_at
from simmoe.profiles.monotone import FloatGrid, monotone_grid
from simmoe.profiles.regression import fit_cells
from simmoe.profiles.samples import Sample
from simmoe.profiles.table import Cell, GridTable

CellKey = tuple[int, int]
"""(size that runs, k)"""

#: Terms and grid are fitted in turn, so often.
ROUNDS = 8

#: A cell is the mean of its steps within this much of the least bound on it: repeated measurements of a step that
#: nothing held up lie that near to each other.
CELL_TRUST = 1.04


class DeviceFit(NamedTuple):
    """What was learned of one kind of step's device time."""

    grid: GridTable
    values: list[float]
    """Coefficients of the terms beside the grid."""
    trusted: int
    """Steps the grid rests on."""
    moved: float
    """Largest relative change the monotone projection made."""


def fit_device(
    evidence: Evidence,
    captured: Sequence[int],
    terms: Callable[[Sample], list[float]],
    above: GridTable | None = None,
) -> DeviceFit:
    """Fit one kind's grid and terms.

    Args:
        evidence: its samples.
        captured: sizes graphs were captured at, ascending.
        terms: what multiplies the values beside the grid.
        above: a grid that this one does not exceed at any point of both.
    """

    def key(s: Sample) -> CellKey:
        return s.shape.num_tokens, s.k

    kind, steps, hidden, sure, held = evidence
    if not sure:
        what = "is clearly longer than the host's share" if steps else "was measured under the step clock"
        raise ProfileError(f"no {kind} step {what}: measure more sizes, up to the largest")
    everything = [*steps, *hidden, *held]
    rows = [s for s in everything if runs_at(captured, key(s)[0]) == key(s)[0]]
    if not rows:
        raise ProfileError(f"no {kind} step fills a captured size: measure those, {', '.join(map(str, captured))}")
    sizes, ks = sorted({key(s)[0] for s in rows}), sorted({s.k for s in rows})
    at = {(size, k): (i, j) for i, size in enumerate(sizes) for j, k in enumerate(ks)}
    # a step between captured sizes takes no less than the size below it does
    below = {s: at.get((sizes[bisect_right(sizes, key(s)[0]) - 1], s.k)) for s in everything if key(s)[0] >= sizes[0]}
    ceiling = np.full((len(sizes), len(ks)), np.inf)
    if above is not None and not held:
        for size, cells_above in zip(above.sizes, above.cells, strict=True):
            for k, cell_above in zip(above.ks, cells_above, strict=True):
                if (size, k) in at:
                    ceiling[at[size, k]] = cell_above.device_s

    for _ in range(ROUNDS):
        values = fit_cells([key(s) for s in sure], [terms(s) for s in sure], [s.median_s for s in sure]).values
        left = {s: max(s.median_s - float(np.dot(terms(s), values)), 1e-6) for s in everything}
        limits = ceiling.copy()
        for s, where in below.items():
            if where is not None:
                limits[where] = min(limits[where], left[s])
        limits = np.minimum.accumulate(np.minimum.accumulate(limits[::-1, ::-1], axis=0), axis=1)[::-1, ::-1]
        sure = [
            s
            for s in evidence.sure
            if s.clock == "held" or key(s) not in at or left[s] <= TRUST_SURE * limits[at[key(s)]]
        ]
    if not np.isfinite(limits).all():
        raise ProfileError(f"{kind} steps were not measured at the largest size {sizes[-1]} and the largest k {ks[-1]}")

    members: dict[CellKey, list[tuple[Sample, float]]] = {}
    known = {key(s) for s in held}
    trusted = [s for s in rows if key(s) not in known and left[s] <= CELL_TRUST * limits[at[key(s)]]]
    trusted += [s for s in rows if s.clock == "held"]
    for s in trusted:
        members.setdefault(key(s), []).append((s, left[s]))
    cells = limits.copy()
    for where, found in members.items():
        weights = [s.median_s**-2.0 for s, _ in found]
        cells[at[where]] = np.average([seconds for _, seconds in found], weights=weights)
    measured = {key(s) for s in rows}
    for i, size in enumerate(sizes):
        mine = np.array([(size, k) in measured for k in ks])
        between = np.interp(np.array(ks)[~mine], np.array(ks)[mine], cells[i, mine])
        cells[i, ~mine] = np.minimum(between, limits[i, ~mine])
    if held:
        bound = {key(s) for s in set(trusted) & set(sure)}
        hidden_cells = np.array([[(size, k) not in known | bound for k in ks] for size in sizes])
        cells = np.minimum(between_known(cells, hidden_cells, sizes, ks), np.where(hidden_cells, limits, np.inf))
    cells, moved = monotone_grid(cells)

    def cell(size: int, k: int) -> Cell:
        found = members.get((size, k), [])
        spread_s = max((s.p90_s - s.p10_s for s, _ in found), default=0.0)
        return Cell(float(cells[at[size, k]]), spread_s, sum(s.repetitions for s, _ in found))

    grid = GridTable(tuple(sizes), tuple(ks), tuple(tuple(cell(size, k) for k in ks) for size in sizes))
    return DeviceFit(grid, values.tolist(), len(trusted), moved)


def between_known(
    cells: FloatGrid, hidden: npt.NDArray[np.bool_], sizes: Sequence[int], ks: Sequence[int]
) -> FloatGrid:
    """Return the grid with hidden cells interpolated between known ones, along k and then along the size.

    Cells that have no known ones on both sides either way stay as they are.
    """
    from scipy.interpolate import PchipInterpolator

    cells, hidden = cells.copy(), hidden.copy()
    for axis, at in ((1, np.array(ks, dtype=np.float64)), (0, np.array(sizes, dtype=np.float64))):
        rows, missing = (cells, hidden) if axis else (cells.T, hidden.T)  # views
        for row, lacks in zip(rows, missing, strict=True):
            if (~lacks).sum() < 2:
                continue
            first, last = at[~lacks][[0, -1]]
            inside = lacks & (at > first) & (at < last)
            row[inside] = PchipInterpolator(at[~lacks], row[~lacks])(at[inside])
            lacks[inside] = False
    return cells


def context_knots(samples: Sequence[Sample]) -> list[int]:
    """Return the batch sizes measured at contexts that differ enough to tell KV tokens from sequences."""
    contexts: dict[int, list[float]] = {}
    for s in samples:
        contexts.setdefault(s.num_decode_seqs, []).append(s.decode_kv_tokens / s.num_decode_seqs)
    knots = sorted(size for size, values in contexts.items() if max(values) > 1.5 * min(values))
    if not knots:
        raise ProfileError("no batch size was decoded at two contexts: KV tokens cannot be told from sequences")
    return knots


def slope_ramps(knots: Sequence[int], size: int, kv_tokens: int) -> list[float]:
    """Return what multiplies the slope's non-negative steps, so that it never falls as the batch grows.

    Step j belongs in full to batches of at least knots[j], and linearly in part from knots[j - 1] on.
    """
    shares = [1.0]
    for low, high in pairwise(knots):
        shares.append(min(max((size - low) / (high - low), 0.0), 1.0))
    return [kv_tokens * share for share in shares]
