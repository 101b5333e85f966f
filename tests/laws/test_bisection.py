"""The bisection of ``simmoe search`` against limits it is not told."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from simmoe.commands.searching.bisection import FIRST_STEP, MAX_STEPS, Bisection, Outcome

REACH = FIRST_STEP ** (2**MAX_STEPS - 1)


@given(st.floats(0.01, 1e4), st.floats(1e-3, 1e3), st.floats(0.001, 0.5))
@settings(max_examples=500)
def test_the_bracket_closes_around_the_limit(guess: float, ratio: float, tolerance: float) -> None:
    limit = guess * ratio
    search = Bisection(guess, tolerance)
    asked = []
    while (rate := search.rate) is not None:
        asked.append(rate)
        search.tell(rate <= limit)
    assert len(asked) == len(set(asked)) == search.num_asked
    if search.outcome is Outcome.FOUND:
        assert 0 < search.low <= limit < search.high
        assert search.high - search.low <= tolerance * search.high or math.isclose(
            search.low, search.high, rel_tol=2e-3
        )
        assert {search.low, search.high} <= set(asked)
        # A bracket is at most FIRST_STEP^8 wide when it is found.
        assert len(asked) <= MAX_STEPS + 2 + math.log2(FIRST_STEP**8 / tolerance)
    elif search.outcome is Outcome.ALWAYS:
        assert limit >= 0.99 * guess * REACH and search.low == max(asked)
    else:
        assert limit <= 1.01 * guess / REACH and search.low == 0
