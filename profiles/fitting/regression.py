"""Regression in relative error: cells with terms beside them by least squares, a few terms by least absolute error."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)


class CellFit(NamedTuple, Generic[Key]):
    """``seconds = cells[key] + terms . values``."""

    cells: dict[Key, float]
    values: FloatArray
    """[num_terms] >= 0; 0 for a term that never varies within a cell, which no data can tell from the cells."""


def fit_cells(keys: Sequence[Key], terms: npt.ArrayLike, seconds: npt.ArrayLike) -> CellFit[Key]:
    """Fit cells and terms to rows.

    Args:
        keys: [num_rows] the cell each row belongs to.
        terms: [num_rows, num_terms] what multiplies the values.
        seconds: [num_rows] > 0.
    Returns:
        The minimum of the sum of (predicted / seconds - 1) ** 2 over cells, and values of at least 0.
    """
    from scipy.optimize import nnls

    x, y = np.asarray(terms, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    weight = y**-2.0
    names = sorted(set(keys))  # type: ignore[type-var]
    index = {name: i for i, name in enumerate(names)}
    cell = np.array([index[key] for key in keys])
    total = np.bincount(cell, weight)

    def cell_means(column: FloatArray) -> FloatArray:
        means: FloatArray = np.bincount(cell, weight * column) / total
        return means

    # For any values the best cells are weighted means, so the values are found on what is left around the means.
    around = np.stack([column - cell_means(column)[cell] for column in x.T], axis=1) if x.shape[1] else x
    scale = np.abs(around).max(axis=0, initial=0.0)
    varies = scale > 1e-9 * np.abs(x).max(axis=0, initial=0.0)
    values = np.zeros(x.shape[1])
    if varies.any():
        matrix = around[:, varies] / scale[varies] / y[:, None]
        size = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
        values[varies] = nnls(matrix / size, (y - cell_means(y)[cell]) / y)[0] / size / scale[varies]
    cells = cell_means(y - x @ values)
    return CellFit(dict(zip(names, cells.tolist(), strict=True)), values)


def least_absolute(
    predicted: Callable[[FloatArray], FloatArray], measured: FloatArray, start: FloatArray
) -> FloatArray:
    """Return the non-negative values that minimise the sum of |log(predicted / measured)|.

    The search starts at some multiples of a positive ``start``: where a term is far below the others, as a host's share
    below the device's, nothing changes around it.
    """
    from scipy.optimize import minimize

    def misfit(scaled: FloatArray) -> float:
        return float(np.abs(np.log(predicted(np.abs(scaled) * start) / measured)).sum())

    corners = np.ones((len(start) + 1, len(start)))
    corners[1:] -= 0.5 * np.eye(len(start))
    found = [
        minimize(
            misfit,
            corners[0],
            method="Nelder-Mead",
            options={"initial_simplex": multiple * corners, "maxiter": 2000, "xatol": 1e-7, "fatol": 1e-9},
        )
        for multiple in (1.0, 2.0, 4.0)
    ]
    best = min(found, key=lambda result: float(result.fun))
    return np.asarray(np.abs(best.x) * start, dtype=np.float64)


def least_absolute_terms(
    terms: npt.ArrayLike,
    rest: npt.ArrayLike,
    seconds: npt.ArrayLike,
    limits: Sequence[float | None],
    weights: npt.ArrayLike = 1.0,
) -> FloatArray:
    """Return the values that minimise the weighted sum of |(rest + terms . values) / seconds - 1|, exactly.

    Args:
        terms: [num_rows, num_terms] what multiplies the values.
        rest: [num_rows] seconds beside them.
        seconds: [num_rows] > 0.
        limits: [num_terms] the most each value may be; None for no limit. Each is at least 0.
        weights: [num_rows], or one of all rows; > 0.
    Source: the linear programme of least absolute deviations, with the part of each error above and below 0 apart.
    """
    from scipy.optimize import linprog
    from scipy.sparse import eye, hstack

    x, y = np.asarray(terms, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    relative = x / y[:, np.newaxis]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    matrix = hstack([relative / scale, -eye(len(y)), eye(len(y))])
    weight = np.broadcast_to(np.asarray(weights, dtype=np.float64), y.shape)
    cost = np.concatenate([np.zeros(x.shape[1]), weight, weight])
    most = [None if limit is None else limit * s for limit, s in zip(limits, scale, strict=True)]
    bounds = [*((0.0, limit) for limit in most), *([(0.0, None)] * (2 * len(y)))]
    found = linprog(cost, A_eq=matrix.tocsr(), b_eq=1 - np.asarray(rest, dtype=np.float64) / y, bounds=bounds)
    values: FloatArray = np.asarray(found.x, dtype=np.float64)[: x.shape[1]] / scale
    return values
