"""The device's time on the (size, k) grid, from steps of which some were held up by the host."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from simmoe.errors import ProfileError
from simmoe.profiles.fitting.evidence import TRUST_SURE, Evidence, runs_at
from simmoe.profiles.fitting.monotone import FloatGrid, monotone_grid
from simmoe.profiles.fitting.regression import fit_cells
from simmoe.profiles.samples import Sample
from simmoe.profiles.table import Cell, GridTable

CellKey = tuple[int, int]
"""(size that runs, k)"""

#: Terms and grid are fitted in turn, so often.
ROUNDS = 8

#: A step whose device took more than this many times what it takes when held was held up by its host. Less is the
#: clocks' doing: between steps a held device idles, so they are up to 10% higher where arithmetic bounds a step.
HELD_TRUST = 1.1

#: Fewer sequences leave multiprocessors idle while their KV is read: a token costs more there, which a slope that never
#: falls as the batch grows cannot say, and would carry to large batches. They are not asked where others are.
FEW_SEQS = 8

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
    shown: frozenset[CellKey]
    """Cells that steps bound by the device show; the others hold a bound, or lie between these."""


def fit_device(
    evidence: Evidence,
    captured: Sequence[int],
    terms: Callable[[Sample], list[float]],
    above: GridTable | None = None,
    telling: Callable[[Sample], bool] = lambda s: True,
) -> DeviceFit:
    """Fit one kind's grid and terms.

    Args:
        evidence: its samples.
        captured: sizes graphs were captured at, ascending.
        terms: what multiplies the values beside the grid.
        above: a grid that this one does not exceed at any point of both that a held device does not show.
        telling: whether a sample tells the values.
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
    if above is not None:
        for size, cells_above in zip(above.sizes, above.cells, strict=True):
            for k, cell_above in zip(above.ks, cells_above, strict=True):
                if (size, k) in at:
                    ceiling[at[size, k]] = cell_above.device_s

    def free(s: Sample) -> tuple[CellKey, bool]:
        return key(s), s.clock == "held"  # a device that was held is cooler, and a little faster

    for _ in range(ROUNDS):
        tell = [s for s in sure if telling(s)]
        values = fit_cells([free(s) for s in tell], [terms(s) for s in tell], [s.median_s for s in tell]).values
        left = {s: max(s.median_s - float(np.dot(terms(s), values)), 1e-6) for s in everything}
        shown = grid_between([(key(s), left[s]) for s in held], sizes, ks)
        limits = np.where(np.isfinite(shown), HELD_TRUST * shown, ceiling)
        for s, where in below.items():
            if where is not None and s.clock != "held":
                limits[where] = min(limits[where], left[s])
        limits = np.minimum.accumulate(np.minimum.accumulate(limits[::-1, ::-1], axis=0), axis=1)[::-1, ::-1]
        sure = [
            s
            for s in evidence.sure
            if s.clock == "held"
            or key(s) not in at
            or left[s] <= min(TRUST_SURE * limits[at[key(s)]], HELD_TRUST * shown[at[key(s)]])
        ]
    if not np.isfinite(limits).all():
        raise ProfileError(f"{kind} steps were not measured at the largest size {sizes[-1]} and the largest k {ks[-1]}")

    members: dict[CellKey, list[tuple[Sample, float]]] = {}
    by_device, measured_held = set(sure), {key(s) for s in held}
    trusted = [
        s
        for s in rows
        if key(s) not in measured_held
        and left[s] <= CELL_TRUST * limits[at[key(s)]]
        and (s in by_device or not np.isfinite(shown[at[key(s)]]))
    ]
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
    # what the host hid is known to lie below its bound, and follows what the device is known to take on either side
    settled = frozenset(key(s) for s in trusted if s in by_device)
    beside = grid_between([(where, float(cells[at[where]])) for where in settled if where in at], sizes, ks)
    for where, place in at.items():
        if where not in settled and np.isfinite(beside[place]):
            cells[place] = min(beside[place], limits[place])
    cells, moved = monotone_grid(cells)

    def cell(size: int, k: int) -> Cell:
        found = members.get((size, k), [])
        spread_s = max((s.p90_s - s.p10_s for s, _ in found), default=0.0)
        return Cell(float(cells[at[size, k]]), spread_s, sum(s.repetitions for s, _ in found))

    grid = GridTable(tuple(sizes), tuple(ks), tuple(tuple(cell(size, k) for k in ks) for size in sizes))
    return DeviceFit(grid, values.tolist(), len(trusted), moved, settled)


def grid_between(found: Sequence[tuple[CellKey, float]], sizes: Sequence[int], ks: Sequence[int]) -> FloatGrid:
    """Return a grid through known cells: their mean, and along k and then along the size a monotone cubic between them;
    infinite where there are none on both sides.

    Args:
        found: known cells with seconds.
        sizes: of the grid.
        ks: of the grid.
    """
    from scipy.interpolate import PchipInterpolator

    cells = np.full((len(sizes), len(ks)), np.inf)
    means: dict[CellKey, list[float]] = {}
    for where, seconds in found:
        means.setdefault(where, []).append(seconds)
    for (size, k), values in means.items():
        if size in sizes and k in ks:
            cells[sizes.index(size), ks.index(k)] = float(np.mean(values))
    for rows, at in ((cells, np.array(ks, dtype=np.float64)), (cells.T, np.array(sizes, dtype=np.float64))):
        for row in rows:  # views of the cells
            known = np.isfinite(row)
            if known.sum() >= 2:
                first, last = at[known][[0, -1]]
                inside = ~known & (at > first) & (at < last)
                row[inside] = PchipInterpolator(at[known], row[known])(at[inside])
    return cells


def context_knots(samples: Sequence[Sample]) -> list[int]:
    """Return the batch sizes, not too small, measured at contexts that tell KV tokens from sequences."""
    contexts: dict[int, list[float]] = {}
    for s in samples:
        contexts.setdefault(s.num_decode_seqs, []).append(s.decode_kv_tokens / s.num_decode_seqs)
    knots = sorted(size for size, values in contexts.items() if max(values) > 1.5 * min(values))
    if not knots:
        raise ProfileError("no batch size was decoded at two contexts: KV tokens cannot be told from sequences")
    return [size for size in knots if size >= FEW_SEQS] or knots


def slope_ramps(knots: Sequence[int], size: int, kv_tokens: int) -> list[float]:
    """Return what multiplies the slope's non-negative steps, so that it never falls as the batch grows.

    Step j belongs in full to batches of at least knots[j], and linearly in part from knots[j - 1] on.
    """
    shares = [1.0]
    for low, high in pairwise(knots):
        shares.append(min(max((size - low) / (high - low), 0.0), 1.0))
    return [kv_tokens * share for share in shares]
