"""Straight lines between known points: numpy's, exact at the points, and rows column by column."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simmoe.profiles.interpolation import interpolated, interpolated_rows

ASCENDING = st.lists(st.integers(1, 10_000), min_size=1, max_size=8, unique=True).map(sorted)


@given(ASCENDING, st.data())
def test_between_points_lines_are_straight_and_outside_flat(xs: list[int], data: st.DataObject) -> None:
    seconds = st.floats(1e-6, 1e3)
    rows = data.draw(st.lists(st.lists(seconds, min_size=3, max_size=3), min_size=len(xs), max_size=len(xs)))
    x = data.draw(st.integers(1, 10_001) | st.sampled_from(xs))
    row = interpolated_rows(xs, rows, x)
    for column, value in zip(zip(*rows, strict=True), row, strict=True):
        assert value == interpolated(xs, column, x) == pytest.approx(np.interp(x, xs, column), rel=1e-12)
    if x in xs:
        assert row == rows[xs.index(x)]
