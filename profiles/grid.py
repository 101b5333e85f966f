"""Seconds on a (size, k) grid: steps where graphs were captured, straight lines between points, a law beyond."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from simmoe.profiles.beyond import AlongRooflines, Beyond, Rooflines, StraightOn
from simmoe.profiles.interpolation import interpolated, interpolated_rows


class _Row(NamedTuple):
    """The grid at one k, ready to be asked."""

    captured: list[float]
    """[num_within] seconds at each captured size within the measured ones."""
    saved: list[float]
    """[num_within] seconds each token fewer than the captured size saves, down to the captured size before."""
    seconds: list[float]
    """[num_sizes] seconds at each measured size."""


class Grid:
    """Seconds as a function of a size (tokens or sequences) and k.

    A size up to the largest captured one runs padded to the next captured size, and costs what that does but for the
    share that only real tokens cost. Above the captured sizes, and between measured points, the grid is linear; below
    its first size and first k it is flat. Beyond its last size or k it goes on by a law of
    :mod:`simmoe.profiles.beyond`, and stays monotone.

    Args:
        sizes: [num_sizes] ascending.
        ks: [num_ks] ascending.
        seconds: [num_sizes][num_ks] non-decreasing along both.
        captured: [num_captured] ascending sizes graphs were captured at; may be empty.
        real_share: (captured size, share of what it costs above the one before that real tokens cost) rows, each share
            in 0..1; linear between rows, flat outside them.
        rooflines: called the first time something beyond the grid is asked for; returns None where the card is not
            known.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        ks: Sequence[int],
        seconds: Sequence[Sequence[float]],
        captured: Sequence[int],
        real_share: Sequence[tuple[int, float]] = ((1, 0.0),),
        rooflines: Callable[[], Rooflines | None] | None = None,
    ) -> None:
        self.sizes = list(sizes)
        self.ks = list(ks)
        self.captured = list(captured)
        self.largest_captured = self.captured[-1] if self.captured else 0
        # columns[j][i] is the seconds at ks[j] and sizes[i].
        self._columns = [[float(row[j]) for row in seconds] for j in range(len(self.ks))]
        share_sizes, shares = zip(*real_share, strict=True)
        self._shares = [interpolated(share_sizes, shares, size) for size in self.captured]
        self._rows: dict[int, _Row] = {}
        # Sizes in first_size..last_size run at a size within the measured ones.
        first, last = self.sizes[0], self.sizes[-1]
        if first <= self.largest_captured:
            i = bisect_left(self.captured, first)
            first = self.captured[i - 1] + 1 if i else 1
        if last < self.largest_captured:
            i = bisect_right(self.captured, last)
            last = self.captured[i - 1] if i else 0
        self.first_size, self.last_size = first, last
        self._last_padded = min(self.largest_captured, last)
        self._within = self.captured[: bisect_right(self.captured, self.sizes[-1])]
        self._rooflines = rooflines
        self._beyond: Beyond | None = None
        # (size, k) beyond the last size -> seconds.
        self._outside: dict[tuple[int, int], float] = {}

    def seconds(self, size: int, k: int) -> float:
        """Return the seconds at a size >= 1 and a k >= 1."""
        row = self._rows.get(k)
        if row is None:
            row = self._rows[k] = self._row(k)
        if size <= self._last_padded:
            i = bisect_left(self.captured, size)
            return row.captured[i] - row.saved[i] * (self.captured[i] - size)
        if size <= self.last_size:
            return self._between(size, row.seconds)
        seconds = self._outside.get((size, k))
        if seconds is None:
            seconds = self._outside[size, k] = self._past_the_last(size, k, row)
        return seconds

    def runs_at(self, size: int) -> int:
        """Return the size that runs: the next captured one, or itself above them."""
        return self.captured[bisect_left(self.captured, size)] if size <= self.largest_captured else size

    def outside_sizes(self, size: int) -> bool:
        """Whether the size that runs lies outside the measured sizes."""
        return not self.first_size <= size <= self.last_size

    def outside_ks(self, k: int) -> bool:
        """Whether k lies outside the measured budgets."""
        return not self.ks[0] <= k <= self.ks[-1]

    def _row(self, k: int) -> _Row:
        is_beyond = k > self.ks[-1]
        seconds = self._law().at_k(k) if is_beyond else interpolated_rows(self.ks, self._columns, k)
        at = [self._between(size, seconds) for size in self._within]
        saved = [0.0, *(high - low for low, high in pairwise(at))][: len(at)]
        widths = [1, *(high - low for low, high in pairwise(self.captured))]
        saved = [share * s / width for share, s, width in zip(self._shares, saved, widths, strict=False)]
        return _Row(at, saved, seconds)

    def _between(self, size: int, seconds: list[float]) -> float:
        """Return the seconds at a size no larger than the last."""
        sizes = self.sizes
        i = bisect_left(sizes, size)
        if i == 0:
            return seconds[0]
        low, high = seconds[i - 1], seconds[i]
        return low + (high - low) * ((size - sizes[i - 1]) / (sizes[i] - sizes[i - 1]))

    def _past_the_last(self, size: int, k: int, row: _Row) -> float:
        """Return the seconds at a size that runs at one beyond the last."""
        i = bisect_left(self.captured, size)
        if i == len(self.captured):
            return self._law().at_size(size, k)
        high = self._law().at_size(self.captured[i], k)
        if i == 0:
            return high
        below = self.captured[i - 1]
        low = row.captured[i - 1] if i <= len(self._within) else self._law().at_size(below, k)
        return high - self._shares[i] * (high - low) / (self.captured[i] - below) * (self.captured[i] - size)

    def _law(self) -> Beyond:
        if self._beyond is None:
            rows = list(zip(*self._columns, strict=True))
            rooflines = self._rooflines() if self._rooflines else None
            self._beyond = (
                StraightOn(self.sizes, self.ks, rows)
                if rooflines is None
                else AlongRooflines(self.sizes, self.ks, rows, rooflines)
            )
        return self._beyond
