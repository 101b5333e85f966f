"""Cells of prompt tokens that the host hid from every point, from steps of a served load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from simmoe.profiles.fitting.device_grid import CellKey
from simmoe.profiles.fitting.evidence import runs_at
from simmoe.profiles.fitting.monotone import monotone_grid
from simmoe.profiles.fitting.regression import FloatArray, least_absolute_terms
from simmoe.profiles.fitting.serving_terms import SERVED_WEIGHT, device_seconds, with_prefill_terms
from simmoe.profiles.samples import Sample
from simmoe.profiles.table import GridTable, StepTable

#: Fewer served steps at a size tell nothing of its cell.
LEAST_STEPS = 10

#: Shares of real tokens tried: found in turn, the share and the cells would stay near where either began.
SHARES = np.linspace(0.0, 1.0, 21)

#: Hidden cells beside those told give way to them, which moves what tells those: in turn, so often.
ROUNDS = 4

#: What decodes add to a step with prompt tokens, each with the most it may be.
TERMS: dict[str, float | None] = {
    "mixed_step_s": None,
    "mixed_seq_s": None,
    "mixed_decode_share": 1.0,
    "mixed_kv_token_s": None,
}


def with_served_cells(
    table: StepTable,
    shown: Collection[CellKey],
    prefills: Sequence[Sample],
    mixed: Sequence[Sample],
    served: Sequence[Sample],
) -> StepTable:
    """Return the table with the terms of a mixed step, prefill's share of real tokens, and cells told by served steps.

    Where the host takes longer than the device, points of prompt tokens show no more than a bound, while a served step
    that follows a long one is launched ahead. A cell that no point shows and enough served steps ran at is what best
    explains them (least absolute relative error), together with what decodes add to a step and the share of real
    tokens; it lies between the cells that are known. What neither points nor served steps show stays as it is, but for
    giving way to cells told.

    Args:
        table: with grids and decode-only terms.
        shown: cells of prompt tokens that points show.
        prefills: steps of prompt tokens alone, bound by the device.
        mixed: points with both, bound by the device.
        served: steps of a served load with both, bound by the device.
    """
    table = with_prefill_terms(table, prefills, mixed, served)
    ran = Counter((runs_at(table.captured_sizes, s.shape.num_tokens), s.k) for s in served)
    hidden = {(size, k) for size in table.prefill.sizes for k in table.prefill.ks if (size, k) not in shown}
    told = sorted(where for where in hidden if ran[where] >= LEAST_STEPS)
    if not told:
        return table
    between = [s for s in prefills if runs_at(table.captured_sizes, s.shape.num_tokens) != s.shape.num_tokens]
    for _ in range(ROUNDS):
        table = _explained(table, hidden, told, between, mixed, served)
    return table


def _explained(
    table: StepTable,
    hidden: Collection[CellKey],
    told: Sequence[CellKey],
    between: Sequence[Sample],
    mixed: Sequence[Sample],
    served: Sequence[Sample],
) -> StepTable:
    """Return the table with the cells told, the terms and the share that explain the steps best."""
    real = _with_share(table, 1.0)
    between, served, mixed = (_decided_by_prompts(real, group) for group in (between, served, mixed))
    steps = [*between, *served, *mixed]
    ran = {(runs_at(table.captured_sizes, s.shape.num_tokens), s.k) for s in steps}
    told = [where for where in told if where in ran]
    if not told:
        return table
    least, most = _bounds(table.prefill, hidden, told)
    kv_told_apart = table.attention.mixed_kv_token_s != table.decode_kv[-1][1]
    names = [name for name in TERMS if kv_told_apart or name != "mixed_kv_token_s"]
    limits = [
        *(TERMS[name] for name in names),
        *(most[where] - least[where] if where in most else None for where in told),
    ]
    measured = np.array([s.median_s for s in steps])
    weights = np.repeat([1.0, SERVED_WEIGHT, 1.0], [len(between), len(served), len(mixed)])
    now = [getattr(table.attention, name) for name in names]
    now += [_cell_s(table.prefill, where) - least[where] for where in told]
    ends = [_linear(_with_share(table, share), names, told, steps, np.array(now)) for share in (0.0, 1.0)]

    def explained(share: float) -> tuple[float, float, FloatArray]:
        """Return how far off the steps that tell the share are at best, the share, and the values that explain all."""
        rest, columns = (a + share * (b - a) for a, b in zip(*ends, strict=True))
        values = least_absolute_terms(columns, rest, measured, limits, weights)
        errors = weights * np.abs((rest + columns @ values) / measured - 1)
        return float(errors[: len(between) + len(served)].sum()), share, values

    _, share, values = min((explained(float(share)) for share in SHARES), key=lambda found: found[:2])
    terms = dict(zip(names, (values + 0.0).tolist(), strict=False))
    cells = {where: least[where] + float(v) for where, v in zip(told, values[len(names) :], strict=True)}
    table = replace(table, attention=table.attention._replace(**terms))
    return _with_share(_with_cells(table, _completed(table.prefill, hidden, cells)), share)


def _bounds(
    grid: GridTable, hidden: Collection[CellKey], told: Sequence[CellKey]
) -> tuple[dict[CellKey, float], dict[CellKey, float]]:
    """Return the least and the most that each cell may be beside those known; no most where none of them has more."""
    known = {
        (size, k): cell.device_s
        for size, row in zip(grid.sizes, grid.cells, strict=True)
        for k, cell in zip(grid.ks, row, strict=True)
        if (size, k) not in hidden
    }
    least, most = {}, {}
    for size, k in told:
        least[size, k] = max((s for (n, other), s in known.items() if n <= size and other <= k), default=0.0)
        above = [s for (n, other), s in known.items() if n >= size and other >= k]
        if above:
            most[size, k] = min(above)
    return least, most


def _decided_by_prompts(table: StepTable, steps: Sequence[Sample]) -> list[Sample]:
    """Return the steps that take longer than their decodes alone would."""
    with_decodes = [s for s in steps if s.num_decode_seqs]
    alone = [s.shape._replace(num_prefill_tokens=0, num_prefill_seqs=0, prefill_kv_pairs=0) for s in with_decodes]
    both_s = device_seconds(table, [s.shape for s in with_decodes])
    by_decodes = {
        s
        for s, together, least in zip(with_decodes, both_s, device_seconds(table, alone), strict=True)
        if together <= least
    }
    return [s for s in steps if s not in by_decodes]


def _linear(
    table: StepTable, names: Sequence[str], told: Sequence[CellKey], steps: Sequence[Sample], now: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return what the device takes for each step without what is sought, and what a unit of each of that adds.

    Args:
        table: with what is sought as it is now.
        names: terms sought.
        told: cells sought.
        steps: [num_steps] decided by their prompt tokens.
        now: [num_terms + num_cells] what is sought as it is now.
    """
    shapes = [s.shape for s in steps]
    seconds = device_seconds(table, shapes)
    columns = []
    for name in names:
        unit = 1.0 if TERMS[name] else 1e-3
        more = replace(table, attention=table.attention._replace(**{name: getattr(table.attention, name) + unit}))
        columns.append((device_seconds(more, shapes) - seconds) / unit)
    for where in told:
        more = _with_cells(table, {where: _cell_s(table.prefill, where) + 1e-3})
        columns.append((device_seconds(more, shapes) - seconds) / 1e-3)
    matrix = np.stack(columns, axis=1)
    return seconds - matrix @ now, matrix


