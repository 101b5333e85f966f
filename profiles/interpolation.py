"""Straight lines between known points, flat outside them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def interpolated(xs: Sequence[int], values: Sequence[float], x: int) -> float:
    """Return the value at x.

    Args:
        xs: [num_points] ascending, at least one.
        values: [num_points] at each of them.
    """
    i = bisect_left(xs, x)
    if i == len(xs):
        return values[-1]
    if i == 0 or xs[i] == x:
        return values[i]
    return values[i - 1] + (values[i] - values[i - 1]) * _share(xs, i, x)


def interpolated_rows(xs: Sequence[int], rows: Sequence[list[float]], x: int) -> list[float]:
    """Return the row at x, each column by itself as :func:`interpolated`.

    Args:
        xs: [num_points] ascending, at least one.
        rows: [num_points][num_columns] at each of them.
    """
    i = bisect_left(xs, x)
    if i == len(xs):
        return rows[-1]
    if i == 0 or xs[i] == x:
        return rows[i]
    share = _share(xs, i, x)
    return [low + (high - low) * share for low, high in zip(rows[i - 1], rows[i], strict=True)]


def _share(xs: Sequence[int], i: int, x: int) -> float:
    """Return how far x lies from point i - 1 to point i."""
    return (x - xs[i - 1]) / (xs[i] - xs[i - 1])
