"""Least squares in relative error: one free value a cell, plus terms that no cell may make negative."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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
