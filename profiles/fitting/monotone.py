"""Nearest monotone grid: what noise has turned round is projected back, and how far it moved is told."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatGrid = npt.NDArray[np.float64]


def monotone_grid(values: FloatGrid, *, rounds: int = 200) -> tuple[FloatGrid, float]:
    """Project a grid onto those that fall along neither axis (least squares in the logarithm).

    Args:
        values: [num_sizes, num_ks] positive.
        rounds: at most so many alternating projections.
    Returns:
        The projected grid, and the largest relative change of a cell.
    Source: Dykstra's alternating projections over rows and columns, each by pool-adjacent-violators.
    """
    from scipy.optimize import isotonic_regression

    def project(grid: FloatGrid) -> FloatGrid:
        return np.stack([isotonic_regression(row).x for row in grid])

    logs = np.log(values)
    along_k, along_size = np.zeros_like(logs), np.zeros_like(logs)
    current = logs
    for _ in range(rounds):
        start = current
        rows = project(current + along_k)
        along_k = current + along_k - rows
        current = project((rows + along_size).T).T
        along_size = rows + along_size - current
        if np.abs(current - start).max() < 1e-12:
            break
    # The limit is reached only approximately; running maxima remove what is left, and change nothing else.
    exact = np.maximum.accumulate(np.maximum.accumulate(np.exp(current), axis=0), axis=1)
    return exact, float(np.abs(exact / values - 1).max())