def _cell_s(grid: GridTable, where: CellKey) -> float:
    return grid.cells[grid.sizes.index(where[0])][grid.ks.index(where[1])].device_s


def _completed(grid: GridTable, hidden: Collection[CellKey], told: Mapping[CellKey, float]) -> dict[CellKey, float]:
    """Return every cell, with those told; what is hidden still is moved to where nothing falls."""
    now = {(size, k): told.get((size, k), _cell_s(grid, (size, k))) for size in grid.sizes for k in grid.ks}
    for size, k in set(hidden) - set(told):
        for (n, other), seconds in told.items():
            if n <= size and other <= k:
                now[size, k] = max(now[size, k], seconds)
            if n >= size and other >= k:
                now[size, k] = min(now[size, k], seconds)
    cells, _ = monotone_grid(np.array(list(now.values())).reshape(len(grid.sizes), len(grid.ks)))
    return dict(zip(now, cells.ravel().tolist(), strict=True))


def _with_cells(table: StepTable, seconds: Mapping[CellKey, float]) -> StepTable:
    grid = table.prefill
    cells = tuple(
        tuple(
            cell._replace(device_s=seconds.get((size, k), cell.device_s)) for k, cell in zip(grid.ks, row, strict=True)
        )
        for size, row in zip(grid.sizes, grid.cells, strict=True)
    )
    return replace(table, prefill=replace(grid, cells=cells))


def _with_share(table: StepTable, share: float) -> StepTable:
    return replace(table, real_share=table.real_share._replace(prefill=((1, share),)))
