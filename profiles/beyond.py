"""Seconds beyond a measured grid: along the rooflines of the model on its card where both are known, else straight on.

Both laws are continuous at the grid's edges and never fall as either coordinate grows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from simmoe.profiles.interpolation import interpolated, interpolated_rows


class Rooflines(Protocol):
    """What a card says of steps of one kind (with prompt tokens, or decode-only), attention to KV left out."""

    def binding_s(self, sizes: Sequence[int], ks: Sequence[int]) -> list[float]:
        """Return the seconds of steps, each part as long as what binds it at a usual share of the card's peak.

        Args:
            sizes: [num_steps] tokens or sequences.
            ks: [num_steps] budgets.
        """
        ...

    def bound_s(self, size: int, k: int) -> float:
        """Return the seconds no such step can go below; never falls as either grows."""
        ...


class Beyond(Protocol):
    """A law beyond the last size or the last k."""

    def at_k(self, k: int) -> list[float]:
        """Return the [num_sizes] seconds at the measured sizes, at a k beyond the last."""
        ...

    def at_size(self, size: int, k: int) -> float:
        """Return the seconds at a size beyond the last, at any k."""
        ...


class AlongRooflines:
    """A step beyond the grid takes the time at the grid's edge times what the binding rooflines grow by from there.

    That ratio is taken at sizes and budgets each an eighth above the one before, with straight lines between; none is
    below a lesser one, and no step below what the card allows. Beyond both the last size and the last k, what either
    makes the corner grow by multiplies.

    Args:
        sizes: [num_sizes] ascending.
        ks: [num_ks] ascending.
        seconds: [num_sizes][num_ks] non-decreasing along both.
        rooflines: of the model on its card.
    """

    def __init__(
        self, sizes: Sequence[int], ks: Sequence[int], seconds: Sequence[Sequence[float]], rooflines: Rooflines
    ) -> None:
        self._sizes, self._ks = list(sizes), list(ks)
        self._rooflines = rooflines
        # rows[i][j] is the seconds at row_sizes[i] and ks[j], columns[j][i] those at sizes[i] and column_ks[j].
        self._row_sizes, self._rows = [self._sizes[-1]], [list(seconds[-1])]
        self._column_ks, self._columns = [self._ks[-1]], [[row[-1] for row in seconds]]
        self._edge_row_s = rooflines.binding_s([self._sizes[-1]] * len(ks), self._ks)
        self._edge_column_s = rooflines.binding_s(self._sizes, [self._ks[-1]] * len(sizes))

    def at_k(self, k: int) -> list[float]:
        """Return the [num_sizes] seconds at the measured sizes, at a k beyond the last."""
        while self._column_ks[-1] < k:
            further = _an_eighth_more(self._column_ks[-1])
            binding_s = self._rooflines.binding_s(self._sizes, [further] * len(self._sizes))
            grown = _grown(self._columns[0], self._edge_column_s, binding_s, self._columns[-1])
            self._column_ks.append(further)
            self._columns.append(grown)
        seconds = interpolated_rows(self._column_ks, self._columns, k)
        least = [self._rooflines.bound_s(size, k) for size in self._sizes]
        return [max(both) for both in zip(seconds, least, strict=True)]

    def at_size(self, size: int, k: int) -> float:
        """Return the seconds at a size beyond the last, at any k."""
        while self._row_sizes[-1] < size:
            further = _an_eighth_more(self._row_sizes[-1])
            binding_s = self._rooflines.binding_s([further] * len(self._ks), self._ks)
            grown = _grown(self._rows[0], self._edge_row_s, binding_s, self._rows[-1])
            self._row_sizes.append(further)
            self._rows.append(grown)
        row = interpolated_rows(self._row_sizes, self._rows, size)
        seconds = interpolated(self._ks, row, k)
        if k > self._ks[-1]:
            seconds *= self.at_k(k)[-1] / self._rows[0][-1]
        return max(seconds, self._rooflines.bound_s(size, max(k, self._ks[0])))


class StraightOn:
    """Beyond its last size a grid goes on at the mean slope of its last doubling, and beyond its last k likewise; those
    slopes never fall as the other coordinate grows, as for a step bound by arithmetic, whose cost is a product of both.

    Args:
        sizes: [num_sizes] ascending.
        ks: [num_ks] ascending.
        seconds: [num_sizes][num_ks] non-decreasing along both.
    """

    def __init__(self, sizes: Sequence[int], ks: Sequence[int], seconds: Sequence[Sequence[float]]) -> None:
        self._last_size, self._ks = sizes[-1], list(ks)
        self._last_row, self._last_column = list(seconds[-1]), [row[-1] for row in seconds]
        columns = zip(*seconds, strict=True)
        self._size_slopes = list(accumulate((_slope(sizes, column) for column in columns), max))
        self._k_slopes = list(accumulate((_slope(ks, row) for row in seconds), max))
        self._slope_of_both = _slope(sizes, self._k_slopes)

    def at_k(self, k: int) -> list[float]:
        """Return the [num_sizes] seconds at the measured sizes, at a k beyond the last."""
        beyond = k - self._ks[-1]
        return [s + slope * beyond for s, slope in zip(self._last_column, self._k_slopes, strict=True)]

    def at_size(self, size: int, k: int) -> float:
        """Return the seconds at a size beyond the last, at any k."""
        beyond = k - self._ks[-1]
        if beyond > 0:
            edge_s, slope_s = self.at_k(k)[-1], self._size_slopes[-1] + self._slope_of_both * beyond
        else:
            edge_s = interpolated(self._ks, self._last_row, k)
            slope_s = interpolated(self._ks, self._size_slopes, k)
        return edge_s + slope_s * (size - self._last_size)


def _an_eighth_more(coordinate: int) -> int:
    return coordinate + max(1, coordinate // 8)


def _grown(
    edge: Sequence[float], edge_binding_s: Sequence[float], binding_s: Sequence[float], before: Sequence[float]
) -> list[float]:
    """Return a line of seconds beyond an edge: none below the one before it in the line, or in the line before."""
    grown = [s * (b / a) for s, a, b in zip(edge, edge_binding_s, binding_s, strict=True)]
    return [max(both) for both in zip(accumulate(grown, max), before, strict=True)]


def _slope(xs: Sequence[int], ys: Sequence[float]) -> float:
    """Return the mean slope over the last doubling: from one point to the next it would be mostly noise."""
    if len(xs) == 1:
        return 0.0
    i = max(bisect_right(xs, xs[-1] // 2) - 1, 0)
    return (ys[-1] - ys[i]) / (xs[-1] - xs[i])
